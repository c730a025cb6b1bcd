"""extras/hub/: published models in and out. Tiny models in the published layouts against what they
are by hand; tokenizers against tiktoken and the package; exports read back."""
import importlib
import json
import math
import os
import sys
import unicodedata
from struct import pack

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

import extras.hub.export
from common.files import ROOT
from common.files import read_json
from data.tokenizer import load_tokenizer
from extras.hub.export import export, own_core
from extras.hub.families import spelled_out
from extras.hub.files import Reader, fetch, load_tensors, save_tensors
from extras.hub.policy import tokenizer_of
from extras.hub.tokenizer import GGUF_PATTERNS, bpe_core, from_folder
from model import GPT, GPTConfig
from extras.hub.tests.published import (
    GPT2, LAYOUTS, LLAMA, LLAMA3, MARKS, TEMPLATE, assert_holds, chat_core, gguf_of_core,
    load, make_tensors, put, write, write_gguf)
from worlds import assert_refused, printed, refusal


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
    assert_refused("model-00002-of-00002.safetensors", load, tmp_path)


def make_shards(folder, tensors, count, index=True, total=None):
    """model-00001-of-00003.safetensors, ... and their index -> its weight_map."""
    put(folder, config=GPT2)
    place = {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{total or count:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::count]}
        save_tensors(f"{folder}/{shard}", part)
        place |= dict.fromkeys(part, shard)
    if index:
        put(folder, **{"model.safetensors.index": {"weight_map": place}})
    return place


@pytest.mark.parametrize("stray", [
    "model-fp16.safetensors", "model-00003-of-00003.safetensors",
    "model-00000-of-00002.safetensors", "model-00002-of-00002-old.safetensors"])
def test_the_index_says_which_shards_are_the_model_and_strays_are_named(stray, tmp_path):
    tensors = make_tensors(GPT2)
    make_shards(tmp_path, tensors, 2)
    save_tensors(f"{tmp_path}/{stray}", {name: x + 1 for name, x in tensors.items()})
    assert stray in printed(load, tmp_path)
    assert_holds(load(tmp_path), GPT2, tensors)
    os.remove(tmp_path / "model.safetensors.index.json")
    assert "index.json" in refusal(load, tmp_path), "nobody can say which one is the model"


def test_a_tensor_is_read_from_the_shard_that_the_index_names(tmp_path):
    tensors = make_tensors(GPT2)
    place = make_shards(tmp_path, tensors, 2)
    old = {name: x - 1 for name, x in tensors.items() if place[name] == max(place.values())}
    first = {name: x for name, x in tensors.items() if place[name] == min(place.values())}
    save_tensors(f"{tmp_path}/{min(place.values())}", first | old)
    assert_holds(load(tmp_path), GPT2, tensors)
    name = max(place)
    put(tmp_path, **{"model.safetensors.index": {
        "weight_map": place | {"transformer.ln_9.weight": place[name]}}})
    assert_refused("transformer.ln_9.weight", load, tmp_path)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_shard_that_is_missing_is_named(lost, index, tmp_path):
    make_shards(tmp_path, make_tensors(GPT2), 3, index)
    name = f"model-0000{lost}-of-00003.safetensors"
    os.remove(tmp_path / name)
    assert_refused(name, load, tmp_path)


@pytest.mark.parametrize("content", [
    {"weight_map": {"a": "../m.safetensors"}}, {"weight_map": {"a": 3}}, {}, []])
def test_an_index_that_is_none_is_one_line(content, tmp_path):
    make_shards(tmp_path, make_tensors(GPT2), 2)
    put(tmp_path, **{"model.safetensors.index": content})
    assert "index.json" in refusal(load, tmp_path)


def test_an_adapter_says_that_it_is_one(tmp_path):
    put(tmp_path, adapter_config={"peft_type": "LORA", "base_model_name_or_path": "gpt2"})
    save_tensors(f"{tmp_path}/adapter_model.safetensors", {"a": torch.zeros(1)})
    assert_refused("adapter", fetch, str(tmp_path))
    assert load(write(tmp_path, GPT2)), "a merged model may keep that file"


