"""
GRPO (Shao et al. 2024, DeepSeekMath) in one file, in the order of the algorithm: rollout, score,
advantage, loss, step.

    python grpo.py config/toxicity.py

Start with train() below, then read on. Shapes: B prompts, G = num_generations completions of each,
N = B * G rows, T tokens in the longest completion, K reward functions, n rows of a step or of a
micro-batch. Under torchrun each process handles a share of the rows; metrics, gradients and files
cover all rows.

The arithmetic is TRL's, but for these departures, whose reasons docs/trl.md gives by number:
   1  old log-probs are always those recorded while sampling
   2  log-probs are renormalised over the tokens that top-k, top-p and min-p allow
   3  entropies are those of the sampling distribution, their quantile is the whole iteration's
   4  with mini-batches dapo and cispo divide by the tokens of the mini-batch
   5  a group whose rewards are all equal gets advantages of exactly 0
   6  `kl` is the KL, also where the loss has the KL times the ratio
   7  metrics are means over the tokens of all micro-batches
   8  frac_reward_zero_std looks at groups; one with at most one score counts as equal
   9  the first step of a warm-up has a rate above 0
  10  ref_model_sync_steps counts iterations
  11  a mini-batch without a token that carries loss is no step
  12  entropy_coef takes the mean over all tokens with loss, also with top_entropy_quantile
  13  a reward function that abstains counts as its mean over the group
"""
import contextlib
import copy
import functools
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from config import load_settings, usage
from critic import token_advantages, value_errors, values_after
from data.comments import get_splits
from data.prompts import draw_prompts, load_prompts
from data.tokenizer import end_tokens, texts_of
from environment.episode import answering, openings, try_environment
from evaluate import evaluate, print_table
from judge import reward_functions
from judge.rewards import score, try_rewards
from judge.train import check_judges, get_judges
from model import completion_entropies, completion_logprobs, completion_states
from pretrain import get_policy, get_tokenizer, load_policy, trainable
from run.debug import take_apart
from run.device import autocast, pick_device, pick_dtype
from run.loop import Run
from run.processes import (all_gather, all_gather_rollout, all_reduce, rank0_first, shard,
                           sum_gradients)
from run.metrics import Meter
from run.prove import prove, try_device
from run.report import check_tape, quiet
from run.script import run_script, seed_for
from run.selfcheck import check_method
from run.size import check_size
from sample import Rollout, concatenate, decode, generate
from tracin import Influence, choose_targets, halves_apart

# ------------------------------------------------------------------------------------------------
# the loop


def train(nets, cfg, run):
    """Sample a group of completions per prompt, score them, compare within the group, step."""
    for it in run.iterations():         # evaluates, saves and stops between iterations
        log = run.step_log()            # prints memory and time after each step
        set_learning_rate(nets.optimizer, learning_rate(it, cfg))

        # rollout, score, advantage
        prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
        batch = collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it), log)

        # loss and step; with influence, the policy gradient only of rows that help a target
        target = collect_target(nets, it, cfg)      # None: no held-out rollouts
        metrics = update(nets, batch, target, cfg, seed_for(cfg.seed, "rows", it), log,
                         first=it == run.start)
        log.stepped()

        if cfg.sync_ref_model and (it + 1) % cfg.ref_model_sync_steps == 0:
            metrics |= sync_reference(nets, cfg.ref_model_mixup_alpha)
        run.record(it, prompts, batch, metrics, log)
        del batch, target   # rollout.allowed is large: gone before the next one is sampled


@torch.no_grad()
def collect(nets, prompts, cfg, seed, log=quiet):
    """All of an iteration that needs no gradient: B prompts -> Batch of N rows."""
    # rollout: a group of G completions per prompt, log-probs recorded as the tokens are drawn
    rollout = sample_groups(nets, prompts, cfg, seed)                               # (N, T)
    completions = texts_of(nets.tokenizer, rollout)
    log.generated(len(completions))

    # score: a number per completion and reward function, then their weighted sum
    scores = score_rows(nets.reward_funcs, prompts, completions, cfg)               # (N, K)
    rewards = total_reward(scores, cfg.reward_weights, cfg.num_generations)         # (N,)
    log.scored(rewards)

    # advantage: the group is its own baseline, unless a critic gives each token one
    ref_logp = reference_logprobs(nets, rollout, cfg) if cfg.beta else None         # (N, T)
    penalty, kl = kl_penalty(rollout, ref_logp, cfg)      # 0.0 unless kl_in = "reward"
    returns = None
    if cfg.critic:
        advantages, returns = token_advantages(rollout, rewards, penalty, cfg)      # (N, T)
    elif cfg.multi_objective_aggregation == "normalize_then_sum":
        advantages = decoupled_advantages(scores, cfg.reward_weights, cfg.num_generations)
    else:
        advantages = group_advantages(rewards - penalty, cfg.num_generations, cfg.scale_rewards)

    mask, policy_mask = loss_masks(rollout, cfg)                                    # (N, T)
    return Batch(rollout, advantages.to(nets.device), mask, policy_mask, ref_logp, completions,
                 scores, rewards, kl, returns)


