"""One GRPO step from fixed seeds, taken apart: every phase with its numbers, and red flags."""
import itertools
import math

import torch
from torch.nn.utils import clip_grad_norm_

from run.metrics import (
    batch_metrics, check_scores, influence_metrics, loss_metrics, mean_influence, numbers,
    row_advantages)
from run.report import diagnose, diagnose_influence
from run.script import seed_for

NUM_NORMS = 64      # rows whose gradients are formed one by one


def take_apart(nets, cfg, grpo):
    """The first step of a run, phase by phase. grpo: the module grpo.py, for its functions."""
    count = itertools.count(1)

    def phase(title):
        print(f"\n--- {next(count)}. {title}")

    print_setup(nets, cfg)
    phase(f"evaluation before: {len(nets.eval_prompts)} prompts x {cfg.num_eval_generations}")
    before = print_measures(nets, cfg, grpo.evaluate)

    prompts = grpo.draw_prompts(nets.prompts, 0, cfg.num_prompts, cfg.seed)
    batch = grpo.collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", 0))
    N = len(batch.loss_mask)
    step = grpo.Step(0, torch.arange(N, device=nets.device), N, int(batch.loss_mask.sum()))
    phase(f"rollout: {len(prompts)} prompts x {cfg.num_generations}; striking completions, the "
          "log-prob behind each token")
    print_striking(nets, cfg, prompts, batch, row_norms(nets, cfg, batch, step, grpo.loss_of))

    how = "(reward - mean) / divisor, 0 where all are equal"
    phase("rewards, by group; advantage = " + ("by token, of a critic" if cfg.critic else how))
    print_rewards(batch, cfg, grpo)

    phase("loss, of all rows at once (mini_batch_size, num_iterations and zero_std_groups are "
          "left aside here)")
    ratio = print_loss(nets, cfg, batch, step, grpo.loss_of)

    flags = {}
    if nets.influence:
        phase(f"influence on {cfg.tracin}: what a small step on a row does for the target")
        found = print_influence(nets, cfg, prompts, batch, step, grpo)
        flags = diagnose_influence(found, cfg, nets.dtype)

    phase("gradient norms before clipping, and the step")
    grad_norm, after = print_step(nets, cfg, batch, step, grpo.loss_of)

    phase("evaluation after")
    measures = print_measures(nets, cfg, grpo.evaluate)
    print("  change: " + ", ".join(f"{k} {measures[k] - before[k]:+.4f}" for k in measures))

    phase("red flags")
    m = batch_metrics(batch, cfg) | {
        "grad_norm": grad_norm, "kl": after.get("kl", batch.kl or 0.0),
        "sampling/sampling_logp_difference/mean": float(ratio.log().abs().mean())}
    flags |= diagnose(m, cfg)
    for flag in list(flags.values()) or ["none"]:
        print("  " + flag)


def print_setup(nets, cfg):
    """What the step is made with."""
    size = sum(p.numel() for p in nets.trained)
    print(f"setup: {size / 1e6:.1f}M weights are trained, {cfg.block_size} positions, {nets.dtype} "
          f"on {nets.device}")
    names = ("seed", "num_prompts", "num_generations", "max_completion_length", "temperature",
             "top_p", "beta", "learning_rate", "max_grad_norm")
    print("  " + ", ".join(f"{name} {getattr(cfg, name):g}" for name in names))


def digits(x):
    return " ".join(f"{value:.4f}" for value in x.tolist())


def print_measures(nets, cfg, evaluate):
    measures, _ = evaluate(nets, nets.policy, cfg)
    print("  " + ", ".join(f"{k} {v:.4f}" for k, v in measures.items()))
    return measures


def row_norms(nets, cfg, batch, step, loss_of):
    """Norms (m,) of the gradients of the first rows, at most NUM_NORMS, a backward for each."""
    norms = []
    for row in step.rows[:NUM_NORMS].split(1):
        out = loss_of(nets, nets.policy, batch, row, step, cfg)
        out.total.backward()
        norms.append(clip_grad_norm_(nets.trained, math.inf))
        nets.policy.zero_grad(set_to_none=True)
    return torch.stack(norms)


