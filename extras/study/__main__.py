"""
Compare arms of a config: runs over seeds, then a table with p-values at equal KL.

    python -m extras.study extras/study/wrong.py              # all runs, one on each core
    python -m extras.study extras/study/wrong.py --workers=1  # one run at a time
    python -m extras.study extras/study/wrong.py --table      # the table of the runs that are done

A study file is Python (`from extras.study.wrong import *` builds on another one). It assigns

    config      path of a config file of grpo.py
    arms        {name: {setting: value}}
    seeds       range or tuple; all arms of a seed have the same prompts and noise
    measure     of the evaluation; lower is better
    controls    arms to compare with; by default the first
    tested      arms that are compared with the controls; by default all that are left

Every run is a folder of grpo.py in out/study/NAME, with a hash of its settings in its name. If you
stop the study, the same command continues it, and changed arms are rerun. What a run prints is in
a .log beside its folder. The table has the seeds that are complete in all arms; its numbers are in
table.json.
"""
import hashlib
import itertools
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from common.cli import own_flags, run_script
from common.errors import BadInput
from common.files import ROOT, read_log, write_json
from run.settings import load_settings, read_config

NEEDED = ("config", "arms", "seeds", "measure")
OPTIONAL = {"controls": (), "tested": ()}
SMALLEST = 1e-3         # a measure below it counts as this, for its logarithm
FLIPS = 100_000         # random sign flips of a p-value, where there are too many to do all


# ------------------------------------------------------------------------------------------------
# the study and its runs


def read_study(path):
    """What a study file assigns, as a namespace, with defaults filled in."""
    values, _ = read_config(path)
    for name in NEEDED:
        if not values.get(name):
            raise BadInput(f"{path}: {name} is missing or empty: see python -m extras.study --help")
    for name in values.keys() - {*NEEDED, *OPTIONAL}:
        raise BadInput(f"{path}: {name!r}: not a name of a study; begin your own with _")
    study = SimpleNamespace(**OPTIONAL | values)
    study.name = os.path.basename(path).removesuffix(".py")
    study.controls = study.controls or tuple(study.arms)[:1]
    study.tested = study.tested or tuple(arm for arm in study.arms if arm not in study.controls)
    for arm in (*study.controls, *study.tested):
        if arm not in study.arms:
            raise BadInput(f"{path}: {arm!r} is not an arm; there are {', '.join(study.arms)}")
    return study


def runs_of(study, out):
    """List all runs, seed by seed: the arguments of grpo.py, and the folder it will write."""
    runs = []
    for seed, arm in itertools.product(study.seeds, study.arms):
        settings = study.arms[arm] | {"seed": seed, "threads": 1, "log_micro": False}
        argv = [study.config, *(f"--{name}={value!r}" for name, value in settings.items())]
        cfg = load_settings(argv)
        text = repr((cfg.public(), cfg.source))
        key = hashlib.sha256(text.encode()).hexdigest()[:6]
        folder = os.path.join(out, f"{arm}_seed{seed}_{key}".replace(" ", "_"))
        argv += [f"--out_dir={folder}", "--resume=True"]    # refused where another is at work
        runs.append(SimpleNamespace(arm=arm, seed=seed, folder=folder, argv=argv,
                                    iterations=cfg.max_iters))
    return runs


def evaluations_of(run, measure):
    """Read the run's eval.jsonl: [] until the run is done."""
    path = os.path.join(run.folder, "eval.jsonl")
    rows = read_log(path) if os.path.exists(path) else []
    if not rows or rows[-1].get("iteration") != run.iterations:
        return []
    if measure not in rows[-1]:
        raise BadInput(f"measure = {measure!r}: is not in {path}, which has {', '.join(rows[-1])}")
    return rows


def make(run):
    """Make a run, or continue it."""
    grpo = os.path.join(ROOT, "grpo.py")
    with open(f"{run.folder}.log", "a", encoding="utf-8") as log:
        process = subprocess.run([sys.executable, grpo, *run.argv], stdout=log, stderr=log)
    result = f"not done, see {run.folder}.log" if process.returncode else "done"
    print(f"{os.path.basename(run.folder)}: {result}", flush=True)


def make_all(runs, measure, workers):
    """Make the runs that are not done. The first one runs alone: it makes the policy and the judges
    of all, and shows whether the measure exists."""
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
    """Fit a line to points (x, y) by least squares and read it at x. Where all points have the
    same x, return the mean of y."""
    xs, ys = np.array(points).T
    if np.ptp(xs) == 0:
        return float(ys.mean())
    return float(np.polyval(np.polyfit(xs, ys, 1), x))


