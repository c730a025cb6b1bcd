"""GPT by hand: the policy, the reference and, without the causal mask, the trunk of the judge. The
defaults are GPT-2 (Radford et al. 2019). Other settings give GPT-Neo (Black et al. 2021) and the
blocks of Llama, Qwen2 and Qwen3.

Shapes: B rows, T positions, C = n_embd channels, V = vocab_size. Attention has nh heads of hs
channels for queries, nkv heads for keys and values, and S key positions.
"""
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    vocab_size: int = 50257
    block_size: int = 1024        # positions
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True             # in Linear and LayerNorm, as in GPT-2
    causal: bool = True           # False: every token sees every other, and there is no lm_head
    # where other decoders differ; Llama sets n_kv_head, n_inner, rms, rope_base, swiglu, bias=False
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
    """Turns channels i and i + hs / 2 of x (B, T, nh, hs) by angles (B, T, 1, hs / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def scale_frequency(frequency, factor, low, high, block_size):
    """The rotary frequencies (hs / 2,) of a model that saw only block_size positions at first, by
    NTK-by-parts (Peng et al. 2023): channels that turn `high` times or more within block_size stay,
    those that turn `low` times or less are `factor` times slower."""
    turns = block_size * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def attend(q, k, v, mask, causal, scale):
    """softmax(scale * q k^T) v with q (B, nh, T, hs) and k, v (B, nkv, S, hs) -> (B, nh, T, hs).
    mask (B, 1, T, S): True where a query sees a key, or numbers to add. scale None: 1 / sqrt(hs).
    On a CPU torch's kernel is slower than the formula for one position and short bfloat16 rows.
    """
    B, nh, T, hs = q.shape
    nkv, S = k.shape[1:3]
    low = q.dtype == torch.bfloat16
    if q.device.type != "cpu" or T > (128 if low else 1):
        if nkv < nh and q.is_cuda:  # torch's fast kernels take no groups beside a mask
            k, v = (x.repeat_interleave(nh // nkv, 1) for x in (k, v))
        grouped = True if k.shape[1] < nh else False    # a plain bool, for torch.compile
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    q = q.reshape(B, nkv, -1, hs)                                       # (B, nkv, nh / nkv * T, hs)
    scores = (k @ q.mT).mT if low and T == 1 else q @ k.mT              # k.mT would be copied
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


def extend(cache, start, k, v):
    """Writes k and v (B, nkv, T, hs) from position `start` on into a layer's cache
    (2, B, nkv, S, hs) -> all that it has now, (2, B, nkv, start + T, hs)."""
    end = start + k.shape[2]
    cache[0, :, :, start:end] = k
    cache[1, :, :, start:end] = v
    return cache[:, :, :, :end].to(k.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.causal = config.causal
        self.scale = config.attn_scale or None
        self.qk_norm = config.qk_norm
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head
        self.hs = config.head_dim or config.n_embd // config.n_head
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        width = (self.n_head + 2 * self.n_kv_head) * self.hs
        self.c_attn = nn.Linear(config.n_embd, width, bias=qkv_bias)
        self.c_proj = nn.Linear(self.n_head * self.hs, config.n_embd, bias=config.bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.hs, config.norm_eps)
            self.k_norm = nn.RMSNorm(self.hs, config.norm_eps)

    def forward(self, x, mask, extend_cache, rope):
        B, T, _ = x.shape
        heads = [self.n_head, self.n_kv_head, self.n_kv_head]
        q, k, v = self.c_attn(x).view(B, T, -1, self.hs).split(heads, dim=2)  # (B, T, heads, hs)
        if self.qk_norm:  # in the precision of x and the weights, whatever autocast made of q and k
            q = self.q_norm(q.to(x.dtype))
            k = self.k_norm(k.to(x.dtype))
        if rope is not None:
            q = rotate(q, *rope)
            k = rotate(k, *rope)
        q, k, v = (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))          # (B, heads, T, hs)
        if extend_cache is not None:
            k, v = extend_cache(k, v)                                         # (B, nkv, S, hs)
        # a plain bool: torch.compile would break the graph at the symbol that `T > 1` is
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
    """Hidden states (..., C) -> logits (..., V). On a GPU they are in float32 also under autocast:
    bfloat16 would round those near -63, where GPT-2's stand, by 0.25."""
    kind = nn.Linear    # what influence takes it for (tracin.py)

    def forward(self, h):
        if not h.is_cuda:
            return F.linear(h, self.weight)
        with torch.autocast("cuda", enabled=False):
            return F.linear(h.to(self.weight.dtype), self.weight)


