"""
Arms of a config against each other: runs over seeds, then a table and a verdict at equal KL.

    python study.py study/clean.py              # all runs, as many at a time as there are cores
    python study.py study/clean.py --table      # the table of the runs that are done
    python study.py study/clean.py --quick      # minutes, through everything; its numbers say nothing
    python plot.py out/study/clean              # pictures

A study file is Python that assigns these names; its docstring says the question and, before the
runs, which answer counts as what:

    config      path of a config file of grpo.py
    arms        {name: {setting: value}}
    seeds       range or tuple; arms of a seed share prompts and noise, so they are compared in pairs
    grid        {setting: (values)} of one setting that moves the KL, such as beta; {}: none
    measure     what the arms are compared by, lower is better: a measure of the evaluation
    controls    arms that every arm is compared with
    tested      arms that the verdicts are about
    quick       {setting: value} that shrink a run for --quick; optional
    base        path of a study whose names and arms this one adds to; optional

Every run is a folder of grpo.py in out/study/NAME, what it printed is beside it in .log, and its row
is in rows.jsonl. A run counts as done when it has a row of its present settings: the same command
goes on where it stopped, and a changed arm alone runs anew (its old folders are renamed). Runs go
seed by seed, so that a study that is stopped has whole seeds. --workers=N, --out=FOLDER.
"""
import ast
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import time
import traceback
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

import grpo
from config import load_settings, read_config
from judge.train import auc
from run.checkpoint import append_rows
from run.content import newest_checkpoint
from run.files import read_rows, replacing, write_json
from run.folder import FREE, is_free, lock_folder, same_settings, unlock
from run.script import BadInput, end_with_parent, run_script

NEEDED = {"config": str, "arms": dict, "seeds": (range, tuple), "grid": dict, "measure": str,
          "controls": tuple, "tested": tuple}
USAGE = "usage: python study.py study/clean.py [--table] [--quick] [--workers=N] [--out=FOLDER]"
# columns of the table: of the last evaluation, beside the measure, and over the iterations
END = ("eval_judge/toxicity", "rewards/planted", "sqrt_kl", "perplexity", "distinct_2", "ended")
OVER_RUN = ("kept", "cosine", "kl_last")
SMALLEST = 1e-3         # of a measure, for its logarithm
QUICK = "**quick: says nothing.** Two seeds of shrunken runs, only to see that everything works."
SURE = 0.01             # a win needs a corrected p below this
WORTH = math.log(0.8)   # a no excludes an improvement of 20 %
TITLES = {
    "wrong_kept": "Share of rollouts with a wrong reward that is kept",
    "right_kept": "Share of rollouts with a right reward that is kept",
    "auc": "Chance that a wrong rollout has a lower influence than a right one",
    "planted": "Share of rollouts with the planted string"}
NOTE = ("Of each seed a straight line through (sqrt(KL), log measure) is read at the median of all "
        "points; `seeds outside` have no point as far out. Below 0 %: better than the control. p: "
        "two-sided, by sign flips of the paired differences; (Holm): corrected for all comparisons "
        "of the tested arms, the others are not. A win needs p < {sure:g} against every control.")
FLIPS = 20_000          # random sign flips, where all of them are too many


# ------------------------------------------------------------------------------------------------
# the study file


def read_study(path, quick=False):
    """The names of a study file, checked, and: name, about (its docstring), values (of the grid,
    (None,) without), setting (of the grid), quick."""
    values, _, source = read_config(path)
    if "base" in values:
        base, _, _ = read_config(values.pop("base"))
        values = base | values | {"arms": base.get("arms", {}) | values.get("arms", {})}
    for name, kind in NEEDED.items():
        if name not in values:
            raise BadInput(f"{path}: no {name}; see python study.py --help")
        if not isinstance(values[name], kind):
            raise BadInput(f"{path}: {name} = {values[name]!r}: is of the wrong type; "
                           "see python study.py --help")
    unknown = sorted(values.keys() - NEEDED.keys() - {"quick"})
    if unknown:
        raise BadInput(f"{path}: {unknown[0]!r} is no name of a study; start it with _")
    study = SimpleNamespace(**{"quick": {}} | values)
    for name in (*study.controls, *study.tested):
        if name not in study.arms:
            raise BadInput(f"{path}: {name!r} is no arm; there are {', '.join(study.arms)}")
    if len(study.grid) > 1 or not all(study.grid.values()):
        raise BadInput(f"{path}: grid = {study.grid!r}: must be one setting and its values, or {{}}")
    study.name = os.path.basename(path).removesuffix(".py") + "_quick" * quick
    study.about = ast.get_docstring(ast.parse(source)) or ""
    study.setting, study.values = next(iter(study.grid.items()), ("", (None,)))
    study.shrink = study.quick if quick else {}
    study.quick = quick
    study.seeds = tuple(study.seeds)[:2 if quick else None]
    return study


