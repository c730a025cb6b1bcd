"""
The account of a run: which rollouts made a sentence likelier or less likely, and what would its
log-prob be had one of them been left out?

f = log p(completion | prompt). theta_0 .. theta_S are the weights along the S optimizer steps of a
run, g the gradient of a step, g_i rollout i's part of it, c = 1 - b^t for AdamW's two betas:

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

S steps, I iterations of N rollouts, W trained weights end to end, K sentences of T tokens.
"""
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import vector_to_parameters

import grpo
from common.device import free_memory, full_precision
from common.script import BadInput, seed_for
from common.supervised import Progress
from rollout import completion_logprobs, empty_rollout
from tracin import Recording, gradient_of

DAMPING = 0.3

# ------------------------------------------------------------------------------------------------
# the run, once more


class Taken(NamedTuple):
    """An optimizer step as the run took it."""
    it: int         # its iteration, from 0
    batch: Any      # grpo.Batch, with the row_weights of this step
    step: Any       # grpo.Step
    clip: float     # what its gradient was multiplied by
    lr: float
    decay: Tensor   # (W,) of each weight
    eps: float
    b1: float
    b2: float
    c1: float
    c2: float


def replay(setup, cfg, start, since, end, folder):
    """Repeats iterations start .. end - 1 as grpo.train did -> the states before each step since
    iteration `since` and after the last one, (3, W) each, and these steps, S of Taken."""
    states = []
    taken = []
    check_optimizer(setup.optimizer)
    decay = decay_of(setup)                                                         # (W,)
    progress = Progress("replay", "iteration", end, start)
    for it in range(start, end):
        grpo.set_learning_rate(setup.optimizer, it, cfg)
        batch = grpo.collect_iteration(setup, it, cfg)
        held_out = grpo.collect_held_out(setup, it, cfg)

        def watch(step, norm):
            if it >= since:
                states.append(kept(state_of(setup), folder))
                taken.append(step_of(setup, cfg, it, batch, step, float(norm), decay))

        grpo.update(setup, batch, held_out, cfg, seed_for(cfg.seed, "rows", it), watch=watch)
        if grpo.is_due(it + 1, cfg.ref_model_sync_steps):
            grpo.sync_reference(setup, cfg.ref_model_mixup_alpha)
        if progress.is_due():
            progress.show(it + 1)
    return [*states, state_of(setup)], taken


def check_optimizer(optimizer):
    """Refuse another optimizer than the formulas above are of."""
    name = type(optimizer).__name__
    if type(optimizer) is not torch.optim.AdamW:
        raise BadInput(f"optimizer {name}: an account knows the steps of torch.optim.AdamW alone")
    first, *others = optimizer.param_groups
    if first["amsgrad"] or first["maximize"]:
        raise BadInput(f"optimizer {name}: an account knows neither amsgrad nor maximize")
    for name in ("lr", "betas", "eps", "amsgrad", "maximize"):
        if any(group[name] != first[name] for group in others):
            raise BadInput(f"optimizer: its groups have several {name}; an account needs one")


def decay_of(setup):
    """The weight decay (W,) of each trained weight."""
    found = {p: group["weight_decay"] for group in setup.optimizer.param_groups
             for p in group["params"]}
    return flat(torch.full_like(p, found[p]) for p in setup.trained).detach()


