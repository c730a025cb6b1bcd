"""
How many threads torch computes with on a CPU, and a run that has become slow.

The threads wait for each other at the end of every operation. Beside another busy process one of
them waits for a core, and all others wait for it: on two cores a step can take ten times as long
and more. A single thread only shares its core.
"""
import contextlib
import os
import statistics
import time

import torch

from run.files import read_json
from run.processes import rank_and_size

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CLEARLY = 1.25      # times as fast
ROUNDS = 3
SLOW = 3            # times the median
FEWEST = 5          # steps that have a median


@contextlib.contextmanager
def use_threads(cfg, device, had=None):
    """Within this block torch computes with as many threads as choose_threads says."""
    before = torch.get_num_threads()
    number = choose_threads(cfg, device, had)
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


def choose_threads(cfg, device, had=None):
    """cfg.threads, else what the environment says, else `had`, the number of the run that goes on,
    else all threads, or one where that is clearly faster now.

    Results depend on the number, so a quiet machine always gets all.
    """
    most = torch.get_num_threads()
    if cfg.threads:
        number = cfg.threads
    elif device.type != "cpu" or rank_and_size()[1] > 1 or any(v in os.environ for v in VARIABLES):
        number = most
    elif had:
        number = min(had, most)
    else:
        number = all_or_one(most)
    if device.type == "cpu" and had not in (None, number):
        print(f"note: this run had {had} threads until now, this is with {number}: its last digits "
              "will differ")
    return number


def all_or_one(most):
    """`most` threads, or 1 where that is clearly faster. Takes a tenth of a second on a quiet
    machine, where the first round already shows that all are faster."""
    if most == 1:
        return 1
    together = alone = 0.0
    for _ in range(ROUNDS):
        with_all = seconds_of_work(most)
        with_one = seconds_of_work(1)
        torch.set_num_threads(most)
        if with_all < with_one:
            break
        together += with_all
        alone += with_one
    else:
        if together > CLEARLY * alone:
            print(f"threads: 1, not {most}: another process is busy (a test takes {alone:.2f} s "
                  f"with one, {together:.2f} s with {most}); --threads={most} takes all")
            return 1
    print(f"threads: {most}")
    return most


def seconds_of_work(threads):
    """Time of operations about as large as those of a small policy."""
    torch.set_num_threads(threads)
    x = torch.full((384, 256), 0.01)
    up = torch.full((256, 1024), 0.01)
    down = torch.full((1024, 256), 0.01)
    (x @ up) @ down     # wakes the threads
    began = time.perf_counter()
    for _ in range(6):
        x = (x @ up).tanh() @ down
    return time.perf_counter() - began


def threads_of(folder):
    """The number of threads of the run in a folder; None where its config.json has none."""
    number = read_json(os.path.join(folder, "config.json"), missing={}).get("threads")
    return number if type(number) is int and number > 0 else None


class Pace:
    """Says once that steps have become slow, where fewer threads may help: so many in a row that
    each take SLOW times the median of those before."""

    def __init__(self, name, device, in_a_row=3):
        self.name = name
        self.in_a_row = in_a_row
        self.on = device.type == "cpu" and torch.get_num_threads() > 1
        self.times = []     # of the steps that were not slow
        self.slow = 0       # how many the last ones are

    def add(self, seconds):
        """Takes the time of one more step. True if something was printed."""
        if not self.on:
            return False
        usual = statistics.median(self.times) if len(self.times) >= FEWEST else seconds
        if seconds <= SLOW * usual:
            self.times = [*self.times[-99:], seconds]
            self.slow = 0
            return False
        self.slow += 1
        if self.slow == self.in_a_row:
            self.on = False
            print(f"note: {self.name} takes {seconds:.2f} s, {seconds / usual:.0f} times the "
                  "median so far. Is another process busy? Ctrl-C, which saves, then the same "
                  "command with --threads=1", flush=True)
            return True
        return False
