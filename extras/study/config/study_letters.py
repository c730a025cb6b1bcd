# One run of letters.py: a quarter of the rollouts of training have their reward mirrored at
# the mean of their group. The held-out target is small, and its rewards are right.
#     python -m extras.study extras/study/letters.py
from config.quick_test import *
from extras.study.config.study_wrong import weigh, wrong

out_dir = "out/study_letters"
max_completion_length = 16
max_iters = 16
learning_rate = 5e-4
eval_interval = 4
expect_rise = 0.0
num_prompts = 10
num_eval_prompts = 64
num_eval_generations = 4
reward_funcs = ("mirrored", "wrong", "missed", "reward")
reward_weights = (1.0, 0.0, 0.0, 0.0)  # the others are recorded, for the study
tracin_val_prompts = 1              # times num_generations: a tenth of the rollouts of training
tracin_val_reward = "reward"
tracin_normalizer = "norm"


def missed(prompts, completions):
    """What is lacking: the share of other characters."""
    return [1 - r for r in reward(prompts, completions)]


def mirrored(prompts, completions):
    """The reward, mirrored at the mean of its prompt where it is wrong."""
    rewards = reward(prompts, completions)
    of_prompt = {}
    for prompt, r in zip(prompts, rewards):
        of_prompt.setdefault(prompt, []).append(r)
    means = [sum(of_prompt[prompt]) / len(of_prompt[prompt]) for prompt in prompts]
    return [2 * mean - r if w else r
            for mean, r, w in zip(means, rewards, wrong(prompts, completions))]
