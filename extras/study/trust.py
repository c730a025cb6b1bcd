"""
How far can an account's predictions be trusted: their order, and their size?

    python -m extras.study.trust                        # 24 small runs, one after another
    python -m extras.study.trust --part=1 --parts=4     # the first quarter of them
    python -m extras.study.trust --table                # of the runs that are done

A run is made, and made again without some of its rollouts: ten random tenths, twelve random
hundredths, and one rollout alone, the three that would head and the three that would end a list.
Truth and predictions: predictions.py, at four dampings of the derivative.

24 runs: rate 1e-3, 3e-3, 1e-2; 8 or 24 iterations; 4 or 8 prompts of 8 completions; the reward is
the share of the letter e, or of spaces. Policy: 1 layer of 32, made by a short pretraining. Number
n has seed 200 + n. Five runs of an earlier grid, with other seeds and a noisy truth, were known
(rate 1e-3: smoothness 0.72 to 0.90, correlations of 0.31 to 0.92, a tenth left out), and two pilots
of this one, seed 1100 (rate 3e-4, 8 iterations, and 3e-3, 24: smoothness 0.91 and 0.84, with
correlations of 0.98 and 0.84, a hundredth left out, and of 0.97 and 0.76 for the reward).

Criteria, written before the first run. "A correlation" is Spearman's of prediction and truth, mean
over the four sentences; that of the reward counts where at least 0.8 of the variance of its truth
is no noise (`reliability`, a hundredth left out). Smoothness is the mean of three draws.

1. Order. A run is bad if its correlation is below 0.7, damped by 0.3. Asked of a hundredth, which
   is nearest to the single rollouts that a list has; of a tenth; and of the reward, a hundredth.
   Yes where AUC of 1 - smoothness for being bad is above 0.9 over the 24 runs: nothing is fitted in
   it. The bound is found on the runs of odd number: the one that calls most of them right.
   Reported: how many of the even ones it calls right. A list of single rollouts is shown from the
   bound of a hundredth on; where fewer than two odd runs are bad there is no bound to find, and it
   is the lowest smoothness among the odd runs. Where the answer is no, lists are by share alone.
   The reward's prediction is made by 256, 16 and 2 completions of each of 32 held-out prompts. The
   agreement of the effects by two halves of the prompts is a second detector, over all 72, with its
   own AUC and bound, found and tested as above. The order of single rollouts by a reward is shown
   where all detectors with an AUC above 0.9 let it pass; if there is none, nowhere.
2. Damping, for order: of 0.3, 0.1, 0.03 and 0 the one of the largest mean correlation of odd runs,
   a hundredth left out; 0.3 stays within 0.02 of it. Tested: its mean over even runs is higher than
   that of 0.3.
3. Size, of the single rollouts, since they are what is printed; sentences and reward apart. Slope:
   of the truth on the prediction, least squares through 0, over the six singles of a run. The
   damping is the one whose slopes have the smallest mean |log| on the odd runs that the bound of a
   hundredth lets pass (below 0.1 counts as 0.1). A number is printed only if, of the even runs that
   pass, at least six, five of six have a slope between 0.5 and 2, and the median error (root mean
   squares, as a part of the truth) is at most 0.5. Of the reward, by 256 completions of a prompt.
4. A check by repetition instead of smoothness: the cosine of prediction and truth over the first
   four hundredths, all four sentences; its AUC for a correlation below 0.7 over the other eight. It
   takes the place of smoothness if it is higher by 0.05 on the odd runs, and not lower on the even.
5. Reported: the order without the Hessian, damped by 0.3, of sentences and of the reward.
"""
import itertools
import math
import statistics
from dataclasses import replace

import torch

import grpo
from common.script import own_flags, run_script, seed_for
from extras.study.predictions import (
    DAMPINGS, DRAWN, PLAIN, all_measured, auc, bound_of, columns, correlation, error_of, measure,
    order_of, reliability, slope_of)
from run.settings import load_settings

