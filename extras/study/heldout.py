"""
Does a held-out target help? confirm.py left a hint of it: it is asked here, with fresh seeds.

The setting is that of confirm.py: a quarter of the rewards are inverted, and eight trusted rollouts
an iteration are the target. The measure is the judge that no training sees.

Equal KL is as there: of each seed and arm a straight line through (sqrt(KL), log toxicity) of the
evaluations after each third of a run, read at the median sqrt(KL) of all these points of a study.
That must lie within 0.8 times the least and 1.25 times the largest sqrt(KL) of an arm, means over
seeds, for `held-out` and what it is compared with; otherwise the comparison decides nothing.

1. Is `held-out` better than all?
2. Is it better than random and top_advantage?
3. Is it better than trusted?
4. Is it better than drop lowest?

mirrored.py asks the same in a second world, and a fifth question. Every p is of two-sided sign
flips over all 24 seeds, and Holm's correction is over the 13 comparisons of both studies together:
five here, five and three there. A yes: all comparisons of the question are below 0, each with a
corrected p < 0.01. All else is a no: also one that is missed by little, one that decides nothing,
and one that is true only at another sqrt(KL), only at the end or only after a correction within one
study, as the tables of extras.study have. The answers are what this prints when all runs are done:

    python -m extras.study.answers
"""
from extras.study.confirm import *

seeds = range(201, 225)
controls = ("all", "random", "top_advantage", "trusted", "drop lowest")
tested = ("held-out",)
_names = ("all", "held-out", "random", "top_advantage", "trusted", "drop lowest", "oracle")
arms = {name: arms[name] for name in _names}
