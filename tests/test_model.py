"""model.py against oracles that share no code with it: network, log-probs, LoRA."""
import copy
import math

import pytest
import torch
import torch.nn as nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from by_hand import (
    PROMPTS, SHAPES, distributions, hidden_by_hand, logits_by_hand, random_gpt, random_ids,
    with_lora)
from model import (GPT, LORA_LAYERS, GPTConfig, LoRA, add_lora, attend, completion_logprobs,
                   token_logprobs)
from model import attend as attend_by_hand
from sample import Rollout, generate


# ------------------------------------------------------------------------------------------------
# network

@pytest.mark.parametrize("shape", [
    {}, dict(bias=False), dict(causal=False), dict(causal=False, bias=False),
    dict(n_layer=1, n_head=1)])
def test_forward_equals_a_forward_written_by_hand(shape):
    model = random_gpt(**shape).double()
    idx = random_ids(3, 11)
    expected = torch.stack([hidden_by_hand(model, row) for row in idx.tolist()])
    torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-11)
    if model.config.causal:
        expected = logits_by_hand(model, idx[0].tolist())
        torch.testing.assert_close(model.lm_head(model(idx))[0], expected, rtol=0, atol=1e-11)


def test_bias_false_leaves_no_bias_and_the_judge_has_no_head():
    assert not any("bias" in name for name in random_gpt(bias=False).state_dict())
    assert not hasattr(random_gpt(causal=False), "lm_head")


def test_weights_start_as_in_gpt2():
    model = GPT(GPTConfig(300, block_size=64, n_layer=8, n_head=2, n_embd=64))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert float(p.detach().std()) == pytest.approx(std, rel=0.1), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


def test_width_that_heads_do_not_divide_is_refused():
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
    both = apart.wte.weight.grad + apart.lm_head.weight.grad
    torch.testing.assert_close(model.wte.weight.grad, both)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("f", [attend, attend_by_hand])
@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("numbers", [True, False])
def test_grouped_queries_on_a_gpu_never_take_the_slow_kernel(f, T, numbers):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, T, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 16)
    mask = torch.rand(2, 1, T, 7) < 0.6
    mask[..., 0] = True
    given = mask.float().log() if numbers else mask
    plain = attend(q, k, v, given, False, 0.3)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):   # an error if it cannot be taken
        found = f(*(x.cuda() for x in (q, k, v, given)), False, 0.3)
    torch.testing.assert_close(found.cpu(), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_other_rows_change_nothing(side, causal):
    model, rows = random_gpt(causal=causal).double(), [row.tolist() for row in random_ids(3, 9)]
    rows = [rows[0][:4], rows[1], rows[2][:1]]
    for pad in (0, 49):  # a row must not see what stands on its padding
        pads = [[pad] * (9 - len(row)) for row in rows]
        idx = torch.tensor([p + row if side == "left" else row + p for p, row in zip(pads, rows)])
        position, lengths = torch.arange(9), torch.tensor([[len(row)] for row in rows])
        attention_mask = position >= 9 - lengths if side == "left" else position < lengths
        h = model(idx, attention_mask)
        assert h.isfinite().all()
        for i, row in enumerate(rows):
            found = h[i][attention_mask[i]]
            torch.testing.assert_close(found, model(torch.tensor([row]))[0], rtol=0, atol=1e-12)
            torch.testing.assert_close(found, hidden_by_hand(model, row), rtol=0, atol=1e-11)


def test_token_that_serves_as_padding_or_end_is_attended_where_it_is_real():
    model = random_gpt().double()
    attention_mask = torch.tensor([[False, True, True, True, True]])
    other = model(torch.tensor([[0, 7, 11, 8, 9]]), attention_mask)
    for token in (0, 49):
        h = model(torch.tensor([[0, 7, token, 8, 9]]), attention_mask)
        assert (h - other)[0, 2:].abs().amax(-1).min() > 1e-3


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
    attention_mask = torch.arange(9) >= torch.tensor([[0], [2], [3]]) if padded else None
    expected = model(idx, attention_mask)
    cache, start, out = model.new_cache(3, 12), 0, []
    for n in pieces:
        end = start + n
        mask = attention_mask[:, :end] if padded else None
        out.append(model(idx[:, start:end], mask, cache, start))
        start = end
    torch.testing.assert_close(torch.cat(out, 1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", ["gpt2", "qwen3", "lora"])
def test_compiled_network_is_one_graph_for_all_lengths(shape):
    torch._dynamo.reset()
    model, compiled = random_gpt(10, block_size=64, **SHAPES[shape]), CompileCounter()
    if shape == "lora":
        add_lora(model, 2, 4.0)
    network, counts = torch.compile(model, dynamic=True, fullgraph=True, backend=compiled), []
    cases = [([3, 1], 8), ([5, 5], 6), ([9, 1], 12), ([7, 3], 20), ([2, 2], 30), ([30, 2], 33)]
    for seed, (widths, T) in enumerate(cases):
        r = generate(model, [[1] * w for w in widths], 4, T, eos=9, seed=seed)
        r = r[torch.arange(1, 8, 1 + seed % 3)]
        results = []
        for m in (model, network):
            model.zero_grad()
            logp = completion_logprobs(m, r)
            logp.sum().backward()
            trained = [p for p in model.parameters() if p.requires_grad]
            results.append([logp.detach(), *(p.grad for p in trained)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        counts.append(compiled.frame_count)
    assert counts[-1] == 2  # without padding and with


# ------------------------------------------------------------------------------------------------
# log-probs of given tokens

def logprob_case(V=50, M=23, C=32):
    torch.manual_seed(0)
    head = nn.Linear(C, V, bias=False)
    h, targets = torch.randn(M, C, requires_grad=True), torch.randint(V, (M,))
    allowed = (torch.rand(M, V) < 0.3).scatter(1, targets[:, None], True)
    return head, h, targets, allowed, torch.randn(M)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("at_once", [1, 50, 149, 50 * 23 - 1, 50 * 23, 2 ** 24])
def test_token_logprobs_and_gradients_are_those_of_log_softmax(at_once, truncated, monkeypatch):
    monkeypatch.setattr("model.LOGITS_AT_ONCE", at_once)
    head, h, targets, allowed, weight = logprob_case()
    allowed = allowed if truncated else None
    logp = token_logprobs(head, h, targets, 0.7, allowed)
    (logp * weight).sum().backward()
    H, W = (x.detach().double().requires_grad_() for x in (h, head.weight))
    logits = H @ W.T / 0.7
    if truncated:
        logits = logits.masked_fill(~allowed, -math.inf)
    expected = logits.log_softmax(-1)[torch.arange(23), targets]
    (expected * weight).sum().backward()
    assert logp.dtype == torch.float32
    for got, want in ((logp, expected), (h.grad, H.grad), (head.weight.grad, W.grad)):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_token_logprobs_never_holds_more_logits_than_it_may(monkeypatch):
    monkeypatch.setattr("model.LOGITS_AT_ONCE", 170)
    head, h, targets, _, _ = logprob_case()
    sizes, saved = [], []
    head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))

    def pack(x):
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logp = token_logprobs(head, h, targets)
    assert sum(sizes) == 23 * 50 and max(sizes) == 150
    # nothing waits for the backward
    assert not any(len(shape) == 2 and shape[1] == 50 for shape in saved)
    logp.sum().backward()
    assert sum(sizes) == 2 * 23 * 50 and max(sizes) == 150


def test_token_logprobs_of_no_tokens_is_empty():
    head, h, targets, allowed, _ = logprob_case()
    assert token_logprobs(head, h[:0], targets[:0], 1.0, allowed[:0]).shape == (0,)


@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.8)])
def test_completion_logprobs_in_pieces_has_the_same_gradients(truncation, monkeypatch):
    r = generate(random_gpt(8), [[3, 1, 4], [5]], 4, 8, eos=7, seed=2, **truncation)
    results, sizes = [], []
    for at_once in (2 ** 24, 8 * 5):
        monkeypatch.setattr("model.LOGITS_AT_ONCE", at_once)
        model = random_gpt(8, seed=1)
        model.lm_head.register_forward_hook(lambda module, inputs, out: sizes.append(out.numel()))
        logp = completion_logprobs(model, r, 0.7)
        (logp * torch.arange(logp.numel()).view_as(logp)).sum().backward()
        results.append([logp.detach()] + [p.grad for p in model.parameters()])
    for whole, pieces in zip(*results):
        torch.testing.assert_close(whole, pieces, rtol=1e-4, atol=1e-4)
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
    assert r.ended.any() and not r.completion_mask.all()

    def keep(module, inputs, output):
        output.retain_grad()
        hidden.append(output)

    model.register_forward_hook(keep)
    logp = completion_logprobs(model, r)
    logp.sum().backward()
    # position t is that of the token before the one it scores
    carries = hidden[0].grad.abs().sum(-1) > 0
    assert torch.equal(carries[:, 2:], r.completion_mask) and not carries[:, :2].any()
    assert (logp[~r.completion_mask] == 0).all()


