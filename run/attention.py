"""
Attention written out, for CPUs, where torch's own kernel is slow: for one query position, and in
bfloat16 for short rows, where it takes two (forward) to five times (with backward) as long. On a
GPU the queries that share keys stand side by side, if they have one position: no key is repeated.
`"attention" not in cfg.speed` turns this file off.
"""
import math

import torch

from model import Attention, attend
from run.script import BadInput


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


def check_equal():
    """BadInput unless the two compute the same: somebody may have changed only one."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=generator, dtype=torch.float32)
    cases = (torch.float32, 1, False, 1e-5), (torch.bfloat16, 5, True, 0.1)
    for dtype, T, causal, bound in cases:
        given = (q[:, :, :T].to(dtype), k.to(dtype), v.to(dtype), None, causal, None)
        gap = (attend_by_hand(*given) - attend(*given)).abs().max()
        if not gap < bound:
            raise BadInput("speed: run/attention.py computes something else than attend in "
                           "model.py; change both, or leave 'attention' out")


def use_attention_by_hand(*models):
    """Every attention layer of these models computes by hand where that is faster. Judges hold
    their model in an attribute, if they have one at all."""
    check_equal()
    for model in models:
        model = getattr(model, "model", model)
        if isinstance(model, torch.nn.Module):
            for module in model.modules():
                if isinstance(module, Attention):
                    module.attend = attend_by_hand
