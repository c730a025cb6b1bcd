"""A policy as a folder that transformers, TRL and vLLM open."""
import os
import shutil

import tiktoken
import torch

from data.tokenizer import byte_alphabet
from hub.layouts import NAMES, TRANSPOSED, config_to_json, pieces
from hub.tensors import gguf_metadata, save_tensors
from hub.tokenizer import TOKENIZER_FILES, gguf_tokenizer
from model import LoRA
from run.files import read_json, replacing, write_json
from run.script import BadInput


@torch.no_grad()
def export(model, folder, source, dtype="float32", adapter=None):
    """Write a policy as a published folder. It appears whole or not at all.

    source: the tokenizer, as a tiktoken.Encoding, or as the folder or GGUF file that hub.policy
        found it in. Files of a folder are copied.
    dtype: of the weights.
    adapter: name of the base model. Then only the LoRA adapter is written, as peft reads it;
        without it, the adapter is merged into the weights.
    Raises BadInput for a folder that holds something, a shape that no published architecture has,
    and a full disk.
    """
    kind, config = config_to_json(model.config)
    folder = os.path.abspath(folder)
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise BadInput(f"{folder}: holds something already; name a folder that is not there yet")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise BadInput(f"dtype = {dtype!r}: must be float32, bfloat16 or float16")
    lora = {name: module for name, module in model.named_modules() if isinstance(module, LoRA)}
    if adapter and not lora:
        raise BadInput(f"adapter = {adapter!r}: this policy has no LoRA adapter; leave it out")

    with replacing(folder) as tmp:
        os.makedirs(tmp)
        ids = write_tokenizer(tmp, source, model.config)
        if adapter:
            tensors = adapter_tensors(model, lora, kind)
            file = "adapter_model.safetensors"
            config = adapter_config(lora, tensors, kind, adapter)
            write_json(os.path.join(tmp, "adapter_config.json"), config)
        else:
            tensors = merged_tensors(model, lora, kind)
            file = "model.safetensors"
            config = ids | config | {"torch_dtype": dtype}
            write_json(os.path.join(tmp, "config.json"), config)
            generation = os.path.join(tmp, "generation_config.json")
            if not os.path.exists(generation):
                write_json(generation, ids)
        tensors = {name: x.to(getattr(torch, dtype)) for name, x in tensors.items()}
        save_tensors(os.path.join(tmp, file), tensors)


# --------------------------------------------------------------------------------------------------
# tensors

def merged_tensors(model, lora, kind):
    """{published name: tensor} with the adapters merged. A tied head and the critic's are left out.

    lora: {name: its LoRA module}. kind: a key of ARCHITECTURES.
    """
    tensors = {}
    for name, x in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        tied_head = name == "lm_head.weight" and model.config.tied
        if module.endswith((".A", ".B")) or module.startswith("value_head") or tied_head:
            continue
        module = module.removesuffix(".base")
        if module in lora and leaf == "weight" and not lora[module].merged:
            x = x + lora[module].scale * lora[module].B.weight @ lora[module].A.weight
        name = f"{module}.{leaf}"
        flip = kind == "gpt2" and name.endswith(TRANSPOSED)
        parts = pieces(model, NAMES[kind], name, len(x))
        sizes = [rows for _, rows in parts]
        for (there, _), part in zip(parts, x.split(sizes)):
            tensors[there] = part.T if flip else part
    return tensors


def adapter_tensors(model, lora, kind):
    """{name in peft's layout: tensor}.

    Where one layer here is several there, each gets its rows of B and a copy of A.
    """
    tensors = {}
    for name, module in lora.items():
        parts = pieces(model, NAMES[kind], f"{name}.weight", module.B.out_features)
        sizes = [rows for _, rows in parts]
        for (there, _), B in zip(parts, module.B.weight.split(sizes)):
            prefix = f"base_model.model.{there.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = module.A.weight.clone()
            tensors[f"{prefix}.lora_B.weight"] = B
    return tensors


