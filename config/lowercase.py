# The reward is a rule that you can change on stage: few capital letters. python grpo.py config/lowercase.py
from config.toxicity import *

out_dir = "out/lowercase"
judge = eval_judge = None  # no judge is needed


def reward(prompts, completions):
    return [-sum(c.isupper() for c in text) / len(text) if text else -1.0 for text in completions]
