"""model.py against oracles that share no code with it: network, sampling, log-probs, LoRA, files, training loop."""
import copy
import errno
import functools
import math
import os
import random
import signal
import sys

import pytest
import torch
import torch.nn as nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import (
    GPT, LORA_LAYERS, GPTConfig, LoRA, add_lora, attend, completion_logprobs, token_logprobs)
from run.script import BadInput
from run.decoder import Decoder, decode_step
from sample import Rollout, draw, generate, pad_left, truncate
from run.device import autocast, free_memory, pick_device, pick_dtype
from run.script import derive, hash_of, interrupts, run_script
from run.files import find_below, load_file, load_gpt, save_file, save_gpt
from run.fit import fit, trapezoid
from pretrain import optimizers

PROMPTS = [[3, 1, 4], [5], [9, 2, 6, 5, 3]]
TRUNCATIONS = [dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=12, top_p=0.8, min_p=0.1)]


def random_gpt(vocab_size=50, seed=0, **shape):
    """A random GPT in which no parameter has its initial value and the next token is neither certain nor uniform."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size, **dict(block_size=24, n_layer=2, n_head=4, n_embd=32) | shape))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def random_ids(B, T, vocab_size=50, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def hidden_by_hand(model, ids):
    """Hidden states (T, C) of one unpadded list of ids, in float64, one head at a time."""
    w, c = {k: v.detach().double() for k, v in model.state_dict().items()}, model.config
    T, hs = len(ids), c.n_embd // c.n_head

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"] + w.get(name + ".bias", 0)

    x = w["wte.weight"][torch.tensor(ids)] + w["wpe.weight"][:T]
    for i in range(c.n_layer):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(c.n_embd, -1)
        heads = []
        for j in range(0, c.n_embd, hs):
            score = q[:, j:j + hs] @ k[:, j:j + hs].T / math.sqrt(hs)
            if c.causal:
                score = score.masked_fill(torch.arange(T)[None, :] > torch.arange(T)[:, None], -math.inf)
            weight = (score - score.amax(-1, keepdim=True)).exp()
            heads.append(weight / weight.sum(-1, keepdim=True) @ v[:, j:j + hs])
        x = x + linear(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f")


def logits_by_hand(model, ids):
    return hidden_by_hand(model, ids) @ model.wte.weight.detach().double().T


def kept_by_hand(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Set of tokens that top-k, then top-p on what is left, then min-p leave; logits (V,)."""
    p = logits.double().softmax(0).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])[:top_k or len(p)]
    total, before, kept = sum(p[i] for i in order), 0.0, set()
    for i in order:
        if before / total < top_p and p[i] >= min_p * p[order[0]]:
            kept.add(i)
        before += p[i]
    return kept


