"""
The metrics of an iteration. docs/running.md says what each of them means.

Add one of your own to loss_metrics (of an update) or to batch_metrics (of the rollouts). The sums
of an update stay on the device until its end, so that a GPU is synchronised once.
"""
import math

import torch

from common.processes import all_gather, shard
from tape import cosine, inner


def tolerance_of(dtype):
    """How far two computations of the same number may differ, with forward passes in dtype."""
    return 1e-3 if dtype == torch.float32 else 5e-2


def logp_error(mean, largest, dtype):
    """How far log-probs differ that should be equal -> (nats, tolerance): the largest difference in
    float32, the mean in bfloat16."""
    return largest if dtype == torch.float32 else mean, tolerance_of(dtype)


def loss_parts(loss, cfg):
    """The parts of a micro-batch's loss -> {name: tensor ()}. Each is already divided by the size
    of the whole step, so the log has their sum over micro-batches and their mean over steps."""
    parts = {
        # 0 * inf is NaN: an infinite log-prob of the sampler is noticed
        "loss": loss.total.double() + 0 * loss.batch.rollout.logp.sum(),
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


def invariant_error(scores, batch_grad, G):
    """How far sum_i I_i = <sum_i grad P_i, G> is violated: (). Relative to sum_i |I_i|, or to a
    tenth of the longest product, if that is more: all advantages may be 0."""
    longest = (inner(batch_grad, batch_grad) * inner(G, G)).sqrt()
    size = torch.maximum(scores.double().abs().sum(), 0.1 * longest)
    return (scores.double().sum() - inner(batch_grad, G)).abs() / size.clamp(min=1e-30)


def std(x):
    """Standard deviation without NaN; exactly 0.0 if all values are equal."""
    x = x[~x.isnan()]
    if len(x) < 2 or x.min() == x.max():
        return 0.0
    return float(x.std())


def influence_metrics(found):
    """Metrics of a step's influence, by its tracin.Influence: tensors () and numbers. A target that
    is a function of the config file has neither halves nor rollouts."""
    target, scores, selection = found
    target_grad = target.gradient
    metrics = {
        "tracin/positive_ratio": (scores.influence > 0).float().mean(),
        "tracin/mean_ip": scores.influence.mean(),
        "tracin/selected_ratio": (selection.weights != 0).float().mean(),
        "tracin/self_share": scores.self_share,
        "tracin/fallback": selection.fallback,
        "tracin/target_grad_norm": inner(target_grad, target_grad).sqrt(),
        "tracin/target_cosine": math.nan}
    if target.is_whole_step:        # else it would cost another gradient
        metrics["tracin/invariant_error"] = invariant_error(scores.raw, target_grad, scores.G)
    if len(target.halves) == 2:
        rewards = target.batch.rewards
        chosen = rewards[target.rows.to(rewards.device)]
        metrics["tracin/target_cosine"] = cosine(*target.halves)    # NaN: one half is empty
        metrics["tracin/target_contrast"] = std(chosen) / max(std(rewards), 1e-12)
    return metrics


class Meter:
    """Collects the metrics of an update, and ends the run where they show a bug."""

    def __init__(self, setup, cfg, log, check=False):
        self.setup = setup
        self.cfg = cfg
        self.log = log
        self.check = check          # compare trainer and sampler before the first step
        zeros = torch.zeros(3, dtype=torch.float64, device=setup.device)
        # {name: tensor ()}, sums over the micro-batches so far, of which there may be none
        self.losses = {"loss": zeros[0], "policy_loss": zeros[0]}
        self.sums = {}              # {name: tensor (2,)}, sum and count of the other metrics
        self.num_begun = 0          # steps, also those for which influence keeps no row
        self.num_empty = 0          # steps for which it keeps no row
        self.grad_norms = []        # of the steps that were taken
        self.gaps = [zeros]         # |trainer's - sampler's log-prob|: sum, largest, count

    @torch.no_grad()
    def add(self, loss):
        """Count a micro-batch in, by its grpo.Loss."""
        self.losses = summed([self.losses, loss_parts(loss, self.cfg)])
        self.count(loss_metrics(loss, self.cfg))
        if not self.grad_norms:     # the policy is still the one that sampled
            rollout = loss.batch.rollout
            sampled = rollout.sampled_mask
            gap = (loss.logp - rollout.logp).abs().masked_fill(~sampled, 0).double()    # (n, T)
            self.gaps.append(torch.stack([gap.sum(), gap.max(), sampled.sum()]))
        self.log.loss(loss)

    def count(self, pairs):
        """Add pairs {name: (sum, count)}, tensors () or numbers, to the metrics of these names."""
        pairs = {name: torch.stack([torch.as_tensor(x, device=self.setup.device).double()
                                    for x in pair])
                 for name, pair in pairs.items()}
        self.sums = summed([self.sums, pairs])

    def logp_difference(self):
        """(mean, largest) difference of the trainer's log-probs from the sampler's, over the tokens
        before the first optimizer step, in all processes."""
        # in one piece, which synchronises a GPU once
        total, largest, count = all_gather(torch.stack(self.gaps).cpu()).unbind(1)
        return float(total.sum() / count.sum().clamp(min=1)), float(largest.max())

    def check_ratio(self):
        """Count a step. End the run if trainer and sampler, which have the same weights before the
        first step, disagree about a token."""
        self.num_begun += 1
        if not self.check or self.grad_norms:
            return
        error, tolerance = logp_error(*self.logp_difference(), self.setup.dtype)
        if not error <= tolerance:
            raise SystemExit(
                "stopped before the first step: the ratio is not 1, sampler and trainer disagree "
                f"by {error:.3g} nats on a token; something in the model is random, not finite or "
                "sees padding (or try dtype = 'float32', or device = 'cpu')")

    def check_influence(self, error):
        """End the run if influence is not that of plain backwards, by tracin.true_error."""
        tolerance = tolerance_of(self.setup.dtype)
        if not error <= tolerance:
            raise SystemExit(
                "stopped before the first step: the influences do not add up to the product of "
                f"ordinary gradients (relative error {float(error):.1e}, at most "
                f"{tolerance:g}); the tape has a bug (or try dtype = 'float32')")

    def add_influence(self, found):
        """Count a step's influence in, by its tracin.Influence."""
        metrics = influence_metrics(found)
        if self.cfg.tracin_target_ema:
            metrics["tracin/target_age"] = self.setup.target_average.age
        self.count({name: (x, 1) for name, x in metrics.items()})
        self.num_empty += not found.selection.weights.any()

    def check_finite(self, grad_norm):
        """Note the norm of a step's gradient. End the run if it or the loss is not finite."""
        # the loss of the steps so far, all but the last of which were finite
        own_loss, norm = torch.stack([self.losses["loss"], grad_norm.double()]).tolist()
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
        if self.cfg.tracin != "off":
            metrics["tracin/empty_steps"] = self.num_empty
        for name, total in summed(all_gather([on_cpu(self.losses)])).items():
            metrics[name] = float(total / max(1, self.num_begun))
        metrics["grad_norm"] = sum(self.grad_norms) / max(1, num_steps)
        metrics["num_steps"] = num_steps
        mean, largest = self.logp_difference()
        metrics["sampling/sampling_logp_difference/mean"] = mean
        metrics["sampling/sampling_logp_difference/max"] = largest
        return metrics


@torch.no_grad()
def rollout_toxicity(batch, setup):
    """Mean toxicity of the rollouts by the eval judge, which training never sees; {} without it."""
    judge = setup.judges.get("eval_judge")
    if judge is None:
        return {}
    mine = shard(len(batch.prompts))
    logits = all_gather(judge(batch.completions[mine]))
    return {"eval_judge/toxicity": float(torch.sigmoid(logits).mean())}


def call_metrics(completions, cfg):
    """Metrics of the calls of tools in completions; {} where no tool answers."""
    if not cfg.tools or not cfg.answers:
        return {}
    from extras.environment import tools
    return tools.call_metrics(completions)


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
        metrics["resample/used"] = used / sum(batch.rounds)
    if cfg.kl_in_reward:
        metrics["kl"] = float(batch.kl.sum() / sampled.sum())
    metrics |= call_metrics(batch.completions, cfg)
    if cfg.critic:      # what it expected while sampling
        from extras.critic import explained_variance
        known = batch.loss_mask & ~batch.returns.isnan()
        metrics["val/var_explained"] = explained_variance(
            rollout.values[known], batch.returns[known])
    return metrics
