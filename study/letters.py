"""
B, third kind: the same as wrong.py where the target is signal: a dense reward by rule, the share of
the letter e, of which a quarter is inverted in training.

The target of wrong.py is mostly noise (docs/cosine.svg). This one is not: so it says whether it is
the noise that decides. The measure is what the completions lack, the share of other letters.

Win: an arm of held-out, average, adam lacks less than all, random and top_advantage at equal KL,
each with p < 0.01 (sign flips over seeds, corrected after Holm for the 9 comparisons).
No: no win, and the 95 % interval of the difference to the best control excludes 20 % less.
Else: not decided. The share of wrong rollouts that is kept is beside it.
"""
base = "study/clean.py"
seeds = range(1, 12)
few = {"pods": 4, "self": 4, "self_leave-one-out": 4, "bottom": 4}
grid = {}
config = "config/study_letters.py"
measure = "rewards/missed"
arms = {"oracle": {"tracin": "reward", "tracin_select": "weigh"}}
