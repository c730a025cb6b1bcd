"""
Arms of a config against each other: runs over seeds, then a table and a verdict at equal KL.

    python study.py study/clean.py            # all runs, as many at a time as there are cores
    python study.py study/clean.py --table    # the table of the runs that are done
    python study.py study/clean.py --quick    # minutes: goes through everything, and says nothing
    python plot.py out/study/clean            # pictures

A study file is Python that assigns these names; its docstring says the question and, before the
runs, which answer counts as what:

    config      path of a config file of grpo.py
    arms        {name: {setting: value}}
    seeds       range or tuple; with the same seed all arms have the same prompts and noise
    grid        {setting: (values)} of one setting that moves the KL, such as beta; {}: none
    measure     what the arms are compared by, lower is better: a measure of the evaluation
    controls    arms that every arm is compared with
    tested      arms that the verdicts are about
    few         {arm: number} of arms that get only so many of the seeds; optional
    quick       {setting: value} that shrink a run for --quick; optional
    base        path of a study whose names and arms this one adds to; optional

Every run is a folder of grpo.py in out/study/NAME. What it printed is beside it in a .log, and its
row is in rows.jsonl. A run counts as done when it has a row of its present settings: the same
command goes on where it stopped, and only a changed arm runs anew (its old folders are renamed).
Runs go seed by seed, so that a study that is stopped has whole seeds. run/compare.py makes the
table.

--workers=N: processes; by default as many as there are cores. --out=FOLDER: in place of
out/study/NAME.
"""
import ast
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import time
import traceback
from types import SimpleNamespace
from typing import NamedTuple

import torch

import grpo
from config import load_settings, read_config
from judge.train import auc
from run.checkpoint import append_rows, newest_checkpoint
from run.compare import SURE, as_markdown, least_p, summarise
from run.files import read_rows, replacing, write_json
from run.folder import FREE, is_free, lock_folder, same_settings
from run.script import BadInput, run_script

NEEDED = {"config": str, "arms": dict, "seeds": (range, tuple), "grid": dict, "measure": str,
          "controls": tuple, "tested": tuple}
USAGE = "usage: python study.py study/clean.py [--table] [--quick] [--workers=N] [--out=FOLDER]"


# ------------------------------------------------------------------------------------------------
# the study file


def read_study(path, quick=False):
    """The names that a study file assigns, checked, as a namespace, with seeds a tuple and quick
    True or False. It also has name, about (the docstring), setting and values (of the grid; "" and
    (None,) without) and shrink (what the file calls quick, {} unless quick)."""
    values, _, source = read_config(path)
    if "base" in values:
        base, _, _ = read_config(values.pop("base"))
        if "base" in base:
            raise BadInput(f"{path}: base = a study that has a base itself: name that one")
        values = base | values | {"arms": base.get("arms", {}) | values.get("arms", {})}
    for name, kind in NEEDED.items():
        if name not in values:
            raise BadInput(f"{path}: no {name}; see python study.py --help")
        if not isinstance(values[name], kind):
            raise BadInput(f"{path}: {name} = {values[name]!r}: is of the wrong type; "
                           "see python study.py --help")
    unknown = sorted(values.keys() - NEEDED.keys() - {"quick", "few"})
    if unknown:
        raise BadInput(f"{path}: {unknown[0]!r} is no name of a study; start it with _")
    study = SimpleNamespace(**{"quick": {}, "few": {}} | values)
    for name in (*study.controls, *study.tested, *study.few):
        if name not in study.arms:
            raise BadInput(f"{path}: {name!r} is no arm; there are {', '.join(study.arms)}")
    are_values = [isinstance(values, tuple) and values for values in study.grid.values()]
    if len(study.grid) > 1 or not all(are_values):
        raise BadInput(f"{path}: grid = {study.grid!r}: must be {{}} or one setting and a tuple of "
                       "its values")
    study.name = os.path.basename(path).removesuffix(".py") + "_quick" * quick
    study.about = ast.get_docstring(ast.parse(source)) or ""
    study.setting, study.values = next(iter(study.grid.items()), ("", (None,)))
    study.shrink = study.quick if quick else {}
    study.quick = quick
    study.seeds = tuple(study.seeds)[:2 if quick else None]
    return study


class Planned(NamedTuple):
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
        if seed in study.seeds[study.few.get(arm, len(study.seeds)):]:
            continue        # beyond the few that this arm gets
        point = "" if value is None else f"_{study.setting}{value}"
        name = f"{arm}{point}_seed{seed}".replace(" ", "_").replace("/", "_")
        settings = study.arms[arm] | study.shrink | {"seed": seed, "threads": 1}
        if value is not None:
            settings[study.setting] = value
        settings["out_dir"] = os.path.join(out, name)
        argv = [study.config, *(f"--{setting}={x!r}" for setting, x in settings.items())]
        try:
            cfg = load_settings(argv)
        except BadInput as e:
            raise BadInput(f"arm {arm!r}: {e}") from e
        jobs.append(Planned(name, arm, value, seed, argv, key_of(cfg)))
    return jobs


