"""Published files: downloaded, read, written. Tables of numbers only: a pickle can run code and is
never opened. Whatever is wrong with a file is one line that names it.

The package huggingface_hub downloads into the cache that transformers uses too. It takes HF_HOME,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE from the environment.
"""
import contextlib
import os
import re

import numpy as np
import torch

from common.files import read_json
from common.script import BadInput, optional

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "generation_config.json")
MODEL_FILES = ("config.json", "model*.safetensors", INDEX, *TOKENIZER_FILES)
PICKLE_HELP = ("no such file. (A pytorch_model.bin is a pickle, which can run code, and is never "
               "opened; look for a revision with safetensors: NAME@refs/pr/1)")


@contextlib.contextmanager
def one_line(what, advice="download it again"):
    """Turns whatever a package raises into one line that names the file."""
    try:
        yield
    except BadInput:
        raise
    except Exception as e:  # the packages raise their own errors, and a dozen of Python's
        raise BadInput(f"{what}: {type(e).__name__}: {e}; {advice}") from e


def fetch(name, files=MODEL_FILES):
    """The folder with these files of a published model, downloaded unless they are in the cache.

    name: a local folder, or OWNER/NAME (or gpt2), with @REVISION for another branch, tag, commit or
    refs/pr/1 than main. Data sets are datasets/OWNER/NAME.
    """
    if os.path.isdir(name):
        return name
    if os.path.isfile(name):
        raise BadInput(f"{name}: must end in .pt or .gguf, or be the folder of a published model")
    match = re.fullmatch(r"(datasets/)?(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?", name)
    if match is None:
        raise BadInput(f"{name!r}: no such folder, and no published name: OWNER/NAME, "
                       "OWNER/NAME@REVISION")
    is_dataset, repo, revision = match.groups()
    with optional("-r extras/hub/requirements.txt"):
        from huggingface_hub import snapshot_download
    advice = ("look at the name; for a gated or private one run `hf auth login`; without a network "
              "give a folder")
    with one_line(name, advice):
        return snapshot_download(
            repo, revision=revision, allow_patterns=list(files),
            repo_type="dataset" if is_dataset else "model")


def load_tensors(folder):
    """{name: tensor} of model.safetensors in a folder, or of all files that its index names."""
    with optional("-r extras/hub/requirements.txt"):
        from safetensors.torch import load_file
    index = read_json(os.path.join(folder, INDEX), missing={})
    names = index.get("weight_map", {"": "model.safetensors"}).values()
    tensors = {}
    for name in sorted(set(names)):
        path = os.path.join(folder, os.path.basename(name))     # nothing outside the folder
        if not os.path.exists(path):
            raise BadInput(f"{path}: {PICKLE_HELP}")
        with one_line(path):
            tensors |= load_file(path)
    return tensors


def save_tensors(path, tensors):
    """Write {name: tensor} as a safetensors file."""
    with optional("-r extras/hub/requirements.txt"):
        from safetensors.torch import save_file
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with one_line(path, "is the disk full?"):
        save_file(tensors, path, metadata={"format": "pt"})     # transformers asks for the format
    os.chmod(path, 0o644)       # save_file lets nobody else read its file


def read_gguf(path, weights=True):
    """(metadata, {name: float32 tensor}) of llama.cpp's files, quantised weights multiplied out."""
    with optional("-r extras/hub/requirements.txt"):
        from gguf import GGUFReader, dequantize

    class Reader(GGUFReader):
        """It would read millions of numbers one by one, also those behind the file's end."""
        left = 2 ** 21      # large vocabularies have half of them

        def _get(self, offset, *args, **kwargs):
            self.data = self.data.view(np.ndarray)      # a memmap is slow to cut
            self.left -= 1
            if self.left < 0 or offset >= len(self.data):
                raise ValueError("its metadata is too long, or cut short")
            return super()._get(offset, *args, **kwargs)

    with one_line(path):
        reader = Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {}
        for x in reader.tensors if weights else ():
            values = dequantize(x.data, x.tensor_type)
            tensors[x.name] = torch.tensor(values, dtype=torch.float32)
    return metadata, tensors
