"""extras/hub/: published models in and out. Tiny models in the published layouts against a forward
by hand; tokenizers against the package and merging by hand; exports read back."""
import json
import math
import os
import re

import pytest
import torch

import extras.hub.policy
from conftest import ROOT
from data.tokenizer import load_tokenizer
from extras.hub.export import core_of, export
from extras.hub.families import spelled_out
from extras.hub.files import fetch, load_tensors, save_tensors
from extras.hub.tokenizer import from_folder
from model import GPT, GPTConfig
from extras.hub.tests.published import (
    GPT2, LAYOUTS, LLAMA, LLAMA3, MARKS, NEO, QWEN2, QWEN3, TEMPLATE, V, chat_core,
    gguf_of_core, logits, logits_by_hand, make_tensors, put, write, write_gguf)
from rollout import pad_left
from worlds import random_ids, refusal, with_lora

TIED = LLAMA | dict(tie_word_embeddings=True)
LLAMA32 = LLAMA | dict(head_dim=12, rope_theta=500000.0)
ROWS = random_ids(3, 9, V).tolist()


# ------------------------------------------------------------------------------------------------
# weights in

@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layout_gives_the_logits_of_a_forward_by_hand_padded_or_not(layout, tmp_path):
    c = LAYOUTS[layout]
    model, where = extras.hub.policy.load(write(tmp_path / "m", c))
    assert where == str(tmp_path / "m")
    for p in model.parameters():    # of its own, not a view of the file
        assert p.dtype == torch.float32
        assert p.requires_grad
        assert p.untyped_storage().nbytes() == 4 * p.numel()
    rows = [ROWS[0], ROWS[1][:1], ROWS[2][:5]]
    tokens, real = pad_left(rows)
    model = model.double()
    padded = logits(model, torch.where(real, tokens, V - 1), real)
    for i, row in enumerate(rows):
        expected = logits_by_hand(c, make_tensors(c), row)
        torch.testing.assert_close(padded[i, -len(row):], expected, rtol=0, atol=1e-10)
        plain = logits(model, torch.tensor([row]))[0]
        torch.testing.assert_close(plain, expected, rtol=0, atol=1e-10)


def test_names_without_prefix_buffers_shards_and_other_dtypes(tmp_path):
    tensors = make_tensors(GPT2)
    idx = torch.tensor(ROWS)
    expected = logits(extras.hub.policy.load(write(tmp_path / "a", GPT2))[0], idx)
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    model, _ = extras.hub.policy.load(write(tmp_path / "b", GPT2, bare))
    assert torch.equal(logits(model, idx), expected)

    names = sorted(tensors)
    shard_of = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    os.makedirs(tmp_path / "c")
    put(tmp_path / "c", config=GPT2)
    put(tmp_path / "c", **{"model.safetensors.index": dict(weight_map=shard_of)})
    for shard in sorted(set(shard_of.values())):
        some = {name: tensors[name] for name in names if shard_of[name] == shard}
        save_tensors(str(tmp_path / "c" / shard), some)
    assert torch.equal(logits(extras.hub.policy.load(tmp_path / "c")[0], idx), expected)

    halves = {name: x.bfloat16() for name, x in make_tensors(LLAMA).items()}
    model, _ = extras.hub.policy.load(write(tmp_path / "d", LLAMA, halves))
    assert torch.equal(model.wte.weight, halves["model.embed_tokens.weight"].float())


def test_tensors_say_whether_the_head_is_tied(tmp_path):
    tensors = make_tensors(GPT2)
    embedding = tensors["transformer.wte.weight"]
    idx = torch.tensor(ROWS)
    repeated = tensors | {"lm_head.weight": embedding.clone()}
    model = extras.hub.policy.load(write(tmp_path / "a", GPT2, repeated))[0]
    assert model.config.tied and model.lm_head.weight is model.wte.weight
    doubled = tensors | {"lm_head.weight": 2 * embedding}       # config.json says tied
    other = extras.hub.policy.load(write(tmp_path / "b", GPT2, doubled))[0]
    assert not other.config.tied
    torch.testing.assert_close(logits(other, idx), 2 * logits(model, idx))


