"""
The folder of a run. It is locked while the run lives, and no run is ever overwritten: the same
command continues a run that was interrupted, and any other needs a folder of its own.
"""
import contextlib
import glob
import os

from filelock import FileLock, Timeout

from config import read_run
from run.checkpoint import (
    LOGS, SHAPE, changed_settings, check_fits_run, in_words, newest_checkpoint, read_newest,
    source_of)
from common.files import is_plain
from common.script import BadInput

LOCK = ".lock"
FIXED = ("policy", *SHAPE)      # settings that no --resume can change


@contextlib.contextmanager
def claimed_folder(cfg):
    """Within this block out_dir is this process's -> (folder, whether a run in it is continued).
    BadInput where it holds something else. With --resume the run in it may have any settings."""
    folder = cfg.out_dir.rstrip("/") or "/"
    try:
        os.makedirs(cfg.cache_dir, exist_ok=True)
        check_files(folder, cfg)        # before even a lock is made there
        os.makedirs(folder, exist_ok=True)
        lock = FileLock(f"{folder}/{LOCK}", timeout=0).acquire()
    except Timeout:
        raise BadInput(f"out_dir = {folder!r}: another run is at work there: wait for it, or "
                       "choose another --out_dir") from None
    except (OSError, UnicodeError) as e:
        raise BadInput(f"out_dir = {cfg.out_dir!r}, cache_dir = {cfg.cache_dir!r}: cannot be "
                       f"written ({e})") from e
    with lock:      # until the block ends, or the process
        check_run(folder, cfg)
        for path in glob.glob(f"{glob.escape(folder)}/ckpt_new.tmp*"):
            os.remove(path)     # of a process that was killed while it wrote
        is_continued = newest_checkpoint(folder) is not None
        if is_continued and not cfg.resume:
            print(f"{folder}: continues the interrupted run of these settings")
        if cfg.resume and not is_continued:
            print(f"{folder}: has no checkpoint, so the run starts from the beginning")
        yield folder, is_continued


def check_files(folder, cfg):
    """BadInput for a folder that is not a run's, or has links where a run would write."""
    for name in (LOCK, *LOGS):
        if not is_plain(f"{folder}/{name}"):
            raise BadInput(f"{folder}/{name}: is a link or no plain file: remove it, since a run "
                           "would write there")
    has_run = newest_checkpoint(folder) or os.path.exists(f"{folder}/config.json")
    if not has_run and not is_free(folder, cfg):
        raise BadInput(f"out_dir = {folder!r}: holds other files; choose another --out_dir")


def check_run(folder, cfg):
    """BadInput for a folder with a run that is not continued with these settings."""
    if is_free(folder, cfg):
        return
    try:
        reason = why_not_continued(folder, cfg)
    except BadInput as e:
        raise BadInput(f"{e}; or choose another --out_dir") from e
    if reason:
        raise BadInput(f"out_dir = {folder!r}: holds {reason}; choose another --out_dir")


def why_not_continued(folder, cfg):
    """Why a run is not continued; "" if it is."""
    if not newest_checkpoint(folder):
        metrics = f"{folder}/metrics.jsonl"
        if os.path.exists(metrics) and os.path.getsize(metrics) > 0:
            return "a run without a checkpoint"
        return other_settings(read_run(folder), folder, cfg)
    path, content = read_newest(folder, mmap=True)
    if cfg.resume:
        check_fits_run(path, content, cfg, FIXED)
        return ""
    reason = other_settings(content, folder, cfg)
    if reason and not changed_settings(content["settings"], cfg).keys() & set(FIXED):
        return f"{reason}, which --resume=True would continue"
    if not reason and content["iteration"] >= cfg.max_iters:
        return "a run that is complete, which --resume=True with more --max_iters would continue"
    return reason


def other_settings(run, folder, cfg):
    """What differs in the settings of a run; "" if nothing does."""
    about = in_words(changed_settings(run["settings"], cfg))
    if not about and not same_text(folder, cfg):
        about = "its config file had another text"
    return f"a run of other settings ({about})" if about else ""


def same_text(folder, cfg):
    """True if the config files have the text that they had for the run in this folder."""
    return source_of(folder) == cfg.source


def is_free(folder, cfg):
    """True where nothing would be lost: no folder, or at most a lock, unfinished files, empty logs,
    and this config file's text, which a run writes first."""
    for name in os.listdir(folder) if os.path.lexists(folder) else []:
        path = f"{folder}/{name}"
        is_empty_log = name in LOGS and os.path.getsize(path) == 0
        is_same_text = name == "config.py" and same_text(folder, cfg)
        if not (name == LOCK or name.endswith(".tmp") or is_empty_log or is_same_text):
            return False
    return True
