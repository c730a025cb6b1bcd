"""
torch.compile for the policy, the reference and sampling (compile = True). Before a run uses it,
run/precision.py compares it with plain float32. If the compiler fails later, the run goes on
without it.

Each block of a GPT is compiled separately: all share their code, so this takes seconds. The step of
sampling (extras/graph) is compiled as a whole, and on a GPU captured like the plain one.
"""
import copy
from importlib.util import find_spec

import torch

from common.errors import shown
from model import GPT

LIMIT = 64      # graphs of a function: padded or not, one row, one token, ...


class OrPlain:
    """A compiled function with a fallback: the first call makes it by make(), and from its first
    error on the plain function is used. off(error) reports the error."""

    def __init__(self, make, plain, off):
        self.make = make
        self.compiled = None
        self.failed = False
        self.plain = plain
        self.off = off

    def __call__(self, *args):
        if not self.failed:
            try:
                if self.compiled is None:
                    self.compiled = self.make()
                return self.compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:      # a compiler may raise anything
                self.failed = True
                self.off(e)
        return self.plain(*args)

    def __getattr__(self, name):        # the model's lm_head, value_head
        return getattr(self.plain, name)


def compiled(function, off):
    return OrPlain(lambda: torch.compile(function, dynamic=True), function, off)


def compiled_model(model, off):
    """Compile a model; of a GPT only the blocks, one by one."""
    if not isinstance(model, GPT):
        return compiled(model, off)

    def make():
        # compile a copy that shares the weights: the tape needs the plain model
        shared = {id(p): p for p in model.parameters()}
        twin = copy.deepcopy(model, shared)
        for block in twin.h:
            block.compile(dynamic=True)
        return twin

    return OrPlain(make, model, off)


def compile_nets(setup):
    """Compile policy and reference, and sampling (extras/graph) where the policy is a GPT."""
    generate = setup.generate

    def off(error):
        """Go back to the plain functions, all three."""
        if setup.compiled:
            print(f"note: compile off: {shown(error, 160)}")
        setup.compiled = {}
        setup.generate = generate

    # policy, reference and sampling share their code, and with it the limit on graphs. Before
    # torch 2.13 torch.compile does not take the limit as an argument
    torch._dynamo.config.recompile_limit = LIMIT
    # let a backward that cannot be compiled fail in the forward, where OrPlain catches it. An older
    # torch lacks this setting: there run/precision.py's backward fails
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True
    nets = setup.policy, setup.reference
    setup.compiled = {model: compiled_model(model, off) for model in nets}
    if find_spec("extras.graph"):
        from extras.graph import generate_by_graph, read_one, sample
        setup.generate = generate_by_graph(
            setup.policy, read=compiled(read_one, off), sample=compiled(sample, off))
