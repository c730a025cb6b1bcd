"""
Decoding on a GPU, one CUDA graph per token of all rows: rollout.decode, only faster. Its tricks,
and their reasons:

    one graph per token     a model launches some three hundred small kernels for a token, and on a
                            GPU launching them takes longer than running them
    fixed memory            a graph can only repeat the same shapes at the same addresses
    sizes rounded up        so a graph serves many numbers of rows and tokens
    CHUNK                   to see whether rows have ended, Python must wait for the GPU. Rows that
                            have are read until the next look, and their results are ignored
    HalfWeights             autocast would cast all weights again in each graph
    draw_by_blocks          a cumulative sum over a large vocabulary is slow

Before a run uses it, run/precision.py compares it with plain float32. rollout.decode still serves
environments, truncated sampling, and a model that is not the policy or not a model.GPT. Without a
GPU, as in the tests, the same step runs without a graph.

Shapes: B prompts of width P, N rows, of which a step reads n, T tokens of a completion, W tokens
that a step sees of a row, C channels, V = vocab_size. See model.py.
"""
import copy
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import GPT, Cache
from rollout import decode, draw, drop_finished, generate

# ------------------------------------------------------------------------------------------------
# from logits to a token

BLOCK = 128     # tokens of the vocabulary


def draw_by_blocks(probs, u):
    """Draw a token per row by inverting the CDF in two steps, first a block of tokens, then a token
    in it. It reads probs once, and never draws a token of probability 0.

    probs (n, V) with V a multiple of BLOCK, u (n,) uniform in [0, 1) -> ids (n,).
    """
    blocks = probs.view(len(probs), -1, BLOCK)
    sums = blocks.sum(-1)                                                       # (n, V / BLOCK)
    block = draw(sums, u)[:, None]                                              # (n, 1)

    # where in its block does u point?
    cdf = sums.cumsum(-1)
    size = sums.gather(1, block)
    start = cdf.gather(1, block) - size
    inside = (u[:, None] * cdf[:, -1:] - start) / size                          # (n, 1)
    inside = inside[:, 0].clamp(0, 1 - 2 ** -24)    # rounding may lead just outside
    weights = blocks.take_along_dim(block[:, :, None], 1)[:, 0]                 # (n, BLOCK)
    return block[:, 0] * BLOCK + draw(weights, inside)


def sample(logits, u, temperature):
    """Draw a token per row by random numbers u (n,) from logits (n, V) in float32 -> tokens (n,),
    their log-probs (n,), entropies (n,)."""
    missing = -logits.shape[1] % BLOCK
    if missing:
        logits = F.pad(logits, (0, missing), value=-math.inf)
    if temperature != 1:
        logits = logits / temperature
    probs = logits.softmax(-1)
    token = draw_by_blocks(probs, u)
    logp = probs.gather(1, token[:, None])[:, 0].log()
    return token, logp, torch.special.entr(probs).sum(-1)   # entr(p) = -p log p, and 0 at p = 0


# ------------------------------------------------------------------------------------------------
# the tensors of a step, at addresses that do not change

CHUNK = 16      # tokens between two looks at which rows have ended


class HalfWeights:
    """A copy of a GPT with its Linears in bfloat16, which shares all other weights. The head's rows
    are padded with zeros to a multiple of BLOCK, so that logits need not be."""

    def __init__(self, model):
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.pairs = []         # (weight in bfloat16, the model's own)
        head = self.model.lm_head
        for layer in [*self.model.h.modules(), head]:
            own = layer.named_parameters(recurse=False) if isinstance(layer, nn.Linear) else ()
            for name, weight in list(own):
                half = weight.detach().bfloat16()
                if layer is head:
                    half = F.pad(half, (0, 0, 0, -len(weight) % BLOCK))
                setattr(layer, name, nn.Parameter(half, requires_grad=False))
                self.pairs.append((half[:len(weight)], weight))

    def refresh(self):
        """Copy the model's current weights."""
        for half, weight in self.pairs:
            half.copy_(weight)


@dataclass
class Window:
    """The first n rows and W tokens of a Memory, as a Cache for GPT.forward."""
    layers: list        # (keys, values) of each layer, (n, nkv, W, hs)
    length: Tensor      # (1,) tokens read; on the device, where forward advances it

    def extend(self, i, k, v):
        """Write k and v (n, nkv, 1, hs) to layer i -> all its W keys and values."""
        keys, values = self.layers[i]
        keys.index_copy_(2, self.length, k)
        values.index_copy_(2, self.length, v)
        return keys, values


