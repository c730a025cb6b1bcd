"""
The metrics of an iteration: pure functions of a loss, of influence, of a batch. Each number is
explained in the docstring of the function that computes it: `python grpo.py --help=metrics`.

A metric of your own is a line in one function: in loss_metrics as the sum and the count of a
micro-batch (run/meter.py adds them up), in completion_metrics as a number of all completions that
an iteration has sampled, or in batch_metrics as a number of those that are learned from. It is
logged, and explained once its docstring has it.
"""
import itertools
import math
from collections import Counter

import torch

from common.hooks import select_arguments
from common.processes import all_gather, all_reduce, shard
from loss import clipped_objective, losses
from tape import cosine, inner
from tracin import target_coefficients


def units_of(loss):
    """True where a ratio counts: tokens with loss (n, T), or at sequence level rows with loss
    (n, 1)."""
    mask = loss.batch.loss_mask
    return mask if loss.ratio.shape == mask.shape else mask.any(1, keepdim=True)


def loss_metrics(loss, cfg):
    """Metrics of a micro-batch -> {name: (sum, count)}, tensors () or numbers. The log has
    sum / count over all micro-batches, steps and processes, for every name in here. count None:
    the sum over micro-batches, and its mean over the steps.

    Metrics:
        loss: mean over steps
        policy_loss: likewise. As in TRL it includes the KL and not the entropy bonus
        kl_loss, entropy_loss, critic_loss: the remaining parts of the loss, where there are any
        ratio: policy / sampler, mean over all passes. 1 before the first step
        clip_ratio/low_mean, clip_ratio/high_mean: share of tokens clipped at 1 - epsilon, at 1 +
            epsilon_high
        clip_ratio/region_mean: the sum of both. At sequence level these three count completions
        kl: KL of the policy to the reference, in nats per token: mean of ratio x kl_estimator
    """
    # the loss and its parts, which are divided by the size of the whole step already
    metrics = {
        "loss": (loss.total.double(), None),
        "policy_loss": (loss.policy.double() + loss.kl, None)}
    if cfg.kl_in_loss:
        metrics["kl_loss"] = loss.kl, None
    if cfg.entropy_coef:
        metrics["entropy_loss"] = loss.entropy, None
    if cfg.critic:
        metrics["critic_loss"] = loss.critic, None

    # the ratio, what the clip holds back, and the KL
    mask = loss.batch.loss_mask
    ratio = loss.ratio
    unit = units_of(loss)
    units = unit.sum()
    A = loss.batch.advantages.view(len(mask), -1)                       # (n, 1), or (n, T)
    metrics["ratio"] = (ratio * unit).sum(), units
    count = getattr(cfg.hook("objective") or clipped_objective, "clipped", lambda: {})
    offered = dict(ratio=ratio, A=A, cfg=cfg)
    for name, where in count(**select_arguments("clipped", count, offered)).items():
        metrics[name] = ((where & unit).sum(), units)
    if loss.kl_by_token is not None:
        metrics["kl"] = ((loss.kl_by_token * mask).sum(), mask.sum())
    return metrics


def std(x):
    """Standard deviation without NaN; exactly 0.0 if all values are equal."""
    x = x[~x.isnan()]
    if len(x) < 2 or x.min() == x.max():
        return 0.0
    return float(x.std())


def influence_spread(influence):
    """Metrics of the influence (n,) of all rollouts that an iteration has scored, on the CPU.

    Metrics:
        tracin/positive_ratio, tracin/negative_ratio, tracin/zero_ratio: shares of all scored
            rollouts, by the sign of their influence; 1 in all
        tracin/mean_ip, tracin/std_ip, tracin/min_ip, tracin/max_ip: influence of all scored
            rollouts
    """
    return {
        "tracin/positive_ratio": float((influence > 0).float().mean()),
        "tracin/negative_ratio": float((influence < 0).float().mean()),
        "tracin/zero_ratio": float((influence == 0).float().mean()),
        "tracin/mean_ip": float(influence.mean()),
        "tracin/std_ip": std(influence),
        "tracin/min_ip": float(influence.min()),
        "tracin/max_ip": float(influence.max())}


