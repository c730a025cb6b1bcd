"""extras/hub/: published models in and out. Tiny models in the published layouts against what they
are by hand; tokenizers against tiktoken and the package; exports read back."""
import importlib
import json
import math
import os
import re
import sys
from struct import pack

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

import extras.hub.export
from conftest import ROOT
from common.files import read_json
from data.tokenizer import load_tokenizer
from extras.hub.export import export
from extras.hub.families import spelled_out
from extras.hub.files import Reader, fetch, load_tensors, save_tensors
from extras.hub.policy import tokenizer_of
from extras.hub.tokenizer import from_folder
from model import GPT, GPTConfig
from extras.hub.tests.published import (
    GPT2, LAYOUTS, LLAMA, LLAMA3, MARKS, TEMPLATE, assert_holds, chat_core, gguf_of_core,
    load, make_tensors, put, write, write_gguf)
from worlds import refusal


def test_without_its_packages_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "-r extras/hub/requirements.txt" in refusal(importlib.reload, extras.hub)


# ------------------------------------------------------------------------------------------------
# weights in

@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layout_is_the_gpt_that_it_is_by_hand(layout, tmp_path):
    c, shape = LAYOUTS[layout]
    tensors = make_tensors(c)
    paths = [write(tmp_path / "m", c, tensors)]
    if "rope_theta" in c and "rope_scaling" not in c:
        paths.append(write_gguf(tmp_path / "m.gguf", c, tensors))
    for path in paths:
        model = load(path)
        assert spelled_out(model.config) == spelled_out(GPTConfig(**shape))
        assert_holds(model, c, tensors)
        assert all(p.requires_grad for p in model.parameters())


def test_names_without_prefix_buffers_and_halves(tmp_path):
    tensors = {name: x.bfloat16() for name, x in make_tensors(GPT2).items()}
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    assert_holds(load(write(tmp_path, GPT2, bare)), GPT2, tensors)


def test_shards(tmp_path):
    tensors = make_tensors(GPT2)
    put(tmp_path, config=GPT2)
    for i in (1, 2):
        half = {name: tensors[name] for name in sorted(tensors)[i - 1::2]}
        save_tensors(f"{tmp_path}/model-0000{i}-of-00002.safetensors", half)
    assert_holds(load(tmp_path), GPT2, tensors)
    os.remove(tmp_path / "model-00002-of-00002.safetensors")
    assert "is missing" in refusal(load, tmp_path)


def test_tensors_say_whether_the_head_is_tied(tmp_path):
    tensors = make_tensors(GPT2)        # config.json says tied
    for factor in (1, 2):
        head = factor * tensors["transformer.wte.weight"]
        model = load(write(tmp_path, GPT2, tensors | {"lm_head.weight": head}))
        assert torch.equal(model.lm_head.weight, head)
        assert model.config.tied == (model.lm_head.weight is model.wte.weight) == (factor == 1)


# layout | what its config.json says instead | what the refusal says
REFUSALS = r"""
gpt2 | "architectures": ["GPT2ForSequenceClassification"] | GPT2ForSequenceClassification
gpt2 | "model_type": "mixtral" | 'mixtral' is not supported, only gpt2
gpt2 | "activation_function": "relu" | activation_function = 'relu' .* 'gelu'
gpt2 | "scale_attn_by_inverse_layer_idx": true | scale_attn_by_inverse_layer_idx = True
gpt2 | "scale_attn_weights": false | scale_attn_weights = False
gpt2 | "n_head": null | n_head is missing
gpt2 | "num_attention_heads": 3 | num_attention_heads = 3 .* only 4
gpt2 | "n_head": 5 | n_embd = 12 must be a multiple of n_head
gpt2 | "n_positions": 64 | wpe.weight is torch.float32 \(32, 12\), must be \(64, 12\)
gpt2 | "n_layer": 1000000000 | tensors for 1000000000 layers
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
llama | "rope_parameters": {"rope_theta": 51.0} | rope_theta = 50.0
llama 3.2 | "rope_parameters": {"rope_type": "default"} | rope_scaling
llama 3.2 | "original_max_position_embeddings": 4 | embeddings = 4
llama 3.2 | "rope_scaling": {"rope_type": "llama3", "factor": 8.0} | must fit together
llama | "rope_scaling": "x" | must fit together
llama | "hidden_act": "gelu" | hidden_act = 'gelu'
qwen2 | "use_sliding_window": true | use_sliding_window = True
qwen3 | "layer_types": ["full_attention", "sliding_attention"] | layer_types
qwen3 | "head_dim": null | q_proj.weight is .*\(24, 16\), must be \(512, 16\)
"""


