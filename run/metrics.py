"""
The numbers of an iteration. docs/metrics.md says what each of them means.

Those of the update are tensors until the step, so that a GPU is waited for once and not for each of
them. Those of the batch are taken from a copy of it on the CPU.
"""
import copy
import dataclasses
import itertools
import math

import torch
from torch.nn.utils import get_total_norm

from critic import explained_variance
from run.processes import all_gather, shard
from tracin import inner, invariant_error

JUDGE_SHARE = 0.02      # of an iteration's cost
FEWEST_JUDGED = 32      # rows, for a mean that says something


class Meter:
    """Collects the metrics of an update: of its micro-batches, its steps and its influence."""

    def __init__(self, nets, batch, cfg, log, first=False):
        self.first = first          # iteration of a run
        self.nets = nets
        self.batch = batch
        self.cfg = cfg
        self.log = log
        T = batch.loss_mask.shape[1]
        self.prompt_lengths = batch.rollout.attention_mask[:, :-T].sum(1)                   # (N,)
        self.unread = []            # {name: tensor ()} of micro-batches, on the device
        self.micro_batches = []     # {name: number} of those that were read
        self.steps = []             # (loss, grad_norm, that of the value head) of each
        self.influence = []
        self.first_pass = []        # log-ratios (n, T), then the tokens that count (n, T)
        self.logp_diff = torch.zeros(0)     # trainer less sampler, first pass, of those read

    def begin_step(self):
        self.loss = torch.zeros((), dtype=torch.float64, device=self.batch.loss_mask.device)
        self.rows = []
        self.log_ratios = []

    @torch.no_grad()
    def add(self, rows, out):
        """A micro-batch: its rows (n,) of the batch and what loss_of returned."""
        metrics = loss_metrics(out, self.cfg)
        prompts, completions = self.prompt_lengths[rows], self.batch.lengths[rows]
        self.unread.append(metrics | {
            "real": (prompts + completions).sum(),
            "positions": len(rows) * (prompts.max() + completions.max())})
        self.loss += metrics["loss"]
        self.rows.append(rows)
        self.log_ratios.append(out.logp - out.batch.rollout.logp)
        self.log.loss(metrics)

    def read(self, *more):
        """Numbers of `more` tensors (). What the micro-batches left on the device is read with
        them, so that a GPU is waited for once."""
        stacked = [torch.stack(list(m.values())) for m in self.unread]
        near = [x.cpu() for x in (*more, *stacked, *self.first_pass)]
        first = len(more)
        last = first + len(stacked)
        for names, x in zip(self.unread, near[first:last]):
            self.micro_batches.append(dict(zip(names, x.tolist())))
        for log_ratio, chosen in zip(near[last::2], near[last + 1::2]):
            self.logp_diff = torch.cat([self.logp_diff, log_ratio[chosen]])
        self.unread = []
        self.first_pass = []
        return [float(x) for x in near[:first]]

    def check_ratio(self):
        """Before the first step trainer and sampler are the same weights: their log-probs must
        agree. Ends the run in its first iteration if they do not."""
        if self.steps:
            return
        if self.rows:
            chosen = self.batch.rollout.sampled_mask[torch.cat(self.rows)]
            self.first_pass += [torch.cat(self.log_ratios), chosen]
        if not self.first:
            return
        self.read()
        logp_diff = all_gather(self.logp_diff)
        if len(logp_diff) == 0:
            return
        gap, bound = gap_of(logp_diff, is_exact(self.nets, self.cfg))
        if not math.isfinite(gap):
            raise SystemExit(f"stopped before the first step: {self.not_finite()}")
        if gap > bound:
            raise SystemExit(
                "stopped before the first step: the ratio is not 1, sampler and trainer disagree "
                f"by {gap:.3g} nats on a token; something in the model is random or sees padding "
                "(or try dtype = 'float32')")

    def add_influence(self, found):
        """What keep_helpful found in a step. Ends the run if the scores are wrong."""
        check_scores(found, self.nets, self.cfg)
        self.influence.append(influence_metrics(found, self.nets))

    def check_finite(self, grad_norm):
        """Ends the run if a number that the step depends on is not finite."""
        moments = [x for state in self.nets.optimizer.state.values() for x in state.values()]
        largest = get_total_norm([*moments, self.old_logp()], math.inf)
        head_norm = value_head_norm(self.nets.policy)
        forced = (self.batch.loss_mask & ~self.batch.rollout.sampled_mask).sum()
        loss, grad_norm, largest, head_norm, forced = self.read(
            self.loss, grad_norm, largest, head_norm, forced)
        if forced:
            raise SystemExit(
                f"stopped: {forced:.0f} tokens that the policy did not choose carry loss; this "
                "step was not taken. A mask of the loss must stay within rollout.sampled_mask")
        loss = sum(all_gather([loss]))
        if not all(map(math.isfinite, (loss, grad_norm, largest))):
            raise SystemExit(
                f"stopped: loss {loss}, grad_norm {grad_norm}; this step was not taken, the last "
                f"checkpoint stands. {self.not_finite()}")
        clipped = max(1.0, grad_norm / (self.cfg.max_grad_norm or math.inf))
        self.steps.append((loss, grad_norm, head_norm * clipped))

    def old_logp(self):
        """Log-probs of the sampled tokens as they were drawn (N, T), 0 where there is none."""
        return self.batch.rollout.logp.masked_fill(~self.batch.rollout.completion_mask, 0)

    def not_finite(self):
        """What is not finite, the cause before its effects, and what to do."""
        if any(not p.isfinite().all() for p in self.nets.policy.parameters()):
            return "The policy's weights are not finite: its file or the checkpoint is damaged"
        states = self.nets.optimizer.state.values()
        if any(not x.isfinite().all() for state in states for x in state.values()):
            return "AdamW's moments are not finite: go on from an earlier checkpoint"
        if self.batch.rewards is not None and self.batch.rewards.isinf().any():
            return "A reward is too large for float32: let the reward function return less"
        if not self.old_logp().isfinite().all():
            return ("A log-prob of the sampled tokens is not finite: raise temperature, or set "
                    "dtype = 'float32'")
        return "Lower learning_rate or raise beta, then --resume=True"

    def metrics(self):
        """{name: number} of the whole update, over all processes."""
        if self.unread:     # of steps that were not taken
            self.read()
        micros = all_gather(self.micro_batches)
        num_steps = max(1, len(self.steps))
        metrics = mean_over_tokens(micros)
        metrics |= mean_influence(self.influence)
        if self.cfg.kl_in_reward:
            metrics["kl"] = float(self.batch.kl.sum() / self.batch.rollout.sampled_mask.sum())
        metrics["loss"] = sum(loss for loss, _, _ in self.steps) / num_steps
        metrics["policy_loss"] = sum(m["policy_loss"] for m in micros) / num_steps
        metrics["grad_norm"] = sum(norm for _, norm, _ in self.steps) / num_steps
        metrics["num_steps"] = len(self.steps)
        if self.cfg.critic:
            metrics["critic_loss"] = sum(m["critic_loss"] for m in micros) / num_steps
            metrics["val/grad_norm"] = sum(norm for _, _, norm in self.steps) / num_steps
        return metrics | sampling_metrics(all_gather(self.logp_diff))


