"""The command line: help, flags, exit codes."""
import contextlib
import io
import os
import re
import sys

from common.errors import BadInput, shown
from common.processes import init, rank_and_size, shutdown

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory")       # GPU, host


@contextlib.contextmanager
def exit_codes():
    """Around a command, its exit codes: 0 done, 1 stopped, 2 bad input (one line), 130 interrupted.
    All else is an error, with its traceback."""
    rank, _ = rank_and_size()       # before the processes part

    # a character that the terminal does not know ends no run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if rank == 0:       # all processes end alike
            print("interrupted", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as e:
        if not OUT_OF_MEMORY.search(str(e)):
            raise
        raise SystemExit(
            f"stopped: out of memory ({shown(e)}); lower micro_batch_size, decode_batch_size, "
            "max_completion_length or num_prompts; with influence mini_batch_size") from None


HELP = {"-h": "first", "--help": "first", "--help=all": "all", "--help=metrics": "metrics"}


def run_script(main, usage=None):
    """Call main(argv) as a command: see exit_codes.

    --help prints usage("first"), --help=all usage("all"), --help=metrics usage("metrics"), or the
    text at the top of main's file. A command that has a usage and is called without arguments
    prints usage() and starts nothing.
    """
    init()
    if rank_and_size()[0] > 0:
        sys.stdout = open(os.devnull, "w")
    with exit_codes(), shutdown():
        argv = sys.argv[1:]
        helps = [HELP[arg] for arg in argv if arg in HELP]
        if helps:
            print((usage(helps[0]) if usage else main.__globals__["__doc__"]).strip())
        elif usage and not argv:
            print(usage().strip())
            sys.exit(2)
        else:
            main(argv)


# by the type of a flag's default: what may be given, as a pattern and in words
FLAGS = {bool: ("True|False|", "True or False"), int: ("[1-9][0-9]{0,4}", "N, from 1 to 99999"),
         str: (".+", "...")}


def own_flags(argv, defaults):
    """Take a command's flags out of argv -> ({name: value}, the remaining arguments). The type of a
    default says what may be given: a bool is True or False, and True without a value; an int is a
    whole number from 1."""
    values = dict(defaults)
    remaining = []
    for arg in argv:
        name, _, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and name in defaults:
            kind = type(defaults[name])
            pattern, words = FLAGS[kind]
            if not re.fullmatch(pattern, value, re.DOTALL):
                raise BadInput(f"{arg}: must be --{name}={words}")
            values[name] = value != "False" if kind is bool else kind(value)
        else:
            remaining.append(arg)
    return values, remaining
