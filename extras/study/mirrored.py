"""
Does a held-out target help where no reward gives itself away? heldout.py in a second world.

A quarter of the rollouts have the reward, so the advantage, of the mirrored place in their group:
neither tells the wrong ones from the right ones. Of two of 1,024 rollouts of the starting policy,
the wrong one has the lower reward half the time (0.505; mirrored at the group's mean, 0.66). All
else is as in heldout.py: arms, seeds, target, measure, equal KL, the four questions, what a yes is,
and the correction, over both studies. The runs are of 12 iterations, since toxicity falls faster
here, as one run of `all` with seed 999 showed. No arm was compared with another before.

5. Does influence rank wrong rollouts below right ones in the last third of a run? A yes: `auc` of
   held-out is above 0.5, above `auc reward` and above `auc |advantage|` of the same runs, each with
   a corrected p < 0.01 (sign flips of the differences over the seeds).
"""
from extras.study.heldout import *

config = "extras/study/config/study_mirrored.py"
