"""Trains the two judges on disjoint halves of the labelled comments, at first use or by itself:

    python -m judge.train config/toxicity.py

judge_a gives the reward. judge_b never touches training: it is the independent judge of the evaluation.
"""
import hashlib
import os
import random
import time

import torch
from torch.nn import functional as F

from config import load_settings
from data.comments import get_splits
from data.tokenizer import load_tokenizer
from judge import load_judge
from judge.scorer import Scorer, encode, log_odds, pad_right, save_judge
from run.script import BadInput
from model import GPTConfig
from run.device import autocast, fast_dtype, pick_device
from run.script import interrupts, run_script
from run.files import load_file
from run.fit import fit

SHAPE = dict(n_layer=2, n_head=4, n_embd=128, block_size=96, causal=False)


def auc(scores, labels):
    """Area under the ROC curve: the chance that a toxic comment scores above a clean one, ties counting half."""
    values, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts.double() - 1) / 2)[inverse]           # mean rank of equal scores, from 1
    positive = labels > 0.5
    n, m = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * m))


def length_batches(rows, size, seed):
    """Indices of rows in shuffled batches of `size` rows of like length, so that padding costs little."""
    rng, order = random.Random(seed), list(range(len(rows)))
    rng.shuffle(order)
    pools = [sorted(order[i:i + 64 * size], key=lambda j: len(rows[j])) for i in range(0, len(order), 64 * size)]
    batches = [pool[i:i + size] for pool in pools for i in range(0, len(pool), size)]
    rng.shuffle(batches)
    return batches


def train_judge(path, name, comments, heldout, *, vocab_size, tokens, seed, device, stop=lambda: False, batch_size=64):
    """Train a Scorer on comments [(text, label)] for about `tokens` tokens, test it on `heldout`, save it at `path`."""
    began = time.time()
    tokenizer = load_tokenizer(vocab_size)
    torch.manual_seed(seed)
    model = Scorer(GPTConfig(vocab_size=vocab_size, **SHAPE)).to(device)
    rows = encode(tokenizer, [text for text, _ in comments], SHAPE["block_size"])
    labels = torch.tensor([label for _, label in comments], device=device)
    steps = max(1, round(tokens / (batch_size * sum(map(len, rows)) / len(rows))))
    batches = length_batches(rows, batch_size, seed)
    while len(batches) < steps:
        batches += length_batches(rows, batch_size, seed + len(batches))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def loss_at(step):
        idx, real = pad_right([rows[i] for i in batches[step]])
        with autocast(device, fast_dtype(device)):
            scores = model(idx.to(device), real.to(device))
        return F.binary_cross_entropy_with_logits(scores.float(), labels[batches[step]])

    fit(model, [optimizer], loss_at, steps, path + ".partial", name, stop=stop)
    scores = log_odds(model.eval(), encode(tokenizer, [text for text, _ in heldout], SHAPE["block_size"]), device)
    truth = torch.tensor([label for _, label in heldout])
    report = dict(accuracy=float(((scores > 0) == (truth > 0.5)).float().mean()), auc=auc(scores, truth), heldout=len(heldout))
    save_judge(path, model, **report)
    os.remove(path + ".partial") if os.path.exists(path + ".partial") else None
    print(describe(name, report) + f", {time.time() - began:.0f} s")


def describe(name, report):
    return (f"{name}: held-out accuracy {report['accuracy']:.4f}, ROC AUC {report['auc']:.4f} "
            f"on {report['heldout']} comments it never saw")


def get_judges(settings, splits, device, stop=lambda: False):
    """{"judge": ..., "eval_judge": ...}: functions (prompts, completions) -> log-odds, those that the settings do not switch
    off with None. Each is what the settings name (see load_judge) or trained here, once, into settings.cache_dir."""
    # by machine: about 40 s each on two cores
    tokens = settings.judge_tokens or (2_000_000 if fast_dtype(device) == torch.bfloat16 else 1_000_000)
    heldout, judges = splits["train_prompts"] + splits["eval_prompts"], {}
    for role, name, path, label in (("judge", "judge_a", settings.judge, settings.judge_label),
                                    ("eval_judge", "judge_b", settings.eval_judge, settings.eval_judge_label)):
        if path is None:
            continue
        if path == "train":
            key = hashlib.sha256(repr((splits[name], SHAPE, settings.judge_vocab_size, tokens, settings.prepare_seed)).encode())
            path = os.path.join(settings.cache_dir, f"{name}-{key.hexdigest()[:8]}.pt")
            if os.path.exists(path):
                print(describe(name, load_file(path, "judge")) + f", {path}")
            elif not splits[name] or len({label for _, label in heldout}) < 2:
                raise BadInput(f"too few comments for {name}: {len(splits[name])} to train on, {len(heldout)} to test, "
                               "where both labels are needed")
            else:
                train_judge(path, name, splits[name], heldout, vocab_size=settings.judge_vocab_size, tokens=tokens,
                            seed=settings.prepare_seed, device=device, stop=stop)
        if role == "eval_judge" and (path, label) == (settings.judge, settings.judge_label):
            print(f"note: eval_judge is the judge that gives the reward, {path}: no independent check")
            judges[role] = judges["judge"]
        else:
            judges[role] = load_judge(path, device, label)
    return judges


def main(argv):
    settings = load_settings(argv)
    with interrupts() as stop:
        get_judges(settings, get_splits(settings), pick_device(settings.device), stop)


if __name__ == "__main__":
    run_script(main)
