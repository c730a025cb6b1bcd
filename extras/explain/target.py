"""
What an account explains: a number that depends on the weights, with its value and its slope
(gradient) at any weights.

    HeldOut     the expected reward on held-out prompts; or by one reward function, or a judge
    Exact       the log-prob of a sentence, or the config file's `target`

The slope of an expected reward R = E[r(o)] is E[r(o) grad log p(o)], the score function (Williams
1992). It is estimated on fresh completions of held-out prompts, drawn anew at each of the weights.
Each completion's reward is taken less the mean of its prompt's other completions, which changes no
expectation and removes most of the noise.

W trained weights end to end. F folds of the held-out sample add up to the reward: how much they
differ says how noisy any sum of shares is. An exact number has F = 1.
"""
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from common.device import full_precision
from common.hooks import target_number
from common.seeds import seed_for
from extras.explain.account import exact, gradient
from extras.explain.repeat import flat
from judge.rewards import reward_facts, score
from rollout import completion_logprobs
from run.sampling import sample_completions

FOLDS = 8       # of the held-out sample
AT_ONCE = 400   # completions that are sampled together; limits memory
SURE = 0.1      # of the completions: those that count most have a backward pass for certain


class Point(NamedTuple):
    """The target at some weights."""
    value: Tensor   # (F,)
    parts: Tensor   # of the value: (prompts, completions), or (1, tokens)
    slope: Tensor   # (F, W), or None


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
# numbers without noise


class Exact(NamedTuple):
    """The log-prob of a sentence, or what the config file's `target` returns."""
    title: str
    about: str
    setup: Any
    parts: Any          # function(batch) -> (1, T), which add up to the number
    batch: Any = None   # the rollouts of the first step

    rollouts = 0        # none is sampled
    folds_of = ""

    @full_precision()
    def at(self, weights, with_slope=True):
        vector_to_parameters(weights.to(self.setup.device), self.setup.trained)
        parts = self.parts(self.batch)
        slope = gradient(parts.sum(), self.setup.trained)[None] if with_slope else None
        parts = parts.detach().cpu().double()
        return Point(parts.sum(1), parts, slope)


def sentence_target(setup, cfg, row):
    """The log-prob of a sentence at the run's temperature; nothing is truncated. row: a Rollout of
    one row."""
    return Exact("log p", "the log-prob of a sentence", setup,
                 lambda batch: completion_logprobs(setup.policy, row, cfg.temperature))


def function_target(setup, cfg):
    """What the config file's target(policy, tokenizer, batch) returns."""
    return Exact("target", "the number that target(policy, tokenizer, batch) of the config file "
                 "returns", setup, lambda batch: target_number(cfg, setup, batch).view(1, 1))
