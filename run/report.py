"""
What a run prints: lines inside an iteration, the line of an iteration, its red flags, the table of
before and after, and the verdict.
"""
import math
import time

import torch

from common.device import memory
from run.flags import notes, problems
from run.metrics import std


class StepLog:
    """The numbered lines inside an iteration: memory in use, time since the last line. Each
    line synchronises a GPU, so that times are those of finished work. on: False: none."""

    def __init__(self, device, micro_batch_size, on):
        self.device = device
        self.micro_batch_size = micro_batch_size
        self.on = on
        self.micro = 0
        self.num_tokens = 0     # of prompts and completions, without padding
        self.num_sampled = 0    # of those the policy's
        self.start = time.monotonic()
        self.last = self.start
        self.line("[Micro 0] 1. Iteration start")

    def generated(self, rollout):
        # prompts and completions, without padding
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
        """loss: loss.Loss, which is read only if the line is printed."""
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

        # a GPU works on while this line is printed: wait for what it is about
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.monotonic()

        # since the last line; at the end of the iteration since its start, too
        spent = f"time={now - self.last:.3f}s"
        if last:
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
    speed = f"{tokens / seconds:.0f}" if seconds > 0 else "?"      # a clock may stand still

    # the parts of the loss, where there are more than one
    main = m["policy_loss"] - kl + m.get("entropy_loss", 0.0)
    extra = ""
    if cfg.answers:
        extra += f"{100 * m['forced']:.1f} % environment, "
    if "tools/call_frequency" in m:
        extra += f"{m['tools/call_frequency']:.2f} calls, "
    critic = f"critic {m['critic_loss']:.4f}, " if "critic_loss" in m else ""
    print(f"iter {m['iteration']}/{cfg.max_iters}: loss {m['loss']:.4f} "
          f"(main {main:.4f}, {critic}beta*kl {kl:.4f}), "
          f"reward {m['reward']:.4f}, "
          f"grad_norm {m['grad_norm']:.3f}, {extra}{speed} tok/s, "
          f"time {seconds:.2f}s, eta {left // 60}m{left % 60:02d}s", flush=True)


def print_table(rows):
    """Print the measures of the first and the last evaluation side by side."""
    before = rows[0]
    after = rows[-1]
    title = f"iterations {before['iteration']} and {after['iteration']}"
    print(f"\n{title:24}{'before':>10}{'after':>10}{'after/before':>14}")

    # a measure a line
    for name in before:
        old = before[name]
        new = after.get(name)       # missing where a resumed run has another judge
        if not isinstance(old, float) or not isinstance(new, float):
            continue
        ratio = f"{new / old:.2f}" if old > 1e-6 and new >= 0 else "-"   # KL begins near 0
        print(f"{name:24}{old:10.4f} {new:9.4f}{ratio:>14}")

    # what the policy wrote, to be read
    print("\nthe same prompts and random numbers, before and after:")
    for old, new in zip(before["samples"], after["samples"]):
        print(f"  {old['prompt']!r}")
        print(f"    before: {old['completion']!r}")
        print(f"    after:  {new['completion']!r}")


def print_warnings(m, cfg, dtype, warned, first=None, groups=None, earlier=()):
    """Print the red flags of an iteration, each kind at most every ten iterations. warned: {kind:
    iteration of its last warning}. The others: see run/flags.py."""
    found = [("WARNING", *flag) for flag in problems(m, cfg, dtype, first, groups)]
    found += [("note", *flag) for flag in notes(m, earlier)]
    for what, kind, text in found:
        again = math.inf if kind == "zero" else 10      # what is right is said once
        if m["iteration"] - warned.get(kind, -again) >= again:
            warned[kind] = m["iteration"]
            print(f"{what}: {text}")


def reward_of(row, cfg):
    """Weighted sum of the rewards of an evaluation; NaN where a function scored nothing, or was not
    asked before the run was resumed. One of weight 0 counts for nothing."""
    counted = {name: weight for name, weight in zip(cfg.reward_funcs, cfg.reward_weights) if weight}
    found = [row.get(f"rewards/{name}") for name in counted]
    if None in found:
        return math.nan
    return sum(weight * x for weight, x in zip(counted.values(), found))


def clip_hint(metrics):
    """Words about the clip, where it has held back more than a hundredth of the tokens. metrics:
    rows of metrics.jsonl."""
    names = ("clip_ratio/region_mean", "cispo_clip_ratio")
    shares = [row[name] for row in metrics for name in names if row.get(name) is not None]
    share = sum(shares) / max(1, len(shares))
    if share <= 0.01:
        return ""
    return (f"the clip held back {share:.0%} of the tokens: lower learning_rate or widen epsilon "
            "first; ")


def print_verdict(rows, cfg, metrics=()):
    """Say whether the reward rose by cfg.expect_rise from the first evaluation to the last. End
    the run with exit code 1 if it did not. metrics: rows of metrics.jsonl."""
    before = reward_of(rows[0], cfg)
    after = reward_of(rows[-1], cfg)
    if after - before >= cfg.expect_rise:
        print(f"verdict: works, the reward rose from {before:.3f} to {after:.3f}")
        return
    raise SystemExit(
        f"verdict: does not work, the reward went from {before:.3f} to {after:.3f} where it must "
        f"rise by {cfg.expect_rise:g}; {clip_hint(metrics)}"
        "`python -m pytest tests/test_algorithm.py` names classic mistakes, --debug_step=True "
        "prints every number of a step")
