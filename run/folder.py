"""
The folder of a run. It is locked while the run lives, and no run is ever overwritten: the same
command continues a run that was interrupted, and any other needs a folder of its own.
"""
import contextlib
import glob
import os

from filelock import FileLock, Timeout

from config import read_run
from run.checkpoint import LOGS, SHAPE, changed_settings, newest_checkpoint, read_newest
from common.files import is_plain, read_text, remove
from common.script import BadInput, shown

LOCK = ".lock"


@contextlib.contextmanager
def claimed_folder(cfg):
    """Within this block out_dir is this process's -> (folder, whether a run in it is continued).
    BadInput where it holds something else. With --resume the run in it may have any settings."""
    folder = cfg.out_dir.rstrip("/") or "/"
    try:
        os.makedirs(cfg.cache_dir, exist_ok=True)
        check_folder(folder, cfg)       # before even a lock is made there
        os.makedirs(folder, exist_ok=True)
        lock = FileLock(f"{folder}/{LOCK}", timeout=0).acquire()
    except Timeout:
        raise BadInput(f"out_dir = {folder!r}: another run is at work there: wait for it, or "
                       "choose another --out_dir") from None
    except (OSError, UnicodeError) as e:
        raise BadInput(f"out_dir = {cfg.out_dir!r}, cache_dir = {cfg.cache_dir!r}: cannot be "
                       f"written ({getattr(e, 'strerror', e)})") from e
    with lock:      # until the block ends, or the process
        check_folder(folder, cfg)       # another run may have ended there meanwhile
        for path in glob.glob(f"{glob.escape(folder)}/ckpt_new.tmp*"):
            remove(path)        # of a process that was killed while it wrote
        is_continued = newest_checkpoint(folder) is not None
        if is_continued and not cfg.resume:
            print(f"{folder}: continues the interrupted run of these settings")
        if cfg.resume and not is_continued:
            print(f"{folder}: has no checkpoint, so the run starts from the beginning")
        yield folder, is_continued


def check_folder(folder, cfg):
    """BadInput where a run with these settings may not have the folder, and what works instead."""
    for name in (LOCK, *LOGS):
        if not is_plain(f"{folder}/{name}"):
            raise BadInput(f"{folder}/{name}: is a link or no plain file: remove it, since a run "
                           "would write there")
    if is_free(folder, cfg):
        return
    holds = f"out_dir = {folder!r}: holds"
    has_checkpoint = newest_checkpoint(folder)
    if not has_checkpoint and not os.path.exists(f"{folder}/config.json"):
        raise BadInput(f"{holds} other files: choose another --out_dir")
    metrics = f"{folder}/metrics.jsonl"
    if not has_checkpoint and os.path.exists(metrics) and os.path.getsize(metrics) > 0:
        raise BadInput(f"{holds} a run without a checkpoint: choose another --out_dir")
    path, content = read_newest(folder, mmap=True) if has_checkpoint else ("", read_run(folder))
    changed = changed_settings(content["settings"], cfg)
    misfits = {name: values for name, values in changed.items() if name in SHAPE}
    if has_checkpoint and cfg.resume:
        if misfits:
            raise BadInput(f"{path}: does not fit these settings: {in_words(misfits)}; set it so, "
                           "or choose another --out_dir")
        return
    if changed or not same_text(folder, cfg):
        about = in_words(changed) or "its config file has another text"
        may_resume = has_checkpoint and not misfits
        resume = ", or continue that run with --resume=True" if may_resume else ""
        raise BadInput(f"{holds} a run of other settings ({about}): choose another --out_dir"
                       f"{resume}")
    if has_checkpoint and content["iteration"] >= cfg.max_iters:
        raise BadInput(f"{holds} a run that is complete: choose another --out_dir, or make it "
                       "longer by --resume=True and a larger --max_iters")


def same_text(folder, cfg):
    """True if the config files have the text that they had for the run in this folder."""
    config = f"{folder}/config.py"
    source = read_text(config) if os.path.exists(config) else None
    return source == cfg.source


def in_words(changed):
    """The first few settings that changed, with their values."""
    words = [f"{name} was {shown(old, 30)}, not {shown(new, 30)}"
             for name, (old, new) in changed.items()]
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


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
