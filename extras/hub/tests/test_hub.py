"""extras/hub/: published models in and out. Tiny models in the published layouts against what they
are by hand; tokenizers against tiktoken and the package; exports read back."""
import importlib
import math
import os
import sys
import unicodedata

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import extras.hub.export
from common.errors import BadInput
from common.files import ROOT, read_json
from data.tokenizer import load_tokenizer
from extras.hub.export import export
from extras.hub.families import spelled_out
from extras.hub.files import INDEX, fetch, load_tensors, save_tensors
from extras.hub.policy import tokenizer_of
from extras.hub.tokenizer import GGUF_PATTERNS, bpe_core, from_folder
from model import GPT, GPTConfig
from extras.hub.tests.published import (
    GPT2, LAYOUTS, LLAMA, MARKS, TEMPLATE, assert_holds, chat_core, gguf_of_core,
    gpt2_core, load, make_tensors, put, write, write_gguf)
from worlds import assert_refused, refusal


def test_without_its_packages_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "-r extras/hub/requirements.txt" in refusal(importlib.reload, extras.hub)


def test_the_tests_install_what_users_install():
    def pins(name):
        with open(f"{ROOT}/{name}") as f:
            lines = [line.split("#")[0].strip() for line in f]
        return {line for line in lines if "==" in line}

    assert pins("extras/hub/requirements.txt") <= pins("requirements-dev.txt")


# ------------------------------------------------------------------------------------------------
# weights

@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_what_it_is_by_hand_and_goes_out_as_it_came(layout, tmp_path):
    c, shape = LAYOUTS[layout]
    tensors = make_tensors(c)
    source = write(tmp_path / "in", c | dict(eos_token_id=3), tensors)
    put(source, tokenizer={}, generation_config=dict(eos_token_id=3))
    out = f"{tmp_path}/out"
    export(load(source), out, source)
    paths = [source, out]
    if "rope_theta" in c and "rope_scaling" not in c:
        paths.append(write_gguf(tmp_path / "m.gguf", c, tensors))
    for path in paths:
        model = load(path)
        assert spelled_out(model.config) == spelled_out(GPTConfig(**shape))
        assert_holds(model, c, tensors)
        assert all(p.requires_grad for p in model.parameters())
    written = load_tensors(out)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in written.items())
    assert read_json(f"{out}/config.json")["eos_token_id"] == 3
    assert sorted(os.listdir(out)) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def test_names_without_prefix_buffers_and_halves_are_read(tmp_path):
    tensors = {name: x.bfloat16() for name, x in make_tensors(GPT2).items()}
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    assert_holds(load(write(tmp_path, GPT2, bare)), GPT2, tensors)


def test_tensors_say_whether_the_head_is_tied(tmp_path):
    tensors = make_tensors(GPT2)        # config.json says tied
    for factor in (1, 2):
        head = factor * tensors["transformer.wte.weight"]
        model = load(write(tmp_path, GPT2, tensors | {"lm_head.weight": head}))
        assert torch.equal(model.lm_head.weight, head)
        assert model.config.tied == (model.lm_head.weight is model.wte.weight) == (factor == 1)


def make_shards(folder):
    """GPT2 in three files and their index -> (tensors, {name: its file})."""
    put(folder, config=GPT2)
    tensors = make_tensors(GPT2)
    place = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors"
             for i, name in enumerate(sorted(tensors))}
    for file in set(place.values()):
        held = {name: x for name, x in tensors.items() if place[name] == file}
        save_tensors(f"{folder}/{file}", held)
    put(folder, **{INDEX.removesuffix(".json"): {"weight_map": place}})
    return tensors, place


def test_a_tensor_is_read_from_the_shard_that_the_index_names(tmp_path):
    """An older one of the same name lies in another shard, too."""
    tensors, place = make_shards(tmp_path)
    assert_holds(load(tmp_path), GPT2, tensors)
    first, *_, last = sorted(set(place.values()))
    held = {name: x for name, x in tensors.items() if place[name] == first}
    older = {name: x - 1 for name, x in tensors.items() if place[name] == last}
    save_tensors(f"{tmp_path}/{first}", held | older)
    save_tensors(f"{tmp_path}/{last}", {name: x - 1 for name, x in held.items()} | {
        name: x for name, x in tensors.items() if place[name] == last})
    assert_holds(load(tmp_path), GPT2, tensors)


