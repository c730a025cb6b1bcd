"""
The functions of common/processes.py for several processes, started by torchrun.

All hold the same weights and the same batch. Each computes its share of the rows, and all get the
combined results.
"""
import contextlib
import importlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

WAIT = timedelta(minutes=30)    # for a slower process; after that it counts as hung
PATIENCE = timedelta(hours=12)  # while rank 0 makes policy and judges


def rank_and_size():
    """(rank of this process, number of processes). Rank 0 alone prints and writes."""
    if not dist.is_initialized():       # before init, or after shutdown
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def shard(n, group=1):
    """The slice of n rows that this process handles, perhaps empty: whole groups, in rank order, as
    even as possible."""
    rank, size = rank_and_size()
    groups = n // group
    return slice(groups * rank // size * group, groups * (rank + 1) // size * group)


def init():
    """Join the processes that torchrun started: gloo for tensors on the CPU, NCCL for a GPU's."""
    # before init: this module keeps the group that it finds at import, and AdamW would import it
    # later
    importlib.import_module("torch.distributed.nn.functional")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=WAIT)


@contextlib.contextmanager
def shutdown():
    """After this block the process has left the others."""
    together = False
    try:
        yield
        together = True
    except KeyboardInterrupt:       # all of them stop at the same point
        together = True
        raise
    finally:
        # a gloo thread that outlives Python may abort it; ending NCCL waits for the others
        if together or not torch.cuda.is_available():
            dist.destroy_process_group()


@contextlib.contextmanager
def or_peer_is_gone():
    """End this process if another one is gone or has hung, but a second later, so that torchrun
    blames the other one."""
    try:
        yield
    except RuntimeError as e:
        time.sleep(1)
        reason = str(e).split(". ")[0]
        raise SystemExit(
            "stopped: another process exited, or hangs: see its error above, or torchrun's report "
            f"below ({reason}); the last checkpoint is good") from None


def all_gather(rows, group=None):
    """Join a list or a tensor (n, ...) from each process, where n may differ, in rank order -> the
    same on every process. group: a process group, with its timeout; None: all processes."""
    parts = [None] * dist.get_world_size()
    is_tensor = isinstance(rows, torch.Tensor)
    sent = rows.cpu().clone() if is_tensor else rows   # a clone: a view would bring all it views
    with or_peer_is_gone():
        dist.all_gather_object(parts, sent, group=group)
    return torch.cat(parts).to(rows.device) if is_tensor else sum(parts, [])


def all_gather_rollout(rollout):
    """[the rollout of each process], on the device of this one."""
    device = rollout.tokens.device
    parts = all_gather([rollout.map(lambda x: x.cpu().clone())])
    return [part.map(lambda x: x.to(device)) for part in parts]


def all_reduce(tensors):
    """Each tensor <- its sum over the processes, in place. Tensors of a dtype travel together."""
    with or_peer_is_gone():
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            same = [x for x in tensors if x.dtype == dtype]
            flat = torch.cat([x.flatten() for x in same])
            dist.all_reduce(flat)
            for x, total in zip(same, flat.split([x.numel() for x in same])):
                x.copy_(total.view_as(x))


def sum_gradients(parameters):
    """Sum .grad over the processes, in place. A process without rows contributes zeros."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    all_reduce([p.grad for p in parameters])


@contextlib.contextmanager
def rank0_first():
    """Rank 0 runs the block first; the others then find the files that it made."""
    rank, _ = rank_and_size()
    patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    if rank > 0:
        all_gather([], patient)     # waits for rank 0
    yield
    if rank == 0:
        all_gather([], patient)
    dist.destroy_process_group(patient)
