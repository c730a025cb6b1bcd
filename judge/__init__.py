"""Judges: a small classifier (scorer.py; extras/make trains one), and published RoBERTa
classifiers (extras/hub). A judge is a function of a list of N texts:

    judge(completions) -> logits of "toxic", float32 (N,)

A judge reads only the completion: the policy did not write the prompt. A text that is too long for
its model is cut into pieces, and the most toxic piece counts. A text that says nothing (empty, a
single symbol, without a letter or digit) counts as clean. As a reward the judge abstains on it, so
that the policy learns neither to fall silent nor to avoid silence.
"""
import contextlib

import torch

from common.seeds import hash_of
from judge.scorer import SAYS_NOTHING, highest_logits, load_scorer, says_nothing


def load_judge(name, device="cpu"):
    """Load a judge. name: a .pt file of a Scorer, or the folder or published name of a
    RoBERTa classifier. OWNER/NAME:LABEL says which label means toxic."""
    if name.endswith(".pt"):
        model, encode = load_scorer(name, device)
        batch_size = 256
    else:
        from extras.hub.roberta import load_roberta
        model, encode = load_roberta(name, device)
        batch_size = 32

    def judge(completions):
        # the model scores every text, but its score of a text that says nothing is worthless
        logits = highest_logits(model, encode(completions), device, batch_size)
        silent = torch.tensor([says_nothing(text) for text in completions], dtype=torch.bool)
        return logits.masked_fill(silent, SAYS_NOTHING)

    judge.digest = hash_of(model)       # tells whether the file has changed (run/hashes.py)
    return judge


def judge_rewards(logits, completions, kind):
    """Turn logits of toxic (N,) into rewards, higher is better -> list of N floats. With p =
    p(toxic) a reward is 1 - p for kind "probability", log((1 - p) / p) for "logit". A completion
    that says nothing gets None: the judge abstains."""
    rewards = torch.sigmoid(-logits) if kind == "probability" else -logits
    return [None if says_nothing(text) else r for text, r in zip(completions, rewards.tolist())]


def reward_functions(cfg, judges, precision=contextlib.nullcontext):
    """Collect the reward functions that the settings name -> {name: function}.

    "judge" rewards by judges["judge"], whose forward pass runs within precision(). All other names
    are functions of the config file.
    """
    def judge_reward(completions):
        with precision():
            logits = judges["judge"](completions)
        return judge_rewards(logits, completions, cfg.judge_score)

    functions = cfg.functions | {"judge": judge_reward}
    names = [*cfg.reward_funcs, cfg.tracin_val_reward]
    return {name: functions[name] for name in names if name is not None}
