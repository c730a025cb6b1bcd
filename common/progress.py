"""Print the progress of a long task."""
import time


class Progress:
    """How far a task has come and how long the rest will take, printed at most every ten seconds.
    start: how much of the total was done before."""

    EVERY = 10

    def __init__(self, label, unit, total, start=0):
        self.label = label
        self.unit = unit
        self.total = total
        self.start = start
        self.began = time.monotonic()
        self.last = self.began

    def is_due(self):
        return time.monotonic() - self.last > self.EVERY

    def show(self, done, about=""):
        self.last = time.monotonic()
        left = (self.last - self.began) / (done - self.start) * (self.total - done)
        print(f"{self.label}: {self.unit} {done}/{self.total}, {about}{left:.0f} s left",
              flush=True)
