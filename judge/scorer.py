"""The judge: a bidirectional GPT trunk that reads a class token and the text, and a score head on the class token.

Interface, the same for every judge: judge(prompts, completions) -> log-odds of "toxic", one finite float per completion.
This judge reads the completion alone, as RealToxicityPrompts scores continuations: the prompt is not the policy's doing.
"""
from dataclasses import asdict

import torch
import torch.nn as nn

from model import GPT
from run.script import BadInput
from run.files import save_file


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


def check_finite(name, scores, completions):
    """The scores (N,); BadInput names the first that is not finite."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        raise BadInput(f"judge {name}: score {float(scores[bad[0]])} for the completion {completions[int(bad[0])]!r}")
    return scores


