"""Writes the policy of a run, or of a .pt file, as a folder that transformers, TRL and vLLM open.

    python -m extras.hub.export out/toxicity my-model

LoRA is merged into the weights.
"""
import os
import shutil

import tiktoken
import torch

from data.tokenizer import byte_alphabet
from extras.hub.families import config_to_json, pieces
from extras.hub.files import TOKENIZER_FILES, one_line, save_tensors
from extras.hub.policy import tokenizer_of
from extras.hub.tokenizer import Tokenizer, bpe_core
from common.files import read_json, replacing, write_json
from common.script import BadInput, run_script


@torch.no_grad()
def export(model, folder, source):
    """Write a policy as a published folder, which appears whole or not at all.

    source: of its tokenizer: a tiktoken.Encoding, or the published folder or GGUF file.
    """
    family, config = config_to_json(model.config)
    if os.path.exists(folder):
        raise BadInput(f"{folder}: is there already; name a folder that is not there yet")
    with replacing(os.path.abspath(folder)) as tmp:
        os.makedirs(tmp)
        with one_line(folder, "is the disk full?"):     # tokenizers raises a plain Exception
            ids = write_tokenizer(tmp, source)
        write_json(os.path.join(tmp, "config.json"), ids | config)
        save_tensors(os.path.join(tmp, "model.safetensors"), merged_tensors(model, family))


def merged_tensors(model, family):
    """Merge adapters -> {published name: tensor}. A tied head and the critic's are left out."""
    tensors = {}
    for name, x in model.named_parameters():    # has a matrix once that is embedding and head
        module, _, leaf = name.rpartition(".")
        if module.endswith((".A", ".B")) or module.startswith("value_head"):
            continue
        if module.endswith(".base"):
            module = module.removesuffix(".base")
            if leaf == "weight":
                lora = model.get_submodule(module)
                x = x + lora.scale * lora.B.weight @ lora.A.weight
        name = f"{module}.{leaf}"
        parts = pieces(model, family, name, len(x))
        for (there, _), part in zip(parts, x.split([rows for _, rows in parts])):
            tensors[there] = part.T if name.endswith(family.transposed) else part
    return tensors


# ------------------------------------------------------------------------------------------------
# tokenizer


def write_tokenizer(folder, source):
    """Write the tokenizer's files. Returns the ids of special tokens as config.json has them."""
    if isinstance(source, tiktoken.Encoding):
        end = source.eot_token
        return save_tokenizer(folder, Tokenizer(core_of(source), folder, [end], bos=end))
    if source.endswith(".gguf"):
        return save_tokenizer(folder, tokenizer_of(source))
    return copy_tokenizer(folder, source)


def copy_tokenizer(folder, source):
    for name in TOKENIZER_FILES:
        if os.path.exists(os.path.join(source, name)):
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    config = read_json(os.path.join(source, "config.json"))
    return {key: i for key, i in config.items() if key.endswith("_token_id")}


def save_tokenizer(folder, tokenizer):
    tokenizer.core.save(os.path.join(folder, "tokenizer.json"))
    tokenizer.core.model.save(folder)     # vocab.json and merges.txt too
    ids = {"eos_token_id": tokenizer.eot_token}
    if tokenizer.bos_token is not None:
        ids["bos_token_id"] = tokenizer.bos_token
    content = {key.removesuffix("_id"): tokenizer.core.id_to_token(i) for key, i in ids.items()}
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    content["chat_template"] = tokenizer.chat_template
    write_json(os.path.join(folder, "tokenizer_config.json"), content)
    write_json(os.path.join(folder, "generation_config.json"),
               ids | {"eos_token_id": list(tokenizer.end_tokens)})
    return ids


def core_of(encoding):
    """A tokenizers.Tokenizer of a tiktoken.Encoding.

    tiktoken knows the rank of each token but not which two it is the merge of. Those are what is
    left when all merges of a lower rank are made.
    """
    character = {byte: c for c, byte in byte_alphabet().items()}
    ranks = encoding._mergeable_ranks
    vocabulary = dict(encoding._special_tokens)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = merged_below(token, rank, ranks)
        written = ["".join(character[byte] for byte in part) for part in parts]
        vocabulary["".join(written)] = rank
        if len(written) == 2:
            merges.append(tuple(written))
    core = bpe_core(vocabulary, merges, encoding._pat_str)
    core.add_special_tokens(list(encoding._special_tokens))
    return core


def merged_below(token, rank, ranks):
    """Make all merges of a lower rank in the bytes of a token: at most two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:])]
        _, i = min((ranks.get(pair, rank), i) for i, pair in enumerate(pairs))
        parts[i:i + 2] = [pairs[i]]
    return parts


def main(argv, load_run):
    """load_run: of evaluate.py, which may import this folder."""
    if len(argv) != 2:
        raise BadInput("usage: python -m extras.hub.export RUN_OR_PT FOLDER")
    path, folder = argv
    model, source = load_run(path)
    export(model, folder, source)
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")


if __name__ == "__main__":
    from evaluate import load_run
    run_script(lambda argv: main(argv, load_run))
