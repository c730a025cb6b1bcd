"""
What functions of the config file are given of a batch, and what they may return. A batch is a
loss.Batch; docs/doors.md has the functions.
"""
import copy
from dataclasses import replace

import torch

from common.script import BadInput, numbers, select_arguments, shown


def subset(batch, rows):
    """The Batch of some rows (m,), with prompts, texts, scores and rewards."""
    here = rows.tolist()
    return replace(
        batch[rows], prompts=[batch.prompts[i] for i in here],
        completions=[batch.completions[i] for i in here], scores=batch.scores[here],
        rewards=batch.rewards[here])


def private_copy(batch):
    """The batch with prompts, texts, scores and rewards that a function may change. Row by row,
    since rows of a prompt are one object."""
    return replace(
        batch, prompts=[copy.deepcopy(prompt) for prompt in batch.prompts],
        completions=list(batch.completions), scores=batch.scores.clone(),
        rewards=batch.rewards.clone())


def unknown_rewards(batch):
    """Words on why what a user's function made of the rewards may be NaN; "" if all are known."""
    count = int(batch.rewards.isnan().sum())
    if not count:
        return ""
    return (f"; {count} of {len(batch.rewards)} rewards are None, and NaN in batch.rewards: leave "
            "them out")


def own_advantages(advantage, batch, cfg, **offered):
    """What the config file's `advantage` returns: (N,), or (N, T) and 0 where no token was sampled.
    It takes, by name, batch (with rollout, rewards, scores and texts, and ref_logp if beta is not
    0), cfg, and what else is offered."""
    offered |= dict(batch=private_copy(batch), cfg=cfg)
    tensors = {name: x for name, x in (*vars(batch.rollout).items(), ("ref_logp", batch.ref_logp))
               if torch.is_tensor(x)}
    versions = {name: x._version for name, x in tensors.items()}
    returned = advantage(**select_arguments("advantage", advantage, offered))

    # its rollout is the one that is trained on, which it may only read
    for name, x in tensors.items():
        if x._version != versions[name]:
            raise BadInput(f"advantage wrote into {name} of the rollout, which is trained on: let "
                           "it change a copy, such as x.clone()")

    # one finite number for each completion, or for each of its tokens
    shape = tuple(batch.rollout.logp.shape)                                         # (N, T)
    A = numbers("advantage", returned, shape[:1], shape, why=unknown_rewards(batch))
    A = A.detach().to(batch.rollout.logp)
    return A if A.dim() == 1 else A.masked_fill(~batch.rollout.sampled_mask, 0)


def target_number(cfg, setup, batch):
    """What the config file's `target` returns. It takes, by name, the policy, the tokenizer and the
    batch: the held-out rollouts, or without any the iteration's own."""
    target = cfg.functions["target"]
    offered = dict(policy=setup.policy, tokenizer=setup.tokenizer, batch=private_copy(batch))
    number = target(**select_arguments("target", target, offered))

    # a number without a slope would teach nothing, NaN would spoil the weights
    numbers("target", number, (), why=unknown_rewards(batch))
    if not torch.is_tensor(number) or not number.requires_grad:
        raise BadInput(f"target returned {shown(number)}: must be a tensor that depends on the "
                       "policy's weights")
    return number
