"""
The metrics of an iteration. docs/running.md says what each of them means.

Add one of your own to loss_metrics (of an update) or to batch_metrics (of the rollouts). The sums
of an update stay on the device until its end, so that a GPU is synchronised once.
"""
import itertools
import math

import torch

from common.processes import all_gather, shard
from tape import inner


class Meter:
    """Collects the metrics of an update, and ends the run where they show a bug."""

    def __init__(self, setup, batch, cfg, log, check=False):
        self.setup = setup
        self.batch = batch
        self.cfg = cfg
        self.log = log
        self.check = check          # compare trainer and sampler before the first step
        self.losses = {}            # {name: tensor ()}, sums over the micro-batches so far
        self.sums = {}              # {name: tensor (2,)}, sum and count of the other metrics
        self.num_begun = 0          # steps, also those for which influence keeps no row
        self.grad_norms = []        # of the steps that were taken
        self.influence = []         # {name: number} of each step
        self.first_pass = []        # log-ratios of trainer and sampler (n, T), sampled_mask (n, T)

    def begin_step(self):
        self.num_begun += 1
        self.loss = torch.zeros((), dtype=torch.float64, device=self.batch.loss_mask.device)

    @torch.no_grad()
    def add(self, loss):
        """Count a micro-batch in, by its grpo.Loss."""
        self.losses = summed([self.losses, loss_parts(loss, self.cfg)])
        pairs = {name: torch.stack([torch.as_tensor(x, device=self.loss.device).double()
                                    for x in pair])
                 for name, pair in loss_metrics(loss, self.cfg).items()}
        self.sums = summed([self.sums, pairs])
        # 0 * inf is NaN: an infinite log-prob of the sampler is noticed
        self.loss += loss.total + 0 * loss.batch.rollout.logp.sum()
        if not self.grad_norms:     # the policy is still the one that sampled
            rollout = loss.batch.rollout
            self.first_pass.append((loss.logp - rollout.logp, rollout.sampled_mask))
        self.log.loss(loss)

    def logp_diff(self):
        """The trainer's log-probs minus the sampler's (M,), of all tokens of the first pass in all
        processes."""
        if not self.first_pass:     # this process has no rows
            return all_gather(torch.zeros(0))
        # to the CPU in one piece each, since a GPU is waited for
        log_ratios = torch.cat([x.flatten() for x, _ in self.first_pass]).cpu()
        sampled = torch.cat([x.flatten() for _, x in self.first_pass]).cpu()
        return all_gather(log_ratios[sampled])

    def check_ratio(self):
        """End the run if trainer and sampler, which have the same weights before the first step,
        disagree about a token."""
        if not self.check or self.grad_norms:
            return
        logp_diff = self.logp_diff()
        if len(logp_diff) == 0:
            return
        error, tolerance = logp_error(logp_diff, self.setup.dtype)
        if not error <= tolerance:
            raise SystemExit(
                "stopped before the first step: the ratio is not 1, sampler and trainer disagree "
                f"by {error:.3g} nats on a token; something in the model is random, not finite or "
                "sees padding (or try dtype = 'float32')")

    def check_influence(self, error):
        """End the run if influence is not that of plain backwards, by tracin.true_error."""
        tolerance = tolerance_of(self.setup.dtype)
        if not error <= tolerance:
            raise SystemExit(
                "stopped before the first step: the influences do not add up to the product of "
                f"ordinary gradients (relative error {float(error):.1e}, at most "
                f"{tolerance:g}); the tape has a bug (or try dtype = 'float32')")

    def add_influence(self, found):
        """Count a step's influence in, by its tracin.Findings."""
        metrics = influence_metrics(found)
        if self.cfg.tracin_target_ema:
            metrics["tracin/target_age"] = float(self.setup.target_average.age)
        self.influence.append(metrics)

    def check_finite(self, grad_norm):
        """End the run if the loss or the gradient of a step is not finite."""
        own_loss, norm = torch.stack([self.loss, grad_norm.double()]).tolist()
        loss = sum(all_gather([own_loss]))
        if not math.isfinite(loss + norm):
            raise SystemExit(
                f"stopped: loss {loss}, grad_norm {norm}; this step was not taken and the last "
                "checkpoint is good. Look for a reward that is not finite, or lower "
                "learning_rate or raise beta, then --resume=True")
        self.grad_norms.append(norm)

    def metrics(self):
        """Put together the metrics of the whole update, over all processes -> {name: number}."""
        num_steps = len(self.grad_norms)
        sums = summed(all_gather([on_cpu(self.sums)]))
        metrics = {name: float(total / count) for name, (total, count) in sums.items()}
        metrics |= mean_influence(self.influence)
        if self.cfg.kl_in_reward:
            sampled = self.batch.rollout.sampled_mask
            metrics["kl"] = float(self.batch.kl.sum() / sampled.sum())
        metrics |= {"loss": 0.0, "policy_loss": 0.0}        # where no row carries loss
        for name, total in summed(all_gather([on_cpu(self.losses)])).items():
            metrics[name] = float(total / self.num_begun)
        metrics["grad_norm"] = sum(self.grad_norms) / max(1, num_steps)
        metrics["num_steps"] = num_steps
        logp_diff = self.logp_diff().abs()
        name = "sampling/sampling_logp_difference"
        metrics[f"{name}/mean"] = float(logp_diff.mean()) if len(logp_diff) else 0.0
        metrics[f"{name}/max"] = float(logp_diff.max()) if len(logp_diff) else 0.0
        return metrics


