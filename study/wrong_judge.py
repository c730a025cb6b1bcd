"""
B, second kind: does influence help where one group in four is scored by a judge that was trained on
flipped labels?

The held-out target has right rewards, and is a tenth as large as the rollouts of training.
`oracle` drops exactly the wrong ones: no selection by influence can be expected to do better.

Win: an arm of held-out, average, adam is better than all, random and top_advantage at equal KL,
each with p < 0.01 (sign flips over seeds, corrected after Holm for the 9 comparisons).
No: no win, and the 95 % interval of the difference to the best control excludes 20 % less toxicity.
Else: not decided.
"""
base = "study/clean.py"
seeds = range(1, 12)
grid = {}
config = "config/study_wrong_judge.py"
arms = {"oracle": {"tracin": "reward", "tracin_select": "weigh"}}