def update(nets, batch, target, cfg, seed, log=quiet, first=False):
    """num_iterations passes over the batch, an optimizer step per mini-batch -> metrics.

    target: held-out rollouts that influence scores rows against, or None. first: the first
    iteration of a run, which stops if the trainer's log-probs are not the sampler's, or if
    influences do not agree with a plain backward.
    """
    meter = Meter(nets, batch, cfg, log)
    steps_taken = 0
    for step in optimizer_steps(batch, cfg, seed):
        meter.begin_step()
        on_policy = steps_taken == 0        # the policy is still the one that sampled
        influence = nets.influence if step.epoch == 0 else None     # None: off
        recording = contextlib.nullcontext()
        if influence:
            recording = influence.record(batch, step, on_policy)

        # loss: micro-batch by micro-batch, the gradients add up in .grad. With influence a tape
        # keeps them row by row instead, and .grad stays empty until keep_helpful
        with recording:
            for positions in micro_batches(sort_key(batch, step, cfg), cfg):
                rows = step.rows[positions]
                if influence:
                    out = influence.forward_backward(positions)
                else:
                    out = loss_of(nets, nets.policy_fn, batch, rows, step, cfg)
                    out.loss.backward()
                meter.add(rows, out)
        if on_policy:
            meter.check_ratio(stop=first)

        if influence:                       # .grad <- rows that help, and the rest of the loss
            select_seed = seed_for(seed, "select", steps_taken)
            found = influence.keep_helpful(target, select_seed, check=first and on_policy)
            meter.add_influence(found)
            if all(p.grad is None for p in nets.trained):
                continue        # no row is kept, and no other part of the loss is left: no step
        else:
            sum_gradients(nets.trained)     # over processes; the tape has done so

        # step: add_step ends the run here if the loss or the gradient is not finite
        grad_norm = clip_grad_norm_(nets.trained, cfg.max_grad_norm or math.inf)
        meter.add_step(grad_norm)
        nets.optimizer.step()
        nets.optimizer.zero_grad(set_to_none=True)
        steps_taken += 1
    return meter.metrics()


# ------------------------------------------------------------------------------------------------
# rollout


@dataclass
class Batch:
    """What an iteration learns from, the rows of a prompt side by side."""
    rollout: Rollout
    advantages: torch.Tensor          # (N,), with a critic (N, T); less the KL if kl_in = "reward"
    mask: torch.Tensor                # (N, T) tokens that carry loss: at most rollout.chosen
    policy_mask: torch.Tensor = None  # (N, T) which of them carry the policy gradient; None: all
    ref_logp: torch.Tensor = None     # (N, T) None at beta 0
    completions: list = None          # N texts
    scores: torch.Tensor = None       # (N, K) by each reward function, on the CPU
    rewards: torch.Tensor = None      # (N,) their weighted sum, on the CPU
    kl: float = None                  # per token, if kl_in = "reward"
    returns: torch.Tensor = None      # (N, T) what a critic's values are to become

    def __getitem__(self, rows):
        """What the loss needs of these rows."""
        policy_mask = None if self.policy_mask is None else self.policy_mask[rows]
        ref_logp = None if self.ref_logp is None else self.ref_logp[rows]
        return Batch(
            self.rollout[rows], self.advantages[rows], self.mask[rows], policy_mask, ref_logp)

    @functools.cached_property
    def lengths(self):
        """Tokens of each completion (N,)."""
        return self.rollout.mask.sum(1)

    @functools.cached_property
    def influence(self):
        """(N,) on the target, filled in by tracin.Influence. NaN: not scored."""
        return self.advantages.new_full(self.lengths.shape, math.nan)

    @functools.cached_property
    def weights(self):
        """(N,) factors on the rows' losses. tracin.Influence sets them during the first pass."""
        return self.advantages.new_ones(self.lengths.shape)

    def equal_groups(self, num_generations):
        """(B,) True where a group's rewards are all equal: without a KL it teaches nothing."""
        return all_equal(self.rewards.view(-1, num_generations))


