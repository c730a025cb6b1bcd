"""
The account of a run: which rollouts made a sentence likelier or less likely, and what would its
log-prob be had one of them been left out?

f = log p(completion | prompt). theta_0 .. theta_S are the weights along the S optimizer steps of a
run, g the gradient of a step, P_i rollout i's part of it, c = 1 - b^t for AdamW's two betas:

    m' = b1 m + (1 - b1) clip g         v' = b2 v + (1 - b2) (clip g)^2         s = sqrt(v' / c2)
    theta' = (1 - lr decay) theta - lr m' / c1 / (s + eps)

Where did the change come from? In a step f changes by <slope, theta' - theta>, with slope the mean
of grad f on the way. With s and clip as they were, theta' - theta is a sum over all gradients so
far. So rollout i of step t has the share <P_i, G_t>, made from the last step to the first:

    G_t = (1 - b1) clip U_t             U_t = b1 U_{t+1} - lr slope / c1 / (s + eps)

What if it had been left out? The derivative of f(theta_S) by the rollout's weight is <P_i, L_t>,
with L_t the derivative by g_t. Each step takes derivatives by theta', m', v', that is d_theta, d_m,
d_v, back to those by theta, m, v and g:

    u_m = d_m - lr d_theta / c1 / (s + eps)     u_v = d_v + lr d_theta m' / c1 / (s + eps)^2 ds/dv'
    L_t = clip ((1 - b1) u_m + 2 (1 - b2) clip g u_v), plus what g changes by way of clip
    d_m <- b1 u_m       d_v <- b2 u_v       d_theta <- (1 - lr decay) d_theta + H L_t

H is the Hessian of the step's loss. In this derivative alone s is damped, s + 0.3 rms(s): where v
is tiny a step is hardly more than a sign, and its derivative is huge and means nothing.

S steps, I iterations of N rollouts, W trained weights end to end, K sentences of T tokens.
"""
import math
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

import grpo
from common.device import free_memory
from common.script import BadInput, seed_for
from rollout import completion_logprobs, empty_rollout
from common.supervised import Progress
from tracin import Recording

DAMPING = 0.3
NEAR = 1e-5     # H d is the difference of two gradients, this far from the weights, relative to
                # their norm. In float32 it has three digits; from nearer ones fewer

# ------------------------------------------------------------------------------------------------
# the run, once more


class Taken(NamedTuple):
    """An optimizer step as the run took it."""
    it: int         # its iteration, from 0
    batch: Any      # grpo.Batch, with the row_weights of this step
    step: Any       # grpo.Step
    norm: float     # of the gradient
    clip: float     # what it was multiplied by
    lr: float
    decay: float
    eps: float
    b1: float
    b2: float
    c1: float
    c2: float


def replay(setup, cfg, start, since, end, folder):
    """Does iterations start .. end - 1 as grpo.train did -> the states before each step since
    iteration `since` and after the last one, (3, W) each, and these steps, S of Taken."""
    states = []
    taken = []
    progress = Progress("replay", "iteration", end, start)
    for it in range(start, end):
        setup.optimizer.param_groups[0]["lr"] = grpo.learning_rate(it, cfg)
        batch, held_out = grpo.sample_iteration(setup, it, cfg)

        def watch(step, norm):
            if it >= since:
                states.append(kept(state_of(setup), folder))
                taken.append(step_of(setup, cfg, it, batch, step, float(norm)))

        grpo.update(setup, batch, held_out, cfg, seed_for(cfg.seed, "rows", it), watch=watch)
        if grpo.is_due(it + 1, cfg.ref_model_sync_steps):
            grpo.sync_reference(setup, cfg.ref_model_mixup_alpha)
        if progress.is_due():
            progress.show(it + 1)
    return [*states, state_of(setup)], taken


def step_of(setup, cfg, it, batch, step, norm):
    """A step that the run is about to take."""
    group, = setup.optimizer.param_groups       # one for all weights
    count = 1 + int(setup.optimizer.state[setup.trained[0]].get("step", 0))
    b1, b2 = group["betas"]
    clip = min(1.0, cfg.max_grad_norm / (norm + 1e-6)) if cfg.max_grad_norm else 1.0
    batch = replace(batch, row_weights=batch.row_weights.clone())
    return Taken(it, batch, step, norm, clip, group["lr"], group["weight_decay"], group["eps"],
                 b1, b2, 1 - b1 ** count, 1 - b2 ** count)


def state_of(setup):
    """Weights, m and v (3, W)."""
    state = setup.optimizer.state
    moments = [flat(state[p].get(name, torch.zeros_like(p)) for p in setup.trained)
               for name in ("exp_avg", "exp_avg_sq")]
    return torch.stack([flat(setup.trained).detach(), *moments])


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])


