"""
Is the split of an account unique? One run, three rules.

    python -m extras.study.rules --seed=401         # any setting of grpo.py

    A   the account's: a rollout has a share of its step, and of later ones by momentum; the
        denominator of a step, sqrt(v), counts as it was
    B   the denominator is shared, too: a step is walked from the gradient 0 to its own along a
        straight line, and each rollout has its part of the way (Aumann and Shapley). What the step
        would have been without a gradient is momentum, of earlier rollouts
    C   no momentum: a rollout counts in its own step alone, as in TracIn with AdamW's scale

A and B add up to the same, the sum along the steps. What is explained is the held-out share of the
letter e in the world of planted.py, with nothing planted.
"""
import os

import torch

import grpo
from common.script import run_script
from extras.explain.account import gradient_in, multiplied, replay, walk_back
from extras.study.planted import OUT, SETTINGS, by_unit, of_letter, prompts_of, targets_of
from run.settings import load_settings


def three_rules(setup, cfg, states, taken, slopes):
    """Shares (3, I, N) of the rollouts by A, B and C."""
    found = []
    means = [(a + b) / 2 for a, b in zip(slopes, slopes[1:])]
    later = 0.0         # of B: what later steps have of m
    for k, before, after, slope, G in walk_back(setup, states, taken, means):
        g = k.clip * gradient_in(k, before, after)
        s = (after[2] / k.c2).sqrt() + k.eps
        without = (k.b2 * before[2] / k.c2).sqrt() + k.eps      # had the gradient been 0
        size = -k.lr / k.c1 * slope

        # in each weight the part of the way is (step - step at gradient 0) / gradient, times g_i
        way = after[1] / s - k.b1 * before[1] / without
        own = torch.where(g == 0, 0.0, way / torch.where(g == 0, 1.0, g))
        B = k.clip * (size * own + (1 - k.b1) * later)
        later = k.b1 * (later + size / without)
        C = (1 - k.b1) * k.clip * size / s
        found.append(multiplied(setup, cfg, k, before[0], torch.cat([G, B, C])))
    return torch.stack(found[::-1], 1).double()


def spearman(x, y):
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def main(argv):
    cfg = load_settings([*SETTINGS, *argv])
    os.makedirs(OUT, exist_ok=True)
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    setup.prompts, setup.eval_prompts = prompts_of("reward", setup.tokenizer, cfg.seed)
    setup.reward_funcs = {"reward": lambda prompts, completions: map(of_letter("e"), completions)}
    states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, OUT)
    target, _ = targets_of("reward", setup, cfg)
    slopes = [target.at(x[0]).slope.sum(0, keepdim=True) for x in states]
    shares = three_rules(setup, cfg, states, taken, slopes)

    units = torch.arange(shares[0].numel()).view_as(shares[0])
    advantages = torch.stack([k.batch.row_advantages for k in taken])
    count = units.numel() // 100
    tops = [set(x.flatten().argsort(descending=True)[:count].tolist()) for x in shares]
    groups = [by_unit(x, units // cfg.num_generations) for x in shares]
    for name, x, group, top in zip("ABC", shares, groups, tops):
        print(f"{name}: sum {x.sum():+.3f}, made less likely {x[advantages < 0].sum():+.3f}, "
              f"likelier {x[advantages > 0].sum():+.3f}; rank correlation with A: rollouts "
              f"{spearman(x.flatten(), shares[0].flatten()):.2f}, groups "
              f"{spearman(group, groups[0]):.2f}; {len(top & tops[0])} of the top {count} are A's")


if __name__ == "__main__":
    run_script(main)
