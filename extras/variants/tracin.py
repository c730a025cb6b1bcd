"""What a rollout is worth to the target, beside the core's `reward` and `advantage`."""
import torch


def contrastive(rewards):
    """1 for the better half of rewards (n,), -1 for the other, 0 for one in the middle."""
    last_if_unknown = rewards.nan_to_num(-torch.inf)
    rank = last_if_unknown.argsort(descending=True).argsort()       # 0: the best
    middle = (~rewards.isnan()).sum() / 2 - 0.5
    side = (middle - rank).sign()
    # equal rewards share what their ranks get, which favours no side where many are equal
    is_equal = (last_if_unknown[:, None] == last_if_unknown).to(side)                   # (n, n)
    return is_equal @ side / is_equal.sum(1)
