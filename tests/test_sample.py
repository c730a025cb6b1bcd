"""sample.py against distributions written out by hand."""
import math

import pytest
import torch

from by_hand import (
    PROMPTS, TRUNCATIONS, distributions, allowed_by_hand, logits_by_hand, random_gpt)
from sample import completion_logprobs
from run.decoder import Decoder
from run.device import autocast
from sample import concatenate, draw, generate, pad_left, truncate


def test_pad_left_puts_padding_left():
    tokens, attention_mask = pad_left([[1, 2, 3], [4]])
    assert tokens[0].tolist() == [1, 2, 3] and tokens[1, 2] == 4
    assert attention_mask.tolist() == [[True, True, True], [False, False, True]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("truncation", [{}] + TRUNCATIONS)
def test_sampler_records_the_distribution_it_drew_from(temperature, truncation):
    model = random_gpt()
    r = generate(model, PROMPTS, 3, 8, eos=49, seed=3, temperature=temperature, **truncation)
    assert r.completion_mask.sum() > 60 and not r.attention_mask.all()
    logp = completion_logprobs(model, r, temperature)
    torch.testing.assert_close(r.logp, logp, rtol=0, atol=1e-5)
    for i, t, token, logits in distributions(model, r, PROMPTS, temperature):
        if truncation:
            allowed = allowed_by_hand(logits, **truncation)
            assert set(r.allowed[i, t].nonzero()[:, 0].tolist()) == allowed and token in allowed
            logits = logits.masked_fill(~r.allowed[i, t], -math.inf)
        p = logits.softmax(0)
        assert float(r.logp[i, t]) == pytest.approx(float(p[token].log()), abs=1e-5)
        entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
        assert float(r.entropy[i, t]) == pytest.approx(entropy, abs=1e-5)
    assert (r.allowed is not None) == bool(truncation)


def test_rollout_holds_prompts_padding_and_what_each_field_promises():
    r = generate(random_gpt(), PROMPTS, 2, 4, eos=49, seed=0)
    assert r.tokens.shape == r.attention_mask.shape == (6, 5 + 4)
    assert r.completion_mask.shape == r.logp.shape == r.entropy.shape == (6, 4)
    assert not r.logp.requires_grad and not r.entropy.requires_grad
    for i in range(6):
        prompt = PROMPTS[i // 2]
        assert r.tokens[i, 5 - len(prompt):5].tolist() == prompt
        padding = 5 - len(prompt)
        assert r.attention_mask[i].tolist() == [False] * padding + [True] * (len(prompt) + 4)


def test_sampled_pairs_follow_the_distribution_of_the_model():
    V, N, T = 6, 30_000, 0.7  # pairs, so that noise used twice would show
    model = random_gpt(V)
    r = generate(model, [[1, 2]], N, 2, eos=V - 1, seed=5, temperature=T)
    first = (logits_by_hand(model, [1, 2])[-1] / T).softmax(0)
    second = [(logits_by_hand(model, [1, 2, a])[-1] / T).softmax(0) for a in range(V - 1)]
    expected = {(a, b): float(first[a] * second[a][b]) for a in range(V - 1) for b in range(V)}
    expected[V - 1, V - 1] = float(first[V - 1])
    counts = dict.fromkeys(expected, 0)
    for pair in r.tokens[:, 2:].tolist():
        counts[tuple(pair)] += 1
    chi_square = sum((counts[k] - N * p) ** 2 / (N * p) for k, p in expected.items())
    df = len(expected) - 1
    assert chi_square < df + 4 * math.sqrt(2 * df)
    assert min(expected.values()) * N > 5


def test_first_tokens_follow_the_distribution_in_a_larger_vocabulary():
    model, N = random_gpt(200), 20_000
    r = generate(model, [[1, 2, 3]], N, 1, eos=199, seed=6, temperature=1.5)
    expected = N * (logits_by_hand(model, [1, 2, 3])[-1] / 1.5).softmax(0)
    counts = torch.bincount(r.tokens[:, -1], minlength=200)
    assert float(((counts - expected).square() / expected).sum()) < 199 + 4 * math.sqrt(2 * 199)


def test_samples_of_a_group_differ_from_their_first_token():
    r = generate(random_gpt(), PROMPTS, 8, 3, eos=49, seed=0)
    assert all(len(set(group)) > 2 for group in r.tokens[:, 5].view(3, 8).tolist())


def pairs(a, b):
    """The tensors of two rollouts side by side."""
    found = list(zip(vars(a).values(), vars(b).values()))
    assert all((x is None) == (y is None) for x, y in found)
    return [(x, y) for x, y in found if x is not None]


def test_seed_alone_decides_the_rollout():
    a, b, c = (generate(random_gpt(), PROMPTS, 4, 8, eos=49, seed=seed, top_p=0.9)
               for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in pairs(a, b))
    assert not torch.equal(a.tokens, c.tokens)


def test_sampling_neither_uses_nor_moves_the_global_random_state():
    state = torch.get_rng_state()
    a = generate(random_gpt(), PROMPTS, 2, 4, eos=49, seed=1)
    torch.manual_seed(123)
    assert torch.equal(generate(random_gpt(), PROMPTS, 2, 4, eos=49, seed=1).tokens, a.tokens)
    torch.set_rng_state(state)
    model = random_gpt()
    state = torch.get_rng_state()
    generate(model, PROMPTS, 2, 4, eos=49, seed=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.9)])
