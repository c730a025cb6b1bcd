"""Several processes, as torchrun starts them: all hold the same weights and the same batch, each computes its share of the
rows, and what came of it is put together for all. In one process these functions give back what they are given."""
import contextlib
import time

import torch
import torch.distributed as dist


def world():
    """(number of this process, number of processes). Number 0 alone prints and writes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def share(n, group=1):
    """The slice of n rows that is this process's: whole groups, in the order of processes, as even as can be, perhaps none."""
    (rank, processes), groups = world(), n // group
    return slice(groups * rank // processes * group, groups * (rank + 1) // processes * group)


@contextlib.contextmanager
def talking():
    """Ends this process when another is gone, a little later than that one, so that torchrun names the right one."""
    try:
        yield
    except RuntimeError as e:
        time.sleep(1)
        raise SystemExit(f"stopped: another process is gone, which has said why or is named below ({str(e).split('. ')[0]}); "
                         "the last checkpoint stands") from None


def gather(rows):
    """A list or a tensor (n, ...) of each process, n may differ -> all in a line, in the order of processes, for all."""
    if world()[1] == 1:
        return rows
    parts, tensor = [None] * world()[1], isinstance(rows, torch.Tensor)
    with talking():
        dist.all_gather_object(parts, rows.cpu().clone() if tensor else rows)  # a clone: a view would bring all that it views
    return torch.cat(parts).to(rows.device) if tensor else sum(parts, [])


def reduce(tensors):
    """Each tensor <- its sum over the processes, in place."""
    if world()[1] > 1:
        with talking():
            for x in tensors:
                dist.all_reduce(x)


@contextlib.contextmanager
def one_by_one():
    """Process 0 goes through this block before the others: what it has made, they find."""
    if world()[0]:
        gather([])
    yield
    if not world()[0]:
        gather([])
