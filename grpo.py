"""
GRPO (Shao et al. 2024, DeepSeekMath) in one file, in the order of the algorithm: rollout, score, advantage, loss, step.

    python grpo.py config/toxicity.py

N = num_prompts * num_generations rows are sampled in an iteration; T is the width of the completions.
Processes that torchrun starts share the rows (see model.py); every metric, gradient and file is of all of them.
The arithmetic is TRL's. Where this file departs from it on purpose:
  - old log-probs are always those recorded while sampling, and log-probs are renormalised over what top-k, top-p and
    min-p keep, so that the ratio is one of two distributions;
  - entropies are those of the sampling distribution, over the whole iteration, so that micro-batches agree;
  - with mini-batches, dapo and cispo divide by the tokens of the mini-batch, so that the step keeps its size;
  - a group whose rewards are all equal gets advantages of exactly 0.
Left out: a critic, tools and several turns.
"""
import contextlib
import copy
import math
import os
import time
from dataclasses import dataclass, replace

import torch

from config import Settings, load_settings, public
from run.checkpoint import append, begin_run, claim_out_dir, save_run, write_config
from evaluate import evaluate, print_table
from data.comments import get_splits
from data.prompts import load_prompts
from run.files import read_rows
from judge import load_judge, reward_functions, score
from judge.train import get_judges
from run.script import BadInput
from run.decoder import Decoder
from sample import Rollout, generate
from model import add_lora, completion_logprobs
from run.device import autocast, free_memory, pick_device, pick_dtype
from run.script import derive, hash_of, interrupts, run_script
from run.processes import gather, one_by_one, reduce, share, world
from pretrain import get_policy, get_tokenizer, load_policy
from tracin import Tape, choose_targets, filter_rows, target_coefficients
from run.report import (Lines, describe_batch, describe_cost, diagnose, numbers, report, std,
                        zero_spread)

# ---------------------------------------------------------------------------------------------------------------
# rollout, score, advantage


