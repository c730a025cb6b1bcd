"""
What makes a run fast, and the proof that it computes the same.

Before a run uses torch.compile and bfloat16 it computes a few rows with them and in plain float32:
log-probs, their gradient, the log-probs that sampling records. What is too far off or fails is
taken away, first compile, then bfloat16, and one line says so. What is left must hold, or the run
stops. That influence adds up is checked in the first step (tracin.py).
"""
import functools
import math
from dataclasses import dataclass

import torch

from common.device import autocast, set_precision
from run.metrics import logp_error, tolerance_of
from common.processes import all_gather
from common.script import BadInput
from rollout import CHECK_EVERY, Rollout, completion_logprobs, generate, prefill, sample_token


def prove(nets, cfg):
    """Makes nets as fast as the settings ask for and as holds here. BadInput if nothing holds."""
    if nets.device.type == "cpu" and nets.dtype == torch.float32 and not cfg.compile:
        return          # nothing is computed in another way
    wanted = nets.dtype
    compute_in(nets, torch.float32, compiled=False)
    rollout = few_rows(nets, cfg)
    expected = logp_and_gradient(nets, cfg, rollout)
    compute_in(nets, wanted, cfg.compile)
    if not expected[0].isfinite().all():
        return          # the first step ends the run, and says why
    while trouble := trouble_of(nets, cfg, rollout, expected):
        if nets.generate is not generate:
            print(f"note: compile off: {trouble}")
            compute_in(nets, wanted, compiled=False)
        elif nets.dtype != torch.float32:
            print(f"note: bfloat16 off: {trouble}")
            compute_in(nets, torch.float32, compiled=False)
        else:
            raise BadInput(f"device = '{nets.device}': {trouble}; set device = 'cpu'")


def compute_in(nets, dtype, compiled):
    """The precision of the forward passes, and whether they and the sampling are compiled."""
    nets.dtype = dtype
    set_precision(nets.device, dtype)
    nets.policy_fn = nets.policy
    nets.reference_fn = nets.reference
    nets.generate = generate
    if compiled:
        nets.policy_fn = torch.compile(nets.policy, dynamic=True)
        nets.reference_fn = torch.compile(nets.reference, dynamic=True)
        nets.generate = functools.partial(generate, decode=Decoder(nets.device, compiled=True))


def few_rows(nets, cfg):
    """Rollout of two prompts, the second of which is shorter, five times; none of the rows ends.
    Ten rows, since no other size is ten: torch.compile would take equal sizes to be one."""
    ids = min((prompt.ids for prompt in nets.prompts), key=len)
    prompts = [ids, ids[1:] or ids]
    T = min(cfg.max_completion_length, 8)
    with autocast(nets.device, nets.dtype):
        return nets.generate(
            nets.policy, prompts, 5, T, seed=0, eos=-1, temperature=cfg.temperature,
            top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p)


def logp_and_gradient(nets, cfg, rollout):
    """Log-probs (N, T) of a rollout, and the gradient (weights,) of a weighted sum of them."""
    with autocast(nets.device, nets.dtype):
        logp = completion_logprobs(nets.policy_fn, rollout, cfg.temperature)
    factors = torch.linspace(1, 2, logp.numel(), device=logp.device).view_as(logp)
    total = (logp * factors).sum()
    gradients = torch.autograd.grad(total, nets.trained, materialize_grads=True)
    return logp.detach(), torch.cat([g.flatten() for g in gradients])


def trouble_of(nets, cfg, rollout, expected):
    """What is wrong with the way in which nets compute, in any process; "" if it holds."""
    try:
        trouble = compare(nets, cfg, rollout, *expected)
    except Exception as e:      # whatever a driver or a compiler makes of it
        words = " ".join(str(e).split())
        trouble = words[:160] or type(e).__name__
    return next(filter(None, all_gather([trouble])), "")


def compare(nets, cfg, rollout, expected_logp, expected_gradient):
    """What is too far from what plain float32 computes, in words; "" if nothing is."""
    logp, gradient = logp_and_gradient(nets, cfg, rollout)
    sampled = few_rows(nets, cfg)
    scored, _ = logp_and_gradient(nets, cfg, sampled)
    far = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    gaps = {
        "log-probs": logp_error(logp - expected_logp, nets.dtype),
        "gradients": (far, 2 * tolerance_of(nets.dtype)),
        "log-probs of sampling": logp_error(scored - sampled.logp, nets.dtype)}
    for name, (gap, bound) in gaps.items():
        if not gap <= bound:    # also if it is NaN
            return f"{name} are off by {gap:.2g}, at most {bound:g} is right"
    return ""