def mean_and_error(values):
    """The mean and its standard error, which is NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def permutation_p(differences):
    """The two-sided p of paired differences: the share of sign flips whose sum is at least
    as far from 0. All flips up to 16 differences, else random ones. The true signs are among them.
    """
    d = np.array(differences)
    if len(d) <= 16:
        signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
    else:
        signs = np.random.default_rng(0).choice((1, -1), (FLIPS, len(d)))
        signs[0] = 1
    far = np.abs(signs @ d) >= abs(d.sum()) * (1 - 1e-9)    # equal sums differ in last digits
    return float(far.mean())


def holm(ps):
    """Correct p-values for their number (Holm 1979), in the order given."""
    order = np.argsort(ps)
    scaled = np.array(ps)[order] * np.arange(len(ps), 0, -1)
    corrected = np.maximum.accumulate(scaled).clip(max=1)
    return corrected[order.argsort()].tolist()


def compare(logs, controls, tested):
    """Compare arms, paired by seed. logs: {arm: log measure by seed} -> {(tested arm, control):
    (mean difference, its error, p)}, with p after Holm over all of these comparisons."""
    differences = {(arm, control): np.subtract(logs[arm], logs[control]).tolist()
                   for arm in tested for control in controls}
    ps = holm([permutation_p(d) for d in differences.values()])
    return {pair: (*mean_and_error(d), p) for (pair, d), p in zip(differences.items(), ps)}


# ------------------------------------------------------------------------------------------------
# the table


def point_of(row, measure):
    """(sqrt(KL), log measure) of an evaluation."""
    return math.sqrt(max(row["kl"], 0)), math.log(max(row[measure], SMALLEST))


def summarise(study, runs):
    """Collect the results of the seeds that are complete in all arms. For each arm there are lists
    by seed: points, (sqrt(KL), log measure) of the evaluations after the first; ends, the last
    evaluation; compared, the log measure at equal KL, where sqrt(KL) is x."""
    rows = {(run.arm, run.seed): evaluations_of(run, study.measure) for run in runs}
    seeds = [seed for seed in study.seeds if all(rows[arm, seed] for arm in study.arms)]
    if not seeds:
        raise BadInput(f"{study.name}: no seed is complete in all arms yet")
    ends = {}
    points = {}
    for arm in study.arms:
        ends[arm] = [rows[arm, seed][-1] for seed in seeds]
        points[arm] = [[point_of(row, study.measure) for row in rows[arm, seed][1:]]
                       for seed in seeds]
    x = statistics.median(x for by_seed in points.values() for line in by_seed for x, _ in line)
    compared = {arm: [value_on_line(line, x) for line in by_seed]
                for arm, by_seed in points.items()}
    return dict(seeds=seeds, x=x, points=points, ends=ends, compared=compared)


def plus_minus(values):
    mean, error = mean_and_error(values)
    return f"{mean:.4g} ± {error:.2g}"


def percent(comparison):
    if comparison is None:
        return "-"
    mean, error, p = comparison
    return f"{100 * math.expm1(mean):+z.0f} % ± {100 * error:.0f}, p {p:.2g}"


def as_markdown(study, summary):
    """Write the summary as a Markdown table with a row for each arm."""
    where = f"at sqrt(KL) {summary['x']:.3f}"
    header = ["arm", study.measure, "kl", where, *study.controls]
    table = [header, ["---"] * len(header)]
    comparisons = compare(summary["compared"], study.controls, study.tested)
    for arm, ends in summary["ends"].items():
        table.append([
            arm, plus_minus([end[study.measure] for end in ends]),
            plus_minus([end["kl"] for end in ends]),
            plus_minus([math.exp(y) for y in summary["compared"][arm]]),
            *(percent(comparisons.get((arm, control))) for control in study.controls)])
    return "\n".join([
        f"# {study.name}", "",
        f"{len(summary['seeds'])} of {len(study.seeds)} seeds are complete. Mean ± standard error "
        f"at the end, then {study.measure} {where} and its differences to the controls, paired by "
        "seed. Below 0 % is better. p: two-sided sign flips, after Holm over this table.", "",
        *("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
          for cells in table), ""])


def main(argv):
    own, paths = own_flags(argv, dict(table=False, workers=os.cpu_count()))
    if len(paths) != 1:
        raise BadInput("usage: python -m extras.study STUDY.py [--table] [--workers=N]")
    study = read_study(paths[0])
    out = os.path.join("out", "study", study.name)
    runs = runs_of(study, out)
    if not own["table"]:
        os.makedirs(out, exist_ok=True)
        make_all(runs, study.measure, own["workers"])
    summary = summarise(study, runs)
    write_json(os.path.join(out, "table.json"), summary)
    print("\n" + as_markdown(study, summary))


if __name__ == "__main__":
    run_script(main)
