"""
GPT-2's architecture by hand: the policy, the reference and, without the causal mask, the trunk of the judge. By settings
the same classes are GPT-Neo (Black et al. 2021) and the block of Llama, Qwen2 and Qwen3.

In the order of the file: network, sampling with a KV cache, token log-probs, LoRA, device, several processes, scripts, files.
Shapes: B rows, T positions, C = n_embd channels, V = vocab_size, nh heads of hs = C / nh channels, nkv of keys and values,
N = B * num_generations sampled rows, P = width of the left-padded prompts.
Left out: dropout (whatever is scored must be scored without it), beam search, paged caches.
"""
import contextlib
import copy
import hashlib
import math
import os
import signal
import socket
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class BadInput(ValueError):
    """Something the user can mend. The message is one line: the name, the value, the way out. Scripts exit with 2."""


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
            raise BadInput(f"n_embd = {config.n_embd} is not a multiple of n_head = {config.n_head}")
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

    @classmethod
    def from_pretrained(cls, name_or_path):
        """The policy in a published layout: a folder, a file or a name, as weights.load_pretrained takes it."""
        from weights import load_pretrained
        return load_pretrained(name_or_path)[0]

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

@dataclass
class Rollout:
    """N sampled rows: prompt left-padded to width P, then at most T sampled tokens; row i answers prompt i // num_generations."""
    tokens: torch.Tensor          # (N, P + T) ids
    real: torch.Tensor            # (N, P + T) False on the prompt's padding
    mask: torch.Tensor            # (N, T) True on sampled tokens, the end token included; what follows it is False
    logp: torch.Tensor            # (N, T) log-prob of each token under the distribution it was drawn from; 0 where masked
    entropy: torch.Tensor         # (N, T) entropy of that distribution, in nats; 0 where masked
    ended: torch.Tensor           # (N,) True where the end token was drawn
    kept: torch.Tensor = None     # (N, T, V) the tokens that truncated sampling could draw; None when it could draw all

    def __getitem__(self, rows):
        """The same rollout with only these rows (slice or index tensor)."""
        return Rollout(*(None if x is None else x[rows] for x in vars(self).values()))

    def completions(self):
        """Lists of ids, one per row, without the end token."""
        lengths = (self.mask.sum(1) - self.ended.long()).tolist()
        return [ids[:n] for ids, n in zip(self.tokens[:, -self.mask.shape[1]:].tolist(), lengths)]


def pad_left(rows):
    """Lists of ids -> tokens (B, P) and real (B, P), padded on the left to the longest."""
    P = max(map(len, rows))
    return (torch.tensor([[0] * (P - len(r)) + list(r) for r in rows]),
            torch.tensor([[False] * (P - len(r)) + [True] * len(r) for r in rows]))


