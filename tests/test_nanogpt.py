"""nanoGPT's checkpoints as policies, against a network written as nanoGPT's model.py is; in and
out."""
import math

import pytest
import torch
from torch.nn import functional as F

import grpo
from conftest import TINY
from data.tokenizer import end_tokens, load_tokenizer
from data.weights import load_gpt, merged_weights
from run.policy import load_policy
from run.settings import load_settings
from worlds import (
    assert_near, assert_refused, printed, random_gpt, read_rows, refusal,
    skip_without, with_lora)

V = 50304       # nanoGPT pads GPT-2's 50,257 to a multiple of 64


ARGS = dict(n_layer=2, n_head=2, n_embd=8, block_size=40, dropout=0.1)    # nanoGPT's GPTConfig


def random_weights(vocab_size, bias):
    """Weights by nanoGPT's names, none of which is 0 or 1."""
    C = ARGS["n_embd"]
    shapes = {"wte": (vocab_size, C), "wpe": (ARGS["block_size"], C), "ln_f": (C,)}
    for i in range(ARGS["n_layer"]):
        shapes |= {f"h.{i}.ln_1": (C,), f"h.{i}.ln_2": (C,), f"h.{i}.attn.c_attn": (3 * C, C),
                   f"h.{i}.attn.c_proj": (C, C), f"h.{i}.mlp.c_fc": (4 * C, C),
                   f"h.{i}.mlp.c_proj": (C, 4 * C)}
    w = {f"transformer.{name}.weight": 0.5 * torch.randn(shape) for name, shape in shapes.items()}
    w["lm_head.weight"] = w["transformer.wte.weight"]
    if bias:
        w |= {f"transformer.{name}.bias": 0.5 * torch.randn(shape[0])
              for name, shape in shapes.items() if name not in ("wte", "wpe")}
    return w


