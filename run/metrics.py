"""
The numbers of an iteration. docs/running.md says what each of them means.

Those of the update stay on the device until the step, so that a GPU is waited for once.
"""
import itertools
import math

import torch

from extras.critic import explained_variance
from common.processes import all_gather, shard
from tape import inner, invariant_error


class Meter:
    """Collects the metrics of an update: of its micro-batches, its steps and its influence."""

    def __init__(self, nets, batch, cfg, log, check=False):
        self.nets = nets
        self.batch = batch
        self.cfg = cfg
        self.log = log
        self.check = check          # before the first step
        self.micro_batches = []     # {name: tensor ()}
        self.num_begun = 0          # steps, including those for which influence keeps no row
        self.grad_norms = []        # of the steps that were taken
        self.influence = []         # {name: number} of each step
        self.first_pass = []        # log-ratios of trainer and sampler (n, T), sampled_mask (n, T)

    def begin_step(self):
        self.num_begun += 1
        self.loss = torch.zeros((), dtype=torch.float64, device=self.batch.loss_mask.device)

    @torch.no_grad()
    def add(self, loss):
        """A micro-batch, by its grpo.Loss."""
        self.micro_batches.append(loss_metrics(loss, self.cfg))
        # the ratio to an infinite log-prob of the sampler is 0: its token would drop out
        self.loss += loss.total + 0 * loss.batch.rollout.logp.sum()
        if not self.grad_norms:     # the policy is still the one that sampled
            rollout = loss.batch.rollout
            self.first_pass.append((loss.logp - rollout.logp, rollout.sampled_mask))
        self.log.loss(loss)

    def logp_diff(self):
        """Trainer's log-probs less sampler's (M,) of the tokens of the first pass, in all
        processes."""
        found = [log_ratios[sampled].cpu() for log_ratios, sampled in self.first_pass]
        return all_gather(torch.cat([torch.zeros(0), *found]))

    def check_ratio(self):
        """Before the first step trainer and sampler are the same weights. Ends the run if their
        log-probs do not agree."""
        logp_diff = self.logp_diff() if self.check and not self.grad_norms else []
        if len(logp_diff) == 0:
            return
        gap, bound = gap_of(logp_diff, self.nets.dtype)
        if not gap <= bound:
            raise SystemExit(
                "stopped before the first step: the ratio is not 1, sampler and trainer disagree "
                f"by {gap:.3g} nats on a token; something in the model is random, not finite or "
                "sees padding (or try dtype = 'float32')")

    def add_influence(self, found):
        """What keep_helpful found in a step. Ends the run unless the scores add up to <gradient of
        the step, target's gradient>, where it has the first from a plain backward."""
        bound = bound_of(self.nets.dtype)
        if found.true_error is not None and not found.true_error <= bound:
            raise SystemExit(
                "stopped before the first step: the influences do not add up to the product of "
                f"ordinary gradients (relative error {float(found.true_error):.1e}, at most "
                f"{bound:g}); the tape or the loss in its units has a bug (or try dtype = "
                "'float32')")
        self.influence.append(influence_metrics(found, self.nets))

    def check_finite(self, grad_norm):
        """Ends the run if the loss or the gradient of a step is not finite."""
        own_loss, norm = torch.stack([self.loss, grad_norm.double()]).tolist()
        loss = sum(all_gather([own_loss]))
        if not math.isfinite(loss + norm):
            raise SystemExit(
                f"stopped: loss {loss}, grad_norm {norm}; this step was not taken, the last "
                "checkpoint stands. Look for a reward that is not finite; else lower "
                "learning_rate or raise beta, then --resume=True")
        self.grad_norms.append(norm)

    def metrics(self):
        """{name: number} of the whole update, over all processes."""
        micros = all_gather(numbers(self.micro_batches))
        num_steps = len(self.grad_norms)
        metrics = mean_over_tokens(micros)
        metrics |= mean_influence(self.influence)
        if self.cfg.kl_in_reward:
            sampled = self.batch.rollout.sampled_mask
            metrics["kl"] = float(self.batch.kl.sum() / sampled.sum())
        metrics |= {"loss": 0.0, "policy_loss": 0.0}        # where no row carries loss
        for name in micros[0] if micros else ():
            if name.endswith("loss"):
                metrics[name] = sum(m[name] for m in micros) / self.num_begun
        metrics["grad_norm"] = sum(self.grad_norms) / max(1, num_steps)
        metrics["num_steps"] = num_steps
        logp_diff = self.logp_diff().abs()
        name = "sampling/sampling_logp_difference"
        metrics[f"{name}/mean"] = float(logp_diff.mean()) if len(logp_diff) else 0.0
        metrics[f"{name}/max"] = float(logp_diff.max()) if len(logp_diff) else 0.0
        return metrics


def bound_of(dtype):
    """Of the relative difference between two ways to compute, with forward passes in dtype."""
    return 1e-3 if dtype == torch.float32 else 5e-2


def gap_of(logp_diff, dtype):
    """(gap in nats, its bound) of differences between log-probs that should be equal: the largest
    in float32, else the mean."""
    gaps = logp_diff.abs()
    gap = gaps.max() if dtype == torch.float32 else gaps.mean()
    return float(gap), bound_of(dtype)


