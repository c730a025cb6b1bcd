"""
The check that fast computation gives the right numbers.

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


def check_precision(setup, cfg):
    """Make setup compute as fast as the settings ask for and the check allows. BadInput if even
    plain float32 fails."""
    if setup.device.type == "cpu" and setup.dtype == torch.float32 and not cfg.compile:
        return          # this is what the check would compare with
    wanted = setup.dtype
    compute_in(setup, torch.float32, compiled=False)
    rollout = few_rows(setup, cfg)
    expected = logp_and_gradient(setup, cfg, rollout)
    compute_in(setup, wanted, cfg.compile)
    if not expected[0].isfinite().all():
        return          # the first step ends the run, and says why
    while problem := find_problem(setup, cfg, rollout, expected):
        if setup.policy_fn is not setup.policy:
            print(f"note: compile off: {problem}")
            compute_in(setup, wanted, compiled=False)
        elif setup.dtype != torch.float32:
            print(f"note: bfloat16 off: {problem}")
            compute_in(setup, torch.float32, compiled=False)
        else:
            raise BadInput(f"device = '{setup.device}': {problem}; set device = 'cpu'")


def compute_in(setup, dtype, compiled):
    """Set the dtype of the forward passes, and whether they and sampling are compiled."""
    setup.dtype = dtype
    set_precision(setup.device, dtype)
    setup.policy_fn = setup.policy
    setup.reference_fn = setup.reference
    setup.generate = generate
    if compiled:
        from extras.compiled import compile_nets
        compile_nets(setup)


def few_rows(setup, cfg):
    """Sample five completions of two prompts, one of which is padded; none of them ends early. Ten
    rows, since torch.compile treats dimensions of equal size as the same symbol."""
    ids = min((prompt.ids for prompt in setup.prompts), key=len)
    prompts = [ids, ids[1:] or ids]
    T = min(cfg.max_completion_length, 8)
    with autocast(setup.device, setup.dtype):
        return setup.generate(
            setup.policy, prompts, 5, T, seed=0, eos=-1, **cfg.sampling)


def logp_and_gradient(setup, cfg, rollout):
    """Return the log-probs (N, T) of a rollout and the gradient (weights,) of a weighted sum of
    them."""
    with autocast(setup.device, setup.dtype):
        logp = completion_logprobs(setup.policy_fn, rollout, cfg.temperature)
    factors = torch.linspace(1, 2, logp.numel(), device=logp.device).view_as(logp)
    total = (logp * factors).sum()
    gradients = torch.autograd.grad(total, setup.trained, materialize_grads=True)
    return logp.detach(), torch.cat([g.flatten() for g in gradients])


def find_problem(setup, cfg, rollout, expected):
    """Say what is wrong with the way setup computes, in any process; "" if nothing is."""
    try:
        problem = compare(setup, cfg, rollout, *expected)
    except Exception as e:      # a driver or a compiler may raise anything
        words = " ".join(str(e).split())
        problem = words[:160] or type(e).__name__
    return next(filter(None, all_gather([problem])), "")


def compare(setup, cfg, rollout, expected_logp, expected_gradient):
    """Say what differs too much from plain float32; "" if nothing does."""
    logp, gradient = logp_and_gradient(setup, cfg, rollout)
    sampled = few_rows(setup, cfg)
    scored, _ = logp_and_gradient(setup, cfg, sampled)
    error = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    errors = {
        "log-probs": logp_error(logp - expected_logp, setup.dtype),
        "gradients": (error, 2 * tolerance_of(setup.dtype)),
        "log-probs of sampling": logp_error(scored - sampled.logp, setup.dtype)}
    for name, (error, tolerance) in errors.items():
        if not error <= tolerance:      # true for NaN too
            return f"{name} are off by {error:.2g}, more than {tolerance:g}"
    return ""
