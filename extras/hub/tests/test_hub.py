"""extras/hub/: published models in and out. Tiny models in the published layouts against a forward
by hand; tokenizers against the package and merging by hand; exports read back."""
import json
import math
import os
import re

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

import extras.hub.policy
from conftest import ROOT
from common.files import read_json
from data.tokenizer import load_tokenizer
from extras.hub.export import core_of, export
from extras.hub.families import spelled_out
from extras.hub.files import fetch, load_tensors, save_tensors
from extras.hub.tokenizer import from_folder
from model import GPT, GPTConfig
from extras.hub.tests.published import (
    GPT2, LAYOUTS, LLAMA, LLAMA3, MARKS, TEMPLATE, V, chat_core, gguf_of_core, load, logits,
    logits_by_hand, make_tensors, put, write, write_gguf)
from rollout import pad_left
from worlds import assert_near, random_ids, refusal, with_lora

LLAMA32 = LLAMA | dict(head_dim=12, rope_theta=500000.0)
IDS = random_ids(3, 9, V)


# ------------------------------------------------------------------------------------------------
# weights in

@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layout_gives_the_logits_of_a_forward_by_hand_padded_or_not(layout, tmp_path):
    c = LAYOUTS[layout]
    model, where = extras.hub.policy.load(write(tmp_path / "m", c))
    assert where == f"{tmp_path}/m"
    for p in model.parameters():
        assert p.dtype == torch.float32
        assert p.requires_grad
        assert p.untyped_storage().nbytes() == 4 * p.numel(), "a view of the file"
    model = model.double()
    rows = [IDS[0].tolist(), IDS[1, :1].tolist(), IDS[2, :5].tolist()]
    tokens, real = pad_left(rows)
    padded = logits(model, torch.where(real, tokens, V - 1), real)
    for i, row in enumerate(rows):
        expected = logits_by_hand(c, make_tensors(c), row)
        assert_near(padded[i, -len(row):], expected, 1e-10)
        assert_near(logits(model, torch.tensor([row]))[0], expected, 1e-10)


def test_names_without_prefix_and_buffers(tmp_path):
    tensors = make_tensors(GPT2)
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    found = load(write(tmp_path / "bare", GPT2, bare))
    assert torch.equal(logits(found, IDS), logits(load(write(tmp_path / "m", GPT2)), IDS))


def test_shards(tmp_path):
    tensors = make_tensors(GPT2)
    half = dict(list(tensors.items())[:9])
    rest = {name: x for name, x in tensors.items() if name not in half}
    folder = write(tmp_path / "shards", GPT2, {})
    os.remove(f"{folder}/model.safetensors")
    shard_of = dict.fromkeys(half, "one.safetensors") | dict.fromkeys(rest, "two.safetensors")
    save_tensors(f"{folder}/one.safetensors", half)
    save_tensors(f"{folder}/two.safetensors", rest)
    put(folder, **{"model.safetensors.index": dict(weight_map=shard_of)})
    assert torch.equal(logits(load(folder), IDS), logits(load(write(tmp_path / "m", GPT2)), IDS))


def test_bfloat16_becomes_float32(tmp_path):
    halves = {name: x.bfloat16() for name, x in make_tensors(LLAMA).items()}
    found = load(write(tmp_path, LLAMA, halves)).wte.weight
    assert torch.equal(found, halves["model.embed_tokens.weight"].float())


def test_tensors_say_whether_the_head_is_tied(tmp_path):
    tensors = make_tensors(GPT2)        # config.json says tied
    embedding = tensors["transformer.wte.weight"]
    tied = load(write(tmp_path / "a", GPT2, tensors | {"lm_head.weight": embedding.clone()}))
    other = load(write(tmp_path / "b", GPT2, tensors | {"lm_head.weight": 2 * embedding}))
    assert tied.config.tied
    assert tied.lm_head.weight is tied.wte.weight
    assert not other.config.tied
    torch.testing.assert_close(logits(other, IDS), 2 * logits(tied, IDS))


