"""
Between two iterations the config file's `after` may change settings, and keep rollouts for one more
iteration. Checkpoints hold both, so a resumed run has the same numbers.
"""
import json
from dataclasses import replace

import torch

from common.errors import BadInput, shown
from common.hooks import select_arguments
from common.processes import all_gather
from loss import Batch
from rollout import Rollout
from run.check import check
from run.settings import assign, settings_that_are

# ------------------------------------------------------------------------------------------------
# settings


def changed_by(before, after):
    """The settings that differ -> {name: value}. BadInput for a wrong value, and for a setting that
    only the start of a run reads, so that a change would do nothing."""
    changed = {name: x for name, x in after.public().items() if x != before[name]}
    live = settings_that_are("live")
    for name, value in changed.items():
        if name not in live:
            raise BadInput(f"after set {name} = {shown(value)}: within a run only "
                           f"{', '.join(live)} can change")
        assign(after, name, value, "after")
    check(after)
    return {name: getattr(after, name) for name in changed}


def change(cfg, changed):
    """Change settings from the next iteration on. cfg.given keeps the values that were given, for
    config.json."""
    for name, value in changed.items():
        cfg.given.setdefault(name, getattr(cfg, name))
        setattr(cfg, name, value)


def change_again(cfg, content):
    """Repeat the changes in a checkpoint's content, except where the command now sets a different
    value."""
    before = content["settings"]
    change(cfg, {name: value for name, value in content["after"].items()
                 if getattr(cfg, name) == before[name]})


# ------------------------------------------------------------------------------------------------
# rollouts for one more iteration


def mask_of(keep, batch, cfg):
    """Check what `after` returned -> a mask (N,) of whole groups of a Batch; all False for None. A
    part of a group has a different mean, and so different advantages."""
    N = len(batch.prompts)
    keep = torch.zeros(N, dtype=torch.bool) if keep is None else torch.as_tensor(keep).cpu()
    first = keep[::cfg.num_generations].repeat_interleave(cfg.num_generations)
    if keep.dtype != torch.bool or keep.shape != (N,) or not torch.equal(keep, first):
        raise BadInput(f"after returned {shown(keep)}: must be None, or True or False for each of "
                       f"the {N} completions of batch, the same within a group")
    return keep


def with_replayed(batch, replay):
    """A Batch, followed by one of rollouts that `after` has kept for one more iteration."""
    replay = replace(replay, age=replay.age + 1)
    joined = Batch.joined([batch, replay])
    return replace(joined, rounds=batch.rounds, replaced=batch.replaced)


def replay_state(setup):
    """setup.replay as plain values for a checkpoint, with an index for each prompt."""
    replay = setup.replay
    if replay is None:
        return None
    index = {id(prompt): i for i, prompt in enumerate(setup.prompts)}
    tensors = {name: x for name, x in vars(replay.rollout).items() if x is not None}
    return dict(rollout=tensors, prompts=[index[id(prompt)] for prompt in replay.prompts],
                completions=replay.completions, scores=replay.scores,
                rewards=replay.rewards, age=replay.age)


def load_replay(setup, state):
    """Set setup.replay from what replay_state returned."""
    setup.replay = None
    if state is not None:
        tensors = {name: x.to(setup.device) for name, x in state["rollout"].items()}
        setup.replay = Batch(
            Rollout(**tensors), prompts=[setup.prompts[i] for i in state["prompts"]],
            completions=list(state["completions"]), scores=state["scores"],
            rewards=state["rewards"], age=state["age"].to(setup.device))


# ------------------------------------------------------------------------------------------------
# the call


def after_iteration(setup, it, cfg, batch, metrics):
    """Call the config file's `after` at the end of an iteration. It may take, by name,

        it          the iteration, from 0
        cfg         the settings; its assignments count from the next iteration on
        batch       the loss.Batch of the iteration; batch.age (N,) is 0 for new rollouts
        metrics     {name: number} of the iteration; numbers that it adds are logged, too
        setup       everything that the loop works with (run/setup.py)
        memory      a dict for its own use, of values that JSON can write

    and returns None, or a mask (N,) of completions, in whole groups, from which the next iteration
    learns once more.
    """
    if "after" not in cfg.functions:
        return

    # call it with the arguments it takes
    edited = replace(cfg, given={})
    before = edited.public()
    offered = dict(it=it, cfg=edited, batch=batch, metrics=metrics, setup=setup,
                   memory=setup.memory)
    after = cfg.functions["after"]
    keep = after(**select_arguments("after", after, offered))
    # a tensor () would be logged as text
    metrics.update({name: x.item() for name, x in metrics.items() if getattr(x, "ndim", 1) == 0})

    # all processes use rank 0's results, and memory as a checkpoint would return it
    changed = changed_by(before, edited)
    memory = json.loads(json.dumps(setup.memory))
    mine = changed, memory, mask_of(keep, batch, cfg).tolist()
    changed, setup.memory, keep = all_gather([mine])[0]
    setup.replay = batch.subset(torch.tensor(keep)) if any(keep) else None
    change(cfg, changed)
