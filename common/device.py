"""Device, precision and memory."""
import contextlib
import os
from pathlib import Path

import torch

from common.errors import BadInput, shown
from common.processes import rank_and_size


def pick_device(name, threads=0):
    """torch.device for "auto", "cpu", "cuda", "cuda:1", ... Under torchrun each process of a
    machine has its own GPU. Raise BadInput if the device does not exist. threads: CPU threads; 0:
    torch's choice."""
    if threads:
        torch.set_num_threads(threads)

    # one GPU for each process of a machine
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":      # torch.cuda.set_device refuses a GPU without a number
        number = os.environ["LOCAL_RANK"] if rank_and_size()[1] > 1 else 0
        name = f"cuda:{number}"

    # is it there?
    try:
        torch.zeros(1, device=name).item()      # "meta" holds no numbers
    except (RuntimeError, AssertionError) as e:
        raise BadInput(f"device = {name!r}: not on this machine: must be 'auto', 'cpu', 'cuda' or "
                       f"'cuda:1', ... (torch says {shown(str(e))})") from e
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # with a mask cuDNN's attention can give NaN gradients on an H100 (torch 2.11 to 2.13), and
        # each new shape costs it half a second
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def fast_dtype(device):
    """bfloat16 where the hardware multiplies it faster than float32, else float32. GPUs have it
    from compute capability 8.0 on; older ones emulate it."""
    if torch.device(device).type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def set_precision(device, dtype):
    """Let a GPU compute float32 products, such as the vocabulary head's, in the faster TF32, unless
    dtype is float32."""
    if device.type == "cuda":
        exact = dtype == torch.float32
        torch.set_float32_matmul_precision("highest" if exact else "high")


@contextlib.contextmanager
def full_precision():
    """Around float32 products outside autocast: compute them in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def pick_dtype(name, device):
    """The torch dtype of forward passes, from the setting dtype; see fast_dtype."""
    dtype = torch.float32
    if name == "fast" or (name == "auto" and device.type == "cuda"):
        dtype = fast_dtype(device)
    if name == "bfloat16":
        dtype = torch.bfloat16
    set_precision(device, dtype)
    return dtype


def autocast(device, dtype):
    """Forward passes in `dtype`; weights and losses stay in float32."""
    half = dtype == torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=half)


def exact_linear(layer, x):
    """Apply a Linear to x (..., C) in the dtype of its weights, even under autocast: clean texts
    have logits near -5, which bfloat16 would round by 0.016, so that many became equal."""
    with torch.autocast(x.device.type, enabled=False):
        return layer(x.to(layer.weight.dtype))


def machine(device, dtype):
    """One line about the device, dtype and threads of this command."""
    gpu = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    precision = str(dtype).removeprefix("torch.")
    return f"device: {device}{gpu}, {precision}, threads: {torch.get_num_threads()}"


def read_proc(name):
    """Text of a file in /proc, or "": only Linux has it."""
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""


def memory(device):
    """Bytes in use: by torch on a GPU, by this process on a CPU. None: unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = read_proc("self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else None
