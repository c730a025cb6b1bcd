"""
Between two iterations: what the config file's `after` changes, and what is learned from again. Both
are in checkpoints, so that a run that goes on has the same numbers.
"""
import json
from dataclasses import replace

import torch

from common.processes import all_gather
from common.script import BadInput, asked_for, shown
from loss import Batch
from rollout import Rollout
from run.check import check
from run.settings import settings_that_are

OFFERED = ("it", "cfg", "batch", "metrics", "setup", "memory")


def try_after(cfg):
    """Before anything is trained: does the config file's `after` name what there is?"""
    if "after" in cfg.functions:
        asked_for("after", cfg.functions["after"], dict.fromkeys(OFFERED))


# ------------------------------------------------------------------------------------------------
# settings


def changed_by(before, after):
    """{name: value} of the settings that differ. BadInput for one that is read only where a run
    begins, since nothing would come of it, and for a value that cannot be."""
    check(after)
    changed = {name: x for name, x in after.public().items() if x != before[name]}
    live = settings_that_are("live")
    for name in changed:
        if name not in live:
            raise BadInput(f"after set {name} = {shown(changed[name])}: within a run only "
                           f"{', '.join(live)} can change")
    return changed


def change(cfg, changed):
    """Let settings have other values from the next iteration on. cfg.given keeps what they were, as
    config.json says."""
    for name, value in changed.items():
        cfg.given.setdefault(name, getattr(cfg, name))
        setattr(cfg, name, value)


def changes_of(cfg):
    """{name: value} of the settings that are no longer what was given: for a checkpoint."""
    return {name: getattr(cfg, name) for name in cfg.given}


def change_again(cfg, content):
    """Let the settings be as a checkpoint's content has them. One that is given another value now
    has that."""
    for name, value in cfg.given.items():
        setattr(cfg, name, value)
    cfg.given.clear()
    given = content["settings"]
    change(cfg, {name: value for name, value in content["after"].items()
                 if getattr(cfg, name) == given[name]})


# ------------------------------------------------------------------------------------------------
# rollouts that are learned from again


def mask_of(keep, batch, cfg):
    """What `after` returned as a mask (N,) of whole groups of a Batch; None keeps none."""
    if keep is None:
        return torch.zeros(len(batch.prompts), dtype=torch.bool)
    keep = torch.as_tensor(keep).cpu()
    if keep.dtype != torch.bool or keep.shape != (len(batch.prompts),):
        raise BadInput(f"after returned {shown(keep)}: must be None, or True or False for each of "
                       f"the {len(batch.prompts)} completions of batch")
    groups = keep.view(-1, cfg.num_generations)
    if (groups.any(1) != groups.all(1)).any():
        raise BadInput("after kept a part of a group: a completion is compared with the others of "
                       "its prompt, so keep all of them or none")
    return keep


def with_replayed(setup, batch):
    """The Batch of an iteration, and behind it what `after` has kept of earlier ones."""
    if setup.replay is None:
        return batch
    replay = replace(setup.replay, age=setup.replay.age + 1)
    joined = Batch.joined([batch, replay])
    return replace(joined, rounds=batch.rounds, replaced=batch.replaced)


def replay_state(setup):
    """setup.replay as plain values, for a checkpoint. A prompt is its index."""
    kept = setup.replay
    if kept is None:
        return None
    index = {id(prompt): i for i, prompt in enumerate(setup.prompts)}
    tensors = {name: x for name, x in vars(kept.rollout).items() if x is not None}
    return dict(rollout=tensors, prompts=[index[id(prompt)] for prompt in kept.prompts],
                completions=kept.completions, scores=kept.scores, rewards=kept.rewards,
                age=kept.age)


def load_replay(setup, state):
    """Take up what replay_state returned."""
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
    """Call the config file's `after`, when an iteration is done. It is given, as far as it names
    them,

        it          the iteration, from 0
        cfg         the settings: what it assigns counts from the next iteration on
        batch       what was learned from, a loss.Batch; batch.age (N,) is 0 for new rollouts
        metrics     {name: number} of the iteration; what it adds is logged, too
        setup       what the loop works with (run/setup.py)
        memory      a dict of its own, of what JSON can write

    and returns None, or a mask (N,) of completions, in whole groups, that the next iteration learns
    from once more.
    """
    if "after" not in cfg.functions:
        return

    # called with what it asks for
    wanted = replace(cfg, given={})
    before = wanted.public()
    offered = dict(zip(OFFERED, (it, wanted, batch, metrics, setup, setup.memory)))
    after = cfg.functions["after"]
    keep = after(**asked_for("after", after, offered))

    # all processes go on with what rank 0 has made of it. Memory is what a checkpoint gives back
    changed = changed_by(before, wanted)
    memory = json.loads(json.dumps(setup.memory))
    mine = changed, memory, mask_of(keep, batch, cfg).tolist()
    changed, setup.memory, keep = all_gather([mine])[0]
    setup.replay = batch.where(torch.tensor(keep)) if any(keep) else None
    change(cfg, changed)
