"""
The proof that fast computation gives the right numbers.

Before a run uses bfloat16 or torch.compile, it computes a few completions with them and in plain
float32: log-probs, their gradient, and the log-probs recorded while sampling. If they differ too
much, or something fails, compile is turned off, then bfloat16, and one line says so. If float32
fails too, the run stops. The first step checks influence (tracin.py).
"""
import torch

from common.device import autocast, set_precision
from common.processes import all_gather
from common.script import BadInput
from rollout import completion_logprobs, generate
from run.metrics import logp_error, tolerance_of


def prove(nets, cfg):
    """Make nets compute as fast as the settings ask for and the proof allows. BadInput if even
    plain float32 fails."""
    if nets.device.type == "cpu" and nets.dtype == torch.float32 and not cfg.compile:
        return          # this is what the proof would compare with
    wanted = nets.dtype
    compute_in(nets, torch.float32, compiled=False)
    rollout = few_rows(nets, cfg)
    expected = logp_and_gradient(nets, cfg, rollout)
    compute_in(nets, wanted, cfg.compile)
    if not expected[0].isfinite().all():
        return          # the first step ends the run, and says why
    while problem := find_problem(nets, cfg, rollout, expected):
        if nets.policy_fn is not nets.policy:
            print(f"note: compile off: {problem}")
            compute_in(nets, wanted, compiled=False)
        elif nets.dtype != torch.float32:
            print(f"note: bfloat16 off: {problem}")
            compute_in(nets, torch.float32, compiled=False)
        else:
            raise BadInput(f"device = '{nets.device}': {problem}; set device = 'cpu'")


def compute_in(nets, dtype, compiled):
    """Set the dtype of the forward passes, and whether they and sampling are compiled."""
    nets.dtype = dtype
    set_precision(nets.device, dtype)
    nets.policy_fn = nets.policy
    nets.reference_fn = nets.reference
    nets.generate = generate
    if compiled:
        from extras.compiled import compile_nets
        compile_nets(nets)


def few_rows(nets, cfg):
    """Sample five completions of two prompts, one of which is padded; none of them ends early. Ten
    rows, since torch.compile treats dimensions of equal size as the same symbol."""
    ids = min((prompt.ids for prompt in nets.prompts), key=len)
    prompts = [ids, ids[1:] or ids]
    T = min(cfg.max_completion_length, 8)
    with autocast(nets.device, nets.dtype):
        return nets.generate(
            nets.policy, prompts, 5, T, seed=0, eos=-1, temperature=cfg.temperature,
            top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p)


def logp_and_gradient(nets, cfg, rollout):
    """Return the log-probs (N, T) of a rollout and the gradient (weights,) of a weighted sum of
    them."""
    with autocast(nets.device, nets.dtype):
        logp = completion_logprobs(nets.policy_fn, rollout, cfg.temperature)
    factors = torch.linspace(1, 2, logp.numel(), device=logp.device).view_as(logp)
    total = (logp * factors).sum()
    gradients = torch.autograd.grad(total, nets.trained, materialize_grads=True)
    return logp.detach(), torch.cat([g.flatten() for g in gradients])


def find_problem(nets, cfg, rollout, expected):
    """Say what is wrong with the way nets compute, in any process; "" if nothing is."""
    try:
        problem = compare(nets, cfg, rollout, *expected)
    except Exception as e:      # a driver or a compiler may raise anything
        words = " ".join(str(e).split())
        problem = words[:160] or type(e).__name__
    return next(filter(None, all_gather([problem])), "")


def compare(nets, cfg, rollout, expected_logp, expected_gradient):
    """Say what differs too much from plain float32; "" if nothing does."""
    logp, gradient = logp_and_gradient(nets, cfg, rollout)
    sampled = few_rows(nets, cfg)
    scored, _ = logp_and_gradient(nets, cfg, sampled)
    error = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    errors = {
        "log-probs": logp_error(logp - expected_logp, nets.dtype),
        "gradients": (error, 2 * tolerance_of(nets.dtype)),
        "log-probs of sampling": logp_error(scored - sampled.logp, nets.dtype)}
    for name, (error, tolerance) in errors.items():
        if not error <= tolerance:      # true for NaN too
            return f"{name} are off by {error:.2g}, more than {tolerance:g}"
    return ""
