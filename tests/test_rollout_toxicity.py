"""The metric eval_judge/toxicity of an iteration's rollouts."""
import os
from types import SimpleNamespace

import pytest
import torch

from data.prompts import Prompt
from run.files import load_file
from run.metrics import rollout_toxicity, rows_to_judge, weights_of


def rollouts(texts, group, judge):
    """Arguments of rollout_toxicity after the iteration number. The policy has 1000 weights."""
    prompts = [Prompt(f"prompt {i}", [i], {}) for i in range(len(texts) // group)]
    policy = torch.nn.Linear(10, 100, bias=False)
    judges = {} if judge is None else {"eval_judge": judge}
    return prompts, SimpleNamespace(completions=texts), SimpleNamespace(
        judges=judges, policy=policy)


def test_it_is_the_mean_over_the_rollouts_with_their_prompts():
    asked = []

    def judge(prompts, completions):
        asked.extend(zip(prompts, completions))
        return torch.tensor([float(text) for text in completions])

    found = rollout_toxicity(3, *rollouts(["0", "1", "-1", "40"], 2, judge))
    assert asked == [("prompt 0", "0"), ("prompt 0", "1"), ("prompt 1", "-1"), ("prompt 1", "40")]
    assert found == {"eval_judge/toxicity": pytest.approx((0.5 + 1 + 1) / 4)}
    assert rollout_toxicity(3, *rollouts(["0", "1"], 2, None)) == {}


@pytest.mark.parametrize("N, policy, judge, expected", [
    (256, 3_400_000, 400_000, (174, 1)),    # 0.02 * 8 / 2 * 256 * 8.5
    (256, 1_000, 0, (256, 1)), (16, 10 ** 9, 1_000, (16, 1)),
    (256, 124, 124, (32, 2)),               # a budget of 20.48 rows an iteration
    (16, 1, 1000, (16, 12_500))])
def test_the_cost_is_bounded_by_arithmetic(N, policy, judge, expected):
    n, every = rows_to_judge(N, policy, judge)
    assert (n, every) == expected
    assert n / every * 2 * judge <= 0.02 * 8 * N * policy * (1 + 1e-9) or judge == 0


def test_a_large_judge_is_asked_every_so_many_iterations():
    class Judge(SimpleNamespace):
        def __call__(self, prompts, completions):
            return torch.zeros(len(completions))

    arguments = rollouts(["x"] * 400, 4, Judge(num_weights=20_000))     # 20 x the policy's
    _, every = rows_to_judge(400, 1000, 20_000)
    asked = [it for it in range(60) if rollout_toxicity(it, *arguments)]
    assert every > 1 and asked == list(range(0, 60, every))


def test_embeddings_cost_nothing():
    model = torch.nn.Sequential(torch.nn.Embedding(100, 3), torch.nn.Linear(3, 2))
    assert weights_of(model) == 8


def test_it_never_touches_training(grpo, rows, tmp_path):
    """Without that judge everything else is the same to the bit."""
    grpo(tmp_path / "with", "--max_iters=2")
    grpo(tmp_path / "without", "--max_iters=2", "--eval_judge=None")
    one, other = (rows(tmp_path / name / "metrics.jsonl") for name in ("with", "without"))
    assert 0 < one[0].pop("eval_judge/toxicity") < 1
    for row in one + other:
        row.pop("step_time")
    assert one == other
    samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("with", "without")]
    assert samples[0] == samples[1]
    a, b = (load_file(os.path.join(tmp_path, name, "ckpt.pt"), "run")
            for name in ("with", "without"))
    assert all(torch.equal(x, b["policy"][key]) for key, x in a["policy"].items())
    assert torch.equal(a["random"]["torch"], b["random"]["torch"])