def kept(x, folder):
    """x on the CPU: in memory while that lasts, then in nameless files of the folder, which end
    with the process."""
    x = x.cpu()
    if 20 * x.nbytes < free_memory(x.device):
        return x
    try:
        file = tempfile.TemporaryFile(dir=folder)
        x.numpy().tofile(file)
    except OSError as e:
        raise BadInput(f"{folder}: no room for the weights on the way ({e.strerror}); take the "
                       "last part of the run, --since=N") from e
    return torch.from_numpy(np.memmap(file, x.numpy().dtype, "r+", shape=x.shape))


# ------------------------------------------------------------------------------------------------
# the sentence


def row_of(before, said, device):
    """A Rollout of one row, by the ids of a prompt and of a completion."""
    ids = torch.tensor([before + said], device=device)
    row = empty_rollout(ids[:, :len(before)], torch.ones_like(ids) > 0, 1, len(said), 0)
    row.tokens = ids
    row.completion_mask |= True
    return row


def logprobs(setup, weights, rollout, cfg):
    """Log-probs (T,) of a sentence's tokens at the run's temperature; nothing is truncated."""
    vector_to_parameters(weights.to(setup.device), setup.trained)
    return completion_logprobs(setup.policy, rollout, cfg.temperature)[0]


def slopes(setup, weights, rollouts, cfg):
    """grad f (K, W) of K sentences."""
    f = [logprobs(setup, weights, rollout, cfg).sum() for rollout in rollouts]
    return torch.stack([
        flat(torch.autograd.grad(x, setup.trained, materialize_grads=True)) for x in f])


def mean_slopes(setup, before, after, rollouts, cfg, parts):
    """The mean of grad f (K, W) on the straight way between two weights, by the trapezoid rule."""
    found = [slopes(setup, before.lerp(after, i / parts), rollouts, cfg) for i in range(parts + 1)]
    return (sum(found) - (found[0] + found[-1]) / 2) / parts


# ------------------------------------------------------------------------------------------------
# a step, from its end to its start


def taken_back(k, before, after, derivative, damping):
    """L_t (K, W), and (d_theta, d_m, d_v) before step k from those after it, without H. before,
    after: the states."""
    d_theta, d_m, d_v = derivative
    _, m, v = after
    s = (v / k.c2).sqrt()
    s_by_v = torch.where(s > 0, 0.5 / (s * k.c2), 0.0)
    bottom = s + k.eps + damping * s.square().mean().sqrt()
    moved = k.lr / k.c1 * d_theta / bottom
    u_m = d_m - moved
    u_v = d_v + moved * m / bottom * s_by_v
    clipped = (m - k.b1 * before[1]) / (1 - k.b1)       # clip times g
    L = k.clip * ((1 - k.b1) * u_m + 2 * (1 - k.b2) * clipped * u_v)
    if k.clip < 1:      # it is a limit / (norm + 1e-6)
        g = clipped / k.clip
        L = L - (L @ g / k.norm / (k.norm + 1e-6))[:, None] * g
    return L, ((1 - k.lr * k.decay) * d_theta, k.b1 * u_m, k.b2 * u_v)


def unclipped(setup, cfg, k):
    """Settings and a Batch with which the loss of step k has the same gradient and no kinks: tokens
    whose ratio or value is clipped now are left out, the others are never clipped."""
    mask = torch.zeros_like(k.batch.loss_mask)
    batch = k.batch
    if cfg.critic:
        values = batch.rollout.values.clone().requires_grad_()
        batch = replace(batch, rollout=replace(batch.rollout, values=values),
                        returns=batch.returns.clone())
    for rows in grpo.micro_batches(batch.rollout, k.step.rows, cfg):
        loss = grpo.loss_of(setup, setup.policy, batch, rows, k.step, cfg)
        slope, = torch.autograd.grad(loss.policy, loss.logp, retain_graph=cfg.critic)   # (n, T)
        mask[rows] = slope != 0
        if cfg.critic:      # a value is clipped where its loss depends on the recorded one
            slope, = torch.autograd.grad(loss.critic, values, materialize_grads=True)   # (N, T)
            batch.returns[slope != 0] = math.nan        # it then has no loss
    cfg = replace(cfg, value_clip=None)
    if cfg.loss_type != "cispo":    # it has no kinks: its clipped ratio is a constant
        cfg = replace(cfg, epsilon=1e9, epsilon_high=None, delta=None)
    return cfg, replace(batch, policy_mask=mask)