# layout | what its config.json says instead | what the refusal says
REFUSALS = r"""
gpt2 | "architectures": ["GPT2ForSequenceClassification"] | GPT2ForSequenceClassification
gpt2 | "activation_function": "relu" | activation_function = 'relu' .* 'gelu'
gpt2 | "scale_attn_by_inverse_layer_idx": true | scale_attn_by_inverse_layer_idx = True
gpt2 | "scale_attn_weights": false | scale_attn_weights = False
gpt2 | "n_head": null | n_head is missing
gpt2 | "num_attention_heads": 3 | num_attention_heads = 3 .* only 4
gpt2 | "n_head": 5 | n_embd = 12 must be a multiple of n_head
gpt2 | "n_positions": 64 | wpe.weight is torch.float32 \(32, 12\), must be \(64, 12\)
gpt2 | "n_layer": 1000000000 | 28 tensors for 1000000000 layers
gpt2 | "n_layer": 1 | h.1.*has no place
gpt2 | "tie_word_embeddings": false | lm_head.weight is missing.* tie_word_embeddings
gpt_neo | "tie_word_embeddings": false | lm_head.weight is missing
llama one kv head, tied | "tie_word_embeddings": null | lm_head.weight is missing
llama | "attention_bias": true | attention_bias = True is not supported, only False
llama | "mlp_bias": true | mlp_bias = True
qwen3 | "attention_bias": true | attention_bias = True
gpt2 | "quantization_config": {"bits": 4} | quantization_config
gpt_neo | "attention_types": [[["global"], 2]] | attention_types
gpt_neo | "attention_types": null | attention_types = None: must name global or local
gpt_neo | "attention_layers": ["global", "global", "global"] | attention_layers
gpt_neo | "window_size": 0 | window_size is missing
llama | "rope_scaling": {"type": "linear", "factor": 2.0} | 'linear'
llama | "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5} | partial
llama 3.2 | "rope_parameters": {"rope_type": "default"} | rope_scaling
llama 3.2 | "original_max_position_embeddings": 4 | embeddings = 4
llama | "rope_scaling": "x" | must fit together
llama | "hidden_act": "gelu" | hidden_act = 'gelu'
qwen2 | "use_sliding_window": true | use_sliding_window = True
qwen3 | "layer_types": ["full_attention", "sliding_attention"] | layer_types
qwen3 | "head_dim": null | q_proj.weight is .*\(24, 16\), must be \(512, 16\)
"""


def test_model_that_would_compute_something_else_is_refused_in_one_line_that_says_why(tmp_path):
    for line in REFUSALS.strip().splitlines():
        layout, changes, says = line.split(" | ")
        c = LAYOUTS[layout]
        folder = write(tmp_path, c | json.loads("{" + changes + "}"), make_tensors(c))
        message = refusal(load, folder)
        assert re.search(says, message), (line, message)
    scaling = LLAMA3 | dict(low_freq_factor=3)
    folder = write(tmp_path, LLAMA | dict(rope_scaling=scaling), make_tensors(LLAMA))
    assert "low_freq_factor = 3" in refusal(load, folder)


def test_odd_tensors_are_named(tmp_path):
    for name, x in (("model.layers.1.self_attn.k_proj.bias", torch.zeros(8)),
                    ("score.weight", torch.zeros(2, 16)), ("a\nb", torch.zeros(1)),
                    ("model.layers.1.mlp.up_proj.weight", torch.zeros(10, 17)),
                    ("model.norm.weight", torch.zeros(16, dtype=torch.int8))):
        folder = write(tmp_path, LLAMA, make_tensors(LLAMA) | {name: x})
        assert name[:2].strip() in refusal(load, folder)