def truncate(logits, top_k=0, top_p=1.0, min_p=0.0):
    """logits (N, V) -> the same with -inf where top-k, then top-p, then min-p forbid the token. At least one stays."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], -math.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        drop = probs.cumsum(-1) - probs >= top_p          # the more likely tokens have that much already
        logits = logits.masked_fill(drop.scatter(1, order, drop), -math.inf)
    if min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -math.inf)
    return logits


def draw(probs, u):
    """One token per row by inverting the CDF: probs (N, V), u (N,) uniform in [0, 1) -> (N,). Never one of probability 0."""
    cdf = probs.cumsum(-1)
    token = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).clamp(max=probs.shape[1] - 1)
    possible = probs.gather(1, token) > 0  # rounding in the sum can give a sliver to a token that has none
    if probs.device.type == "cpu" and not torch.compiler.is_compiling() and bool(possible.all()):  # the argmax is slow there
        return token[:, 0]
    return torch.where(possible, token, probs.argmax(-1, keepdim=True))[:, 0]


@torch.no_grad()
def generate(model, prompts, num_generations, max_new_tokens, *, eos, seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
             batch_size=0, retire=True, decoder=None):
    """Sample num_generations completions of every prompt (lists of ids, any lengths) -> Rollout.

    A prompt is computed once and its keys and values are copied to its group. The noise is drawn ahead from `seed`, one
    number per row and step, on the CPU, so that it is the same on every device and for every batch_size (rows decoded at
    once; 0: all), which changes memory only. Several processes sample their share of the prompts each and get all rows.
    retire: rows that have ended stop costing. decoder: a Decoder of this model, which changes speed only.
    Raises BadInput for an empty or over-long prompt and for temperature <= 0.
    """
    device, G, limit = model.wte.weight.device, num_generations, model.config.block_size
    if not temperature > 0:
        raise BadInput(f"temperature = {temperature}: must be above 0, since a group needs samples that differ")
    for i, ids in enumerate(prompts):
        if not 1 <= len(ids) <= limit - max_new_tokens:
            raise BadInput(f"prompt {i + 1} has {len(ids)} tokens: must be 1 to {limit - max_new_tokens} "
                           f"(block_size {limit} less max_completion_length {max_new_tokens})")
    prompt, real = (x.to(device) for x in pad_left(prompts))                                        # (B, P)
    (B, P), N = prompt.shape, len(prompts) * G
    noise = torch.rand(N, max_new_tokens, generator=torch.Generator().manual_seed(seed)).to(device)
    truncated = top_k or top_p < 1 or min_p > 0
    r = Rollout(tokens=torch.cat([prompt.repeat_interleave(G, 0), torch.full((N, max_new_tokens), eos, device=device)], 1),
                real=F.pad(real.repeat_interleave(G, 0), (0, max_new_tokens), value=True),
                mask=torch.zeros(N, max_new_tokens, dtype=torch.bool, device=device),
                logp=torch.zeros(N, max_new_tokens, device=device), entropy=torch.zeros(N, max_new_tokens, device=device),
                ended=torch.zeros(N, dtype=torch.bool, device=device),
                kept=None if not truncated else torch.ones(N, max_new_tokens, model.config.vocab_size, dtype=torch.bool,
                                                           device=device))
    step = max(1, batch_size // G) if batch_size else B
    mine = share(B)
    if decoder:
        decoder.refresh()
    for b in range(mine.start, mine.stop, step):
        end = min(b + step, mine.stop)
        rows = slice(b * G, end * G)
        decode(model, prompt[b:end], real[b:end], r[rows], noise[rows], eos, temperature, (top_k, top_p, min_p), retire, decoder)
    r = Rollout(*(None if x is None else gather(x[share(N, G)]) for x in vars(r).values()))
    T = int(r.mask.any(0).sum())
    return Rollout(r.tokens[:, :P + T], r.real[:, :P + T], r.mask[:, :T], r.logp[:, :T], r.entropy[:, :T], r.ended,
                   r.kept[:, :T] if truncated else None)


LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens: asking which rows have ended waits for the device


def decode(model, prompt, real, r, noise, eos, temperature, limits, retire=True, decoder=None):
    """Fill the rows r (views of a Rollout) with completions of prompt (B, P), left-padded where real (B, P) is False.

    A row that has ended gives its place in the cache to a later one that still runs, so that a step costs what runs.
    """
    (B, P), (N, T) = prompt.shape, r.mask.shape
    padded = not bool(real.all())
    model = decoder.model if decoder else model
    prefix = model.new_cache(B, P)
    h = model(prompt, real if padded else None, prefix)[:, -1].repeat_interleave(N // B, 0)         # (N, C)
    rows = torch.arange(N, device=h.device)  # of r, in the order of the cache; n of them are left
    sample(model.lm_head, h, r, rows, 0, P, noise, eos, temperature, limits)
    if decoder:
        return decoder(r, prefix.repeat_interleave(N // B, 2), noise, eos, temperature, limits, retire)
    cache = model.new_cache(N, P + T)
    cache[:, :, :, :, :P] = prefix.repeat_interleave(N // B, 2)
    for t in range(1, T):
        if retire and t % LOOK_EVERY.get(h.device.type, 16) == 0:
            runs = ~r.ended[rows]
            n = int(runs.sum())
            if n == 0:
                break
            free, late = (~runs[:n]).nonzero()[:, 0], n + runs[n:].nonzero()[:, 0]
            for i, j in zip(free.tolist(), late.tolist()):
                cache[:, :, i] = cache[:, :, j]
            rows[free] = rows[late]
            rows, cache = rows[:n], cache[:, :, :n]
        at = P + t
        h = model(r.tokens[rows, at - 1:at], r.real[rows, :at] if padded else None, cache, at - 1)[:, 0]
        sample(model.lm_head, h, r, rows, t, at, noise, eos, temperature, limits)


def sample(lm_head, h, r, rows, t, at, noise, eos, temperature, limits):
    """From hidden states h (n, C) draw token t of these rows (n,) of r, column `at` of its tokens. t, at: numbers or (1,)."""
    logits = lm_head(h).float() / temperature                                                       # (n, V)
    if r.kept is not None:
        logits = truncate(logits, *limits)
        r.kept[rows, t] = logits > -math.inf
    logits = logits - logits.amax(-1, keepdim=True)
    weights = logits.exp()                                   # the distribution times `total`: one pass over V less
    total = weights.sum(-1)                                                                         # (n,)
    token = draw(weights, noise[rows, t])                                                           # (n,)
    over = r.ended[rows]
    r.mask[rows, t] = ~over
    r.logp[rows, t] = (logits.gather(1, token[:, None])[:, 0] - total.log()).masked_fill(over, 0)
    r.entropy[rows, t] = (total.log() - (weights * logits).nansum(-1) / total).masked_fill(over, 0)  # 0 * -inf counts 0
    r.tokens[rows, at] = token.masked_fill(over, eos)
    r.ended[rows] = over | (token == eos)


class Decoder:
    """The steps of `decode` with every shape and address fixed, so that a CUDA graph launches one as a whole, where it would be
    some two hundred launches, and torch.compile compiles it once.

        decoder = Decoder(policy, torch.bfloat16)
        generate(policy, ..., decoder=decoder)

    Rows run in buffers of the decoder's own, which it keeps. The cache is read under a mask up to the next multiple of `bucket`
    positions, and the rows that run are halved when half of them have ended: a graph for each pair of the two. In bfloat16
    (under autocast) the Linear weights are copies, refreshed by generate, so that no step casts them. It stays with one model
    and one device. Raises BadInput for graphs of a model that is not on a GPU.
    """

    def __init__(self, model, dtype=torch.float32, compile=False, graphs=True, bucket=64):
        if graphs and not model.wte.weight.is_cuda:
            raise BadInput(f"cuda_graphs = True: the model is on {model.wte.weight.device}, where there are none; set it False")
        self.model, self.copies = model, []
        if dtype == torch.bfloat16:
            self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
            for module in self.model.modules():
                for name, p in list(module.named_parameters(recurse=False)) if isinstance(module, nn.Linear) else ():
                    setattr(module, name, nn.Parameter(p.detach().to(dtype), requires_grad=False))
                    self.copies.append((getattr(module, name), p))
        self.step = torch.compile(decode_step, dynamic=True) if compile else decode_step
        self.graphs, self.bucket, self.states = graphs, bucket, {}
        self.pool, self.captured = None, []  # all that were ever captured: their pool lives as long as they do

    @torch.no_grad()
    def refresh(self):
        """The copies <- the weights as they are now."""
        for mine, p in self.copies:
            mine.copy_(p)

    def state(self, r, prefix, settings):
        """(Rollout, noise, rows, cache, t, P, graphs) for rollouts like r and these settings, the same again while it is wide
        enough."""
        (N, width), T, device = r.tokens.shape, r.mask.shape[1], r.tokens.device
        state = self.states.get((N, T, settings))
        if state is None or state[0].tokens.shape[1] < width:
            self.states[N, T, settings] = state = None  # the buffers are given back before there are wider ones
            width = -(-width // self.bucket) * self.bucket
            own = Rollout(*(None if x is None else torch.zeros_like(x) for x in vars(r).values()))
            own.tokens, own.real = (x.new_zeros(N, width) for x in (r.tokens, r.real))
            cache = prefix.new_zeros(*prefix.shape[:4], width, prefix.shape[5])
            t, P = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
            state = own, torch.zeros(N, T, device=device), torch.arange(N, device=device), cache, t, P, {}
            self.states[N, T, settings] = state
        return state

    def __call__(self, r, prefix, noise, eos, temperature, limits, retire):
        """Tokens 1, 2, ... of the rows r, whose token 0 is drawn. prefix (n_layer, 2, N, nkv, P, hs): prompts' cache."""
        (N, T), P = r.mask.shape, prefix.shape[4]
        own, seeds, rows, cache, t, start, graphs = self.state(r, prefix, (eos, temperature, limits))
        pairs = [(mine[..., :x.shape[-1]], x) for mine, x in zip(vars(own).values(), vars(r).values()) if x is not None]
        for mine, given in [*pairs, (seeds, noise), (cache[:, :, :, :, :P], prefix), (rows, torch.arange(N, device=rows.device))]:
            mine.copy_(given)
        t.fill_(1), start.fill_(P)
        n = N
        for i in range(1, T):
            if retire and i % LOOK_EVERY.get(rows.device.type, 16) == 0:
                ended, before = own.ended[rows[:n]], n
                runs = n - int(ended.sum())
                if runs == 0:
                    break
                while n > 3 and runs <= n // 2:  # not down to one row, for which torch.compile would compile again
                    n //= 2
                if n < before:
                    order = ended.long().argsort(stable=True)[:n]  # those that run first
                    cache[:, :, :n], rows[:n] = cache[:, :, order], rows[order]
            S = -(-(P + i) // self.bucket) * self.bucket
            self.launch(graphs, (n, S), lambda: self.step(
                self.model, own, rows[:n], cache[:, :, :n, :, :S], t, start, seeds, eos, temperature, limits))
        for mine, given in pairs:
            given.copy_(mine)

    def launch(self, graphs, key, step):
        """The step itself the first time, which readies the libraries; from the second on its graph."""
        if not self.graphs or key not in graphs:
            graphs[key] = None
            return step()
        if graphs[key] is None:
            graphs[key], self.pool = self.capture(step)
            self.captured.append(graphs[key])
        graphs[key].replay()

    def capture(self, step):
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError as e:
            raise BadInput(f"cuda_graphs = True: a step could not be captured ({str(e).splitlines()[0]}); set it False") from e
        return graph, graph.pool()


def decode_step(model, r, rows, cache, t, P, noise, eos, temperature, limits):
    """Token t of these rows (n,) of r, and t <- t + 1. cache (n_layer, 2, n, nkv, S, hs); t, P (1,)."""
    at = P + t
    h = model(r.tokens[rows, at - 1][:, None], r.real[rows, :cache.shape[4]], cache, at - 1)[:, 0]  # (n, C)
    sample(model.lm_head, h, r, rows, t, at, noise, eos, temperature, limits)
    t += 1


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
        raise BadInput(f"lora_rank = {rank}, lora_layers = {layers}: rank from 1, layers out of {LORA_LAYERS}")
    if any(isinstance(module, LoRA) for module in model.modules()):
        raise BadInput("the model has LoRA adapters already: merge them first")
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in layers and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank, alpha))
    return model


