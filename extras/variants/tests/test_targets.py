"""Which held-out rollouts are the target of influence."""
import math

import torch

from extras.variants.tracin_val_select import targets
from run.settings import Settings, load_settings
from worlds import assert_refused, generator_of

NAN = math.nan


def test_which_held_out_rollouts_are_the_target():
    rewards = torch.tensor([.1, .9, NAN, .7, .3, .2])
    g = generator_of(1)
    for how, size, expected in (("best", 2, [1, 3]), ("worst", 2, [5, 0]), ("balanced", 2, [1, 0]),
                                ("balanced", 4, [1, 3, 5, 0]), ("best", 0, [1, 3, 4, 5, 0])):
        cfg = Settings(tracin_val_select=how, tracin_val_size=size)
        assert targets(rewards, cfg, g).tolist() == expected, (how, size)
    few = targets(rewards, Settings(tracin_val_size=2), g).tolist()
    assert len({*few}) == 2 and {*few} < {*range(6)}, "two random ones"


def test_one_held_out_rollout_has_no_spread():
    assert_refused("tracin_val_size", load_settings, [
        "--tracin=reward", "--tracin_val_prompts=2", "--tracin_val_size=1"])
