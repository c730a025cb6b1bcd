"""What a run says: numbered lines inside an iteration, the line of an iteration, progress of what
takes long, warnings."""
import math
import os
import sys
import time

import torch

from run.device import free_memory, memory
from run.metrics import bound_of, std
from run.processes import rank_and_size
from run.script import BadInput

# ------------------------------------------------------------------------------------------------
# lines


class StepLog:
    """The numbered lines inside an iteration: memory now, time since the line before.

    A GPU is waited for only to print, so that the times are of finished work. on: print at all.
    """

    def __init__(self, device, micro_batch_size, on):
        self.device = device
        self.micro_batch_size = micro_batch_size
        self.on = on
        self.micro = 0
        self.start = self.last = time.time()
        self.line("[Micro 0] 1. Iteration start")

    def generated(self, num_rows):
        shared = num_rows > self.micro_batch_size
        note = f" ({num_rows} rows for all micro-batches)" if shared else ""
        self.line(f"[Micro 0] 2. Samples generated{note}")

    def scored(self, rewards):
        if self.on:
            values = f", rewards={rewards.nanmean():.4f}±{std(rewards):.4f}"
            self.line("[Micro 0] 3. Samples scored", values)

    def loss(self, metrics):
        """metrics: tensors, read only if the line is printed."""
        if self.on:
            policy_loss = metrics["policy_loss"]
            total = metrics["loss"]
            kl = total - policy_loss
            critic = ""
            if "critic_loss" in metrics:
                kl = kl - metrics["critic_loss"]
                critic = f" critic={metrics['critic_loss']:.6f},"
            values = f", pg_loss={policy_loss:.6f},{critic} kl={kl:.6f}, total={total:.6f}"
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
        if last:  # the optimizer's own time and the sum of all
            spent = f"step={now - self.last:.3f}s, time={now - self.start:.3f}s total"
        print(f"{text}: mem={memory(self.device) / 2 ** 20:.0f} MB, {spent}{values}")
        self.last = now


quiet = StepLog(device=None, micro_batch_size=0, on=False)


def print_iteration(m, cfg, tokens, seconds_left):
    """The line of an iteration with metrics m, in which so many tokens were sampled."""
    seconds = m["step_time"]
    left = int(seconds_left)
    critic_loss = m.get("critic_loss", 0.0)
    critic = f"critic {critic_loss:.4f}, " if "critic_loss" in m else ""
    kl = m["loss"] - m["policy_loss"] - critic_loss
    forced = f"{100 * m['forced']:.1f} % forced, " if cfg.force_rate or cfg.answers else ""
    calls = ""
    if "tools/call_frequency" in m:
        calls = f"{m['tools/call_frequency']:.2f} calls, "
    print(f"iter {m['iteration']}/{cfg.max_iters}: loss {m['loss']:.4f} "
          f"(main {m['policy_loss']:.4f}, {critic}kl {round(kl, 4) + 0.0:.4f}), "  # no -0.0000
          f"reward {m['reward']:.4f}, "
          f"grad_norm {m['grad_norm']:.3f}, {forced}{calls}{tokens / seconds:.0f} tok/s, "
          f"time {duration(seconds)}, eta {left // 60}m{left % 60:02d}s", flush=True)


def duration(seconds):
    """A time in three digits: 43.5ms, 435ms, 4.35s, 43.5s."""
    unit = "s"
    if seconds < 0.9995:
        seconds *= 1000
        unit = "ms"
    exponent = int(f"{seconds:.2e}".partition("e")[2])
    return f"{seconds:.{max(2 - exponent, 0)}f}{unit}"