def test_tensors_say_whether_the_head_is_tied(tmp_path):
    tensors = make_tensors(GPT2)        # config.json says tied
    for factor in (1, 2):
        head = factor * tensors["transformer.wte.weight"]
        model = load(write(tmp_path, GPT2, tensors | {"lm_head.weight": head}))
        assert torch.equal(model.lm_head.weight, head)
        assert model.config.tied == (model.lm_head.weight is model.wte.weight) == (factor == 1)


# layout | what its config.json says instead | what the refusal names, if not that key
REFUSALS = r"""
gpt2 | "architectures": ["GPT2ForSequenceClassification"] | GPT2ForSequenceClassification
gpt2 | "model_type": "mixtral" | mixtral
gpt2 | "activation_function": "relu"
gpt2 | "scale_attn_by_inverse_layer_idx": true
gpt2 | "scale_attn_weights": false
gpt2 | "add_cross_attention": true
gpt2 | "n_head": null
gpt2 | "num_attention_heads": 3
gpt2 | "n_head": 5
gpt2 | "n_positions": 64 | wpe.weight
gpt2 | "n_layer": 1000000000 | 1000000000 layers
gpt2 | "n_layer": 1 | h.1.
gpt2 | "tie_word_embeddings": false
gpt_neo | "tie_word_embeddings": false
llama one kv head, tied | "tie_word_embeddings": null | lm_head.weight
llama | "attention_bias": true
llama | "mlp_bias": true
qwen3 | "attention_bias": true
gpt2 | "quantization_config": {"bits": 4}
gpt_neo | "attention_types": [[["global"], 2]]
gpt_neo | "attention_types": null
gpt_neo | "attention_layers": ["global", "global", "global"]
gpt_neo | "window_size": 0
llama | "rope_scaling": {"type": "linear", "factor": 2.0} | 'linear'
llama | "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5} | partial
llama | "rope_parameters": {"rope_theta": 51.0} | rope_theta
llama 3.2 | "rope_parameters": {"rope_type": "default"} | rope_scaling
llama 3.2 | "original_max_position_embeddings": 4
llama 3.2 | "rope_scaling": {"rope_type": "llama3", "factor": 8.0} | low_freq_factor
llama | "rope_scaling": "x" | config.json
llama | "hidden_act": "gelu"
qwen2 | "use_sliding_window": true
qwen3 | "layer_types": ["full_attention", "sliding_attention"]
qwen3 | "head_dim": null | q_proj.weight
"""
REFUSED = [line.split(" | ") for line in REFUSALS.strip().splitlines()]
REFUSED.append(["llama", f'"rope_scaling": {json.dumps(LLAMA3 | dict(low_freq_factor=3))}',
                "low_freq_factor"])


@pytest.mark.parametrize("layout, change, name", [
    (row[0], row[1], row[2] if row[2:] else row[1].split('"')[1]) for row in REFUSED])
def test_model_that_would_compute_something_else_is_refused_in_one_line_that_names_why(
        layout, change, name, tmp_path):
    c, _ = LAYOUTS[layout]
    folder = write(tmp_path, c | json.loads("{" + change + "}"), make_tensors(c))
    assert_refused(name, load, folder)


def test_odd_tensors_are_named(tmp_path):
    for name, x in ((r"a\nb", torch.zeros(1)), ("layers.1.mlp.up_proj.weight", torch.zeros(10, 17)),
                    ("norm.weight", torch.zeros(16, dtype=torch.int8))):
        odd = {"model." + name.replace(r"\n", "\n"): x}
        folder = write(tmp_path, LLAMA, make_tensors(LLAMA) | odd)
        assert_refused(name, load, folder)


