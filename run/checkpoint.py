"""
What a run leaves in its folder. Only rank 0 writes.

    config.json    settings and versions: is itself a config
    config.py      the text of its config file, which nothing runs by itself
    *.jsonl        metrics of every iteration, its samples, the evaluations
    ckpt.pt        all that the next iteration depends on; ckpt_prev.pt is the one before, and
                   ckpt_000001.pt, ... are older ones, if keep_checkpoints asks for them
"""
import glob
import json
import math
import os
import platform
import random
import shlex
import subprocess
from dataclasses import asdict

import numpy as np
import torch

from common.files import (
    flush, is_plain, load_file, load_optimizer, load_weights, read_text, replacing, save_file,
    undamaged, write_json)
from common.processes import rank_and_size
from common.script import BadInput, shown

LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")
# settings that may differ in the same run
FREE = ("out_dir", "log_micro", "wandb_project", "threads", "keep_checkpoints")
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "lora_rank", "critic")


def append_rows(folder, name, rows):
    """Add rows to a log. NaN and infinity become null; other values that JSON does not know, which
    a user's columns may have, become text."""
    if rank_and_size()[0] > 0:
        return
    with open(f"{folder}/{name}", "a", encoding="utf-8", errors="backslashreplace") as f:
        for row in rows:
            row = {k: None if is_nan_or_inf(v) else v for k, v in row.items()}
            f.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def is_nan_or_inf(x):
    return isinstance(x, float) and not math.isfinite(x)


def write_run_config(folder, cfg, device):
    """config.json: settings, versions, device, git revision, names of functions; config.py: the
    text of the config files."""
    if rank_and_size()[0] > 0:
        return
    if cfg.source is not None:      # first: by config.json a folder is known as a run's
        config = f"{folder}/config.py"
        with replacing(config) as tmp, open(tmp, "w", encoding="utf-8") as f:
            f.write(cfg.source)
    here = shlex.quote(os.path.dirname(os.path.abspath(__file__)))
    git = subprocess.getoutput(f"git -C {here} rev-parse HEAD")     # or that there is none
    write_json(f"{folder}/config.json", dict(
        settings=cfg.public(), functions=sorted(cfg.functions), device=str(device),
        torch=torch.__version__, python=platform.python_version(),
        threads=torch.get_num_threads(), git=git))


def source_of(folder):
    """The text of a run's config files; None without."""
    path = f"{folder}/config.py"
    return read_text(path) if os.path.exists(path) else None


def save_checkpoint(folder, setup, cfg, iteration, num_tokens, base_hash):
    """Writes ckpt.pt: all that the next iteration depends on, and how long the logs are. Raises
    SystemExit, and writes nothing, if a weight is not finite."""
    weights = setup.policy.state_dict()
    states = setup.optimizer.state.values()
    moments = [x for state in states for x in state.values() if torch.is_tensor(x)]
    finite = [x.isfinite().all() for x in (*weights.values(), *moments)]
    if not torch.stack(finite).all():
        raise SystemExit(
            f"stopped: a weight or a moment of AdamW is not finite after iteration {iteration}, "
            "which is not saved. Lower learning_rate or raise beta, and continue from the last "
            "checkpoint with --resume=True")
    if rank_and_size()[0] > 0:
        return
    for name in LOGS:
        flush(f"{folder}/{name}")
    path = f"{folder}/ckpt.pt"
    new = f"{folder}/ckpt_new.tmp"
    save_file(
        new, "run", iteration=iteration, num_tokens=num_tokens, base_hash=base_hash,
        shape=asdict(setup.policy.config), policy=weights, optimizer=setup.optimizer.state_dict(),
        reference=setup.reference.state_dict() if cfg.ref_model_sync_steps else None,
        influence=setup.target_average.state(),
        settings=cfg.public(), random=random_state(),
        logs={name: os.path.getsize(f"{folder}/{name}") for name in LOGS})
    before = f"{folder}/ckpt_prev.pt"
    if cfg.keep_checkpoints not in (1, 2) and os.path.exists(before):
        set_aside(folder, before, cfg.keep_checkpoints)
    if os.path.exists(path):
        os.replace(path, before)
    os.replace(new, path)
    flush(folder)


def set_aside(folder, path, keep):
    """Give a checkpoint the next of the names ckpt_000001.pt, ckpt_000002.pt, ... The newest
    keep - 2 of these stay; 0: all."""
    older = older_checkpoints(folder)
    number = int(older[-1][-9:-3]) + 1 if older else 1
    while os.path.lexists(name := f"{folder}/ckpt_{number:06}.pt"):
        number += 1
    os.replace(path, name)
    older.append(name)
    if keep:
        for gone in older[:2 - keep]:
            os.remove(gone)


def older_checkpoints(folder):
    """Paths of ckpt_000001.pt, ... A link or a folder of such a name is the user's."""
    return [path for path in sorted(glob.glob(f"{glob.escape(folder)}/ckpt_{'[0-9]' * 6}.pt"))
            if is_plain(path)]


