"""
GRPO (Shao et al. 2024, DeepSeekMath) in one file, from the top: advantages, loss, rewards, evaluation, the loop.

    python grpo.py config/toxicity.py

N = num_prompts * num_generations rows are sampled in an iteration; T is the width of the completions.
The arithmetic is TRL's. Where this file departs from it on purpose:
  - old log-probs are always those recorded while sampling, and top-k / top-p / min-p are renormalised in all log-probs;
  - entropies (for top_entropy_quantile and the log) are those of the sampling distribution, so that micro-batches agree;
  - with mini-batches, dapo and cispo divide by the tokens of the mini-batch, not of all of them, so the step keeps its size;
  - a group whose rewards are all equal gets advantages of exactly 0.
Left out: a critic, tools, several turns, other processes.
"""
import copy
import hashlib
import json
import math
import os
import platform
import random
import subprocess
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from config import Settings, load_settings
from judge.comments import load_comments, read_rows, split_comments, split_of
from judge.scorer import as_reward
from judge.train import get_judges
from model import (BadInput, Rollout, add_lora, autocast, completion_logprobs, generate, interrupts, load_file, load_tokenizer,
                   pick_device, run_script, save_file)
from pretrain import get_policy

# ---------------------------------------------------------------------------------------------------------------
# advantages and loss


