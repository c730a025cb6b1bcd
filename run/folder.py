"""
Which folder a run gets. It is locked while the run lives, and no run is ever overwritten: the same
command goes on with a run that was interrupted, any other gets a folder of its own.
"""
import contextlib
import glob
import itertools
import json
import os

from filelock import FileLock, Timeout

from config import read_run
from run.checkpoint import LOGS, check_going_on, iterations_in, newest_checkpoint
from common.files import is_plain, read_text, remove
from common.script import BadInput

LOCK = ".lock"
# settings that may differ in the same run
FREE = ("out_dir", "log_micro", "wandb_project", "threads")


@contextlib.contextmanager
def claimed_folder(cfg):
    """Within this block the folder of the run is this process's -> (folder, whether a run in it
    goes on): out_dir, or out_dir-2, -3, ... where another run or other files are. With --resume
    out_dir itself, whatever the settings of the run in it were."""
    try:
        os.makedirs(cfg.cache_dir, exist_ok=True)
        folder, lock = first_fit(cfg.out_dir.rstrip("/") or "/", cfg)
    except (OSError, UnicodeError) as e:
        raise BadInput(f"out_dir = {cfg.out_dir!r}, cache_dir = {cfg.cache_dir!r}: cannot be "
                       f"written ({getattr(e, 'strerror', e)})") from e
    with lock:
        for path in glob.glob(f"{glob.escape(folder)}/ckpt_new.tmp*"):
            remove(path)        # of a process that was killed while it wrote
        goes_on = newest_checkpoint(folder) is not None
        if goes_on:
            check_going_on(folder, cfg)
            if not cfg.resume:
                print(f"{folder}: a run of these settings was interrupted here, it goes on")
        elif cfg.resume:
            print(f"{folder}: no checkpoint to go on from, starts from the beginning")
        yield folder, goes_on


def first_fit(wanted, cfg):
    """(folder, its lock) of the first folder that the run may have."""
    for number in itertools.count(1):
        folder = wanted if number == 1 else f"{wanted}-{number}"
        lock, why = claim(folder, cfg)
        if lock:
            return folder, lock
        if cfg.resume:
            raise BadInput(f"{folder}: {why}; --resume goes on with a run that has ended")
        print(f"{folder}: {why} (--resume goes on with a run)")


def claim(folder, cfg):
    """(lock, why not) of a folder, None where the run may not have it."""
    for name in (LOCK, *LOGS):
        if not is_plain(f"{folder}/{name}"):
            return None, f"{name} is a link or no file: remove it, what is written would go there"
    has_run = newest_checkpoint(folder) or os.path.exists(f"{folder}/config.json")
    if not is_free(folder, cfg) and not has_run:
        return None, "holds other files"    # where not even a lock is made
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(f"{folder}/{LOCK}", timeout=0)
    try:
        held = lock.acquire()       # until the block ends, or the process
    except Timeout:
        return None, "another run is at work there"
    goes_on = cfg.resume and newest_checkpoint(folder)
    if goes_on or is_free(folder, cfg) or is_unfinished(folder, cfg):
        return held, None
    lock.release()
    return None, "holds another run, or one without a checkpoint"


def is_free(folder, cfg):
    """True where nothing is lost: no folder, or at most a lock, halves of files, empty logs, and
    this config file's text, which a run writes first."""
    for name in os.listdir(folder) if os.path.lexists(folder) else []:
        path = f"{folder}/{name}"
        is_empty_log = name in LOGS and os.path.getsize(path) == 0
        is_same_text = name == "config.py" and read_text(path) == cfg.source
        if not (name == LOCK or name.endswith(".tmp") or is_empty_log or is_same_text):
            return False
    return True


def is_unfinished(folder, cfg):
    """True for a run of these settings and this config file that has not come to its end."""
    if not same_settings(folder, cfg):
        return False
    if newest_checkpoint(folder):
        return iterations_in(folder) < cfg.max_iters
    metrics = f"{folder}/metrics.jsonl"     # killed before its first checkpoint
    return not os.path.exists(metrics) or os.path.getsize(metrics) == 0


def same_settings(folder, cfg):
    """True if config.json and config.py are those of these settings."""
    try:
        before = read_run(folder)["settings"]
    except BadInput:
        return False
    config = f"{folder}/config.py"
    source = read_text(config) if os.path.exists(config) else None
    now = json.loads(json.dumps(cfg.public()))
    names = [name for name in now if name not in FREE]
    return source == cfg.source and all(before.get(name) == now[name] for name in names)