def target_metrics(target):
    """Metrics of a target's rollouts: tensors () and numbers.

    Metrics:
        tracin/target_rows: how many rollouts the target is made of
        tracin/target_loss, tracin/target_loss_min, tracin/target_loss_max: minus value times
            log-prob: mean, least and greatest over the target's rollouts. The value is what tracin
            says (reward, advantage or half), for self the advantage; log-probs are the sampler's
        tracin/target_advantage_min, tracin/target_advantage_max: of the target's rollouts
    """
    batch = target.batch
    rows = target.rows

    # each rollout's loss: its value times its log-prob, with the sign turned
    kind = "advantage" if target.kind == "self" else target.kind
    coef = target_coefficients(batch, rows, kind)       # (N,) or (N, T): -value / m
    logp = batch.rollout.logp.masked_fill(~batch.loss_mask, 0)                      # (N, T)
    by_rollout = (coef.view(len(logp), -1) * logp).sum(1)[rows] * len(rows)         # (m,)
    advantages = batch.row_advantages[rows]
    return {
        "tracin/target_rows": len(rows),
        "tracin/target_loss": by_rollout.mean(),
        "tracin/target_loss_min": by_rollout.min(),
        "tracin/target_loss_max": by_rollout.max(),
        "tracin/target_advantage_min": advantages.min(),
        "tracin/target_advantage_max": advantages.max()}


def influence_metrics(influence, setup):
    """Metrics of a step's tracin.Influence: tensors () and numbers. A target that is a function of
    the config file has neither halves nor rollouts.

    Metrics:
        tracin/selected_ratio: share of the rollouts that are kept
        tracin/self_share: size of the rollouts' own parts in the target relative to all influence,
            from four of them
        tracin/fallback: 1 if hardly any influence was positive
        tracin/target_grad_norm: norm of the target's gradient
        tracin/target_grad_norm/NAME: the same for one of its first three weights
        tracin/target_cosine: cosine of the target's gradients on two halves of its rollouts. Near
            0: noise
        tracin/target_contrast: spread of the target's rewards, relative to the spread of all the
            rewards it was chosen from
        tracin/target_age: steps in the average of the target's gradient
    """
    target, scores, selection = influence
    target_grad = target.gradient
    metrics = {
        "tracin/selected_ratio": (selection.weights != 0).float().mean(),
        "tracin/self_share": scores.self_share,
        "tracin/fallback": selection.fallback,
        "tracin/target_grad_norm": inner(target_grad, target_grad).sqrt(),
        "tracin/target_cosine": math.nan}
    names = {p: name for name, p in setup.policy.named_parameters() if p in target_grad}
    for p in itertools.islice(names, 3):
        metrics[f"tracin/target_grad_norm/{names[p]}"] = target_grad[p].norm()
    if setup.target_average:
        metrics["tracin/target_age"] = setup.target_average.age

    # signal or noise? Two halves of a good target point the same way
    if len(target.halves) == 2:
        rewards = target.batch.rewards
        chosen = rewards[target.rows.to(rewards.device)]
        metrics["tracin/target_cosine"] = cosine(*target.halves)    # NaN: one half is empty
        metrics["tracin/target_contrast"] = std(chosen) / max(std(rewards), 1e-12)
        metrics |= target_metrics(target)
    if target.kind == "target":
        metrics["tracin/target_loss"] = target.loss
    return metrics


@torch.no_grad()
def rollout_toxicity(batch, setup):
    """What the eval judge says about the rollouts; {} without it.

    Metrics:
        eval_judge/toxicity: mean toxicity of the rollouts, by the judge that training never sees
    """
    judge = setup.judges.get("eval_judge")
    if judge is None:
        return {}
    completions = batch.everything.completions
    mine = shard(len(completions))
    logits = all_gather(judge(completions[mine]))
    return {"eval_judge/toxicity": float(torch.sigmoid(logits).mean())}


