"""
The one that decides: the setting of wrong.py, 24 seeds that no other study has used.

Simpler uses of what is known are among the arms: `trusted` learns from all rollouts and from eight
right ones more, `trusted only` from such eight alone, and `drop lowest` keeps as many rollouts as
influence would, those of the highest rewards.

Equal KL: of each seed and arm a straight line through (sqrt(KL), log toxicity) of the evaluations
after iterations 8, 16 and 24, read at the median sqrt(KL) of all these points. That must lie within
0.8 times the least and 1.25 times the largest sqrt(KL) of an arm, means over seeds, for `average`
and what it is compared with; an arm where it does not decides nothing. Two-sided sign flips over
the seeds, after Holm. A yes to a question: all its comparisons are below 0 with p < 0.01. All else
is a no: also one that is missed by little, or is true only at another sqrt(KL) or only at the end.

1. Is `average` better than all, random and top_advantage?
2. Is it better than trusted and drop lowest?  (with controls = ("trusted", "drop lowest"))
"""
from extras.study.wrong import *

seeds = range(101, 125)
tested = ("average",)
_names = ("all", "random", "top_advantage", "held-out", "average", "adam", "oracle")
_trusted = {"tracin": "off", "reward_weights": (0.0, 0.0, 1.0)}
arms = {name: arms[name] for name in _names} | {
    "trusted": _trusted | {"num_prompts": 11},
    "trusted only": _trusted | {"num_prompts": 1},
    "drop lowest": {"tracin": "reward", "tracin_select": "top_reward"},
}
