"""The policy gradient on the tokens that the policy is least sure of (Wang et al. 2025)."""
import math

import torch

from common.processes import all_reduce
from loss import micro_batches
from rollout import completion_entropies


def most_entropy(entropy, mask, cfg):
    """The share top_entropy_quantile of the tokens in a mask (N, T) that has the most entropy."""
    if not mask.any():
        return mask
    entropies = entropy[mask].sort().values                 # quantile() takes 2 ** 24 at most
    rank = round((1 - cfg.top_entropy_quantile) * (len(entropies) - 1), 6)  # without float error
    return mask & (entropy >= entropies[math.ceil(rank)])


@torch.no_grad()
def least_sure(setup, batch, rows, fresh, cfg):
    """The tokens (N, T) that carry the policy gradient of a step, by its rows: among their tokens,
    those of which the policy is least sure now. fresh: no step was taken since sampling."""
    # how unsure was it while sampling? After a step since, how unsure is it now?
    entropy = batch.rollout.entropy
    if not fresh or batch.is_replayed:
        entropy = torch.zeros_like(entropy)
        with setup.autocast():
            for piece in micro_batches(batch.rollout, rows, cfg):
                entropy[piece] = completion_entropies(
                    setup.fast(setup.policy), batch.rollout[piece], cfg.temperature)
        all_reduce([entropy])       # each process has filled in its share

    # some tokens of these rows
    in_step = torch.zeros_like(batch.loss_mask[:, :1]).index_fill(0, rows, True)        # (N, 1)
    return most_entropy(entropy, batch.loss_mask & in_step, cfg)
