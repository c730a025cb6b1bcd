"""
A step of AdamW on half of its rollouts: is the target's loss after it predicted better with a
damped scale?

    python -m extras.study.half_step config/toxicity.py --num_prompts=8 --seed=1

50 random halves of the fifth iteration. The target is the reward on held-out prompts, as with
tracin = "reward". Influence is that of tracin_adam = True, whose scale is 1 / (sqrt(v) + eps); with
a damping d it is 1 / (sqrt(v) + d rms(sqrt(v)) + eps). Printed is Spearman's correlation of
predicted and true loss over the halves.
"""
import copy
from dataclasses import replace

import torch

import grpo
from common.script import run_script, seed_for
from config import load_settings
from data.prompts import draw_prompts
from explain.account import flat, replay
from extras.study.leave_out import DAMPINGS, gradients_of_rows, spearman
from rollout import completion_logprobs
from tracin import adam_scale, target_coefficients

BEFORE = 4      # iterations
HALVES = 50


def study(setup, cfg):
    """{arm: rho}"""
    replay(setup, cfg, 0, BEFORE, BEFORE, cfg.out_dir)
    prompts = draw_prompts(setup.eval_prompts, 0, cfg.num_prompts, cfg.seed)
    held_out = grpo.collect(setup, prompts, cfg, seed_for(cfg.seed, "held-out"))
    coef = target_coefficients(held_out, torch.arange(len(held_out.rewards)), "reward")

    def target_loss():
        return coef @ completion_logprobs(setup.policy, held_out.rollout, cfg.temperature).sum(1)

    batch, _ = grpo.sample_iteration(setup, BEFORE, cfg)
    step = next(grpo.optimizer_steps(batch, cfg, 0))
    P = gradients_of_rows(setup, cfg, batch, step)                                  # (N, W)
    whole = grpo.gradient_of(setup, cfg, batch, step.rows, step)
    bottom = 1 / flat(adam_scale(setup.optimizer, whole).values())                  # (W,)
    G = flat(torch.autograd.grad(target_loss(), setup.trained))
    scores = {"no scale": P @ G}
    for d in DAMPINGS:
        scores[f"AdamW's scale {d}"] = P @ (G / (bottom + d * bottom.square().mean().sqrt()))

    before = copy.deepcopy((setup.policy.state_dict(), setup.optimizer.state_dict()))
    generator = torch.Generator().manual_seed(cfg.seed)
    kept = (torch.rand(HALVES, len(P), generator=generator) < 0.5).float()
    truth = []
    for weights in kept:
        setup.policy.load_state_dict(before[0])
        setup.optimizer.load_state_dict(copy.deepcopy(before[1]))
        grpo.update(setup, replace(batch, row_weights=weights), None, cfg, 0)
        with torch.no_grad():
            truth.append(target_loss())
    truth = torch.stack(truth)
    return {arm: float(spearman(-kept @ x, truth)) for arm, x in scores.items()}


def main(argv):
    cfg = load_settings(argv)
    for arm, rho in study(grpo.prepare(cfg, grpo.read_inputs(cfg)), cfg).items():
        print(f"{arm:20} {rho:.2f}")


if __name__ == "__main__":
    run_script(main)
