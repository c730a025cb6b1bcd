"""What a run prints: lines inside an iteration, the line of an iteration, warnings."""
import math
import time

import torch

from common.device import memory
from run.metrics import std, tolerance_of


class StepLog:
    """Prints the numbered lines inside an iteration: memory in use, time since the last line. Each
    line synchronises a GPU, so that times are those of finished work. on: False prints nothing."""

    def __init__(self, device, micro_batch_size, on):
        self.device = device
        self.micro_batch_size = micro_batch_size
        self.on = on
        self.micro = 0
        self.num_tokens = 0     # of prompts and completions, without padding
        self.num_sampled = 0    # of those the policy's
        self.start = time.time()
        self.last = self.start
        self.line("[Micro 0] 1. Iteration start")

    def generated(self, rollout):
        padding = (~rollout.completion_mask).sum()      # attention_mask is True there
        self.num_tokens += int(rollout.attention_mask.sum() - padding)
        self.num_sampled += int(rollout.sampled_mask.sum())
        num_rows = len(rollout.ended)
        shared = num_rows > self.micro_batch_size
        note = f" ({num_rows} rows for all micro-batches)" if shared else ""
        self.line(f"[Micro 0] 2. Samples generated{note}")

    def scored(self, rewards):
        if self.on:
            values = f", rewards={rewards.nanmean():.4f}±{std(rewards):.4f}"
            self.line("[Micro 0] 3. Samples scored", values)

    def loss(self, loss):
        """loss: grpo.Loss, which is read only if the line is printed."""
        if self.on:
            values = f", pg_loss={loss.policy + loss.entropy:.6f},"
            if loss.critic.requires_grad:
                values += f" critic={loss.critic:.6f},"
            values += f" beta*kl={loss.kl:.6f}, total={loss.total:.6f}"
            self.line(f"[Micro {self.micro}] 4. Loss computed", values)
            self.micro += 1

    def stepped(self):
        self.line("5. Optimizer step finished", last=True)

    def line(self, text, values="", last=False):
        if not self.on:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.time()
        spent = f"time={now - self.last:.3f}s"
        if last:    # the optimizer's own time, and the sum of all
            spent = f"step={now - self.last:.3f}s, time={now - self.start:.3f}s total"
        used = memory(self.device)
        mem = "" if used is None else f"mem={used / 2 ** 20:.0f} MB, "
        print(f"{text}: {mem}{spent}{values}")
        self.last = now


silent_log = StepLog(device=None, micro_batch_size=0, on=False)


def print_iteration(m, cfg, tokens, seconds_left):
    """Print the line of an iteration. m: its metrics; tokens: how many were sampled."""
    seconds = m["step_time"]
    left = int(seconds_left)
    kl = m.get("kl_loss", 0.0)
    main = m["policy_loss"] - kl + m.get("entropy_loss", 0.0)
    more = ""
    if cfg.answers:
        more += f"{100 * m['forced']:.1f} % environment, "
    if "tools/call_frequency" in m:
        more += f"{m['tools/call_frequency']:.2f} calls, "
    critic = f"critic {m['critic_loss']:.4f}, " if "critic_loss" in m else ""
    print(f"iter {m['iteration']}/{cfg.max_iters}: loss {m['loss']:.4f} "
          f"(main {main:.4f}, {critic}beta*kl {kl:.4f}), "
          f"reward {m['reward']:.4f}, "
          f"grad_norm {m['grad_norm']:.3f}, {more}{tokens / seconds:.0f} tok/s, "
          f"time {seconds:.2f}s, eta {left // 60}m{left % 60:02d}s", flush=True)


def print_table(rows):
    """Print the measures of the first and the last evaluation side by side."""
    before = rows[0]
    after = rows[-1]
    title = f"iterations 0 and {after['iteration']}"
    print(f"\n{title:24}{'before':>10}{'after':>10}{'after/before':>14}")
    for name in before:
        old = before[name]
        new = after.get(name)       # missing where a resumed run has another judge
        if not isinstance(old, float) or not isinstance(new, float):
            continue
        ratio = f"{new / old:.2f}" if old > 1e-6 and new >= 0 else "-"   # KL begins near 0
        print(f"{name:24}{old:10.4f} {new:9.4f}{ratio:>14}")
    print("\nthe same prompts and random numbers, before and after:")
    for old, new in zip(before["samples"], after["samples"]):
        print(f"  {old['prompt']!r}")
        print(f"    before: {old['completion']!r}")
        print(f"    after:  {new['completion']!r}")


