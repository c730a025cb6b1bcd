"""
GPT by hand: the policy, the reference and, without the causal mask, the judge's trunk. The defaults
are GPT-2 (Radford et al. 2019). GPTConfig can also describe GPT-Neo (Black et al. 2021) and the
blocks of Llama, Qwen2 and Qwen3.

Shapes: B sequences, T tokens, C = n_embd channels, V = vocab_size. Attention has nh heads of hs
channels for queries, nkv heads for keys and values, and S keys.
"""
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fast import attend_on_cpu, half_product


@dataclass
class GPTConfig:
    vocab_size: int = 50257
    block_size: int = 1024        # positions
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True             # in Linear and LayerNorm, as in GPT-2
    causal: bool = True           # False: every token sees all others; the model has no lm_head
    # the other families; Llama sets n_kv_head, n_inner, rms, rope_base, swiglu, bias=False
    n_kv_head: int = 0            # heads of keys and values, shared by groups of queries; 0: n_head
    head_dim: int = 0             # 0: n_embd / n_head
    n_inner: int = 0              # width inside the MLP; 0: 4 * n_embd
    rms: bool = False             # RMSNorm (Zhang and Sennrich 2019) in place of LayerNorm
    norm_eps: float = 1e-5
    rope_base: float = 0.0        # > 0: rotary positions (Su et al. 2021); 0: learned positions
    rope_scaling: tuple = ()      # the four numbers of scale_frequency (Llama 3.1); (): not scaled
    swiglu: bool = False          # gated MLP (Shazeer 2020); c_fc holds the gate, then its partner
    exact_gelu: bool = False      # GELU by erf (Hendrycks and Gimpel 2016); False: by tanh, GPT-2's
    qkv_bias: bool | None = None  # bias of c_attn; None: as `bias`. GPT-Neo: False, Qwen2: True
    qk_norm: bool = False         # RMSNorm of each head's queries and keys, before rotation (Qwen3)
    attn_scale: float = 0.0       # factor on q @ k; 0: 1 / sqrt(head_dim). GPT-Neo: 1
    window: int = 0               # local layers see the last `window` positions (GPT-Neo: 256)
    local_layers: tuple = ()
    tied: bool = True             # lm_head shares the token embedding's matrix


def norm(config):
    if config.rms:
        return nn.RMSNorm(config.n_embd, config.norm_eps)
    return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)