def sample_groups(nets, prompts, cfg, seed):
    """num_generations completions of each prompt -> Rollout of N rows."""
    eos = end_tokens(nets.tokenizer)
    with autocast(nets.device, nets.dtype):
        rollout = nets.generate(
            nets.policy, [prompt.ids for prompt in prompts],
            cfg.num_generations, cfg.max_completion_length, seed=seed,
            batch_size=cfg.decode_batch_size, part=shard(len(prompts)), eos=eos,
            temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, min_p=cfg.min_p,
            forced=openings(nets.tokenizer, cfg, len(prompts), seed),
            respond=answering(nets.tokenizer, prompts, cfg, cfg.num_generations))
        if cfg.bootstrap_truncated_completions:
            rollout.value_after = values_after(nets.policy, rollout, cfg.micro_batch_size)
    return concatenate(all_gather_rollout(rollout), eos[0])


# ------------------------------------------------------------------------------------------------
# score


def score_rows(reward_funcs, prompts, completions, cfg):
    """Each reward function on each completion (N, K), computed by the process that has the row."""
    G = cfg.num_generations
    asked = [prompt for prompt in prompts for _ in range(G)]
    mine = shard(len(completions), G)
    used = {name: reward_funcs[name] for name in cfg.reward_funcs}  # a target may have its own
    return all_gather(score(used, asked[mine], completions[mine]))


def total_reward(scores, weights, num_generations):
    """Weighted sum (N,) of scores (N, K) by group. Where a function abstains (NaN) it counts as its
    mean over the group, which favours nobody; NaN if all abstain."""
    groups = scores.view(-1, num_generations, scores.shape[1])                      # (B, G, K)
    filled = groups.where(~groups.isnan(), groups.nanmean(1, keepdim=True)).view_as(scores)
    total = (filled * torch.tensor(weights)).nansum(1)
    return total.masked_fill(scores.isnan().all(1), math.nan)


# ------------------------------------------------------------------------------------------------
# advantage