# what config.json changes, and what the refusal says
REFUSALS = [
    (GPT2, dict(architectures=["GPT2ForSequenceClassification"]), "GPT2ForSequenceClassification"),
    (GPT2, dict(activation_function="relu"), "activation_function = 'relu' .* 'gelu'"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx = True"),
    (GPT2, dict(scale_attn_weights=False), "scale_attn_weights = False"),
    (GPT2, dict(n_head=None), "n_head is missing"),
    (GPT2, dict(num_attention_heads=3), "num_attention_heads = 3 .* only 4"),
    (GPT2, dict(n_head=5), "n_embd = 12 must be a multiple of n_head"),
    (GPT2, dict(n_positions=64), r"wpe.weight is torch.float32 \(32, 12\), must be \(64, 12\)"),
    (GPT2, dict(n_layer=10 ** 9), "28 tensors for 1000000000 layers"),
    (GPT2, dict(n_layer=1), "h.1.*has no place"),
    (GPT2, dict(tie_word_embeddings=False), "lm_head.weight is missing.* tie_word_embeddings"),
    (NEO, dict(tie_word_embeddings=False), "lm_head.weight is missing"),
    (TIED, dict(tie_word_embeddings=False), "lm_head.weight is missing"),
    (TIED, dict(tie_word_embeddings=None), "lm_head.weight is missing"),    # the family's default
    (LLAMA, dict(attention_bias=True), "attention_bias = True is not supported, only False"),
    (LLAMA, dict(mlp_bias=True), "mlp_bias = True"),
    (QWEN3, dict(attention_bias=True), "attention_bias = True"),
    (GPT2, dict(quantization_config=dict(bits=4)), "quantization_config"),
    (NEO, dict(attention_types=[[["global"], 2]]), "attention_types"),
    (NEO, dict(attention_types=None), "attention_types = None: must name global or local"),
    (NEO, dict(attention_layers=["global"] * 3), "attention_layers"),
    (NEO, dict(window_size=0), "window_size is missing"),
    (LLAMA, dict(rope_scaling=dict(type="linear", factor=2.0)), "'linear'"),
    (LLAMA, dict(rope_parameters=dict(rope_theta=50.0, partial_rotary_factor=0.5)), "partial"),
    (LLAMA, dict(rope_scaling=LLAMA3, rope_parameters=dict(rope_type="default")), "rope_scaling"),
    (LLAMA, dict(rope_scaling=LLAMA3 | dict(low_freq_factor=3)), "low_freq_factor = 3"),
    (LLAMA, dict(rope_scaling=LLAMA3, original_max_position_embeddings=4), "embeddings = 4"),
    (LLAMA, dict(rope_scaling="x"), "must fit together"),
    (LLAMA, dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (QWEN2, dict(use_sliding_window=True), "use_sliding_window = True"),
    (QWEN3, dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (QWEN3, dict(head_dim=None), r"q_proj.weight is .*\(24, 16\), must be \(512, 16\)")]


def test_model_that_would_compute_something_else_is_refused_in_one_line_that_says_why(tmp_path):
    for i, (c, changes, says) in enumerate(REFUSALS):
        folder = write(tmp_path / str(i), c | changes, make_tensors(c))
        message = refusal(extras.hub.policy.load, folder)
        assert re.search(says, message), (changes, message)


def test_odd_tensors_are_named_and_pickles_are_never_opened(tmp_path):
    for name, x in (("model.layers.1.self_attn.k_proj.bias", torch.zeros(8)),
                    ("score.weight", torch.zeros(2, 16)), ("a\nb", torch.zeros(1)),
                    ("model.layers.1.mlp.up_proj.weight", torch.zeros(10, 17)),
                    ("model.norm.weight", torch.zeros(16, dtype=torch.int8))):
        folder = write(tmp_path / "m", LLAMA, make_tensors(LLAMA) | {name: x})
        assert name[:2].strip() in refusal(extras.hub.policy.load, folder)
    put(folder, **{"model.safetensors.index": dict(weight_map={"x": "../up.safetensors"})})
    assert os.path.join(folder, "up.safetensors") in refusal(extras.hub.policy.load, folder)
    os.remove(tmp_path / "m" / "model.safetensors.index.json")
    os.remove(tmp_path / "m" / "model.safetensors")
    torch.save(make_tensors(LLAMA), tmp_path / "m" / "pytorch_model.bin")
    assert "never opened" in refusal(extras.hub.policy.load, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x80\x02half a file")
    assert "download it again" in refusal(extras.hub.policy.load, tmp_path / "m")


def test_what_is_no_published_model_is_named(tmp_path):
    folder = write(tmp_path / "m", LLAMA)
    for text in ("[]", "{", "{}"):
        (tmp_path / "m" / "config.json").write_text(text)
        assert folder in refusal(extras.hub.policy.load, folder)
    for name in ("no/such/folder", "../up", "a b", ""):
        assert "no published name" in refusal(fetch, name)


def test_names_are_downloaded_by_huggingface_hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    seen = []

    def snapshot_download(repo, **how):
        seen.append((repo, how["revision"], how["repo_type"], how["allow_patterns"]))
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    fetch("gpt2")
    fetch("unitary/toxic@refs/pr/2")
    fetch("datasets/allenai/rtp", ["prompts.jsonl"])
    assert [row[:3] for row in seen] == [
        ("gpt2", None, "model"), ("unitary/toxic", "refs/pr/2", "model"),
        ("allenai/rtp", None, "dataset")]
    assert seen[2][3] == ["prompts.jsonl"]
    assert not any(name.endswith((".bin", ".pt", "*")) for name in seen[0][3])


# ------------------------------------------------------------------------------------------------
# GGUF

@pytest.mark.parametrize("layout", ["llama", "llama one kv head, tied", "qwen2", "qwen3"])
def test_gguf_equals_the_safetensors_it_was_made_from(layout, tmp_path):
    c = LAYOUTS[layout]
    path = write_gguf(tmp_path / "m.gguf", c, make_tensors(c), c["model_type"])
    a, _ = extras.hub.policy.load(write(tmp_path / "m", c))
    b, where = extras.hub.policy.load(path)
    assert where == path
    assert spelled_out(a.config) == spelled_out(b.config)
    for name, x in a.state_dict().items():
        assert torch.equal(x, b.state_dict()[name]), name


def test_gguf_of_llama_3_is_scaled_by_its_table_of_frequencies(tmp_path):
    scaling = dict(LLAMA3, factor=32.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    tensors = make_tensors(LLAMA32)
    folder = write(tmp_path / "m", LLAMA32 | dict(rope_scaling=scaling))
    expected, _ = extras.hub.policy.load(folder)
    # waves of 6.3, 56, 499, 4443, 39583 and 352674 positions: one lies between 2048 and 8192
    smooth = (8192 / 4442.9 - 1) / (4 - 1)
    table = torch.tensor([1, 1, 1, 1 / ((1 - smooth) / 32 + smooth), 32, 32])
    path = write_gguf(tmp_path / "m.gguf", LLAMA32, tensors | {"rope_freqs.weight": table}, "llama")
    found, _ = extras.hub.policy.load(path)
    assert found.config == expected.config
    for odd in (table + torch.eye(6)[3], table * math.nan):
        path = write_gguf(
            tmp_path / "m.gguf", LLAMA32, tensors | {"rope_freqs.weight": odd}, "llama")
        assert "rope_freqs.weight" in refusal(extras.hub.policy.load, path)


def test_gguf_of_another_kind_is_one_line(tmp_path):
    for kind, changes, says in (
            ("gemma", {}, "general.architecture = 'gemma'"),
            ("llama", {"llama.rope.scaling.type": "yarn"}, "yarn"),
            ("llama", {"llama.rope.scale_linear": 2.0}, "scale_linear = 2.0"),
            ("llama", {"llama.rope.scaling.factor": 2.0}, "factor = 2.0"),
            ("llama", {"llama.rope.dimension_count": 2}, "dimension_count = 2"),
            ("llama", {"llama.block_count": 10 ** 9}, "21 tensors for 1000000000 layers"),
            ("llama", {"llama.attention.causal": False}, "causal = False")):
        path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), kind, **changes)
        message = refusal(extras.hub.policy.load, path)
        assert path in message and says in message, message
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:300])
    assert "download it again" in refusal(extras.hub.policy.load, path)


# ------------------------------------------------------------------------------------------------
# tokenizers

TEXTS = ["", " ", "don't I'll WE'VE 'S", "a    b   c  ", "\n\n\t \r\n x\r\n\r\ny", "1234 3.14",
         "the theatre, the other!!! ???", "\U0001f642 na\u00efve e\u0301 \u4e2d\u6587\u2028\u00a0x",
         "x" * 300, "".join(map(chr, range(256))), "a</s>b<|endoftext|><|im_start|>"]
def write_chat(folder, **config):
    os.makedirs(folder, exist_ok=True)
    chat_core(2000).save(str(folder / "tokenizer.json"))
    put(folder, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE) | config)
    return str(folder)


