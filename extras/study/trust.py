"""
How far can an account's prediction be trusted, and has it the right size?

    python -m extras.study.trust             # 24 small runs, some minutes of processor time
    python -m extras.study.trust --table     # of the runs that are done

A run is made, ten random tenths of its rollouts are left out, and it is made again on the others;
then ten random hundredths. Truth: the change of the log-probs of four completions of its first
iteration (no noise), and of the held-out reward (256 completions, noisy). Prediction: minus the sum
of the effects of what was left out, damped by 0.3, as `python tracin.py RUN` has it.

24 runs: rate 1e-3, 3e-3, 1e-2; 8 or 24 iterations; 4 or 8 prompts of 8 completions; the reward is
the share of the letter e, or of spaces. Policy: 1 layer of 32, made by a short pretraining.

Criteria, written before the first run:
1. Trust. A run is bad if the rank correlation of prediction and truth, a tenth left out, mean over
   the four sentences, is below 0.7. Yes if AUC of 1 - smoothness for being bad is above 0.9, on the
   12 runs of even number. The bound is found on the 12 of odd number alone: the one that calls most
   of them right (the middle, where several do). Reported: how many of the other 12 it calls right.
2. Size. A number is printed only if the slope of the truth on the prediction (least squares through
   0) is between 0.5 and 2 in at least 10 of the 12 even runs that the bound lets pass, or in all
   where fewer than 12 pass; else the order alone. For sentences and reward apart, a hundredth out.
"""
import itertools
import json
import os
import tempfile
from dataclasses import replace

import torch

import grpo
from common.script import own_flags, run_script, seed_for
from explain.account import account, replay, smoothness, train_again
from explain.target import HeldOut, Sentences, follow
from run.settings import load_settings

BAD = 0.7
SUBSETS = 10
SIZES = {"tenth": 0.1, "hundredth": 0.01}
FLAGS = [
    "config/quick_test.py", "--threads=1", "--n_layer=1", "--n_embd=32", "--n_head=2",
    "--vocab_size=300", "--pretrain_tokens=100000", "--max_completion_length=12",
    "--block_size=40", "--log_micro=False", "--num_eval_prompts=32", "--num_eval_generations=8",
    "--cache_dir=out/study/prepared"]
OUT = "out/study/trust"


def spaces(prompts, completions):
    """Share of spaces."""
    return [text.count(" ") / max(1, len(text)) for text in completions]


def runs():
    """24 tuples: number, rate, iterations, prompts, job."""
    grid = itertools.product((1e-3, 3e-3, 1e-2), (8, 24), (4, 8), ("letters", "spaces"))
    return [(number, *row) for number, row in enumerate(grid)]


def settings_of(number, rate, iterations, prompts, job):
    cfg = load_settings([*FLAGS, f"--learning_rate={rate}", f"--max_iters={iterations}",
                         f"--num_prompts={prompts}", f"--seed={100 + number}"])
    if job == "spaces":
        cfg = replace(cfg, functions=cfg.functions | {"reward": spaces})
    return cfg


def ranks(x):
    return x.argsort().argsort().double()


def compared(predicted, truth):
    """Rank correlation, slope through 0, and the error of the prediction relative to the truth."""
    correlation = torch.corrcoef(torch.stack([ranks(predicted), ranks(truth)]))[0, 1]
    slope = (predicted @ truth) / (predicted @ predicted).clamp(min=1e-30)
    error = (predicted - truth).norm() / truth.norm().clamp(min=1e-30)
    return dict(correlation=float(correlation), slope=float(slope), error=float(error))


