"""
The fast paths of run/ against the plain functions of model.py that they stand in for: attention by
hand and the fused head. The decoder has test_decoder.py.
"""
import copy
import functools
import math

import pytest
import torch

from by_hand import PROMPTS, SHAPES, random_gpt, with_lora
from judge.scorer import Scorer
from model import Block, GPTConfig, attend
from sample import completion_logprobs
from run.attention import attend_by_hand, use_attention_by_hand
from run.decoder import Decoder
from run.device import autocast
from run.fused_head import FusedHead, fused_logprobs
from sample import generate
from tracin import Tape

# ------------------------------------------------------------------------------------------------
# attention by hand

# B, nh, nkv, T, S
ATTENTION = [(3, 4, 4, 1, 9), (3, 6, 2, 1, 9), (2, 4, 4, 7, 7), (2, 6, 3, 7, 7), (2, 4, 4, 5, 9)]
KINDS = ("none", "causal", "bool", "numbers")


def attention_case(shape, kind, dtype):
    """(q, k, v), the gradient of the output, what each query may see (B, 1, T, S), the mask."""
    B, nh, nkv, T, S = shape
    g = torch.Generator().manual_seed(0)
    sizes = (nh, T), (nkv, S), (nkv, S), (nh, T)
    q, k, v, dy = (torch.randn(B, *size, 8, generator=g, dtype=torch.float64).to(dtype)
                   for size in sizes)
    allowed = torch.rand(B, 1, T, S, generator=g) < 0.6
    allowed |= torch.eye(T, S, dtype=torch.bool)
    if kind == "causal":
        allowed = torch.ones(T, S, dtype=torch.bool).tril().expand(B, 1, T, S)
    numbers = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf)
    mask = {"bool": allowed, "numbers": numbers}.get(kind)
    if kind == "none":
        allowed = torch.ones_like(allowed)
    return (q, k, v), dy, allowed, mask


def with_gradients(f, qkv, dy, *rest):
    """[output, gradients of q, k and v] in float64."""
    x = [y.clone().requires_grad_() for y in qkv]
    y = f(*x, *rest)
    return [z.detach().double() for z in (y, *torch.autograd.grad(y, x, dy))]