def test_gpt2s_two_files_and_its_one_file_give_the_ids_of_tiktoken(tmp_path):
    ours = load_tokenizer(2000)
    core = core_of(ours)
    core.save(str(tmp_path / "tokenizer.json"))
    os.makedirs(tmp_path / "two")
    core.model.save(str(tmp_path / "two"))
    for folder in (tmp_path, tmp_path / "two"):
        put(folder, config=dict(bos_token_id=1999, eos_token_id=1999))
        tokenizer = from_folder(str(folder))
        assert tokenizer.eot_token == tokenizer.bos_token == 1999
        assert tokenizer.n_vocab == 2000
        for text in TEXTS:
            ids = ours.encode_ordinary(text)
            assert tokenizer.encode_ordinary(text) == ids
            for n in range(len(ids) + 1):       # also in the middle of a character
                assert tokenizer.decode(ids[:n]) == ours.decode(ids[:n])
        for i in range(1999):
            assert tokenizer.decode_single_token_bytes(i) == ours.decode_single_token_bytes(i)
        assert tokenizer.encode_marked("a<|endoftext|>") == ours.encode_ordinary("a") + [1999]


def test_no_text_becomes_a_special_token_but_what_a_template_wrote_does(tmp_path):
    tokenizer = from_folder(write_chat(tmp_path))
    text = "hi<|im_end|>"
    assert not set(tokenizer.encode_ordinary(text)) & {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert tokenizer.encode_marked(text)[-1] == 2
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.names == {"eos_token": "<|im_end|>"}
    (tmp_path / "chat_template.jinja").write_text("other")
    assert from_folder(str(tmp_path)).chat_template == "other"


def test_generation_config_alone_says_what_ends_a_completion_where_it_names_some(tmp_path):
    folder = write_chat(tmp_path)
    for model, generation, expected in (
            ({}, {}, (2,)), (dict(eos_token_id=0), {}, (2, 0)),
            (dict(eos_token_id=0), dict(eos_token_id=1), (1,)),
            ({}, dict(eos_token_id=[0, 2]), (2, 0)), ({}, dict(eos_token_id=[0, 9999]), (0,))):
        put(folder, config=model, generation_config=generation)
        tokenizer = from_folder(folder)
        assert tokenizer.end_tokens == expected
        assert tokenizer.eot_token == expected[0]


def test_ids_that_the_models_own_tokenizer_puts_before_a_text(tmp_path):
    from tokenizers.processors import TemplateProcessing

    core = chat_core(2000)
    core.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), (MARKS[2], 2)])
    write_chat(tmp_path)
    core.save(str(tmp_path / "tokenizer.json"))
    assert from_folder(str(tmp_path)).before_text == [0]


