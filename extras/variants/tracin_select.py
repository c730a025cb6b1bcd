"""Which rollouts are kept, beside the core's `positive`, `all` and `weigh`: influence (n,) -> (n,)
True where a rollout is kept, and True if the fallback was used. Controls keep as many as `positive`
would."""
import torch

from tracin import largest, positive


def _count_of(influence):
    """How many rollouts `positive` would keep, and whether by its fallback."""
    keep, fallback = positive(influence)
    return int(keep.sum()), fallback


def drop(influence, cfg):
    """All but the worst tracin_fraction of the negative ones."""
    negative = int((influence < 0).sum())
    return largest(influence, len(influence) - round(cfg.tracin_fraction * negative)), False


def top(influence, cfg):
    """The best tracin_fraction, rounded to rollouts."""
    return largest(influence, round(cfg.tracin_fraction * len(influence))), False


def bottom(influence):
    """A control: the worst."""
    count, fallback = _count_of(influence)
    return largest(-influence, count), fallback


def random(influence, generator):
    """A control: any, also those without influence."""
    count, fallback = _count_of(influence)
    key = torch.randperm(len(influence), generator=generator).to(influence)
    return largest(key, count), fallback


def top_advantage(influence, batch, rows):
    """A control: the largest advantages, of either sign."""
    count, fallback = _count_of(influence)
    return largest(batch.row_advantages[rows].abs(), count), fallback


def top_reward(influence, batch, rows):
    """A control: the highest rewards."""
    count, fallback = _count_of(influence)
    rewards = batch.rewards.to(rows.device)[rows]
    return largest(rewards.nan_to_num(-torch.inf), count), fallback
