"""The policy "train": a small GPT from scratch, made at first use and kept for all runs."""
import math
import random

import torch
from torch.nn import functional as F

from common.device import autocast, pick_dtype
from common.errors import BadInput
from data.comments import load_splits
from data.tokenizer import load_tokenizer
from data.weights import save_gpt
from extras.make.supervised import cached, fit
from model import GPT, GPTConfig, Policy

# the settings that give a new policy its shape: the first fields of GPTConfig, in their order
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
SEED = 0
BATCH_SIZE = 48  # windows of block_size tokens


def new_policy(cfg):
    """Make a policy of the shape in the settings, with random weights."""
    if cfg.n_embd % cfg.n_head:
        raise BadInput(f"n_embd = {cfg.n_embd}: must be a multiple of n_head = {cfg.n_head}")
    return Policy(GPTConfig(*(getattr(cfg, name) for name in SHAPE)))


def made_up_texts(cfg, n, seed):
    """Call texts(n, seed) of the config file; raise BadInput unless it returns n texts."""
    texts = cfg.functions["texts"](n, seed)
    if len(texts) != n:
        raise BadInput(f"texts({n}, {seed}) returned {len(texts)} texts: must be {n}")
    return texts


def token_stream(tokenizer, texts, limit=math.inf):
    """Join texts in random order, each followed by the end token -> about `limit` ids (M,)."""
    texts = list(texts)
    random.Random(SEED).shuffle(texts)

    # ten thousand texts at a time, until there is enough
    ids = []
    while texts and len(ids) < limit:
        for text_ids in tokenizer.encode_ordinary_batch(texts[:10_000], num_threads=2):
            ids += text_ids + [tokenizer.eot_token]
        texts = texts[10_000:]
    return torch.tensor(ids)


def text_starts(stream, block_size, eot):
    """Find where texts begin in a stream (M,), after an end token eot -> positions (S,), without
    those too near the end for a window."""
    ends = (stream[:-block_size - 1] == eot).nonzero()[:, 0]
    return torch.cat([torch.tensor([0]), ends + 1])


def windows(stream, starts, num_anywhere, block_size, seed):
    """Cut random windows out of a stream (M,) -> ids (BATCH_SIZE, block_size + 1). The first
    num_anywhere begin anywhere, all others at one of starts (S,)."""
    generator = torch.Generator().manual_seed(seed)
    first = starts[torch.randint(len(starts), (BATCH_SIZE,), generator=generator)]
    num_places = len(stream) - block_size
    first[:num_anywhere] = torch.randint(num_places, (num_anywhere,), generator=generator)
    return stream[first[:, None] + torch.arange(block_size + 1)]


def optimizers(model):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, since it needs fewer tokens,
    and AdamW for all other weights."""
    blocks = getattr(model, "h", torch.nn.Module())     # another class may have none
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if not matrices:
        return [adam]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), adam]


def pretrain(cfg, path, texts, held_out, device):
    """Train a new policy on texts and save it at `path`. If the config file makes the texts up,
    take as many as cfg.pretrain_tokens needs, by the mean length of these."""
    # the texts as one stream of tokens
    num_tokens = cfg.pretrain_tokens
    makes_up = "texts" in cfg.functions
    T = cfg.block_size
    tokenizer = load_tokenizer(cfg.vocab_size)
    if makes_up:
        mean_length = len(token_stream(tokenizer, texts)) / len(texts)
        texts = made_up_texts(cfg, math.ceil(num_tokens / mean_length), SEED)
    stream = token_stream(tokenizer, texts, 2 * num_tokens)
    held_out = token_stream(tokenizer, held_out, 50_000)
    if min(len(stream), len(held_out)) <= T:
        raise BadInput(f"too few comments or texts: {len(stream)} tokens to train on and "
                       f"{len(held_out)} to test on, both must be above block_size = {T}")

    # windows of made-up texts begin at the start of one, like a prompt. Comments are long: half of
    # their windows begin anywhere
    num_anywhere = 0 if makes_up else BATCH_SIZE // 2
    starts = text_starts(stream, T, tokenizer.eot_token)
    held_out_starts = text_starts(held_out, T, tokenizer.eot_token)

    # a new GPT, and the loss of its next tokens
    torch.manual_seed(SEED)
    model = new_policy(cfg).to(device)
    dtype = pick_dtype(cfg.dtype, device)
    print(f"policy: {num_tokens / 1e6:.1f}M tokens of {len(texts)} texts, {dtype} on {device}")

    def loss_at(step, stream=stream, starts=starts):
        batch = windows(stream, starts, num_anywhere, T, 1000 * SEED + step).to(device)
        with autocast(device, dtype):
            logits = model.lm_head(model(batch[:, :-1]))  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    # train it, and measure it on unseen texts
    steps = max(1, num_tokens // (BATCH_SIZE * T))
    fit(model, optimizers(model), loss_at, steps, f"{path}.partial", "policy")
    with torch.no_grad():
        loss = sum(float(loss_at(i, held_out, held_out_starts)) for i in range(10)) / 10
    save_gpt(path, model, loss=loss)
    print(f"policy: held-out loss {loss:.3f} nats per token")


def made_policy(cfg, device, may_train=True):
    """Path of the policy "train". Pretrain it at first use, into cfg.cache_dir."""
    if "texts" in cfg.functions:
        texts = made_up_texts(cfg, 1000, SEED)      # enough to recognise a changed function
        held_out = made_up_texts(cfg, 1000, SEED + 1)
    else:
        splits = load_splits(cfg)
        texts = [text for half in ("judge_a", "judge_b") for text, _ in splits[half]]
        held_out = [text for text, _ in splits["eval_prompts"]]

    def make(path):
        pretrain(cfg, path, texts, held_out, device)

    shape = [getattr(cfg, name) for name in SHAPE]
    inputs = (texts, shape, cfg.pretrain_tokens, SEED, BATCH_SIZE)
    kind = "policy" if Policy is GPT else f"policy-{Policy.__name__}"
    name = f"{kind}-{cfg.n_layer}x{cfg.n_embd}"
    return cached(cfg, name, inputs, make, may_train)
