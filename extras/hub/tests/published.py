"""Tiny models in exactly the layouts that they are published in, and what they are by hand: GPT-2,
GPT-Neo, Llama, Qwen2, Qwen3, RoBERTa; folders and GGUF files."""
import functools
import itertools
import json
import os
from types import SimpleNamespace

import gguf
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

import worlds
from common.files import read_json, write_json
from data.tokenizer import load_tokenizer
from extras.hub.export import export, merged_tensors, gpt2_tokenizer
from extras.hub.families import config_from_json, published
from extras.hub.files import save_tensors
from extras.hub.policy import model_of
from extras.hub.roberta import NAMES, Roberta
from model import GPT, GPTConfig
from worlds import generator_of, seed_of

V, C, H = 23, 12, 4     # tokens, channels, heads
GPT2 = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=V, n_positions=32,
            n_embd=C, n_layer=2, n_head=H, activation_function="gelu_new", layer_norm_epsilon=1e-5)
NEO = dict(architectures=["GPTNeoForCausalLM"], model_type="gpt_neo", vocab_size=V,
           max_position_embeddings=32, hidden_size=C, num_layers=3, num_heads=H, window_size=3,
           attention_types=[[["global", "local"], 1], [["local"], 1]],
           intermediate_size=9, activation_function="gelu_new", layer_norm_epsilon=1e-5)
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=V,
             max_position_embeddings=32, hidden_size=16, num_hidden_layers=2,
             num_attention_heads=H, num_key_value_heads=2, intermediate_size=10, rms_norm_eps=1e-2,
             rope_theta=50.0, hidden_act="silu")
QWEN2 = LLAMA | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=8,
                     use_sliding_window=False)
QWEN3 = LLAMA | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=6,
                     attention_bias=False)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=2.5,
              original_max_position_embeddings=24)
WITHOUT_THETA = {key: x for key, x in LLAMA.items() if key != "rope_theta"}
# a config.json, and the GPTConfig that it means
IS_GPT2 = dict(vocab_size=V, block_size=32, n_layer=2, n_head=H, n_embd=C)
IS_NEO = IS_GPT2 | dict(n_layer=3, n_inner=9, window=3, local_layers=(1, 2), attn_scale=1.0,
                        qkv_bias=False)
IS_LLAMA = IS_GPT2 | dict(n_embd=16, n_kv_head=2, n_inner=10, norm_eps=1e-2, rope_base=50.0,
                          rms=True, swiglu=True, bias=False, tied=False)
IS_LLAMA3 = IS_LLAMA | dict(head_dim=12, rope_scaling=(8.0, 1.0, 2.5, 24))
IS_QWEN2 = IS_LLAMA | dict(qkv_bias=True)
IS_QWEN3 = IS_LLAMA | dict(head_dim=6, qk_norm=True)
LAYOUTS = {
    "gpt2": (GPT2, IS_GPT2),
    "gpt2 by erf, untied": (
        GPT2 | dict(activation_function="gelu", n_inner=7, tie_word_embeddings=False),
        IS_GPT2 | dict(exact_gelu=True, n_inner=7, tied=False)),
    "gpt_neo": (NEO, IS_NEO),
    "llama": (LLAMA, IS_LLAMA),
    "llama one kv head, tied": (
        LLAMA | dict(num_key_value_heads=1, tie_word_embeddings=True),
        IS_LLAMA | dict(n_kv_head=1, tied=True)),
    "llama 3.2": (
        LLAMA | dict(head_dim=12, tie_word_embeddings=True, rope_scaling=LLAMA3),
        IS_LLAMA3 | dict(tied=True)),
    "llama 3.2 of transformers 5": (
        WITHOUT_THETA | dict(head_dim=12, rope_parameters=LLAMA3 | dict(rope_theta=9.0)),
        IS_LLAMA3 | dict(rope_base=9.0)),
    "qwen2": (
        QWEN2 | dict(tie_word_embeddings=True, layer_types=["full_attention"] * 2),
        IS_QWEN2 | dict(tied=True)),
    "qwen3": (QWEN3, IS_QWEN3)}


# ------------------------------------------------------------------------------------------------
# tensors

def make_tensors(c):
    """{published name: tensor} of the model of a config.json, all of them random."""
    family, config = config_from_json(c, "a test")
    with torch.device("meta"):
        return random_like(merged_tensors(GPT(config), family))


