"""The policy that the settings name: loaded, pretrained here, or rebuilt from a run.

    python pretrain.py config/toxicity.py

makes the small default policy, a GPT trained from scratch on the comments or on the texts that the
config file makes up, and prints samples of it. grpo.py makes it at first use too. The file that it
prints can be named as a policy: --policy=FILE.pt
"""
import copy
import hashlib
import math
import os
import random
import time

from run.script import (     # before torch: sets how its threads wait
    BadInput, interrupts, run_script, seed_for, shown)

import torch
from torch.nn import functional as F

import hub.policy
from config import Settings, load_settings, usage
from critic import ValueHead
from data.chat import encode_prompt
from data.comments import get_splits
from data.prompts import prompts_of_questions
from data.tokenizer import end_tokens, load_tokenizer, texts_of
from model import GPT, GPTConfig, add_lora
from run.checkpoint import read_newest
from run.device import autocast, fast_dtype, pick_device
from run.files import load_gpt, load_weights, save_gpt, undamaged
from run.fit import fit
from sample import generate

# the settings that give a new policy its shape: the first fields of GPTConfig, in their order
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
SEED = 0
BATCH_SIZE = 48  # windows of block_size tokens


# --------------------------------------------------------------------------------------------------
# the policy that the settings name


def get_policy(cfg, splits, device, stop=lambda: False, may_train=True):
    """Return the policy on the CPU: loaded, or for "train" pretrained once into cfg.cache_dir.

    Raises BadInput if it would have to be pretrained and may_train is False.
    """
    if cfg.policy != "train":
        return load_policy(cfg)
    texts = [text for half in ("judge_a", "judge_b") for text, _ in splits[half]]
    if "texts" in cfg.functions:
        texts = made_up_texts(cfg, 1000, SEED)      # so many tell them from others
    shape = [getattr(cfg, name) for name in SHAPE]
    made_of = (texts, shape, cfg.pretrain_tokens, SEED, BATCH_SIZE)
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]
    path = os.path.join(cfg.cache_dir, f"policy-{cfg.n_layer}x{cfg.n_embd}-{key}.pt")
    if os.path.exists(path):
        print(f"policy: {path}")
        return load_gpt(path)
    if not may_train:
        raise BadInput(f"{path}: the policy that this run began from is not there; python "
                       f"pretrain.py {cfg.out_dir} makes it again")
    held_out = [text for text, _ in splits["eval_prompts"]]
    if "texts" in cfg.functions:
        texts = made_up_tokens(cfg, texts)
        held_out = made_up_texts(cfg, 1000, SEED + 1)
    return pretrain(cfg, path, texts, held_out, device, stop)


def made_up_texts(cfg, n, seed):
    """Call texts(n, seed) of the config file; raise BadInput unless it returns n texts."""
    texts = cfg.functions["texts"](n, seed)
    good = isinstance(texts, list) and len(texts) == n
    if not good or not all(isinstance(text, str) and text for text in texts):
        raise BadInput(f"texts({n}, {seed}) returned {shown(texts)}: must be a list of {n} texts, "
                       "none empty")
    return texts


def made_up_tokens(cfg, texts):
    """Make up about pretrain_tokens tokens of texts, given a few of them to learn their length."""
    encoded = load_tokenizer(cfg.vocab_size).encode_ordinary_batch(texts)
    mean_length = sum(len(ids) + 1 for ids in encoded) / len(texts)
    return made_up_texts(cfg, math.ceil(cfg.pretrain_tokens / mean_length), SEED)


def load_policy(cfg):
    """Load the policy that is named by a file or published name; return None for "train".

    It brings its own shape: it overrides the settings, and overridden values are printed. Raises
    BadInput where a completion leaves no room for a prompt.
    """
    if cfg.policy == "train":
        return None
    policy = hub.policy.load(cfg.policy)[0] if is_published(cfg) else load_gpt(cfg.policy)
    ignored = []
    for name in SHAPE:
        wanted = getattr(cfg, name)
        found = getattr(policy.config, name)
        if wanted not in (getattr(Settings, name), found):
            ignored.append(f"{name} = {wanted}")
        setattr(cfg, name, found)
    if ignored:
        print(f"note: {cfg.policy} has its own shape; ignored: {', '.join(ignored)}")
    if cfg.max_completion_length >= cfg.block_size:
        raise BadInput(f"max_completion_length = {cfg.max_completion_length}: {cfg.policy} has "
                       f"{cfg.block_size} positions for prompt and completion")
    return policy


