"""Device, precision and memory."""
import math
import os
from pathlib import Path

import torch

from run.script import BadInput
from run.processes import world


def pick_device(name):
    """torch.device for "auto", "cpu", "cuda", "cuda:1", ...; BadInput when it is not there. Under torchrun each process of a
    machine has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world()[1] > 1:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise BadInput(f"device = {name!r}: not on this machine ({str(e).splitlines()[0]}); try device = 'auto'") from e
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)
    return torch.device(name)


def fast_dtype(device):
    """bfloat16 where the hardware multiplies it faster than float32, else float32."""
    cpu_has_it = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if torch.device(device).type == "cuda" or cpu_has_it else torch.float32


def pick_dtype(name, device):
    """torch dtype of the forward passes for "float32", "bfloat16", "fast" (see fast_dtype) or "auto": bfloat16 on cuda, else
    float32."""
    if name == "fast":
        return fast_dtype(device)
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and device.type == "cuda") else torch.float32


def autocast(device, dtype):
    """Forward passes in `dtype`, weights and losses in float32."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def memory(device):
    """Bytes in use: by torch on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_memory(device, root="/"):
    """Bytes to be had: of a GPU's memory, or of the machine's within the limits of this process's cgroups (v2). inf: nothing
    says."""
    if device.type == "cuda":  # what torch holds for later is free too
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def read(*path):
        path = Path(root, *path)
        return [line.split() for line in path.read_text().splitlines()] if path.is_file() else []

    free = [1024 * int(line[1]) for line in read("proc/meminfo") if line[0] == "MemAvailable:"]
    group = Path("sys/fs/cgroup", *(line[0][4:] for line in read("proc/self/cgroup") if line[0].startswith("0::/")))
    for folder in (group, *group.parents):  # what is allowed higher up holds as well; in a container the top is its own
        for (limit,), (used,) in zip(read(folder, "memory.max"), read(folder, "memory.current")):
            if limit != "max":
                files = [int(n) for name, n in read(folder, "memory.stat") if name in ("active_file", "inactive_file")]
                free.append(int(limit) - int(used) + sum(files))  # copies of files give way
    return min(free, default=math.inf)
