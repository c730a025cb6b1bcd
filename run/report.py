"""
The printed lines of a run: lines inside an iteration, the line of an iteration, its red flags, the
table of before and after, and the verdict.
"""
import math
import os
import statistics
import sys
import time

import torch

from common.device import memory
from run.flags import notes, problems
from run.metrics import std


def dimmed(text):
    """Make text fainter on a terminal; leave it as it is in a file."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\033[2m{text}\033[0m"


# phase of an iteration: its line. A phase without one is timed only
LINES = {
    "sample": "[Micro 0] 2. Samples generated",
    "score": "[Micro 0] 3. Samples scored",
    "reference": "[Micro 0] Reference's log-probs",
    "held-out": "[Micro 0] Held-out rollouts sampled and scored",
    "KL share": "[Micro 0] KL's share of the gradient",
    "influence": "Influence scored",
    "update": "5. Optimizer step finished"}


class Clock:
    """Where the time of an iteration goes: seconds by phase, and lines inside the iteration with
    the memory in use and the time since the last line. It waits for a GPU at the end of a phase, to
    time finished work. on: print the lines, which wait once more for each micro-batch."""

    def __init__(self, device, on):
        self.device = device
        self.on = on
        self.micro = 0
        self.num_sampled = 0    # tokens that the policy sampled, in held-out rollouts too
        self.seconds = {}       # {phase: seconds so far}
        self.start = self.last_line = self.last_end = self.now()
        self.line("[Micro 0] 1. Iteration start")

    def now(self):
        """The time, once a GPU has done its work: it works on while Python runs ahead."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    def end(self, phase, rewards=None):
        """Add the time since the last end to a phase, and print its line."""
        now = self.now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last_end
        self.last_end = now
        if self.on and phase in LINES:
            values = "" if rewards is None else (
                f", rewards={rewards.nanmean():.4f}±{std(rewards):.4f}")
            self.line(LINES[phase], values, is_last=phase == "update")

    def sampled(self, rollout, phase="sample"):
        """A phase ends in which a Rollout was sampled."""
        self.num_sampled += int(rollout.sampled_mask.sum())
        self.end(phase)

    def loss(self, loss):
        """loss: loss.Loss, which is read only if the line is printed."""
        if self.on:
            parts = {"pg_loss": loss.policy + loss.entropy}
            if loss.critic.requires_grad:
                parts["critic"] = loss.critic
            if loss.batch.ref_logp is not None:
                mask = loss.batch.loss_mask                                             # (n, T)
                kl = loss.batch.kl if loss.kl_by_token is None else loss.kl_by_token
                parts["kl"] = (kl * mask).sum() / mask.sum().clamp(min=1)
            parts |= {"beta*kl": loss.kl, "total": loss.total}
            # one transfer, which waits for a GPU
            numbers = torch.stack([x.to(loss.policy) for x in parts.values()]).tolist()
            values = "".join(f", {name}={x:.6f}" for name, x in zip(parts, numbers))
            self.line(f"[Micro {self.micro}] 4. Loss computed", values)
            self.micro += 1

    def line(self, text, values="", is_last=False):
        """Print a line with the time since the last one; at the end of an iteration also since its
        start. Call it when a GPU has done its work."""
        if not self.on:
            return
        now = time.monotonic()
        spent = f"time={now - self.last_line:.3f}s"
        if is_last:
            spent = f"step={now - self.last_line:.3f}s, time={now - self.start:.3f}s total"
        used = memory(self.device)
        mem = "" if used is None else f"mem={used / 2 ** 20:.0f} MB, "
        print(dimmed(f"{text}: {mem}{spent}{values}"))
        self.last_line = now


silent_clock = Clock(torch.device("cpu"), on=False)


def loss_in_parts(m):
    """The loss and its parts, if there are several, as text."""
    kl = m.get("kl_loss", 0.0)
    main = m["policy_loss"] - kl + m.get("entropy_loss", 0.0)
    parts = [f"main {main:.4f}"]
    if "critic_loss" in m:
        parts.append(f"critic {m['critic_loss']:.4f}")
    if "kl_loss" in m:
        parts.append(f"beta*kl {kl:.4f}")
    return f"loss {m['loss']:.4f}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def print_iteration(m, cfg, tokens, seconds_left):
    """Print the line of an iteration. m: its metrics; tokens: how many were sampled."""
    seconds = m["step_time"]
    left = int(seconds_left)

    # what the policy does, then how it learns; some parts only in some runs
    parts = [f"reward {m['reward']:.4f} ±{m['reward_std']:.4f}"]
    if "kl" in m:
        parts.append(f"kl {m['kl']:.4f}")
    parts += [f"entropy {m['entropy']:.2f}", f"length {m['completions/mean_length']:.1f}"]
    if cfg.answers:
        parts.append(f"{100 * m['forced']:.1f} % forced")
    if "tools/call_frequency" in m:
        parts.append(f"{m['tools/call_frequency']:.2f} calls")
    if m["num_steps"] > 1:
        share = m.get("clip_ratio/region_mean", m.get("cispo_clip_ratio"))
        clipped = "" if share is None else f", clipped {100 * share:.1f} %"
        parts.append(f"ratio {m['ratio']:.3f} ±{m['ratio_std']:.3f}{clipped}")
    if "val/var_explained" in m:
        parts.append(f"critic explains {m['val/var_explained']:.2f}")
    parts += [f"grad_norm {m['grad_norm']:.3f}", loss_in_parts(m), f"{tokens / seconds:.0f} tok/s",
              f"time {seconds:.2f}s", f"eta {left // 60}m{left % 60:02d}s"]
    print(f"iter {m['iteration']}/{cfg.max_iters}: {', '.join(parts)}", flush=True)


