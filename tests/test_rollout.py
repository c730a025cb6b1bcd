"""rollout.py against distributions written out by hand."""
import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from by_hand import logits_by_hand
from common.files import ROOT
from fast import BufferedLogProb
from rollout import (
    Sampling, completion_entropies, completion_logprobs, concatenate, draw, generate, truncate)
from worlds import (
    assert_near, forcing, generator_of, gradient, random_gpt, random_ids, refusal,
    same_rollout)

PROMPTS = [[3, 1, 4], [5], [7, 2, 6, 5, 3]]
T = 8


def rollout_of(model=None, prompts=PROMPTS, G=3, T=T, eos=(49,), seed=3, **more):
    return generate(model or random_gpt(), prompts, G, T, eos=eos, seed=seed, **more)


def forced_ids():
    """(9, T) ids, -1 where the policy draws. Row 1 is forced from its second token to its end, the
    second token of row 2 is the end token."""
    ids = 3 + random_ids(9, T, 46)
    forced = ids.where(random_ids(9, T, 10, seed=2) < 3, -1)
    forced[1] = ids[1]
    forced[2] = -1
    forced[:, 0] = -1
    forced[2, 1] = 49
    return forced


# ------------------------------------------------------------------------------------------------
# what is drawn and recorded

def allowed_by_hand(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Token ids that are left of logits (V,), in plain Python."""
    kept = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        kept = kept[:top_k]
    p = logits.double().exp()
    if top_p < 1:
        total = sum(float(p[i]) for i in kept)
        before = 0.0
        nucleus = []
        for i in kept:
            if before < top_p * total:
                nucleus.append(i)
            before += float(p[i])
        kept = nucleus
    return {i for i in kept if p[i] >= min_p * p.max()}


@pytest.mark.parametrize("temperature, truncation, forced", [
    (1.0, dict(), False), (0.7, dict(), True), (1.5, dict(top_k=5), False),
    (1.5, dict(top_p=0.8), False), (1.5, dict(min_p=0.1), False),
    (1.5, dict(top_k=20, top_p=0.9, min_p=0.02), True)])
def test_what_is_recorded_is_the_distribution_that_was_drawn_from(temperature, truncation, forced):
    """By hand, and the trainer's log-probs and entropies are the same. The token is where a number
    per row and step falls in it."""
    model = random_gpt()
    more = dict(respond=forcing(forced_ids())) if forced else {}
    r = rollout_of(model, seed=3, temperature=temperature, **truncation, **more)
    width = r.completion_mask.shape[1]
    assert torch.equal(r.sampled_mask, r.completion_mask) != forced

    logp = completion_logprobs(model, r, temperature)
    entropies = completion_entropies(model, r, temperature)
    assert_near(logp.detach(), r.logp)
    assert_near(entropies.detach(), r.entropy)
    assert not r.logp.requires_grad and logp.requires_grad and entropies.requires_grad
    assert not r.logp[~r.sampled_mask].any() and not r.entropy[~r.sampled_mask].any()

    noise = torch.rand(9, T, generator=torch.Generator().manual_seed(3))
    for i, t in r.sampled_mask.nonzero().tolist():
        ids = r.tokens[i][r.attention_mask[i]].tolist()
        ids = ids[:len(ids) - width + t + 1]
        logits = logits_by_hand(model, ids[:-1])[-1] / temperature
        p = logits.softmax(0)
        if truncation:
            allowed = allowed_by_hand(logits, **truncation)
            assert set(r.allowed[i, t].nonzero()[:, 0].tolist()) == allowed
            p = torch.where(r.allowed[i, t], p, 0.0)
            p = p / p.sum()
        end = float(p[:ids[-1] + 1].sum())
        u = float(noise[i, t])
        assert end - float(p[ids[-1]]) - 1e-5 <= u <= end + 1e-5, "another token was drawn"
        assert float(r.logp[i, t]) == pytest.approx(math.log(p[ids[-1]]), abs=1e-5)
        entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
        assert float(r.entropy[i, t]) == pytest.approx(entropy, abs=1e-5)


def test_a_rollout_holds_prompts_padding_and_what_each_field_promises():
    """Either of two end tokens ends a completion; one in a prompt ends nothing."""
    r = rollout_of(random_gpt(8), eos=(7, 3), G=20, T=12)
    texts = r.completions((7, 3))
    width = r.completion_mask.shape[1]
    last = set()
    for i, row in enumerate(r.tokens.tolist()):
        prompt = PROMPTS[i // 20]
        padding = 5 - len(prompt)
        assert row[padding:5] == prompt
        assert r.attention_mask[i].tolist() == [False] * padding + [True] * (len(prompt) + width)
        row = row[5:]
        ends = [t for t, token in enumerate(row) if token in (7, 3)]
        n = ends[0] + 1 if ends else width
        assert r.completion_mask[i].tolist() == [t < n for t in range(width)]
        assert bool(r.ended[i]) == bool(ends) and row[n:] == [7] * (width - n)
        assert texts[i] == row[:n - bool(ends)], "a text is without its end token"
        last |= {row[n - 1]}
    assert {7, 3} < last, "choose another seed: not both end tokens, or no row is truncated"
    part = r[torch.tensor([6, 1])]
    assert part.completions((7, 3)) == [texts[6], texts[1]]
    assert torch.equal(part.logp, r.logp[[6, 1]])


def test_forced_tokens_stand_where_they_were_put():
    forced = forced_ids()
    r = rollout_of(respond=forcing(forced))
    width = r.completion_mask.shape[1]
    tokens, forced = r.tokens[:, -width:], forced[:, :width]
    is_forced = (forced >= 0) & r.completion_mask
    assert torch.equal(tokens[is_forced], forced[is_forced])
    assert torch.equal(r.sampled_mask, r.completion_mask & ~is_forced)
    assert r.sampled_mask[1].sum() == 1 and r.completion_mask[1].all(), "forced to its end"
    assert tokens[2, 1] == 49 and r.completion_mask[2, 2], "a forced end token ends nothing"
    assert r.completions((49,))[2][1] == 49, "and is part of the text"


def test_no_way_of_decoding_changes_a_rollout(monkeypatch):
    """The noise is a number per row and step: each row is what it would be alone."""
    made = dict(model=random_gpt(8, seed=5), prompts=[[3, 1, 4], [5], [7, 2, 6, 5, 3], [2, 2]],
                G=4, T=12, eos=(7,), seed=2, temperature=1.5, top_p=0.9)   # many rows end early
    whole = rollout_of(**made)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    for batch_size in (1, 8, 1000):
        same_rollout(rollout_of(**made, batch_size=batch_size), whole)
    assert torch.equal(state, torch.get_rng_state()), "sampling has moved the global random state"
    for every in (1, 16):       # tokens between checks for finished rows, as on a GPU
        monkeypatch.setattr("rollout.CHECK_EVERY", {"cpu": every})
        same_rollout(rollout_of(**made), whole)
    ranges = (slice(0, 1), slice(1, 1), slice(1, 3), slice(3, 4))
    parts = [rollout_of(**made, part=part) for part in ranges]
    assert [len(part.logp) for part in parts] == [4, 0, 8, 4]
    same_rollout(concatenate(parts), whole)
    assert not torch.equal(rollout_of(**made | {"seed": 3}).tokens, whole.tokens)


def test_rows_that_have_ended_are_not_computed():
    model = random_gpt(8, seed=5)
    rows = []
    model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    r = rollout_of(model, G=8, T=12, eos=(7,))
    running = r.completion_mask.sum(0).tolist()     # before each token
    assert rows[0] == 3, "prompts are computed once, not once per sample"
    assert rows[1:len(running)] == running[1:] and 0 < running[-1] < 24
    rows.clear()
    rollout_of(model, G=8, T=12, eos=(7,), batch_size=8)
    assert max(rows) == r.completion_mask[:, 1].view(3, 8).sum(1).max(), "8 rows are one batch"


def test_what_cannot_be_sampled_is_refused():
    for prompts in ([[1], []], [[1], [2] * 17]):
        assert "prompt 2" in refusal(rollout_of, prompts=prompts)


# ------------------------------------------------------------------------------------------------
# log-probs and their gradient, in pieces of memory

def test_pieces_of_logits_change_nothing(monkeypatch):
    """Nor does who listens to the head, as the tape does. Pieces that are not kept are formed again
    in the backward; without a listener in one buffer."""
    model = random_gpt()
    r = rollout_of(model, top_p=.9)

    def found():
        logp = completion_logprobs(model, r, .7)
        loss = logp.sum() + 2 * completion_entropies(model, r, .7).square().sum()
        return torch.cat([logp.detach().flatten(), gradient(loss, model.parameters())])

    whole = found()
    least = 1e-6 * whole.abs().max()
    heard = []
    pieces = 2 * math.ceil(int(r.sampled_mask.sum()) / 7)       # of log-probs, and of entropies
    for name, calls in ("LOGITS_AT_ONCE", pieces), ("LOGITS_KEPT", 2 * pieces):
        monkeypatch.setattr(f"fast.{name}", 7 * 50)
        assert_near(found(), whole, least)
        heard.clear()
        handle = model.lm_head.register_forward_hook(lambda *given: heard.append(0))
        assert_near(found(), whole, least)
        assert len(heard) == calls, f"{len(heard)} calls of the head are heard, of {calls}"
        handle.remove()


def test_log_probs_in_one_buffer_are_those_of_torch(monkeypatch):
    """With their first and second derivatives, in pieces of which the last is shorter, with a
    temperature, and tokens that could not be drawn."""
    monkeypatch.setattr("fast.LOGITS_AT_ONCE", 3 * 50)
    g = generator_of(4)
    h, weight = (torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()
                 for shape in ((11, 8), (50, 8)))
    targets = torch.randint(50, (11,), generator=g)
    factors = torch.randn(11, generator=g, dtype=torch.float64)
    allowed = torch.rand(11, 50, generator=g) < .5
    allowed[torch.arange(11), targets] = True

    def plain():
        logits = (F.linear(h, weight) / .7).masked_fill(~allowed, -math.inf)
        return logits.log_softmax(1)[torch.arange(11), targets]

    def buffered():
        return BufferedLogProb.apply(h, weight, targets, allowed, .7)

    found = []
    for function in (plain, buffered):
        slope = gradient(function() @ factors, (h, weight))
        of_h, = torch.autograd.grad(function() @ factors, h, create_graph=True)
        second = gradient(of_h.square().sum(), (h, weight))
        found.append(torch.cat([function().detach(), slope, second]))
    assert_near(found[1], found[0], 1e-12, "log-probs, slopes or second derivatives")


PEAK = """
import resource, torch
import fast, rollout
from model import GPT, GPTConfig
torch.set_num_threads(1)
fast.LOGITS_KEPT = fast.LOGITS_AT_ONCE
model = GPT(GPTConfig(49_152, block_size=260, n_layer=1, n_head=1, n_embd=8))
r = rollout.empty_rollout(torch.full((4, 4), 5), torch.ones(4, 4, dtype=bool), 1, 256, 7)
r.completion_mask[:] = True
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rollout.completion_logprobs(model, r).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KB on Linux alone")
def test_pieces_of_logits_are_given_back():
    """All logits and their gradient would be 0.4 GB. A process of its own: a peak does not fall."""
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) < 120, f"the peak rose by {done.stdout} MB: {done.stderr[-300:]}"