def print_striking(nets, cfg, prompts, batch, norms):
    """The rows of the best and the worst reward and of the largest of norms (m,)."""
    among = "" if len(norms) == len(batch.loss_mask) else f" of the first {len(norms)} rows"
    striking = (
        ("best reward", batch.rewards.nan_to_num(-math.inf).argmax()),
        ("worst reward", batch.rewards.nan_to_num(math.inf).argmin()),
        (f"largest gradient{among}, norm {norms.max():.3e}", norms.argmax()))
    advantages = row_advantages(batch)
    for why, row in striking:
        i = int(row)
        print(f"  {why}: row {i}, reward {batch.rewards[i]:.4f}, advantage {advantages[i]:+.4f}")
        print_completion(nets.tokenizer, prompts[i // cfg.num_generations].text, batch.rollout, i)


def print_completion(tokenizer, prompt, rollout, i):
    """Tokens of row i, each with its log-prob."""
    T = rollout.completion_mask.shape[1]
    n = int(rollout.completion_mask[i].sum())
    ids = rollout.tokens[i, -T:][:n].tolist()
    logp = rollout.logp[i, :n].tolist()
    chosen = rollout.sampled_mask[i, :n].tolist()
    words = [f"{tokenizer.decode([token])!r} " + (f"{x:.2f}" if own else "forced")
             for token, x, own in zip(ids, logp, chosen)]
    print(f"    {prompt!r} -> " + " ".join(words))


def print_rewards(batch, cfg, grpo):
    """Rewards and advantages of each group, and what the differences are divided by."""
    for name, weight, scores in zip(cfg.reward_funcs, cfg.reward_weights, batch.scores.T):
        print(f"  {name} mean {scores.nanmean():.4f}, weight {weight:g}, abstains for "
              f"{100 * scores.isnan().float().mean():.0f} %")
    if cfg.critic:
        print_values(batch, cfg)
        return
    penalty = cfg.beta * batch.kl.sum(1).cpu() if cfg.kl_in_reward else 0.0
    rewards = batch.rewards - penalty
    if cfg.kl_in == "reward" and cfg.beta:
        print("  rewards are less beta * KL here")
    if cfg.multi_objective_aggregation == "normalize_then_sum":
        print("  normalize_then_sum: advantages are made of each function's scores, not of these")
    if cfg.scale_rewards == "batch":
        print(f"  scale_rewards = batch: std of the batch {float(grpo.nanstd(rewards)):.4f}")
    groups = zip(rewards.view(-1, cfg.num_generations),
                 batch.advantages.view(-1, cfg.num_generations))
    for i, (r, advantages) in enumerate(groups):
        divisor = 1.0
        if cfg.scale_rewards != "none":
            spread = grpo.nanstd(r if cfg.scale_rewards == "group" else rewards)
            divisor = float(spread) + 1e-4
        print(f"  group {i}: mean {r.nanmean():.4f}, divisor {divisor:.4f}, "
              f"rewards {digits(r)}, advantages {digits(advantages)}")


def print_values(batch, cfg):
    """Rewards of each group, and what the critic makes of its first row, token by token."""
    print(f"  a critic: gamma {cfg.gae_gamma:g}, lambda {cfg.gae_lambda:g}; advantages "
          + ("whitened" if cfg.whiten_advantages else "as they are"))
    for i in range(0, len(batch.loss_mask), cfg.num_generations):
        here = batch.rollout.sampled_mask[i]
        print(f"  group {i // cfg.num_generations}: rewards "
              f"{digits(batch.rewards[i:i + cfg.num_generations])}")
        for name, x in (("values", batch.rollout.values), ("returns", batch.returns),
                        ("advantages", batch.advantages)):
            print(f"    row {i}, {name} {digits(x[i][here])}")


def print_loss(nets, cfg, batch, step, loss_of):
    """Forward and backward of all rows; -> policy / sampler of their tokens (M,)."""
    policy_loss = kl_loss = critic_loss = 0.0
    ratios = []
    for rows in torch.arange(step.num_rows, device=nets.device).split(cfg.micro_batch_size):
        out = loss_of(nets, nets.policy, batch, rows, step, cfg)
        out.total.backward()
        m, = numbers([loss_metrics(out, cfg)])
        policy_loss += float((out.policy + out.entropy).detach())
        critic_loss += m.get("critic_loss", 0.0)
        kl_loss += float(out.kl.detach())
        chosen = batch.rollout.sampled_mask[rows]
        ratios.append((out.logp.detach() - batch.rollout.logp[rows])[chosen].exp())
    ratio = torch.cat(ratios)
    share = 100 * abs(kl_loss) / (abs(kl_loss) + abs(policy_loss) + 1e-12)
    critic = f" + critic {critic_loss:.6f}" if cfg.critic else ""
    print(f"  policy gradient {policy_loss:.6f} + beta * KL {kl_loss:.6f}{critic} = loss "
          f"{policy_loss + kl_loss + critic_loss:.6f}; the KL is {share:.1f} % of the first two "
          "(at ratio 1 the policy part is near 0; its gradient is not)")
    print(f"  ratio: min {ratio.min():.6f}, mean {ratio.mean():.6f}, max {ratio.max():.6f} "
          "(1: these weights sampled)")
    return ratio


def print_influence(nets, cfg, prompts, batch, step, grpo):
    """Scores all rows and leaves the gradient of those kept in .grad -> metrics."""
    nets.policy.zero_grad(set_to_none=True)
    influence = nets.influence
    target = None
    if cfg.tracin_val_prompts:
        target = grpo.collect_target(nets, 0, cfg, grpo.collect)
    with influence.record(batch, step, fresh=True):
        for rows in grpo.micro_batches(batch.lengths, step.rows, cfg):
            influence.forward_backward(rows)
    seed = seed_for(cfg.seed, "rows", 0)
    found = influence.keep_helpful(target, seed_for(seed, "select", 0), check=True)
    check_scores(found, nets, cfg)
    m = mean_influence([influence_metrics(found, nets)])
    print(f"  {100 * m['tracin/positive_ratio']:.0f} % of the rows are positive, "
          f"{100 * m['tracin/selected_ratio']:.0f} % are kept (tracin_select = "
          f"{cfg.tracin_select!r})")
    print("  check: their sum is <G_train, G_target>, with G_train by a plain backward, to "
          f"{float(found.true_error):.1e} of the sum of |influence|")
    scores = batch.influence.tolist()
    advantages = row_advantages(batch)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    helpful = [i for i in order if scores[i] > 0][:3]
    harmful = [i for i in reversed(order) if scores[i] < 0][:3]
    for title, rows in (("helpful", helpful), ("harmful", harmful)):
        print(f"  most {title}" + ("" if rows else ": none"))
        for i in rows:
            fate = "kept" if batch.weights[i] != 0 else "left out"
            print(f"    row {i}, influence {scores[i]:+.2e}, {fate}, reward "
                  f"{batch.rewards[i]:.4f}, advantage {advantages[i]:+.4f}: "
                  f"{prompts[i // cfg.num_generations].text!r} -> {batch.completions[i]!r}")
    return m


def print_step(nets, cfg, batch, step, loss_of):
    """Gradient norms and an optimizer step -> (grad_norm, metrics of some rows afterwards)."""
    for name, p in nets.policy.named_parameters():
        if p.grad is not None:
            print(f"  {name:28} {p.grad.norm():.3e}")
    most = cfg.max_grad_norm or math.inf
    grad_norm = float(clip_grad_norm_(nets.trained, most))
    old = [p.detach().clone() for p in nets.policy.parameters()]
    nets.optimizer.step()
    with torch.no_grad():
        rows = slice(0, cfg.micro_batch_size)
        out = loss_of(nets, nets.policy, batch, rows, step, cfg)
        after, = numbers([loss_metrics(out, cfg)])
    moved = sum(not torch.equal(p, q) for p, q in zip(nets.policy.parameters(), old))
    print(f"  all {grad_norm:.3e}, clipped to {min(grad_norm, most):.3e}; at learning rate "
          f"{cfg.learning_rate:g} {moved} of {len(old)} tensors changed; mean ratio is now "
          f"{after['ratio']:.6f}" + (f", KL is now {after['kl']:.6f}" if "kl" in after else ""))
    return grad_norm, after