@pytest.mark.parametrize("batch_size", [1, 4, 8, 1000])
def test_batch_size_changes_no_rollout(batch_size, truncation):
    model, prompts = random_gpt(8), [[3, 1, 4], [5], [7, 2, 6, 5, 3], [2, 2]]  # many rows end early
    whole = generate(model, prompts, 4, 10, eos=7, seed=9, **truncation)
    parts = generate(model, prompts, 4, 10, eos=7, seed=9, batch_size=batch_size, **truncation)
    for name in ("tokens", "attention_mask", "mask", "ended"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    torch.testing.assert_close(whole.logp, parts.logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.entropy, parts.entropy, rtol=0, atol=1e-5)
    if truncation:
        assert torch.equal(whole.allowed[whole.mask], parts.allowed[parts.mask])


def test_batch_size_bounds_the_rows_that_are_decoded_at_once():
    model, rows = random_gpt(), []
    model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    generate(model, PROMPTS, 4, 5, eos=49, seed=9, batch_size=8)
    # prompts are computed once, not once per sample
    assert max(rows) == 8 and rows[0] == 2 and 1 in rows

@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.9)])
def test_parts_of_the_prompts_together_are_the_whole(truncation):
    """As several processes sample them; one of them has no prompt."""
    model, prompts = random_gpt(8), [[3, 1, 4], [5], [7, 2, 6, 5, 3], [2, 2]]
    whole = generate(model, prompts, 2, 10, eos=7, seed=4, **truncation)
    parts = [generate(model, prompts, 2, 10, eos=7, seed=4, part=part, **truncation)
             for part in (slice(0, 1), slice(1, 1), slice(1, 4))]
    assert [len(part.mask) for part in parts] == [2, 0, 6]
    assert len({part.mask.shape[1] for part in parts}) == 3     # each is as wide as it must be
    joined = concatenate(parts, 7)
    for name in ("tokens", "attention_mask", "mask", "ended"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    for name in ("logp", "entropy"):
        a, b = getattr(joined, name), getattr(whole, name)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert not truncation or torch.equal(joined.allowed[joined.mask], whole.allowed[whole.mask])
    assert completion_logprobs(model, joined).shape == whole.logp.shape


def test_prompts_added_behind_leave_a_row_as_it_was():
    model = random_gpt()
    few = generate(model, PROMPTS[:2], 3, 8, eos=49, seed=4)
    many = generate(model, PROMPTS[:2] + [[8] * 12, [1]], 3, 8, eos=49, seed=4)[:6]
    T = few.mask.shape[1]
    assert many.completions(49) == few.completions(49)
    torch.testing.assert_close(many.logp[:, :T], few.logp, rtol=0, atol=1e-5)


def test_model_that_only_ends_stops_after_one_step():
    model, calls = random_gpt(), []
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1)
        model.wte.weight[49] = 10
    model.register_forward_hook(lambda *a: calls.append(1))
    r = generate(model, PROMPTS, 2, 15, eos=49, seed=0)
    assert len(calls) == 1  # the prompts, and nothing after them
    assert r.completion_mask.tolist() == [[True]] * 6 and r.ended.all()
    assert r.tokens[:, 5:].tolist() == [[49]] * 6
    assert r.completions(49) == [[]] * 6


