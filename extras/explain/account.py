"""
The account of a run: which rollouts made a number rise or fall, and what would it be without one of
them?

f is the number, a function of the weights: the expected reward on held-out prompts, the log-prob of
a sentence (target.py). theta_0 .. theta_S are the weights along the S optimizer steps of a run, g
the gradient of a step, g_i rollout i's part of it, c = 1 - b^t for AdamW's two betas:

    m' = b1 m + (1 - b1) clip g         v' = b2 v + (1 - b2) (clip g)^2         s = sqrt(v' / c2)
    theta' = (1 - lr decay) theta - lr m' / c1 / (s + eps)

Where did the change come from? In a step f changes by <slope, theta' - theta>, with slope the mean
of grad f on the way. With s and clip as they were, theta' - theta is a sum over all gradients so
far. So rollout i of step t has the share <g_i, G_t>. G_t is made from the last step to the first:

    G_t = (1 - b1) clip U_t             U_t = b1 U_{t+1} - lr slope / c1 / (s + eps)

What if it had been left out? The derivative of f(theta_S) by the rollout's weight is <g_i, L_t>,
with L_t the derivative by g_t. AdamW's step, clipping included, takes derivatives by theta', m', v'
back to those by theta, m, v and g; the one by theta then gets H L_t too, since g depends on theta.
H is the Hessian of the step's loss. In this derivative alone s is damped, s + 0.3 rms(s): where v
is tiny a step is hardly more than a sign, and its derivative is huge and means nothing.

S steps, I iterations of N rollouts, W trained weights end to end, K columns: sentences, or folds of
the one number.
"""
import math
import re
import tempfile
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_, vector_to_parameters

import grpo
from common.device import full_precision, read_proc
from common.errors import BadInput
from common.processes import all_reduce
from common.progress import Progress
from common.seeds import seed_for
from loss import losses
from tape import Tape
from tracin import gradient_of, taped_losses

DAMPING = 0.3
DRAWS = 3           # of the smoothness

# ------------------------------------------------------------------------------------------------
# the run, once more


class RunStep(NamedTuple):
    """An optimizer step as the run took it."""
    it: int         # its iteration, from 0
    batch: Any      # loss.Batch, with the row_weights of this step
    step: Any       # loss.Step
    clip: float     # what its gradient was multiplied by
    lr: float
    decay: Tensor   # (W,) of each weight
    eps: float
    b1: float
    b2: float
    count: int      # of AdamW's steps, this one included

    @property
    def c1(self):
        return 1 - self.b1 ** self.count

    @property
    def c2(self):
        return 1 - self.b2 ** self.count


class Replay(NamedTuple):
    """A part of a run, once more."""
    setup: Any
    cfg: Any
    folder: str
    since: int      # iterations before the part
    states: list    # before each step and after the last one: S + 1 of (3, W), weights, m and v
    steps: list     # S of RunStep

    @property
    def shape(self):
        """(I, N)."""
        return self.steps[-1].it + 1, len(self.steps[0].batch.row_weights)

    @property
    def batches(self):
        """{iteration: its Batch}. Its last step knows all weights of its rows."""
        return {k.it: k.batch for k in self.steps}


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])


def free_memory():
    """Free memory of the host in bytes; inf where it is not known."""
    available = re.search(r"MemAvailable: *(\d+)", read_proc("meminfo"))
    return 1024 * int(available[1]) if available else math.inf


def stored(x, folder):
    """x on the CPU: in memory while that lasts, then in nameless files of the folder, which end
    with the process."""
    x = x.cpu()
    if 20 * x.nbytes < free_memory():
        return x
    file = tempfile.TemporaryFile(dir=folder)
    x.numpy().tofile(file)
    return torch.from_numpy(np.memmap(file, x.numpy().dtype, "r+", shape=x.shape))


def gradient(x, weights, **how):
    """The gradient (W,) of a number ()."""
    return flat(torch.autograd.grad(x, weights, materialize_grads=True, **how))