def step_of(setup, cfg, it, batch, step, norm, decay):
    """A step that the run is about to take."""
    # AdamW skips a weight without gradient. One that never has any stands still; of others it would
    # have several counts
    steps = {p: int(state["step"]) for p, state in setup.optimizer.state.items() if state}
    moved = {1 + steps.get(p, 0) for p in setup.trained if p.grad is not None}
    skipped = any(p.grad is None and p in steps for p in setup.trained)
    if len(moved) > 1 or skipped:
        raise BadInput(f"iteration {it + 1}: a weight has no gradient in some steps, which AdamW "
                       "skips; an account knows weights that have one always or never")
    count, = moved
    group = setup.optimizer.param_groups[0]     # all have the same, but for the decay
    b1, b2 = group["betas"]
    clip = min(1.0, cfg.max_grad_norm / (norm + 1e-6)) if cfg.max_grad_norm else 1.0
    batch = replace(batch, row_weights=batch.row_weights.clone())
    return Taken(it, batch, step, clip, group["lr"], decay, group["eps"],
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
    prompt = torch.tensor([before], device=device)
    row = empty_rollout(prompt, torch.ones_like(prompt) > 0, 1, len(said), 0)
    row.tokens[0, len(before):] = torch.tensor(said)
    row.completion_mask |= True
    return row


@full_precision()
def logprobs(setup, weights, sentences, cfg):
    """Log-probs (K, T) of the sentences' tokens at the run's temperature; nothing is truncated."""
    vector_to_parameters(weights.to(setup.device), setup.trained)
    return completion_logprobs(setup.policy, sentences, cfg.temperature)


@full_precision()
def slopes(setup, weights, sentences, cfg):
    """grad f (K, W)."""
    f = logprobs(setup, weights, sentences, cfg).sum(1)                             # (K,)
    return torch.stack([gradient(x, setup.trained, retain_graph=True) for x in f])


def gradient(x, weights, **how):
    """Of a number (): (W,)."""
    return flat(torch.autograd.grad(x, weights, materialize_grads=True, **how))


def mean_slopes(setup, before, after, sentences, cfg, parts):
    """The mean of grad f (K, W) on the straight line between two weights, by the trapezoid rule."""
    found = [slopes(setup, before.lerp(after, i / parts), sentences, cfg)
             for i in range(parts + 1)]
    return (sum(found) - (found[0] + found[-1]) / 2) / parts


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


def taken_back(k, before, after, derivative, damping):
    """L_t (K, W), and (d_theta, d_m, d_v) before step k from those after it, without H. before,
    after: the states."""
    g = (after[1] - k.b1 * before[1]) / (1 - k.b1) / k.clip      # what m' was made of
    _, back = torch.func.vjp(lambda *inputs: adamw(k, *inputs, damping), g, *before)
    L, *derivative = torch.vmap(back)(tuple(derivative))
    return L, derivative


@full_precision()
def hessian_times(setup, cfg, k, weights, directions):
    """H d (K, W) of the loss of step k, in full precision: the derivative of <gradient, d>."""
    exact = replace(setup, dtype=weights.dtype)
    vector_to_parameters(weights, setup.trained)
    products = torch.zeros_like(directions)
    with sdpa_kernel(SDPBackend.MATH):      # no other attention has a second derivative
        for loss, _ in grpo.losses(exact, setup.policy, k.batch, k.step, cfg):
            g = gradient(loss.total, setup.trained, create_graph=True)
            for i, d in enumerate(directions):
                products[i] += gradient(g @ d, setup.trained, retain_graph=True)
    return products


def multiplied(setup, cfg, k, weights, directions):
    """Products (n, N) of directions (n, W) with the rollouts' parts of the gradient of step k."""
    vector_to_parameters(weights, setup.trained)
    with Recording(grpo.losses, setup, k.batch, k.step, False, cfg) as recording:
        for loss, _ in recording.passes():
            loss.policy.backward()
    return torch.stack([recording.tape.dot(by_parameter(setup, d)) for d in directions]).cpu()


def by_parameter(setup, d):
    """(W,) -> {parameter: tensor}."""
    parts = d.split([p.numel() for p in setup.trained])
    return {p: part.view_as(p) for p, part in zip(setup.trained, parts)}


# ------------------------------------------------------------------------------------------------
# from the last step to the first


class Account(NamedTuple):
    """In nats, of K sentences."""
    logp: Tensor        # (S + 1, K, T) of their tokens, along the run
    shares: Tensor      # (K, I, N) of the rollouts: where the change came from
    effects: Tensor     # (K, I, N): the derivatives by their weights
    rest: dict          # {name: shares (K,)}: of the rest of the loss, and of what is no loss

    @property
    def together(self):     # (K,)
        return self.shares.sum((1, 2)) + sum(self.rest.values())

    @property
    def change(self):       # (K,)
        return (self.logp[-1] - self.logp[0]).sum(1)


def account(setup, cfg, states, taken, sentences, hessian=True, parts=1, damping=DAMPING):
    """The Account of sentences, a Rollout of K rows. parts: of the way of a step, for the mean
    slope on it."""
    with torch.no_grad():
        logp = torch.stack([logprobs(setup, x[0], sentences, cfg) for x in states]).cpu()
    d_theta = slopes(setup, states[-1][0], sentences, cfg)
    derivative = d_theta, 0 * d_theta, 0 * d_theta
    shape = len(d_theta), taken[-1].it + 1, len(taken[0].batch.row_weights)
    shares, effects = torch.zeros(2, *shape, dtype=torch.float64)
    is_on = dict(kl=cfg.kl_in_loss, entropy=cfg.entropy_coef, critic=cfg.critic)
    parts_of_loss = [part for part in is_on if is_on[part]]
    rest = dict.fromkeys([*parts_of_loss, "decay"], 0.0)
    progress = Progress("account", "step", len(taken))
    steps = walk_back(setup, cfg, states, taken, sentences, parts)
    for done, (k, before, after, slope, G) in enumerate(steps, 1):
        L, derivative = taken_back(k, before, after, derivative, damping)
        products = multiplied(setup, cfg, k, before[0], torch.cat([G, L]))          # (2 K, N)
        shares[:, k.it] += products[:len(G)]
        effects[:, k.it] += products[len(G):]
        for part in parts_of_loss:
            g = gradient_of(grpo.losses, setup, cfg, k.batch, k.step, part)
            rest[part] += (G @ flat(g.values())).cpu()
        rest["decay"] -= k.lr * (slope @ (k.decay * before[0])).cpu()
        if hessian:
            derivative[0] += hessian_times(setup, cfg, k, before[0], L)
        if progress.is_due():
            progress.show(done)
    # of what m held before the first step
    rest["momentum"] = k.b1 / (1 - k.b1) / k.clip * (G @ before[1]).cpu()
    return Account(logp, shares, effects, rest)


def walk_back(setup, cfg, states, taken, sentences, parts=1):
    """Each step, from the last to the first, with the states before and after it, the mean slopes,
    and G (K, W)."""
    U = 0.0
    for k, before, after in reversed(list(zip(taken, states, states[1:]))):
        before = before.to(setup.device)
        after = after.to(setup.device)
        slope = mean_slopes(setup, before[0], after[0], sentences, cfg, parts)
        U = k.b1 * U - k.lr / k.c1 * slope / ((after[2] / k.c2).sqrt() + k.eps)
        yield k, before, after, slope, (1 - k.b1) * k.clip * U
