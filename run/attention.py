"""
Attention written out, for CPUs, where torch's own kernel is slow: for one query position, and in
bfloat16 for short rows, where it takes two (forward) to five times (with backward) as long. On a
GPU the queries that share keys stand side by side, if they have one position: no key is repeated.
`"attention" not in cfg.speed` turns this file off.
"""
import math

import torch

from model import Attention, attend


def attend_by_hand(q, k, v, mask, causal, scale):
    """model.attend for q (B, nh, T, hs), k and v (B, nkv, S, hs). mask may be numbers to add."""
    B, nh, T, hs = q.shape
    nkv, S = k.shape[1:3]
    if q.is_cuda and T == 1 and not causal:
        q = q.reshape(B, nkv, -1, hs)
        return attend(q, k, v, mask, causal, scale).reshape(B, nh, T, hs)
    longest = 128 if q.dtype == torch.bfloat16 else 1
    if q.device.type != "cpu" or T > longest:
        return attend(q, k, v, mask, causal, scale)
    q = q.reshape(B, nkv, -1, hs)                                       # (B, nkv, nh / nkv * T, hs)
    if q.dtype == torch.bfloat16 and T == 1:
        scores = (k @ q.mT).mT                                          # k.mT would be copied
    else:
        scores = q @ k.mT
    wide = torch.promote_types(q.dtype, torch.float32)                  # the softmax in float32
    scores = scores.reshape(B, nh, T, S).to(wide) * (scale or hs ** -0.5)
    if causal:
        mask = torch.ones(T, S, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1).to(v.dtype)                            # (B, nh, T, S)
    return (weights.view(B, nkv, -1, S) @ v).view(B, nh, T, hs)


def cases(device):
    """[arguments of attend] that the two functions are compared on."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 16, 4, 32, 32, generator=generator, dtype=torch.float32).to(device)
    low = [x.bfloat16() for x in (q, k, v)]
    one = q[:, :, :1]
    seen = torch.rand(16, 1, 32, 32, generator=generator).to(device) < 0.7
    seen[..., 0] = True
    numbers = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)[:, :, :1]
    return [(one, k, v, seen[:, :, :1], False, None),
            (one, k[:, :2], v[:, :2], numbers, False, None),
            (*low, None, True, None), (*low, seen, False, None)]


def worst_gap(found, expected):
    """(largest difference, its bound) of the case that comes nearest to its bound."""
    in_float32 = 2e-2 if found[0].is_cuda else 1e-5     # TF32 may be on
    gaps = [float((x - y).abs().max()) for x, y in zip(found, expected)]
    if not all(map(math.isfinite, gaps)):
        return math.nan, in_float32
    return max(zip(gaps, (in_float32, in_float32, 0.1, 0.1)), key=lambda gap: gap[0] / gap[1])


def by_hand_on_cases(device):
    return [attend_by_hand(*given) for given in cases(device)]


def plain_on_cases(device):
    return [attend(*given) for given in cases(device)]


def agrees(device):
    """True if both compute the same there: somebody may have changed only one."""
    try:
        gap, bound = worst_gap(by_hand_on_cases(device), plain_on_cases(device))
    except Exception:   # of an edited one; run/prove.py says which
        return False
    return gap <= bound


def use_attention_by_hand(*models):
    """Every attention layer of these models computes by hand where that is faster. Judges hold
    their model in an attribute, if they have one at all. Where the two functions differ nothing is
    changed, which run/prove.py says."""
    for model in models:
        model = getattr(model, "model", model)
        if isinstance(model, torch.nn.Module) and agrees(next(model.parameters()).device):
            for module in model.modules():
                if isinstance(module, Attention):
                    module.attend = attend_by_hand
