"""
Arms beside each other: means, paired differences at equal KL, p-values, verdicts, tables.

study.py makes the runs and hands their rows to summarise; as_markdown writes what that returns as
tables. A study here is what study.read_study returns, a row what study.row_of returns.
"""
import math
import statistics

import numpy as np

from run.script import BadInput

# columns of the table: of the last evaluation, beside the measure, and over the iterations
END = ("eval_judge/toxicity", "rewards/planted", "sqrt_kl", "perplexity", "distinct_2", "ended")
OVER_RUN = ("kept", "cosine", "kl_last")
SMALLEST = 1e-3         # a measure below it counts as this, for its logarithm
QUICK = "**quick: says nothing.** Two seeds of shrunken runs, only to see that everything works."
SURE = 0.01             # a win needs corrected p-values below this
WORTH = math.log(0.8)   # of log measures: a no excludes an improvement of 20 %
TITLES = {
    "wrong_kept": "Share of rollouts with a wrong reward that is kept",
    "right_kept": "Share of rollouts with a right reward that is kept",
    "auc": "Chance that a wrong rollout has a lower influence than a right one",
    "planted": "Share of rollouts with the planted string"}
NOTE = ("Of each seed a straight line through (sqrt(KL), log measure) is read at the median of all "
        "points; `seeds outside` have all of theirs on one side of it. Below 0 %: better than the "
        "control. p: two-sided, by sign flips of the paired differences. (Holm): corrected for all "
        "comparisons of the tested arms; other p-values and the intervals are not. A win needs "
        "p < {sure:g} against every control.")
FLIPS = 20_000          # random sign flips, where all of them are too many


# ------------------------------------------------------------------------------------------------
# the maths


def value_on_line(points, x):
    """Value at x of the straight line that fits points (x, y) best (least squares). Where all
    points have the same x: their mean."""
    mean_x = statistics.fmean(px for px, _ in points)
    mean_y = statistics.fmean(py for _, py in points)
    spread = sum((px - mean_x) ** 2 for px, _ in points)
    slope = 0.0
    if spread > 0:
        slope = sum((px - mean_x) * (py - mean_y) for px, py in points) / spread
    return mean_y + slope * (x - mean_x)


def mean_and_error(values):
    """(mean, its standard error) of numbers, None left out. Of one number the error is NaN."""
    values = [v for v in values if v is not None]
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def permutation_p(differences):
    """Two-sided p of paired differences: the share of their sign flips whose sum is at least as far
    from 0 as theirs. All 2^n flips up to n = 16, which makes p at least 2 / 2^n; else FLIPS random
    ones and the true signs."""
    d = np.array(differences, dtype=float)
    n = len(d)
    if n <= 16:
        signs = 1 - 2 * (np.arange(2 ** n)[:, None] >> np.arange(n) & 1)        # (2^n, n)
    else:
        signs = np.random.default_rng(0).choice((-1, 1), (FLIPS, n))
        signs = np.vstack([np.ones(n), signs])
    far = np.abs(signs @ d) >= abs(d.sum()) * (1 - 1e-9)    # equal sums differ in last digits
    return float(far.mean())


def holm(ps):
    """p-values corrected for their number (Holm 1979), in the order given."""
    corrected = [1.0] * len(ps)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, (len(ps) - rank) * ps[i])
        corrected[i] = min(1.0, largest)
    return corrected


def least_p(study):
    """The smallest corrected p that a tested arm can reach against every control."""
    arms = {*study.tested, *study.controls}
    seeds = min(study.few.get(arm, len(study.seeds)) for arm in arms)
    comparisons = sum(arm != control for arm in study.tested for control in study.controls)
    return min(1.0, comparisons * 2.0 ** (1 - seeds))


def t_quantile(freedom):
    """97.5 % quantile of Student's t, from its density in small steps."""
    step = 1e-4
    x = np.arange(0, 20, step) + step / 2
    height = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = (1 + x ** 2 / freedom) ** (-(freedom + 1) / 2)
    density *= math.exp(height) / math.sqrt(freedom * math.pi)
    return float(x[np.searchsorted(np.cumsum(density) * step, 0.475)])


def paired_difference(ours, theirs):
    """Differences ours - theirs of two {seed: log measure}, over the seeds that both have: their
    number n, mean, 95 % interval (Student's t) and p. None without two such seeds."""
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    n = len(differences)
    if n < 2:
        return None
    mean, error = mean_and_error(differences)
    reach = t_quantile(n - 1) * error
    return {"n": n, "mean": mean, "low": mean - reach, "high": mean + reach,
            "p": permutation_p(differences)}