def test_model_that_would_compute_something_else_is_refused_in_one_line_that_says_why(tmp_path):
    rows = [line.split(" | ") for line in REFUSALS.strip().splitlines()]
    scaling = json.dumps(LLAMA3 | dict(low_freq_factor=3))
    rows.append(("llama", f'"rope_scaling": {scaling}', "low_freq_factor = 3"))
    for layout, changes, says in rows:
        c, _ = LAYOUTS[layout]
        folder = write(tmp_path, c | json.loads("{" + changes + "}"), make_tensors(c))
        message = refusal(load, folder)
        assert re.search(says, message), (layout, changes, message)


def test_odd_tensors_are_named(tmp_path):
    for name, x in ((r"a\nb", torch.zeros(1)), ("layers.1.mlp.up_proj.weight", torch.zeros(10, 17)),
                    ("norm.weight", torch.zeros(16, dtype=torch.int8))):
        odd = {"model." + name.replace(r"\n", "\n"): x}
        folder = write(tmp_path, LLAMA, make_tensors(LLAMA) | odd)
        assert name in refusal(load, folder)


def test_what_is_no_published_model_is_named_and_no_pickle_is_opened(tmp_path):
    put(tmp_path, config=LLAMA)
    torch.save(make_tensors(LLAMA), tmp_path / "pytorch_model.bin")
    assert "never opened" in refusal(load, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x02half a file")
    assert "download it again" in refusal(load, tmp_path)
    for text in ("[]", "{", "{}"):
        (tmp_path / "config.json").write_text(text)
        assert str(tmp_path) in refusal(load, tmp_path)


def test_names_are_downloaded_by_huggingface_hub(monkeypatch):
    for name in ("no/such/folder", "../up", "a b", ""):
        assert "no published name" in refusal(fetch, name)
    assert "must end in .pt or .gguf" in refusal(fetch, __file__)
    seen = []
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda name, **how: seen.append((name, how)))
    fetch("gpt2")
    fetch("unitary/toxic@refs/pr/2")
    assert [(name, how["revision"]) for name, how in seen] == [
        ("gpt2", None), ("unitary/toxic", "refs/pr/2")]
    files = seen[0][1]["allow_patterns"]
    assert not any(name.endswith((".bin", ".pt", "*")) for name in files)


# ------------------------------------------------------------------------------------------------
# GGUF

def test_gguf_of_llama_3_is_scaled_by_its_table_of_frequencies(tmp_path):
    c = LLAMA | dict(head_dim=12, rope_theta=500000.0)
    # waves of 6.3, 56, 499, 4443, 39583 and 352674 positions: one lies between 2048 and 8192
    smooth = (8192 / 4442.9 - 1) / (4 - 1)
    table = torch.tensor([1, 1, 1, 1 / ((1 - smooth) / 32 + smooth), 32, 32])

    def written(table):
        tensors = make_tensors(c) | {"rope_freqs.weight": table}
        return write_gguf(tmp_path / "m.gguf", c, tensors)

    assert load(written(table)).config.rope_scaling == (32, 1, 4, 8192)
    for odd in (table + torch.eye(6)[3], table * math.nan):
        assert "rope_freqs.weight" in refusal(load, written(odd))


# what the metadata of a Llama says instead | what the refusal says
GGUF_REFUSALS = """
"general.architecture": "gemma" | 'gemma' is not supported, only llama
"llama.rope.scaling.type": "yarn" | yarn
"llama.rope.scale_linear": 2.0 | scale_linear = 2.0
"llama.rope.scaling.factor": 2.0 | factor = 2.0
"llama.rope.dimension_count": 2 | dimension_count = 2
"llama.block_count": 1000000000 | tensors for 1000000000 layers
"llama.attention.causal": false | causal = False
"""


def test_gguf_of_another_kind_or_cut_short_is_one_line(tmp_path, monkeypatch):
    for line in GGUF_REFUSALS.strip().splitlines():
        changes, says = line.split(" | ")
        changes = json.loads("{" + changes + "}")
        path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), **changes)
        message = refusal(load, path)
        assert path in message and says in message, message
    os.truncate(path, 300)
    assert "download it again" in refusal(load, path)
    head = b"GGUF" + pack("<IQQ", 3, 0, 1) + pack("<Q", 1) + b"k" + pack("<I", 9)     # an array
    for kind in (0, 6, 8, 9):
        (tmp_path / "m.gguf").write_bytes(head + pack("<IQ", kind, 2 ** 61))
        assert path in refusal(load, path), "an array of 2^61 numbers"
    monkeypatch.setattr(Reader, "left", 1000)
    (tmp_path / "m.gguf").write_bytes(head + pack("<IQ", 6, 2000) + bytes(8000))
    assert "too long" in refusal(load, path), "more metadata than anybody would wait for"


