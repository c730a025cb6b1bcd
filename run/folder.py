"""
The folder of a run. It is locked while the run lives, and a run is never overwritten: the same
command continues an interrupted run, and a different command needs its own folder.
"""
import contextlib
import glob
import os

from filelock import FileLock, Timeout

from common.errors import BadInput, shown
from run.checkpoint import LOGS, changed_settings, checkpoints, iterations_of
from run.settings import read_run, settings_that_are

LOCK = ".lock"
# files that are first written under a temporary name
WRITTEN = ("ckpt_*.pt", "base.pt", "config.json", "config.py", "*.jsonl")


def in_words(changed):
    """The old values of changed settings, as text."""
    return ", ".join(f"{name} was {shown(old, 30)}" for name, (old, _) in changed.items())


def why_not_continued(folder, cfg):
    """Why this folder cannot be resumed, or ""."""
    if not os.path.exists(f"{folder}/config.json"):
        return "holds files, but not a run"

    # is it the same run, and how far has it come?
    before = read_run(folder)
    changed = changed_settings(before["settings"], cfg)
    fixed = {name: changed[name] for name in settings_that_are("fixed") if name in changed}
    done = [iterations_of(path) for path in checkpoints(folder)]

    # without a checkpoint it would begin anew, and overwrite its logs
    metrics = f"{folder}/metrics.jsonl"
    if not done and os.path.exists(metrics) and os.path.getsize(metrics) > 0:
        return "holds a run without a checkpoint"

    # with --resume=True settings may differ, as long as the weights fit
    if done and cfg.resume:
        return f"holds a run of a different policy ({in_words(fixed)})" if fixed else ""

    # else it must be the same command, and the run must have iterations left
    about = in_words(changed)
    if not about and before["source"] != cfg.source:
        about = "its config file has changed"
    if about:
        way_out = ", which --resume=True would continue" if done and not fixed else ""
        return f"holds a run with different settings ({about}){way_out}"
    if done and done[-1] >= cfg.max_iters and before.get("is_printed"):
        return ("holds a run that is complete, which --resume=True with more --max_iters would "
                "continue")
    return ""


def is_free(folder):
    """True if nothing would be lost: the folder does not exist, or holds at most a lock, unfinished
    files and empty logs."""
    for name in os.listdir(folder) if os.path.lexists(folder) else []:
        is_empty_log = name in LOGS and os.path.getsize(f"{folder}/{name}") == 0
        if not (name == LOCK or name.endswith(".tmp") or is_empty_log):
            return False
    return True


def check_folder(folder, cfg):
    """BadInput unless the folder is free, or holds a run that these settings continue."""
    if is_free(folder):
        return
    if reason := why_not_continued(folder, cfg):
        raise BadInput(f"out_dir = {folder!r}: {reason}; choose another --out_dir")


@contextlib.contextmanager
def claimed_folder(cfg):
    """Lock out_dir for this block -> (folder, whether it holds a run to continue). BadInput if it
    holds something else."""
    folder = cfg.out_dir.rstrip("/") or "/"

    # check before making anything there, then lock it
    try:
        check_folder(folder, cfg)
        os.makedirs(folder, exist_ok=True)
        lock = FileLock(f"{folder}/{LOCK}", timeout=0).acquire()
    except Timeout:
        raise BadInput(f"out_dir = {folder!r}: is in use by another run: wait for it, or "
                       "choose another --out_dir") from None
    except (OSError, UnicodeError) as e:
        raise BadInput(f"out_dir = {cfg.out_dir!r}: cannot be written ({e})") from e
    with lock:      # until the block ends, or the process
        check_folder(folder, cfg)       # again: a different run may have used it meanwhile

        # remove what a process left that was killed while it wrote
        for name in WRITTEN:
            for path in glob.glob(f"{glob.escape(folder)}/{name}.[0-9]*.tmp"):
                os.remove(path)

        # from the beginning, or from where it stopped?
        is_continued = bool(checkpoints(folder))
        if cfg.resume and not is_continued:
            print(f"{folder}: has no checkpoint, so the run starts from the beginning")
        yield folder, is_continued
