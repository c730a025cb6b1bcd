"""
The loss of GRPO: what a batch is, and the loss of some of its rows. grpo.py steps along its
gradient, tracin.py takes that gradient apart.

    loss = losses of the tokens, added up and divided by their number
    of a token: -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) + beta * KL(policy, ref)

cfg.call("divide", by_tokens, ...) calls a hook: the config file's function `divide`, or what a
setting of an extra puts there, else by_tokens; each with the arguments that it names.

    N   rows of a batch                     n   rows of the current step or micro-batch
    G   completions of a prompt             T   tokens in the longest completion
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.hooks import shaped
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
    # sampled and scored
    rollout: Rollout
    prompts: list = None        # N of data.prompts.Prompt
    completions: list = None    # N texts
    scores: Tensor = None       # (N, K) by each reward function, float64 on the CPU
    rewards: Tensor = None      # (N,) their weighted sum, likewise
    age: Tensor = None          # (N,) iterations since they were sampled: above 0 where replayed
    rounds: list = None         # how many groups were sampled in each round
    replaced: list = None       # Batches of the groups that resampling has replaced

    # made by grpo.add_advantages, for the loss
    ref_logp: Tensor = None     # (N, T) None at beta 0
    kl: Tensor = None           # (N, T) with the KL in the reward, not yet times beta; else 0
    advantages: Tensor = None   # (N,), with a critic (N, T)
    returns: Tensor = None      # (N, T) regression targets of a critic
    loss_mask: Tensor = None    # (N, T) tokens that carry loss: a subset of sampled_mask
    policy_mask: Tensor = None  # (N, T) of these, the ones with a policy gradient: all or some
    row_weights: Tensor = None  # (N,) factors on the rows' policy losses: 1, or by influence
    influence: Tensor = None    # (N,) for the log; NaN where unknown

    def __post_init__(self):
        if self.age is None and self.rollout is not None:
            self.age = torch.zeros_like(self.rollout.ended, dtype=torch.long)

    def __getitem__(self, rows):
        """These rows for the loss: its tensors, without prompts, texts and rewards."""
        names = ("rollout", "age", "ref_logp", "kl", "advantages", "returns", "loss_mask",
                 "policy_mask", "row_weights")
        return Batch(**{name: x[rows] for name, x in vars(self).items()
                        if name in names and x is not None})

    def subset(self, rows):
        """The same with prompts, texts, scores and rewards. rows: indices (m,), or a mask (N,)."""
        places = torch.arange(len(self.prompts))[rows.cpu()]
        rows = places.to(rows.device)       # one transfer: each tensor indexed by a mask is a wait
        places = places.tolist()
        return replace(
            self[rows], prompts=[self.prompts[i] for i in places],
            completions=[self.completions[i] for i in places],
            scores=self.scores[places], rewards=self.rewards[places])

    @staticmethod
    def joined(batches):
        """The rows of several Batches as they were sampled and scored, without advantages."""
        return Batch(
            concatenate([b.rollout for b in batches]),
            prompts=sum((b.prompts for b in batches), []),
            completions=sum((b.completions for b in batches), []),
            scores=torch.cat([b.scores for b in batches]),
            rewards=torch.cat([b.rewards for b in batches]),
            age=torch.cat([b.age for b in batches]))

    @property
    def is_replayed(self):
        """Whether some rows come from earlier iterations: the policy has changed since."""
        return bool(self.age.any())

    @property
    def fresh(self):
        """The rows that this iteration has sampled."""
        return self.subset(self.age == 0) if self.is_replayed else self

    @property
    def everything(self):
        """All rows that this iteration has sampled; the ones that resampling has replaced come
        last."""
        if not self.replaced:
            return self.fresh
        # without `allowed`, which is large and not needed for this
        return Batch.joined([replace(b, rollout=replace(b.rollout, allowed=None))
                             for b in (self.fresh, *self.replaced)])

    @property
    def row_advantages(self):
        """One advantage per row (N,): with a critic, the mean over its sampled tokens."""
        if self.advantages.dim() == 1:
            return self.advantages
        return self.advantages.sum(1) / self.rollout.sampled_mask.sum(1).clamp(min=1)

    def equal_rows(self, num_generations):
        """(N,) True where the rewards of the row's group are all equal: it teaches nothing. A KL in
        the reward is ignored, since it differs by noise alone."""
        equal = all_equal(self.rewards.view(-1, num_generations))
        return equal.repeat_interleave(num_generations)


# ------------------------------------------------------------------------------------------------
# a step, and the parts of its loss


class Step(NamedTuple):
    """An optimizer step: its rows of the batch, and the divisors of its loss. The divisors count
    the whole mini-batch. So micro-batches add up to it, and dropping a row does not raise the
    weight of the others."""
    epoch: int
    rows: Tensor        # (n,) computed in this step
    num_rows: int       # in the mini-batch
    num_tokens: int     # with loss, in the mini-batch


ZERO = torch.tensor(0.0)


@dataclass
class Loss:
    """The loss of some rows: the sum of its parts, each a scalar () with gradient."""
    policy: Tensor              # what influence scores and reweights; the rest uses every row
    kl: Tensor = ZERO           # already times beta; 0 unless kl_in = "loss"
    entropy: Tensor = ZERO      # -entropy_coef * entropy
    critic: Tensor = ZERO       # of extras/critic

    # for influence and metrics
    logp: Tensor = None         # (n, T) with gradient
    ratio: Tensor = None        # (n, T), or (n, 1) at sequence level
    kl_by_token: Tensor = None  # (n, T) times the token's ratio, or None
    batch: Batch = None         # these rows

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
    """log_ratio, at most LARGEST_LOG_RATIO. The bound changes the value only: the slope stays 1
    beyond it, where clamp would make it 0, so that such a token keeps a gradient."""
    return log_ratio - (log_ratio - LARGEST_LOG_RATIO).clamp(min=0).detach()


def k3(d):
    return torch.expm1(bounded(d)) - d      # never negative, and unbiased


def kl_estimate(logp, ref_logp, cfg):
    """Per-token estimate of KL(policy, reference) from tokens of the policy: k3 (Schulman 2020), or
    one of extras/variants/kl_estimator.py."""
    return cfg.call("kl_estimator", k3, d=ref_logp - logp)


def times_ratio(kl, ratio):
    """The KL of a token, weighed by how much likelier it is now than when it was sampled: mean and
    gradient are then those of the policy's KL (DeepSeek-V3.2, 2025)."""
    return kl * ratio