def is_published(cfg):
    """Tell whether the policy is a published model: neither pretrained here nor a .pt file."""
    return cfg.policy != "train" and not cfg.policy.endswith(".pt")


def new_policy(cfg):
    """Make a GPT of the shape in the settings, with random weights."""
    return GPT(GPTConfig(*(getattr(cfg, name) for name in SHAPE)))


def trainable(base, cfg):
    """Copy the base into the policy that is trained, with gradients on.

    With cfg.lora_rank the copy gets adapters, whose initial weights depend on cfg.seed alone. All
    other weights are frozen and shared with the base, so they are in memory once. With cfg.critic
    it gets a value head, which is always trained.
    """
    if cfg.lora_rank:
        shared = {id(p): p for p in base.parameters()}
        policy = copy.deepcopy(base, shared)
        torch.manual_seed(seed_for(cfg.seed, "lora"))
        add_lora(policy, cfg.lora_rank, cfg.lora_alpha)
    else:
        policy = copy.deepcopy(base).requires_grad_(True)
    if cfg.critic:
        policy.value_head = ValueHead(base.config.n_embd).to(base.wte.weight)
    return policy


def get_tokenizer(cfg):
    """Return the policy's tokenizer: a published model's own, else GPT-2's first vocab_size tokens.

    The settings must have the policy's shape by now (see load_policy). Raises BadInput when the
    tokenizer gives ids that the model does not have.
    """
    if not is_published(cfg):
        return load_tokenizer(cfg.vocab_size)
    tokenizer = hub.policy.tokenizer_of(hub.policy.locate(cfg.policy))
    if tokenizer.largest >= cfg.vocab_size:
        raise BadInput(f"{cfg.policy}: its tokenizer gives ids up to {tokenizer.largest}, the model "
                       f"has {cfg.vocab_size} tokens: these files do not belong together")
    return tokenizer


# --------------------------------------------------------------------------------------------------
# the policy of a run


def load_run(path):
    """Load the policy of a run's folder or of a .pt file -> (policy, source of its tokenizer).

    The source is the tokenizer itself, or the folder or file of a published model.
    """
    if os.path.isdir(path):
        return policy_of(*read_newest(path))
    policy = load_gpt(path)
    return policy, load_tokenizer(policy.config.vocab_size)


def policy_of(path, content):
    """Rebuild the policy of a checkpoint that grpo.py wrote -> (policy, source of its tokenizer).

    LoRA adapters are on it.
    """
    with undamaged(path):
        known = vars(Settings())
        cfg = Settings(**{name: x for name, x in content["settings"].items() if name in known})
        policy = trainable(GPT(GPTConfig(**content["shape"])), cfg)
        load_weights(path, policy, content["policy"])
    if is_published(cfg):
        return policy, hub.policy.locate(cfg.policy)
    return policy, load_tokenizer(cfg.vocab_size)


# --------------------------------------------------------------------------------------------------
# pretraining


