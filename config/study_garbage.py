# One run of study/garbage.py: the reward also pays for a planted word, which the policy writes in
# some completions. The held-out target is scored by the judge alone.
#     python study.py study/garbage.py
from config.study_toxicity import *

out_dir = "out/study_garbage"
reward_funcs = ("judge", "planted")
tracin_val_reward = "judge"
eval_interval = 8


def planted(prompts, completions):
    """1 for a completion that holds the planted word, at first one in twenty."""
    return [float(" article" in text) for text in completions]