def adapter_config(lora, tensors, kind, base):
    """The content of peft's adapter_config.json. base: the name of the model below it."""
    first = next(iter(lora.values()))
    rank = first.A.out_features
    return dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=rank,
        lora_alpha=round(first.scale * rank, 9),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=kind == "gpt2",
        target_modules=sorted({name.split(".")[-3] for name in tensors}),
        inference_mode=True,
    )


# --------------------------------------------------------------------------------------------------
# tokenizer

def write_tokenizer(folder, source, config):
    """Write the tokenizer's files. Returns the ids of special tokens as config.json has them."""
    if isinstance(source, tiktoken.Encoding):
        parts = parts_of_encoding(source)
    elif os.path.isdir(source):
        return copy_tokenizer(folder, source)
    else:
        parts = parts_of_gguf(source)
    vocab = parts["vocab"] | parts["special"]
    if max(vocab.values()) >= config.vocab_size:
        raise BadInput(f"the tokenizer has {len(vocab)} tokens, the model only "
                       f"{config.vocab_size}")
    merges = parts["merges"]
    write_json(os.path.join(folder, "vocab.json"), vocab)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
        f.write("\n".join(["#version: 0.2", *merges, ""]))
    end = next(token for token, i in vocab.items() if i == parts["end"])
    write_json(os.path.join(folder, "tokenizer_config.json"), parts["template"] | dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=end,
        eos_token=end,
        model_max_length=config.block_size,
        clean_up_tokenization_spaces=False,
    ))
    write_json(os.path.join(folder, "tokenizer.json"), whole_tokenizer(vocab, parts))
    return dict(bos_token_id=parts["end"], eos_token_id=parts["end"])


def copy_tokenizer(folder, source):
    for name in TOKENIZER_FILES:
        path = os.path.join(source, name)
        if os.path.exists(path):
            shutil.copy(path, folder)
    config = read_json(os.path.join(source, "config.json"))
    return {key: i for key, i in config.items() if key.endswith("_token_id")}


def parts_of_encoding(encoding):
    """What tokenizer files are made of, from a tiktoken.Encoding.

    tiktoken knows the rank of each token but not which two it is the merge of. Those are what is
    left when all merges of a lower rank are made.
    """
    character = {byte: c for c, byte in byte_alphabet().items()}
    ranks = encoding._mergeable_ranks
    vocab, merges = {}, []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        pair = merged_below(token, rank, ranks)
        written = ["".join(character[byte] for byte in part) for part in pair]
        vocab["".join(written)] = rank
        if len(pair) == 2:
            merges.append(" ".join(written))
    return dict(vocab=vocab, merges=merges, special=encoding._special_tokens,
                pattern=encoding._pat_str, end=encoding.eot_token, nfc=False, template={})


def merged_below(token, rank, ranks):
    """The bytes of a token after all merges of a lower rank: at most two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:])]
        _, i = min((ranks.get(pair, rank), i) for i, pair in enumerate(pairs))
        parts[i:i + 2] = [pairs[i]]
    return parts


def parts_of_gguf(path):
    """What tokenizer files are made of, from a GGUF file."""
    metadata = gguf_metadata(path)
    tokenizer = gguf_tokenizer(metadata, path)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    template = {}
    if "tokenizer.chat_template" in metadata:
        template["chat_template"] = metadata["tokenizer.chat_template"]
    return dict(vocab=vocab, merges=metadata["tokenizer.ggml.merges"],
                special=tokenizer.special_tokens, pattern=tokenizer.core._pat_str,
                end=tokenizer.eot_token, nfc=tokenizer.nfc, template=template)


def whole_tokenizer(vocab, parts):
    """The content of a tokenizer.json."""
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    cut = dict(type="Split", pattern=dict(Regex=parts["pattern"]), behavior="Isolated",
               invert=False)
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    by_id = sorted(parts["special"].items(), key=lambda item: item[1])
    return dict(
        version="1.0",
        normalizer=dict(type="NFC") if parts["nfc"] else None,
        decoder=byte_level,
        model=dict(type="BPE", vocab=vocab, merges=parts["merges"]),
        added_tokens=[dict(id=i, content=token) | plain for token, i in by_id],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[cut, byte_level]),
    )