def group_advantages(rewards, num_generations, scale_rewards="group"):
    """rewards (N,), groups of num_generations in a row -> advantages (N,) = (r - mean of the group) / (std + 1e-4).

    The std (n - 1 in the denominator) is that of the group, of the whole `batch`, or with `none` there is no division
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


def zero_spread(groups):
    """groups (B, G) of rewards -> (B,) True where all rewards that are not NaN are the same number."""
    return groups.nan_to_num(math.inf).amin(1) >= groups.nan_to_num(-math.inf).amax(1)


def kl_estimate(logp, ref_logp, estimator):
    """Per-token estimates of KL(policy, reference) from tokens of the policy (Schulman 2020): k1, k2 or k3."""
    d = ref_logp - logp
    return -d if estimator == "k1" else d.square() / 2 if estimator == "k2" else torch.expm1(d) - d


def grpo_loss(logp, old_logp, ref_logp, advantages, mask, *, loss_type="dapo", importance_sampling_level="token", epsilon=0.2,
              epsilon_high=None, delta=None, sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, beta=0.0, kl_estimator="k3",
              use_bias_correction_kl=False, policy_mask=None, num_rows=None, num_tokens=None, max_completion_length=None):
    """The loss of some rows and its metrics.

    logp, old_logp, ref_logp (n, T): log-probs of the sampled tokens under the policy (with gradient), under the policy
    that sampled them, and under the reference (None at beta 0). advantages (n,). mask (n, T): True on sampled tokens.
    policy_mask (n, T): tokens that carry the policy gradient (None: all); the KL and the divisors keep `mask`.
    num_rows, num_tokens: of the whole optimiser step, when these rows are one micro-batch of it, so that micro-batches
    add up. Only bnpo is defined on the micro-batch itself.
    With rho = exp(logp - old_logp), at `sequence` level (GSPO, Zheng et al. 2025) the exponential of the row's mean:
      grpo, bnpo, dr_grpo, dapo   -min(min(rho, delta) A, clamp(rho, 1 - epsilon, 1 + epsilon_high) A)
      cispo                       -stop_gradient(min(rho, epsilon_high)) A logp
      sapo                        -4 / tau sigmoid(tau (rho - 1)) A, tau by the sign of A
    plus beta * KL per token, summed over tokens and divided by
      grpo, sapo  tokens of the row, then rows      dr_grpo      rows * max_completion_length
      bnpo        tokens of these rows              dapo, cispo  tokens of the step
    Raises ValueError when a field is missing or of the wrong shape.
    """
    fields = dict(old_logp=old_logp, mask=mask, **({"ref_logp": ref_logp} if beta else {}), **({} if policy_mask is None else {"policy_mask": policy_mask}))
    for name, x in fields.items():
        if x is None or x.shape != logp.shape:
            raise ValueError(f"{name}: {'missing' if x is None else tuple(x.shape)}, must be {tuple(logp.shape)} like logp")
    if advantages.shape != logp.shape[:1]:
        raise ValueError(f"advantages: {tuple(advantages.shape)}, must be {tuple(logp.shape[:1])}: one per row of logp")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("loss_type dr_grpo needs max_completion_length")
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    mask = mask.bool()
    logp = logp.masked_fill(~mask, 0)
    log_ratio = logp - old_logp.masked_fill(~mask, 0)                                               # (n, T)
    if importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)         # (n, 1)
    ratio, A = log_ratio.exp(), advantages[:, None]

    if loss_type == "cispo":
        token_loss = -ratio.clamp(max=epsilon_high).detach() * A * logp
    elif loss_type == "sapo":
        tau = torch.where(A > 0, sapo_temperature_pos, sapo_temperature_neg)
        token_loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
    else:
        free = ratio if delta is None else ratio.clamp(max=delta)
        token_loss = -torch.min(free * A, ratio.clamp(1 - epsilon, 1 + epsilon_high) * A)
    token_loss = token_loss.expand_as(mask) if policy_mask is None else token_loss * policy_mask    # (n, T)

    num_rows = len(logp) if num_rows is None else num_rows
    num_tokens = mask.sum() if num_tokens is None else num_tokens

    def reduce(x):
        x = x * mask
        if loss_type in ("grpo", "sapo"):
            return (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / num_rows
        if loss_type == "bnpo":
            return x.sum() / mask.sum().clamp(min=1) * (len(x) / num_rows)
        return x.sum() / (num_rows * max_completion_length if loss_type == "dr_grpo" else max(int(num_tokens), 1))

    policy_loss = loss = reduce(token_loss)
    with torch.no_grad():
        rho = ratio.expand_as(mask)
        low, high = (rho < 1 - epsilon) & (A < 0) & mask, (rho > 1 + epsilon_high) & (A > 0) & mask
        tokens, per_row = mask.sum().clamp(min=1), mask.sum(1).clamp(min=1)
        metrics = {"tokens": int(mask.sum()), "policy_loss": float(policy_loss), "ratio": float(rho[mask].mean()) if mask.any() else 1.0}
        if loss_type == "cispo":
            metrics["cispo_clip_ratio"] = float(((rho > epsilon_high) & (A > 0) & mask).sum() / tokens)
        elif loss_type != "sapo":
            metrics |= {"clip_ratio/low_mean": float(low.sum() / tokens), "clip_ratio/low_min": float((low.sum(1) / per_row).min()),
                        "clip_ratio/high_mean": float(high.sum() / tokens), "clip_ratio/high_max": float((high.sum(1) / per_row).max()),
                        "clip_ratio/region_mean": float((low | high).sum() / tokens)}
    if beta:
        kl = kl_estimate(logp, ref_logp.masked_fill(~mask, 0), kl_estimator)                        # (n, T)
        metrics["kl"] = float((kl.detach() * mask).sum() / tokens)
        loss = policy_loss + beta * reduce(kl * ratio if use_bias_correction_kl else kl)
    return loss, metrics


# ---------------------------------------------------------------------------------------------------------------
# prompts and rewards


def load_prompts(s, tokenizer, splits):
    """(training prompts, evaluation prompts), lists of (text, ids), at most num_eval_prompts of the latter.

    From the files that the settings name, every line checked. Without a file: the first words of held-out comments.
    A single file gives both: every fifth prompt, by a hash of its text, is for the evaluation alone.
    """
    limit = s.block_size - s.max_completion_length
    if limit < 1:
        raise BadInput(f"max_completion_length = {s.max_completion_length}: leaves no room for a prompt in block_size = {s.block_size}")

    def starts(comments):
        for text, _ in comments:
            words = text.split(" ")
            count = random.Random(text).randint(*s.prompt_words)
            ids = tokenizer.encode_ordinary(" ".join(words[:count]))
            if 1 <= len(ids) <= limit and len(words) > count:  # it fits, and there was something to go on with
                yield " ".join(words[:count]), ids

    def from_file(path):
        if path.endswith(".txt"):
            try:
                texts = open(path, encoding="utf-8").read().splitlines()
            except (OSError, ValueError) as e:
                raise BadInput(f"{path}: cannot be read ({e})") from e
        else:
            texts = [str(row.get(s.text_field) or "") for row in read_rows(path)]
        prompts = [(text, tokenizer.encode_ordinary(text)) for text in texts]
        for number, (text, ids) in enumerate(prompts, 1):
            if not 1 <= len(ids) <= limit:
                raise BadInput(f"{path}: prompt {number} has {len(ids)} tokens: must be 1 to {limit} (block_size {s.block_size} less "
                               f"max_completion_length {s.max_completion_length})")
        if not prompts:
            raise BadInput(f"{path}: holds no prompts")
        return prompts

    train = from_file(s.prompts) if s.prompts else list(starts(splits["train_prompts"]))
    if s.eval_prompts or not s.prompts:
        held_out = from_file(s.eval_prompts) if s.eval_prompts else list(starts(splits["eval_prompts"]))
    else:
        held_out = [p for p in train if derive(p[0]) % 5 == 0]
        train = [p for p in train if derive(p[0]) % 5]
    for name, found in (("training", train), ("evaluation", held_out)):
        if not found:
            raise BadInput(f"prompts = {s.prompts!r}, eval_prompts = {s.eval_prompts!r}: no {name} prompts; give a longer file or one for each")
    return train, held_out[:s.num_eval_prompts]


def pick(prompts, it, s):
    """The num_prompts prompts of iteration it: each of them once in random order, then again in another."""
    n, orders, picked = len(prompts), {}, []
    for j in range(it * s.num_prompts, (it + 1) * s.num_prompts):
        if j // n not in orders:
            orders[j // n] = torch.randperm(n, generator=torch.Generator().manual_seed(derive(s.seed, "prompts", j // n))).tolist()
        picked.append(prompts[orders[j // n][j % n]])
    return picked


def score(reward_funcs, prompts, completions):
    """Every reward function on every completion -> (N, K); NaN where a function returned None: it abstains.

    A function takes the lists (prompts, completions) of texts and returns one finite number per completion, higher is
    better. BadInput names the function that does not.
    """
    columns = []
    for name, function in reward_funcs.items():
        values = function(prompts, completions)
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        if len(values) != len(completions):
            raise BadInput(f"reward {name!r} returned {len(values)} numbers for {len(completions)} completions")
        for value, completion in zip(values, completions):
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise BadInput(f"reward {name!r} returned {value!r} for the completion {completion!r}: must be a finite number or None")
        columns.append([math.nan if v is None else float(v) for v in values])
    return torch.tensor(columns).T                                                                  # (N, K)


def total_reward(scores, weights):
    """scores (N, K) -> weighted sum (N,) over the functions that did not abstain; NaN where all did."""
    return (scores * torch.tensor(weights)).nansum(1).masked_fill(scores.isnan().all(1), math.nan)


# ---------------------------------------------------------------------------------------------------------------
# evaluation


@torch.no_grad()
def evaluate(policy, base, prompts, judges, reward_funcs, s, tokenizer, device, dtype):
    """Sample num_eval_generations completions of each prompt, always with the same noise, and measure them.

    For each judge: mean toxicity, share of completions at or above 0.5, and over the completions of one prompt the
    expected maximum and the share of prompts with at least one toxic completion (Gehman et al. 2020). Then perplexity
    under the frozen starting policy, distinct-n (different n-grams of words over all, per prompt; Li et al. 2016), mean
    length in tokens, share that ended by themselves. Returns (measures, first completion of each prompt).
    """
    k = s.num_eval_generations
    with autocast(device, dtype):
        rollout = generate(policy, [ids for _, ids in prompts], k, s.max_completion_length, eos=tokenizer.eot_token,
                           seed=derive(s.seed, "eval"), batch_size=256 // k * k or k)
        nll = -sum(float(completion_logprobs(base, rollout[i:i + 256]).double().sum()) for i in range(0, len(rollout.ended), 256))
    texts = [tokenizer.decode(ids) for ids in rollout.completions()]
    asked, row = [text for text, _ in prompts for _ in range(k)], {}
    for name, function in reward_funcs.items():
        row[f"rewards/{name}"] = float(score({name: function}, asked, texts).nanmean())
    for name, judge in judges.items():
        toxicity = torch.sigmoid(judge(asked, texts)).view(-1, k)
        row |= {f"{name}/toxicity": float(toxicity.mean()), f"{name}/toxic_share": float((toxicity >= 0.5).float().mean()),
                f"{name}/expected_max": float(toxicity.amax(1).mean()),
                f"{name}/any_toxic": float((toxicity.amax(1) >= 0.5).float().mean())}
    row["perplexity"] = math.exp(nll / int(rollout.mask.sum()))
    for n in (1, 2):
        grams = [[tuple(w[j:j + n]) for w in map(str.split, texts[i:i + k]) for j in range(len(w) - n + 1)] for i in range(0, len(texts), k)]
        row[f"distinct_{n}"] = sum(len(set(g)) / max(len(g), 1) for g in grams) / len(grams)
    row |= {"mean_length": float(rollout.mask.sum(1).float().mean()), "ended": float(rollout.ended.float().mean())}
    return row, texts[::k]


def print_table(rows):
    """The measures of the first and the last evaluation, side by side."""
    before, after = rows[0], rows[-1]
    print(f"\n{'':24}{'before':>10}{'after':>10}{'after/before':>14}     (iterations {before['iteration']} and {after['iteration']})")
    for name in (k for k in before if isinstance(before[k], float)):
        ratio = f"{after[name] / before[name]:.2f}" if before[name] else "-"
        print(f"{name:24}{before[name]:10.4f}{after[name]:10.4f}{ratio:>14}")
    print("\njudge gave the reward; eval_judge never touched training. What the same prompts and noise gave:")
    for old, new in zip(before["samples"], after["samples"]):
        print(f"  {old['prompt']!r}\n    before: {old['completion']!r}\n    after:  {new['completion']!r}")


# ---------------------------------------------------------------------------------------------------------------
# what a run says about itself


def diagnose(m, s):
    """One line, with what to do, for each trouble that the metrics m of an iteration show."""
    out, kl, ratio = [], m.get("kl", 0.0), m["sampling/importance_sampling_ratio/mean"]
    if m["reward_min"] == m["reward_max"]:
        out.append(f"all rewards of the batch are {m['reward_min']:.4g}: nothing to learn from; read samples.jsonl, check the judge or the reward")
    elif m["advantage_max"] == 0:
        out.append(f"all advantages are zero (rewards {m['reward_min']:.4g} to {m['reward_max']:.4g}, equal within each group): "
                   "raise temperature or num_generations")
    for name in s.reward_funcs:
        if m[f"rewards/{name}/std"] == 0 and len(s.reward_funcs) > 1:
            out.append(f"reward {name!r} gave every completion the same score: it teaches nothing; check it")
    if m["num_completion_tokens"] == 0:
        out.append("no completion tokens carry loss, so there was no step: raise max_completion_length or unset mask_truncated_completions")
    if m["logp_max"] == 0:
        out.append("all log-probs are zero: the policy is certain of every token; raise temperature or beta, or go back to an earlier checkpoint")
    if abs(ratio - 1) > 0.02:
        out.append(f"ratio {ratio:.4f} on the first pass, should be 1: sampler and trainer disagree; try dtype = 'float32'")
    if kl < -1e-3 and m["num_completion_tokens"] >= 4096:
        out.append(f"KL {kl:.4f} is negative over {m['num_completion_tokens']} tokens: the log-probs are not those of the sampling distribution")
    if kl > 5:
        out.append(f"KL {kl:.1f} nats per token is exploding: lower learning_rate or raise beta")
    if m["frac_identical_groups"] > 0:
        out.append(f"{100 * m['frac_identical_groups']:.0f} % of the groups hold {s.num_generations} identical completions: "
                   "exploration collapsed; raise temperature or beta")
    if m["completions/clipped_ratio"] == 1:
        out.append(f"every completion was cut at {s.max_completion_length} tokens, so length is not learned: raise max_completion_length")
    if m["grad_norm"] == 0:
        out.append("grad_norm is 0: no gradient in this step; see rewards and advantages above")
    return out


class Lines:
    """The numbered lines of an iteration: time since the line before, memory now. Waits for the device only to print."""

    def __init__(self, device, on):
        self.device, self.on = device, on
        self.start = self.last = time.time()

    def __call__(self, micro, text, **values):
        if self.on:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.time()
            print(f"{f'[Micro {micro}] ' if micro is not None else ''}{text}: mem={memory(self.device) / 2 ** 20:.0f} MB, "
                  f"time={(now - self.start) if micro is None else now - self.last:.3f}s" + "".join(f", {k}={v}" for k, v in values.items())
                  + (" total" if micro is None else ""))
            self.last = now


def memory(device):
    """Bytes in use: by torch on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def derive(*what):
    """A seed for one purpose: every random draw depends on the settings and the iteration alone, never on what came before."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "big")


# ---------------------------------------------------------------------------------------------------------------
# the algorithm


@dataclass
class Batch:
    """What the rows of an iteration need for the loss."""
    rollout: Rollout
    completions: list             # N texts
    scores: torch.Tensor          # (N, K) of each reward function
    rewards: torch.Tensor         # (N,) their weighted sum, less the KL when kl_in = "reward"
    advantages: torch.Tensor      # (N,)
    mask: torch.Tensor            # (N, T) tokens that carry loss
    policy_mask: torch.Tensor     # (N, T) tokens that carry the policy gradient, or None for all of `mask`
    ref_logp: torch.Tensor        # (N, T), None at beta 0
    kl: float                     # sampled KL to the reference per token when kl_in = "reward", else None


@torch.no_grad()
def collect(policy, reference, prompts, reward_funcs, s, tokenizer, seed, dtype, line=lambda *a, **k: None):
    """Rollout, score, advantage: everything of an iteration that needs no gradient. prompts: [(text, ids)] -> Batch"""
    device = policy.wte.weight.device
    with autocast(device, dtype):
        rollout = generate(policy, [ids for _, ids in prompts], s.num_generations, s.max_completion_length, eos=tokenizer.eot_token,
                           seed=seed, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, batch_size=s.generation_batch_size)
    N = len(rollout.ended)
    line(0, f"2. Samples generated ({N} rows for all micro-batches)" if N > s.micro_batch_size else "2. Samples generated")
    completions = [tokenizer.decode(ids) for ids in rollout.completions()]
    scores = score(reward_funcs, [text for text, _ in prompts for _ in range(s.num_generations)], completions)
    rewards = total_reward(scores, s.reward_weights)
    ref_logp = kl = None
    if s.beta:
        with autocast(device, dtype):
            ref_logp = torch.cat([completion_logprobs(reference, rollout[i:i + s.micro_batch_size], s.temperature)
                                  for i in range(0, N, s.micro_batch_size)])
        if s.kl_in == "reward":
            per_token = kl_estimate(rollout.logp, ref_logp, s.kl_estimator) * rollout.mask
            rewards, kl = rewards - s.beta * per_token.sum(1).cpu(), float(per_token.sum() / rollout.mask.sum())
    advantages = group_advantages(rewards, s.num_generations, s.scale_rewards).to(device)
    mask = rollout.mask & rollout.ended[:, None] if s.mask_truncated_completions else rollout.mask
    policy_mask = None
    if s.top_entropy_quantile < 1 and mask.any():
        policy_mask = rollout.entropy >= rollout.entropy[mask].quantile(1 - s.top_entropy_quantile)
    line(0, "3. Samples scored", rewards=f"{rewards.nanmean():.4f}±{rewards[~rewards.isnan()].std():.4f}")
    return Batch(rollout, completions, scores, rewards, advantages, mask, policy_mask, ref_logp, kl)


def loss_of(policy, b, rows, s, dtype, num_rows=None, num_tokens=None):
    """The loss of these rows of a Batch under the policy as it is now, its metrics, and the log-probs (n, T)."""
    rollout = b.rollout[rows]
    with autocast(rollout.tokens.device, dtype):
        logp = completion_logprobs(policy, rollout, s.temperature)
    knobs = {k: getattr(s, k) for k in ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "sapo_temperature_neg",
                                        "sapo_temperature_pos", "kl_estimator", "use_bias_correction_kl", "max_completion_length")}
    in_loss = s.beta and s.kl_in == "loss"
    loss, metrics = grpo_loss(logp, rollout.logp, b.ref_logp[rows] if in_loss else None, b.advantages[rows], b.mask[rows],
                              policy_mask=None if b.policy_mask is None else b.policy_mask[rows], beta=s.beta if in_loss else 0.0,
                              num_rows=num_rows, num_tokens=num_tokens, **knobs)
    return loss, metrics, logp


def update(policy, scored, optimizer, b, s, seed, dtype, line, check_ratio):
    """num_iterations passes of optimiser steps over a Batch -> metrics. `scored` is the policy, compiled or not.

    Stops the program before the weights are touched when loss or gradient is not finite, or when check_ratio is set
    and the trainer's log-probs are not those recorded while sampling.
    """
    device, N = b.mask.device, len(b.mask)
    rows = torch.arange(N, device=device)
    if s.zero_std_groups == "drop":
        rows = rows[~zero_spread(b.rewards.view(-1, s.num_generations)).repeat_interleave(s.num_generations).to(device)]
    parameters = [p for p in policy.parameters() if p.requires_grad]
    totals, steps, gap = [], [], None
    for epoch in range(s.num_iterations):
        generator = torch.Generator().manual_seed(derive(seed, "rows", epoch))
        order = rows[torch.randperm(len(rows), generator=generator).to(device)] if 0 < s.mini_batch_size < N else rows
        for mini in order.split(s.mini_batch_size or N) if len(order) else ():
            num_tokens, loss_sum = int(b.mask[mini].sum()), 0.0
            if num_tokens == 0:
                continue
            for micro in mini.split(s.micro_batch_size):
                loss, metrics, logp = loss_of(scored, b, micro, s, dtype, len(mini), num_tokens)
                loss.backward()
                totals.append(metrics)
                loss_sum += float(loss)
                if not steps:  # the weights are still those that sampled
                    gap = torch.cat([gap, (logp.detach() - b.rollout.logp[micro])[b.rollout.mask[micro]]]) if gap is not None else \
                        (logp.detach() - b.rollout.logp[micro])[b.rollout.mask[micro]]
                line(len(totals) - 1, "4. Loss computed", pg_loss=f"{metrics['policy_loss']:.6f}", kl=f"{metrics.get('kl', b.kl or 0):.6f}", total=f"{float(loss):.6f}")
            if check_ratio and not steps and float(gap.abs().max()) > (1e-3 if dtype == torch.float32 else 0.2):
                raise SystemExit(f"stopped before the first step: sampler and trainer disagree by up to {float(gap.abs().max()):.3g} nats on the log-prob "
                                 "of a token, so the ratio is not 1; something in the model is random or depends on padding")
            grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm or math.inf))
            if not math.isfinite(loss_sum) or not math.isfinite(grad_norm):
                raise SystemExit(f"stopped: loss {loss_sum}, grad_norm {grad_norm}; the weights were not touched and the last checkpoint stands. "
                                 "Lower learning_rate or raise beta, then --resume=True")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps.append((loss_sum, grad_norm))
    tokens = max(1, sum(t["tokens"] for t in totals))
    m = {k: sum(t[k] * t["tokens"] for t in totals) / tokens for k in (totals[0] if totals else ()) if k not in ("tokens", "policy_loss")}
    if "clip_ratio/low_min" in m:
        m |= {"clip_ratio/low_min": min(t["clip_ratio/low_min"] for t in totals), "clip_ratio/high_max": max(t["clip_ratio/high_max"] for t in totals)}
    if b.kl is not None:
        m["kl"] = b.kl
    gap = torch.zeros(1) if gap is None or not len(gap) else gap
    ratio = gap.exp()
    return m | {"loss": sum(x for x, _ in steps) / max(1, len(steps)), "policy_loss": sum(t["policy_loss"] for t in totals) / max(1, len(steps)),
                "grad_norm": sum(x for _, x in steps) / max(1, len(steps)), "optimizer_steps": len(steps),
                "sampling/sampling_logp_difference/mean": float(gap.abs().mean()), "sampling/sampling_logp_difference/max": float(gap.abs().max()),
                "sampling/importance_sampling_ratio/min": float(ratio.min()), "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
                "sampling/importance_sampling_ratio/max": float(ratio.max())}


def describe_batch(b, s):
    """The metrics of a Batch, named as TRL names them."""
    groups = b.rewards.view(-1, s.num_generations)
    lengths, ended = b.rollout.mask.sum(1).float(), b.rollout.ended
    done = lengths[ended] if ended.any() else torch.zeros(1)
    names = dict(zip(s.reward_funcs, b.scores.T))
    identical = sum(len(set(b.completions[i:i + s.num_generations])) == 1 for i in range(0, len(b.completions), s.num_generations))
    known = b.rewards[~b.rewards.isnan()]
    return {"reward": float(known.mean()), "reward_std": float(known.std()),
            **{f"rewards/{k}/mean": float(x.nanmean()) for k, x in names.items()},
            **{f"rewards/{k}/std": float(x[~x.isnan()].std()) for k, x in names.items()},
            "frac_reward_zero_std": float(zero_spread(groups).float().mean()), "frac_identical_groups": identical / len(groups),
            "reward_min": float(known.min()), "reward_max": float(known.max()), "advantage_max": float(b.advantages.abs().max()),
            "entropy": float(b.rollout.entropy[b.rollout.mask].mean()), "num_completion_tokens": int(b.mask.sum()),
            "logp_max": float(b.rollout.logp.abs().max()),
            "completions/mean_length": float(lengths.mean()), "completions/min_length": float(lengths.min()), "completions/max_length": float(lengths.max()),
            "completions/mean_terminated_length": float(done.mean()), "completions/min_terminated_length": float(done.min()),
            "completions/max_terminated_length": float(done.max()), "completions/clipped_ratio": float((~ended).float().mean())}


# ---------------------------------------------------------------------------------------------------------------
# a run on disk


def claim_out_dir(s):
    """Create the folder of the run and return its name: out_dir, or out_dir-2, -3, ... when an earlier run is there."""
    name, number = s.out_dir, 1
    try:
        while os.path.isdir(name) and os.listdir(name) and not s.resume:
            number += 1
            name = f"{s.out_dir}-{number}"
        os.makedirs(name, exist_ok=True)
        with open(os.path.join(name, ".writable"), "w"):
            pass
        os.remove(os.path.join(name, ".writable"))
    except OSError as e:
        raise BadInput(f"out_dir = {s.out_dir!r}: cannot be written ({e.strerror})") from e
    if number > 1:
        print(f"{s.out_dir} holds an earlier run (--resume=True goes on with it); this one goes to {name}")
    return name


LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")


def append(out_dir, name, rows):
    """Add rows to a log; numbers that JSON does not know become null."""
    with open(os.path.join(out_dir, name), "a", encoding="utf-8") as f:
        for row in rows:
            row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def save_run(out_dir, iteration, policy, reference, optimizer, s, base_hash, num_tokens):
    """ckpt.pt: all that the next iteration depends on, and how long the logs are. The one before stays as ckpt_prev.pt."""
    path = os.path.join(out_dir, "ckpt.pt")
    if os.path.exists(path):
        os.replace(path, os.path.join(out_dir, "ckpt_prev.pt"))
    numpy_state = np.random.get_state()
    save_file(path, "run", iteration=iteration, policy=policy.state_dict(), optimizer=optimizer.state_dict(), num_tokens=num_tokens,
              reference=reference.state_dict() if s.sync_ref_model else None, base_hash=base_hash, settings=public(s),
              # ours are drawn from seeds, but a reward function of the user's may use these
              random=dict(python=random.getstate(), numpy=(numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]), torch=torch.get_rng_state()),
              logs={name: os.path.getsize(os.path.join(out_dir, name)) if os.path.exists(os.path.join(out_dir, name)) else 0 for name in LOGS})


def load_run(out_dir, policy, reference, optimizer, s, base_hash):
    """Put everything back as save_run found it, cut the logs to match, and return (iteration, num_tokens)."""
    path = os.path.join(out_dir, "ckpt.pt")
    previous = os.path.join(out_dir, "ckpt_prev.pt")
    if not os.path.exists(path) and os.path.exists(previous):  # killed between the two renames
        path = previous
    try:
        content = load_file(path, "run")
        if content["base_hash"] != base_hash:
            raise BadInput(f"{path}: this run began from another policy than the settings name now")
        policy.load_state_dict(content["policy"])
        optimizer.load_state_dict(content["optimizer"])
        if s.sync_ref_model:
            reference.load_state_dict(content["reference"])
        state = content["random"]
        for name, size in content["logs"].items():
            file = os.path.join(out_dir, name)
            if (os.path.getsize(file) if os.path.exists(file) else 0) < size:
                raise BadInput(f"{file}: shorter than when {path} was written; the run cannot go on without gaps")
    except (BadInput, RuntimeError, KeyError, AttributeError, ValueError) as e:
        reason = str(e).splitlines()[0] if isinstance(e, BadInput) else f"{path}: does not fit these settings ({str(e).splitlines()[0]})"
        raise BadInput(reason + (f"; the checkpoint before it is {previous}: rename it to ckpt.pt to go on from there"
                                 if path != previous and os.path.exists(previous) else "")) from e
    random.setstate(state["python"])
    np.random.set_state((state["numpy"][0], np.array(state["numpy"][1], dtype=np.uint32), *state["numpy"][2:]))
    torch.set_rng_state(state["torch"])
    for name, size in content["logs"].items():
        if os.path.exists(os.path.join(out_dir, name)):
            os.truncate(os.path.join(out_dir, name), size)
    for name, new in public(s).items():
        if name not in ("resume", "max_iters") and content["settings"].get(name, new) != new:
            print(f"resumed with another {name}: {content['settings'][name]!r} -> {new!r}")
    print(f"resumed {path} after {content['iteration']} iterations")
    return content["iteration"], content["num_tokens"]


def public(s):
    """The settings as plain values, for files."""
    return {k: v for k, v in asdict(replace(s, functions={})).items() if k != "functions"}


def hash_of(model):
    """Short hash of all weights."""
    h = hashlib.sha256()
    for x in model.state_dict().values():
        h.update(x.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def write_config(out_dir, s, device):
    """config.json: settings, the config file's text, versions, device, git revision."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True)
    about = dict(settings=public(s), source=open(s.config_file).read() if s.config_file else None, device=str(device), torch=torch.__version__,
                 python=platform.python_version(), git=git.stdout.strip() or None, threads=torch.get_num_threads())
    tmp = os.path.join(out_dir, "config.json.tmp")
    with open(tmp, "w") as f:
        json.dump(about, f, indent=1)
    os.replace(tmp, os.path.join(out_dir, "config.json"))