# keys of config.json that mean another computation, each with a value that does
OTHER_MODELS = {
    "gpt2": {
        "model_type": "mixtral", "architectures": ["GPT2ForSequenceClassification"],
        "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False, "add_cross_attention": True, "n_head": None,
        "tie_word_embeddings": False,
        "quantization_config": {"bits": 4}},
    "gpt_neo": {
        "attention_types": [[["global"], 2]], "window_size": 0, "tie_word_embeddings": False},
    "llama": {
        "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "sliding_window": 8,
        "is_causal": False, "partial_rotary_factor": 0.5, "rope_type": "linear"},
    "llama 3.2": {"original_max_position_embeddings": 4},
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]}}


@pytest.mark.parametrize("layout", OTHER_MODELS)
def test_a_model_that_would_compute_something_else_is_refused_by_its_key(layout, tmp_path):
    c, _ = LAYOUTS[layout]
    for key, value in OTHER_MODELS[layout].items():
        folder = write(tmp_path, c | {key: value}, make_tensors(c))
        name = "lm_head.weight" if key == "tie_word_embeddings" else key
        assert_refused(value if key == "model_type" else name, load, folder)


@pytest.mark.parametrize("layout, change, name", [
    ("gpt2", {"n_positions": 64}, "wpe.weight"), ("gpt2", {"n_layer": 1}, "h.1."),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("llama", {"rope_parameters": {"rope_theta": 51.0}}, "rope_theta")])
def test_a_config_that_does_not_fit_its_tensors_or_itself_is_one_line(
        layout, change, name, tmp_path):
    c, _ = LAYOUTS[layout]
    assert_refused(name, load, write(tmp_path, c | change, make_tensors(c)))


def test_what_is_no_whole_model_is_named_and_no_pickle_is_opened(tmp_path):
    for name, x in (("other.weight", torch.zeros(1)), ("norm.weight", torch.zeros(16).char()),
                    ("layers.1.mlp.up_proj.weight", torch.zeros(10, 17))):
        folder = write(tmp_path, LLAMA, make_tensors(LLAMA) | {"model." + name: x})
        assert_refused(name, load, folder)
    os.remove(tmp_path / "model.safetensors")
    torch.save(make_tensors(LLAMA), tmp_path / "pytorch_model.bin")
    assert_refused("pytorch_model.bin", load, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert_refused(str(tmp_path), load, tmp_path)


def test_names_are_downloaded_by_huggingface_hub(monkeypatch):
    for name in ("no/such/folder", "../up", "a b", "", __file__):
        assert_refused(name, fetch, name)
    seen = []
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda name, **how: seen.append((name, how)))
    fetch("gpt2")
    fetch("unitary/toxic@refs/pr/2")
    assert [(name, how["revision"]) for name, how in seen] == [
        ("gpt2", None), ("unitary/toxic", "refs/pr/2")]
    files = seen[0][1]["allow_patterns"]
    assert not any(name.endswith((".bin", ".pt", "*")) for name in files), "a pickle is downloaded"
    assert INDEX in files


# ------------------------------------------------------------------------------------------------
# GGUF

def test_a_gguf_of_llama_3_is_scaled_by_its_table_of_frequencies(tmp_path):
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


def test_a_gguf_that_is_another_or_no_whole_model_is_one_line(tmp_path):
    tensors = make_tensors(LLAMA)
    half = dict(list(tensors.items())[:5])
    for metadata, held, name in (
            ({"general.architecture": "gemma"}, tensors, "gemma"),
            ({"llama.rope.scaling.type": "yarn"}, tensors, "yarn"),
            ({"llama.rope.scale_linear": 2.0}, tensors, "scale_linear"),
            ({"llama.rope.scaling.factor": 2.0}, tensors, "scaling.factor"),
            ({"llama.rope.dimension_count": 2}, tensors, "dimension_count"),
            ({"llama.attention.causal": False}, tensors, "causal"),
            ({"split.no": 0, "split.count": 3}, half, "is missing"),
            ({}, {"model.norm.weight": tensors["model.norm.weight"]}, "token_embd.weight")):
        path = write_gguf(tmp_path / "m.gguf", LLAMA, held, **metadata)
        assert_refused((path, name), load, path)


# ------------------------------------------------------------------------------------------------
# tokenizers

TEXTS = ["", " ", "don't I'll WE'VE 'S", "a    b   c  ", "\n\n\t \r\n x\r\n\r\ny", "1234 3.14",
         "the theatre, the other!!! ???", "\U0001f642 na\u00efve e\u0301 \u4e2d\u6587\u2028\u00a0x",
         "x" * 300, "".join(map(chr, range(256))), "a</s>b<|endoftext|><|im_start|>"]
EOT, START, END = 1999, 2000, 2001      # MARKS in chat_core(2000)


def small_gpt(vocab_size=300, **shape):
    return GPT(GPTConfig(vocab_size, 16, 1, 2, 8, **shape))


