"""Download, read and write published files. Tables of numbers only: a pickle can run code and is
never opened.

The package huggingface_hub downloads into the cache that transformers uses too. It takes HF_HOME,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE from the environment.
"""
import os

import huggingface_hub
import numpy as np
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from extras.hub.families import published
from common.errors import BadInput, shown
from common.files import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "generation_config.json")
INDEX = "model.safetensors.index.json"
MODEL_FILES = ("config.json", "model.safetensors", "model-*.safetensors", INDEX, *TOKENIZER_FILES)

# endings of tensors that may be ignored
NO_WEIGHTS = (".attn.bias", ".masked_bias", ".attention.bias", ".rotary_emb.inv_freq",
              ".position_ids", "pooler.dense.weight", "pooler.dense.bias")


def fetch(name):
    """The folder of a published model, downloaded unless it is in the cache.

    name: a local folder, or OWNER/NAME (or gpt2); @REVISION names a branch, tag, commit or
    refs/pr/1 instead of main.
    """
    if os.path.isdir(name):
        return name
    repo, _, revision = name.partition("@")
    try:
        return huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=MODEL_FILES)
    except Exception as e:      # a misspelled path or name, no network, a gated model
        raise BadInput(f"{name!r}: no such file or folder, and not fetched as a published name "
                       f"(OWNER/NAME, OWNER/NAME@REVISION): {type(e).__name__}: {e}") from e


def load_tensors(folder, prefix=""):
    """Read model.safetensors in a folder, or its shards -> {name without prefix: tensor}."""
    if os.path.exists(f"{folder}/model.safetensors"):
        tensors = load_file(f"{folder}/model.safetensors")
    elif os.path.exists(f"{folder}/{INDEX}"):
        # the index says which file has a tensor: another one may hold an older copy
        place = read_json(f"{folder}/{INDEX}")["weight_map"]
        shards = {file: load_file(f"{folder}/{file}") for file in set(place.values())}
        tensors = {name: shards[file][name] for name, file in place.items()}
    else:
        raise BadInput(f"{folder}: no model.safetensors and no {INDEX}. (A pytorch_model.bin is a "
                       "pickle, which can run code, and is never opened; look for a revision with "
                       "safetensors: NAME@refs/pr/1. An adapter must be merged into its model)")
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


@torch.no_grad()
def fill(make, tensors, kv_rows, family, path):
    """Call make() for a module, in float32 on the CPU, and give it the published tensors. BadInput
    unless each has its place."""
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for name, p in published(module.state_dict(), kv_rows, family).items():
        if name not in tensors:
            raise BadInput(f"{path}: {name} is missing: the model is not whole, or of a different "
                           "kind")
        x = tensors.pop(name)
        if x.shape != p.shape or not x.is_floating_point():
            raise BadInput(f"{path}: {name} is {x.dtype} {tuple(x.shape)}, must be "
                           f"{tuple(p.shape)}")
        p.copy_(x)
    for name in tensors:
        if not name.endswith(NO_WEIGHTS):
            raise BadInput(f"{path}: {shown(name)} has no place in the model")
    return module


def save_tensors(path, tensors):
    """Write {name: tensor} as a safetensors file."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})     # transformers asks for the format
    os.chmod(path, 0o644)       # save_file lets nobody else read its file


class Reader(GGUFReader):
    def _get(self, *args, **kwargs):
        self.data = self.data.view(np.ndarray)      # a memmap is slow to cut
        return super()._get(*args, **kwargs)


def read_gguf(path):
    """Read a file of llama.cpp -> (metadata, tensors as they are stored)."""
    reader = Reader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors
