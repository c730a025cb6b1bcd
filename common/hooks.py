"""
Hooks: functions of the config file that the project calls in place of its own, such as `advantage`
and `target`. Here is what they are given, and what they may return. docs/hooks.md lists them. A
batch is a loss.Batch.
"""
import copy
import inspect
from dataclasses import replace

import torch

from common.errors import BadInput, shown


def select_arguments(name, function, offered):
    """The entries of offered {parameter: value} that a function of the config file names; all of
    them for **kwargs."""
    # by name, so that a misspelled one is refused
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for missing in [n for n, p in names.items() if n not in offered and p.default is p.empty]:
        raise BadInput(f"{name} asks for {missing!r}: it may ask for "
                       f"{', '.join(map(str, offered))}, by these names")
    return {key: x for key, x in offered.items() if takes_all or key in names}


def numbers(what, returned, *shapes):
    """What a user's function returned -> a float64 tensor of one of these shapes, all of it finite.
    BadInput for anything else. (A reward that is None is NaN in batch.rewards.)"""
    try:
        x = torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        x = torch.tensor(torch.nan)
    if x.shape not in shapes or not x.isfinite().all():
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise BadInput(
            f"{what} returned {shown(returned)}: must be finite numbers of shape {wanted}")
    return x


def shaped(name, x, *shapes):
    """What a hook has returned; BadInput unless it is a tensor of one of these shapes."""
    if not torch.is_tensor(x) or x.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        what = f"a tensor of shape {tuple(x.shape)}" if torch.is_tensor(x) else shown(x)
        raise BadInput(f"{name} returned {what}: must be a tensor of shape {wanted}")
    return x


def private_copy(batch):
    """The batch, to be changed by a function as it likes. Prompts are copied row by row, since rows
    of a prompt are one object. `allowed`, which is large, stays the same."""
    allowed = batch.rollout.allowed
    rollout = replace(batch.rollout, allowed=None).map(torch.clone)
    tensors = {name: x.clone() for name, x in vars(batch).items() if torch.is_tensor(x)}
    return replace(
        batch, prompts=[copy.deepcopy(prompt) for prompt in batch.prompts],
        completions=list(batch.completions), rollout=replace(rollout, allowed=allowed), **tensors)


def own_advantages(batch, cfg, **offered):
    """What the hook `advantage` returns: (N,), or (N, T) and 0 where no token was sampled. It
    takes, by name, batch (with rollout, rewards, scores and texts, and ref_logp if beta is not 0),
    cfg, and what else is offered. It may set batch.returns, for a critic's loss."""
    own = private_copy(batch)
    returned = cfg.call("advantage", batch=own, cfg=cfg, **offered)
    batch.returns = own.returns

    # one finite number for each completion, or for each of its tokens
    shape = tuple(batch.rollout.logp.shape)                                         # (N, T)
    A = numbers("advantage", returned, shape[:1], shape)
    A = A.detach().to(batch.rollout.logp)
    return A if A.dim() == 1 else A.masked_fill(~batch.rollout.sampled_mask, 0)


def target_number(cfg, setup, batch):
    """What the config file's `target` returns. It takes, by name, the policy, the tokenizer and the
    batch: the held-out rollouts, or without any the iteration's own."""
    target = cfg.functions["target"]
    offered = dict(policy=setup.policy, tokenizer=setup.tokenizer, batch=private_copy(batch))
    number = target(**select_arguments("target", target, offered))

    # a number without a slope would teach nothing, NaN would spoil the weights
    numbers("target", number, ())
    if not torch.is_tensor(number) or not number.requires_grad:
        raise BadInput(f"target returned {shown(number)}: must be a tensor that depends on the "
                       "policy's weights")
    return number


def own_weights(recording, influence):
    """What the config file's `weigh` returns for the rollouts of a step: a factor (n,) on the loss
    of each. It may take, by name,

        influence       (n,)
        self_influence  (n,) of each rollout on itself, made only if `weigh` takes it
        batch           their loss.Batch: rewards, advantages, completions, prompts, rollout
        recording       the step's tracin.Recording: policy_gradient(weights) and scores(gradient)
                        give what any weights would make of the gradient
    """
    weigh = recording.cfg.functions["weigh"]
    batch = private_copy(recording.batch.subset(recording.step.rows))
    offered = dict(influence=influence.clone(), self_influence=None, recording=recording,
                   batch=batch)
    given = select_arguments("weigh", weigh, offered)
    if "self_influence" in given:
        given["self_influence"] = recording.self_influence()
    weights = weigh(**given)
    return numbers("weigh", weights, influence.shape).detach().to(influence)
