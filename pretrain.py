"""The small default policy: a GPT trained from scratch on the comments, at first use or by itself:

    python pretrain.py config/toxicity.py
"""
import hashlib
import os
import random
import time

import torch
from torch.nn import functional as F

from config import Settings, load_settings
import hub.policy
from data.comments import get_splits
from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig, add_lora
from run.script import BadInput
from run.device import autocast, fast_dtype, pick_device
from sample import generate
from run.script import interrupts, run_script
from run.files import load_file, load_gpt, save_gpt
from run.fit import fit


def token_stream(tokenizer, texts, seed, limit):
    """About `limit` tokens (M,) of whole comments in shuffled order, the end token after each."""
    texts = list(texts)
    random.Random(seed).shuffle(texts)
    ids, done = [], 0
    while done < len(texts) and len(ids) < limit:
        for comment in tokenizer.encode_ordinary_batch(texts[done:done + 10_000], num_threads=2):
            ids += comment + [tokenizer.eot_token]
        done += 10_000
    return torch.tensor(ids)


def windows(stream, rows, block_size, seed):
    """rows random stretches of block_size + 1 tokens -> (rows, block_size + 1)"""
    starts = torch.randint(len(stream) - block_size, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return stream[starts + torch.arange(block_size + 1)]


def optimizers(model, muon_lr=0.02, adam_lr=3e-3):
    """Muon (Jordan et al. 2024) for the matrices inside the blocks, AdamW for embeddings, norms and biases: at this scale
    it needs clearly fewer tokens than AdamW alone for the same loss."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("h.")]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and name.startswith("h."))]
    return [torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0),
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")


def is_published(settings):
    """True when the policy is a published model, by its name or place, and neither made here nor a .pt file."""
    return settings.policy != "train" and not settings.policy.endswith(".pt")


def load_policy(settings):
    """The policy that the settings name; None for "train". The shape of a published one goes into the settings, and what they
    said is said to be left aside; a .pt file must have theirs, since the tokenizer is chosen by it, else BadInput."""
    if settings.policy == "train":
        return None
    model = hub.policy.load(settings.policy)[0] if is_published(settings) else load_gpt(settings.policy)
    aside = [f"{name} = {getattr(settings, name)}" for name in SHAPE
             if getattr(settings, name) not in (getattr(Settings, name), getattr(model.config, name))]
    if aside and is_published(settings):
        print(f"note: {settings.policy} has a shape of its own; {', '.join(aside)} is left aside")
    for name in SHAPE:
        wanted, found = getattr(settings, name), getattr(model.config, name)
        if wanted != found and not is_published(settings):
            raise BadInput(f"{name} = {wanted} but {settings.policy} has {found}: set {name} = {found}")
        setattr(settings, name, found)
    if settings.max_completion_length >= settings.block_size:
        raise BadInput(f"max_completion_length = {settings.max_completion_length}: {settings.policy} has {settings.block_size} "
                       "positions for prompt and completion")
    return model


def get_tokenizer(settings):
    """The tokenizer of the policy: its own where it is a published model, whose shape is in the settings by now, else GPT-2's
    first vocab_size tokens. BadInput when it gives ids that the model does not have."""
    if not is_published(settings):
        return load_tokenizer(settings.vocab_size)
    tokenizer = hub.policy.tokenizer_of(hub.policy.locate(settings.policy))
    largest = max(i for i in (tokenizer.eot_token, *tokenizer.ids) if i is not None)
    if largest >= settings.vocab_size:
        raise BadInput(f"{settings.policy}: its tokenizer gives ids up to {largest}, the model has {settings.vocab_size} tokens: "
                       "these files do not belong together")
    return tokenizer


def get_policy(settings, splits, device, stop=lambda: False, batch_size=48):
    """The policy on the CPU: the file that the settings name, else pretrained here, once, into settings.cache_dir."""
    if settings.policy != "train":
        return load_policy(settings)
    fast = fast_dtype(device) == torch.bfloat16
    tokens = settings.pretrain_tokens or (12_000_000 if device.type == "cuda" else 3_000_000 if fast else 1_500_000)
    shape = GPTConfig(*(getattr(settings, name) for name in SHAPE))
    texts = [text for half in ("judge_a", "judge_b") for text, _ in splits[half]]
    made_of = texts, [getattr(settings, name) for name in SHAPE], tokens, settings.prepare_seed, batch_size
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]
    path = os.path.join(settings.cache_dir, f"policy-{settings.n_layer}x{settings.n_embd}-{key}.pt")
    if os.path.exists(path):
        print(f"policy: {path}")
        return load_gpt(path)
    began = time.time()
    tokenizer = load_tokenizer(settings.vocab_size)
    torch.manual_seed(settings.prepare_seed)
    model = GPT(shape).to(device)
    stream = token_stream(tokenizer, texts, settings.prepare_seed, 2 * tokens)
    heldout = token_stream(tokenizer, [text for text, _ in splits["eval_prompts"]], 0, 50_000)
    if min(len(stream), len(heldout)) <= shape.block_size:
        raise BadInput(f"too few comments: {len(stream)} tokens to train on and {len(heldout)} to test, must be above block_size")
    print(f"policy: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M weights, {tokens / 1e6:.1f}M tokens of "
          f"{len(texts)} comments, {fast_dtype(device)} on {device}")

    def loss_at(step, stream=stream):
        batch = windows(stream, batch_size, shape.block_size, 1000 * settings.prepare_seed + step).to(device)
        with autocast(device, fast_dtype(device)):
            logits = model.lm_head(model(batch[:, :-1]))
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    steps = max(1, tokens // (batch_size * shape.block_size))
    fit(model, optimizers(model), loss_at, steps, path + ".partial", "policy", stop=stop)
    with torch.no_grad():
        loss = sum(float(loss_at(i, heldout)) for i in range(10)) / 10
    save_gpt(path, model, loss=loss)
    if os.path.exists(path + ".partial"):
        os.remove(path + ".partial")
    print(f"policy: held-out loss {loss:.3f} nats per token, {time.time() - began:.0f} s, {path}")
    return model.cpu()


def load_run(path):
    """(policy, tokenizer's source) of a run's folder or of a policy's .pt file."""
    if not os.path.isdir(path):
        model = load_gpt(path)
        return model, load_tokenizer(model.config.vocab_size)
    return policy_of(path, load_file(os.path.join(path, "ckpt.pt"), "run"))


def policy_of(path, run):
    """(policy, tokenizer's source) of a checkpoint that grpo.py wrote, the adapters on it."""
    s = run["settings"]
    if s["policy"] == "train":
        model = GPT(GPTConfig(*(s[k] for k in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"))))
        source = load_tokenizer(s["vocab_size"])
    else:
        model, source = load_run(s["policy"]) if s["policy"].endswith(".pt") else hub.policy.load(s["policy"])
    if s["lora_rank"]:
        add_lora(model, s["lora_rank"], s["lora_alpha"], s["lora_layers"])
    try:
        model.load_state_dict(run["policy"])
    except RuntimeError as e:
        raise BadInput(f"{path}: the checkpoint does not fit its settings ({str(e).splitlines()[0]})") from e
    return model, source


def main(argv):
    settings = load_settings(argv)
    with interrupts() as stop:
        model = get_policy(settings, get_splits(settings), pick_device(settings.device), stop)
    tokenizer = get_tokenizer(settings)
    prompts = ["I think that the", "Please do not", "You are a"]
    rollout = generate(model, [tokenizer.encode_ordinary(p) for p in prompts], 3, settings.max_completion_length,
                       eos=tokenizer.eot_token, seed=settings.seed)
    for i, completion in enumerate(rollout.completions()):
        print(f"{prompts[i // 3]}|{tokenizer.decode(completion)}")


if __name__ == "__main__":
    run_script(main)
