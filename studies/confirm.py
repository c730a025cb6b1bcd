"""
The one that decides: the setting of wrong.py, 24 seeds that no other study has used.

A quarter of the rewards of training are inverted, and eight held-out rollouts of an iteration have
right ones. Two simpler uses of what is known: `trusted` learns from eight right rollouts more, and
`drop lowest` keeps as many rollouts as influence would, those of the highest rewards.

1. Is `average` better than all, random and top_advantage at equal KL? Yes if it is with p < 0.01
   for each (sign flips over seeds, after Holm for these three comparisons). Else no.
2. Is it better than trusted and drop lowest? The same, after Holm for these two: `--table` with
   controls = ("trusted", "drop lowest").

Equal KL: of each seed a straight line through (sqrt(KL), log toxicity) of its evaluations after 8,
16 and 24 iterations, read at the median sqrt(KL) of all arms.
"""
from studies.wrong import *

seeds = range(101, 125)
tested = ("average",)
_names = ("all", "random", "top_advantage", "held-out", "average", "adam", "oracle")
arms = {name: arms[name] for name in _names} | {
    "trusted": {"tracin": "off", "num_prompts": 11, "reward_weights": (0.0, 0.0, 1.0)},
    "drop lowest": {"tracin": "reward", "tracin_select": "top_reward"},
}
