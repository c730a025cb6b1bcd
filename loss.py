"""
The loss of GRPO: what a batch is, and the loss of some of its rows. grpo.py steps along its
gradient, tracin.py takes that gradient apart.

    loss = losses of the tokens, added up and divided as loss_type says
    of a token: -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) + beta * KL(policy, ref)

    N   rows of a batch                     n   rows of the current step or micro-batch
    G   completions of a prompt             T   tokens in the longest completion
"""
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.processes import shard
from judge.rewards import all_equal
from rollout import (
    Rollout, completion_entropies, completion_logprobs, completion_states, concatenate)

# ------------------------------------------------------------------------------------------------
# a batch


@dataclass
class Batch:
    """What an iteration learns from, the rows of a prompt side by side. A completion has sampled
    tokens (rollout.sampled_mask) and environment tokens, which the policy did not choose."""
    rollout: Rollout
    advantages: Tensor = None   # (N,), with a critic (N, T)
    loss_mask: Tensor = None    # (N, T) tokens that carry loss: a subset of sampled_mask
    policy_mask: Tensor = None  # (N, T) of these, those with a policy gradient: all or some
    ref_logp: Tensor = None     # (N, T) None at beta 0
    returns: Tensor = None      # (N, T) regression targets of a critic
    row_weights: Tensor = None  # (N,) factors on the rows' policy losses: 1, or by influence
    prompts: list = None        # N of data.prompts.Prompt; from here on not for the loss
    completions: list = None    # N texts
    scores: Tensor = None       # (N, K) by each reward function, float64 on the CPU
    rewards: Tensor = None      # (N,) their weighted sum, likewise
    kl: Tensor = None           # (N, T) with the KL in the reward, not yet times beta; or 0
    influence: Tensor = None    # (N,) NaN where it is not known
    rounds: list = None         # how many groups were sampled in each round
    replaced: list = None       # Batches of the groups that others have replaced
    age: Tensor = None          # (N,) iterations since they were sampled: above 0 where replayed

    def __post_init__(self):
        if self.age is None:
            self.age = torch.zeros_like(self.rollout.ended, dtype=torch.long)

    def __getitem__(self, rows):
        """What the loss needs of these rows: without prompts, texts and rewards."""
        names = ("rollout", "advantages", "loss_mask", "policy_mask", "ref_logp", "returns",
                 "row_weights", "kl", "age")
        known = [name for name in names if getattr(self, name) is not None]
        return Batch(**{name: getattr(self, name)[rows] for name in known})

    def where(self, mask):
        """What is known of some rows, mask (N,), before there are advantages."""
        return Batch(
            self.rollout[mask], prompts=[*itertools.compress(self.prompts, mask)],
            completions=[*itertools.compress(self.completions, mask)], scores=self.scores[mask],
            rewards=self.rewards[mask], age=self.age[mask])

    @staticmethod
    def joined(batches):
        """The rows of several, before there are advantages."""
        return Batch(
            concatenate([b.rollout for b in batches]),
            prompts=sum((b.prompts for b in batches), []),
            completions=sum((b.completions for b in batches), []),
            scores=torch.cat([b.scores for b in batches]),
            rewards=torch.cat([b.rewards for b in batches]),
            age=torch.cat([b.age for b in batches]))

    @property
    def is_replayed(self):
        """Whether some rows are of earlier iterations, by a policy that has changed since."""
        return bool(self.age.any())

    @property
    def fresh(self):
        """The rows that this iteration has sampled."""
        return self.where((self.age == 0).cpu()) if self.is_replayed else self

    @property
    def everything(self):
        """All that this iteration has sampled: its rows, and behind them those that others have
        replaced."""
        if not self.replaced:
            return self.fresh
        # `allowed` is large, and nobody asks for it here
        parts = [replace(b, rollout=replace(b.rollout, allowed=None))
                 for b in (self.fresh, *self.replaced)]
        return Batch.joined(parts)

    @property
    def row_advantages(self):
        """(N,): with a critic the mean over the row's sampled tokens; it is 0 elsewhere."""
        if self.advantages.dim() == 1:
            return self.advantages
        return self.advantages.sum(1) / self.rollout.sampled_mask.sum(1).clamp(min=1)

    def equal_rows(self, num_generations):
        """(N,) True where the rewards of the row's group are all equal: it teaches nothing. A KL
        penalty in the reward is ignored here: it differs by noise alone."""
        equal = all_equal(self.rewards.view(-1, num_generations))
        return equal.repeat_interleave(num_generations)


# ------------------------------------------------------------------------------------------------
# a step, and the parts of its loss


