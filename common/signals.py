"""A signal asks a run to finish its iteration and save; a second one ends it."""
import contextlib
import os
import signal

from common.processes import rank_and_size


def heard_signals():
    """The signals that ask a run to save and leave. SIGHUP, of a lost connection, does not exist on
    Windows and is ignored under nohup."""
    heard = [signal.SIGINT, signal.SIGTERM]
    lost = getattr(signal, "SIGHUP", None)
    if lost and signal.getsignal(lost) != signal.SIG_IGN:
        heard.append(lost)
    return heard


@contextlib.contextmanager
def interrupts():
    """Within this block SIGINT, SIGTERM and SIGHUP do not kill. They make the yielded function
    return True, so that work can be saved first. A second signal ends the block at once."""
    seen = []
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    process = os.getpid()

    def handler(number, frame):
        if os.getpid() != process:      # a forked worker, as of multiprocessing.Pool
            if number == signal.SIGTERM:    # by which the pool ends it
                os._exit(1)
            return      # a terminal's Ctrl-C, which this process hears, too
        if seen:
            raise KeyboardInterrupt("at once; what was saved last is kept")
        seen.append(number)
        for fd in terminals:
            if not os.isatty(fd):       # the connection is lost: print to nobody, and save
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        if rank_and_size()[0] == 0:     # os.write: print could be in the middle of another line
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted: finishing this iteration and saving; press Ctrl-C "
                            b"again to quit now\n")

    # in place of what a signal does otherwise, until the block ends
    previous = {s: signal.signal(s, handler) for s in heard_signals()}
    try:
        yield lambda: bool(seen)
    finally:
        for s, old_handler in previous.items():
            signal.signal(s, old_handler)
