"""
Arms of a config against each other: runs over seeds, then a table and verdicts at equal KL.

    python study.py studies/wrong.py             # all runs, as many at a time as there are cores
    python study.py studies/wrong.py --table     # the table of the runs that are done
    python study.py studies/wrong.py --quick     # two seeds of shrunken runs: does everything work?
    python plot.py out/study/wrong               # the picture

A study file is Python (`from studies.wrong import *` builds on another one). It assigns

    config      path of a config file of grpo.py
    arms        {name: {setting: value}}
    seeds       range or tuple; with the same seed all arms have the same prompts and noise
    measure     of the evaluation; lower is better
    controls    arms that the others are compared with; by default the first one
    tested      arms that get a verdict; by default all but the controls
    grid        {setting: (values)} of one setting that moves the KL, such as beta; or {}
    quick       {setting: value} that shrink a run for --quick
    columns     a function (folder of a run) -> {name: number} that the table has too; optional

Every run is a folder of grpo.py in out/study/NAME, with a hash of its settings in its name. So the
same command goes on where it stopped, and an arm that was changed runs anew. What a run prints is
in a .log beside it. Runs go seed by seed, so that a study that is stopped has whole seeds.
--workers=N: so many runs at a time.
"""
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from config import load_settings, read_config
from run.files import read_rows, replacing, write_json
from run.script import BadInput, run_script

GRPO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "grpo.py")
NAMES = {       # of a study file: its type, and what it is by default
    "config": (str, None), "arms": (dict, None), "seeds": ((range, tuple), None),
    "measure": (str, None), "controls": (tuple, ()), "tested": (tuple, ()), "grid": (dict, {}),
    "quick": (dict, {})}
END = ("kl", "perplexity", "distinct_2", "ended")     # columns of the table beside the measure
SMALLEST = 1e-3         # a measure below it counts as this, for its logarithm
SURE = 0.01             # a win needs corrected p-values below this
FLIPS = 20_000          # random sign flips, where all of them are too many
USAGE = "usage: python study.py studies/wrong.py [--table] [--quick] [--workers=N]"

# ------------------------------------------------------------------------------------------------
# the study and its runs


def read_study(path, quick=False):
    """The names that a study file assigns, checked, as a namespace. It also has name, columns,
    setting and values (of the grid; "" and (None,) without) and shrink ({} unless quick)."""
    values, functions, _ = read_config(path)
    study = SimpleNamespace(columns=functions.get("columns"))
    for name, (kind, default) in NAMES.items():
        value = values.pop(name, default)
        if not isinstance(value, kind) or default is None and not value:
            raise BadInput(f"{path}: {name} = {value!r}: see python study.py --help")
        setattr(study, name, value)
    if values:
        raise BadInput(f"{path}: {min(values)!r} is no name of a study; begin it with _")
    for arm, settings in study.arms.items():
        if not isinstance(settings, dict):
            raise BadInput(f"{path}: arm {arm!r} is {settings!r}: must be a dict of settings")
    study.controls = study.controls or (next(iter(study.arms)),)
    study.tested = study.tested or tuple(arm for arm in study.arms if arm not in study.controls)
    for arm in (*study.controls, *study.tested):
        if arm not in study.arms:
            raise BadInput(f"{path}: {arm!r} is no arm; there are {', '.join(study.arms)}")
    if len(study.grid) > 1 or not all(study.grid.values()):
        raise BadInput(f"{path}: grid = {study.grid!r}: must be {{}} or one setting and a tuple")
    study.name = os.path.basename(path).removesuffix(".py") + "_quick" * quick
    study.setting, study.values = next(iter(study.grid.items()), ("", (None,)))
    study.shrink = study.quick if quick else {}
    study.seeds = tuple(study.seeds)[:2 if quick else None]
    return study


class Planned(NamedTuple):
    """A run."""
    arm: str
    value: object       # of the grid; None without
    seed: int
    folder: str
    argv: list          # for grpo.py
    iterations: int


