"""What every command needs: help, one-line errors, exit codes, seeds."""
import contextlib
import errno
import hashlib
import inspect
import io
import os
import re
import socket
import sys

import torch

from common.processes import join, leaving, rank_and_size


class BadInput(ValueError):
    """An error that the user can fix. The message is one line: name, value and fix."""

    def __init__(self, message):
        line = " ".join(message.split())
        super().__init__(line if len(line) <= 300 else f"{line[:210]} ... {line[-85:]}")


def shown(value, most=80):
    """repr of what a user gave, on one line and cut after `most` characters."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:   # a number of thousands of digits, or an object's own __repr__
        text = f"<{type(value).__name__}, which cannot be printed>"
    return text if len(text) <= most else text[:most] + "..."


def numbers(what, returned, *shapes, why=""):
    """What a user's function returned -> a float64 tensor of one of these shapes, all of it finite.
    BadInput for anything else. why: words on what may be the cause."""
    try:
        x = torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        x = torch.tensor(torch.nan)
    if x.shape not in shapes or not x.isfinite().all():
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise BadInput(
            f"{what} returned {shown(returned)}: must be finite numbers of shape {wanted}" + why)
    return x


def select_arguments(name, function, offered):
    """Those of offered {parameter: value} that a function of the config file names; all of them for
    **kwargs."""
    # by name, so that a misspelled one is refused
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wrong = [p.name for p in by_name if p.name not in offered and p.default is p.empty]
    wrong += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if wrong:
        raise BadInput(f"{name} asks for {wrong[0]!r}: it may ask for "
                       f"{', '.join(map(str, offered))}, by these names")
    names = {p.name for p in by_name}
    return {key: x for key, x in offered.items() if takes_all or key in names}


@contextlib.contextmanager
def optional(packages):
    """Around the import of an optional package: without it, one line says what to install."""
    try:
        yield
    except ImportError as e:
        raise BadInput(f"{e}; this needs an optional package: pip install {packages}") from e


@contextlib.contextmanager
def exit_codes():
    """Around a command, its exit codes: 0 done, 1 stopped, 2 bad input (one line), 130 interrupted.
    Under torchrun the last line names the process and its machine."""
    rank, size = rank_and_size()
    who = f"rank {rank} of {size} on {socket.gethostname()}: " if size > 1 else ""

    # output that is closed, or cannot write every character, ends no run
    if sys.stdout is None:      # closed, as by `>&-`
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):    # it may not know every character
        sys.stdout.reconfigure(errors="backslashreplace")

    # each kind of end has its exit code and its one line
    try:
        yield
        sys.stdout.flush()
    except BadInput as e:
        print(f"error: {who}{e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as e:
        if rank == 0:  # the others end alike
            print(f"interrupted: {who}{str(e) or 'by Ctrl-C'}", file=sys.stderr)
        sys.exit(130)
    except SystemExit as e:
        raise SystemExit(f"{who}{e.code}" if isinstance(e.code, str) else e.code) from None
    except OSError as e:    # nobody reads the output any more, a disk is full
        if e.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # for what is not printed yet
        raise SystemExit(f"{who}stopped: {e}") from None
    except (MemoryError, RuntimeError) as e:
        said = "out of memory" in str(e) or "can't allocate memory" in str(e)       # GPU, host
        if not said and not isinstance(e, MemoryError):
            raise
        raise SystemExit(
            f"{who}stopped: out of memory ({shown(e)}); lower micro_batch_size, decode_batch_size, "
            "max_completion_length or num_prompts; with influence mini_batch_size") from None


def call(main, argv, usage):
    asked = {"-h": "first", "--help": "first", "--help=all": "all", "--help=metrics": "metrics"}
    if helps := [arg for arg in argv if arg in asked]:
        text = usage(asked[helps[0]]) if usage else main.__globals__["__doc__"]
        print(text.strip())
    elif usage and not argv:
        print(usage().strip())
        sys.exit(2)
    else:
        main(argv)


def run_script(main, usage=None):
    """Call main(argv) as a command: see exit_codes.

    --help prints usage("first"), --help=all usage("all"), --help=metrics usage("metrics"), or the
    text at the top of main's file. A command that has a usage and is called without arguments
    prints usage() and starts nothing.
    """
    join()
    if rank_and_size()[0] > 0:
        sys.stdout = open(os.devnull, "w")
    with exit_codes(), leaving():
        call(main, sys.argv[1:], usage)


WANTED = {bool: "True or False", int: "N, from 1 to 99999", str: "..."}
PATTERNS = {bool: "True|False|", int: "[1-9][0-9]{0,4}", str: ".+"}


def own_flags(argv, defaults):
    """Take a command's flags out of argv -> ({name: value}, all other arguments). The type of a
    default says what may be given: a bool is True or False, and True without a value; an int is a
    whole number from 1."""
    values = dict(defaults)
    others = []
    for arg in argv:
        name, _, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and name in defaults:
            kind = type(defaults[name])
            if not re.fullmatch(PATTERNS[kind], value, re.DOTALL):
                raise BadInput(f"{arg}: must be --{name}={WANTED[kind]}")
            values[name] = value != "False" if kind is bool else kind(value)
        else:
            others.append(arg)
    return values, others


def seed_for(*purpose):
    """A seed for one purpose. Every random draw depends on the settings and the iteration alone,
    never on what was drawn before it."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def key_of(made_of):
    """A short hash of the inputs, for a cache file's name."""
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]


def hash_of(model):
    """Short hash of all weights; the same where they are stored in bfloat16."""
    h = hashlib.sha256()
    for x in model.state_dict().values():
        x = x.float() if x.dtype == torch.bfloat16 else x
        h.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]
