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
import dataclasses
import functools
import inspect
import itertools
import math
import runpy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ------------------------------------------------------------------------------------------------
# influence in a step: record, target, score, select, step

ELSEWHERE = -0.3    # a target's gradient whose cosine with the average is below starts a new one


class Influence:
    """Learns an optimizer step from the rows that lower a target's loss.

        with influence.record(batch, step, on_policy):          # the tape replaces .grad
            for positions in ...:
                influence.forward_backward(positions)
        found = influence.keep_helpful(target, seed, check)     # target, score, select, step

    nets, loss_of, gradient_of: of grpo.py. all_reduce(tensors) sums in place over the processes.

    The loss of row i is P_i + R_i. P_i is scored and weighed; R_i is learned from every row. With
    cfg.tracin_kl = "all" R_i is the rest beside the policy's part (KL, entropy, critic); with
    "kept" there is no R_i. With r_i what the tape records of row i, P_i or its summed log-prob,
        grad P_i      = loss_coef_i grad r_i
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
        self.held_out = None    # grpo.Target that serves several iterations
        self.average = {}       # {parameter: tensor} of the target's gradient over steps
        self.age = 0            # steps in the average

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

        With one_backward what is scored of a row and its part in the target are both multiples of
        its summed log-prob: that one is recorded and serves both. The rest of the loss has a
        backward of its own over the same forward, and only its sum over rows is kept. Returns a
        grpo.Forward.
        """
        nets = self.nets
        batch = self.batch
        rows = self.step.rows[positions]
        # the head is given chosen tokens only, flattened: which of these rows each is of (M,)
        row_of_token = batch.rollout.chosen[rows].nonzero()[:, 0]
        self.tape.rows(positions, tokens=row_of_token)
        out = self.loss_of(nets, nets.policy, batch, rows, self.step, self.cfg, self.one_backward)
        recorded = out.scored
        if self.one_backward:
            slope, = torch.autograd.grad(recorded, out.logp, retain_graph=True)  # equal along a row
            mask = batch.mask[rows]
            self.loss_coef[positions] = slope.sum(1) / mask.sum(1).clamp(min=1)
            recorded = (out.logp * mask).sum()
        recorded.backward(retain_graph=self.cfg.two_parts)
        if self.cfg.two_parts:
            self.tape.backward_summed(out.rest)
        return out

    def keep_helpful(self, target, seed, check):
        """Writes the step to .grad: the gradient of the selected rows, and the rest of the loss of
        all rows. Returns Findings.

        target: (Batch, its rows that are the target), or None for the step's own rows. check: find
        Findings.true_error too, by another backward. Fills in batch.influence and batch.weights.
        """
        rows = self.step.rows
        generator = torch.Generator().manual_seed(seed)
        found = self.score(target, generator)
        true_error = self.true_error(found) if check else None

        weights, fallback = self.weights_of(found.scores, generator)                # (n,)
        kept_grad, batch_grad = self.kept_gradient(weights, found.batch_grad, found.G)
        factor = self.normalizer(weights, kept_grad, batch_grad)
        if factor != 1:
            torch._foreach_mul_(list(kept_grad.values()), factor)
        if found.rest_grad:
            kept_grad = add(kept_grad, found.rest_grad)
        if weights.any() or found.rest_grad:
            for p, g in kept_grad.items():
                p.grad = g
        self.batch.influence[rows] = found.scores
        self.batch.weights[rows] = weights * factor

        # what the log is told of gradients: numbers, since nothing large outlives the step
        error = invariant_error(found.raw_scores, batch_grad, found.G)
        pairs = itertools.combinations_with_replacement(found.halves, 2)
        products = torch.stack([inner(G, H) for G, H in pairs])
        norms = {self.tape.names[p]: sum(half[p] for half in found.halves).norm()
                 for p in list(self.tape.names)[:3]}
        num_stored = sum(g.numel() for g in self.tape.row_grads.values())
        target = target or (self.batch, rows)
        self.tape.forget()
        del self.batch, self.step, self.loss_coef
        return Findings(found.scores, weights, fallback, found.self_share, error, true_error,
                        target, found.target_loss, products, norms, num_stored)

    def true_error(self, found):
        """The larger of two errors against plain backwards, in which the tape has no part: of the
        scores (invariant_error), and of the rest's gradient, relative to the step's."""
        # in the micro-batches that were recorded, since bnpo depends on them
        key = halves_apart(self.batch, self.step.rows, self.cfg.num_generations)
        plain = functools.partial(
            self.gradient_of, self.nets, self.batch, self.step.rows, self.step, self.cfg, key=key)
        scored = plain(part="scored")
        error = invariant_error(found.raw_scores, scored, found.G)
        if not found.rest_grad:
            return error
        rest = plain(part="rest")
        gap = each(torch._foreach_sub, rest, found.rest_grad)
        size = inner(rest, rest) + inner(scored, scored)
        return error.maximum((inner(gap, gap) / size.clamp(min=1e-30)).sqrt())

    # target

    def target_gradient(self, target):
        """The target's gradient in two halves, since their cosine tells signal from noise (in one
        piece if a function made it); self_coef (n,), 0 if the target is another batch, None if it
        is unknown; and the target's loss ()."""
        cfg = self.cfg
        if cfg.tracin == "target":
            return self.gradient_of_function()
        batch, rows = target or (self.batch, self.step.rows)
        advantages = batch.advantages[rows]                                      # (m,), or (m, T)
        if cfg.tracin == "self":    # the target is the loss, for which this stands in the log
            coef = None
            weight = -advantages / len(rows)
        else:                       # the target is sum_i coef_i * log-prob of completion i
            rewards = batch.rewards[rows.to(batch.rewards.device)].to(rows.device)
            coef = weight = target_coefficients(cfg.tracin, rewards, advantages)    # same
        logp = (batch.rollout.logp * batch.mask)[rows]                              # (m, T)
        loss = (weight * (logp.sum(1) if weight.dim() == 1 else logp)).sum()

        in_first = ~second_half(rows, cfg.num_generations)                          # (m,)
        if target is None and (coef is None or self.one_backward):
            self_coef = self.loss_coef if coef is None else coef        # of what was recorded
            halves = self.tape.gradients([self_coef * in_first, self_coef * ~in_first])
        else:
            self_coef = None if target is None else torch.zeros_like(self.loss_coef)
            halves = self.plain_halves(batch, rows, in_first, coef)
        return halves, self_coef, loss

    def gradient_of_function(self):
        """As target_gradient, for a function of the config file: how to raise the number that it
        returns. It has no halves."""
        nets = self.nets
        number = self.cfg.functions["target"](nets.policy, nets.tokenizer, self.batch)
        check_number(number)
        parameters = list(self.tape.names)
        G = torch.autograd.grad(-number, parameters, materialize_grads=True)
        return [dict(zip(parameters, G))], None, -number.detach()

    def plain_halves(self, batch, rows, in_first, coef):
        """The target's two halves by forwards and backwards of their own."""
        num_tokens = int(batch.mask[rows].sum())
        step = self.step._replace(rows=rows, num_rows=len(rows), num_tokens=num_tokens)
        all_coef = None
        if coef is not None:
            all_coef = coef.new_zeros(len(batch.mask), *coef.shape[1:]).index_copy(0, rows, coef)
        return [self.gradient_of(self.nets, batch, part, step, self.cfg, coef=all_coef)
                for part in (rows[in_first], rows[~in_first])]

    # score

    def score(self, target, generator):
        """The recorded rows against the target (see keep_helpful) -> Scored."""
        cfg = self.cfg
        if self.one_backward:
            self.all_reduce([self.loss_coef])
        rest_grad = self.sum_rest()
        halves, self_coef, target_loss = self.target_gradient(target)
        target_grad = functools.reduce(add, halves)
        batch_grad = target_grad if cfg.tracin == "self" and target is None else None
        if cfg.tracin_target_ema:
            target_grad, share = self.averaged(target_grad)
            self_coef = None if self_coef is None else self_coef * share
        scale = {}
        if cfg.tracin_adam:
            batch_grad = batch_grad or self.tape.gradient(self.loss_coef)
            whole_grad = add(batch_grad, rest_grad) if rest_grad else batch_grad
            scale = adam_scale(self.nets.optimizer, whole_grad)
        G = self.scored_part(target_grad, scale)
        raw_scores = self.loss_coef * self.tape.dot(G).to(self.loss_coef)           # (n,)
        own, self_share = self.self_influence(raw_scores, self_coef, scale, G, generator)
        scores = raw_scores - own if cfg.tracin_leave_one_out else raw_scores
        if not scores.isfinite().all():
            raise SystemExit("stopped: an influence is not finite; the weights or the target's "
                             "rewards are not. The last checkpoint stands")
        return Scored(scores, raw_scores, G, scale, halves, target_loss, self_coef, self_share,
                      batch_grad, rest_grad)

    def sum_rest(self):
        """The gradient of the rest of the loss over all rows; {} if there is no rest."""
        if not self.cfg.two_parts:
            return {}
        # a process that has no row of this step adds zeros
        rest_grad = self.tape.summed or {p: torch.zeros_like(p) for p in self.tape.names}
        self.all_reduce(list(rest_grad.values()))
        return rest_grad

    def averaged(self, target_grad):
        """The average of the target's gradient over steps, corrected for its start at 0, and this
        step's share in it. It starts anew where the gradient points elsewhere than the average."""
        decay = self.cfg.tracin_target_ema
        if not self.average or cosine(target_grad, self.average) < ELSEWHERE:
            self.age = 0
            self.average = {p: torch.zeros_like(g) for p, g in target_grad.items()}
        self.age += 1
        average = list(self.average.values())
        torch._foreach_lerp_(average, [target_grad[p] for p in self.average], 1 - decay)
        total = 1 - decay ** self.age       # of the steps' shares so far
        unbiased = torch._foreach_div(average, total)
        return dict(zip(self.average, unbiased)), (1 - decay) / total

    def scored_part(self, target_grad, scale):
        """The target's gradient over cfg.tracin_layers, scaled as AdamW would if asked for."""
        parts = self.cfg.tracin_layers or ("",)     # which is in every name
        G = {p: g for p, g in target_grad.items()
             if any(part in self.tape.names[p] for part in parts)}
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
            return None, scores.new_full((), math.nan)
        here = rows.to(scores.device)
        own_terms = (self.loss_coef * self_coef)[here]              # 0 for another batch
        if own_terms.any():
            own_terms = own_terms * self.tape.norms(rows, scale, G).to(scores)
        return own_terms, own_terms.sum() / scores[here].abs().sum().clamp(min=1e-30)

    # select, step

    def weights_of(self, scores, generator):
        """Factors on the rows (n,), 0 for those that are not learned from, and whether select used
        its fallback."""
        cfg = self.cfg
        rows = self.step.rows
        if cfg.tracin_select == "weigh":
            weights = call_weigh(cfg.functions["weigh"], scores, self.batch, rows)
            return check_weights(weights, scores), False
        advantages = self.batch.advantages[rows].view(len(rows), -1).mean(1)    # of a critic: mean
        rewards = self.batch.rewards.to(rows.device)[rows]
        keep, fallback = select(scores, cfg.tracin_select, cfg.tracin_fraction, generator,
                                advantages, rewards, rows // cfg.num_generations)
        return keep.to(scores), fallback

    def kept_gradient(self, weights, batch_grad, G):
        """The weighted gradient of what is scored, and the gradient of all rows, weighed alike:
        batch_grad if it is known, else over the parameters of G only, unless normalizer needs all.

        With batch_grad the tape is asked for the fewer rows, those kept or those dropped.
        """
        coef = self.loss_coef
        others = 1 - weights
        if batch_grad is None:
            kept, dropped = self.tape.gradients([coef * weights, coef * others])
            needed = kept if self.cfg.tracin_normalizer == "norm" else G
            return kept, add({p: kept[p] for p in needed}, dropped)
        if weights.count_nonzero() <= others.count_nonzero():
            return self.tape.gradient(coef * weights), batch_grad
        dropped = self.tape.gradient(coef * others)
        return each(torch._foreach_sub, batch_grad, dropped), batch_grad

    def normalizer(self, weights, kept_grad, batch_grad):
        """Factor on the weighted gradient. all: 1. kept: what makes the loss a mean over the rows
        kept (over their tokens, if loss_type divides by tokens). norm: what gives it the norm that
        the gradient of all rows has."""
        loss_type = self.cfg.loss_type
        if self.cfg.tracin_normalizer == "all" or not weights.any():
            return 1.0
        if self.cfg.tracin_normalizer == "norm":
            squares = torch.stack([inner(batch_grad, batch_grad), inner(kept_grad, kept_grad)])
            of_all, of_kept = squares.sqrt().tolist()
            return of_all / of_kept if of_kept else 1.0
        units = torch.ones_like(weights)    # what the loss is divided by, row by row (n,)
        if loss_type in ("dapo", "cispo", "bnpo"):
            units = self.batch.mask[self.step.rows].sum(1)
        elif loss_type not in ("grpo", "dr_grpo", "sapo"):
            raise ValueError(f"tracin.Influence.normalizer: is loss_type {loss_type!r} divided by "
                             "rows or by tokens?")
        factor = float(units.sum() / (units * weights.abs()).sum())
        return factor if math.isfinite(factor) else 1.0             # not finite: nothing is kept


class Scored(NamedTuple):
    scores: Tensor          # (n,) influence of each row
    raw_scores: Tensor      # (n,) before a row's own part in the target is taken off
    G: dict                 # what rows were scored against: {parameter: tensor}
    scale: dict             # what the target's gradient was scaled with, with tracin_adam
    halves: list            # the target's gradient of this step in two parts
    target_loss: Tensor     # ()
    self_coef: Tensor       # (n,) see Influence; 0: another batch, None: unknown
    self_share: Tensor      # () see self_influence
    batch_grad: dict        # the gradient of all rows, or None if it was not needed
    rest_grad: dict         # the gradient of the rest of the loss over all rows; {}: no rest


class Findings(NamedTuple):
    """What a step tells its log, which makes metrics of it. No gradient is kept for that."""
    scores: Tensor          # (n,) influence of each row
    weights: Tensor         # (n,) 0: not selected
    fallback: bool          # of select
    self_share: Tensor      # ()
    error: Tensor           # () see invariant_error
    true_error: Tensor      # () see Influence.true_error; None: not asked for
    target: tuple           # (Batch, its rows that are the target)
    target_loss: Tensor     # ()
    products: Tensor        # (3,) <G, G>, <G, H>, <H, H> of the target's halves; (1,) of one
    norms: dict             # {name: ()} of the target's gradient, of its first parameters
    num_stored: int         # rows x weights whose gradients the tape stored


def serves_both(cfg, batch):
    """True if what is scored of a fresh row is a number times its log-prob (no KL or entropy in it,
    no critic, no token left out) and so is its part in the target."""
    by_row = not cfg.critic and batch.policy_mask is None
    return cfg.tracin not in ("off", "self") and by_row and cfg.scores_policy_only


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
    return batch.lengths[rows] + batch.mask.shape[1] * second_half(rows, num_generations)


# ------------------------------------------------------------------------------------------------
# pure functions: target, selection, gradients


def target_coefficients(target, rewards, advantages):
    """coef (n,): the target's loss is sum_i coef_i * log-prob of completion i, of n rollouts. With
    a critic and `advantage` coef (n, T) is by token.

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
    chosen = {
        "best": order[:size],
        "worst": order[n - size:],
        "balanced": torch.cat([order[:size - size // 2], order[n - size // 2:]])}
    if how not in chosen:
        raise ValueError(f"no choice of targets is called {how!r}")
    return chosen[how]


def select(influence, how, fraction=0.5, generator=None, advantages=None, rewards=None,
           prompts=None):
    """influence (n,) -> keep (n,) bool, and True if the fallback was used.

    positive: above 0. If fewer than 10 % of the nonzero scores are positive, the better half of the
    nonzero ones is kept (the fallback). drop: all but the worst `fraction` of the negative ones.
    top: the best `fraction`. all: every row.

    Controls keep as many as `positive` would. bottom: the worst. random. top_advantage: the largest
    |advantages| (n,). pods: about as many of each prompt, those whose rewards (n,) spread widest
    (PODS, Xu et al. 2025); prompts (n,) has the number of each row's prompt.
    """
    n = len(influence)
    positive, negative = torch.stack([(influence > 0).sum(), (influence < 0).sum()]).tolist()
    nonzero = positive + negative
    fallback = how not in ("drop", "top", "all") and positive < 0.1 * nonzero
    count = (nonzero + 1) // 2 if fallback else positive
    order = influence.argsort(descending=True)
    if how == "positive" and fallback:  # rows of influence 0, of groups without spread, go last
        order = influence.masked_fill(influence == 0, -torch.inf).argsort(descending=True)
    if how == "random":
        order = torch.randperm(n, generator=generator).to(influence.device)
    if how == "top_advantage":
        order = advantages.abs().argsort(descending=True, stable=True)
    if how == "pods":
        order = widest(rewards, prompts, count)
    kept = {
        "positive": order[:count],
        "drop": order[:n - int(fraction * negative)],
        "top": order[:round(fraction * n)],
        "bottom": order[n - count:],
        "random": order[:count],
        "top_advantage": order[:count],
        "pods": order,
        "all": order}
    if how not in kept:
        raise ValueError(f"no selection is called {how!r}")
    return torch.zeros_like(influence, dtype=torch.bool).index_fill_(0, kept[how], True), fallback


def widest(rewards, prompts, count):
    """Indices of `count` rows, about as many of each prompt. Of a prompt they are its k best and
    some of its worst, with the k that gives their rewards the largest variance. A reward that is
    unknown (NaN) counts as the prompt's mean."""
    chosen = []
    groups = [(prompts == number).nonzero()[:, 0] for number in prompts.unique().tolist()]
    groups.sort(key=len)    # what a small one has too few rows for is spread over the larger ones
    for j, rows in enumerate(groups):
        share = (count - sum(map(len, chosen))) / (len(groups) - j)
        size = min(len(rows), round(share))
        r = rewards[rows]
        r = torch.where(r.isnan(), r.nanmean().nan_to_num(), r)
        order = rows[r.argsort(descending=True, stable=True)]
        sorted_r = r.sort(descending=True, stable=True).values
        spreads = [torch.cat([sorted_r[:k], sorted_r[len(r) - size + k:]]).var(correction=0)
                   for k in range(size + 1)] if size else [r.new_zeros(())]
        k = int(torch.stack(spreads).argmax())
        chosen.append(torch.cat([order[:k], order[len(r) - size + k:]]))
    return torch.cat(chosen)


def call_weigh(function, scores, batch, rows):
    """What a config file's weigh(influence) or weigh(influence, batch) returns. It is given a copy
    of the scores, and a grpo.Batch of these rows."""
    scores = scores.clone()
    if list(inspect.signature(function).parameters)[1:2] != ["batch"]:
        return function(scores)
    here = rows.cpu()
    batch = dataclasses.replace(
        batch[rows], scores=batch.scores[here], rewards=batch.rewards[here],
        completions=[batch.completions[i] for i in here.tolist()])
    return function(scores, batch)


def check_number(number):
    """Ends the run unless a target function returned a number that gradients can come from."""
    is_number = isinstance(number, Tensor) and number.numel() == 1 and number.requires_grad
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
        for p in group["params"]:
            if p in gradient:
                state = optimizer.state.get(p, {})
                # a tensor to the end: a GPU that holds it need not be waited for
                steps = torch.as_tensor(state.get("step", 0)).double() + 1
                v = decay * state.get("exp_avg_sq", 0) + (1 - decay) * gradient[p].square()
                scale[p] = 1 / ((v / (1 - decay ** steps)).sqrt() + group["eps"])
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


def cosine(G, H):
    """Cosine of the angle between two gradients of the same parameters: a number."""
    both, first, second = torch.stack([inner(G, H), inner(G, G), inner(H, H)]).tolist()
    return both / max((first * second) ** 0.5, 1e-30)


def invariant_error(scores, batch_grad, G):
    """How far sum_i I_i = <G_batch, G_target> is violated, relative to sum_i |I_i|: ()."""
    scores = scores.double()
    gap = scores.sum() - inner(batch_grad, G)
    return gap.abs() / scores.abs().sum().clamp(min=1e-30)


# ------------------------------------------------------------------------------------------------
# the tape

LARGEST_PRODUCT = 2 ** 31 - 1   # elements; above it cuBLAS reads a matrix x vector elsewhere


class MicroBatch(NamedTuple):
    """Rows of one forward and backward."""
    index: int          # which micro-batch of the recording it is
    numbers: Tensor     # (n,) the rows' numbers
    tokens: Tensor      # (M,) the row, 0 .. n - 1, of each flattened token; or None
    seen: dict          # {layer: flattened tokens that it has been given}


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
    bytes (all rows need n times the weights). forget() frees what is contracted, which nothing
    bounds. It keeps the memory of what is stored for the next recording, since fresh pages cost
    time and `memory` is set aside for them anyway.

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
        self.summing = False
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
        """Lets go of what was recorded, but for the memory of stored gradients."""
        self.summed = {}            # {parameter: gradient} of backward_summed, over the rows here
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
        self.check_tokens()
        for name, p in self.model.named_parameters():
            if p.requires_grad != (p in self.names):
                raise ValueError(f"{name}: its requires_grad was changed while recording")
            if p in self.names and p.grad is not None:
                raise ValueError(f"{name} is used outside its layer, where the tape cannot see it")

    def give_back_memory(self):
        """Forgets the buffers that this recording did not use and, where that leaves more than
        `memory`, those that are longer than needed."""
        self.pool = {key: self.pool[key] for key in self.row_grads}
        if sum(g.nbytes for g in self.pool.values()) > self.memory:
            self.pool = {key: g for key, g in self.pool.items()
                         if len(g) == len(self.row_grads[key])}

    # recording

    def backward_summed(self, loss):
        """Calls backward() on a loss and adds its gradient to `summed`: no row's own is kept. The
        graph may be one that another backward is recorded from (retain_graph)."""
        if not self.summed:
            self.summed = {p: torch.zeros_like(p) for p in self.names}
        self.summing = True
        try:
            loss.backward()
        finally:
            self.summing = False

    def rows(self, which, tokens=None):
        """What follows is a forward and backward of new rows.

        which: how many, or, after numbered(), their numbers (n,). tokens (M,): the row, 0 to n - 1,
        of each of M flattened tokens.
        """
        self.check_tokens()
        if isinstance(which, int):
            which = torch.arange(self.counted, self.counted + which, device=self.device)
        if tokens is not None:
            tokens = tokens.to(self.device)
        self.micro_batches.append(MicroBatch(len(self.micro_batches), which, tokens, {}))
        self.counted += len(which)

    def check_tokens(self, all_read=True):
        """ValueError unless every layer that was given flattened tokens was given all of them, or
        no more than them."""
        for micro in self.micro_batches[-1:]:
            for module, count in micro.seen.items():
                told = len(micro.tokens)
                if count > told or all_read and count < told:
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
            micro, owner = (None, None) if again else self.owner(module, x)
            out, a = run_detached(module, x)
            is_own = not x.is_leaf

            def record(a, b):
                if again:
                    raise ValueError(
                        f"{layer}: computed again under a reentrant checkpoint, where the tape "
                        "cannot tell which rows it is of; set use_reentrant=False")
                if isinstance(module, nn.Linear):
                    b = b.to(a.dtype)
                # memory of the caller's, a buffer of inputs for instance, may be used again
                self.add(module, micro, owner, a if is_own else a.clone(), b)

            return Recorded.apply(out, out.new_empty((), requires_grad=True), a, record)

        return forward

    def record_linear(self, module, x, b):
        """Records a Linear whose output gradient b is known already, in code that goes no way
        through backward(): input x (m, in), b (m, out)."""
        micro, owner = self.owner(module, x)
        self.add(module, micro, owner, x.detach().to(b.dtype), b.detach())

    def owner(self, module, x):
        """Whose rows x holds: the micro-batch, and which of its rows each flattened token is of
        (m,), or None if row i of x is row i."""
        if not self.micro_batches:
            raise ValueError("tape.rows(n) first: how many rows are in this micro-batch?")
        micro = self.micro_batches[-1]
        is_lookup = isinstance(module, nn.Embedding)
        if x.dim() == 2 and micro.tokens is not None and not is_lookup:
            # the next ones, in pieces; after the last one a layer that is used twice begins again
            start = micro.seen.get(module, 0) % max(1, len(micro.tokens))
            end = start + len(x)
            micro.seen[module] = end
            self.check_tokens(all_read=False)
            return micro, micro.tokens[start:end]
        if len(x) != len(micro.numbers) or (is_lookup and x.dim() == 1):
            raise ValueError(
                f"{self.layers[module]}: its input {tuple(x.shape)} does not tell which of the "
                f"{len(micro.numbers)} rows is whose; look positions up per row, and give rows() "
                "the owner of flattened tokens")
        return micro, None

    def add(self, module, micro, owner, a, b):
        """Records a layer: the gradient of each row, or a and b. Of backward_summed: their sum."""
        numbers = micro.numbers
        if len(numbers) == 0:
            return
        if self.summing:
            for name, p in module.named_parameters(recurse=False):
                if p in self.names:
                    self.summed[p] += parameter_gradient(module, name, a, b)
            return
        # a head in pieces has as many
        tokens = b.shape[:-1].numel() if owner is None else len(micro.tokens)
        if not self.store(module, micro, owner, a, b, tokens / len(numbers)):
            numbers = numbers if owner is None else numbers[owner]
            self.records.append((module, numbers, a, b))

    def store(self, module, micro, owner, a, b, tokens_per_row):
        """Adds a layer's gradients to row_grads. False if a and b are to be recorded instead."""
        params = {name: p for name, p in module.named_parameters(recurse=False) if p in self.names}
        new = {p for p in params.values() if (p, micro.index) not in self.row_grads}
        n = len(micro.numbers)
        size = sum(n * p.nbytes for p in new)
        # the gradient of a lookup is sparse, unless the matrix is the head's too and stored already
        is_lookup = isinstance(module, nn.Embedding)
        is_short = isinstance(module, nn.Linear) and tokens_per_row < self.fewest
        does_not_fit = size > self.room
        does_not_pay = new and (is_lookup or is_short)
        if does_not_fit or does_not_pay:
            return False
        self.room -= size
        for name, p in params.items():
            add_gradients(self.buffer(p, micro), p in new, module, name, a, b, owner)
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

    @property
    def device(self):
        return next(iter(self.names)).device

    def contracted(self, parameters):
        """(module, name in it, parameter, numbers, a, b): what is contracted of parameters."""
        for module, numbers, a, b in self.records:
            for name, p in module.named_parameters(recurse=False):
                if p in parameters:
                    yield module, name, p, numbers, a, b

    def stored(self, parameters, entries=None):
        """(micro-batch, parameters, (n, weights)): what is stored of these parameters, in all
        micro-batches or in those of entries. Small ones are side by side, for fewer products."""
        for micro in self.micro_batches:
            if entries is not None and micro.numbers not in entries:
                continue
            here = [p for p in parameters if (p, micro.index) in self.row_grads]
            alone = [[p] for p in here if p.numel() > self.small]
            together = [p for p in here if p.numel() <= self.small]
            for group in filter(None, [*alone, together]):
                g = [self.row_grads[p, micro.index].flatten(1) for p in group]
                yield micro, group, side_by_side(g)

    def gradient(self, weights=None):
        """sum_i weights_i g_i as {parameter: tensor}, with weights (n,) or None: all 1."""
        if weights is None:
            weights = torch.ones(self.n, device=self.device)
        return self.gradients([weights])[0]

    def gradients(self, weights):
        """The gradients for several weights (n,), in a list."""
        chosen = self.entries(torch.stack([w != 0 for w in weights]).long() - 1)
        totals = [{p: torch.empty_like(p) for p in self.names} for _ in weights]
        for total, weight, entries in zip(totals, weights, chosen):
            torch._foreach_zero_(list(total.values()))
            self.add_contracted(total, weight, entries)
            self.add_stored(total, weight, entries)
        self.all_reduce([g for total in totals for g in total.values()])
        return totals

    def add_contracted(self, total, weight, entries):
        """total[p] += the weighted gradients of what is contracted."""
        @functools.cache    # many layers have them in common
        def factors(numbers, dtype):
            return weight.to(dtype)[numbers][entries[numbers].here]

        for module, numbers, a, b in self.records:
            if numbers in entries:
                here = entries[numbers].here
                a, b = weigh(module, a[here], b[here], factors(numbers, b.dtype))
                for name, p in module.named_parameters(recurse=False):
                    if p in total:
                        total[p] += parameter_gradient(module, name, a, b)

    def add_stored(self, total, weight, entries):
        """total[p] += the weighted gradients of what is stored."""
        for micro, group, g in self.stored(total, entries):
            w = weight[micro.numbers].to(g)
            flat = total[group[0]].view(-1) if len(group) == 1 else g.new_zeros(g.shape[1])
            width = LARGEST_PRODUCT // len(g)
            for span in spans_of(entries[micro.numbers].places):
                for part, out in zip(g[span].split(width, 1), flat.split(width)):
                    out.addmv_(part.T, w[span])
            if len(group) > 1:
                parts = flat.split([p.numel() for p in group])
                torch._foreach_add_([total[p].view(-1) for p in group], parts)

    def dot(self, G):
        """<g_i, G> for every row (n,), over the parameters of G {parameter: tensor}."""
        terms = [(numbers, layer_dot(module, name, a, b, G[p]))
                 for module, name, p, numbers, a, b in self.contracted(G)]
        for micro, group, g in self.stored(G):
            target = side_by_side([G[p].to(g).flatten() for p in group])
            width = LARGEST_PRODUCT // len(g)
            if not g.is_cuda:   # a CPU adds a long product up in one line, which costs digits
                width = min(width, 32768)
            for part, t in zip(g.split(width, 1), target.split(width)):
                terms.append((micro.numbers, part @ t))
        dtype = torch.promote_types(next(iter(self.names)).dtype, torch.float32)
        return self.sum_of(terms, self.n).to(dtype)

    def norms(self, rows, scale={}, parameters=None, memory=2 ** 26):
        """sum of scale * g_i^2 for some rows (their numbers, ascending) in float64; without scale
        it is ||g_i||^2. At most about `memory` numbers of per-row gradients exist at a time."""
        rows = torch.as_tensor(rows)
        places = torch.arange(len(rows), device=self.device)
        find = functools.cache(lambda size: self.find(rows.split(size)))
        entries, = find(len(rows))
        formed = []
        products = []
        only_stored = []
        stored = {p for p, _ in self.row_grads}
        for p in self.names if parameters is None else parameters:
            uses = list(self.contracted({p}))
            if not uses:
                only_stored.append(p)
            elif p not in scale and p not in stored and is_plain_matrix(uses):
                products += gram_norms(entries, uses)
            else:
                size = max(1, min(len(rows), memory // p.numel()))
                for part, place, here in zip(rows.split(size), places.split(size), find(size)):
                    squares = self.per_row(p, part, here).square()
                    if p in scale:
                        squares *= scale[p]
                    formed.append((place, squares.flatten(1).sum(1)))
        products += self.stored_norms(entries, only_stored, scale, memory)
        return self.sum_of(formed + products, len(rows))

    def sum_of(self, terms, n):
        """The sum (n,) in float64, over processes too, of terms (rows (k,), what these are given
        (k,))."""
        total = torch.zeros(n, dtype=torch.float64, device=self.device)
        if terms:
            rows, found = zip(*terms)
            total.index_add_(0, torch.cat(rows), torch.cat(found).to(total))
        self.all_reduce([total])
        return total

    def stored_norms(self, entries, parameters, scale, memory):
        """Terms of norms (rows (k,), squares (k,)), of parameters of which all is stored."""
        for micro, group, g in self.stored(parameters, entries):
            here, rows, _ = entries[micro.numbers]
            factors = g.new_ones(g.shape[1])
            if scale:
                factors = side_by_side([scale[p].flatten() for p in group])
            width = max(1, memory // len(rows)) if g.is_cuda else 32768     # as in dot
            for part, factor in zip(g.split(width, 1), factors.split(width)):
                yield rows, (part[here].square() * factor).sum(1)

    def per_row(self, p, rows, entries=None):
        """The gradients (len(rows), *p.shape) of one parameter, for rows recorded here. entries: of
        find."""
        if entries is None:
            entries, = self.find([rows])
        total = torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device)
        for module, name, _, numbers, a, b in self.contracted({p}):
            if numbers in entries:
                here, row, places = entries[numbers]
                add_per_row(total, module, name, a[here], b[here], row, places)
        for micro, _, g in self.stored([p], entries):
            here, row, _ = entries[micro.numbers]
            total.flatten(1).index_add_(0, row, g[here])
        return total

    def find(self, choices):
        """As entries, for several lists of rows (their numbers)."""
        places = torch.full((len(choices), self.n), -1)
        for place, rows in zip(places, choices):
            place[rows] = torch.arange(len(rows))
        return self.entries(places.to(self.device))

    def entries(self, places):
        """Where chosen rows are in the records, for several choices; a GPU is waited for once.

        places (choices, n): the place of each row among those chosen, or -1. Returns {numbers of a
        record: Entries} of each choice, without records of other rows only.
        """
        owners = [micro.numbers for micro in self.micro_batches]
        owners += [record[1] for record in self.records]
        owners = dict.fromkeys(owners)      # each once
        places = places[:, torch.cat([places.new_zeros(0), *owners])]
        found = []
        for choice, on_host in zip(places, places.tolist()):
            entries = {}
            on_host = iter(on_host)
            for numbers, place in zip(owners, choice.split([len(x) for x in owners])):
                listed = list(itertools.islice(on_host, len(numbers)))
                count = len(listed) - listed.count(-1)
                here = slice(None)      # all of them: no copy
                if count < len(listed):
                    here = (place >= 0).nonzero_static(size=count)[:, 0]
                if count:
                    entries[numbers] = Entries(here, place[here], listed)
            found.append(entries)
        return found


class Entries(NamedTuple):
    """Those entries of a record that are of chosen rows."""
    here: Tensor    # (k,) or slice(None): which
    rows: Tensor    # (k,) the place of each one's row among those chosen
    places: list    # the same of all entries of the record; -1: not chosen


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
    alone = torch.autograd.grad(
        loss_of(rows[i:i + 1]), list(tape.names), materialize_grads=True)
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
        is_head = hasattr(module, "product")    # model.Head
        known = is_head or type(module) in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
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
    spans = []
    end = 0
    for chosen, group in itertools.groupby(places, lambda place: place >= 0):
        start = end
        end += len(list(group))
        if chosen:
            spans.append(slice(start, end))
    return spans


# ------------------------------------------------------------------------------------------------
# the rules of a layer: input a (ids, or what a norm's weight multiplies), output gradient b


def run_detached(module, x):
    """(output of the layer on detached weights, a)."""
    weights = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
    if isinstance(module, nn.Embedding):
        return F.embedding(x, **weights), x
    if isinstance(module, nn.Linear):
        product = getattr(module, "product", F.linear)      # model.Head has one of its own
        out = product(x, **weights)
        dtype = out.dtype
        device = x.device.type
        if product is not F.linear and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)    # of its operands; logits may be wider
        # autograd takes some outputs for views, which Recorded cannot change in place
        return torch.ops.aten._unsafe_view(out, out.shape), x.detach().to(dtype)
    normalize = F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
    norm = functools.partial(normalize, normalized_shape=module.normalized_shape, eps=module.eps)
    return norm(x, **weights), norm(x.detach())


def weigh(module, a, b, w):
    """a and b, one of them times the weights w of the entries."""
    if isinstance(module, nn.Linear) and a.numel() < b.numel() and module.bias is None:
        return a * as_entries(w, a), b      # the smaller factor
    return a, b * as_entries(w, b)


def as_entries(w, x):
    """w (n,) with the dimensions of x (n, ...), to be multiplied with it or added to it."""
    return w.view(-1, *[1] * (x.dim() - 1))


def parameter_gradient(module, name, a, b):
    """The gradient of one parameter of a layer, summed over rows and tokens."""
    if isinstance(module, nn.Embedding):
        zeros = torch.zeros_like(module.weight)
        return zeros.index_add_(0, a.flatten(), b.flatten(0, -2).to(zeros.dtype))
    flat_b = b.flatten(0, -2)                                                   # (rows * T, out)
    if name == "bias":
        return flat_b.sum(0)
    if isinstance(module, nn.Linear):
        return flat_b.T @ a.flatten(0, -2)
    return (flat_b * a.flatten(0, -2)).sum(0)


def add_gradients(g, first, module, name, a, b, owner):
    """Adds the gradients of one parameter to g (n, *shape), row by row.

    first: what the memory of g holds does not count. owner: the row of each entry of the first
    dimension of a and b; None: entry i is of row i.
    """
    if b.dim() != 3 or isinstance(module, nn.Embedding):    # flattened tokens, or ids
        if first:
            g.zero_()
        if owner is None:
            owner = torch.arange(len(g), device=b.device)
        add_per_row(g, module, name, a, b, owner)
    elif isinstance(module, nn.Linear) and name == "weight" and b.dtype == g.dtype:
        g.baddbmm_(b.mT, a, beta=0 if first else 1)     # in place: no copy of a large g
    elif first:
        g.copy_(gradient_of_rows(module, name, a, b))
    else:
        g.add_(gradient_of_rows(module, name, a, b))


def gradient_of_rows(module, name, a, b):
    """The gradients of one parameter, row by row: a (n, T, in), b (n, T, out) -> (n, *shape)."""
    if name == "bias":
        return b.sum(1)
    if isinstance(module, nn.Linear):
        return b.mT @ a
    return (b * a).sum(1)


def add_per_row(total, module, name, a, b, row, rows=None):
    """total[row[i]] += the gradient of one parameter from entry i of a layer's a and b. rows: the
    same as a list, where it is known, for which a GPU need not be waited for."""
    if isinstance(module, nn.Embedding):
        flat = (as_entries(row, a) * total.shape[1] + a).flatten()
        total.view(-1, total.shape[2]).index_add_(0, flat, b.flatten(0, -2).to(total.dtype))
    elif isinstance(module, nn.Linear) and name == "weight" and b.dim() == 2:   # flattened
        order = row.argsort(stable=True)
        counts = collections.Counter(rows or row.tolist())
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


def is_plain_matrix(uses):
    """True for the weight of one Linear on (rows, tokens, channels), each row recorded once. uses:
    of Tape.contracted."""
    in_rows = all(isinstance(module, nn.Linear) and name == "weight" and b.dim() == 3
                  for module, name, *_, b in uses)
    return in_rows and len({numbers for *_, numbers, _, _ in uses}) == len(uses)


def gram_norms(entries, uses):
    """Terms (rows (k,), |g_i|^2 (k,)) for a matrix with g_i = sum_t b_t a_t^T, without forming it:
    |g_i|^2 = sum_ts (a_t . a_s) (b_t . b_s)."""
    for *_, numbers, a, b in uses:
        if numbers in entries:
            here, rows, _ = entries[numbers]
            x, y = a[here], b[here]
            yield rows, ((x @ x.mT) * (y @ y.mT)).sum((1, 2), dtype=torch.float64)


if __name__ == "__main__":  # the command needs the whole project and has a file of its own
    runpy.run_module("explain", run_name="__main__")