def runs_of(study, out):
    """All runs, seed by seed. BadInput for settings that grpo.py would refuse."""
    runs = []
    for seed, arm, value in itertools.product(study.seeds, study.arms, study.values):
        settings = study.arms[arm] | study.shrink | {"seed": seed, "threads": 1, "log_micro": False}
        point = ""
        if study.setting:
            settings[study.setting] = value
            point = f"_{study.setting}{value}"
        argv = [study.config, *(f"--{name}={x!r}" for name, x in settings.items())]
        try:
            cfg = load_settings(argv)
        except BadInput as e:
            raise BadInput(f"arm {arm!r}: {e}") from e
        check_measure(study, cfg)
        text = json.dumps([cfg.public(), cfg.source], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:6]
        name = f"{arm}{point}_seed{seed}_{key}".replace(" ", "_").replace("/", "_")
        folder = os.path.join(out, name)
        argv.append(f"--out_dir={folder}")
        runs.append(Planned(arm, value, seed, folder, argv, cfg.max_iters))
    return runs


def check_measure(study, cfg):
    """BadInput for a measure that the evaluation of these settings will not have."""
    judges = [name for name in ("judge", "eval_judge") if getattr(cfg, name)]
    known = [f"{judge}/{name}" for judge in judges
             for name in ("toxicity", "toxic_share", "expected_max", "any_toxic")]
    known += [f"rewards/{name}" for name in cfg.reward_funcs]
    known += ["mean_length", "distinct_1", "says_nothing", *END]
    if study.measure not in known:
        raise BadInput(f"measure = {study.measure!r}: is no measure of the evaluation; there are "
                       f"{', '.join(known)}")


def evaluations_of(run):
    """Rows of the run's eval.jsonl; [] until the run is done."""
    path = os.path.join(run.folder, "eval.jsonl")
    rows = read_rows(path) if os.path.exists(path) else []
    return rows if rows and rows[-1]["iteration"] == run.iterations else []


def make(run):
    """Make a run, or go on with it, in a process of its own."""
    with open(f"{run.folder}.log", "a", encoding="utf-8") as log:
        subprocess.run([sys.executable, GRPO, *run.argv], stdout=log, stderr=log,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
    how = "done" if evaluations_of(run) else f"not done, see {run.folder}.log"
    print(f"{os.path.basename(run.folder)}: {how}", flush=True)


def make_all(runs, workers):
    """Make the runs that are not done. Ctrl-C reaches those at work, which save and end."""
    left = [run for run in runs if not evaluations_of(run)]
    print(f"{len(runs)} runs, {len(left)} to make", flush=True)
    for run in left[:1]:
        make(run)       # alone: it makes policy and judges, which the others find
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(make, left[1:]))


# ------------------------------------------------------------------------------------------------
# statistics


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
    """(mean, its standard error) of numbers, None left out; NaN where there are too few."""
    values = [v for v in values if v is not None]
    mean = statistics.fmean(values) if values else math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean, error


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


def differences_of(logs, controls, tested):
    """{arm: {control: difference}} of logs {arm: {seed: log measure}}. A difference is paired by
    seed: its mean, error, p, and for tested arms "corrected", p after Holm over all of these. None
    without two seeds that both have."""
    found = {arm: {} for arm in logs}
    for arm, control in itertools.product(logs, controls):
        theirs = logs[control]
        both = [y - theirs[seed] for seed, y in logs[arm].items() if seed in theirs]
        if arm != control and len(both) < 2:
            found[arm][control] = None
        elif arm != control:
            mean, error = mean_and_error(both)
            found[arm][control] = {"mean": mean, "error": error, "p": permutation_p(both)}
    family = [c for arm in tested for c in found[arm].values() if c]
    for difference, p in zip(family, holm([c["p"] for c in family])):
        difference["corrected"] = p
    return found


def verdict(arm, differences):
    """One sentence on a tested arm. differences: {control: difference}."""
    if not all(differences.values()):
        return f"{arm}: not decided, fewer than two seeds are complete"
    missed = [f"{control} (p {c['corrected']:.2g})" for control, c in differences.items()
              if c["mean"] >= 0 or c["corrected"] >= SURE]
    if missed:
        return f"{arm}: no win at equal KL, not better with p < {SURE:g} than {', '.join(missed)}"
    return f"{arm}: a win, better than {', '.join(differences)} at equal KL, each p < {SURE:g}"


# ------------------------------------------------------------------------------------------------
# the table


