# Learn only from the rollouts that make good comments more likely: a target of your own.
#     python grpo.py config/tracin_target.py
from config.toxicity import *

import torch

out_dir = "out/tracin_target"
max_iters = 40
tracin = "target"
_GOOD = ["Thank you for your help with this article.", "I agree with you.", "This is a good idea."]


def target(policy, tokenizer, batch):
    """Mean log-prob per token of good comments, which should rise.

    batch is a loss.Batch, not used here: batch.rollout.tokens has prompt and completion, padded on
    the left."""
    device = policy.lm_head.weight.device
    logps = []
    for text in _GOOD:
        ids = [tokenizer.eot_token] + tokenizer.encode_ordinary(text) + [tokenizer.eot_token]
        ids = torch.tensor([ids], device=device)                            # (1, T)
        logits = policy.lm_head(policy(ids[:, :-1])).float()                # (1, T - 1, V)
        logps.append(logits.log_softmax(-1).gather(2, ids[:, 1:, None]))
    return torch.cat(logps, 1).mean()
