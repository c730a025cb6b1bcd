"""
Arms of a config against each other: runs over seeds, then a table and verdicts at equal KL.

    python -m extras.study extras/study/wrong.py          # all runs, as many at a time as cores
    python -m extras.study extras/study/wrong.py --table  # the table of the runs that are done
    python -m extras.study.picture out/study/wrong           # the picture

A study file is Python (`from extras.study.wrong import *` builds on another one). It assigns

    config      path of a config file of grpo.py
    arms        {name: {setting: value}}
    seeds       range or tuple; with the same seed all arms have the same prompts and noise
    measure     of the evaluation; lower is better
    controls    arms that the others are compared with; by default the first. --controls=A,B: other
                controls for the same runs
    tested      arms that get a verdict; by default all but the controls
    at_end      True compares the last evaluations in place of those at equal KL
    columns     a function (folder of a run) -> {name: number} that the table has too; optional

Every run is a folder of grpo.py in out/study/NAME, with a hash of its settings in its name. So the
same command goes on where it stopped, and an arm that was changed runs anew. What a run prints is
in a .log beside it. The table is of the seeds that all arms have complete.
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

import numpy as np

from config import load_settings, read_config
from common.files import ROOT, is_plain, read_rows, replacing, undamaged, write_json
from common.script import BadInput, own_flags, run_script

GRPO = os.path.join(ROOT, "grpo.py")
NEEDED = ("config", "arms", "seeds", "measure")
OTHERS = {"controls": (), "tested": (), "at_end": False}
SMALLEST = 1e-3         # a measure below it counts as this, for its logarithm
SURE = 0.01             # a win needs corrected p-values below this
FLIPS = 100_000         # random sign flips of a p-value, where there are too many to do all

# ------------------------------------------------------------------------------------------------
# the study and its runs


def read_study(path, controls=()):
    """The names that a study file assigns, as a namespace. It also has name and columns."""
    values, functions = read_config(path)
    for name in NEEDED:
        if not values.get(name):
            raise BadInput(f"{path}: {name} is missing or empty: see python -m extras.study --help")
    for name in values.keys() - {*NEEDED, *OTHERS}:
        raise BadInput(f"{path}: {name!r} is no name of a study; begin it with _")
    if isinstance(values["seeds"], int):
        raise BadInput(f"{path}: seeds = {values['seeds']}: must be a range or a tuple")
    for arm, settings in dict(values["arms"]).items():
        if not isinstance(settings, dict) or "/" in arm:
            raise BadInput(f"{path}: arm {arm!r}: must be a dict, and its name without a slash")
    study = SimpleNamespace(**OTHERS | values,
                            columns=functions.get("columns", lambda folder: {}))
    study.controls = controls or study.controls or (next(iter(study.arms)),)
    study.tested = study.tested or tuple(arm for arm in study.arms if arm not in study.controls)
    for arm in (*study.controls, *study.tested):
        if arm not in study.arms:
            raise BadInput(f"{path}: {arm!r} is no arm; there are {', '.join(study.arms)}")
    study.name = os.path.basename(path).removesuffix(".py")
    study.seeds = tuple(study.seeds)
    return study


def runs_of(study, out):
    """All runs, seed by seed: what to call grpo.py with, and where its folder will be."""
    runs = []
    for seed, arm in itertools.product(study.seeds, study.arms):
        settings = study.arms[arm] | {"seed": seed, "threads": 1, "log_micro": False}
        argv = [study.config, *(f"--{name}={x!r}" for name, x in settings.items())]
        cfg = load_settings(argv)
        text = json.dumps([cfg.public(), cfg.source], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:6]
        folder = os.path.join(out, f"{arm}_seed{seed}_{key}".replace(" ", "_"))
        argv += [f"--out_dir={folder}", "--resume=True"]    # refused where another is at work
        runs.append(SimpleNamespace(arm=arm, seed=seed, folder=folder, argv=argv,
                                    iterations=cfg.max_iters))
    return runs


def evaluations_of(run, measure):
    """Rows of the run's eval.jsonl; [] until the run is done. BadInput if they lack the measure."""
    path = os.path.join(run.folder, "eval.jsonl")
    rows = read_rows(path) if os.path.exists(path) else []
    if not rows or rows[-1].get("iteration") != run.iterations:
        return []
    if measure not in rows[-1]:
        raise BadInput(f"measure = {measure!r}: is not in {path}, which has {', '.join(rows[-1])}")
    return rows