def newest_checkpoint(folder):
    """Path of ckpt.pt, or of ckpt_prev.pt after a kill between two renames; None without both."""
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        path = f"{folder}/{name}"
        if os.path.exists(path):
            return path
    return None


def read_newest(folder, mmap=False):
    """(path, content) of the newest checkpoint."""
    path = newest_checkpoint(folder)
    if path is None:
        raise BadInput(f"{folder}: has no checkpoint, ckpt.pt")
    try:
        return path, read_checkpoint(path, mmap)
    except BadInput as e:
        raise BadInput(f"{e}; if there is a ckpt_prev.pt, rename it to ckpt.pt to continue from "
                       "there") from e


def read_checkpoint(path, mmap=False):
    """The content of a checkpoint. mmap: its tensors are read when they are used."""
    content = load_file(path, "run", mmap)
    with undamaged(path):
        tables = [content[name] for name in ("settings", "shape", "policy", "logs")]
        counts = [content["iteration"], content["num_tokens"], *map(tables[-1].get, LOGS)]
        whole = set(map(type, counts)) == {int} and min(counts) >= 0
        if not whole or not all(isinstance(table, dict) for table in tables):
            raise TypeError("a part is of another type")
    return content


def changed_settings(before, cfg):
    """{name: (value before, value now)} of the settings that make it another run. One that was not
    there before had its default."""
    changed = {}
    for name, now in cfg.public().items():
        was = before.get(name, getattr(type(cfg), name))
        if name not in FREE and json.dumps(was, default=str) != json.dumps(now):
            changed[name] = was, now
    return changed


def check_fits_run(path, content, cfg, names=SHAPE):
    """BadInput where a checkpoint has other weights than these settings ask for."""
    changed = changed_settings(content["settings"], cfg)
    misfits = {name: changed[name] for name in names if name in changed}
    if misfits:
        raise BadInput(f"{path}: does not fit these settings: {in_words(misfits)}; keep that")


def in_words(changed):
    """What the first few settings that changed were before."""
    words = [f"{name} was {shown(old, 30)}" for name, (old, _) in changed.items()]
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


def begin_logs(folder, cfg):
    """New logs, and the global generators, which a reward function may use, from the seed."""
    if rank_and_size()[0] == 0:
        for name in LOGS:  # an earlier start may have been killed before its first checkpoint
            open(f"{folder}/{name}", "w").close()
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2 ** 32)
    torch.manual_seed(cfg.seed)


def resume(folder, setup, cfg, base_hash):
    """Puts everything back as the last checkpoint has it and cuts the logs to match. -> (iterations
    done, tokens seen)"""
    path, content = read_newest(folder)
    with undamaged(path):
        load_checkpoint(content, path, setup, cfg, base_hash)
        set_random_state(content["random"])
        sizes = {f"{folder}/{name}": content["logs"][name] for name in LOGS}
        for log, size in sizes.items():
            if not os.path.exists(log) or os.path.getsize(log) < size:
                raise BadInput(f"{log}: shorter than when {path} was written, so the run cannot "
                               "continue: put the file back, or choose another --out_dir")
        for name, (old, new) in changed_settings(content["settings"], cfg).items():
            if name != "max_iters":
                print(f"resumed with another {name}: {old!r} -> {new!r}")
    if rank_and_size()[0] == 0:
        for log, size in sizes.items():
            os.truncate(log, size)
    print(f"resumed {path} after {content['iteration']} iterations")
    return content["iteration"], content["num_tokens"]


def load_checkpoint(content, path, setup, cfg, base_hash):
    """Loads the content of a checkpoint into policy, optimizer, reference and influence."""
    check_fits_run(path, content, cfg)
    if content["base_hash"] != base_hash:
        raise BadInput(f"{path}: this run began from another policy than the settings name now (a "
                       "published one may have changed: name its commit, policy = 'NAME@COMMIT')")
    load_weights(path, setup.policy, content["policy"])
    load_optimizer(setup.optimizer, content["optimizer"])
    if cfg.ref_model_sync_steps and content["settings"].get("ref_model_sync_steps"):
        load_weights(path, setup.reference, content["reference"] or {})     # else it is the base
    state = content["influence"]
    if cfg.tracin == content["settings"]["tracin"] != "off" and state and state["average"]:
        shapes = [x.shape for x in state["average"]]
        if state["age"] < 1 or shapes != [p.shape for p in setup.trained]:
            raise ValueError("the target's average is of other weights")
        setup.target_average.load_state(state, setup.trained)


def random_state():
    """State of the global generators, which a reward function may use."""
    kind, keys, *rest = np.random.get_state()
    return dict(python=random.getstate(), numpy=(kind, keys.tolist(), *rest),
                torch=torch.get_rng_state())


def set_random_state(state):
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
