"""What the studies of predictions measure: their statistics by hand, the truth of a reward by
enumeration, a whole small run."""
import math

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from extras.explain.story import row_of
from extras.explain.target import Sentences
from extras.study import predictions, trust
from extras.study.predictions import Truth, auc, bound_of, correlation, error_of, slope_of
from rollout import completion_logprobs
from worlds import inputs_of, number_gpt, settings, setup_of, shaken


def tensor(*x):
    return torch.tensor(x, dtype=torch.float64)


def test_order_size_and_bound_by_hand():
    assert correlation(tensor(1, 2, 9), tensor(5, 6, 7)) == pytest.approx(1)
    assert correlation(tensor(1, 2, 9), tensor(5, 7, 6)) == pytest.approx(0.5)
    pairs = [(tensor(1, 0), tensor(2, 0)), (tensor(0, 2), tensor(0, 4))]
    assert slope_of(pairs) == pytest.approx(2), "the truth is twice the prediction"
    assert error_of(pairs) == pytest.approx(0.5)
    assert auc([4, 3, 2, 1], [True, True, False, False]) == 1
    assert auc([4, 3, 2, 1], [True, False, True, False]) == 0.75
    assert auc([1, 1], [True, False]) == 0.5
    assert math.isnan(auc([1, 2], [False, False]))
    assert bound_of([0.2, 0.4, 0.8, 0.9], [True, True, False, False]) == pytest.approx(0.6)


def test_the_true_change_of_a_reward_is_that_of_all_completions(monkeypatch):
    """Of two policies: completions of one token, each with its probability."""
    monkeypatch.setattr(predictions, "DRAWN", 3000)
    cfg = settings(functions=last_letter, max_completion_length=1)
    policy = number_gpt()
    setup = setup_of(cfg, policy)
    here = parameters_to_vector(policy.parameters()).detach()
    there = parameters_to_vector(shaken(number_gpt(), 0.05).parameters()).detach()
    truth = Truth(setup, cfg, Sentences(setup, cfg, row_of([2, 3], [4, 1, 0], setup.device)), here)
    assert truth.at(here) == ([0.0, 0.0], 0.0), "nothing changed"
    (_, change), noise = truth.at(there)
    exact = exact_reward(setup, there) - exact_reward(setup, here)
    assert abs(change - exact) < 4 * noise < abs(exact), (change, exact, noise)


def last_letter(prompts, completions):
    return [float(text[-1:] in "13579") for text in completions]


def exact_reward(setup, weights):
    """The mean over prompts of the sum over tokens of probability times reward."""
    torch.nn.utils.vector_to_parameters(weights.clone(), setup.policy.parameters())
    total = 0.0
    for prompt in setup.eval_prompts:
        for i in range(12):         # 0 is the end token
            row = row_of(prompt.ids, [i], setup.device)
            with torch.no_grad():
                p = float(completion_logprobs(setup.policy, row, 1.0).sum().exp())
            total += p * last_letter(None, [setup.tokenizer.decode([i] if i else [])])[0]
    return total / len(setup.eval_prompts)


def test_a_smooth_run_is_predicted(monkeypatch):
    """The whole measurement, of a run of small steps: the truth is nearly the prediction."""
    monkeypatch.setattr(predictions, "DRAWN", 200)
    monkeypatch.setattr(predictions, "FEWER", (100,))
    cfg = settings(functions=last_letter, max_completion_length=2, max_iters=2, num_prompts=4,
                   learning_rate=1e-4, beta=0.1)
    run = predictions.measure(cfg, inputs_of(number_gpt()), {"tenth": (0.1, 2)}, 1, (0.3, 0.0))
    for which in ("sentences", "reward"):
        slope = slope_of(trust.single(run, 0.3, which))
        assert 0.5 < slope < 2, f"single rollouts, {which}: slope {slope:.2f}"
    assert set(run["predicted"]) == {"0.3", "0.0", predictions.PLAIN}
    assert run["predicted"]["0.0"] != run["predicted"]["0.3"], "the damping does nothing"
