"""Models in files: the shape and weights of a policy or a judge."""
import re
from dataclasses import asdict

import torch

from common.files import check_kind, load_torch, save_file
from common.errors import BadInput
from data.tokenizer import GPT2_SIZE
from model import GPTConfig, Policy


def save_gpt(path, model, kind="policy", **extra):
    """Write weights and shape."""
    save_file(path, kind, config=asdict(model.config), model=model.state_dict(), **extra)


def load_gpt(path, kind="policy", make=Policy):
    """Read the policy that save_gpt or nanoGPT wrote, onto the CPU. kind, make: for a judge, or any
    module that is made from a GPTConfig."""
    content = load_torch(path)
    if kind == "policy" and isinstance(content, dict) and "model_args" in content:
        shape, weights = of_nanogpt(content, path)
    else:
        check_kind(content, kind, path)
        shape, weights = content["config"], content["model"]
    model = make(GPTConfig(**shape))
    model.load_state_dict(weights)
    return model


# ------------------------------------------------------------------------------------------------
# nanoGPT's checkpoints


def of_nanogpt(content, path):
    """nanoGPT's checkpoint -> (shape, weights) as save_gpt writes them."""
    # torch.compile and DistributedDataParallel add prefixes, and older versions kept the causal
    # mask
    weights = {}
    for name, x in content["model"].items():
        name = re.sub(r"^(module\.|_orig_mod\.|transformer\.)+", "", name)
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            weights[name] = x
    weights.setdefault("lm_head.weight", weights["wte.weight"])

    # its GELU is exact, and its head usually shares the embedding's matrix
    args = content["model_args"]
    shape = {name: args[name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    shape["vocab_size"] = len(weights["wte.weight"])
    shape["bias"] = "ln_f.bias" in weights
    shape["exact_gelu"] = True
    shape["tied"] = torch.equal(weights["lm_head.weight"], weights["wte.weight"])

    # with a different tokenizer, our ids would be nonsense to it
    if shape["vocab_size"] < 257:
        raise BadInput(f"{path}: its {shape['vocab_size']} tokens are characters (nanoGPT's "
                       "meta.pkl): only a model of GPT-2's tokens can be read, such as one of "
                       "nanoGPT's data/shakespeare or data/openwebtext")
    if shape["vocab_size"] < GPT2_SIZE:
        print(f"note: {path}: its {shape['vocab_size']} tokens are taken for GPT-2's first ones; "
              "with a different tokenizer (nanoGPT's meta.pkl) prompts would be nonsense")
    return shape, weights


@torch.no_grad()
def merged_weights(model):
    """Merge adapters into a policy's weights -> {name: tensor}, each tensor once, in float32
    where it is stored in bfloat16, without a critic's."""
    weights = {name.replace(".base.", "."): x.detach() for name, x in model.named_parameters()
               if not name.endswith((".A.weight", ".B.weight")) and "value_head" not in name}
    for name, lora in model.named_modules():
        if hasattr(lora, "base"):
            update = lora.scale * lora.B.weight @ lora.A.weight
            weights[f"{name}.weight"] = lora.base.weight + update
    return {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in weights.items()}
