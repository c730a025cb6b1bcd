"""
The metrics of an update, added up over its micro-batches and steps. run/metrics.py computes each of
them. The sums stay on the device until the end of the update, so that no micro-batch waits for a
GPU.
"""
import math
from typing import NamedTuple

import torch
from torch.nn.utils import get_total_norm

from common.guards import check_importance, check_ratio, check_step
from common.processes import all_gather
from run.metrics import influence_metrics, influence_spread, loss_metrics, units_of
from run.report import silent_clock


def totals_of(sums):
    """{name: sum, a tensor ()} -> {name: number}, over all processes."""
    numbers = torch.stack([*sums.values()]).tolist() if sums else []
    totals = {}
    for name, x in all_gather([*zip(sums, numbers)]):
        totals[name] = totals.get(name, 0.0) + x
    return totals


class Spread(NamedTuple):
    """How numbers are spread; five zeros of no numbers."""
    count: float
    mean: float
    std: float
    least: float
    greatest: float


def piece_of(x, mask, around=0.0):
    """What a Spread needs of the numbers x where mask is True: count, sum, sum of squares, least,
    greatest (5,). around: what is taken off before the sums, so that the difference of two squares
    loses no digits."""
    deviation = (x - around).masked_fill(~mask, 0).double()
    least = x.masked_fill(~mask, math.inf).min().double()
    greatest = x.masked_fill(~mask, -math.inf).max().double()
    return torch.stack([
        mask.sum().double(), deviation.sum(), deviation.square().sum(), least, greatest])


def spread_of(pieces, around=0.0):
    """The Spread of the numbers in the pieces of all processes."""
    # in one transfer, since each waits for a GPU
    rows = all_gather(torch.stack(pieces).tolist() if pieces else []) or [[0.0] * 5]
    pieces = torch.tensor(rows, dtype=torch.float64)                                # (M, 5)
    count, total, squares = pieces[:, :3].sum(0).tolist()
    if count == 0:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    variance = (squares - total ** 2 / count) / max(count - 1, 1)
    return Spread(count, around + total / count, max(variance, 0.0) ** 0.5,
                  float(pieces[:, 3].min()), float(pieces[:, 4].max()))