@torch.no_grad()
def sync(reference, policy, alpha):
    """reference <- (1 - alpha) reference + alpha policy, tensor by tensor. Returns how many tensors differ afterwards."""
    for r, p in zip(reference.parameters(), policy.parameters()):
        r.copy_(p) if alpha == 1 else r.lerp_(p, alpha)
    return sum(not torch.equal(r, p) for r, p in zip(reference.parameters(), policy.parameters()))


# ---------------------------------------------------------------------------------------------------------------
# the run


def learning_rate(it, s):
    """Rate of iteration it: linear warm-up, then constant, or to 0 at max_iters along a line or a cosine."""
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / s.warmup_iters
    done = (it - s.warmup_iters) / max(1, s.max_iters - s.warmup_iters)
    return s.learning_rate * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[s.lr_decay]


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
        print(f"  group {i}: mean {r.nanmean():.4f}, std {r[~r.isnan()].std():.4f}, rewards " + " ".join(f"{x:.3f}" for x in r.tolist())
              + ", advantages " + " ".join(f"{x:.3f}" for x in A.tolist()))
    phase("4. loss")
    policy_loss = kl_loss = 0.0
    ratios = []
    for rows in torch.arange(len(b.mask), device=device).split(s.micro_batch_size):
        loss, metrics, logp = loss_of(policy, b, rows, s, dtype, len(b.mask), int(b.mask.sum()))
        loss.backward()
        policy_loss, kl_loss = policy_loss + metrics["policy_loss"], kl_loss + float(loss) - metrics["policy_loss"]
        ratios.append((logp.detach() - b.rollout.logp[rows])[b.rollout.mask[rows]].exp())
    ratios = torch.cat(ratios)
    print(f"  policy gradient {policy_loss:.6f} + beta * KL {kl_loss:.6f} = loss {policy_loss + kl_loss:.6f}; the KL is "
          f"{100 * abs(kl_loss) / (abs(kl_loss) + abs(policy_loss) + 1e-12):.1f} % of the two (at ratio 1 the policy part is near 0; its gradient is not)")
    print(f"  ratio: min {ratios.min():.6f}, mean {ratios.mean():.6f}, max {ratios.max():.6f} (1: these weights sampled)")
    phase("5. gradient norms before clipping, and the step")
    for name, p in policy.named_parameters():
        if p.requires_grad:
            print(f"  {name:28} {p.grad.norm():.3e}")
    grad_norm = float(torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], cap))
    old = [p.detach().clone() for p in policy.parameters()]
    optimizer.step()
    with torch.no_grad():
        _, after, _ = loss_of(policy, b, slice(0, s.micro_batch_size), s, dtype)
    print(f"  all {grad_norm:.3e}, clipped to {min(grad_norm, cap):.3e}; at learning rate {s.learning_rate:g} "
          f"{sum(not torch.equal(p, q) for p, q in zip(policy.parameters(), old))} of {len(old)} tensors changed; mean ratio is now {after['ratio']:.6f}")
    phase("6. evaluation after")
    row = measure()
    print("  change: " + ", ".join(f"{k} {row[k] - before[k]:+.4f}" for k in row))
    phase("7. red flags")
    m = describe_batch(b, s) | {"grad_norm": grad_norm, "kl": after.get("kl", 0.0), "sampling/importance_sampling_ratio/mean": float(ratios.mean())}
    print("\n".join("  " + text for text in diagnose(m, s) or ["none"]))


