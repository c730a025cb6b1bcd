"""run/precision.py: bfloat16 that does not hold is turned off. What is called float32 is."""
import pytest
import torch

import run.evaluation
from explain import target, words
from common.device import full_precision
from rollout import completion_logprobs
from run import precision
from worlds import WORDS, WORD_PROMPTS, printed, settings, setup_of, word_gpt


def word_nets():
    cfg = settings(num_generations=4)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    setup.dtype = torch.bfloat16
    return setup, cfg


def test_bfloat16_that_holds_is_used_and_nothing_is_said():
    setup, cfg = word_nets()
    before = torch.get_rng_state()
    assert printed(precision.check_precision, setup, cfg) == ""
    assert setup.dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in setup.policy.parameters())


def test_bfloat16_that_does_not_hold_is_turned_off(monkeypatch):
    setup, cfg = word_nets()

    def off_under_autocast(*args):
        return completion_logprobs(*args) + (0.5 if torch.is_autocast_enabled("cpu") else 0.0)

    monkeypatch.setattr(precision, "completion_logprobs", off_under_autocast)
    out = printed(precision.check_precision, setup, cfg)
    assert out.startswith("note: bfloat16 off: log-probs are off by 0.5")
    assert setup.dtype == torch.float32


def test_sampling_that_does_not_hold_is_found():
    setup, cfg = word_nets()
    generate = setup.generate

    def off(*args, **how):
        rollout = generate(*args, **how)
        rollout.logp += 0.5
        return rollout

    setup.generate = off
    out = printed(precision.check_precision, setup, cfg)
    assert out.startswith("note: bfloat16 off: log-probs of sampling are off by 0.5")


@pytest.fixture
def tf32():
    """As in a bfloat16 run on a GPU."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def test_full_precision_ends_with_its_block(tf32):
    with pytest.raises(ValueError), full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
        raise ValueError
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("module, call", [
    (run.evaluation, lambda setup, rollout, cfg: run.evaluation.perplexity_under(
        setup.base, rollout, cfg)),
    (target, lambda setup, rollout, cfg: target.HeldOut(
        "reward", setup, cfg, {}, [], [], 1).slope_of(
            rollout, torch.ones(len(rollout.ended)), torch.arange(len(rollout.ended)))),
    (words, lambda setup, rollout, cfg: words.logprob_changes(
        setup.policy, {p: p.detach() for p in setup.trained}, rollout, 1.0))],
    ids=["perplexity", "account", "words"])
def test_what_is_called_float32_is_not_tf32(tf32, monkeypatch, module, call):
    """Forward and backward, which another hook sees."""
    setup, cfg = word_nets()
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
