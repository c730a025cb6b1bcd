"""How long the kept gradient is, beside the core's `all`: as it comes."""
import torch

from tape import inner


def norm(recording, weights):
    """Factor () that rescales the kept rollouts' gradient to the length that all of them have."""
    everyone = recording.policy_gradient(torch.ones_like(weights))
    kept = recording.policy_gradient(weights)
    squares = inner(everyone, everyone) / inner(kept, kept)
    return squares.sqrt().nan_to_num(1.0, posinf=1.0).to(weights)