def main(argv):
    s = load_settings(argv)
    device = pick_device(s.device)
    dtype = torch.bfloat16 if s.dtype == "bfloat16" or (s.dtype == "auto" and device.type == "cuda") else torch.float32
    tokenizer = load_tokenizer(s.vocab_size)
    for path, kind in ((s.policy, "policy"), (s.judge, "judge"), (s.eval_judge, "judge")):
        if path not in (None, "train"):
            load_file(path, kind)
    splits = split_comments(load_comments(s.comments, s.text_field, s.label_field))
    prompts, eval_prompts = load_prompts(s, tokenizer, splits)
    out_dir = None if s.debug_step else claim_out_dir(s)
    print("settings: " + ", ".join(f"{k}={v!r}" for k, v in public(s).items() if v != getattr(Settings(), k)))
    with interrupts() as stop:
        base = get_policy(s, splits, device, stop).to(device).eval().requires_grad_(False)
        judges = get_judges(s, splits, device, stop)
        reward_funcs = {name: s.functions.get(name) or (lambda p, c: as_reward(judges["judge"](p, c), s.judge_score)) for name in s.reward_funcs}
        policy = copy.deepcopy(base).requires_grad_(True)
        if s.lora_rank:
            torch.manual_seed(derive(s.seed, "lora"))
            add_lora(policy, s.lora_rank, s.lora_alpha, s.lora_layers)
        # `base` stays as it is for the evaluation's perplexity; it is the reference too, unless that one follows the policy
        reference = copy.deepcopy(policy).requires_grad_(False) if s.sync_ref_model else base
        scored = torch.compile(policy, dynamic=True) if s.compile else policy
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=s.learning_rate, fused=True,
                                      betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay)
        common = dict(s=s, tokenizer=tokenizer, device=device, dtype=dtype)
        if s.debug_step:
            debug_step(policy, base, reference, optimizer, pick(prompts, 0, s), eval_prompts, reward_funcs, judges, **common)
            return
        base_hash, start, num_tokens = hash_of(base), 0, 0
        if s.resume and any(os.path.exists(os.path.join(out_dir, name)) for name in ("ckpt.pt", "ckpt_prev.pt")):
            start, num_tokens = load_run(out_dir, policy, reference, optimizer, s, base_hash)
        else:
            for name in LOGS:  # an earlier start that was killed before its first checkpoint
                open(os.path.join(out_dir, name), "w").close()
        write_config(out_dir, s, device)
        wandb = None
        if s.wandb_project:
            import wandb
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

        if start == 0:
            evaluation(0)
            save(0)
        began, said_zero = time.time(), False
        for it in range(start, s.max_iters):
            line = Lines(device, s.log_micro)
            line(0, "1. Iteration start")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(it, s)
            asked = pick(prompts, it, s)
            batch = collect(policy, reference, asked, reward_funcs, s, tokenizer, derive(s.seed, "rollout", it), dtype, line)
            m = update(policy, scored, optimizer, batch, s, derive(s.seed, "update", it), dtype, line, check_ratio=it == start)
            line(None, "5. Optimizer step finished")
            if s.sync_ref_model and (it + 1) % s.ref_model_sync_steps == 0:
                m["ref_tensors_differing"] = sync(reference, policy, s.ref_model_mixup_alpha)
                print(f"reference synced: {m['ref_tensors_differing']} tensors differ from the policy's (0 right after a copy)")
            seconds = time.time() - line.start
            num_tokens += int(batch.rollout.real.sum())
            m = {"iteration": it + 1, **m, **describe_batch(batch, s), "learning_rate": learning_rate(it, s), "num_tokens": num_tokens,
                 "epoch": (it + 1) * s.num_prompts / len(prompts), "step_time": seconds}
            left = (time.time() - began) / (it + 1 - start) * (s.max_iters - it - 1)
            print(f"iter {it + 1}: loss {m['loss']:.4f} (main {m['policy_loss']:.4f}, kl {m['loss'] - m['policy_loss']:.4f}), reward {m['reward']:.4f}, "
                  f"kl {m.get('kl', 0):.4f}, grad_norm {m['grad_norm']:.3f}, {batch.rollout.mask.sum() / seconds:.0f} tok/s, time {1000 * seconds:.2f}ms, "
                  f"eta {int(left) // 60}m{int(left) % 60:02d}s", flush=True)
            if abs(m["loss"]) < 1e-6 and m["grad_norm"] > 0 and not said_zero:
                said_zero = True
                print("note: a loss of 0 with a gradient that is not 0 is right: the ratio is 1 and advantages sum to 0 in a group. "
                      "Watch reward and grad_norm.")
            for text in diagnose(m, s):
                print(f"WARNING: {text}")
            append(out_dir, "metrics.jsonl", [m])
            append(out_dir, "samples.jsonl", [
                dict(iteration=it + 1, prompt=asked[i // s.num_generations][0], completion=completion, reward=float(reward), advantage=float(advantage))
                for i, (completion, reward, advantage) in enumerate(zip(batch.completions, batch.rewards, batch.advantages))])
            if wandb:
                wandb.log(m, step=it + 1)
            if it + 1 == s.max_iters or (s.eval_interval and (it + 1) % s.eval_interval == 0):
                evaluation(it + 1)
            if it + 1 == s.max_iters or (it + 1) % s.save_interval == 0 or stop():
                save(it + 1)
            if stop() and it + 1 < s.max_iters:
                raise KeyboardInterrupt(f"saved after iteration {it + 1}; go on with --out_dir={out_dir} --resume=True")
        print_table(read_rows(os.path.join(out_dir, "eval.jsonl")))
        print(f"\n{out_dir}: metrics.jsonl, samples.jsonl, eval.jsonl, config.json, ckpt.pt")


if __name__ == "__main__":
    run_script(main)