def differences_of(logs, controls, tested):
    """{arm: {control: paired_difference}} of logs {arm: {seed: log measure}}. Comparisons of tested
    arms also have "corrected", their p corrected for the number of these comparisons."""
    found = {arm: {control: paired_difference(logs[arm], logs[control]) for control in controls
                   if control != arm} for arm in logs}
    family = [c for arm in tested for c in found[arm].values() if c]
    for comparison, p in zip(family, holm([c["p"] for c in family])):
        comparison["corrected"] = p
    return found


def verdict(comparisons):
    """win, no or not decided, and why, in words. comparisons: {control: paired_difference} of a
    tested arm."""
    if not comparisons or not all(comparisons.values()):
        return "not decided: too few seeds"
    not_beaten = [control for control, c in comparisons.items()
                  if c["mean"] >= 0 or c["corrected"] >= SURE]
    if not not_beaten:
        return f"win: better than {', '.join(comparisons)}"
    why = f"not better than {', '.join(not_beaten)} with p < {SURE:g}"
    best = max(comparisons, key=lambda control: comparisons[control]["mean"])   # of the controls
    if comparisons[best]["low"] > WORTH:
        most = max(0.0, -percent(comparisons[best]["low"]))
        return f"no: {why}, and at most {most:.0f} % better than {best} (95 %)"
    return f"not decided: {why}"


def percent(log_ratio):
    """A difference of logarithms as a change in percent."""
    return 100 * math.expm1(log_ratio)


# ------------------------------------------------------------------------------------------------
# summary and table


