"""
What a run writes, by rank 0 alone:

    config.json    settings, versions, text of the config file; can be named as a config
    config.py      that text; runs only if a command names it
    base.pt        a copy of the policy before training, if its file, or run, might change
    *.jsonl        metrics of every iteration, its samples, the evaluations
    ckpt_*.pt      all that the next iteration depends on, by the number of iterations done
"""
import glob
import json
import math
import os
import platform
import random
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from common.errors import BadInput
from common.files import ROOT, flush, load_file, replacing, save_file, write_json
from common.guards import moments_of
from common.processes import rank_and_size
from common.seeds import hash_of
from run.after import change_again, load_replay, replay_state
from run.hashes import changed_inputs, of_prompts, what_was_read
from run.optimizer import load_state
from run.settings import settings_that_are

LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")


def append_rows(folder, name, rows):
    """Add rows to a log. NaN and infinity become null. Values that JSON cannot write, from a user's
    columns, become text."""
    if rank_and_size()[0] > 0:
        return
    with open(f"{folder}/{name}", "a", encoding="utf-8", errors="backslashreplace") as f:
        for row in rows:
            row = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in row.items()}
            f.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def write_run_config(folder, cfg, device, changes):
    """Write config.json: settings, versions, device, git revision, names of functions, the text of
    the config files, changes of a resumed run. Write config.py: that text once more, so that a
    command can name it."""
    if rank_and_size()[0] > 0:
        return

    git = subprocess.getoutput(f"git -C '{ROOT}' rev-parse HEAD")       # or the shell's error
    write_json(f"{folder}/config.json", dict(
        settings=cfg.public(), functions=sorted(cfg.functions), source=cfg.source,
        device=str(device), torch=torch.__version__, python=platform.python_version(),
        threads=torch.get_num_threads(), git=git, changes=changes))

    # and the text of the config file
    if cfg.source is not None:
        with replacing(f"{folder}/config.py") as tmp, open(tmp, "w", encoding="utf-8") as f:
            f.write(cfg.source)


def checkpoints(folder):
    """Paths of a run's checkpoints, the newest last."""
    return sorted(glob.glob(f"{glob.escape(folder)}/ckpt_{'[0-9]' * 6}.pt"))


def iterations_of(path):
    """How many iterations were done at a checkpoint, from its name."""
    return int(path[-9:-3])


def newest_checkpoint(folder):
    """Path of a run's newest checkpoint."""
    paths = checkpoints(folder)
    if not paths:
        raise BadInput(f"{folder}: has no checkpoint")
    return paths[-1]


def random_state():
    """State of the global random generators, which a reward function may use."""
    kind, keys, *rest = np.random.get_state()
    return dict(python=random.getstate(), numpy=(kind, keys.tolist(), *rest),
                torch=torch.get_rng_state())


def set_random_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def save_checkpoint(folder, setup, cfg, iteration, num_tokens, base_hash):
    """Write a checkpoint and remove older ones. Raise SystemExit, and write nothing, if a weight is
    not finite."""
    # bad weights must not replace the last good ones
    weights = setup.policy.state_dict()
    moments = moments_of(setup.optimizer)
    finite = [x.isfinite().all() for x in (*weights.values(), *moments)]
    if not torch.stack(finite).all():
        raise SystemExit(
            "stopped: a weight or a moment of the optimizer is not finite after iteration "
            f"{iteration}, which is not saved. Lower learning_rate or raise beta, and continue "
            "from the last checkpoint with --resume=True")

    # the logs first, since a checkpoint records their lengths
    if rank_and_size()[0] > 0:
        return
    for name in LOGS:
        flush(f"{folder}/{name}")

    # all that the next iteration depends on
    save_file(
        f"{folder}/ckpt_{iteration:06}.pt", "run", iteration=iteration, num_tokens=num_tokens,
        base_hash=base_hash, shape=asdict(setup.policy.config), policy=weights,
        optimizer=setup.optimizer.state_dict(),
        reference=None if setup.reference is setup.base else setup.reference.state_dict(),
        influence=setup.target_average and setup.target_average.state(), random=random_state(),
        seen=setup.seen, replay=replay_state(setup), memory=setup.memory,
        after={name: getattr(cfg, name) for name in cfg.given}, settings=cfg.public(),
        has_read=what_was_read(setup, cfg), changes=setup.changes,
        **{name: os.path.getsize(f"{folder}/{name}") for name in LOGS})

    # keep at least two: the newest may turn out to be damaged
    if cfg.keep_checkpoints:
        for path in checkpoints(folder)[:-max(2, cfg.keep_checkpoints)]:
            os.remove(path)


