"""
The rollouts of an account, in groups that a person can name.

F folds of the held-out prompts (1: exact), I iterations of N rollouts, n rollouts in all, G groups.
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from extras.explain.number import Number, total

BANDS = 4           # of rewards, lengths and other numbers
MOST = 8            # groups of a split by texts: the largest by size; all that is left is one group


class Rows(NamedTuple):
    """All rollouts of an account, flat."""
    iteration: Tensor   # (n,) from 0
    shares: Tensor      # (F, n)
    weight: Tensor      # (n,) in the loss; 0: influence dropped it from each step
    advantage: Tensor   # (n,)
    reward: Tensor      # (n,) NaN: every reward function abstained
    length: Tensor      # (n,) tokens that the policy drew
    prompts: list       # of data.prompts.Prompt
    completions: list   # texts

    @property
    def n(self):
        return self.shares.shape[1]


class Split(NamedTuple):
    """Rollouts in groups."""
    what: str           # "reward"
    names: list         # of G groups
    where: Tensor       # (n,) the group of each
    has_others: bool = False    # the last group is all that is left, which nobody can name


def rows_of(run, shares):
    """The Rows of a RepeatedRun. shares: (F, I, N)."""
    batches = run.batches.values()
    weights = {it: torch.zeros_like(batch.row_weights) for it, batch in run.batches.items()}
    for k in run.steps:     # a rollout may have a weight in each pass
        weights[k.it][k.step.rows] += k.batch.row_weights[k.step.rows]

    def flat(parts):
        return torch.cat([*parts]).detach().cpu().double()

    return Rows(
        iteration=torch.tensor([*weights]).repeat_interleave(shares.shape[2]),
        shares=shares[:, [*weights]].flatten(1).double(),
        weight=flat(weights.values()),
        advantage=flat(batch.row_advantages for batch in batches),
        reward=flat(batch.rewards for batch in batches),
        length=flat(batch.rollout.sampled_mask.sum(1) for batch in batches),
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        completions=[text for batch in batches for text in batch.completions])


# ------------------------------------------------------------------------------------------------
# splits: names of groups, and the group (n,) of each rollout


def bands(x, name):
    """By values (n,): each alone, or in bands if they are many; NaN has a group of its own."""
    distinct = x[~x.isnan()].unique()
    if len(distinct) <= BANDS:
        names = [f"{name} {value:.4g}" for value in distinct.tolist()]
        starts = distinct[1:]
    else:
        edges = torch.linspace(float(distinct[0]), float(distinct[-1]), BANDS + 1)
        names = [f"{name} {a:.3g} to {b:.3g}" for a, b in zip(edges.tolist(), edges[1:].tolist())]
        starts = edges[1:-1]
    where = (x[:, None] >= starts).sum(1)
    return [*names, f"no {name}"], where.masked_fill(x.isnan(), len(names))


def by_text(labels, shares):
    """By labels: the largest sums of shares (n,) by size, and what is left."""
    sums = {}
    for label, share in zip(labels, shares.tolist()):
        sums[label] = sums.get(label, 0.0) + share
    few = sorted(sums, key=lambda label: -abs(sums[label]))
    if len(few) > MOST + 1:
        few = few[:MOST]
    names = sorted(few, key=lambda label: -sums[label])
    place = {label: i for i, label in enumerate(names)}
    where = torch.tensor([place.get(label, len(names)) for label in labels])
    return [*names, f"the other {len(sums) - len(few)}"], where


def by_push(rows):
    """By the direction in which a rollout was pushed: the sign of weight times advantage."""
    names = ["made less likely", "not pushed (advantage 0)", "made likelier",
             "dropped by influence"]
    dropped = (rows.weight == 0) & (rows.advantage != 0)
    return names, ((rows.weight * rows.advantage).sign().long() + 1).masked_fill(dropped, 3)


def by_label(labels, by, shares):
    """The reader's own Split: numbers in bands, anything else by its text."""
    if len(set(labels)) > MOST and all(isinstance(x, (int, float)) for x in labels):
        return Split(by, *bands(torch.tensor(labels).double(), by))
    return Split(by, *by_text([f"{by} {x!r}" for x in labels], shares), has_others=True)


def splits_of(rows, by="", labels=None):
    """All Splits, by name. labels: the reader's group of each rollout, by the name given; or None.
    """
    shares = rows.shares.sum(0)
    splits = [] if labels is None else [by_label(labels, by, shares)]
    rewards, reward = bands(rows.reward, "reward")
    pushes, push = by_push(rows)
    prompts = by_text([repr(prompt.text[:40]) for prompt in rows.prompts], shares)
    splits += [
        Split("push", pushes, push),
        Split("reward", rewards, reward),
        Split("reward and push", [f"{a}, {b}" for a in rewards for b in pushes],
              reward * len(pushes) + push),
        Split("prompt", *prompts, has_others=True),
        Split("length", *bands(rows.length, "tokens"))]
    return {split.what: split for split in splits}


# ------------------------------------------------------------------------------------------------
# sums


def counts_of(split):
    """(G,)."""
    return split.where.bincount(minlength=len(split.names))


def sums_of(rows, split, factors=1.0):
    """Shares (F, G) of the groups. factors: of the rollouts (n,)."""
    sums = torch.zeros(len(rows.shares), len(split.names), dtype=torch.float64)
    return sums.index_add_(1, split.where, rows.shares.double() * factors)


def rewards_of(rows, split):
    """(mean, standard deviation) of the reward of each group; NaN where it is not known. They often
    say why a group has its share: equal rewards teach nothing."""
    for g in range(len(split.names)):
        known = rows.reward[(split.where == g) & ~rows.reward.isnan()]
        yield float(known.mean()), float(known.std()) if len(known) > 1 else math.nan


def at_random(rows, split):
    """The share that each group would have, were the shares of an iteration dealt out at random
    among its rollouts: Numbers, whose error is its standard deviation then. A control: a split that
    tells nothing has groups like these."""
    x = rows.shares.sum(0).double()
    mean, variance = torch.zeros(2, len(split.names), dtype=torch.float64)
    for it in rows.iteration.unique():
        here = rows.iteration == it
        n = int(here.sum())
        k = split.where[here].bincount(minlength=len(split.names)).double()         # (G,)
        mean += k / n * x[here].sum()
        # of a sum of k numbers that are drawn from n without putting them back
        variance += x[here].var() * k * (n - k) / n if n > 1 else 0.0
    return [Number(float(m), float(v.sqrt())) for m, v in zip(mean, variance)]


def most_of(rows, split, least=0.0):
    """The groups that pulled up most, and down most: two lists of indices. Several tie; none: that
    is not known. least: smaller shares count as not known."""
    def first(sums):
        best = int(sums.sum(0).argmax())
        size = total(sums[:, best])
        if size.value <= least or not size.is_known:
            return []
        ties = [g for g in range(sums.shape[1]) if g != best and sums[:, g].sum() > 0
                and not total(sums[:, best] - sums[:, g]).is_known]
        return sorted([best, *ties])

    sums = sums_of(rows, split)
    if split.has_others:
        sums = sums[:, :-1]
    return first(sums), first(-sums)
