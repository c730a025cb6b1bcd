"""
B, third kind: wrong advantages that only a target can find, where that target is signal.

The reward is dense and a rule: the share of the letter e. In training a quarter of the rollouts
have theirs mirrored at the mean of their group: neither the reward nor |advantage| gives them away.
In wrong.py the reward does, and the target is mostly noise (docs/cosine.svg). The measure is what
the completions lack, the share of other letters.

Win: an arm of held-out, average, adam lacks less than all, random and top_advantage at equal KL,
each with p < 0.01 (sign flips over seeds, corrected after Holm for the 9 comparisons).
No: no win, and the 95 % interval of the difference to the best control excludes 20 % less.
Else: not decided. The share of wrong rollouts that is kept is beside it.
"""
base = "study/clean.py"
seeds = range(1, 12)
few = {"pods": 3, "self": 3, "self_leave-one-out": 3, "bottom": 3}
grid = {}
config = "config/study_letters.py"
measure = "rewards/missed"
arms = {"oracle": {"tracin": "reward", "tracin_select": "weigh"}}
