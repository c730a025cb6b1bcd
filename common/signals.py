"""A signal asks a run to finish its iteration and save; a second one ends it."""
import contextlib
import os
import signal

from common.processes import rank_and_size


def spare_children(handler):
    """SIGTERM ends a forked process, also where it calls this handler here: multiprocessing ends
    its workers by it, and waits for them."""
    # blocked around the fork: one that comes before a child is ready for it would be lost
    def mask(how):
        signal.pthread_sigmask(how, [signal.SIGTERM])

    def in_child():
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mask(signal.SIG_UNBLOCK)

    if hasattr(os, "register_at_fork"):     # not on Windows, which cannot fork
        os.register_at_fork(before=lambda: mask(signal.SIG_BLOCK), after_in_child=in_child,
                            after_in_parent=lambda: mask(signal.SIG_UNBLOCK))


@contextlib.contextmanager
def interrupts():
    """Within this block the first SIGINT (Ctrl-C), SIGTERM or SIGHUP (of a lost connection) only
    makes the yielded function return True, so that work can be saved first. A second one is a
    KeyboardInterrupt."""
    seen = []
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]
    this_process = os.getpid()
    heard = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)        # not on Windows, and ignored under nohup
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:
        heard.append(hangup)

    def handler(number, frame):
        if os.getpid() != this_process:     # Ctrl-C reaches what a reward has forked, too
            return
        for fd in terminals:
            if not os.isatty(fd):       # the connection is lost: print to nobody, and save
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        if seen and number == hangup:   # a shell may send it twice
            return
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if rank_and_size()[0] == 0:     # os.write: print could be in the middle of another line
            with contextlib.suppress(OSError):      # nobody reads it any more
                os.write(2, b"interrupted: finishing this iteration and saving; press Ctrl-C "
                            b"again to quit now\n")

    # in place of what a signal does otherwise, until the block ends
    spare_children(handler)
    previous = {s: signal.signal(s, handler) for s in heard}
    try:
        yield lambda: bool(seen)
    finally:
        for s, old_handler in previous.items():
            signal.signal(s, old_handler)
