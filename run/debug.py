"""One GRPO step from fixed seeds, taken apart: every phase with its numbers, and red flags."""
import math
from types import SimpleNamespace

import torch

from model import completion_logprobs
from run.metrics import batch_metrics, loss_metrics, numbers
from run.report import diagnose
from run.script import seed_for
from tracin import std


def take_apart(nets, cfg, draw_prompts, collect, loss_of, evaluate):
    """The first step of a run, phase by phase. The four functions are those of grpo.py."""
    G = cfg.num_generations
    phase(f"1. evaluation before: {len(nets.eval_prompts)} prompts x {cfg.num_eval_generations}")
    before = print_measures(nets, cfg, evaluate)

    prompts = draw_prompts(nets.prompts, 0, cfg.num_prompts, cfg.seed)
    batch = collect(nets, prompts, cfg, seed_for(cfg.seed, "rollout", 0))
    phase(f"2. rollout: {len(prompts)} prompts x {G}; some completions, the log-prob behind each "
          "token")
    for i in (0, 1, G, G + 1) if len(prompts) > 1 else (0, 1):
        print_completion(nets.tokenizer, prompts[i // G][0], batch.rollout, i)

    phase(f"3. rewards, by group; advantage = reward - mean, scale_rewards = {cfg.scale_rewards}")
    groups = zip(batch.rewards.view(-1, G), batch.advantages.view(-1, G))
    for i, (rewards, advantages) in enumerate(groups):
        print(f"  group {i}: mean {rewards.nanmean():.4f}, std {std(rewards):.4f}, "
              f"rewards {digits(rewards)}, advantages {digits(advantages)}")

    phase("4. loss, of all rows at once (mini_batch_size, num_iterations and zero_std_groups are "
          "left aside here)")
    step = SimpleNamespace(epoch=0, num_rows=len(batch.mask), num_tokens=int(batch.mask.sum()))
    ratio = print_loss(nets, cfg, batch, step, loss_of)

    phase("5. gradient norms before clipping, and the step")
    grad_norm, after = print_step(nets, cfg, batch, step, loss_of)

    phase("6. evaluation after")
    measures = print_measures(nets, cfg, evaluate)
    print("  change: " + ", ".join(f"{k} {measures[k] - before[k]:+.4f}" for k in measures))

    phase("7. red flags")
    m = batch_metrics(batch, cfg) | {
        "grad_norm": grad_norm, "kl": after.get("kl", batch.kl or 0.0),
        "sampling/sampling_logp_difference/mean": float(ratio.log().abs().mean())}
    for flag in list(diagnose(m, cfg).values()) or ["none"]:
        print("  " + flag)


def phase(title):
    print(f"\n--- {title}")


def digits(x):
    return " ".join(f"{value:.3f}" for value in x.tolist())


def print_measures(nets, cfg, evaluate):
    measures, _ = evaluate(nets, nets.policy, cfg)
    print("  " + ", ".join(f"{k} {v:.4f}" for k, v in measures.items()))
    return measures


def print_completion(tokenizer, prompt, rollout, i):
    """Tokens of row i, each with its log-prob."""
    T = rollout.mask.shape[1]
    n = int(rollout.mask[i].sum())
    ids = rollout.tokens[i, -T:][:n].tolist()
    logp = rollout.logp[i, :n].tolist()
    words = [f"{tokenizer.decode([token])!r} {x:.2f}" for token, x in zip(ids, logp)]
    print(f"  {prompt!r} -> " + " ".join(words))


def print_loss(nets, cfg, batch, step, loss_of):
    """Forward and backward of all rows; -> policy / sampler of their tokens (M,)."""
    policy_loss = kl_loss = 0.0
    ratios = []
    for rows in torch.arange(step.num_rows, device=nets.device).split(cfg.micro_batch_size):
        out = loss_of(nets, nets.policy, batch, rows, step, cfg, logprobs=completion_logprobs)
        out.loss.backward()
        m, = numbers([loss_metrics(out, cfg)])
        policy_loss += m["policy_loss"]
        kl_loss += m["loss"] - m["policy_loss"]
        chosen = batch.rollout.chosen[rows]
        ratios.append((out.logp.detach() - batch.rollout.logp[rows])[chosen].exp())
    ratio = torch.cat(ratios)
    share = 100 * abs(kl_loss) / (abs(kl_loss) + abs(policy_loss) + 1e-12)
    print(f"  policy gradient {policy_loss:.6f} + beta * KL {kl_loss:.6f} = loss "
          f"{policy_loss + kl_loss:.6f}; the KL is {share:.1f} % of the two (at ratio 1 the policy "
          "part is near 0; its gradient is not)")
    print(f"  ratio: min {ratio.min():.6f}, mean {ratio.mean():.6f}, max {ratio.max():.6f} "
          "(1: these weights sampled)")
    return ratio


def print_step(nets, cfg, batch, step, loss_of):
    """Gradient norms and an optimizer step -> (grad_norm, metrics of some rows afterwards)."""
    for name, p in nets.policy.named_parameters():
        if p.requires_grad:
            print(f"  {name:28} {p.grad.norm():.3e}")
    most = cfg.max_grad_norm or math.inf
    grad_norm = float(torch.nn.utils.clip_grad_norm_(nets.trained, most))
    old = [p.detach().clone() for p in nets.policy.parameters()]
    nets.optimizer.step()
    with torch.no_grad():
        rows = slice(0, cfg.micro_batch_size)
        out = loss_of(nets, nets.policy, batch, rows, step, cfg, logprobs=completion_logprobs)
        after, = numbers([loss_metrics(out, cfg)])
    moved = sum(not torch.equal(p, q) for p, q in zip(nets.policy.parameters(), old))
    print(f"  all {grad_norm:.3e}, clipped to {min(grad_norm, most):.3e}; at learning rate "
          f"{cfg.learning_rate:g} {moved} of {len(old)} tensors changed; mean ratio is now "
          f"{after['ratio']:.6f}")
    return grad_norm, after
