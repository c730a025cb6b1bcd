"""Which held-out rollouts are the target, where it is not made of all."""
import torch


def targets(rewards, cfg, generator):
    """Indices of tracin_val_size rollouts (0: all): random ones, those of the best or of the worst
    rewards (N,), or balanced: one half of the best and one half of the worst."""
    n = len(rewards)
    how = cfg.tracin_val_select
    if how == "random":
        return torch.randperm(n, generator=generator)[:cfg.tracin_val_size or n]

    # without a reward (NaN) a rollout is neither good nor bad
    known = n - int(rewards.isnan().sum())
    order = rewards.nan_to_num(-torch.inf).argsort(descending=True)[:max(1, known)]
    size = min(cfg.tracin_val_size or n, len(order))
    num_worst = {"best": 0, "balanced": size // 2, "worst": size}[how]
    return torch.cat([order[:size - num_worst], order[len(order) - num_worst:]])
