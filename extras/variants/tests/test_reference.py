"""A reference that follows the policy. How often it does: tests/test_trl.py."""
import pytest
import torch

from extras.variants.ref_model_sync_steps import sync_reference
from run.settings import load_settings
from worlds import assert_near, assert_refused, settings, setup_of, shaken


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rank", (0, 2))
def test_the_reference_follows_the_policy(rank):
    """By a share of the way, or as a copy; the log says how many tensors are still others."""
    setup = setup_of(settings(beta=.1, ref_model_sync_steps=1, lora_rank=rank))
    shaken(setup.policy)
    before, policy = weights_of(setup.reference), weights_of(setup.policy)
    found = sync_reference(setup, .6)
    expected = .4 * before + .6 * policy
    assert_near(weights_of(setup.reference), expected, what="the reference after 0.6 of the way")
    assert found["ref_tensors_differing"] == len([*setup.policy.parameters()])
    assert found["ref_distance_left"] == pytest.approx(.4)
    found = sync_reference(setup, 1.0)
    assert torch.equal(weights_of(setup.reference), policy)
    assert found == {"ref_tensors_differing": 0, "ref_distance_left": 0.0}


def test_a_reference_that_nothing_looks_at_follows_nothing():
    assert_refused(("ref_model_sync_steps", "beta"), load_settings, ["--ref_model_sync_steps=2"])