def tolerance_of(dtype):
    """How far two computations of the same number may differ, with forward passes in dtype."""
    return 1e-3 if dtype == torch.float32 else 5e-2


def logp_error(logp_diff, dtype):
    """How far log-probs differ that should be equal -> (nats, tolerance): the largest difference in
    float32, the mean in bfloat16."""
    errors = logp_diff.abs()
    error = errors.max() if dtype == torch.float32 else errors.mean()
    return float(error), tolerance_of(dtype)


def loss_parts(loss, cfg):
    """The parts of a micro-batch's loss -> {name: tensor ()}. Each is already divided by the size
    of the whole step, so the log has their sum over micro-batches and their mean over steps."""
    parts = {
        "loss": loss.total.double(),
        "policy_loss": loss.policy.double() + loss.kl}      # TRL's
    if cfg.kl_in_loss:
        parts["kl_loss"] = loss.kl.double()
    if cfg.entropy_coef:
        parts["entropy_loss"] = loss.entropy.double()
    if cfg.critic:
        parts["critic_loss"] = loss.critic.double()
    return parts


def loss_metrics(loss, cfg):
    """Other metrics of a micro-batch -> {name: (sum, count)}, tensors () or numbers. The log has
    sum / count over all micro-batches, steps and processes, of every name in here."""
    mask = loss.batch.loss_mask
    ratio = loss.ratio                # (n, T), or (n, 1) at sequence level: then rows count
    unit = mask if ratio.shape == mask.shape else mask.any(1, keepdim=True)
    units = unit.sum()
    A = loss.batch.advantages.view(len(mask), -1)                       # (n, 1), or (n, T)
    low_bound, high_bound = cfg.clip_range
    low = (ratio < low_bound) & (A < 0) & unit
    high = (ratio > high_bound) & (A > 0) & unit
    metrics = {"ratio": ((ratio * unit).sum(), units)}
    if cfg.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = (high.sum(), units)
    elif cfg.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        metrics["clip_ratio/low_mean"] = (low.sum(), units)
        metrics["clip_ratio/high_mean"] = (high.sum(), units)
        metrics["clip_ratio/region_mean"] = ((low | high).sum(), units)
    if loss.kl_by_token is not None:
        metrics["kl"] = ((loss.kl_by_token * mask).sum(), mask.sum())
    return metrics


def summed(dicts):
    """Add up dicts of numbers or tensors by name."""
    total = {}
    for values in dicts:
        for name, x in values.items():
            total[name] = total.get(name, 0) + x
    return total


def on_cpu(tensors):
    """Copy {name: tensor}, all of one shape, to the CPU. Synchronises a GPU once."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack(list(tensors.values())).cpu()))


def influence_metrics(found):
    """Metrics of a step's influence, by its tracin.Findings."""
    tensors = {
        "tracin/positive_ratio": (found.scores > 0).float().mean(),
        "tracin/mean_ip": found.scores.mean(),
        "tracin/selected_ratio": (found.row_weights != 0).float().mean()}
    if found.batch_grad is not None:        # else it would cost another gradient
        tensors["tracin/invariant_error"] = invariant_error(
            found.raw_scores, found.batch_grad, found.G)
    metrics = {name: float(x) for name, x in on_cpu(tensors).items()}
    metrics["tracin/self_share"] = float(found.self_influence)
    metrics["tracin/fallback"] = float(found.fallback)
    return metrics | target_metrics(found)