def by_hand(w, idx):
    """Logits (B, T, V) as nanoGPT's model.py computes them."""
    B, T = idx.shape

    def linear(x, name):
        return F.linear(x, w[f"transformer.{name}.weight"], w.get(f"transformer.{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"transformer.{name}.weight"],
                            w.get(f"transformer.{name}.bias"), 1e-5)

    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][:T]
    for i in range(ARGS["n_layer"]):
        heads = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
        q, k, v = (y.view(B, T, ARGS["n_head"], -1).transpose(1, 2) for y in heads)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(torch.tril(torch.ones(T, T)) == 0, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        x = x + linear(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["lm_head.weight"].T


def write(path, prefix="", vocab_size=V, bias=False):
    """A checkpoint as nanoGPT's train.py writes it, and its older versions with their masks -> (its
    weights, its path)."""
    w = random_weights(vocab_size, bias)
    state = {prefix + name: x for name, x in w.items()}
    if bias:
        state |= {f"{prefix}transformer.h.{i}.attn.bias": torch.ones(1, 1, 40, 40) for i in (0, 1)}
    torch.save(dict(model=state, model_args=ARGS | dict(bias=bias, vocab_size=vocab_size),
                    optimizer=dict(state={}), iter_num=2000, best_val_loss=torch.tensor(1.5),
                    config=dict(dataset="openwebtext")), path)
    return w, str(path)


def logits(policy, idx):
    with torch.no_grad():
        return policy.lm_head(policy(idx))


@pytest.mark.parametrize("prefix, bias", [
    ("", True), ("_orig_mod.", False), ("module.", True), ("module._orig_mod.", False)])
def test_nanogpts_checkpoint_is_the_policy_that_nanogpt_computes(prefix, bias, tmp_path):
    theirs, path = write(tmp_path / "ckpt.pt", prefix, bias=bias)
    cfg = load_settings([f"--policy={path}"])
    policy, tokenizer = load_policy(cfg)
    idx = torch.randint(V, (2, 30))
    assert_near(logits(policy, idx), by_hand(theirs, idx), 1e-4)
    shape = policy.config
    assert (shape.vocab_size, shape.block_size, shape.n_layer) == (V, 40, 2)
    assert end_tokens(tokenizer) == (50256,), "the end of a text is GPT-2's, not the padding's last"
    assert tokenizer.encode_ordinary("I'm here") == load_tokenizer().encode_ordinary("I'm here")
    assert tokenizer.decode([40, 50303]), "a sampled id of the padding can be written"


def test_a_run_from_nanogpts_checkpoint_trains_it_and_its_policy_goes_out_again(tmp_path):
    _, path = write(tmp_path / "ckpt.pt")
    config = tmp_path / "c.py"
    config.write_text("judge = eval_judge = None\n"
                      "def questions(n, seed): return [dict(text=f'say {i}') for i in range(30)]\n"
                      "def reward(prompts, completions): return [len(c) for c in completions]\n")
    out = f"{tmp_path}/run"
    printed(grpo.main, [str(config), *TINY, f"--policy={path}", f"--out_dir={out}",
                        "--max_iters=1", "--learning_rate=1e-2", "--max_completion_length=8"])
    assert read_rows(f"{out}/samples.jsonl")
    policy, _ = load_policy(load_settings([f"--policy={out}"]))
    idx = torch.randint(V, (2, 30))
    assert (logits(policy, idx) - logits(load_gpt(path), idx)).abs().max() > 1e-3, "not trained"
    skip_without("hub")
    from extras.hub.export import save_nanogpt
    save_nanogpt(f"{tmp_path}/out.pt", policy)
    content = torch.load(f"{tmp_path}/out.pt", weights_only=True)
    assert content["model_args"].keys() == {*ARGS, "bias", "vocab_size"}
    assert content["model"].keys() == random_weights(300, bias=False).keys()
    assert_near(by_hand(content["model"], idx), logits(policy, idx), 1e-4)
    assert_near(logits(load_gpt(f"{tmp_path}/out.pt"), idx), logits(policy, idx), 1e-6)


def test_nanogpts_policy_leaves_as_a_published_gpt2(tmp_path):
    skip_without("hub")
    from extras.hub.export import export
    from extras.hub.policy import load
    theirs, path = write(tmp_path / "ckpt.pt")
    policy, tokenizer = load_policy(load_settings([f"--policy={path}"]))
    export(policy, f"{tmp_path}/out", tokenizer)
    found, names = load(f"{tmp_path}/out")
    idx = torch.randint(V, (2, 30))
    assert_near(logits(found, idx), by_hand(theirs, idx), 1e-4)
    assert names.encode_ordinary("I'm here") == tokenizer.encode_ordinary("I'm here")
    assert names.end_tokens == (50256,)


def test_what_nanogpt_would_compute_otherwise_does_not_go_out(tmp_path):
    skip_without("hub")
    from extras.hub.export import save_nanogpt
    _, path = write(tmp_path / "ckpt.pt")
    policy = load_gpt(path)
    policy.config.exact_gelu = False
    refusal(save_nanogpt, f"{tmp_path}/out.pt", policy)
    assert not (tmp_path / "out.pt").exists()


def test_a_model_of_other_tokens_is_refused_or_noted(tmp_path):
    _, path = write(tmp_path / "ckpt.pt", vocab_size=65)
    assert_refused("65", load_gpt, path)
    _, path = write(tmp_path / "ckpt.pt", vocab_size=300)
    assert "meta.pkl" in printed(load_gpt, path)
    _, path = write(tmp_path / "ckpt.pt", vocab_size=50258)
    assert_refused("vocab_size", load_policy, load_settings([f"--policy={path}"]))


def test_adapters_are_merged_into_the_weights():
    skip_without("lora")
    policy = with_lora(random_gpt())
    plain = random_gpt()
    plain.load_state_dict(merged_weights(policy), strict=False)
    idx = torch.randint(50, (2, 9))
    assert_near(logits(plain, idx), logits(policy, idx), 1e-5)