class Progress:
    """The line of something that takes long: what, how far, time left.

        progress = Progress("policy", "step", 500)
        for i in range(500):
            ...
            if progress.is_due():
                progress.show(i + 1, "loss 4.421, ")    # policy: step 20/500, loss 4.421, 31 s left

    A terminal shows one line that is rewritten; a file gets a line every EVERY seconds. start: how
    many of the total were done before.
    """

    EVERY = 10

    def __init__(self, label, unit, total, start=0):
        self.label = label
        self.unit = unit
        self.total = total
        self.start = start
        self.rewrites = sys.stdout.isatty()
        self.every = 1 if self.rewrites else self.EVERY
        self.shown = False
        self.began = self.last = time.time()

    def is_due(self):
        return time.time() - self.last > self.every

    def show(self, done, about=""):
        self.last = time.time()
        left = (self.last - self.began) / (done - self.start) * (self.total - done)
        line_up = "\x1b[A\x1b[K" if self.rewrites and self.shown else ""
        print(f"{line_up}{self.label}: {self.unit} {done}/{self.total}, {about}{left:.0f} s left",
              flush=True)
        self.shown = True


def print_warnings(m, cfg, dtype, warned):
    """Troubles of an iteration, each kind at most every ten iterations; `warned` remembers when."""
    it = m["iteration"]
    is_zero = abs(m["loss"]) < 5e-5 and m["grad_norm"] > 0
    if is_zero and not cfg.critic and "zero" not in warned:
        warned["zero"] = it
        print("note: a loss of 0.0000 with a gradient that is not 0 is right: the ratio is 1 and "
              "the advantages of a group sum to 0. Watch reward and grad_norm.")
    troubles = diagnose(m, cfg)
    if "tracin/selected_ratio" in m:
        troubles |= diagnose_influence(m, cfg, dtype)
    for kind, text in troubles.items():
        if it - warned.get(kind, -10) >= 10:
            warned[kind] = it
            print(f"WARNING: {text}")


# ------------------------------------------------------------------------------------------------
# diagnosis: {kind of trouble: one line that says what it is and what to do}


def diagnose(m, cfg):
    """Troubles that the metrics m of an iteration show."""
    out = {}
    kl = m.get("kl", 0.0)
    gap = m["sampling/sampling_logp_difference/mean"]
    num_tokens = m["num_completion_tokens"]
    if math.isnan(m["reward"]):
        out["reward"] = "no reward function scored any completion: all returned None"
    elif m["reward_min"] == m["reward_max"]:
        out["reward"] = (
            f"all rewards of the batch are {m['reward_min']:.4g}: nothing to learn from; read "
            "samples.jsonl, check the judge or the reward function")
    elif m["advantage_max"] == 0:
        out["advantage"] = (
            f"all advantages are zero (rewards {m['reward_min']:.4g} to {m['reward_max']:.4g}, "
            "equal within each group): raise temperature or num_generations")
    for name in cfg.reward_funcs:
        if m[f"rewards/{name}/std"] == 0 and len(cfg.reward_funcs) > 1:
            out[name] = (f"reward {name!r} gave every completion the same score: it teaches "
                         "nothing; check it")
    if num_tokens == 0:
        out["tokens"] = (
            "no completion tokens carry loss, so there was no step: raise max_completion_length or "
            "unset mask_truncated_completions")
    if m["logp_min"] == 0:
        out["logp"] = (
            "all log-probs are zero, the policy is certain of every token: raise temperature or "
            "beta, or go back to an earlier checkpoint")
    if gap > 0.05:  # the mean of the ratio stays near 1 whatever is wrong; its spread does not
        out["ratio"] = (
            f"ratio off on the first pass: sampler and trainer disagree by {gap:.3f} nats a token; "
            "try dtype = 'float32'")
    if kl < -1e-3 and num_tokens >= 4096:
        out["negative"] = (
            f"KL {kl:.4f} is negative over {num_tokens} tokens: the log-probs are not those of the "
            "sampling distribution")
    if kl > 5:
        out["kl"] = f"KL {kl:.1f} nats per token is exploding: lower learning_rate or raise beta"
    if m["frac_identical_groups"] > 0:
        out["identical"] = (
            f"{100 * m['frac_identical_groups']:.0f} % of the groups hold {cfg.num_generations} "
            "identical completions, which teach nothing: if they are not what you want, raise "
            "temperature or beta")
    if m["completions/clipped_ratio"] == 1:
        out["length"] = (
            f"every completion was cut at {cfg.max_completion_length} tokens, so length is not "
            "learned: raise max_completion_length")
    if m.get("tools/failure_frequency") == 1:
        out["tools"] = (
            "every call was answered with an error: read samples.jsonl, a tool may have a bug")
    if m["grad_norm"] == 0:
        out["gradient"] = (
            "grad_norm is 0: no gradient in this step; see rewards and advantages above")
    return out | diagnose_values(m)


