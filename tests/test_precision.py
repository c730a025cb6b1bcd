"""run/precision.py: bfloat16 that does not hold is turned off. What is called float32 is."""
import copy
import importlib
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import fast
import grpo
import run.evaluation
from common.seeds import hash_of
from data.weights import merged_weights, save_gpt
from fast import to_half
from grpo import Meter, collect, update
from rollout import completion_logprobs, generate
from run import precision
from worlds import (
    WORDS, WORD_PROMPTS, CastsOfMatrices, assert_near, generator_of, printed, random_gpt,
    random_ids, setup_of, skip_without, word_gpt, words)


@pytest.fixture
def half():
    """Setup in bfloat16, and its settings."""
    cfg = words()
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    setup.dtype = torch.bfloat16
    return setup, cfg


def test_bfloat16_that_holds_is_used_and_nothing_is_said(half):
    setup, cfg = half
    before = torch.get_rng_state()
    assert printed(precision.check_precision, setup, cfg) == ""
    assert setup.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in setup.policy.parameters())


@pytest.mark.parametrize("whose", ("trainer", "sampler"))
def test_bfloat16_that_does_not_hold_is_turned_off(whose, half, monkeypatch):
    setup, cfg = half

    def trainer(*args):
        return completion_logprobs(*args) + (0.5 if torch.is_autocast_enabled("cpu") else 0.0)

    def sampler(*args, **how):
        rollout = generate(*args, **how)
        rollout.logp += 0.5
        return rollout

    if whose == "trainer":
        monkeypatch.setattr(precision, "completion_logprobs", trainer)
    else:
        setup.generate = sampler
    out = printed(precision.check_precision, setup, cfg)
    assert out.startswith("note: ") and "bfloat16" in out and "0.5" in out
    assert setup.dtype == torch.float32


def test_a_mistake_that_shows_in_bfloat16_alone_is_said_with_its_place(half, monkeypatch):
    def of_a_new_model(*args):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("mat1 and mat2 must have the same dtype")
        return completion_logprobs(*args)

    monkeypatch.setattr(precision, "completion_logprobs", of_a_new_model)
    out = printed(precision.check_precision, *half)
    assert "bfloat16" in out and "line" in out and "of_a_new_model" in out, "whose mistake is it?"


def bytes_of(*models):
    """Bytes of their weights, each storage once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for model in models for p in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("rank", [0, 2])
def test_frozen_weights_that_are_bfloat16_numbers_take_half_the_memory(comments, tmp_path, rank):
    """As those of published models. What is trained stays float32, and nothing else changes."""
    if rank:
        skip_without("lora")
    base = word_gpt()
    with torch.no_grad():
        for p in base.h.parameters():
            p.copy_(p.bfloat16())
    linears = sum(p.numel() for layer in base.h.modules() if isinstance(layer, torch.nn.Linear)
                  for p in layer.parameters())
    save_gpt(f"{tmp_path}/base.pt", base)
    found = []
    for dtype in ("float32", "bfloat16"):
        cfg = replace(words(lora_rank=rank, beta=0.1), dtype=dtype, policy=f"{tmp_path}/base.pt",
                      comments=str(comments))
        setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
        assert all(p.dtype == torch.float32 for p in setup.trained), "it would learn in bfloat16"
        found.append((bytes_of(setup.policy, setup.base, setup.reference), hash_of(setup.base),
                      merged_weights(setup.policy)))
    (whole, name, weights), (less, half_name, half_weights) = found
    assert whole - less == 2 * linears, "the frozen copy, once, in two bytes a number"
    assert name == half_name, "a run could not go on where the weights are stored in the other way"
    assert all(torch.equal(x, half_weights[key]) for key, x in weights.items())


def test_half_the_memory_changes_no_bit():
    plain = random_gpt().requires_grad_(False)
    half = copy.deepcopy(plain)
    to_half(half)
    assert bytes_of(half) == bytes_of(plain), "its weights are no numbers of bfloat16"
    for p in plain.h.parameters():
        p.copy_(p.bfloat16())
    half = copy.deepcopy(plain)
    to_half(half)
    assert bytes_of(half) < bytes_of(plain)
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert torch.equal(half(random_ids(2, 7)), plain(random_ids(2, 7)))


@pytest.mark.parametrize("frozen", [False, True])
def test_plain_sampling_casts_weights_once_for_all_tokens(frozen):
    model = random_gpt().requires_grad_(not frozen)

    def casts(T):
        with CastsOfMatrices() as found, torch.autocast("cpu", torch.bfloat16):
            generate(model, [[5, 6, 7], [3, 4], [9]], 2, T, seed=3, eos=(-1,))
        return found.count

    assert casts(2) == casts(9) > 0, "sampling casts the weights for each token"
    assert all(p.requires_grad != frozen for p in model.parameters())


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The product that only a GPU has, by a CPU."""
    monkeypatch.setattr(fast, "product", lambda a, b: a.float() @ b.float())


