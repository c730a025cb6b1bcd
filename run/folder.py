"""
Which folder a run gets. It is locked while the run lives, and no run is ever overwritten: the same
command goes on with a run that was interrupted, any other gets a folder of its own.
"""
import contextlib
import errno
import fcntl
import json
import os
import re
import socket

from config import with_speed
from run.content import (LOGS, check_going_on, is_first_evaluation, iterations_in,
                         newest_checkpoint)
from run.files import read_json
from run.script import BadInput

LOCK = ".lock"
# what a process that was killed while it wrote leaves behind
LEFTOVER = re.compile(r"(ckpt_new\.pt|config\.json)(\.\d+)?\.tmp|ckpt_new\.pt")
# settings that may differ in the same run (threads change last digits, which is said)
FREE = ("out_dir", "log_micro", "wandb_project", "threads")


@contextlib.contextmanager
def claimed_folder(cfg):
    """Within this block the folder of the run is this process's -> (folder, whether a run in it
    goes on). It is made if need be: out_dir, or out_dir-2, -3, ... where another run is.

    BadInput for what cannot be written or gone on with, and where a live run has the folder that
    --resume=True asks for.
    """
    wanted = cfg.out_dir.rstrip("/") or "/"
    try:
        folder, state, lock = resumed(wanted, cfg) if cfg.resume else first_fit(wanted, cfg)
    except OSError as e:
        raise BadInput(f"out_dir = {wanted!r}: cannot be written ({e.strerror})") from e
    try:
        make_writable("cache_dir", cfg.cache_dir)
        if state == "saved":
            check_going_on(folder, cfg)
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if state != "free" and LEFTOVER.fullmatch(name) and os.path.isfile(path):
                os.remove(path)
        say_which(wanted, folder, state, cfg)
        yield folder, cfg.resume or state in ("begun", "saved")
    finally:
        unlock(folder, lock)


def first_fit(wanted, cfg):
    """(folder, state, lock) of the first of out_dir, out_dir-2, ... that is free, or holds a run of
    these settings that was interrupted."""
    number = 1
    while True:
        folder = wanted if number == 1 else f"{wanted}-{number}"
        state = state_of(folder, cfg)
        if state != "other":
            os.makedirs(folder, exist_ok=True)
            lock = lock_folder(folder)
            if lock and state_of(folder, cfg) == state:
                return folder, state, lock
            if lock:        # another run came and went in between: look again
                unlock(folder, lock)
                continue
            print(f"{folder}: in use by {owner(folder)}")
        number += 1


def resumed(folder, cfg):
    """(folder, state, lock) for --resume=True: settings may differ, but it must hold a run."""
    state = "saved"
    if not newest_checkpoint(folder):
        state = "free"
        names = own_files(folder)
        rows = logs_with_rows(folder)
        if rows:
            raise BadInput(f"{folder}/{rows[0]} has rows but there is no ckpt.pt to go on from: "
                           "choose another out_dir")
        if not is_free(folder) and not settings_in(folder):
            raise BadInput(f"out_dir = {folder!r}: holds {names[0]} and no run to go on with: "
                           "choose another out_dir")
    os.makedirs(folder, exist_ok=True)
    lock = lock_folder(folder)
    if not lock:
        raise BadInput(f"out_dir = {folder!r}: in use by {owner(folder)}; --resume=True goes on "
                       "when that has ended")
    return folder, state, lock


def say_which(wanted, folder, state, cfg):
    if folder != wanted and not os.path.exists(os.path.join(wanted, LOCK)):     # which is said then
        held = "other files"
        if newest_checkpoint(wanted) or settings_in(wanted):
            held = "an earlier run, which --resume=True goes on with"
        print(f"{wanted} holds {held}; this one goes to {folder}")
    if state == "saved" and not cfg.resume:
        print(f"{folder}: a run of these settings was interrupted here, it goes on")
    if state == "begun":
        print(f"{folder}: a run of these settings was interrupted before its first checkpoint")


# ------------------------------------------------------------------------------------------------
# what a folder holds


def state_of(folder, cfg):
    """What a folder is to this run: "free"; "saved" or "begun", a run of the same settings that
    has not ended and has a checkpoint or none yet; or "other"."""
    if is_free(folder):
        return "free"
    if not same_settings(folder, cfg):
        return "other"
    if newest_checkpoint(folder):
        return "saved" if iterations_in(folder) < cfg.max_iters else "other"
    return "other" if logs_with_rows(folder) else "begun"


def logs_with_rows(folder):
    """Logs that are not to be started anew: links, and all that hold more than the evaluation that
    a run writes before its first checkpoint."""
    names = [name for name in LOGS if size_of(folder, name)]
    path = os.path.join(folder, "eval.jsonl")
    if "eval.jsonl" in names and not os.path.islink(path) and is_first_evaluation(path):
        names.remove("eval.jsonl")
    return names


def own_files(folder):
    """Names in a folder, sorted, without a lock and leftovers; [] where there is no folder."""
    if not os.path.isdir(folder):
        return []
    names = sorted(os.listdir(folder))
    return [name for name in names if name != LOCK and not LEFTOVER.fullmatch(name)]


def is_free(folder):
    """True where nothing is lost: no folder, or at most empty logs in it."""
    return all(name in LOGS and not size_of(folder, name) for name in own_files(folder))


def size_of(folder, name):
    """Bytes of a file; 1 for what is no file, 0 for what is not there."""
    path = os.path.join(folder, name)
    if os.path.islink(path) or os.path.isdir(path):
        return 1
    return os.path.getsize(path) if os.path.exists(path) else 0


def settings_in(folder):
    """(settings, text of the config file) in config.json; None where no run wrote one."""
    try:
        about = read_json(os.path.join(folder, "config.json"))
    except BadInput:
        return None
    if not isinstance(about.get("settings"), dict):
        return None
    return with_speed(about["settings"]), about.get("source")


def same_settings(folder, cfg):
    """True if config.json is of these settings and of this text of the config file."""
    found = settings_in(folder)
    if found is None:
        return False
    before = type(cfg)().public() | found[0]
    now = cfg.public()
    for name in FREE:
        before.pop(name, None)
        now.pop(name)
    as_json = [json.dumps(settings, sort_keys=True) for settings in (before, now)]
    return as_json[0] == as_json[1] and found[1] == cfg.source


# ------------------------------------------------------------------------------------------------
# locks, and whether a folder can be written


def lock_folder(folder):
    """Locks a folder until the file that is returned is closed or the process dies; None if
    another process has it."""
    path = os.path.join(folder, LOCK)
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        lock = os.fdopen(number, "r+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            print(f"note: {folder} is on a file system without locks: start no second run there")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(number)):
                break
        lock.close()        # its last owner has just removed it
    if lock.read(7) not in ("", "process"):
        lock.close()
        raise BadInput(f"{path}: is no lock of a run: choose another out_dir")
    lock.seek(0)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def unlock(folder, lock):
    with contextlib.suppress(OSError):
        os.remove(os.path.join(folder, LOCK))
    lock.close()


def owner(folder):
    """Who has locked a folder, in words."""
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, LOCK), encoding="utf-8") as f:
            return f.read(200) or "another process"
    return "another process"


def make_writable(name, folder):
    try:
        os.makedirs(folder, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as e:
        raise BadInput(f"{name} = {folder!r}: cannot be written ({e.strerror})") from e
    if not writable:
        raise BadInput(f"{name} = {folder!r}: cannot be written (Permission denied)")
