"""Judges: the small classifier that judge/train.py trains (scorer.py), and published RoBERTa
classifiers (extras/hub). A judge is a function of a list of N texts:

    judge(completions) -> logits of "toxic", float32 (N,), all of them finite

A judge reads the completion alone: the policy did not write the prompt. A text that says nothing
(empty, a single symbol, no letter or digit) counts as clean. As a reward the judge abstains on it,
so that the policy learns neither to fall silent nor to avoid it.
"""
import contextlib
import math

import torch

from judge.scorer import SAYS_NOTHING, load_scorer, logits_of, says_nothing, silent
from common.script import BadInput


def load_judge(name, device="cpu"):
    """Load a judge. name: a .pt file of judge/train.py, or the folder or published name of a
    RoBERTa classifier. OWNER/NAME:LABEL says which label means toxic."""
    if name.endswith(".pt"):
        model, encode = load_scorer(name, device)
        batch_size = 256
    else:
        from extras.hub.roberta import load_roberta
        model, encode = load_roberta(name, device)
        batch_size = 32

    def judge(completions):
        logits = logits_of(model, encode(completions), device, batch_size)
        for completion, logit in zip(completions, logits.tolist()):
            if not math.isfinite(logit):
                raise BadInput(f"judge {name}: the score of the completion {completion!r} is "
                               f"{logit}: must be finite")
        return logits.masked_fill(silent(completions), SAYS_NOTHING)

    return judge


def as_reward(logits, kind):
    """Turn logits of toxic into rewards, higher is better. With p = p(toxic) a reward is 1 - p for
    kind "probability", log((1 - p) / p) for "logit"."""
    return torch.sigmoid(-logits) if kind == "probability" else -logits


def judge_rewards(logits, completions, kind):
    """Rewards of the judge's logits (N,) -> list of N floats; None, an abstention, where a
    completion says nothing."""
    rewards = as_reward(logits, kind).tolist()
    return [None if says_nothing(text) else r for text, r in zip(completions, rewards)]


def reward_functions(cfg, judges, precision=contextlib.nullcontext):
    """Collect the reward functions that the settings name -> {name: function}.

    "judge" is the reward by judges["judge"], whose forward pass runs within precision(). All other
    names are functions of the config file.
    """
    def judge_reward(completions):
        with precision():
            logits = judges["judge"](completions)
        return judge_rewards(logits, completions, cfg.judge_score)

    functions = cfg.functions | {"judge": judge_reward}
    names = [*cfg.reward_funcs, cfg.tracin_val_reward]
    return {name: functions[name] for name in names if name is not None}
