"""run/precision.py: bfloat16 that does not hold is turned off. What is called float32 is."""
import copy
import importlib
from dataclasses import replace

import pytest
import torch

import grpo
import run.evaluation
from common.seeds import hash_of
from data.weights import merged_weights, save_gpt
from fast import to_half
from graph import HalfWeights
from grpo import collect, update
from rollout import completion_logprobs, generate
from run import precision
from worlds import (
    WORDS, WORD_PROMPTS, printed, random_gpt, random_ids, setup_of, skip_without, word_gpt, words)


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
    # the weights of a graph's step are these, and no copies
    assert bytes_of(half.h, HalfWeights(half).model.h) == bytes_of(half.h)


def test_a_step_in_bfloat16_keeps_log_probs_and_weights_in_float32(half):
    setup, cfg = half
    batch = collect(setup, WORD_PROMPTS, cfg, seed=7)
    assert batch.rollout.logp.dtype == torch.float32
    assert update(setup, batch, None, cfg, seed=3, check=True)["num_steps"] == 1
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
    from extras.explain.words import logprob_changes
    target_gradient = {p: p.detach() for p in setup.trained}
    logprob_changes(setup.policy, target_gradient, rollout, 1.0)


def slope_of_account(setup, rollout, cfg):
    from extras.explain.target import HeldOut
    held_out = HeldOut("reward", setup, cfg, {}, [], [], 1)
    rows = torch.arange(len(rollout.ended))
    held_out.slope_of(rollout, torch.ones(len(rows)), rows)


@pytest.mark.parametrize("module, call", [
    ("run.evaluation", perplexity), ("extras.explain.words", changes_of_words),
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