# ---------------------------------------------------------------------------------------------------------------
# device and precision

def pick_device(name):
    """torch.device for "auto", "cpu", "cuda", "cuda:1", ...; BadInput when it is not there. Under torchrun each process of a
    machine has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world()[1] > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise BadInput(f"device = {name!r}: not on this machine ({str(e).splitlines()[0]}); try device = 'auto'") from e
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)
    return torch.device(name)


def fast_dtype(device):
    """bfloat16 where the hardware multiplies it faster than float32, else float32."""
    cpu_has_it = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if torch.device(device).type == "cuda" or cpu_has_it else torch.float32


def pick_dtype(name, device):
    """torch dtype of the forward passes for "float32", "bfloat16", "fast" (see fast_dtype) or "auto": bfloat16 on cuda, else
    float32."""
    if name == "fast":
        return fast_dtype(device)
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and device.type == "cuda") else torch.float32


def autocast(device, dtype):
    """Forward passes in `dtype`, weights and losses in float32."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def memory(device):
    """Bytes in use: by torch on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_memory(device, root="/"):
    """Bytes to be had: of a GPU's memory, or of the machine's within the limits of this process's cgroups (v2). inf: nothing
    says."""
    if device.type == "cuda":  # what torch holds for later is free too
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def read(*path):
        path = Path(root, *path)
        return [line.split() for line in path.read_text().splitlines()] if path.is_file() else []

    free = [1024 * int(line[1]) for line in read("proc/meminfo") if line[0] == "MemAvailable:"]
    group = Path("sys/fs/cgroup", *(line[0][4:] for line in read("proc/self/cgroup") if line[0].startswith("0::/")))
    for folder in (group, *group.parents):  # what is allowed higher up holds as well; in a container the top is its own
        for (limit,), (used,) in zip(read(folder, "memory.max"), read(folder, "memory.current")):
            if limit != "max":
                files = [int(n) for name, n in read(folder, "memory.stat") if name in ("active_file", "inactive_file")]
                free.append(int(limit) - int(used) + sum(files))  # copies of files give way
    return min(free, default=math.inf)


# ---------------------------------------------------------------------------------------------------------------
# several processes, as torchrun starts them: all hold the same weights and the same batch, each computes its share of the
# rows, and what came of it is put together for all. In one process these functions give back what they are given.


def world():
    """(number of this process, number of processes). Number 0 alone prints and writes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def share(n, group=1):
    """The slice of n rows that is this process's: whole groups, in the order of processes, as even as can be, perhaps none."""
    (rank, processes), groups = world(), n // group
    return slice(groups * rank // processes * group, groups * (rank + 1) // processes * group)


@contextlib.contextmanager
def talking():
    """Ends this process when another is gone, a little later than that one, so that torchrun names the right one."""
    try:
        yield
    except RuntimeError as e:
        time.sleep(1)
        raise SystemExit(f"stopped: another process is gone, which has said why or is named below ({str(e).split('. ')[0]}); "
                         "the last checkpoint stands") from None


def gather(rows):
    """A list or a tensor (n, ...) of each process, n may differ -> all in a line, in the order of processes, for all."""
    if world()[1] == 1:
        return rows
    parts, tensor = [None] * world()[1], isinstance(rows, torch.Tensor)
    with talking():
        dist.all_gather_object(parts, rows.cpu().clone() if tensor else rows)  # a clone: a view would bring all that it views
    return torch.cat(parts).to(rows.device) if tensor else sum(parts, [])


def reduce(tensors):
    """Each tensor <- its sum over the processes, in place."""
    if world()[1] > 1:
        with talking():
            for x in tensors:
                dist.all_reduce(x)


@contextlib.contextmanager
def one_by_one():
    """Process 0 goes through this block before the others: what it has made, they find."""
    if world()[0]:
        gather([])
    yield
    if not world()[0]:
        gather([])


# ---------------------------------------------------------------------------------------------------------------
# scripts


def derive(*what):
    """A seed for one purpose: every random draw depends on settings and iteration alone, never on what was drawn before."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "big")


def hash_of(model):
    """Short hash of all weights."""
    h = hashlib.sha256()
    for x in model.state_dict().values():
        h.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


@contextlib.contextmanager
def interrupts():
    """Within this block SIGINT and SIGTERM do not kill: they make the yielded function return True, so that work can save."""
    seen = []

    def handler(number, frame):
        if seen:  # the second one is in earnest
            raise KeyboardInterrupt("at once; what was saved last stands")
        seen.append(number)

    old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for s, previous in old.items():
            signal.signal(s, previous)


def run_script(main):
    """main(argv) with the exit codes of every script here: 0 done, 1 stopped, 2 bad input (one line), 130 interrupted.
    Under torchrun a process names itself and its machine in the line it ends with."""
    if dist.is_available() and dist.is_torchelastic_launched():
        dist.init_process_group()  # gloo for what is on the CPU, nccl for what is on GPUs
    rank, processes = world()
    who = f"rank {rank} of {processes} on {socket.gethostname()}: " if processes > 1 else ""
    if rank:
        sys.stdout = open(os.devnull, "w")
    try:
        main(sys.argv[1:])
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    except BadInput as e:
        print(f"error: {who}{e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as e:
        if not rank:  # all end alike
            print(f"interrupted: {who}{e}", file=sys.stderr)
        sys.exit(130)
    except SystemExit as e:
        raise SystemExit(f"{who}{e.code}" if isinstance(e.code, str) else e.code) from None


# ---------------------------------------------------------------------------------------------------------------
# files: written to a temporary name and renamed, read without running what is in them

def find_below(folder, name):
    """Path of the first file called `name` below `folder`; BadInput when there is none."""
    for root, _, files in sorted(os.walk(folder)):
        if name in files:
            return os.path.join(root, name)
    raise BadInput(f"{name} is missing below {folder}: reinstall the package")


def save_file(path, kind, **content):
    """Write a checkpoint of this kind ("policy", "judge", "run", ...). A reader sees the old file or the new, never half.
    BadInput when the disk is full or may not be written."""
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(tmp, "wb") as f:
            torch.save({"kind": kind, **content}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch's writer turns the first into the second
        reason = next((x.strerror or str(x) for x in (e, e.__context__) if isinstance(x, OSError)), str(e).splitlines()[0])
        raise BadInput(f"{path}: could not be written ({reason}); make room, or choose another folder. What was saved before "
                       "stands") from e
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def load_file(path, kind):
    """The dict that save_file wrote. BadInput names the file and the reason when it is missing, broken or of another kind."""
    if not os.path.exists(path):
        raise BadInput(f"{path}: no such file")
    try:
        damaged = zipfile.ZipFile(path).testzip()  # torch itself does not look at the check sums
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch reports broken files in a dozen ways
        raise BadInput(f"{path}: not a readable checkpoint, perhaps cut short ({type(e).__name__})") from e
    if damaged:
        raise BadInput(f"{path}: damaged, a check sum is wrong")
    found = content.get("kind") if isinstance(content, dict) else None
    if found != kind:
        raise BadInput(f"{path}: holds {found or 'something else'!r} where a checkpoint of kind {kind!r} is needed")
    return content


def save_gpt(path, model, **extra):
    """Write weights and shape of a policy."""
    save_file(path, "policy", config=asdict(model.config), model=model.state_dict(), **extra)


def load_gpt(path):
    """The policy that save_gpt wrote, on the CPU."""
    content = load_file(path, "policy")
    return load_weights(path, content, GPT)


def load_weights(path, content, make):
    """make(GPTConfig) with the weights in `content`; BadInput when they do not fit."""
    try:
        model = make(GPTConfig(**content["config"]))
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise BadInput(f"{path}: weights and shape do not fit ({str(e).splitlines()[0]})") from e
    return model
