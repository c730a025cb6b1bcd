"""The policy gradient on the tokens that the policy is least sure of (Wang et al. 2025)."""
import math

import torch

from common.processes import all_reduce
from loss import micro_batches
from rollout import completion_entropies


def least_sure(entropy, mask, cfg):
    """Of the tokens in a mask (N, T), the share top_entropy_quantile of the greatest entropy."""
    if not mask.any():
        return mask
    entropies = entropy[mask].sort().values                 # quantile() takes 2 ** 24 at most
    rank = round((1 - cfg.top_entropy_quantile) * (len(entropies) - 1), 6)  # without float error
    return mask & (entropy >= entropies[math.ceil(rank)])


@torch.no_grad()
def of_step(setup, batch, step, fresh, cfg):
    """The tokens (N, T) that carry the policy gradient of a step: among its own tokens, those of
    which the policy is least sure now. fresh: no step was taken since sampling."""
    # how unsure was it while sampling? After a step since, how unsure is it now?
    entropy = batch.rollout.entropy
    if not fresh or batch.is_replayed:
        entropy = torch.zeros_like(entropy)
        with setup.autocast():
            for rows in micro_batches(batch.rollout, step.rows, cfg):
                entropy[rows] = completion_entropies(
                    setup.fast(setup.policy), batch.rollout[rows], cfg.temperature)
        all_reduce([entropy])       # each process has filled in its own rows

    # some tokens of this step's rows
    in_step = torch.zeros_like(batch.loss_mask[:, :1]).index_fill(0, step.rows, True)   # (N, 1)
    return least_sure(entropy, batch.loss_mask & in_step, cfg)


least_sure.of_step = of_step
