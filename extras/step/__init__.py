"""The first iteration of a run, taken apart: every phase with its numbers, and red flags.

    python grpo.py config/toxicity.py --debug_step=True
"""
import itertools
import math

from run.metrics import batch_metrics, std
from run.flags import problems
from common.script import seed_for


def debug_step(setup, cfg, batch, held_out, update):
    """The first iteration of a run, phase by phase: its batch, and an update by grpo.update."""
    count = itertools.count(1)

    def phase(title):
        print(f"\n--- {next(count)}. {title}")

    phase(f"rollout: {cfg.num_prompts} prompts x {cfg.num_generations}; the log-prob behind each "
          "token of the best and of the worst completion")
    print_completion("best", batch.rewards.nan_to_num(-math.inf).argmax(), setup, batch)
    print_completion("worst", batch.rewards.nan_to_num(math.inf).argmin(), setup, batch)

    source = "by token, of a critic" if cfg.critic else "(reward - mean) / std"
    phase(f"rewards, by group; advantage = {source}")
    print_rewards(batch, cfg)

    phase("loss")
    norms = {}      # of each weight's gradient, in the last step

    def watch(*args):
        for name, p in setup.policy.named_parameters():
            if p.grad is not None:
                norms[name] = p.grad.norm()

    seed = seed_for(cfg.seed, "rows", 0)
    m = update(setup, batch, held_out, cfg, seed, check=True, watch=watch)
    print_loss(m)
    if "tracin/selected_ratio" in m:    # influence has scored a step
        phase(f"influence on {cfg.tracin}: what a small step on a row does for the target")
        print_influence(m, setup, batch)

    phase("gradient norms after clipping, before a step at the full learning_rate")
    for name, norm in norms.items():
        print(f"  {name:28} {norm:.3e}")
    print(f"  all {m['grad_norm']:.3e} before clipping to max_grad_norm = {cfg.max_grad_norm:g}")

    phase("red flags")
    m |= batch_metrics(batch, cfg) | {"iteration": 1}
    flags = [text for _, text in problems(m, cfg, setup.dtype)]
    for flag in flags or ["none"]:
        print("  " + flag)


def print_completion(what, row, setup, batch):
    """Tokens of a row, each with its log-prob."""
    i = int(row)
    rollout = batch.rollout[i]
    T = int(rollout.completion_mask.sum())
    ids = rollout.tokens[-len(rollout.completion_mask):][:T].tolist()
    words = [f"{setup.tokenizer.decode([token])!r} {logp:.2f}"
             for token, logp in zip(ids, rollout.logp.tolist())]
    prompt = batch.prompts[i].text
    print(f"  {what}: row {i}, reward {batch.rewards[i]:.4f}, advantage "
          f"{batch.row_advantages[i]:+.4f}")
    print(f"    {prompt!r} -> " + " ".join(words))


def print_rewards(batch, cfg):
    """Mean of each reward function, then rewards and advantages of each group."""
    for name, weight, scores in zip(cfg.reward_funcs, cfg.reward_weights, batch.scores.T):
        print(f"  {name} mean {scores.nanmean():.4f}, weight {weight:g}")
    groups = batch.rewards.view(-1, cfg.num_generations)
    advantages = batch.row_advantages.view(-1, cfg.num_generations)
    for i, (r, A) in enumerate(zip(groups, advantages)):
        pairs = " ".join(f"{x:.4f} ({a:+.4f})" for x, a in zip(r.tolist(), A.tolist()))
        print(f"  group {i}: mean {r.nanmean():.4f}, std {std(r):.4f}; rewards "
              f"(advantages): {pairs}")


def print_loss(m):
    """The parts of the loss, and how near to 1 the ratio was on the first pass."""
    kl = m.get("kl_loss", 0.0)
    policy = m["policy_loss"] - kl      # which is logged with the KL
    others = m["loss"] - m["policy_loss"]
    print(f"  policy gradient {policy:.6f} + beta * KL {kl:.6f} + entropy and critic {others:.6f} "
          f"= loss {m['loss']:.6f}")
    print("  at ratio 1 the policy gradient's part is near 0; its gradient is not")
    difference = m["sampling/sampling_logp_difference/max"]
    print(f"  ratio: mean {m.get('ratio', math.nan):.6f} (1: these weights sampled); the largest "
          f"difference of log-probs is {difference:.1e}")


def print_influence(m, setup, batch):
    """How many rows help, and the one that helps most and the one that harms most."""
    print(f"  {100 * m['tracin/positive_ratio']:.0f} % of the rows are positive, "
          f"{100 * m['tracin/selected_ratio']:.0f} % are kept")
    print("  check: a weighted sum of the scores, and the gradients, agree with plain backwards")
    helps = batch.influence.nan_to_num(-math.inf).argmax()      # NaN: left out of the step
    harms = batch.influence.nan_to_num(math.inf).argmin()
    for what, i in (("helps", helps), ("harms", harms)):
        print_completion(f"{what} most ({batch.influence[i]:+.2e})", i, setup, batch)