def summarise(study, runs):
    """What the table and the picture show, as plain values, of the seeds that are complete."""
    middle = study.values[len(study.values) // 2]
    points = {arm: {} for arm in study.arms}        # {arm: {seed: [(sqrt(kl), log measure)]}}
    ends = {arm: {} for arm in study.arms}          # {arm: {seed: last evaluation}}, in the middle
    groups = {}
    for run in runs:
        groups.setdefault((run.arm, run.seed), []).append(run)
    for (arm, seed), group in groups.items():
        found = [evaluations_of(run) for run in group]
        if not all(found):
            continue
        rows = [rows[-1] for rows in found] if study.grid else found[0][1:]
        points[arm][seed] = [(math.sqrt(max(row["kl"], 0)),
                              math.log(max(row[study.measure], SMALLEST))) for row in rows]
        for run, rows in zip(group, found):
            if run.value == middle:
                columns = study.columns(run.folder) if study.columns else {}
                ends[arm][seed] = {name: rows[-1].get(name) for name in (study.measure, *END)}
                ends[arm][seed] |= columns
    everywhere = [x for by_seed in points.values() for found in by_seed.values() for x, _ in found]
    if not everywhere:
        raise BadInput(f"{study.name}: no seed of any arm is complete yet")
    x = statistics.median(everywhere)
    equal = {arm: {seed: value_on_line(found, x) for seed, found in by_seed.items()}
             for arm, by_seed in points.items()}
    differences = differences_of(equal, study.controls, study.tested)
    return dict(
        name=study.name, measure=study.measure, x=x, points=points, ends=ends, equal=equal,
        differences=differences, verdicts=[verdict(arm, differences[arm]) for arm in study.tested])


def as_markdown(study, found):
    """The summary as Markdown: the ends, the arms at equal KL, the verdicts."""
    names = dict.fromkeys(name for ends in found["ends"].values() for row in ends.values()
                          for name in row)
    lines = [f"# {found['name']}", "", "At the end, mean ± standard error over seeds:", ""]
    rows = [[arm, len(ends), *(plus_minus(row.get(name) for row in ends.values())
                               for name in names)] for arm, ends in found["ends"].items()]
    lines += table_lines(["arm", "seeds", *names], rows)
    lines += ["", f"At equal KL, sqrt(KL) = {found['x']:.3f}. Of each seed a straight line through "
              f"(sqrt(KL), log {found['measure']}) is read there. Differences to the controls are "
              "paired by seed; below 0 %: better. p: two-sided, by sign flips; (Holm): corrected "
              "for all comparisons of the tested arms.", ""]
    rows = [[arm, plus_minus(math.exp(y) for y in by_seed.values()),
             *(cell_of(found["differences"][arm].get(control)) for control in study.controls)]
            for arm, by_seed in found["equal"].items()]
    lines += table_lines(["arm", found["measure"], *study.controls], rows)
    return "\n".join([*lines, "", *(f"- {text}" for text in found["verdicts"]), ""])


def plus_minus(values):
    mean, error = mean_and_error(values)
    return "-" if math.isnan(mean) else f"{mean:.4g} ± {error:.2g}"


def cell_of(difference):
    """A paired difference of logarithms, in percent, and its p."""
    if difference is None:
        return "-"
    p = f"p {difference['p']:.2g}"
    if "corrected" in difference:
        p = f"p {difference['corrected']:.2g} (Holm)"
    change = 100 * math.expm1(difference["mean"])
    return f"{change:+z.0f} % ± {100 * difference['error']:.0f}, {p}"


def table_lines(heads, rows):
    """Lines of a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def main(argv):
    paths = [arg for arg in argv if not arg.startswith("--")]
    workers = str(os.cpu_count())
    for arg in argv:
        if arg.startswith("--workers="):
            workers = arg.removeprefix("--workers=")
        elif arg.startswith("--") and arg not in ("--table", "--quick"):
            raise BadInput(f"{arg}: no such flag; {USAGE}")
    if len(paths) != 1 or not workers.isdigit() or int(workers) < 1:
        raise BadInput(USAGE)
    study = read_study(paths[0], "--quick" in argv)
    out = os.path.join("out", "study", study.name)
    runs = runs_of(study, out)
    if "--table" not in argv:
        os.makedirs(out, exist_ok=True)
        make_all(runs, int(workers))
    found = summarise(study, runs)
    text = as_markdown(study, found)
    write_json(os.path.join(out, "table.json"), found)
    with replacing(os.path.join(out, "table.md")) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
    print(f"\n{text}\n{out}/table.md; picture: python plot.py {out}")


if __name__ == "__main__":
    run_script(main)
