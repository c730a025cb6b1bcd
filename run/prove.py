"""
A run proves what makes it fast before it uses it.

On four rows it computes log-probs and their gradient as it will (in bfloat16, compiled) and plainly
(in float32, not compiled), and holds the log-probs that sampling records against both. What fails,
or is too far off, is taken away: first compile, then bfloat16, and one line says so. What is left
must hold, or the run stops. That influence adds up is checked in the first step (see tracin.py).
"""
import math

import torch

from sample import completion_logprobs
from run.device import autocast
from run.metrics import gap_of, is_exact
from run.processes import all_gather
from run.script import BadInput
from sample import generate


def prove(nets, cfg):
    """Makes nets as fast as the settings ask for and as holds here."""
    plain = log_probs_and_gradient(nets, cfg, four_rows(nets, cfg, generate, torch.float32),
                                   nets.policy, torch.float32)
    if not plain[0].isfinite().all():
        return      # the first step ends the run, and says why
    compiled = compile_parts(nets) if cfg.compile else []
    for what, take_away in (("compile", compiled), ("bfloat16", [lambda: use_float32(nets)]), ("", [])):
        trouble = next(filter(None, all_gather([trouble_of(nets, cfg, plain)])), "")
        if not trouble:
            return
        if not what:
            raise BadInput(f"device = '{nets.device}': {trouble}; set device = 'cpu'")
        if what == "compile" and not compiled or what == "bfloat16" and is_exact(nets, cfg):
            continue
        for undo in take_away:
            undo()
        print(f"note: {what} off: {trouble}")


def four_rows(nets, cfg, sampler, dtype):
    """Rollout of two prompts, the second of which is shorter, twice; none of the rows ends."""
    ids = min((prompt.ids for prompt in nets.prompts), key=len)
    with autocast(nets.device, dtype):
        return sampler(nets.policy, [ids, ids[1:] or ids], 2, min(cfg.max_completion_length, 8),
                       seed=0, eos=-1, temperature=cfg.temperature, top_k=cfg.top_k,
                       top_p=cfg.top_p, min_p=cfg.min_p)


def log_probs_and_gradient(nets, cfg, rollout, policy, dtype):
    """Log-probs (4, T), and the gradient (weights,) of their sum, each with a weight of its own."""
    with autocast(nets.device, dtype):
        logp = completion_logprobs(policy, rollout, cfg.temperature)
    weights = torch.linspace(1, 2, logp.numel(), device=logp.device).view_as(logp)
    parts = torch.autograd.grad((logp * weights).sum(), nets.trained, materialize_grads=True)
    return logp.detach(), torch.cat([g.flatten() for g in parts])


def trouble_of(nets, cfg, plain):
    """What is wrong with the way in which nets compute, in words; "" if it holds."""
    try:
        rollout = four_rows(nets, cfg, generate, torch.float32)
        logp, gradient = log_probs_and_gradient(nets, cfg, rollout, nets.policy_fn, nets.dtype)
        sampled = four_rows(nets, cfg, nets.generate, nets.dtype)
        scored, _ = log_probs_and_gradient(nets, cfg, sampled, nets.policy_fn, nets.dtype)
        with torch.no_grad(), autocast(nets.device, nets.dtype):
            reference = completion_logprobs(nets.reference_fn, rollout, cfg.temperature)
    except Exception as e:  # whatever a driver or a compiler makes of it
        return " ".join(str(e).split())[:160] or type(e).__name__
    exact = is_exact(nets, cfg)
    far = float((gradient - plain[1]).norm() / plain[1].norm().clamp(min=1e-30))
    gaps = {"log-probs": gap_of(logp - plain[0], exact), "the gradient": (far, 1e-3 if exact else 0.1),
            "sampled log-probs": gap_of(scored - sampled.logp, exact),
            "the reference's log-probs": gap_of(reference - plain[0], exact)}
    for name, (gap, bound) in gaps.items():
        if not gap <= bound and math.isfinite(bound):
            return f"{name} differ from the plain path's by {gap:.2g} (bound {bound:g})"
    return ""


def compile_parts(nets):
    """Compiles the policy's forward, the reference's, the judge's -> functions that undo it."""
    def undo():
        nets.policy_fn, nets.reference_fn = nets.policy, nets.reference

    nets.policy_fn = torch.compile(nets.policy, dynamic=True)
    nets.reference_fn = torch.compile(nets.reference, dynamic=True)
    return [undo]


def use_float32(nets):
    nets.dtype = torch.float32