def test_what_is_no_published_model_is_named_and_no_pickle_is_opened(tmp_path):
    put(tmp_path, config=LLAMA)
    torch.save(make_tensors(LLAMA), tmp_path / "pytorch_model.bin")
    assert_refused("pytorch_model.bin", load, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x02half a file")
    assert_refused("model.safetensors", load, tmp_path)
    for text in ("[]", "{", "{}"):
        (tmp_path / "config.json").write_text(text)
        assert_refused(str(tmp_path), load, tmp_path)


def test_names_are_downloaded_by_huggingface_hub(monkeypatch):
    for name in ("no/such/folder", "../up", "a b", ""):
        assert_refused(name, fetch, name)
    assert_refused(__file__, fetch, __file__)
    seen = []
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda name, **how: seen.append((name, how)))
    fetch("gpt2")
    fetch("unitary/toxic@refs/pr/2")
    assert [(name, how["revision"]) for name, how in seen] == [
        ("gpt2", None), ("unitary/toxic", "refs/pr/2")]
    files = seen[0][1]["allow_patterns"]
    assert not any(name.endswith((".bin", ".pt", "*")) for name in files)
    assert "model.safetensors.index.json" in files


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
        assert_refused("rope_freqs.weight", load, written(odd))


def test_gguf_that_is_no_whole_model_says_what_it_is(tmp_path):
    tensors = make_tensors(LLAMA)
    half = dict(list(tensors.items())[:5])
    for held, metadata, name in (
            (half, {"split.no": 0, "split.count": 2}, "part 1 of 2"),
            (half, {"split.no": 2, "split.count": 3}, "part 3 of 3"),
            (half, {"general.type": "adapter", "adapter.type": "lora"}, "adapter"),
            ({}, {}, "vocabulary"),
            ({"model.norm.weight": tensors["model.norm.weight"]}, {}, "token_embd.weight")):
        path = write_gguf(tmp_path / "m.gguf", LLAMA, held, **metadata)
        assert_refused((path, name), load, path)


# what the metadata of a Llama says instead
GGUF_REFUSALS = """
"general.architecture": "gemma"
"llama.rope.scaling.type": "yarn"
"llama.rope.scale_linear": 2.0
"llama.rope.scaling.factor": 2.0
"llama.rope.dimension_count": 2
"llama.block_count": 1000000000
"llama.attention.causal": false
"""


def test_gguf_of_another_kind_or_cut_short_is_one_line(tmp_path, monkeypatch):
    for line in GGUF_REFUSALS.strip().splitlines():
        changes = json.loads("{" + line + "}")
        path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), **changes)
        assert_refused((path, str(*changes.values())), load, path)
    os.truncate(path, 300)
    assert_refused(path, load, path)
    head = b"GGUF" + pack("<IQQ", 3, 0, 1) + pack("<Q", 1) + b"k" + pack("<I", 9)     # an array
    for kind in (0, 6, 8, 9):
        (tmp_path / "m.gguf").write_bytes(head + pack("<IQ", kind, 2 ** 61))
        assert_refused(path, load, path)        # an array of 2^61 numbers
    monkeypatch.setattr(Reader, "left", 1000)
    (tmp_path / "m.gguf").write_bytes(head + pack("<IQ", 6, 2000) + bytes(8000))
    assert_refused(path, load, path)            # more metadata than anybody would wait for


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


TRAINED = {
    "cut": {"truncation": dict(direction="Right", max_length=3, strategy="LongestFirst", stride=0)},
    "cut on the left": {
        "truncation": dict(direction="Left", max_length=2, strategy="LongestFirst", stride=0)},
    "padded on the left": {"padding": dict(
        strategy={"Fixed": 24}, direction="Left", pad_id=EOT, pad_type_id=0, pad_token=MARKS[0],
        pad_to_multiple_of=None)},
    "padded to eight": {"padding": dict(
        strategy="BatchLongest", direction="Right", pad_id=EOT, pad_type_id=0, pad_token=MARKS[0],
        pad_to_multiple_of=8)},
    "merges left out": {}}