def make(run):
    """Make a run, or go on with it."""
    if not is_plain(f"{run.folder}.log"):
        raise BadInput(f"{run.folder}.log: is a link or no file: remove it")
    with open(f"{run.folder}.log", "a", encoding="utf-8") as log:
        done = subprocess.run([sys.executable, GRPO, *run.argv], stdout=log, stderr=log,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    how = f"not done, see {run.folder}.log" if done.returncode else "done"
    print(f"{os.path.basename(run.folder)}: {how}", flush=True)


def make_all(runs, measure, workers):
    """Make the runs that are not done. The first is alone: it makes policy and judges, and shows
    whether there is such a measure."""
    left = [run for run in runs if not evaluations_of(run, measure)]
    print(f"{len(runs)} runs, {len(left)} to make", flush=True)
    for run in left[:1]:
        make(run)
        evaluations_of(run, measure)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(make, left[1:]))


# ------------------------------------------------------------------------------------------------
# statistics


def value_on_line(points, x):
    """Value at x of the line of least squares through points (x, y); their mean where all have the
    same x."""
    xs, ys = np.array(points).T
    away = xs - xs.mean()
    slope = away @ (ys - ys.mean()) / max(away @ away, 1e-30)
    return float(ys.mean() + slope * (x - xs.mean()))


def mean_and_error(values):
    """(mean, its standard error) of numbers, None left out; NaN where there are too few."""
    values = [v for v in values if v is not None]
    mean = statistics.fmean(values) if values else math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean, error


def permutation_p(differences):
    """Two-sided p of paired differences: the share of sign flips (all; random ones above 16
    differences) whose sum is at least as far from 0. The true signs are among them."""
    d = np.array(differences)
    if len(d) <= 16:
        signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), (FLIPS, len(d)))
        signs[0] = 1
    far = np.abs(signs @ d) >= abs(d.sum()) * (1 - 1e-9)    # equal sums differ in last digits
    return float(far.mean())


def holm(ps):
    """p-values corrected for their number (Holm 1979), in the order given."""
    order = np.argsort(ps)
    scaled = np.array(ps)[order] * np.arange(len(ps), 0, -1)
    corrected = np.maximum.accumulate(scaled).clip(max=1)
    return corrected[order.argsort()].tolist()


def differences_of(logs, controls, tested):
    """{tested arm: {control: (mean, error, p)}}, paired by seed. logs {arm: {seed: log measure}}.
    p is after Holm over all of these comparisons."""
    pairs = [(arm, control) for arm in tested for control in controls]
    paired = [[y - logs[control][seed] for seed, y in logs[arm].items()] for arm, control in pairs]
    found = {arm: {} for arm in tested}
    for (arm, control), d, p in zip(pairs, paired, holm([permutation_p(d) for d in paired])):
        found[arm][control] = (*mean_and_error(d), p)
    return found


def verdict(arm, differences, where="at equal KL"):
    """One sentence on a tested arm. differences: {control: (mean, error, p)}."""
    missed = [f"{control} (p {p:.2g})" for control, (mean, _, p) in differences.items()
              if mean >= 0 or p >= SURE]
    if missed:
        return f"{arm}: no win {where}, not better with p < {SURE:g} than {', '.join(missed)}"
    return f"{arm}: a win, better than {', '.join(differences)} {where}, each p < {SURE:g}"


# ------------------------------------------------------------------------------------------------
# the table