def distributions(model, rollout, prompts, temperature):
    """For each row i and step t under the mask: (i, t, sampled token, logits (V,) / temperature) by hand, without padding."""
    G, T = len(rollout.ended) // len(prompts), rollout.mask.shape[1]
    for i, row in enumerate(rollout.tokens[:, -T:].tolist()):
        prompt, n = prompts[i // G], int(rollout.mask[i].sum())
        logits = logits_by_hand(model, prompt + row[:n])[len(prompt) - 1:] / temperature
        for t in range(n):
            yield i, t, row[t], logits[t]


# ---------------------------------------------------------------------------------------------------------------
# network

@pytest.mark.parametrize("shape", [
    {}, dict(bias=False), dict(causal=False), dict(causal=False, bias=False), dict(n_layer=1, n_head=1)])
def test_forward_equals_a_forward_written_by_hand(shape):
    model = random_gpt(**shape).double()
    idx = random_ids(3, 11)
    expected = torch.stack([hidden_by_hand(model, row) for row in idx.tolist()])
    torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-11)
    if model.config.causal:
        torch.testing.assert_close(model.lm_head(model(idx))[0], logits_by_hand(model, idx[0].tolist()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", [(3, 4, 4, 1, 9), (3, 6, 2, 1, 9), (2, 4, 4, 7, 7), (2, 6, 3, 7, 7), (2, 4, 4, 5, 9)])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "numbers"])
def test_attention_and_its_gradients_are_those_of_its_definition(dtype, bound, shape, kind):
    B, nh, nkv, T, S = shape
    g = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(B, n, t, 8, generator=g, dtype=torch.float64).to(dtype)
                   for n, t in ((nh, T), (nkv, S), (nkv, S), (nh, T)))
    allowed = torch.rand(B, 1, T, S, generator=g) < 0.6
    allowed |= torch.eye(T, S, dtype=torch.bool)
    if kind == "causal":
        allowed = torch.ones(T, S, dtype=torch.bool).tril().expand(B, 1, T, S)
    mask = {"bool": allowed, "numbers": torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf)}.get(kind)
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    y = attend(*x, mask, kind == "causal", 0.3)
    found = [y, *torch.autograd.grad(y, x, dy)]
    x = [y.double().requires_grad_() for y in (q, k, v)]
    forbidden = torch.zeros_like(allowed) if kind == "none" else ~allowed
    heads = [[(x[0][b, h] @ x[1][b, h * nkv // nh].T * 0.3).masked_fill(forbidden[b, 0], -math.inf).softmax(-1)
              @ x[2][b, h * nkv // nh] for h in range(nh)] for b in range(B)]
    y = torch.stack([torch.stack(row) for row in heads])
    for a, right in zip(found, [y, *torch.autograd.grad(y, x, dy.double())]):
        assert float((a.detach().double() - right.detach()).abs().max()) < bound * max(1, float(right.detach().abs().max()))


def test_bias_false_leaves_no_bias_and_the_judge_has_no_head():
    assert not any("bias" in name for name in random_gpt(bias=False).state_dict())
    assert not hasattr(random_gpt(causal=False), "lm_head")


def test_weights_start_as_in_gpt2():
    model = GPT(GPTConfig(300, block_size=64, n_layer=8, n_head=2, n_embd=64))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            assert float(p.detach().std()) == pytest.approx(0.02 / 4 if name.endswith("c_proj.weight") else 0.02, rel=0.1), name
        else:
            assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name


def test_width_that_heads_do_not_divide_is_bad_input():
    with pytest.raises(ValueError, match="n_embd = 30 .* n_head = 4"):
        GPT(GPTConfig(n_embd=30, n_head=4))


def test_head_and_embedding_are_one_matrix_whose_gradient_sums_both_uses():
    model = random_gpt()
    assert model.lm_head.weight.data_ptr() == model.wte.weight.data_ptr()
    assert sum(p.shape == (50, 32) for p in model.parameters()) == 1
    idx, seed = random_ids(2, 6), torch.randn(2, 6, 50)
    (model.lm_head(model(idx)) * seed).sum().backward()
    apart = copy.deepcopy(model)
    apart.zero_grad()
    apart.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
    (apart.lm_head(apart(idx)) * seed).sum().backward()
    torch.testing.assert_close(model.wte.weight.grad, apart.wte.weight.grad + apart.lm_head.weight.grad)


@pytest.mark.parametrize("side, causal", [("left", True), ("right", True), ("right", False), ("left", False)])
def test_padding_and_other_rows_change_nothing(side, causal):
    model, rows = random_gpt(causal=causal).double(), [row.tolist() for row in random_ids(3, 9)]
    rows = [rows[0][:4], rows[1], rows[2][:1]]
    for pad in (0, 49):  # a row must not see what stands on its padding
        pads = [[pad] * (9 - len(row)) for row in rows]
        idx = torch.tensor([p + row if side == "left" else row + p for p, row in zip(pads, rows)])
        real = torch.tensor([[False] * len(p) + [True] * len(row) if side == "left" else [True] * len(row) + [False] * len(p)
                             for p, row in zip(pads, rows)])
        h = model(idx, real)
        assert h.isfinite().all()
        for i, row in enumerate(rows):
            torch.testing.assert_close(h[i][real[i]], model(torch.tensor([row]))[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(h[i][real[i]], hidden_by_hand(model, row), rtol=0, atol=1e-11)


def test_token_that_serves_as_padding_or_end_is_attended_where_it_is_real():
    model, real = random_gpt().double(), torch.tensor([[False, True, True, True, True]])
    for token in (0, 49):
        h = model(torch.tensor([[0, 7, token, 8, 9]]), real)
        assert (h - model(torch.tensor([[0, 7, 11, 8, 9]]), real))[0, 2:].abs().amax(-1).min() > 1e-3


def test_later_tokens_are_seen_by_the_judge_alone():
    idx = random_ids(1, 8)
    changed = idx.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 50
    for causal in (True, False):
        model = random_gpt(causal=causal).double()
        same = (model(idx) == model(changed)).all(-1)[0]
        assert same.tolist() == ([True] * 5 + [False] * 3 if causal else [False] * 8)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("pieces", [(9,), (4, 1, 1, 1, 1, 1), (1,) * 9, (3, 4, 2)])
def test_forward_in_pieces_through_the_cache_equals_one_forward(pieces, padded):
    model, idx = random_gpt().double(), random_ids(3, 9)
    real = torch.arange(9) >= torch.tensor([[0], [2], [3]]) if padded else None
    expected, cache, start, out = model(idx, real), model.new_cache(3, 12), 0, []
    for n in pieces:
        out.append(model(idx[:, start:start + n], real[:, :start + n] if padded else None, cache, start))
        start += n
    torch.testing.assert_close(torch.cat(out, 1), expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------
# sampling

def test_pad_left_puts_padding_left():
    tokens, real = pad_left([[1, 2, 3], [4]])
    assert tokens[0].tolist() == [1, 2, 3] and tokens[1, 2] == 4
    assert real.tolist() == [[True, True, True], [False, False, True]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("truncation", [{}] + TRUNCATIONS)
def test_sampler_records_the_distribution_it_drew_from(temperature, truncation):
    model = random_gpt()
    r = generate(model, PROMPTS, 3, 8, eos=49, seed=3, temperature=temperature, **truncation)
    assert r.mask.sum() > 60 and not r.real.all()
    torch.testing.assert_close(r.logp, completion_logprobs(model, r, temperature), rtol=0, atol=1e-5)
    for i, t, token, logits in distributions(model, r, PROMPTS, temperature):
        if truncation:
            kept = kept_by_hand(logits, **truncation)
            assert set(r.kept[i, t].nonzero()[:, 0].tolist()) == kept and token in kept
            logits = logits.masked_fill(~r.kept[i, t], -math.inf)
        p = logits.softmax(0)
        assert float(r.logp[i, t]) == pytest.approx(float(p[token].log()), abs=1e-5)
        assert float(r.entropy[i, t]) == pytest.approx(-sum(x * math.log(x) for x in p.tolist() if x > 0), abs=1e-5)
    assert (r.kept is not None) == bool(truncation)


def test_rollout_holds_prompts_padding_and_what_each_field_promises():
    r = generate(random_gpt(), PROMPTS, 2, 4, eos=49, seed=0)
    assert r.tokens.shape == r.real.shape == (6, 5 + 4) and r.mask.shape == r.logp.shape == r.entropy.shape == (6, 4)
    assert not r.logp.requires_grad and not r.entropy.requires_grad
    for i in range(6):
        prompt = PROMPTS[i // 2]
        assert r.tokens[i, 5 - len(prompt):5].tolist() == prompt
        assert r.real[i].tolist() == [False] * (5 - len(prompt)) + [True] * (len(prompt) + 4)


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


def test_seed_alone_decides_the_rollout():
    a, b, c = (generate(random_gpt(), PROMPTS, 4, 8, eos=49, seed=seed, top_p=0.9) for seed in (1, 1, 2))
    assert all(torch.equal(getattr(a, f), getattr(b, f)) for f in vars(a))
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
    model, prompts = random_gpt(8), [[3, 1, 4], [5], [7, 2, 6, 5, 3], [2, 2]]  # 8 tokens: many rows end early
    whole = generate(model, prompts, 4, 10, eos=7, seed=9, **truncation)
    parts = generate(model, prompts, 4, 10, eos=7, seed=9, batch_size=batch_size, **truncation)
    for name in ("tokens", "real", "mask", "ended"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    torch.testing.assert_close(whole.logp, parts.logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.entropy, parts.entropy, rtol=0, atol=1e-5)
    if truncation:
        assert torch.equal(whole.kept[whole.mask], parts.kept[parts.mask])


def test_batch_size_bounds_the_rows_that_are_decoded_at_once():
    model, rows = random_gpt(), []
    model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    generate(model, PROMPTS, 4, 5, eos=49, seed=9, batch_size=8)
    assert max(rows) == 8 and rows[0] == 2 and 1 in rows  # prompts are computed once, not once per sample


def test_prompts_added_behind_leave_a_row_as_it_was():
    model = random_gpt()
    few = generate(model, PROMPTS[:2], 3, 8, eos=49, seed=4)
    many = generate(model, PROMPTS[:2] + [[8] * 12, [1]], 3, 8, eos=49, seed=4)[:6]
    T = few.mask.shape[1]
    assert many.completions() == few.completions()
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
    assert r.mask.tolist() == [[True]] * 6 and r.ended.all() and r.tokens[:, 5:].tolist() == [[49]] * 6
    assert r.completions() == [[]] * 6


def test_mask_holds_the_end_token_and_nothing_after_it():
    prompts = [[7, 1, 7], [7]]  # end tokens in a prompt end nothing
    r = generate(random_gpt(8), prompts, 30, 12, eos=7, seed=2)
    texts, lengths = r.completions(), set()
    for i, row in enumerate(r.tokens[:, 3:].tolist()):
        ended = 7 in row
        n = row.index(7) + 1 if ended else len(row)
        lengths.add(n)
        assert r.mask[i].tolist() == [t < n for t in range(len(row))] and bool(r.ended[i]) == ended
        assert row[n:] == [7] * (len(row) - n) and texts[i] == row[:n - ended]
        assert (r.logp[i, :n] < 0).all() and (r.entropy[i, :n] > 0).all()
        assert (r.logp[i, n:] == 0).all() and (r.entropy[i, n:] == 0).all()
    assert len(lengths) > 3 and not r.ended.all()
    assert max(lengths) == r.mask.shape[1]


@pytest.mark.parametrize("every", [1, 3, 16])  # tokens between looks at what has ended, as on a GPU
@pytest.mark.parametrize("prompts", [[[3, 1, 4], [5], [2, 6]], [[3, 1], [5, 0], [2, 6]]])  # padded and not
@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.9)])
def test_ended_rows_are_not_computed_and_change_no_other(every, prompts, truncation, monkeypatch):
    model, rows = random_gpt(8), []
    monkeypatch.setattr(sys.modules["sample"], "LOOK_EVERY", {"cpu": every})
    hook = model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    r = generate(model, prompts, 8, 12, eos=7, seed=2, **truncation)
    hook.remove()
    running = r.mask.sum(0).tolist()  # before each token
    assert rows[:1] == [3] and running[0] == 24 and 0 < running[-1] < 12
    assert rows[1:][:len(running) - 1] == [running[t // every * every] for t in range(1, len(running))]
    for i in range(24):  # alone, with the noise of its place
        noise = torch.rand(24, 12, generator=torch.Generator().manual_seed(2))[i]
        ids = list(prompts[i // 8])
        for t in range(int(r.mask[i].sum())):
            p = (logits_by_hand(model, ids)[-1]).softmax(0)
            if truncation:
                p = torch.where(r.kept[i, t], p, 0.0)
            token = int((p.cumsum(0) > noise[t] * p.sum()).nonzero()[0])
            assert int(r.tokens[i, -r.mask.shape[1] + t]) == token
            assert float(r.logp[i, t]) == pytest.approx(float((p[token] / p.sum()).log()), abs=1e-5)
            ids.append(token)


# ---------------------------------------------------------------------------------------------------------------
# decoding with fixed shapes and addresses. A CUDA graph is taken for what it is: the operations of one run, done again on the
# same memory with no Python between them

class Recorded(TorchDispatchMode):
    """Notes the operations of a step and does them again, into the memory of the first time. Like a capture it refuses what
    waits for the device, to tell a number or a shape."""

    def __enter__(self):
        self.operations = []
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split("::")[1].split(".")[0]
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh", "bincount",
                               "repeat_interleave"):
            raise RuntimeError(f"{op.name()} waits for the device")
        out = op(*args, **(kwargs or {}))
        self.operations.append((op, args, kwargs or {}, out))
        return out

    def replay(self):
        for op, args, kwargs, out in self.operations:
            again = op(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again)):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class RecordingDecoder(Decoder):
    def __init__(self, model, bucket=64, graphs=True):
        super().__init__(model, graphs=False, bucket=bucket)
        self.graphs = graphs

    def capture(self, step):
        own = [x for (rollout, *rest, _) in filter(None, self.states.values()) for x in (*vars(rollout).values(), *rest)
               if x is not None]
        before = [x.clone() for x in own]
        with Recorded() as graph:
            step()
        for x, y in zip(own, before):  # a capture does nothing
            x.copy_(y)
        return graph, None


SHAPES = {"gpt2": {}, "llama": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=2, tied=False, bias=False),
          "qwen3": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=1, qk_norm=True, head_dim=16),
          "neo": dict(window=4, local_layers=(1,), attn_scale=1.0, qkv_bias=False), "lora": {}}


@pytest.fixture
def graph_rules(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # what a CPU alone may ask is not asked
    for module in ("sample", "run.decoder"):
        monkeypatch.setattr(sys.modules[module], "LOOK_EVERY", {"cpu": 1, "cuda": 3})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("truncation", [{}, dict(top_k=4, top_p=0.9)])
@pytest.mark.parametrize("batch_size", [0, 8])
def test_graphs_sample_what_plain_decoding_samples(shape, truncation, batch_size, graph_rules):
    model = random_gpt(6, block_size=40, **SHAPES[shape])
    if shape == "lora":
        add_lora(model, 2, 4.0)
    decoder, widths = RecordingDecoder(model, bucket=8), set()
    for seed, prompts in enumerate([[[3, 1, 4], [5], [2, 1]], [[3, 1], [5, 0], [2, 1]], [[1], [2], [3, 4, 5, 1, 2, 3, 0]],
                                    [[1], [2], [3]]]):
        plain = generate(model, prompts, 8, 20, eos=5, seed=seed, **truncation)
        r = generate(model, prompts, 8, 20, eos=5, seed=seed, batch_size=batch_size, decoder=decoder, **truncation)
        for name in ("tokens", "real", "mask", "ended"):
            assert torch.equal(getattr(r, name), getattr(plain, name)), name
        assert not truncation or torch.equal(r.kept[r.mask], plain.kept[r.mask])
        for name in ("logp", "entropy"):
            torch.testing.assert_close(getattr(r, name), getattr(plain, name), atol=1e-5, rtol=0)
        widths.add(r.tokens.shape[1])
        with torch.no_grad():  # a step of the optimiser, in place
            for p in model.parameters():
                p += 0.02 * torch.randn(p.shape)
    graphs = {key for *_, found in decoder.states.values() for key in found}
    assert len(widths) > 1 and {n for n, _ in graphs} >= ({8, 4} if batch_size else {24, 12})
    assert {S for _, S in graphs} > {8, 16} and 3 < len(decoder.captured)


def test_graphs_are_taken_once(graph_rules):
    model = random_gpt(10)
    decoder = RecordingDecoder(model, bucket=8)
    for seed in range(4):
        generate(model, [[3, 1, 4], [5]], 8, 12, eos=9, seed=seed, retire=False, decoder=decoder)
    assert len(decoder.captured) == 2  # columns up to 8 and up to 16


def test_wider_rollouts_take_new_buffers_and_the_old_graphs_live_on(graph_rules):
    model = random_gpt(10, block_size=40)  # the pool that graphs share is gone with the last of them
    decoder, widths = RecordingDecoder(model, bucket=8), []
    for width in (2, 20, 3, 21):
        generate(model, [[1] * width, [5]], 4, 6, eos=9, seed=0, retire=False, decoder=decoder)
        (own, *_, graphs), = decoder.states.values()
        widths.append((own.tokens.shape[1], len(decoder.captured), len(graphs)))
    assert widths == [(8, 1, 1), (32, 2, 2), (32, 3, 3), (32, 4, 3)] and len(set(map(id, decoder.captured))) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_graphs_sample_what_plain_decoding_samples(shape, dtype, compile):
    model, decoders = random_gpt(50, block_size=200, **SHAPES[shape]).cuda(), []
    if shape == "lora":
        add_lora(model, 2, 4.0)
    decoders = [Decoder(model, dtype, compile=compile) for _ in range(2)]
    for seed, (widths, truncation) in enumerate([([3, 1], {}), ([5, 5, 2], {}), ([90, 1], {}), ([7, 3], dict(top_p=0.9)),
                                                ([1, 2], {})]):
        prompts = [[1] * w for w in widths]
        with autocast(model.wte.weight.device, dtype):
            plain, *others = (generate(model, prompts, 8, 60, eos=9, seed=seed, decoder=d, **truncation)
                              for d in (None, *decoders))
        for r in others:
            if dtype == torch.float32:
                assert torch.equal(r.tokens, plain.tokens) and torch.equal(r.ended, plain.ended)
                torch.testing.assert_close(r.logp, plain.logp, atol=1e-4, rtol=0)
            else:  # the first token is drawn by the prompt's pass, the second by the first step: later ones may part
                same = r.tokens[:, max(widths)] == plain.tokens[:, max(widths)]
                assert same.all() and float((r.logp[:, :2] - plain.logp[:, :2]).abs().median()) < 0.05
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn_like(p)


def test_without_retiring_every_row_is_computed_to_the_end(graph_rules):
    model = random_gpt(8)
    for decoder in (None, RecordingDecoder(model, graphs=False)):
        rows, results = [], []
        hook = model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
        for retire in (True, False):
            results.append(generate(model, [[3, 1, 4], [5]], 8, 12, eos=7, seed=2, retire=retire, decoder=decoder))
        hook.remove()
        end = rows.index(2, 1)
        assert rows[end:] == [2] + 11 * [16] and rows[0] == 2 and min(rows[1:end]) <= 8 < max(rows[1:end])
        assert torch.equal(results[0].tokens, results[1].tokens) and torch.equal(results[0].logp != 0, results[1].logp != 0)


@pytest.mark.parametrize("lora", [False, True])
def test_bfloat16_copies_of_the_weights_sample_what_autocast_samples(lora):
    model = random_gpt(40)
    if lora:
        add_lora(model, 2, 4.0)
    decoder, alone = Decoder(model, torch.bfloat16, graphs=False), Decoder(model, graphs=False)
    assert alone.model is model and not alone.copies
    before = [p.clone() for p in model.parameters()]
    for seed in range(3):
        with autocast("cpu", torch.bfloat16):
            results = [generate(model, PROMPTS, 8, 12, eos=9, seed=seed, decoder=d) for d in (decoder, alone)]
        for x, y in zip(*(vars(r).values() for r in results)):
            assert x is y is None or torch.equal(x, y)
        assert all(torch.equal(p, q) and p.dtype == torch.float32 for p, q in zip(model.parameters(), before))
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape)
        before = [p.clone() for p in model.parameters()]
    assert decoder.model.lm_head.weight.dtype == torch.bfloat16 and decoder.model.wte.weight is model.wte.weight


def test_compiled_step_samples_the_same_and_is_compiled_a_few_times_only():
    torch._dynamo.reset()
    model, counts = random_gpt(6, block_size=64), []
    decoder, compiled = Decoder(model, graphs=False, bucket=8), CompileCounter()
    decoder.step = torch.compile(decode_step, dynamic=True, fullgraph=True, backend=compiled)
    for seed, width in enumerate((3, 1, 7, 11, 20, 24, 30, 34)):
        prompts = [[1] * width, [2] * (width // 2 + 1)] + [[3]] * (seed % 2)
        plain, r = (generate(model, prompts, 8, 12, eos=5, seed=seed, decoder=d) for d in (None, decoder))
        assert torch.equal(r.tokens, plain.tokens) and torch.allclose(r.logp, plain.logp, atol=1e-5)
        counts.append(compiled.frame_count)
    assert 1 <= counts[-1] <= 6 and counts[-1] == counts[4], counts


@pytest.mark.parametrize("shape", ["gpt2", "qwen3", "lora"])
def test_compiled_network_is_one_graph_for_all_lengths(shape):
    torch._dynamo.reset()
    model, compiled = random_gpt(10, block_size=64, **SHAPES[shape]), CompileCounter()
    if shape == "lora":
        add_lora(model, 2, 4.0)
    network, counts = torch.compile(model, dynamic=True, fullgraph=True, backend=compiled), []
    for seed, (widths, T) in enumerate([([3, 1], 8), ([5, 5], 6), ([9, 1], 12), ([7, 3], 20), ([2, 2], 30), ([30, 2], 33)]):
        r = generate(model, [[1] * w for w in widths], 4, T, eos=9, seed=seed)[torch.arange(1, 8, 1 + seed % 3)]
        results = []
        for m in (model, network):
            model.zero_grad()
            logp = completion_logprobs(m, r)
            logp.sum().backward()
            results.append([logp.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        counts.append(compiled.frame_count)
    assert counts[-1] == 2  # without padding and with


def test_graphs_where_there_are_none_are_bad_input():
    model = random_gpt(10)
    with pytest.raises(BadInput, match="cuda_graphs = True.*set it False"):
        generate(model, PROMPTS, 4, 6, eos=9, seed=0, decoder=Decoder(model))


def test_width_is_that_of_the_longest_completion():
    model = random_gpt(3)  # few tokens, so that all rows end early
    r = generate(model, [[0, 1]], 4, 20, eos=2, seed=1, top_p=0.99)
    longest = int(r.mask.sum(1).max())
    assert longest < 20 and r.tokens.shape == r.real.shape == (4, 2 + longest) and r.kept.shape == (4, longest, 3)


def test_rows_of_a_rollout_can_be_taken_apart():
    model = random_gpt(8)
    r = generate(model, [[3, 1, 4], [5]], 4, 6, eos=7, seed=2, top_p=0.9)
    rows = torch.tensor([6, 1])
    part = r[rows]
    assert all(torch.equal(getattr(part, f), getattr(r, f)[rows]) for f in vars(r))
    assert part.completions() == [r.completions()[6], r.completions()[1]]
    torch.testing.assert_close(completion_logprobs(model, part), r.logp[rows], rtol=0, atol=1e-5)
    assert generate(model, [[5]], 2, 2, eos=7, seed=2)[:1].kept is None


def test_prompt_of_the_wrong_length_is_bad_input_with_number_and_limit():
    for prompts in ([[1], []], [[1], [2] * 17]):
        with pytest.raises(ValueError, match=rf"prompt 2 has {len(prompts[1])} tokens: must be 1 to 16 .*24.*8"):
            generate(random_gpt(), prompts, 2, 8, eos=49, seed=0)
    assert generate(random_gpt(), [[1], [2] * 16], 2, 8, eos=49, seed=0).mask.shape == (4, 8)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_temperature_that_is_not_above_zero_is_bad_input(temperature):
    with pytest.raises(ValueError, match=f"temperature = {temperature}.*above 0"):
        generate(random_gpt(), PROMPTS, 2, 4, eos=49, seed=0, temperature=temperature)


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
    drawn = [int(draw(probs, torch.tensor([u]))) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2 ** -24)]
    assert drawn == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("truncation", TRUNCATIONS + [dict(top_k=1), dict(top_k=1000), dict(top_p=0.05), dict(min_p=1.0)])
def test_truncate_keeps_what_its_definition_keeps(truncation):
    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    out = truncate(logits, **truncation)
    for row, before in zip(out, logits):
        kept = kept_by_hand(before, **truncation)
        assert set((row > -math.inf).nonzero()[:, 0].tolist()) == kept
        assert all(row[i] == before[i] for i in kept)


@pytest.mark.parametrize("truncation", [dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0), dict(top_k=1, top_p=1e-9, min_p=1.0)])
def test_truncate_keeps_at_least_one_token(truncation):
    flat, peaked, barred = torch.zeros(1, 40), torch.zeros(1, 40), torch.full((1, 40), -math.inf)
    peaked[0, 13], barred[0, 5] = 200.0, -3.0
    for logits, best in ((flat, None), (peaked, 13), (barred, 5)):
        kept = (truncate(logits, **truncation) > -math.inf).nonzero()[:, 1].tolist()
        assert kept and (best is None or kept == [best])


def test_truncate_by_default_changes_nothing():
    logits = torch.randn(3, 9)
    assert torch.equal(truncate(logits), logits)


# ---------------------------------------------------------------------------------------------------------------
# log-probs of given tokens

def logprob_case(V=50, M=23, C=32):
    torch.manual_seed(0)
    head, h, targets = nn.Linear(C, V, bias=False), torch.randn(M, C, requires_grad=True), torch.randint(V, (M,))
    kept = (torch.rand(M, V) < 0.3).scatter(1, targets[:, None], True)
    return head, h, targets, kept, torch.randn(M)


@pytest.mark.parametrize("with_kept", [False, True])
@pytest.mark.parametrize("chunk", [1, 50, 149, 50 * 23 - 1, 50 * 23, 2 ** 24])
def test_token_logprobs_and_gradients_are_those_of_log_softmax(chunk, with_kept):
    head, h, targets, kept, weight = logprob_case()
    kept = kept if with_kept else None
    logp = token_logprobs(head, h, targets, 0.7, kept, chunk)
    (logp * weight).sum().backward()
    H, W = h.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    logits = H @ W.T / 0.7
    expected = (logits if kept is None else logits.masked_fill(~kept, -math.inf)).log_softmax(-1)[torch.arange(23), targets]
    (expected * weight).sum().backward()
    assert logp.dtype == torch.float32
    for got, want in ((logp, expected), (h.grad, H.grad), (head.weight.grad, W.grad)):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_token_logprobs_never_holds_more_logits_than_chunk():
    head, h, targets, kept, _ = logprob_case()
    sizes, saved = [], []
    head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        logp = token_logprobs(head, h, targets, 1.0, None, 170)
    assert sum(sizes) == 23 * 50 and max(sizes) == 150
    assert not any(len(shape) == 2 and shape[1] == 50 for shape in saved)  # nothing waits for the backward
    logp.sum().backward()
    assert sum(sizes) == 2 * 23 * 50 and max(sizes) == 150


def test_token_logprobs_of_no_tokens_is_empty():
    head, h, targets, kept, _ = logprob_case()
    assert token_logprobs(head, h[:0], targets[:0], 1.0, kept[:0]).shape == (0,)


@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.8)])
def test_completion_logprobs_in_chunks_has_the_same_gradients(truncation):
    r = generate(random_gpt(8), [[3, 1, 4], [5]], 4, 8, eos=7, seed=2, **truncation)
    results, sizes = [], []
    for chunk in (2 ** 24, 8 * 5):
        model = random_gpt(8, seed=1)
        model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
        logp = completion_logprobs(model, r, 0.7, chunk)
        (logp * torch.arange(logp.numel()).view_as(logp)).sum().backward()
        results.append([logp.detach()] + [p.grad for p in model.parameters()])
    for whole, chunked in zip(*results):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-4)
    assert max(sizes[1:]) == 8 * 5 < sizes[0]


@torch.no_grad()
def test_completion_logprobs_do_not_depend_on_the_other_rows():
    model, other = random_gpt(8).double(), random_gpt(8, seed=1).double()
    prompts = [[3, 1, 4], [5], [1, 2, 3, 4, 5, 6]]
    r = generate(model, prompts, 3, 8, eos=7, seed=2)
    whole = completion_logprobs(other, r, 0.7)
    alone = torch.cat([completion_logprobs(other, r[i:i + 1], 0.7) for i in range(9)])
    torch.testing.assert_close(alone, whole, rtol=0, atol=1e-6)
    for i, t, token, logits in distributions(other, r, prompts, 0.7):
        assert float(whole[i, t]) == pytest.approx(float(logits.log_softmax(0)[token]), abs=1e-5)


def test_end_token_carries_gradient_and_what_follows_it_does_not():
    model, hidden = random_gpt(8), []
    r = generate(model, [[3, 1, 4], [5]], 6, 10, eos=7, seed=2)
    assert r.ended.any() and not r.mask.all()
    model.register_forward_hook(lambda module, inputs, output: output.retain_grad() or hidden.append(output))
    logp = completion_logprobs(model, r)
    logp.sum().backward()
    carries = hidden[0].grad.abs().sum(-1) > 0  # position t is that of the token before the one it scores
    assert torch.equal(carries[:, 2:], r.mask) and not carries[:, :2].any()
    assert (logp[~r.mask] == 0).all()


def test_tokens_after_the_end_change_no_logprob():
    model = random_gpt(8)
    r = generate(model, [[3, 1, 4], [5]], 6, 10, eos=7, seed=2)
    before = completion_logprobs(model, r)
    r.tokens[:, 3:][~r.mask] = 2
    assert torch.equal(completion_logprobs(model, r), before)


@torch.no_grad()
def test_mixed_masks_score_only_the_tokens_they_name():
    model = random_gpt()
    mask = torch.tensor([[True, False, True], [False, False, True]])
    r = Rollout(random_ids(2, 5), torch.ones(2, 5, dtype=torch.bool), mask, logp=None, entropy=None, ended=None)
    logp = completion_logprobs(model, r)
    for i in range(2):
        expected = logits_by_hand(model, r.tokens[i].tolist()).log_softmax(-1)
        for t in range(3):
            want = float(expected[1 + t, r.tokens[i, 2 + t]]) if mask[i, t] else 0.0
            assert float(logp[i, t]) == pytest.approx(want, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# LoRA

def with_lora(model, rank=3, alpha=6, layers=LORA_LAYERS, seed=5):
    """A copy with adapters that do something."""
    adapted = add_lora(copy.deepcopy(model), rank, alpha, layers)
    torch.manual_seed(seed)
    for name, p in adapted.named_parameters():
        if name.endswith("B.weight"):
            nn.init.normal_(p, std=0.2)
    return adapted


def test_new_adapter_changes_nothing():
    model, idx = random_gpt(), random_ids(2, 7)
    assert torch.equal(add_lora(copy.deepcopy(model), 3, 6)(idx), model(idx))


def test_adapter_adds_alpha_over_rank_times_b_a():
    model, idx = random_gpt(), random_ids(2, 7)
    adapted, plain = with_lora(model, rank=3, alpha=7.5), copy.deepcopy(model)
    with torch.no_grad():
        for name, module in adapted.named_modules():
            if isinstance(module, LoRA):
                plain.get_submodule(name).weight += 7.5 / 3 * module.B.weight @ module.A.weight
    assert (adapted(idx) - model(idx)).abs().max() > 0.1
    torch.testing.assert_close(adapted(idx), plain(idx), rtol=0, atol=1e-5)


def test_merging_keeps_the_function_and_unmerging_restores_the_weights():
    adapted, idx = with_lora(random_gpt()), random_ids(2, 7)
    before, weights = adapted(idx), {k: v.clone() for k, v in adapted.state_dict().items()}
    adapters = [module for module in adapted.modules() if isinstance(module, LoRA)]
    for _ in range(2):  # the second call does nothing
        for module in adapters:
            module.merge()
    assert all(module.merged for module in adapters)
    torch.testing.assert_close(adapted(idx), before, rtol=0, atol=1e-5)
    assert (adapted.h[0].attn.c_attn.base.weight - weights["h.0.attn.c_attn.base.weight"]).abs().max() > 0.01
    for _ in range(2):
        for module in adapters:
            module.merge(False)
    for name, value in adapted.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)


def test_only_adapters_get_gradients():
    adapted = with_lora(random_gpt())
    adapted.lm_head(adapted(random_ids(2, 7))).square().sum().backward()
    for name, p in adapted.named_parameters():
        is_adapter = name.endswith(("A.weight", "B.weight"))
        assert p.requires_grad == is_adapter and (p.grad is not None and bool(p.grad.any())) == is_adapter, name


@pytest.mark.parametrize("layers, ends", [
    (("c_attn",), {"attn.c_attn"}), (("c_proj",), {"attn.c_proj", "mlp.c_proj"}),
    (LORA_LAYERS, {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"})])
def test_layers_says_where_the_adapters_go(layers, ends):
    adapted = add_lora(random_gpt(), 2, 4, layers)
    found = {name for name, module in adapted.named_modules() if isinstance(module, LoRA)}
    assert found == {f"h.{i}.{end}" for i in range(2) for end in ends}
    assert all(adapted.get_submodule(name).A.weight.shape[0] == 2 for name in found)


@pytest.mark.parametrize("rank, layers", [
    (0, LORA_LAYERS), (-1, LORA_LAYERS), (2, ("lm_head",)), (2, ("c_attn", "q")), (2, ())])
def test_impossible_adapter_is_bad_input(rank, layers):
    with pytest.raises(ValueError, match=f"lora_rank = {rank}, lora_layers = "):
        add_lora(random_gpt(), rank, 4, layers)


def test_copy_of_an_adapted_model_is_equal_and_separate():
    adapted, idx = with_lora(random_gpt()), random_ids(2, 7)
    before, twin = adapted(idx), copy.deepcopy(adapted)
    assert torch.equal(twin(idx), before) and twin.lm_head.weight is twin.wte.weight
    with torch.no_grad():
        for p in twin.parameters():
            p += 1
    assert torch.equal(adapted(idx), before)


def test_adapted_model_samples_from_what_it_scores():
    adapted = with_lora(random_gpt())
    r = generate(adapted, PROMPTS, 2, 6, eos=49, seed=0)
    torch.testing.assert_close(completion_logprobs(adapted, r), r.logp, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# device and precision

@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that must be missing")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_missing_device_is_bad_input(name):
    with pytest.raises(BadInput, match=f"device = '{name}': not on this machine"):
        pick_device(name)


def test_pick_device_and_dtype(monkeypatch):
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(BadInput, match="device = 'toaster'"):
        pick_device("toaster")
    wanted = {("auto", "cpu"): torch.float32, ("auto", "cuda"): torch.bfloat16, ("float32", "cuda"): torch.float32,
              ("bfloat16", "cpu"): torch.bfloat16, ("float32", "cpu"): torch.float32, ("bfloat16", "cuda"): torch.bfloat16}
    for (name, device), dtype in wanted.items():
        assert pick_dtype(name, torch.device(device)) == dtype
    for has_it, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_it)
        assert pick_dtype("fast", torch.device("cpu")) == dtype and pick_dtype("fast", torch.device("cuda")) == torch.bfloat16


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


# ---------------------------------------------------------------------------------------------------------------
# seeds, hashes, signals, exit codes

@pytest.mark.parametrize("free, files", (
    (math.inf, {}), (math.inf, {"meminfo": "MemTotal: 9 kB"}), (700 * 1024, {}), (700 * 1024, {"": ("max", 10, 0, 0)}),
    (500_000, {"": (600_000, 100_000, 0, 0)}), (533_000, {"": (600_000, 100_000, 30_000, 3_000)}),   # a container's own
    (500_000, {"group": "0::/", "": (600_000, 100_000, 0, 0)}),
    (500_000, {"group": "1:cpu:/b\n0::/a/b", "": ("max", 3, 0, 0), "a": (600_000, 100_000, 0, 0), "a/b": (800_000, 9, 0, 0)}),
    (400_000, {"group": "0::/a/b", "a": (600_000, 100_000, 0, 0), "a/b": (500_000, 100_000, 0, 0)}),
    (500_000, {"group": "0::/elsewhere/b", "": (600_000, 100_000, 0, 0), "a/b": (8, 4, 0, 0)}),     # a name outside the container
    (700 * 1024, {"group": "0::/a", "b": (8, 4, 0, 0)}), (700 * 1024, {"": (10 ** 9, 0, 0, 0)})))
def test_free_memory(free, files, tmp_path):
    found = {"meminfo": "MemFree: 100 kB\nMemAvailable:  700 kB\n", "group": "4:memory:/old"} | files
    if files or free < math.inf:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "meminfo").write_text(found.pop("meminfo"))
        (tmp_path / "proc" / "self" / "cgroup").write_text(found.pop("group"))
        for folder, (limit, used, inactive, active) in found.items():
            folder = tmp_path / "sys" / "fs" / "cgroup" / folder
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"file 9\ninactive_anon 5\ninactive_file {inactive}\nactive_file {active}\n")
    assert free_memory(torch.device("cpu"), str(tmp_path)) == free


def test_free_memory_here_and_on_a_gpu(monkeypatch):
    assert 2 ** 20 < free_memory(torch.device("cpu")) < 2 ** 50
    for name, n in dict(mem_get_info=(1000, 9000), memory_reserved=500, memory_allocated=300).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, n=n: n)
    assert free_memory(torch.device("cuda")) == 1200


def test_derive_is_stable_and_depends_on_every_argument():
    assert derive(1, "rollout", 0) == 29435854404557282
    cases = [(), (1,), (2,), ("1",), (1, 2), (2, 1), (12,), (1, "rollout", 0), (1, "rollout", 1), (1, "rows", 0),
             (2, "rollout", 0)]
    seeds = [derive(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    for seed in seeds:
        torch.manual_seed(seed)


def test_hash_of_changes_with_any_weight():
    model, hashes = random_gpt(), set()
    assert hash_of(model) == hash_of(copy.deepcopy(model))
    for p in model.parameters():
        hashes.add(hash_of(model))
        with torch.no_grad():
            p.view(-1)[-1] += 1
    assert len(hashes | {hash_of(model)}) == len(list(model.parameters())) + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with interrupts() as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("error, code, text", [
    (BadInput("x = 1: no"), 2, "error: x = 1: no\n"), (KeyboardInterrupt("saved"), 130, "interrupted: saved\n")])
def test_run_script_turns_errors_into_exit_codes(error, code, text, capsys):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_script(main)
    assert exit_.value.code == code and capsys.readouterr().err == text


# ---------------------------------------------------------------------------------------------------------------
# files

def test_find_below_searches_subfolders_and_names_what_is_missing(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.json").write_text("1")
    assert find_below(tmp_path, "x.json") == str(tmp_path / "a" / "b" / "x.json")
    with pytest.raises(BadInput, match="y.json is missing below"):
        find_below(tmp_path, "y.json")


class Full:
    """A file on a disk that is full after 1000 bytes."""

    def __init__(self, f):
        self.f, self.flush = f, f.flush

    def write(self, data):
        if self.f.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.f.write(data)


def test_save_file_that_fails_midway_leaves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / "a.pt")
    save_file(path, "policy", x=torch.arange(3))

    monkeypatch.setattr(torch, "save", lambda content, f, save=torch.save: save(content, Full(f)))
    with pytest.raises(BadInput, match="a.pt: could not be written .No space left on device."):
        save_file(path, "policy", x=torch.arange(40000))
    assert torch.equal(load_file(path, "policy")["x"], torch.arange(3)) and os.listdir(tmp_path) == ["a.pt"]


def test_save_file_makes_folders_replaces_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = str(tmp_path / "new" / "folder" / "a.pt")
    for x in (1, 2):
        save_file(path, "run", x=x, nested=dict(y=[1.5, None, "z"]))
    assert load_file(path, "run") == dict(kind="run", x=2, nested=dict(y=[1.5, None, "z"]))
    assert os.listdir(tmp_path / "new" / "folder") == ["a.pt"]
    monkeypatch.chdir(tmp_path)
    save_file("bare.pt", "run", x=3)
    assert load_file("bare.pt", "run")["x"] == 3


def test_missing_file_is_bad_input(tmp_path):
    path = str(tmp_path / "none.pt")
    with pytest.raises(BadInput, match="none.pt: no such file"):
        load_file(path, "policy")


def test_broken_file_is_bad_input(tmp_path):
    path = str(tmp_path / "cut.pt")
    save_gpt(path, random_gpt())
    with open(path, "rb") as f:
        data = f.read()
    broken = [data[:n] for n in (0, 1, 10, 100, 1000, len(data) // 2, len(data) - 20, len(data) - 1)]
    for content in broken + [bytes(2000), b"not a checkpoint", random.Random(0).randbytes(5000)]:
        with open(path, "wb") as f:
            f.write(content)
        with pytest.raises(BadInput, match="cut.pt: not a readable checkpoint"):
            load_gpt(path)
    with pytest.raises(BadInput, match="not a readable checkpoint"):
        load_file(str(tmp_path), "policy")


def test_file_of_another_kind_is_bad_input(tmp_path):
    path = str(tmp_path / "other.pt")
    save_file(path, "judge", x=1)
    with pytest.raises(BadInput, match="other.pt: holds 'judge' where a checkpoint of kind 'policy'"):
        load_gpt(path)
    for content in ([1, 2], torch.zeros(3), dict(model=1), dict(kind=None)):
        torch.save(content, path)
        with pytest.raises(BadInput, match="other.pt: holds 'something else' where"):
            load_file(path, "policy")


def test_code_in_a_file_is_not_run(tmp_path):
    path, proof = str(tmp_path / "evil.pt"), tmp_path / "proof"
    with open(path, "wb") as f:
        f.write(b"cos\nmkdir\n(V" + str(proof).encode() + b"\ntR.")  # a pickle that calls os.mkdir(proof)
    with pytest.raises(BadInput, match="evil.pt"):
        load_file(path, "policy")
    torch.save(dict(kind="policy", x=os.mkdir), path)
    with pytest.raises(BadInput, match="evil.pt"):
        load_file(path, "policy")
    assert not proof.exists()


@pytest.mark.parametrize("bias", [True, False])
def test_policy_comes_back_bit_for_bit(tmp_path, bias):
    model, path = random_gpt(bias=bias), str(tmp_path / "policy.pt")
    save_gpt(path, model, loss=1.25)
    back = load_gpt(path)
    assert back.config == model.config and load_file(path, "policy")["loss"] == 1.25
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, y) for x, y in zip(back.state_dict().values(), model.state_dict().values()))
    assert back.lm_head.weight is back.wte.weight and os.listdir(tmp_path) == ["policy.pt"]


# ---------------------------------------------------------------------------------------------------------------
# the supervised loop

def train(partial, steps=8, until=None, crash=False):
    """A GPT trained on random tokens; until: the step before which it is stopped or crashes -> (model, steps made)."""
    model, made = random_gpt(seed=0 if not os.path.exists(partial) else 1), []

    def loss_at(step):
        if crash and step == until:
            raise RuntimeError("power cut")
        made.append(step)
        idx = random_ids(4, 9, seed=step)
        return nn.functional.cross_entropy(model.lm_head(model(idx[:, :-1])).flatten(0, 1), idx[:, 1:].flatten())

    stop = (lambda: made[-1:] == [until - 1]) if until and not crash else lambda: False
    schedule = functools.partial(trapezoid, warmup=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("run.fit.SAVE_SECONDS", -1 if crash else 1e9)
        try:
            fit(model, optimizers(model), loss_at, steps, partial, "test", schedule, stop)
        except (KeyboardInterrupt, RuntimeError) as e:
            made.append(str(e))
    return model, made


@pytest.mark.parametrize("crash", [False, True])
def test_interrupted_fit_goes_on_as_if_it_had_not_been(tmp_path, crash):
    whole, made = train(str(tmp_path / "whole.pt"))
    assert made == list(range(8)) and not (tmp_path / "whole.pt").exists()
    partial = str(tmp_path / "partial.pt")
    _, first = train(partial, until=1, crash=crash)  # while the learning rate still goes up
    _, second = train(partial, until=6, crash=crash)  # and while it goes down
    model, third = train(partial)
    assert (first[:-1], second[:-1], third) == ([0], [1, 2, 3, 4, 5], [6, 7])
    assert ("power cut" if crash else "test is saved") in first[-1]
    for (name, a), b in zip(whole.state_dict().items(), model.state_dict().values()):
        assert torch.equal(a, b), name
    assert not any(torch.equal(a, b) for a, b in zip(whole.parameters(), random_gpt().parameters()))


def test_fit_interrupted_after_its_last_step_is_done(tmp_path):
    partial = str(tmp_path / "partial.pt")
    _, made = train(partial, until=8)
    assert made[:-1] == list(range(8)) and "saved" in made[-1]
    model, made = train(partial)
    whole, _ = train(str(tmp_path / "whole.pt"))
    assert made == [] and torch.equal(model.wte.weight, whole.wte.weight)


def test_learning_rate_goes_up_stays_and_goes_down_to_nearly_zero(tmp_path, capsys):
    model, rates = nn.Linear(2, 1), []
    groups = [dict(params=[model.weight], lr=0.1), dict(params=[model.bias], lr=0.02)]
    optimizer = torch.optim.SGD(groups)

    def loss_at(step):
        rates.append([group["lr"] for group in optimizer.param_groups])
        return (model(torch.tensor([1.0, -2.0])) - 3).square().sum()

    schedule = functools.partial(trapezoid, warmup=0.1, decay=0.4)
    final = fit(model, [optimizer], loss_at, 100, str(tmp_path / "p"), "test", schedule)
    expected = [(i + 1) / 10 for i in range(10)] + [1.0] * 50 + [(40 - i) / 40 for i in range(40)]
    for rate, scale in zip(rates, expected, strict=True):
        assert rate == pytest.approx([0.1 * scale, 0.02 * scale])
    assert loss_at(0) < 1e-6 and math.isfinite(final)
    assert "test: step 100/100, loss" in capsys.readouterr().out


def test_fit_reports_a_loss_that_starts_at_its_full_height(tmp_path, capsys):
    model = nn.Linear(1, 1)

    def loss_at(step):
        return 0 * model.weight.sum() + 1.25

    fit(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loss_at, 3, str(tmp_path / "p"), "x")
    assert "x: step 3/3, loss 1.250, 0 s left" in capsys.readouterr().out


def test_optimizers_share_the_weights_between_them():
    model = random_gpt()
    muon, adam = optimizers(model)
    names = {id(p): name for name, p in model.named_parameters()}
    of = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in (muon, adam)]
    assert sorted(of[0] + of[1]) == sorted(names.values())
    assert all(name.startswith("h.") and name.endswith("weight") and ".ln_" not in name for name in of[0]) and len(of[0]) == 8


def test_padding_that_rows_share_is_left_out():
    model = random_gpt(9)
    r = generate(model, [[3, 1, 4, 1], [5], [2]], 6, 12, eos=8, seed=3)
    whole, widths = completion_logprobs(model, r), []
    hook = model.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[1]))
    for row in range(18):
        part = completion_logprobs(model, r[row:row + 1])
        assert part.shape == (1, r.mask.shape[1]) and torch.allclose(part[0], whole[row], atol=1e-5)
        assert widths[-1] == int(r.real[row, :4].sum() + r.mask[row].sum()) - 1
    hook.remove()
    assert len(set(widths)) > 3
