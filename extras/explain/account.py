"""
The account of a run: which rollouts made a number rise or fall, and what would it be without one of
them?

f is the number, a function of the weights: the expected reward on held-out prompts, the log-prob of
a sentence (target.py). theta_0 .. theta_S are the weights along the S optimizer steps of a run, g
the gradient of a step, g_i rollout i's part of it. AdamW has two betas; c = 1 - b^t for each:

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

S steps, I iterations of N rollouts, W trained weights end to end. A number that is estimated has F
folds, which add up to it; an exact one has F = 1.
"""
import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_, vector_to_parameters

from common.device import full_precision
from common.processes import all_reduce
from common.progress import Progress
from common.seeds import seed_for
from extras.explain.number import total
from extras.explain.repeat import flat
from loss import losses
from tape import Tape
from tracin import gradient_of, taped_losses

DAMPING = 0.3
DRAWS = 3           # of the smoothness
NAMES = {"kl": "KL", "entropy": "entropy bonus", "decay": "weight decay",
         "rounding": "bfloat16's rounding"}

# ------------------------------------------------------------------------------------------------
# a step, from its end to its start


def gradient(x, weights, **how):
    """The gradient (W,) of a number ()."""
    return flat(torch.autograd.grad(x, weights, materialize_grads=True, **how))


def by_parameter(setup, d):
    """(W,) -> {parameter: tensor}."""
    parts = d.split([p.numel() for p in setup.trained])
    return {p: part.view_as(p) for p, part in zip(setup.trained, parts)}


def exact(setup):
    """The setup with forward passes in the precision of its weights. An account draws and
    differentiates one policy, also of a run in bfloat16."""
    return replace(setup, dtype=setup.trained[0].dtype)


def damped_step(k, g, theta, m, v, damping):
    """What AdamW's step k makes of theta, m, v (W,) with the gradient g (W,)."""
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


def through_step(k, before, after, derivative, damping):
    """L_t (W,), and the derivatives by theta, m, v before step k from those after it, without H.
    before, after: the states."""
    g = gradient_in(k, before, after)
    _, back = torch.func.vjp(lambda *inputs: damped_step(k, *inputs, damping), g, *before)
    L, *derivative = back(tuple(derivative))
    return L, derivative


@full_precision()
def hessian_times(run, k, weights, direction):
    """H d (W,) of the loss of step k, in full precision: the derivative of <gradient, d>."""
    setup = run.setup
    vector_to_parameters(weights, setup.trained)
    product = torch.zeros_like(direction)
    with sdpa_kernel(SDPBackend.MATH):      # no other attention has a second derivative
        for loss, _ in losses(exact(setup), setup.policy, k.batch, k.step, run.cfg):
            g = gradient(loss.total, setup.trained, create_graph=True)
            product += gradient(g @ direction, setup.trained)
    return product


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
    """Where the change of a number came from, in its unit."""
    run: Any            # repeat.RepeatedRun
    target: Any         # of target.py: the number
    points: list        # S + 1 of its Points, without slopes: before each step, after the last
    gains: Tensor       # (S, F) of <mean slope, step>: nearly its changes
    shares: Tensor      # (F, I, N) of the rollouts
    rest: dict          # {name: shares (F, I)} of what is no rollout
    effects: Any        # (I, N): the derivatives of the end by the rollouts' weights; or None
    directions: list    # S of (W,): effects, or else shares, are products of gradients with these

    @property
    def values(self):       # (S + 1, F)
        return torch.stack([point.value for point in self.points])

    @property
    def change(self):       # (F,)
        return self.values[-1] - self.values[0]

    @property
    def sources(self):
        """{from what, in words: shares (F, I)}, without what is 0."""
        return {"rollouts": self.shares.sum(2),
                **{NAMES.get(name, name): x for name, x in self.rest.items() if x.any()}}

    @property
    def together(self):     # (F,)
        return sum(x.sum(1) for x in self.sources.values())

    @property
    def off(self):
        """How far the sum is from the change: a Number."""
        return total(self.together - self.change)

    @property
    def error(self):
        """How far the sum is from the change, as a part of it."""
        return abs(self.off.value) / max(abs(float(self.change.sum())), 1e-30)

    @property
    def noise(self):
        """The standard error of the sum, as a part of it."""
        value, error, _ = total(self.together)
        return error / max(abs(value), 1e-30)

    @property
    def digits(self):
        """As many behind the point as the numbers deserve."""
        sizes = (self.change.sum(), self.shares.sum((0, 2)).abs().max())
        return min(9, max(2, 2 - math.floor(math.log10(max(1e-12, *map(abs, map(float, sizes)))))))


