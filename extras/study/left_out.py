"""
A hundredth left out: the row that others publish, by two truths.

    python -m extras.study.left_out                     # 12 runs, one after another
    python -m extras.study.left_out --part=1 --parts=2  # the first half of them
    python -m extras.study.left_out --table             # of the runs that are done

As trust.py, with its policy: a run is made, and again without twenty random hundredths of its
rollouts, and without the single ones at either end of a list. Truth: the log-probs of four of its
completions, and the held-out reward of the run made again. Two jobs, six seeds each, the share of
the letter e:

    40 steps    40 iterations of 32 rollouts, rate 1.5e-4, too small to saturate
    8 steps     8 iterations of 64 rollouts, rate 5e-4

Criteria, written before the first run, when trust.py was known. Spearman's correlation of
prediction and truth, damped by 0.3, the mean over the six seeds of a job:

1. Sentences: is it at least 0.9 on both jobs? (Others, 72 steps of fine-tuning: 0.93.)
2. The reward: is it at least 0.8 on both jobs? By 256 completions of each of 32 prompts.
3. Is any seed below 0.7, in either?
4. Size. In trust.py the damping 0.03 was chosen, and all even runs that the bound let pass had a
   slope between 0.5 and 2 (errors 0.21 and 0.28), but they were five and six were asked, so the
   answer was no. It is asked again, of all twelve runs here: a number is printed if, damped by
   0.03, at least ten have a slope of their six singles between 0.5 and 2, and the median error is
   at most 0.5. Sentences and reward apart. Reported: the same damped by 0.3.
5. Reported: without the Hessian, by fewer held-out completions, smoothness, how much of the
   reward's truth is no noise.
"""
import itertools
import statistics

import grpo
from common.script import own_flags, run_script, seed_for
from extras.study.predictions import (
    PLAIN, all_measured, columns, error_of, measure, order_of, reliability, slope_of)
from extras.study.trust import FLAGS, by_counts, single, smooth
from run.settings import load_settings

SEEDS = range(301, 307)
JOBS = {"40 steps": dict(max_iters=40, num_prompts=4, learning_rate=1.5e-4),
        "8 steps": dict(max_iters=8, num_prompts=8, learning_rate=5e-4)}
DAMPINGS = (0.3, 0.03)      # of the order, of the size
SIZES = {"hundredth": (0.01, 20)}
OUT = "out/study/left_out"


def runs():
    """12 dicts."""
    rows = [dict(job=job, seed=seed) for job in JOBS for seed in SEEDS]
    return [dict(number=number, **row) for number, row in enumerate(rows)]


def settings_of(number, job, seed):
    flags = [f"--{name}={value!r}" for name, value in JOBS[job].items()]
    return load_settings([*FLAGS, *flags, f"--seed={seed}"])


def row_of(run):
    """{what: number} of a run."""
    found = {"reward before": run["reward"][0], "after": run["reward"][1],
             "smoothness": smooth(run), "reliability": reliability(run, "hundredth")}
    for which in ("sentences", "reward"):
        pairs = columns(run, "hundredth", 0.3, which)
        found |= {
            which: order_of(run, "hundredth", 0.3, which),
            f"{which}, no Hessian": order_of(run, "hundredth", PLAIN, which),
            f"{which}, slope": statistics.fmean(slope_of([pair]) for pair in pairs),
            f"{which}, error": statistics.fmean(error_of([pair]) for pair in pairs)}
        for damping in DAMPINGS:
            pairs = single(run, damping, which)
            found |= {f"{which}, damped by {damping}, slope of singles": slope_of(pairs),
                      f"{which}, damped by {damping}, error of singles": error_of(pairs)}
    for row in by_counts(run):
        found[f"agreement by {row['count']}"] = row["agreement"]
        found[f"reward by {row['count']}"] = row["order"]
    return found


def table(rows):
    for job in JOBS:
        found = [row_of(row) for row in rows if row["job"] == job]
        print(f"{job}, {len(found)} seeds")
        for name in found[0] if found else ():
            values = [row[name] for row in found]
            print(f"  {name}: {statistics.fmean(values):.2f} ("
                  + ", ".join(f"{x:.2f}" for x in values) + ")")
    for which, damping in itertools.product(("sentences", "reward"), DAMPINGS):
        pairs = [single(row, damping, which) for row in rows]
        good = sum(0.5 <= slope_of(pair) <= 2 for pair in pairs)
        error = statistics.median(map(error_of, pairs)) if pairs else float("nan")
        print(f"size, {which}, damped by {damping}: slope between 0.5 and 2 in {good} of "
              f"{len(pairs)} runs, median error {error:.2f}")


def main(argv):
    own, _ = own_flags(argv, dict(table=False, part=1, parts=1))
    inputs = None if own["table"] else grpo.read_inputs(settings_of(**runs()[0]))

    def measure_run(row):
        seed = seed_for("left out", row["seed"])
        return row | measure(settings_of(**row), inputs, SIZES, seed, DAMPINGS)

    table(all_measured(OUT, runs(), own, measure_run))


if __name__ == "__main__":
    run_script(main)