class GPT(nn.Module):
    """Returns hidden states: the vocabulary head is paid for only where it is needed.
    `model.lm_head(model(idx))` is (B, T, V)."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head and not config.head_dim:
            raise ValueError(f"n_embd = {config.n_embd} must be a multiple of n_head")
        self.config = config
        self.recompute = False  # True: keep a block's input only, compute it again in the backward
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.rope_base:
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = norm(config)
        for name, p in self.named_parameters():     # GPT-2's start: depth does not grow the stream
            if p.dim() == 2:
                depth = 2 * config.n_layer if name.endswith("c_proj.weight") else 1
                nn.init.normal_(p, std=0.02 / math.sqrt(depth))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if config.causal:
            self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
            if config.tied:
                self.lm_head.weight = self.wte.weight
        self.value_head = None  # or critic.ValueHead

    def forward(self, idx, attention_mask=None, cache=None, start=0):
        """Token ids idx (B, T) at positions start .. start + T - 1 -> hidden states (B, T, C).
        attention_mask (B, start + T) is False on padding, which no token sees and which counts as
        no position; None: no padding. cache: from new_cache, filled up to position `start`.
        """
        pos, mask, local_mask = self.positions_and_masks(idx, attention_mask, start)
        caches = [None] * len(self.h)
        if cache is not None:
            caches = [functools.partial(extend, cache[i], start) for i in range(len(cache))]
        return self.blocks(idx, pos, mask, local_mask, caches)

    def blocks(self, idx, pos, mask, local_mask, extend_caches):
        """The same from positions and masks. extend_caches: for each block None, or a function that
        stores new keys and values and returns all."""
        x, rope = self.embed(idx, pos)
        recompute = self.recompute and extend_caches[0] is None and torch.is_grad_enabled()
        for i, block in enumerate(self.h):
            block_mask = local_mask if i in self.config.local_layers else mask
            inputs = (x, block_mask, extend_caches[i], rope)
            if recompute:
                x = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(*inputs)                                                  # (B, T, C)
        return self.ln_f(x)

    def positions_and_masks(self, idx, attention_mask, start):
        """Positions (B, T) and what each sees, (B, 1, T, S), in global and in local layers. None
        where plain causal attention (or none, in the judge) is right."""
        B, T = idx.shape
        S = start + T
        windowed = bool(self.config.local_layers) and S > self.config.window
        if attention_mask is None:
            if not windowed and (start == 0 or T == 1):
                return torch.arange(start, S, device=idx.device).expand(B, T), None, None
            # torch's own causal mask starts at the first key, not at `start`
            attention_mask = torch.ones(B, S, dtype=torch.bool, device=idx.device)
        query = start + torch.arange(T, device=idx.device)[:, None]                 # (T, 1)
        key = torch.arange(S, device=idx.device)                                    # (S,)
        pos = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, query[:, 0]]           # (B, T)
        mask = attention_mask[:, None, :].expand(B, T, S)
        if self.config.causal:
            mask = mask & (key <= query)
        mask = mask | (key == query)        # padding sees itself: softmax of an empty row is NaN
        local_mask = mask & (key > query - self.config.window) if windowed else mask
        return pos, mask[:, None], local_mask[:, None]

    def embed(self, idx, pos):
        """Input of the first block (B, T, C) and, with rotary positions, their cos and sin."""
        x = self.wte(idx)                                                           # (B, T, C)
        if not self.config.rope_base:
            return x + self.wpe(pos), None
        hs = self.h[0].attn.hs
        dtype = torch.promote_types(x.dtype, torch.float32)  # also under autocast
        channel = torch.arange(0, hs, 2, device=idx.device, dtype=dtype)
        frequency = 1 / self.config.rope_base ** (channel / hs)                     # (hs / 2,)
        if self.config.rope_scaling:
            frequency = scale_frequency(frequency, *self.config.rope_scaling)
        angles = pos[:, :, None, None] * frequency                              # (B, T, 1, hs / 2)
        return x, (angles.cos(), angles.sin())

    def new_cache(self, B, S):
        """Empty cache (n_layer, 2, B, nkv, S, hs) of keys and values, for B rows of S positions."""
        attn = self.h[0].attn
        w = self.ln_f.weight
        shape = (len(self.h), 2, B, attn.n_kv_head, S, attn.hs)
        autocast = torch.is_autocast_enabled(w.device.type)
        dtype = torch.get_autocast_dtype(w.device.type) if autocast else w.dtype
        return torch.zeros(shape, device=w.device, dtype=dtype)


class LoRA(nn.Module):
    """W x + (alpha / rank) B A x, with W frozen (Hu et al. 2021). B starts at 0."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        device = base.weight.device
        self.A = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.B = nn.Linear(rank, base.out_features, bias=False, device=device)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base(x) + self.scale * self.B(self.A(x))


def add_lora(model, rank, alpha):
    """Freezes the model and adapts every Linear of its blocks."""
    model.requires_grad_(False)
    for module in list(model.h.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank, alpha))
    return model
