"""
What an account explains: a number that depends on the weights, its value and its slope (gradient)
at any weights, and both along a run.

    HeldOut     the expected reward on held-out prompts; or by one reward function, or a judge
    Sentences   the log-probs of sentences
    Function    the config file's `target`

The slope of an expected reward R = E[r(o)] is E[r(o) grad log p(o)], the score function (Williams
1992). It is estimated on fresh completions of held-out prompts, drawn anew at each of the weights.
Each completion's reward is taken less the mean of its prompt's other completions, which changes no
expectation and removes most of the noise.

S steps, W trained weights end to end, K columns: sentences, or the folds of the held-out sample,
which add up to the one reward: how much they differ says how noisy any sum of shares is.
"""
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from common.device import full_precision
from common.hooks import target_number
from common.progress import Progress
from common.seeds import seed_for
from extras.explain.account import exact, flat, gradient, stored
from judge.rewards import reward_facts, score
from rollout import completion_logprobs
from run.sampling import sample_completions

FOLDS = 8       # of the held-out sample
AT_ONCE = 400   # completions that are sampled together; limits memory
SURE = 0.1      # of the completions: those that count most have a backward pass for certain


class Point(NamedTuple):
    """The target at some weights."""
    value: Tensor   # (K,)
    parts: Tensor   # of the value: (prompts, completions), or (sentences, tokens)
    slope: Tensor   # (K, W); None: not asked for


# ------------------------------------------------------------------------------------------------
# the expected reward


def centred(scores, weights, count):
    """What each of N completions adds to the mean reward (N,), and the factor of its log-prob in
    the slope (N,). scores (N, number of functions), NaN where one abstains: the mean is over known
    scores. count: completions of a prompt, side by side."""
    known = ~scores.isnan()
    n = known.sum(0).clamp(min=1)
    value = (scores.nan_to_num() / n) @ weights

    # a mean of known scores is a ratio of two sums, and has its slope
    away = (scores - scores.nanmean(0)).nan_to_num() / n @ weights                  # (N,)
    groups = away.view(-1, count)
    baseline = (groups.sum(1, keepdim=True) - groups) / max(1, count - 1)
    return value, (groups - baseline).flatten()


def thinned(signal, seed):
    """signal (N,) with most of its small numbers set to 0, and the rest of these made larger, so
    that on average nothing changes: a reward hardly tells most completions apart, and a backward
    pass for each would take most of an account's time. The largest tenth stays as it is."""
    size = signal.abs()
    likely = (size / size.quantile(1 - SURE)).clamp(max=1)      # (N,) to be drawn; NaN: 0 / 0
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(size), dtype=size.dtype, generator=generator) < likely
    return torch.where(drawn, signal / likely, 0.0)


