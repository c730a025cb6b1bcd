"""What a run says: lines inside an iteration, the line of an iteration, progress, warnings."""
import collections
import math
import time

import torch

from common.device import memory
from run.metrics import bound_of, std


class StepLog:
    """The numbered lines inside an iteration: memory now, time since the line before. A GPU is
    waited for, so that the times are of finished work. on: print at all."""

    def __init__(self, device, micro_batch_size, on):
        self.device = device
        self.micro_batch_size = micro_batch_size
        self.on = on
        self.micro = 0
        self.start = time.time()
        self.last = self.start
        self.line("[Micro 0] 1. Iteration start")

    def generated(self, num_rows):
        shared = num_rows > self.micro_batch_size
        note = f" ({num_rows} rows for all micro-batches)" if shared else ""
        self.line(f"[Micro 0] 2. Samples generated{note}")

    def scored(self, rewards):
        if self.on:
            values = f", rewards={rewards.nanmean():.4f}±{std(rewards):.4f}"
            self.line("[Micro 0] 3. Samples scored", values)

    def loss(self, loss):
        """A grpo.Loss, read only if the line is printed."""
        if self.on:
            values = f", pg_loss={loss.policy + loss.entropy:.6f},"
            if loss.critic.requires_grad:
                values += f" critic={loss.critic:.6f},"
            values += f" kl={loss.kl:.6f}, total={loss.total:.6f}"
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


silent_log = StepLog(device=None, micro_batch_size=0, on=False)


def print_iteration(m, cfg, tokens, seconds_left):
    """The line of an iteration with metrics m, in which so many tokens were sampled."""
    seconds = m["step_time"]
    left = int(seconds_left)
    kl = m.get("kl_loss", 0.0)
    main = m["policy_loss"] - kl + m.get("entropy_loss", 0.0)
    more = ""
    if cfg.answers:
        more += f"{100 * m['forced']:.1f} % forced, "
    if "tools/call_frequency" in m:
        more += f"{m['tools/call_frequency']:.2f} calls, "
    critic = f"critic {m['critic_loss']:.4f}, " if "critic_loss" in m else ""
    print(f"iter {m['iteration']}/{cfg.max_iters}: loss {m['loss']:.4f} "
          f"(main {main:.4f}, {critic}kl {round(kl, 4) + 0.0:.4f}), "     # no -0.0000
          f"reward {m['reward']:.4f}, "
          f"grad_norm {m['grad_norm']:.3f}, {more}{tokens / seconds:.0f} tok/s, "
          f"time {duration(seconds)}, eta {left // 60}m{left % 60:02d}s", flush=True)


def print_table(rows):
    """The measures of the first and the last evaluation, side by side."""
    before, after = rows[0], rows[-1]
    title = f"iteration 0 and {after['iteration']}"
    print(f"\n{title:24}{'before':>10}{'after':>10}{'after/before':>14}")
    for name in before:
        old, new = before[name], after.get(name)    # the judge may have changed
        if not isinstance(old, float) or not isinstance(new, float):
            continue
        ratio = f"{new / old:.2f}" if old > 1e-6 and new >= 0 else "-"   # KL begins near 0
        print(f"{name:24}{old:10.4f}{new:10.4f}{ratio:>14}")
    print("\nthe same prompts and noise, before and after:")
    for old, new in zip(before["samples"], after["samples"]):
        print(f"  {old['prompt']!r}")
        print(f"    before: {old['completion']!r}")
        print(f"    after:  {new['completion']!r}")


def duration(seconds):
    """A time in three digits: 43.5ms, 435ms, 4.35s, 43.5s."""
    unit = "s"
    if seconds < 0.9995:
        seconds *= 1000
        unit = "ms"
    exponent = int(f"{seconds:.2e}".partition("e")[2])
    return f"{seconds:.{max(2 - exponent, 0)}f}{unit}"


class Progress:
    """The line of something that takes long, at most every ten seconds: what, how far, time left.
    start: how many of the total were done before."""

    EVERY = 10

    def __init__(self, label, unit, total, start=0):
        self.label = label
        self.unit = unit
        self.total = total
        self.start = start
        self.began = time.time()
        self.last = self.began

    def is_due(self):
        return time.time() - self.last > self.EVERY

    def show(self, done, about=""):
        self.last = time.time()
        left = (self.last - self.began) / (done - self.start) * (self.total - done)
        print(f"{self.label}: {self.unit} {done}/{self.total}, {about}{left:.0f} s left",
              flush=True)