class Job(NamedTuple):
    name: str       # of its folder
    arm: str
    value: object   # of the grid; None without
    seed: int
    argv: list      # for grpo.main
    key: str        # hash of its settings


def jobs_of(study, out):
    """All runs, seed by seed. BadInput for settings that grpo.py would refuse."""
    jobs = []
    for seed, arm, value in itertools.product(study.seeds, study.arms, study.values):
        point = "" if value is None else f"_{study.setting}{value}"
        name = f"{arm}{point}_seed{seed}".replace(" ", "_").replace("/", "_")
        settings = study.arms[arm] | study.shrink | {"seed": seed, "threads": 1}
        if value is not None:
            settings[study.setting] = value
        settings["out_dir"] = os.path.join(out, name)
        argv = [study.config, *(f"--{name}={x!r}" for name, x in settings.items())]
        try:
            cfg = load_settings(argv)
        except BadInput as e:
            raise BadInput(f"arm {arm!r}: {e}") from e
        jobs.append(Job(name, arm, value, seed, argv, key_of(cfg)))
    return jobs


def key_of(cfg):
    """Hash of what a run depends on: settings and the text of the config file."""
    settings = {name: x for name, x in cfg.public().items() if name not in FREE}
    text = json.dumps([settings, cfg.source], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------
# the runs


def run_all(jobs, workers, out):
    """Makes the runs in worker processes, each of which makes one after the other, and adds the row
    of each to rows.jsonl. Ctrl-C lets the workers save and ends them."""
    left = list(jobs)[::-1]
    busy = {}           # connection -> (process, job)
    began = time.time()
    # the first run alone makes policy and judges, which the others find
    first = not os.path.exists(os.path.join(out, "rows.jsonl"))
    try:
        while left or busy:
            while left and len(busy) < (1 if first else workers):
                give(left.pop(), *start_worker(), busy)
            for connection in multiprocessing.connection.wait(busy):
                process, job = busy.pop(connection)
                row = answer_of(process, connection)
                append_rows(out, "rows.jsonl", [dict(
                    run=job.name, arm=job.arm, value=job.value, seed=job.seed, key=job.key) | row])
                first = False
                say_done(job, row, len(jobs) - len(left) - len(busy), len(jobs), began)
                if left and process.is_alive():
                    give(left.pop(), process, connection, busy)
                else:
                    connection.close()
                    process.join()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(left) + len(busy)} of {len(jobs)} runs are left; the same "
                                "command goes on") from None
    finally:
        for process, _ in busy.values():
            process.terminate()
        for process, _ in busy.values():
            process.join()


def give(job, process, connection, busy):
    busy[connection] = process, job
    connection.send(job)


def say_done(job, row, done, of, began):
    minutes = (time.time() - began) / done * (of - done) / 60
    how = f"failed: {row['error']}" if row["error"] else f"{row['seconds']:.0f} s"
    print(f"{done}/{of} {job.name}: {how}; {minutes:.1f} min left", flush=True)


