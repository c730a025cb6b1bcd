"""nanoGPT's checkpoints as policies, against a network written as nanoGPT's model.py is; in and
out."""
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import grpo
from conftest import TINY
from data.tokenizer import end_tokens, load_tokenizer
from data.weights import load_gpt, merged_weights
from run.policy import load_policy
from run.settings import load_settings
from worlds import assert_near, assert_refused, printed, read_rows, refusal, skip_without, with_lora

V = 50304       # nanoGPT pads GPT-2's 50,257 to a multiple of 64


class Norm(nn.Module):
    def __init__(self, C, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.bias = nn.Parameter(torch.zeros(C)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, C, n_head, bias):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(C, 3 * C, bias=bias)
        self.c_proj = nn.Linear(C, C, bias=bias)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2)
                   for y in self.c_attn(x).split(C, dim=2))
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        att = att.masked_fill(torch.tril(torch.ones(T, T)) == 0, -math.inf).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, C, n_head, bias):
        super().__init__()
        self.ln_1 = Norm(C, bias)
        self.attn = Attention(C, n_head, bias)
        self.ln_2 = Norm(C, bias)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(C, 4 * C, bias=bias),
                                      c_proj=nn.Linear(4 * C, C, bias=bias)))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, block_size, bias, vocab_size, dropout=0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab_size, n_embd), wpe=nn.Embedding(block_size, n_embd),
            h=nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer)),
            ln_f=Norm(n_embd, bias)))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def forward(self, idx):
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[:idx.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def nanogpt(vocab_size=V, bias=False):
    """A random model whose every weight matters, and its model_args."""
    torch.manual_seed(0)
    args = dict(n_layer=2, n_head=2, n_embd=8, block_size=40, bias=bias, vocab_size=vocab_size,
                dropout=0.1)
    model = NanoGPT(**args)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    return model, args


def write(path, prefix="", extra=None, **how):
    """A checkpoint as nanoGPT's train.py writes it -> (the model, its path)."""
    model, args = nanogpt(**how)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {prefix + name: x for name, x in model.state_dict().items()} | (extra or {})
    torch.save(dict(model=state, optimizer=optimizer.state_dict(), model_args=args, iter_num=2000,
                    best_val_loss=torch.tensor(1.5), config=dict(dataset="openwebtext")), path)
    return model, str(path)


def logits(policy, idx):
    with torch.no_grad():
        return policy.lm_head(policy(idx))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpts_checkpoint_is_the_policy_that_nanogpt_computes(prefix, bias, tmp_path):
    masks = {f"{prefix}transformer.h.{i}.attn.bias": torch.ones(1, 1, 40, 40) for i in (0, 1)}
    theirs, path = write(tmp_path / "ckpt.pt", prefix, masks if bias else None, bias=bias)
    cfg = load_settings([f"--policy={path}"])
    policy, tokenizer = load_policy(cfg)
    idx = torch.randint(V, (2, 30))
    assert_near(logits(policy, idx), theirs(idx), 1e-4)
    assert (cfg.vocab_size, cfg.block_size, cfg.n_layer) == (V, 40, 2)
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
    again = NanoGPT(**content["model_args"])
    again.load_state_dict(content["model"])
    assert_near(again(idx), logits(policy, idx), 1e-4)
    assert_near(logits(load_gpt(f"{tmp_path}/out.pt"), idx), logits(policy, idx), 1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_policy_leaves_as_a_published_gpt2(bias, tmp_path):
    skip_without("hub")
    from extras.hub.export import export
    from extras.hub.policy import load
    theirs, path = write(tmp_path / "ckpt.pt", bias=bias)
    policy, tokenizer = load_policy(load_settings([f"--policy={path}"]))
    export(policy, f"{tmp_path}/out", tokenizer)
    found, names = load(f"{tmp_path}/out")
    idx = torch.randint(V, (2, 30))
    assert_near(logits(found, idx), theirs(idx), 1e-4)
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


@pytest.mark.parametrize("damage", [
    lambda c: c["model_args"].pop("n_head"), lambda c: c["model"].pop("transformer.wpe.weight"),
    lambda c: c.update(model=3), lambda c: c["model_args"].update(n_layer=10 ** 9),
    lambda c: c["model"].update({"transformer.new.weight": torch.zeros(1)})])
def test_a_damaged_checkpoint_of_nanogpt_is_one_line(damage, tmp_path):
    _, path = write(tmp_path / "ckpt.pt")
    content = torch.load(path, weights_only=True)
    damage(content)
    torch.save(content, path)
    assert_refused(path, load_gpt, path)


def test_adapters_are_merged_into_the_weights():
    skip_without("lora")
    from worlds import random_gpt
    policy = with_lora(random_gpt())
    plain = random_gpt()
    plain.load_state_dict(merged_weights(policy), strict=False)
    idx = torch.randint(50, (2, 9))
    assert_near(logits(plain, idx), logits(policy, idx), 1e-5)