@pytest.mark.parametrize("kept", TRAINED)
def test_what_a_training_left_in_tokenizer_json_changes_no_prompt(kept, tmp_path):
    folder = write_chat(tmp_path)
    plain = from_folder(folder)
    content = read_json(f"{folder}/tokenizer.json")
    content["model"] |= {"dropout": 0.9} if not TRAINED[kept] else {}
    put(folder, tokenizer=content | TRAINED[kept])
    tokenizer = from_folder(folder)
    assert tokenizer.before_text == plain.before_text == [EOT]
    chat = [dict(role="user", content="Where is the other theatre?")]
    assert tokenizer.encode_chat(chat, "x") == plain.encode_chat(chat, "x")
    for text in TEXTS:
        assert tokenizer.encode_ordinary(text) == plain.encode_ordinary(text)


def write_two_files(folder, **contents):
    """A chat model's tokenizer as vocab.json and merges.txt: 2000 tokens of GPT-2."""
    own_core(2000).model.save(str(folder))
    put(folder, **contents)
    return str(folder)


IN_ADDED = {"added_tokens": {MARKS[1]: START, MARKS[2]: END},
            "tokenizer_config": {"eos_token": MARKS[2]}}
IN_DECODER = {"tokenizer_config": {"eos_token": MARKS[2], "added_tokens_decoder": {
    str(EOT + i): dict(content=token, special=True) for i, token in enumerate(MARKS)}}}
IN_EXTRA = {"tokenizer_config": {"eos_token": MARKS[2], "additional_special_tokens": MARKS[1:]}}
IN_MAP = {"tokenizer_config": {}, "special_tokens_map": {
    "eos_token": {"content": MARKS[2]}, "additional_special_tokens": [MARKS[1], MARKS[2]]}}


@pytest.mark.parametrize("where", [IN_ADDED, IN_DECODER, IN_EXTRA, IN_MAP],
                         ids=["added_tokens", "decoder", "extra", "map"])
def test_tokens_that_a_folder_adds_are_those_of_tokenizer_json(where, tmp_path):
    os.makedirs(tmp_path / "one")
    os.makedirs(tmp_path / "two")
    one = from_folder(write_chat(tmp_path / "one"))
    if where in (IN_EXTRA, IN_MAP):     # numbered in their order: the end token is named first
        one.core = own_core(2000)
        one.core.add_special_tokens([MARKS[2], MARKS[1]])
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE}
    two = from_folder(write_two_files(tmp_path / "two", **where | {
        "tokenizer_config": config | where["tokenizer_config"]}))
    assert two.eot_token == two.core.token_to_id(MARKS[2])
    for text in TEXTS:
        assert two.encode_ordinary(text) == one.encode_ordinary(text)
        assert two.encode_marked(text) == one.encode_marked(text)
    chat = [dict(role="user", content="Hi"), dict(role="system", content="no I'M")]
    assert two.encode_chat(chat, "x") == one.encode_chat(chat, "x")
    assert set(MARKS) <= two.special_tokens_set


def test_an_added_word_is_one_token_in_every_text_and_ids_that_do_not_fit_are_refused(tmp_path):
    contents = {"tokenizer_config": dict(tokenizer_class="GPT2Tokenizer", eos_token=MARKS[0])}
    words = from_folder(write_two_files(tmp_path, added_tokens={"<mol>": 2007}, **contents))
    assert words.encode_ordinary("a<mol>")[-1] == 2007, "it is no special token"
    put(tmp_path, added_tokens={"a": 2005})
    assert_refused("'a'", from_folder, str(tmp_path))


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPT2TokenizerFast", "RobertaTokenizer"])
@pytest.mark.parametrize("one_file", [True, False])
def test_a_space_before_a_text_is_put_there_if_the_config_says_so(kind, one_file, tmp_path):
    folder = write_chat(tmp_path) if one_file else write_two_files(tmp_path)
    for value in (True, False):
        put(folder, tokenizer_config=dict(tokenizer_class=kind, eos_token=MARKS[0],
                                          add_prefix_space=value))
        tokenizer = from_folder(folder)
        for text in ("the cat's  hat\n", "Hi", "\nx", " the"):
            spaced = " " + text if value and text[0] != " " else text
            assert tokenizer.encode_ordinary(text) == load_tokenizer(2000).encode_ordinary(spaced)