def print_phases(seconds):
    """Print where the time of an iteration went: {phase: seconds}."""
    parts = ", ".join(f"{phase} {spent:.3f}" for phase, spent in seconds.items())
    print(f"    {sum(seconds.values()):.3f} s: {parts}")


def print_influence(m, batch):
    """Print the influence of an iteration's rollouts: before the selection, and what it kept."""
    scored = ~batch.influence.isnan()                                               # (N,)
    influence = batch.influence[scored]
    kept = (batch.row_weights[scored] != 0).sum()
    text = (f"    influence of {len(influence)}: {(influence > 0).sum()} +, "
            f"{(influence < 0).sum()} -, {(influence == 0).sum()} zero; "
            f"mean {m['tracin/mean_ip']:.3g}, std {m['tracin/std_ip']:.3g}, "
            f"{m['tracin/min_ip']:.3g} to {m['tracin/max_ip']:.3g}; {kept} kept")
    if "tracin/target_rows" in m:
        text += (f"; target of {m['tracin/target_rows']:.0f}, cosine "
                 f"{m['tracin/target_cosine']:.2f}, own parts {m['tracin/self_share']:.2f}")
    print(text)


def print_table(rows):
    """Print the measures of the first and the last evaluation side by side."""
    before = rows[0]
    after = rows[-1]
    title = f"iterations {before['iteration']} and {after['iteration']}"
    print(f"\n{title:24}{'before':>10}{'after':>10}{'after/before':>14}")

    # a measure a line
    for name in before:
        old = before[name]
        new = after.get(name)       # missing if a resumed run has a different judge
        if not isinstance(old, float) or not isinstance(new, float):
            continue
        ratio = f"{new / old:.2f}" if old > 1e-6 and new >= 0 else "-"   # KL begins near 0
        print(f"{name:24}{old:10.4f} {new:9.4f}{ratio:>14}")

    # and some completions to read
    print("\nthe same prompts and random numbers, before and after:")
    for old, new in zip(before["samples"], after["samples"]):
        print(f"  {old['prompt']!r}")
        print(f"    before: {old['completion']!r}")
        print(f"    after:  {new['completion']!r}")


class Warned:
    """What a run has warned of, and noted."""

    def __init__(self):
        self.warnings = {}      # {kind: [(iteration, sentence)]}
        self.notes = set()      # kinds

    def warn(self, kind, text, iteration):
        """Print a warning when its kind first comes, and every tenth time after that."""
        times = self.warnings.setdefault(kind, [])
        if len(times) % 10 == 0:
            print(f"WARNING: {text}", flush=True)
        times.append((iteration, text))

    def note(self, kind, text):
        """Print a note when its kind first comes."""
        if kind not in self.notes:
            print(f"note: {text}", flush=True)
        self.notes.add(kind)

    def repeat(self):
        """Print the last warning of each kind again, with its iterations."""
        if self.warnings:
            print("\nwarnings of this run, the last of each kind:")
        for times in self.warnings.values():
            (first, _), (last, text) = times[0], times[-1]
            where = f"iteration {first}"
            if len(times) > 1:
                where = f"{len(times)} iterations from {first} to {last}"
            print(f"  {where}: {text}")


def print_warnings(m, cfg, warned, earlier=(), groups=None):
    """Print the red flags of an iteration. warned: the run's Warned. The other arguments are those
    of run/flags.py."""
    warnings = [*problems(m, cfg, earlier, groups)]
    for kind, text in warnings:
        warned.warn(kind, text, m["iteration"])
    for kind, text in notes(m, cfg, earlier, warned=bool(warnings)):
        warned.note(kind, text)


def held_out_reward(row):
    """The mean reward of the prompts of an evaluation, a row of eval.jsonl; NaN: none is known."""
    known = [x for x in row["prompt_rewards"] if x is not None]
    return statistics.fmean(known) if known else math.nan


def print_verdict(rows, cfg):
    """Print whether the held-out reward rose by cfg.expect_rise from the first evaluation to the
    last. If it did not, end the run with exit code 1."""
    before, after = held_out_reward(rows[0]), held_out_reward(rows[-1])
    if after - before >= cfg.expect_rise:
        print(f"verdict: works, the reward rose from {before:.3f} to {after:.3f}")
        return
    raise SystemExit(
        f"verdict: does not work, the reward went from {before:.3f} to {after:.3f} where it must "
        f"rise by {cfg.expect_rise:g}; `python -m pytest tests/test_algorithm.py` names classic "
        "mistakes, --debug_step=True prints every number of a step")