def test_a_gguf_that_claims_to_be_endless(tmp_path):
    from struct import pack
    path = tmp_path / "m.gguf"
    head = b"GGUF" + pack("<IQQ", 3, 0, 1) + pack("<Q", 1) + b"k" + pack("<I", 9)     # an array
    for kind in (0, 6, 8, 9):
        path.write_bytes(head + pack("<IQ", kind, 2 ** 61))
        assert "m.gguf" in refusal(extras.hub.policy.load, str(path))


def test_gguf_vocabularies_cut_words_as_their_names_say(tmp_path):
    def tokenizer_of(pre):
        metadata = gguf_of_core(chat_core(2000), pre, bos_token_id=1)
        path = write_gguf(tmp_path / "m.gguf", LLAMA, {}, "llama", **metadata)
        return extras.hub.policy.tokenizer_of(path)

    cut = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        tokenizer = tokenizer_of(pre)
        assert tokenizer.end_tokens == (2, 0)
        assert tokenizer.before_text == ([1] if pre == "llama-bpe" else [])
        assert tokenizer.encode_marked("a<|im_end|>")[-1] == 2
        cut[pre] = [tokenizer.decode([i]) for i in tokenizer.encode_ordinary("100 2010")]
        composed = tokenizer.encode_ordinary("\u00e9")
        assert (tokenizer.encode_ordinary("e\u0301") == composed) == (pre == "qwen2")
    assert cut["gpt-2"] == ["1", "00", " 201", "0"]
    assert cut["smollm"] == cut["qwen2"] == ["1", "0", "0", " ", "2", "0", "1", "0"]
    assert cut["llama-bpe"] != cut["smollm"]
    assert "'deepseek'" in refusal(tokenizer_of, "deepseek")