def start_worker():
    """A process that makes the runs that are sent to it -> (process, connection)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there,), daemon=True)
    process.start()
    there.close()       # so that the end of the process closes the pipe
    return process, here


def answer_of(process, connection):
    """The row that a worker sends; one that says how it died, if it did."""
    try:
        return connection.recv()
    except EOFError:
        process.join()
        return {"error": f"the process ended with exit code {process.exitcode}"}


def work(connection):
    """In a worker: make runs until the study closes the connection."""
    os.setpgrp()        # Ctrl-C in a terminal is for the study alone, which ends its workers
    end_with_parent()
    with contextlib.suppress(EOFError):
        while True:
            connection.send(run_one(connection.recv()))


def run_one(job):
    """Makes a run, or goes on with it -> its row. What it prints goes into a log beside it."""
    began = time.time()
    folder = load_settings(job.argv).out_dir
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            grpo.main([*job.argv, *going_on(job.argv, folder)])
            return row_of(folder) | {"seconds": time.time() - began, "error": None}
        except (Exception, SystemExit) as e:
            traceback.print_exc()
            return {"error": traceback.format_exception_only(e)[-1].strip()}
        finally:
            sys.stdout.flush()


def going_on(argv, folder):
    """Arguments with which grpo.py goes on in this folder, and nowhere else, if it holds this run.
    A run of other settings there is renamed."""
    if same_settings(folder, load_settings(argv)):
        return ["--resume=True"] if newest_checkpoint(folder) else []
    if not is_free(folder):
        names = (f"{folder}_old{number}" for number in itertools.count(1))
        os.rename(folder, next(name for name in names if not os.path.exists(name)))
    return []


# ------------------------------------------------------------------------------------------------
# a run's row


def row_of(folder):
    """What a study needs of a run."""
    evaluations = read_rows(os.path.join(folder, "eval.jsonl"))
    for row in evaluations:
        del row["samples"]
    metrics = read_rows(os.path.join(folder, "metrics.jsonl"))
    row = {
        "evaluations": evaluations,
        "kl_last": mean_of(metrics[-5:], "kl"),
        "kept": mean_of(metrics, "tracin/selected_ratio"),
        "cosine": mean_of(metrics, "tracin/target_cosine")}
    samples = read_rows(os.path.join(folder, "samples.jsonl"))
    parts = thirds(samples, len(metrics))
    scores = samples[0].get("scores", {})
    if "wrong" in scores:
        row["wrong"] = [found_wrong(part) for part in parts]
    if "planted" in scores:
        row["planted"] = [mean_of([s["scores"] for s in part], "planted") for part in parts]
    return row


def mean_of(rows, name):
    """Mean over the rows that have a number; None without any."""
    found = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(found) if found else None


def thirds(samples, iterations):
    """Samples of the first, second and last third of a run's iterations."""
    parts = [[], [], []]
    for sample in samples:
        parts[(sample["iteration"] - 1) * 3 // iterations].append(sample)
    return parts


def found_wrong(samples):
    """How well selection tells rollouts whose reward was falsified (scores.wrong = 1) from the
    others: shares kept of both, and auc, the chance that a wrong one has the lower influence, within
    an iteration. Rows with advantage 0, which carry no policy gradient, are left out."""
    rows = [s for s in samples if s["advantage"]]
    kept = {0.0: [], 1.0: []}
    for s in rows:
        kept[s["scores"]["wrong"]].append({"kept": float(s.get("weight", 1) != 0)})
    aucs = []
    for _, group in itertools.groupby(rows, key=lambda s: s["iteration"]):
        scored = [s for s in group if s.get("influence") is not None]
        wrong = torch.tensor([s["scores"]["wrong"] for s in scored])
        if 0 < wrong.sum() < len(wrong):
            influence = torch.tensor([s["influence"] for s in scored])
            aucs.append({"auc": auc(-influence, wrong)})
    return {"wrong_kept": mean_of(kept[1.0], "kept"), "right_kept": mean_of(kept[0.0], "kept"),
            "auc": mean_of(aucs, "auc")}


# ------------------------------------------------------------------------------------------------
# the maths


def read_line(points, x):
    """Value at x of the straight line through points (x, y) by least squares. Points that share
    one x have no slope: their mean."""
    mean_x = statistics.fmean(px for px, _ in points)
    mean_y = statistics.fmean(py for _, py in points)
    spread = sum((px - mean_x) ** 2 for px, _ in points)
    slope = 0.0
    if spread > 0:
        slope = sum((px - mean_x) * (py - mean_y) for px, py in points) / spread
    return mean_y + slope * (x - mean_x)


def mean_and_error(values):
    """(mean, its standard error) of numbers, None left out; the error is NaN for one number."""
    values = [v for v in values if v is not None]
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def permutation_p(differences):
    """Two-sided p of paired differences: the share of their sign flips whose sum is as far from 0
    as theirs. All 2^n flips up to n = 16, else FLIPS random ones and the true one."""
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


def t_quantile(freedom):
    """97.5 % quantile of Student's t, from its density in small steps."""
    step = 1e-4
    x = np.arange(0, 20, step) + step / 2
    height = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = (1 + x ** 2 / freedom) ** (-(freedom + 1) / 2)
    density *= math.exp(height) / math.sqrt(freedom * math.pi)
    return float(x[np.searchsorted(np.cumsum(density) * step, 0.475)])


def compare(ours, theirs):
    """Paired differences of two {seed: log measure} over the seeds that both have: their number,
    mean, 95 % interval and p. None without two such seeds."""
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    n = len(differences)
    if n < 2:
        return None
    mean, error = mean_and_error(differences)
    reach = t_quantile(n - 1) * error
    return {"n": n, "mean": mean, "low": mean - reach, "high": mean + reach,
            "p": permutation_p(differences)}


def compare_all(logs, controls, tested):
    """{arm: {control: compare(...)}} of {arm: {seed: log measure}}; among the tested arms p is also
    corrected for all their comparisons."""
    found = {arm: {control: compare(logs[arm], logs[control]) for control in controls
                   if control != arm} for arm in logs}
    family = [c for arm in tested for c in found[arm].values() if c]
    for comparison, p in zip(family, holm([c["p"] for c in family])):
        comparison["corrected"] = p
    return found


def verdict(comparisons):
    """In words, for a tested arm's {control: comparison}: win, no or not decided, and why."""
    if not comparisons or not all(comparisons.values()):
        return "not decided: too few seeds"
    failed = [control for control, c in comparisons.items()
              if c["mean"] >= 0 or c["corrected"] >= SURE]
    if not failed:
        return f"win: better than {', '.join(comparisons)}"
    best = max(comparisons, key=lambda control: comparisons[control]["mean"])
    if comparisons[best]["low"] > WORTH:
        return (f"no: not better than {', '.join(failed)} with p < {SURE:g}, and at most "
                f"{-percent(comparisons[best]['low']):.0f} % better than {best}")
    return f"not decided: not better than {', '.join(failed)} with p < {SURE:g}"


def percent(log_ratio):
    return 100 * math.expm1(log_ratio)


# ------------------------------------------------------------------------------------------------
# summary and table


def summarise(study, rows):
    """What the table and the pictures show, as plain values. rows: {(arm, value, seed): row}."""
    middle = study.values[len(study.values) // 2]
    points = {}         # arm -> {seed: [(sqrt(kl), log measure)]}
    ends = {}           # arm -> {seed: last evaluation, at the middle of the grid}
    for arm in study.arms:
        points[arm] = {seed: found for seed in study.seeds
                       if (found := points_of(study, rows, arm, seed))}
        ends[arm] = {seed: end_of(rows[arm, middle, seed]) for seed in points[arm]}
    everywhere = [x for by_seed in points.values() for found in by_seed.values() for x, _ in found]
    if not everywhere:
        raise BadInput(f"{study.name}: no seed of any arm is complete yet")
    x = statistics.median(everywhere)
    at_equal_kl = {arm: {seed: read_line(found, x) for seed, found in by_seed.items()}
                   for arm, by_seed in points.items()}
    at_end = {arm: {seed: log_measure(study, e) for seed, e in by_seed.items()}
              for arm, by_seed in ends.items()}
    arms = {}
    for arm in study.arms:
        middles = [rows[arm, middle, seed] for seed in points[arm]]
        arms[arm] = {
            "seeds": len(middles),
            "failed": sorted(run for run, row in study.failed.items() if row["arm"] == arm),
            "end": {name: mean_and_error([e.get(name) for e in ends[arm].values()])
                    for name in (study.measure, *END)},
            "run": {name: mean_and_error([row[name] for row in middles]) for name in OVER_RUN},
            "frontier": frontier(points[arm].values()),
            "equal": mean_and_error([math.exp(y) for y in at_equal_kl[arm].values()]),
            "outside": sum(not min(found)[0] <= x <= max(found)[0]
                           for found in points[arm].values()),
            "thirds": {name: [mean_and_error(by_third) for by_third in zip(*found)]
                       for name, found in parts_of(middles).items()}}
    by_kl = compare_all(at_equal_kl, study.controls, study.tested)
    return {
        "name": study.name, "about": study.about, "quick": study.quick, "measure": study.measure,
        "setting": study.setting, "values": study.values, "middle": middle, "x": x,
        "controls": study.controls, "tested": study.tested, "arms": arms, "equal": by_kl,
        "end": compare_all(at_end, study.controls, study.tested),
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
    """[(mean and error of sqrt(kl), of the measure)] at each point of an arm's curve, over the
    points of its seeds."""
    return [(mean_and_error([x for x, _ in at_point]),
             mean_and_error([math.exp(y) for _, y in at_point])) for at_point in zip(*found)]


def parts_of(rows):
    """{name: [values by third, for each row]} of what was found in thirds of the runs."""
    parts = {}
    for row in rows:
        for third in [row["wrong"]] if "wrong" in row else []:
            for name in third[0]:
                parts.setdefault(name, []).append([part[name] for part in third])
        if "planted" in row:
            parts.setdefault("planted", []).append(row["planted"])
    return parts


def table(summary):
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
    lines += markdown(["arm", "seeds", *names, *OVER_RUN], rows)
    for arm, a in arms.items():
        lines += [f"Failed: {run}" for run in a["failed"]]
    lines += ["", f"## At equal KL, sqrt(KL) = {summary['x']:.3f}: {measure}, difference to each "
              "control (95 %), p", "", NOTE.format(sure=SURE), ""]
    rows = [[arm, plus_minus(a["equal"]), f"{a['outside']} of {a['seeds']}",
             *differences(summary["equal"][arm], summary["controls"])] for arm, a in arms.items()]
    lines += markdown(["arm", measure, "seeds outside", *summary["controls"]], rows)
    lines += [""] + [f"- {arm}: {text}" for arm, text in summary["verdicts"].items()]
    lines += ["", f"## At the end{at}: difference to each control (95 %), p", ""]
    rows = [[arm, *differences(summary["end"][arm], summary["controls"])] for arm in arms]
    lines += markdown(["arm", *summary["controls"]], rows)
    for name in sorted({name for a in arms.values() for name in a["thirds"]}):
        lines += ["", f"## {TITLES[name]}, by thirds of the run{at}", ""]
        rows = [[arm, *map(plus_minus, a["thirds"].get(name, ()))] for arm, a in arms.items()]
        lines += markdown(["arm", "first", "second", "third"], rows)
    return "\n".join(lines) + "\n"


def plus_minus(mean_error):
    mean, error = mean_error
    if math.isnan(mean):
        return "-"
    digits = 1 if abs(mean) >= 10 else 4
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def differences(comparisons, controls):
    """Cells of the table: an arm beside each control."""
    cells = []
    for control in controls:
        c = comparisons.get(control)
        if c is None:
            cells.append("-")
            continue
        p = f"p {c['corrected']:.2g} (Holm)" if "corrected" in c else f"p {c['p']:.2g}"
        low, high = percent(c["low"]), percent(c["high"])
        cells.append(f"{percent(c['mean']):+.0f} % ({low:+.0f} to {high:+.0f}), {p}")
    return cells


def markdown(heads, rows):
    """Lines of a table, columns padded so that they can be read as they are."""
    rows = [[str(cell) for cell in row] + [""] * (len(heads) - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]


# ------------------------------------------------------------------------------------------------


def done_rows(jobs, out):
    """(rows of finished runs by (arm, value, seed), failed ones by name), of the present settings
    alone. A run that failed is tried again by the next command."""
    path = os.path.join(out, "rows.jsonl")
    found = {row["run"]: row for row in (read_rows(path) if os.path.exists(path) else [])}
    rows = {}
    failed = {}
    for job in jobs:
        row = found.get(job.name)
        if row is None or row["key"] != job.key:
            continue
        if row["error"]:
            failed[job.name] = row
        else:
            rows[job.arm, job.value, job.seed] = row
    return rows, failed


def write_table(study, jobs, out):
    """Prints the table and writes table.txt, and table.json for plot.py."""
    rows, study.failed = done_rows(jobs, out)
    summary = summarise(study, rows)
    text = table(summary)
    with replacing(os.path.join(out, "table.txt")) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
    write_json(os.path.join(out, "table.json"), summary)
    print(f"\n{text}\n{out}: table.txt; pictures: python plot.py {out}")


def main(argv):
    options = {"--table": False, "--quick": False, "--workers": os.cpu_count(), "--out": None}
    paths = [arg for arg in argv if not arg.startswith("--")]
    for arg in argv:
        flag, _, value = arg.partition("=")
        if flag in ("--table", "--quick") and not value:
            options[flag] = True
        elif flag == "--workers" and value.isdigit() and int(value):
            options[flag] = int(value)
        elif flag == "--out" and value:
            options[flag] = value
        elif arg.startswith("-"):
            raise BadInput(f"{arg}: no such flag, or no value; {USAGE}")
    if len(paths) != 1:
        raise BadInput(USAGE)
    study = read_study(paths[0], options["--quick"])
    out = options["--out"] or os.path.join("out", "study", study.name)
    jobs = jobs_of(study, out)
    if not options["--table"]:
        os.environ["OMP_NUM_THREADS"] = "1"     # for the workers, before they import torch
        os.makedirs(out, exist_ok=True)
        lock = lock_folder(out)
        if not lock:
            raise BadInput(f"{out}: another study is at work there")
        try:
            rows, _ = done_rows(jobs, out)
            left = [job for job in jobs if (job.arm, job.value, job.seed) not in rows]
            print(f"{out}: {len(jobs)} runs, {len(left)} to make", flush=True)
            run_all(left, options["--workers"], out)
        finally:
            unlock(out, lock)
    write_table(study, jobs, out)


if __name__ == "__main__":
    run_script(main)
