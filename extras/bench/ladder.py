"""
The ladder of speed: iterations in plain float32, then with one technique after the other. It is the
evidence for every line that is there only for speed.

A rung names the plain way to use while its technique is off. The rows share one policy that hardly
learns.
"""
import contextlib
from collections.abc import Callable
from importlib.util import find_spec
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
from extras.bench.phases import Variant, in_turns, print_table, row_of
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
    """Instead of fast.can_buffer."""
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
    Rung("ended rows leave", "sample", "", lambda setup: [(rollout, "drop_finished", keep_all)]),
    Rung("rows by length", "update", "", lambda setup: [
        (loss, "micro_batches", unsorted), (grpo, "micro_batches", unsorted)]),
    Rung("one gradient of the logits", "update", "", lambda setup: [
        (rollout, "log_prob", plain_log_prob)]),
    Rung("logits in one buffer", "update", "cpu", lambda setup: [(rollout, "can_buffer", never)]),
    Rung("attention by formula", "sample", "cpu", lambda setup: [
        (model, "attend_on_cpu", torch_attention)]),
    Rung("bfloat16", "update", "", lambda setup: [(setup, "dtype", torch.float32)]),
    Rung("casts kept", "sample", "", lambda setup: [
        (rollout, "casts_kept", contextlib.nullcontext)]),
    Rung("TF32", "update", "cuda", lambda setup: [
        (torch.backends.cuda.matmul, "allow_tf32", False)]),
    Rung("half head", "update", "cuda", lambda setup: [(model, "half_product", float_product)]),
    Rung("five passes over the logits", "update", "cuda", lambda setup: [
        (fast, "LogProbOfHalf", fast.LogProb)]),
    Rung("graph", "sample", "cuda", lambda setup: [(setup, "generate", generate)]),
    Rung("compile", "update", "cuda", lambda setup: [(setup, "compiled", {})])]

# ------------------------------------------------------------------------------------------------
# a row for each


def rungs_for(setup, cfg):
    """The rungs for this device and these settings."""
    can = {"bfloat16": pick_dtype("fast", setup.device) == torch.bfloat16,
           "casts kept": bool(cfg.lora_rank), "graph": find_spec("extras.graph") is not None,
           "compile": cfg.compile}
    return [rung for rung in RUNGS
            if rung.on in ("", setup.device.type) and can.get(rung.name, True)]


def rows_of(setup, cfg):
    """The plain row, and each technique added to those before it -> {name: Variant}."""
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
            from extras.graph import generate_by_graph
            places.append((setup, "generate", generate_by_graph(setup.policy)))
        if "compile" in names[:i]:
            from extras.compiled import compile_nets
            compile_nets(setup)
            places += [(setup, what, getattr(setup, what)) for what in ("compiled", "generate")]
        rows[name] = Variant(setup, cfg, places)
    return rows


def print_ladder(setup, cfg, repeat):
    """Print a row for each technique, with its gain: the time of its phase without it / with it."""
    variants = rows_of(setup, cfg)
    timed = in_turns(variants, repeat)
    rows = [row_of(name, timed[name], variant) for name, variant in variants.items()]
    notes = [""]
    for before, row, rung in zip(rows, rows[1:], rungs_for(setup, cfg)):
        row["gain"] = round(before["ms"][rung.phase] / row["ms"][rung.phase], 3)
        notes.append(f"{row['gain']:.2f} x {rung.phase}")
    print_table(setup.device, rows, notes)
