"""
The folder of a run. It is locked while the run lives, and no run is ever overwritten: the same
command continues a run that was interrupted, and any other needs a folder of its own.
"""
import contextlib
import glob
import os

from filelock import FileLock, Timeout

from common.files import flush, is_plain
from common.script import BadInput, shown
from run.checkpoint import LOGS, changed_settings, checkpoints, iterations_of
from run.settings import read_run, settings_that_are

LOCK = ".lock"
# files that are written under a temporary name first
WRITTEN = ("ckpt_*.pt", "base.pt", "config.json", "config.py")


def in_words(changed):
    """What the settings that changed were before."""
    return ", ".join(f"{name} was {shown(old, 30)}" for name, (old, _) in changed.items())


def why_not_continued(folder, cfg):
    """Why what a folder holds is not continued; "" if it is."""
    if not os.path.exists(f"{folder}/config.json"):
        return "holds other files"

    # is it the same run, and how far has it come?
    before = read_run(folder)
    changed = changed_settings(before["settings"], cfg)
    fixed = {name: changed[name] for name in settings_that_are("fixed") if name in changed}
    done = [iterations_of(path) for path in checkpoints(folder)]

    # rows without a checkpoint: it cannot be continued, and its logs would be overwritten
    metrics = f"{folder}/metrics.jsonl"
    if not done and os.path.exists(metrics) and os.path.getsize(metrics) > 0:
        return "holds a run without a checkpoint"

    # with --resume=True settings may differ, as long as the weights fit
    if done and cfg.resume:
        return f"holds a run of another policy ({in_words(fixed)})" if fixed else ""

    # else it must be the same command, of a run that has something left to do
    about = in_words(changed)
    if not about and before["source"] != cfg.source:
        about = "its config file had another text"
    if about:
        way_out = ", which --resume=True would continue" if done and not fixed else ""
        return f"holds a run of other settings ({about}){way_out}"
    if done and done[-1] >= cfg.max_iters and before.get("is_printed"):
        return ("holds a run that is complete, which --resume=True with more --max_iters would "
                "continue")
    return ""


def how_plain(path):
    """A command that makes a link a file of its own, or moves away what is no file. Neither loses
    what a user made."""
    if os.path.isfile(path):
        return "`cp F F.2 && mv F.2 F` makes it a file of its own"
    return "`mv F F.2` moves it away"


def is_free(folder):
    """Whether nothing would be lost: no folder, or at most a lock, unfinished files and empty
    logs."""
    for name in os.listdir(folder) if os.path.lexists(folder) else []:
        is_empty_log = name in LOGS and os.path.getsize(f"{folder}/{name}") == 0
        if not (name == LOCK or name.endswith(".tmp") or is_empty_log):
            return False
    return True


def check_folder(folder, cfg):
    """BadInput for a folder with anything but a run that is continued with these settings, or with
    links where a run would write."""
    # a link may lead to another run's log
    names = [name for name in (LOCK, *LOGS) if not is_plain(f"{folder}/{name}")]
    if names:
        first = f"{folder}/{names[0]}"
        raise BadInput(f"{first}: is a link or no plain file, and a run would write there. In that "
                       f"folder, for each F of {', '.join(names)}: {how_plain(first)}")

    # whose is what the folder holds?
    if is_free(folder):
        return
    try:
        reason = why_not_continued(folder, cfg)
    except BadInput as e:       # its config.json cannot be read
        reason = str(e)
    if reason:
        raise BadInput(f"out_dir = {folder!r}: {reason}; choose another --out_dir")


@contextlib.contextmanager
def claimed_folder(cfg):
    """Within this block out_dir is this process's -> (folder, whether a run in it is continued).
    BadInput where it holds something else."""
    folder = cfg.out_dir.rstrip("/") or "/"

    # look before anything is made there, then lock it
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
        check_folder(folder, cfg)       # which another run may have used meanwhile

        # can a power failure lose what is saved here?
        if not flush(folder):
            print(f"note: {folder}: this disk cannot be waited for (fsync of a folder), so a power "
                  "failure may lose what was saved last")
        for name in WRITTEN:        # by a process that was killed while it wrote
            for path in glob.glob(f"{glob.escape(folder)}/{name}.[0-9]*.tmp"):
                os.remove(path)

        # from the beginning, or from where it stopped?
        is_continued = bool(checkpoints(folder))
        if cfg.resume and not is_continued:
            print(f"{folder}: has no checkpoint, so the run starts from the beginning")
        yield folder, is_continued
