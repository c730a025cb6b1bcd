"""
torch.compile of the policy, the reference and sampling (compile = True). Before a run uses it,
run/precision.py compares it with plain float32.

To read one token, a model launches some two hundred small kernels, and on a GPU launching them
takes longer than running them. A CUDA graph launches all of them at once, but it can only repeat
the same shapes at the same addresses. So a Decoder reads a token of all N completions in memory
that is kept between calls. Completions that have ended are read too, and the result is ignored.
Everything else is rollout.generate, which takes a Decoder for the model.

Shapes: N completions, n of which still run, room for S tokens. See model.py.
"""
import functools

import torch

from model import GPT, Cache
from rollout import generate

BUCKET = 64     # S is a multiple of it, so that few shapes are compiled


def compile_nets(setup):
    """Compile policy and reference. Sampling stays as it is if the policy is not a GPT."""
    setup.policy_fn = torch.compile(setup.policy, dynamic=True)
    setup.reference_fn = torch.compile(setup.reference, dynamic=True)
    if isinstance(setup.policy, GPT):
        setup.generate = compiled_generate(setup.device)


def compiled_generate(device):
    """Return a rollout.generate that reads single tokens with a compiled step."""
    if device.type == "cuda":
        step = torch.compile(read_one, mode="reduce-overhead", dynamic=False)   # CUDA graphs
    else:
        step = torch.compile(read_one, dynamic=True)
    decoder_of = functools.cache(functools.partial(Decoder, step=step))

    def generate_with(model, *args, **how):
        return generate(decoder_of(model), *args, **how)

    return generate_with


def read_one(model, ids, attention_mask, cache):
    """Read one token of each completion: ids (N, 1), attention_mask (N, S) -> (N, C)."""
    return model(ids, attention_mask, cache)[:, 0]


class Decoder:
    """A model for rollout.generate: a GPT whose steps have shapes and addresses that never
    change. step: read_one, perhaps compiled."""

    def __init__(self, model, step=read_one):
        self.model = model
        self.step = step
        self.lm_head = model.lm_head
        self.value_head = model.value_head
        self.block_size = model.block_size
        self.kept = {}      # FixedCaches by their shape

    def new_cache(self, S):
        """Return an empty Cache of prompts, which is repeated in a FixedCache."""
        cache = Cache(S)
        cache.repeat = functools.partial(self.repeat, cache)
        return cache

    def repeat(self, prompts, n, S):
        """Return the FixedCache of this shape with n copies of each sequence of a Cache."""
        N = n * prompts.layers[0].shape[1]
        S = -(-S // BUCKET) * BUCKET
        key = (N, S, prompts.layers[0].dtype)
        if key not in self.kept:
            self.kept[key] = FixedCache(prompts, N, S)
        self.kept[key].load(prompts, n)
        return self.kept[key]

    def __call__(self, ids, attention_mask, cache):
        if isinstance(cache, Cache):    # of prompts
            return self.model(ids, attention_mask, cache)
        end = cache.num_read + 1
        cache.ids[cache.rows] = ids
        cache.seen[cache.rows, :end] = True if attention_mask is None else attention_mask
        cache.num_read = end
        h = self.step(self.model, cache.ids, cache.seen, cache)                     # (N, C)
        return h[cache.rows, None]                                                  # (n, 1, C)


class FixedCache:
    """What a Decoder remembers of N completions: model.Cache at addresses that do not change."""

    def __init__(self, prompts, N, S):
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
            keys[:, :, :P], values[:, :, :P] = kv.repeat_interleave(n, 1)
        self.length.fill_(P)            # GPT.forward counts on from here, on the device
        self.num_read = P               # the same number, to be had without waiting for a GPU
        self.rows = torch.arange(len(self.seen), device=self.seen.device)   # that still run

    def extend(self, i, k, v):
        """Write k and v (N, nkv, 1, hs), and return all S keys and values of the layer."""
        keys, values = self.layers[i]
        keys.index_copy_(2, self.length, k)
        values.index_copy_(2, self.length, v)
        return keys, values

    def keep(self, rows):
        self.rows = self.rows[rows]