def parts_of(setup, cfg):
    """Parts of the rest of the loss that take a pass each, and the name of what is left of a step's
    gradient then, or None. A single part takes no pass, unless the run rounded: it is what the
    rollouts leave."""
    is_on = dict(kl=cfg.kl_in_loss, entropy=cfg.entropy_coef, critic=cfg.critic)
    parts = [part for part in is_on if is_on[part]]
    if setup.dtype == torch.bfloat16:       # the run's passes; an account's are exact
        return parts, "rounding"
    return ([], *parts) if len(parts) == 1 else (parts, None)


def rest_of_step(run, k, before, after, G, rollouts):
    """{name: shares (F,)} of the rest of the loss of step k. rollouts: the sums of their shares."""
    parts, left_over = parts_of(run.setup, run.cfg)
    left = (G @ gradient_in(k, before, after)).cpu() - rollouts
    shares = {}
    for part in parts:
        g = gradient_of(exact(run.setup), run.cfg, k.batch, k.step, part)
        shares[part] = (G @ flat(g.values())).cpu()
        left = left - shares[part]
    return shares | ({left_over: left} if left_over else {})


def backwards(run, target, end):
    """Each step, from the last to the first: the states before and after it, the target's Point
    before it, the mean slope (F, W) on its way, and G (F, W). end: the Point after the last."""
    U = 0.0
    for k, *states in reversed(list(zip(run.steps, run.states, run.states[1:]))):
        before, after = (x.to(run.setup.device) for x in states)
        start = target.at(before[0])
        slope = start.slope / 2 + end.slope / 2     # by the trapezoid rule
        U = k.b1 * U - k.lr / k.c1 * slope / ((after[2] / k.c2).sqrt() + k.eps)
        yield k, before, after, start, slope, (1 - k.b1) * k.clip * U
        end = start


def make_account(run, target, predicts=False, damping=DAMPING):
    """The Account of a RepeatedRun. predicts: with effects, of an exact target."""
    end = target.at(run.states[-1][0])
    F = len(end.slope)
    points, gains, directions = [end._replace(slope=None)], [], []
    shares = torch.zeros(F, *run.shape).double()
    effects = torch.zeros(run.shape).double() if predicts else None
    rest = defaultdict(lambda: torch.zeros(F, run.shape[0]).double())
    derivative = end.slope[0], 0 * end.slope[0], 0 * end.slope[0]       # by theta, m, v
    progress = Progress("account", "step", len(run.steps))
    for k, before, after, start, slope, G in backwards(run, target, end):
        points.append(start._replace(slope=None))
        gains.append((slope @ (after[0] - before[0]).to(slope)).double().cpu())

        # the rollouts: products of their gradients with G, and with L
        wanted, direction = G, G.sum(0)
        if predicts:
            direction, derivative = through_step(k, before, after, derivative, damping)
            wanted = torch.cat([G, direction[None]])
        products = products_with(run, k, before[0], wanted)                     # (F or F + 1, N)
        shares[:, k.it] += products[:F]
        if predicts:
            effects[k.it] += products[F]
            derivative[0] += hessian_times(run, k, before[0], direction)
        directions.append(direction.cpu())

        # what is no rollout
        left = rest_of_step(run, k, before, after, G, products[:F].sum(1))
        left["decay"] = -k.lr * (slope @ (k.decay * before[0])).cpu()
        for name, share in left.items():
            rest[name][:, k.it] += share
        if progress.is_due():
            progress.show(len(gains))
    return Account(run, target, points[::-1], torch.stack(gains[::-1]), shares, dict(rest), effects,
                   directions[::-1])


# ------------------------------------------------------------------------------------------------
# the run on its own rollouts


def train_again(run, factors):
    """Weights (W,) at the end of the run on its own rollouts, with factors (I, N) on their losses.
    """
    # from where the run began
    setup, cfg = run.setup, run.cfg
    theta = run.states[0][0].to(setup.device, copy=True)        # steps are in place
    vector_to_parameters(theta, setup.trained)
    setup.optimizer.state.clear()

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