def test_tokens_after_the_end_change_no_logprob():
    model = random_gpt(8)
    r = generate(model, [[3, 1, 4], [5]], 6, 10, eos=7, seed=2)
    before = completion_logprobs(model, r)
    r.tokens[:, 3:][~r.completion_mask] = 2
    assert torch.equal(completion_logprobs(model, r), before)


@torch.no_grad()
def test_mixed_masks_score_only_the_tokens_they_name():
    model = random_gpt()
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    whole = torch.ones(2, 5, dtype=torch.bool)
    r = Rollout(random_ids(2, 5), whole, whole[:, :3], chosen, None, None, None)
    logp = completion_logprobs(model, r)
    for i in range(2):
        expected = logits_by_hand(model, r.tokens[i].tolist()).log_softmax(-1)
        for t in range(3):
            want = float(expected[1 + t, r.tokens[i, 2 + t]]) if chosen[i, t] else 0.0
            assert float(logp[i, t]) == pytest.approx(want, abs=1e-5)


def test_padding_that_rows_share_is_left_out():
    model = random_gpt(9)
    r = generate(model, [[3, 1, 4, 1], [5], [2]], 6, 12, eos=8, seed=3)
    whole, widths = completion_logprobs(model, r), []
    hook = model.register_forward_hook(lambda module, inputs, out: widths.append(out.shape[1]))
    for row in range(18):
        part = completion_logprobs(model, r[row:row + 1])
        assert part.shape == (1, r.completion_mask.shape[1]) and torch.allclose(part[0], whole[row], atol=1e-5)
        assert widths[-1] == int(r.attention_mask[row, :4].sum() + r.completion_mask[row].sum()) - 1
    hook.remove()
    assert len(set(widths)) > 3


# ------------------------------------------------------------------------------------------------
# LoRA

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
    name = "h.0.attn.c_attn.base.weight"
    assert (adapted.get_parameter(name) - weights[name]).abs().max() > 0.01
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
        has_gradient = p.grad is not None and bool(p.grad.any())
        assert p.requires_grad == has_gradient == is_adapter, name


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
def test_impossible_adapter_is_refused(rank, layers):
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