def test_mask_holds_the_end_token_and_nothing_after_it():
    prompts = [[7, 1, 7], [7]]  # end tokens in a prompt end nothing
    r = generate(random_gpt(8), prompts, 30, 12, eos=7, seed=2)
    texts, lengths = r.completions(7), set()
    for i, row in enumerate(r.tokens[:, 3:].tolist()):
        ended = 7 in row
        n = row.index(7) + 1 if ended else len(row)
        lengths.add(n)
        assert r.completion_mask[i].tolist() == [t < n for t in range(len(row))] and bool(r.ended[i]) == ended
        assert row[n:] == [7] * (len(row) - n) and texts[i] == row[:n - ended]
        assert (r.logp[i, :n] < 0).all() and (r.entropy[i, :n] > 0).all()
        assert (r.logp[i, n:] == 0).all() and (r.entropy[i, n:] == 0).all()
    assert len(lengths) > 3 and not r.ended.all()
    assert max(lengths) == r.completion_mask.shape[1]


@pytest.mark.parametrize("fast", (False, True))
def test_any_of_several_end_tokens_ends(fast):
    model = random_gpt(8)
    way = dict(decode=Decoder(model, graphs=False)) if fast else {}
    r = generate(model, [[1], [2]], 60, 12, eos=(7, 3), seed=2, **way)
    for i, row in enumerate(r.tokens[:, 1:].tolist()):
        n = int(r.completion_mask[i].sum())
        assert not {7, 3} & {*row[:n - 1]}, "no end token within a completion"
        assert bool(r.ended[i]) == (row[n - 1] in (7, 3))
        assert row[n:] == [7] * (len(row) - n), "the first end token fills the rest"
    last = {row[int(n) - 1] for row, n in zip(r.tokens[:, 1:].tolist(), r.completion_mask.sum(1))}
    assert {7, 3} <= last, "both end completions"


@pytest.mark.parametrize("every", [1, 3, 16])  # tokens between looks at what has ended, as on a GPU
@pytest.mark.parametrize("prompts", [    # padded and not
    [[3, 1, 4], [5], [2, 6]], [[3, 1], [5, 0], [2, 6]]])
