"""
torch.compile of the policy, the reference and sampling (compile = True). Before a run uses it,
run/precision.py compares it with plain float32. Where the compiler fails later, the run goes on
without it.

To read one token, a model launches some two hundred small kernels, and on a GPU launching them
takes longer than running them. A CUDA graph launches all of them at once, but it can only repeat
the same shapes at the same addresses. So a Decoder reads a token of N rows in memory that is kept
between calls. Completions that have ended are read too, as are rows without a completion; the
result is ignored. Everything else is rollout.generate, which takes a Decoder for the model.

A shape takes a minute to compile, and its memory is kept. So a model gets MOST shapes, and other
batches are read in the smallest that has room for them. Under autocast a graph would cast all
weights for each token; a Decoder casts those of the blocks once for all tokens.

Shapes: N rows, n of which are completions that still run, room for S tokens. See model.py.
"""
import copy
import functools

import torch
from torch import nn

from common.script import shown
from model import GPT, Cache
from rollout import generate

BUCKET = 64     # rows and tokens of a FixedCache are multiples of it
MOST = 4        # FixedCaches of a model
LIMIT = 64      # graphs of a function: padded or not, one row, one token, ...


def compile_nets(setup):
    """Compile policy and reference. Sampling stays as it is if the policy is not a GPT."""
    plain = copy.copy(setup)

    def off(error):
        """Compile no longer, in any of the three."""
        if setup.policy_fn is not plain.policy_fn:
            print(f"note: compile off: {shown(error, 160)}")
        setup.policy_fn = plain.policy_fn
        setup.reference_fn = plain.reference_fn
        setup.generate = plain.generate

    # policy, reference and sampling share their functions, and with them the number of graphs. A
    # setting, since torch.compile has no argument for it before 2.13
    torch._dynamo.config.recompile_limit = LIMIT
    # a backward that cannot be compiled fails in the forward, where OrPlain sees it. An
    # older torch lacks this setting: there it fails in the check's backward
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True
    for name, model in (("policy_fn", setup.policy), ("reference_fn", setup.reference)):
        setattr(setup, name, OrPlain(dict(dynamic=True), model, model, off))
    if isinstance(setup.policy, GPT):
        setup.generate = compiled_generate(setup.device, off)


class OrPlain:
    """A function, compiled at its first call with some arguments of torch.compile, and the plain
    one from the first error on: off(error) is called."""

    def __init__(self, how, function, plain, off):
        self.how = how
        self.function = function
        self.compiled = None
        self.failed = False
        self.plain = plain
        self.off = off

    def __call__(self, *args):
        if not self.failed:
            try:
                if self.compiled is None:
                    self.compiled = torch.compile(self.function, **self.how)
                return self.compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:      # a compiler may raise anything
                self.failed = True
                self.off(e)
        return self.plain(*args)

    def __getattr__(self, name):        # of the model: lm_head, value_head
        return getattr(self.plain, name)


def compiled_generate(device, off):
    """A rollout.generate that reads single tokens with a compiled step."""
    on_gpu = dict(mode="reduce-overhead", dynamic=False)
    how = on_gpu if device.type == "cuda" else dict(dynamic=True)
    step = OrPlain(how, read_one, read_again, off)
    decoder_of = functools.cache(functools.partial(Decoder, step=step))

    def generate_with(model, *args, **how):
        return generate(decoder_of(model), *args, **how)

    return generate_with


def read_one(model, ids, attention_mask, cache):
    """Read one token of each row: ids (N, 1), attention_mask (N, S) -> (N, C)."""
    return model(ids, attention_mask, cache)[:, 0]


def read_again(model, ids, attention_mask, cache):
    """read_one of a token that a compiled step may have half read."""
    cache.length.fill_(cache.num_read - 1)
    return read_one(model, ids, attention_mask, cache)


