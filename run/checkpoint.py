"""The folder of a run: claimed, written, gone on from. Of several processes number 0 writes."""
import json
import math
import os
import platform
import random
import subprocess

import numpy as np
import torch

from config import public
from run.script import BadInput
from run.files import load_file, save_file
from run.processes import world


def claim_out_dir(s):
    """Create the folder of the run and return its name: out_dir, or out_dir-2, -3, ... when an earlier run is there."""
    s.out_dir = s.out_dir.rstrip("/") or "/"
    name, number = s.out_dir, 1
    try:
        while os.path.isdir(name) and os.listdir(name) and not s.resume:
            number += 1
            name = f"{s.out_dir}-{number}"
        os.makedirs(name, exist_ok=True)
        with open(os.path.join(name, ".writable"), "w"):
            pass
        os.remove(os.path.join(name, ".writable"))
    except OSError as e:
        raise BadInput(f"out_dir = {s.out_dir!r}: cannot be written ({e.strerror})") from e
    try:
        os.makedirs(s.cache_dir, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cache_dir = {s.cache_dir!r}: cannot be written ({e.strerror})") from e
    if number > 1:
        print(f"{s.out_dir} holds an earlier run, which --resume=True goes on with; this one goes to {name} and goes on with "
              f"{name}/config.json --resume=True")
    s.out_dir = name
    return name


LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")


def append(out_dir, name, rows):
    """Add rows to a log; numbers that JSON does not know become null."""
    with open(os.path.join(out_dir, name) if world()[0] == 0 else os.devnull, "a", encoding="utf-8") as f:
        for row in rows:
            row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def save_run(out_dir, iteration, policy, reference, optimizer, s, base_hash, num_tokens):
    """ckpt.pt: all that the next iteration depends on, and how long the logs are. The one before stays as ckpt_prev.pt."""
    if world()[0]:
        return
    path, new = os.path.join(out_dir, "ckpt.pt"), os.path.join(out_dir, "ckpt_new.pt")
    kind, keys, *rest = np.random.get_state()
    save_file(new, "run", iteration=iteration, policy=policy.state_dict(), optimizer=optimizer.state_dict(),
              num_tokens=num_tokens, base_hash=base_hash, settings=public(s), source=s.source,
              reference=reference.state_dict() if s.sync_ref_model else None,
              # our own draws have seeds; a reward function of the user's may use these
              random=dict(python=random.getstate(), numpy=(kind, keys.tolist(), *rest), torch=torch.get_rng_state(),
                          cuda=[torch.cuda.get_rng_state()] if torch.cuda.is_available() else []),
              logs={name: os.path.getsize(os.path.join(out_dir, name)) for name in LOGS})
    if os.path.exists(path):
        os.replace(path, os.path.join(out_dir, "ckpt_prev.pt"))
    os.replace(new, path)


def begin_run(out_dir, policy, reference, optimizer, s, base_hash):
    """(iterations done, tokens seen) of the checkpoint that --resume=True goes on from; (None, 0) for a run that starts."""
    if s.resume and any(os.path.exists(os.path.join(out_dir, name)) for name in ("ckpt.pt", "ckpt_prev.pt")):
        return load_run(out_dir, policy, reference, optimizer, s, base_hash)
    log = os.path.join(out_dir, "metrics.jsonl")
    if os.path.exists(log) and os.path.getsize(log):
        raise BadInput(f"{log} has rows but there is no ckpt.pt to go on from: choose another out_dir")
    if s.resume:
        print(f"{out_dir}: no checkpoint to resume, starts from the beginning")
    for name in LOGS if world()[0] == 0 else ():  # an earlier start may have been killed before its first checkpoint
        open(os.path.join(out_dir, name), "w").close()
    # our own draws have seeds of their own; a reward function of the user's may use the global generators
    random.seed(s.seed), np.random.seed(s.seed % 2 ** 32), torch.manual_seed(s.seed)
    return None, 0


def load_run(out_dir, policy, reference, optimizer, s, base_hash):
    """Put everything back as save_run found it, cut the logs to match, and return (iteration, num_tokens)."""
    path = os.path.join(out_dir, "ckpt.pt")
    previous = os.path.join(out_dir, "ckpt_prev.pt")
    if not os.path.exists(path) and os.path.exists(previous):  # killed between the two renames
        path = previous
    try:
        content = load_file(path, "run")
        if content["base_hash"] != base_hash:
            raise BadInput(f"{path}: this run began from another policy than the settings name now")
        policy.load_state_dict(content["policy"])
        optimizer.load_state_dict(content["optimizer"])
        for group in optimizer.param_groups:
            group |= dict(betas=(s.adam_beta1, s.adam_beta2), weight_decay=s.weight_decay)
        if s.sync_ref_model:
            reference.load_state_dict(content["reference"])
        state = content["random"]
        for name, size in content["logs"].items():
            log = os.path.join(out_dir, name)
            if not os.path.exists(log) or os.path.getsize(log) < size:
                raise BadInput(f"{log}: shorter than when {path} was written; the run cannot go on without gaps")
    except (BadInput, RuntimeError, KeyError, AttributeError, TypeError, ValueError) as e:
        reason = str(e).splitlines()[0]
        reason = reason if isinstance(e, BadInput) else f"{path}: does not fit these settings ({reason})"
        if path != previous and os.path.exists(previous):
            reason += f"; the checkpoint before it is {previous}: rename it to ckpt.pt to go on from there"
        raise BadInput(reason) from e
    random.setstate(state["python"])
    np.random.set_state((state["numpy"][0], np.array(state["numpy"][1], dtype=np.uint32), *state["numpy"][2:]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0])
    for name, size in content["logs"].items():
        if world()[0] == 0 and os.path.exists(os.path.join(out_dir, name)):
            os.truncate(os.path.join(out_dir, name), size)
    for name, new in public(s).items():
        if name not in ("resume", "max_iters") and content["settings"].get(name, new) != new:
            print(f"resumed with another {name}: {content['settings'][name]!r} -> {new!r}")
    if content["source"] != s.source:
        print("resumed with another text of the config file")
    print(f"resumed {path} after {content['iteration']} iterations")
    return content["iteration"], content["num_tokens"]


def write_config(out_dir, s, device):
    """config.json: settings, the config file's text, versions, device, git revision."""
    if world()[0]:
        return
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True,
                             text=True).stdout.strip()
    except OSError:
        git = None
    about = dict(settings=public(s), source=s.source, device=str(device), torch=torch.__version__,
                 python=platform.python_version(), git=git or None, threads=torch.get_num_threads())
    tmp = os.path.join(out_dir, "config.json.tmp")
    with open(tmp, "w") as f:
        json.dump(about, f, indent=1)
    os.replace(tmp, os.path.join(out_dir, "config.json"))
