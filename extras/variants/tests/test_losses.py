"""Losses by name: as a flag and as a config file they are the same, and wrong settings are
refused. Their arithmetic: tests/test_loss.py, test_algorithm.py."""
import pytest

from common.files import ROOT
from common.variants import variants_of
from run.settings import Settings, load_settings
from worlds import assert_refused, loss_of_rows, generator_of

import torch


@pytest.mark.parametrize("loss_type", variants_of("loss_type"))
def test_a_loss_works_as_a_config_file(loss_type):
    """--loss_type=sapo and extras/variants/loss_type/sapo.py give the same loss."""
    logp, old = torch.randn(2, 5, 4, generator=generator_of(1)).double() - 3
    mask = torch.rand(5, 4, generator=generator_of(2)) < 0.8
    A = torch.tensor([1.0, -1, 0.5, 2, -2]).double()
    cfg = load_settings([f"{ROOT}/extras/variants/loss_type/{loss_type}.py", "--epsilon_high=3.0"])
    knobs = dict(epsilon_high=3.0, num_rows=7, num_tokens=40)
    by_name = loss_of_rows(logp, old, A, mask, loss_type=loss_type, **knobs).total
    by_file = loss_of_rows(logp, old, A, mask, functions=cfg.functions, **knobs).total
    assert by_name == by_file
    assert by_name != loss_of_rows(logp, old, A, mask, **knobs).total, "it is dapo's"


@pytest.mark.parametrize("names, flags", [
    (("delta", "1.3"), "--delta=1.2 --epsilon_high=0.3"),
    (("delta", "different one"), "--delta=4 --loss_type=sapo"),
    (("objective", "keep one"), "extras/variants/loss_type/sapo.py --delta=4"),
    ("epsilon_high", "--loss_type=cispo --epsilon_high=0.28"),
    ("use_bias_correction_kl", "--use_bias_correction_kl=True --kl_in=reward"),
    ("use_bias_correction_kl", "--use_bias_correction_kl=True --kl_estimator=k2"),
    ("critic", "--critic=True --importance_sampling_level=sequence"),
    ("bnpo", "--tracin=self --loss_type=bnpo --num_iterations=2")])
def test_settings_that_do_not_go_together_are_refused(names, flags):
    assert_refused(names, load_settings, flags.split())


def test_only_cispo_detaches_a_factor():
    """An account must know it."""
    for loss_type in variants_of("loss_type"):
        objective = Settings(loss_type=loss_type, epsilon_high=3.0).hook("objective")
        assert getattr(objective, "detaches", False) == (loss_type == "cispo"), loss_type