def invariant_error(scores, batch_grad, G):
    """How far sum_i I_i = <sum_i grad P_i, G> is violated: (). Relative to sum_i |I_i|, or to a
    tenth of the longest product, if that is more: all advantages may be 0."""
    longest = (inner(batch_grad, batch_grad) * inner(G, G)).sqrt()
    size = torch.maximum(scores.double().abs().sum(), 0.1 * longest)
    return (scores.double().sum() - inner(batch_grad, G)).abs() / size.clamp(min=1e-30)


def target_metrics(found):
    """Metrics of the target's gradient and of its rollouts. A target that is a function of the
    config file has neither halves nor rollouts."""
    pairs = itertools.combinations_with_replacement(found.halves, 2)
    products = torch.stack([inner(G, H) for G, H in pairs]).tolist()
    if len(products) == 1:
        return {"tracin/target_grad_norm": products[0] ** 0.5, "tracin/target_cosine": math.nan}
    first, both, second = products      # <G, G>, <G, H>, <H, H> of the two halves
    norms = (first * second) ** 0.5
    batch, rows = found.target
    rewards = batch.rewards[rows.to(batch.rewards.device)]
    return {
        "tracin/target_grad_norm": max(first + second + 2 * both, 0.0) ** 0.5,
        "tracin/target_cosine": both / norms if norms else math.nan,    # one half is empty
        "tracin/target_contrast": std(rewards) / max(std(batch.rewards), 1e-12)}


def mean_influence(steps):
    """Metrics of influence: means over the steps of an update."""
    if not steps:
        return {}
    metrics = {name: sum(m[name] for m in steps) / len(steps) for name in steps[0]}
    metrics["tracin/empty_steps"] = sum(m["tracin/selected_ratio"] == 0 for m in steps)
    return metrics


def std(x):
    """Standard deviation without NaN; exactly 0.0 if all values are equal."""
    x = x[~x.isnan()]
    if len(x) < 2 or x.min() == x.max():
        return 0.0
    return float(x.std())


@torch.no_grad()
def rollout_toxicity(batch, setup):
    """Mean toxicity of the rollouts by the eval judge, which training never sees; {} without it."""
    judge = setup.judges.get("eval_judge")
    if judge is None:
        return {}
    mine = shard(len(batch.prompts))
    logits = all_gather(judge(batch.completions[mine]))
    return {"eval_judge/toxicity": float(torch.sigmoid(logits).mean())}


def batch_metrics(batch, cfg):
    """Metrics of a Batch -> {name: number}, with TRL's names where it has the metric."""
    rollout = batch.rollout
    known = batch.rewards[~batch.rewards.isnan()]
    if len(known) == 0:
        known = torch.full((1,), math.nan)
    sampled = rollout.sampled_mask
    lengths = sampled.sum(1).float()
    terminated = lengths[rollout.ended]
    metrics = {
        "reward": float(known.mean()),
        "reward_std": std(known),
        "reward_min": float(known.min()),
        "reward_max": float(known.max()),
        "frac_reward_zero_std": float(batch.equal_rows(cfg.num_generations).float().mean()),
        "entropy": float(rollout.entropy[batch.loss_mask].mean()),
        "num_completion_tokens": int(batch.loss_mask.sum()),
        "forced": 1 - int(sampled.sum()) / int(rollout.completion_mask.sum()),
        "completions/clipped_ratio": float((~rollout.ended).float().mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/mean_terminated_length": float(terminated.mean()) if len(terminated) else 0.0}
    for name, scores in zip(cfg.reward_funcs, batch.scores.T):
        metrics[f"rewards/{name}/mean"] = float(scores.nanmean())
        metrics[f"rewards/{name}/std"] = std(scores)
    if cfg.zero_std_groups == "resample":
        used = (1 - metrics["frac_reward_zero_std"]) * cfg.num_prompts
        metrics["resample/rounds"] = len(batch.rounds) - 1
        metrics["resample/used"] = used / sum(groups for groups, *_ in batch.rounds)
    metrics |= call_metrics(batch.completions, cfg)
    if cfg.critic:      # what it expected while sampling
        from extras.critic import explained_variance
        known = batch.loss_mask & ~batch.returns.isnan()
        metrics["val/var_explained"] = explained_variance(
            rollout.values[known], batch.returns[known])
    return metrics


def call_metrics(completions, cfg):
    """Metrics of the calls of tools in completions; {} where no tool answers."""
    if not cfg.tools or not cfg.answers:
        return {}
    from extras.environment import tools
    return tools.call_metrics(completions)