def pretrain(cfg, path, texts, held_out, device, stop):
    """Train a new policy on texts for about pretrain_tokens tokens and save it at `path`.

    Prints its loss on the held_out texts. Returns it on the CPU.
    """
    began = time.time()
    num_tokens = cfg.pretrain_tokens
    tokenizer = load_tokenizer(cfg.vocab_size)
    stream = token_stream(tokenizer, texts, SEED, 2 * num_tokens)
    held_out = token_stream(tokenizer, held_out, 0, 50_000)
    if min(len(stream), len(held_out)) <= cfg.block_size:
        raise BadInput(f"too few comments or texts: {len(stream)} tokens to train on and "
                       f"{len(held_out)} to test on, both must be above block_size = "
                       f"{cfg.block_size}")
    # windows of made-up texts begin with a text, as a prompt does; those of comments anywhere
    eot = tokenizer.eot_token if "texts" in cfg.functions else None
    torch.manual_seed(SEED)
    model = new_policy(cfg).to(device)
    dtype = fast_dtype(device)
    num_weights = sum(p.numel() for p in model.parameters())
    print(f"policy: {num_weights / 1e6:.1f}M weights, {num_tokens / 1e6:.1f}M tokens of "
          f"{len(texts)} texts, {dtype} on {device}")

    def loss_at(step, stream=stream):
        seed = 1000 * SEED + step
        batch = windows(stream, BATCH_SIZE, cfg.block_size, seed, eot).to(device)
        with autocast(device, dtype):
            logits = model.lm_head(model(batch[:, :-1]))  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    partial = path + ".partial"
    steps = max(1, num_tokens // (BATCH_SIZE * cfg.block_size))
    fit(model, optimizers(model), loss_at, steps, partial, "policy", stop=stop)
    with torch.no_grad():
        loss = sum(float(loss_at(i, held_out)) for i in range(10)) / 10
    save_gpt(path, model, loss=loss)
    if os.path.exists(partial):
        os.remove(partial)
    print(f"policy: held-out loss {loss:.3f} nats per token, {time.time() - began:.0f} s, {path}")
    return model.cpu()


def token_stream(tokenizer, texts, seed, limit):
    """Join whole texts in shuffled order, the end token after each -> about `limit` ids (M,)."""
    texts = list(texts)
    random.Random(seed).shuffle(texts)
    ids = []
    for start in range(0, len(texts), 10_000):
        if len(ids) >= limit:
            break
        part = texts[start:start + 10_000]
        for text_ids in tokenizer.encode_ordinary_batch(part, num_threads=2):
            ids += text_ids + [tokenizer.eot_token]
    return torch.tensor(ids)


def windows(stream, num_rows, block_size, seed, eot=None):
    """Cut random windows out of a stream (M,) -> ids (num_rows, block_size + 1).

    With eot, the end token, each begins where a text does.
    """
    generator = torch.Generator().manual_seed(seed)
    if eot is None:
        starts = torch.randint(len(stream) - block_size, (num_rows, 1), generator=generator)
    else:
        ends = (stream[:-block_size - 1] == eot).nonzero()                          # (S, 1)
        behind = torch.cat([torch.tensor([[0]]), ends + 1])
        starts = behind[torch.randint(len(behind), (num_rows,), generator=generator)]
    return stream[starts + torch.arange(block_size + 1)]


def optimizers(model, muon_lr=0.02, adam_lr=3e-3):
    """Return Muon (Jordan et al. 2024) for the blocks' matrices and AdamW for all other weights.

    At this scale Muon needs clearly fewer tokens than AdamW alone for the same loss.
    """
    matrices = []
    others = []
    for name, p in model.named_parameters():
        if p.dim() == 2 and name.startswith("h."):
            matrices.append(p)
        else:
            others.append(p)
    muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adam]


def main(argv):
    cfg = load_settings(argv)
    given = load_policy(cfg)
    tokenizer = get_tokenizer(cfg)
    prompts = ["I think that the", "Please do not", "You are a"]
    ids = [encode_prompt(tokenizer, prompt, "prompt")[1] for prompt in prompts]
    room = cfg.block_size - cfg.max_completion_length
    if "questions" in cfg.functions:
        asked = prompts_of_questions(cfg, tokenizer, room)[:3]
        prompts = [prompt.text for prompt in asked]
        ids = [prompt.ids for prompt in asked]
    if max(map(len, ids)) > room:
        raise BadInput(f"max_completion_length = {cfg.max_completion_length}: with block_size = "
                       f"{cfg.block_size} it leaves {room} tokens for a prompt")
    with interrupts() as stop:
        device = pick_device(cfg.device)
        policy = given or get_policy(cfg, get_splits(cfg), device, stop)
    rollout = generate(policy, ids, 3, cfg.max_completion_length, eos=end_tokens(tokenizer),
                       seed=cfg.seed)
    for i, completion in enumerate(texts_of(tokenizer, rollout)):
        print(f"{prompts[i // 3]}|{completion}")


if __name__ == "__main__":
    run_script(main, usage)
