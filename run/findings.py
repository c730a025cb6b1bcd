"""
What the logs of a run say of influence: in sentences, and in tables.

z (n,) is the influence of n rollouts in the standard deviations of their iteration, columns
{name: (n,)} is what else is known of them, less its mean in the iteration; NaN: unknown.
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Logs(NamedTuple):
    rows: list          # n of samples.jsonl
    metrics: list       # rows of metrics.jsonl
    its: Tensor         # (n,) iterations
    z: Tensor           # (n,)
    kept: Tensor        # (n,) True where a rollout was learned from
    columns: dict


def logs_of(rows, metrics, encode):
    """Logs of rows with influence and weight. encode(text) -> its tokens."""
    its, influence, weights = (torch.tensor([row[name] for row in rows], dtype=torch.float64)
                               for name in ("iteration", "influence", "weight"))
    columns = find_columns(rows, encode)
    columns = {name: less_mean(its, x) for name, x in columns.items()}
    return Logs(rows, metrics, its, own_units(its, influence), weights != 0, columns)


def find_columns(rows, encode):
    """{name: (n,)} of what rows of samples.jsonl have; NaN where it is unknown."""
    columns = {}
    for name in ("reward", "advantage"):
        values = [row.get(name, math.nan) for row in rows]
        columns[name] = torch.tensor(values, dtype=torch.float64)
    columns["|advantage|"] = columns["advantage"].abs()
    columns["tokens"] = torch.tensor([len(encode(row["completion"])) for row in rows]).double()
    return columns


def own_units(its, influence):
    """Influence (n,) in the standard deviations of its iteration, since scales drift in a run."""
    z = influence.clone()
    for it in its.unique():
        z[its == it] /= z[its == it].std(correction=0) or 1.0
    return z


def less_mean(its, x):
    """x (n,) less its mean in the iteration, so that what drifts in a run is not compared."""
    rest = x.clone()
    for it in its.unique():
        rest[its == it] -= x[its == it].nanmean()
    rounding = 1e-9 * x.nan_to_num().abs().max()
    return rest.masked_fill(rest.abs() < rounding, 0)


def rank_correlation(x, z):
    """Spearman's, of x and z (n,), NaN in x left out; NaN if there is nothing to compare."""
    known = ~x.isnan()
    both = torch.stack([ranks(x[known]), ranks(z[known])])
    return float(torch.corrcoef(both)[0, 1]) if known.sum() > 1 else math.nan


