"""A signal asks a run to finish its iteration and save; a second one ends it."""
import contextlib
import os
import signal

from common.processes import rank_and_size


@contextlib.contextmanager
def interrupts():
    """Within this block the first SIGINT (Ctrl-C) or SIGTERM only makes the yielded function return
    True, so that work can be saved first. A second one is a KeyboardInterrupt."""
    seen = []
    this_process = os.getpid()

    def handler(number, frame):
        # a worker that a reward has forked is ended by SIGTERM, as multiprocessing does; Ctrl-C,
        # which it hears too, is for this process to answer
        if os.getpid() != this_process:
            if number == signal.SIGTERM:
                os._exit(1)
            return
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if rank_and_size()[0] == 0:     # os.write: print could be in the middle of another line
            os.write(2, b"interrupted: finishing this iteration and saving; press Ctrl-C again to "
                        b"quit now\n")

    # in place of what a signal does otherwise, until the block ends
    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for s, old_handler in previous.items():
            signal.signal(s, old_handler)
