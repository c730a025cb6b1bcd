"""
Wrong advantages that only a target can find, where that target is signal.

The reward is dense and a rule: the share of the letter e. In training a quarter of the rollouts
have theirs mirrored at the mean of their group: neither the reward nor |advantage| gives them away.
In wrong.py the reward does, and the target is mostly noise. The measure is what the completions
lack, the share of other letters. A win is that of wrong.py.
"""
from extras.study.wrong import *

seeds = range(1, 12)
config = "extras/study/config/study_letters.py"
measure = "rewards/missed"