# kind: (what the numbers of an iteration show, what is wrong and what to do). A number that an
# iteration does not have is NaN, of which no comparison is true
WARNINGS = {
    "reward": (
        lambda m: math.isnan(m["reward"]),
        "no reward function scored any completion: all returned None"),
    "equal": (
        lambda m: m["reward_min"] == m["reward_max"],
        "all rewards of the batch are {reward_min:.4g}: nothing to learn from; read samples.jsonl, "
        "check the judge or the reward function"),
    "advantage": (
        lambda m: m["advantage_max"] == 0 and m["reward_min"] < m["reward_max"],
        "all advantages are zero: rewards are equal within each group; raise temperature or "
        "num_generations"),
    "tokens": (
        lambda m: m["num_completion_tokens"] == 0,
        "no completion tokens carry loss, so there was no step: raise max_completion_length or "
        "unset mask_truncated_completions"),
    "ratio": (      # the mean of the ratio stays near 1 whatever is wrong; its spread does not
        lambda m: m["sampling/sampling_logp_difference/mean"] > 0.05,
        "ratio off on the first pass: sampler and trainer disagree by "
        "{sampling/sampling_logp_difference/mean:.3f} nats a token; try dtype = 'float32'"),
    "kl": (
        lambda m: m["kl"] > 5,
        "KL {kl:.1f} nats per token is exploding: lower learning_rate or raise beta"),
    "length": (
        lambda m: m["completions/clipped_ratio"] == 1,
        "every completion was cut at {max_completion_length} tokens, so length is not learned: "
        "raise max_completion_length"),
    "tools": (
        lambda m: m["tools/failure_frequency"] == 1,
        "every call was answered with an error: read samples.jsonl, a tool may have a bug"),
    "critic": (
        lambda m: m["val/var_explained"] < 0 and m["iteration"] > 20,
        "the critic explains {val/var_explained:.2f} of the returns' variance, less than a "
        "constant (0): sample more completions an iteration, or lower learning_rate"),
    "empty": (
        lambda m: m["tracin/empty_steps"] > 0,
        "influence kept no rollout, so a step had no policy gradient. Are all rewards of the "
        "target equal? Take more tracin_val_prompts, or another reward"),
    "fallback": (
        lambda m: m["tracin/fallback"] > 0,
        "only {tracin/positive_ratio:.0%} of the rollouts have positive influence: kept the better "
        "half instead; is the target too small or of another kind?"),
    "contrast": (
        lambda m: m["tracin/target_contrast"] < 0.3,
        "the target's rewards spread {tracin/target_contrast:.2f} times as wide as those it was "
        "chosen from: use tracin_val_select = 'random' or more tracin_val_prompts"),
    "noise": (
        lambda m: m["tracin/target_cosine"] < 0.1,
        "the target's rollouts are too few: the gradients of its two halves have cosine "
        "{tracin/target_cosine:.2f}; raise num_prompts, or tracin_val_prompts and tracin_val_size"),
    "self": (
        lambda m: m["tracin/self_share"] > 0.5 and not m["tracin_leave_one_out"],
        "{tracin/self_share:.0%} of the influence is each rollout's own share in the target: set "
        "tracin_leave_one_out = True"),
    "invariant": (
        lambda m: "tracin/invariant_error" in m and not m["tracin/invariant_error"] <= m["bound"],
        "influences do not add up to <G_train, G_target> (relative error "
        "{tracin/invariant_error:.1e}): the scores are wrong, do not trust this run")}


def troubles(metrics, cfg, dtype):
    """{kind: sentence} of what the metrics of an iteration show."""
    m = collections.defaultdict(lambda: math.nan, cfg.public() | metrics)
    m["bound"] = bound_of(dtype)
    return {kind: text.format_map(m) for kind, (shows, text) in WARNINGS.items() if shows(m)}


def print_warnings(metrics, cfg, dtype, warned):
    """Troubles of an iteration, each kind at most every ten iterations; `warned` remembers when."""
    it = metrics["iteration"]
    for kind, text in troubles(metrics, cfg, dtype).items():
        if it - warned.get(kind, -10) >= 10:
            warned[kind] = it
            print(f"WARNING: {text}")