def group_advantages(rewards, num_generations, scale_rewards="group"):
    """Advantages (N,) = (r - mean of the group) / (std + 1e-4), of rewards (N,) by group.

    The std (n - 1 in the denominator) is that of the `group` or of the whole `batch`; with `none`
    nothing is divided (Dr. GRPO, Liu et al. 2025). NaN marks a completion that no reward function
    scored: it is left out of mean and std, and its advantage is 0. A group whose rewards are all
    equal gets exactly 0.
    """
    r = rewards.view(-1, num_generations)                                           # (B, G)
    advantages = r - r.nanmean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (nanstd(r) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (nanstd(rewards) + 1e-4)
    no_lesson = r.isnan() | all_equal(r)[:, None]
    return advantages.masked_fill(no_lesson, 0).flatten()                           # (N,)


def decoupled_advantages(scores, weights, num_generations):
    """Advantages (N,) from scores (N, K) that are normalised in their group before they are summed,
    so that none drowns another; the sum is normalised over the batch (GDPO, Liu et al. 2026)."""
    parts = torch.stack([group_advantages(r, num_generations) for r in scores.T], 1)    # (N, K)
    known = parts.masked_fill(scores.isnan(), math.nan)
    r = total_reward(known, weights, num_generations)                                   # (N,)
    advantages = (r - r.nanmean()) / (nanstd(r) + 1e-4)
    return advantages.masked_fill(r.isnan() | (parts == 0).all(1), 0)


def nanstd(r):
    """Standard deviation along the last dimension, NaN left out, that dimension kept."""
    n = (~r.isnan()).sum(-1, keepdim=True)
    squares = (r - r.nanmean(-1, keepdim=True)).square().nansum(-1, keepdim=True)
    return (squares / (n - 1).clamp(min=1)).sqrt()


def all_equal(groups):
    """(B,) True for groups of rewards (B, G) that are all the same number, NaN left out."""
    # NaN is never the least or the greatest; >= holds for a group of NaN alone
    return groups.nan_to_num(math.inf).amin(1) >= groups.nan_to_num(-math.inf).amax(1)


# ------------------------------------------------------------------------------------------------
# reference and masks


def reference_logprobs(nets, rollout, cfg):
    """Log-probs (N, T) of the chosen tokens under the reference."""
    ref_logp = torch.zeros_like(rollout.logp)
    with autocast(nets.device, nets.dtype):
        for rows in micro_batches(rollout.mask.sum(1), cfg):    # of this process
            ref_logp[rows] = nets.logprobs(nets.reference_fn, rollout[rows], cfg.temperature)
    all_reduce([ref_logp])      # each process has filled in its own rows
    return ref_logp


def kl_penalty(rollout, ref_logp, cfg):
    """What is taken off the reward: beta * KL of each completion (N,), with a critic of each token
    (N, T). And the mean KL per token. 0.0 and None unless kl_in = "reward"."""
    if not cfg.beta or cfg.kl_in != "reward":
        return 0.0, None
    kl = kl_estimate(rollout.logp, ref_logp, cfg.kl_estimator) * rollout.chosen     # (N, T)
    penalty = kl if cfg.critic else kl.sum(1).cpu()
    return cfg.beta * penalty, float(kl.sum() / rollout.chosen.sum())


def loss_masks(rollout, cfg):
    """Tokens that carry loss (N, T), and which of them carry the policy gradient (N, T), or None
    for all."""
    mask = rollout.chosen
    if cfg.mask_truncated_completions:
        mask = mask & rollout.ended[:, None]
    if cfg.top_entropy_quantile == 1 or not mask.any():
        return mask, None
    least = rollout.entropy[mask].quantile(1 - cfg.top_entropy_quantile)
    return mask, rollout.entropy >= least


# ------------------------------------------------------------------------------------------------
# loss


class Step(NamedTuple):
    """An optimizer step: its rows of the batch, and what its loss is divided by, numbers of the
    whole step, so that the losses of micro-batches add up."""
    epoch: int
    rows: torch.Tensor          # (n,)
    num_rows: int
    num_tokens: int


class LossTerms(NamedTuple):
    """Parts of a loss."""
    policy_loss: torch.Tensor   # () with gradient
    ratio: torch.Tensor         # (n, T), or (n, 1) at sequence level
    kl: torch.Tensor            # (n, T), or None
    rest: torch.Tensor = 0.0    # () with gradient: KL, entropy bonus and critic in the loss
    critic_loss: torch.Tensor = None    # ()


class Forward(NamedTuple):
    loss: torch.Tensor          # ()
    logp: torch.Tensor          # (n, T) with gradient
    terms: LossTerms
    batch: Batch                # of these rows
    scored: torch.Tensor = None # () the part of the loss that influence scores and weighs
    rest: torch.Tensor = 0.0    # () the part that is learned from all rows


def grpo_loss(
        logp, old_logp, ref_logp, advantages, mask, policy_mask, step, cfg, weights=None):
    """The loss of some rows, a scalar, and its LossTerms.

    logp, old_logp, ref_logp (n, T): log-probs of the chosen tokens under the policy (with
    gradient), under the policy that sampled them, and under the reference (None without a KL).
    advantages (n,) or (n, T). mask (n, T): tokens that carry loss. policy_mask (n, T): those that
    carry the policy gradient (None: all); the KL and the divisors keep `mask`. step: a Step, whose
    micro-batches add up to its loss. weights (n,): factors on the rows (None: 1), with
    cfg.tracin_kl = "all" on their policy gradient only. Everything stays on the device, so that a
    GPU is not waited for. Raises ValueError for a field that is missing or of the wrong shape.
    """
    check_shapes(logp, old_logp=old_logp, mask=mask)
    check_shapes(logp if cfg.critic else logp[:, 0], advantages=advantages)
    mask = mask.bool()
    logp = logp.masked_fill(~mask, 0)
    old_logp = old_logp.masked_fill(~mask, 0)

    # what is (n, 1), at sequence level, goes to every token of its row
    ratio = importance_ratio(logp, old_logp, mask, cfg)                 # (n, T), or (n, 1)
    objective = clipped_objective(ratio, logp, advantages, cfg)         # (n, T), or (n, 1)
    if policy_mask is not None:
        check_shapes(logp, policy_mask=policy_mask)
        objective = objective * policy_mask
    w = 1.0 if weights is None else weights[:, None]                    # (n, 1)
    policy_loss = aggregate(-objective * w, mask, step, cfg)            # ()
    if not cfg.kl_in_loss:
        return policy_loss, LossTerms(policy_loss, ratio.detach(), None)

    check_shapes(logp, ref_logp=ref_logp)
    kl = kl_estimate(logp, ref_logp.masked_fill(~mask, 0), cfg.kl_estimator)        # (n, T)
    corrected_kl = kl * ratio if cfg.corrects_kl else kl
    if cfg.tracin_kl == "kept":
        corrected_kl = corrected_kl * w
    rest = cfg.beta * aggregate(corrected_kl, mask, step, cfg)          # ()
    return policy_loss + rest, LossTerms(policy_loss, ratio.detach(), kl.detach(), rest)


def importance_ratio(logp, old_logp, mask, cfg):
    """policy / sampler, per token (n, T) or per sequence (n, 1): the exp of the row's mean
    log-ratio (GSPO, Zheng et al. 2025)."""
    log_ratio = logp - old_logp
    if cfg.importance_sampling_level == "sequence":
        row_tokens = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.sum(1, keepdim=True) / row_tokens
    return log_ratio.exp()


def clipped_objective(ratio, logp, advantages, cfg):
    """What the policy maximises, for each token (n, T) or sequence (n, 1).

    grpo, bnpo, dr_grpo, dapo   min(min(ratio, delta) A, clamp(ratio, low, high) A)
    cispo                       stop_gradient(min(ratio, high)) A logp
    sapo                        4 / tau sigmoid(tau (ratio - 1)) A, tau by the sign of A

    At ratio 1 the gradient of each of these is A times that of logp. Without a critic A is a number
    per row: tracin.serves_both builds on that.
    """
    A = advantages.view(len(advantages), -1)                            # (n, 1), or (n, T)
    low, high = cfg.clip_range          # 1 - epsilon, 1 + epsilon_high; cispo: epsilon_high
    if cfg.loss_type == "cispo":
        return ratio.clamp(max=high).detach() * A * logp
    if cfg.loss_type == "sapo":
        tau = torch.full_like(A, cfg.sapo_temperature_neg)
        tau = tau.masked_fill(A > 0, cfg.sapo_temperature_pos)
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
    unclipped = ratio if cfg.delta is None else ratio.clamp(max=cfg.delta)
    return torch.min(unclipped * A, ratio.clamp(low, high) * A)


def kl_estimate(logp, ref_logp, estimator):
    """Per-token estimates of KL(policy, reference) from tokens of the policy (Schulman 2020)."""
    d = ref_logp - logp
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return torch.expm1(d) - d       # k3


def aggregate(x, mask, step, cfg):
    """Sum of x (n, T) or (n, 1) over the tokens with loss, divided by what loss_type says:

    grpo, sapo   the tokens of the row, then the rows of the step
    dr_grpo      the rows of the step * max_completion_length
    bnpo         the tokens of these rows: the one type that depends on micro-batches
    dapo, cispo  the tokens of the step

    Who adds a loss_type says here what it is divided by, in tracin.Influence.normalizer whether
    these are rows or tokens, and its name in config/check.py.
    """
    x = x * mask
    if cfg.loss_type in ("grpo", "sapo"):
        row_tokens = mask.sum(1).clamp(min=1)                                       # (n,)
        return (x.sum(1) / row_tokens).sum() / step.num_rows
    if cfg.loss_type == "dr_grpo":
        return x.sum() / (step.num_rows * cfg.max_completion_length)
    if cfg.loss_type == "bnpo":
        share = len(x) / step.num_rows
        return x.sum() / mask.sum().clamp(min=1) * share
    if cfg.loss_type in ("dapo", "cispo"):
        return x.sum() / max(step.num_tokens, 1)
    raise ValueError(f"grpo.aggregate: what is loss_type {cfg.loss_type!r} divided by?")


def check_shapes(logp, **fields):
    """ValueError for a field that is missing or has another shape than logp."""
    for name, x in fields.items():
        if x is None or x.shape != logp.shape:
            found = "missing" if x is None else tuple(x.shape)
            raise ValueError(f"{name}: {found}, must be {tuple(logp.shape)} to go with logp")


def loss_of(nets, policy, batch, rows, step, cfg, record_logp=False, logprobs=None):
    """Forward pass of some rows of a batch -> Forward.

    record_logp: backward will be called on the sum of the log-probs and not on the loss (see
    tracin.Influence); the ratio is taken as exactly 1. logprobs: nets.logprobs, or the plain
    version of it.
    """
    b = batch[rows]
    weights = torch.ones_like(b.rollout.logp[:, 0])                                 # (n,)
    if step.epoch > 0:      # in the first pass keep_helpful weighs the rows, after the backward
        weights = batch.weights[rows]

    def loss_and_terms(logp):
        old_logp = logp.detach() if record_logp else b.rollout.logp
        return grpo_loss(
            logp, old_logp, b.ref_logp, b.advantages, b.mask, b.policy_mask, step, cfg, weights)

    # The fused head forms its gradients during the forward pass, so it must know the scalar that
    # backward() will start from. The plain head ignores this.
    def backward_from(logp):
        return (logp * b.mask).sum() if record_logp else loss_and_terms(logp)[0]

    logprobs = logprobs or nets.logprobs
    if cfg.two_parts and step.epoch == 0:
        logprobs = completion_logprobs      # two backwards follow: the fused head knows of one
    states = None       # where log-probs, entropies and values share them
    with autocast(nets.device, nets.dtype):
        if cfg.entropy_coef or cfg.critic:
            states = completion_states(policy, b.rollout)
        logp = logprobs(policy, b.rollout, cfg.temperature, backward_from, states)  # (n, T)
    loss, terms = loss_and_terms(logp)
    if cfg.tracin_kl == "all":
        weights = torch.ones_like(weights)      # of the terms that follow
    if cfg.entropy_coef:
        bonus = cfg.entropy_coef * mean_entropy(nets, policy, b, step, cfg, weights, states)
        loss = loss - bonus
        terms = terms._replace(policy_loss=terms.policy_loss - bonus, rest=terms.rest - bonus)
    if cfg.critic:
        errors = value_errors(policy, b.rollout, batch.returns[rows], states, cfg.value_clip)
        critic_loss = cfg.value_coef * aggregate(errors * weights[:, None], b.mask, step, cfg)
        loss = loss + critic_loss
        terms = terms._replace(critic_loss=critic_loss, rest=terms.rest + critic_loss)
    rest = terms.rest if cfg.tracin_kl == "all" else 0.0
    return Forward(loss, logp, terms, b, scored=loss - rest, rest=rest)


def mean_entropy(nets, policy, b, step, cfg, weights, states):
    """These rows' part of the mean entropy over all tokens of the step that carry loss, whatever
    loss_type divides by. weights and states: as in loss_of."""
    with autocast(nets.device, nets.dtype):
        entropies = completion_entropies(policy, b.rollout, cfg.temperature, states)    # (n, T)
    return (entropies * weights[:, None] * b.mask).sum() / max(step.num_tokens, 1)


def gradient_of(nets, batch, rows, step, cfg, key=None, coef=None, part="scored"):
    """{parameter: gradient} of a part of some rows' loss, by a plain backward. Leaves .grad empty.

    part: a field of Forward, `scored`, `rest` or `loss`. coef, over completions (N,) or tokens
    (N, T): the sum of coef * policy / sampler takes the place of the loss; on fresh rollouts its
    gradient is that of coef * log-prob. key: see micro_batches. Only influence needs this function.
    Fast paths stay out of it: it is what they are checked against.
    """
    key = batch.lengths[rows] if key is None else key
    for positions in micro_batches(key, cfg):
        micro = rows[positions]
        out = loss_of(nets, nets.policy, batch, micro, step, cfg, logprobs=completion_logprobs)
        scalar = getattr(out, part)
        if coef is not None:
            mask = batch.mask[micro]
            ratio = (out.logp - batch.rollout.logp[micro]).masked_fill(~mask, 0).exp()
            scalar = (coef[micro].view(len(micro), -1) * ratio * mask).sum()
        scalar.backward()
    sum_gradients(nets.trained)
    gradient = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in nets.trained}
    nets.policy.zero_grad(set_to_none=True)
    return gradient


