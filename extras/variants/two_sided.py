"""What delta adds to the plain clip."""
import torch

from loss import clipped


def objective(ratio, A, cfg):
    """min(min(ratio, delta) A, clamp(ratio, low, high) A): delta alone bounds what a bad token can
    cost."""
    low, high = cfg.clip_range
    return torch.min(ratio.clamp(0, cfg.delta) * A, ratio.clamp(low, high) * A)


objective.clipped = clipped
objective.one_slope = True      # influence takes its faster way (docs/hooks.md)
