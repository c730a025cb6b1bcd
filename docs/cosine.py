"""
How much of a held-out target is signal: the cosine of the gradients of two halves, whose prompts
are drawn apart, against the number of rollouts; and of two averages over iterations, each of a
stream of its own. Two rollouts' gradients that agree in nothing have cosine 0.

    python -m docs.cosine config/study_toxicity.py          # writes docs/cosine.svg

A plain run of the config trains the policy; the target is measured beside it and changes nothing.
"""
import json

import torch

import grpo
from config import load_settings
from data.prompts import draw_prompts
from plot import COLORS, look
from run.compare import mean_and_error
from run.report import quiet
from run.script import run_script, seed_for
from tracin import cosine, target_coefficients

LARGEST = 4096      # rollouts of a target, both halves together
SMALLEST = 64
DRAWS = 3           # of a target of the largest size
DECAYS = (0.0, 0.5, 0.8, 0.9, 0.97)
STREAM = 64         # rollouts of one iteration of a stream


def target_gradient(nets, cfg, rollouts, seed):
    """The gradient of the target `reward` over so many fresh rollouts of held-out prompts."""
    num_prompts = rollouts // cfg.num_generations
    prompts = draw_prompts(nets.val_prompts, 0, num_prompts, seed)
    batch = grpo.collect(nets, prompts, cfg, seed)
    rows = torch.arange(rollouts, device=nets.device)
    rewards = batch.rewards.to(nets.device)
    coef = target_coefficients("reward", rewards, batch.advantages)                 # (rollouts,)
    step = grpo.Step(0, rows, rollouts, int(batch.loss_mask.sum()))
    return grpo.gradient_of(nets, batch, rows, step, cfg, coef=coef)


def cosines_by_size(nets, cfg, when):
    """Rows {"rollouts", "draw", "cosine", "iteration"}. A half of a target is the mean of smaller
    ones, so that each rollout is sampled once; rewards are normalised within the smallest."""
    rows = []
    for draw in range(DRAWS):
        pieces = [target_gradient(nets, cfg, SMALLEST // 2, seed_for("size", when, draw, i))
                  for i in range(2 * LARGEST // SMALLEST)]
        n = SMALLEST // 2
        while len(pieces) > 1:
            found = [cosine(G, H) for G, H in zip(pieces[::2], pieces[1::2])]
            rows += [dict(iteration=when, draw=draw, rollouts=2 * n, cosine=x) for x in found]
            pieces = [average_of(G, H) for G, H in zip(pieces[::2], pieces[1::2])]
            n *= 2
    return rows


def average_of(G, H):
    return {p: (g + H[p]) / 2 for p, g in G.items()}


def cosines_of_averages(nets, cfg, it, averages):
    """Rows {"iteration", "decay", "cosine"} after one more iteration of both streams. averages:
    {decay: [G, H]}, moved on in place; the bias of their start at 0 changes no cosine."""
    fresh = [target_gradient(nets, cfg, STREAM, seed_for("stream", it, i)) for i in range(2)]
    rows = []
    for decay in DECAYS:
        pair = averages.setdefault(decay, [{}, {}])
        for i, G in enumerate(fresh):
            pair[i] = {p: decay * pair[i].get(p, 0) + (1 - decay) * g for p, g in G.items()}
        rows.append(dict(iteration=it, decay=decay, cosine=cosine(*pair)))
    return rows


def measure_cosines(nets, cfg):
    """Trains as grpo.train does, without evaluations, and measures on the way."""
    rows = cosines_by_size(nets, cfg, 0)
    averages = {}
    for it in range(cfg.max_iters):
        rows += cosines_of_averages(nets, cfg, it, averages)
        prompts = draw_prompts(nets.prompts, it, cfg.num_prompts, cfg.seed)
        batch = grpo.collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", it))
        grpo.update(nets, batch, None, cfg, seed_for(cfg.seed, "rows", it), quiet)
        print(f"iteration {it + 1}/{cfg.max_iters}", flush=True)
    return rows + cosines_by_size(nets, cfg, cfg.max_iters)


def draw_cosines(rows, path):
    """Two panels: by the number of rollouts, and by the decay of the average."""
    with look():
        from matplotlib import pyplot
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.6, 3.2), layout="constrained")
        draw_sizes(left, [row for row in rows if "rollouts" in row])
        for color, decay in zip(COLORS, DECAYS):
            here = [row for row in rows if row.get("decay") == decay]
            x = [row["iteration"] + 1 for row in here]
            y = [row["cosine"] for row in here]
            right.plot(x, y, color=color)
            right.annotate(f"{decay:g}", (x[-1], y[-1]), xytext=(4, 0), color=color,
                           textcoords="offset points", verticalalignment="center")
        right.set_xlabel("iteration")
        right.set_title(f"cosine of two averages of {STREAM} rollouts a step, by decay")
        left.legend()
        for axes in (left, right):
            axes.axhline(0, color="0.6", linewidth=0.6)
        figure.savefig(path)


def draw_sizes(axes, rows):
    """A line for each time of the run, with standard errors."""
    for color, when in zip(COLORS, sorted({row["iteration"] for row in rows})):
        by_size = {}
        for row in rows:
            if row["iteration"] == when:
                by_size.setdefault(row["rollouts"], []).append(row["cosine"])
        means, errors = zip(*map(mean_and_error, by_size.values()))
        axes.errorbar(list(by_size), means, errors, color=color, marker="o", capsize=2,
                      label=f"after {when} iterations")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(by_size), [f"{size:,}" for size in by_size])
    axes.set_xlabel("held-out rollouts, both halves together")
    axes.set_title("cosine of the target's two halves")


def main(argv):
    cfg = load_settings([*argv, "--tracin=off"])
    given = grpo.read_inputs(cfg)
    nets = grpo.prepare(cfg, given)
    rows = measure_cosines(nets, cfg)
    with open("out/cosine.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    draw_cosines(rows, "docs/cosine.svg")
    print("out/cosine.jsonl, docs/cosine.svg")


if __name__ == "__main__":
    run_script(main)
