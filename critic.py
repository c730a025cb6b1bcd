"""
The critic of PPO: what a completion is still worth, estimated at every token.

GRPO compares a completion with others of its prompt. With `critic = True` a token is compared with
what was expected before it: a value head on the policy's last hidden states predicts the rest of
the reward, and generalised advantage estimation (Schulman et al. 2016) makes an advantage of each
token from these predictions. The loss of the policy stays as it is; that of the values (Schulman et
al. 2017) is added.

In the order of an iteration: values, rewards by token, advantages and returns, the loss. This file
needs nothing but torch. Shapes: N rows of T tokens, n rows of a micro-batch, M chosen tokens of
several rows, C channels. `chosen` (N, T) is True on the tokens that the policy drew: they are the
steps of an episode. Tokens that were forced between them are none, and are skipped.
"""
import math

import torch
from torch import nn

# ------------------------------------------------------------------------------------------------
# values


class ValueHead(nn.Module):
    """Hidden states (..., C) -> values (...), 0 at first, in float32 also under autocast."""

    def __init__(self, C):
        super().__init__()
        self.linear = nn.Linear(C, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h):
        with torch.autocast(h.device.type, enabled=False):
            return self.linear(h.to(self.linear.weight.dtype))[..., 0].float()


def values_after(policy, rollout, size):
    """Values (N,) after the last token of completions that were cut; 0 where an end token ended
    them. Runs a forward pass of the rows that were cut, `size` at a time."""
    values = torch.zeros(len(rollout.ended), device=rollout.ended.device)
    P = rollout.attention_mask.shape[1] - rollout.mask.shape[1]
    last = P + rollout.mask.sum(1) - 1                                  # (N,) column in tokens
    cut = (~rollout.ended).nonzero()[:, 0]
    for rows in cut.split(size) if len(cut) else ():
        h = policy(rollout.tokens[rows], rollout.attention_mask[rows])              # (n, P + T, C)
        number = torch.arange(len(rows), device=h.device)
        values[rows] = policy.value_head(h[number, last[rows]])
    return values


# ------------------------------------------------------------------------------------------------
# advantages and returns


def token_advantages(rollout, rewards, penalty, cfg):
    """Advantages (N, T) and returns (N, T), the numbers that the values are to become.

    rewards (N,): of completions. penalty (N, T): to be taken off token by token (or 0.0). A row
    whose reward is NaN teaches nothing: its advantages are 0, its returns NaN.
    """
    values = rollout.values
    chosen = rollout.chosen
    rewards = rewards.to(values.device)
    if cfg.center_rewards:
        rewards = rewards - rewards.nanmean()
    if rollout.value_after is not None:     # what a completion that was cut might still have got
        rewards = rewards + cfg.gae_gamma * rollout.value_after
    by_token = token_rewards(rewards, penalty, chosen)
    advantages = gae(by_token, values, chosen, cfg.gae_gamma, cfg.gae_lambda)
    returns = advantages + values
    known = chosen & ~rewards.isnan()[:, None]
    if cfg.whiten_advantages:
        advantages = whiten(advantages, known)
    return advantages.masked_fill(~known, 0), returns


def token_rewards(rewards, penalty, chosen):
    """(N, T): the reward (N,) of a completion at its last chosen token, less the penalty (N, T)."""
    last = chosen & (chosen.cumsum(1) == chosen.sum(1, keepdim=True))
    return torch.where(last, rewards[:, None], 0.0) - penalty


def gae(rewards, values, chosen, gamma=1.0, lam=0.95):
    """Advantages (N, T) of the chosen tokens, elsewhere 0, of rewards and values (N, T):

        A_t = delta_t + gamma lam A_t'          delta_t = r_t + gamma V_t' - V_t

    with t' the next chosen token of the row; after the last one A and V are 0. lam = 1: the sum of
    rewards to come less V_t, without bias; lam = 0: delta_t, with the least variance.
    """
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])                    # (N,)
    for t in reversed(range(values.shape[1])):
        here = chosen[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = next_advantage * here
    return advantages


def whiten(x, mask):
    """x (N, T) with mean 0 and variance 1 over the mask."""
    count = mask.sum()
    mean = torch.where(mask, x, 0.0).sum() / count.clamp(min=1)
    squares = torch.where(mask, x - mean, 0.0).square().sum()
    variance = squares / (count - 1).clamp(min=1)
    return (x - mean) * torch.rsqrt(variance + 1e-8)


# ------------------------------------------------------------------------------------------------
# loss


def value_errors(policy, rollout, returns, states, clip=None):
    """value_loss (n, T) of a rollout's chosen tokens; elsewhere 0. states: of
    model.completion_states, the ones that the log-probs are made of."""
    h, _, _, where = states
    errors = value_loss(policy.value_head(h), rollout.values[where], returns[where], clip)  # (M,)
    return torch.zeros(rollout.mask.shape, device=h.device).index_put(where, errors)


def value_loss(values, old_values, returns, clip=None):
    """Half the squared error of each value (M,); 0 where the return is NaN.

    With clip a value gets no further than that from the one recorded while sampling: of the errors
    of both, the larger counts, as in the policy's loss.
    """
    unknown = returns.isnan()
    loss = (values - returns).masked_fill(unknown, 0).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        clipped_loss = (near - returns).masked_fill(unknown, 0).square()
        loss = torch.maximum(loss, clipped_loss)
    return loss / 2


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns) of some tokens (M,): 1 is a perfect critic, 0 is as
    good as a constant, below 0 is worse than that. NaN if all returns are equal."""
    if len(returns) < 2 or returns.min() == returns.max():
        return math.nan
    return 1 - float((returns - values).var() / returns.var())
