"""One GRPO step from fixed seeds, taken apart: every phase with its numbers, and red flags.

    python grpo.py config/toxicity.py --debug_step=True
"""
import itertools
import math

import torch
from torch.nn.utils import clip_grad_norm_

from run.metrics import Meter, batch_metrics, loss_metrics, row_advantages
from run.report import quiet, troubles
from run.script import seed_for


def take_apart(nets, cfg, grpo):
    """The first step of a run, phase by phase. grpo: the module, for its functions."""
    count = itertools.count(1)

    def phase(title):
        print(f"\n--- {next(count)}. {title}")

    print_setup(nets, cfg)
    phase(f"evaluation before: {len(nets.eval_prompts)} prompts x {cfg.num_eval_generations}")
    before = print_measures(nets, cfg, grpo)

    phase(f"rollout: {cfg.num_prompts} prompts x {cfg.num_generations}; the log-prob behind each "
          "token of the best and of the worst completion")
    prompts = grpo.draw_prompts(nets.prompts, 0, cfg.num_prompts, cfg.seed)
    batch = grpo.collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", 0))
    print_completion("best", batch.rewards.nan_to_num(-math.inf).argmax(), nets, prompts, batch)
    print_completion("worst", batch.rewards.nan_to_num(math.inf).argmin(), nets, prompts, batch)

    formula = "(reward - mean) / divisor, 0 where all are equal"
    phase("rewards, by group; advantage = " + ("by token, of a critic" if cfg.critic else formula))
    print_rewards(batch, cfg, grpo)

    phase("loss, of all rows at once (mini_batch_size, num_iterations and zero_std_groups are left "
          "aside here)")
    N = len(batch.lengths)
    step = grpo.Step(0, torch.arange(N, device=nets.device), N, int(batch.loss_mask.sum()))
    meter = backward(nets, cfg, batch, step, grpo)
    grad_norm = clip_grad_norm_(nets.trained, cfg.max_grad_norm or math.inf)
    meter.check_finite(grad_norm)
    m = meter.metrics() | batch_metrics(batch, cfg)
    print_loss(m, meter.logp_diff().exp())
    if nets.influence:
        phase(f"influence on {cfg.tracin}: what a small step on a row does for the target")
        print_influence(m, cfg, prompts, batch)

    phase("gradient norms after clipping, and the step")
    print_step(nets, cfg, batch, step, grpo, m["grad_norm"])

    phase("evaluation after")
    after = print_measures(nets, cfg, grpo)
    print("  change: " + ", ".join(f"{k} {after[k] - before[k]:+.4f}" for k in after))

    phase("red flags")
    for flag in list(troubles(m, cfg, nets.dtype).values()) or ["none"]:
        print("  " + flag)


def print_setup(nets, cfg):
    """What the step is made with."""
    size = sum(p.numel() for p in nets.trained)
    print(f"setup: {size / 1e6:.1f}M weights are trained, {cfg.block_size} positions, {nets.dtype} "
          f"on {nets.device}")
    names = ("seed", "num_prompts", "num_generations", "max_completion_length", "temperature",
             "top_p", "beta", "learning_rate", "max_grad_norm")
    print("  " + ", ".join(f"{name} {getattr(cfg, name):g}" for name in names))


def print_measures(nets, cfg, grpo):
    measures, _ = grpo.evaluate(nets, nets.policy, cfg)
    print("  " + ", ".join(f"{k} {v:.4f}" for k, v in measures.items()))
    return measures