class Meter:
    """Watches an update, and collects its metrics."""

    def __init__(self, setup, cfg, clock=silent_clock, check=False, watch=None):
        """clock: the iteration's Clock. check: the first step is the first of a run. It ends the
        run if the trainer's log-probs are not the sampler's, or if influence is not what plain
        backward passes give. watch(Step, norm of the gradient) is called before each step."""
        self.setup = setup
        self.cfg = cfg
        self.clock = clock
        self.check = check          # until that step is taken
        self.watch = watch or (lambda step, grad_norm: None)
        self.num_begun = 0          # steps, also those for which influence keeps no row
        self.num_empty = 0          # steps for which it keeps no row
        self.num_steps = 0          # steps that were taken
        self.ratios = []            # pieces of a spread
        self.gaps = []              # likewise: |trainer's - sampler's log-prob| before a step
        self.influences = []        # (n,) of the rollouts that each step has scored
        # {name: sum} and {name: count}. A name without a count is divided by the number of steps.
        # loss and policy_loss are always logged
        self.zero = torch.zeros((), dtype=torch.float64, device=setup.device)
        self.sums = {"loss": self.zero, "policy_loss": self.zero}
        self.counts = {}

    def begin_step(self):
        """Count a step in, whether it will be taken or not -> True before the first one: the policy
        is the one that sampled."""
        self.num_begun += 1
        return self.num_steps == 0

    def count(self, pairs):
        """Add up {name: (sum, count or None)}, tensors () or numbers."""
        for name, (x, count) in pairs.items():
            self.sums[name] = self.sums.get(name, self.zero) + x
            if count is not None:
                self.counts[name] = self.counts.get(name, self.zero) + count

    @torch.no_grad()
    def add(self, loss):
        """Count a micro-batch in, by its loss.Loss."""
        self.count(loss_metrics(loss, self.cfg))
        self.ratios.append(piece_of(loss.ratio, units_of(loss), around=1.0))

        # before the first step the trainer's log-probs should be the sampler's
        if self.num_steps == 0:
            rollout = loss.batch.rollout
            sampled = rollout.sampled_mask & (loss.batch.age == 0)[:, None]     # not replayed
            self.gaps.append(piece_of((loss.logp - rollout.logp).abs(), sampled))
        self.clock.loss(loss)

    def logp_difference(self):
        """(mean, largest) difference of the trainer's log-probs from the sampler's, over the tokens
        before the first optimizer step, in all processes."""
        spread = spread_of(self.gaps)
        return spread.mean, spread.greatest

    def check_ratio(self, batch):
        """Before the first step of a run: is policy / sampler 1?"""
        if not self.check:
            return
        check_ratio(self.setup, batch, *self.logp_difference())
        if self.cfg.hook("importance") and (batch.age == 0).all():      # none is replayed
            check_importance(spread_of(self.ratios, around=1.0).mean)

    def add_influence(self, influence):
        """Count a step's tracin.Influence in."""
        self.influences.append(influence.scores.influence)
        self.count({name: (x, 1) for name, x in influence_metrics(influence, self.setup).items()})
        self.num_empty += not influence.selection.weights.any()

    def add_step(self, batch, grad_norm):
        """Count a step that is about to be taken, while its gradient is not clipped yet. grad_norm:
        its norm (). End the run if something in the step must not be there."""
        loss, norm = torch.stack([self.sums["loss"], grad_norm.double()]).tolist()
        check_step(self.setup, batch, sum(all_gather([loss])), norm)
        self.count({"grad_norm": (norm, 1)})
        if self.cfg.critic:
            head = self.setup.policy.value_head.parameters()
            norm = get_total_norm([p.grad for p in head if p.grad is not None])
            self.count({"val/grad_norm": (norm, 1)})
        self.num_steps += 1
        self.check = False

    def metrics(self):
        """The metrics of the whole update, over all processes -> {name: number}.

        Metrics:
            grad_norm: norm of the gradient before clipping, mean over steps
            num_steps: optimizer steps; 0: there was nothing to learn from
            ratio_std, ratio_min, ratio_max: over the tokens with loss of all passes; at sequence
                level over completions. With one pass they are rounding, with several ratio_std is
                often 0.1 to 0.3
            val/grad_norm: norm of the gradient of the critic's head, before clipping
            tracin/empty_steps: steps that kept no rollout
            sampling/sampling_logp_difference/mean, sampling/sampling_logp_difference/max:
                trainer's log-probs against the sampler's: rounding, or a bug
        """
        # means over what was counted, NaN where that is nothing, or over the steps
        steps = max(1, self.num_begun)
        counts = totals_of(self.counts)
        norms = ["grad_norm", "val/grad_norm"] if self.cfg.critic else ["grad_norm"]
        metrics = dict.fromkeys(norms, 0.0)         # without a step
        for name, total in totals_of(self.sums).items():
            metrics[name] = total / (counts[name] or math.nan) if name in counts else total / steps
        metrics["num_steps"] = self.num_steps
        if self.cfg.tracin != "off":
            metrics["tracin/empty_steps"] = self.num_empty

        # of all ratios, of all influences, and of sampler beside trainer
        ratio = spread_of(self.ratios, around=1.0)
        if ratio.count:
            metrics |= {"ratio_std": ratio.std, "ratio_min": ratio.least,
                        "ratio_max": ratio.greatest}
        if self.influences:
            metrics |= influence_spread(torch.cat(self.influences).cpu())
        mean, largest = self.logp_difference()
        metrics["sampling/sampling_logp_difference/mean"] = mean
        metrics["sampling/sampling_logp_difference/max"] = largest
        return metrics
