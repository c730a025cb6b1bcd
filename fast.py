"""
Faster ways to the same numbers, up to rounding. You can follow the algorithm without reading this.

Shapes: M tokens, m in a piece, C channels, V = vocab_size. Attention: see model.py.
"""
import contextlib
import functools
import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# ------------------------------------------------------------------------------------------------
# products of bfloat16 numbers, summed in float32: on a GPU twice as fast as TF32


def product(a, b):
    """a @ b of bfloat16 matrices, in float32. Only on a GPU."""
    return torch.mm(a, b, out_dtype=torch.float32)


class HalfProduct(torch.autograd.Function):
    """h @ weight.T for h (M, C) and weight (V, C) -> (M, V) in float32; gradients likewise."""

    @staticmethod
    def forward(ctx, h, weight):
        h = h.bfloat16()
        weight = weight.bfloat16()
        ctx.save_for_backward(h, weight)
        return product(h, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        h, weight = ctx.saved_tensors
        grad = grad.bfloat16()
        needs_h, needs_weight = ctx.needs_input_grad
        of_h = product(grad, weight) if needs_h else None
        of_weight = product(grad.T, h) if needs_weight else None
        return of_h, of_weight


def half_product(h, weight):
    """h @ weight.T for h (..., C) and weight (V, C) -> (..., V): factors are rounded to bfloat16 as
    under autocast, but the sums stay in float32."""
    logits = HalfProduct.apply(h.flatten(0, -2), weight)
    return logits.view(*h.shape[:-1], len(weight))


# ------------------------------------------------------------------------------------------------
# frozen weights in half the memory


class HalfLinear(nn.Linear):
    """A frozen Linear whose weights are stored in bfloat16. Without autocast it computes in the
    input's precision."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def is_half(layer):
    """Whether bfloat16 would change no weight of a layer, as in most published models."""
    return all(torch.equal(p, p.bfloat16().to(p.dtype)) for p in layer.parameters())


def to_half(model):
    """Store the Linears of a frozen GPT in bfloat16, in place, where that changes no number. The
    head, which may be the embedding, stays as it is."""
    for layer in model.modules():
        if type(layer) is nn.Linear and is_half(layer):
            layer.bfloat16().__class__ = HalfLinear


def to_float(model):
    """Undo to_half."""
    for layer in model.modules():
        if type(layer) is HalfLinear:
            layer.float().__class__ = nn.Linear


# ------------------------------------------------------------------------------------------------
# log-probs: their logits are most of a step's memory

LOGITS_KEPT = 2 ** 27       # at most for the backward, 0.5 GB; entropies keep three times as much
LOGITS_AT_ONCE = 2 ** 23    # at most in a piece on a CPU, where allocating memory is slow


def in_pieces(function, V, h, targets, allowed):
    """function(h (m, C), targets (m,), allowed (m, V) or None) -> (m, 1), applied to M tokens in
    pieces that fit into memory -> (M, 1). With more than LOGITS_KEPT logits, the backward computes
    each piece again."""
    if len(h) * V > LOGITS_KEPT:
        function = functools.partial(checkpoint, function, use_reentrant=False)
    m = max(1, (LOGITS_KEPT if h.is_cuda else LOGITS_AT_ONCE) // V)
    pieces = []
    for i in range(0, max(1, len(h)), m):
        piece = [None if x is None else x[i:i + m] for x in (h, targets, allowed)]
        pieces.append(function(*piece))
    return torch.cat(pieces)


class LogProb(torch.autograd.Function):
    """Log-probs (m, 1) of ids targets (m, 1) from logits (m, V). The backward allocates one tensor
    where torch would allocate five, which is slow."""

    @staticmethod
    def forward(ctx, logits, targets):
        total = logits.logsumexp(-1, keepdim=True)                                  # (m, 1)
        ctx.save_for_backward(logits, targets, total)
        return logits.gather(1, targets) - total

    @staticmethod
    def backward(ctx, grad):
        logits, targets, total = ctx.saved_tensors
        if torch.is_grad_enabled():     # create_graph=True: there may be a second derivative
            return (logits.softmax(-1) * -grad).scatter_add(1, targets, grad), None
        slopes = (logits - total).exp_().mul_(-grad)                                # (m, V)
        return slopes.scatter_add_(1, targets, grad), None  # grad * (one-hot - probability)


class LogProbOfHalf(torch.autograd.Function):
    """LogProb for a GPU, in five passes over the logits instead of twelve: it keeps probabilities,
    not logits. It cannot be differentiated twice."""

    @staticmethod
    def forward(ctx, logits, targets):
        most, likeliest = logits.max(-1, keepdim=True)                              # (m, 1)
        probs = logits.softmax(-1)
        ctx.save_for_backward(probs, targets)
        total = most - probs.gather(1, likeliest).log()     # the log of the sum of exponentials
        return logits.gather(1, targets) - total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        probs, targets = ctx.saved_tensors
        return (probs * -grad).scatter_add_(1, targets, grad), None


def log_prob(logits, targets):
    """The log-probs (m, 1) of ids targets (m, 1) from logits (m, V)."""
    # second derivatives are taken in float32
    is_half = logits.is_cuda and torch.is_autocast_enabled("cuda")
    return (LogProbOfHalf if is_half else LogProb).apply(logits, targets)


def buffered_logits(h, weight, allowed, temperature):
    """(rows, logits (m, V)) of hidden states h (M, C), piece by piece, in one buffer."""
    m = max(1, LOGITS_AT_ONCE // len(weight))
    buffer = h.new_empty(min(m, len(h)), len(weight))
    for i in range(0, len(h), m):
        rows = slice(i, i + m)
        logits = torch.mm(h[rows], weight.T, out=buffer[:len(h[rows])])
        if temperature != 1:
            logits /= temperature
        if allowed is not None:
            logits.masked_fill_(~allowed[rows], -math.inf)
        yield rows, logits


class BufferedLogProb(torch.autograd.Function):
    """Log-probs (M,) of targets (M,) at hidden states h (M, C), by a head's weight (V, C). allowed:
    (M, V) or None.

    The logits are computed in one buffer, piece after piece, and again in the backward. If each
    piece were allocated anew, on a CPU small results would land in the freed block, the next piece
    would not fit, and the heap would grow to the size of all logits.
    """

    @staticmethod
    def forward(ctx, h, weight, targets, allowed, temperature):
        logp = h.new_empty(len(h))
        totals = h.new_empty(len(h), 1)
        for rows, logits in buffered_logits(h, weight, allowed, temperature):
            target = logits.gather(1, targets[rows, None])
            # the log of the sum of exponentials, in place
            most = logits.amax(1, keepdim=True)
            totals[rows] = logits.sub_(most).exp_().sum(1, keepdim=True).log_().add_(most)
            logp[rows] = (target - totals[rows])[:, 0]
        ctx.save_for_backward(h, weight, targets, allowed, totals)
        ctx.temperature = temperature
        return logp

    @staticmethod
    def backward(ctx, grad):
        h, weight, targets, allowed, totals = ctx.saved_tensors
        slope = grad[:, None] / ctx.temperature
        if torch.is_grad_enabled():     # create_graph=True: there may be a second derivative
            logits = h @ weight.T / ctx.temperature
            if allowed is not None:
                logits = logits.masked_fill(~allowed, -math.inf)
            slopes = (logits.softmax(-1) * -slope).scatter_add(1, targets[:, None], slope)
            return slopes @ weight, slopes.T @ h, None, None, None

        needs_h, needs_weight, *_ = ctx.needs_input_grad
        of_h = torch.zeros_like(h) if needs_h else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        for rows, logits in buffered_logits(h, weight, allowed, ctx.temperature):
            # the logits' gradient: grad * (one-hot - probability), as in LogProb
            slopes = logits.sub_(totals[rows]).exp_().mul_(-slope[rows])                # (m, V)
            slopes.scatter_add_(1, targets[rows, None], slope[rows])
            if needs_h:
                torch.mm(slopes, weight, out=of_h[rows])
            if needs_weight:
                of_weight.addmm_(slopes.T, h[rows])
        return of_h, of_weight, None, None, None


def can_buffer(model, h):
    """Whether BufferedLogProb can be used for hidden states h (M, C): on a CPU, with more logits
    than one piece, or than a backward keeps."""
    head = model.lm_head
    most = LOGITS_KEPT if torch.is_grad_enabled() else LOGITS_AT_ONCE
    is_linear = getattr(head, "kind", type(head)) is nn.Linear and head.bias is None
    # a hook must see its calls: a tape adds one
    is_plain = is_linear and not head._forward_hooks
    is_float = head.weight.dtype == h.dtype and not torch.is_autocast_enabled("cpu")
    return h.device.type == "cpu" and is_float and is_plain and len(h) * len(head.weight) > most


# ------------------------------------------------------------------------------------------------
# attention, and weights under autocast


def attend_on_cpu(q, k, v, mask, causal, scale):
    """model.attend, by its formula. On a CPU this beats torch's kernel for a single token, and in
    bfloat16 for short sequences."""
    # queries that share a key stand side by side, so that no key is copied
    B, nh, T, hs = q.shape
    nkv, S = k.shape[1:3]
    q = q.reshape(B, nkv, -1, hs)                                       # (B, nkv, nh / nkv * T, hs)
    if T == 1 and q.dtype == torch.bfloat16:
        scores = (k @ q.mT).mT      # q @ k.mT would copy all keys
    else:
        scores = q @ k.mT

    # the softmax in float32
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scores.reshape(B, nh, T, S).to(wide) * (scale or hs ** -0.5)
    if causal:
        mask = torch.ones(T, S, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).to(v.dtype)                            # (B, nh, T, S)
    return (weights.view(B, nkv, -1, S) @ v).view(B, nh, T, hs)


@contextlib.contextmanager
def casts_kept(model):
    """Around decoding: let autocast keep its casts of frozen weights, such as LoRA's base. Else it
    would cast them again for each token: it keeps casts of weights with requires_grad alone."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
