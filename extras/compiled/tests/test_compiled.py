"""Reading tokens in memory of fixed shape, and compile = True beside a plain run."""
import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import extras.compiled as compiled_module
from extras.compiled import Decoder, OrPlain, compile_nets, read_again, read_one
from rollout import completion_logprobs, generate
from run.precision import check_precision
from worlds import (
    SHAPES, WORDS, WORD_PROMPTS, printed, random_gpt, read_rows, same_rollout, settings, setup_of,
    shaken, skip_without, with_lora, word_gpt)

PROMPTS = [[5, 6, 7], [3, 4], [9]]

# ------------------------------------------------------------------------------------------------
# the decoder


def assert_same_tokens(decoder, prompts=PROMPTS, **how):
    """A decoder samples what generate does without it -> the rollout."""
    how = dict(seed=3, eos=(0,)) | how
    expected = generate(decoder.model, prompts, 2, 10, **how)
    found = generate(decoder, prompts, 2, 10, **how)
    same_rollout(found, expected)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decoder_samples_the_same_tokens(shape):
    model = random_gpt(**SHAPES[shape])
    for how in ({}, dict(top_k=5), dict(batch_size=2), dict(temperature=0.7, eos=(0, 3))):
        found = assert_same_tokens(Decoder(model), **how)
        logp = completion_logprobs(model, found, how.get("temperature", 1.0))
        torch.testing.assert_close(logp, found.logp, rtol=1e-4, atol=1e-4)


def test_few_shapes_are_compiled_and_kept_whatever_comes(monkeypatch):
    """Compiled as on a GPU, once for each shape; what is kept holds nothing of the last call."""
    monkeypatch.setattr(compiled_module, "BUCKET", 4)
    monkeypatch.setattr(compiled_module, "MOST", 2)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(read_one, backend=backend, dynamic=False)
    decoder = Decoder(random_gpt(n_layer=1), step)
    for count in (5, 1, 9, 3, 30):      # prompts, two completions of each
        prompts = [[5, 6, 7 + i % 3][:1 + i % 3] for i in range(count)]
        assert_same_tokens(decoder, prompts)
    for prompts in (PROMPTS, [[1], [2, 8, 8, 8], [30, 4]], [[5, 6], [3, 4], [9, 2]], [[5], [3]]):
        assert_same_tokens(decoder, prompts)
    assert len(decoder.kept) <= 2, "memory is kept for every number of rows"
    assert len(graphs) <= 2, "every number of rows is another compilation"


