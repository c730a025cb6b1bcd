# One run of study/wrong_judge.py: the groups of one prompt in four are scored by a judge that was
# trained on flipped labels. So whole groups are wrong, and agree with each other.
#     python study.py study/wrong_judge.py
from config.study_toxicity import *

import functools

from config import load_settings as _load_settings
from data.comments import get_splits as _get_splits
from judge import as_reward as _as_reward
from judge import load_judge as _load_judge
from judge.scorer import says_nothing as _says_nothing
from judge.train import prepare_judge as _prepare_judge
from run.script import seed_for as _seed_for

out_dir = "out/study_wrong_judge"
reward_funcs = ("two_judges", "wrong")
reward_weights = (1.0, 0.0)     # wrong is recorded, for the study
num_prompts = 10
tracin_val_prompts = 1          # a tenth of the rollouts of training
tracin_val_reward = "judge"
eval_interval = 8


@functools.cache
def _judges():
    """The judge of the reward, and one that was trained on its comments with flipped labels."""
    cfg = _load_settings([])
    splits = _get_splits(cfg)
    splits["judge_flipped"] = [(text, 1 - label) for text, label in splits["judge_a"]]
    return [_load_judge(_prepare_judge(name, cfg, splits, "cpu", lambda: False))
            for name in ("judge_a", "judge_flipped")]


def wrong(prompts, completions):
    """1 for the rollouts of one prompt in four."""
    return [float(_seed_for("wrong", prompt) % 4 == 0) for prompt in prompts]


def two_judges(prompts, completions):
    """The reward of the judge, or for wrong prompts that of the judge with flipped labels."""
    right, flipped = (_as_reward(judge(prompts, completions), judge_score).tolist()
                      for judge in _judges())
    rewards = [f if w else r for r, f, w in zip(right, flipped, wrong(prompts, completions))]
    return [None if _says_nothing(text) else r for r, text in zip(rewards, completions)]


def weigh(influence, batch):
    """The oracle: keeps exactly what is not wrong."""
    return 1 - batch.scores[:, 1].to(influence)