def pick(prompts, it, s):
    """The num_prompts prompts of iteration it: each of them once in random order, then again in another."""
    n, orders, picked = len(prompts), {}, []
    for j in range(it * s.num_prompts, (it + 1) * s.num_prompts):
        if j // n not in orders:
            generator = torch.Generator().manual_seed(derive(s.seed, "prompts", j // n))
            orders[j // n] = torch.randperm(n, generator=generator).tolist()
        picked.append(prompts[orders[j // n][j % n]])
    return picked


@dataclass
class Batch:
    """What an iteration learns from, rows of a prompt side by side."""
    rollout: Rollout
    completions: list             # N texts
    scores: torch.Tensor          # (N, K) by each reward function
    rewards: torch.Tensor         # (N,) their weighted sum
    advantages: torch.Tensor      # (N,) of the rewards, less beta * KL of the completion when kl_in = "reward"
    mask: torch.Tensor            # (N, T) tokens that carry loss
    policy_mask: torch.Tensor     # (N, T) tokens that carry the policy gradient; None: all of `mask`
    ref_logp: torch.Tensor        # (N, T); None at beta 0
    kl: float                     # per token, of the sampled tokens, when kl_in = "reward"; else None
    influence: torch.Tensor = None  # (N,) on the target, and
    weights: torch.Tensor = None  # (N,) in the step, both set by `update`


@torch.no_grad()
def collect(policy, reference, prompts, reward_funcs, s, tokenizer, seed, dtype, line=lambda *a, **k: None, decoder=None):
    """All of an iteration that needs no gradient: prompts [(text, ids)] -> Batch. decoder: see make_decoder."""
    device, G = policy.wte.weight.device, s.num_generations
    with autocast(device, dtype):
        rollout = generate(policy, [ids for _, ids in prompts], G, s.max_completion_length, eos=tokenizer.eot_token, seed=seed,
                           temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p,
                           batch_size=s.decode_batch_size, retire=s.retire_rows, decoder=decoder)
    N = len(prompts) * G
    line(0, "2. Samples generated" + (f" ({N} rows for all micro-batches)" if N > s.micro_batch_size else ""))

    completions = [tokenizer.decode(ids) for ids in rollout.completions()]
    asked, mine = [text for text, _ in prompts for _ in range(G)], share(N, G)  # all rows, but of several processes
    scores = gather(score(reward_funcs, asked[mine], completions[mine]))
    rewards = total_reward(scores, s.reward_weights)
    line(0, "3. Samples scored", rewards=f"{rewards.nanmean():.4f}±{std(rewards):.4f}")

    ref_logp, kl, penalty = None, None, 0.0
    if s.beta:
        with autocast(device, dtype):
            ref_logp = torch.zeros_like(rollout.logp)
            for rows in micro_batches(own_share(rollout.mask.sum(1), s), s):
                ref_logp[rows] = completion_logprobs(reference, rollout[rows], s.temperature)
            reduce([ref_logp])
        if s.kl_in == "reward":
            per_token = kl_estimate(rollout.logp, ref_logp, s.kl_estimator) * rollout.mask
            penalty, kl = s.beta * per_token.sum(1).cpu(), float(per_token.sum() / rollout.mask.sum())
    advantages = group_advantages(rewards - penalty, G, s.scale_rewards).to(device)
    mask = rollout.mask & rollout.ended[:, None] if s.mask_truncated_completions else rollout.mask
    policy_mask = None
    if s.top_entropy_quantile < 1 and mask.any():
        policy_mask = rollout.entropy >= rollout.entropy[mask].quantile(1 - s.top_entropy_quantile)
    return Batch(rollout, completions, scores, rewards, advantages, mask, policy_mask, ref_logp, kl)


def make_decoder(policy, s, dtype):
    """What samples the rollouts where plain decoding would not be the fastest; None: plain decoding."""
    graphs, compiled = s.cuda_graphs and policy.wte.weight.is_cuda, "generate" in s.compile
    return Decoder(policy, dtype, compiled, graphs) if graphs or compiled else None


def try_compile(s, device):
    """BadInput when something is to be compiled and nothing can be."""
    try:
        s.compile and torch.compile(lambda x: 2 * x + 1)(torch.zeros(2, device=device))
    except Exception as e:  # a missing compiler shows in many ways
        raise BadInput(f"compile = {s.compile}: torch cannot compile on this machine ({str(e).strip().splitlines()[0]}); leave "
                       "it ()") from e


def compile_parts(policy, reference, judges, s):
    """What s.compile names -> (policy as the update calls it, reference as collect does), compiled or not; the judge in place."""
    idle = {"reference": not s.beta, "judge": not hasattr(judges.get("judge"), "model"),
            "update": s.tracin != "off" and s.num_iterations == 1}  # the pass that influence records is never compiled
    for part in s.compile:
        if idle.get(part):
            print(f"note: compile = {s.compile}: this run has no {part} that could be compiled")
    if "judge" in s.compile and not idle["judge"]:
        judges["judge"].model = torch.compile(judges["judge"].model, dynamic=True)
    return tuple(torch.compile(x, dynamic=True) if part in s.compile and not idle[part] else x
                 for part, x in (("update", policy), ("reference", reference)))


def total_reward(scores, weights):
    """scores (N, K) -> weighted sum (N,) over the functions that did not abstain; NaN where all did."""
    return (scores * torch.tensor(weights)).nansum(1).masked_fill(scores.isnan().all(1), math.nan)


def group_advantages(rewards, num_generations, scale_rewards="group"):
    """rewards (N,), groups of num_generations in a row -> advantages (N,) = (r - mean of the group) / (std + 1e-4).

    The std (n - 1 in the denominator) is that of the `group`, of the whole `batch`, or with `none` there is no division
    (Dr. GRPO, Liu et al. 2025). NaN marks a completion that no reward function scored: it is left out of mean and std
    and gets 0. A group whose rewards are all equal gets exactly 0.
    """
    def nanstd(r):
        n = (~r.isnan()).sum(-1, keepdim=True)
        return ((r - r.nanmean(-1, keepdim=True)).square().nansum(-1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()

    r = rewards.view(-1, num_generations)                                                           # (B, G)
    advantages = r - r.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        advantages = advantages / ((nanstd(r) if scale_rewards == "group" else nanstd(rewards)) + 1e-4)
    return advantages.masked_fill(r.isnan() | zero_spread(r)[:, None], 0).flatten()                 # (N,)


# ---------------------------------------------------------------------------------------------------------------
# loss


def kl_estimate(logp, ref_logp, estimator):
    """Per-token estimates of KL(policy, reference) from tokens of the policy (Schulman 2020): k1, k2 or k3."""
    d = ref_logp - logp
    return -d if estimator == "k1" else d.square() / 2 if estimator == "k2" else torch.expm1(d) - d


def grpo_loss(logp, old_logp, ref_logp, advantages, mask, *, loss_type="dapo", importance_sampling_level="token", epsilon=0.2,
              epsilon_high=None, delta=None, sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, beta=0.0, kl_estimator="k3",
              use_bias_correction_kl=False, policy_mask=None, num_rows=None, num_tokens=None, max_completion_length=None,
              measure=True):
    """The loss of some rows, a scalar, and its metrics, a dict of scalars without gradient (measure=False: none). All are
    tensors, so that a GPU is not waited for.

    logp, old_logp, ref_logp (n, T): log-probs of the sampled tokens under the policy (with gradient), under the policy
    that sampled them, and under the reference (None at beta 0). advantages (n,). mask (n, T): True on tokens with loss.
    policy_mask (n, T): tokens that carry the policy gradient (None: all); the KL and the divisors keep `mask`.
    num_rows, num_tokens: of the whole optimiser step when these rows are one micro-batch of it, so that micro-batches
    add up to it. Only bnpo is defined on the micro-batch itself.
    With rho = exp(logp - old_logp), at `sequence` level (GSPO, Zheng et al. 2025) exp of the mean over the row:
      grpo, bnpo, dr_grpo, dapo   -min(min(rho, delta) A, clamp(rho, 1 - epsilon, 1 + epsilon_high) A)
      cispo                       -stop_gradient(min(rho, epsilon_high)) A logp
      sapo                        -4 / tau sigmoid(tau (rho - 1)) A, tau by the sign of A
    plus beta * KL, per token, then summed over the tokens and divided by
      grpo, sapo  tokens of the row, then rows      dr_grpo      rows * max_completion_length
      bnpo        tokens of these rows              dapo, cispo  tokens of the step
    Raises ValueError for a field that is missing or of the wrong shape.
    """
    needed = dict(old_logp=old_logp, mask=mask, advantages=advantages) | (dict(ref_logp=ref_logp) if beta else {}) | (
        {} if policy_mask is None else dict(policy_mask=policy_mask))
    for name, x in needed.items():
        shape = tuple(logp.shape[:1] if name == "advantages" else logp.shape)
        if x is None or tuple(x.shape) != shape:
            raise ValueError(f"{name}: {'missing' if x is None else tuple(x.shape)}, must be {shape} to go with logp")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("max_completion_length: missing, dr_grpo divides by it")
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    mask = mask.bool()
    logp, old_logp = logp.masked_fill(~mask, 0), old_logp.masked_fill(~mask, 0)
    row_tokens, all_tokens = mask.sum(1).clamp(min=1), mask.sum().clamp(min=1)                      # (n,), ()
    log_ratio = logp - old_logp                                                                     # (n, T)
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(1) / row_tokens)[:, None]                                        # (n, 1)
    ratio, A = log_ratio.exp(), advantages[:, None]

    if loss_type == "cispo":
        token_loss = -ratio.clamp(max=epsilon_high).detach() * A * logp
    elif loss_type == "sapo":
        tau = torch.full_like(A, sapo_temperature_neg).masked_fill(A > 0, sapo_temperature_pos)
        token_loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
    else:
        unclipped = ratio if delta is None else ratio.clamp(max=delta)
        token_loss = -torch.min(unclipped * A, ratio.clamp(1 - epsilon, 1 + epsilon_high) * A)
    token_loss = token_loss * (torch.ones_like(logp) if policy_mask is None else policy_mask)       # (n, T)

    num_rows = len(logp) if num_rows is None else num_rows
    num_tokens = all_tokens if num_tokens is None else max(num_tokens, 1)

    def reduce(x):
        x = x * mask
        if loss_type in ("grpo", "sapo"):
            return (x.sum(1) / row_tokens).sum() / num_rows
        if loss_type == "bnpo":
            return x.sum() / all_tokens * (len(x) / num_rows)
        return x.sum() / (num_rows * max_completion_length if loss_type == "dr_grpo" else num_tokens)

    policy_loss = loss = reduce(token_loss)
    if beta:
        kl = kl_estimate(logp, ref_logp.masked_fill(~mask, 0), kl_estimator)                        # (n, T)
        loss = policy_loss + beta * reduce(kl * ratio if use_bias_correction_kl else kl)
    if not measure:
        return loss, {}
    with torch.no_grad():
        rho = ratio.expand_as(mask)
        low, high = (rho < 1 - epsilon) & (A < 0) & mask, (rho > 1 + epsilon_high) & (A > 0) & mask
        metrics = {"tokens": mask.sum(), "ratio": (rho * mask).sum() / all_tokens}
        if loss_type == "cispo":
            metrics["cispo_clip_ratio"] = ((rho > epsilon_high) & (A > 0) & mask).sum() / all_tokens
        elif loss_type != "sapo":
            metrics |= {"clip_ratio/low_mean": low.sum() / all_tokens, "clip_ratio/low_min": (low.sum(1) / row_tokens).min(),
                        "clip_ratio/high_mean": high.sum() / all_tokens, "clip_ratio/high_max": (high.sum(1) / row_tokens).max(),
                        "clip_ratio/region_mean": (low | high).sum() / all_tokens}
        if beta:
            metrics["kl"] = (kl * mask).sum() / all_tokens
    return loss, metrics | {"loss": loss.detach(), "policy_loss": policy_loss.detach()}


def loss_of(policy, b, rows, s, dtype, num_rows=None, num_tokens=None, fresh=False, fused=False):
    """Loss and metrics of these rows of a Batch under the policy as it is now, log(policy / sampler) of their tokens (n, T), 0
    where masked, and the policy's log-probs (n, T) with gradient. fresh: the ratio is exactly 1, rounding left aside.
    fused: backward() is going to be called on the loss, or with `fresh` on the sum of the log-probs, and a large head may form
    its gradient at once."""
    rollout = b.rollout[rows]
    knobs = {k: getattr(s, k) for k in (
        "loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "sapo_temperature_neg",
        "sapo_temperature_pos", "kl_estimator", "use_bias_correction_kl", "max_completion_length")}
    in_loss = s.beta > 0 and s.kl_in == "loss"

    def loss_at(logp, measure=True):
        return grpo_loss(logp, logp.detach() if fresh else rollout.logp, b.ref_logp[rows] if in_loss else None,
                         b.advantages[rows], b.mask[rows], policy_mask=None if b.policy_mask is None else b.policy_mask[rows],
                         beta=s.beta if in_loss else 0.0, num_rows=num_rows, num_tokens=num_tokens, measure=measure, **knobs)

    def slope_of(logp):
        if fresh:  # what is called backward on is the sum of the log-probs
            return b.mask[rows].float()
        with torch.enable_grad():
            logp.requires_grad_()
            return torch.autograd.grad(loss_at(logp, measure=False)[0], logp)[0]

    with autocast(rollout.tokens.device, dtype):
        logp = completion_logprobs(policy, rollout, s.temperature, slope_of=slope_of if fused else None)   # (n, T)
    loss, metrics = loss_at(logp)
    return loss, metrics, logp.detach() - rollout.logp, logp


def own_share(lengths, s):
    """Which of some rows of these lengths (n,) are this process's: positions (m,), perhaps none. From short to long, so that
    micro-batches hold little padding; that changes nothing else, but for bnpo."""
    mine = torch.arange(len(lengths), device=lengths.device)[share(len(lengths))]
    return mine[lengths[mine].argsort(stable=True)] if s.sort_by_length else mine


def micro_batches(rows, s):
    """Rows (m,) -> pieces of micro_batch_size; none of no rows, which a process may have."""
    return rows.split(s.micro_batch_size) if len(rows) else ()


def sum_gradients(parameters):
    """The .grad of each parameter <- its sum over the processes. One without rows has none and takes part all the same."""
    if world()[1] > 1:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        reduce([p.grad for p in parameters])


# ---------------------------------------------------------------------------------------------------------------
# step


def update(policy, scored, optimizer, b, s, seed, dtype, line, check_ratio, held_out=None, recorder=None):
    """num_iterations passes of optimiser steps over a Batch -> metrics. `scored` is the policy, compiled or not.

    With s.tracin, the steps of the first pass are recorded, each step's gradient is that of the rows which help the target
    (of the Batch, or of the Batch `held_out`), and later passes use the same rows. recorder: the Tape to do it with.
    Ends the program before the weights are touched when loss or gradient is not finite, or when check_ratio is set and
    the trainer's log-probs are not those recorded while sampling.
    """
    N, device = b.mask.shape[0], b.mask.device
    rows = torch.arange(N, device=device)
    if s.zero_std_groups == "drop":
        equal = zero_spread(b.rewards.view(-1, s.num_generations)).repeat_interleave(s.num_generations)
        rows = rows[~equal.to(device)]
    parameters = [p for p in policy.parameters() if p.requires_grad]
    micros, steps, gap = [], [], torch.zeros(0, device=device)
    b.influence, b.weights = torch.full((N,), math.nan, device=device), torch.ones(N, device=device)
    length, prompt, traced = b.rollout.mask.sum(1), b.rollout.real[:, :-b.mask.shape[1]].sum(1), []
    for epoch in range(s.num_iterations):
        if 0 < s.mini_batch_size < N:
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(derive(seed, epoch))).to(device)]
        for mini in rows.split(s.mini_batch_size or N):
            num_rows, num_tokens = len(mini), int(b.mask[mini].sum())
            if epoch and traced:  # the rows selected in the first pass
                mini = mini[b.weights[mini] > 0]
                if s.tracin_normalizer == "kept":
                    num_rows, num_tokens = len(mini), int(b.mask[mini].sum())
            if num_tokens == 0 or len(mini) == 0:
                continue
            tape = (recorder or Tape(policy, reduce=reduce)) if s.tracin != "off" and epoch == 0 else None
            # the halves of a target apart, so that the sum of either reads its own rows only
            mine = own_share(length[mini] + b.mask.shape[1] * second_half(mini, s) if tape else length[mini], s)
            unit, coefficients, gaps = tape and one_backward(s, b) and not steps, [b.advantages[:0]], [b.rollout.logp[:0]]
            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
            fused = s.fused_head and s.importance_sampling_level == "token"
            with tape or contextlib.nullcontext():
                for micro in micro_batches(mini[mine], s):
                    if tape:
                        tape.rows(len(micro), b.rollout.mask[micro].nonzero()[:, 0])
                    loss, metrics, log_ratio, logp = loss_of(policy if tape else scored, b, micro, s, dtype, num_rows,
                                                             num_tokens, fresh=bool(unit), fused=fused)
                    if unit:  # record the gradient of each row's log-prob, of which its loss and the target are multiples
                        slope, = torch.autograd.grad(loss, logp, retain_graph=True)     # (n, T), the same along a row
                        coefficients.append(slope.sum(1) / b.mask[micro].sum(1).clamp(min=1))
                        (logp * b.mask[micro]).sum().backward()
                    else:
                        loss.backward()
                    loss_sum += metrics["loss"]
                    micros.append(metrics | {"real": (prompt + length)[micro].sum(),
                                             "positions": len(micro) * (prompt[micro].max() + length[micro].max())})
                    gaps.append(log_ratio)
                    line(len(micros) - 1, "4. Loss computed", pg_loss=metrics["policy_loss"],
                         kl=metrics["loss"] - metrics["policy_loss"], total=metrics["loss"])
            if not steps:  # the weights are still those that sampled
                gap = torch.cat([gap, gather(torch.cat(gaps)[b.rollout.mask[mini[mine]]])])
            if check_ratio and not steps and len(gap):
                off = float(gap.abs().max() if dtype == torch.float32 else gap.abs().mean())
                if off > (1e-3 if dtype == torch.float32 else 0.05):
                    raise SystemExit("stopped before the first step: the ratio is not 1, sampler and trainer disagree by "
                                     f"{off:.3g} nats on a token; something in the model is random or sees padding (or try "
                                     "dtype = 'float32')")
            if tape:
                tape.place(mine, len(mini))
                traced.append(keep_helpful(policy, tape, tape.spread(torch.cat(coefficients)) if unit else None, b, mini,
                                           held_out, optimizer, s, derive(seed, "select", len(steps)), dtype,
                                           check_ratio and not steps))
                if not b.weights[mini].any():
                    continue
            else:
                sum_gradients(parameters)
            grad_norm = torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm or math.inf)
            loss_sum, grad_norm = torch.stack([loss_sum, grad_norm]).tolist()
            loss_sum = sum(gather([loss_sum]))
            if not math.isfinite(loss_sum) or not math.isfinite(grad_norm):
                raise SystemExit(f"stopped: loss {loss_sum}, grad_norm {grad_norm}; this step was not taken, the last checkpoint "
                                 "stands. Lower learning_rate or raise beta, then --resume=True")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps.append((loss_sum, grad_norm))

    micros = gather(numbers(micros))
    tokens, n = max(1, sum(t["tokens"] for t in micros)), max(1, len(steps))
    m = {k: sum(t[k] * t["tokens"] for t in micros) / tokens for k in (micros[0] if micros else ())
         if k not in ("tokens", "loss", "policy_loss", "real", "positions")}
    m["padding"] = 1 - sum(t["real"] for t in micros) / sum(t["positions"] for t in micros) if micros else 0.0
    m |= {k: sum(t[k] for t in traced) / len(traced) for k in (traced[0] if traced else ())}
    if traced:
        m["tracin/empty_steps"] = sum(t["tracin/selected_ratio"] == 0 for t in traced)
        for k, extreme in (("invariant_error", max), ("min_ip", min), ("max_ip", max)):
            m[f"tracin/{k}"] = extreme(t[f"tracin/{k}"] for t in traced)
    for k, extreme in (("clip_ratio/low_min", min), ("clip_ratio/high_max", max)):
        if k in m:
            m[k] = extreme(t[k] for t in micros)
    if b.kl is not None:
        m["kl"] = b.kl
    gap = gap if len(gap) else torch.zeros(1)
    return m | {"loss": sum(x for x, _ in steps) / n, "policy_loss": sum(t["policy_loss"] for t in micros) / n,
                "grad_norm": sum(x for _, x in steps) / n, "num_steps": len(steps)} | numbers([{
                    "sampling/sampling_logp_difference/mean": gap.abs().mean(),
                    "sampling/sampling_logp_difference/max": gap.abs().max(),
                    "sampling/importance_sampling_ratio/min": gap.min().exp(),
                    "sampling/importance_sampling_ratio/mean": gap.exp().mean(),
                    "sampling/importance_sampling_ratio/max": gap.max().exp()}])[0]


def keep_helpful(policy, tape, coefficients, b, mini, held_out, optimizer, s, seed, dtype, check):
    """Score the recorded rows `mini` against the target, note influence and weight of each in the Batch and leave in .grad the
    gradient of those that are kept -> metrics. coefficients: what the loss of each row is a multiple of its record by; None: 1.
    check: hold the scores against the gradient of an ordinary backward, in which the tape had no part."""
    ones = torch.ones(len(mini), device=mini.device)
    unit, coefficients = coefficients is not None, ones if coefficients is None else coefficients
    halves, own, about = target_of(policy, tape, coefficients, b, mini, held_out, unit, s, dtype)
    truth = everything = None
    if s.tracin == "self" and held_out is None:
        everything = {p: g + halves[1][p] for p, g in halves[0].items()}
    if check:
        for micro in micro_batches(mini[tape.where], s):
            loss_of(policy, b, micro, s, dtype, len(mini), int(b.mask[mini].sum()))[0].backward()
        sum_gradients(tape.names)
        truth = {p: torch.zeros_like(p) if p.grad is None else p.grad for p in tape.names}
        policy.zero_grad(set_to_none=True)
    units = b.mask[mini].sum(1) if s.loss_type in ("dapo", "cispo", "bnpo") else ones
    b.weights[mini], b.influence[mini], gradient, found = filter_rows(tape, coefficients, halves, own, units, optimizer, s, seed,
                                                                      everything, truth)
    some = bool(b.weights[mini].any())
    for p, g in gradient.items():
        p.grad = g if some else None
    kept = sum(gather([g.numel() for g in tape.kept.values()]))
    return found | about | {"tracin/kept_gradients": kept / (len(mini) * sum(p.numel() for p in tape.names))}


def second_half(rows, s):
    """(n,) True for the rows of the later half of the prompts. Advantages of a group sum to 0, so that halves of a group would
    not be independent; where there is one prompt only, it is every other row all the same."""
    prompts = rows // s.num_generations
    distinct = prompts.unique()
    return prompts >= distinct[len(distinct) // 2] if len(distinct) > 1 else torch.arange(len(rows), device=rows.device) % 2 == 1


def one_backward(s, b):
    """True when the loss of a fresh row is a number times its log-prob (no KL in it, no token left out), and so is the target:
    one backward of the log-probs then serves both."""
    return s.tracin not in ("off", "self") and not (s.beta and s.kl_in == "loss") and b.policy_mask is None


def target_of(policy, tape, coefficients, b, mini, held_out, unit, s, dtype):
    """Gradient of the target in two halves, the multiple of each recorded row in it (see filter_rows), metrics of the target."""
    t, rows = (b, mini) if held_out is None else held_out
    rewards, every = t.rewards.to(mini.device), torch.arange(len(rows), device=mini.device)
    half = ~second_half(rows, s)
    rho = coefficients if s.tracin == "self" else target_coefficients(s.tracin, rewards[rows], t.advantages[rows])
    if held_out is None and (unit or s.tracin == "self"):
        halves, own = tape.gradients([rho * half, rho * ~half]), rho
    else:  # one more forward and backward
        halves, own = [], torch.full((len(mini),), math.nan if held_out is None else 0.0, device=mini.device)
        for part in (every[half], every[~half]):
            for j in micro_batches(part[own_share(t.rollout.mask[rows[part]].sum(1), s)], s):
                loss, _, _, logp = loss_of(policy, t, rows[j], s, dtype, len(rows), int(t.mask[rows].sum()))
                (loss if s.tracin == "self" else (rho[j] * (logp * t.mask[rows[j]]).sum(1)).sum()).backward()
            sum_gradients(tape.names)
            halves.append({p: torch.zeros_like(p) if p.grad is None else p.grad for p in tape.names})
            policy.zero_grad(set_to_none=True)
    weight = -t.advantages[rows] / len(rows) if s.tracin == "self" else rho
    loss = (weight * (t.rollout.logp * t.mask)[rows].sum(1)).sum()
    return halves, own, {
        "tracin/target_rows": len(rows), "tracin/target_loss": float(loss),
        "tracin/target_contrast": std(rewards[rows]) / max(std(rewards), 1e-12),
        "tracin/target_advantage_min": float(t.advantages[rows].min()),
        "tracin/target_advantage_max": float(t.advantages[rows].max())}


def learning_rate(it, s):
    """Rate of iteration it: linear warm-up, then constant, or to 0 at max_iters along a line or a cosine."""
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / s.warmup_iters
    done = (it - s.warmup_iters) / max(1, s.max_iters - s.warmup_iters)
    return s.learning_rate * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[s.lr_decay]


@torch.no_grad()
def sync(reference, policy, alpha):
    """reference <- (1 - alpha) reference + alpha policy, adapters included. Returns how many tensors differ afterwards."""
    for r, p in zip(reference.parameters(), policy.parameters(), strict=True):
        r.copy_(p) if alpha == 1 else r.lerp_(p, alpha)
    return sum(not torch.equal(r, p) for r, p in zip(reference.parameters(), policy.parameters()))


# ---------------------------------------------------------------------------------------------------------------
# what a run says about itself


def debug_step(policy, base, reference, optimizer, prompts, eval_prompts, reward_funcs, judges, s, tokenizer, device, dtype):
    """One GRPO step from fixed seeds, taken apart: every phase with its numbers, and the red flags found."""
    def phase(title):
        print(f"\n--- {title}")

    def measure():
        row, _ = evaluate(policy, base, eval_prompts, judges, reward_funcs, s, tokenizer, device, dtype)
        print("  " + ", ".join(f"{k} {v:.4f}" for k, v in row.items()))
        return row

    phase(f"1. evaluation before: {len(eval_prompts)} prompts x {s.num_eval_generations}")
    before = measure()
    b = collect(policy, reference, prompts, reward_funcs, s, tokenizer, derive(s.seed, "rollout", 0), dtype)
    G, T, cap = s.num_generations, b.mask.shape[1], s.max_grad_norm or math.inf
    phase(f"2. rollout: {len(prompts)} prompts x {G}; some completions, the log-prob behind each token")
    for i in (0, 1, G, G + 1) if len(prompts) > 1 else (0, 1):
        n = int(b.rollout.mask[i].sum())
        print(f"  {prompts[i // G][0]!r} -> " + " ".join(f"{tokenizer.decode([token])!r} {logp:.2f}" for token, logp in zip(
            b.rollout.tokens[i, -T:][:n].tolist(), b.rollout.logp[i, :n].tolist())))
    phase(f"3. rewards, by group; advantage = reward - mean, scale_rewards = {s.scale_rewards}")
    for i, (r, A) in enumerate(zip(b.rewards.view(-1, G), b.advantages.view(-1, G))):
        print(f"  group {i}: mean {r.nanmean():.4f}, std {std(r):.4f}, rewards "
              + " ".join(f"{x:.3f}" for x in r.tolist()) + ", advantages " + " ".join(f"{x:.3f}" for x in A.tolist()))
    phase("4. loss, of all rows at once (mini_batch_size, num_iterations and zero_std_groups are left aside here)")
    policy_loss, kl_loss, ratios = 0.0, 0.0, []
    for rows in torch.arange(len(b.mask), device=device).split(s.micro_batch_size):
        loss, metrics, log_ratio, _ = loss_of(policy, b, rows, s, dtype, len(b.mask), int(b.mask.sum()))
        loss.backward()
        metrics, = numbers([metrics])
        policy_loss, kl_loss = policy_loss + metrics["policy_loss"], kl_loss + metrics["loss"] - metrics["policy_loss"]
        ratios.append(log_ratio[b.rollout.mask[rows]].exp())
    ratios = torch.cat(ratios)
    print(f"  policy gradient {policy_loss:.6f} + beta * KL {kl_loss:.6f} = loss {policy_loss + kl_loss:.6f}; the KL is "
          f"{100 * abs(kl_loss) / (abs(kl_loss) + abs(policy_loss) + 1e-12):.1f} % of the two "
          "(at ratio 1 the policy part is near 0; its gradient is not)")
    print(f"  ratio: min {ratios.min():.6f}, mean {ratios.mean():.6f}, max {ratios.max():.6f} (1: these weights sampled)")
    phase("5. gradient norms before clipping, and the step")
    for name, p in policy.named_parameters():
        if p.requires_grad:
            print(f"  {name:28} {p.grad.norm():.3e}")
    grad_norm = float(torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], cap))
    old = [p.detach().clone() for p in policy.parameters()]
    optimizer.step()
    with torch.no_grad():
        after, = numbers([loss_of(policy, b, slice(0, s.micro_batch_size), s, dtype)[1]])
    moved = sum(not torch.equal(p, q) for p, q in zip(policy.parameters(), old))
    print(f"  all {grad_norm:.3e}, clipped to {min(grad_norm, cap):.3e}; at learning rate {s.learning_rate:g} {moved} of "
          f"{len(old)} tensors changed; mean ratio is now {after['ratio']:.6f}")
    phase("6. evaluation after")
    row = measure()
    print("  change: " + ", ".join(f"{k} {row[k] - before[k]:+.4f}" for k in row))
    phase("7. red flags")
    m = describe_batch(b, s) | {"grad_norm": grad_norm, "kl": after.get("kl", b.kl or 0.0),
                                "sampling/sampling_logp_difference/mean": float(ratios.log().abs().mean())}
    print("\n".join("  " + text for text in list(diagnose(m, s).values()) or ["none"]))


# ---------------------------------------------------------------------------------------------------------------
# the run


def main(argv):
    s, (rank, processes) = load_settings(argv), world()
    device = pick_device(s.device)
    try_compile(s, device)
    dtype, base = pick_dtype(s.dtype, device), load_policy(s)
    for path, label in ((s.judge, s.judge_label), (s.eval_judge, s.eval_judge_label)):
        if path not in (None, "train"):
            load_judge(path, label=label)
    tokenizer, splits = get_tokenizer(s), get_splits(s)
    prompts, eval_prompts, val_prompts = load_prompts(s, tokenizer, splits)
    if s.tracin_val_prompts and s.tracin != "off" and not val_prompts:
        raise BadInput(f"tracin_val_prompts = {s.tracin_val_prompts}: no held-out prompts are left beside num_eval_prompts = "
                       f"{s.num_eval_prompts}")
    texts = [text for text, _ in eval_prompts[:8]]  # rewards of the config file are tried out before anything is trained
    if s.functions:
        score({name: s.functions[name] for name in s.reward_funcs if name != "judge"}, texts, texts)
    wandb = None
    if s.wandb_project and rank == 0:
        try:
            import wandb
        except ImportError as e:
            raise BadInput(f"wandb_project = {s.wandb_project!r}: pip install wandb, or leave it None") from e
    if not s.debug_step:
        s.out_dir = out_dir = gather([claim_out_dir(s) if rank == 0 else None])[0]
    print("settings: " + ", ".join(f"{k}={v!r}" for k, v in public(s).items() if v != getattr(Settings(), k)))
    with interrupts() as stop:
        with one_by_one():
            base = (base or get_policy(s, splits, device, stop)).to(device).eval().requires_grad_(False)
            judges = get_judges(s, splits, device, stop)
        if any(gather([stop()])):
            raise KeyboardInterrupt("policy and judges are saved; the same command goes on from there")
        reward_funcs = reward_functions(s, judges, device, dtype)
        policy = copy.deepcopy(base, {id(p): p for p in base.parameters()} if s.lora_rank else {}).requires_grad_(True)
        if s.lora_rank:
            torch.manual_seed(derive(s.seed, "lora"))
            add_lora(policy, s.lora_rank, s.lora_alpha, s.lora_layers)
        trained = [name for name, p in policy.named_parameters() if p.requires_grad]
        for part in s.tracin_layers:
            if not any(part in name for name in trained):
                raise BadInput(f"tracin_layers: {part!r} is in the name of no trained parameter; there are "
                               f"{', '.join(trained[:3])}, ...")
        # `base` stays as it is for the evaluation's perplexity; it is the reference too, unless that one follows the policy
        reference = copy.deepcopy(policy).requires_grad_(False) if s.sync_ref_model else base
        policy.recompute = s.activation_checkpointing
        decoder, (scored, scored_reference) = make_decoder(policy, s, dtype), compile_parts(policy, reference, judges, s)
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=s.learning_rate, fused=True,
                                      betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay)
        common = dict(s=s, tokenizer=tokenizer, device=device, dtype=dtype)
        if s.debug_step:
            debug_step(policy, base, reference, optimizer, pick(prompts, 0, s), eval_prompts, reward_funcs, judges, **common)
            return
        recorder = Tape(policy, s.tracin_memory * 2 ** 30, reduce=reduce) if s.tracin != "off" else None
        if recorder:
            num_weights, longest = sum(p.numel() for p in recorder.names), max(len(ids) for _, ids in prompts)
            print(describe_cost(replace(s, tracin_memory=s.tracin_memory * processes), num_weights, recorder.fewest))
            rows = -(-(s.mini_batch_size or s.num_prompts * s.num_generations) // processes)
            kept, free = min(s.tracin_memory, rows * num_weights * 4 / 2 ** 30), free_memory(device) / 2 ** 30
            if device.type == "cpu":  # which the processes of a machine share
                kept *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            if kept > free and longest + s.max_completion_length > recorder.fewest:  # the last token is no input
                raise BadInput(f"tracin_memory = {s.tracin_memory:g}: {kept:.1f} GB of rollouts' gradients are to be kept, and "
                               f"{free:.1f} GB are free; lower it")
        base_hash = hash_of(base)
        start, num_tokens = begin_run(out_dir, policy, reference, optimizer, s, base_hash)
        if processes > 1 and len(set(gather([(base_hash, start, hash_of(policy))]))) > 1:
            raise BadInput(f"the processes begin with different weights: out_dir = {out_dir!r} and cache_dir = {s.cache_dir!r} "
                           "must be the same folders on all machines")
        write_config(out_dir, s, device)
        if wandb:
            wandb.init(project=s.wandb_project, name=os.path.basename(out_dir), config=public(s))

        def evaluation(iteration):
            row, first = evaluate(policy, base, eval_prompts, judges, reward_funcs, **common)
            print(f"eval {iteration}: " + ", ".join(f"{k} {v:.4f}" for k, v in row.items()), flush=True)
            samples = [dict(prompt=p, completion=c) for (p, _), c in list(zip(eval_prompts, first))[:s.num_shown]]
            append(out_dir, "eval.jsonl", [dict(iteration=iteration, **row, samples=samples)])
            if wandb:
                wandb.log({f"eval/{k}": v for k, v in row.items()}, step=iteration)

        def save(iteration):
            save_run(out_dir, iteration, policy, reference, optimizer, s, base_hash, num_tokens)

        if s.beta and (s.kl_in == "reward") != (s.kl_estimator == "k1") and not s.use_bias_correction_kl:
            print(f"note: kl_estimator = {s.kl_estimator!r} has almost no gradient with kl_in = {s.kl_in!r}; use "
                  + ("k1" if s.kl_in == "reward" else "k2 or k3"))
        if start is None:
            start = 0
            evaluation(0)
            save(0)
        began, warned = time.time(), {}
        for it in range(start, s.max_iters):
            line = Lines(device, s.log_micro)
            line(0, "1. Iteration start")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(it, s)
            asked = pick(prompts, it, s)
            batch = collect(policy, scored_reference, asked, reward_funcs, s, tokenizer, derive(s.seed, "rollout", it), dtype,
                            line, decoder)
            held_out = None
            if s.tracin_val_prompts and s.tracin != "off":
                asked_too = pick(val_prompts, it, replace(s, num_prompts=s.tracin_val_prompts))
                t = collect(policy, scored_reference, asked_too, reward_funcs, s, tokenizer, derive(s.seed, "target", it), dtype,
                            decoder=decoder)
                held_out = t, choose_targets(t.rewards, s.tracin_val_size, s.tracin_val_select,
                                             torch.Generator().manual_seed(derive(s.seed, "chosen", it))).to(device)
            m = update(policy, scored, optimizer, batch, s, derive(s.seed, "rows", it), dtype, line, it == start, held_out,
                       recorder)
            line(None, "5. Optimizer step finished")
            if s.sync_ref_model and (it + 1) % s.ref_model_sync_steps == 0:
                m["ref_tensors_differing"] = sync(reference, policy, s.ref_model_mixup_alpha)
                print(f"reference synced: {m['ref_tensors_differing']} tensors differ from the policy's (0 right after a copy)")
            seconds = time.time() - line.start
            prompt_width = batch.rollout.tokens.shape[1] - batch.mask.shape[1]
            num_tokens += int(batch.rollout.real[:, :prompt_width].sum() + batch.rollout.mask.sum())
            m = {"iteration": it + 1, **m, **describe_batch(batch, s), "learning_rate": learning_rate(it, s),
                 "num_tokens": num_tokens, "epoch": (it + 1) * s.num_prompts / len(prompts), "step_time": seconds}
            left = (time.time() - began) / (it + 1 - start) * (s.max_iters - it - 1)
            report(m, replace(s, dtype=str(dtype).removeprefix("torch.")), batch, left, warned)
            append(out_dir, "metrics.jsonl", [m])
            append(out_dir, "samples.jsonl", [
                dict(iteration=it + 1, prompt=asked[i // s.num_generations][0], completion=text, reward=r, advantage=A)
                | ({} if s.tracin == "off" else dict(influence=float(batch.influence[i]), weight=float(batch.weights[i])))
                for i, (text, r, A) in enumerate(zip(batch.completions, batch.rewards.tolist(), batch.advantages.tolist()))])
            if wandb:
                wandb.log(m, step=it + 1)
            if it + 1 == s.max_iters or (s.eval_interval and (it + 1) % s.eval_interval == 0):
                evaluation(it + 1)
            stopped = any(gather([stop()]))
            if it + 1 == s.max_iters or (it + 1) % s.save_interval == 0 or stopped:
                save(it + 1)
            if stopped and it + 1 < s.max_iters:
                raise KeyboardInterrupt(f"saved after iteration {it + 1}; go on with: "
                                        f"python grpo.py {out_dir}/config.json --resume=True")
        if rank == 0:
            print_table(read_rows(os.path.join(out_dir, "eval.jsonl")))
        print(f"\n{out_dir}: metrics.jsonl, samples.jsonl, eval.jsonl, config.json, ckpt.pt")


if __name__ == "__main__":
    run_script(main)
