"""
The metrics of an update, as its micro-batches and steps come in: sums and extremes. They stay on
the device until the end of the update, so that a GPU is synchronised once.
"""
import math

import torch

from torch.nn.utils import get_total_norm

from common.guards import check_step
from common.processes import all_gather
from run.metrics import (
    first_layers, influence_metrics, influence_spread, loss_metrics, loss_parts, suspects_of,
    units_of)


def summed(dicts):
    """Add up dicts of numbers or tensors by name."""
    total = {}
    for values in dicts:
        for name, x in values.items():
            total[name] = total.get(name, 0) + x
    return total


def on_device(x, device):
    """A tensor () or a number as float64 on a device. A number is filled in there: to copy it from
    the CPU is to wait for a GPU."""
    if torch.is_tensor(x):
        return x.to(device).double()
    return torch.full((), float(x), dtype=torch.float64, device=device)


def on_cpu(tensors):
    """Copy {name: tensor}, all of one shape, to the CPU. Synchronises a GPU once."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack(list(tensors.values())).cpu()))


class Sums:
    """Sums {name: tensor}, all of one shape."""

    def __init__(self, first=None):
        self.values = first or {}

    def add(self, values):
        self.values = summed([self.values, values])

    def over_all(self):
        """The sums of all processes, on the CPU."""
        return summed(all_gather([on_cpu(self.values)]))


class Spread:
    """Count, mean, standard deviation and extremes of numbers that come in pieces. around: where
    most of them are, so that no digits are lost in the difference of two squares."""

    def __init__(self, device, around=0.0):
        self.around = around
        zeros = torch.zeros(3, dtype=torch.float64, device=device)
        infinite = torch.full_like(zeros[:1], math.inf)
        # of each piece: count, sum, sum of squares, least, greatest; the first has no numbers
        self.parts = [torch.cat([zeros, infinite, -infinite])]

    def add(self, x, mask):
        """Count in the numbers x where mask is True."""
        deviation = (x - self.around).masked_fill(~mask, 0).double()
        least = x.masked_fill(~mask, math.inf).min().double()
        greatest = x.masked_fill(~mask, -math.inf).max().double()
        self.parts.append(torch.stack([
            mask.sum().double(), deviation.sum(), deviation.square().sum(), least, greatest]))

    def over_all(self):
        """(count, mean, std, least, greatest) of all processes; of no numbers five zeros."""
        parts = all_gather(torch.stack(self.parts).cpu())                               # (M, 5)
        count, total, squares = parts[:, :3].sum(0).tolist()
        if count == 0:
            return (0.0,) * 5
        variance = (squares - total ** 2 / count) / max(count - 1, 1)
        return (count, self.around + total / count, max(variance, 0.0) ** 0.5,
                float(parts[:, 3].min()), float(parts[:, 4].max()))


class Meter:
    """The metrics of an update, as they are collected."""

    def __init__(self, setup, cfg, log, check=False, watch=None):
        """check: these are the first steps of a run, which end it if the trainer's log-probs are
        not the sampler's, or if influence is not that of plain backward passes. watch(Step, norm of
        the gradient) is called before each step that is taken."""
        self.setup = setup
        self.cfg = cfg
        self.log = log
        self.check = check
        self.watch = watch
        zeros = torch.zeros(3, dtype=torch.float64, device=setup.device)
        self.losses = Sums({"loss": zeros[0], "policy_loss": zeros[0]})     # there may be no rows
        self.means = Sums()         # (2,) each, sum and count of the other metrics
        self.ratios = Spread(setup.device, around=1.0)
        self.gaps = Spread(setup.device)    # |trainer's - sampler's log-prob| before the first step
        self.influences = []        # (n,) of the scored rollouts of each step
        # tokens under the loss that the policy did not choose; advantages, log-probs not finite
        self.suspects = zeros
        self.num_begun = 0          # steps, also those for which influence keeps no row
        self.num_empty = 0          # steps for which it keeps no row
        self.grad_norms = []        # of the steps that were taken
        self.head_norms = []        # of the critic's head in these

    @property
    def is_fresh(self):
        """No step was taken yet: the policy is the one that sampled."""
        return not self.grad_norms

    @property
    def is_checked(self):
        """The next step is the first one of a run, whose numbers are checked."""
        return self.check and self.is_fresh

    @torch.no_grad()
    def add(self, loss):
        """Count a micro-batch in, by its loss.Loss."""
        self.losses.add(loss_parts(loss, self.cfg))
        self.count(loss_metrics(loss, self.cfg))
        self.ratios.add(loss.ratio, units_of(loss))
        self.suspects = self.suspects + suspects_of(loss)

        # before the first step the trainer's log-probs should be the sampler's
        if self.is_fresh:
            rollout = loss.batch.rollout
            sampled = rollout.sampled_mask & (loss.batch.age == 0)[:, None]     # not replayed
            self.gaps.add((loss.logp - rollout.logp).abs(), sampled)            # (n, T)
        self.log.loss(loss)

    def count(self, pairs):
        """Add pairs {name: (sum, count)}, tensors () or numbers, to the metrics of these names."""
        pairs = {name: torch.stack([on_device(x, self.setup.device) for x in pair])
                 for name, pair in pairs.items()}
        self.means.add(pairs)

    def logp_difference(self):
        """(mean, largest) difference of the trainer's log-probs from the sampler's, over the tokens
        before the first optimizer step, in all processes."""
        _, mean, _, _, largest = self.gaps.over_all()
        return mean, largest

    def add_influence(self, found):
        """Count a step's influence in, by its tracin.Influence.

        Metrics:
            tracin/target_age: steps in the average of the target's gradient
        """
        self.influences.append(found.scores.influence)
        metrics = influence_metrics(found)
        metrics |= first_layers(self.setup.policy, found.target.gradient)
        if self.setup.target_average:
            metrics["tracin/target_age"] = self.setup.target_average.age
        self.count({name: (x, 1) for name, x in metrics.items()})
        self.num_empty += not found.selection.weights.any()

    def add_step(self, step, grad_norm):
        """Count a Step that is about to be taken, by the norm of its gradient (). One with what
        must not be in it ends the run."""
        # in one piece, which synchronises a GPU once
        head_norm = self.head_norm(grad_norm)
        numbers = torch.stack([self.losses.values["loss"], grad_norm.double(), head_norm])
        loss, norm, head_norm, *suspects = torch.cat([numbers, self.suspects]).tolist()
        self.grad_norms.append(norm)
        self.head_norms.append(head_norm)
        loss, *suspects = (sum(x) for x in zip(*all_gather([[loss, *suspects]])))
        check_step(self.setup, loss, norm, *suspects)
        if self.watch:
            self.watch(step, grad_norm)

    def head_norm(self, grad_norm):
        """Norm () of the gradient of the critic's head before clipping; 0 without one."""
        if not self.cfg.critic:
            return torch.zeros_like(grad_norm.double())
        head = [p.grad for p in self.setup.policy.value_head.parameters() if p.grad is not None]
        # it is clipped by now
        most = self.cfg.max_grad_norm or math.inf
        return get_total_norm(head).double() * (grad_norm / most).clamp(min=1)

    def metrics(self):
        """Put together the metrics of the whole update, over all processes -> {name: number}.

        Metrics:
            grad_norm: norm of the gradient before clipping, mean over steps
            num_steps: optimizer steps; 0: skipped, and a warning says why
            ratio_std, ratio_min, ratio_max: over the tokens with loss of all passes; at sequence
                level over completions. With one pass they are rounding, with several ratio_std is
                often 0.1 to 0.3
            val/grad_norm: norm of the gradient of the critic's head, before clipping
            tracin/empty_steps: steps that kept no rollout
            sampling/sampling_logp_difference/mean, sampling/sampling_logp_difference/max:
                trainer's log-probs against the sampler's: rounding, or a bug
        """
        # means of what was counted, over micro-batches, steps and processes
        num_steps = len(self.grad_norms)
        means = self.means.over_all()
        metrics = {name: float(total / count) for name, (total, count) in means.items()}
        if self.cfg.tracin != "off":
            metrics["tracin/empty_steps"] = self.num_empty

        # the parts of the loss: sums over micro-batches, means over steps
        for name, total in self.losses.over_all().items():
            metrics[name] = float(total / max(1, self.num_begun))
        metrics["grad_norm"] = sum(self.grad_norms) / max(1, num_steps)
        metrics["num_steps"] = num_steps
        if self.cfg.critic:
            metrics["val/grad_norm"] = sum(self.head_norms) / max(1, num_steps)

        # of all ratios, of all influences, and of sampler beside trainer
        count, _, spread, least, greatest = self.ratios.over_all()
        if count:
            metrics |= {"ratio_std": spread, "ratio_min": least, "ratio_max": greatest}
        if self.influences:
            metrics |= influence_spread(torch.cat(self.influences).cpu())
        mean, largest = self.logp_difference()
        metrics["sampling/sampling_logp_difference/mean"] = mean
        metrics["sampling/sampling_logp_difference/max"] = largest
        return metrics
