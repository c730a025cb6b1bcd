"""Counts the bytes of tensors that are alive, what autograd keeps included."""
import collections
import functools
import os
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PHASES = {  # by the function of the project that runs
    "sample_groups": "generate", "sample_evaluation": "generate", "score_rows": "judge",
    "reference_logprobs": "reference", "perplexity_under": "perplexity",
    "keep_helpful": "influence", "update": "update", "save_checkpoint": "save"}
# whose kernels hold as much as their input for a moment, which no operation shows
COPIES_INPUT = {"logsumexp"}


class Peak(TorchDispatchMode):
    """Within this block .most has {phase: the most bytes alive at a time} on a type of device, and
    .lines {line of the project: bytes of what it made} of the largest moment.

    A storage counts once, however many views it has, from the first operation that gives or takes
    it until it is freed. Tensors that no operation touches within the block are not counted.
    """

    def __init__(self, device="cpu"):
        super().__init__()
        self.device = device
        self.alive = {}         # {address of a storage: (bytes, line that made it)}
        self.total = 0
        self.most = collections.Counter()
        self.lines = collections.Counter()
        self.phase = "start"

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        new = sum([self.see(x) for x in (*given, *made)])
        within = given[0].nbytes if op.overloadpacket.__name__ in COPIES_INPUT else 0
        if new or within:
            self.look(within)
        return out

    def see(self, x):
        """True if the storage of x is new."""
        if x.device.type != self.device:
            return False
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        self.alive[key] = storage.nbytes(), line_of_project()
        self.total += storage.nbytes()
        weakref.finalize(storage, self.forget, key)
        return True

    def forget(self, key):
        self.total -= self.alive.pop(key)[0]

    def look(self, within):
        self.phase = phase_of_project() or self.phase
        total = self.total + within
        if total > 1.001 * max(self.most.values(), default=0):
            self.lines = collections.Counter({"within a kernel": within})
            for size, line in self.alive.values():
                self.lines[line] += size
        self.most[self.phase] = max(self.most[self.phase], total)


def frames_of_project():
    frame = sys._getframe(2)
    while frame:
        if is_of_project(frame.f_code):
            yield frame
        frame = frame.f_back


@functools.cache
def is_of_project(code):
    path = code.co_filename
    return path.startswith(ROOT) and not path.startswith(os.path.join(ROOT, "tests"))


def line_of_project():
    """file:line of the innermost frame of the project's own code."""
    for frame in frames_of_project():
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return "elsewhere"


def phase_of_project():
    names = (frame.f_code.co_name for frame in frames_of_project())
    return next((PHASES[name] for name in names if name in PHASES), None)
