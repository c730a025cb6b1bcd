"""Counts what a GPU would be waited for, on a machine that has none."""
import collections
import os
import sys

import torch
from torch.overrides import TorchFunctionMode

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__",
         "nonzero", "argwhere", "masked_select", "unique", "bincount", "equal", "allclose",
         "__contains__"}


class Waits(TorchFunctionMode):
    """Within this block counts, by source line, what reads a tensor or has a size that depends on
    its values: .total, .lines. It counts tensors that live on the CPU anyway, too; it does not see
    copies to the device."""

    def __init__(self):
        super().__init__()
        self.lines = collections.Counter()

    @property
    def total(self):
        return sum(self.lines.values())

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READS or reads_by_mask(name, args):
            self.lines[f"{line_of_project()}: {name}"] += 1
        return function(*args, **(kwargs or {}))


def reads_by_mask(name, args):
    """True for x[mask], and for x[mask] = y unless y is one number."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    by_mask = any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
    if name == "__setitem__" and by_mask:
        return isinstance(args[2], torch.Tensor) and args[2].dim() > 0
    return by_mask


def line_of_project():
    """file:line of the innermost frame of the project's own code."""
    frame = sys._getframe(2)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and not path.startswith(os.path.join(ROOT, "tests")):
            return f"{os.path.relpath(path, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