def is_exact(nets, cfg):
    """True where products of the forward passes are in float32."""
    return nets.dtype == torch.float32


def bound_of(exact):
    """Of relative differences."""
    return 1e-3 if exact else 5e-2


def gap_of(logp_diff, exact):
    """(gap in nats, its bound) of differences between log-probs that should be equal: the largest
    where products are exact, which is in float32, else the mean."""
    if exact:
        return float(logp_diff.abs().max()), 1e-3
    return float(logp_diff.abs().mean()), 0.05


def loss_metrics(out, cfg):
    """Metrics of a micro-batch, from what loss_of returned, as tensors ()."""
    mask = out.batch.loss_mask
    ratio = out.ratio                 # (n, T), or (n, 1) at sequence level: then rows count
    unit = mask if ratio.shape == mask.shape else mask.any(1, keepdim=True)
    units = unit.sum().clamp(min=1)
    row_units = unit.sum(1)                                             # (n,) 0: no loss in the row
    A = out.batch.advantages.view(len(mask), -1)                        # (n, 1), or (n, T)
    metrics = {"tokens": mask.sum(), "units": unit.sum(), "ratio": (ratio * unit).sum() / units}
    low_bound, high_bound = cfg.clip_range
    high = (ratio > high_bound) & (A > 0) & unit
    if cfg.loss_type == "cispo":
        metrics["cispo_clip_ratio"] = high.sum() / units
    elif cfg.loss_type != "sapo":
        low = (ratio < low_bound) & (A < 0) & unit
        low_share, high_share = (x.sum(1) / row_units.clamp(min=1) for x in (low, high))    # (n,)
        metrics["clip_ratio/low_mean"] = low.sum() / units
        metrics["clip_ratio/low_min"] = low_share.masked_fill(row_units == 0, 1).min()
        metrics["clip_ratio/high_mean"] = high.sum() / units
        metrics["clip_ratio/high_max"] = high_share.max()
        metrics["clip_ratio/region_mean"] = (low | high).sum() / units
    if out.kl_by_token is not None:
        metrics["kl"] = (out.kl_by_token * mask).sum() / mask.sum().clamp(min=1)
    metrics["loss"] = out.total.detach()
    metrics["policy_loss"] = (out.policy + out.kl).detach()     # as TRL
    if cfg.critic:
        metrics["critic_loss"] = out.critic.detach()
    return metrics


