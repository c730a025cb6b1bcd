# As study_wrong.py, but no reward gives itself away. A wrong
# rollout has the reward of the mirrored place in its group: the best that of the worst, the second
# that of the last but one. Mirrored at the group's mean, most would have one below it: these
# rewards are near 1 but for a few.
#     python grpo.py extras/study/config/study_mirrored.py
from extras.study.config.study_wrong import *
from extras.study.config.study_wrong import _rewards, _wrong_but_last

del inverted
out_dir = "out/study_mirrored"
reward_funcs = ("mirrored", "wrong", "trusted")
# With 24 iterations toxicity would come near its floor: from 0.090 it fell to 0.026 after 8 and to
# 0.013 after 24, to 0.011 after 48 (seed 999, all rollouts). Evaluations after each third, as there
max_iters = 12
eval_interval = 4


def mirrored(prompts, completions):
    """The judge's reward, of the mirrored place where it is wrong."""
    return _mirror(prompts, completions, wrong(prompts, completions))


def trusted(prompts, completions):
    """As mirrored, but right for the last prompt: for an arm with one prompt more."""
    return _mirror(prompts, completions, _wrong_but_last(prompts, completions))


def _mirror(prompts, completions, are_wrong):
    right = _rewards(prompts, completions, [0.0] * len(prompts))
    rewards = list(right)
    for prompt in set(prompts):
        group = [i for i, r in enumerate(right) if prompts[i] == prompt and r is not None]
        group.sort(key=right.__getitem__)
        for i, opposite in zip(group, reversed(group)):
            if are_wrong[i]:
                rewards[i] = right[opposite]
    return rewards
