# Reward by a rule instead of a judge: few capital letters. Change the rule and run it again.
#     python grpo.py config/lowercase.py
from config.toxicity import *

max_iters = 40
out_dir = "out/lowercase"
judge = None
eval_judge = None


def reward(prompts, completions):
    """Minus the share of capital letters; an empty completion gets the lowest reward."""
    return [-sum(c.isupper() for c in text) / len(text) if text else -1.0 for text in completions]