class HeldOut(NamedTuple):
    """The expected reward on held-out prompts."""
    name: str
    setup: Any
    cfg: Any
    functions: dict     # {name: reward function}
    weights: list       # of these in the sum
    prompts: list
    count: int          # completions of each prompt

    @property
    def title(self):
        return f"held-out {self.name}"

    @property
    def about(self):
        return (f"the mean {self.name} of {self.rollouts} completions of {len(self.prompts)} "
                "held-out prompts of the evaluation")

    @property
    def rollouts(self):
        return len(self.prompts) * self.count

    @property
    def folds_of(self):
        """What is in folds: the prompts, as a sample of others like them; or the completions, where
        there is one prompt, or all prompts are trained on, too."""
        trained_on = {prompt.text for prompt in self.setup.prompts}
        is_new = any(prompt.text not in trained_on for prompt in self.prompts)
        return "prompts" if is_new and len(self.prompts) > 1 else "completions"

    @full_precision()
    def sample(self):
        """Completions of the prompts by the policy as it is, always with the random numbers of the
        evaluation -> Rollout, scores (N, number of functions). In full precision, as the slope is:
        drawn in bfloat16, the sum of the default job was 13 % off."""
        cfg = self.cfg
        how = replace(cfg.untruncated(cfg.eval_temperature), num_generations=self.count,
                      decode_batch_size=AT_ONCE)
        rollout, prompts, completions = sample_completions(
            exact(self.setup), self.setup.policy, self.prompts, how, seed_for("evaluation"))
        # the iteration of the last evaluation, at all weights: a reward that changes on the way has
        # no slope
        facts = reward_facts(rollout, cfg.max_iters, self.count)
        return rollout, score(self.functions, prompts, completions, facts)

    def at(self, weights, with_slope=True):
        """The target at these weights -> Point."""
        setup = self.setup
        vector_to_parameters(weights.to(setup.device), setup.trained)
        rollout, scores = self.sample()
        value, signal = centred(scores, torch.tensor(self.weights).double(), self.count)    # (N,)
        signal = thinned(signal, seed_for("thinned"))

        # prompt i, or completion i, is in fold i modulo the number of folds
        unit = self.count if self.folds_of == "prompts" else 1
        folds = min(FOLDS, len(value) // unit)
        fold = torch.arange(len(value)) // unit % folds
        values = torch.zeros(folds, dtype=torch.float64).index_add_(0, fold, value)
        parts = value.view(-1, self.count)
        if not with_slope:
            return Point(values, parts, None)
        carries = signal != 0       # not so where rewards are equal
        slopes = [self.slope_of(rollout, signal, (carries & (fold == f)).nonzero()[:, 0])
                  for f in range(folds)]
        return Point(values, parts, torch.stack(slopes))

    @full_precision()
    def slope_of(self, rollout, signal, rows):
        """What these rows add to the slope (W,): grad of the sum of signal x log-prob."""
        total = torch.zeros_like(flat(self.setup.trained))
        signal = signal.to(rollout.logp)
        for few in rows.to(rollout.logp.device).split(self.cfg.micro_batch_size):
            if len(few):
                logp = completion_logprobs(
                    self.setup.policy, rollout[few], self.cfg.eval_temperature).sum(1)
                total += gradient((logp * signal[few]).sum(), self.setup.trained)
        return total


# ------------------------------------------------------------------------------------------------
# sentences, and a function of the weights


class Sentences(NamedTuple):
    """Log-probs of sentences at the run's temperature; nothing is truncated."""
    setup: Any
    cfg: Any
    rollout: Any        # a Rollout of K rows

    title = "log p"
    about = "the log-prob of a sentence"
    rollouts = 0        # none is sampled: the number is exact
    folds_of = ""

    @full_precision()
    def at(self, weights, with_slope=True):
        vector_to_parameters(weights.to(self.setup.device), self.setup.trained)
        with torch.set_grad_enabled(with_slope):
            logp = completion_logprobs(self.setup.policy, self.rollout, self.cfg.temperature)
        parts = logp.detach().cpu().double()                                        # (K, T)
        slope = torch.stack([gradient(x, self.setup.trained, retain_graph=True)
                             for x in logp.sum(1)]) if with_slope else None
        return Point(parts.sum(1), parts, slope)


class Function(NamedTuple):
    """What the config file's target(policy, tokenizer, batch) returns. batch: the rollouts of the
    first iteration that is explained."""
    setup: Any
    cfg: Any
    batch: Any

    title = "target"
    about = "the number that target(policy, tokenizer, batch) of the config file returns"
    rollouts = 0
    folds_of = ""

    @full_precision()
    def at(self, weights, with_slope=True):
        vector_to_parameters(weights.to(self.setup.device), self.setup.trained)
        number = target_number(self.cfg, self.setup, self.batch)
        slope = gradient(number, self.setup.trained)[None] if with_slope else None
        value = number.detach().cpu().double().view(1)
        return Point(value, value[None], slope)


# ------------------------------------------------------------------------------------------------
# along a run


class Course(NamedTuple):
    """The target along a run."""
    values: Tensor      # (S + 1, K) before each step and after the last
    gains: Tensor       # (S, K) of <mean slope, step>: nearly its changes
    ends: list          # Point.parts at the start and at the end
    means: list         # S mean slopes (K, W) along a step
    last: Tensor        # (K, W) the slope at the end

    @property
    def change(self):   # (K,)
        return self.values[-1] - self.values[0]


def follow(target, run, pieces=1):
    """The Course of a target along a Replay. The mean slope on the straight line of a step is by
    the trapezoid rule over `pieces` of it: 1 takes the mean of both ends."""
    progress = Progress("target", "point", len(run.steps) * pieces + 1)
    start = end = target.at(run.states[0][0])
    values = [start.value]
    gains = []
    means = []
    for t, (before, after) in enumerate(zip(run.states, run.states[1:]), 1):
        # the end of one step is the start of the next
        move = after[0] - before[0]
        mean = end.slope / 2 + sum(
            target.at(before[0] + move * (i / pieces)).slope for i in range(1, pieces))
        end = target.at(after[0])
        mean = (mean + end.slope / 2) / pieces
        values.append(end.value)
        gains.append((mean @ move.to(mean)).double().cpu())
        means.append(stored(mean, run.folder))
        if progress.is_due():
            progress.show(t * pieces + 1)
    return Course(torch.stack(values), torch.stack(gains), [start.parts, end.parts], means,
                  end.slope)