class Step(NamedTuple):
    """An optimizer step: its rows of the batch, and the divisors of its loss. They count the whole
    mini-batch, so that the losses of some of its rows simply add up, and so that a row which
    influence has dropped makes the others no heavier."""
    epoch: int
    rows: Tensor        # (n,) those that are computed
    num_rows: int       # of the mini-batch
    num_tokens: int     # with loss, likewise


ZERO = torch.tensor(0.0)


@dataclass
class Loss:
    """The loss of some rows: the sum of its parts, () each, with gradient."""
    policy: Tensor              # what influence scores and reweights; the rest uses every row
    kl: Tensor = ZERO           # beta * KL, if kl_in = "loss"
    entropy: Tensor = ZERO      # -entropy_coef * entropy
    critic: Tensor = ZERO       # value_coef * error
    logp: Tensor = None         # (n, T) with gradient; from here on for influence, metrics
    ratio: Tensor = None        # (n, T), or (n, 1) at sequence level
    kl_by_token: Tensor = None  # (n, T) times the token's ratio, or None
    batch: Batch = None         # of these rows

    @property
    def rest(self):             # zero unless cfg.has_rest
        return self.kl + self.entropy + self.critic

    @property
    def total(self):
        return self.policy + self.rest


# ------------------------------------------------------------------------------------------------
# each token: how much likelier is it now, what is gained, how far is it from the reference?


# The largest log-ratio that is exponentiated. No clip is near exp(20), 5e8. Above 88 float32
# overflows, and the gradient would be inf * 0, NaN, where a clip or an advantage of 0 takes the
# token out
LARGEST_LOG_RATIO = 20.0


def bounded(log_ratio):
    """log_ratio, or LARGEST_LOG_RATIO where that is less. Its own slope stays 1 everywhere, so that
    a token beyond the bound still has a gradient."""
    return log_ratio - (log_ratio - LARGEST_LOG_RATIO).clamp(min=0).detach()


def kl_estimate(logp, ref_logp, estimator):
    """Per-token estimates of KL(policy, reference) from tokens of the policy (Schulman 2020)."""
    d = ref_logp - logp
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(bounded(d)) - d      # k3: never negative, and as unbiased as k1


def clipped_objective(ratio, logp, advantages, cfg):
    """What the policy maximises, for each token (n, T) or sequence (n, 1).

    grpo, bnpo, dr_grpo, dapo   min(min(ratio, delta) A, clamp(ratio, low, high) A)
    cispo                       stop_gradient(min(ratio, high)) A logp
    sapo                        4 / tau sigmoid(tau (ratio - 1)) A, tau by the sign of A

    At ratio 1 the gradient of each of these is A times that of logp. A new one must keep this:
    tracin.Recording builds on it where A is one number for a row.
    """
    A = advantages.view(len(advantages), -1)                            # (n, 1), or (n, T)
    low, high = cfg.clip_range      # 1 - epsilon, 1 + epsilon_high; cispo: high = epsilon_high
    if cfg.loss_type == "cispo":    # clip the weight of a token, never its gradient
        return ratio.clamp(max=high).detach() * A * logp
    if cfg.loss_type == "sapo":     # a soft clip, which may be another one for pushing down
        tau = torch.full_like(A, cfg.sapo_temperature_neg)
        tau = tau.masked_fill(A > 0, cfg.sapo_temperature_pos)
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
    # the smaller of the two: nothing is gained by a ratio beyond the clip. Only delta, if there is
    # one, bounds what a bad token can cost
    capped = ratio.clamp(0, cfg.delta)      # delta None: no ceiling
    return torch.min(capped * A, ratio.clamp(low, high) * A)


# ------------------------------------------------------------------------------------------------
# a step


def aggregate(x, mask, step, cfg):
    """Sum of x (n, T) or (n, 1) over the tokens with loss, divided by what loss_type says:

    grpo, sapo   the tokens of the row, then the rows of the step
    dr_grpo      the rows of the step * max_completion_length
    bnpo         the tokens of these rows: the one type that depends on micro-batches
    dapo, cispo  the tokens of the step

    A new loss_type is named in run/settings.py and added here and in clipped_objective: what is not
    named there has the plain clip and dapo's divisor. What it clips is counted in run/metrics.py.
    """
    x = x * mask
    if cfg.loss_type in ("grpo", "sapo"):
        row_tokens = mask.sum(1).clamp(min=1)                                       # (n,)
        return (x.sum(1) / row_tokens).sum() / step.num_rows
    if cfg.loss_type == "dr_grpo":
        return x.sum() / (step.num_rows * cfg.max_completion_length)
    if cfg.loss_type == "bnpo":
        share = len(x) / step.num_rows
        return x.sum() / mask.sum().clamp(min=1) * share
    return x.sum() / max(step.num_tokens, 1)        # dapo, cispo


