"""
The rollouts of an account, in groups that a person can name.

F folds of the held-out prompts (1: exact), I iterations of N rollouts, n rollouts in all.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from extras.explain.number import Number, total

BANDS = 4           # of rewards, lengths and other numbers
MOST = 8            # groups of a split by texts: the largest by size, the others are one group
ONE_BAND = 0.9      # of the rollouts in one band of lengths: these say nothing


class Rows(NamedTuple):
    """All rollouts of an account, flat."""
    iteration: Tensor   # (n,) from 0
    shares: Tensor      # (F, n)
    pushed: Tensor      # (n,) weight times advantage: above 0 the policy was to say it more
    dropped: Tensor     # (n,) by influence, whose weight was 0 in each step
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
    has_rest: bool      # the last group is of what is left, and no group that a person can name


def rows_of(taken, shares):
    """The Rows of an account's steps. shares: (F, I, N)."""
    batches = {k.it: k.batch for k in taken}
    weights = {it: torch.zeros_like(batch.row_weights) for it, batch in batches.items()}
    for k in taken:         # a rollout may have a weight in each pass
        weights[k.it][k.step.rows] += k.batch.row_weights[k.step.rows]

    def flat(parts):
        return torch.cat([*parts]).detach().cpu().double()

    of = batches.values()
    weight = flat(weights.values())
    advantage = flat(batch.row_advantages for batch in of)
    return Rows(
        torch.tensor([*batches]).repeat_interleave(shares.shape[2]),
        shares[:, [*batches]].flatten(1).double(),
        weight * advantage, (weight == 0) & (advantage != 0),
        flat(batch.rewards for batch in of),
        flat(batch.rollout.sampled_mask.sum(1) for batch in of),
        [prompt for batch in of for prompt in batch.prompts],
        [text for batch in of for text in batch.completions])


# ------------------------------------------------------------------------------------------------
# splits: names of groups, and the group (n,) of each rollout


def bands(x, name):
    """By values (n,): each alone, or in bands if they are many; NaN has one of its own."""
    known = x[~x.isnan()]
    distinct = known.unique()
    if len(distinct) <= BANDS:
        names = [f"{name} {value:.4g}" for value in distinct.tolist()]
        where = torch.searchsorted(distinct, x.nan_to_num(0)).clamp(max=max(0, len(distinct) - 1))
    else:
        edges = torch.linspace(float(known.min()), float(known.max()), BANDS + 1).tolist()
        names = [f"{name} {a:.3g} to {b:.3g}" for a, b in zip(edges, edges[1:])]
        width = edges[1] - edges[0]
        where = ((x.nan_to_num(edges[0]) - edges[0]) / width).long().clamp(0, BANDS - 1)
    return [*names, f"no {name}"], where.masked_fill(x.isnan(), len(names))


def by_text(labels, shares):
    """By labels: those of the largest sums of shares (n,) by size, and what is left."""
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
    return names, (rows.pushed.sign().long() + 1).masked_fill(rows.dropped, 3)


def by_label(labels, by, shares):
    """By what the reader asks for: numbers in bands, anything else by its text."""
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in labels)
    if numbers and len(set(labels)) > MOST:
        return Split(by, *bands(torch.tensor(labels).double(), by), False)
    return Split(by, *by_text([f"{by} {x!r}" for x in labels], shares), True)


def splits_of(rows, by="", labels=None):
    """All Splits, by name. labels: of the rollouts, by what the reader asks for (by), or None."""
    shares = rows.shares.sum(0)
    asked = {} if labels is None else {by: by_label(labels, by, shares)}
    names, where = bands(rows.reward, "reward")
    directions, push = by_push(rows)
    both = [f"{a}, {b}" for a in names for b in directions], where * len(directions) + push
    found = {"push": (directions, push), "reward": (names, where), "reward and push": both}
    splits = {what: Split(what, *split, False) for what, split in found.items()}
    prompts = by_text([repr(prompt.text[:40]) for prompt in rows.prompts], shares)
    splits["prompt"] = Split("prompt", *prompts, True)
    names, where = bands(rows.length, "tokens")
    if where.bincount().max() < ONE_BAND * rows.n:
        splits["length"] = Split("length", names, where, False)
    return asked | splits


# ------------------------------------------------------------------------------------------------
# sums


def counts_of(split):
    """(G,)."""
    return split.where.bincount(minlength=len(split.names))


def sums_of(rows, split, here=1.0):
    """Shares (F, G) of the groups. here: factors (n,)."""
    sums = torch.zeros(len(rows.shares), len(split.names), dtype=torch.float64)
    return sums.index_add_(1, split.where, rows.shares.double() * here)


def rewards_of(rows, split):
    """Mean and standard deviation of the reward of each group, as texts; "" where it is not known.
    Rewards that hardly differ, or that are high where the others are low, are often the cause."""
    written = []
    for g in range(len(split.names)):
        known = rows.reward[(split.where == g) & ~rows.reward.isnan()]
        mean = f"{float(known.mean()):.3g}" if len(known) else ""
        std = f"{float(known.std()):.3g}" if len(known) > 1 else ""
        written.append((mean, std))
    return written


def at_random(rows, split):
    """The share that each group would have, were the shares of an iteration dealt out at random
    among its rollouts: Numbers, whose error is the standard deviation of that. A control: a split
    that tells nothing has groups like these."""
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
    """The groups that are known to have pulled most up, and down: two lists of indices. A list of
    several is a tie, an empty one is not known. least: smaller shares count as not known."""
    def first(sums):
        best = int(sums.sum(0).argmax())
        size = total(sums[:, best])
        if size.value <= least or not size.is_known:
            return []
        others = [g for g in range(sums.shape[1]) if g != best and sums[:, g].sum() > 0
                  and not total(sums[:, best] - sums[:, g]).is_known]
        return sorted([best, *others])

    sums = sums_of(rows, split)
    if split.has_rest:
        sums = sums[:, :-1]
    return first(sums), first(-sums)
