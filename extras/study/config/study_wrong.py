# One run of extras/study/wrong.py: in training a quarter of the rewards are inverted. Which ones
# depends on the texts alone. The held-out target is small, and its rewards are right.
# The policy is so small that a run takes half a minute.
#     python -m extras.study extras/study/wrong.py
from config.toxicity import *

import functools

from common.seeds import seed_for as _seed_for
from judge import judge_rewards as _judge_rewards
from judge import load_judge as _load_judge

out_dir = "out/study_wrong"
dtype = "auto"
policy = "train"
vocab_size = 1024
n_layer = 2
n_embd = 128
pretrain_tokens = 3_000_000
max_completion_length = 16
reward_funcs = ("inverted", "wrong")
reward_weights = (1.0, 0.0)         # wrong is recorded, for the oracle
num_prompts = 10
num_generations = 8
max_iters = 24
learning_rate = 5e-4
beta = 0.1
tracin_val_prompts = 1          # a tenth of the rollouts of training
tracin_val_reward = "judge"
tracin_normalizer = "norm"      # what is kept makes as long a step as all would
eval_interval = 8
num_eval_prompts = 128
num_eval_generations = 4


@functools.cache
def _judge():
    return _load_judge(judge)


def wrong(prompts, completions):
    """1 where the reward is inverted: a quarter of the rollouts."""
    return [float(_seed_for(*texts) % 4 == 0) for texts in zip(prompts, completions)]


def inverted(prompts, completions):
    """The judge's reward, inverted where it is wrong."""
    rewards = _judge_rewards(_judge()(completions), completions, judge_score)
    are_wrong = wrong(prompts, completions)
    return [1 - r if w and r is not None else r for r, w in zip(rewards, are_wrong)]


def weigh(influence, batch):
    """The oracle: keeps exactly what is not wrong."""
    return 1 - batch.scores[:, 1].to(influence)