# ------------------------------------------------------------------------------------------------
# step


def optimizer_steps(batch, cfg, seed):
    """num_iterations passes over the rows in mini-batches; those without loss are left out.

    A generator on purpose: in the first pass influence fills in batch.weights for the later ones.
    """
    N = len(batch.mask)
    device = batch.mask.device
    rows = torch.arange(N, device=device)
    if cfg.zero_std_groups == "drop":
        equal = batch.equal_groups(cfg.num_generations)         # (B,) on the CPU, as rewards are
        rows = (~equal.repeat_interleave(cfg.num_generations)).nonzero()[:, 0].to(device)
    for epoch in range(cfg.num_iterations):
        if 0 < cfg.mini_batch_size < N:
            generator = torch.Generator().manual_seed(seed_for(seed, epoch))
            rows = rows[torch.randperm(len(rows), generator=generator).to(device)]
        for mini in rows.split(cfg.mini_batch_size or N):
            num_rows = len(mini)
            num_tokens = int(batch.mask[mini].sum())
            if epoch > 0 and cfg.tracin != "off" and not cfg.two_parts:
                mini = mini[batch.weights[mini] != 0]   # the others have no loss left
            if num_tokens > 0 and len(mini) > 0:
                yield Step(epoch, mini, num_rows, num_tokens)


