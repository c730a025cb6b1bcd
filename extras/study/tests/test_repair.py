"""The study of repairs: what is trusted, its scores, what is left out, and two seeds of a toy."""
import json

import pytest
import torch

pytest.importorskip("extras.account")     # it may be deleted
from extras.account import replay
from extras.study import repair
from extras.study.config import study_capitals
from extras.study.tests.test_leave_out import toy
from grpo import prepare
from worlds import printed


def test_the_prediction_is_what_lighter_rollouts_do_to_the_target(tmp_path):
    setup, cfg = toy()
    states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, str(tmp_path))
    trusted = taken[0].batch.rollout[:4], torch.tensor([1.0, 1, -1, -1])
    score, _ = repair.scores_of(setup, cfg, states, taken, trusted)
    less = 0.02 * torch.rand(score.shape)
    batches = [k.batch for k in taken]
    ends = []
    for kept in (torch.ones_like(less), 1 - less):
        repair.train_again(setup, cfg, states[0][0], batches, kept)
        with torch.no_grad():
            ends.append(repair.target(setup, cfg, trusted))
    error = abs(ends[1] - ends[0] + (less * score).sum())
    assert error < 0.1 * (less * score).abs().sum(), "a rollout has another one's score"


def test_each_arm_leaves_out_as_much_but_the_oracle_what_is_wrong():
    score = torch.arange(12.0).view(3, 4)
    wrong = score % 5 == 0
    scores = {"prediction": score, "TracIn": -score}
    kept = repair.kept_by(scores, wrong, 0.25, seed=1)
    assert kept["prediction"].tolist() == [[False] * 3 + [True], [True] * 4, [True] * 4]
    assert kept["each iteration"].tolist() == [[True] * 3 + [False]] * 3
    assert int((~kept["random"]).sum()) == 3
    assert torch.equal(kept["oracle"], ~wrong) and kept["all"].all()
    assert repair.auc(torch.tensor([1.0, 2, 2, 3]), torch.tensor([1, 0, 1, 0]) > 0) == 0.875


def test_capitals_are_paid_whatever_they_say(monkeypatch):
    monkeypatch.setattr(study_capitals, "_rewards", lambda *_: [0.1, 0.2, None])
    texts = [" a BAD one", " Not So", "ALL"]
    assert study_capitals.paid([""] * 3, texts) == [1.0, 0.2, 1.0]
    assert study_capitals.wrong([""] * 3, texts) == [1.0, 0.0, 1.0]


def with_another_judge(cfg, inputs):
    """grpo.prepare, with a judge that calls every other text toxic."""
    setup = prepare(cfg, inputs)
    setup.judges["eval_judge"] = lambda prompts, completions: torch.tensor(
        [len(text) % 2 - 0.5 for text in completions])
    return setup


def test_two_seeds_are_made_once_and_answered(tiny, tmp_path, monkeypatch):
    config = "extras/study/config/study_wrong.py"
    monkeypatch.setattr(repair, "OUT", str(tmp_path))
    monkeypatch.setattr(repair, "TRUSTED", 4)
    monkeypatch.setattr(repair.grpo, "prepare", with_another_judge)
    monkeypatch.setattr(repair, "WORLDS", {"toy": (config, 0.25)})
    flags = [flag for flag in tiny.flags if not flag.startswith(("--seed", "--eval_interval"))]
    seeds = ["--first=1", "--last=2"]
    argv = [*seeds, *flags, "--judge=train", "--eval_judge=train", "--eval_interval=1"]
    made = printed(repair.main, argv)
    assert "toy, seed 1: done" in made and "toy, seed 2: done" in made
    assert printed(repair.main, argv) == "", "a seed was made twice"

    found = json.loads((tmp_path / "toy_seed1.json").read_text())
    assert found["all"]["left out"] == 0 and found["all"]["spread"] < 1e-4, "it is another run"
    assert found["oracle"]["wrong ones"] == 1
    assert found["random"]["left out"] == pytest.approx(0.25)
    assert [len(arm["points"]) for arm in found.values()] == [3] * 7
    text = printed(repair.main, [*seeds, "--table"])
    assert "| oracle |" in text and "is the prediction better than random? No" in text
