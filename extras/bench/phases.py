"""Time iterations in turns and print a table: milliseconds by phase, tokens/s, memory, and as a
last line of JSON also the shares of the device's peak speed. See docs/gpus.md."""
import contextlib
import json
import math
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpo     # before torch: sets how its threads wait

import torch
from torch import nn

from common.device import read_proc
from common.seeds import seed_for
from run.report import Clock

# {part of a GPU's name: (GB/s of its memory, TFLOP/s of bfloat16 products summed in float32,
# TFLOP/s of float32)}, dense, from the makers' data sheets; the first part that fits counts
PEAKS = {
    "B200": (8000, 2250, 75), "H200": (4800, 989, 67), "H100 PCIe": (2000, 756, 51),
    "H100 NVL": (3900, 835, 60), "H100": (3350, 989, 67), "A100 80GB PCIe": (1935, 312, 19.5),
    "A100-SXM4-80GB": (2039, 312, 19.5), "A100": (1555, 312, 19.5), "L40S": (864, 362, 91.6),
    "L4": (300, 121, 30.3), "RTX 5090": (1792, 209.5, 104.8), "RTX 4090": (1008, 165.2, 82.6),
    "RTX 3090": (936, 71, 35.6), "RTX A6000": (768, 154.8, 38.7), "T4": (320, None, 8.1)}
THREADS = torch.get_num_threads()


@dataclass
class Variant:
    """What is timed. places: [(object, attribute, value)] while it is."""
    setup: Any
    cfg: Any
    places: list = field(default_factory=list)


class Timed(NamedTuple):
    """An iteration."""
    seconds: dict       # {phase: seconds}
    tokens: int         # sampled
    gb: float           # at the peak, of a GPU
    rollout: Any = None


@contextlib.contextmanager
def put(places):
    """Set [(object, attribute, value)] within the block."""
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in places]
    try:
        for thing, name, value in places:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in reversed(before):
            setattr(thing, name, value)


def peak_memory(device):
    return torch.cuda.max_memory_allocated(device) / 2 ** 30 if device.type == "cuda" else 0.0


def timed_iteration(setup, cfg, it):
    """Iteration `it` of grpo.train -> Timed. As in a run, its clock waits for the device at the end
    of each phase."""
    torch.set_num_threads(cfg.threads or THREADS)   # each variant may have a different number
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.device)
    clock = Clock(setup.device, on=False)
    batch = grpo.collect_iteration(setup, it, cfg, clock)
    held_out = grpo.collect_held_out(setup, it, cfg, clock)
    grpo.update(setup, batch, held_out, cfg, seed_for(cfg.seed, "rows", it),
                grpo.Meter(setup, cfg, clock))
    tokens = int(batch.rollout.sampled_mask.sum())
    return Timed(clock.seconds, tokens, peak_memory(setup.device), batch.rollout)


def in_turns(variants, repeat):
    """Time {name: Variant} in turns, so that other load on the machine hits them all -> {name:
    [Timed]}, without the first round."""
    rounds = {name: [] for name in variants}
    for it in range(repeat + 1):
        for name, variant in variants.items():
            with put(variant.places):
                rounds[name].append(timed_iteration(variant.setup, variant.cfg, it))
    return {name: timed[1:] for name, timed in rounds.items()}


# ------------------------------------------------------------------------------------------------
# which share of the device's peak is that?


