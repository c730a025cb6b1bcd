"""Influence with a tape that stores gradients of rows: the same numbers, and what it costs."""
from types import SimpleNamespace

import pytest
import torch

from extras import stored
from extras.stored import StoredTape, use_stored_tape
from grpo import collect
from worlds import (
    WORD_PROMPTS, WORDS, nets_of, printed, refusal, settings, shaken, steps_of, word_gpt, words)


def close(a, b):
    return float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


@pytest.mark.parametrize("knobs", [
    dict(tracin="self", beta=.1),
    dict(tracin="reward", kl_in="reward", kl_estimator="k1", beta=.1),
    dict(tracin="reward", tracin_leave_one_out=True),
    dict(tracin="self", top_entropy_quantile=.7), dict(tracin="advantage", mini_batch_size=8)])
def test_stored_gradients_change_nothing(knobs):
    cfg = words(max_completion_length=24, **knobs)
    found = []
    for tape in ("recorded", "stored"):
        nets = nets_of(cfg, word_gpt(), WORD_PROMPTS, WORDS, reference=shaken(word_gpt(), .02))
        nets.optimizer = torch.optim.AdamW(nets.trained, lr=1e-3)
        batch = collect(nets, WORD_PROMPTS, cfg, 7)
        if tape == "stored":
            use_stored_tape(nets, cfg)
            assert nets.influence.new_tape.func is StoredTape
        seen, m = steps_of(nets, batch, cfg, check=True)
        found.append((batch.influence, seen[0], m["tracin/self_share"]))
    (a, g, share), (b, h, other) = found
    assert close(a, b), "influences differ from those of the plain tape"
    assert close(g, h), "the gradient of the kept rows differs from that of the plain tape"
    assert other == pytest.approx(share, rel=1e-3, nan_ok=True)


def test_influence_says_what_it_costs_and_that_it_does_not_fit(monkeypatch):
    nets = SimpleNamespace(trained=[torch.zeros(1000, 2500)], device=torch.device("cpu"),
                           influence=SimpleNamespace(new_tape=None))
    cfg = settings(tracin="self", tracin_memory=8, num_prompts=8, num_generations=4,
                   max_completion_length=24)
    assert printed(use_stored_tape, nets, cfg) == (
        "influence: 32 rows x 2.5 M weights, 0.30 GB of gradients are stored\n")
    assert nets.influence.new_tape.func is StoredTape
    monkeypatch.setattr(stored, "free_memory", lambda device: 2 ** 26)
    assert "tracin_memory = 8: 0.3 GB" in refusal(use_stored_tape, nets, cfg)
