"""The small judge: a bidirectional GPT and a linear head on its class token.

B texts of T tokens, the class token included. attention_mask (B, T) is False on padding.
"""
import functools
import re

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

from common.device import exact_linear
from data.comments import clean
from data.tokenizer import load_tokenizer, pieces
from data.weights import load_gpt
from model import GPT

SAYS_NOTHING = -5.0     # the logit for a text that says nothing, about as for clean text


class Scorer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.trunk = GPT(config)
        self.score = nn.Linear(config.n_embd, 1)

    def forward(self, idx, attention_mask):
        """Score idx (B, T), the class token first -> logits of toxic (B,)."""
        x = self.trunk(idx, attention_mask)  # (B, T, C)
        return exact_linear(self.score, x[:, 0])[:, 0]


def ids_of(tokenizer, texts):
    """Encode texts -> lists of ids. Clean them like the comments first, since completions begin
    with a space and may hold line breaks."""
    return tokenizer.encode_ordinary_batch([clean(text) for text in texts], num_threads=2)


def encode(tokenizer, texts, block_size):
    """Turn each text into a list of rows of at most block_size ids: one row, or several for a long
    text. The end token comes first in a row, as class token."""
    return [[[tokenizer.eot_token] + piece for piece in pieces(ids, block_size - 1)]
            for ids in ids_of(tokenizer, texts)]


def load_scorer(path, device="cpu"):
    """Load the judge of a .pt file -> (Scorer, a function that encodes texts, see encode). BadInput
    if the file holds something else."""
    model = load_gpt(path, "judge", Scorer).to(device).eval().requires_grad_(False)
    tokenizer = load_tokenizer(model.config.vocab_size)
    return model, functools.partial(encode, tokenizer, block_size=model.config.block_size)


def pad_right(rows):
    """Pad lists of ids on the right to the longest -> idx (B, T) and attention_mask (B, T)."""
    idx = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
    lengths = torch.tensor([len(ids) for ids in rows])
    return idx, torch.arange(idx.shape[1]) < lengths[:, None]


@torch.no_grad()
def logits_of(model, rows, device, batch_size=256):
    """Score N lists of ids with model(idx, attention_mask) -> float32 (N,) on the CPU. Rows of
    similar length share a batch."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    logits = torch.empty(len(rows), device=device)
    for start in range(0, len(rows), batch_size):
        batch = order[start:start + batch_size]
        idx, attention_mask = pad_right([rows[i] for i in batch])
        logits[batch] = model(idx.to(device), attention_mask.to(device)).float()
    return logits.cpu()


def highest_logits(model, texts, device, batch_size=256):
    """Score N texts, each a list of rows of ids, by the most toxic of its rows -> (N,)."""
    logits = logits_of(model, [row for rows in texts for row in rows], device, batch_size)
    return torch.tensor([float(part.max()) for part in logits.split([*map(len, texts)])])


def says_nothing(text):
    """Whether a text is empty, a single symbol, or has neither letter nor digit. Judges have not
    learned to rate such texts, and disagree about them."""
    text = text.strip()
    return len(text) < 2 or not re.search(r"[^\W_]", text)