BAD = 0.7
RELIABLE = 0.8
SIZES = {"tenth": (0.1, 10), "hundredth": (0.01, 12)}
SINGLES = {"sentences": "single by sentence", "reward": "single by reward"}
CHECKED = 4         # repetitions of a check
FLAGS = [
    "config/quick_test.py", "--policy=train", "--threads=1", "--n_layer=1", "--n_embd=32",
    "--n_head=2", "--vocab_size=300", "--pretrain_tokens=100000", "--max_completion_length=8",
    "--block_size=20", "--micro_batch_size=64", "--log_micro=False", "--num_eval_prompts=32",
    "--cache_dir=out/study/prepared"]
OUT = "out/study/trust"


# ------------------------------------------------------------------------------------------------
# the runs


def spaces(prompts, completions):
    """Share of spaces."""
    return [text.count(" ") / max(1, len(text)) for text in completions]


def runs():
    """24 dicts."""
    grid = itertools.product((1e-3, 3e-3, 1e-2), (8, 24), (4, 8), ("letters", "spaces"))
    names = ("rate", "iterations", "prompts", "job")
    return [dict(number=number, **dict(zip(names, row))) for number, row in enumerate(grid)]


def settings_of(number, rate, iterations, prompts, job):
    cfg = load_settings([*FLAGS, f"--learning_rate={rate}", f"--max_iters={iterations}",
                         f"--num_prompts={prompts}", f"--seed={200 + number}"])
    if job == "spaces":
        cfg = replace(cfg, functions=cfg.functions | {"reward": spaces})
    return cfg


# ------------------------------------------------------------------------------------------------
# the table, and the criteria


def single(row, damping, which):
    """[(predicted, truth)] of the single rollouts of a list: of the first sentence, or of the
    reward."""
    return columns(row, SINGLES[which], damping, which)[:1]


def smooth(row):
    return statistics.fmean(row["smoothness"])


def checked(row):
    """(the cosine over the first repetitions, the correlation over the others)."""
    pairs = columns(row, "hundredth", 0.3, "sentences")
    predicted, truth = (torch.cat([x[:CHECKED] for x in side]) for side in zip(*pairs))
    cosine = float(torch.cosine_similarity(predicted, truth, dim=0))
    others = [correlation(p[CHECKED:], t[CHECKED:]) for p, t in pairs]
    return cosine, statistics.fmean(others)


def halves(rows):
    """The runs of odd and of even number."""
    odd = [row for row in rows if row["number"] % 2]
    return odd, [row for row in rows if not row["number"] % 2]


def tell(name, rows, score, value):
    """Print how well score (higher: better) foretells that the value is not below BAD -> the bound
    of the odd runs."""
    odd, even = halves(rows)
    known = {id(row): (score(row), value(row) < BAD) for row in rows}
    bound = bound_of(*zip(*(known[id(row)] for row in odd)))
    if sum(known[id(row)][1] for row in odd) < 2:
        bound = min(known[id(row)][0] for row in odd)
    right = sum((x < bound) == bad for x, bad in (known[id(row)] for row in even))
    scores = [auc([-known[id(row)][0] for row in some], [known[id(row)][1] for row in some])
              for some in (rows, odd, even)]
    print(f"{name}: {sum(bad for _, bad in known.values())} of {len(rows)} are bad, AUC "
          f"{scores[0]:.3f} (odd {scores[1]:.3f}, even {scores[2]:.3f}); bound {bound:.3f} by "
          f"{len(odd)} odd runs, right in {right} of {len(even)} even ones")
    return bound


def by_counts(row):
    """What the order of a reward was worth, by the completions of a prompt: dicts."""
    truth = columns(row, "hundredth", 0.3, "reward")[0][1]
    order = {str(DRAWN): order_of(row, "hundredth", 0.3, "reward")}
    for count, predicted in row["fewer"].items():
        x = torch.tensor(predicted["hundredth"], dtype=torch.float64)[:, 0]
        order[count] = correlation(x, truth)
    return [dict(number=row["number"], count=int(count), order=order[count],
                 smoothness=smooth(row), agreement=agreement)
            for count, agreement in row["agreement"].items()]