def sort_key(batch, step, cfg):
    """What a step's rows are sorted by (n,), for speed: their length. With influence, first which
    half of the target they are in (tracin.second_half), then their length."""
    if cfg.tracin != "off" and step.epoch == 0:
        return halves_apart(batch, step.rows, cfg.num_generations)
    return batch.lengths[step.rows]


def micro_batches(key, cfg):
    """Positions of this process's share of n rows, in pieces of micro_batch_size.

    Sorted by key (n,), rows of like length share a piece, which saves padding. The order changes no
    result except bnpo's. A process may have no rows: no pieces.
    """
    mine = torch.arange(len(key), device=key.device)[shard(len(key))]
    if "sort" in cfg.speed:
        mine = mine[key[mine].argsort(stable=True)]
    return mine.split(cfg.micro_batch_size) if len(mine) else ()


def learning_rate(it, cfg):
    """Rate of iteration it: linear warm-up, then constant, or to 0 by a line or a cosine."""
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    done = (it - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)
    if cfg.lr_decay == "linear":
        return cfg.learning_rate * (1 - done)
    if cfg.lr_decay == "cosine":
        return cfg.learning_rate * (0.5 + 0.5 * math.cos(math.pi * done))
    return cfg.learning_rate


def set_learning_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def sync_reference(nets, alpha):
    """reference <- (1 - alpha) reference + alpha policy, adapters included. -> metrics"""
    pairs = list(zip(nets.reference.parameters(), nets.policy.parameters(), strict=True))
    for r, p in pairs:
        if alpha == 1:
            r.copy_(p)
        else:
            r.lerp_(p, alpha)
    differing = sum(not torch.equal(r, p) for r, p in pairs)
    print(f"reference synced: {differing} tensors differ from the policy's (0 right after a copy)")
    return {"ref_tensors_differing": differing}