def numbers(dicts):
    """Dicts of scalar tensors (same keys) -> dicts of Python numbers, with a single device sync."""
    if not dicts:
        return []
    rows = torch.stack([torch.stack(list(d.values())) for d in dicts]).tolist()
    return [dict(zip(dicts[0], row)) for row in rows]


def mean_over_tokens(micros):
    """Metrics of micro-batches -> those of the update: means over tokens (over rows, of a ratio at
    sequence level), but the extremes."""
    if not micros:
        return {"padding": 0.0}
    apart = ("tokens", "units", "loss", "policy_loss", "critic_loss", "real", "positions")
    metrics = {}
    for name in micros[0]:
        if name not in apart:
            unit = "tokens" if name == "kl" else "units"
            total = max(1, sum(m[unit] for m in micros))
            metrics[name] = sum(m[name] * m[unit] for m in micros) / total
    for name, extreme in (("clip_ratio/low_min", min), ("clip_ratio/high_max", max)):
        if name in metrics:
            metrics[name] = extreme(m[name] for m in micros)
    metrics["padding"] = 1 - sum(m["real"] for m in micros) / sum(m["positions"] for m in micros)
    return metrics


def check_scores(found, nets, cfg):
    """Ends the run unless the scores add up to <gradient of the step, target's gradient>, with the
    first from a plain backward. Without that one (see keep_helpful) nothing is checked."""
    bound = bound_of(is_exact(nets, cfg))
    if found.true_error is not None and not found.true_error <= bound:
        raise SystemExit(
            "stopped before the first step: the influences do not add up to the product of "
            f"ordinary gradients (relative error {float(found.true_error):.1e}, at most "
            f"{bound:g}); the tape or the loss in its units has a bug (or try dtype = 'float32')")


