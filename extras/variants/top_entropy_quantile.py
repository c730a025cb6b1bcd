"""The policy gradient on the tokens that the policy is least sure of (Wang et al. 2025)."""
import math


def least_sure(entropy, mask, cfg):
    """Of the tokens in a mask (N, T), the share top_entropy_quantile of the greatest entropy."""
    if not mask.any():
        return mask
    entropies = entropy[mask].sort().values                 # quantile() takes 2 ** 24 at most
    rank = round((1 - cfg.top_entropy_quantile) * (len(entropies) - 1), 6)  # without float error
    return mask & (entropy >= entropies[math.ceil(rank)])
