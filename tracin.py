"""
Influence of every row of a batch on a target, exact on the whole model, from one backward.

    I_i = <grad L_i, grad L_target>       (TracIn, Pruthi et al. 2020, at one set of weights)

Positive: a small step on row i lowers the target's loss, and a small step on the target lowers row
i's. I_i is exact to first order in the step: momentum, the size of the step and what rows do
together are not in it.

Every layer with parameters is linear in them, out = layer(a; theta). With b the gradient of out,
  - the score of row i against a target gradient G is <b_i, layer(a_i; G)>, over layers and tokens;
  - a weighted gradient sum_i w_i g_i is the layer's own backward with b_i scaled by w_i.
A tape records a and b of every layer during one backward, and everything follows from these two. A
tied matrix is used twice, against one total G, which holds the cross terms.

In the order of the file: Influence, which grpo.update uses (record, target, score, select, step);
pure functions of target and selection; the Tape, which works on models of your own; the rules of a
layer. The file imports nothing but torch; Tape works by itself, Influence with grpo.py.

Shapes: N rows of a batch, n of a step or a micro-batch, M tokens of several rows, flattened. G is a
gradient {parameter: tensor}, mostly the target's.

    python tracin.py out/toxicity_tracin        # explains a run: which rollouts helped, which hurt
"""
import collections
import functools
import itertools
import math
import os
import runpy
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

# ------------------------------------------------------------------------------------------------
# influence in a step: record, target, score, select, step


