"""
run/head.py: logits in float32 of operands in bfloat16, for the policy, the fused head, the tape and
the decoder. A CPU has float32_product only; where there is a GPU its own product is tried too.
"""
import copy

import pytest
import torch
from torch.nn import functional as F

from by_hand import random_gpt
from sample import completion_logprobs, token_logprobs
from run.decoder import Decoder
from run.device import autocast
from run.fused_head import fused_logprobs
from run.head import float32_product, set_product, wide_product
from sample import decode, generate
from tracin import Tape, check_exact

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])


def product_for(device):
    """The wide one where there is a GPU that knows it."""
    try:
        wide_product(*torch.ones(2, 64, 64, device=device, dtype=torch.bfloat16))
        return wide_product
    except RuntimeError:
        return float32_product


def shifted_gpt(device, by=-63.0, **shape):
    """A random GPT whose logits are `by` lower: one channel of what its head is given is constant.
    """
    model = random_gpt(tied=False, **shape)
    with torch.no_grad():
        model.ln_f.weight[0] = 0
        model.ln_f.bias[0] = 8
        model.lm_head.weight[:, 0] = by / 8
    return model.to(device)


def with_wide_head(model, device):
    wide = copy.deepcopy(model)
    set_product(wide, product_for(device))
    return wide


def mean_gap(a, b, r):
    return float((a - b)[r.sampled_mask].abs().mean())


@every_device
def test_log_probs_keep_their_digits_where_logits_stand_near_minus_63(device):
    plain = shifted_gpt(device)
    gaps = {}
    for name, model in (("plain", plain), ("wide", with_wide_head(plain, device))):
        with autocast(device, torch.bfloat16):
            r = generate(model, [[3, 1, 4], [5]], 16, 15, eos=49, seed=0)
            with torch.no_grad():
                trained = completion_logprobs(model, r)
        with torch.no_grad():
            exact = completion_logprobs(model, r)       # in float32, where both heads are one
        gaps[name] = mean_gap(trained, exact, r)
        if name == "wide":
            gap = mean_gap(r.logp, trained, r)
            assert gap < 0.02, f"sampler and trainer disagree by {gap:.3f} nats with the wide head"
    assert gaps["wide"] < 0.02, (
        f"the wide head in bfloat16 is {gaps['wide']:.3f} nats from float32 on logits near -63")
    assert gaps["plain"] > 0.04, "the plain head is as exact, so this test shows nothing"


def head_case(device, V=50):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 7, 32), (V, 32), (2, 7, V)
    return [torch.randn(*shape, generator=g).to(device) for shape in shapes]


def values_and_gradients(product, h, weight, gradient, dtype=torch.bfloat16):
    h = h.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    with autocast(h.device, dtype):
        logits = product(h, weight)
    logits.backward(gradient.view_as(logits).to(logits.dtype))
    return logits.detach(), h.grad, weight.grad


@every_device
@pytest.mark.parametrize("V", [50, 64])
@pytest.mark.parametrize("flat", [True, False])
def test_wide_product_has_the_logits_of_float32_and_the_gradients_of_bfloat16(device, V, flat):
    h, weight, gradient = head_case(device, V)
    h = h.flatten(0, 1) if flat else h
    wide = values_and_gradients(product_for(device), h, weight, gradient)
    rounded = h.bfloat16().float(), weight.bfloat16().float(), gradient.bfloat16().float()
    exact = values_and_gradients(F.linear, *rounded, torch.float32)
    bounds = 1e-5, 0.01, 0.01       # the logits are float32, their gradients' products are rounded
    for found, right, bound in zip(wide, exact, bounds):
        assert found.shape == right.shape and found.dtype == torch.float32
        torch.testing.assert_close(found, right, atol=bound * float(right.abs().max()), rtol=0)


def test_wide_product_forms_no_gradient_for_what_needs_none():
    h, weight, gradient = head_case("cpu")
    for trains_h in (True, False):
        x, w = h.clone().requires_grad_(trains_h), weight.clone().requires_grad_(not trains_h)
        with autocast("cpu", torch.bfloat16):
            float32_product(x, w).backward(gradient)
        assert (x.grad is None) != trains_h and (w.grad is None) == trains_h
    with autocast("cpu", torch.bfloat16):
        assert not float32_product(h, weight).requires_grad


def test_a_gradient_of_the_gradient_is_refused():
    h, weight, _ = head_case("cpu")
    weight.requires_grad_()
    with autocast("cpu", torch.bfloat16):
        loss = float32_product(h, weight).square().sum()
    gradient, = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.sum().backward()