def test_a_product_of_bfloat16_numbers_does_not_round_its_sums(on_a_cpu):
    """Logits near -63, which are GPT-2's."""
    h = torch.randn(4, 5, 256, generator=generator_of(0)).requires_grad_()
    weight = torch.randn(300, 256, generator=generator_of(1)) / 16
    h.data[..., 0] = 63.0
    weight[:, 0] = -1.0
    weight.requires_grad_()
    targets = random_ids(4, 5, 300)[..., None]

    def logp_of(logits):
        logp = logits.log_softmax(-1).gather(-1, targets)
        return logp, torch.autograd.grad(logp.sum(), (h, weight))

    expected, expected_gradients = logp_of(F.linear(h, weight))
    logp, gradients = logp_of(fast.half_product(h, weight))
    assert (logp - expected).abs().max() < 0.01
    for g, e in zip(gradients, expected_gradients):
        assert g.dtype == e.dtype and (g - e).norm() < 0.01 * e.norm()
    rounded = F.linear(h.bfloat16(), weight.bfloat16()).float().log_softmax(-1).gather(-1, targets)
    assert (rounded - expected).abs().max() > 0.05, "logits that nothing would round"


def test_a_second_derivative_of_it_is_refused(on_a_cpu):
    h = torch.ones(2, 3, requires_grad=True)
    slope, = torch.autograd.grad(fast.half_product(h, h).exp().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_log_probs_that_keep_probabilities_are_those_of_torch():
    """Also of a token whose probability is 0 in float32, and where some may not be drawn."""
    logits = 4 * torch.randn(5, 40, generator=generator_of(3)) - 63
    logits[0, 1] -= 200
    logits[1, 5:] = -math.inf
    targets = torch.tensor([1, 2, 3, 4, 5])[:, None]
    factors = torch.randn(5, 1, generator=generator_of(4))
    found = []
    for function, x in ((fast.LogProbOfHalf.apply, logits),
                        (lambda x, t: x.log_softmax(-1).gather(1, t), logits.double())):
        x = x.clone().requires_grad_()
        logp = function(x, targets)
        slope, = torch.autograd.grad((logp * factors).sum(), x)
        found += [logp.detach().double(), slope.double()]
    assert_near(found[0], found[2], 1e-5)
    assert_near(found[1], found[3], 1e-5)


def test_a_step_in_bfloat16_keeps_log_probs_and_weights_in_float32(half):
    setup, cfg = half
    batch = collect(setup, WORD_PROMPTS, cfg, seed=7)
    assert batch.rollout.logp.dtype == torch.float32
    meter = Meter(setup, cfg, check=True)
    assert update(setup, batch, None, cfg, 3, meter)["num_steps"] == 1
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in setup.policy.parameters())


@pytest.fixture
def tf32():
    """As in a bfloat16 run on a GPU."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def perplexity(setup, rollout, cfg):
    run.evaluation.perplexity_under(setup.base, rollout, cfg)


def changes_of_words(setup, rollout, cfg):
    from extras.explain.tokens import logprob_changes
    target_gradient = {p: p.detach() for p in setup.trained}
    logprob_changes(setup.policy, target_gradient, rollout, 1.0)


def slope_of_account(setup, rollout, cfg):
    from extras.explain.target import HeldOut
    held_out = HeldOut("reward", setup, cfg, {}, [], [], 1)
    rows = torch.arange(len(rollout.ended))
    held_out.slope_of(rollout, torch.ones(len(rows)), rows)


@pytest.mark.parametrize("module, call", [
    ("run.evaluation", perplexity), ("extras.explain.tokens", changes_of_words),
    ("extras.explain.target", slope_of_account)])
def test_what_is_called_float32_is_not_tf32(tf32, half, monkeypatch, module, call):
    """Forward and backward, which another hook sees."""
    if module.startswith("extras."):
        skip_without(module.split(".")[1])
    module = importlib.import_module(module)
    setup, cfg = half
    rollout = precision.few_rows(setup, cfg)[0]
    seen = []

    def watched(*args):
        logp = completion_logprobs(*args)
        seen.append(torch.get_float32_matmul_precision())
        if logp.requires_grad:
            logp.register_hook(lambda g: seen.append(torch.get_float32_matmul_precision()))
        return logp

    monkeypatch.setattr(module, "completion_logprobs", watched)
    call(setup, rollout, cfg)
    assert set(seen) == {"highest"}, "products would be rounded to 10 bits on a GPU"
    assert torch.get_float32_matmul_precision() == "high", "it does not end with its block"