def by_parameter(setup, d):
    """(W,) -> {parameter: tensor}."""
    parts = d.split([p.numel() for p in setup.trained])
    return {p: part.view_as(p) for p, part in zip(setup.trained, parts)}


def check_optimizer(optimizer):
    """Refuse an optimizer that takes different steps than the formulas above."""
    first, *others = optimizer.param_groups
    same = ("lr", "betas", "eps", "amsgrad", "maximize")
    if (type(optimizer) is not torch.optim.AdamW or first["amsgrad"] or first["maximize"]
            or any(group[name] != first[name] for group in others for name in same)):
        raise BadInput(
            f"optimizer {type(optimizer).__name__}: an account knows torch.optim.AdamW alone, with "
            "one lr, betas and eps for all weights, and without amsgrad and maximize")


def decay_of(setup):
    """The weight decay (W,) of each trained weight."""
    decay = {p: group["weight_decay"] for group in setup.optimizer.param_groups
             for p in group["params"]}
    return flat(torch.full_like(p, decay[p]) for p in setup.trained).detach()


def run_step(setup, cfg, it, batch, step, norm, decay):
    """The RunStep that the run is about to take."""
    # AdamW skips a weight without gradient. One that never has any stands still; any other would
    # have a count of its own
    counts = {p: int(state["step"]) for p, state in setup.optimizer.state.items() if state}
    moved = {1 + counts.get(p, 0) for p in setup.trained if p.grad is not None}
    skipped = any(p.grad is None and p in counts for p in setup.trained)
    if len(moved) > 1 or skipped:
        raise BadInput(f"iteration {it + 1}: a weight has no gradient in some steps, which AdamW "
                       "skips; an account knows weights that have one always or never")
    count, = moved
    group = setup.optimizer.param_groups[0]     # all have the same, but for the decay
    clip = min(1.0, cfg.max_grad_norm / (norm + 1e-6)) if cfg.max_grad_norm else 1.0
    batch = replace(batch, row_weights=batch.row_weights.clone())
    return RunStep(it, batch, step, clip, group["lr"], decay, group["eps"], *group["betas"], count)


def state_of(setup):
    """Weights, m and v (3, W)."""
    state = setup.optimizer.state
    moments = [flat(state[p].get(name, torch.zeros_like(p)) for p in setup.trained)
               for name in ("exp_avg", "exp_avg_sq")]
    return torch.stack([flat(setup.trained).detach(), *moments])


def replay(setup, cfg, start, since, end, folder):
    """Repeat iterations start .. end - 1 as grpo.train did -> the Replay of those since `since`."""
    states = []
    steps = []
    check_optimizer(setup.optimizer)
    decay = decay_of(setup)                                                         # (W,)
    progress = Progress("replay", "iteration", end, start)
    for it in range(start, end):
        grpo.set_learning_rate(setup.optimizer, it, cfg)
        batch = grpo.collect_iteration(setup, it, cfg)
        held_out = grpo.collect_held_out(setup, it, cfg)

        def watch(step, norm):
            if it >= since:
                states.append(stored(state_of(setup), folder))
                steps.append(run_step(setup, cfg, it, batch, step, float(norm), decay))

        grpo.update(setup, batch, held_out, cfg, seed_for(cfg.seed, "rows", it), watch=watch)
        if follow := cfg.hook("follow"):
            follow(setup, it + 1, cfg)
        if progress.is_due():
            progress.show(it + 1)
    states.append(stored(state_of(setup), folder))
    return Replay(setup, cfg, folder, since, states, steps)


# ------------------------------------------------------------------------------------------------
# a step, from its end to its start


def adamw(k, g, theta, m, v, damping):
    """What step k makes of theta, m, v (W,) with the gradient g (W,)."""
    clip = k.clip
    if clip < 1:        # it is limit / (norm + 1e-6): the same number, with its derivative by g
        norm = g.norm() + 1e-6
        clip = clip * norm.detach() / norm
    m = k.b1 * m + (1 - k.b1) * clip * g
    v = k.b2 * v + (1 - k.b2) * (clip * g).square()
    s = (v / k.c2 + 1e-30).sqrt()       # which has no derivative at 0
    denominator = s + k.eps + damping * s.detach().square().mean().sqrt()
    return (1 - k.lr * k.decay) * theta - k.lr / k.c1 * m / denominator, m, v