def diagnose_values(m):
    """Troubles of a critic."""
    out = {}
    it = m.get("iteration", 1)
    explained = m.get("val/var_explained", math.nan)
    if m.get("val/std") == 0 and it > 1 and not math.isnan(m["val/mean"]):
        out["values"] = (
            f"the critic's values do not move, all are {m['val/mean']:.4g}: it is not trained; "
            "raise value_coef or learning_rate")
    if explained < 0 and it > 20:
        out["explained"] = (
            f"the critic explains {explained:.2f} of the returns' variance, less than a constant "
            "would (0): it follows noise; sample more completions an iteration, or lower "
            "learning_rate")
    return out


def diagnose_influence(m, cfg, dtype):
    """Troubles that the tracin/ metrics of an iteration show."""
    out = {}
    if m["tracin/empty_steps"] > 0:
        out["empty"] = (
            "influence kept no rollout, so a step had no policy gradient: use tracin_select = "
            "'positive' or a larger tracin_fraction")
    if m["tracin/fallback"] > 0:
        out["fallback"] = (
            f"only {100 * m['tracin/positive_ratio']:.0f} % of the rollouts have positive "
            "influence: kept the better half instead; is the target too small or of another kind?")
    contrast = m.get("tracin/target_contrast", 1.0)     # a function of the config file has neither
    if contrast < 0.3:
        out["contrast"] = (
            f"the target's rewards spread {contrast:.2f} times as wide as those it was chosen from "
            "(0: all alike): without good and bad it says 'write this', not 'improve'; use "
            "tracin_val_select = 'random' or 'balanced'")
    cosine = m.get("tracin/target_cosine", 1.0)
    if cosine < 0.1:
        out["noise"] = (
            f"the target's {m['tracin/target_rows']:.0f} rollouts are too few: the gradients of "
            f"its two halves have cosine {cosine:.2f}; raise num_prompts, or tracin_val_prompts "
            "and tracin_val_size")
    error = m["tracin/invariant_error"]
    exact = dtype == torch.float32
    if not error <= bound_of(exact):
        out["invariant"] = (
            f"influences do not add up to <G_train, G_target> (relative error {error:.1e}): the "
            "scores are wrong, do not trust this run")
    return out


# ------------------------------------------------------------------------------------------------
# influence before the run: what it costs, and whether it fits


def check_tape(nets, cfg):
    """Says what influence will cost."""
    if cfg.tracin == "off":
        return
    print(describe_cost(cfg))


def describe_cost(cfg):
    """One line: what an iteration costs beyond plain GRPO."""
    N = cfg.num_prompts * cfg.num_generations
    where = ""
    if cfg.mini_batch_size:
        where = f", in each of the {N // cfg.mini_batch_size} steps of the first pass"
    if cfg.tracin_val_prompts:
        n = cfg.tracin_val_prompts * cfg.num_generations
        cost = (f"{n} held-out rollouts are sampled and scored, {min(cfg.tracin_val_size or n, n)} "
                "of them go forward and backward for the target; 1 forward and 1 backward of the "
                "batch for scores and step")
    elif cfg.tracin == "target":
        cost = ("the function of the config file forward and backward for the target; 1 forward "
                "and 1 backward of the batch for scores and step")
    elif cfg.tracin == "self" or cfg.multiple_of_logp:
        cost = "1 forward and 1 backward serve target, scores and step"
    else:
        cost = ("2 forwards and 2 backwards, since what is scored of a row is not a multiple of "
                "its log-prob; mini_batch_size = 0, top_entropy_quantile = 1 and critic = False "
                "need 1")
    if cfg.two_parts:
        cost += ", and 1 backward for the KL and whatever else keeps all rollouts"
    return f"influence on {cfg.tracin}, {cfg.tracin_select} kept{where}: {cost}"


def gigabytes(numbers):
    """Of so many float32 numbers."""
    return numbers * 4 / 2 ** 30
