"""
The vocabulary head with its backward in its forward.

Plainly, logits that are too many to be kept are computed twice: for the log-probs, and again in the
backward. Where the loss of a token depends on no other token's log-prob, the gradient of each
log-prob is known as soon as the log-prob is. So each piece of logits gives log-probs and gradients
at once and is gone: three matrix products in place of four. `"head" not in cfg.speed` turns this
off.
"""
import math

import torch

from model import (completion_logprobs, completion_states, piece_size, product_dtype,
                   token_logprobs)
from run.head import operand


def fused_logprobs(model, rollout, temperature, backward_from=None, states=None, size=None):
    """model.completion_logprobs for a caller who will call backward on backward_from(logp (N, T)).

    It is the plain function without backward_from, without gradients, and where logits are few: at
    most those of `size` tokens (None: model.piece_size).
    """
    if backward_from is None or not torch.is_grad_enabled():
        return completion_logprobs(model, rollout, temperature, states=states)
    h, targets, allowed, where = states or completion_states(model, rollout)
    row, column = where                                                             # (M,) each

    def slopes_of(logp, i, j):
        """Gradient (j - i,) of the loss with respect to the log-probs of tokens i .. j - 1."""
        here = row[i:j], column[i:j]
        all_logp = rollout.logp.index_put(here, logp)   # what the other tokens have does not matter
        with torch.enable_grad():
            all_logp.requires_grad_()
            slopes, = torch.autograd.grad(backward_from(all_logp), all_logp)              # (N, T)
        return slopes[here]

    size = size or piece_size(model.lm_head, h)
    head = model.lm_head
    if len(h) <= size:
        logp = token_logprobs(head, h, targets, temperature, allowed)
    else:
        logp = FusedHead.apply(h, head.weight, head, targets, temperature, allowed, size, slopes_of)
    return torch.zeros(rollout.mask.shape, device=h.device).index_put(where, logp)  # (N, T)


class FusedHead(torch.autograd.Function):
    """Log-probs (M,) of targets (M,) after hidden states h (M, C), `size` of them at a time."""

    @staticmethod
    def forward(ctx, h, weight, lm_head, targets, temperature, allowed, size, slopes_of):
        logp = h.new_empty(len(h), dtype=torch.float32)
        slopes = h.new_empty(len(h), dtype=torch.float32)
        dh = torch.empty_like(h)
        dw = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        dtype = product_dtype(h)
        w = operand(lm_head.product, weight, dtype)     # (V, C), or padded in V
        V = len(weight)
        for i in range(0, len(h), size):
            j = min(i + size, len(h))
            logits = lm_head.product(h[i:j], w)[:, :V].float()                      # (m, V)
            logits /= temperature       # in place: this is the largest tensor of the update
            if allowed is not None:
                logits.masked_fill_(~allowed[i:j], -math.inf)
            logits -= logits.logsumexp(-1, keepdim=True)
            target = targets[i:j, None]                                             # (m, 1)
            logp[i:j] = logits.gather(1, target)[:, 0]
            slopes[i:j] = slope = slopes_of(logp[i:j], i, j)                        # (m,)
            # gradient of the logits: slope * (1[target] - probability) / temperature
            per_logit = slope[:, None] / temperature
            d = logits.exp_().mul_(-per_logit)
            d.scatter_add_(1, target, per_logit)
            d = operand(lm_head.product, d, dtype, dim=1)                           # like w in V
            dh[i:j] = d @ w
            if dw is not None:
                dw += (d.T @ h[i:j].to(dtype))[:V]
            del logits, d               # before the next piece
        ctx.save_for_backward(dh, dw, slopes)
        return logp

    @staticmethod
    def backward(ctx, gradient):
        dh, dw, slopes = ctx.saved_tensors
        # NaN is left for the update to report
        if not torch.allclose(gradient, slopes, rtol=1e-4, atol=1e-12, equal_nan=True):
            raise ValueError("backward_from is not what backward was called on, or a token's "
                             "loss depends on other tokens: set speed without 'head'")
        return dh, dw, None, None, None, None, None, None
