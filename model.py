"""
GPT-2's architecture by hand: the policy, the reference and, without the causal mask, the trunk of the judge. By settings
the same classes are GPT-Neo (Black et al. 2021) and the block of Llama, Qwen2 and Qwen3.

In the order of the file: network, sampling with a KV cache, token log-probs, LoRA, device, several processes, scripts, files.
Shapes: B rows, T positions, C = n_embd channels, V = vocab_size, nh heads of hs = C / nh channels, nkv of keys and values,
N = B * num_generations sampled rows, P = width of the left-padded prompts.
Left out: dropout (whatever is scored must be scored without it), beam search, paged caches.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


# ---------------------------------------------------------------------------------------------------------------
# network

@dataclass
class GPTConfig:
    vocab_size: int = 50257
    block_size: int = 1024   # positions
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True        # in Linear and LayerNorm, as in GPT-2
    causal: bool = True      # False: every token sees every other (the judge), and there is no vocabulary head
    # where other decoders differ; Llama: n_kv_head, n_inner, rms, rope_base, swiglu, bias = False
    n_kv_head: int = 0       # heads of keys and values, each read by n_head / n_kv_head heads of queries; 0: n_head
    head_dim: int = 0        # 0: n_embd / n_head
    n_inner: int = 0         # width inside the MLP; 0: 4 n_embd
    rms: bool = False        # RMSNorm (Zhang and Sennrich 2019) for LayerNorm
    norm_eps: float = 1e-5
    rope_base: float = 0.0   # above 0: rotary positions (Su et al. 2021) of that base, 0: learned ones
    swiglu: bool = False     # gated MLP (Shazeer 2020): c_fc holds the gate, then what it multiplies
    qkv_bias: bool | None = None  # of c_attn; None: as `bias`. GPT-Neo: False, Qwen2: True
    qk_norm: bool = False    # RMSNorm of each head of queries and keys, before rotation (Qwen3)
    attn_scale: float = 0.0  # of queries times keys; 0: 1 / sqrt(head_dim). GPT-Neo: 1
    window: int = 0          # the layers in local_layers see the last `window` positions, their own included (GPT-Neo: 256)
    local_layers: tuple = ()
    tied: bool = True        # the vocabulary head is the token embedding


def norm(config):
    return (nn.RMSNorm(config.n_embd, config.norm_eps) if config.rms
            else nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias))


def rotate(x, cos, sin):
    """x (B, T, nh, hs): channels i and i + hs / 2 turned by the angle of their position, cos and sin (B, T, 1, hs / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v, mask, causal, scale):
    """F.scaled_dot_product_attention of q (B, nh, T, hs) on k, v (B, nkv, S, hs). mask (B, 1, T, S) bool, or numbers to add.

    Written out where torch's own is slow on a CPU: for one position, and for short rows in bfloat16, where it takes two (forward)
    to five times (both ways) as long."""
    (B, nh, T, hs), nkv, S, half = q.shape, k.shape[1], k.shape[2], q.dtype == torch.bfloat16
    if q.device.type != "cpu" or T > (128 if half else 1):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=nkv < nh)
    q = q.reshape(B, nkv, -1, hs)
    scores = (k @ q.mT).mT if half and T == 1 else q @ k.mT    # (B, nkv, nh / nkv * T, S); in bfloat16 k.mT would be copied
    scores = scores.reshape(B, nh, T, S).to(torch.promote_types(q.dtype, torch.float32)) * (scale or hs ** -0.5)
    if causal:
        mask = torch.ones(T, S, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).to(v.dtype).view(B, nkv, -1, S) @ v).view(B, nh, T, hs)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.causal, self.scale, self.qk_norm = config.causal, config.attn_scale or None, config.qk_norm
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head or config.n_head
        self.hs = config.head_dim or config.n_embd // config.n_head
        self.c_attn = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.hs,
                                bias=config.bias if config.qkv_bias is None else config.qkv_bias)
        self.c_proj = nn.Linear(self.n_head * self.hs, config.n_embd, bias=config.bias)
        if self.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(self.hs, config.norm_eps), nn.RMSNorm(self.hs, config.norm_eps)

    def forward(self, x, mask, cache, start, rope=None):
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).view(B, T, -1, self.hs).split([self.n_head, self.n_kv_head, self.n_kv_head], dim=2)
        if self.qk_norm:  # in the precision of x and the weights, whatever autocast made of q and k
            q, k = self.q_norm(q.to(x.dtype)), self.k_norm(k.to(x.dtype))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))  # (B, nh, T, hs), (B, nkv, T, hs) twice
        if isinstance(start, torch.Tensor):  # (2, B, nkv, S, hs): write the one position, read all; the mask has the rest
            k, v = cache.index_copy_(3, start, torch.stack([k, v]).to(cache.dtype)).to(q.dtype)     # (B, nkv, S, hs) twice
        elif cache is not None:  # write these T positions, read all so far
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
            k, v = cache[:, :, :, :start + T].to(q.dtype)  # (B, nkv, start + T, hs)
        causal = True if self.causal and mask is None and T > 1 else False  # torch.compile has a symbol for T > 1
        y = attend(q, k, v, mask, causal, self.scale)                                               # (B, nh, T, hs)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner, self.swiglu = config.n_inner or 4 * config.n_embd, config.swiglu
        self.c_fc = nn.Linear(config.n_embd, (1 + self.swiglu) * inner, bias=config.bias)
        self.c_proj = nn.Linear(inner, config.n_embd, bias=config.bias)

    def forward(self, x):
        if self.swiglu:
            gate, x = self.c_fc(x).chunk(2, -1)
            return self.c_proj(F.silu(gate) * x)
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = Attention(config)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x, mask, cache, start, rope=None):
        x = x + self.attn(self.ln_1(x), mask, cache, start, rope)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Decoder of Radford et al. 2019. Called on token ids it returns the final hidden states, not the logits, so that
    the vocabulary head is paid only where it is needed: `model.lm_head(model(idx))` is (B, T, V)."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head and not config.head_dim:
            raise ValueError(f"n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}")
        self.config, self.recompute = config, False  # True: backward computes each block again and keeps its input only
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.rope_base:
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = norm(config)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # residual projections are scaled down so that depth does not grow the stream (GPT-2)
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if config.causal:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
            if config.tied:
                self.lm_head.weight = self.wte.weight

    def forward(self, idx, real=None, cache=None, start=0):
        """idx (B, T) token ids at positions start .. start + T - 1 -> hidden states (B, T, C) after the last LayerNorm.

        real (B, start + T) bool: False marks padding, by position, never by a token's value; None means no padding.
        Padding is seen by no one and does not count as a position, so it may stand left or right.
        cache: the tensor of `new_cache`, holding positions before `start`.
        start may be a tensor (1,), for T = 1 and a cache and `real` of any one width S above it: no shape then depends on it.
        """
        (B, T), c, rope = idx.shape, self.config, None
        moving = isinstance(start, torch.Tensor)
        S = real.shape[1] if moving else start + T
        windowed = bool(c.local_layers) and S > c.window
        if real is None and (windowed or start and T > 1):  # SDPA's own causal mask starts at the first key, not at `start`
            real = torch.ones(B, S, dtype=torch.bool, device=idx.device)
        if real is None:
            pos, mask = torch.arange(start, S, device=idx.device).expand(B, T), None
        else:
            query, key = start + torch.arange(T, device=idx.device)[:, None], torch.arange(S, device=idx.device)
            pos = (real.cumsum(1) - 1).clamp(min=0)[:, query[:, 0]]                                # (B, T)
            mask = real[:, None, :] & (key <= query) if c.causal else real[:, None, :].expand(B, T, S)
            mask = (mask | (key == query))[:, None]       # (B, 1, T, S); padding looks at itself: an empty row is NaN
        near = mask & (key > query - c.window) if windowed else mask                               # of the local layers
        if moving:  # as numbers to add, made once here rather than by every layer
            mask, near = (torch.zeros_like(m, dtype=cache.dtype).masked_fill(~m, -math.inf) for m in (mask, near))
        x = self.wte(idx)                                                                          # (B, T, C)
        if c.rope_base:  # angles in float32 or better, also under autocast
            hs, dtype = self.h[0].attn.hs, torch.promote_types(x.dtype, torch.float32)
            frequency = 1 / c.rope_base ** (torch.arange(0, hs, 2, device=idx.device, dtype=dtype) / hs)
            angles = pos[:, :, None, None] * frequency                                             # (B, T, 1, hs / 2)
            rope = angles.cos(), angles.sin()
        else:
            x = x + self.wpe(pos)
        for i, block in enumerate(self.h):
            inputs = x, near if i in c.local_layers else mask, None if cache is None else cache[i], start, rope
            recompute = self.recompute and cache is None and torch.is_grad_enabled()
            x = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False) if recompute else block(*inputs)
        return self.ln_f(x)

    def new_cache(self, B, S):
        """Empty KV cache (n_layer, 2, B, nkv, S, hs) for B rows of at most S positions."""
        attn, w = self.h[0].attn, self.h[0].ln_1.weight
        dtype = torch.get_autocast_dtype(w.device.type) if torch.is_autocast_enabled(w.device.type) else w.dtype
        return torch.zeros(len(self.h), 2, B, attn.n_kv_head, S, attn.hs, device=w.device, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------
# sampling


# ---------------------------------------------------------------------------------------------------------------
# log-probs of given tokens

def token_logprobs(lm_head, h, targets, temperature=1.0, kept=None, chunk=2 ** 24, slope_of=None):
    """h (M, C) hidden states, targets (M,) ids -> log-probs (M,) in fp32, with gradient.

    At the sampling temperature and, after truncated sampling, renormalised over the kept set (M, V): the distribution
    the token was drawn from. At most about `chunk` logits (8 times that on a GPU) exist at a time; with more, backward computes
    each piece again, unless slope_of(log-probs of tokens i .. j - 1, i, j) says beforehand what gradient (j - i,) they will get.
    """
    def piece(h, targets, kept):
        logits = lm_head(h).float() / temperature                                                   # (m, V)
        if kept is not None:
            logits = logits.masked_fill(~kept, -math.inf)
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)                      # (m,)

    m = max(1, chunk * (8 if h.is_cuda else 1) // lm_head.weight.shape[0])  # a GPU has the room, and waits for every piece
    if len(h) <= m:
        return piece(h, targets, kept)
    if slope_of is not None and torch.is_grad_enabled():
        return FusedHead.apply(h, lm_head.weight, lm_head, targets, temperature, kept, m, slope_of)
    return torch.cat([checkpoint(piece, *x, use_reentrant=False) for x in zip(
        h.split(m), targets.split(m), [None] * len(h) if kept is None else kept.split(m))])


class FusedHead(torch.autograd.Function):
    """The vocabulary head with its backward in its forward, piece by piece: a piece's logits are used for log-probs and
    gradients alike and are gone, three products in place of four, for a loss in which the gradient of a log-prob depends on no
    other token's."""

    @staticmethod
    def forward(ctx, h, weight, lm_head, targets, temperature, kept, m, slope_of):
        logp, slopes = h.new_empty(len(h), dtype=torch.float32), h.new_empty(len(h), dtype=torch.float32)
        note = getattr(lm_head, "note", None)  # of a tape, which has the weight's gradient formed in its own way
        dh, dw = torch.empty_like(h), torch.zeros_like(weight) if ctx.needs_input_grad[1] and not note else None
        for i in range(0, len(h), m):
            j = min(i + m, len(h))
            raw = lm_head(h[i:j])                                                                   # (m, V)
            logits = raw.float() / temperature
            if kept is not None:
                logits = logits.masked_fill(~kept[i:j], -math.inf)
            logits = logits - logits.logsumexp(-1, keepdim=True)
            logp[i:j] = logits.gather(1, targets[i:j, None])[:, 0]
            slopes[i:j] = slope = slope_of(logp[i:j], i, j)
            d = logits.exp_().mul_(-slope[:, None] / temperature)       # of the logits: slope * (1[target] - p) / temperature
            d.scatter_add_(1, targets[i:j, None], slope[:, None] / temperature)
            d = d.to(raw.dtype)
            dh[i:j] = d @ weight.to(raw.dtype)
            if note:
                note(h[i:j], d)
            elif dw is not None:
                dw += d.T @ h[i:j].to(raw.dtype)
        ctx.save_for_backward(dh, dw, slopes)
        return logp

    @staticmethod
    def backward(ctx, gradient):
        dh, dw, slopes = ctx.saved_tensors
        if not torch.allclose(gradient, slopes, rtol=1e-4, atol=1e-12, equal_nan=True):  # NaN is for update to report
            raise ValueError("slope_of gave another gradient than the loss: is a token's loss its own alone?")
        return dh, dw, None, None, None, None, None, None


def completion_logprobs(model, rollout, temperature=1.0, chunk=2 ** 24, slope_of=None):
    """Log-probs (N, T) of a rollout's sampled tokens under `model`; 0 where masked.

    Position t predicts token t + 1: the hidden state at the prompt's last position scores the first sampled token.
    slope_of(logp): the gradient (N, T) that these log-probs (N, T) are going to get (see token_logprobs).
    """
    # these rows may be shorter than the rollout that they are of: leave out what is padding in all of them. What the host must
    # know for that it asks at once, since a GPU is waited for
    real, mask, P = rollout.real, rollout.mask, rollout.real.shape[1] - rollout.mask.shape[1]
    first, T, fewest = torch.stack([real.any(0).long().argmax(), mask.any(0).cumsum(0).argmax() + 1, real.sum(1).min()]).tolist()
    tokens, padded = rollout.tokens[:, first:P + T], fewest < real.shape[1] - first
    h = model(tokens[:, :-1].contiguous(), real[:, first:P + T - 1] if padded else None)[:, -T:]    # (N, T, C)
    row, column = where = mask.nonzero(as_tuple=True)                                               # (M,) each

    def flat_slope(logp, i, j):  # of tokens i .. j - 1 in the line of all; what the others get does not matter
        here = row[i:j], column[i:j]
        return slope_of(rollout.logp.index_put(here, logp))[here]

    logp = token_logprobs(model.lm_head, h[where], tokens[:, -T:][where], temperature,
                          None if rollout.kept is None else rollout.kept[where], chunk, slope_of and flat_slope)
    return torch.zeros(mask.shape, device=h.device).index_put(where, logp)                          # (N, T)


# ---------------------------------------------------------------------------------------------------------------
# LoRA (Hu et al. 2021): W x + (alpha / rank) B A x, with W frozen

class LoRA(nn.Module):
    """A Linear with a low-rank update beside it. B starts at zero, so a new adapter changes nothing."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale, self.merged = base, alpha / rank, False
        self.A = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.B = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + self.scale * self.B(self.A(x))

    @torch.no_grad()
    def merge(self, on=True):
        """Fold the update into W (on) or take it out again, for a model that runs or leaves without the adapter."""
        if on != self.merged:
            self.base.weight += (1 if on else -1) * self.scale * self.B.weight @ self.A.weight
            self.merged = on


LORA_LAYERS = ("c_attn", "c_proj", "c_fc")


def add_lora(model, rank, alpha, layers=LORA_LAYERS):
    """Freeze the model and put a LoRA adapter on every Linear whose own name is in `layers`. Returns the model."""
    if rank < 1 or not set(layers) <= set(LORA_LAYERS) or not layers:
        raise ValueError(f"lora_rank = {rank}, lora_layers = {layers}: rank from 1, layers out of {LORA_LAYERS}")
    if any(isinstance(module, LoRA) for module in model.modules()):
        raise ValueError("the model has LoRA adapters already: merge them first")
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in layers and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank, alpha))
    return model


# ---------------------------------------------------------------------------------------------------------------
# device and precision


# ---------------------------------------------------------------------------------------------------------------
# several processes, as torchrun starts them: all hold the same weights and the same batch, each computes its share of the
# rows, and what came of it is put together for all. In one process these functions give back what they are given.


# ---------------------------------------------------------------------------------------------------------------
# scripts


# ---------------------------------------------------------------------------------------------------------------
# files: written to a temporary name and renamed, read without running what is in them


