"""
The folder of a run: claimed, logged to, saved in, gone on from. Only rank 0 writes.

    config.json    settings, the config file's text, versions: is itself a config
    *.jsonl        metrics of every iteration, its samples, the evaluations
    ckpt.pt        all that the next iteration depends on; ckpt_prev.pt is the one before
"""
import json
import math
import os
import platform
import random
import subprocess

import numpy as np
import torch

from config import with_speed
from run.files import load_file, save_file
from run.processes import rank_and_size
from run.script import BadInput

OTHER_POLICY = ("{}: this run began from another policy than the settings name now (a published "
                "one may have changed: name its commit, policy = 'NAME@COMMIT')")
LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")
NEEDED = ("base_hash", "policy", "optimizer", "random", "logs", "iteration", "num_tokens",
          "settings", "source")     # in ckpt.pt


def claim_folder(cfg):
    """Creates the folder of the run and returns its name: out_dir, or out_dir-2, -3, ... where an
    earlier run is. --resume=True goes on in the earlier one."""
    wanted = cfg.out_dir.rstrip("/") or "/"
    folder, number = wanted, 1
    try:
        while os.path.isdir(folder) and os.listdir(folder) and not cfg.resume:
            number += 1
            folder = f"{wanted}-{number}"
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, ".writable")
        with open(probe, "w"):
            pass
        os.remove(probe)
    except OSError as e:
        raise BadInput(f"out_dir = {wanted!r}: cannot be written ({e.strerror})") from e
    try:
        os.makedirs(cfg.cache_dir, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cache_dir = {cfg.cache_dir!r}: cannot be written ({e.strerror})") from e
    if number > 1:
        print(f"{wanted} holds an earlier run, which --resume=True goes on with; this one goes to "
              f"{folder} and goes on with {folder}/config.json --resume=True")
    return folder


def append_rows(folder, name, rows):
    """Adds rows to a log. Numbers that JSON does not know become null."""
    path = os.path.join(folder, name) if rank_and_size()[0] == 0 else os.devnull
    with open(path, "a", encoding="utf-8") as f:
        for row in rows:
            row = {k: None if is_nan_or_inf(v) else v for k, v in row.items()}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def is_nan_or_inf(x):
    return isinstance(x, float) and not math.isfinite(x)


def write_run_config(folder, cfg, device):
    """config.json: settings, the config file's text, versions, device, git revision."""
    if rank_and_size()[0] > 0:
        return
    about = dict(
        settings=cfg.public(), source=cfg.source, device=str(device), torch=torch.__version__,
        python=platform.python_version(), git=git_revision(), threads=torch.get_num_threads())
    tmp = os.path.join(folder, "config.json.tmp")
    with open(tmp, "w") as f:
        json.dump(about, f, indent=1)
    os.replace(tmp, os.path.join(folder, "config.json"))


def git_revision():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None


# ------------------------------------------------------------------------------------------------
# checkpoints


def save_checkpoint(folder, nets, cfg, iteration, num_tokens, base_hash):
    """Writes ckpt.pt: all that the next iteration depends on, and how long the logs are."""
    if rank_and_size()[0] > 0:
        return
    path = os.path.join(folder, "ckpt.pt")
    new = os.path.join(folder, "ckpt_new.pt")
    save_file(
        new, "run", iteration=iteration, policy=nets.policy.state_dict(),
        optimizer=nets.optimizer.state_dict(), num_tokens=num_tokens, base_hash=base_hash,
        settings=cfg.public(), source=cfg.source,
        reference=nets.reference.state_dict() if cfg.sync_ref_model else None,
        random=random_state(),
        logs={name: os.path.getsize(os.path.join(folder, name)) for name in LOGS})
    if os.path.exists(path):
        os.replace(path, os.path.join(folder, "ckpt_prev.pt"))
    os.replace(new, path)


def begin_folder(folder, nets, cfg, base_hash):
    """Finds the checkpoint that --resume=True goes on from, or starts new logs. -> (iterations
    done, tokens seen), or (None, 0) for a run that starts."""
    names = ("ckpt.pt", "ckpt_prev.pt")
    if cfg.resume and any(os.path.exists(os.path.join(folder, name)) for name in names):
        return resume(folder, nets, cfg, base_hash)
    log = os.path.join(folder, "metrics.jsonl")
    if os.path.exists(log) and os.path.getsize(log):
        raise BadInput(f"{log} has rows but there is no ckpt.pt to go on from: choose another "
                       "out_dir")
    if cfg.resume:
        print(f"{folder}: no checkpoint to resume, starts from the beginning")
    if rank_and_size()[0] == 0:
        for name in LOGS:  # an earlier start may have been killed before its first checkpoint
            open(os.path.join(folder, name), "w").close()
    # our own draws have seeds of their own; a reward function may use the global generators
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2 ** 32)
    torch.manual_seed(cfg.seed)
    return None, 0