def summarise(study, runs):
    """What the table and the picture show, as plain values, of the seeds that are complete."""
    rows_of = {run.folder: evaluations_of(run, study.measure) for run in runs}
    unfinished = {run.seed for run in runs if not rows_of[run.folder]}
    runs = [run for run in runs if run.seed not in unfinished]
    if not runs:
        raise BadInput(f"{study.name}: no seed is complete in all arms yet")
    points = {arm: {} for arm in study.arms}        # {arm: {seed: [(sqrt(kl), log measure)]}}
    ends = {arm: {} for arm in study.arms}          # {arm: {seed: last evaluation}}
    for run in runs:
        rows = rows_of[run.folder]
        points[run.arm][run.seed] = [
            (math.sqrt(max(row["kl"], 0)), math.log(max(row[study.measure], SMALLEST)))
            for row in rows[1:]]
        end = {name: rows[-1][name] for name in (study.measure, "kl")}
        ends[run.arm][run.seed] = end | study.columns(run.folder)
    x = statistics.median(x for by_seed in points.values() for found in by_seed.values()
                          for x, _ in found)
    equal = {arm: {seed: value_on_line(found, x) for seed, found in by_seed.items()}
             for arm, by_seed in points.items()}
    where = "at the end" if study.at_end else "at equal KL"
    if study.at_end:
        equal = {arm: {seed: math.log(max(end[study.measure], SMALLEST))
                       for seed, end in by_seed.items()} for arm, by_seed in ends.items()}
    differences = differences_of(equal, study.controls, study.tested)
    return dict(
        name=study.name, measure=study.measure, x=x, points=points, ends=ends, equal=equal,
        where=where, differences=differences,
        verdicts=[verdict(arm, differences[arm], where) for arm in study.tested])


def as_markdown(study, found):
    """The summary as Markdown: a table with a row for each arm, and the verdicts."""
    names = dict.fromkeys(name for ends in found["ends"].values() for row in ends.values()
                          for name in row)
    lines = [["arm", *names, found["where"], *study.controls]]
    lines.append(["---"] * len(lines[0]))
    for arm, ends in found["ends"].items():
        cells = [plus_minus(row.get(name) for row in ends.values()) for name in names]
        cells.append(plus_minus(math.exp(y) for y in found["equal"][arm].values()))
        percent = {control: f"{100 * math.expm1(mean):+z.0f} % ± {100 * error:.0f}, p {p:.2g}"
                   for control, (mean, error, p) in found["differences"].get(arm, {}).items()}
        cells += [percent.get(control, "-") for control in study.controls]
        lines.append([arm, *cells])
    table = ["| " + " | ".join(line) + " |" for line in lines]
    seeds = len(found["ends"][study.controls[0]])
    return "\n".join([
        f"# {study.name}", "", f"Of {len(study.seeds)} seeds {seeds} are complete. Mean ± standard "
        f"error: at the end, then {study.measure} {found['where']}, and its differences to the "
        "controls, paired by seed. Below 0 %: better. p: two-sided, by sign flips, after Holm for "
        "all of these. Equal KL: of each seed a straight line through (sqrt(KL), log "
        f"{study.measure}) is read at sqrt(KL) = {found['x']:.3f}.", "",
        *table, "", *(f"- {text}" for text in found["verdicts"]), ""])


def plus_minus(values):
    mean, error = mean_and_error(values)
    return "-" if math.isnan(mean) else f"{mean:.4g} ± {error:.2g}"


def main(argv):
    own, paths = own_flags(argv, dict(table=False, controls="", workers=os.cpu_count()))
    if len(paths) != 1:
        raise BadInput("usage: python -m extras.study STUDY.py [--table] [--controls=A,B] "
                       "[--workers=N]")
    controls = tuple(filter(None, own["controls"].split(",")))
    study = read_study(paths[0], controls)
    out = os.path.join("out", "study", study.name)
    runs = runs_of(study, out)
    if not own["table"]:
        os.makedirs(out, exist_ok=True)
        make_all(runs, study.measure, own["workers"])
    with undamaged(out):
        found = summarise(study, runs)
    text = as_markdown(study, found)
    write_json(os.path.join(out, "table.json"), found)
    with replacing(os.path.join(out, "table.md")) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
    print(f"\n{text}\n{out}/table.md; picture: python -m extras.study.picture {out}")


if __name__ == "__main__":
    run_script(main)
