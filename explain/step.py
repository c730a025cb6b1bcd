"""One GRPO step from fixed seeds, taken apart: every phase with its numbers, and red flags.

    python grpo.py config/toxicity.py --debug_step=True
"""
import itertools
import math

import torch
from torch.nn.utils import clip_grad_norm_

from evaluate import evaluate
from run.metrics import Meter, batch_metrics, loss_metrics, row_advantages
from run.report import silent_log, troubles
from run.script import seed_for

FORMULA = "(reward - mean) / std, 0 where all are equal"


def debug_step(nets, cfg, grpo):
    """The first step of a run, phase by phase. grpo: the module, for its functions."""
    count = itertools.count(1)

    def phase(title):
        print(f"\n--- {next(count)}. {title}")

    names = ("seed", "temperature", "top_p", "beta", "learning_rate", "max_grad_norm")
    print("setup: " + ", ".join(f"{name} {getattr(cfg, name):g}" for name in names))
    phase(f"evaluation before: {len(nets.eval_prompts)} prompts x {cfg.num_eval_generations}")
    before, _ = evaluate(nets, nets.policy, cfg)
    print("  " + ", ".join(f"{k} {v:.4f}" for k, v in before.items()))

    phase(f"rollout: {cfg.num_prompts} prompts x {cfg.num_generations}; the log-prob behind each "
          "token of the best and of the worst completion")
    prompts = grpo.draw_prompts(nets.prompts, 0, cfg.num_prompts, cfg.seed)
    batch = grpo.collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", 0))
    print_completion("best", batch.rewards.nan_to_num(-math.inf).argmax(), nets, prompts, batch)
    print_completion("worst", batch.rewards.nan_to_num(math.inf).argmin(), nets, prompts, batch)

    phase(f"rewards, by group; advantage = {'by token, of a critic' if cfg.critic else FORMULA}")
    print_rewards(batch, cfg, grpo)

    phase("loss, of all rows at once (without mini-batches and further passes)")
    N = len(batch.lengths)
    step = grpo.Step(0, torch.arange(N, device=nets.device), N, int(batch.loss_mask.sum()))
    meter = backward(nets, cfg, batch, step, grpo)
    grad_norm = clip_grad_norm_(nets.trained, cfg.max_grad_norm or math.inf)
    meter.check_finite(grad_norm)
    m = meter.metrics() | batch_metrics(batch, cfg)
    print_loss(m, meter.logp_diff().exp())
    if nets.influence:
        phase(f"influence on {cfg.tracin}: what a small step on a row does for the target")
        print_influence(m, nets, prompts, batch)

    phase("gradient norms after clipping, and the step")
    print_step(nets, cfg, batch, step, grpo, m["grad_norm"])

    phase("evaluation after")
    after, _ = evaluate(nets, nets.policy, cfg)
    print("  " + ", ".join(f"{k} {v:.4f} (change: {v - before[k]:+.4f})" for k, v in after.items()))

    phase("red flags")
    for flag in list(troubles(m, cfg, nets.dtype).values()) or ["none"]:
        print("  " + flag)


def print_completion(what, row, nets, prompts, batch):
    """Tokens of a row, each with its log-prob."""
    i = int(row)
    rollout = batch.rollout[i]
    T = int(rollout.completion_mask.sum())
    ids = rollout.tokens[-len(rollout.completion_mask):][:T].tolist()
    words = [f"{nets.tokenizer.decode([token])!r} {logp:.2f}"
             for token, logp in zip(ids, rollout.logp.tolist())]
    prompt = prompts[i * len(prompts) // len(batch.lengths)].text
    print(f"  {what}: row {i}, reward {batch.rewards[i]:.4f}, advantage "
          f"{row_advantages(batch)[i]:+.4f}")
    print(f"    {prompt!r} -> " + " ".join(words))


def print_rewards(batch, cfg, grpo):
    """Mean of each reward function, then rewards and advantages of each group."""
    for name, weight, scores in zip(cfg.reward_funcs, cfg.reward_weights, batch.scores.T):
        print(f"  {name} mean {scores.nanmean():.4f}, weight {weight:g}")
    groups = batch.rewards.view(-1, cfg.num_generations)
    advantages = row_advantages(batch).view(-1, cfg.num_generations)
    for i, (r, A) in enumerate(zip(groups, advantages)):
        pairs = " ".join(f"{x:.4f} ({a:+.4f})" for x, a in zip(r.tolist(), A.tolist()))
        print(f"  group {i}: mean {r.nanmean():.4f}, std {float(grpo.nanstd(r)):.4f}; rewards "
              f"(advantages): {pairs}")


def backward(nets, cfg, batch, step, grpo):
    """Fills .grad as grpo.update does -> Meter of the step."""
    meter = Meter(nets, batch, cfg, silent_log, check=True)
    meter.begin_step()
    if nets.influence:
        target = None
        if cfg.tracin_val_prompts:
            target = grpo.collect_target(nets, 0, cfg, grpo.collect)
        seed = seed_for(seed_for(cfg.seed, "rows", 0), "select", 0)
        nets.influence.backward(batch, step, target, meter, seed, fresh=True, check=True)
    else:
        grpo.backward(nets, batch, step, cfg, meter)
    return meter


def print_loss(m, ratio):
    """The parts of the loss. ratio: policy / sampler of its tokens (M,)."""
    kl = m.get("kl_loss", 0.0)
    policy = m["policy_loss"] - kl      # which is logged with the KL
    others = m["loss"] - m["policy_loss"]
    print(f"  policy gradient {policy:.6f} + beta * KL {kl:.6f} + entropy and critic {others:.6f} "
          f"= loss {m['loss']:.6f}")
    print("  at ratio 1 the policy gradient's part is near 0; its gradient is not")
    print(f"  ratio: min {ratio.min():.6f}, mean {ratio.mean():.6f}, max {ratio.max():.6f} "
          "(1: these weights sampled)")


def print_influence(m, nets, prompts, batch):
    """How many rows help, and the one that helps most and the one that harms most."""
    print(f"  {100 * m['tracin/positive_ratio']:.0f} % of the rows are positive, "
          f"{100 * m['tracin/selected_ratio']:.0f} % are kept")
    print("  check: their sum is <G_train, G_target> to "
          f"{m['tracin/invariant_error']:.1e} of the sum of |influence|")
    for what, i in (("helps", batch.influence.argmax()), ("harms", batch.influence.argmin())):
        print_completion(f"{what} most ({batch.influence[i]:+.2e})", i, nets, prompts, batch)


def print_step(nets, cfg, batch, step, grpo, grad_norm):
    """Gradient norms, the optimizer's step, and what it changed."""
    for name, p in nets.policy.named_parameters():
        if p.grad is not None:
            print(f"  {name:28} {p.grad.norm():.3e}")
    nets.optimizer.step()
    with torch.no_grad():
        rows = step.rows[:cfg.micro_batch_size]
        loss = grpo.loss_of(nets, nets.policy, batch, rows, step, cfg)
    after = loss_metrics(loss, cfg)
    now = ", ".join(f"{k} is now {after[k]:.6f}" for k in ("ratio", "kl") if k in after)
    most = cfg.max_grad_norm or math.inf
    print(f"  all {grad_norm:.3e}, clipped to {min(grad_norm, most):.3e}; after a step at learning "
          f"rate {cfg.learning_rate:g}: {now}")
