"""run/precision.py: bfloat16 that does not hold is turned off."""
import torch

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
