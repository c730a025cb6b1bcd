# One run of study/letters.py: a dense reward, the share of the letter e, of which a quarter is
# inverted in training. The held-out target is small, and its rewards are right.
#     python study.py study/letters.py
from config.quick_test import *

from run.script import seed_for as _seed_for

out_dir = "out/study_letters"
max_completion_length = 16
max_iters = 16
learning_rate = 5e-4
eval_interval = 4
expect_rise = 0.0
num_prompts = 10
num_eval_prompts = 64
num_eval_generations = 4
reward_funcs = ("inverted", "wrong", "missed", "reward")
reward_weights = (1.0, 0.0, 0.0, 0.0)  # the others are recorded, for the study
tracin_val_prompts = 1              # times num_generations: a tenth of the rollouts of training
tracin_val_reward = "reward"
tracin_normalizer = "norm"
save_interval = 1000
log_micro = False


def missed(prompts, completions):
    """What is lacking: the share of other characters."""
    return [1 - r for r in reward(prompts, completions)]


def wrong(prompts, completions):
    """1 where the reward is inverted: a quarter of the rollouts."""
    return [float(_seed_for(*texts) % 4 == 0) for texts in zip(prompts, completions)]


def inverted(prompts, completions):
    """The reward, inverted where it is wrong."""
    rewards = zip(reward(prompts, completions), wrong(prompts, completions))
    return [1 - r if w else r for r, w in rewards]


def weigh(influence, batch):
    """The oracle: keeps exactly what is not wrong."""
    return 1 - batch.scores[:, 1].to(influence)