def key_of(cfg):
    """Hash of settings and of the config file's text. Code is not in it, nor what a config file
    imports, but for its settings."""
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
    """Prints how a run went and, from the mean so far, when all will be done."""
    minutes = (time.time() - began) / done * (of - done) / 60
    how = f"failed: {row['error']}" if row["error"] else f"{row['seconds']:.0f} s"
    print(f"{done}/{of} {job.name}: {how}; {minutes:.1f} min left", flush=True)


def start_worker():
    """Starts a process that makes the runs sent to it -> (process, connection)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there,), daemon=True)
    process.start()
    there.close()       # so that the end of the process closes the pipe
    return process, here


def answer_of(process, connection):
    """The row that a worker sends. If it died, a row that says how."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):     # the second if it died before it read its job
        process.join()
        return {"error": f"the process ended with exit code {process.exitcode}"}


def work(connection):
    """In a worker: make runs until the study closes the connection."""
    os.setpgrp()        # Ctrl-C in a terminal is for the study alone, which ends its workers
    with contextlib.suppress(EOFError):
        while True:
            connection.send(run_one(connection.recv()))


def run_one(job):
    """Makes a run, or goes on with it -> its row. What it prints goes to FOLDER.log."""
    began = time.time()
    spent = time.process_time()
    cfg = load_settings(job.argv)
    folder = cfg.out_dir
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            grpo.main([*job.argv, *going_on(job.argv, folder)])
            seconds = {"seconds": time.time() - began, "cpu_seconds": time.process_time() - spent}
            return row_of(folder, cfg.max_iters) | seconds | {"error": None}
        except (Exception, SystemExit) as e:
            traceback.print_exc()
            return {"error": traceback.format_exception_only(e)[-1].strip()}
        finally:
            sys.stdout.flush()


def going_on(argv, folder):
    """Further arguments, so that grpo.py works in this folder: --resume if it holds this run and a
    checkpoint of it. A run of other settings there is renamed."""
    if same_settings(folder, load_settings(argv)):
        return ["--resume=True"] if newest_checkpoint(folder) else []
    if not is_free(folder):
        names = (f"{folder}_old{number}" for number in itertools.count(1))
        os.rename(folder, next(name for name in names if not os.path.exists(name)))
    return []


# ------------------------------------------------------------------------------------------------
# a run's row


def row_of(folder, iterations):
    """What a study needs of a run, from the logs in its folder: evaluations without their samples,
    means over iterations, and by thirds of the run what was wrong or planted. BadInput for a run
    that has not come to its end here: grpo.py chooses another folder where this one is in use or
    has logs without a checkpoint."""
    evaluations = read_rows(os.path.join(folder, "eval.jsonl"))
    done = evaluations[-1]["iteration"]
    if done < iterations:
        raise BadInput(f"{folder}: ends after iteration {done} of {iterations}, and the run went "
                       "elsewhere (see its .log); move the folder away")
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
    """How well selection tells rollouts with a wrong reward (scores.wrong = 1) from the others:
    shares kept of both, and auc, the chance that of a wrong and a right one of an iteration the
    wrong one has the lower influence. Rows with advantage 0 carry no policy gradient and are left
    out."""
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
# the table


def done_rows(jobs, out):
    """({(arm, value, seed): row} of finished runs, {run: row} of failed ones), of the present
    settings only. The next command tries failed runs again."""
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
    """Prints the table and writes table.txt, and table.json for plot.py. Returns the runs that
    failed."""
    rows, failed = done_rows(jobs, out)
    summary = summarise(study, rows, failed)
    text = as_markdown(summary)
    with replacing(os.path.join(out, "table.txt")) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)
    write_json(os.path.join(out, "table.json"), summary)
    print(f"\n{text}\n{out}: table.txt; pictures: python plot.py {out}")
    return failed


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
    if least_p(study) >= SURE and not study.quick:
        print(f"note: no verdict can be a win: of {len(study.seeds)} seeds the smallest corrected "
              f"p is {least_p(study):.2g}, and a win needs p < {SURE:g}; plan more seeds")
    if not options["--table"]:
        os.environ["OMP_NUM_THREADS"] = "1"     # for the workers, before they import torch
        os.makedirs(out, exist_ok=True)
        lock = lock_folder(out)
        if not lock:
            raise BadInput(f"{out}: another study is at work there")
        with lock:
            rows, _ = done_rows(jobs, out)
            left = [job for job in jobs if (job.arm, job.value, job.seed) not in rows]
            print(f"{out}: {len(jobs)} runs, {len(left)} to make", flush=True)
            run_all(left, options["--workers"], out)
    if write_table(study, jobs, out):
        raise SystemExit("error: runs failed (the table names them); the same command tries again")


if __name__ == "__main__":
    run_script(main)
