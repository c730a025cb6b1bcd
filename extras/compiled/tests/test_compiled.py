"""Reading tokens in memory of fixed shape, and compile = True beside a plain run."""
import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from extras.compiled import BUCKET, Decoder, compile_nets
from rollout import completion_logprobs, generate
from run.precision import check_precision
from worlds import (
    SHAPES, WORDS, WORD_PROMPTS, printed, random_gpt, read_rows, same_rollout, settings, setup_of,
    shaken, skip_without, word_gpt)

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


def test_memory_is_kept_between_calls_and_holds_nothing_of_the_last_one():
    decoder = Decoder(random_gpt())
    unpadded = [[5, 6], [3, 4], [9, 2]]
    one_token = [[5], [3], [9]]
    for prompts in (PROMPTS, [[1], [2, 8, 8, 8], [30, 4]], unpadded, one_token, PROMPTS):
        assert_same_tokens(decoder, prompts)
    (N, S, _), = decoder.kept
    assert (N, S) == (6, BUCKET)


def test_all_completions_are_read_in_one_shape_until_all_have_ended():
    model = random_gpt(8, seed=5)       # many end early
    shapes = []
    model.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    generate(Decoder(model), [[5, 6, 1], [3, 4], [2]], 4, 12, seed=3, eos=(7,))
    assert set(shapes[1:]) == {(12, 1, 32)}


def test_an_environment_is_heard():
    model = random_gpt()

    def respond(first, r, rows, t, column):     # writes a token after each fourth one
        if t == 4:
            r.tokens[rows, column + 1] = 11
            r.sampled_mask[rows, t + 1] = False

    found = assert_same_tokens(Decoder(model), respond=respond)
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


def compiled(change=lambda h: h):
    """In place of torch.compile: the model as it is, but what it returns is changed."""
    def compile(function, **how):
        if not isinstance(function, nn.Module):
            return function

        def call(*args):
            return change(function(*args))
        call.lm_head = function.lm_head
        return call
    return compile


def raising(*args):
    raise RuntimeError("no compiler\nhere")


def test_what_holds_is_used_and_nothing_is_said(monkeypatch):
    monkeypatch.setattr(torch, "compile", compiled())
    for dtype in (torch.float32, torch.bfloat16):
        setup, cfg = word_nets()
        setup.dtype = dtype
        before = torch.get_rng_state()
        assert printed(check_precision, setup, cfg) == ""
        assert setup.policy_fn is not setup.policy
        assert setup.reference_fn is not setup.reference
        assert setup.generate is not generate
        assert setup.dtype == dtype
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in setup.policy.parameters())


@pytest.mark.parametrize("change, says", [
    (lambda h: h + 0.05 * h.abs().mean(), "note: compile off: log-probs are off by"),
    (lambda h: h * math.nan, "note: compile off: log-probs are off by nan"),
    (lambda h: h.detach() + 0 * h, "note: compile off: gradients are off"),
    (raising, "note: compile off: RuntimeError(")])
def test_compile_that_does_not_hold_is_turned_off(monkeypatch, change, says):
    monkeypatch.setattr(torch, "compile", compiled(change))
    setup, cfg = word_nets()
    out = printed(check_precision, setup, cfg)
    assert out.startswith(says) and out.count("\n") == 1, out
    assert setup.policy_fn is setup.policy
    assert setup.reference_fn is setup.reference
    assert setup.generate is generate


def test_sampling_from_a_policy_that_is_no_gpt_is_not_compiled():
    setup = SimpleNamespace(policy=nn.Linear(2, 3), reference=nn.Linear(2, 3), generate=generate)
    compile_nets(setup)
    assert setup.policy_fn is not setup.policy
    assert setup.generate is generate


def test_a_run_is_the_same_compiled(grpo, tmp_path, monkeypatch):
    """With torch's own graphs, shapes and guards, but without its code generator, which is slow."""
    plain = tmp_path / "plain"
    fast_one = tmp_path / "fast"
    grpo(plain, "--beta=0.1", "--max_iters=1")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = grpo(fast_one, "--beta=0.1", "--max_iters=1", "--compile=True")
    assert "compile off" not in out
    for log in ("metrics.jsonl", "samples.jsonl"):
        for a, b in zip(read_rows(plain / log), read_rows(fast_one / log), strict=True):
            assert a.keys() == b.keys()
            for name in a.keys() - {"step_time"}:
                expected = a[name]
                if isinstance(expected, float):
                    expected = pytest.approx(expected, 1e-3, 1e-5)
                assert b[name] == expected, name
