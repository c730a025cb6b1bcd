"""What every script here needs: one-line errors, exit codes, signals, seeds."""
import contextlib
import hashlib
import os
import signal
import socket
import sys

import torch
import torch.distributed as dist

from run.processes import world


class BadInput(ValueError):
    """Something the user can mend. The message is one line: the name, the value, the way out. Scripts exit with 2."""


@contextlib.contextmanager
def optional(packages):
    """Around the import of an optional package: without it, one line says what to install."""
    try:
        yield
    except ImportError as e:
        raise BadInput(f"{e}; this needs an optional package: pip install {packages}") from e


def derive(*what):
    """A seed for one purpose: every random draw depends on settings and iteration alone, never on what was drawn before."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "big")


def hash_of(model):
    """Short hash of all weights."""
    h = hashlib.sha256()
    for x in model.state_dict().values():
        h.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


@contextlib.contextmanager
def interrupts():
    """Within this block SIGINT and SIGTERM do not kill: they make the yielded function return True, so that work can save."""
    seen = []

    def handler(number, frame):
        if seen:  # the second one is in earnest
            raise KeyboardInterrupt("at once; what was saved last stands")
        seen.append(number)

    old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for s, previous in old.items():
            signal.signal(s, previous)


def run_script(main):
    """main(argv) with the exit codes of every script here: 0 done, 1 stopped, 2 bad input (one line), 130 interrupted.
    Under torchrun a process names itself and its machine in the line it ends with."""
    if dist.is_available() and dist.is_torchelastic_launched():
        dist.init_process_group()  # gloo for what is on the CPU, nccl for what is on GPUs
    rank, processes = world()
    who = f"rank {rank} of {processes} on {socket.gethostname()}: " if processes > 1 else ""
    if rank:
        sys.stdout = open(os.devnull, "w")
    try:
        main(sys.argv[1:])
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    except BadInput as e:
        print(f"error: {who}{e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as e:
        if not rank:  # all end alike
            print(f"interrupted: {who}{e}", file=sys.stderr)
        sys.exit(130)
    except SystemExit as e:
        raise SystemExit(f"{who}{e.code}" if isinstance(e.code, str) else e.code) from None
