"""
What is only fast: the same numbers, up to rounding, as the plain lines that call it. Nobody needs
to read it to follow the algorithm.

Shapes: M tokens, C channels, V = vocab_size.
"""
import torch
from torch.autograd.function import once_differentiable

# ------------------------------------------------------------------------------------------------
# products of bfloat16 numbers, summed in float32: on a GPU twice as fast as TF32


def has_half_product():
    """Whether this torch can return a product of bfloat16 matrices in float32 (since 2.8)."""
    return hasattr(torch.ops.aten.mm, "dtype")


def product(a, b):
    """a @ b of matrices in bfloat16, in float32. On a GPU alone."""
    return torch.mm(a, b, out_dtype=torch.float32)


class HalfProduct(torch.autograd.Function):
    """h @ weight.T of h (M, C) and weight (V, C) -> (M, V) in float32; gradients likewise."""

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
    """h @ weight.T of h (..., C) and weight (V, C) -> (..., V): rounded to bfloat16 as autocast
    does, but the sums stay in float32."""
    logits = HalfProduct.apply(h.flatten(0, -2), weight)
    return logits.view(*h.shape[:-1], len(weight))
