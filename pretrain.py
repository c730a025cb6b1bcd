"""Make the policy that the settings name: load it, or pretrain it.

    python pretrain.py config/toxicity.py --policy=train --judge=train

trains what the settings call "train", and prints the names of the files: a small GPT from scratch,
on the comments or on the texts that the config file makes up, and the judges (judge/train.py).
grpo.py does so at first use, too.
"""
import copy
import math
import random

from common.script import BadInput, run_script, seed_for, shown     # before torch: see common

import torch
from torch.nn import functional as F

from common.device import autocast, fast_dtype, pick_device
from common.files import load_gpt, save_gpt
from common.supervised import fit, made_once
from config import Settings, load_settings, usage
from data.comments import get_splits
from data.tokenizer import load_tokenizer
from judge.train import trained_judges
from model import GPTConfig, Policy

# the settings that give a new policy its shape: the first fields of GPTConfig, in their order
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
SEED = 0
BATCH_SIZE = 48  # windows of block_size tokens


def get_policy(cfg, splits, device, may_train=True):
    """Return the policy "train" on the CPU. It is pretrained at first use, into cfg.cache_dir."""
    if "texts" in cfg.functions:
        texts = made_up_texts(cfg, 1000, SEED)      # enough to tell them from others
        held_out = made_up_texts(cfg, 1000, SEED + 1)
    else:
        texts = [text for half in ("judge_a", "judge_b") for text, _ in splits[half]]
        held_out = [text for text, _ in splits["eval_prompts"]]

    def make(path):
        pretrain(cfg, path, texts, held_out, device)

    shape = [getattr(cfg, name) for name in SHAPE]
    made_of = (texts, shape, cfg.pretrain_tokens, SEED, BATCH_SIZE)
    return load_gpt(
        made_once(cfg, f"policy-{cfg.n_layer}x{cfg.n_embd}", made_of, make, may_train))


def made_up_texts(cfg, n, seed):
    """Call texts(n, seed) of the config file; raise BadInput unless it returns n texts."""
    texts = cfg.functions["texts"](n, seed)
    good = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not good or len(texts) != n:
        count = f"{len(texts)} texts" if good else shown(texts)
        raise BadInput(f"texts({n}, {seed}) returned {count}: must be a list of {n} texts, none "
                       "empty")
    return texts


def load_policy(cfg):
    """Load the policy of a file or a published name -> (policy, tokenizer); the policy is None for
    "train". Its shape overrides the settings, and a note names each setting that differs."""
    if cfg.policy == "train":
        return None, load_tokenizer(cfg.vocab_size)
    if is_published(cfg):
        from extras.hub.policy import load
        policy, tokenizer = load(cfg.policy)
    else:
        policy = load_gpt(cfg.policy)
        tokenizer = load_tokenizer(policy.config.vocab_size)
    for name in SHAPE:
        wanted = getattr(cfg, name)
        found = getattr(policy.config, name)
        if wanted not in (getattr(Settings, name), found):
            print(f"note: {name} = {wanted} is ignored: {cfg.policy} has {found}")
        setattr(cfg, name, found)
    return policy, tokenizer


def is_published(cfg):
    """Tell whether the policy is a published model, neither pretrained here nor a .pt file."""
    return cfg.policy != "train" and not cfg.policy.endswith(".pt")


def new_policy(cfg):
    """Make a policy of the shape in the settings, with random weights."""
    return Policy(GPTConfig(*(getattr(cfg, name) for name in SHAPE)))


def trainable(base, cfg):
    """Copy the base into the policy that is trained, with gradients on. With cfg.lora_rank it gets
    adapters and shares all other weights, frozen, with the base. With cfg.critic it gets a value
    head, which is always trained."""
    if cfg.lora_rank:
        from extras.lora import add_lora
        shared = {id(p): p for p in base.parameters()}
        policy = copy.deepcopy(base, shared)
        torch.manual_seed(seed_for(cfg.seed, "lora"))
        add_lora(policy, cfg.lora_rank, cfg.lora_alpha)
    else:
        policy = copy.deepcopy(base).requires_grad_(True)
    if cfg.critic:
        from extras.critic import ValueHead
        weight = base.lm_head.weight                                                # (V, C)
        policy.value_head = ValueHead(weight.shape[1]).to(weight)
    return policy


def pretrain(cfg, path, texts, held_out, device):
    """Train a new policy on texts and save it at `path`. Of made-up texts there are as many as
    cfg.pretrain_tokens needs, by the mean length of these."""
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
    # made-up texts are read from their start, like a prompt. Comments are long: half of their
    # windows begin anywhere
    num_anywhere = 0 if makes_up else BATCH_SIZE // 2
    starts = text_starts(stream, T, tokenizer.eot_token)
    held_out_starts = text_starts(held_out, T, tokenizer.eot_token)
    torch.manual_seed(SEED)
    model = new_policy(cfg).to(device)
    dtype = fast_dtype(device)
    print(f"policy: {num_tokens / 1e6:.1f}M tokens of {len(texts)} texts, {dtype} on {device}")

    def loss_at(step, stream=stream, starts=starts):
        batch = windows(stream, starts, num_anywhere, T, 1000 * SEED + step).to(device)
        with autocast(device, dtype):
            logits = model.lm_head(model(batch[:, :-1]))  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    steps = max(1, num_tokens // (BATCH_SIZE * T))
    fit(model, optimizers(model), loss_at, steps, f"{path}.partial", "policy")
    with torch.no_grad():
        loss = sum(float(loss_at(i, held_out, held_out_starts)) for i in range(10)) / 10
    save_gpt(path, model, loss=loss)
    print(f"policy: held-out loss {loss:.3f} nats per token")


def token_stream(tokenizer, texts, limit=math.inf):
    """Join texts in shuffled order, each followed by the end token -> about `limit` ids (M,)."""
    texts = list(texts)
    random.Random(SEED).shuffle(texts)
    ids = []
    while texts and len(ids) < limit:
        for text_ids in tokenizer.encode_ordinary_batch(texts[:10_000], num_threads=2):
            ids += text_ids + [tokenizer.eot_token]
        texts = texts[10_000:]
    return torch.tensor(ids)


def text_starts(stream, block_size, eot):
    """Find where texts begin in a stream (M,), after an end token eot -> positions (S,). Leaves out
    those that are too near the end for a window."""
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
    """Return Muon (Jordan et al. 2024) for the matrices of the blocks, since it needs fewer tokens,
    and AdamW for all other weights."""
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adam]


def main(argv):
    cfg = load_settings(argv)
    if "train" not in (cfg.policy, cfg.judge, cfg.eval_judge):
        raise BadInput(f"policy = {cfg.policy!r}, judge = {cfg.judge!r}, eval_judge = "
                       f"{cfg.eval_judge!r}: nothing to train; --policy=train trains a new one")
    device = pick_device(cfg.device, cfg.threads)
    splits = get_splits(cfg)
    if cfg.policy == "train":
        get_policy(cfg, splits, device)
    trained_judges(cfg, splits, device)


if __name__ == "__main__":
    run_script(main, usage)
