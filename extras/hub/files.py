"""Download, read and write published files. Tables of numbers only: a pickle can run code and is
never opened. Every error is one line that names the file.

The package huggingface_hub downloads into the cache that transformers uses too. It takes HF_HOME,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE from the environment.
"""
import contextlib
import glob
import os
import re

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
MODEL_FILES = ("config.json", "model.safetensors", "model-*.safetensors", INDEX,
               "adapter_config.json", *TOKENIZER_FILES)

# endings of tensors that may be ignored
NO_WEIGHTS = (".attn.bias", ".masked_bias", ".attention.bias", ".rotary_emb.inv_freq",
              ".position_ids", "pooler.dense.weight", "pooler.dense.bias")


@contextlib.contextmanager
def one_line(what, advice="download it again"):
    """Turn whatever a package raises into one line that names the file."""
    try:
        yield
    except BadInput:
        raise
    except BaseException as e:  # the packages raise their own errors, and a dozen of Python's
        # a panic in Rust is not an Exception
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise BadInput(f"{what}: {type(e).__name__}: {e}; {advice}") from e


def fetch(name):
    """The folder of a published model, downloaded unless it is in the cache.

    name: a local folder, or OWNER/NAME (or gpt2); @REVISION names a branch, tag, commit or
    refs/pr/1 instead of main.
    """
    folder = name if os.path.isdir(name) else download(name)
    config = read_json(f"{folder}/config.json", missing={})
    if isinstance(config, dict) and "settings" in config:
        raise BadInput(f"{name}: is the folder of a run, not a published model: python -m "
                       "extras.hub.export makes one of it")
    is_adapter = os.path.exists(f"{folder}/adapter_config.json")
    if is_adapter and not glob.glob(f"{glob.escape(folder)}/model*.safetensors"):
        raise BadInput(f"{name}: is an adapter (LoRA) without the model that it changes: merge it "
                       "into that one (merge_and_unload of peft), save the result, and name that")
    return folder


def download(name):
    if os.path.isfile(name):
        raise BadInput(f"{name}: must end in .pt or .gguf, or be the folder of a published model")
    repo, _, revision = name.partition("@")
    advice = ("look at the name (OWNER/NAME, OWNER/NAME@REVISION); for a gated or private one run "
              "`hf auth login`; without a network give a folder")
    with one_line(f"{name!r}: no such folder, and no published name", advice):
        return huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=MODEL_FILES)


def named_by_index(folder, files):
    """{tensor: its file}, from the index. Skip files that it does not name, such as a copy in a
    different precision or from an older upload."""
    place = read_json(f"{folder}/{INDEX}")["weight_map"]
    for name in place.values():
        if os.path.basename(name) != name:
            raise BadInput(f"{folder}: {INDEX} names {shown(name)}, which is in another folder")
    for name in files:
        if name not in place.values():
            print(f"note: {folder}: {name} is not read: {INDEX} does not name it")
    return place


def named_by_number(folder, files):
    """The names of all shards -00001-of-00003, ..., if there is no index."""
    counts = {name[-len("00003.safetensors"):] for name in files}
    if len(counts) > 1:
        raise BadInput(f"{folder}: {files[0]} and {files[-1]} are not of one model, and {INDEX}, "
                       "which says what is, is missing: download it, or remove the others")
    numbered = re.fullmatch(r"model-\d{5}-of-(\d{5})\.safetensors", files[0])
    if not numbered:
        raise BadInput(f"{folder}: {files[0]} has no number, and {INDEX}, which says what it is, "
                       "is missing: call it model.safetensors if it is the model")
    names = [f"model-{i:05}-of-{numbered[1]}.safetensors" for i in range(1, int(numbered[1]) + 1)]
    for name in files:
        if name not in names:
            raise BadInput(f"{folder}: {name} has no place among {len(names)} files, and {INDEX}, "
                           "which says what is, is missing: download it, or remove it")
    return names


def shards_of(folder):
    """The files of a model's tensors -> {path: names of its tensors, None: all}."""
    if os.path.exists(f"{folder}/model.safetensors"):
        return {f"{folder}/model.safetensors": None}
    files = sorted(name for name in os.listdir(folder)
                   if name.startswith("model-") and name.endswith(".safetensors"))
    if os.path.exists(f"{folder}/{INDEX}"):
        place = named_by_index(folder, files)
        shards = {name: [x for x in place if place[x] == name] for name in place.values()}
    elif files:
        shards = dict.fromkeys(named_by_number(folder, files))
    else:
        raise BadInput(f"{folder}: no model.safetensors. (A pytorch_model.bin is a pickle, which "
                       "can run code, and is never opened; look for a revision with safetensors: "
                       "NAME@refs/pr/1)")
    for name in shards:
        if not os.path.isfile(f"{folder}/{name}"):
            raise BadInput(f"{folder}: {name} is missing, one of {len(shards)} files that the "
                           "model is in: download it again")
    return {f"{folder}/{name}": names for name, names in shards.items()}


def load_tensors(folder, prefix=""):
    """Read model.safetensors in a folder, or its shards model-00001-of-00002.safetensors, ... ->
    {name without prefix: tensor}."""
    tensors = {}
    with one_line(f"{folder}: {INDEX}"):
        shards = shards_of(str(folder))
    for path, names in shards.items():
        with one_line(path):
            held = load_file(path)
            for name in held if names is None else names:
                if name not in held:
                    raise BadInput(f"{path}: {name} is missing, which {INDEX} says is there: "
                                   "download both again")
                tensors[name] = held[name]
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


@torch.no_grad()
def fill(make, num_layers, tensors, kv_rows, family, path):
    """Call make() for a module, in float32 on the CPU, and give it the published tensors. BadInput
    unless each has its place."""
    if num_layers > len(tensors):   # too many layers would fill the memory
        raise BadInput(f"{path}: {len(tensors)} tensors for {num_layers} layers")
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for name, p in published(module.state_dict(), kv_rows, family).items():
        if name not in tensors:
            tied = (" (it may be, where config.json says tie_word_embeddings = true)"
                    * (name == "lm_head.weight"))
            raise BadInput(f"{path}: {name} is missing{tied}: the model is not whole, or of a "
                           "different kind")
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
    with one_line(path, "is the disk full?"):
        save_file(tensors, path, metadata={"format": "pt"})     # transformers asks for the format
    os.chmod(path, 0o644)       # save_file lets nobody else read its file


class Reader(GGUFReader):
    """GGUFReader with a limit: a broken file would make it read millions of numbers one by one,
    even past the file's end."""
    left = 2 ** 21      # numbers; large vocabularies need half as many

    def _get(self, offset, *args, **kwargs):
        self.data = self.data.view(np.ndarray)      # a memmap is slow to cut
        self.left -= 1
        if self.left < 0 or offset >= len(self.data):
            raise ValueError("its metadata is too long, or cut short")
        return super()._get(offset, *args, **kwargs)


def read_gguf(path):
    """Read a file of llama.cpp -> (metadata, tensors as they are stored)."""
    with one_line(path):
        reader = Reader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors
