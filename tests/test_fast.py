"""Fast paths beside plain ones: the decode step with fixed shapes, attention's two branches,
and the ladder that takes away what does not hold."""
import functools
import math
from dataclasses import replace

import pytest
import torch

from model import attend
from run import fast
from run.fast import Decoder, prove
from rollout import completion_logprobs, generate
from worlds import (
    SHAPES, WORD_PROMPTS, WORDS, nets_of, printed, random_gpt, refusal, same_rollout, seed_of,
    settings, word_gpt)

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [3, 4], [9]]


def test_a_step_of_fixed_shape_draws_the_same_tokens():
    decoder = Decoder(CPU, compiled=False)
    for shape in SHAPES.values():
        model = random_gpt(**shape)
        for how in ({}, dict(top_k=5), dict(batch_size=2), dict(temperature=0.7, eos=(0, 3))):
            how = dict(seed=3, eos=0) | how
            expected = generate(model, PROMPTS, 2, 10, **how)
            found = generate(model, PROMPTS, 2, 10, decode=decoder, **how)
            same_rollout(found, expected)
            logp = completion_logprobs(model, found, how.get("temperature", 1.0))
            torch.testing.assert_close(logp, found.logp, rtol=1e-4, atol=1e-4)


def test_buffers_are_kept_between_calls_and_hold_nothing_of_the_last_one():
    model = random_gpt()
    decoder = Decoder(CPU, compiled=False)
    for prompts in (PROMPTS, [[1], [2, 8, 8, 8], [30, 4]], PROMPTS):
        expected = generate(model, prompts, 2, 10, seed=1, eos=0)
        same_rollout(generate(model, prompts, 2, 10, seed=1, eos=0, decode=decoder), expected)
    assert len(decoder.buffers) == 1
    own, = decoder.buffers.values()
    assert own.rollout.tokens.shape[1] == Decoder.BUCKET


def test_forced_tokens_and_answers_reach_the_buffers():
    model = random_gpt()
    def respond(first, r, rows, t, column):     # puts a token behind each fourth one
        if t == 4:
            r.tokens[rows, column + 1] = 11
            r.sampled_mask[rows, t + 1] = False

    how = dict(seed=3, eos=0, respond=respond)
    expected = generate(model, PROMPTS, 2, 10, **how)
    assert not expected.sampled_mask.all()
    found = generate(model, PROMPTS, 2, 10, decode=Decoder(CPU, compiled=False), **how)
    same_rollout(found, expected)


