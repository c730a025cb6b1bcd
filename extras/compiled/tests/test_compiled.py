"""compile = True beside a plain run, and compilers that fail."""
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from extras.compiled import OrPlain, compile_nets, compiled
from rollout import generate
from run.precision import check_precision
from worlds import (
    WORDS, WORD_PROMPTS, printed, random_gpt, read_rows, same_rollout, settings, setup_of,
    skip_without, word_gpt)

PROMPTS = [[5, 6, 7], [3, 4], [9]]

# ------------------------------------------------------------------------------------------------
# compile = True


def word_nets():
    cfg = settings(num_generations=4)
    return setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS), replace(cfg, compile=True)


def is_plain(setup):
    """Whether nothing is compiled; None: some is."""
    plain = {setup.fast(setup.policy) is setup.policy,
             setup.fast(setup.reference) is setup.reference, setup.generate is generate}
    return plain.pop() if len(plain) == 1 else None


def is_block(function):
    """Whether torch.compile is given a block, in training; else a function, while sampling."""
    return isinstance(getattr(function, "__self__", None), nn.Module)


def changed(change=lambda x, mask: x):
    """In place of torch.compile: the blocks as they are, but what they return is changed."""
    def compile(function, **how):
        def call(x, mask, *more):
            return change(function(x, mask, *more), mask)

        return call if is_block(function) else function
    return compile


def off(x):
    return x + 0.2 * x.abs().mean() * torch.linspace(-1, 1, x.shape[-1])


def raising(*args):
    raise RuntimeError("no compiler\nhere")


def failing_after(calls, of=lambda function: True):
    """In place of torch.compile: the functions as they are, of which some raise after so many
    calls."""
    def compile(function, **how):
        left = iter(range(calls))

        def call(*args):
            found = function(*args)
            if next(left, None) is None:
                raising()
            return found
        return call if of(function) else function
    return compile


def test_what_holds_is_used_and_nothing_is_said(monkeypatch):
    skip_without("graph")       # else sampling is not compiled
    monkeypatch.setattr(torch, "compile", changed())
    for dtype in (torch.float32, torch.bfloat16):
        setup, cfg = word_nets()
        setup.dtype = dtype
        before = torch.get_rng_state()
        assert printed(check_precision, setup, cfg) == ""
        assert is_plain(setup) is False
        assert setup.dtype == dtype
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in setup.policy.parameters())


@pytest.mark.parametrize("change", [
    lambda x, mask: x.detach() + 0 * x, raising, lambda x, mask: off(x) if mask is None else x],
    ids=["wrong gradient", "an error", "wrong without padding"])
def test_compile_that_does_not_hold_is_turned_off_in_one_line(monkeypatch, change):
    monkeypatch.setattr(torch, "compile", changed(change))
    setup, cfg = word_nets()
    out = printed(check_precision, setup, cfg)
    assert "compile" in out and out.count("\n") == 1, out
    assert is_plain(setup)


@pytest.mark.skipif(not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"),
                    reason="an older torch compiles a backward when it gets there")
def test_a_backward_that_cannot_be_compiled_ends_no_run(monkeypatch):
    """As one of a new shape, long after the check of precision."""
    def fails(graph, inputs):
        raise RuntimeError("no backward")

    def works(graph, inputs):
        return graph.forward

    backend = aot_autograd(fw_compiler=works, bw_compiler=fails, inference_compiler=works)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    net = nn.Linear(2, 3)
    setup = SimpleNamespace(policy=net, reference=net, compiled={}, generate=generate)
    compile_nets(setup)
    setup.compiled[net](torch.ones(1, 2)).sum().backward()
    assert not setup.compiled and net.weight.grad is not None


FLAGS = ("--beta=0.1", "--max_iters=2", "--ref_model_sync_steps=1")


@pytest.fixture(scope="module")
def plain(run_grpo, tmp_path_factory):
    """The folder of a run that is not compiled."""
    folder = tmp_path_factory.mktemp("plain")
    run_grpo(folder, *FLAGS)
    return folder


def assert_same_run(plain, other):
    """Two runs have the same logs, up to rounding."""
    for log in ("metrics.jsonl", "samples.jsonl"):
        for a, b in zip(read_rows(plain / log), read_rows(other / log), strict=True):
            assert a.keys() == b.keys()
            for name in a.keys() - {"step_time"}:
                is_float = isinstance(a[name], float)
                expected = pytest.approx(a[name], 1e-3, 1e-5) if is_float else a[name]
                assert b[name] == expected, name


@pytest.mark.parametrize("compile", [failing_after(40), failing_after(4, is_block)],
                         ids=["while sampling", "in training"])
def test_a_compiler_that_fails_is_turned_off_and_the_run_goes_on(
        plain, run_grpo, tmp_path, monkeypatch, compile):
    skip_without("graph")
    monkeypatch.setattr(torch, "compile", compile)
    out = run_grpo(tmp_path, *FLAGS, "--compile=True")
    assert out.count("no compiler") == 1, "it is said once"
    assert_same_run(plain, tmp_path)


def test_a_run_is_the_same_compiled(plain, run_grpo, tmp_path, monkeypatch):
    """With torch's own graphs, shapes and guards, but without its code generator, which is slow."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = run_grpo(tmp_path, *FLAGS, "--compile=True")
    assert "compile off" not in out
    assert_same_run(plain, tmp_path)


def test_a_step_that_failed_half_way_is_read_again(monkeypatch):
    """The token was written to the memory before the error came."""
    skip_without("graph")
    from extras.graph import Decoder, read_one
    notes = []
    monkeypatch.setattr(torch, "compile", failing_after(3))
    model = random_gpt()
    expected = generate(model, PROMPTS, 2, 10, seed=3, eos=(0,))
    decoder = Decoder(model, read=compiled(read_one, notes.append))
    same_rollout(generate(model, PROMPTS, 2, 10, seed=3, eos=(0,), decode=decoder), expected)
    assert len(notes) == 1


def test_running_out_of_memory_is_no_failure_of_the_compiler(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        OrPlain(lambda: full, lambda: 1, None)()