def test_a_begin_token_is_put_before_a_text_if_the_config_says_so(tmp_path):
    for says, before in ((True, [EOT]), (False, [])):
        put(tmp_path, tokenizer_config=dict(
            tokenizer_class="GPT2Tokenizer", bos_token=MARKS[0], eos_token=MARKS[0],
            add_bos_token=says))
        assert from_folder(write_two_files(tmp_path)).before_text == before


def test_qwens_two_files_are_cut_as_qwens(tmp_path):
    """Its cut puts "'M" together, line ends apart, and a letter and its accent into one."""
    config = dict(tokenizer_class="Qwen2Tokenizer", eos_token=MARKS[0])
    qwen = from_folder(write_two_files(tmp_path, tokenizer_config=config))
    core = bpe_core(read_json(f"{tmp_path}/vocab.json"),
                    [tuple(line.split(" ")) for line in
                     (tmp_path / "merges.txt").read_text().splitlines()[1:]],
                    GGUF_PATTERNS["qwen2"])
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text)
        assert qwen.encode_ordinary(text) == core.encode(composed, add_special_tokens=False).ids
    gpt2 = from_folder(write_two_files(tmp_path, tokenizer_config=config | {
        "tokenizer_class": "GPT2Tokenizer"}))
    assert gpt2.encode_ordinary("x\n\n\ny 12") != qwen.encode_ordinary("x\n\n\ny 12")


def test_a_tokenizer_that_cannot_be_read_says_what_it_is(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert_refused("sentencepiece", from_folder, str(tmp_path))
    put(tmp_path, vocab={"a": 0})
    assert_refused("merges.txt", from_folder, str(tmp_path))
    write_two_files(tmp_path, tokenizer_config=dict(tokenizer_class="BertTokenizer"))
    assert_refused("BertTokenizer", from_folder, str(tmp_path))
    put(tmp_path, tokenizer_config=dict(tokenizer_class="GPT2Tokenizer"),
        generation_config=dict(eos_token_id="301"))
    assert_refused("eos_token_id", from_folder, str(tmp_path))


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
    assert_refused("2001", tokenizer.check_fit, END)     # it ends completions
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
    assert_refused("deepseek", tokenizer_of, gguf_tokenizer(tmp_path / "m.gguf", "deepseek"))
    folder = write_chat(tmp_path, eos_token=None)
    assert_refused("end token", tokenizer_of, folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(f"{tmp_path}/tokenizer.json")
    assert_refused(folder, tokenizer_of, folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert_refused(folder, tokenizer_of, folder)
    chat_core().save(f"{tmp_path}/tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = "##"        # the package panics
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert_refused(folder, tokenizer_of, folder)
    os.remove(tmp_path / "tokenizer.json")
    assert_refused(folder, tokenizer_of, folder)


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
    def refuses(said, name, **shape):
        assert_refused(said, export, small_gpt(**shape), f"{tmp_path}/{name}", load_tokenizer(300))

    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    refuses("there", "there")
    rotary = dict(rope_base=100.0, rms=True, swiglu=True)
    qwen3 = dict(rms=True, swiglu=True, bias=False, qkv_bias=False, qk_norm=True)   # no rope_base
    for shape in (dict(causal=False), dict(rope_base=100.0), rotary,
                  qwen3, dict(window=3, local_layers=(0,)), dict(attn_scale=0.5, qkv_bias=False)):
        refuses((), "out", **shape)
    monkeypatch.setattr(extras.hub.export, "save_tensors", full)
    refuses("No space left", "out")
    assert os.listdir(tmp_path) == ["there"]


def test_the_tests_install_what_users_install():
    pins = {}
    for name in ("requirements-dev.txt", "extras/hub/requirements.txt"):
        with open(f"{ROOT}/{name}") as f:
            lines = [line.split("#")[0].strip() for line in f]
        pins[name] = {line for line in lines if "==" in line}
    assert pins["extras/hub/requirements.txt"] <= pins["requirements-dev.txt"]