def rotate(x, cos, sin):
    """Rotate channels i and i + hs / 2 of x (B, T, nh, hs) by angles (B, T, 1, hs / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def scale_frequency(frequency, factor, low, high, block_size):
    """The rotary frequencies (hs / 2,) of a model first trained on block_size positions, by
    NTK-by-parts (Peng et al. 2023). Channels that turn `high` times or more within block_size keep
    their frequency, channels that turn `low` times or less become `factor` times slower."""
    turns = block_size * frequency / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)      # 1: unchanged
    return frequency * (share + (1 - share) / factor)


def attend(q, k, v, mask, causal, scale):
    """softmax(scale * q k^T) v with q (B, nh, T, hs) and k, v (B, nkv, S, hs) -> (B, nh, T, hs).
    mask (B, 1, T, S): True where a query sees a key. scale None: 1 / sqrt(hs)."""
    nh, T = q.shape[1:3]
    nkv = k.shape[1]

    # on a CPU the formula is faster for short sequences, as measured
    short = 128 if q.dtype == torch.bfloat16 else 1         # tokens
    if q.device.type == "cpu" and T <= short:
        return attend_on_cpu(q, k, v, mask, causal, scale)

    # torch's fast kernels on a GPU do not take groups together with a mask
    if nkv < nh and q.is_cuda:
        k = k.repeat_interleave(nh // nkv, 1)
        v = v.repeat_interleave(nh // nkv, 1)
    grouped = True if k.shape[1] < nh else False    # torch.compile needs a bool, not a symbol
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.causal = config.causal
        self.scale = config.attn_scale or None
        self.qk_norm = config.qk_norm
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head
        self.hs = config.head_dim or config.n_embd // config.n_head

        # one matrix for queries, keys and values, one to mix the heads' outputs
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        width = (self.n_head + 2 * self.n_kv_head) * self.hs
        self.c_attn = nn.Linear(config.n_embd, width, bias=qkv_bias)
        self.c_proj = nn.Linear(self.n_head * self.hs, config.n_embd, bias=config.bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.hs, config.norm_eps)
            self.k_norm = nn.RMSNorm(self.hs, config.norm_eps)

    def forward(self, x, mask, extend_cache, rope):
        B, T, _ = x.shape
        # queries, keys and values of all heads from one matrix
        heads = [self.n_head, self.n_kv_head, self.n_kv_head]
        q, k, v = self.c_attn(x).view(B, T, -1, self.hs).split(heads, dim=2)  # (B, T, heads, hs)
        if self.qk_norm:    # in the dtype of x, also under autocast
            q = self.q_norm(q.to(x.dtype))
            k = self.k_norm(k.to(x.dtype))
        if rope is not None:
            q = rotate(q, *rope)
            k = rotate(k, *rope)
        q, k, v = (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))          # (B, heads, T, hs)

        # append k and v to the cache, and see all that is in it
        if extend_cache is not None:
            k, v = extend_cache(k, v)                                         # (B, nkv, S, hs)
        # torch.compile needs a bool: the symbol `T > 1` would break the graph
        causal = True if self.causal and mask is None and T > 1 else False
        y = attend(q, k, v, mask, causal, self.scale)                         # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.swiglu = config.swiglu
        self.gelu = "none" if config.exact_gelu else "tanh"
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, (1 + self.swiglu) * inner, bias=config.bias)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)

    def forward(self, x):
        if self.swiglu:
            gate, x = self.c_fc(x).chunk(2, -1)
            return self.c_proj(F.silu(gate) * x)
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x, mask, extend_cache, rope):
        x = x + self.attn(self.ln_1(x), mask, extend_cache, rope)
        return x + self.mlp(self.ln_2(x))


class Head(nn.Linear):
    """Hidden states (..., C) -> logits (..., V). On a GPU they are in float32 even under autocast:
    GPT-2's logits are near -63, where bfloat16 rounds by 0.25."""
    kind = nn.Linear    # tape.py treats it as a Linear

    def forward(self, h):
        if h.is_cuda and torch.is_autocast_enabled("cuda"):
            return half_product(h, self.weight)
        return F.linear(h, self.weight)


class Cache:
    """Keys and values of the tokens so far, so that each token is computed once."""

    def __init__(self, S):
        self.S = S              # room, in tokens of a sequence
        self.length = 0         # tokens stored
        self.layers = []        # keys and values of each layer, (2, B, nkv, S, hs)

    def extend(self, i, k, v):
        """Append k and v (B, nkv, T, hs) to layer i -> all its keys and values."""
        # room for all tokens at once, since growing would copy
        if i == len(self.layers):
            B, nkv, _, hs = k.shape
            self.layers.append(k.new_zeros(2, B, nkv, self.S, hs))
        kv = self.layers[i]
        end = self.length + k.shape[2]
        kv[0, :, :, self.length:end] = k
        kv[1, :, :, self.length:end] = v
        return kv[:, :, :, :end]

    def repeat(self, n, S):
        """A cache with n copies of each sequence side by side and room for S tokens."""
        copy = Cache(S)
        copy.length = self.length
        for kv in self.layers:
            kv = F.pad(kv, (0, 0, 0, S - self.S))
            copy.layers.append(kv.repeat_interleave(n, 1))
        return copy

    def keep(self, rows):
        """Keep only these sequences (n,), in this order. Copy only those that move."""
        n = len(rows)
        moved = (rows != torch.arange(n, device=rows.device)).nonzero()[:, 0]
        for i, kv in enumerate(self.layers):
            kv[:, moved] = kv[:, rows[moved]]
            self.layers[i] = kv[:, :n]