def loss_metrics(loss, cfg):
    """Metrics of a micro-batch, from its grpo.Loss, as tensors ()."""
    mask = loss.batch.loss_mask
    ratio = loss.ratio                # (n, T), or (n, 1) at sequence level: then rows count
    unit = mask if ratio.shape == mask.shape else mask.any(1, keepdim=True)
    units = unit.sum().clamp(min=1)
    A = loss.batch.advantages.view(len(mask), -1)                       # (n, 1), or (n, T)
    metrics = {"tokens": mask.sum(), "units": unit.sum(), "ratio": (ratio * unit).sum() / units}
    low_bound, high_bound = cfg.clip_range
    low = (ratio < low_bound) & (A < 0) & unit
    high = (ratio > high_bound) & (A > 0) & unit
    if cfg.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = high.sum() / units
    elif cfg.loss_type != "sapo":
        metrics["clip_ratio/low_mean"] = low.sum() / units
        metrics["clip_ratio/high_mean"] = high.sum() / units
        metrics["clip_ratio/region_mean"] = (low | high).sum() / units
    if loss.kl_by_token is not None:
        metrics["kl"] = (loss.kl_by_token * mask).sum() / mask.sum().clamp(min=1)
    metrics["loss"] = loss.total.detach()
    metrics["policy_loss"] = (loss.policy.double() + loss.kl).detach()      # TRL's
    if cfg.kl_in_loss:
        metrics["kl_loss"] = loss.kl.detach()
    if cfg.entropy_coef:
        metrics["entropy_loss"] = loss.entropy.detach()
    if cfg.critic:
        metrics["critic_loss"] = loss.critic.detach()
    return metrics


def numbers(dicts):
    """Dicts of tensors () with the same keys -> dicts of numbers. A GPU is waited for once."""
    if not dicts:
        return []
    rows = torch.stack([torch.stack(list(d.values())) for d in dicts]).tolist()
    return [dict(zip(dicts[0], row)) for row in rows]


def mean_over_tokens(micros):
    """Metrics of micro-batches -> means over the tokens of the update (over the rows, where a ratio
    is of a sequence)."""
    metrics = {}
    for name in micros[0] if micros else ():
        unit = "tokens" if name == "kl" else "units"
        if "ratio" in name or name == "kl":
            total = max(1, sum(m[unit] for m in micros))
            metrics[name] = sum(m[name] * m[unit] for m in micros) / total
    return metrics


def influence_metrics(found, nets):
    """Metrics of a step's influence. found: tracin.Findings."""
    metrics, = numbers([{
        "tracin/positive_ratio": (found.scores > 0).float().mean(),
        "tracin/mean_ip": found.scores.mean(),
        "tracin/min_ip": found.scores.min(),
        "tracin/max_ip": found.scores.max(),
        "tracin/selected_ratio": (found.row_weights != 0).float().mean(),
        "tracin/invariant_error": invariant_error(found.raw_scores, found.batch_grad, found.G)}])
    metrics["tracin/self_share"] = float(found.self_share)
    metrics["tracin/fallback"] = float(found.fallback)
    if nets.influence.average.total:
        metrics["tracin/target_age"] = float(nets.influence.average.age)
    return metrics | target_metrics(found)


def target_metrics(found):
    """Metrics of the target's gradient and rows. A function of the config file has no rows."""
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
    """Influence's metrics of the steps -> those of the update: means, but the extremes."""
    if not steps:
        return {}
    metrics = {name: sum(m[name] for m in steps) / len(steps) for name in steps[0]}
    metrics["tracin/empty_steps"] = sum(m["tracin/selected_ratio"] == 0 for m in steps)
    for name, extreme in (("invariant_error", max), ("min_ip", min), ("max_ip", max)):
        metrics[f"tracin/{name}"] = extreme(m[f"tracin/{name}"] for m in steps)
    return metrics


def tensors_differing(nets):
    """How many tensors of the reference differ from the policy's, which a line says too."""
    pairs = zip(nets.reference.parameters(), nets.policy.parameters(), strict=True)
    differing = sum(not torch.equal(r, p) for r, p in pairs)
    print(f"reference synced: {differing} tensors differ from the policy's (0 right after a copy)")
    return differing


def std(x):
    """Standard deviation, NaN left out; exactly 0.0 if all values are the same number."""
    x = x[~x.isnan()]
    if len(x) < 2 or x.min() == x.max():
        return 0.0
    return float(x.std())


@torch.no_grad()
def rollout_toxicity(prompts, batch, nets):
    """Mean toxicity of the rollouts by the eval judge, which training never sees. {} without it."""
    judge = nets.judges.get("eval_judge")
    if judge is None:
        return {}
    N = len(batch.completions)
    group = N // len(prompts)
    asked = [prompts[i // group].text for i in range(N)]
    mine = shard(N)
    log_odds = all_gather(judge(asked[mine], batch.completions[mine]))
    return {"eval_judge/toxicity": float(torch.sigmoid(log_odds).mean())}


def batch_metrics(batch, cfg):
    """Metrics of a Batch, named as TRL names them."""
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
        "advantage_max": float(batch.advantages.abs().max()),
        "frac_reward_zero_std": float(batch.equal_groups(cfg.num_generations).float().mean()),
        "entropy": float(rollout.entropy[batch.loss_mask].mean()),
        "num_completion_tokens": int(batch.loss_mask.sum()),
        "forced": 1 - int(sampled.sum()) / int(rollout.completion_mask.sum()),
        "completions/clipped_ratio": float((~rollout.ended).float().mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/mean_terminated_length": float(terminated.mean()) if len(terminated) else 0.0}
    for name, scores in zip(cfg.reward_funcs, batch.scores.T):
        metrics[f"rewards/{name}/mean"] = float(scores.nanmean())
        metrics[f"rewards/{name}/std"] = std(scores)
    metrics |= cfg.call_metrics(batch.completions)
    if batch.returns is not None:       # what the critic expected while sampling
        known = batch.loss_mask & ~batch.returns.isnan()
        metrics["val/var_explained"] = explained_variance(
            rollout.values[known], batch.returns[known])
    return metrics