class Decoder:
    """A drop-in for rollout.decode, whose step has shapes and addresses that never change.

        generate(policy, ..., decode=Decoder(device, compiled=True))

    A step of decode launches some two hundred small kernels, and on a GPU launching them takes
    longer than running them. There torch.compile makes a CUDA graph of the step. Rows run in
    buffers that are kept between calls. Those that have ended run on with the others.
    """

    BUCKET = 64     # positions: the width of the buffers is a multiple of it

    def __init__(self, device, compiled):
        self.buffers = {}
        self.step = decode_step
        if compiled:
            on_gpu = device.type == "cuda"
            mode = "reduce-overhead" if on_gpu else "default"
            self.step = torch.compile(decode_step, mode=mode, dynamic=not on_gpu)

    @torch.no_grad()
    def __call__(self, model, prompt, attention_mask, r, noise, sampling, respond=None):
        """Fills the rows r with completions of prompts (B, P), as rollout.decode does."""
        N, T = r.completion_mask.shape
        P = prompt.shape[1]
        prefix = prefill(model, prompt, attention_mask, r, noise, sampling, respond)
        prefix = prefix.repeat_interleave(N // len(prompt), 2)      # (n_layer, 2, N, nkv, P, hs)
        width = -(-(P + T) // self.BUCKET) * self.BUCKET
        key = (model, N, T, width, prefix.dtype, sampling)
        if key not in self.buffers:
            self.buffers[key] = new_buffers(r, prefix, width)
        own = self.buffers[key]
        own.load(r, prefix, noise)
        for t in range(1, T):
            if t % CHECK_EVERY.get(prompt.device.type, 16) == 0 and own.rollout.ended.all():
                break
            self.step(model, own, sampling)
            if respond:
                respond(own.rollout, own.rows, t, P + t)
        copy_rollout(own.rollout, r)


@dataclass
class Buffers:
    """Memory whose addresses a CUDA graph remembers."""
    rollout: Rollout        # (N, T) and (N, width)
    noise: torch.Tensor     # (N, T)
    rows: torch.Tensor      # (N,)
    cache: list             # keys and values (N, nkv, width, hs) of each layer
    t: torch.Tensor         # (1,) the token to draw next
    start: torch.Tensor     # (1,) width of the prompts

    def load(self, r, prefix, noise):
        P = prefix.shape[4]
        copy_rollout(r, self.rollout)
        for layer, given in zip(self.cache, prefix):
            for mine, x in zip(layer, given):
                mine[:, :, :P].copy_(x)
        self.noise.copy_(noise)
        self.t.fill_(1)
        self.start.fill_(P)


def copy_rollout(source, target):
    """Copies tensor by tensor, as far as the narrower of the two goes."""
    for x, y in zip(vars(source).values(), vars(target).values()):
        if x is not None:
            width = min(x.shape[-1], y.shape[-1])
            y[..., :width].copy_(x[..., :width])


def new_buffers(r, prefix, width):
    N, T = r.completion_mask.shape
    device = prefix.device
    rollout = r.map(torch.zeros_like)
    rollout.tokens = r.tokens.new_zeros(N, width)
    rollout.attention_mask = r.attention_mask.new_zeros(N, width)
    shape = (*prefix.shape[2:4], width, prefix.shape[5])                    # (N, nkv, width, hs)
    cache = [(prefix.new_zeros(shape), prefix.new_zeros(shape)) for _ in prefix]
    own = Buffers(
        rollout, torch.zeros(N, T, device=device), torch.arange(N, device=device), cache,
        t=torch.ones(1, dtype=torch.long, device=device),
        start=torch.ones(1, dtype=torch.long, device=device))
    if device.type == "cuda":       # a graph may write only where it knows the address
        found, _ = torch.utils._pytree.tree_flatten([vars(rollout), vars(own)])
        for x in filter(torch.is_tensor, found):
            torch._dynamo.mark_static_address(x)
    return own


def decode_step(model, own, sampling):
    """Draws token own.t of every row and adds 1 to t."""
    r = own.rollout
    column = own.start + own.t                                              # (1,)
    idx = r.tokens[own.rows, column - 1][:, None]                           # (N, 1)
    h = hidden_states(model, idx, r.attention_mask, own.cache, column - 1)  # (N, 1, C)
    sample_token(model, h[:, 0], r, own.rows, own.t, column, own.noise, sampling)
    own.t += 1


def hidden_states(model, idx, attention_mask, cache, at):
    """GPT.forward for the one position `at`, a tensor (1,), so that no shape depends on it.

    idx (N, 1), attention_mask (N, S), cache: keys and values (N, nkv, S, hs) of each layer ->
    (N, 1, C). Attention runs over all S positions under masks of numbers to add. (torch.compile
    would copy a cache that is one tensor, in each layer and step.)
    """
    S = attention_mask.shape[1]
    window = model.config.window
    key = torch.arange(S, device=idx.device)
    pos = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, at]                        # (N, 1)
    seen = (attention_mask & (key <= at) | (key == at))[:, None, None]              # (N, 1, 1, S)
    near = seen & (key > at - window) if model.config.local_layers else seen
    dtype = cache[0][0].dtype
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf)
    local_mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~near, -math.inf)
    extend_caches = [functools.partial(extend_at, keys, values, at) for keys, values in cache]
    return model.blocks(idx, pos, mask, local_mask, extend_caches)


def extend_at(keys, values, at, k, v):
    """model.extend for the one position `at`, a tensor (1,) -> all S positions of the cache."""
    keys.index_copy_(2, at, k.to(keys.dtype))                                   # (N, nkv, S, hs)
    values.index_copy_(2, at, v.to(values.dtype))
    return keys.to(k.dtype), values.to(v.dtype)
