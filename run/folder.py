"""
The folder of a run. It is locked while the run lives, and no run is ever overwritten: the same
command continues a run that was interrupted, and any other needs a folder of its own.
"""
import contextlib
import glob
import json
import os

from filelock import FileLock, Timeout

from config import read_run
from run.checkpoint import LOGS, check_continues, iterations_in, newest_checkpoint
from common.files import is_plain, read_text, remove
from common.script import BadInput

LOCK = ".lock"
# settings that may differ in the same run
FREE = ("out_dir", "log_micro", "wandb_project", "threads")


@contextlib.contextmanager
def claimed_folder(cfg):
    """Within this block out_dir is this process's -> (folder, whether a run in it is continued).
    BadInput where it holds something else. With --resume the run in it may have any settings."""
    folder = cfg.out_dir.rstrip("/") or "/"
    try:
        os.makedirs(cfg.cache_dir, exist_ok=True)
        lock = claim(folder, cfg)
    except (OSError, UnicodeError) as e:
        raise BadInput(f"out_dir = {cfg.out_dir!r}, cache_dir = {cfg.cache_dir!r}: cannot be "
                       f"written ({getattr(e, 'strerror', e)})") from e
    with lock:
        for path in glob.glob(f"{glob.escape(folder)}/ckpt_new.tmp*"):
            remove(path)        # of a process that was killed while it wrote
        is_continued = newest_checkpoint(folder) is not None
        if is_continued:
            check_continues(folder, cfg)
            if not cfg.resume:
                print(f"{folder}: continues the interrupted run of these settings")
        elif cfg.resume:
            print(f"{folder}: has no checkpoint, so the run starts from the beginning")
        yield folder, is_continued


def claim(folder, cfg):
    """The held lock of a folder. BadInput where the run may not have it."""
    for name in (LOCK, *LOGS):
        if not is_plain(f"{folder}/{name}"):
            raise BadInput(f"{folder}/{name}: is a link or no plain file: remove it, since a run "
                           "would write there")
    has_run = newest_checkpoint(folder) or os.path.exists(f"{folder}/config.json")
    if not is_free(folder, cfg) and not has_run:    # not even a lock is made there
        raise BadInput(f"out_dir = {folder!r}: holds other files: choose another --out_dir")
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(f"{folder}/{LOCK}", timeout=0)
    try:
        held = lock.acquire()       # until the block ends, or the process
    except Timeout:
        raise BadInput(f"out_dir = {folder!r}: another run is at work there: wait for it, or "
                       "choose another --out_dir") from None
    is_resumed = cfg.resume and newest_checkpoint(folder)
    if is_resumed or is_free(folder, cfg) or is_unfinished(folder, cfg):
        return held
    lock.release()
    raise BadInput(f"out_dir = {folder!r}: holds {what_is_in(folder, cfg)}: choose another "
                   "--out_dir, or continue it with --resume=True")


def what_is_in(folder, cfg):
    """In words, what kind of run keeps a folder from another one."""
    if not newest_checkpoint(folder):
        return "a run without a checkpoint"
    if not same_settings(folder, cfg):
        return "a run of other settings"
    return "a run that is complete"


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
    """True for a run of these settings and this config file that is not complete."""
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