# ------------------------------------------------------------------------------------------------
# from logits to a token

def test_draw_inverts_the_distribution_function():
    generator = generator_of(0)
    for V in (2, 30, 5000):
        probs = torch.rand(60, V, generator=generator)
        probs *= torch.rand(60, V, generator=generator) < 0.4
        probs[:20, :V // 2] = 0             # zeros in front
        probs[20:, (V + 1) // 2:] = 0       # zeros behind
        probs[:20, V - 1] += 0.1
        probs[20:, 0] += 0.1
        share = probs.double() / probs.double().sum(1, keepdim=True)
        for u in (0.0, 1e-8, 0.3, 0.5, 0.9, 1 - 2 ** -24):
            token = draw(probs, torch.full((60,), u))[:, None]
            up_to = share.cumsum(1).gather(1, token)
            own = share.gather(1, token)
            assert ((up_to - own - 1e-5 <= u) & (u <= up_to + 1e-5) & (own > 0)).all()


@pytest.mark.parametrize("truncation", [dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0)])
def test_at_least_one_token_is_kept(truncation):
    sampling = Sampling((0,), **truncation)
    assert (truncate(torch.zeros(1, 40), sampling) > -math.inf).any()
    barred = torch.full((1, 40), -math.inf)     # by a rule before
    barred[0, 5] = -3.0
    assert torch.equal(truncate(barred, sampling), barred)
