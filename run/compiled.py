"""
torch.compile for the parts that cfg.compile names: generate, judge, reference, update.

Shapes are symbolic, so each part is one graph for all lengths (two: with padding and without). The
pass that influence records is never compiled.
"""
import functools

import torch

from run.decoder import Decoder
from run.script import BadInput
from sample import decode, generate


def try_compile(cfg, device):
    """Raises BadInput when something is to be compiled and nothing can be."""
    if not cfg.compile:
        return
    try:
        torch.compile(lambda x: 2 * x + 1)(torch.zeros(2, device=device))
    except Exception as e:  # a missing compiler shows in many ways
        reason = str(e).strip().splitlines()[0]
        raise BadInput(
            f"compile = {cfg.compile}: torch cannot compile on this machine ({reason}); "
            "set compile = ()") from e


def compile_parts(nets, cfg):
    """Compiles the parts of nets that cfg.compile names. Says so if this run has no such part."""
    judge = nets.judges.get("judge")
    only_recorded = cfg.tracin != "off" and cfg.num_iterations == 1
    for part in cfg.compile:
        if part == "update" and not only_recorded:
            nets.policy_fn = torch.compile(nets.policy, dynamic=True)
        elif part == "reference" and cfg.beta:
            nets.reference_fn = torch.compile(nets.reference, dynamic=True)
        elif part == "judge" and hasattr(judge, "model"):
            judge.model = torch.compile(judge.model, dynamic=True)
        elif part != "generate":
            print(f"note: compile = {cfg.compile}: this run has no {part} that could be compiled")


def make_generate(policy, cfg, dtype):
    """sample.generate for the rollouts, with the way of decoding that the settings ask for."""
    plain = functools.partial(decode, drop="retire" in cfg.speed)
    return functools.partial(generate, decode=make_decoder(policy, cfg, dtype) or plain)


def make_decoder(policy, cfg, dtype):
    """The Decoder that samples the rollouts; None if neither graphs nor compile ask for it."""
    graphs = "graphs" in cfg.speed and policy.wte.weight.is_cuda
    compile = "generate" in cfg.compile
    if not graphs and not compile:
        return None
    return Decoder(policy, dtype, compile, graphs, drop="retire" in cfg.speed)
