"""
A run tries its fast paths, then uses those that hold.

grpo.build makes Nets that compute plainly. prove() tries each fast path that the settings ask for
on a few rows beside the plain one. What agrees is used from then on: the very function that was
tried, so that compiling is paid once. What fails (a driver, an old card, a missing compiler, a new
torch) or differs by more than its bound stays off, which one line says. `bench.py check` prints the
same paths as a table.

Each path is a function of (nets, cfg, few) that returns a Path. Trying one draws no global random
numbers, leaves no .grad and keeps no memory.
"""
import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from model import completion_logprobs, completion_states
from run.attention import by_hand_on_cases, plain_on_cases, use_attention_by_hand, worst_gap
from run.decoder import Decoder
from run.device import autocast
from run.fused_head import fused_logprobs
from run.head import float32_product, set_product, wide_product
from run.metrics import bound_of, gap_of, is_exact
from run.processes import all_gather, rank_and_size
from run.script import BadInput, is_out_of_memory
from run.stored import StoredTape
from sample import Rollout
from tracin import Tape


def nothing():
    pass


class Path(NamedTuple):
    """A fast path of a run beside the plain one."""
    name: str
    asked: bool             # by the settings
    fast: Any               # () -> a result
    plain: Any              # () -> the same, plainly
    gap: Any                # (result of fast, result of plain) -> (difference, its bound)
    without: str            # the setting that leaves it out
    use: Any = nothing      # () -> None, called where the fast path holds
    leave: Any = nothing    # () -> None, called where it does not
    missing: str = ""       # why it cannot be tried here


class Few(NamedTuple):
    """What paths are tried on."""
    rollout: Rollout        # (N, T) the first group has no padding, the others have
    generate: Any           # (decode, dtype) -> such a Rollout
    texts: list             # four, for a judge


def prove(nets, cfg):
    """Makes nets fast where that holds. BadInput where even the plain path fails, and with
    cfg.strict where any path that was asked for does."""
    use_one_dtype(nets)
    few = few_rows(nets, cfg)
    if few is None:
        return
    for path_of in PATHS:
        path = path_of(nets, cfg, few)
        if not path.asked:
            continue
        if path.missing:
            if path.name.startswith("compile"):     # speed is on by default everywhere
                print(f"note: {path.name}: {path.missing}")
            continue
        _, _, trouble = tried(path, nets.device)
        trouble = first_trouble(trouble)
        if not trouble:
            path.use()
        elif cfg.strict:
            raise BadInput(f"{path.name}: {trouble}; set {path.without}, or strict = False")
        else:
            path.leave()
            print(f"note: {path.name} off: {trouble}; --strict=True makes this an error")


def use_one_dtype(nets):
    """float32 for all processes if one has a card without bfloat16: all must try the same paths."""
    if torch.float32 in all_gather([nets.dtype]) and nets.dtype != torch.float32:
        nets.dtype = torch.float32
        print("note: dtype is float32, as of a process whose GPU only emulates bfloat16")


def tried(path, device):
    """(difference, its bound, what is wrong with the path or "")."""
    with plainly(device):
        expected = path.plain()
    try:
        difference, bound = path.gap(path.fast(), expected)
    except Exception as e:  # whatever a driver, a compiler or another torch makes of it
        return math.nan, math.nan, in_short(e)
    trouble = ""
    if not math.isfinite(difference):
        trouble = f"its result is {difference}"
    elif difference > bound:
        trouble = f"differs from the plain path by {difference:.2g} (bound {bound:g})"
    return difference, bound, trouble


def first_trouble(trouble):
    """The first trouble of any process: what fails on one is off on all."""
    _, size = rank_and_size()
    for rank, other in enumerate(all_gather([trouble])):
        if other:
            return f"process {rank}: {other}" if size > 1 else other
    return ""


def in_short(e):
    """An error on one line, without torch.compile's advice on tracing it."""
    text = str(e).partition("Set TORCHDYNAMO_VERBOSE")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = " ".join(lines[:2]) or type(e).__name__
    return text if len(text) <= 160 else text[:160] + "..."


@contextlib.contextmanager
def plainly(device):
    """Around what has no plainer version: BadInput if the device cannot do it."""
    try:
        yield
    except RuntimeError as e:
        if device.type == "cpu" or is_out_of_memory(e):
            raise
        raise BadInput(f"device = '{device}': it is found, but plain computing fails on it "
                       f"({in_short(e)}); set device = 'cpu'") from e