class Memory:
    """The keys and values of N rows, with room for S tokens each, and the tokens drawn since the
    last look."""

    def __init__(self, prompts, N, S):
        """prompts: a Cache with the shape of those to load."""
        self.N = N
        self.S = S
        self.dtype = prompts.layers[0].dtype
        device = prompts.layers[0].device
        zeros = functools.partial(torch.zeros, device=device)
        # (keys, values) of each layer, (N, nkv, S, hs). Two tensors, since a compiled step writes
        # into a part of one by copying all of it
        self.layers = []
        for kv in prompts.layers:
            shape = (N, kv.shape[2], S, kv.shape[4])
            self.layers.append((kv.new_zeros(shape), kv.new_zeros(shape)))
        self.seen = zeros(N, S, dtype=torch.bool)           # the attention mask
        self.length = zeros(1, dtype=torch.long)            # tokens read
        self.ids = zeros(N, 1, dtype=torch.long)            # the next token to read

        # the tokens drawn since the last look: how many, their noise, their numbers
        self.t = zeros(1, dtype=torch.long)
        self.noise = zeros(N, CHUNK)
        self.drawn = {"token": zeros(N, CHUNK, dtype=torch.long), "logp": zeros(N, CHUNK),
                      "entropy": zeros(N, CHUNK), "values": zeros(N, CHUNK)}

    def load(self, prompts, attention_mask, n):
        """Begin with n copies of each sequence of a Cache of prompts; attention_mask (B, P) or
        None."""
        P = prompts.length
        N = n * prompts.layers[0].shape[1]
        for (keys, values), kv in zip(self.layers, prompts.layers):
            keys[:N, :, :P], values[:N, :, :P] = kv.repeat_interleave(n, 1)
        self.seen[:N] = True
        if attention_mask is not None:
            self.seen[:N, :P] = attention_mask.repeat_interleave(n, 0)
        self.length.fill_(P)

    def keep(self, rows):
        """Keep only these rows (n,), in this order, as the first n. Copy only those that move."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for x in (self.ids, self.seen, *sum(self.layers, ())):
            x[moved] = x[rows[moved]]


def write(r, rows, t, drawn, ends):
    """Write tokens t, t + 1, .. of these rows with their numbers, (n, k) each, into r. Rows that
    have ended stay as they are."""
    # which tokens come before the end, or are the end?
    token = drawn["token"]
    is_end = torch.zeros_like(token, dtype=torch.bool)
    for end in ends:
        is_end |= token == end
    after = is_end.cumsum(1) > is_end                                           # (n, k)
    running = ~(after | r.ended[rows, None])

    # as Rollout.record does with one of them
    columns = slice(t, t + token.shape[1])
    r.tokens[:, r.tokens.shape[1] - r.logp.shape[1]:][rows, columns] = token.where(running, ends[0])
    r.completion_mask[rows, columns] = running
    for name, x in drawn.items():
        if name != "token" and getattr(r, name) is not None:
            getattr(r, name)[rows, columns] = x.masked_fill(~running, 0)
    r.ended[rows] |= (is_end & running).any(1)


# ------------------------------------------------------------------------------------------------
# the step and its graphs

ROWS = 32       # the fewest rows of a graph
WIDTH = 64      # the fewest tokens of a row in a graph
MOST = 32       # graphs, which take memory; a step of any further size runs without one


def size_for(n, least):
    """Round n up to one of few sizes: least, then 3/2, 2, 3, 4, 6, .. times as much."""
    size = least
    while size < n:
        size *= 2
    three_quarters = size * 3 // 4
    return three_quarters if max(n, least) <= three_quarters else size


def read_one(model, ids, attention_mask, layers, length):
    """Read a token of each row: ids (n, 1), attention_mask (n, W) -> hidden states (n, C). layers
    and length are a Window's. It changes no length, so a second call repeats the first."""
    return model(ids, attention_mask, Window(layers, length.clone()))[:, 0]


def capture(function, pool):
    """Capture all that function() launches in a graph -> a function that launches it at once."""
    graph = torch.cuda.CUDAGraph()
    # other threads, such as NCCL's, may go on meanwhile: they are not captured
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph.replay


