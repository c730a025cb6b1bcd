"""Write the policy of a run, or of a .pt file, as a folder that transformers, TRL and vLLM open.

    python -m extras.hub.export out/toxicity my-model
    python -m extras.hub.export out/toxicity ckpt.pt        # as nanoGPT's sample.py reads it

LoRA is merged into the weights.
"""
import math
import os
import shutil

import torch

from data.tokenizer import GPT2_PACKAGE
from data.weights import merged_weights
from extras.hub.families import config_to_json, published, spelled_out, with_biases
from extras.hub.files import TOKENIZER_FILES, save_tensors
from extras.hub.policy import tokenizer_of
from extras.hub.tokenizer import Tokenizer, gpt2_core
from common.cli import run_script
from common.errors import BadInput
from common.files import file_of_package, read_json, replacing, write_json
from model import GPT, GPTConfig


@torch.no_grad()
def export(model, folder, source):
    """Write a policy as a published folder, which appears whole or not at all.

    source: where its tokenizer comes from: a tiktoken.Encoding, a published folder or a GGUF file.
    """
    family, config = config_to_json(model.config)
    with replacing(os.path.abspath(folder)) as tmp:
        os.makedirs(tmp)
        ids = write_tokenizer(tmp, source)
        write_json(os.path.join(tmp, "config.json"), ids | config)
        save_tensors(os.path.join(tmp, "model.safetensors"), merged_tensors(model, family))


def merged_tensors(model, family):
    """Merge adapters -> {published name: tensor}, without a tied head and a critic. Biases that the
    family has and the model lacks, such as nanoGPT's, become 0."""
    weights = merged_weights(model)
    c = spelled_out(model.config)
    with torch.device("meta"):
        for name, x in GPT(with_biases(c)).named_parameters():
            if name.endswith("bias") and name not in weights:
                weights[name] = torch.zeros(x.shape, device=weights["wte.weight"].device)
    tensors = published(weights, c.n_kv_head * c.head_dim, family)
    return {name if name == "lm_head.weight" else family.prefix + name: x
            for name, x in tensors.items()}


# ------------------------------------------------------------------------------------------------
# tokenizer


def write_tokenizer(folder, source):
    """Write the tokenizer's files -> the ids of special tokens as config.json has them."""
    if not isinstance(source, str):     # GPT-2's
        core = gpt2_tokenizer(source.n_vocab)
        names = dict.fromkeys(("bos_token", "eos_token"), core.id_to_token(source.eot_token))
        return save_tokenizer(folder, Tokenizer(core, folder, [source.eot_token], names))
    if source.endswith(".gguf"):
        return save_tokenizer(folder, tokenizer_of(source))
    return copy_tokenizer(folder, source)


def gpt2_tokenizer(vocab_size):
    """The tokenizer of data/tokenizer.py, as a tokenizers.Tokenizer."""
    files = [file_of_package(name, *GPT2_PACKAGE) for name in ("encoder.json", "vocab.bpe")]
    return gpt2_core(*files, vocab_size)


def copy_tokenizer(folder, source):
    for name in TOKENIZER_FILES:
        path = os.path.join(source, name)
        if os.path.exists(path):
            shutil.copy(path, folder)
    config = read_json(os.path.join(source, "config.json"))
    return {key: i for key, i in config.items() if key.endswith("_token_id")}


def save_tokenizer(folder, tokenizer):
    core = tokenizer.core
    core.save(os.path.join(folder, "tokenizer.json"))
    core.model.save(folder)     # vocab.json and merges.txt too
    names = {key: tokenizer.names[key] for key in ("eos_token", "bos_token")
             if key in tokenizer.names}
    ids = {f"{key}_id": core.token_to_id(token) for key, token in names.items()}
    write_json(os.path.join(folder, "tokenizer_config.json"),
               names | {"tokenizer_class": "PreTrainedTokenizerFast",
                        "chat_template": tokenizer.chat_template})
    write_json(os.path.join(folder, "generation_config.json"),
               ids | {"eos_token_id": list(tokenizer.end_tokens)})
    return ids


def save_nanogpt(path, model):
    """Write a policy as nanoGPT's sample.py reads it. BadInput where nanoGPT would compute
    something else."""
    c = model.config
    args = dict(block_size=c.block_size, vocab_size=c.vocab_size, n_layer=c.n_layer,
                n_head=c.n_head, n_embd=c.n_embd, bias=c.bias)
    if GPTConfig(**args, exact_gelu=True) != c:
        raise BadInput(f"{path}: nanoGPT cannot compute {c}: its GELU is exact, its head is tied; "
                       "name a folder, which transformers opens")
    weights = {f"transformer.{name}": x for name, x in merged_weights(model).items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    with replacing(path) as tmp:
        torch.save(dict(model=weights, model_args=args | dict(dropout=0.0), iter_num=0,
                        best_val_loss=math.inf, config={}), tmp)


def main(argv, load_run):
    """load_run: of run/policy.py, which may import this folder."""
    if len(argv) != 2:
        raise BadInput("usage: python -m extras.hub.export RUN_OR_PT FOLDER_OR_PT")
    path, target = argv
    if os.path.exists(target):
        raise BadInput(f"{target}: is there already; name what is not there yet")
    model, source = load_run(path)
    if target.endswith(".pt"):
        save_nanogpt(target, model)
    else:
        export(model, target, source)
    print(target)


if __name__ == "__main__":
    from run.policy import load_run
    run_script(lambda argv: main(argv, load_run))
