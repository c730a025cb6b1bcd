"""
Decoding on a GPU: a token of all rows as one CUDA graph. It does what rollout.decode does, and is
only faster.

To read a token and draw the next one, a model launches some three hundred small kernels, and on a
GPU launching them takes longer than running them. A CUDA graph launches all of them at once, but
it can only repeat the same shapes at the same addresses. So what a step works with is kept between
calls, and there is a graph for each size: a number of rows, and of tokens that are read, both
rounded up. Rows that have ended are read until the next look, their results ignored.

Before a run uses it, run/precision.py compares it with plain float32. What it does not take is
decoded by rollout.decode: environments, truncated sampling, a model that is not the policy or not a
model.GPT. Without a GPU the same step runs without a graph, as in the tests.

Shapes: B prompts of width P, N rows, n of which the step reads, T tokens of a completion, W tokens
of a row that are read, C channels, V = vocab_size. See model.py.
"""
import copy
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast import has_half_product
from model import GPT, Cache
from rollout import decode, draw, drop_finished, generate

CHUNK = 16      # tokens between two looks at which rows have ended, each of which waits for the GPU
ROWS = 32       # the fewest that a graph reads
WIDTH = 64      # the fewest tokens of a row
MOST = 32       # graphs; a step of a further size runs without one
BLOCK = 128     # tokens of the vocabulary that are summed before one of them is looked for

# ------------------------------------------------------------------------------------------------
# from logits to a token


def draw_by_blocks(probs, u):
    """Draw a token per row by inverting the CDF in two steps, a block of tokens and one of them:
    probs (n, V) with V a multiple of BLOCK, u (n,) uniform in [0, 1) -> ids (n,). It reads probs
    once, and never draws a token of probability 0."""
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
    """Draw a token per row by numbers u (n,) from logits (n, V) in float32 -> the tokens (n,),
    their log-probs (n,), the entropies (n,)."""
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
# what a step works with, at addresses that do not change


def size_for(n, least):
    """n rounded up to one of few sizes: least, and from there on 3, 4, 6, 8, 12, .. halves of
    it."""
    size = least
    while size < n:
        size *= 2
    return size * 3 // 4 if least < size and n <= size * 3 // 4 else size


class HalfWeights:
    """A GPT that shares all weights of another but those of its Linears: these are in bfloat16.
    Autocast would cast them again for each token of a graph. The head has rows of zeros behind
    those of the vocabulary, up to a multiple of BLOCK."""

    def __init__(self, model):
        shared = {id(p): p for p in model.parameters()}
        self.model = copy.deepcopy(model, shared)
        self.pairs = []         # (weight in bfloat16, the model's own)
        head = self.model.lm_head
        for layer in (*self.model.h.modules(), *[head] * has_half_product()):
            for name, own in list(layer.named_parameters(recurse=False)):
                if isinstance(layer, nn.Linear):
                    half = own.detach().bfloat16()
                    if layer is head:
                        half = F.pad(half, (0, 0, 0, -len(own) % BLOCK))
                    setattr(layer, name, nn.Parameter(half, requires_grad=False))
                    self.pairs.append((half[:len(own)], own))

    def refresh(self):
        """Take over the model's weights as they are now."""
        for half, own in self.pairs:
            half.copy_(own)


@dataclass
class Window:
    """The first n rows and W tokens of a Memory, as a Cache for GPT.forward."""
    layers: list        # (keys, values) of each layer, (n, nkv, W, hs)
    length: Tensor      # (1,) tokens that were read; on the device, as forward counts it on

    def extend(self, i, k, v):
        """Write k and v (n, nkv, 1, hs) to layer i, and return all W keys and values of it."""
        keys, values = self.layers[i]
        keys.index_copy_(2, self.length, k)
        values.index_copy_(2, self.length, v)
        return keys, values


class Memory:
    """What was read of N rows with room for S tokens each, and what was drawn since the last
    look."""

    def __init__(self, prompts, N, S):
        """prompts: a Cache like those that will be loaded."""
        self.N = N
        self.S = S
        self.dtype = prompts.layers[0].dtype
        device = prompts.layers[0].device
        zeros = functools.partial(torch.zeros, device=device)
        self.layers = []                                    # (keys, values), (N, nkv, S, hs)
        for kv in prompts.layers:
            shape = (N, kv.shape[2], S, kv.shape[4])
            self.layers.append((kv.new_zeros(shape), kv.new_zeros(shape)))
        self.seen = zeros(N, S, dtype=torch.bool)           # the attention mask
        self.length = zeros(1, dtype=torch.long)            # tokens that were read
        self.ids = zeros(N, 1, dtype=torch.long)            # the next one

        # of the tokens since the last look
        self.t = zeros(1, dtype=torch.long)
        self.noise = zeros(N, CHUNK)
        self.drawn = {"token": zeros(N, CHUNK, dtype=torch.long), "logp": zeros(N, CHUNK),
                      "entropy": zeros(N, CHUNK), "values": zeros(N, CHUNK)}

    def load(self, prompts, attention_mask, n):
        """Begin with n copies of each sequence of a Cache of prompts; attention_mask (B, P) or
        None."""
        P = prompts.length
        for (keys, values), kv in zip(self.layers, prompts.layers):
            copies = kv.repeat_interleave(n, 1)                             # (2, n * B, nkv, P, hs)
            N = copies.shape[1]
            keys[:N, :, :P], values[:N, :, :P] = copies
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
    """Write tokens t, t + 1, .. of these rows, (n, k) each, and what is known of them, into r. A
    row that has ended gets nothing."""
    # which of them come before the end, or are it?
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