class CastsOfMatrices(TorchDispatchMode):
    """Counts the casts to bfloat16 of matrices (rows, 32) or (32, columns), the weights' shapes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_cast = function.overloadpacket is torch.ops.aten._to_copy
        if is_cast and kwargs.get("dtype") == torch.bfloat16 and args[0].dim() == 2:
            self.count += 1
        return function(*args, **(kwargs or {}))


def casts(model, T, cache_enabled=True):
    """Casts of weights while T tokens are sampled in bfloat16, but those of the head, which on a
    GPU is in float32."""
    head = getattr(model, "model", model).lm_head
    head.forward = lambda h: torch.autocast("cpu", enabled=False)(F.linear)(h, head.weight)
    with CastsOfMatrices() as found, torch.autocast(
            "cpu", torch.bfloat16, cache_enabled=cache_enabled):
        generate(model, PROMPTS, 2, T, seed=3, eos=(-1,))
    return found.count


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_cast_once_for_all_tokens(frozen):
    model = random_gpt().requires_grad_(not frozen)
    assert casts(model, 2) == casts(model, 9), "sampling casts the weights for each token"
    assert all(p.requires_grad != frozen for p in model.parameters())
    decoder = Decoder(model)
    casts(decoder, 2, False)    # a graph keeps no casts of its own, hence no cache
    assert casts(decoder, 2, False) == casts(decoder, 9, False), "a graph casts for each token"


@pytest.mark.parametrize("shape", ["gpt2", "lora"])
def test_a_decoder_in_bfloat16_has_the_weights_of_now(shape):
    model = random_gpt(**SHAPES.get(shape, {}))
    if shape == "lora":
        model = with_lora(model)
    before = copy.deepcopy(model)
    decoder = Decoder(model)
    with torch.autocast("cpu", torch.bfloat16):
        generate(decoder, PROMPTS, 2, 10, seed=3, eos=(-1,))
    shaken(model, 0.3, seed=8)
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(decoder, PROMPTS, 2, 10, seed=3, eos=(-1,))
    now, old = ((completion_logprobs(x, found, 1.0) - found.logp).abs().mean()
                for x in (model, before))
    assert now < 0.1 * old, "it samples by other weights than its model has"


def test_an_environment_is_heard():
    def respond(first, r, rows, t, column):     # writes a token after each fourth one
        if t == 4:
            r.tokens[rows, column + 1] = 11
            r.sampled_mask[rows, t + 1] = False

    found = assert_same_tokens(Decoder(random_gpt()), respond=respond)
    assert not found.sampled_mask.all()


def test_a_critic_is_asked():
    skip_without("critic")
    from extras.critic import ValueHead
    model = random_gpt()
    model.value_head = shaken(ValueHead(32), 0.3)
    assert assert_same_tokens(Decoder(model)).values.std() > 0.05


# ------------------------------------------------------------------------------------------------
# compile = True


def word_nets():
    cfg = settings(num_generations=4)
    return setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS), replace(cfg, compile=True)


def is_plain(setup):
    """Whether nothing is compiled; None: some is."""
    plain = {setup.policy_fn is setup.policy, setup.reference_fn is setup.reference,
             setup.generate is generate}
    return plain.pop() if len(plain) == 1 else None


def changed(change=lambda h, ids, mask: h):
    """In place of torch.compile: the model as it is, but what it returns is changed."""
    def compile(function, **how):
        def call(ids, mask):
            return change(function(ids, mask), ids, mask)

        if not isinstance(function, nn.Module):
            return function
        call.lm_head = function.lm_head
        return call
    return compile


def raising(*args):
    raise RuntimeError("no compiler\nhere")


def failing_after(calls, kind=object):
    """In place of torch.compile: the function as it is, which raises after so many calls, if it is
    of this kind."""
    def compile(function, **how):
        left = iter(range(calls))

        def call(*args):
            found = function(*args)
            if next(left, None) is None:
                raising()
            return found
        return call if isinstance(function, kind) else function
    return compile


def test_what_holds_is_used_and_nothing_is_said(monkeypatch):
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
    lambda h, ids, mask: h + 0.05 * h.abs().mean(),
    lambda h, ids, mask: h.detach() + 0 * h, raising,
    lambda h, ids, mask: h * (1.1 if mask is None else 1),
    lambda h, ids, mask: h * (1.1 if len(ids) == 1 else 1)],
    ids=["wrong", "wrong gradient", "an error", "wrong without padding", "a wrong row"])
def test_compile_that_does_not_hold_is_turned_off_in_one_line(monkeypatch, change):
    monkeypatch.setattr(torch, "compile", changed(change))
    setup, cfg = word_nets()
    out = printed(check_precision, setup, cfg)
    assert "compile" in out and out.count("\n") == 1, out
    assert is_plain(setup)


def test_a_backward_that_cannot_be_compiled_is_noticed_before_training(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no backward")

    def works(graph, inputs):
        return graph.forward

    backend = aot_autograd(fw_compiler=works, bw_compiler=fails, inference_compiler=works)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    net = nn.Linear(2, 3)
    setup = SimpleNamespace(
        policy=net, policy_fn=net, reference=net, reference_fn=net, generate=generate)
    compile_nets(setup)
    assert setup.generate is generate, "a policy that is no GPT has no step to compile"
    setup.policy_fn(torch.ones(1, 2)).sum().backward()
    assert setup.policy_fn is setup.policy
    assert setup.policy.weight.grad is not None


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


@pytest.mark.parametrize("compile", [failing_after(40), failing_after(4, nn.Module)],
                         ids=["while sampling", "in training"])
def test_a_compiler_that_fails_is_turned_off_and_the_run_goes_on(
        plain, run_grpo, tmp_path, monkeypatch, compile):
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
    notes = []
    monkeypatch.setattr(torch, "compile", failing_after(3))
    step = OrPlain({}, read_one, read_again, notes.append)
    assert_same_tokens(Decoder(random_gpt(), step))
    assert len(notes) == 1


def test_running_out_of_memory_is_no_failure_of_the_compiler(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "compile", lambda function: function)
    with pytest.raises(torch.OutOfMemoryError):
        OrPlain({}, full, lambda: 1, None)()


def signature_of_2_8(model=None, *, fullgraph=False, dynamic=None, backend="inductor", mode=None,
                     options=None, disable=False):
    return model


def signature_of_2_13(model=None, *, fullgraph=False, dynamic=None, backend=None, mode=None,
                      options=None, name=None, disable=False, recompile_limit=None,
                      isolate_recompiles=False, shapes_spec=None):
    return model


def signature_of_another_torch(model, level):
    return model


@pytest.mark.parametrize("compile", [signature_of_2_8, signature_of_2_13])
def test_torch_compile_is_called_as_each_version_takes_it(monkeypatch, compile):
    monkeypatch.setattr(torch, "compile", compile)
    setup, cfg = word_nets()
    assert printed(check_precision, setup, cfg) == ""
    assert is_plain(setup) is False


def test_a_compiler_that_cannot_be_called_is_a_note(monkeypatch):
    monkeypatch.setattr(torch, "compile", signature_of_another_torch)
    setup, cfg = word_nets()
    out = printed(check_precision, setup, cfg)
    assert out.startswith("note: compile off") and out.count("\n") == 1, out
    assert is_plain(setup)