def try_device(device):
    """BadInput if the device cannot do what every network does."""
    with plainly(device):
        x = torch.ones(2, 2, 8, 16, device=device, requires_grad=True)
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        (y @ x.mT).logsumexp(-1).sum().backward()
        float(x.grad.sum())


# ------------------------------------------------------------------------------------------------
# a few rows, plainly


def few_rows(nets, cfg, num_prompts=2, num_generations=2, max_length=8):
    """Few with completions of at most max_length tokens. None if plain log-probs are not finite:
    nothing compares with that, and the first step ends the run."""
    ids = min((prompt.ids for prompt in nets.prompts), key=len)
    rows = [ids] + [ids[1:] or ids] * (num_prompts - 1)
    T = min(cfg.max_completion_length, max_length)
    plain_decode = nets.generate.keywords["decode"]

    def generate(decode=plain_decode, dtype=torch.float32):
        with autocast(nets.device, dtype):
            return nets.generate.func(      # no token is -1, so that no row ends
                nets.policy, rows, num_generations, T, seed=0, decode=decode, eos=-1,
                temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p)

    with plainly(nets.device):
        rollout = generate()
        finite = bool(rollout.logp.isfinite().all())
    texts = [prompt.text for prompt in nets.prompts[:4]] * 4
    return Few(rollout, generate, texts[:4]) if all(all_gather([finite])) else None


def weighted_sum(logp):
    """A scalar of log-probs (n, T) in which each counts differently."""
    weights = torch.linspace(1, 2, logp.numel(), device=logp.device)
    return (logp * weights.view_as(logp)).sum()


def logp_and_gradient(nets, cfg, rollout, dtype, policy=None, logprobs=completion_logprobs):
    """Log-probs (n, T) and the gradient of weighted_sum (weights,)."""
    policy = nets.policy if policy is None else policy
    with autocast(nets.device, dtype):
        logp = logprobs(policy, rollout, cfg.temperature, weighted_sum)
    return logp.detach(), flat_gradient(weighted_sum(logp), nets.trained)


