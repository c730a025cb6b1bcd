"""GDPO: scores that are normalised before they are summed. MaxRL: tests/test_hooks.py. Resampling:
test_resample.py."""
from types import SimpleNamespace

import pytest
import torch

from extras.variants.multi_objective_aggregation import normalize_then_sum
from grpo import group_advantages
from run.settings import load_settings
from test_loss import NAN, plain_advantages
from worlds import assert_refused, letters, mean_token, settings, world


def decoupled(scores, weights, num_generations):
    cfg = SimpleNamespace(reward_weights=weights, num_generations=num_generations)
    return normalize_then_sum(SimpleNamespace(scores=scores), cfg, group_advantages)


def test_scores_that_are_normalised_before_they_are_summed():
    """As TRL's normalize_then_sum: over the group, weighed and summed, then over the batch."""
    scores = [[1, 100], [2, 300], [4, NAN], [NAN, NAN], [0, 10], [1, 10.5], [.5, 11], [0, 12]]
    columns = [plain_advantages(column, 4, "group") for column in zip(*scores)]
    totals = [first + .5 * second for first, second in zip(*columns)]
    totals[3] = NAN     # nobody scored it
    expected = plain_advantages(totals, 8, "batch")
    found = decoupled(torch.tensor(scores), (1.0, .5), 4)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_rewards_are_combined_as_the_setting_says():
    functions = {"a": letters, "b": mean_token}
    cfg = settings(functions, weights=(1.0, 0.5),
                   multi_objective_aggregation="normalize_then_sum")
    _, batch = world(cfg)
    expected = decoupled(batch.scores, (1.0, 0.5), 6)
    assert batch.advantages.tolist() == pytest.approx(expected.tolist())
    _, summed = world(settings(functions, weights=(1.0, 0.5)))
    assert (batch.advantages - summed.advantages).abs().max() > 0.1, "the setting does nothing"


@pytest.mark.parametrize("names, flags", [
    ("zero_std_groups",
     "--multi_objective_aggregation=normalize_then_sum --zero_std_groups=resample"),
    ("kl_in", "--multi_objective_aggregation=normalize_then_sum --kl_in=reward"),
    ("critic", "--multi_objective_aggregation=normalize_then_sum --critic=True")])
def test_settings_that_do_not_go_together_are_refused(names, flags):
    assert_refused(names, load_settings, flags.split())