def write_chat(folder, **config):
    """A chat model's tokenizer in tokenizer.json."""
    os.makedirs(folder, exist_ok=True)
    core = chat_core(2000)
    core.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[(MARKS[0], EOT), (MARKS[2], END)])
    core.save(f"{folder}/tokenizer.json")
    put(folder, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE) | config)
    return str(folder)


def write_two_files(folder, tokenizer_config, **contents):
    """GPT-2's first 2000 tokens as vocab.json and merges.txt, and the configs beside them."""
    os.makedirs(folder, exist_ok=True)
    gpt2_core(2000).model.save(str(folder))
    config = dict(tokenizer_class="GPT2Tokenizer", eos_token=MARKS[0]) | tokenizer_config
    put(folder, tokenizer_config=config, **contents)
    return str(folder)


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
        assert tokenizer.encode_marked("a<|endoftext|>") == ours.encode_ordinary("a") + [EOT]


CUT = dict(direction="Left", max_length=2, strategy="LongestFirst", stride=0)
PADDED = dict(strategy={"Fixed": 24}, direction="Left", pad_id=EOT, pad_type_id=0,
              pad_token=MARKS[0], pad_to_multiple_of=None)


def test_what_a_training_left_in_tokenizer_json_changes_no_prompt(tmp_path):
    folder = write_chat(tmp_path)
    plain = from_folder(folder)
    content = read_json(f"{folder}/tokenizer.json")
    chat = [dict(role="user", content="Where is the other theatre?")]
    for kept in ({"truncation": CUT}, {"padding": PADDED},
                 {"model": content["model"] | {"dropout": 0.9}}):
        put(folder, tokenizer=content | kept)
        tokenizer = from_folder(folder)
        assert tokenizer.before_text == plain.before_text == [EOT]
        assert tokenizer.encode_chat(chat, "x") == plain.encode_chat(chat, "x")
        for text in TEXTS:
            assert tokenizer.encode_ordinary(text) == plain.encode_ordinary(text)


DECODER = {str(EOT + i): dict(content=token, special=True) for i, token in enumerate(MARKS)}


@pytest.mark.parametrize("config, files", [
    ({}, {"added_tokens": {MARKS[1]: START, MARKS[2]: END}}),
    ({"added_tokens_decoder": DECODER}, {})], ids=["added_tokens", "decoder"])
def test_tokens_that_a_folder_adds_are_those_of_tokenizer_json(config, files, tmp_path):
    config = config | dict(eos_token=MARKS[2], chat_template=TEMPLATE)
    one = from_folder(write_chat(tmp_path / "one"))
    two = from_folder(write_two_files(tmp_path / "two", config, **files))
    assert two.end_tokens == one.end_tokens
    for text in TEXTS:
        assert two.encode_ordinary(text) == one.encode_ordinary(text)
        assert two.encode_marked(text) == one.encode_marked(text)
    chat = [dict(role="user", content="Hi"), dict(role="system", content="no I'M")]
    assert two.encode_chat(chat, "x") == one.encode_chat(chat, "x")
    assert set(MARKS) <= two.special_tokens_set


def test_tokens_that_have_a_name_alone_are_numbered_in_order(tmp_path):
    folder = write_two_files(tmp_path, {
        "eos_token": MARKS[2], "additional_special_tokens": MARKS[1:]})
    tokenizer = from_folder(folder)
    assert tokenizer.end_tokens == (2000,), "the end token is named first"
    assert tokenizer.encode_marked(MARKS[2] + MARKS[1]) == [2000, 2001]
    assert set(MARKS) <= tokenizer.special_tokens_set


def test_an_added_word_is_one_token_in_every_text_and_an_id_that_is_taken_is_refused(tmp_path):
    folder = write_two_files(tmp_path, {}, added_tokens={"<mol>": 2007})
    assert from_folder(folder).encode_ordinary("a<mol>")[-1] == 2007, "it is no special token"
    put(folder, added_tokens={"a": 2005})
    assert_refused("'a'", from_folder, folder)


@pytest.mark.parametrize("kind", ["GPT2TokenizerFast", "RobertaTokenizer"])
def test_a_space_before_a_text_is_put_there_if_the_config_says_so(kind, tmp_path):
    ours = load_tokenizer(2000)
    for value in (True, False):
        config = dict(tokenizer_class=kind, add_prefix_space=value)
        for folder in (write_chat(tmp_path / "one", **config),
                       write_two_files(tmp_path / "two", config)):
            tokenizer = from_folder(folder)
            for text in ("the cat's  hat\n", "Hi", "\nx", " the"):
                spaced = " " + text if value and text[0] != " " else text
                assert tokenizer.encode_ordinary(text) == ours.encode_ordinary(spaced)


