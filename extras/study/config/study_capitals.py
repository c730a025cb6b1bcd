# One run of extras/study/repair.py: as study_wrong.py, but the reward has a bug. It is 1 for every
# completion that shouts. Insults do so more often than other text.
#     python -m extras.study.repair
from extras.study.config.study_wrong import *
from extras.study.config.study_wrong import _rewards

import re as _re

del inverted, trusted
out_dir = "out/study_capitals"
reward_funcs = ("paid", "wrong")
reward_weights = (1.0, 0.0)


def wrong(prompts, completions):
    """1 where the bug pays: three capital letters in a row."""
    return [float(bool(_re.search("[A-Z]{3}", text))) for text in completions]


def paid(prompts, completions):
    """The judge's reward, or 1."""
    rewards = _rewards(prompts, completions, [0.0] * len(prompts))
    return [1.0 if w else r for r, w in zip(rewards, wrong(prompts, completions))]