class Influence:
    """Learns an optimizer step from the rows that lower a target's loss.

        with influence.record(batch, step, on_policy):          # the tape replaces .grad
            for positions in ...:
                influence.forward_backward(positions)
        metrics = influence.keep_helpful(target, seed, check)   # target, score, select, step

    nets, loss_of, gradient_of: of grpo.py. all_reduce(tensors) sums in place over the processes.

    With r_i what the tape records of row i, its loss or its summed log-prob,
        grad L_i      = loss_coef_i grad r_i
        grad L_target = sum_j self_coef_j grad r_j      if the target is made of the same rows
        I_i's own part, from row i being in the target, = loss_coef_i self_coef_i |grad r_i|^2
    """

    def __init__(self, nets, cfg, loss_of, gradient_of, all_reduce):
        self.nets = nets
        self.cfg = cfg
        self.loss_of = loss_of
        self.gradient_of = gradient_of
        self.all_reduce = all_reduce
        self.tape = Tape(nets.policy, memory=cfg.tracin_memory * 2 ** 30, all_reduce=all_reduce)

    # record

    def record(self, batch, step, on_policy):
        """Return the tape, a with block that records the rows of a step. on_policy: no optimizer
        step since sampling."""
        self.batch = batch
        self.step = step
        self.one_backward = on_policy and serves_both(self.cfg, batch)
        n = len(step.rows)      # a row's number on the tape is its position in the step
        fill = 0.0 if self.one_backward else 1.0    # 0: forward_backward fills it in
        self.loss_coef = torch.full((n,), fill, device=step.rows.device)
        return self.tape.numbered(n)

    def forward_backward(self, positions):
        """Forward and recorded backward of some rows, by their positions in the step.

        With one_backward a row's loss and its part in the target are both multiples of its summed
        log-prob: that one is recorded and serves both. Returns a grpo.Forward.
        """
        nets, batch = self.nets, self.batch
        rows = self.step.rows[positions]
        # the head is given chosen tokens only, flattened: which of these rows each is of (M,)
        row_of_token = batch.rollout.chosen[rows].nonzero()[:, 0]
        self.tape.rows(positions, tokens=row_of_token)
        out = self.loss_of(nets, nets.policy, batch, rows, self.step, self.cfg, self.one_backward)
        if not self.one_backward:
            out.loss.backward()
            return out
        slope, = torch.autograd.grad(out.loss, out.logp, retain_graph=True)  # equal along a row
        mask = batch.mask[rows]
        self.loss_coef[positions] = slope.sum(1) / mask.sum(1).clamp(min=1)
        (out.logp * mask).sum().backward()
        return out

    def keep_helpful(self, target, seed, check):
        """Writes the gradient of the selected rows to .grad. Returns metrics.

        target: (Batch, its rows that are the target), or None for the step's own rows. check: see
        check_scores. Fills in batch.influence and batch.weights.
        """
        rows = self.step.rows
        generator = torch.Generator().manual_seed(seed)
        found = self.score(target, generator)
        if check:
            self.check_scores(found)

        weights, fallback = self.weights_of(found.scores, generator)                # (n,)
        kept_grad, batch_grad = self.kept_gradient(weights, found.batch_grad, found.G)
        factor = self.normalizer(weights)
        any_kept = bool(weights.any())
        if factor != 1:
            torch._foreach_mul_(list(kept_grad.values()), factor)
        for p, g in kept_grad.items():
            p.grad = g if any_kept else None
        self.batch.influence[rows] = found.scores
        self.batch.weights[rows] = weights * factor

        # the scores of all rows add up to <gradient of the step, target's gradient>
        error = invariant_error(found.raw_scores, batch_grad, found.G)
        metrics = score_metrics(found.scores, weights, fallback)
        metrics["tracin/self_share"] = found.self_share
        metrics["tracin/invariant_error"] = error
        metrics |= halves_metrics(found.halves, self.tape.names) | found.target_metrics
        metrics["tracin/kept_gradients"] = self.share_stored()
        self.tape.forget()
        del self.batch, self.step, self.loss_coef   # nothing outlives the step
        return metrics

    def check_scores(self, found):
        """Ends the run unless the scores add up to <gradient of the step, target's gradient>, with
        the first from a plain backward, in which the tape has no part."""
        # in the micro-batches that were recorded, since bnpo depends on them
        key = halves_apart(self.batch, self.step.rows, self.cfg.num_generations)
        true_grad = self.gradient_of(
            self.nets, self.batch, self.step.rows, self.step, self.cfg, key=key)
        error = invariant_error(found.raw_scores, true_grad, found.G)
        bound = 5e-2 if self.nets.dtype == torch.bfloat16 else 1e-3
        if not error <= bound:
            raise SystemExit(
                "stopped before the first step: the influences do not add up to the product of "
                f"ordinary gradients (relative error {error:.1e}, at most {bound:g}); the tape or "
                "the loss in its units has a bug (or try dtype = 'float32')")

    # target

    def target_gradient(self, target):
        """The target's gradient in two halves, since their cosine tells signal from noise (in one
        piece if a function made it); self_coef (n,), 0 if the target is another batch, None if it
        is unknown; and metrics."""
        cfg = self.cfg
        if cfg.tracin == "target":
            return self.gradient_of_function()
        t, rows = target or (self.batch, self.step.rows)
        rewards = t.rewards[rows.to(t.rewards.device)]                              # (m,)
        in_first = ~second_half(rows, cfg.num_generations)                          # (m,)
        if cfg.tracin == "self":    # the target is the loss
            coef = None
        else:                       # the target is sum_i coef_i * log-prob of completion i
            coef = target_coefficients(
                cfg.tracin, rewards.to(rows.device), t.advantages[rows])            # (m,)

        if target is not None:              # another batch
            self_coef = torch.zeros_like(self.loss_coef)
            halves = self.plain_halves(t, rows, in_first, coef)
        elif cfg.tracin == "self":          # the recorded loss itself
            self_coef = self.loss_coef
            halves = self.tape.gradients([self_coef * in_first, self_coef * ~in_first])
        elif self.one_backward:             # the recorded log-probs, with other coefficients
            self_coef = coef
            halves = self.tape.gradients([self_coef * in_first, self_coef * ~in_first])
        else:                               # the same rows, but not what was recorded of them
            self_coef = None
            halves = self.plain_halves(t, rows, in_first, coef)

        # the number that is logged; for "self" it stands in for the loss
        weight = -t.advantages[rows] / len(rows) if coef is None else coef
        loss = (weight * (t.rollout.logp * t.mask)[rows].sum(1)).sum()
        advantages = t.advantages[rows]
        return halves, self_coef, read({
            "tracin/target_loss": loss,
            "tracin/target_advantage_min": advantages.min(),
            "tracin/target_advantage_max": advantages.max()}) | {
            "tracin/target_rows": len(rows),
            "tracin/target_contrast": std(rewards) / max(std(t.rewards), 1e-12)}

    def gradient_of_function(self):
        """As target_gradient, for a function of the config file: how to raise the number that it
        returns. It has no halves."""
        nets = self.nets
        number = self.cfg.functions["target"](nets.policy, nets.tokenizer, self.batch)
        check_number(number)
        parameters = list(self.tape.names)
        found = torch.autograd.grad(-number, parameters, allow_unused=True)
        G = {p: torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)}
        return [G], None, {"tracin/target_loss": -float(number.detach())}

    def plain_halves(self, batch, rows, in_first, coef):
        """The target's two halves by forwards and backwards of their own."""
        num_tokens = int(batch.mask[rows].sum())
        step = self.step._replace(rows=rows, num_rows=len(rows), num_tokens=num_tokens)
        all_coef = None
        if coef is not None:
            all_coef = coef.new_zeros(len(batch.mask)).index_copy(0, rows, coef)    # (N,)
        parts = rows[in_first], rows[~in_first]
        return [self.gradient_of(self.nets, batch, part, step, self.cfg, coef=all_coef)
                for part in parts]

    # score

    def score(self, target, generator):
        """The recorded rows against the target (see keep_helpful) -> Scored."""
        cfg = self.cfg
        if self.one_backward:
            self.all_reduce([self.loss_coef])
        halves, self_coef, target_metrics = self.target_gradient(target)
        target_grad = functools.reduce(add, halves)
        batch_grad = target_grad if cfg.tracin == "self" and target is None else None
        scale = {}
        if cfg.tracin_adam:
            batch_grad = batch_grad or self.tape.gradient(self.loss_coef)
            scale = adam_scale(self.nets.optimizer, batch_grad)
        G = self.scored_part(target_grad, scale)
        raw_scores = self.loss_coef * self.tape.dot(G).to(self.loss_coef)           # (n,)
        own, self_share = self.self_influence(raw_scores, self_coef, scale, G, generator)
        scores = raw_scores - own if cfg.tracin_leave_one_out else raw_scores
        if not scores.isfinite().all():
            raise SystemExit("stopped: an influence is not finite; the weights or the target's "
                             "rewards are not. The last checkpoint stands")
        return Scored(scores, raw_scores, G, scale, halves, self_coef, self_share, batch_grad,
                      target_metrics)

    def scored_part(self, target_grad, scale):
        """The target's gradient over cfg.tracin_layers, scaled as AdamW would if asked for."""
        G = {}
        for p, g in target_grad.items():
            name = self.tape.names[p]
            if not self.cfg.tracin_layers or any(part in name for part in self.cfg.tracin_layers):
                G[p] = g
        return each(torch._foreach_mul, G, scale) if scale else G

    def self_influence(self, scores, self_coef, scale, G, generator):
        """What the scores of some rows owe to these rows' own part in the target, and its share of
        their absolute scores. All rows with tracin_leave_one_out, else four, as a measure. None
        where self_coef is unknown, which config/check.py refuses with tracin_leave_one_out."""
        n = len(scores)
        rows = torch.arange(n)
        if not self.cfg.tracin_leave_one_out:
            rows = torch.randperm(n, generator=generator)[:4].sort().values
        if self_coef is None:   # not before the draw: what is drawn later must not depend on this
            return None, math.nan
        here = rows.to(scores.device)
        own_terms = (self.loss_coef * self_coef)[here]              # 0 for another batch
        if own_terms.any():
            own_terms = own_terms * self.tape.norms(rows, scale, G).to(scores)
        return own_terms, float(own_terms.sum() / scores[here].abs().sum().clamp(min=1e-30))

    # select, step

    def weights_of(self, scores, generator):
        """Factors on the rows (n,), 0 for those that are not learned from, and whether select used
        its fallback."""
        cfg = self.cfg
        if cfg.tracin_select == "weigh":
            return check_weights(cfg.functions["weigh"](scores.clone()), scores), False
        keep, fallback = select(scores, cfg.tracin_select, cfg.tracin_fraction, generator)
        return keep.to(scores), fallback

    def kept_gradient(self, weights, batch_grad, G):
        """The weighted gradient, and that of all rows: batch_grad if it is known, else over the
        parameters of G only.

        With batch_grad the tape is asked for the fewer rows, those kept or those dropped.
        """
        coef, rest = self.loss_coef, 1 - weights
        if batch_grad is None:
            kept, dropped = self.tape.gradients([coef * weights, coef * rest])
            return kept, add({p: kept[p] for p in G}, dropped)
        if weights.count_nonzero() <= rest.count_nonzero():
            return self.tape.gradient(coef * weights), batch_grad
        dropped = self.tape.gradient(coef * rest)
        return each(torch._foreach_sub, batch_grad, dropped), batch_grad

    def normalizer(self, weights):
        """Factor on the gradient: 1, or what makes the loss a mean over the rows kept (over their
        tokens, if loss_type divides by tokens)."""
        loss_type = self.cfg.loss_type
        if self.cfg.tracin_normalizer == "all":
            return 1.0
        # what the loss is divided by, row by row (n,)
        if loss_type in ("dapo", "cispo", "bnpo"):
            units = self.batch.mask[self.step.rows].sum(1)
        elif loss_type in ("grpo", "dr_grpo", "sapo"):
            units = torch.ones_like(weights)
        else:
            raise ValueError(f"tracin.Influence.normalizer: is loss_type {loss_type!r} divided by "
                             "rows or by tokens?")
        factor = float(units.sum() / (units * weights.abs()).sum())
        return factor if math.isfinite(factor) else 1.0             # not finite: nothing is kept

    def share_stored(self):
        """Share of rows x weights whose gradients the tape stored; the rest was contracted."""
        stored = sum(g.numel() for g in self.tape.row_grads.values())
        stored = torch.tensor(float(stored), dtype=torch.float64)
        self.all_reduce([stored])
        return float(stored) / (len(self.loss_coef) * sum(p.numel() for p in self.tape.names))