def flat_gradient(scalar, parameters):
    """(weights,), without touching .grad. Of no parameters it is empty."""
    if not parameters:
        return scalar.new_zeros(0)
    found = torch.autograd.grad(scalar, parameters, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
    return torch.cat([g.flatten() for g in parts])


def relative(found, expected):
    """Norm of the difference, in units of the norm of what is expected."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def gap_with_gradient(nets, cfg):
    """The gap of what logp_and_gradient returns: the larger of that in nats and the gradient's, in
    units of itself."""
    def gap(found, expected):
        in_nats, bound = gap_of(found[0] - expected[0], is_exact(nets, cfg))
        in_gradient = relative(found[1], expected[1])
        return float(torch.tensor([in_nats, in_gradient]).max()), bound     # NaN if one is

    return gap


# ------------------------------------------------------------------------------------------------
# the paths, those first that others build on


def attention(nets, cfg, few):
    networks = (nets.policy, nets.base, nets.reference, *nets.judges.values())
    return Path(
        "attention", "attention" in cfg.speed,
        fast=lambda: by_hand_on_cases(nets.device), plain=lambda: plain_on_cases(nets.device),
        gap=worst_gap, without="speed without 'attention'",
        use=lambda: use_attention_by_hand(*networks))


def set_products(nets, product):
    """Gives the policy's, base's and reference's vocabulary heads this product (run/head.py)."""
    for model in (nets.policy, nets.base, nets.reference):
        set_product(model, product)


def wide_head(nets, cfg, few):
    """On a GPU: logits in float32 of a product in bfloat16, beside a product in float32."""
    def logits(product):
        with torch.no_grad(), autocast(nets.device, torch.bfloat16):
            h, *_ = completion_states(nets.policy, few.rollout)
            return product(h, nets.policy.lm_head.weight)

    return Path(
        "wide head", nets.dtype == torch.bfloat16 and nets.device.type == "cuda",
        fast=lambda: logits(wide_product), plain=lambda: logits(float32_product),
        gap=lambda found, expected: (relative(found, expected), 1e-3),
        without="dtype = 'float32'",
        use=lambda: set_products(nets, wide_product),
        leave=lambda: set_products(nets, float32_product),
        missing="" if nets.device.type == "cuda" else "needs a GPU")


def in_bfloat16(nets, cfg, few, name, leave):
    """Log-probs in bfloat16 beside those in float32. The gradient has to be finite."""
    def gap(found, expected):
        in_nats, bound = gap_of(found[0] - expected[0], exact=False)
        return in_nats if found[1].isfinite().all() else math.nan, bound

    return Path(
        name, nets.dtype == torch.bfloat16,
        fast=lambda: logp_and_gradient(nets, cfg, few.rollout, torch.bfloat16),
        plain=lambda: logp_and_gradient(nets, cfg, few.rollout, torch.float32),
        gap=gap, without="dtype = 'float32'", leave=leave)


def bfloat16_logits(nets, cfg, few):
    """On a CPU logits are rounded too, as long as that does no harm."""
    path = in_bfloat16(nets, cfg, few, "bfloat16 logits",
                       leave=lambda: set_products(nets, float32_product))
    return path._replace(missing="" if nets.device.type == "cpu" else "needs a CPU")


def bfloat16(nets, cfg, few):
    def leave():
        nets.dtype = torch.float32

    return in_bfloat16(nets, cfg, few, "bfloat16", leave)


def head(nets, cfg, few):
    def use():
        nets.logprobs = fused_logprobs

    size = max(1, few.rollout.chosen.numel() // 4)      # as if the logits were many
    in_pieces = functools.partial(fused_logprobs, size=size)
    return Path(
        "head", "head" in cfg.speed and cfg.importance_sampling_level == "token",
        fast=lambda: logp_and_gradient(nets, cfg, few.rollout, nets.dtype, logprobs=in_pieces),
        plain=lambda: logp_and_gradient(nets, cfg, few.rollout, nets.dtype),
        gap=gap_with_gradient(nets, cfg), without="speed without 'head'", use=use)


def graphs(nets, cfg, few):
    path = decoding(nets, cfg, few, "graphs", "graphs" in cfg.speed, compile=False, graphs=True)
    return path._replace(without="speed without 'graphs'",
                         missing="" if nets.device.type == "cuda" else "needs a GPU")


def compiled_generate(nets, cfg, few):
    graphs = getattr(nets.generate.keywords["decode"], "graphs", False)
    asked = "generate" in cfg.compile
    return decoding(nets, cfg, few, "compile 'generate'", asked, compile=True, graphs=graphs)


def decoding(nets, cfg, few, name, asked, **how):
    """Sampling through a Decoder: its recorded log-probs are the trainer's, as in a run's first
    step. On a CPU in float32 its tokens are the plain ones, too."""
    @functools.cache
    def decoder():
        return Decoder(nets.policy, nets.dtype, drop="retire" in cfg.speed, **how)

    def gap(found, expected):
        exact = nets.device.type == "cpu" and nets.dtype == torch.float32
        if exact and not torch.equal(found.tokens, expected.tokens):
            raise ValueError("it samples other tokens")
        with torch.no_grad(), autocast(nets.device, nets.dtype):
            logp = completion_logprobs(nets.policy, found, cfg.temperature)
        return gap_of(logp - found.logp, is_exact(nets, cfg))

    def use():
        decoder().buffers.clear()
        nets.generate = functools.partial(nets.generate.func, decode=decoder())

    return Path(
        name, asked, fast=lambda: few.generate(decoder(), nets.dtype),
        plain=lambda: few.generate(dtype=nets.dtype), gap=gap, use=use,
        without="compile without 'generate'")


def with_and_without_padding(few):
    """Compiling makes a graph of each."""
    return few.rollout, few.rollout[:2]


def compile_once(network):
    """() -> the compiled network, always the same. Only when called, since torch.compile can fail.
    """
    return functools.cache(lambda: torch.compile(network, dynamic=True))


def compiled_reference(nets, cfg, few):
    compiled = compile_once(nets.reference)

    def logp(reference):
        with torch.no_grad(), autocast(nets.device, nets.dtype):
            parts = [nets.logprobs(reference, rollout, cfg.temperature)
                     for rollout in with_and_without_padding(few)]
        return torch.cat(parts)

    def use():
        nets.reference_fn = compiled()

    return Path(
        "compile 'reference'", "reference" in cfg.compile,
        fast=lambda: logp(compiled()), plain=lambda: logp(nets.reference),
        gap=lambda found, expected: gap_of(found - expected, is_exact(nets, cfg)),
        without="compile without 'reference'", use=use,
        missing="" if cfg.beta else "this run has no reference (beta = 0)")


def compiled_update(nets, cfg, few):
    compiled = compile_once(nets.policy)

    def forward_backward(policy):
        parts = [logp_and_gradient(nets, cfg, rollout, nets.dtype, policy, nets.logprobs)
                 for rollout in with_and_without_padding(few)]
        logp, gradients = zip(*parts)
        return torch.cat(logp), gradients[0].add_(gradients[1])     # as large as the weights

    def use():
        nets.policy_fn = compiled()

    recorded = cfg.tracin != "off" and cfg.num_iterations == 1
    return Path(
        "compile 'update'", "update" in cfg.compile,
        fast=lambda: forward_backward(compiled()), plain=lambda: forward_backward(nets.policy),
        gap=gap_with_gradient(nets, cfg), without="compile without 'update'", use=use,
        missing="influence records the only pass, uncompiled" if recorded else "")


def compiled_judge(nets, cfg, few):
    judge = nets.judges.get("judge")
    model = getattr(judge, "model", None)
    compiled = compile_once(model)

    def log_odds(network):
        judge.model = network
        try:
            with autocast(nets.device, nets.dtype):
                return judge(few.texts, few.texts)
        finally:
            judge.model = model

    def gap(found, expected):
        differences = (found - expected) / (1 + expected.abs())
        return float(differences.abs().max()), bound_of(is_exact(nets, cfg))

    def use():
        judge.model = compiled()

    return Path(
        "compile 'judge'", "judge" in cfg.compile,
        fast=lambda: log_odds(compiled()), plain=lambda: log_odds(model), gap=gap,
        without="compile without 'judge'", use=use,
        missing="" if model is not None else "this run has no judge that could be compiled")


def influence(nets, cfg, few, new_tape=Tape):
    """Products of two rows' gradients with their sum: from a tape, and each by its own backward."""
    rollout = few.rollout[[0, -1]]      # a row without padding and one with

    def recorded():
        n = len(rollout.mask)
        with new_tape(nets.policy, n) as tape:
            tape.rows(torch.arange(n), rollout.chosen.nonzero()[:, 0])
            with autocast(nets.device, nets.dtype):
                logp = nets.logprobs(nets.policy, rollout, cfg.temperature, torch.sum)
            logp.sum().backward()
        return tape.dot(tape.gradient(torch.ones(n, device=nets.device)))

    def one_by_one():
        gradients = []
        for i in range(len(rollout.mask)):
            with autocast(nets.device, nets.dtype):
                logp = completion_logprobs(nets.policy, rollout[i:i + 1], cfg.temperature)
            gradients.append(flat_gradient(logp.sum(), nets.trained))
        return torch.stack([g @ sum(gradients) for g in gradients])

    def leave():
        raise SystemExit("stopped before training: influence does not agree with plain gradients "
                         "of single rows; the tape or a layer that it does not know has a bug (or "
                         "try dtype = 'float32', or tracin = 'off')")

    return Path(
        "influence", cfg.tracin != "off", fast=recorded, plain=one_by_one,
        gap=lambda found, expected: (relative(found, expected), bound_of(is_exact(nets, cfg))),
        without="tracin = 'off'", leave=leave)


def stored_influence(nets, cfg, few):
    """Gradients of rows formed in the backward, which pays where rows are long."""
    fewest = 500 if nets.device.type == "cuda" else 24
    width = len(nets.prompts[0].ids) + cfg.max_completion_length
    new_tape = functools.partial(StoredTape, memory=cfg.tracin_memory * 2 ** 30)

    def use():
        nets.influence.new_tape = functools.partial(new_tape, pool={})

    path = influence(nets, cfg, few, new_tape)
    return path._replace(
        name="influence, stored", asked=path.asked and cfg.tracin_memory > 0 and width > fewest,
        without="tracin_memory = 0", use=use, leave=nothing)


PATHS = (attention, wide_head, bfloat16_logits, bfloat16, head, graphs, compiled_generate,
         compiled_reference, compiled_update, compiled_judge, influence,
         stored_influence)