def grpo_loss(logp, b, step, cfg):
    """The policy's loss and the KL -> Loss. b: the rows of a Batch. logp (n, T): their log-probs,
    with gradient."""
    # outside the mask both log-probs become 0, so the ratio there is exp(0) = 1 and never NaN
    mask = b.loss_mask
    unmasked_logp = logp        # influence asks for the gradient of this one
    logp = logp.masked_fill(~mask, 0)
    old_logp = b.rollout.logp.masked_fill(~mask, 0)

    # how much likelier is each token now than when it was sampled? 1 before the first step
    log_ratio = logp - old_logp
    token_ratio = bounded(log_ratio).exp()                              # (n, T)
    ratio = token_ratio
    if cfg.importance_sampling_level == "sequence":
        # GSPO (Zheng et al. 2025): one ratio for all tokens of a row, their geometric mean
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ratio = bounded(log_ratio).exp()                                # (n, 1)

    # push tokens of better completions up and of worse ones down, but only as far as the clip.
    # Tokens outside policy_mask get no push, but count in a sequence's ratio, the KL and the
    # divisors. Influence may have weighed the rows; else every weight is 1
    objective = clipped_objective(ratio, logp, b.advantages, cfg) * b.policy_mask   # (n, T)
    policy = aggregate(-objective * b.row_weights[:, None], mask, step, cfg)
    loss = Loss(policy, logp=unmasked_logp, ratio=ratio.detach(), batch=b)

    # and stay near the reference. The tokens are the sampler's, so each counts by its own ratio, at
    # sequence level too: value and gradient are then those of the KL (DeepSeek-V3.2, 2025)
    if cfg.kl_in_loss:
        kl = kl_estimate(logp, b.ref_logp.masked_fill(~mask, 0), cfg.kl_estimator)  # (n, T)
        corrected = kl * token_ratio                                                # (n, T)
        loss.kl_by_token = corrected.detach()
        loss.kl = cfg.beta * aggregate(corrected if cfg.corrects_kl else kl, mask, step, cfg)
    return loss


def loss_of(setup, policy, batch, rows, step, cfg):
    """Log-probs of some rows of a batch, then their Loss."""
    # one forward pass: the hidden states that predict each sampled token, then their log-probs
    b = batch[rows]
    with setup.autocast():
        states = completion_states(policy, b.rollout)
        logp = completion_logprobs(policy, b.rollout, cfg.temperature, states)      # (n, T)
        if cfg.entropy_coef:
            entropies = completion_entropies(policy, b.rollout, cfg.temperature, states)
    loss = grpo_loss(logp, b, step, cfg)

    # a bonus for being unsure: the mean over the tokens of the step, whatever loss_type says
    if cfg.entropy_coef:
        total = entropies.masked_fill(~b.loss_mask, 0).sum()
        loss.entropy = -cfg.entropy_coef * total / max(step.num_tokens, 1)

    # PPO: the critic learns to expect the returns
    if cfg.critic:
        from extras.critic import value_errors
        errors = value_errors(policy, b.rollout, b.returns, states, cfg.value_clip)     # (n, T)
        loss.critic = cfg.value_coef * aggregate(errors, b.loss_mask, step, cfg)
    return loss


def micro_batches(rollout, rows, cfg):
    """This process's share of some rows (n,), in pieces of micro_batch_size; () if it has none."""
    mine = rows[shard(len(rows))]
    # rows of similar length share a piece, which saves padding. The order changes no result but
    # bnpo's, which divides by the tokens of a piece: its rows stay as they are
    if cfg.loss_type != "bnpo":
        lengths = rollout.completion_mask[mine].sum(1)                              # (n,)
        mine = mine[lengths.argsort(stable=True)]
    return mine.split(cfg.micro_batch_size) if len(mine) else ()


def losses(setup, policy, batch, step, cfg, recording=None):
    """The Loss of a step, micro-batch by micro-batch, each with its rows. Run its backward before
    taking the next, so that only one is in memory; their gradients add up in .grad.

    policy: setup.policy_fn, which may be compiled, for a plain step; setup.policy for a recording
    of tracin.py, since the tape hooks its layers.
    """
    for rows in micro_batches(batch.rollout, step.rows, cfg):
        if recording:
            recording.begin(rows)
        yield loss_of(setup, policy, batch, rows, step, cfg), rows
