"""weights.py against transformers and peft, where they are installed; elsewhere this file is skipped, and says so.

    pip install transformers peft && python -m pytest tests/test_transformers.py
"""
import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers peft")

from model import GPT, add_lora, generate, pad_left  # noqa: E402
from tokenizer import load_tokenizer  # noqa: E402
from weights import export, load_pretrained, locate  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

V, T = 90, 20
LLAMA = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, max_position_embeddings=64,
             hidden_act="silu")
SHAPES = {
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "gpt2, n_inner, eps, untied": ("GPT2", dict(n_embd=24, n_layer=3, n_head=2, n_positions=64, n_inner=40,
                                               layer_norm_epsilon=1e-3, tie_word_embeddings=False)),
    "gpt_neo": ("GPTNeo", dict(hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64, window_size=5,
                               attention_types=[[["global", "local"], 1]])),
    "gpt_neo, other order, n_inner": ("GPTNeo", dict(hidden_size=32, num_layers=3, num_heads=2, max_position_embeddings=64,
                                                     window_size=3, intermediate_size=48,
                                                     attention_types=[[["local"], 2], [["global"], 1]])),
    "llama": ("Llama", LLAMA | dict(num_key_value_heads=2)),
    "llama, one kv head, tied": ("Llama", LLAMA | dict(num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-3,
                                                       rope_parameters=dict(rope_theta=100.0, rope_type="default"))),
    "llama, head_dim, as many kv heads": ("Llama", LLAMA | dict(num_key_value_heads=4, head_dim=12)),
    "qwen2": ("Qwen2", LLAMA | dict(num_key_value_heads=2)),
    "qwen2, tied": ("Qwen2", LLAMA | dict(num_key_value_heads=4, tie_word_embeddings=True,
                                          rope_parameters=dict(rope_theta=1e6, rope_type="default"))),
    "qwen3": ("Qwen3", LLAMA | dict(num_key_value_heads=2, head_dim=16)),
    "qwen3, tied": ("Qwen3", LLAMA | dict(num_key_value_heads=1, head_dim=6, tie_word_embeddings=True, rms_norm_eps=1e-4)),
}
BLANK = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def theirs(name, seed=0):
    """transformers' model with random weights, none at its initial value, in which attention and positions matter."""
    kind, shape = SHAPES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(vocab_size=V, **shape, **BLANK)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def logits_of(model, tokens, real):
    """Logits (B, T, V) of transformers' model, positions counted from the first token that is not padding."""
    with torch.no_grad():
        return model(tokens, attention_mask=real.long(), position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits


def rows(seed=1, lengths=(T, 13, 1, 7)):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=g).tolist() for n in lengths]


def differ(ours, theirs, seed=1):
    """Largest difference of the logits on real tokens, left-padded rows and full ones; both models answer alike otherwise."""
    worst = 0.0
    for prompts in (rows(seed), rows(seed, (T, T))):
        tokens, real = pad_left(prompts)
        with torch.no_grad():
            mine = ours.lm_head(ours(tokens, None if real.all() else real))
        other = logits_of(theirs, tokens, real)
        assert other[real].std() > 0.3
        worst = max(worst, float((mine - other)[real].abs().max()))
    return worst


@pytest.mark.parametrize("name", SHAPES)
def test_logits_greedy_tokens_and_exports_equal_those_of_transformers(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "in")
    ours = GPT.from_pretrained(tmp_path / "in")
    assert differ(ours, model) < 1e-5

    prompts = rows(2, (9, 4, 1))
    tokens, real = pad_left(prompts)
    written = model.generate(tokens, attention_mask=real.long(), do_sample=False, max_new_tokens=30, pad_token_id=0)
    drawn = generate(ours, prompts, 1, 30, eos=V, seed=0, temperature=1e-4)
    assert drawn.tokens[:, -30:].tolist() == written[:, -30:].tolist() and len(written.unique()) > 8

    tokenizer = load_tokenizer(257)
    with pytest.raises(ValueError, match="257 tokens, the model only 90"):
        export(ours, tmp_path / "out", tokenizer)
    export(ours, tmp_path / "out", str(tmp_path / "in"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(back) is type(model) and back.dtype == torch.float32
    tokens, real = pad_left(rows())
    torch.testing.assert_close(logits_of(back, tokens, real)[real], logits_of(model, tokens, real)[real], rtol=0, atol=1e-5)
