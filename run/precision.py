"""
Check that what is fast gives the right numbers.

Before a run uses bfloat16, graphs for decoding, or torch.compile, it computes a few completions
with it and in plain float32: log-probs, their gradient, and the log-probs recorded while sampling.
What differs too much, or fails, is turned off, and a line says so. (Guards in common/guards.py
check sampler, trainer and influence.)
"""
import os
import traceback
from dataclasses import replace

import torch

from common.device import set_precision
from common.errors import shown
from common.files import ROOT
from common.guards import logp_error, tolerance_of
from common.processes import all_gather
from rollout import completion_logprobs


def few_rows(setup, cfg):
    """Sample the rows to compare, completions that never end early -> [Rollout]: some rows padded,
    all rows unpadded, a single row, and a row that was sampled alone."""
    ids = min((prompt.ids for prompt in setup.prompts), key=len)
    T = min(cfg.max_completion_length, 8)
    set_precision(setup.device, setup.dtype)
    with setup.autocast():
        how = dict(seed=0, eos=(-1,), **cfg.sampling)
        # ten rows, since torch.compile treats dimensions of equal size as the same symbol
        rows = setup.generate(setup.policy, [ids, ids[1:] or ids], 5, T, **how)
        alone = setup.generate(setup.policy, [ids], 1, T, **how)
    return [rows, rows[:5], rows[:1], alone]


def logp_and_gradient(setup, rollout, cfg):
    """The log-probs (N, T) of a rollout and the gradient (weights,) of a weighted sum of
    them."""
    # a forward pass as setup computes it
    set_precision(setup.device, setup.dtype)
    with setup.autocast():
        logp = completion_logprobs(setup.fast(setup.policy), rollout, cfg.temperature)

    # one backward for all rows; each token has a different weight, so that errors do not cancel
    factors = torch.linspace(1, 2, logp.numel(), device=logp.device).view_as(logp)
    total = (logp * factors).sum()
    gradients = torch.autograd.grad(total, setup.trained, materialize_grads=True)
    return logp.detach(), torch.cat([g.flatten() for g in gradients])


def compare(setup, cfg, rollout):
    """Say what differs too much from plain float32 on a rollout; "" if nothing does."""
    # three things must agree: the log-probs, the log-probs of sampling, the gradient
    plain = replace(setup, dtype=torch.float32, compiled={})
    expected, expected_gradient = logp_and_gradient(plain, rollout, cfg)
    logp, gradient = logp_and_gradient(setup, rollout, cfg)
    errors = {}
    for name, x in (("log-probs", logp), ("log-probs of sampling", rollout.logp)):
        gaps = (x - expected).abs()
        errors[name] = logp_error(float(gaps.mean()), float(gaps.max()), setup.dtype)
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    errors["gradients"] = float(error), 2 * tolerance_of(setup.dtype)

    # name the first that does not
    for name, (error, tolerance) in errors.items():
        if not error <= tolerance:      # true for NaN too
            return f"{name} are off by {error:.2g}, more than {tolerance:g}"
    return ""


def find_problem(setup, cfg):
    """How setup's results differ from plain float32's, in any process; "" if they agree."""
    try:
        problems = [compare(setup, cfg, rollout) for rollout in few_rows(setup, cfg)]
        problem = next(filter(None, problems), "")
    except Exception as e:      # a driver, a compiler, or a mistake in a model
        problem = f"{shown(e, 160)}\n{traceback.format_exc()}"
    return next(filter(None, all_gather([problem])), "")


def check_precision(setup, cfg):
    """Let setup compute as fast as the settings say and the check allows."""
    # turn on each fast way on top of the earlier ones, and remember what it replaces
    slow = {}
    if setup.dtype != torch.float32:
        slow["bfloat16"] = dict(dtype=torch.float32)
    if setup.device.type == "cuda" and os.path.isdir(f"{ROOT}/extras/graph"):
        from extras.graph import generate_by_graph
        slow["CUDA graph"] = dict(generate=setup.generate)
        setup.generate = generate_by_graph(setup.policy)
    if cfg.compile:
        from extras.compiled import compile_nets
        slow["compile"] = dict(compiled={}, generate=setup.generate)
        compile_nets(setup)

    # turn off the last one until the rest gives the right numbers
    for name, without in reversed(slow.items()):
        problem = find_problem(setup, cfg)
        failed = name == "compile" and not setup.compiled   # the compiler has, and printed a note
        if not problem and not any(all_gather([failed])):
            break
        if not failed:
            print(f"note: {name} off: {problem or 'another process cannot compile'}")
        vars(setup).update(without)
    set_precision(setup.device, setup.dtype)
