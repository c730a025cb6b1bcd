"""Device, precision and memory."""
import contextlib
import math
import os
import re
from pathlib import Path

import torch

from common.processes import rank_and_size
from common.script import BadInput, shown


def pick_device(name, threads=0):
    """torch.device for "auto", "cpu", "cuda", "cuda:1", ... Under torchrun each process of a
    machine has a GPU of its own. Raise BadInput if the device does not exist. threads: of a
    CPU; 0: torch's choice."""
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
        # it takes half a second for each new shape
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def fast_dtype(device):
    """bfloat16 where the hardware multiplies it faster than float32, else float32. GPUs do from
    compute capability 8.0 on; older ones emulate it."""
    if torch.device(device).type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_it = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if has_it else torch.float32


def set_precision(device, dtype):
    """float32 products of a GPU, as those of the vocabulary head, are in the faster TF32 where
    others are in bfloat16, never where float32 is asked for."""
    if device.type == "cuda":
        exact = dtype == torch.float32
        torch.set_float32_matmul_precision("highest" if exact else "high")


@contextlib.contextmanager
def full_precision():
    """Around products outside autocast that are called float32: they are not in TF32 either."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def pick_dtype(name, device):
    """torch dtype of the forward passes for the setting dtype; see fast_dtype."""
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
    """Apply a Linear to x (..., C) in the dtype of its weights, also under autocast: bfloat16 would
    round a judge's logits near -5, those of clean texts, by 0.016 and make many of them equal."""
    with torch.autocast(x.device.type, enabled=False):
        return layer(x.to(layer.weight.dtype))


def why_no_gpu():
    """Why a torch that is built for GPUs sees none, in torch's words; "" where there is nothing to
    say."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
        reason = "unknown"
    except (RuntimeError, AssertionError) as e:     # the driver is missing or too old
        reason = str(e).split(". ")[0].strip()
    return f"; this torch is built for CUDA {torch.version.cuda} and sees no GPU: {reason}"


def gpu_name(device):
    """What a GPU calls itself. One whose driver does not say it can be used all the same."""
    try:
        return torch.cuda.get_device_name(device)
    except Exception as e:
        return f"its name is not known: {type(e).__name__}"


def machine(name, device, dtype):
    """One line: what this command computes on. name: the setting device."""
    gpu = f" ({gpu_name(device)})" if device.type == "cuda" else ""
    precision = str(dtype).removeprefix("torch.")
    why = why_no_gpu() if name == "auto" else ""
    return f"device: {device}{gpu}, {precision}, threads: {torch.get_num_threads()}{why}"


def read_proc(name):
    """Text of a file in /proc, "" where there is none: only Linux has it."""
    try:
        return Path("/proc", name).read_text()
    except OSError:
        return ""


def memory(device):
    """Bytes in use, by torch on a GPU, by this process on a CPU. None: unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    pages = read_proc("self/statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else None


def free_memory(device):
    """Free memory in bytes, of the GPU or of the host. inf: unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held  # what torch holds for later is free too
    available = re.search(r"MemAvailable: *(\d+)", read_proc("meminfo"))
    return 1024 * int(available[1]) if available else math.inf


def influence_memory(cfg, dtype):
    """About how many bytes a step with influence takes if no completion ends early: by count, for
    GPT-2's kind of layers."""
    total = cfg.num_prompts * cfg.num_generations
    rows = min(cfg.mini_batch_size or total, total) // rank_and_size()[1]
    size = 2 if dtype == torch.bfloat16 else 4
    width = cfg.n_layer * cfg.n_embd

    # float32: policy, base, gradient, two of AdamW, the target's gradient and its two halves
    weights = 8 * 4 * (12 * width * cfg.n_embd + cfg.vocab_size * cfg.n_embd)
    # a token's inputs and gradients of outputs: 16 C in a block, V + C of the head, 2 C embeddings
    token = size * (16 * width + cfg.vocab_size + cfg.n_embd) + 8 * cfg.n_embd
    tape = rows * cfg.max_completion_length * token
    # a micro-batch's activations, and its logits three times (see rollout.at_sampled_tokens)
    tokens = min(rows, cfg.micro_batch_size) * cfg.max_completion_length
    activations = 22 * size * width * tokens
    logits = 3 * 4 * min(2 ** 27, tokens * cfg.vocab_size)
    return weights + tape + activations + logits


def warn_of_influence(cfg, device, dtype):
    """Print a note where a step with influence may not fit: records of all its tokens are kept."""
    if cfg.tracin == "off" or cfg.lora_rank:
        return
    most = influence_memory(cfg, dtype)
    if most > free_memory(device):
        print(f"note: influence may need {most / 2 ** 30:.0f} GB, more than is free, where rows "
              f"have max_completion_length = {cfg.max_completion_length} tokens; if so, "
              "lower mini_batch_size, num_prompts or micro_batch_size")


def check_fits(cfg, device):
    """Raise BadInput where the weights, the rollout, and the keys and values of the rows that are
    decoded at once are alone too much, such as by a typo in a setting: that would end in "Killed".
    """
    # the least that is needed: keys and values, weights and moments, the rollout
    total = cfg.num_prompts * cfg.num_generations
    rows = min(cfg.decode_batch_size or total, total // rank_and_size()[1])
    share = 1 if cfg.policy == "train" else 8   # queries that may share a key
    kept = 4 * cfg.n_layer * cfg.n_embd // share * cfg.max_completion_length * rows
    least = kept + 32 * cfg.n_layer * cfg.n_embd ** 2 + 50 * total * cfg.max_completion_length
    if least > free_memory(device):
        raise BadInput(
            f"num_prompts * num_generations = {total} rows, {rows} at once, n_layer = "
            f"{cfg.n_layer}, n_embd = {cfg.n_embd}: need {least >> 30} GB of memory, more than is "
            "free; lower num_prompts, decode_batch_size, max_completion_length or the policy's "
            "size")
