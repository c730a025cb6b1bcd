"""The small judge: a bidirectional GPT and a linear head on its class token.

B texts of T tokens, the class token included. attention_mask (B, T) is False on padding.
"""
import re

import torch
import torch.nn as nn

from data.comments import clean
from data.tokenizer import load_tokenizer
from model import GPT
from common.files import load_gpt
from common.script import BadInput

SAYS_NOTHING = -5.0     # the logit of a text that says nothing, about that of clean text


class Scorer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = GPT(config)
        self.score = nn.Linear(config.n_embd, 1)

    def forward(self, idx, attention_mask):
        """Score idx (B, T), the class token first -> logits of toxic (B,)."""
        x = self.trunk(idx, attention_mask)  # (B, T, C)
        return self.score(x[:, 0])[:, 0]


def load_scorer(path, device="cpu"):
    """Load the judge that judge/train.py wrote to a .pt file; BadInput for any other file."""
    model = load_gpt(path, "judge", Scorer).to(device).eval().requires_grad_(False)
    block_size = model.config.block_size
    tokenizer = load_tokenizer(model.config.vocab_size)

    def judge(prompts, completions):
        rows = encode(tokenizer, completions, block_size)
        return finished(path, logits_of(model, rows, device), completions)

    return judge


def encode(tokenizer, texts, block_size):
    """Turn texts into lists of at most block_size ids, the end token first as class token. They are
    cleaned like the comments, since completions begin with a space and may hold line breaks."""
    rows = tokenizer.encode_ordinary_batch([clean(text) for text in texts], num_threads=2)
    return [[tokenizer.eot_token] + ids[:block_size - 1] for ids in rows]


def pad_right(rows):
    """Pad lists of ids on the right to the longest -> idx (B, T) and attention_mask (B, T)."""
    T = max(map(len, rows))
    idx = torch.tensor([ids + [0] * (T - len(ids)) for ids in rows])
    lengths = torch.tensor([len(ids) for ids in rows])
    return idx, torch.arange(T) < lengths[:, None]


@torch.no_grad()
def logits_of(model, rows, device, batch_size=256):
    """Score N lists of ids with model(idx, attention_mask) -> float32 (N,) on the CPU. Rows of
    similar length share a batch. Synchronises a GPU once."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    ordered = torch.empty(len(rows), device=device)
    for start in range(0, len(rows), batch_size):
        batch = order[start:start + batch_size]
        idx, attention_mask = pad_right([rows[i] for i in batch])
        ordered[start:start + batch_size] = model(
            idx.to(device, non_blocking=True), attention_mask.to(device, non_blocking=True))
    scores = torch.empty(len(rows))
    scores[order] = ordered.cpu()
    return scores


def says_nothing(text):
    """Tell whether a text is empty, a single symbol, or has neither letter nor digit. No judge has
    learned to rate such texts, and any two judges disagree about them."""
    text = text.strip()
    return len(text) < 2 or not re.search(r"[^\W_]", text)


def silent(texts):
    """Tell which of N texts say nothing -> bools (N,)."""
    return torch.tensor([says_nothing(text) for text in texts], dtype=torch.bool)


def finished(name, scores, completions):
    """Return the scores (N,), with SAYS_NOTHING where a text says nothing. BadInput names the first
    text whose score is not finite."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        i = int(bad[0])
        raise BadInput(f"judge {name}: the score of the completion {completions[i]!r} is "
                       f"{float(scores[i])}: must be finite")
    return scores.masked_fill(silent(completions), SAYS_NOTHING)