def call_metrics(completions, cfg):
    """Metrics of the calls of tools in completions; {} where no tool answers."""
    if not cfg.tools or not cfg.answers:
        return {}
    from extras.environment import tools
    return tools.call_metrics(completions)


def repeated(completions, num_generations):
    """Share of completions (texts) whose group has the same text again."""
    count = 0
    for i in range(0, len(completions), num_generations):
        group = completions[i:i + num_generations]
        count += sum(n for n in Counter(group).values() if n > 1)
    return count / len(completions)


def num_tokens(batch):
    """Tokens in the prompts and completions that an iteration has sampled, without padding."""
    sampled = batch.everything
    in_prompts = sum(len(prompt.ids) for prompt in sampled.prompts)
    return in_prompts + int(sampled.rollout.completion_mask.sum())


def reward_metrics(everything, cfg):
    """Metrics of the rewards of a Batch.

    Metrics:
        reward, reward_std, reward_min, reward_max: of all completions, after reward_weights
        frac_reward_zero_std: share of groups whose rewards are all equal: without a KL they teach
            nothing
        rewards/NAME/mean, rewards/NAME/std: of each reward function
        rewards/NAME/abstained: share of the completions for which it returned None
    """
    # where all functions abstained there is no reward
    known = everything.rewards[~everything.rewards.isnan()]
    if len(known) == 0:
        known = torch.full((1,), math.nan)
    equal = everything.equal_rows(cfg.num_generations)
    metrics = {
        "reward": float(known.mean()),
        "reward_std": std(known),
        "reward_min": float(known.min()),
        "reward_max": float(known.max()),
        "frac_reward_zero_std": float(equal.float().mean())}
    for name, scores in zip(cfg.reward_funcs, everything.scores.T):
        metrics[f"rewards/{name}/mean"] = float(scores.nanmean())
        metrics[f"rewards/{name}/std"] = std(scores)
        metrics[f"rewards/{name}/abstained"] = float(scores.isnan().float().mean())
    return metrics


