"""Device, precision and memory."""
import math
import os
from pathlib import Path

import torch

from run.processes import gpu_group, rank_and_size
from run.script import BadInput

DRIVER = Path("/proc/driver/nvidia/version")


def pick_device(name):
    """torch.device for "auto", "cpu", "cuda", "cuda:1", ... Under torchrun each process of a
    machine has a GPU of its own. allow_tf32, deterministic: see set_up_gpu. Raises BadInput if the
    device does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and DRIVER.exists():
            print(f"note: device = 'auto' is the CPU: this machine has an NVIDIA driver, but torch "
                  f"{torch.__version__} (CUDA {torch.version.cuda}) finds no GPU that it can use; "
                  "nvidia-smi shows which CUDA the driver knows")
    if name == "cuda" and rank_and_size()[1] > 1:
        name = own_gpu(int(os.environ["LOCAL_RANK"]))
    if name.startswith("cuda"):
        set_up_gpu(False, False)
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise BadInput(
            f"device = {name!r}: not on this machine ({reason}); try device = 'auto'") from e
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)
    if name.startswith("cuda") and rank_and_size()[1] > 1:
        connect_gpus(torch.device(name))
    return torch.device(name)


def set_up_gpu(allow_tf32, deterministic):
    """Sets how torch computes on a GPU, for this process. allow_tf32: float32 products may be in
    TF32. deterministic: the same bits each time."""
    # with a mask cuDNN's attention can give NaN gradients on an H100 (torch 2.11 to 2.13), and it
    # takes half a second for each new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    # set in any case: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which some containers have, turns TF32 on
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"   # read when cuBLAS is used first
        # with warn_only=True attention's backward would still add up in any order
        torch.use_deterministic_algorithms(True, warn_only=False)
        torch.utils.deterministic.fill_uninitialized_memory = False     # only to find bugs


def own_gpu(number):
    """Name of the GPU of the process with this number on its machine. Raises BadInput if there are
    fewer GPUs; where there is none, pick_device says so."""
    gpus = torch.cuda.device_count()
    if 0 < gpus <= number:
        raise BadInput(
            f"device = 'cuda': process {number} of this machine has no GPU of its own, there are "
            f"{gpus}; start torchrun with --nproc_per_node={gpus}, or take device = 'cpu'")
    return f"cuda:{number}"


def connect_gpus(device):
    """Connects the GPUs of all processes now, rather than at the first sum over them: what NCCL
    lacks is said before anything is trained."""
    try:
        gpu_group(device)
    except RuntimeError as e:
        reason = str(e).splitlines()[0]
        raise BadInput(f"device = '{device}': the GPUs of the processes could not be connected "
                       f"({reason}); NCCL_DEBUG=INFO says more, device = 'cpu' does without") from e


def fast_dtype(device):
    """bfloat16 where the hardware multiplies it faster than float32, else float32. GPUs do from
    compute capability 8.0 on; older ones emulate it."""
    if torch.device(device).type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_it = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if has_it else torch.float32


def pick_dtype(name, device):
    """torch dtype of the forward passes for "float32", "bfloat16", "fast" (see fast_dtype) or
    "auto": fast on CUDA, else float32. Raises BadInput for bfloat16 on a GPU that emulates it."""
    on_gpu = device.type == "cuda"
    if name == "float32" or (name == "auto" and not on_gpu):
        return torch.float32
    if name == "bfloat16" and not on_gpu:
        return torch.bfloat16
    dtype = fast_dtype(device)
    if on_gpu and dtype == torch.float32:
        if name == "bfloat16":
            raise BadInput("dtype = 'bfloat16': this GPU only emulates it (compute capability "
                           "below 8.0), slower than float32; set dtype = 'float32'")
        print(f"note: dtype = {name!r} is float32 on this GPU, which only emulates bfloat16 "
              "(compute capability below 8.0)")
    return dtype


def autocast(device, dtype):
    """Forward passes in `dtype`; weights and losses stay in float32."""
    half = dtype == torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=half)


def memory(device):
    """Bytes in use: by torch on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_memory(device, root="/"):
    """Free memory in bytes: on the GPU, or on the host within this process's cgroup (v2) limits;
    inf if unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held  # what torch holds for later is free too
    memory_lines = fields(root, "proc/meminfo")
    free = [1024 * int(line[1]) for line in memory_lines if line[0] == "MemAvailable:"]
    own = [line[0][4:] for line in fields(root, "proc/self/cgroup") if line[0].startswith("0::/")]
    group = Path("sys/fs/cgroup", *own)
    for folder in (group, *group.parents):  # limits higher up hold too
        free += cgroup_room(root, folder)
    return min(free, default=math.inf)


def cgroup_room(root, folder):
    """[bytes] that a cgroup's limit leaves; [] where it sets none."""
    limits = fields(root, folder, "memory.max")
    used = fields(root, folder, "memory.current")
    if not limits or not used or limits[0][0] == "max":
        return []
    stat = dict(fields(root, folder, "memory.stat"))
    cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return [int(limits[0][0]) - int(used[0][0]) + cached]  # copies of files give way


def fields(*path):
    """The words of each line of a small file; [] where there is no such file."""
    path = Path(*path)
    if not path.is_file():
        return []
    return [line.split() for line in path.read_text().splitlines()]