def resume(folder, nets, cfg, base_hash):
    """Puts everything back as the last checkpoint has it and cuts the logs to match."""
    path = os.path.join(folder, "ckpt.pt")
    previous = os.path.join(folder, "ckpt_prev.pt")
    if not os.path.exists(path):  # killed between the two renames
        path = previous
    try:
        content = load_file(path, "run")
        load_checkpoint(content, path, nets, cfg, base_hash)
        check_logs(content, path, folder)
    except BadInput as e:
        reason = str(e)
        if path != previous and os.path.exists(previous):
            reason += (f"; the checkpoint before it is {previous}: rename it to ckpt.pt to go on "
                       "from there")
        raise BadInput(reason) from e
    set_random_state(content["random"])
    if rank_and_size()[0] == 0:
        for name, size in content["logs"].items():
            os.truncate(os.path.join(folder, name), size)
    say_what_differs(content, cfg)
    print(f"resumed {path} after {content['iteration']} iterations")
    return content["iteration"], content["num_tokens"]


def load_checkpoint(content, path, nets, cfg, base_hash):
    """Loads the content of a checkpoint into policy, optimizer and reference."""
    missing = [name for name in NEEDED if name not in content]
    if missing:
        raise BadInput(f"{path}: does not fit these settings (it has no {', '.join(missing)})")
    if content["base_hash"] != base_hash:
        raise BadInput(OTHER_POLICY.format(path))
    try:
        nets.policy.load_state_dict(content["policy"])
        nets.optimizer.load_state_dict(content["optimizer"])
        for group in nets.optimizer.param_groups:
            group["betas"] = (cfg.adam_beta1, cfg.adam_beta2)
            group["weight_decay"] = cfg.weight_decay
        if cfg.sync_ref_model:
            nets.reference.load_state_dict(content["reference"])
    except (RuntimeError, KeyError, AttributeError, TypeError, ValueError) as e:
        reason = str(e).splitlines()[0]
        raise BadInput(f"{path}: does not fit these settings ({reason})") from e


def check_logs(content, path, folder):
    """The logs may be longer than the checkpoint says, not shorter."""
    for name, size in content["logs"].items():
        log = os.path.join(folder, name)
        if not os.path.exists(log) or os.path.getsize(log) < size:
            raise BadInput(
                f"{log}: shorter than when {path} was written; the run cannot go on without gaps")


def say_what_differs(content, cfg):
    before = with_speed(content["settings"])
    for name, new in cfg.public().items():
        old = before.get(name, new)
        if old != new and name not in ("resume", "max_iters"):
            print(f"resumed with another {name}: {old!r} -> {new!r}")
    if content["source"] != cfg.source:
        print("resumed with another text of the config file")


def random_state():
    """State of the global generators, which a reward function may use."""
    kind, keys, *rest = np.random.get_state()
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return dict(python=random.getstate(), numpy=(kind, keys.tolist(), *rest),
                torch=torch.get_rng_state(), cuda=cuda)


def set_random_state(state):
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0])
