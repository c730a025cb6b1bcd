"""
Decoding for GPUs and for torch.compile: the same tokens as sample.decode, with every shape and
address fixed.

A step of decode launches some two hundred small kernels, and on a GPU launching them takes longer
than running them. With fixed shapes and addresses a CUDA graph launches a step as a whole, and
torch.compile compiles it once. `"graphs" not in cfg.speed` and no "generate" in cfg.compile turn
this file off.
"""
import copy
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn

import sample
from run.head import operand, set_product
from run.script import BadInput
from sample import Rollout, prefill, sample_token


class Decoder:
    """A drop-in for sample.decode, for one model on one device.

        generate(policy, ..., decode=Decoder(policy, torch.bfloat16))

    Rows run in buffers that the decoder keeps. Attention reads the cache under a mask up to the
    next multiple of `bucket` positions. With drop the rows that run are halved when half of them
    have ended. With graphs each pair of the two is one CUDA graph; with compile they share compiled
    code. In bfloat16 (under autocast) the Linear weights are copies, so that no step casts them;
    each call refreshes them. BadInput for graphs without a GPU, ValueError for another model.
    """

    def __init__(self, model, dtype=torch.float32, compile=False, graphs=True, drop=True,
                 bucket=64):
        device = model.wte.weight.device
        if graphs and device.type != "cuda":
            raise BadInput(f"speed: the model is on {device}, which has no CUDA graphs; leave out "
                           "'graphs'")
        self.original = model
        self.model, self.copies = model, []
        if dtype == torch.bfloat16:
            self.model, self.copies = with_copies_of_linears(model, dtype)
        self.step = torch.compile(decode_step, dynamic=True) if compile else decode_step
        self.graphs = graphs
        self.drop = drop
        self.bucket = bucket
        self.buffers = {}     # (N, T, sampling) -> Buffers
        # a stream of its own: torch frees cuBLAS's memory of all graphs that share one with a
        # graph that is destroyed
        self.stream = torch.cuda.Stream(device) if graphs else None
        self.pool = None      # graphs share one memory pool,
        self.captured = []    # which lives as long as any graph that was ever captured in it

    @torch.no_grad()
    def __call__(self, model, prompt, attention_mask, r, noise, sampling, respond=None):
        """Fills the rows r with completions of prompts (B, P), as sample.decode does."""
        if model is not self.original:
            raise ValueError("a Decoder samples from the model that it was made for")
        N, T = r.mask.shape
        P = prompt.shape[1]
        for mine, p in self.copies:
            mine.copy_(p)
        prefix = prefill(self.model, prompt, attention_mask, r, noise, sampling, respond)
        prefix = prefix.repeat_interleave(N // len(prompt), 2)       # (n_layer, 2, N, nkv, P, hs)
        own = self.buffers_for(r, prefix, sampling)
        own.load(r, prefix, noise)
        n = N
        for i in range(1, T):
            if self.drop and i % sample.CHECK_EVERY.get(prompt.device.type, 16) == 0:
                n = own.halve(n)
                if n == 0:
                    break
            S = -(-(P + i) // self.bucket) * self.bucket
            self.launch(own, n, S, sampling)
            if respond:
                respond(own.rollout, own.rows[:n], i, P + i)
        own.store(r)

    def buffers_for(self, r, prefix, sampling):
        """The buffers for rollouts like r: the same again while they are wide enough."""
        N, T = r.mask.shape
        width = r.tokens.shape[1]
        key = (N, T, sampling)
        own = self.buffers.get(key)
        if own is None or own.rollout.tokens.shape[1] < width:
            self.buffers[key] = own = None   # give the memory back before taking more
            self.buffers[key] = own = new_buffers(r, prefix, -(-width // self.bucket) * self.bucket)
        return own

    def launch(self, own, n, S, sampling):
        """One step of n rows over S positions: by itself the first time, which readies the
        libraries, from the second time on as a graph."""
        def step():
            cache = [(k[:n, :, :S], v[:n, :, :S]) for k, v in own.cache]
            self.step(self.model, own.rollout, own.rows[:n], cache, own.t, own.start, own.noise,
                      sampling)

        key = (n, S)
        if not self.graphs or key not in own.graphs:
            own.graphs[key] = None
            step()
            return
        if own.graphs[key] is None:
            own.graphs[key] = self.capture(step)
        own.graphs[key].replay()

    def capture(self, step):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream,
                                  capture_error_mode="thread_local"):
                step()
        except RuntimeError as e:
            reason = str(e).splitlines()[0]
            raise BadInput(
                f"speed: a decoding step could not be captured ({reason}); leave out "
                "'graphs'") from e
        self.pool = graph.pool()
        self.captured.append(graph)
        return graph


@dataclass
class Buffers:
    """Memory whose addresses graphs remember."""
    rollout: Rollout        # (N, T) and (N, width)
    noise: torch.Tensor     # (N, T)
    rows: torch.Tensor      # (N,) of the rollout, in the order of the cache
    cache: list             # keys and values (N, nkv, width, hs) of each layer
    t: torch.Tensor         # (1,) the token to draw next
    start: torch.Tensor     # (1,) width of the prompts
    graphs: dict

    def load(self, r, prefix, noise):
        P = prefix.shape[4]
        for mine, given in self.pairs(r):
            mine.copy_(given)
        self.noise.copy_(noise)
        for layer, given in zip(self.cache, prefix):
            for mine, x in zip(layer, given):
                mine[:, :, :P].copy_(x)
        self.rows.copy_(torch.arange(len(self.rows), device=self.rows.device))
        self.t.fill_(1)
        self.start.fill_(P)

    def store(self, r):
        for mine, given in self.pairs(r):
            given.copy_(mine)

    def pairs(self, r):
        """(tensor here, the one of r), cut to the width of r."""
        for mine, given in zip(vars(self.rollout).values(), vars(r).values()):
            if given is not None:
                yield mine[..., :given.shape[-1]], given

    def halve(self, n):
        """Number of rows that still need a place, after half of n made room as often as they could;
        0 when all have ended. The rows that run come first."""
        ended = self.rollout.ended[self.rows[:n]]
        running = n - int(ended.sum())
        if running == 0:
            return 0
        fewer = n
        while fewer > 3 and running <= fewer // 2:  # torch.compile would compile one row again
            fewer //= 2
        if fewer < n:
            order = ended.long().argsort(stable=True)[:fewer]
            for layer in self.cache:
                for x in layer:
                    x[:fewer] = x[order]
            self.rows[:fewer] = self.rows[order]
        return fewer


def new_buffers(r, prefix, width):
    N, T = r.mask.shape
    device = r.tokens.device
    shape = (*prefix.shape[2:4], width, prefix.shape[5])                    # (N, nkv, width, hs)
    rollout = r.map(torch.zeros_like)
    rollout.tokens = r.tokens.new_zeros(N, width)
    rollout.attention_mask = r.attention_mask.new_zeros(N, width)
    return Buffers(
        rollout=rollout,
        noise=torch.zeros(N, T, device=device),
        rows=torch.arange(N, device=device),
        cache=[(prefix.new_zeros(shape), prefix.new_zeros(shape)) for _ in prefix],
        t=torch.zeros(1, dtype=torch.long, device=device),
        start=torch.zeros(1, dtype=torch.long, device=device),
        graphs={})


def with_copies_of_linears(model, dtype):
    """A copy of the model that shares all but its Linears' weights, and pairs (copy, original). A
    value head stays in float32."""
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    head = twin.lm_head
    pairs = []
    for module in (*twin.h.modules(), head):
        if isinstance(module, nn.Linear):
            for name, p in list(module.named_parameters(recurse=False)):
                mine = p.detach().to(dtype)
                if module is head:
                    mine = operand(head.product, mine, dtype)   # may have more rows than the head
                setattr(module, name, nn.Parameter(mine, requires_grad=False))
                pairs.append((mine[:len(p)], p))
    if len(head.weight) > head.out_features:
        set_product(twin, functools.partial(first_logits, head.product, head.out_features))
    return twin, pairs


def first_logits(product, V, h, weight):
    """Logits (..., V) of a head whose weight has more rows than V."""
    return product(h, weight)[..., :V]


def decode_step(model, r, rows, cache, t, P, noise, sampling):
    """Draws token t of these rows (n,) of r and adds 1 to t. cache: see step_states."""
    column = P + t
    idx = r.tokens[rows, column - 1][:, None]                                       # (n, 1)
    S = cache[0][0].shape[2]
    h = step_states(model, idx, r.attention_mask[rows, :S], cache, column - 1)
    sample_token(model, h[:, 0], r, rows, t, column, noise, sampling)
    t += 1


def step_states(model, idx, attention_mask, cache, at):
    """GPT.forward for the one position `at`, a tensor (1,), so that no shape depends on it.

    idx (n, 1), attention_mask (n, S), cache: keys and values (n, nkv, S, hs) of each layer ->
    (n, 1, C). Attention runs over all S positions under masks of numbers to add, made once for all
    layers. torch.compile copies a cache that is one tensor, in each layer and step.
    """
    config = model.config
    S = attention_mask.shape[1]
    key = torch.arange(S, device=idx.device)
    pos = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, at]                        # (n, 1)
    seen = (attention_mask & (key <= at) | (key == at))[:, None, None]              # (n, 1, 1, S)
    windowed = bool(config.local_layers) and S > config.window
    near = seen & (key > at - config.window) if windowed else seen
    mask, local_mask = (as_numbers(m, cache[0][0].dtype) for m in (seen, near))

    extend_caches = [functools.partial(extend_at, keys, values, at) for keys, values in cache]
    return model.blocks(idx, pos, mask, local_mask, extend_caches)


def extend_at(keys, values, at, k, v):
    """model.extend for the one position `at`, a tensor (1,) -> all S positions of the cache."""
    keys.index_copy_(2, at, k.to(keys.dtype))                                   # (n, nkv, S, hs)
    values.index_copy_(2, at, v.to(values.dtype))
    return keys.to(k.dtype), values.to(v.dtype)


def as_numbers(mask, dtype):
    """0 where the mask is True, -inf elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