def summarise(study, rows, failed):
    """What the table and the pictures show, as plain values. rows: {(arm, value, seed): row} of the
    finished runs. failed: {run: row} of the others."""
    middle = study.values[len(study.values) // 2]
    points = {}         # arm -> {seed: [(sqrt(kl), log measure)]}
    ends = {}           # arm -> {seed: last evaluation at the middle value of the grid}
    for arm in study.arms:
        points[arm] = {seed: found for seed in study.seeds
                       if (found := points_of(study, rows, arm, seed))}
        ends[arm] = {seed: end_of(rows[arm, middle, seed]) for seed in points[arm]}
    everywhere = [x for by_seed in points.values() for found in by_seed.values() for x, _ in found]
    if not everywhere:
        raise BadInput(f"{study.name}: no seed of any arm is complete yet")
    x = statistics.median(everywhere)
    at_equal_kl = {arm: {seed: value_on_line(found, x) for seed, found in by_seed.items()}
                   for arm, by_seed in points.items()}
    at_end = {arm: {seed: log_measure(study, e) for seed, e in by_seed.items()}
              for arm, by_seed in ends.items()}
    arms = {}
    for arm in study.arms:
        middles = [rows[arm, middle, seed] for seed in points[arm]]
        arms[arm] = {
            "seeds": len(middles),
            "failed": sorted(run for run, row in failed.items() if row["arm"] == arm),
            "end": {name: mean_and_error([e.get(name) for e in ends[arm].values()])
                    for name in (study.measure, *END)},
            "run": {name: mean_and_error([row[name] for row in middles]) for name in OVER_RUN},
            "frontier": frontier(points[arm].values()),
            "equal": mean_and_error([math.exp(y) for y in at_equal_kl[arm].values()]),
            "outside": sum(not min(found)[0] <= x <= max(found)[0]
                           for found in points[arm].values()),
            "thirds": {name: [mean_and_error(by_third) for by_third in zip(*found)]
                       for name, found in parts_of(middles).items()}}
    by_kl = differences_of(at_equal_kl, study.controls, study.tested)
    return {
        "name": study.name, "about": study.about, "quick": study.quick, "measure": study.measure,
        "setting": study.setting, "values": study.values, "middle": middle, "x": x,
        "controls": study.controls, "tested": study.tested, "arms": arms, "equal": by_kl,
        "end": differences_of(at_end, study.controls, study.tested),
        "verdicts": {arm: verdict(by_kl[arm]) for arm in study.tested}}


def points_of(study, rows, arm, seed):
    """[(sqrt(kl), log measure)] of a seed: the last evaluation at each value of the grid, or
    without a grid all evaluations but the first. None while a run is missing."""
    found = [rows.get((arm, value, seed)) for value in study.values]
    if None in found:
        return None
    evaluations = [row["evaluations"][-1] for row in found]
    if not study.grid:
        evaluations = found[0]["evaluations"][1:]
    for name in (study.measure, "kl"):
        if evaluations[0].get(name) is None:
            raise BadInput(f"measure = {name!r}: is no measure of the evaluation; there are "
                           f"{', '.join(evaluations[0])}")
    return [(math.sqrt(max(e["kl"], 0)), log_measure(study, e)) for e in evaluations]


def log_measure(study, evaluation):
    return math.log(max(evaluation[study.measure], SMALLEST))


def end_of(row):
    """The last evaluation, with the root of its KL."""
    last = row["evaluations"][-1]
    return last | {"sqrt_kl": math.sqrt(max(last["kl"], 0))}


def frontier(found):
    """An arm's curve: [(mean and error of sqrt(kl), those of the measure)] of each point, over
    seeds. found: the points_of each seed."""
    return [(mean_and_error([x for x, _ in at_point]),
             mean_and_error([math.exp(y) for _, y in at_point])) for at_point in zip(*found)]


def parts_of(rows):
    """{name: [(first, second, third) of each row]} of what rows have by thirds of their run."""
    parts = {}
    for row in rows:
        found = {"planted": row["planted"]} if "planted" in row else {}
        if "wrong" in row:
            found |= {name: [third[name] for third in row["wrong"]] for name in row["wrong"][0]}
        for name, thirds in found.items():
            parts.setdefault(name, []).append(thirds)
    return parts


def as_markdown(summary):
    """The summary as Markdown."""
    arms = summary["arms"]
    measure = summary["measure"]
    at = f", {summary['setting']} = {summary['middle']}" if summary["setting"] else ""
    lines = [f"# {summary['name']}", "", summary["about"], ""]
    lines += [QUICK, ""] if summary["quick"] else []
    names = [name for name in dict.fromkeys((measure, *END))
             if not all(math.isnan(a["end"][name][0]) for a in arms.values())]
    rows = [[arm, a["seeds"], *(plus_minus(a["end"][name]) for name in names),
             *(plus_minus(a["run"][name]) for name in OVER_RUN)] for arm, a in arms.items()]
    lines += [f"## At the end{at}: mean ± standard error", ""]
    lines += table_lines(["arm", "seeds", *names, *OVER_RUN], rows)
    failed = [run for a in arms.values() for run in a["failed"]]
    lines += [""] + [f"- Failed: {run}" for run in failed] if failed else []
    lines += ["", f"## At equal KL, sqrt(KL) = {summary['x']:.3f}: {measure}, difference to each "
              "control (95 %), p", "", NOTE.format(sure=SURE), ""]
    rows = [[arm, plus_minus(a["equal"]), f"{a['outside']} of {a['seeds']}",
             *beside_controls(summary["equal"][arm], summary["controls"])]
            for arm, a in arms.items()]
    lines += table_lines(["arm", measure, "seeds outside", *summary["controls"]], rows)
    lines += [""] + [f"- {arm}: {text}" for arm, text in summary["verdicts"].items()]
    lines += ["", f"## At the end{at}: difference to each control (95 %), p", ""]
    rows = [[arm, *beside_controls(summary["end"][arm], summary["controls"])] for arm in arms]
    lines += table_lines(["arm", *summary["controls"]], rows)
    for name in sorted({name for a in arms.values() for name in a["thirds"]}):
        lines += ["", f"## {TITLES[name]}, by thirds of the run{at}", ""]
        rows = [[arm, *map(plus_minus, a["thirds"].get(name, ()))] for arm, a in arms.items()]
        lines += table_lines(["arm", "first", "second", "third"], rows)
    return "\n".join(lines) + "\n"


def plus_minus(mean_error):
    mean, error = mean_error
    if math.isnan(mean):
        return "-"
    digits = 1 if abs(mean) >= 10 else 4
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def beside_controls(comparisons, controls):
    """Cells of a table: an arm beside each control, in percent."""
    cells = []
    for control in controls:
        c = comparisons.get(control)
        if c is None:
            cells.append("-")
            continue
        p = f"p {c['corrected']:.2g} (Holm)" if "corrected" in c else f"p {c['p']:.2g}"
        low, high = percent(c["low"]), percent(c["high"])
        cells.append(f"{percent(c['mean']):+z.0f} % ({low:+z.0f} to {high:+z.0f}), {p}")
    return cells


def table_lines(heads, rows):
    """Lines of a Markdown table, columns padded so that they can be read as they are."""
    rows = [[str(cell) for cell in row] + [""] * (len(heads) - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