def attend_by_definition(q, k, v, forbidden):
    """A head of a row at a time."""
    share = q.shape[1] // k.shape[1]

    def head(b, h):
        scores = q[b, h] @ k[b, h // share].T * 0.3
        return scores.masked_fill(forbidden[b, 0], -math.inf).softmax(-1) @ v[b, h // share]

    rows = [torch.stack([head(b, h) for h in range(q.shape[1])]) for b in range(len(q))]
    return torch.stack(rows)


@pytest.mark.parametrize("f", [attend, attend_by_hand])
@pytest.mark.parametrize("dtype, bound", [
    (torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", ATTENTION)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradients_are_those_of_its_definition(f, dtype, bound, shape, kind):
    qkv, dy, allowed, mask = attention_case(shape, kind, dtype)
    found = with_gradients(f, qkv, dy, mask, kind == "causal", 0.3)
    exact = with_gradients(attend_by_definition, [x.double() for x in qkv], dy.double(), ~allowed)
    for a, right in zip(found, exact):
        assert float((a - right).abs().max()) < bound * max(1, float(right.abs().max()))


# by hand, scores and weights are rounded to the 8 binary digits of a bfloat16
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", [*ATTENTION, (2, 4, 2, 128, 128), (2, 4, 2, 3, 200)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_by_hand_is_torchs_kernel(dtype, bound, shape, kind, scale, monkeypatch):
    """The output and its gradients, relative to their largest entry."""
    qkv, dy, _, mask = attention_case(shape, kind, dtype)
    rest = mask, kind == "causal", scale
    plain = with_gradients(attend, qkv, dy, *rest)
    if shape[3] == 1 or dtype == torch.bfloat16:
        monkeypatch.setattr("run.attention.attend", lambda *a: pytest.fail("not by hand"))
    largest = max(float(x.abs().max()) for x in plain)
    for a, b in zip(with_gradients(attend_by_hand, qkv, dy, *rest), plain):
        assert float((a - b).abs().max()) < bound * largest


@pytest.mark.parametrize("dtype, T", [(torch.float32, 2), (torch.bfloat16, 129)])
def test_long_rows_are_left_to_torchs_kernel(dtype, T):
    qkv, dy, _, _ = attention_case((1, 4, 2, T, T), "causal", dtype)
    plain = with_gradients(attend, qkv, dy, None, True, None)
    for a, b in zip(with_gradients(attend_by_hand, qkv, dy, None, True, None), plain):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_policy_that_attends_by_hand_samples_and_scores_the_same(shape, dtype, bound):
    model = random_gpt(**SHAPES[shape])
    model = with_lora(model) if shape == "lora" else model
    by_hand = copy.deepcopy(model)
    use_attention_by_hand(by_hand)
    by_hand = copy.deepcopy(by_hand)        # as the reference is of the policy
    assert by_hand.state_dict().keys() == model.state_dict().keys()
    assert all(block.attn.attend is attend_by_hand for block in by_hand.h)
    assert all(block.attn.attend is attend for block in model.h)
    with autocast("cpu", dtype):
        r = generate(by_hand, PROMPTS, 4, 8, eos=49, seed=3)
        if dtype == torch.float32:
            assert torch.equal(r.tokens, generate(model, PROMPTS, 4, 8, eos=49, seed=3).tokens)
        plain, found = completion_logprobs(model, r), completion_logprobs(by_hand, r)
    assert float((r.logp - plain).detach().abs().mean()) < bound
    assert float((found - plain).detach().abs().mean()) < bound


def test_judges_attend_by_hand_too():
    class Judge:
        """As judge/ has them: the network is in .model."""
        def __init__(self):
            self.model = Scorer(GPTConfig(50, 16, 2, 2, 16, causal=False))

    policy, judge = random_gpt(), Judge()
    use_attention_by_hand(policy, judge, lambda prompts, completions: None)     # without a network
    for trunk in (policy, judge.model.trunk):
        assert all(block.attn.attend is attend_by_hand for block in trunk.h)


# ------------------------------------------------------------------------------------------------
# the fused head

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])
HEADS = dict(tied={}, untied=dict(tied=False), **{k: v for k, v in SHAPES.items() if k != "gpt2"})


def policy_and_rollout(head, truncation, device="cpu"):
    """The rollout is of another policy."""
    model = random_gpt(11, **HEADS[head])
    r = generate(model, [[3, 1, 4], [5], [2, 2, 7, 8]], 4, 8, eos=7, seed=2, **truncation)
    model = random_gpt(11, seed=1, **HEADS[head])
    model = with_lora(model) if head == "lora" else model
    return model.to(device), r.map(lambda x: x.to(device))


def loss_at(logp):
    """Each token's part depends on its own log-prob alone, and not linearly."""
    weights = torch.linspace(-1, 1, logp.numel(), device=logp.device).view_as(logp)
    return (weights * (logp + 0.3 * logp.sin())).sum()


@pytest.fixture
def small_pieces(monkeypatch):
    """Three tokens a piece of the head. Returns the sizes that the fused head was given."""
    monkeypatch.setattr("model.piece_size", lambda lm_head, h: 3)
    monkeypatch.setattr("run.fused_head.piece_size", lambda lm_head, h: 3)
    sizes, apply = [], FusedHead.apply

    def noted(h, *rest):
        sizes.append(len(h))
        return apply(h, *rest)

    monkeypatch.setattr(FusedHead, "apply", noted)
    return sizes


@every_device
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.8)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_fused_head_has_the_values_and_gradients_of_the_plain_one(
        head, truncation, dtype, bound, device, small_pieces):
    model, r = policy_and_rollout(head, truncation, device)
    found = []
    for f, more in ((completion_logprobs, ()), (fused_logprobs, (loss_at,))):
        with autocast(device, dtype):
            logp = f(model, r, 0.7, *more)
        loss_at(logp).backward()
        found.append([logp.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        model.zero_grad(set_to_none=True)
    assert small_pieces == [int(r.completion_mask.sum())]
    assert (found[0][0][~r.completion_mask] == 0).all() and all(x.any() for x in found[0])
    for plain, fused in zip(*found, strict=True):
        assert fused.dtype == plain.dtype == torch.float32
        assert float((fused - plain).abs().max()) < bound * float(plain.abs().max())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.8)])
@pytest.mark.parametrize("memory", [0, 2 ** 30])
@every_device
def test_fused_head_is_recorded_as_the_plain_one_is(
        head, truncation, memory, device, small_pieces):
    model, r = policy_and_rollout(head, truncation, device)
    n = len(r.completion_mask)
    tapes = []
    for f, more in ((completion_logprobs, ()), (fused_logprobs, (loss_at,))):
        with Tape(model, memory=memory, fewest=0) as tape:
            for rows in (torch.arange(5), torch.arange(5, n)):
                tape.rows(len(rows), r.completion_mask[rows].nonzero()[:, 0])
                part = r[rows]
                loss_at(f(model, part, 0.7, *more)).backward()
        tapes.append(tape)
    assert sum(small_pieces) == int(r.completion_mask.sum())
    w = torch.linspace(-1, 1, n, device=device)
    G, H = (tape.gradient(w) for tape in tapes)
    scores = [tape.dot(G) for tape in tapes]
    for plain, fused in (scores, *((G[p], H[p]) for p in G)):
        assert plain.any() and float((fused - plain).abs().max()) < 1e-5 * float(plain.abs().max())


def test_fused_head_is_the_plain_one_where_it_has_nothing_to_gain(monkeypatch):
    """Without a loss, without gradients, and where all logits fit at once."""
    monkeypatch.setattr(FusedHead, "apply", lambda *a: pytest.fail("used"))
    model, r = policy_and_rollout("tied", {})
    assert torch.equal(fused_logprobs(model, r, 0.7, loss_at), completion_logprobs(model, r, 0.7))
    monkeypatch.setattr("model.LOGITS_AT_ONCE", 3 * 11)
    plain = completion_logprobs(model, r, 0.7)
    assert torch.equal(fused_logprobs(model, r, 0.7), plain)
    with torch.no_grad():
        assert torch.equal(fused_logprobs(model, r, 0.7, loss_at), plain)


def test_fused_head_refuses_a_loss_that_is_not_the_one_announced(small_pieces):
    model, r = policy_and_rollout("tied", {})
    with pytest.raises(ValueError, match="backward_from is not what backward was called on"):
        (2 * loss_at(fused_logprobs(model, r, 0.7, loss_at))).backward()


# ------------------------------------------------------------------------------------------------
# who changes the model changes all of it


@pytest.mark.parametrize("change", [lambda *x: 2 * attend(*x), lambda *x: attend(*x) * math.nan,
                                    lambda q, k, v, mask, causal, scale: attend(
                                        q, k, v, mask, False, scale),
                                    lambda q, k, v, mask, causal, scale: attend(
                                        q, k, v, None, causal, scale)])
def test_an_attention_that_only_one_file_computes_is_not_taken(change, monkeypatch):
    monkeypatch.setattr("run.attention.attend", change)
    model = random_gpt()
    use_attention_by_hand(model)
    assert all(block.attn.attend is attend for block in model.h), \
        "attention by hand was taken though it computes something else than model.attend"


def test_attention_that_is_equal_is_taken():
    model = random_gpt()
    use_attention_by_hand(model)
    assert all(block.attn.attend is attend_by_hand for block in model.h)


def test_a_changed_block_is_what_the_decoder_samples_from(monkeypatch):
    def halved(block, x, *more):
        x = x + 0.5 * block.attn(block.ln_1(x), *more)
        return x + 0.5 * block.mlp(block.ln_2(x))

    model = random_gpt()
    prompts = [[3, 1, 4], [5]]
    plain = functools.partial(generate, model, prompts, 4, 10, seed=2, eos=0)
    before = plain()
    monkeypatch.setattr(Block, "forward", halved)
    expected = plain()
    found = plain(decode=Decoder(model, graphs=False))
    assert not torch.equal(before.tokens, expected.tokens), "the change changed nothing"
    assert torch.equal(found.tokens, expected.tokens), \
        "the decoder samples from another network than model.py has"
    torch.testing.assert_close(found.logp, expected.logp)


def test_a_decoder_of_another_model_is_refused():
    decoder = Decoder(random_gpt(), graphs=False)
    with pytest.raises(ValueError, match="the model that it was made for"):
        generate(random_gpt(seed=1), [[3]], 2, 4, seed=0, eos=0, decode=decoder)
