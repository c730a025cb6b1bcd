"""
The vocabulary head with logits in float32.

bfloat16 has eight significant bits. Near -63, where GPT-2's logits stand, its numbers are 0.25
apart, and the sampler's log-probs and the trainer's differ by 0.1 nats. So the operands are in
bfloat16 and the logits are not. In float32, on CPUs and in pre-training model.Head stays plain.
"""
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model import product_dtype

ALIGNED = 64    # tensor cores are slow on rows of an odd size, and GPT-2 has 50257 tokens


def wide_product(h, weight):
    """F.linear(h (..., C), weight (V, C)) -> (..., V) in float32, of operands in bfloat16.

    Autocast rounds the operands, where it is on. With operands in float32 this is F.linear. Needs a
    GPU; raises RuntimeError where this card or torch does not have it.
    """
    return product_in_float32(h, weight, mm_wide)


def float32_product(h, weight):
    """wide_product for any device: the operands are rounded, then multiplied in float32."""
    return product_in_float32(h, weight, mm_of_rounded)


def mm_wide(a, b):
    return torch.mm(a, b, out_dtype=torch.float32)


def mm_of_rounded(a, b):
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


def product_in_float32(h, weight, mm):
    dtype = product_dtype(h)
    if dtype.itemsize > 2:
        return F.linear(h, weight)
    logits = WideHead.apply(h.flatten(0, -2), weight, dtype, mm)
    return logits.view(*h.shape[:-1], len(weight))


class WideHead(torch.autograd.Function):
    """Logits (m, V) in float32 of h (m, C) and weight (V, C). The backward's two products have
    operands and results in `dtype`, as those of F.linear under autocast."""

    @staticmethod
    def forward(ctx, h, weight, dtype, mm):
        ctx.dtypes = h.dtype, weight.dtype
        h = h.to(dtype)
        w = padded(weight, dtype)
        ctx.save_for_backward(h, w)
        return mm(h, w.T)[:, :len(weight)]

    @staticmethod
    @once_differentiable    # h and w have no graph: a gradient of the gradient would be wrong
    def backward(ctx, gradient):
        h, w = ctx.saved_tensors
        h_dtype, weight_dtype = ctx.dtypes
        d = padded(gradient, w.dtype, dim=1)
        dh = dw = None
        if ctx.needs_input_grad[0]:
            dh = (d @ w).to(h_dtype)
        if ctx.needs_input_grad[1]:
            dw = (d.T @ h)[:gradient.shape[1]].to(weight_dtype)
        return dh, dw, None, None


def operand(product, x, dtype, dim=0):
    """x in this dtype, and padded in dimension dim (that of V) where this head's product wants it.
    """
    if product is F.linear or dtype.itemsize > 2:
        return x.to(dtype)
    return padded(x, dtype, dim)


def padded(x, dtype, dim=0):
    """x in this dtype, with zeros at the end of a dimension up to a multiple of ALIGNED."""
    size = x.shape[dim]
    if size % ALIGNED == 0:
        return x.to(dtype)
    shape = list(x.shape)
    shape[dim] += -size % ALIGNED
    y = x.new_zeros(shape, dtype=dtype)
    y.narrow(dim, 0, size).copy_(x)
    return y


def set_product(model, product):
    """Gives a GPT's head this product; copies of the model have it too."""
    model.lm_head.product = product