def test_nothing_outside_of_the_folder_and_no_pickle_is_opened(tmp_path):
    put(tmp_path, config=LLAMA)
    torch.save(make_tensors(LLAMA), tmp_path / "pytorch_model.bin")
    assert "never opened" in refusal(load, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x02half a file")
    assert "download it again" in refusal(load, tmp_path)
    put(tmp_path, **{"model.safetensors.index": dict(weight_map={"x": "../up.safetensors"})})
    assert f"{tmp_path}/up.safetensors" in refusal(load, tmp_path)


def test_what_is_no_published_model_is_named(tmp_path):
    folder = write(tmp_path / "m", LLAMA)
    for text in ("[]", "{", "{}"):
        (tmp_path / "m" / "config.json").write_text(text)
        assert folder in refusal(load, folder)
    for name in ("no/such/folder", "../up", "a b", ""):
        assert "no published name" in refusal(fetch, name)


def test_names_are_downloaded_by_huggingface_hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    seen = []

    def snapshot_download(repo, **how):
        seen.append((repo, how["revision"], how["repo_type"], how["allow_patterns"]))
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert "must end in .pt or .gguf" in refusal(fetch, __file__)
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
    expected = load(write(tmp_path / "m", c))
    found, where = extras.hub.policy.load(path)
    assert where == path
    assert spelled_out(found.config) == spelled_out(expected.config)
    for name, x in found.state_dict().items():
        assert torch.equal(x, expected.state_dict()[name]), name


def test_gguf_of_llama_3_is_scaled_by_its_table_of_frequencies(tmp_path):
    scaling = dict(LLAMA3, factor=32.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    expected = load(write(tmp_path / "m", LLAMA32 | dict(rope_scaling=scaling)))
    # waves of 6.3, 56, 499, 4443, 39583 and 352674 positions: one lies between 2048 and 8192
    smooth = (8192 / 4442.9 - 1) / (4 - 1)
    table = torch.tensor([1, 1, 1, 1 / ((1 - smooth) / 32 + smooth), 32, 32])

    def written(table):
        tensors = make_tensors(LLAMA32) | {"rope_freqs.weight": table}
        return write_gguf(tmp_path / "m.gguf", LLAMA32, tensors, "llama")

    assert load(written(table)).config == expected.config
    for odd in (table + torch.eye(6)[3], table * math.nan):
        assert "rope_freqs.weight" in refusal(load, written(odd))


# what the metadata of a Llama says instead | what the refusal says
GGUF_REFUSALS = """
"general.architecture": "gemma" | general.architecture = 'gemma'
"llama.rope.scaling.type": "yarn" | yarn
"llama.rope.scale_linear": 2.0 | scale_linear = 2.0
"llama.rope.scaling.factor": 2.0 | factor = 2.0
"llama.rope.dimension_count": 2 | dimension_count = 2
"llama.block_count": 1000000000 | 21 tensors for 1000000000 layers
"llama.attention.causal": false | causal = False
"""


def test_gguf_of_another_kind_is_one_line(tmp_path):
    for line in GGUF_REFUSALS.strip().splitlines():
        changes, says = line.split(" | ")
        metadata = json.loads("{" + changes + "}")
        kind = metadata.pop("general.architecture", "llama")
        path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), kind, **metadata)
        message = refusal(load, path)
        assert path in message and says in message, message


def test_half_a_gguf_is_one_line(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), "llama")
    os.truncate(path, 300)
    assert "download it again" in refusal(load, path)


# ------------------------------------------------------------------------------------------------
# tokenizers

TEXTS = ["", " ", "don't I'll WE'VE 'S", "a    b   c  ", "\n\n\t \r\n x\r\n\r\ny", "1234 3.14",
         "the theatre, the other!!! ???", "\U0001f642 na\u00efve e\u0301 \u4e2d\u6587\u2028\u00a0x",
         "x" * 300, "".join(map(chr, range(256))), "a</s>b<|endoftext|><|im_start|>"]


def write_chat(folder, **config):
    core = chat_core(2000)
    core.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), (MARKS[2], 2)])
    core.save(f"{folder}/tokenizer.json")
    put(folder, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE) | config)
    return str(folder)


def test_gpt2s_two_files_and_its_one_file_give_the_ids_of_tiktoken(tmp_path):
    ours = load_tokenizer(2000)
    core = core_of(ours)
    core.save(f"{tmp_path}/tokenizer.json")
    os.makedirs(tmp_path / "two")
    core.model.save(f"{tmp_path}/two")
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
    assert tokenizer.before_text == [0], "of what the tokenizer itself puts around a text"
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.names == {"eos_token": "<|im_end|>"}
    (tmp_path / "chat_template.jinja").write_text("other")
    assert from_folder(str(tmp_path)).chat_template == "other", "a file of its own wins"


def test_generation_config_alone_says_what_ends_a_completion_where_it_names_some(tmp_path):
    folder = write_chat(tmp_path)
    for model, generation, expected in (
            (None, None, (2,)), (0, None, (2, 0)), (0, 1, (1,)), (None, [0, 2], (2, 0)),
            (None, [0, 9999], (0,))):
        put(folder, config=dict(eos_token_id=model),
            generation_config=dict(eos_token_id=generation))
        tokenizer = from_folder(folder)
        assert tokenizer.end_tokens == expected
        assert tokenizer.eot_token == expected[0]


def test_a_gguf_that_claims_to_be_endless(tmp_path):
    from struct import pack
    path = tmp_path / "m.gguf"
    head = b"GGUF" + pack("<IQQ", 3, 0, 1) + pack("<Q", 1) + b"k" + pack("<I", 9)     # an array
    for kind in (0, 6, 8, 9):
        path.write_bytes(head + pack("<IQ", kind, 2 ** 61))
        assert "m.gguf" in refusal(load, str(path))


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