@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.9)])
def test_ended_rows_are_not_computed_and_change_no_other(every, prompts, truncation, monkeypatch):
    model, rows = random_gpt(8), []
    monkeypatch.setattr("sample.CHECK_EVERY", {"cpu": every})
    hook = model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    r = generate(model, prompts, 8, 12, eos=7, seed=2, **truncation)
    hook.remove()
    running = r.completion_mask.sum(0).tolist()  # before each token
    assert rows[:1] == [3] and running[0] == 24 and 0 < running[-1] < 12
    T = len(running)
    assert rows[1:][:T - 1] == [running[t // every * every] for t in range(1, T)]
    for i in range(24):  # alone, with the noise of its place
        noise = torch.rand(24, 12, generator=torch.Generator().manual_seed(2))[i]
        ids = list(prompts[i // 8])
        for t in range(int(r.completion_mask[i].sum())):
            p = (logits_by_hand(model, ids)[-1]).softmax(0)
            if truncation:
                p = torch.where(r.allowed[i, t], p, 0.0)
            token = int((p.cumsum(0) > noise[t] * p.sum()).nonzero()[0])
            assert int(r.tokens[i, -r.completion_mask.shape[1] + t]) == token
            assert float(r.logp[i, t]) == pytest.approx(float((p[token] / p.sum()).log()), abs=1e-5)
            ids.append(token)


def test_width_is_that_of_the_longest_completion():
    model = random_gpt(3)  # few tokens, so that all rows end early
    r = generate(model, [[0, 1]], 4, 20, eos=2, seed=1, top_p=0.99)
    longest = int(r.completion_mask.sum(1).max())
    assert longest < 20 and r.allowed.shape == (4, longest, 3)
    assert r.tokens.shape == r.attention_mask.shape == (4, 2 + longest)


def test_rows_of_a_rollout_can_be_taken_apart():
    model = random_gpt(8)
    r = generate(model, [[3, 1, 4], [5]], 4, 6, eos=7, seed=2, top_p=0.9)
    rows = torch.tensor([6, 1])
    part = r[rows]
    assert all(torch.equal(x, y[rows]) for x, y in pairs(part, r))
    assert part.completions(7) == [r.completions(7)[6], r.completions(7)[1]]
    torch.testing.assert_close(completion_logprobs(model, part), r.logp[rows], rtol=0, atol=1e-5)
    assert generate(model, [[5]], 2, 2, eos=7, seed=2)[:1].allowed is None


def test_prompt_of_the_wrong_length_is_refused_with_number_and_limit():
    for prompts in ([[1], []], [[1], [2] * 17]):
        n = len(prompts[1])
        with pytest.raises(ValueError, match=rf"prompt 2 has {n} tokens: must be 1 to 16 .*24.*8"):
            generate(random_gpt(), prompts, 2, 8, eos=49, seed=0)
    assert generate(random_gpt(), [[1], [2] * 16], 2, 8, eos=49, seed=0).mask.shape == (4, 8)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_temperature_that_is_not_above_zero_is_refused(temperature):
    with pytest.raises(ValueError, match=f"temperature = {temperature}.*above 0"):
        generate(random_gpt(), PROMPTS, 2, 4, eos=49, seed=0, temperature=temperature)


def test_bfloat16_sampler_and_trainer_agree_roughly_and_float32_is_untouched():
    model = random_gpt()
    with autocast("cpu", torch.bfloat16):
        assert model.new_cache(1, 4).dtype == torch.bfloat16
        r = generate(model, PROMPTS, 4, 8, eos=49, seed=3)
        logp = completion_logprobs(model, r)
    assert r.logp.dtype == logp.dtype == torch.float32
    assert (r.logp - logp).abs().max() < 0.1
    with autocast("cpu", torch.float32):
        exact = completion_logprobs(model, r)
    assert torch.equal(exact, completion_logprobs(model, r))
    assert 1e-4 < (logp - exact).abs().max() < 0.3  # bfloat16 was in fact used


# ------------------------------------------------------------------------------------------------
# from logits to a token

def test_draw_inverts_the_distribution_function():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(200, 30, generator=generator).mul(3).softmax(-1)
    probs = probs * (torch.rand(200, 30, generator=generator) < 0.4)
    probs[:, 17] += 0.01  # at least one
    probs *= torch.linspace(0.5, 2, 200)[:, None] / probs.sum(-1, keepdim=True)  # need not sum to 1
    u = torch.rand(200, generator=generator)
    for row, x, token in zip(probs.double(), u.double(), draw(probs, u).tolist()):
        below = row[:token].sum() / row.sum()
        assert below - 1e-6 <= x <= below + row[token] / row.sum() + 1e-6 and row[token] > 0


@pytest.mark.parametrize("V", [2, 30, 50257])
def test_draw_never_returns_a_token_of_probability_zero(V):
    generator = torch.Generator().manual_seed(V)
    probs = torch.rand(60, V, generator=generator) * (torch.rand(60, V, generator=generator) < 0.3)
    probs[:20, :V // 2] = 0      # zeros in front
    probs[20:40, (V + 1) // 2:] = 0  # zeros behind
    probs[torch.arange(60), torch.where(torch.arange(60) < 20, V - 1, 0)] += 0.1
    probs /= probs.sum(-1, keepdim=True)
    for scale in (1.0, 0.999, 1.001):  # sums that rounding has moved off 1
        for u in (0.0, 1e-8, 0.5, 1 - 2 ** -24):
            token = draw(probs * scale, torch.full((60,), u))
            assert (probs.gather(1, token[:, None]) > 0).all(), (scale, u)


def test_draw_reaches_the_first_and_the_last_possible_token():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    numbers = (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2 ** -24)
    drawn = [int(draw(probs, torch.tensor([u]))) for u in numbers]
    assert drawn == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("truncation", TRUNCATIONS + [
    dict(top_k=1), dict(top_k=1000), dict(top_p=0.05), dict(min_p=1.0)])
def test_truncate_keeps_what_its_definition_keeps(truncation):
    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    out = truncate(logits, **truncation)
    for row, before in zip(out, logits):
        kept = allowed_by_hand(before, **truncation)
        assert set((row > -math.inf).nonzero()[:, 0].tolist()) == kept
        assert all(row[i] == before[i] for i in kept)


@pytest.mark.parametrize("truncation", [
    dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0), dict(top_k=1, top_p=1e-9, min_p=1.0)])
def test_truncate_keeps_at_least_one_token(truncation):
    flat, peaked, barred = torch.zeros(1, 40), torch.zeros(1, 40), torch.full((1, 40), -math.inf)
    peaked[0, 13], barred[0, 5] = 200.0, -3.0
    for logits, best in ((flat, None), (peaked, 13), (barred, 5)):
        kept = (truncate(logits, **truncation) > -math.inf).nonzero()[:, 1].tolist()
        assert kept and (best is None or kept == [best])


def test_truncate_by_default_changes_nothing():
    logits = torch.randn(3, 9)
    assert torch.equal(truncate(logits), logits)
