"""
Does influence find mirrored advantages where its target is signal? letters.py with 24 fresh seeds.

Neither the reward nor |advantage| can tell a mirrored rollout from a right one: their columns are
there to show it. Nothing is compared at equal KL here, but at the end of the runs.

1. Does influence rank mirrored rollouts below right ones in the last third of a run? A yes: the
   mean over seeds of `auc` of held-out, and of average, is above 0.5 with p < 0.01 (two-sided sign
   flips of auc - 0.5 over the seeds, after Holm over the two), and above `auc reward` and
   `auc |advantage|` of the same runs.
2. Is less missing at the end than with all rollouts? A yes: both held-out and average lack less
   than all with p < 0.01 (sign flips of the difference of logarithms, after Holm over the two).
"""
from extras.study.letters import *

seeds = range(101, 125)
controls = ("all",)
tested = ("held-out", "average")
at_end = True
arms = {name: arms[name] for name in ("all", "held-out", "average", "oracle")}
