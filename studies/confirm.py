"""
The one that decides: the setting of wrong.py, 24 seeds that no other study has used.

Two simpler uses of what is known: `trusted` learns from eight right rollouts more, and `drop
lowest` keeps as many rollouts as influence would, those of the highest rewards.

1. Is `average` better than all, random and top_advantage at equal KL, each with p < 0.01?
2. Is it better than trusted and drop lowest? `--table` with controls = ("trusted", "drop lowest").
"""
from studies.wrong import *

seeds = range(101, 125)
tested = ("average",)
_names = ("all", "random", "top_advantage", "held-out", "average", "adam", "oracle")
arms = {name: arms[name] for name in _names} | {
    "trusted": {"tracin": "off", "num_prompts": 11, "reward_weights": (0.0, 0.0, 1.0)},
    "drop lowest": {"tracin": "reward", "tracin_select": "top_reward"},
}
