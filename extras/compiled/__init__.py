"""
torch.compile of the policy, the reference and sampling (compile = True). Before a run uses it,
run/precision.py compares it with plain float32. Where the compiler fails later, the run goes on
without it.

Of a GPT each block is compiled by itself: all have the same code, which takes seconds. The step of
sampling (graph.py) is compiled as a whole, and on a GPU captured like the plain one.
"""
import copy

import torch

from common.script import shown
from graph import generate_by_graph, read_one, sample
from model import GPT

LIMIT = 64      # graphs of a function: padded or not, one row, one token, ...


class OrPlain:
    """What make() returns, a compiled function, which is made at the first call; and the plain one
    from the first error on: off(error) is called."""

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

    def __getattr__(self, name):        # of the model: lm_head, value_head
        return getattr(self.plain, name)


def compiled(function, off):
    return OrPlain(lambda: torch.compile(function, dynamic=True), function, off)


def compiled_model(model, off):
    """A model that is compiled; of a GPT its blocks are, one by one."""
    if not isinstance(model, GPT):
        return compiled(model, off)

    def make():
        # other blocks with the same weights: the model itself stays plain, for the tape
        shared = {id(p): p for p in model.parameters()}
        twin = copy.deepcopy(model, shared)
        for block in twin.h:
            block.compile(dynamic=True)
        return twin

    return OrPlain(make, model, off)


def compile_nets(setup):
    """Compile policy and reference, and sampling where the policy is a GPT."""
    generate = setup.generate

    def off(error):
        """Compile no longer, in any of the three."""
        if setup.compiled:
            print(f"note: compile off: {shown(error, 160)}")
        setup.compiled = {}
        setup.generate = generate

    # policy, reference and sampling share their functions, and with them the number of graphs. A
    # setting, since torch.compile has no argument for it before 2.13
    torch._dynamo.config.recompile_limit = LIMIT
    # a backward that cannot be compiled fails in the forward, where OrPlain sees it. An
    # older torch lacks this setting: there it fails in the check's backward
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True
    nets = setup.policy, setup.reference
    setup.compiled = {model: compiled_model(model, off) for model in nets}
    if isinstance(setup.policy, GPT):
        setup.generate = generate_by_graph(
            setup.policy, read=compiled(read_one, off), sample=compiled(sample, off))
