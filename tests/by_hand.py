"""The forward of a GPT of any family (worlds.SHAPES), written out: in float64, a head at a time,
without padding or a cache."""
import math

import torch
from torch.nn import functional as F


def turned(x, c):
    """A head's vectors (T, hs) with rotary positions. A pair of channels is a complex number."""
    half = x.shape[1] // 2
    frequency = c.rope_base ** (-torch.arange(half).double() / half)            # (hs / 2,)
    if c.rope_scaling:
        factor, low, high, positions = c.rope_scaling
        turns = positions * frequency / (2 * math.pi)   # in the context it was trained with
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (smooth + (1 - smooth) / factor)
    angle = torch.arange(len(x))[:, None] * frequency                           # (T, hs / 2)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag], 1)


def hidden_by_hand(model, ids):
    """Final hidden states (T, C) of a list of ids."""
    c = model.config
    w = {name: x.detach().double() for name, x in model.state_dict().items()}
    T = len(ids)
    nkv = c.n_kv_head or c.n_head
    hs = c.head_dim or c.n_embd // c.n_head

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    def norm(x, name):
        if not c.rms:
            x = x - x.mean(-1, keepdim=True)
        scale = (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
        return x / scale * w[name + ".weight"] + w.get(name + ".bias", 0)

    def head(x, j, name):
        """Queries or keys (T, hs) of head j, normalised and turned."""
        x = x[:, j * hs:(j + 1) * hs]
        if c.qk_norm:
            x = norm(x, name)
        return turned(x, c) if c.rope_base else x

    x = w["wte.weight"][torch.tensor(ids)]
    if not c.rope_base:
        x = x + w["wpe.weight"][:T]
    back = torch.arange(T)[:, None] - torch.arange(T)       # (T, T) from a query to a key
    for i in range(c.n_layer):
        hidden = (back < 0) & c.causal
        if i in c.local_layers:
            hidden |= back >= c.window
        attn = f"h.{i}.attn."
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), attn + "c_attn").split(
            [c.n_head * hs, nkv * hs, nkv * hs], -1)
        heads = []
        for j in range(c.n_head):
            shared = j * nkv // c.n_head
            score = head(q, j, attn + "q_norm") @ head(k, shared, attn + "k_norm").T
            score = score * (c.attn_scale or 1 / math.sqrt(hs))
            score = score.masked_fill(hidden, -math.inf)
            heads.append(score.softmax(-1) @ v[:, shared * hs:(shared + 1) * hs])
        x = x + linear(torch.cat(heads, -1), attn + "c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        if c.swiglu:
            gate, y = y.chunk(2, -1)
            y = gate * gate.sigmoid() * y
        else:
            y = F.gelu(y, approximate="none" if c.exact_gelu else "tanh")
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f")


def logits_by_hand(model, ids):
    """Logits (T, V) of a list of ids."""
    return hidden_by_hand(model, ids) @ model.lm_head.weight.detach().double().T