def problems_of_influence(m, cfg, dtype):
    if m["tracin/empty_steps"] > 0:
        yield "empty", (
            "influence kept no rollout, so a step had no policy gradient. Are all rewards of the "
            "target equal? Take more tracin_val_prompts, or another reward")
    if m["tracin/fallback"] > 0:
        yield "fallback", (
            f"only {m['tracin/positive_ratio']:.0%} of the rollouts have positive influence: kept "
            "the better half instead; is the target too small or of another kind?")
    if cfg.tracin != "target" and m["tracin/target_contrast"] < 0.3:
        yield "contrast", (
            f"the target's rewards spread {m['tracin/target_contrast']:.2f} times as wide as those "
            "it was chosen from: use tracin_val_select = 'random' or more tracin_val_prompts")
    if m["tracin/target_cosine"] < 0.1:
        yield "noise", (
            "the target's rollouts are too few: the gradients of its two halves have cosine "
            f"{m['tracin/target_cosine']:.2f}; raise num_prompts, or tracin_val_prompts and "
            "tracin_val_size")
    if m["tracin/self_share"] > 0.5 and not cfg.tracin_leave_one_out:
        yield "self", (
            "self-influence (each rollout's own part in the target) adds up to "
            f"{m['tracin/self_share']:.2f} times all influence: set tracin_leave_one_out = True")
    error = m.get("tracin/invariant_error", 0.0)    # of steps that compute the batch's gradient
    if not error <= tolerance_of(dtype):
        yield "invariant", (
            f"influences do not add up to <G_train, G_target> (relative error {error:.1e}): the "
            "scores are wrong, do not trust this run")


def problems(m, cfg, dtype):
    """Find what is wrong in the metrics m of an iteration -> (kind, sentence) of each problem.
    Metrics that not every run has are read only under their setting: a misspelled name fails."""
    by_reward = cfg.multi_objective_aggregation == "normalize_then_sum"
    if math.isnan(m["reward"]):
        yield "reward", "no reward function scored any completion: all returned None"
    elif by_reward:
        pass        # what cancels in the sum is learned from
    elif m["reward_min"] == m["reward_max"]:
        yield "equal", (
            f"all rewards of the batch are {m['reward_min']:.4g}, so they teach nothing: read "
            "samples.jsonl, check the judge or the reward function")
    elif m["frac_reward_zero_std"] == 1 and not cfg.critic:
        yield "groups", (
            "rewards are equal within each group, so they teach nothing: raise temperature or "
            "num_generations")
    if m["num_completion_tokens"] == 0:
        yield "tokens", (
            "no completion tokens carry loss, so there was no step: raise max_completion_length or "
            "unset mask_truncated_completions")
    # the mean of the ratio stays near 1 whatever is wrong; its spread does not
    difference = m["sampling/sampling_logp_difference/mean"]
    if difference > 0.05:
        yield "ratio", (
            "ratio off on the first pass: sampler and trainer disagree by "
            f"{difference:.3f} nats a token; try dtype = 'float32'")
    if cfg.beta and m["num_steps"] and m["kl"] > 5:
        yield "kl", (
            f"KL {m['kl']:.1f} nats per token is exploding: lower learning_rate or raise beta")
    if m["completions/clipped_ratio"] == 1:
        yield "length", (
            f"every completion was truncated at {cfg.max_completion_length} tokens: length is not "
            "learned: raise max_completion_length")
    if cfg.tools and cfg.answers and m["tools/failure_frequency"] == 1:
        yield "tools", (
            "every call was answered with an error: read samples.jsonl, a tool may have a bug")
    if cfg.critic and m["val/var_explained"] < 0 and m["iteration"] > 20:
        yield "critic", (
            f"the critic explains {m['val/var_explained']:.2f} of the returns' variance, less than "
            "a constant (0): sample more completions an iteration, or lower learning_rate")
    if "tracin/selected_ratio" in m:        # influence has scored a step
        yield from problems_of_influence(m, cfg, dtype)


def print_warnings(m, cfg, dtype, warned):
    """Print the problems of an iteration, each kind at most every ten iterations. warned: {kind:
    iteration of its last warning}."""
    for kind, text in problems(m, cfg, dtype):
        if m["iteration"] - warned.get(kind, -10) >= 10:
            warned[kind] = m["iteration"]
            print(f"WARNING: {text}")