def measure(row, folder):
    """All numbers of a run."""
    cfg = settings_of(*row)
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, folder)
    first = taken[0].batch.rollout
    some = first[torch.arange(0, len(first.ended), cfg.num_generations)[:4]]
    reward = HeldOut("reward", setup, cfg, setup.reward_funcs, [1.0], setup.eval_prompts, 8)
    targets = {"sentences": Sentences(setup, cfg, some), "reward": reward}
    courses = {name: follow(target, states, folder) for name, target in targets.items()}
    effects = {name: account(setup, cfg, states, taken, course, folder).effects
               for name, course in courses.items()}
    effects["reward"] = effects["reward"].sum(0, keepdim=True)
    found = dict(number=row[0], rate=row[1], iterations=row[2], prompts=row[3], job=row[4])
    for name, course in courses.items():
        found[name] = dict(before=course.values[0].tolist(), after=course.values[-1].tolist())
    found["smoothness"] = smoothness(setup, cfg, states, taken, seed_for("smoothness"))

    generator = torch.Generator().manual_seed(seed_for("trust", row[0]))
    for size, share in SIZES.items():
        truth = {name: [] for name in targets}
        predicted = {name: [] for name in targets}
        for _ in range(SUBSETS):
            out = (torch.rand(effects["reward"].shape[1:], generator=generator) < share).double()
            weights = train_again(setup, cfg, states, taken, 1 - out)
            for name, target in targets.items():
                end = target.at(weights, with_slope=False).parts.sum(1)             # (K,)
                change = (end - courses[name].values[-1]).double()
                if name == "reward":
                    change = change.sum(0, keepdim=True)
                truth[name].append(change)
                predicted[name].append(-(effects[name] * out).sum((1, 2)))
        for name in targets:
            columns = zip(torch.stack(predicted[name]).T, torch.stack(truth[name]).T)
            found[name][size] = [compared(p, t) for p, t in columns]
    return found


def mean(rows, key):
    return sum(row[key] for row in rows) / len(rows)


def auc(scores, bad):
    """The chance that a bad one has the higher score than a good one."""
    pairs = [(a > b) + 0.5 * (a == b) for a, is_bad in zip(scores, bad) if is_bad
             for b, other in zip(scores, bad) if not other]
    return sum(pairs) / len(pairs) if pairs else float("nan")


def bound_of(rows):
    """The smoothness that tells bad runs from good ones best, among these."""
    edges = sorted({0.0, 1.0, *(row["smoothness"] for row in rows)})
    middles = [(a + b) / 2 for a, b in zip(edges, edges[1:])]
    right = [sum((row["smoothness"] < x) == is_bad(row) for row in rows) for x in middles]
    best = [x for x, n in zip(middles, right) if n == max(right)]
    return best[len(best) // 2]


def is_bad(row):
    return mean(row["sentences"]["tenth"], "correlation") < BAD


def table(rows):
    print("number rate iterations prompts job smoothness | a tenth: sentences' correlation, slope, "
          "reward's | a hundredth: the same")
    for row in rows:
        cells = [f"{row[name]}" for name in ("number", "rate", "iterations", "prompts", "job")]
        cells.append(f"{row['smoothness']:.3f}")
        for size in SIZES:
            for name in ("sentences", "reward"):
                cells += [f"{mean(row[name][size], key):.2f}" for key in ("correlation", "slope")]
        print(" | ".join(cells))
    odd = [row for row in rows if row["number"] % 2]
    even = [row for row in rows if not row["number"] % 2]
    if odd and even:
        bound = bound_of(odd)
        right = sum((row["smoothness"] < bound) == is_bad(row) for row in even)
        score = auc([1 - row["smoothness"] for row in even], list(map(is_bad, even)))
        print(f"bound {bound:.3f} (odd runs); even runs: {right} of {len(even)} right, AUC "
              f"{score:.2f}, {sum(map(is_bad, even))} are bad")
        for name in ("sentences", "reward"):
            slopes = [mean(row[name]["hundredth"], "slope") for row in even
                      if row["smoothness"] >= bound]
            good = sum(0.5 <= x <= 2 for x in slopes)
            print(f"{name}: slope between 0.5 and 2 in {good} of {len(slopes)} that pass")


def main(argv):
    own, _ = own_flags(argv, dict(table=False))
    os.makedirs(OUT, exist_ok=True)
    rows = []
    for row in runs():
        path = f"{OUT}/{row[0]:02}.json"
        if not os.path.exists(path) and not own["table"]:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(row, folder)
            with open(path, "w", encoding="utf-8") as f:
                json.dump(found, f)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                rows.append(json.load(f))
    table(rows)


if __name__ == "__main__":
    run_script(main)