def by_definition(q, k, v, seen, scale):
    """softmax(scale * q k^T) v in float64, a head and a position at a time."""
    B, nh, T, hs = q.shape
    group = nh // k.shape[1]
    out = torch.zeros(B, nh, T, hs, dtype=torch.float64)
    for b in range(B):
        for j in range(nh):
            for t in range(T):
                keys = k[b, j // group].double()
                weights = (keys @ q[b, j, t].double() * scale + seen[b, 0, t]).softmax(0)
                out[b, j, t] = weights @ v[b, j // group].double()
    return out


def test_both_branches_of_attention_are_its_definition():
    generator = torch.Generator().manual_seed(seed_of(0))

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for T, S in ((1, 7), (5, 5), (130, 130)):       # by hand, by hand in bfloat16, torch's
            q = random(2, 4, T, 8).to(dtype)
            k = random(2, 2, S, 8).to(dtype)
            v = random(2, 2, S, 8).to(dtype)
            mask = random(2, 1, T, S) > -0.5
            mask[..., 0] = True
            added = torch.zeros(2, 1, T, S).masked_fill(~mask, -math.inf)
            causal = torch.zeros(T, S).masked_fill(~torch.ones(T, S).bool().tril(), -math.inf)
            nothing = torch.zeros(2, 1, T, S)
            cases = [(mask, False, added), (added.to(dtype), False, added), (None, False, nothing)]
            if T == S:
                cases.append((None, True, causal.expand(2, 1, T, S)))
            for given, is_causal, seen in cases:
                found = attend(q, k, v, given, is_causal, 0.3).double()
                expected = by_definition(q, k, v, seen, 0.3)
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def word_nets(**knobs):
    cfg = settings(num_generations=4, **knobs)
    nets = nets_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    return nets, replace(cfg, compile=knobs.get("compile", False))


def compiled(change=lambda h: h):
    """In place of torch.compile: the model as it is, but what it returns is changed."""
    def compile(function, **how):
        if not isinstance(function, torch.nn.Module):
            return function

        def call(*args):
            return change(function(*args))
        call.lm_head = function.lm_head
        return call
    return compile


def raising(*args):
    raise RuntimeError("no compiler\n here")


def test_what_holds_is_used_and_nothing_is_said(monkeypatch):
    monkeypatch.setattr(torch, "compile", compiled())
    for dtype in (torch.float32, torch.bfloat16):
        nets, cfg = word_nets(compile=True)
        nets.dtype = dtype
        before = torch.get_rng_state()
        assert printed(prove, nets, cfg) == ""
        assert nets.policy_fn is not nets.policy
        assert nets.reference_fn is not nets.reference
        assert isinstance(nets.generate.keywords["decode"], Decoder)
        assert nets.dtype == dtype
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in nets.policy.parameters())


@pytest.mark.parametrize("change, says", [
    (lambda h: h + 0.05 * h.abs().mean(), "note: compile off: log-probs are off by"),
    (lambda h: h * math.nan, "note: compile off: log-probs are off by nan"),
    (lambda h: h.detach() + 0 * h, "note: compile off: gradients are off"),
    (raising, "note: compile off: no compiler here\n")])
def test_compile_that_does_not_hold_goes(monkeypatch, change, says):
    monkeypatch.setattr(torch, "compile", compiled(change))
    nets, cfg = word_nets(compile=True)
    out = printed(prove, nets, cfg)
    assert out.startswith(says) and out.count("\n") == 1, out
    assert nets.policy_fn is nets.policy
    assert nets.reference_fn is nets.reference
    assert nets.generate is generate


def off_under_autocast(wrong):
    """completion_logprobs, wrong where the forward pass is in bfloat16, or always."""
    def logprobs(*args):
        low = torch.is_autocast_enabled("cpu")
        return completion_logprobs(*args) + (0.5 if low or next(wrong) else 0.0)
    return logprobs


def test_bfloat16_that_does_not_hold_goes(monkeypatch):
    nets, cfg = word_nets()
    nets.dtype = torch.bfloat16
    never = iter(lambda: False, True)
    monkeypatch.setattr(fast, "completion_logprobs", off_under_autocast(never))
    out = printed(prove, nets, cfg)
    assert out.startswith("note: bfloat16 off: log-probs are off by 0.5")
    assert nets.dtype == torch.float32


def test_a_run_stops_where_nothing_holds(monkeypatch):
    nets, cfg = word_nets()
    nets.dtype = torch.bfloat16
    all_but_the_first = iter([False] + [True] * 20)
    monkeypatch.setattr(fast, "completion_logprobs", off_under_autocast(all_but_the_first))
    text = refusal(prove, nets, cfg)
    assert "device = 'cpu'" in text and "log-probs are off by 0.5" in text


def test_a_run_is_the_same_compiled(grpo, rows, tmp_path, monkeypatch):
    """With torch's own graphs, shapes and guards, but without its code generator, which is slow."""
    plain = tmp_path / "plain"
    fast_one = tmp_path / "fast"
    grpo(plain, "--beta=0.1", "--max_iters=1")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = grpo(fast_one, "--beta=0.1", "--max_iters=1", "--compile=True")
    assert "compile off" not in out
    for log in ("metrics.jsonl", "samples.jsonl"):
        for a, b in zip(rows(plain / log), rows(fast_one / log), strict=True):
            assert a.keys() == b.keys()
            for name in a.keys() - {"step_time"}:
                expected = a[name]
                if isinstance(expected, float):
                    expected = pytest.approx(expected, 1e-3, 1e-5)
                assert b[name] == expected, name