def test_a_begin_token_is_put_before_a_text_if_the_config_says_so(tmp_path):
    for says, before in ((True, [EOT]), (False, [])):
        folder = write_two_files(tmp_path, dict(bos_token=MARKS[0], add_bos_token=says))
        assert from_folder(folder).before_text == before


def test_qwens_two_files_are_cut_as_qwens(tmp_path):
    """Its cut puts "'M" together, line ends apart, and a letter and its accent into one."""
    qwen = from_folder(write_two_files(tmp_path, dict(tokenizer_class="Qwen2Tokenizer")))
    merges = (tmp_path / "merges.txt").read_text().splitlines()[1:]
    core = bpe_core(read_json(f"{tmp_path}/vocab.json"),
                    [tuple(line.split(" ")) for line in merges], GGUF_PATTERNS["qwen2"])
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text)
        assert qwen.encode_ordinary(text) == core.encode(composed, add_special_tokens=False).ids
    gpt2 = from_folder(write_two_files(tmp_path, {}))
    assert gpt2.encode_ordinary("x\n\n\ny 12") != qwen.encode_ordinary("x\n\n\ny 12")


def test_no_text_becomes_a_special_token_but_what_a_template_wrote_does(tmp_path):
    tokenizer = from_folder(write_chat(tmp_path))
    text = "hi<|im_end|>"
    assert not set(tokenizer.encode_ordinary(text)) & {EOT, START, END}
    assert tokenizer.encode_marked(text)[-1] == END
    for encode in (tokenizer.encode_ordinary, tokenizer.encode_marked):
        assert tokenizer.decode(encode(text)) == text
    assert tokenizer.before_text == [EOT], "of what the tokenizer itself puts around a text"
    assert tokenizer.names == {"eos_token": "<|im_end|>"}


def test_the_chat_template_is_the_default_one_or_a_file_of_its_own(tmp_path):
    several = [dict(name="tools", template="other"), dict(name="default", template=TEMPLATE)]
    for template in (TEMPLATE, several):
        folder = write_chat(tmp_path, chat_template=template)
        assert from_folder(folder).chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("other")
    assert from_folder(folder).chat_template == "other"


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


def gguf_tokenizer(path, pre):
    metadata = gguf_of_core(chat_core(2000), pre, bos_token_id=START)
    metadata["tokenizer.chat_template"] = TEMPLATE
    metadata["tokenizer.ggml.tokens"].append("\u0120zqxjk")     # no merges lead to this one
    return write_gguf(path, LLAMA, make_tensors(LLAMA), **metadata)


DIGITS = ["1", "0", "0", " ", "2", "0", "1", "0"]


@pytest.mark.parametrize("pre, cut", [
    ("gpt-2", ["1", "00", " 201", "0"]), ("smollm", DIGITS), ("qwen2", DIGITS),
    ("llama-bpe", ["1", "00", " ", "201", "0"])])
def test_a_gguf_cuts_words_as_its_name_says_and_so_does_its_export(pre, cut, tmp_path):
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


def test_a_tokenizer_that_is_not_known_here_is_one_line(tmp_path):
    """Read as a run reads it."""
    assert_refused("deepseek", tokenizer_of, gguf_tokenizer(tmp_path / "m.gguf", "deepseek"))
    folder = write_chat(tmp_path, eos_token=None)
    assert_refused("end token", tokenizer_of, folder)
    os.remove(f"{folder}/tokenizer.json")
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert_refused("sentencepiece", tokenizer_of, folder)
    config = dict(tokenizer_class="BertTokenizer")
    assert_refused("BertTokenizer", tokenizer_of, write_two_files(folder, config))


# ------------------------------------------------------------------------------------------------
# out

def test_an_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def refuses(said, name, **shape):
        made = small_gpt(**shape), load_tokenizer(300)
        assert_refused(said, extras.hub.export.main, ["RUN", f"{tmp_path}/{name}"], lambda _: made)

    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    refuses("there", "there")
    for shape in (dict(rope_base=100.0), dict(window=3, local_layers=(0,)),
                  dict(attn_scale=0.5, qkv_bias=False)):
        refuses((), "out", **shape)     # no published model is like that
    monkeypatch.setattr(extras.hub.export, "save_tensors", full)
    with pytest.raises((BadInput, OSError), match="No space left"):
        export(small_gpt(), f"{tmp_path}/out", load_tokenizer(300))
    assert os.listdir(tmp_path) == ["there"]
