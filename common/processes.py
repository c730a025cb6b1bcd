"""
How the processes of a run share its work. The functions here serve a single process. Under torchrun
the functions of extras/torchrun replace them, and each process has a share of the rows.
"""
import contextlib

import torch.distributed as dist


def rank_and_size():
    """(number of this process, number of processes). Rank 0 alone prints and writes."""
    return 0, 1


def shard(n, group=1):
    """The slice of n rows that this process handles: whole groups."""
    return slice(0, n)


def all_gather(rows):
    """The rows of all processes, a list or a tensor (n, ...), joined in rank order."""
    return rows


def all_gather_rollout(rollout):
    """[the rollout of each process], on the device of this one."""
    return [rollout]


def all_reduce(tensors):
    """Each tensor <- its sum over the processes, in place."""


def sum_gradients(parameters):
    """Sum .grad over the processes, in place."""


def rank0_first():
    """Around a block that rank 0 runs first, so that the others find the files it made."""
    return contextlib.nullcontext()


def init():
    """Join the processes that torchrun started."""


def shutdown():
    """Around all that a process does: leave the others at the end."""
    return contextlib.nullcontext()


if dist.is_torchelastic_launched():
    try:
        from extras.torchrun import (
            all_gather, all_gather_rollout, all_reduce, init, rank0_first, rank_and_size, shard,
            shutdown, sum_gradients)
    except ModuleNotFoundError:
        raise SystemExit("torchrun needs extras/torchrun, which is not here") from None
