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


def spare_children(signals, is_on):
    """While is_on is not empty, processes that are forked do not inherit what these signals do
    here: SIGTERM kills them, since multiprocessing ends its workers by it and waits for them, and
    what a terminal sends to the whole command is left to this process."""
    # blocked around the fork: what comes before a child has put its own in place would be lost
    def change(how):
        if is_on:
            signal.pthread_sigmask(how, signals)

    def in_child():
        for s in signals if is_on else ():
            signal.signal(s, signal.SIG_DFL if s == signal.SIGTERM else lambda *_: None)
        change(signal.SIG_UNBLOCK)

    if hasattr(os, "register_at_fork"):     # not on Windows, which cannot fork
        os.register_at_fork(
            before=lambda: change(signal.SIG_BLOCK), after_in_child=in_child,
            after_in_parent=lambda: change(signal.SIG_UNBLOCK))


@contextlib.contextmanager
def interrupts():
    """Within this block SIGINT, SIGTERM and SIGHUP do not kill. They make the yielded function
    return True, so that work can be saved first. A second signal ends the block at once."""
    seen = []
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def handler(number, frame):
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
    is_on = [True]
    spare_children(previous, is_on)
    try:
        yield lambda: bool(seen)
    finally:
        is_on.clear()
        for s, old_handler in previous.items():
            signal.signal(s, old_handler)
