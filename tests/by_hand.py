"""A random GPT, and what it must compute, written out by hand."""
import copy
import math

import torch
import torch.nn as nn

from model import GPT, LORA_LAYERS, GPTConfig, add_lora


PROMPTS = [[3, 1, 4], [5], [9, 2, 6, 5, 3]]
TRUNCATIONS = [dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2),
               dict(top_k=12, top_p=0.8, min_p=0.1)]
SHAPES = {
    "gpt2": {},
    "llama": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=2, tied=False, bias=False,
                  rope_scaling=(8.0, 0.5, 2.0, 16)),
    "qwen3": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=1, qk_norm=True, head_dim=16),
    "neo": dict(window=4, local_layers=(1,), attn_scale=1.0, qkv_bias=False, exact_gelu=True),
    "lora": {}}


def random_gpt(vocab_size=50, seed=0, **shape):
    """A random GPT in which no parameter has its initial value and the next token is neither
    certain nor uniform."""
    torch.manual_seed(seed)
    shape = dict(block_size=24, n_layer=2, n_head=4, n_embd=32) | shape
    model = GPT(GPTConfig(vocab_size, **shape))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def random_ids(B, T, vocab_size=50, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def with_lora(model, rank=3, alpha=6, layers=LORA_LAYERS, seed=5):
    """A copy with adapters that do something."""
    adapted = add_lora(copy.deepcopy(model), rank, alpha, layers)
    torch.manual_seed(seed)
    for name, p in adapted.named_parameters():
        if name.endswith("B.weight"):
            nn.init.normal_(p, std=0.2)
    return adapted


def hidden_by_hand(model, ids):
    """Hidden states (T, C) of one unpadded list of ids, in float64, one head at a time."""
    w = {k: v.detach().double() for k, v in model.state_dict().items()}
    c = model.config
    T, hs = len(ids), c.n_embd // c.n_head
    later = torch.arange(T)[None, :] > torch.arange(T)[:, None]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * w[name + ".weight"] + w.get(name + ".bias", 0)

    x = w["wte.weight"][torch.tensor(ids)] + w["wpe.weight"][:T]
    for i in range(c.n_layer):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(c.n_embd, -1)
        heads = []
        for j in range(0, c.n_embd, hs):
            score = q[:, j:j + hs] @ k[:, j:j + hs].T / math.sqrt(hs)
            if c.causal:
                score = score.masked_fill(later, -math.inf)
            weight = (score - score.amax(-1, keepdim=True)).exp()
            heads.append(weight / weight.sum(-1, keepdim=True) @ v[:, j:j + hs])
        x = x + linear(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f")


def logits_by_hand(model, ids):
    return hidden_by_hand(model, ids) @ model.wte.weight.detach().double().T


def allowed_by_hand(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Set of tokens that top-k, then top-p on what is left, then min-p leave; logits (V,)."""
    p = logits.double().softmax(0).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])[:top_k or len(p)]
    total, before, kept = sum(p[i] for i in order), 0.0, set()
    for i in order:
        if before / total < top_p and p[i] >= min_p * p[order[0]]:
            kept.add(i)
        before += p[i]
    return kept


def distributions(model, rollout, prompts, temperature):
    """For each row i and step t under the mask: (i, t, sampled token, logits (V,) / temperature) by
    hand, without padding."""
    G, T = len(rollout.ended) // len(prompts), rollout.completion_mask.shape[1]
    for i, row in enumerate(rollout.tokens[:, -T:].tolist()):
        prompt, n = prompts[i // G], int(rollout.completion_mask[i].sum())
        logits = logits_by_hand(model, prompt + row[:n])[len(prompt) - 1:] / temperature
        for t in range(n):
            yield i, t, row[t], logits[t]