class Decoder:
    """A model for rollout.generate: a GPT whose steps have shapes and addresses that never
    change. step: read_one, perhaps compiled."""

    def __init__(self, model, step=read_one):
        self.model = model
        self.step = step
        self.lm_head = model.lm_head
        self.value_head = model.value_head
        self.block_size = model.block_size
        self.kept = []          # FixedCaches
        self.half = None        # a HalfBlocks, once autocast has asked for it

    def new_cache(self, S):
        """An empty Cache of prompts, which is repeated in a FixedCache."""
        cache = Cache(S)
        cache.repeat = functools.partial(self.repeat, cache)
        return cache

    def repeat(self, prompts, n, S):
        """A FixedCache with n copies of each sequence of a Cache and room for S tokens; a
        Cache where no FixedCache has room for them."""
        if torch.is_autocast_enabled(prompts.layers[0].device.type):
            self.half = self.half or HalfBlocks(self.model)
            self.half.cast()
        N = n * prompts.layers[0].shape[1]
        fixed = self.with_room(prompts, N, S)
        if fixed is None:
            return Cache.repeat(prompts, n, S)
        fixed.load(prompts, n)
        return fixed

    def with_room(self, prompts, N, S):
        """The smallest FixedCache that has room for N rows of S tokens, or None. A new one,
        if there may be one more, where that is more than twice as large as is asked for."""
        N = -(-N // BUCKET) * BUCKET
        S = -(-S // BUCKET) * BUCKET
        dtype = prompts.layers[0].dtype
        fitting = [x for x in self.kept if x.dtype == dtype and x.N >= N and x.S >= S]
        best = min(fitting, key=lambda x: x.N * x.S, default=None)
        if len(self.kept) < MOST and (best is None or best.N * best.S > 2 * N * S):
            best = FixedCache(prompts, N, S)
            self.kept.append(best)
        return best

    def __call__(self, ids, attention_mask, cache):
        if isinstance(cache, Cache):    # of prompts
            return self.model(ids, attention_mask, cache)
        end = cache.num_read + 1
        cache.ids[cache.rows] = ids
        cache.seen[cache.rows, :end] = True if attention_mask is None else attention_mask
        cache.num_read = end
        half = torch.is_autocast_enabled(ids.device.type)
        model = self.half.model if half else self.model
        h = self.step(model, cache.ids, cache.seen, cache)                          # (N, C)
        return h[cache.rows, None]                                                  # (n, 1, C)


class HalfBlocks:
    """A GPT that shares all weights of another but those of its blocks' Linears: these are in
    bfloat16, as autocast would cast them."""

    def __init__(self, model):
        shared = {id(p): p for p in model.parameters()}
        self.model = copy.deepcopy(model, shared)
        self.pairs = []         # (weight in bfloat16, the model's own)
        for layer in self.model.h.modules():
            if isinstance(layer, nn.Linear):
                for name, own in list(layer.named_parameters()):
                    half = nn.Parameter(own.detach().bfloat16(), requires_grad=False)
                    setattr(layer, name, half)
                    self.pairs.append((half, own))

    def cast(self):
        """Take over the model's weights as they are now."""
        for half, own in self.pairs:
            half.copy_(own)


class FixedCache:
    """What a Decoder remembers of N rows: model.Cache at addresses that do not change."""

    def __init__(self, prompts, N, S):
        self.N = N
        self.S = S
        self.dtype = prompts.layers[0].dtype
        # torch.compile would copy keys and values that are one tensor, in each layer and step
        self.layers = []        # (keys, values) of each layer, (N, nkv, S, hs)
        for kv in prompts.layers:
            shape = (N, kv.shape[2], S, kv.shape[4])
            self.layers.append((kv.new_zeros(shape), kv.new_zeros(shape)))
        device = prompts.layers[0].device
        self.ids = torch.zeros(N, 1, dtype=torch.long, device=device)       # to be read
        self.seen = torch.zeros(N, S, dtype=torch.bool, device=device)      # the attention mask
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        if device.type == "cuda":       # a CUDA graph writes only to addresses that it may rely on
            for x in (self.ids, self.seen, self.length, *sum(self.layers, ())):
                torch._dynamo.mark_static_address(x)

    def load(self, prompts, n):
        """Begin with n copies of each sequence of a Cache of prompts."""
        P = prompts.length
        for (keys, values), kv in zip(self.layers, prompts.layers):
            copies = kv.repeat_interleave(n, 1)                             # (2, n * B, nkv, P, hs)
            keys[:copies.shape[1], :, :P], values[:copies.shape[1], :, :P] = copies
        self.length.fill_(P)            # GPT.forward counts on from here, on the device
        self.num_read = P               # the same number, to be had without waiting for a GPU
        self.rows = torch.arange(copies.shape[1], device=self.seen.device)  # that still run

    def extend(self, i, k, v):
        """Write k and v (N, nkv, 1, hs), and return all S keys and values of the layer."""
        keys, values = self.layers[i]
        keys.index_copy_(2, self.length, k)
        values.index_copy_(2, self.length, v)
        return keys, values

    def keep(self, rows):
        self.rows = self.rows[rows]