def influence_metrics(found, nets):
    """Metrics of a step's influence. found: tracin.Findings."""
    scores = found.scores
    names = {p: name for name, p in nets.policy.named_parameters() if p.requires_grad}
    metrics = numbers([{
        "tracin/positive_ratio": (scores > 0).float().mean(),
        "tracin/negative_ratio": (scores < 0).float().mean(),
        "tracin/zero_ratio": (scores == 0).float().mean(),
        "tracin/mean_ip": scores.mean(),
        "tracin/std_ip": scores.std(),
        "tracin/min_ip": scores.min(),
        "tracin/max_ip": scores.max(),
        "tracin/selected_ratio": (found.weights != 0).float().mean(),
        "tracin/invariant_error": invariant_error(found.raw_scores, found.batch_grad, found.G),
        }
        | {f"tracin/target_grad_norm/{names[p]}": sum(half[p] for half in found.halves).norm()
           for p in list(names)[:3]}])[0]
    metrics["tracin/fallback"] = float(found.fallback)
    metrics["tracin/self_share"] = float(found.self_share)
    if nets.influence.average.total:
        metrics["tracin/target_age"] = float(nets.influence.average.age)
    return metrics | target_metrics(found)


def target_metrics(found):
    """Metrics of the target's gradient and rows. A function of the config file has no rows."""
    batch, rows = found.target
    advantages = batch.advantages[rows]
    extremes = advantages.min(), advantages.max()
    pairs = itertools.combinations_with_replacement(found.halves, 2)
    *products, low, high = torch.stack([*(inner(G, H) for G, H in pairs), *extremes]).tolist()
    if len(products) == 1:
        return {"tracin/target_grad_norm": products[0] ** 0.5}
    first, both, second = products      # <G, G>, <G, H>, <H, H> of the two halves
    rewards = batch.rewards[rows.to(batch.rewards.device)]
    return {
        "tracin/target_grad_norm": max(first + second + 2 * both, 0.0) ** 0.5,
        "tracin/target_cosine": both / (first * second) ** 0.5 if first * second else math.nan,
        "tracin/target_advantage_min": low,
        "tracin/target_advantage_max": high,
        "tracin/target_rows": len(rows),
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
    """Number of tensors in which the reference differs from the policy: 0 right after a copy."""
    pairs = zip(nets.reference.parameters(), nets.policy.parameters(), strict=True)
    differing = sum(not torch.equal(r, p) for r, p in pairs)
    print(f"reference synced: {differing} tensors differ from the policy's (0 right after a copy)")
    return differing


def sampling_metrics(logp_diff):
    """logp_diff (M,): trainer's log-probs less sampler's, of the tokens of the first pass."""
    if len(logp_diff) == 0:
        logp_diff = torch.zeros(1)
    return numbers([{
        "sampling/sampling_logp_difference/mean": logp_diff.abs().mean(),
        "sampling/sampling_logp_difference/max": logp_diff.abs().max(),
        "sampling/importance_sampling_ratio/min": logp_diff.min().exp(),
        "sampling/importance_sampling_ratio/mean": logp_diff.exp().mean(),
        "sampling/importance_sampling_ratio/max": logp_diff.max().exp()}])[0]


@torch.no_grad()
def rollout_toxicity(it, prompts, batch, nets):
    """Mean toxicity of an iteration's rollouts by the eval judge, which training never sees.

    {} without that judge, and where it is not this iteration's turn: see rows_to_judge.
    """
    judge = nets.judges.get("eval_judge")
    if judge is None:
        return {}
    N = len(batch.completions)
    n, every = rows_to_judge(N, weights_of(nets.policy), getattr(judge, "num_weights", 0))
    if it % every:
        return {}
    chosen = [i * N // n for i in range(n)][shard(n)]
    group = N // len(prompts)
    texts = [prompts[i // group].text for i in chosen]
    log_odds = all_gather(judge(texts, [batch.completions[i] for i in chosen]))
    return {"eval_judge/toxicity": float(torch.sigmoid(log_odds).mean())}


def rows_to_judge(N, policy_weights, judge_weights):
    """(rows of an iteration's N that the eval judge reads, every how many iterations) so that it
    costs about JUDGE_SHARE of the iteration.

    By arithmetic and not by time, so that a run that goes on has the same metrics. A row costs the
    judge 2 operations per weight and token, and the policy 8: it samples, goes forward, backward.
    """
    budget = N
    if judge_weights:
        budget = min(N, JUDGE_SHARE * N * 8 * policy_weights / (2 * judge_weights))
    n = min(N, max(FEWEST_JUDGED, int(budget)))
    return n, math.ceil(n / budget)


def weights_of(model):
    """Number of weights but those of embeddings, whose lookup costs nothing."""
    return sum(p.numel() for m in model.modules() if not isinstance(m, torch.nn.Embedding)
               for p in m.parameters(recurse=False))


def std(x):
    """Standard deviation, NaN left out; exactly 0.0 if all values are the same number."""
    x = x[~x.isnan()]
    if len(x) < 2 or x.min() == x.max():
        return 0.0
    return float(x.std())


def batch_on_host(batch):
    """A copy of a Batch on the CPU, without `allowed`, for all that the logs ask of it."""
    batch = copy.copy(batch)
    batch.rollout = dataclasses.replace(batch.rollout, allowed=None)
    fields = [(vars(part), name) for part in (batch, batch.rollout)
              for name, x in vars(part).items() if torch.is_tensor(x)]
    for part, name in fields:
        part[name] = part[name].cpu()
    return batch


def row_advantages(batch):
    """Advantages (N,): with a critic means over the chosen tokens of each row."""
    chosen = batch.rollout.sampled_mask
    if batch.advantages.dim() == 1:
        return batch.advantages
    return (batch.advantages * chosen).sum(1) / chosen.sum(1).clamp(min=1)


def value_metrics(batch):
    """Metrics of what the critic expected while sampling, over the tokens that carry loss."""
    known = batch.loss_mask & ~batch.returns.isnan()
    values = batch.rollout.values[known]
    returns = batch.returns[known]
    return {
        "val/mean": float(values.mean()),
        "val/std": std(values),
        "returns/mean": float(returns.mean()),
        "val/var_explained": explained_variance(values, returns)}


def value_head_norm(policy):
    """Norm () of the gradient of the value head, 0 without one."""
    head = policy.value_head.parameters() if policy.value_head else []
    return get_total_norm([p.grad for p in head])


def batch_metrics(batch, cfg):
    """Metrics of a Batch, named as TRL names them."""
    G = cfg.num_generations
    known = batch.rewards[~batch.rewards.isnan()]
    if len(known) == 0:
        known = torch.full((1,), math.nan)
    groups = [batch.completions[i:i + G] for i in range(0, len(batch.completions), G)]
    identical = [len(set(texts)) == 1 and G > 1 for texts in groups]
    ended = batch.rollout.ended
    num_tokens = int(batch.rollout.completion_mask.sum())
    metrics = {
        "reward": float(known.mean()),
        "reward_std": std(known),
        "reward_min": float(known.min()),
        "reward_max": float(known.max()),
        "advantage_max": float(batch.advantages.abs().max()),
        "frac_reward_zero_std": float(batch.equal_groups(G).float().mean()),
        "frac_identical_groups": sum(identical) / len(identical),
        "entropy": float(batch.rollout.entropy[batch.loss_mask].mean()),
        "num_completion_tokens": int(batch.loss_mask.sum()),
        "forced": 1 - int(batch.rollout.sampled_mask.sum()) / num_tokens,
        "logp_min": float(batch.rollout.logp.min()),
        "completions/clipped_ratio": float((~ended).float().mean())}
    for name, scores in zip(cfg.reward_funcs, batch.scores.T):
        metrics[f"rewards/{name}/mean"] = float(scores.nanmean())
        metrics[f"rewards/{name}/std"] = std(scores)
    metrics |= cfg.call_metrics(batch.completions)
    if batch.returns is not None:
        metrics |= value_metrics(batch)
    lengths = batch.rollout.sampled_mask.sum(1).float()
    terminated = lengths[ended] if ended.any() else torch.zeros(1)
    for kind, x in (("", lengths), ("terminated_", terminated)):
        metrics[f"completions/mean_{kind}length"] = float(x.mean())
        metrics[f"completions/min_{kind}length"] = float(x.min())
        metrics[f"completions/max_{kind}length"] = float(x.max())
    return metrics
