"""How several rewards become one advantage, beside the core's `sum_then_normalize`."""
import math

import torch

from judge.rewards import counted_scores, total_reward


def normalize_then_sum(batch, cfg, group_advantages):
    """Advantages (N,) from scores (N, K), each on a scale of its own (GDPO, Liu et al. 2026)."""
    # each score is normalised in its group before they are summed, so that none dominates by scale
    G = cfg.num_generations
    scores, weights = counted_scores(batch.scores, cfg.reward_weights)                  # (N, k)
    if len(weights) == 0:
        return torch.zeros(len(scores))
    parts = torch.stack([group_advantages(r, G) for r in scores.T], 1)                 # (N, k)
    known = parts.masked_fill(scores.isnan(), math.nan)
    r = total_reward(known, weights.tolist(), G)                                       # (N,)

    # the sum is normalised again, with the whole batch as one group; a row that no function has
    # anything to teach stays 0
    advantages = group_advantages(r, num_generations=len(r))                            # (N,)
    return advantages.masked_fill((parts == 0).all(1), 0)


normalize_then_sum.by_score = True      # what cancels in the sum of rewards is learned from