def hessian_times(setup, cfg, k, weights, directions):
    """H d (K, W) of the loss of step k, each as the difference of two gradients in full precision.
    """
    exact = replace(setup, dtype=weights.dtype)
    vector_to_parameters(weights, setup.trained)
    cfg, batch = unclipped(exact, cfg, k)
    products = []
    for d in directions:
        h = NEAR * weights.norm() / d.norm().clamp(min=1e-30)
        found = []
        for there in (weights + h * d, weights - h * d):
            vector_to_parameters(there, setup.trained)
            found.append(flat(grpo.gradient_of(exact, cfg, batch, k.step).values()))
        products.append((found[0] - found[1]) / (2 * h))
    return torch.stack(products)


def multiplied(setup, cfg, k, weights, directions):
    """Products (n, N) of directions (n, W) with the rollouts' parts of the gradient of step k."""
    vector_to_parameters(weights, setup.trained)
    alone = replace(cfg, beta=0.0, entropy_coef=0.0, critic=False)      # without the rest
    batch = replace(k.batch, row_weights=k.batch.row_weights.clone())
    with Recording(setup.policy, batch, k.step, False, alone) as recording:  # it sets them to 1
        batch.row_weights = k.batch.row_weights
        for loss, rows in grpo.losses(setup, setup.policy, batch, k.step, alone, recording):
            recording.backward(loss, rows)
    return torch.stack([recording.tape.dot(by_parameter(setup, d)) for d in directions]).cpu()


def by_parameter(setup, d):
    """(W,) -> {parameter: tensor}."""
    parts = d.split([p.numel() for p in setup.trained])
    return {p: part.view_as(p) for p, part in zip(setup.trained, parts)}


# ------------------------------------------------------------------------------------------------
# from the last step to the first


class Account(NamedTuple):
    """In nats, of K sentences."""
    logp: list          # (S + 1, T) of each one's tokens, along the run
    shares: Tensor      # (K, I, N) of the rollouts: where the change came from
    effects: Tensor     # (K, I, N): the derivatives by their weights
    rest: dict          # {name: shares (K,)} of the other parts of the loss
    others: dict        # likewise, of what is no loss

    @property
    def together(self):     # (K,)
        return self.shares.sum((1, 2)) + sum([*self.rest.values(), *self.others.values()])

    @property
    def change(self):       # (K,)
        return torch.stack([x[-1].sum() - x[0].sum() for x in self.logp])


def account(setup, cfg, states, taken, rollouts, hessian=True, parts=1, damping=DAMPING):
    """The Account of K sentences, a Rollout of one row each. parts: of the way of a step, for the
    mean slope on it."""
    with torch.no_grad():
        logp = [torch.stack([logprobs(setup, x[0], rollout, cfg) for x in states]).cpu()
                for rollout in rollouts]
    K = len(rollouts)
    N = len(taken[0].batch.row_weights)
    found = torch.zeros(2, K, taken[-1].it + 1, N, dtype=torch.float64)
    parts_of_rest = dict(kl=cfg.kl_in_loss, entropy=cfg.entropy_coef, critic=cfg.critic)
    rest = {part: 0.0 for part, is_on in parts_of_rest.items() if is_on}
    decay = 0.0
    derivative = slopes(setup, states[-1][0], rollouts, cfg), 0.0, 0.0
    progress = Progress("account", "step", len(taken))
    steps = walk_back(setup, cfg, states, taken, rollouts, parts)
    for done, (k, before, after, slope, U) in enumerate(steps, 1):
        L, derivative = taken_back(k, before, after, derivative, damping)
        G = (1 - k.b1) * k.clip * U
        products = multiplied(setup, cfg, k, before[0], torch.cat([G, L]))
        found[:, :, k.it] += products.view(2, K, -1)
        for part in rest:
            g = grpo.gradient_of(setup, cfg, k.batch, k.step, part).values()
            rest[part] += (G @ flat(g)).cpu()
        decay -= k.lr * k.decay * (slope @ before[0]).cpu()
        if hessian:
            d_theta, *moments = derivative
            derivative = d_theta + hessian_times(setup, cfg, k, before[0], L), *moments
        if progress.is_due():
            progress.show(done)
    momentum = k.b1 * (U @ before[1]).cpu()     # what m held before the first step
    return Account(logp, *found, rest, dict(decay=decay, momentum=momentum))


def walk_back(setup, cfg, states, taken, rollouts, parts=1):
    """Each step, from the last to the first, with the states before and after it, the mean slopes,
    and U (K, W)."""
    U = 0.0
    for k, before, after in reversed(list(zip(taken, states, states[1:]))):
        before = before.to(setup.device)
        after = after.to(setup.device)
        slope = mean_slopes(setup, before[0], after[0], rollouts, cfg, parts)
        U = k.b1 * U - k.lr / k.c1 * slope / ((after[2] / k.c2).sqrt() + k.eps)
        yield k, before, after, slope, U