def test_gguf_of_llama_3_takes_a_word_that_is_a_token_and_its_export_keeps_bos(tmp_path):
    """As llama.cpp: ignore_merges, and <bos> before every text."""
    ids = {}
    for pre in ("gpt-2", "llama-bpe"):
        metadata = gguf_of_core(chat_core(2000), pre, bos_token_id=1)
        tokens = metadata["tokenizer.ggml.tokens"]
        word = len(tokens)      # no merges lead to this one
        metadata["tokenizer.ggml.tokens"] = [*tokens, "\u0120zqxjk"]
        path = write_gguf(tmp_path / f"{pre}.gguf", LLAMA, make_tensors(LLAMA), "llama", **metadata)
        tokenizer = extras.hub.policy.tokenizer_of(path)
        export(extras.hub.policy.load(path)[0], str(tmp_path / pre), path)
        exported = from_folder(str(tmp_path / pre))
        for text in (*TEXTS, "a zqxjk"):
            ids[pre] = tokenizer.encode_ordinary(text)
            assert exported.encode_ordinary(text) == ids[pre], f"{pre}: the export reads otherwise"
            whole = exported.core.encode(text).ids      # as transformers asks the same file
            assert whole == tokenizer.before_text + ids[pre], f"{pre}: <bos> was lost or added"
        assert exported.before_text == tokenizer.before_text == [1] * (pre == "llama-bpe")
    assert ids["llama-bpe"][-1] == word
    assert word not in ids["gpt-2"]