def completion_metrics(everything, cfg):
    """Metrics of the completions in a Batch.

    Metrics:
        identical_completions: share of completions whose group has the same text again
        entropy: of the sampling distribution, in nats per token that carries loss
        logp: mean log-prob of the tokens that the policy chose, as they were sampled
        forced: share of the completions' tokens that come from an environment
        completions/clipped_ratio: share of completions truncated at max_completion_length
        completions/mean_length: tokens that the policy chose, mean over completions
        completions/mean_terminated_length: the same of those that ended by themselves
    """
    # what the policy wrote. Truncated completions count for the entropy if they carry loss
    rollout = everything.rollout
    sampled = rollout.sampled_mask
    with_loss = sampled
    if cfg.mask_truncated_completions:
        with_loss = sampled & rollout.ended[:, None]

    # how long is it, and does it end by itself?
    lengths = sampled.sum(1).float()
    terminated = lengths[rollout.ended]
    return {
        "identical_completions": repeated(everything.completions, cfg.num_generations),
        "entropy": float(rollout.entropy[with_loss].mean()),
        "logp": float(rollout.logp[sampled].mean()),
        "forced": 1 - int(sampled.sum()) / int(rollout.completion_mask.sum()),
        "completions/clipped_ratio": float((~rollout.ended).float().mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/mean_terminated_length": float(terminated.mean()) if len(terminated) else 0.0}


def advantage_metrics(batch, cfg):
    """Metrics of the advantages of a Batch.

    Metrics:
        advantage_std, advantage_min, advantage_max: over all completions; with a critic over their
            tokens
        advantage_group_mean: largest mean of the advantages of a group: 0, since its mean reward is
            the baseline. Not of advantages by token
    """
    A = batch.advantages        # (N,), with a critic of tokens
    A = A.cpu() if A.dim() == 1 else A[batch.rollout.sampled_mask].cpu()
    metrics = {"advantage_std": std(A), "advantage_min": float(A.min()),
               "advantage_max": float(A.max())}
    if batch.advantages.dim() == 1:
        means = A.double().view(-1, cfg.num_generations).mean(1)                    # (B,)
        metrics["advantage_group_mean"] = float(means.abs().max())
    return metrics


def critic_metrics(batch, cfg):
    """Metrics of what a critic expected while sampling; {} without one.

    Metrics:
        val/mean, val/std: what the critic expected while sampling, over tokens
        returns/mean: what it is to expect
        val/var_explained: 1 - Var(return - value) / Var(return). 1: perfect; 0: like a constant
    """
    if not cfg.critic:
        return {}
    from extras.critic import explained_variance
    known = batch.loss_mask & ~batch.returns.isnan()
    values = batch.rollout.values[known].cpu()
    returns = batch.returns[known].cpu()
    return {
        "val/mean": float(values.mean()), "val/std": std(values),
        "returns/mean": float(returns.mean()),
        "val/var_explained": explained_variance(values, returns)}


def batch_metrics(batch, cfg):
    """Metrics of a Batch -> {name: number}, with TRL's names where it has the metric.

    Metrics:
        num_completion_tokens: tokens that carry loss
        tokens_without_loss: sampled tokens that grpo.loss_mask_of leaves out of the loss
        replayed: share of the completions that were sampled in earlier iterations, where the config
            file has a function after
    """
    # of everything that this iteration has sampled, also of what is not learned from
    everything = batch.everything
    metrics = reward_metrics(everything, cfg) | completion_metrics(everything, cfg)
    metrics |= call_metrics(everything.completions, cfg)

    # of what is learned from
    metrics |= advantage_metrics(batch, cfg)
    metrics |= critic_metrics(batch, cfg)
    if resample := cfg.hook("zero_std_groups"):
        metrics |= resample.metrics(batch, cfg)
    if cfg.kl_in_reward:
        metrics["kl"] = float(batch.kl.sum() / batch.rollout.sampled_mask.sum())
    if "after" in cfg.functions:
        metrics["replayed"] = float((batch.age > 0).float().mean())

    # both in one transfer, since each waits for a GPU
    left_out = batch.rollout.sampled_mask & ~batch.loss_mask                        # (N, T)
    with_loss, without = torch.stack([batch.loss_mask.sum(), left_out.sum()]).tolist()
    return metrics | {"num_completion_tokens": with_loss, "tokens_without_loss": without}


def kl_grad_share(setup, batch, steps, cfg):
    """Compare two parts of the gradient in the first of the steps that are about to come. {} if the
    loss has no KL.

    Metrics:
        kl_grad_share: norm of the gradient of beta times the KL beside the norm of the policy's
            part. It takes a forward and two backward passes, so only iterations with an evaluation
            have it
    """
    if not cfg.kl_in_loss:
        return {}
    step = next(steps, None)
    if step is None:        # there is nothing to learn from
        return {"kl_grad_share": math.nan}

    # both gradients from one forward
    kl, policy = ({p: torch.zeros_like(p) for p in setup.trained} for _ in range(2))
    for loss, _ in losses(setup, setup.policy, batch, step, cfg):
        for part, gradient, is_last in ((loss.kl, kl, False), (loss.policy, policy, True)):
            slopes = torch.autograd.grad(
                part, setup.trained, retain_graph=not is_last, materialize_grads=True)
            for total, slope in zip(gradient.values(), slopes):
                total += slope
    all_reduce([*kl.values(), *policy.values()])
    return {"kl_grad_share": float((inner(kl, kl) / inner(policy, policy)).sqrt())}
