"""
Whose folder is out_dir? A run locks it while it lives. No run is overwritten: the same command
continues it, and a different command needs its own folder.
"""
import contextlib
import glob
import os

from filelock import FileLock, Timeout

from common.errors import BadInput, shown
from run.checkpoint import changed_settings, checkpoints
from run.settings import read_run

LOCK = ".lock"


def why_not_used(folder, cfg):
    """Why a run with these settings may not use a folder, or ""."""
    # it is free if it holds at most a lock and unfinished files
    names = os.listdir(folder) if os.path.lexists(folder) else []
    if all(name == LOCK or name.endswith(".tmp") for name in names):
        return ""
    if "config.json" not in names:
        return "holds files, but not a run"

    # without a checkpoint a run would begin anew, and overwrite its logs
    metrics = f"{folder}/metrics.jsonl"
    has_rows = os.path.exists(metrics) and os.path.getsize(metrics) > 0
    if has_rows and not checkpoints(folder):
        return "holds a run without a checkpoint"

    # the same command continues it, and so does --resume=True with changed settings. They may
    # change before the first iteration is done: a function of the config file failed, and is mended
    before = read_run(folder)
    changed = changed_settings(before["settings"], cfg)
    about = ", ".join(f"{name} was {shown(old, 30)}" for name, (old, _) in changed.items())
    if not about and before["source"] != cfg.source:
        about = "its config file has changed"
    if about and has_rows and not cfg.resume:
        return f"holds a run with different settings ({about}), which --resume=True would continue"
    return ""


@contextlib.contextmanager
def claimed_folder(cfg):
    """Lock out_dir for this block -> whether it holds a run to continue. BadInput if it holds
    something else, or another run is at work there."""
    # check before making anything there, then lock it
    folder = cfg.out_dir
    if reason := why_not_used(folder, cfg):
        raise BadInput(f"out_dir = {folder!r}: {reason}; choose another --out_dir")
    os.makedirs(folder, exist_ok=True)
    try:
        lock = FileLock(f"{folder}/{LOCK}", timeout=0).acquire()
    except Timeout:
        raise BadInput(f"out_dir = {folder!r}: is in use by another run: wait for it, or "
                       "choose another --out_dir") from None
    with lock:      # until the block ends, or the process
        # half a checkpoint that a killed process left would fill the disk
        for path in glob.glob(f"{glob.escape(folder)}/*.pt.*.tmp"):
            os.remove(path)

        # from the beginning, or from where it stopped?
        is_continued = bool(checkpoints(folder))
        if cfg.resume and not is_continued:
            print(f"{folder}: has no checkpoint, so the run starts from the beginning")
        yield is_continued