def work_of(setup, cfg, rollout):
    """Count what an iteration needs, whatever the code does -> {phase: (amount, what)}: bytes to
    read where memory is the limit, operations where products are."""
    policy = setup.policy
    linear = sum(layer.weight.numel() for layer in policy.modules()
                 if isinstance(layer, nn.Linear) and layer is not policy.lm_head)
    head = policy.lm_head.weight.numel()
    size = 2 if setup.dtype == torch.bfloat16 else 4
    c = policy.config
    head_dim = c.head_dim or c.n_embd // c.n_head

    # tokens of each row: read before the first sample, and sampled
    T = rollout.sampled_mask.shape[1]
    read = rollout.attention_mask[:, :-T].sum(1).double()                           # (N,)
    sampled = rollout.completion_mask.sum(1).double()                               # (N,)
    num_tokens = float((read + sampled - 1).sum())      # nothing follows the last one
    keys = float((sampled * read + sampled * (sampled - 1) / 2).sum())      # read while sampling
    pairs = float((read + sampled - 1).square().sum() / 2)                  # of a query and a key

    # sampling reads all weights for each token of the batch, and the keys and values before it
    at_once = cfg.decode_batch_size or len(read)
    steps = T * math.ceil(len(read) / at_once)
    kept = 2 * c.n_layer * (c.n_kv_head or c.n_head) * head_dim * size      # bytes of a token
    forward = (2 * linear * num_tokens + 2 * head * float(sampled.sum())
               + 4 * c.n_layer * c.n_head * head_dim * pairs)
    return {
        "sample": (steps * (linear + head) * size + keys * kept, "bandwidth"),
        "reference": (forward, "matrix"),
        "update" if cfg.tracin == "off" else "record": (
            3 * forward * cfg.num_iterations, "matrix")}


def device_name(device):
    """The GPU's name, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in read_proc("cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "CPU"


def peaks_of(name, dtype):
    """A device's peaks by its data sheet -> {"bandwidth": bytes/s, "matrix": operations/s}."""
    for part, (bandwidth, half, full) in PEAKS.items():
        if part in name:
            rate = half if dtype == torch.bfloat16 else full
            return {"bandwidth": 1e9 * bandwidth} | ({"matrix": 1e12 * rate} if rate else {})
    return {}


# ------------------------------------------------------------------------------------------------
# the table


def row_of(name, timed, variant=None):
    """A row: medians of [Timed], and shares of the device's peak for a Variant."""
    totals = [1000 * sum(x.seconds.values()) for x in timed]
    ms = {phase: 1000 * statistics.median(x.seconds[phase] for x in timed)
          for phase in timed[0].seconds}
    rates = [1000 * x.tokens / total for x, total in zip(timed, totals)]
    row = dict(
        row=name, computes="", ms={phase: round(x, 3) for phase, x in ms.items()},
        all=round(statistics.median(totals), 3), least=round(min(totals), 3),
        most=round(max(totals), 3), tokens_per_s=round(statistics.median(rates)),
        gb=round(timed[-1].gb, 2))
    if variant is None:
        return row
    with put(variant.places):
        setup = variant.setup
        dtype = str(setup.dtype).removeprefix("torch.")
        row["computes"] = dtype + (", compiled" if setup.compiled else "")
        peaks = peaks_of(device_name(setup.device), setup.dtype)
        work = work_of(setup, variant.cfg, timed[-1].rollout) if peaks else {}
    row["of_peak"] = {
        f"{phase}, {what}": float(f"{1000 * amount / ms[phase] / peaks[what]:.3g}")
        for phase, (amount, what) in work.items() if what in peaks and phase in ms}
    return row


def print_table(device, rows, notes):
    """Print rows of row_of with a note each, then all of them as JSON."""
    phases = list(dict.fromkeys(phase for row in rows for phase in row["ms"]))
    width = max(len(row["row"]) for row in rows)
    heads = [*phases, "all", "least", "most", "tokens/s", "GB"]
    print(f"{'ms of an iteration':{width}}", *(f"{name:>9}" for name in heads))
    for row, note in zip(rows, notes):
        ms = [row["ms"].get(phase, 0.0) for phase in phases]
        times = *ms, row["all"], row["least"], row["most"]
        print(f"{row['row']:{width}}", *(f"{x:9.2f}" for x in times),
              f"{row['tokens_per_s']:9} {row['gb']:9.2f}  {note}")
    print(json.dumps(dict(device=device_name(device), torch=torch.__version__, rows=rows)),
          flush=True)
