"""
PPO's critic: it estimates, before every token, the reward that is still to come.

With `critic = True` a value head on the policy's last hidden states makes this estimate, and
generalised advantage estimation (Schulman et al. 2016) turns it into an advantage for each token.
The values are trained by a separate loss.

In the order of an iteration: values, advantages and returns, loss. Shapes: N rows of T tokens, n
rows of a micro-batch, M sampled tokens of several rows, C channels. `sampled` (N, T) is True on the
tokens that the policy drew, which are the steps of an episode. An environment's tokens are skipped.
"""
import math

import torch
from torch import nn

from loss import aggregate

# ------------------------------------------------------------------------------------------------
# values


class ValueHead(nn.Module):
    """Hidden states (..., C) -> values (...), 0 at first, in float32 even under autocast."""

    def __init__(self, C):
        super().__init__()
        self.linear = nn.Linear(C, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h):
        with torch.autocast(h.device.type, enabled=False):
            return self.linear(h.to(self.linear.weight.dtype))[..., 0].float()


# ------------------------------------------------------------------------------------------------
# advantages and returns


def token_advantages(rollout, rewards, penalty, cfg):
    """Advantages (N, T), and returns (N, T), which the values learn to predict.

    rewards (N,): one per completion, given at its last sampled token. penalty (N, T): subtracted
    token by token. A row whose reward is NaN teaches nothing: its advantages are 0, its returns
    NaN.
    """
    values = rollout.values
    sampled = rollout.sampled_mask
    rewards = (rewards - rewards.nanmean()).to(values)      # the values start at 0, near their mean
    last = sampled & (sampled.cumsum(1) == sampled.sum(1, keepdim=True))            # (N, T)
    by_token = torch.where(last, rewards[:, None], 0.0) - penalty
    advantages = gae(by_token, values, sampled, cfg.gae_gamma, cfg.gae_lambda)
    returns = advantages + values
    known = sampled & ~rewards.isnan()[:, None]
    if cfg.whiten_advantages:
        advantages = whiten(advantages, known)
    return advantages.masked_fill(~known, 0), returns


def advantage(batch, cfg):
    """Of a loss.Batch: its advantages (N, T). Sets batch.returns (N, T)."""
    penalty = cfg.beta * batch.kl           # 0 unless kl_in = "reward"
    advantages, batch.returns = token_advantages(batch.rollout, batch.rewards, penalty, cfg)
    return advantages


def gae(rewards, values, sampled, gamma=1.0, lam=0.95):
    """Advantages (N, T) of the sampled tokens, 0 elsewhere, from rewards and values (N, T):

        A_t = delta_t + gamma lam A_t'          delta_t = r_t + gamma V_t' - V_t

    with t' the next sampled token of the row; after the last one A and V are 0. With lam = 1, A_t
    is the sum of future rewards minus V_t, without bias; with lam = 0 it is delta_t, with the least
    variance.
    """
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])                    # (N,)
    for t in reversed(range(values.shape[1])):
        here = sampled[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = next_advantage * here
    return advantages


def whiten(x, mask):
    """x (N, T) with mean 0 and variance 1 over the mask; NaN elsewhere."""
    x = x.masked_fill(~mask, math.nan)
    x = x - x.nanmean()
    variance = x.square().nansum() / (mask.sum() - 1).clamp(min=1)
    return x * torch.rsqrt(variance + 1e-8)


# ------------------------------------------------------------------------------------------------
# loss


def value_errors(policy, rollout, returns, states, clip=None):
    """value_loss (n, T) of a rollout's sampled tokens; 0 elsewhere. returns (n, T). states: from
    rollout.completion_states, shared with the log-probs."""
    where = states.where
    values = policy.value_head(states.h)                                            # (M,)
    errors = value_loss(values, rollout.values[where], returns[where], clip)        # (M,)
    return torch.zeros(returns.shape, device=returns.device).index_put(where, errors)


def critic_loss(policy, b, states, step, cfg):
    """The critic's part () of the loss of some rows of a batch: value_coef * error."""
    errors = value_errors(policy, b.rollout, b.returns, states, cfg.value_clip)     # (n, T)
    return cfg.value_coef * aggregate(errors, b.loss_mask, step, cfg)


def value_loss(values, old_values, returns, clip=None):
    """Half the squared error (M,) of each value; 0 where the return is NaN.

    With clip, the larger of two errors counts: the value's own, and the error it has when clamped
    to within clip of the value recorded while sampling.
    """
    unknown = returns.isnan()
    loss = (values - returns).masked_fill(unknown, 0).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        clipped_loss = (near - returns).masked_fill(unknown, 0).square()
        loss = torch.maximum(loss, clipped_loss)
    return loss / 2


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns) over M tokens: 1 is a perfect critic, 0 is as good
    as a constant, below 0 is worse than a constant. NaN if all returns are equal."""
    if len(returns) < 2 or returns.min() == returns.max():
        return math.nan
    return 1 - float((returns - values).var() / returns.var())