def clipped_objective(ratio, A, cfg):
    """What the policy maximises, for each token: min(ratio A, clamp(ratio, low, high) A). ratio (n,
    T) or (n, 1), A (n, 1) or (n, T).

    At ratio 1 its gradient is A times the gradient of logp: tracin.record builds on it where A is
    one number for a row.
    """
    # the smaller of the two: nothing is gained by a ratio beyond the clip
    low, high = cfg.clip_range
    return torch.min(ratio * A, ratio.clamp(low, high) * A)


def clipped(ratio, A, cfg):
    """The tokens that clipped_objective holds back, where the advantage pushes a ratio further out
    -> {metric: (n, T) True there}."""
    low_bound, high_bound = cfg.clip_range
    low = (ratio < low_bound) & (A < 0)
    high = (ratio > high_bound) & (A > 0)
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high}


clipped_objective.clipped = clipped     # each objective brings its own clip metrics


# ------------------------------------------------------------------------------------------------
# a step


def by_tokens(x, num_tokens):
    """The sum of x (n, T), divided by the tokens of the step: (). A token counts the same, whatever
    row it stands in (DAPO)."""
    return x.sum() / max(num_tokens, 1)


def aggregate(x, mask, step, cfg):
    """x (n, T) or (n, 1), summed over the tokens with loss and divided: ()."""
    total = cfg.call("divide", by_tokens, x=x * mask, mask=mask, num_rows=step.num_rows,
                     num_tokens=step.num_tokens, cfg=cfg)
    return shaped("divide", total, ())