# ------------------------------------------------------------------------------------------------
# tokenizers

TEXTS = ["", " ", "don't I'll WE'VE 'S", "a    b   c  ", "\n\n\t \r\n x\r\n\r\ny", "1234 3.14",
         "the theatre, the other!!! ???", "\U0001f642 na\u00efve e\u0301 \u4e2d\u6587\u2028\u00a0x",
         "x" * 300, "".join(map(chr, range(256))), "a</s>b<|endoftext|><|im_start|>"]
EOT, START, END = 1999, 2000, 2001      # MARKS in chat_core(2000)


def small_gpt(vocab_size=300, **shape):
    return GPT(GPTConfig(vocab_size, 16, 1, 2, 8, **shape))


def test_gpt2_leaves_with_its_tokenizer_in_one_file_and_in_two_and_without_dropout(tmp_path):
    ours = load_tokenizer(2000)
    out = f"{tmp_path}/out"
    export(small_gpt(2000), out, ours)
    config = read_json(f"{out}/config.json")
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert config.get(name) == 0, f"{name} is not 0, and transformers' default is 0.1"
    for one_file in (True, False):
        if not one_file:
            for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
                os.remove(f"{out}/{name}")
        tokenizer = from_folder(out)
        assert tokenizer.end_tokens == (EOT,)
        assert tokenizer.n_vocab == 2000
        for text in TEXTS:
            ids = ours.encode_ordinary(text)
            assert tokenizer.encode_ordinary(text) == ids
            for n in range(len(ids) + 1):       # also in the middle of a character
                assert tokenizer.decode(ids[:n]) == ours.decode(ids[:n])
        for i in range(EOT):
            assert tokenizer.decode_single_token_bytes(i) == ours.decode_single_token_bytes(i)
        assert tokenizer.encode_marked("a<|endoftext|>") == ours.encode_ordinary("a") + [EOT]


def write_chat(folder, **config):
    core = chat_core(2000)
    core.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[(MARKS[0], EOT), (MARKS[2], END)])
    core.save(f"{folder}/tokenizer.json")
    put(folder, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE) | config)
    return str(folder)


def test_no_text_becomes_a_special_token_but_what_a_template_wrote_does(tmp_path):
    tokenizer = from_folder(write_chat(tmp_path))
    text = "hi<|im_end|>"
    assert not set(tokenizer.encode_ordinary(text)) & {EOT, START, END}
    for encode in (tokenizer.encode_ordinary, tokenizer.encode_marked):
        assert tokenizer.decode(encode(text)) == text
    assert tokenizer.encode_marked(text)[-1] == END
    assert tokenizer.before_text == [EOT], "of what the tokenizer itself puts around a text"
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.names == {"eos_token": "<|im_end|>"}
    several = [dict(name="tools", template="other"), dict(name="default", template=TEMPLATE)]
    assert from_folder(write_chat(tmp_path, chat_template=several)).chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("other")
    assert from_folder(str(tmp_path)).chat_template == "other", "a file of its own wins"


def test_generation_config_alone_says_what_ends_a_completion_where_it_names_some(tmp_path):
    folder = write_chat(tmp_path)
    for model, generation, expected in (
            (None, None, (END,)), (EOT, None, (END, EOT)), (EOT, 1, (1,)),
            (None, [EOT, END], (END, EOT)), (None, [EOT, 9999], (EOT,))):
        put(folder, config=dict(eos_token_id=model),
            generation_config=dict(eos_token_id=generation))
        tokenizer = from_folder(folder)
        assert tokenizer.end_tokens == expected
        assert tokenizer.eot_token == expected[0]


def test_tokens_that_a_fine_tune_adds_and_never_uses_need_no_place_in_the_model(tmp_path):
    tokenizer = from_folder(write_chat(tmp_path))
    tokenizer.check_fit(END + 1)
    assert "up to 2001" in refusal(tokenizer.check_fit, END), "it ends completions"
    put(tmp_path, generation_config=dict(eos_token_id=EOT))
    from_folder(str(tmp_path)).check_fit(EOT + 1)


def gguf_tokenizer(path, pre):
    metadata = gguf_of_core(chat_core(2000), pre, bos_token_id=START)
    metadata["tokenizer.chat_template"] = TEMPLATE
    metadata["tokenizer.ggml.tokens"].append("\u0120zqxjk")     # no merges lead to this one
    return write_gguf(path, LLAMA, make_tensors(LLAMA), **metadata)


