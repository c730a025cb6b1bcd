"""
The ladder of speed: iterations in plain float32, then with one technique after the other, a row for
each, in milliseconds by phase. It is the evidence for every line that is there only for speed.

    python -m extras.bench ladder config/toxicity.py
    python -m extras.bench ladder config/lowercase.py --policy=train --n_layer=12 --n_embd=768

A rung names the plain way to use while its technique is off. The rows share one policy that hardly
learns, and take turns, so that other load on the machine hits them all.
"""
import contextlib
import json
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

import fast
import grpo
import loss
import model
import rollout
from common.device import pick_dtype
from common.processes import shard
from extras import graph
from extras.bench.phases import (
    PHASES, device_name, peaks_of, share, timed_iteration, work_of)
from rollout import generate

# ------------------------------------------------------------------------------------------------
# the plain way of each technique


def keep_all(rows, cache, ended):
    """Instead of rollout.drop_finished: read ended rows to the end."""
    return rows[:0] if bool(ended.all()) else rows


def unsorted(rollout, rows, cfg):
    """Instead of loss.micro_batches: rows in their order, so that a piece is padded to its
    longest."""
    mine = rows[shard(len(rows))]
    return mine.split(cfg.micro_batch_size) if len(mine) else ()


def plain_log_prob(logits, targets):
    """Instead of fast.log_prob."""
    return logits.log_softmax(-1).gather(1, targets)


def float_product(h, weight):
    """Instead of fast.half_product."""
    with torch.autocast("cuda", enabled=False):
        return F.linear(h, weight)


def never(*args):
    """Instead of a check whether a technique applies."""
    return False


def torch_attention(q, k, v, mask, causal, scale):
    """Instead of fast.attend_on_cpu: torch's kernel."""
    groups = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=mask,
        is_causal=causal, scale=scale)


class Rung(NamedTuple):
    """A technique."""
    name: str
    phase: str      # that it speeds up
    on: str         # "cuda", "cpu", or "" for both
    off: Callable   # Setup -> [(object, attribute, its value while the technique is off)]


RUNGS = [
    Rung("ended rows leave", "sampling", "", lambda setup: [(rollout, "drop_finished", keep_all)]),
    Rung("rows by length", "loss", "", lambda setup: [
        (loss, "micro_batches", unsorted), (grpo, "micro_batches", unsorted)]),
    Rung("one gradient of the logits", "loss", "", lambda setup: [
        (rollout, "log_prob", plain_log_prob)]),
    Rung("logits in one buffer", "loss", "cpu", lambda setup: [
        (rollout, "can_buffer", never)]),
    Rung("attention by formula", "sampling", "cpu", lambda setup: [
        (model, "attend_on_cpu", torch_attention)]),
    Rung("bfloat16", "loss", "", lambda setup: [(setup, "dtype", torch.float32)]),
    Rung("casts kept", "sampling", "", lambda setup: [
        (rollout, "casts_kept", contextlib.nullcontext)]),
    Rung("TF32", "loss", "cuda", lambda setup: [
        (torch.backends.cuda.matmul, "allow_tf32", False)]),
    Rung("half head", "loss", "cuda", lambda setup: [(model, "half_product", float_product)]),
    Rung("graph", "sampling", "cuda", lambda setup: [(setup, "generate", generate)]),
    Rung("five passes over the logits", "loss", "cuda", lambda setup: [
        (fast, "LogProbOfHalf", fast.LogProb)]),
    Rung("compile", "loss", "cuda", lambda setup: [
        (setup, "compiled", {})])]

# ------------------------------------------------------------------------------------------------
# a row for each


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


def rungs_for(setup, cfg):
    """The rungs for this device and these settings."""
    can = {"bfloat16": pick_dtype("fast", setup.device) == torch.bfloat16,
           "casts kept": bool(cfg.lora_rank), "compile": cfg.compile}
    return [rung for rung in RUNGS
            if rung.on in ("", setup.device.type) and can.get(rung.name, True)]


def rows_of(setup, cfg):
    """The plain row, and each technique added to those before it -> {name: what to put}."""
    rungs = rungs_for(setup, cfg)
    names = [rung.name for rung in rungs]
    on = [(setup, "dtype", torch.bfloat16 if "bfloat16" in names else torch.float32)]
    if "TF32" in names:
        on.append((torch.backends.cuda.matmul, "allow_tf32", True))
    rows = {}
    for i, name in enumerate(["plain float32", *names]):
        places = [*on, *(place for rung in rungs[i:] for place in rung.off(setup))]
        # a new sampler, since a graph keeps the functions it was captured with
        if "graph" in names[:i]:
            places.append((setup, "generate", graph.generate_by_graph(setup.policy)))
        if "compile" in names[:i]:
            from extras.compiled import compile_nets
            compile_nets(setup)
            places += [(setup, what, getattr(setup, what))
                       for what in ("compiled", "generate")]
        rows[name] = places
    return rows


def measure(setup, cfg, rows, repeat):
    """Measure the rows in turns -> {row: [({phase: seconds}, Rollout)]}, without the first
    turn."""
    measured = {name: [] for name in rows}
    for it in range(repeat + 1):
        for name, places in rows.items():
            with put(places):
                measured[name].append(timed_iteration(setup, cfg, it))
    return {name: times[1:] for name, times in measured.items()}


def summary(setup, cfg, name, times, dtype):
    """A row: medians in ms, sampled tokens/s of the iteration, shares of the device's peaks."""
    ms = {phase: 1000 * statistics.median(seconds[phase] for seconds, _ in times)
          for phase in PHASES}
    total = statistics.median(sum(seconds.values()) for seconds, _ in times)
    tokens = statistics.median(int(r.sampled_mask.sum()) for _, r in times)
    bandwidth, matrix = peaks_of(device_name(setup.device), dtype)
    with put([(setup, "dtype", dtype)]):
        work = work_of(setup, cfg, times[-1][1])
    return dict(
        row=name, ms={phase: round(x, 3) for phase, x in ms.items() if x},
        iteration_ms=round(1000 * total, 3), tokens_per_s=round(tokens / total),
        sampling_bandwidth=share(work["sampling"][1], ms["sampling"] / 1000, bandwidth),
        loss_matrix=share(work["loss"][0], ms["loss"] / 1000, matrix))


def print_ladder(setup, cfg, repeat):
    """Print the table, and all of it as a last line of JSON."""
    rungs = {rung.name: rung for rung in rungs_for(setup, cfg)}
    rows = rows_of(setup, cfg)
    measured = measure(setup, cfg, rows, repeat)
    table = []
    for name, places in rows.items():
        dtype = [value for thing, what, value in places if what == "dtype"][-1]
        table.append(summary(setup, cfg, name, measured[name], dtype))

    # a technique's gain: the time of its phase without it / with it
    phases = [phase for phase in PHASES if any(phase in row["ms"] for row in table)]
    print(f"{'ms of an iteration':28}", *(f"{phase:>10}" for phase in phases), "       all  gain")
    for before, row in zip([None, *table], table):
        if before:
            phase = rungs[row["row"]].phase
            row["phase"] = phase
            row["gain"] = round(before["ms"].get(phase, math.nan) / row["ms"][phase], 3)
        gain = f"{row['gain']:.2f} x {row['phase']}" if before else ""
        print(f"{row['row']:28}", *(f"{row['ms'].get(phase, 0):10.2f}" for phase in phases),
              f"{row['iteration_ms']:10.2f}  {gain}")
    print(json.dumps(dict(
        device=device_name(setup.device), torch=torch.__version__, repeat=repeat,
        rows=cfg.num_prompts * cfg.num_generations, ladder=table)))
