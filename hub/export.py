"""Writes the policy of a run, or of a .pt file, as a folder that transformers, TRL and vLLM open.

    python -m hub.export out/toxicity my-model [--dtype=bfloat16] [--adapter=gpt2]

LoRA is merged into the weights. With --adapter=BASE_MODEL it is left as an adapter that peft opens.
"""
import os
import shutil

import tiktoken
import torch

from data.tokenizer import byte_alphabet
from hub.families import FAMILIES, config_to_json, pieces
from hub.files import TOKENIZER_FILES, save_tensors
from hub.policy import TRANSPOSED
from hub.tokenizer import Tokenizer, bpe_core, from_gguf
from model import LoRA
from pretrain import load_run
from run.files import read_json, replacing, write_json
from run.script import BadInput, run_script

DTYPES = ("float32", "bfloat16", "float16")


@torch.no_grad()
def export(model, folder, source, dtype="float32", adapter=None):
    """Write a policy as a published folder, which appears whole or not at all.

    source: its tokenizer, as a tiktoken.Encoding, or the folder or GGUF file where hub.policy found
    it. adapter: name of the base model; then only the LoRA adapter is written, as peft reads it.
    """
    kind, config = config_to_json(model.config)
    if os.path.exists(folder):
        raise BadInput(f"{folder}: is there already; name a folder that is not there yet")
    if dtype not in DTYPES:
        raise BadInput(f"dtype = {dtype!r}: must be {', '.join(DTYPES)}")
    lora = {name: module for name, module in model.named_modules() if isinstance(module, LoRA)}
    if adapter and not lora:
        raise BadInput(f"adapter = {adapter!r}: this policy has no LoRA adapter; leave it out")
    with replacing(os.path.abspath(folder)) as tmp:
        os.makedirs(tmp)
        ids = write_tokenizer(tmp, source)
        if adapter:
            name = "adapter_model"
            tensors = adapter_tensors(model, lora, kind)
            config = adapter_config(lora, tensors, kind, adapter)
            write_json(os.path.join(tmp, "adapter_config.json"), config)
        else:
            name = "model"
            tensors = merged_tensors(model, lora, kind)
            write_json(os.path.join(tmp, "config.json"), ids | config | {"torch_dtype": dtype})
        tensors = {name: x.to(getattr(torch, dtype)) for name, x in tensors.items()}
        save_tensors(os.path.join(tmp, f"{name}.safetensors"), tensors)


def published(model, kind, name, x):
    """[(published name, its part)] of all that is stacked into the tensor x of this name."""
    parts = pieces(model, FAMILIES[kind].names, name, len(x))
    sizes = [rows for _, rows in parts]
    return [(there, part) for (there, _), part in zip(parts, x.split(sizes))]


def merged_tensors(model, lora, kind):
    """{published name: tensor}, adapters merged. A tied head and the critic's are left out."""
    tensors = {}
    for name, x in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        tied_head = name == "lm_head.weight" and model.config.tied
        if module.endswith((".A", ".B")) or module.startswith("value_head") or tied_head:
            continue
        module = module.removesuffix(".base")
        if module in lora and leaf == "weight":
            x = x + lora[module].scale * lora[module].B.weight @ lora[module].A.weight
        flip = FAMILIES[kind].transposed and f"{module}.{leaf}".endswith(TRANSPOSED)
        for there, part in published(model, kind, f"{module}.{leaf}", x):
            tensors[there] = part.T if flip else part
    return tensors


def adapter_tensors(model, lora, kind):
    """{name in peft's layout: tensor}. Where one layer here is several there, each gets its rows of
    B and a copy of A."""
    tensors = {}
    for name, module in lora.items():
        for there, B in published(model, kind, f"{name}.weight", module.B.weight):
            prefix = f"base_model.model.{there.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = module.A.weight.clone()
            tensors[f"{prefix}.lora_B.weight"] = B
    return tensors


def adapter_config(lora, tensors, kind, base):
    """The content of peft's adapter_config.json. base: the name of the model below it."""
    first = next(iter(lora.values()))
    rank = first.A.out_features
    return dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True,
        r=rank, lora_alpha=round(first.scale * rank, 9), lora_dropout=0.0, bias="none",
        fan_in_fan_out=FAMILIES[kind].transposed,
        target_modules=sorted({name.split(".")[-3] for name in tensors}))


# ------------------------------------------------------------------------------------------------
# tokenizer


def write_tokenizer(folder, source):
    """Write the tokenizer's files. Returns the ids of special tokens as config.json has them."""
    if isinstance(source, str) and os.path.isdir(source):
        for name in TOKENIZER_FILES:
            if os.path.exists(os.path.join(source, name)):
                shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
        config = read_json(os.path.join(source, "config.json"))
        return {key: i for key, i in config.items() if key.endswith("_token_id")}
    if isinstance(source, tiktoken.Encoding):
        end = [source.eot_token]
        tokenizer = Tokenizer(core_of(source), folder, end, bos=end)
    else:
        tokenizer = from_gguf(source)
    tokenizer.core.save(os.path.join(folder, "tokenizer.json"))
    tokenizer.core.model.save(folder)     # vocab.json and merges.txt too
    ids = dict(bos_token_id=tokenizer.bos_token, eos_token_id=tokenizer.eot_token)
    ids = {key: i for key, i in ids.items() if i is not None}
    content = {key.removesuffix("_id"): tokenizer.core.id_to_token(i) for key, i in ids.items()}
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if tokenizer.chat_template:
        content["chat_template"] = tokenizer.chat_template
    write_json(os.path.join(folder, "tokenizer_config.json"), content)
    write_json(os.path.join(folder, "generation_config.json"),
               ids | dict(eos_token_id=list(tokenizer.end_tokens)))
    return ids


def core_of(encoding):
    """A tokenizers.Tokenizer of a tiktoken.Encoding.

    tiktoken knows the rank of each token but not which two it is the merge of. Those are what is
    left when all merges of a lower rank are made.
    """
    character = {byte: c for c, byte in byte_alphabet().items()}
    ranks = encoding._mergeable_ranks
    vocabulary, merges = dict(encoding._special_tokens), []
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
    """The bytes of a token after all merges of a lower rank: at most two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:])]
        _, i = min((ranks.get(pair, rank), i) for i, pair in enumerate(pairs))
        parts[i:i + 2] = [pairs[i]]
    return parts


def main(argv):
    options = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith("--") and "=" in arg)
    paths = [arg for arg in argv if not arg.startswith("--")]
    known = set(options) <= {"dtype", "adapter"} and all(options.values())
    if len(paths) != 2 or len(argv) != 2 + len(options) or not known:
        raise BadInput("usage: python -m hub.export RUN_OR_PT FOLDER "
                       f"[--dtype={'|'.join(DTYPES)}] [--adapter=BASE_MODEL]")
    model, source = load_run(paths[0])
    export(model, paths[1], source, **options)
    print(f"{paths[1]}: {', '.join(sorted(os.listdir(paths[1])))}")


if __name__ == "__main__":
    run_script(main)