# ------------------------------------------------------------------------------------------------
# influence: the target's rows


class Target(NamedTuple):
    batch: Batch
    rows: torch.Tensor      # (m,) those of its rows that are the target


def collect_target(nets, it, cfg):
    """Rollouts of held-out prompts -> Target of influence, new every tracin_val_every iterations.
    None where the target is the batch itself, or influence is off."""
    if cfg.tracin == "off" or not cfg.tracin_val_prompts:
        return None
    influence = nets.influence
    if it % cfg.tracin_val_every and influence.held_out:
        batch, rows = influence.held_out
        if not isinstance(batch, Batch):    # of a checkpoint
            batch = Batch(**vars(batch))
        return Target(batch, rows)
    influence.held_out = None   # rollout.allowed is large: gone before the next one is sampled
    prompts = draw_prompts(nets.val_prompts, it, cfg.tracin_val_prompts, cfg.seed)
    batch = collect(nets, prompts, cfg.of_target(), seed_for(cfg.seed, "target", it))
    generator = torch.Generator().manual_seed(seed_for(cfg.seed, "chosen", it))
    rows = choose_targets(batch.rewards, cfg.tracin_val_size, cfg.tracin_val_select, generator)
    target = Target(batch, rows.to(nets.device))
    influence.held_out = target if cfg.tracin_val_every > 1 else None
    return target


# ------------------------------------------------------------------------------------------------
# what the loop works with, built once