def changed_settings(before, cfg):
    """The settings that make it a different run -> {name: (value before, value now)}."""
    changed = {}
    free = settings_that_are("free")
    for name, now in cfg.public().items():
        was = before.get(name)      # None: the setting is new
        if name not in free and json.dumps(was, default=str) != json.dumps(now):
            changed[name] = was, now
    return changed


def begin_logs(folder, cfg):
    """Begin empty logs, and seed the global random generators, which a reward function may use."""
    if rank_and_size()[0] == 0:
        for name in LOGS:  # a run that was killed before its first checkpoint may have left rows
            open(f"{folder}/{name}", "w").close()
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2 ** 32)
    torch.manual_seed(cfg.seed)


def load_checkpoint(path, setup, cfg):
    """Load a checkpoint into policy, optimizer, reference, influence, the state of `after` and the
    global random generators -> its content."""
    content = load_file(path, "run")

    # does it belong to this run?
    if content["base_hash"] != hash_of(setup.base):
        raise BadInput(
            f"{path}: this run began from a different policy than the settings name now (a "
            "published one may have changed: name its commit, policy = 'NAME@COMMIT'; for a run "
            "name the checkpoint, policy = 'RUN/ckpt_000004.pt')")

    # weights and moments. A reference that followed the policy goes on from where it was
    setup.policy.load_state_dict(content["policy"])
    load_state(setup.optimizer, content["optimizer"])
    if setup.reference is not setup.base and content["reference"] is not None:
        setup.reference.load_state_dict(content["reference"])

    # the target's average, if the target is still of the same kind
    state = content["influence"]
    if setup.target_average and state and cfg.tracin == content["settings"]["tracin"]:
        setup.target_average.load_state(state, setup.trained)

    # the settings that `after` has changed, and its memory
    change_again(cfg, content)
    setup.memory = content["memory"]

    # the history of prompts, if the prompts are still the same
    setup.changes = content["changes"]
    if content["has_read"]["prompts"] == of_prompts(setup.prompts):
        setup.seen = content["seen"]
        load_replay(setup, content["replay"])
    elif content["seen"] or content["replay"]:
        print("note: the prompts have changed: choose starts without their history, and no rollout "
              "is replayed")
    set_random_state(content["random"])
    return content


def say_changes(setup, content, cfg):
    """Print what has changed since the checkpoint was written, and record it in setup.changes."""
    # a larger max_iters is the usual reason to resume
    changed = changed_settings(content["settings"], cfg)
    longer = changed.pop("max_iters", None)
    if longer and cfg.lr_decay != "constant":
        print(f"note: resumed with a different max_iters, {longer[0]} -> {longer[1]}: lr_decay = "
              f"{cfg.lr_decay!r} ends there, so from here on the learning rate differs from that "
              "in a single run of either length")

    # all other settings, and what was read
    changed |= changed_inputs(content["has_read"], what_was_read(setup, cfg))
    for name, (old, new) in changed.items():
        print(f"resumed with different {name}: {old!r} -> {new!r}")
        setup.changes.append([content["iteration"], name, old, new])


def resume(folder, setup, cfg):
    """Restore the last checkpoint and cut the logs to match -> (iterations done, tokens seen)."""
    path = newest_checkpoint(folder)
    content = load_checkpoint(path, setup, cfg)
    say_changes(setup, content, cfg)

    # rows after the checkpoint will be written again. Cut copies: `cp -al` makes links, which lead
    # to the logs of a different run
    for name in LOGS if rank_and_size()[0] == 0 else ():
        with open(f"{folder}/{name}", "rb") as f, replacing(f.name) as tmp:
            Path(tmp).write_bytes(f.read(content[name]))
    print(f"resumed {path} after {content['iteration']} iterations")
    if content["iteration"] >= cfg.max_iters:
        print(f"already at max_iters = {cfg.max_iters}: nothing to do")
    return content["iteration"], content["num_tokens"]