class GPT(nn.Module):
    """The model up to its hidden states; `model.lm_head(model(idx))` are the logits (B, T, V). The
    head is expensive, and few tokens need it. rollout.py lists what a policy must provide."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head and not config.head_dim:
            raise ValueError(f"n_embd = {config.n_embd} must be a multiple of n_head")
        self.config = config
        self.block_size = config.block_size
        self.recompute = False  # True: keep a block's input alone, run it again in the backward

        # tokens and their positions, blocks, and a last norm
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.rope_base:
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = norm(config)

        # GPT-2's initialisation: in a deeper model each block adds less to the residual stream
        for name, p in self.named_parameters():
            if p.dim() == 2:
                depth = 2 * config.n_layer if name.endswith("c_proj.weight") else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if config.causal:
            self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
            if config.tied:
                self.lm_head.weight = self.wte.weight
        self.value_head = None      # a critic puts its own here

    def forward(self, idx, attention_mask=None, cache=None):
        """Token ids idx (B, T) -> hidden states (B, T, C).

        cache: from new_cache. It holds the tokens before these, and afterwards these as well.
        attention_mask (B, S), for the tokens in the cache and these: False on padding, which no
        token sees and no position counts. None: not padded.
        """
        # at which position is each token, and what does it see?
        T = idx.shape[1]
        start = 0 if cache is None else cache.length
        column = start + torch.arange(T, device=idx.device)                         # (T,)
        pos, mask = self.positions_and_mask(idx, attention_mask, start, column)
        local_mask = self.windowed(mask, column)

        # the residual stream, block by block
        x, rope = self.embed(idx, pos)
        recompute = self.recompute and cache is None and torch.is_grad_enabled()
        for i, block in enumerate(self.h):
            block_mask = local_mask if i in self.config.local_layers else mask
            extend_cache = functools.partial(cache.extend, i) if cache is not None else None
            inputs = (x, block_mask, extend_cache, rope)
            if recompute:
                x = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(*inputs)                                                  # (B, T, C)
        if cache is not None:
            cache.length += T
        return self.ln_f(x)

    def positions_and_mask(self, idx, attention_mask, start, column):
        """Positions (B, T) of the tokens in columns `column` (T,), which begin at `start`, and the
        mask (B, 1, T, S) of what each token sees. The mask is None where plain causal attention
        (in the judge, full attention) is right."""
        # the usual case: not padded, and torch's own mask will do
        B, T = idx.shape
        if attention_mask is None:
            S = start + T
            all_near = not self.config.local_layers or S <= self.config.window
            # torch's causal mask starts at the first key, not at `start`
            if all_near and (start == 0 or T == 1):
                return column.expand(B, T), None
            attention_mask = torch.ones(B, S, dtype=torch.bool, device=idx.device)

        # a row with two columns of padding:
        #     attention_mask      0 0 1 1 1
        #     pos                 0 0 0 1 2
        #     query 3 sees        . . x x .     itself and what is before it, never padding
        query = column[:, None]                                                     # (T, 1)
        key = torch.arange(attention_mask.shape[1], device=idx.device)              # (S,)
        pos = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, column]                # (B, T)
        mask = attention_mask[:, None, :]                                           # (B, 1, S)
        if self.config.causal:
            mask = mask & (key <= query)                                            # (B, T, S)
        mask = mask | (key == query)        # padding sees itself: softmax of an empty row is NaN
        return pos, mask[:, None]

    def windowed(self, mask, column):
        """The mask for local layers: tokens in columns `column` (T,) see only the last `window`
        positions."""
        if mask is None or not self.config.local_layers:
            return mask
        key = torch.arange(mask.shape[-1], device=mask.device)                      # (S,)
        return mask & (key > column[:, None] - self.config.window)

    def embed(self, idx, pos):
        """The first block's input (B, T, C), and the cos and sin of rotary positions, or None."""
        x = self.wte(idx)                                                           # (B, T, C)
        if not self.config.rope_base:
            return x + self.wpe(pos), None

        # rotary: angles grow with the position, more slowly from channel to channel
        hs = self.h[0].attn.hs
        dtype = torch.promote_types(x.dtype, torch.float32)  # even under autocast
        channel = torch.arange(0, hs, 2, device=idx.device, dtype=dtype)
        frequency = 1 / self.config.rope_base ** (channel / hs)                     # (hs / 2,)
        if self.config.rope_scaling:
            frequency = scale_frequency(frequency, *self.config.rope_scaling)
        angles = pos[:, :, None, None] * frequency                              # (B, T, 1, hs / 2)
        return x, (angles.cos(), angles.sin())

    def new_cache(self, S):
        """An empty cache with room for S tokens of each sequence."""
        return Cache(S)


Policy = GPT    # the class of every policy made here or read from a file; see rollout.py
