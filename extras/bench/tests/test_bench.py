"""The bench: an iteration is grpo's, variants take turns, and what is typed wrong is refused."""
import importlib.util
import sys

import pytest
import torch

import extras.bench.__main__ as bench
import grpo
from common.files import ROOT
from extras.bench import shapes
from worlds import assert_near, printed, refusal, settings, setup_of, skip_without


@pytest.fixture
def quick(comments):
    """Flags of a job that takes a moment."""
    return [f"{ROOT}/config/quick_test.py", f"--comments={comments}", "--n_layer=1", "--n_embd=16",
            "--n_head=2", "--num_prompts=2", "--num_generations=2", "--max_completion_length=4",
            "--device=cpu"]


def test_an_iteration_is_that_of_a_run():
    cfg = settings(beta=0.1)
    here, there = setup_of(cfg), setup_of(cfg)
    found = bench.iteration(here, cfg, 3)
    batch = grpo.collect_iteration(there, 3, cfg)
    grpo.update(there, batch, None, cfg, bench.seed_for(cfg.seed, "rows", 3))
    for a, b in zip(here.trained, there.trained):
        assert torch.equal(a, b)
    assert found.tokens == int(batch.rollout.sampled_mask.sum())


def test_variants_take_turns_and_the_first_round_does_not_count(monkeypatch):
    order = []

    def iteration(setup, cfg, it):
        order.append((setup, it))
        return bench.Round(100.0 if it == 0 else float(it), 10, 0.5)

    monkeypatch.setattr(bench, "iteration", iteration)
    rounds = bench.in_turns({"a": ("A", None), "b": ("B", None)}, 3)
    assert order == [(setup, it) for it in range(4) for setup in "AB"]
    text = printed(bench.print_rounds, rounds)
    assert "a\n  2.000 s an iteration (1.000 to 3.000), 5 tokens/s, 1.00 x the first" in text


def test_a_config_beside_a_variant(quick):
    text = printed(bench.main, [*quick, "--repeat=1", "vs", "--tracin=self"])
    assert f"{' '.join(quick)} (torch.float32)\n" in text, "a variant says what it runs in"
    assert "vs --tracin=self (torch.float32)\n" in text
    assert text.count(" tokens/s, ") == 2


def test_beside_trl_no_judge_is_asked(quick, monkeypatch):
    skip_without("hub")
    monkeypatch.setitem(sys.modules, "trl", torch)
    monkeypatch.setattr(bench, "rounds_of_trl", lambda *_: [bench.Round(1.0, 1, 0.0)])
    asked = ["--judge=train", "--reward_funcs=('reward','judge')", "--reward_weights=(1.0,1.0)"]
    text = printed(bench.main, ["trl", *quick, *asked])
    assert text.count(" s an iteration") == 2
    assert "here\n" in text


def test_what_is_typed_wrong_is_one_line(quick):
    assert "--repeat=0: must be" in refusal(bench.main, ["--repeat=0"])
    assert "tracing" in refusal(bench.main, [*quick, "vs", "--tracing=self"])
    for argv in (["vs"], ["vs", "--tracin=self"], [*quick, "vs"]):
        assert "must be between" in refusal(bench.main, argv)


def test_the_tape_beside_a_forward_and_backward(monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", ((1, 8, 20, 4, 3),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    note, line = printed(bench.main, ["tape", "--repeat=1"]).splitlines()
    assert "pip install dattri-llm" in note
    assert line.startswith("1 x 8, V 20, 4 x 3 tokens: ")
    assert "with tape" in line


def test_dattri_llm_does_the_same_work_as_the_tape():
    pytest.importorskip("dattri_llm")
    model, loss = shapes.random_loss(2, 64, 300, 8, 10)
    scores, kept = shapes.with_tape(model, 8, loss)
    others, gradient = shapes.with_dattri(model, 8, loss)
    assert_near(others.double(), scores, 0.01 * float(scores.abs().max()))
    for p, g in gradient.items():
        assert_near(g, kept[p], 1e-4 * float(kept[p].abs().max()))