def random_like(tensors, seed=0):
    generator = generator_of(seed)
    return {name: 0.5 * torch.randn(x.shape, generator=generator, device="cpu")
            for name, x in tensors.items()}


def write(folder, c, tensors=None):
    """The folder as it would be published -> its path."""
    os.makedirs(folder, exist_ok=True)
    tensors = make_tensors(c) if tensors is None else tensors
    save_tensors(f"{folder}/model.safetensors", tensors)
    put(folder, config=c)
    return str(folder)


def put(folder, **contents):
    """Write JSON files by their names without the ending."""
    for name, content in contents.items():
        write_json(f"{folder}/{name}.json", content)


def write_gguf(path, c, tensors, **changes):
    """A GGUF file by the package gguf, which knows llama.cpp's names -> its path. The rows of
    Llama's queries and keys are in llama.cpp's order. changes: of the metadata."""
    kind = c["model_type"]
    hs = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    metadata = {
        "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"],
        "attention.head_count": c["num_attention_heads"], "context_length": 32,
        "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": hs,
        "feed_forward_length": c["intermediate_size"], "rope.freq_base": c["rope_theta"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"]}
    metadata = {f"{kind}.{key}": x for key, x in metadata.items()} | changes
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", kind))
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], c["num_hidden_layers"])
    for name, x in tensors.items():
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            x = x.view(-1, 2, hs // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        there = names.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(there, x.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def gguf_of_core(core, pre, **ids):
    """The metadata of a GGUF file that holds the vocabulary of chat_core."""
    model = json.loads(core.to_str())["model"]
    vocabulary = core.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    metadata = dict(model="gpt2", pre=pre, tokens=tokens,
                    token_type=[3 if token in MARKS else 1 for token in tokens],
                    merges=[" ".join(merge) for merge in model["merges"]],
                    eos_token_id=vocabulary[MARKS[2]], eot_token_id=vocabulary[MARKS[0]]) | ids
    return {f"tokenizer.ggml.{key}": x for key, x in metadata.items()}


# there: here, to be replaced one after the other
GPT_NAMES = {
    "transformer.": "", "attn.attention.": "attn.", "attn.out_proj": "attn.c_proj"}
LLAMA_NAMES = {
    "model.layers.": "h.", "model.embed_tokens": "wte", "model.norm": "ln_f",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.": "attn.",
    "attn.o_proj": "attn.c_proj", "mlp.down_proj": "mlp.c_proj"}
STACKED = {"attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
           "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj")}


def assert_holds(model, c, tensors):
    """The model has the published tensors of a config.json, each in its place."""
    w = {}
    for name, x in tensors.items():
        names = GPT_NAMES if c["model_type"].startswith("gpt") else LLAMA_NAMES
        for there, here in names.items():
            name = name.replace(there, here)
        is_turned = c["model_type"] == "gpt2" and name.startswith("h.") and x.dim() == 2
        w[name] = x.T if is_turned else x
    for i, leaf in itertools.product(range(3), ("weight", "bias")):
        for whole, parts in STACKED.items():
            found = [w.pop(f"h.{i}.{part}.{leaf}", None) for part in parts]
            if found[0] is not None:
                w[f"h.{i}.{whole}.{leaf}"] = torch.cat(found)
    w.setdefault("lm_head.weight", w["wte.weight"])
    state = model.state_dict()
    assert state.keys() == w.keys()
    for name, x in state.items():
        assert x.dtype == torch.float32
        assert torch.equal(x, w[name].float()), name


def load(path):
    """The GPT of a published folder or file."""
    return model_of(str(path))


@torch.no_grad()
def logits(model, idx):
    return model.lm_head(model(idx))


# ------------------------------------------------------------------------------------------------
# whole folders: a policy of each family with its tokenizer, a judge, prompts

def make_policy(folder, config):
    torch.manual_seed(seed_of(0))
    export(GPT(config), folder, load_tokenizer(300))
    return folder


def make_gpt2(folder, config=GPTConfig(300, 64, 2, 2, 16)):
    """As openai-community/gpt2 is published: vocab.json and merges.txt, the end token named in
    config.json alone."""
    make_policy(folder, config)
    for name in ("tokenizer.json", "generation_config.json"):
        os.remove(f"{folder}/{name}")
    put(folder, tokenizer_config=dict(model_max_length=config.block_size))
    return folder


MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = GPTConfig(
    vocab_size=320, block_size=64, n_layer=2, n_head=4, n_embd=18, n_kv_head=2, head_dim=6,
    n_inner=24, rms=True, rope_base=50.0, swiglu=True, bias=False, qkv_bias=False, qk_norm=True,
    tied=False)
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{{ '<|im_start|>assistant\\n' }}")


@functools.cache
def json_of_core(size):
    return gpt2_tokenizer(size).to_str()


def gpt2_core(size):
    """A tokenizers.Tokenizer of GPT-2's first tokens, the end token among them."""
    return Tokenizer.from_str(json_of_core(size))       # to read all of GPT-2's is slow


def chat_core(size=300):
    """It with two further marks."""
    core = gpt2_core(size)
    core.add_special_tokens(MARKS)
    return core


def make_chat(folder):
    """As Qwen/Qwen3-0.6B: tokenizer.json, a chat template with an end token of its own, a
    vocabulary padded beyond the tokenizer's."""
    make_policy(folder, CHAT)
    chat_core().save(f"{folder}/tokenizer.json")
    put(folder, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE),
        generation_config=dict(eos_token_id=[299, 301]))
    for name in ("vocab.json", "merges.txt"):
        os.remove(f"{folder}/{name}")
    return folder


def make_roberta(folder, labels=("nothate", "hate"), seed=1, **changes):
    """As facebook/roberta-hate-speech-dynabench-r4-target: its own numbers for GPT-2's tokens."""
    os.makedirs(folder, exist_ok=True)
    gpt2_core(300).model.save(str(folder))
    tokens = sorted(read_json(f"{folder}/vocab.json").keys() - {"<|endoftext|>"})
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *tokens, "<mask>"]
    c = dict(architectures=["RobertaForSequenceClassification"], model_type="roberta",
             vocab_size=len(tokens), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             intermediate_size=24, max_position_embeddings=26, type_vocab_size=1,
             layer_norm_eps=1e-5, hidden_act="gelu", bos_token_id=0, pad_token_id=1, eos_token_id=2,
             id2label={str(i): label for i, label in enumerate(labels)}) | changes
    put(folder, config=c, vocab={token: i for i, token in enumerate(tokens)},
        special_tokens_map=dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>"))
    with torch.device("meta"):
        there = published(Roberta(SimpleNamespace(**c)).state_dict(), c["hidden_size"], NAMES)
    there = {name if "classifier" in name else f"roberta.{name}": x for name, x in there.items()}
    save_tensors(f"{folder}/model.safetensors", random_like(there, seed))
    return str(folder)


def roberta_by_hand(c, tensors, ids):
    """Logits (labels,) of one text in float64, by the published names."""
    w = {name.removeprefix("roberta."): x.double() for name, x in tensors.items()}
    T = len(ids)

    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"],
                            c["layer_norm_eps"])

    x = w["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    x = x + w["embeddings.position_embeddings.weight"][2:2 + T]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        block = f"encoder.layer.{i}"
        heads = [linear(x, f"{block}.attention.self.{name}")
                 .view(T, c["num_attention_heads"], -1).transpose(0, 1)
                 for name in ("query", "key", "value")]
        mixed = F.scaled_dot_product_attention(*heads).transpose(0, 1).reshape(T, -1)
        x = norm(x + linear(mixed, f"{block}.attention.output.dense"),
                 f"{block}.attention.output.LayerNorm")
        y = linear(F.gelu(linear(x, f"{block}.intermediate.dense")), f"{block}.output.dense")
        x = norm(x + y, f"{block}.output.LayerNorm")
    return linear(torch.tanh(linear(x[0], "classifier.dense")), "classifier.out_proj")


def make_prompts(path):
    """As allenai/real-toxicity-prompts: a row has a prompt and a continuation, each with its
    scores, now and then null."""
    worlds.write_rows(path, [
        {"filename": f"{i}.txt", "continuation": {"text": " and so on.", "toxicity": 0.5},
         "prompt": {"text": f"{i} sees the \u201ccat\u201d", "toxicity": (None, 0.1, 0.9)[i % 3]}}
        for i in range(60)])
    return str(path)