def gradient_in(k, before, after):
    """The gradient (W,) of step k, by what it made of m. before, after: the states."""
    return (after[1] - k.b1 * before[1]) / (1 - k.b1) / k.clip


def through_adamw(k, before, after, derivative, damping):
    """L_t (K, W), and (d_theta, d_m, d_v) before step k from those after it, without H. before,
    after: the states."""
    g = gradient_in(k, before, after)
    _, back = torch.func.vjp(lambda *inputs: adamw(k, *inputs, damping), g, *before)
    L, *derivative = torch.vmap(back)(tuple(derivative))
    return L, derivative


def exact(setup):
    """The setup with forward passes in the precision of its weights. An account draws and
    differentiates one policy, also of a run in bfloat16."""
    return replace(setup, dtype=setup.trained[0].dtype)


@full_precision()
def hessian_times(run, k, weights, directions):
    """H d (K, W) of the loss of step k, in full precision: the derivative of <gradient, d>."""
    setup = run.setup
    vector_to_parameters(weights, setup.trained)
    products = torch.zeros_like(directions)
    with sdpa_kernel(SDPBackend.MATH):      # no other attention has a second derivative
        for loss, _ in losses(exact(setup), setup.policy, k.batch, k.step, run.cfg):
            g = gradient(loss.total, setup.trained, create_graph=True)
            for i, d in enumerate(directions):
                products[i] += gradient(g @ d, setup.trained, retain_graph=True)
    return products


@full_precision()
def products_with(run, k, weights, directions):
    """Products (n, N) of directions (n, W) with the rollouts' parts of the gradient of step k, in
    full precision."""
    setup = run.setup
    vector_to_parameters(weights, setup.trained)
    with Tape(setup.policy, len(k.batch.row_weights), all_reduce) as tape:
        for loss, _ in taped_losses(tape, exact(setup), k.batch, k.step, run.cfg):
            loss.policy.backward()
    return torch.stack([tape.dot(by_parameter(setup, d)) for d in directions]).cpu()


# ------------------------------------------------------------------------------------------------
# from the last step to the first


class Account(NamedTuple):
    """In the unit of f, of K columns."""
    shares: Tensor      # (K, I, N) of the rollouts: where the change came from
    effects: Any        # (K, I, N): the derivatives of the end by their weights; or None
    rest: dict          # {name: shares (K, I)}: of the rest of the loss, and of what is no loss
    directions: list    # S of (K, W): L_t, which the effects are products with; or []

    @property
    def together(self):     # (K,)
        return self.shares.sum((1, 2)) + sum(x.sum(1) for x in self.rest.values())


def parts_of(setup, cfg):
    """Parts of the rest of the loss that take a pass each, and the name of what is left of a step's
    gradient then, or None. A single part takes no pass, unless the run rounded: it is what the
    rollouts leave."""
    is_on = dict(kl=cfg.kl_in_loss, entropy=cfg.entropy_coef, critic=cfg.critic)
    parts = [part for part in is_on if is_on[part]]
    if setup.dtype == torch.bfloat16:       # the run's passes; an account's are exact
        return parts, "rounding"
    return ([], *parts) if len(parts) == 1 else (parts, None)


def backwards(run, means):
    """Each step, from the last to the first, with the states before and after it, the mean slope
    (K, W), and G (K, W)."""
    U = 0.0
    steps = zip(run.steps, run.states, run.states[1:], means)
    for k, *tensors in reversed(list(steps)):
        before, after, slope = (x.to(run.setup.device) for x in tensors)
        U = k.b1 * U - k.lr / k.c1 * slope / ((after[2] / k.c2).sqrt() + k.eps)
        yield k, before, after, slope, (1 - k.b1) * k.clip * U


