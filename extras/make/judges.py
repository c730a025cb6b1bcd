"""Train the two judges on disjoint halves of the labelled comments."""
import random

import torch
from torch.nn import functional as F

from common.device import autocast, pick_dtype
from common.errors import BadInput
from data.comments import load_splits
from data.tokenizer import load_tokenizer
from data.weights import save_gpt
from extras.make.supervised import cached, fit
from judge.scorer import Scorer, encode, highest_logits, ids_of, pad_right
from model import GPTConfig

SHAPE = dict(n_layer=2, n_head=4, n_embd=128, block_size=96, causal=False)
VOCAB_SIZE = 8192
BATCH_SIZE = 64  # comments
SEED = 0
HALVES = {"judge": "judge_a", "eval_judge": "judge_b"}  # the split that each one is trained on


def even_lengths(comments, seed):
    """Cut half of the clean comments to the length of some toxic comment. Toxic comments are short;
    otherwise the judge would learn that short means toxic, and the policy never to end."""
    # cut to the length of a random toxic comment, from a random start
    rng = random.Random(seed)
    toxic_lengths = [len(text.split()) for text, label in comments if label > 0.5]
    out = []
    for text, label in comments:
        if label < 0.5 and toxic_lengths and rng.random() < 0.5:
            words = text.split()
            count = rng.choice(toxic_lengths)
            start = rng.randrange(max(1, len(words) - count + 1))
            text = " ".join(words[start:start + count])
        out.append((text, label))
    return out


def length_batches(rows, size, seed):
    """Shuffle the rows into batches (lists of indices) of `size` rows of similar length, cut from
    pools of 64 batches that are sorted by length."""
    rng = random.Random(seed)
    order = list(range(len(rows)))
    rng.shuffle(order)
    batches = []

    # sort within a pool, not all rows: batches in order of length would teach lengths first
    for start in range(0, len(order), 64 * size):
        pool = sorted(order[start:start + 64 * size], key=lambda i: len(rows[i]))
        batches += [pool[i:i + size] for i in range(0, len(pool), size)]
    rng.shuffle(batches)
    return batches


def auc(scores, toxic):
    """Area under the ROC curve: the probability that a toxic comment scores above a clean one.
    Equal scores count half. scores (N,), toxic (N,) bools."""
    scores_of_toxic = scores[toxic]
    clean = scores[~toxic].sort().values    # all pairs at once would fill the memory
    below = torch.searchsorted(clean, scores_of_toxic)
    not_above = torch.searchsorted(clean, scores_of_toxic, right=True)
    return float((below + not_above).double().mean() / (2 * len(clean)))


def train_judge(path, name, comments, held_out, cfg, device):
    """Train a Scorer on comments for cfg.judge_tokens tokens, test it on held_out, save it."""
    if not comments or len({label for _, label in held_out}) < 2:
        raise BadInput(f"too few comments for {name}: {len(comments)} to train on and "
                       f"{len(held_out)} to test on; the test needs both labels")
    tokenizer = load_tokenizer(VOCAB_SIZE)
    # cut a long comment to its beginning: the label may be about any piece of it
    rows = [[tokenizer.eot_token] + ids[:SHAPE["block_size"] - 1]
            for ids in ids_of(tokenizer, [text for text, _ in comments])]
    labels = torch.tensor([label for _, label in comments], device=device)

    tokens_per_batch = BATCH_SIZE * sum(map(len, rows)) / len(rows)
    steps = max(1, round(cfg.judge_tokens / tokens_per_batch))
    batches = []
    while len(batches) < steps:
        batches += length_batches(rows, BATCH_SIZE, SEED + len(batches))

    torch.manual_seed(SEED)
    model = Scorer(GPTConfig(vocab_size=VOCAB_SIZE, **SHAPE)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98),
                                  weight_decay=0.01, fused=True)

    dtype = pick_dtype(cfg.dtype, device)

    def loss_at(step):
        batch = batches[step]
        idx, attention_mask = pad_right([rows[i] for i in batch])
        with autocast(device, dtype):
            scores = model(idx.to(device), attention_mask.to(device))
        return F.binary_cross_entropy_with_logits(scores.float(), labels[batch])

    # train it, and measure it on comments that neither judge has seen
    fit(model, [optimizer], loss_at, steps, f"{path}.partial", name)
    texts = encode(tokenizer, [text for text, _ in held_out], SHAPE["block_size"])
    scores = highest_logits(model.eval(), texts, device)
    toxic = torch.tensor([label > 0.5 for _, label in held_out])
    area = auc(scores, toxic)
    save_gpt(path, model, "judge", auc=area)
    print(f"{name}: ROC AUC {area:.4f} on {len(held_out)} comments it never saw")

    # rates at p = 0.5, which an AUC does not show: a judge that has seen few toxic comments may
    # order texts well and yet call none of them toxic
    right, wrong = (float((scores[rows] >= 0).float().mean()) for rows in (toxic, ~toxic))
    print(f"{name}: of these {float(toxic.float().mean()):.1%} are toxic; p is 0.5 or more for "
          f"{right:.1%} of them and for {wrong:.1%} of the others")


def made_judge(cfg, role, device, may_train=True):
    """Path of the judge "train" for a role, "judge" or "eval_judge". Train it at first use, into
    cfg.cache_dir."""
    splits = load_splits(cfg)
    held_out = splits["train_prompts"] + splits["eval_prompts"]
    half = HALVES[role]
    comments = even_lengths(splits[half], SEED)

    def make(path):
        train_judge(path, half, comments, held_out, cfg, device)

    inputs = (comments, SHAPE, VOCAB_SIZE, cfg.judge_tokens, SEED)
    return cached(cfg, half, inputs, make, may_train)