def print_completion(what, row, nets, prompts, batch):
    """Tokens of a row, each with its log-prob."""
    i = int(row)
    rollout = batch.rollout[[i]]
    T = rollout.completion_mask.shape[1]
    n = int(rollout.completion_mask.sum())
    words = []
    for t in range(n):
        token = int(rollout.tokens[0, t - T])
        logp = f"{rollout.logp[0, t]:.2f}" if rollout.sampled_mask[0, t] else "forced"
        words.append(f"{nets.tokenizer.decode([token])!r} {logp}")
    prompt = prompts[i * len(prompts) // len(batch.lengths)].text
    print(f"  {what} reward: row {i}, reward {batch.rewards[i]:.4f}, advantage "
          f"{row_advantages(batch)[i]:+.4f}")
    print(f"    {prompt!r} -> " + " ".join(words))


def digits(x):
    return " ".join(f"{value:.4f}" for value in x.tolist())


def print_rewards(batch, cfg, grpo):
    """Rewards and advantages of each group, and what the differences are divided by."""
    for name, weight, scores in zip(cfg.reward_funcs, cfg.reward_weights, batch.scores.T):
        print(f"  {name} mean {scores.nanmean():.4f}, weight {weight:g}, abstains for "
              f"{100 * scores.isnan().float().mean():.0f} %")
    rewards = batch.rewards
    if cfg.kl_in_reward:
        rewards = rewards - cfg.beta * batch.kl.sum(1).cpu()
        print("  rewards are less beta * KL here")
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        print("  normalize_then_sum: advantages are made of each function's scores, not of these")
    G = cfg.num_generations
    groups = zip(rewards.view(-1, G), row_advantages(batch).view(-1, G))
    for i, (r, advantages) in enumerate(groups):
        divisor = 1.0
        if cfg.scale_rewards != "none" and not cfg.critic:
            among = r if cfg.scale_rewards == "group" else rewards
            divisor = float(grpo.nanstd(among)) + 1e-4
        print(f"  group {i}: mean {r.nanmean():.4f}, divisor {divisor:.4f}, rewards {digits(r)}, "
              f"advantages {digits(advantages)}")


def backward(nets, cfg, batch, step, grpo):
    """Fills .grad as grpo.update does -> Meter of the step."""
    meter = Meter(nets, batch, cfg, quiet, first=True)
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
    policy = m["policy_loss"] - kl
    more = ""
    for name in ("entropy", "critic"):
        if f"{name}_loss" in m:
            more += f" + {name} {m[f'{name}_loss']:.6f}"
    share = 100 * abs(kl) / (abs(kl) + abs(policy) + 1e-12)
    print(f"  policy gradient {policy:.6f} + beta * KL {kl:.6f}{more} = loss {m['loss']:.6f}; the "
          f"KL is {share:.1f} % of the first two (at ratio 1 the policy part is near 0; its "
          "gradient is not)")
    print(f"  ratio: min {ratio.min():.6f}, mean {ratio.mean():.6f}, max {ratio.max():.6f} "
          "(1: these weights sampled)")


def print_influence(m, cfg, prompts, batch):
    """The rows that help most and those that harm most."""
    print(f"  {100 * m['tracin/positive_ratio']:.0f} % of the rows are positive, "
          f"{100 * m['tracin/selected_ratio']:.0f} % are kept (tracin_select = "
          f"{cfg.tracin_select!r})")
    print("  check: their sum is <G_train, G_target> to "
          f"{m['tracin/invariant_error']:.1e} of the sum of |influence|")
    scores = batch.influence
    advantages = row_advantages(batch)
    order = scores.argsort(descending=True).tolist()
    helpful = [i for i in order if scores[i] > 0][:3]
    harmful = [i for i in reversed(order) if scores[i] < 0][:3]
    for title, rows in (("helpful", helpful), ("harmful", harmful)):
        print(f"  most {title}" + ("" if rows else ": none"))
        for i in rows:
            fate = "kept" if batch.weights[i] != 0 else "left out"
            print(f"    row {i}, influence {scores[i]:+.2e}, {fate}, reward "
                  f"{batch.rewards[i]:.4f}, advantage {advantages[i]:+.4f}: "
                  f"{prompts[i // cfg.num_generations].text!r} -> {batch.completions[i]!r}")


def print_step(nets, cfg, batch, step, grpo, grad_norm):
    """Gradient norms, the optimizer's step, and what it changed."""
    for name, p in nets.policy.named_parameters():
        if p.grad is not None:
            print(f"  {name:28} {p.grad.norm():.3e}")
    old = [p.detach().clone() for p in nets.trained]
    nets.optimizer.step()
    with torch.no_grad():
        rows = step.rows[:cfg.micro_batch_size]
        loss = grpo.loss_of(nets, nets.policy, batch, rows, step, cfg)
    after = loss_metrics(loss, cfg)
    moved = sum(not torch.equal(p, q) for p, q in zip(nets.trained, old))
    most = cfg.max_grad_norm or math.inf
    print(f"  all {grad_norm:.3e}, clipped to {min(grad_norm, most):.3e}; at learning rate "
          f"{cfg.learning_rate:g} {moved} of {len(old)} tensors changed; mean ratio is now "
          f"{after['ratio']:.6f}" + (f", KL is now {after['kl']:.6f}" if "kl" in after else ""))