def account(run, course, predicts=True, damping=DAMPING):
    """The Account of a Replay for the target whose Course along it is given. predicts: False leaves
    out the effects, which take most of the time."""
    setup, cfg = run.setup, run.cfg
    derivative = course.last, 0 * course.last, 0 * course.last
    K = len(course.last)
    shares, effects = torch.zeros(2, K, *run.shape).double()
    parts, left_over = parts_of(setup, cfg)
    rest = defaultdict(lambda: torch.zeros(K, run.shape[0]).double())
    directions = []
    progress = Progress("account", "step", len(run.steps))
    for done, (k, before, after, slope, G) in enumerate(backwards(run, course.means), 1):
        wanted = G                                                                  # (n, W)
        if predicts:
            L, derivative = through_adamw(k, before, after, derivative, damping)
            directions.append(stored(L, run.folder))
            wanted = torch.cat([G, L])
        products = products_with(run, k, before[0], wanted)                         # (n, N)
        shares[:, k.it] += products[:K]
        if predicts:
            effects[:, k.it] += products[K:]
            derivative[0] += hessian_times(run, k, before[0], L)

        # the gradient of the step, without the rollouts'
        left = (G @ gradient_in(k, before, after)).cpu() - products[:K].sum(1)      # (K,)
        for part in parts:
            g = gradient_of(exact(setup), cfg, k.batch, k.step, part)
            product = (G @ flat(g.values())).cpu()
            rest[part][:, k.it] += product
            left = left - product
        if left_over:
            rest[left_over][:, k.it] += left
        rest["decay"][:, k.it] -= k.lr * (slope @ (k.decay * before[0])).cpu()
        if progress.is_due():
            progress.show(done)
    # of what m held before the first step
    rest["momentum"][:, k.it] = k.b1 / (1 - k.b1) / k.clip * (G @ before[1]).cpu()
    return Account(shares, effects if predicts else None, dict(rest), directions[::-1])


# ------------------------------------------------------------------------------------------------
# the run on its own rollouts, once more


def train_again(run, factors):
    """Weights (W,) at the end of the run on its own rollouts, with factors (I, N) on their losses.
    """
    # from where the run began, with what AdamW held there
    setup, cfg = run.setup, run.cfg
    theta, *moments = run.states[0].to(setup.device, copy=True)     # steps are in place
    vector_to_parameters(theta, setup.trained)
    m, v = (by_parameter(setup, x) for x in moments)
    for p in setup.trained:
        step = torch.tensor(run.steps[0].count - 1.0, device=p.device)
        setup.optimizer.state[p] = dict(step=step, exp_avg=m[p], exp_avg_sq=v[p])

    # its steps, as they were taken
    for k in run.steps:
        weights = k.batch.row_weights * factors[k.it].to(k.batch.row_weights)
        batch = replace(k.batch, row_weights=weights)
        for loss, _ in losses(setup, setup.policy, batch, k.step, cfg):
            loss.total.backward()
        clip_grad_norm_(setup.trained, cfg.max_grad_norm or math.inf)
        for group in setup.optimizer.param_groups:
            group["lr"] = k.lr
        setup.optimizer.step()
        setup.optimizer.zero_grad(set_to_none=True)
    return flat(setup.trained).detach()


def smoothness_by(run, seed):
    """How far the signs agree of two movements of the last weights, by rollouts weighed 1 + 0.1 z
    in place of 1 and 1 + 0.2 z in place of 1 + 0.1 z (Engstrom et al. 2025, arXiv 2503.13751). z is
    one normal number for each rollout."""
    z = torch.randn(run.shape, generator=torch.Generator().manual_seed(seed))
    start = run.states[-1][0].to(run.setup.device)
    middle, end = (train_again(run, 1 + size * z) for size in (0.1, 0.2))
    size = (end - start).abs()
    agree = (middle - start).sign() * (end - middle).sign()
    return float((size * agree).sum() / size.sum().clamp(min=1e-30))


def smoothness(run):
    """1 is smooth, 0 is chance: the mean of three draws, which may differ by 0.3."""
    return fmean(smoothness_by(run, seed_for("smoothness", i)) for i in range(DRAWS))
