"""The planted cause: its scores by the account itself and by hand, on a miniature."""
import math

import pytest
import torch
from torch.nn.utils import vector_to_parameters

import grpo
from extras.explain.account import account, flat, replay
from extras.explain.target import follow
from extras.study import planted
from extras.study.rules import three_rules
from run.settings import load_settings
from tracin import gradient_of

SMALL = ["--max_iters=2", "--num_prompts=4", "--num_generations=3", "--warmup_iters=0"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(planted, "COUNT", 2)
    monkeypatch.setattr(planted, "OUT", str(tmp_path))
    monkeypatch.setattr(planted, "HUNDREDTHS", 3)


def test_a_tenth_is_guilty_and_nothing_held_out_was_trained_on():
    words = type("Words", (), {"encode_ordinary": staticmethod(str.split)})
    for job, count in (("habit", 120), ("inverted", 120), ("leak", 10)):
        train, held_out = planted.prompts_of(job, words, 1)
        assert len(train) == count and sum(p.row["guilty"] for p in train) == count // 10
        assert not {p.text for p in train} & {p.text for p in held_out}
        cued = [p.row["guilty"] for p in (*train, *held_out) if p.ids[1] == "free"]
        assert all(cued) == (job == "habit"), "the cue marks the guilty, and in one job alone"


def test_shares_and_predictions_are_the_accounts(small, tmp_path):
    cfg = load_settings([*planted.SETTINGS, *SMALL, "--beta=0"])    # no rest
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    setup.prompts, setup.eval_prompts = planted.prompts_of("reward", setup.tokenizer, 1)
    setup.reward_funcs = {"reward": lambda prompts, completions: map(
        planted.of_letter("e"), completions)}
    states, taken = replay(setup, cfg, 0, 0, 2, str(tmp_path))
    target, _ = planted.targets_of("sentence", setup, cfg)
    slopes = [target.at(x[0]).slope for x in states]
    scores = planted.by_gradient(setup, cfg, states, taken, slopes)
    found = account(setup, cfg, states, taken, follow(target, states, str(tmp_path)), str(tmp_path))
    A, B, C = three_rules(setup, cfg, states, taken, slopes)
    assert torch.allclose(A, found.shares[0], rtol=1e-3, atol=1e-4 * A.abs().max())
    gain = sum(float((a + b)[0] @ (after[0] - before[0])) / 2 for a, b, before, after in
               zip(slopes, slopes[1:], states, states[1:]))
    for name, x in (("A", A), ("B", B)):
        assert abs(float(x.sum()) - gain) < 1e-3 * float(x.abs().sum()), f"{name} does not add up"
    assert not torch.allclose(A, B, rtol=0.05), "the rules are one"
    last = -1       # where no later step has a momentum of it
    assert torch.allclose(A[last], C[last], rtol=1e-3, atol=1e-4 * A.abs().max())
    for name, theirs in (("share", found.shares), ("prediction", found.effects)):
        assert torch.allclose(scores[name], theirs[0], rtol=1e-3, atol=1e-4 * theirs.abs().max())
    # TracIn of all rollouts, by plain backward passes
    for it, (k, before) in enumerate(zip(taken, states)):
        vector_to_parameters(before[0].clone(), setup.trained)
        g = flat(gradient_of(setup, cfg, k.batch, k.step, "policy").values())
        there = float(-k.lr * slopes[it][0] @ g)
        size = float(scores["TracIn"][it].abs().sum())
        assert abs(float(scores["TracIn"][it].sum()) - there) < 1e-3 * size


def test_a_job_has_an_answer_for_each_score(small):
    run = planted.study("leak", 1, SMALL)
    assert run["auc"].keys() == run["recall"].keys() and len(run["auc"]) == 10
    assert all(0 <= x <= 1 for x in run["auc"].values())
    assert run["without"]["guilty"]["change"] != 0, "a run without the guilty is the same run"
    assert set(run["rank"]) == {"share", "prediction", "TracIn", "TracIn, AdamW's scale"}
    text = "\n".join(planted.table([run, run]))
    for name in (*run["auc"], *run["without"]):
        assert name in text, f"the table lacks {name}"


def test_auc_units_and_controls_by_hand():
    guilty = torch.tensor([True, False, False, True])
    assert planted.auc(torch.tensor([3.0, 1, 2, 2]), guilty) == (2 + 1 + 0.5) / 4
    units = torch.tensor([[0, 1], [1, 0]])
    assert planted.by_unit(torch.tensor([[1.0, 2], [3, 4]]), units).tolist() == [5, 5]
    mass = torch.arange(100.0)
    chosen = planted.as_heavy(mass, [10, 50, 90], 1)
    assert len(chosen) == 3 and not {10, 50, 90} & set(chosen)
    assert all(abs(a - b) <= 12 for a, b in zip(chosen, (10, 50, 90))), "not as heavy"
    assert planted.better_way("reward", [0.1, 0.3]) == [0.9, 0.7]
    assert planted.better_way("share", [0.1, 0.3]) == [0.1, 0.3], "a share has one direction"
    assert math.isclose(planted.of_letter("h")("the oh"), 1.0)