class Decoder:
    """rollout.decode for one GPT. read, sample: read_one and sample, perhaps compiled."""

    def __init__(self, model, read=read_one, sample=sample):
        self.model = model
        self.read = read
        self.sample = sample
        self.half = None        # HalfWeights, made at the first call under autocast
        self.now = None         # the GPT that the steps run: the model, or half.model
        self.memory = None
        self.graphs = {}        # {(n, W, temperature): a function that launches the step's graph}
        self.V = len(model.lm_head.weight)
        self.on_gpu = model.lm_head.weight.is_cuda
        self.pool = None        # memory that all graphs share, since no two run at once

    def prepare(self, prompts, N, S):
        """Make room for N rows of S tokens after a Cache of prompts. New memory has new addresses,
        so the graphs are captured again."""
        old = self.memory
        dtype = prompts.layers[0].dtype
        if old is None or old.dtype != dtype or old.N < N or old.S < S:
            if old:
                N, S = max(N, old.N), max(S, old.S)
            self.memory = old = None        # free it before a larger one is made
            self.graphs.clear()
            if self.on_gpu:
                self.pool = torch.cuda.graph_pool_handle()      # the last one ended with its graphs
            # attention's kernels need a multiple of 16
            self.memory = Memory(prompts, size_for(N, ROWS), -(-S // 16) * 16)

    def draw(self, h, temperature):
        """Draw the next token of rows (n,) from the hidden states h (n, C) before it."""
        m = self.memory
        n = len(h)
        logits = self.now.lm_head(h).float()                    # (n, V), with HalfWeights more
        logits[:, self.V:] = -math.inf
        u = m.noise[:n].index_select(1, m.t)[:, 0]
        token, logp, entropy = self.sample(logits, u, temperature)
        drawn = {"token": token, "logp": logp, "entropy": entropy}
        if self.now.value_head is not None:
            drawn["values"] = self.now.value_head(h)
        m.ids[:n, 0] = token
        for name, x in drawn.items():
            m.drawn[name][:n].index_copy_(1, m.t, x[:, None])
        m.t += 1

    def read_and_draw(self, n, W, temperature):
        """Read the last of W tokens of n rows, and draw the next."""
        m = self.memory
        layers = [(keys[:n, :, :W], values[:n, :, :W]) for keys, values in m.layers]
        h = self.read(self.now, m.ids[:n], m.seen[:n, :W], layers, m.length)    # (n, C)
        m.length += 1
        self.draw(h, temperature)

    def step(self, n, W, temperature):
        """read_and_draw for at least n rows and W tokens."""
        size = min(size_for(n, ROWS), self.memory.N), min(size_for(W, WIDTH), self.memory.S)
        key = *size, temperature
        if key in self.graphs:
            return self.graphs[key]()

        # the first of its size runs as it is, which loads its kernels. To capture is not to run
        step = functools.partial(self.read_and_draw, *key)
        step()
        if self.on_gpu and len(self.graphs) < MOST:
            self.graphs[key] = capture(step, self.pool)

    def __call__(self, model, prompt, attention_mask, r, noise, sampling, respond=None):
        """See rollout.decode."""
        if model is not self.model or respond or r.allowed is not None:
            return decode(model, prompt, attention_mask, r, noise, sampling, respond)
        B, P = prompt.shape
        N, T = r.logp.shape

        # the current weights, in bfloat16 under autocast
        self.now = model
        if torch.is_autocast_enabled(prompt.device.type):
            self.half = self.half or HalfWeights(model)
            self.half.refresh()
            self.now = self.half.model

        # the prompts are read once for all of their completions
        cache = Cache(P)
        h = self.now(prompt, attention_mask, cache)[:, -1].repeat_interleave(N // B, 0)     # (N, C)
        self.prepare(cache, N, P + T)
        self.memory.load(cache, attention_mask, N // B)
        del cache

        # CHUNK tokens, then a look: rows that still run fill the places of those that have ended
        rows = torch.arange(N, device=prompt.device)    # of r, in the order of the memory
        for start in range(0, T, CHUNK):
            n = len(rows)
            k = min(CHUNK, T - start)
            self.memory.noise[:n, :k] = noise[rows, start:start + k]
            self.memory.t.zero_()
            for t in range(start, start + k):
                if t == 0:
                    self.draw(h, sampling.temperature)
                else:
                    self.step(n, P + t, sampling.temperature)
            drawn = {name: x[:n, :k] for name, x in self.memory.drawn.items()}
            write(r, rows, start, drawn, sampling.eos)
            rows = drop_finished(rows, self.memory, r.ended)
            if len(rows) == 0:
                break


def generate_by_graph(model, **how):
    """rollout.generate, by graphs if the model is a GPT. how: see Decoder."""
    if not isinstance(model, GPT):
        return generate
    return functools.partial(generate, decode=Decoder(model, **how))
