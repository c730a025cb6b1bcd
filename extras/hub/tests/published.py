"""Tiny models in exactly the layouts that they are published in, and what they compute by hand from
the published tensors: GPT-2, GPT-Neo, Llama, Qwen2, Qwen3, RoBERTa; folders and GGUF files."""
import itertools
import json
import math
import os
import random
import shutil
from types import SimpleNamespace

import torch

import extras.hub.policy
import worlds
from common.files import read_json, write_json
from data.tokenizer import GPT2_PATTERN, load_tokenizer
from extras.hub.export import core_of, export, merged_tensors
from extras.hub.families import config_from_json
from extras.hub.files import save_tensors
from extras.hub.tokenizer import bpe_core
from model import GPT, GPTConfig
from worlds import generator_of, seed_of

V, C, H = 23, 12, 4     # tokens, channels, heads
GPT2 = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=V, n_positions=32,
            n_embd=C, n_layer=2, n_head=H, activation_function="gelu_new", layer_norm_epsilon=1e-5)
NEO = dict(architectures=["GPTNeoForCausalLM"], model_type="gpt_neo", vocab_size=V,
           max_position_embeddings=32, hidden_size=C, num_layers=3, num_heads=H, window_size=3,
           attention_types=[[["global", "local"], 1], [["local"], 1]],
           activation_function="gelu_new", layer_norm_epsilon=1e-5)
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=V,
             max_position_embeddings=32, hidden_size=16, num_hidden_layers=2,
             num_attention_heads=H, num_key_value_heads=2, intermediate_size=10, rms_norm_eps=1e-2,
             rope_theta=50.0, hidden_act="silu")
QWEN2 = LLAMA | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=8,
                     use_sliding_window=False)
QWEN3 = LLAMA | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=6,
                     attention_bias=False)
# Llama 3.2's scaling for heads of 12 channels: of six frequencies some stay, some lie between, and
# some become 8 times slower
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=2.5,
              original_max_position_embeddings=24)
WITHOUT_THETA = {key: x for key, x in LLAMA.items() if key != "rope_theta"}
LAYOUTS = {
    "gpt2": GPT2,
    "gpt2 by erf, untied": GPT2 | dict(activation_function="gelu", n_inner=7,
                                       tie_word_embeddings=False),
    "gpt_neo": NEO,
    "gpt_neo by erf": NEO | dict(activation_function="gelu", intermediate_size=9, window_size=1),
    "llama": LLAMA,
    "llama one kv head, tied": LLAMA | dict(num_key_value_heads=1, tie_word_embeddings=True),
    "llama of transformers 5": WITHOUT_THETA | dict(
        head_dim=8, rope_parameters=dict(rope_theta=9.0, rope_type="default")),
    "llama 3.2": LLAMA | dict(head_dim=12, tie_word_embeddings=True, rope_scaling=LLAMA3),
    "llama 3.2 of transformers 5": WITHOUT_THETA | dict(
        head_dim=12, rope_parameters=LLAMA3 | dict(rope_theta=50.0)),
    "qwen2": QWEN2,
    "qwen2 tied": QWEN2 | dict(tie_word_embeddings=True, layer_types=["full_attention"] * 2),
    "qwen3": QWEN3,
    "qwen3 tied": QWEN3 | dict(tie_word_embeddings=True, rope_scaling=LLAMA3)}


# ------------------------------------------------------------------------------------------------
# tensors


def make_tensors(c, seed=0):
    """{published name: tensor} of the model of a config.json, all of them random."""
    family, config = config_from_json(c, "a test")
    with torch.device("meta"):
        model = GPT(config)
    generator = generator_of(seed)
    return {name: 0.4 * torch.randn(x.shape, generator=generator)
            + ("norm" in name or "ln_" in name and name.endswith("weight"))
            for name, x in merged_tensors(model, family).items()}


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


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down"}