def by_micro_batch(cfg):
    """Whether a micro-batch has a divisor of its own, so that it matters which rows are in it."""
    return getattr(cfg.hook("divide"), "by_micro_batch", False)


def grpo_loss(logp, b, step, cfg):
    """The policy's loss and the KL -> Loss. b: rows of a Batch. logp (n, T): the log-probs of their
    tokens now, with gradient."""
    # outside the mask both log-probs become 0, so the ratio there is exp(0) = 1 and never NaN
    mask = b.loss_mask
    unmasked_logp = logp        # influence differentiates by the model's own output
    logp = logp.masked_fill(~mask, 0)
    old_logp = b.rollout.logp.masked_fill(~mask, 0)

    # how much likelier is each token now than when it was sampled? 1 before the first step
    log_ratio = logp - old_logp
    token_ratio = bounded(log_ratio).exp()                              # (n, T)
    ratio = token_ratio
    A = b.advantages.view(len(mask), -1)                                # (n, 1), or (n, T)
    if cfg.hook("importance"):                  # such as one for all tokens of a row, (n, 1)
        log = cfg.call("importance", log_ratio=log_ratio, mask=mask, A=A, cfg=cfg)
        ratio = bounded(shaped("importance", log, mask.shape, (len(mask), 1))).exp()

    # what is maximised: the clipped objective, or the one of a hook
    objective = cfg.call("objective", clipped_objective, ratio=ratio, logp=logp, A=A,
                         old_logp=old_logp, mask=mask, cfg=cfg)
    shaped("objective", objective, mask.shape, ratio.shape)             # (n, T) or (n, 1)

    # tokens outside policy_mask get no push, but count in a sequence's ratio, the KL and the
    # divisors. row_weights are 1 unless influence has set them
    objective = objective * b.policy_mask                               # (n, T)
    policy = aggregate(-objective * b.row_weights[:, None], mask, step, cfg)
    loss = Loss(policy, logp=unmasked_logp, ratio=ratio.detach(), batch=b)

    # and stay near the reference. The tokens were drawn by the sampler, so each is multiplied by
    # its own ratio, at sequence level too
    if cfg.kl_in_loss:
        kl = kl_estimate(logp, b.ref_logp.masked_fill(~mask, 0), cfg)               # (n, T)
        loss.kl_by_token = times_ratio(kl, token_ratio).detach()    # the log has this in any case
        kl = cfg.call("kl_correction", times_ratio, kl=kl, ratio=token_ratio)       # (n, T)
        loss.kl = cfg.beta * aggregate(kl, mask, step, cfg)
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

    # a bonus for being unsure: the mean over the tokens of the step, also with a different divisor
    if cfg.entropy_coef:
        total = entropies.masked_fill(~b.loss_mask, 0).sum()
        loss.entropy = -cfg.entropy_coef * total / max(step.num_tokens, 1)

    # PPO: a critic learns to expect the returns
    if cfg.hook("critic_loss"):
        loss.critic = cfg.call(
            "critic_loss", policy=policy, b=b, states=states, step=step, cfg=cfg)
    return loss


def micro_batches(rollout, rows, cfg):
    """Split this process's share of some rows (n,) into micro-batches; () if it has none."""
    mine = rows[shard(len(rows))]
    # rows of similar length go together, which saves padding. Where the loss is divided by the
    # tokens of a micro-batch it matters which these are: then rows keep their random order
    if not by_micro_batch(cfg):
        lengths = rollout.completion_mask[mine].sum(1)                              # (n,)
        mine = mine[lengths.argsort(stable=True)]
    return mine.split(cfg.micro_batch_size) if len(mine) else ()


def losses(setup, policy, batch, step, cfg):
    """(Loss, rows) of each micro-batch of a step. Run its backward before taking the next, so that
    only one is in memory; their gradients add up in .grad. policy: setup.policy, or what
    setup.fast makes of it."""
    for rows in micro_batches(batch.rollout, step.rows, cfg):
        yield loss_of(setup, policy, batch, rows, step, cfg), rows