def ranks(x):
    """Rank of each value; equal values share one, and so stay in one fifth."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[inverse].double()


# ------------------------------------------------------------------------------------------------
# in sentences: each function returns one, or "" where there is nothing to say


def sentences_of(logs):
    """All that there is to say."""
    name = "tracin/target_cosine"
    cosines = [row[name] for row in logs.metrics if name in row]
    found = [say_shares(logs.z, logs.kept), say_target(cosines),
             say_likeness(logs.z, logs.columns), say_difference(logs.z, logs.columns)]
    return [text for text in found if text]


def say_shares(z, kept):
    """Do a few rollouts hold the influence, and what did those hold that were dropped?"""
    share = z.abs() / z.abs().sum().clamp(min=1e-30)
    few = max(1, len(z) // 100)
    top = float(share.topk(few).values.sum())
    word = "A few rollouts decide" if top > 0.25 else "Many rollouts count"
    text = (f"{word}: the {few} of most influence, for or against ({100 * few / len(z):.0f} %), "
            f"hold {100 * top:.0f} % of it")
    dropped = ~kept
    if dropped.any():
        held = float(share[dropped].sum())
        verdict = ", so leaving them out changed little" if held < 0.1 else ""
        part = float(dropped.double().mean())
        text += (f"; the {int(dropped.sum())} dropped ({100 * part:.0f} %) held {100 * held:.0f} %"
                 f"{verdict}")
    return text + "."


def say_target(cosines):
    """Is the target signal or noise? cosines: of its two halves, by iteration."""
    if not cosines:
        return ""
    mean = sum(cosines) / len(cosines)
    word = "part signal, part noise"
    if mean < 0.1:
        word = "mostly noise (more prompts would help)"
    elif mean > 0.5:
        word = "mostly signal"
    third = -(-len(cosines) // 3)
    first, last = (sum(part) / third for part in (cosines[:third], cosines[-third:]))
    drift = f", from {first:.2f} early to {last:.2f} late" if abs(first - last) > 0.1 else ""
    return (f"The target is {word}: the gradients of its two halves have a cosine of {mean:.2f} on "
            f"average{drift} (0 is noise, 1 is signal).")


def say_likeness(z, columns):
    """Does influence say more than reward and advantage do?"""
    found = {name: rank_correlation(columns[name], z)
             for name in ("reward", "advantage", "|advantage|")}
    found = {name: r for name, r in found.items() if not math.isnan(r)}
    if not found:
        return ""
    like = max(found, key=lambda name: abs(found[name]))
    word = "says something else than reward and advantage"
    if abs(found[like]) > 0.8:
        word = f"says hardly more than {like}"
    elif abs(found[like]) > 0.4:
        word = f"goes partly with {like}"
    numbers = ", ".join(f"{r:+.2f} with {name}" for name, r in found.items())
    return f"Influence {word}: rank correlation {numbers}."


def say_difference(z, columns):
    """What was different about the helpful? Differences of 0.2 standard deviations and more."""
    helpful, harmful = z > 0, z < 0
    if not helpful.any() or not harmful.any():
        return ""
    found = []
    for name, x in columns.items():
        gap = float(x[helpful].nanmean() - x[harmful].nanmean())
        spread = float(x[~x.isnan()].std(correction=0))
        if abs(gap) > 0.2 * spread:
            more, less = ("more", "fewer") if name == "tokens" else ("higher", "lower")
            found.append(f"{more if gap > 0 else less} {name} (by {abs(gap):.2g})")
    if not found:
        return "The helpful were like the harmful in reward, advantage and length."
    return f"Compared with the harmful of the same iteration, the helpful had {', '.join(found)}."


# ------------------------------------------------------------------------------------------------
# in tables


def best_and_worst(z, show):
    """Places of the `show` highest of z (n,) above 0, and of the `show` lowest below 0: lists."""
    order = z.argsort(descending=True)
    best = order[z[order] > 0][:show]
    worst = order[z[order] < 0].flip(0)[:show]
    return best.tolist(), worst.tolist()


def extremes(rows, z, show, names=("helpful", "harmful")):
    """Lines on the rows of best_and_worst."""
    lines = []
    for name, found in zip(names, best_and_worst(z, show)):
        lines.append(f"  most {name}" + ("" if found else ": none"))
        lines += [describe_row(rows[i], float(z[i])) for i in found]
    return lines


def describe_row(row, z):
    """A row of samples.jsonl in a line; z: its influence in standard deviations."""
    forms = dict(iteration="", reward=".3f", advantage="+.2f", weight=".2g")
    about = [f"{name} {row[name]:{form}}" for name, form in forms.items() if name in row]
    prompt, completion = shorten(row["prompt"]), shorten(row["completion"])
    return f"  {z:+7.2f}  {', '.join(about)}: {prompt!r} -> {completion!r}"


def shorten(text):
    return text if len(text) <= 48 else text[:45] + "..."


def relation(x, z, kept):
    """x, z, kept (n,) -> text: rank correlation of x and z, then by fifths of x the mean z and the
    share kept. NaN is skipped; a fifth whose values are all in another one stays blank."""
    known = ~x.isnan()
    x, z, kept = x[known], z[known], kept[known].double()
    cells = [f"{rank_correlation(x, z):+10.2f}"]
    fifth = 5 * ranks(x) // len(x)
    for j in range(5):
        here = fifth == j
        cell = " " * 14
        if here.any():
            cell = f"{z[here].mean():+8.2f} {100 * kept[here].mean():3.0f} %"
        cells.append(cell)
    return "".join(cells).rstrip()


def relations(z, kept, columns):
    """Lines: a table of relation(), without columns that are all equal."""
    fifths = "".join(f"{f'fifth {j}':>14}" for j in range(1, 6))
    lines = [f"  {'':12}{'rank corr':>10}{fifths}"]
    for name, x in columns.items():
        if len(x[~x.isnan()].unique()) > 1:
            lines.append(f"  {name:12}" + relation(x, z, kept))
        else:
            lines.append(f"  {name:12} the same in all rollouts of an iteration")
    return lines


OVER_TIME = ("positive_ratio", "selected_ratio", "self_share", "target_cosine", "invariant_error")


def history(rows):
    """Lines: means of tracin/ metrics over ten stretches of iterations; the largest of the last."""
    measured = [name for name in OVER_TIME
                if any(f"tracin/{name}" in row for row in rows)]
    if not measured:
        return ["  metrics.jsonl says nothing of influence"]
    lines = ["  iterations  " + "".join(f"{name:>16}" for name in measured)]
    n = len(rows)
    for j in range(10):
        part = rows[j * n // 10:(j + 1) * n // 10]
        if not part:
            continue
        cells = ""
        for name in measured:
            values = [row[f"tracin/{name}"] for row in part if f"tracin/{name}" in row]
            if not values:
                cells += " " * 16
            elif name == "invariant_error":
                cells += f"{max(values):16.0e}"
            else:
                cells += f"{sum(values) / len(values):16.2f}"
        lines.append(f"  {part[0]['iteration']:4} to {part[-1]['iteration']:<4}{cells.rstrip()}")
    if "self_share" not in measured:
        lines.append("  (self_share is not known for this target)")
    return lines