def read_inputs(cfg):
    """Finds what a user can get wrong, before anything is trained."""
    device = pick_device(cfg.device, cfg.allow_tf32, cfg.deterministic)
    try_device(device)
    dtype = pick_dtype(cfg.dtype, device)
    base = load_policy(cfg)
    check_judges(cfg)
    tokenizer = get_tokenizer(cfg)
    splits = get_splits(cfg)
    prompts, eval_prompts, val_prompts = load_prompts(cfg, tokenizer, splits)
    check_size(cfg, base, len(eval_prompts), device, dtype)
    try_rewards(cfg, prompts + eval_prompts + val_prompts)
    try_environment(cfg, prompts + eval_prompts + val_prompts, tokenizer)
    return SimpleNamespace(
        device=device, dtype=dtype, base=base, splits=splits, tokenizer=tokenizer,
        prompts=prompts, eval_prompts=eval_prompts, val_prompts=val_prompts)


def prepare(cfg, given, stop=lambda: False):
    """Makes policy and judges at first use, finds them later, and builds Nets."""
    with rank0_first():
        base = given.base or get_policy(cfg, given.splits, given.device, stop)
        judges = get_judges(cfg, given.splits, given.device, stop)
    if any(all_gather([stop()])):
        raise KeyboardInterrupt("policy and judges are saved; the same command goes on from there")
    nets = build(cfg, given, base, judges)
    prove(nets, cfg)            # tries each fast path beside the plain one, uses what holds
    check_method(nets, cfg, collect, optimizer_steps, loss_of)  # signs, groups, masks: still GRPO?
    check_tape(nets, cfg)       # says what influence will cost
    return nets


@dataclass
class Nets:
    """What the loop works with."""
    policy: torch.nn.Module
    base: torch.nn.Module         # the policy before training; for the evaluation's perplexity
    reference: torch.nn.Module    # the base, unless sync_ref_model makes it follow the policy
    judges: dict                  # {"judge": ..., "eval_judge": ...}
    reward_funcs: dict            # {name: function}, called by judge.rewards.score
    optimizer: torch.optim.Optimizer
    trained: list                 # parameters with gradient
    tokenizer: Any
    prompts: list                 # of data.prompts.Prompt
    eval_prompts: list
    val_prompts: list             # for the target of influence
    device: torch.device
    dtype: torch.dtype            # of the forward passes
    generate: Any                 # sample.generate, or one that decodes faster
    logprobs: Any                 # model.completion_logprobs, or the fused head
    policy_fn: Any                # the policy, compiled if cfg.compile says so (never for a tape)
    reference_fn: Any             # the reference, likewise
    influence: Any = None         # tracin.Influence, or None


def build(cfg, given, base, judges):
    """Nets from a base policy and its judges, which compute plainly until prove()."""
    base = base.to(given.device).eval().requires_grad_(False)
    policy = trainable(base, cfg)
    policy.recompute = cfg.activation_checkpointing
    reference = copy.deepcopy(policy).requires_grad_(False) if cfg.sync_ref_model else base
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(      # tracin.adam_scale reads its state
        trained, lr=cfg.learning_rate, betas=(cfg.adam_beta1, cfg.adam_beta2),
        weight_decay=cfg.weight_decay, fused=True)

    plain_decode = functools.partial(decode, drop="retire" in cfg.speed)
    nets = Nets(
        policy=policy, base=base, reference=reference, judges=judges,
        reward_funcs=reward_functions(cfg, judges, lambda: autocast(nets.device, nets.dtype)),
        optimizer=optimizer, trained=trained, tokenizer=given.tokenizer, prompts=given.prompts,
        eval_prompts=given.eval_prompts, val_prompts=given.val_prompts,
        device=given.device, dtype=given.dtype,
        generate=functools.partial(generate, decode=plain_decode),
        logprobs=completion_logprobs, policy_fn=policy, reference_fn=reference)
    if cfg.tracin != "off":
        # functions are handed in: tracin.py imports nothing of the project
        nets.influence = Influence(nets, cfg, loss_of, gradient_of, all_reduce)
    return nets


def main(argv):
    cfg = load_settings(argv)
    given = read_inputs(cfg)
    with Run(cfg, evaluate, print_table) as run:  # a folder of its own; Ctrl-C saves before it ends
        nets = prepare(cfg, given, run.stopped)
        if cfg.debug_step:
            take_apart(nets, cfg, grpo=sys.modules[__name__])
            return
        run.begin(nets)                 # anew, or from the checkpoint of an interrupted run
        train(nets, cfg, run)
        run.finish()                    # the table of before and after


if __name__ == "__main__":
    run_script(main, usage)