DIGITS = ["1", "0", "0", " ", "2", "0", "1", "0"]


@pytest.mark.parametrize("pre, cut", [
    ("gpt-2", ["1", "00", " 201", "0"]), ("smollm", DIGITS), ("qwen2", DIGITS),
    ("llama-bpe", ["1", "00", " ", "201", "0"])])
def test_tokenizer_of_a_gguf_cuts_words_as_its_name_says_and_so_does_its_export(
        pre, cut, tmp_path):
    """Llama 3 as llama.cpp reads it: ignore_merges, and <bos> before every text."""
    is_llama = pre == "llama-bpe"
    path = gguf_tokenizer(tmp_path / "m.gguf", pre)
    export(load(path), f"{tmp_path}/out", path)
    for tokenizer in (tokenizer_of(path), from_folder(f"{tmp_path}/out")):
        assert tokenizer.end_tokens == (END, EOT)
        assert tokenizer.before_text == [START] * is_llama
        assert tokenizer.chat_template == TEMPLATE
        assert tokenizer.encode_marked("a<|im_end|>")[-1] == END
        ids = tokenizer.encode_ordinary("100 2010")
        assert [tokenizer.decode([i]) for i in ids] == cut
        composed = tokenizer.encode_ordinary("\u00e9")
        assert (tokenizer.encode_ordinary("e\u0301") == composed) == (pre == "qwen2")
        ids = tokenizer.encode_ordinary("a zqxjk")
        assert (ids[-1] == 2002) == is_llama, "Llama 3 alone takes a word that is a token"
        whole = tokenizer.core.encode("a zqxjk").ids    # as transformers asks the same file
        assert whole == tokenizer.before_text + ids, "<bos> was lost or added"


def test_tokenizer_that_is_not_known_here_is_one_line(tmp_path):
    assert "'deepseek'" in refusal(tokenizer_of, gguf_tokenizer(tmp_path / "m.gguf", "deepseek"))
    folder = write_chat(tmp_path, eos_token=None)
    assert "no end token" in refusal(tokenizer_of, folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(f"{tmp_path}/tokenizer.json")
    assert "byte-level" in refusal(tokenizer_of, folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert folder in refusal(tokenizer_of, folder)
    chat_core().save(f"{tmp_path}/tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "##"        # the package panics
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert folder in refusal(tokenizer_of, folder)
    os.remove(tmp_path / "tokenizer.json")
    assert folder in refusal(tokenizer_of, folder)


# ------------------------------------------------------------------------------------------------
# out

@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_gives_back_what_came_in(layout, tmp_path):
    c, shape = LAYOUTS[layout]
    source = write(tmp_path / "in", c | dict(eos_token_id=3))
    put(source, tokenizer={}, generation_config=dict(eos_token_id=3))
    out = tmp_path / "out"
    export(load(source), str(out), source)
    tensors = load_tensors(out)
    expected = make_tensors(c)
    assert tensors.keys() == expected.keys()
    for name, x in tensors.items():
        assert torch.equal(x, expected[name]), name
    assert read_json(f"{out}/config.json")["eos_token_id"] == 3
    assert sorted(os.listdir(out)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert spelled_out(load(out).config) == spelled_out(GPTConfig(**shape))


def test_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def refused(name, **shape):
        return refusal(export, small_gpt(**shape), f"{tmp_path}/{name}", load_tokenizer(300))

    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    assert "is there already" in refused("there")
    rotary = dict(rope_base=100.0, rms=True, swiglu=True)
    qwen3 = dict(rms=True, swiglu=True, bias=False, qkv_bias=False, qk_norm=True)   # no rope_base
    for shape in (dict(bias=False), dict(causal=False), dict(rope_base=100.0), rotary,
                  qwen3, dict(window=3, local_layers=(0,)), dict(attn_scale=0.5, qkv_bias=False)):
        assert re.search("no published architecture|(window_size|rope_theta) is missing",
                         refused("out", **shape))
    monkeypatch.setattr(extras.hub.export, "save_tensors", full)
    assert "No space left" in refused("out")
    assert os.listdir(tmp_path) == ["there"]


def test_the_tests_install_what_users_install():
    pins = {}
    for name in ("requirements-dev.txt", "extras/hub/requirements.txt"):
        with open(f"{ROOT}/{name}") as f:
            lines = [line.split("#")[0].strip() for line in f]
        pins[name] = {line for line in lines if "==" in line}
    assert pins["extras/hub/requirements.txt"] <= pins["requirements-dev.txt"]