@pytest.mark.parametrize("pre", ("gpt-2", "llama-bpe"))
def test_the_tokenizer_of_a_gguf_and_its_export_give_the_same_ids(pre, tmp_path):
    """Llama 3 as llama.cpp reads it: ignore_merges, and <bos> before every text."""
    is_llama = pre == "llama-bpe"
    metadata = gguf_of_core(chat_core(2000), pre, bos_token_id=1)
    metadata["tokenizer.chat_template"] = TEMPLATE
    metadata["tokenizer.ggml.tokens"].append("\u0120zqxjk")     # no merges lead to this one
    path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), "llama", **metadata)
    tokenizer = extras.hub.policy.tokenizer_of(path)
    export(load(path), f"{tmp_path}/out", path)
    exported = from_folder(f"{tmp_path}/out")
    assert exported.end_tokens == tokenizer.end_tokens == (2, 0)
    assert exported.before_text == tokenizer.before_text == [1] * is_llama
    assert exported.chat_template == TEMPLATE
    for text in (*TEXTS, "a zqxjk"):
        ids = tokenizer.encode_ordinary(text)
        assert exported.encode_ordinary(text) == ids, "the export reads otherwise"
        whole = exported.core.encode(text).ids      # as transformers asks the same file
        assert whole == tokenizer.before_text + ids, "<bos> was lost or added"
    word = metadata["tokenizer.ggml.tokens"].index("\u0120zqxjk")
    assert (ids[-1] == word) == is_llama, "Llama 3 alone takes a word that is a token"


def test_tokenizer_that_is_not_known_here_is_one_line(tmp_path):
    folder = write_chat(tmp_path, eos_token=None)
    assert "no end token" in refusal(extras.hub.policy.tokenizer_of, folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(f"{tmp_path}/tokenizer.json")
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
    model = load(source)
    out = tmp_path / "out"
    export(model, str(out), source)
    tensors = load_tensors(out)
    expected = make_tensors(c)
    assert tensors.keys() == expected.keys()
    for name, x in tensors.items():
        assert torch.equal(x, expected[name]), name
    assert read_json(f"{out}/config.json")["eos_token_id"] == 3
    assert sorted(os.listdir(out)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(logits(load(out), IDS), logits(model, IDS))


@pytest.mark.parametrize("layout", ["gpt2", "gpt_neo", "llama", "qwen2 tied", "qwen3"])
def test_lora_leaves_merged(layout, tmp_path):
    source = source_of(tmp_path / "in", LAYOUTS[layout])
    base = load(source)
    model = with_lora(base)
    assert (logits(model, IDS) - logits(base, IDS)).abs().max() > 0.05
    export(model, f"{tmp_path}/merged", source)
    assert_near(logits(load(f"{tmp_path}/merged"), IDS), logits(model, IDS), 1e-4)


def small_gpt(vocab_size=300, **shape):
    return GPT(GPTConfig(vocab_size, 16, 1, 2, 8, **shape))


def test_exported_gpt2_has_its_tokenizer_and_no_dropout(tmp_path):
    ours = load_tokenizer(2000)
    out = tmp_path / "out"
    export(small_gpt(2000), str(out), ours)
    back = from_folder(str(out))
    assert back.end_tokens == (1999,)
    assert back.encode_ordinary(TEXTS[6]) == ours.encode_ordinary(TEXTS[6])
    assert {"vocab.json", "merges.txt", "tokenizer.json"} <= set(os.listdir(out))
    config = read_json(f"{out}/config.json")
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert config.get(name) == 0, f"{name} is not 0, and transformers' default is 0.1"


def test_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def refused(name):
        return refusal(export, small_gpt(), str(tmp_path / name), load_tokenizer(300))

    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    assert "is there already" in refused("there")
    monkeypatch.setattr(extras.hub.export, "save_tensors", full)
    assert "No space left" in refused("out")
    assert os.listdir(tmp_path) == ["there"]


def test_shape_that_nobody_publishes_is_refused(tmp_path):
    rotary = dict(rope_base=100.0, rms=True, swiglu=True)
    qwen3 = dict(rms=True, swiglu=True, bias=False, qkv_bias=False, qk_norm=True)   # no rope_base
    for shape in (dict(bias=False), dict(causal=False), dict(rope_base=100.0), rotary,
                  qwen3, dict(window=3, local_layers=(0,)), dict(attn_scale=0.5, qkv_bias=False)):
        out = f"{tmp_path}/out"
        message = refusal(export, small_gpt(**shape), out, load_tokenizer(300))
        assert re.search("no published architecture|(window_size|rope_theta) is missing", message)
    assert not os.listdir(tmp_path)


def test_the_tests_install_what_users_install():
    pins = {}
    for name in ("requirements-dev.txt", "extras/hub/requirements.txt"):
        with open(f"{ROOT}/{name}") as f:
            lines = [line.split("#")[0].strip() for line in f]
        pins[name] = {line for line in lines if "==" in line}
    assert pins["extras/hub/requirements.txt"] <= pins["requirements-dev.txt"]