def write_gguf(path, c, tensors, kind, **changes):
    """A GGUF file by the package gguf -> its path. The rows of Llama's queries and keys are in
    llama.cpp's order. changes: of the metadata."""
    import gguf
    import numpy

    hs = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    metadata = {
        "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"],
        "attention.head_count": c["num_attention_heads"], "context_length": 32,
        "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": hs,
        "feed_forward_length": c["intermediate_size"], "rope.freq_base": c["rope_theta"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"]}
    writer = gguf.GGUFWriter(path, kind)
    metadata = {f"{kind}.{key}": x for key, x in metadata.items()} | changes
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, x in tensors.items():
        module, leaf = name.rsplit(".", 1)
        block = ""
        if module.startswith("model.layers."):
            _, _, i, module = module.split(".", 3)
            block = f"blk.{i}."
        if kind == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            x = x.view(-1, 2, hs // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
        writer.add_tensor(f"{block}{GGUF_NAMES.get(module, module)}.{leaf}",
                          numpy.ascontiguousarray(x.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def gguf_of_core(core, pre, **ids):
    """The metadata of a GGUF file that holds the vocabulary of chat_core."""
    model = json.loads(core.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3 if token in MARKS else 1 for token in tokens]
    metadata = dict(model="gpt2", pre=pre, tokens=tokens, token_type=kinds,
                    merges=[" ".join(merge) for merge in model["merges"]],
                    eos_token_id=2, eot_token_id=0) | ids
    return {f"tokenizer.ggml.{key}": x for key, x in metadata.items()}


# ------------------------------------------------------------------------------------------------
# logits, by the model and by hand


def load(path):
    """The GPT of a published folder or file."""
    return extras.hub.policy.load(path)[0]


@torch.no_grad()
def logits(model, idx, real=None):
    return model.lm_head(model(idx, real))


NAMES = {   # there: here, to be replaced one after the other
    "transformer.": "", "model.layers.": "h.", "model.embed_tokens": "wte", "model.norm": "ln_f",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "attn.attention.": "attn.",
    "self_attn.": "attn.", "attn.out_proj": "attn.c_proj", "attn.o_proj": "attn.c_proj",
    "mlp.down_proj": "mlp.c_proj"}
STACKED = {"attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
           "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj")}


def logits_by_hand(c, tensors, ids):
    """Logits (T, V) of one text, from a config.json and the published tensors: put into the words
    of worlds.py, which then computes them a head and a position at a time."""
    kind = c["model_type"]
    gpt = kind.startswith("gpt")
    n_layer = c.get("n_layer") or c.get("num_layers") or c["num_hidden_layers"]
    w = {}
    for name, x in tensors.items():
        for there, here in NAMES.items():
            name = name.replace(there, here)
        is_turned = kind == "gpt2" and name.startswith("h.") and x.dim() == 2
        w[name] = x.T if is_turned else x
    for i, leaf in itertools.product(range(n_layer), ("weight", "bias")):
        for whole, parts in STACKED.items():
            names = [f"h.{i}.{part}.{leaf}" for part in parts]
            if names[0] in w:
                w[f"h.{i}.{whole}.{leaf}"] = torch.cat([w[name] for name in names])
    config = SimpleNamespace(
        **rope_of(c), n_layer=n_layer, n_embd=w["wte.weight"].shape[1], causal=True,
        n_head=c.get("n_head") or c.get("num_heads") or c["num_attention_heads"],
        n_kv_head=c.get("num_key_value_heads"), head_dim=c.get("head_dim"),
        rms=not gpt, swiglu=not gpt, qk_norm=kind == "qwen3",
        norm_eps=c["layer_norm_epsilon"] if gpt else c["rms_norm_eps"],
        attn_scale=1.0 if kind == "gpt_neo" else None, window=c.get("window_size"),
        local_layers=local_layers(c), exact_gelu=c.get("activation_function") == "gelu")
    return worlds.logits_by_hand(SimpleNamespace(config=config, state_dict=lambda: w), ids)


def local_layers(c):
    kinds = []
    for some, times in c.get("attention_types", []):
        kinds += some * times
    return [i for i, kind in enumerate(kinds) if kind == "local"]


def rope_of(c):
    """The base of a config.json's rotary positions and the numbers that scale them."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = [rope[name] for name in names] if rope.get("rope_type") == "llama3" else ()
    base = rope.get("rope_theta") or c.get("rope_theta")
    return dict(rope_base=base, rope_scaling=scaling)


# ------------------------------------------------------------------------------------------------
# whole folders: a policy of each family with its tokenizer, a judge, prompts


def make_gpt2(folder, config=GPTConfig(300, 64, 2, 2, 16), seed=0):
    """As openai-community/gpt2 is published: vocab.json and merges.txt, the end token named in
    config.json alone."""
    torch.manual_seed(seed_of(seed))
    export(GPT(config), folder, load_tokenizer(300))
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


def chat_core(size=300, pattern=GPT2_PATTERN):
    """A tokenizers.Tokenizer of GPT-2's first merges, special tokens first, as SmolLM2 has them."""
    model = json.loads(core_of(load_tokenizer(size)).to_str())["model"]
    tokens = sorted(model["vocab"].keys() - set(MARKS), key=model["vocab"].get)
    vocabulary = {token: i for i, token in enumerate(MARKS + tokens)}
    core = bpe_core(vocabulary, [tuple(merge) for merge in model["merges"]], pattern)
    core.add_special_tokens(MARKS)
    return core


def make_chat(folder, config=CHAT, seed=0):
    """As Qwen/Qwen3-0.6B: tokenizer.json, a chat template with an end token of its own, a
    vocabulary padded beyond the tokenizer's."""
    torch.manual_seed(seed_of(seed))
    export(GPT(config), folder, load_tokenizer(300))
    chat_core().save(f"{folder}/tokenizer.json")
    put(folder, tokenizer_config=dict(eos_token="<|im_end|>", chat_template=TEMPLATE),
        generation_config=dict(eos_token_id=[0, 2]))
    for name in ("vocab.json", "merges.txt"):
        os.remove(f"{folder}/{name}")
    return folder


def make_roberta(folder, gpt2, labels, seed, **changes):
    """As facebook/roberta-hate-speech-dynabench-r4-target: its own numbers for the tokens that the
    folder gpt2 has."""
    vocabulary = read_json(f"{gpt2}/vocab.json")
    tokens = sorted(vocabulary.keys() - {"<|endoftext|>"})
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *tokens, "<mask>"]
    c = dict(architectures=["RobertaForSequenceClassification"], model_type="roberta",
             vocab_size=len(tokens), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             intermediate_size=24, max_position_embeddings=26, type_vocab_size=1,
             layer_norm_eps=1e-5, hidden_act="gelu", bos_token_id=0, pad_token_id=1, eos_token_id=2,
             id2label={str(i): label for i, label in enumerate(labels)}) | changes
    os.makedirs(folder)
    shutil.copy(f"{gpt2}/merges.txt", folder)
    put(folder, config=c, vocab={token: i for i, token in enumerate(tokens)},
        special_tokens_map=dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>"))
    tensors = roberta_tensors(c, len(labels), seed)
    save_tensors(f"{folder}/model.safetensors", tensors)
    return folder


# tensor as it is published | its shape by keys of config.json
ROBERTA = """
roberta.embeddings.word_embeddings.weight | vocab_size hidden_size
roberta.embeddings.position_embeddings.weight | max_position_embeddings hidden_size
roberta.embeddings.token_type_embeddings.weight | type_vocab_size hidden_size
roberta.embeddings.LayerNorm.weight | hidden_size
roberta.embeddings.LayerNorm.bias | hidden_size
roberta.encoder.layer.N.attention.self.query.weight | hidden_size hidden_size
roberta.encoder.layer.N.attention.self.query.bias | hidden_size
roberta.encoder.layer.N.attention.self.key.weight | hidden_size hidden_size
roberta.encoder.layer.N.attention.self.key.bias | hidden_size
roberta.encoder.layer.N.attention.self.value.weight | hidden_size hidden_size
roberta.encoder.layer.N.attention.self.value.bias | hidden_size
roberta.encoder.layer.N.attention.output.dense.weight | hidden_size hidden_size
roberta.encoder.layer.N.attention.output.dense.bias | hidden_size
roberta.encoder.layer.N.attention.output.LayerNorm.weight | hidden_size
roberta.encoder.layer.N.attention.output.LayerNorm.bias | hidden_size
roberta.encoder.layer.N.intermediate.dense.weight | intermediate_size hidden_size
roberta.encoder.layer.N.intermediate.dense.bias | intermediate_size
roberta.encoder.layer.N.output.dense.weight | hidden_size intermediate_size
roberta.encoder.layer.N.output.dense.bias | hidden_size
roberta.encoder.layer.N.output.LayerNorm.weight | hidden_size
roberta.encoder.layer.N.output.LayerNorm.bias | hidden_size
classifier.dense.weight | hidden_size hidden_size
classifier.dense.bias | hidden_size
classifier.out_proj.weight | labels hidden_size
classifier.out_proj.bias | labels
"""


def roberta_tensors(c, num_labels, seed):
    """{published name: tensor}, all of them random."""
    generator = generator_of(seed)
    sizes = c | {"labels": num_labels}
    tensors = {}
    for i in range(c["num_hidden_layers"]):
        for line in ROBERTA.strip().replace(".N.", f".{i}.").splitlines():
            name, keys = line.split(" | ")
            shape = [sizes[key] for key in keys.split()]
            x = 0.5 * torch.randn(shape, generator=generator)
            tensors[name] = x + 1 if "LayerNorm.weight" in name else x
    return tensors


def roberta_by_hand(c, tensors, ids):
    """Logits (labels,) of one text in float64, a head at a time."""
    w = {name.replace("roberta.", "").replace("encoder.layer.", ""): x.double()
         for name, x in tensors.items()}
    hs = c["hidden_size"] // c["num_attention_heads"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + c["layer_norm_eps"]).sqrt()
        return x * w[name + ".weight"] + w[name + ".bias"]

    x = w["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    x = x + w["embeddings.position_embeddings.weight"][2:2 + len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        q, k, v = (linear(x, f"{i}.attention.self.{name}") for name in ("query", "key", "value"))
        mixed = torch.zeros_like(x)
        for first in range(0, c["hidden_size"], hs):
            head = slice(first, first + hs)
            weights = (q[:, head] @ k[:, head].T / math.sqrt(hs)).softmax(-1)
            mixed[:, head] = weights @ v[:, head]
        y = linear(mixed, f"{i}.attention.output.dense")
        x = norm(x + y, f"{i}.attention.output.LayerNorm")
        y = linear(x, f"{i}.intermediate.dense")
        y = linear(y * (1 + torch.erf(y / math.sqrt(2))) / 2, f"{i}.output.dense")
        x = norm(x + y, f"{i}.output.LayerNorm")
    return linear(torch.tanh(linear(x[0], "classifier.dense")), "classifier.out_proj")


def make_prompts(path, count=60, seed=0):
    """As allenai/real-toxicity-prompts: a row has a prompt and a continuation, each with its
    scores, now and then null."""
    rng = random.Random(seed_of(seed))
    words = "the a cat river runs sees it's old and, we \u201cnever\u201d".split()
    rows = []
    for i in range(count):
        score = None if i % 7 == 0 else round(rng.random(), 3)
        text = f"{i} " + " ".join(rng.choices(words, k=rng.randint(1, 7)))
        rows.append({"filename": f"{i}.txt", "prompt": {"text": text, "toxicity": score},
                     "continuation": {"text": " and so on.", "toxicity": 0.5}})
    worlds.write_rows(path, rows)
    return str(path)