def read_one(model, ids, attention_mask, layers, length):
    """Read a token of each row: ids (n, 1), attention_mask (n, W) -> hidden states (n, C). layers,
    length: of a Window. Called again, it does the same again."""
    return model(ids, attention_mask, Window(layers, length.clone()))[:, 0]


def capture(function, pool):
    """What function() launches, as a graph -> a function that launches all of it at once."""
    graph = torch.cuda.CUDAGraph()
    # what other threads do meanwhile, such as NCCL's, is no part of it and no error
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph.replay


class Step:
    """A function that is called again and again: the first time as it is, which loads its kernels,
    from the second time on as a graph."""

    def __init__(self, function, pool):
        self.function = function
        self.pool = pool
        self.replay = None
        self.is_first = True

    def __call__(self):
        if self.is_first:
            self.is_first = False
            return self.function()
        self.replay = self.replay or capture(self.function, self.pool)
        self.replay()


class Decoder:
    """rollout.decode for the completions of one GPT. read, sample: the functions of these names,
    perhaps compiled."""

    def __init__(self, model, read=read_one, sample=sample):
        self.model = model
        self.read = read
        self.sample = sample
        self.half = None        # HalfWeights, once autocast has asked for them
        self.now = None         # the GPT that the steps read: the model, or that of `half`
        self.memory = None
        self.steps = {}         # {(n, W, temperature): Step}
        self.V = len(model.lm_head.weight)
        self.on_gpu = model.lm_head.weight.is_cuda
        self.pool = None        # memory that all graphs share, since no two run at once

    def prepare(self, prompts, N, S):
        """Room for N rows of S tokens after a Cache of prompts. New memory has other addresses, so
        that the graphs are made anew."""
        old = self.memory
        dtype = prompts.layers[0].dtype
        if old is None or old.dtype != dtype or old.N < N or old.S < S:
            most = (old.N, old.S) if old else (0, 0)
            self.memory = old = None        # freed before there is a larger one
            self.steps.clear()
            if self.on_gpu:
                self.pool = torch.cuda.graph_pool_handle()      # the last one ended with its graphs
            S = -(-S // 16) * 16            # attention's kernels ask for a multiple
            self.memory = Memory(prompts, max(size_for(N, ROWS), most[0]), max(S, most[1]))

    def draw(self, h, temperature):
        """Draw the next token of rows (n,) from the hidden states h (n, C) before it."""
        m = self.memory
        n = len(h)
        logits = self.now.lm_head(h).float()                    # (n, V), with HalfWeights more
        logits[:, self.V:] = -math.inf
        u = m.noise[:n].index_select(1, m.t)[:, 0]
        token, logp, entropy = self.sample(logits, u, temperature)
        found = {"token": token, "logp": logp, "entropy": entropy}
        if self.now.value_head is not None:
            found["values"] = self.now.value_head(h)
        m.ids[:n, 0] = token
        for name, x in found.items():
            m.drawn[name][:n].index_copy_(1, m.t, x[:, None])
        m.t += 1

    def read_and_draw(self, n, W, temperature):
        """Read the last token of n rows, which have W tokens with it, and draw the next."""
        m = self.memory
        layers = [(keys[:n, :, :W], values[:n, :, :W]) for keys, values in m.layers]
        h = self.read(self.now, m.ids[:n], m.seen[:n, :W], layers, m.length)    # (n, C)
        m.length += 1
        self.draw(h, temperature)

    def step(self, n, W, temperature):
        """read_and_draw of at least n rows and W tokens."""
        size = min(size_for(n, ROWS), self.memory.N), min(size_for(W, WIDTH), self.memory.S)
        key = *size, temperature
        function = functools.partial(self.read_and_draw, *key)
        if not self.on_gpu or key not in self.steps and len(self.steps) == MOST:
            return function()
        self.steps.setdefault(key, Step(function, self.pool))()

    def __call__(self, model, prompt, attention_mask, r, noise, sampling, respond=None):
        """See rollout.decode."""
        if model is not self.model or respond or r.allowed is not None:
            return decode(model, prompt, attention_mask, r, noise, sampling, respond)
        B, P = prompt.shape
        N, T = r.logp.shape

        # the weights of now
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

        # some tokens, then a look at them: ended rows leave, and those that run fill their places
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
    """A rollout.generate that decodes by graphs, if the model is a GPT. how: see Decoder."""
    if not isinstance(model, GPT):
        return generate
    return functools.partial(generate, decode=Decoder(model, **how))