def mean_log(rows, damping, which):
    slopes = [max(0.1, slope_of(single(row, damping, which))) for row in rows]
    return statistics.fmean(abs(math.log(slope)) for slope in slopes)


def tell_size(which, rows, bound):
    """Print what criterion 3 finds."""
    odd, even = ([row for row in half if smooth(row) >= bound] for half in halves(rows))
    if not odd or not even:
        return
    for damping in DAMPINGS:
        logs = [mean_log(half, damping, which) for half in (odd, even)]
        print(f"size, {which}, damping {damping}: mean |log slope| {logs[0]:.2f} of {len(odd)} odd "
              f"runs, {logs[1]:.2f} of {len(even)} even ones")
    best = min(DAMPINGS, key=lambda damping: mean_log(odd, damping, which))
    pairs = [single(row, best, which) for row in even]
    good = sum(0.5 <= slope_of(pair) <= 2 for pair in pairs)
    error = statistics.median(map(error_of, pairs))
    passed = len(even) >= 6 and good >= 5 / 6 * len(even) and error <= 0.5
    print(f"size, {which}: damping {best}; slope between 0.5 and 2 in {good} of {len(even)} even "
          f"runs, median error {error:.2f}: {'yes' if passed else 'no'}")


def table(rows):
    print("number rate iterations prompts job | reward | smoothness agreement reliability check | "
          "order of sentences: tenth, hundredth; reward: tenth, hundredth | slope of singles: "
          "sentence, reward | errors")
    for row in rows:
        cells = [f"{row[name]}" for name in ("number", "rate", "iterations", "prompts", "job")]
        cells += [f"{x:.3f}" for x in row["reward"]]
        more = [smooth(row), row["agreement"][str(DRAWN)], reliability(row, "hundredth"),
                checked(row)[0]]
        more += [order_of(row, size, 0.3, which) for which in SINGLES for size in SIZES]
        more += [slope_of(single(row, 0.3, which)) for which in SINGLES]
        more += [error_of(single(row, 0.3, which)) for which in SINGLES]
        print(" | ".join([*cells, *(f"{x:.2f}" for x in more)]))
    odd, even = halves(rows)
    if not odd or not even:
        return

    bound = tell("a hundredth, by smoothness", rows, smooth,
                 lambda row: order_of(row, "hundredth", 0.3, "sentences"))
    tell("a tenth, by smoothness", rows, smooth,
         lambda row: order_of(row, "tenth", 0.3, "sentences"))
    tell("the other hundredths, by smoothness", rows, smooth, lambda row: checked(row)[1])
    tell("the other hundredths, by a check", rows, lambda row: checked(row)[0],
         lambda row: checked(row)[1])
    counted = [by_count for row in rows if reliability(row, "hundredth") >= RELIABLE
               for by_count in by_counts(row)]
    if all(halves(counted)):
        for name in ("smoothness", "agreement"):
            tell(f"the reward, a hundredth, by {name}", counted, lambda row: row[name],
                 lambda row: row["order"])
        most = [row for row in counted if row["count"] == DRAWN]
        tell(f"the same, by {DRAWN} completions of a prompt, by smoothness", most,
             lambda row: row["smoothness"], lambda row: row["order"])
    for damping, which in itertools.product((*DAMPINGS, PLAIN), SINGLES):
        means = [statistics.fmean(order_of(row, "hundredth", damping, which) for row in half)
                 for half in (odd, even)]
        print(f"order of {which}, damping {damping}: {means[0]:.3f} of odd runs, {means[1]:.3f} of "
              "even ones")
    for which in SINGLES:
        tell_size(which, rows, bound)


def main(argv):
    own, _ = own_flags(argv, dict(table=False, part=1, parts=1))
    inputs = None if own["table"] else grpo.read_inputs(settings_of(**runs()[0]))

    def measure_run(row):
        seed = seed_for("trust", row["number"])
        return row | measure(settings_of(**row), inputs, SIZES, seed)

    table(all_measured(OUT, runs(), own, measure_run))


if __name__ == "__main__":
    run_script(main)
