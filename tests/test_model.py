"""model.py: the network of every family against a forward by hand; padding, the cache, the start of
the weights."""
import functools
import math

import pytest
import torch

from model import GPT, GPTConfig, attend
from by_hand import hidden_by_hand
from common.device import autocast
from worlds import SHAPES, assert_near, random_gpt, random_ids

exact = functools.partial(assert_near, atol=1e-11)
every_shape = pytest.mark.parametrize("shape", SHAPES)


# ------------------------------------------------------------------------------------------------
# network

@pytest.mark.parametrize("shape", [*SHAPES.values(), dict(causal=False)], ids=[*SHAPES, "judge"])
def test_forward_equals_a_forward_by_hand_padded_or_not(shape):
    """Ids on padding, and the other rows, change nothing."""
    model = random_gpt(**shape).double()
    assert hasattr(model, "lm_head") == model.config.causal
    rows = [row[:n] for row, n in zip(random_ids(3, 9).tolist(), (4, 9, 1))]
    for side, pad in (("left", 0), ("left", 49), ("right", 0), ("right", 49)):
        tokens = torch.full((3, 9), pad)
        attention_mask = torch.zeros(3, 9, dtype=torch.bool)
        for i, row in enumerate(rows):
            place = slice(9 - len(row), 9) if side == "left" else slice(len(row))
            tokens[i, place] = torch.tensor(row)
            attention_mask[i, place] = True
        h = model(tokens, attention_mask)
        assert h.isfinite().all()
        for i, row in enumerate(rows):
            expected = hidden_by_hand(model, row)
            exact(h[i][attention_mask[i]], expected)
            exact(model(torch.tensor([row]))[0], expected)


@every_shape
def test_forward_in_pieces_through_the_cache_equals_one_forward(shape):
    model = random_gpt(**SHAPES[shape]).double()
    idx = random_ids(3, 9)
    for padded in (False, True):
        attention_mask = torch.arange(9) >= torch.tensor([[0], [2], [3]]) if padded else None
        expected = model(idx, attention_mask)
        for pieces in ((9,), (4, 1, 1, 1, 1, 1), (1,) * 9, (3, 4, 2)):
            cache = model.new_cache(12)
            start = 0
            out = []
            for n in pieces:
                end = start + n
                mask = attention_mask[:, :end] if padded else None
                out.append(model(idx[:, start:end], mask, cache))
                start = end
            exact(torch.cat(out, 1), expected)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("T, S", [(1, 7), (5, 5), (130, 130)])  # formula, in bfloat16, torch's
def test_attention_is_its_definition_on_every_path(T, S, dtype, tolerance):
    """softmax(scale * q k^T) v, of four heads of queries and two of keys and values."""
    q, k, v = (torch.randn(2, nh, n, 8).to(dtype) for nh, n in ((4, T), (2, S), (2, S)))
    mask = torch.rand(2, 1, T, S) > 0.3
    mask[..., 0] = True
    cases = [(mask, False, mask), (None, False, torch.ones(T, S).bool())]
    if T == S:
        cases.append((None, True, torch.ones(T, S).bool().tril()))
    shared = [x.double().repeat_interleave(2, 1) for x in (k, v)]
    for given, is_causal, seen in cases:
        scores = 0.3 * q.double() @ shared[0].mT
        expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ shared[1]
        found = attend(q, k, v, given, is_causal, 0.3).double()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every_shape
def test_a_cache_is_repeated_for_groups_and_keeps_the_rows_it_is_asked_to(shape):
    model = random_gpt(**SHAPES[shape]).double()
    idx = random_ids(2, 6).repeat_interleave(3, 0)
    idx[:, 4:] = random_ids(6, 2)                   # six endings of two beginnings
    expected = model(idx)
    cache = model.new_cache(4)
    model(idx[::3, :4], None, cache)
    cache = cache.repeat(3, 6)
    exact(model(idx[:, 4:5], None, cache)[:, 0], expected[:, 4])
    rows = torch.tensor([5, 1, 4])
    cache.keep(rows)
    exact(model(idx[rows, 5:], None, cache)[:, 0], expected[rows, 5])


def test_weights_start_as_in_gpt2():
    model = GPT(GPTConfig(1000, 64, n_layer=8, n_head=2, n_embd=128))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / math.sqrt(16 if name.endswith("c_proj.weight") else 1)
            assert float(p.detach().std()) == pytest.approx(std, rel=0.05), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


# ------------------------------------------------------------------------------------------------
# precision

def test_rotary_angles_keep_their_precision_under_autocast():
    """In bfloat16 positions above 256 would be rounded to every second one and more."""
    model = random_gpt(**SHAPES["llama"] | dict(block_size=900))
    idx = random_ids(1, 900)
    with torch.no_grad():
        expected = model(idx)
        with autocast("cpu", torch.bfloat16):
            rough = model(idx).float()
    assert float((rough - expected).abs().mean()) < 0.05 < 0.5 < float(expected.std())