@every_device
@pytest.mark.parametrize("product", [wide_product, float32_product])
def test_in_float32_every_product_is_the_plain_one(device, product):
    case = head_case(device)
    found = values_and_gradients(product, *case, torch.float32)
    plain = values_and_gradients(F.linear, *case, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, plain))


@pytest.fixture
def small_pieces(monkeypatch):
    """Three tokens a piece of the head."""
    monkeypatch.setattr("model.piece_size", lambda lm_head, h: 3)
    monkeypatch.setattr("run.fused_head.piece_size", lambda lm_head, h: 3)


def loss_at(logp):
    weights = torch.linspace(-1, 1, logp.numel(), device=logp.device).view_as(logp)
    return (weights * logp).sum()


def gradients(model, r, logprobs):
    with autocast(model.wte.weight.device, torch.bfloat16):
        logp = logprobs(model, r, 0.7, loss_at)
    loss_at(logp).backward()
    found = [logp.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


@every_device
@pytest.mark.parametrize("truncation", [{}, dict(top_p=0.8)])
@pytest.mark.parametrize("logprobs", [completion_logprobs, fused_logprobs])
def test_log_probs_and_gradients_are_near_float32(device, truncation, logprobs, small_pieces):
    """Plainly in pieces and by the fused head; V = 50 is no multiple of 64."""
    model = shifted_gpt(device)
    r = generate(model, [[3, 1, 4], [5]], 4, 8, eos=7, seed=2, **truncation)
    logp, *wide = gradients(with_wide_head(model, device), r, logprobs)
    exact = completion_logprobs(model, r, 0.7)
    loss_at(exact).backward()
    assert mean_gap(logp, exact.detach(), r) < 0.02
    for (name, p), found in zip(model.named_parameters(), wide, strict=True):
        error = float((found - p.grad).norm() / p.grad.norm())
        assert error < 0.05, f"{name}: the gradient is {error:.3f} from that of float32"


@every_device
@pytest.mark.parametrize("logprobs", [completion_logprobs, fused_logprobs])
@pytest.mark.parametrize("memory", [0, 2 ** 30])
@pytest.mark.parametrize("pieces", [True, False])
def test_a_tape_gives_the_gradients_of_the_wide_head(device, logprobs, memory, pieces, request):
    if pieces:
        request.getfixturevalue("small_pieces")
    model = with_wide_head(shifted_gpt(device), device)
    r = generate(model, [[3, 1, 4], [5]], 4, 8, eos=7, seed=2)
    _, *plain = gradients(model, r, logprobs)
    with Tape(model, memory=memory, fewest=0) as tape:
        tape.rows(len(r.completion_mask), r.completion_mask.nonzero()[:, 0])
        with autocast(device, torch.bfloat16):
            logp = logprobs(model, r, 0.7, loss_at)
        loss_at(logp).backward()
    G = tape.gradient()
    for (name, p), right in zip(model.named_parameters(), plain, strict=True):
        error = float((G[p] - right).norm() / right.norm())
        assert error < 0.02, f"{name}: the tape's gradient is {error:.3f} from the backward's"
    total = sum(float((G[p] ** 2).sum()) for p in G)
    assert float(tape.dot(G).sum()) == pytest.approx(total, rel=0.02)
    for module, _, a, b in tape.records:
        if module is model.lm_head:
            assert a.dtype == b.dtype == torch.bfloat16, (
                f"the tape keeps the head's records in {a.dtype} and {b.dtype}: twice the memory")


def test_a_tape_is_exact_with_the_wide_head():
    model = with_wide_head(shifted_gpt("cpu"), "cpu")
    idx = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(0))

    def loss_of(rows):
        with autocast("cpu", torch.bfloat16):
            h = model(idx[rows][:, :-1])
            logp = token_logprobs(model.lm_head, h.flatten(0, 1), idx[rows][:, 1:].flatten())
        return -logp.sum()

    tokens = torch.arange(2).repeat_interleave(5)
    check_exact(model, loss_of, torch.arange(2), tokens, tolerance=0.05)


@every_device
def test_the_decoder_pads_its_copy_of_the_head_and_samples_the_same(device):
    model = with_wide_head(shifted_gpt(device), device)
    decoder = Decoder(model, torch.bfloat16, graphs=False)
    assert len(decoder.model.lm_head.weight) == 64 and len(model.lm_head.weight) == 50
    for seed in range(2):
        with autocast(device, torch.bfloat16):
            plain, found = (generate(model, [[3, 1, 4], [5]], 8, 10, eos=9, seed=seed, decode=d)
                            for d in (decode, decoder))
        first = slice(3, 5)     # later tokens may part
        assert torch.equal(found.tokens[:, first], plain.tokens[:, first])
        torch.testing.assert_close(found.logp[:, :2], plain.logp[:, :2], atol=0.05, rtol=0)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn_like(p)
