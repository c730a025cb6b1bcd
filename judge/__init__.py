"""Judges: the small classifier that judge/train.py trains (scorer.py), and published RoBERTa
classifiers (extras/hub). A judge is a function of two lists of N texts:

    judge(prompts, completions) -> log-odds of "toxic", float32 (N,), every one of them finite

All judges read the completion alone: the prompt is not the policy's doing. A text that says nothing
(empty, a single symbol, no letter or digit) is clean to every judge. As a reward the judge
abstains, so that the policy learns neither to fall silent nor to avoid it.
"""
import contextlib

import torch

from judge.scorer import finished, load_scorer, log_odds, says_nothing


def load_judge(name, device="cpu"):
    """Load a judge: a .pt file of judge/train.py, or the folder or published name of a RoBERTa
    classifier, perhaps with the label that means toxic: OWNER/NAME:LABEL."""
    if name.endswith(".pt"):
        return load_scorer(name, device)
    from extras.hub.roberta import load_roberta
    model, encode = load_roberta(name, device)

    def judge(prompts, completions):
        scores = log_odds(model, encode(completions), device, batch_size=32)
        return finished(name, scores, completions)

    return judge


def as_reward(scores, kind):
    """Turn log-odds of toxic into a reward, higher is better: 1 - p (probability) or
    log((1 - p) / p) (logit), with p = p(toxic)."""
    return torch.sigmoid(-scores) if kind == "probability" else -scores


def reward_functions(cfg, judges, precision=contextlib.nullcontext):
    """{name: function} for the names in cfg.reward_funcs, and for cfg.tracin_val_reward. "judge" is
    the reward by judges["judge"], whose forward pass runs within precision(); any other name a
    function of the config file."""
    def judge_reward(prompts, completions):
        with precision():
            log_odds = judges["judge"](prompts, completions)
        rewards = as_reward(log_odds, cfg.judge_score).tolist()
        return [None if says_nothing(text) else r for r, text in zip(rewards, completions)]

    functions = cfg.functions | {"judge": judge_reward}
    names = [*cfg.reward_funcs, cfg.tracin_val_reward]
    return {name: functions[name] for name in names if name is not None}