class Scored(NamedTuple):
    scores: torch.Tensor        # (n,) influence of each row
    raw_scores: torch.Tensor    # (n,) before a row's own part in the target is taken off
    G: dict                     # what rows were scored against: {parameter: tensor}
    scale: dict                 # what the target's gradient was scaled with, with tracin_adam
    halves: list                # the target's gradient in two parts
    self_coef: torch.Tensor     # (n,) see Influence; 0: another batch, None: unknown
    self_share: float
    batch_grad: dict            # the gradient of all rows, or None if it was not needed
    target_metrics: dict


def serves_both(cfg, batch):
    """True if the loss of a fresh row is a number times its log-prob (no KL or entropy in it, no
    token left out) and so is its part in the target."""
    policy_gradient_only = not cfg.kl_in_loss and not cfg.entropy_coef and batch.policy_mask is None
    return cfg.tracin not in ("off", "self") and policy_gradient_only


def second_half(rows, num_generations):
    """(n,) True for the rows of the later half of the prompts. Advantages of a group sum to 0, so
    halves of a group would not be independent. Of a single prompt it is every other row."""
    prompts = rows // num_generations
    distinct = prompts.unique()
    if len(distinct) > 1:
        return prompts >= distinct[len(distinct) // 2]
    return torch.arange(len(rows), device=rows.device) % 2 == 1


def halves_apart(batch, rows, num_generations):
    """Key (n,) that sorts rows by half, then by length, so that a sum over one half of the stored
    gradients reads nothing of the other."""
    width = batch.mask.shape[1]
    return batch.lengths[rows] + width * second_half(rows, num_generations)


# ------------------------------------------------------------------------------------------------
# pure functions: target, selection, metrics


def target_coefficients(target, rewards, advantages):
    """coef (n,): the target's loss is sum_i coef_i * log-prob of completion i, of n rollouts.

    reward: -(reward normalised over these n) / n. advantage: -advantage / n. contrastive: -1 / n
    for the better half by reward, +1 / n for the other. 0 where the reward is NaN.
    """
    n = len(rewards)
    unknown = rewards.isnan()
    rewards = torch.where(unknown, rewards.nanmean().nan_to_num(), rewards.nan_to_num())
    if target == "reward":
        spread = rewards.std(correction=int(n > 1)) + 1e-4
        return (-(rewards - rewards.mean()) / spread / n).masked_fill(unknown, 0)
    if target == "advantage":
        return -advantages / n
    if target != "contrastive":
        raise ValueError(f"no target is called {target!r}")
    order = rewards.masked_fill(unknown, -torch.inf).argsort(descending=True)
    good = torch.zeros_like(unknown)
    good[order[:int((~unknown).sum()) // 2]] = True
    return torch.where(good, -1.0, 1.0).masked_fill(unknown, 0) / n


def choose_targets(rewards, size, how, generator):
    """Indices of `size` rollouts (0: all) of a held-out batch by reward: random, best, worst, or
    balanced (half and half). Of those without a reward only `random` takes any."""
    n = len(rewards)
    if how == "random":
        return torch.randperm(n, generator=generator)[:size or n]
    order = rewards.nan_to_num(-torch.inf).argsort(descending=True)
    n = max(1, n - int(rewards.isnan().sum()))      # which come last
    order = order[:n]
    size = min(size or n, n)
    if how == "balanced":
        return torch.cat([order[:size - size // 2], order[n - size // 2:]])
    if how == "best":
        return order[:size]
    if how == "worst":
        return order[n - size:]
    raise ValueError(f"no choice of targets is called {how!r}")


def select(influence, how, fraction=0.5, generator=None):
    """influence (n,) -> keep (n,) bool, and True if the fallback was used.

    positive: above 0. If fewer than 10 % of the nonzero scores are positive, the better half of the
    nonzero ones is kept (the fallback). drop: all but the worst `fraction` of the negative ones.
    top: the best `fraction`. bottom, random: controls that keep as many as `positive`. all.
    """
    n = len(influence)
    positive, negative = torch.stack([(influence > 0).sum(), (influence < 0).sum()]).tolist()
    order = influence.argsort(descending=True)
    fallback = how in ("positive", "bottom", "random") and positive < 0.1 * (positive + negative)
    count = (positive + negative + 1) // 2 if fallback else positive
    if how == "positive" and fallback:  # rows of influence 0, of groups without spread, go last
        order = influence.masked_fill(influence == 0, -torch.inf).argsort(descending=True)
    if how == "positive":
        kept = order[:count]
    elif how == "bottom":
        kept = order[n - count:]
    elif how == "random":
        kept = torch.randperm(n, generator=generator)[:count]
    elif how == "top":
        kept = order[:round(fraction * n)]
    elif how == "drop":
        kept = order[:n - int(fraction * negative)]
    elif how == "all":
        kept = order
    else:
        raise ValueError(f"no selection is called {how!r}")
    keep = torch.zeros(n, dtype=torch.bool, device=influence.device)
    return keep.index_fill_(0, kept.to(influence.device), True), fallback


def check_number(number):
    """Ends the run unless a target function returned a number that gradients can come from."""
    is_number = isinstance(number, torch.Tensor) and number.numel() == 1 and number.requires_grad
    if not is_number or not number.isfinite():
        raise SystemExit(f"stopped: target returned {number!r}: must be one finite number as a "
                         "tensor that depends on the policy's weights, computed without no_grad")


def check_weights(weights, scores):
    """The factors (n,) that a weigh function returned, as a tensor like scores. Ends the run unless
    they are one finite number per rollout."""
    try:
        found = torch.as_tensor(weights).detach().to(scores)
    except (TypeError, ValueError, RuntimeError):
        found = scores.new_zeros(0)
    if found.shape != scores.shape or not found.isfinite().all():
        raise SystemExit(f"stopped: weigh returned {weights!r}: must be one finite number for each "
                         f"of {len(scores)} influences")
    return found


def adam_scale(optimizer, gradient):
    """{parameter: 1 / (sqrt(v) + eps)}: the diagonal that AdamW will multiply a step with this
    gradient by (before clipping). Momentum scales all rows alike and weight decay is in no row, so
    neither matters here."""
    scale = {}
    for group in optimizer.param_groups:
        decay = group["betas"][1]
        params = [p for p in group["params"] if p in gradient]
        states = [optimizer.state.get(p, {}) for p in params]   # empty before the first step
        moments = [state["exp_avg_sq"] if state else torch.zeros_like(p)
                   for p, state in zip(params, states)]
        steps = [state["step"].to(p.device) if state else p.new_zeros(())
                 for p, state in zip(params, states)]
        grads = [gradient[p] for p in params]
        v = torch._foreach_mul(grads, grads)
        torch._foreach_mul_(v, 1 - decay)
        torch._foreach_add_(v, torch._foreach_mul(moments, decay))
        torch._foreach_div_(v, [1 - decay ** (t + 1) for t in torch.stack(steps).tolist()])
        torch._foreach_sqrt_(v)
        torch._foreach_add_(v, group["eps"])
        scale |= zip(params, torch._foreach_reciprocal(v))
    return scale


def each(operation, G, *others):
    """A torch._foreach operation on gradients, over the parameters of G: on a GPU one launch for
    many of them."""
    lists = [[H[p] for p in G] for H in (G, *others)]
    return dict(zip(G, operation(*lists)))


def add(G, H):
    """The sum of two gradients {parameter: tensor}."""
    return each(torch._foreach_add, G, H)


def inner(G, H):
    """<G, H> of two gradients, over the parameters of H, as a tensor ()."""
    return torch.stack([G[p].flatten() @ H[p].to(G[p]).flatten() for p in H]).double().sum()


def read(numbers):
    """{name: tensor ()} as {name: number}. A GPU is waited for once, and not for each of them."""
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist()))


def invariant_error(scores, batch_grad, G):
    """How far sum_i I_i = <G_batch, G_target> is violated, relative to sum_i |I_i|."""
    scores = scores.double()
    total, size, product = torch.stack(
        [scores.sum(), scores.abs().sum(), inner(batch_grad, G)]).tolist()
    return abs(total - product) / max(size, 1e-30)


def score_metrics(scores, weights, fallback):
    return read({
        "tracin/positive_ratio": (scores > 0).float().mean(),
        "tracin/negative_ratio": (scores < 0).float().mean(),
        "tracin/zero_ratio": (scores == 0).float().mean(),
        "tracin/mean_ip": scores.mean(),
        "tracin/std_ip": scores.std(),
        "tracin/min_ip": scores.min(),
        "tracin/max_ip": scores.max(),
        "tracin/selected_ratio": (weights != 0).float().mean()}) | {
        "tracin/fallback": float(fallback)}


def halves_metrics(halves, names):
    """The norm of the target's gradient and of its first parameters, and the cosine of its halves.
    """
    numbers = {f"tracin/target_grad_norm/{names[p]}": sum(half[p] for half in halves).norm()
               for p in list(halves[0])[:3]}
    numbers |= {i: inner(half, half) for i, half in enumerate(halves)}
    numbers["product"] = inner(halves[0], halves[-1])
    metrics = read(numbers)
    product = metrics.pop("product")
    squares = [metrics.pop(i) for i in range(len(halves))]
    if len(halves) == 1:
        return metrics | {"tracin/target_grad_norm": product ** 0.5}
    return metrics | {
        "tracin/target_grad_norm": max(sum(squares) + 2 * product, 0.0) ** 0.5,
        "tracin/target_cosine": product / max(math.prod(squares) ** 0.5, 1e-30)}


def std(x):
    """Standard deviation, NaN left out; exactly 0.0 if all values are the same number."""
    x = x[~x.isnan()]
    if len(x) < 2 or x.min() == x.max():
        return 0.0
    return float(x.std())


# ------------------------------------------------------------------------------------------------
# the tape

LARGEST_PRODUCT = 2 ** 31 - 1   # elements; above it cuBLAS reads a matrix x vector elsewhere


class MicroBatch(NamedTuple):
    """Rows of one forward and backward."""
    index: int                      # which micro-batch of the recording it is
    numbers: torch.Tensor           # (n,) the rows' numbers
    tokens: torch.Tensor            # (M,) the row, 0 .. n - 1, of each flattened token; or None
    token_numbers: torch.Tensor     # (M,) the number of that row; or None
    owners: list                    # tokens as a list, from when it is needed
    seen: dict                      # {layer: flattened tokens that it has been given}


class Tape:
    """Records a backward over one or several micro-batches, of any model made of Linear, Embedding,
    LayerNorm and RMSNorm.

        check_exact(model, loss_of, rows)       # once: for this model and this loss?
        with Tape(model) as tape:
            for rows in micro_batches:
                tape.rows(len(rows))
                loss_of(rows).backward()        # the sum of the rows' losses, not their mean
        G = tape.gradient()                     # {parameter: tensor}: what .grad would have held
        influence = tape.dot(G)                 # (n,) of each row, in the order recorded
        update = tape.gradient(influence > 0)   # the gradient of some rows

    Rows are the first dimension of what a layer is given. Where a layer is given the tokens of all
    rows flattened (M, C), at once or in pieces, rows() is told the row of each token.

    Inside the block no parameter gets a .grad: the layers run on detached weights, so that the
    backward forms activation gradients only. Frozen parameters cost nothing. What the tape cannot
    do exactly is a ValueError that names it: a parameter used outside its layer, other kinds of
    layers, other weights in a call (functional_call), hooks on parameters, create_graph=True,
    reentrant checkpoints.

    What is recorded of a layer is one of two things:
      stored       the gradient of each row, formed during the backward in place of their sum. A
                   score or a weighted gradient is then a matrix-vector product.
      contracted   a and b, later multiplied with G: two more products of 2 x tokens x weights.
    Storing costs no extra arithmetic for long rows, but its traffic: 4 bytes x weights a row, once
    written and read three times. The two are even near 24 tokens a row on a CPU, near 500 on a GPU:
    a layer with fewer than `fewest` is contracted, and so is one that does not fit into `memory`
    bytes (all rows need n times the weights). A tape that is used again uses the same memory again,
    since fresh pages cost time: forget() frees what is contracted, and keeps those buffers.

    all_reduce(tensors) sums in place over processes that record a part of the rows each; see
    numbered().
    """

    def __init__(self, model, memory=0, fewest=None, all_reduce=lambda tensors: None):
        self.model = model
        self.find_layers()
        on_gpu = any(p.is_cuda for p in self.names)
        if fewest is None:
            fewest = 500 if on_gpu else 24
        self.memory = memory
        self.fewest = fewest
        self.all_reduce = all_reduce
        self.small = 2 ** 16 if on_gpu else 0   # weights up to which parameters share a product
        self.pool = {}                          # memory of stored gradients, used again
        self.total = None
        self.forget()

    def find_layers(self):
        """Looks up what is trained now."""
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        self.layers = trained_layers(self.model)     # {module: name}

    def numbered(self, total):
        """Rows have numbers 0 .. total - 1, over all processes; each is recorded once.

        rows() is then given the numbers of the rows recorded here, and what the tape returns speaks
        of all rows, in the order of their numbers. The tape stays numbered. Returns the tape.
        """
        self.total = total
        return self

    def forget(self):
        """Lets go of what was recorded. The memory of stored gradients is kept for the next time.
        """
        self.records = []           # contracted: (module, numbers of its first dimension, a, b)
        self.row_grads = {}         # stored: {(parameter, micro-batch): (n, *shape)}
        self.micro_batches = []

    def __enter__(self):
        self.forget()
        self.room = self.memory
        self.counted = 0            # rows recorded so far
        self.find_layers()
        if not self.names:
            raise ValueError("no parameter of the model is trained: requires_grad is False in all")
        for p, name in self.names.items():
            if p.grad is not None:
                raise ValueError(f"{name} has a .grad: zero_grad(set_to_none=True) before "
                                 "recording")
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ValueError(f"{name} has a hook: it would wait for a .grad, which the tape "
                                 "does not form; remove it")
        for module, name in self.layers.items():
            if "forward" in vars(module):
                raise ValueError(f"{name or 'model'}: its forward has been replaced, by another "
                                 "tape perhaps")
        for module in self.layers:
            module.forward = self.recording(module)
            module.record_linear = functools.partial(self.record_linear, module)
        return self

    def __exit__(self, *error):
        for module in self.layers:
            del module.forward, module.record_linear
        self.give_back_memory()
        if error[0] is not None:
            return
        self.check_all_read()
        for name, p in self.model.named_parameters():
            if p.requires_grad != (p in self.names):
                raise ValueError(f"{name}: its requires_grad was changed while recording")
            if p in self.names and p.grad is not None:
                raise ValueError(f"{name} is used outside its layer, where the tape cannot see it")

    def give_back_memory(self):
        """Forgets the buffers that this recording did not use and, where that leaves more than
        `memory`, those that are longer than needed."""
        self.pool = {key: self.pool[key] for key in self.row_grads}
        size = sum(g.numel() * g.element_size() for g in self.pool.values())
        if size > self.memory:
            self.pool = {key: g for key, g in self.pool.items()
                         if len(g) == len(self.row_grads[key])}

    # recording

    def rows(self, which, tokens=None):
        """What follows is a forward and backward of new rows.

        which: how many, or, after numbered(), their numbers (n,). tokens (M,): the row, 0 to n - 1,
        of each of M flattened tokens.
        """
        self.check_all_read()
        device = next(iter(self.names)).device
        if isinstance(which, int):
            which = torch.arange(self.counted, self.counted + which, device=device)
        token_numbers = None
        if tokens is not None:
            tokens = tokens.to(device)
            token_numbers = which[tokens]
        index = len(self.micro_batches)
        self.micro_batches.append(MicroBatch(index, which, tokens, token_numbers, [], {}))
        self.counted += len(which)

    def check_all_read(self):
        """ValueError unless every layer that saw flattened tokens saw all of them."""
        if not self.micro_batches or self.micro_batches[-1].tokens is None:
            return
        micro = self.micro_batches[-1]
        for module, count in micro.seen.items():
            self.check_count(module, count, exact=True)

    def check_count(self, module, count, exact=False):
        told = len(self.micro_batches[-1].tokens)
        if count > told or exact and count < told:
            raise ValueError(
                f"{self.layers[module]}: {count} tokens, where rows() was told of {told}")

    def recording(self, module):
        """The module's forward on detached weights, which records its input a and the gradient b
        of its output."""
        plain = module.forward
        layer = self.layers[module]
        own = dict(module.named_parameters(recurse=False))

        def forward(x):
            if not torch.is_grad_enabled():
                return plain(x)
            for name, p in own.items():
                if getattr(module, name) is not p:
                    raise ValueError(
                        f"{layer}: its {name} is another tensor than when the recording began; "
                        "call the model itself, not functional_call")
            again = torch._C._current_graph_task_id() != -1     # in a backward, by a checkpoint
            micro, part = (None, None) if again else self.owner(module, x)
            out, a = run_detached(module, x)
            tokens = out.shape[:-1].numel()
            is_own = not x.is_leaf

            def record(a, b):
                if again:
                    raise ValueError(
                        f"{layer}: computed again under a reentrant checkpoint, where the tape "
                        "cannot tell which rows it is of; set use_reentrant=False")
                if isinstance(module, nn.Linear):
                    b = b.to(a.dtype)
                # memory of the caller's, a buffer of inputs for instance, may be used again
                self.add(module, micro, part, a if is_own else a.clone(), b, tokens)

            return Recorded.apply(out, out.new_empty((), requires_grad=True), a, record)

        return forward

    def record_linear(self, module, x, b):
        """Records a Linear whose output gradient b is known already, in code that goes no way
        through backward(): input x (m, in), b (m, out)."""
        micro, part = self.owner(module, x)
        self.add(module, micro, part, x.detach().to(b.dtype), b.detach(), len(x))

    def owner(self, module, x):
        """Whose rows x holds: the micro-batch, and None if row i of x is row i of it, or the slice
        of its flattened tokens."""
        if not self.micro_batches:
            raise ValueError("tape.rows(n) first: how many rows are in this micro-batch?")
        micro = self.micro_batches[-1]
        is_lookup = type(module) is nn.Embedding
        flattened = x.dim() == (1 if is_lookup else 2)
        if flattened and micro.tokens is not None and not is_lookup:
            return micro, self.next_slice(module, len(x))
        if len(x) != len(micro.numbers) or (flattened and is_lookup):
            raise ValueError(
                f"{self.layers[module]}: its input {tuple(x.shape)} does not tell which of the "
                f"{len(micro.numbers)} rows is whose; look positions up per row, and give rows() "
                "the owner of flattened tokens")
        return micro, None

    def next_slice(self, module, count):
        """The next `count` flattened tokens, as a layer is given them piece by piece. After the
        last one a layer that is used twice begins again."""
        micro = self.micro_batches[-1]
        start = micro.seen.get(module, 0) % max(1, len(micro.tokens))
        micro.seen[module] = start + count
        self.check_count(module, start + count)
        return slice(start, start + count)

    def add(self, module, micro, part, a, b, tokens):
        """Records a layer: the gradient of each row, or a and b."""
        if len(micro.numbers) == 0:
            return
        all_tokens = tokens if part is None else len(micro.tokens)  # a head in pieces has as many
        if not self.store(module, micro, part, a, b, all_tokens / len(micro.numbers)):
            numbers = micro.numbers if part is None else micro.token_numbers[part]
            self.records.append((module, numbers, a, b))

    def store(self, module, micro, part, a, b, tokens_per_row):
        """Adds a layer's gradients to row_grads. False if a and b are to be recorded instead."""
        params = {name: p for name, p in module.named_parameters(recurse=False) if p in self.names}
        new = {p for p in params.values() if (p, micro.index) not in self.row_grads}
        n = len(micro.numbers)
        size = sum(n * p.numel() * p.element_size() for p in new)
        # the gradient of a lookup is sparse, unless the matrix is the head's too and stored already
        is_lookup = isinstance(module, nn.Embedding)
        is_short = isinstance(module, nn.Linear) and tokens_per_row < self.fewest
        does_not_fit = size > self.room
        does_not_pay = bool(new) and (is_lookup or is_short)
        if does_not_fit or does_not_pay:
            return False
        self.room -= size
        owner = torch.arange(n, device=b.device)
        places = range(n)
        if part is not None:
            if not micro.owners:
                micro.owners.extend(micro.tokens.tolist())
            owner = micro.tokens[part]
            places = micro.owners[part]
        for name, p in params.items():
            add_gradients(self.buffer(p, micro), p in new, module, name, a, b, owner, places)
        return True

    def buffer(self, p, micro):
        """Memory (n, *shape) for the stored gradients of a parameter."""
        key = (p, micro.index)
        n = len(micro.numbers)
        if key not in self.row_grads:
            if len(self.pool.get(key, ())) < n:
                self.pool[key] = torch.empty(n, *p.shape, dtype=p.dtype, device=p.device)
            self.row_grads[key] = self.pool[key][:n]
        return self.row_grads[key]

    # what follows from the records

    @property
    def n(self):
        """Number of rows."""
        return self.counted if self.total is None else self.total

    def gradient(self, weights=None):
        """sum_i weights_i g_i as {parameter: tensor}, with weights (n,) or None: all 1."""
        return self.gradients([weights])[0]

    def gradients(self, weights):
        """The gradients for several weights, in a list."""
        given = [w for w in weights if w is not None]
        choices = iter(self.entries([(w != 0).long() - 1 for w in given]))
        totals = []
        for weight in weights:
            total = {p: torch.empty_like(p) for p in self.names}
            torch._foreach_zero_(list(total.values()))
            chosen = None if weight is None else next(choices)
            self.add_contracted(total, weight, chosen)
            self.add_stored(total, weight, chosen)
            totals.append(total)
        self.all_reduce([g for total in totals for g in total.values()])
        return totals

    def add_contracted(self, total, weight, chosen):
        """total[p] += the weighted gradients of what is contracted."""
        factors = {}    # the weights of entries, which many layers have in common
        for module, numbers, a, b in self.records:
            if weight is not None:
                if id(numbers) not in chosen:
                    continue
                here, _, _ = chosen[id(numbers)]
                key = id(numbers), b.dtype
                if key not in factors:
                    factors[key] = weight.to(b)[numbers][here]
                a, b = weigh(module, a[here], b[here], factors[key])
            for name, p in module.named_parameters(recurse=False):
                if p in total:
                    total[p] += parameter_gradient(module, name, a, b)

    def add_stored(self, total, weight, chosen):
        """total[p] += the weighted gradients of what is stored."""
        for micro, group, g in self.stored(total):
            w = g.new_ones(len(g))
            spans = [slice(None)]
            if weight is not None:
                if id(micro.numbers) not in chosen:
                    continue
                w = weight[micro.numbers].to(g)
                spans = spans_of(chosen[id(micro.numbers)][2])
            flat = total[group[0]].view(-1) if len(group) == 1 else g.new_zeros(g.shape[1])
            width = LARGEST_PRODUCT // len(g)
            for span in spans:
                for part, out in zip(g[span].split(width, 1), flat.split(width)):
                    out.addmv_(part.T, w[span])
            if len(group) > 1:
                parts = flat.split([p.numel() for p in group])
                parts = [part.view_as(p) for part, p in zip(parts, group)]
                torch._foreach_add_([total[p] for p in group], parts)

    def stored(self, parameters):
        """The stored gradients of these parameters as matrices: (micro-batch, parameters, (n,
        weights)). Small parameters are side by side, for fewer products."""
        for micro in self.micro_batches:
            here = [p for p in parameters if (p, micro.index) in self.row_grads]
            groups = [[p] for p in here if p.numel() > self.small]
            groups.append([p for p in here if p.numel() <= self.small])
            for group in filter(None, groups):
                g = [self.row_grads[p, micro.index].flatten(1) for p in group]
                yield micro, group, side_by_side(g)

    def dot(self, G):
        """<g_i, G> for every row (n,), over the parameters of G {parameter: tensor}."""
        p = next(iter(self.names))
        scores = torch.zeros(self.n, dtype=torch.float64, device=p.device)
        products = Products()
        for module, numbers, a, b in self.records:
            for name, p in module.named_parameters(recurse=False):
                if p in G:
                    products.note(numbers, layer_dot(module, name, a, b, G[p]))
        for micro, group, g in self.stored(G):
            target = side_by_side([G[p].to(g).flatten() for p in group])
            width = LARGEST_PRODUCT // len(g)
            if not g.is_cuda:   # a CPU adds a long product up in one line, which costs digits
                width = min(width, 32768)
            for part, t in zip(g.split(width, 1), target.split(width)):
                products.note(micro.numbers, part @ t)
        products.add_to(scores)
        scores = scores.to(torch.promote_types(p.dtype, torch.float32))
        self.all_reduce([scores])
        return scores

    def norms(self, rows, scale={}, parameters=None, memory=2 ** 26):
        """sum of scale * g_i^2 for some rows (their numbers, ascending) in float64; without scale
        it is ||g_i||^2. At most about `memory` numbers of per-row gradients exist at a time."""
        rows = torch.as_tensor(rows)
        find = functools.cache(lambda size: self.find(rows.split(size)))
        chosen, = find(len(rows))
        device = next(iter(self.names)).device
        found = torch.zeros(len(rows), dtype=torch.float64, device=device)
        products = Products()
        only_stored = []
        for p in self.names if parameters is None else parameters:
            uses = [record for record in self.records if uses_parameter(record[0], p)]
            is_stored = any((p, micro.index) in self.row_grads for micro in self.micro_batches)
            if not uses:
                only_stored.append(p)
            elif p not in scale and not is_stored and is_plain_matrix(p, uses):
                note_gram_norms(products, chosen, uses)
            else:
                size = max(1, min(len(rows), memory // p.numel()))
                for part, total, here in zip(rows.split(size), found.split(size), find(size)):
                    squares = self.per_row(p, part, here).square()
                    if p in scale:
                        squares *= scale[p]
                    total += squares.flatten(1).sum(1)
        self.note_stored_norms(products, chosen, only_stored, scale, memory)
        products.add_to(found)
        self.all_reduce([found])
        return found

    def note_stored_norms(self, products, chosen, parameters, scale, memory):
        """As norms, of parameters of which everything is stored."""
        for micro, group, g in self.stored(parameters):
            if id(micro.numbers) not in chosen:
                continue
            here, places, _ = chosen[id(micro.numbers)]
            factors = side_by_side([
                (scale[p] if p in scale else torch.ones_like(p)).flatten() for p in group])
            width = max(1, memory // len(places)) if g.is_cuda else 32768   # as in dot
            for part, factor in zip(g.split(width, 1), factors.split(width)):
                products.note(places, (part[here].square() * factor).sum(1))

    def per_row(self, p, rows, chosen=None):
        """The gradients (len(rows), *p.shape) of one parameter, for rows recorded here. chosen: as
        of find."""
        if chosen is None:
            chosen, = self.find([rows])
        total = torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device)
        for module, numbers, a, b in self.records:
            for name, q in module.named_parameters(recurse=False):
                if q is p and id(numbers) in chosen:
                    here, row, places = chosen[id(numbers)]
                    add_per_row(total, module, name, a[here], b[here], row, places)
        for (q, index), g in self.row_grads.items():
            key = id(self.micro_batches[index].numbers)
            if q is p and key in chosen:
                here, row, _ = chosen[key]
                total.index_add_(0, row, g[here])
        return total

    def find(self, choices):
        """As entries, for several lists of rows (their numbers)."""
        places = torch.full((len(choices), self.n), -1)
        for place, rows in zip(places, choices):
            place[rows] = torch.arange(len(rows))
        return self.entries(places.to(next(iter(self.names)).device))

    def entries(self, choices):
        """Where rows are in the records, for several choices of rows; a GPU is waited for once.

        A choice (n,) has for each row its place among those chosen, or -1. Of each choice it is
        {id(numbers): (entries of the record (k,), the places of their rows (k,), the places of all
        entries in a list)}, without records of other rows only. The records keep `numbers` alive.
        """
        numbers = [micro.numbers for micro in self.micro_batches]
        numbers += [record[1] for record in self.records]
        numbers = {id(x): x for x in numbers}
        found = [{key: choice[x] for key, x in numbers.items()} for choice in choices]
        places = [x for chosen in found for x in chosen.values()]
        on_host = iter(torch.cat(places).tolist() if places else ())
        return [dict(located(chosen, on_host)) for chosen in found]


def located(chosen, on_host):
    """Items of what Tape.entries returns for a choice. chosen: {id(numbers): places}."""
    for key, x in chosen.items():
        places = list(itertools.islice(on_host, len(x)))
        count = sum(i >= 0 for i in places)
        if count == len(x):
            yield key, (slice(None), x, places)     # all of them: no copy
        elif count:
            here = (x >= 0).nonzero_static(size=count)[:, 0]
            yield key, (here, x[here], places)


class Products:
    """Collects sums over rows, since one addition for many is one launch."""

    def __init__(self):
        self.noted = {}

    def note(self, rows, products):
        """products (k,) are to be added to rows (k,)."""
        self.noted.setdefault(id(rows), (rows, []))[1].append(products)

    def add_to(self, total):
        for rows, products in self.noted.values():
            total.index_add_(0, rows, torch.stack(products).to(total).sum(0))


def side_by_side(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def check_exact(model, loss_of, rows, tokens=None, tolerance=0.01):
    """ValueError unless one of these rows has the same gradient on a tape, among the others, as
    autograd gives it alone.

    loss_of(rows) -> (): the sum of their losses. rows: two or more, in a tensor or a list. tokens:
    see Tape.rows.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: a mean over one is its sum; give two or more")
    with Tape(model) as tape:
        tape.rows(len(rows), tokens)
        loss_of(rows).backward()
    i = int(tape.norms(range(len(rows))).argmax())      # another may have no gradient
    among = torch.cat([tape.per_row(p, [i]).flatten() for p in tape.names]).double()
    loss = loss_of(rows[i:i + 1])
    alone = torch.autograd.grad(loss, list(tape.names), materialize_grads=True)
    alone = torch.cat([g.flatten() for g in alone]).double()
    scale = float(among @ alone / (alone @ alone))
    rest = float((among - scale * alone).norm() / among.norm())
    if not rest < tolerance:
        raise ValueError(
            f"row {i} has another gradient among {len(rows)} rows than alone, by {rest:.0%}: do "
            "rows mix, are they not the first dimension, or is dropout on?")
    if abs(scale - 1) > tolerance:
        raise ValueError(
            f"row {i} has {scale:.3g} times the gradient among {len(rows)} rows that it has alone: "
            "the loss looks like a mean over rows or tokens; the tape needs their sum")


class Recorded(torch.autograd.Function):
    """The output of a layer, unchanged. Its backward calls record(a, b).

    A node of the graph is given b as the layer would be: after hooks on its output, and operations
    on it in place. `leaf` () stands in for the parameters: backward() goes there,
    torch.autograd.grad(loss, x) does not.
    """

    @staticmethod
    def forward(ctx, out, leaf, a, record):
        ctx.mark_dirty(out)         # the same memory
        ctx.save_for_backward(a)    # so autograd notices if a is changed in place
        ctx.record = record
        return out

    @staticmethod
    def backward(ctx, b):
        if torch.is_grad_enabled():
            raise ValueError("create_graph=True: the tape knows no gradient of a gradient")
        leaf = ctx.next_functions[1][0]
        if torch._C._will_engine_execute_node(leaf):
            ctx.record(*ctx.saved_tensors, b)
        return b, b.new_zeros(()), None, None


def trained_layers(model):
    """{module: name} of the layers with trained parameters. ValueError for an unknown kind."""
    layers = {}
    for name, module in model.named_modules():
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        known = type(module) in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
        known = known or hasattr(module, "product")     # model.Head
        params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        odd = [k for k in params if k not in ("weight", "bias")]
        odd += [f"complex {k}" for k, p in params.items() if p.is_complex()]
        if len(set(params.values())) < len(params):
            odd.append("one tensor as weight and bias")
        odd += [k for k in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, k, None)]
        if getattr(module, "padding_idx", None) is not None:
            odd.append("padding_idx")
        if len(getattr(module, "normalized_shape", ())) > 1:
            odd.append("normalized_shape")
        if not known or odd:
            raise ValueError(
                f"{name or 'model'}: {type(module).__name__}{odd or ''} has parameters of its own; "
                "the tape knows Linear, Embedding, LayerNorm and RMSNorm")
        layers[module] = name
    return layers


def spans_of(places):
    """Slices of a list without -1: a copy of the rows that count would cost more."""
    on = [False, *(i >= 0 for i in places), False]
    ends = [i for i in range(len(places) + 1) if on[i] != on[i + 1]]
    return [slice(i, j) for i, j in zip(ends[::2], ends[1::2])]


# ------------------------------------------------------------------------------------------------
# the rules of a layer: input a (ids, or what a norm's weight multiplies), output gradient b


def run_detached(module, x):
    """(output of the layer on detached weights, a)."""
    weight = module.weight.detach()
    bias = None if getattr(module, "bias", None) is None else module.bias.detach()
    if isinstance(module, nn.Embedding):
        return F.embedding(x, weight), x
    if isinstance(module, nn.Linear):
        if hasattr(module, "product"):      # a vocabulary head: float32, of operands in bfloat16
            out = module.product(x, weight)
        else:
            out = F.linear(x, weight, bias)
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        a = x.detach().to(torch.get_autocast_dtype(device) if autocast else x.dtype)
        # autograd takes some outputs for views, which Recorded cannot change in place
        return torch.ops.aten._unsafe_view(out, out.shape), a
    shape, eps = module.normalized_shape, module.eps
    if isinstance(module, nn.LayerNorm):
        a = F.layer_norm(x.detach(), shape, eps=eps)
        return F.layer_norm(x, shape, weight, bias, eps), a
    a = F.rms_norm(x.detach(), shape, eps=eps)
    return F.rms_norm(x, shape, weight, eps), a


def uses_parameter(module, p):
    return any(q is p for q in module.parameters(recurse=False))


def weigh(module, a, b, w):
    """a and b, one of them times the weights w of the entries."""
    if isinstance(module, nn.Linear) and a.numel() < b.numel() and module.bias is None:
        return a * w.view(-1, *[1] * (a.dim() - 1)), b      # the smaller factor
    return a, b * w.view(-1, *[1] * (b.dim() - 1))


def parameter_gradient(module, name, a, b):
    """The gradient of one parameter of a layer, summed over rows and tokens."""
    if isinstance(module, nn.Embedding):
        zeros = torch.zeros_like(module.weight)
        return zeros.index_add_(0, a.flatten(), b.flatten(0, -2).to(module.weight.dtype))
    flat_b = b.flatten(0, -2)                                                   # (rows * T, out)
    if name == "bias":
        return flat_b.sum(0)
    if isinstance(module, nn.Linear):
        return flat_b.T @ a.flatten(0, -2)
    return (flat_b * a.flatten(0, -2)).sum(0)


def add_gradients(g, first, module, name, a, b, owner, owners):
    """Adds the gradients of one parameter to g (n, *shape), row by row.

    first: what the memory of g holds does not count. owner: the row of each entry of the first
    dimension of a and b; owners: the same as a list.
    """
    in_rows = b.dim() == 3 and not isinstance(module, nn.Embedding)
    is_matrix = isinstance(module, nn.Linear) and name == "weight"
    if in_rows and is_matrix and b.dtype == g.dtype:
        g.baddbmm_(b.mT, a, beta=0 if first else 1)     # in place: no copy of a large g
    elif in_rows and first:
        g.copy_(gradient_of_rows(module, name, a, b))
    elif in_rows:
        g.add_(gradient_of_rows(module, name, a, b))
    else:                       # flattened tokens, or ids: entry by entry
        if first:
            g.zero_()
        add_per_row(g, module, name, a, b, owner, owners)


def gradient_of_rows(module, name, a, b):
    """The gradients of one parameter, row by row: a (n, T, in), b (n, T, out) -> (n, *shape)."""
    if name == "bias":
        return b.sum(1)
    if isinstance(module, nn.Linear):
        return b.mT @ a
    return (b * a).sum(1)


def add_per_row(total, module, name, a, b, row, rows):
    """total[row[i]] += the gradient of one parameter from entry i of a layer's a and b. rows: the
    same as a list, which may have -1 besides."""
    if isinstance(module, nn.Embedding):
        flat = (row.view(-1, *[1] * (a.dim() - 1)) * total.shape[1] + a).flatten()
        total.view(-1, total.shape[2]).index_add_(0, flat, b.flatten(0, -2).to(total.dtype))
    elif isinstance(module, nn.Linear) and name == "weight" and b.dim() == 2:   # flattened
        order = row.argsort(stable=True)
        counts = collections.Counter(rows)
        sizes = [counts[i] for i in range(len(total))]
        a, b = (x[order].to(total.dtype).split(sizes) for x in (a, b))
        for g, x, y in zip(total, a, b):
            if len(x):
                g.addmm_(y.T, x)
    elif isinstance(module, nn.Linear) and name == "weight":
        products = b.flatten(1, -2).mT @ a.flatten(1, -2)
        total.index_add_(0, row, products.to(total.dtype))
    else:
        part = (b if name == "bias" else b * a).to(total.dtype)
        if part.dim() > 2:
            part = part.flatten(1, -2).sum(1)
        total.index_add_(0, row, part)


def layer_dot(module, name, a, b, G):
    """<b, layer(a; G)> for each entry of the first dimension, for one parameter of a layer."""
    if name == "bias":
        out = G.to(b.dtype)
    elif isinstance(module, nn.Embedding):
        out = F.embedding(a, G.to(b.dtype))
    elif not isinstance(module, nn.Linear):
        out = a * G.to(a.dtype)
    elif len(G) > G.shape[1]:       # the vocabulary head: the other way round is smaller
        out = a
        b = b @ G.to(b.dtype)
    else:
        out = F.linear(a, G.to(a.dtype))
    return (b * out).flatten(1).sum(1, dtype=torch.promote_types(b.dtype, torch.float32))


def is_plain_matrix(p, uses):
    """True for the weight of one Linear on (rows, tokens, channels), each row recorded once."""
    if not uses or p.dim() != 2 or not isinstance(uses[0][0], nn.Linear):
        return False
    in_rows = all(b.dim() == 3 for _, _, _, b in uses)
    return in_rows and len({id(numbers) for _, numbers, _, _ in uses}) == len(uses)


def note_gram_norms(products, chosen, uses):
    """Notes |g_i|^2 for a matrix with g_i = sum_t b_t a_t^T, without forming it:
    |g_i|^2 = sum_ts (a_t . a_s) (b_t . b_s)."""
    for _, numbers, a, b in uses:
        if id(numbers) in chosen:
            here, places, _ = chosen[id(numbers)]
            x, y = a[here], b[here]
            products.note(places, ((x @ x.mT) * (y @ y.mT)).sum((1, 2), dtype=torch.float64))


if __name__ == "__main__":  # the command needs the whole project and has a file of its own
    runpy.run_path(os.path.join(os.path.dirname(__file__), "explain.py"), run_name="__main__")