def test_tokenizer_that_is_not_known_here_is_one_line(tmp_path):
    from tokenizers import Tokenizer, models

    folder = write_chat(tmp_path, eos_token=None)
    assert "no end token" in refusal(extras.hub.policy.tokenizer_of, folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert "byte-level" in refusal(extras.hub.policy.tokenizer_of, folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert folder in refusal(extras.hub.policy.tokenizer_of, folder)
    os.remove(tmp_path / "tokenizer.json")
    assert folder in refusal(extras.hub.policy.tokenizer_of, folder)


# ------------------------------------------------------------------------------------------------
# out

def source_of(folder, c):
    """A published folder with a tokenizer whose files are copied as they are."""
    write(folder, c | dict(eos_token_id=3))
    put(folder, tokenizer={}, generation_config=dict(eos_token_id=3))
    return str(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_gives_back_what_came_in(layout, tmp_path):
    c = LAYOUTS[layout]
    source = source_of(tmp_path / "in", c)
    export(extras.hub.policy.load(source)[0], str(tmp_path / "out"), source)
    back = load_tensors(tmp_path / "out")
    tensors = make_tensors(c)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 3
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    idx = torch.tensor(ROWS)
    again = logits(extras.hub.policy.load(tmp_path / "out")[0], idx)
    assert torch.equal(again, logits(extras.hub.policy.load(source)[0], idx))


@pytest.mark.parametrize("layout", ["gpt2", "gpt_neo", "llama", "qwen2 tied", "qwen3"])
def test_lora_leaves_merged(layout, tmp_path):
    c = LAYOUTS[layout]
    source = source_of(tmp_path / "in", c)
    model = with_lora(extras.hub.policy.load(source)[0], rank=3, alpha=6.0)
    idx = torch.tensor(ROWS)
    expected = logits(model, idx)
    assert float((expected - logits(extras.hub.policy.load(source)[0], idx)).abs().max()) > 0.05
    export(model, str(tmp_path / "merged"), source)
    merged, _ = extras.hub.policy.load(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, idx), expected, rtol=0, atol=1e-4)


def test_exported_tokenizers_give_the_same_ids(tmp_path):
    model = GPT(GPTConfig(2000, 16, 1, 2, 8))
    ours = load_tokenizer(2000)
    export(model, str(tmp_path / "out"), ours)
    back = from_folder(str(tmp_path / "out"))
    assert back.end_tokens == (1999,)
    for text in TEXTS:
        assert back.encode_ordinary(text) == ours.encode_ordinary(text)
    assert {"vocab.json", "merges.txt", "tokenizer.json"} <= set(os.listdir(tmp_path / "out"))

    metadata = gguf_of_core(chat_core(2000), "gpt-2")
    metadata["tokenizer.chat_template"] = TEMPLATE
    path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), "llama", **metadata)
    export(extras.hub.policy.load(path)[0], str(tmp_path / "gguf"), path)
    one = from_folder(str(tmp_path / "gguf"))
    other = extras.hub.policy.tokenizer_of(path)
    assert one.end_tokens == other.end_tokens == (2, 0)
    assert one.chat_template == TEMPLATE
    for text in TEXTS:
        assert one.encode_ordinary(text) == other.encode_ordinary(text)


def test_exported_gpt2_is_trained_without_dropout_elsewhere_too(tmp_path):
    export(GPT(GPTConfig(300, 16, 1, 2, 8)), str(tmp_path / "out"), load_tokenizer(300))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert config.get(name) == 0, f"{name} is not 0, and transformers' default is 0.1"


def test_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    model = GPT(GPTConfig(300, 16, 1, 2, 8))
    tokenizer = load_tokenizer(300)
    (tmp_path / "there").mkdir()
    assert "is there already" in refusal(export, model, str(tmp_path / "there"), tokenizer)
    out = str(tmp_path / "out")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(extras.hub.export, "save_tensors", full)
    assert "No space left" in refusal(export, model, out, tokenizer)
    assert os.listdir(tmp_path) == ["there"]


def test_shape_that_nobody_publishes_is_refused(tmp_path):
    rotary = dict(rope_base=100.0, rms=True, swiglu=True)
    qwen3 = dict(rms=True, swiglu=True, bias=False, qkv_bias=False, qk_norm=True)   # no rope_base
    for shape in (dict(bias=False), dict(causal=False), dict(rope_base=100.0), rotary,
                  qwen3, dict(window=3, local_layers=(0,)), dict(attn_scale=0.5, qkv_bias=False)):
        model = GPT(GPTConfig(300, 16, 1, 2, 8, **shape))
        message = refusal(export, model, str(tmp_path / "out"), load_tokenizer(300))
        assert re.search("no published architecture|(window_size|rope_theta) is missing", message)
    assert not os.listdir(tmp_path)


def test_the_tests_install_what_users_install():
    pins = {}
    for name in ("requirements-dev.txt", "extras/hub/requirements.txt"):
        with open(os.path.join(ROOT, name)) as f:
            lines = [line.split("#")[0].strip() for line in f]
        pins[name] = {line for line in lines if "==" in line}
    assert pins["extras/hub/requirements.txt"] <= pins["requirements-dev.txt"]
