"""Make the policy that the settings name: load it, or pretrain it.

    python pretrain.py config/toxicity.py --policy=train

pretrains a small GPT from scratch, on the comments or on the texts that the config file makes up.
grpo.py does so at first use, too. The command prints the file's name, for --policy=FILE.pt
"""
import copy
import math
import os
import random
import time

from common.script import (     # before torch: sets how its threads wait
    BadInput, interrupts, key_of, run_script, seed_for, shown)

import torch
from torch.nn import functional as F

from config import Settings, load_settings, usage
from data.comments import get_splits
from data.tokenizer import load_tokenizer
from model import GPTConfig, Policy
from common.device import autocast, fast_dtype, pick_device
from common.files import load_gpt, save_gpt
from common.supervised import fit

# the settings that give a new policy its shape: the first fields of GPTConfig, in their order
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
SEED = 0
BATCH_SIZE = 48  # windows of block_size tokens


def get_policy(cfg, splits, device, stop=lambda: False, may_train=True):
    """Return the policy "train" on the CPU, pretrained once into cfg.cache_dir. BadInput if it
    would have to be pretrained now and may_train is False."""
    makes_up = "texts" in cfg.functions
    if makes_up:
        texts = made_up_texts(cfg, 1000, SEED)      # enough to tell them from others
        held_out = made_up_texts(cfg, 1000, SEED + 1)
    else:
        texts = [text for half in ("judge_a", "judge_b") for text, _ in splits[half]]
        held_out = [text for text, _ in splits["eval_prompts"]]
    path = path_of(cfg, texts)
    if os.path.exists(path):
        print(f"policy: {path}")
        return load_gpt(path)
    if not may_train:
        raise BadInput(f"{path}: the policy that this run began from is missing; make it again: "
                       f"python pretrain.py {cfg.out_dir}")
    if makes_up:
        texts = made_up_tokens(cfg, texts)
    return pretrain(cfg, path, texts, held_out, device, stop)


def path_of(cfg, texts):
    """Name the file of the policy that is made of these texts, by a hash of all it depends on."""
    shape = [getattr(cfg, name) for name in SHAPE]
    made_of = (texts, shape, cfg.pretrain_tokens, SEED, BATCH_SIZE)
    name = f"policy-{cfg.n_layer}x{cfg.n_embd}-{key_of(made_of)}.pt"
    return os.path.join(cfg.cache_dir, name)


def made_up_tokens(cfg, examples):
    """Call texts(n, seed) for about pretrain_tokens tokens, by the mean length of the examples."""
    encoded = load_tokenizer(cfg.vocab_size).encode_ordinary_batch(examples)
    mean_length = sum(len(ids) + 1 for ids in encoded) / len(examples)
    return made_up_texts(cfg, math.ceil(cfg.pretrain_tokens / mean_length), SEED)


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
    """Load the policy of a file or a published name; return None for "train". Its shape overrides
    the settings, and a note names each setting that differs."""
    if cfg.policy == "train":
        return None
    if is_published(cfg):
        from extras.hub.policy import load
        policy = load(cfg.policy)
    else:
        policy = load_gpt(cfg.policy)
    for name in SHAPE:
        wanted = getattr(cfg, name)
        found = getattr(policy.config, name)
        if wanted not in (getattr(Settings, name), found):
            print(f"note: {name} = {wanted} is ignored: {cfg.policy} has {found}")
        setattr(cfg, name, found)
    return policy


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


def get_tokenizer(cfg):
    """Return the policy's tokenizer: a published model's own, or GPT-2's first vocab_size tokens.
    Call load_policy first: it gives the settings the policy's shape."""
    if not is_published(cfg):
        return load_tokenizer(cfg.vocab_size)
    from extras.hub.policy import locate, tokenizer_of
    tokenizer = tokenizer_of(locate(cfg.policy))
    if tokenizer.largest >= cfg.vocab_size:
        raise BadInput(f"{cfg.policy}: its tokenizer gives ids up to {tokenizer.largest}, but the "
                       f"model has {cfg.vocab_size} tokens: they do not belong together")
    return tokenizer


def pretrain(cfg, path, texts, held_out, device, stop):
    """Train a new policy on texts, save it at `path` and return it on the CPU."""
    began = time.time()
    num_tokens = cfg.pretrain_tokens
    T = cfg.block_size
    tokenizer = load_tokenizer(cfg.vocab_size)
    stream = token_stream(tokenizer, texts, 2 * num_tokens)
    held_out = token_stream(tokenizer, held_out, 50_000)
    if min(len(stream), len(held_out)) <= T:
        raise BadInput(f"too few comments or texts: {len(stream)} tokens to train on and "
                       f"{len(held_out)} to test on, both must be above block_size = {T}")
    # made-up texts are read from their start, like a prompt. Comments are long: half of their
    # windows begin anywhere
    num_anywhere = 0 if "texts" in cfg.functions else BATCH_SIZE // 2
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
    fit(model, optimizers(model), loss_at, steps, f"{path}.partial", "policy", stop=stop)
    with torch.no_grad():
        loss = sum(float(loss_at(i, held_out, held_out_starts)) for i in range(10)) / 10
    save_gpt(path, model, loss=loss)
    print(f"policy: held-out loss {loss:.3f} nats per token, {time.time() - began:.0f} s, {path}")
    return model.cpu()


def token_stream(tokenizer, texts, limit):
    """Join texts in shuffled order, each followed by the end token -> about `limit` ids (M,)."""
    texts = list(texts)
    random.Random(SEED).shuffle(texts)
    ids = []
    for start in range(0, len(texts), 10_000):
        if len(ids) >= limit:
            break
        part = texts[start:start + 10_000]
        for text_ids in tokenizer.encode_ordinary_batch(part, num_threads=2):
            ids += text_ids + [tokenizer.eot_token]
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
    matrices = [m.weight for m in model.modules()
                if isinstance(m, torch.nn.Linear) and m is not model.lm_head]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adam]


def main(argv):
    cfg = load_settings(argv)
    if cfg.policy != "train":
        raise BadInput(f"policy = {cfg.policy!r}: exists already; --policy=train makes a new one")
    with interrupts() as stop:
        device = pick_device(cfg.device, cfg.threads)
        get_policy(cfg, get_splits(cfg), device, stop)


if __name__ == "__main__":
    run_script(main, usage)
