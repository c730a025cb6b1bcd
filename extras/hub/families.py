"""How models are published: the names of their tensors, and config.json to GPTConfig and back.

Each family has one table: GPT-2, GPT-Neo, Llama, Qwen2, Qwen3. To add a family that model.py can
compute, add a table to FAMILIES. A model that needs something else is refused: here if a key of
config.json says so, in extras/hub/policy.py if a tensor is left over.
"""
from dataclasses import dataclass, replace

from model import GPTConfig
from common.errors import BadInput, shown

# `only` (below) of all families, and of those with rotary positions
ONLY = {"quantization_config": (), "is_causal": (True,)}
ONLY_ROTARY = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "llama3"),
}
# fields of GPTConfig that are never 0
REQUIRED = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "window", "rope_base")
# keys of rope_type = "llama3", in the order of model.scale_frequency
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class Family:
    model_type: str     # this and the next as in config.json
    architecture: str
    prefix: str         # before all published names but the head's; some files omit it
    names: dict         # part of a name here -> its published form; replaced one after the other
    stacked: dict       # part of a name here -> the published tensors that it joins, in order
    keys: dict          # field of GPTConfig -> key of config.json
    only: dict          # key of config.json -> the values it may have, if it is there
    fields: dict        # field of GPTConfig -> its value if config.json does not have one
    written: dict       # key of config.json -> its value in an export
    transposed: tuple = ()      # endings of matrices that are published as (in, out)


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    names={},
    stacked={},
    keys={
        "vocab_size": "vocab_size",
        "block_size": "n_positions",
        "n_embd": "n_embd",
        "n_inner": "n_inner",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    only={
        "activation_function": ("gelu", "gelu_new"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    fields={},
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},    # if missing: 0.1
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
)
GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    prefix="transformer.",
    names={"attn.c_proj": "attn.out_proj", ".attn.": ".attn.attention."},
    stacked={"c_attn": ("q_proj", "k_proj", "v_proj")},
    keys={
        "vocab_size": "vocab_size",
        "block_size": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "norm_eps": "layer_norm_epsilon",
        "window": "window_size",
        "tied": "tie_word_embeddings",
    },
    only={"activation_function": ("gelu", "gelu_new")},
    fields={"qkv_bias": False, "attn_scale": 1.0},
    written={},
)
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    names={
        "wte.": "embed_tokens.",
        "h.": "layers.",
        "ln_f.": "norm.",
        "ln_1.": "input_layernorm.",
        "ln_2.": "post_attention_layernorm.",
        "attn.c_proj": "attn.o_proj",
        ".attn.": ".self_attn.",
        "mlp.c_proj": "mlp.down_proj",
    },
    stacked={"c_attn": ("q_proj", "k_proj", "v_proj"), "c_fc": ("gate_proj", "up_proj")},
    keys={
        "vocab_size": "vocab_size",
        "block_size": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_eps": "rms_norm_eps",
        "rope_base": "rope_theta",
        "tied": "tie_word_embeddings",
    },
    only=ONLY_ROTARY | {"attention_bias": (False,), "mlp_bias": (False,), "sliding_window": ()},
    fields={
        "bias": False,
        "qkv_bias": False,
        "rms": True,
        "norm_eps": 1e-6,
        "rope_base": 1e4,
        "swiglu": True,
        "tied": False,
    },
    written={"hidden_act": "silu"},
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    only=ONLY_ROTARY | {"use_sliding_window": (False,)},
    fields=LLAMA.fields | {"qkv_bias": True},
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    only=QWEN2.only | {"attention_bias": (False,)},
    fields=LLAMA.fields | {"qk_norm": True, "head_dim": 128},
)
FAMILIES = {family.model_type: family for family in (GPT2, GPT_NEO, LLAMA, QWEN2, QWEN3)}

# llama.cpp's files, and their metadata in place of config.json
GGUF = {
    "prefix": "",
    "names": {
        "wte.": "token_embd.",
        "h.": "blk.",
        "ln_f.": "output_norm.",
        "lm_head.": "output.",
        "ln_1.": "attn_norm.",
        "ln_2.": "ffn_norm.",
        "attn.c_proj": "attn.output",
        ".attn.": ".attn_",
        "mlp.c_proj": "ffn_down",
        "mlp.": "ffn_",
    },
    "stacked": {"c_attn": ("q", "k", "v"), "c_fc": ("gate", "up")},
    "keys": {
        "vocab_size": "vocab_size",
        "block_size": "context_length",
        "n_embd": "embedding_length",
        "n_inner": "feed_forward_length",
        "n_layer": "block_count",
        "n_head": "attention.head_count",
        "n_kv_head": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_base": "rope.freq_base",
    },
    "only": {
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (0, 1),
        "rope.scale_linear": (0, 1),
        "attention.causal": (True,),
    },
}
GGUF_FAMILIES = {kind: replace(FAMILIES[kind], **GGUF) for kind in ("llama", "qwen2", "qwen3")}


def published(weights, kv_rows, family):
    """Give weights their published names, without the family's prefix: {name here: tensor} ->
    {published name: view of the tensor}. kv_rows: rows of a layer's keys, and of its values."""
    views = {}
    for name, x in weights.items():
        for here, there in family.names.items():
            name = name.replace(here, there)
        names = [name]
        for whole, parts in family.stacked.items():
            if whole in name:
                names = [name.replace(whole, part) for part in parts]
        pieces = x.chunk(len(names))
        if len(names) == 3:     # queries, keys, values
            pieces = x.split([len(x) - 2 * kv_rows, kv_rows, kv_rows])
        for there, piece in zip(names, pieces):
            views[there] = piece.T if there.endswith(family.transposed) else piece
    return views


def family_of(kind, families, path):
    if kind not in families:
        raise BadInput(f"{path}: model type {shown(kind)} is not supported, only "
                       f"{', '.join(families)}")
    return families[kind]


def config_from_json(content, path):
    """The content of a config.json -> (Family, GPTConfig). BadInput for a model that model.py
    cannot compute."""
    family = family_of(content.get("model_type"), FAMILIES, path)
    check_only({"architectures": ([family.architecture],)}, content, path)
    return family, config_of(family, content, path)


def config_of(family, content, path):
    # transformers 5 writes rope_parameters, transformers 4 rope_scaling. Both, if there, must agree
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    twice = {key: (value,) for key, value in rope.items()}
    check_only(twice | {"rope_scaling": ({}, rope)}, content, path)
    content = {"rope_type": rope.get("type")} | content | rope
    check_only(ONLY | family.only, content, path)
    if set(content.get("layer_types") or ()) - {"full_attention"}:
        raise BadInput(f"{path}: layer_types: only 'full_attention' is supported")
    fields = dict(family.fields)
    for name, key in family.keys.items():
        if content.get(key) is not None:
            fields[name] = content[key]
        if name in REQUIRED and not fields.get(name):
            raise BadInput(f"{path}: {key} is missing")
    fields["exact_gelu"] = content.get("activation_function") == "gelu"
    if content["rope_type"] == "llama3":
        fields["rope_scaling"] = tuple(content[key] for key in LLAMA3_KEYS)
    if family is GPT_NEO:
        fields["local_layers"] = local_layers(content, path)
    return GPTConfig(**fields)


def check_only(table, content, path):
    """Raise BadInput for a key whose value would need a different computation."""
    for key, values in table.items():
        value = content.get(key)
        if value is not None and value not in values:
            only = f", only {', '.join(map(repr, values))}" if values else ""
            raise BadInput(f"{path}: {key} = {shown(value)} is not supported{only}")


def local_layers(content, path):
    """The numbers of GPT-Neo's layers that see only a window. attention_types is
    [[kinds, times], ...]."""
    layers = [kind for kinds, times in content["attention_types"] for kind in kinds * times]
    if len(layers) != content["num_layers"] or not set(layers) <= {"global", "local"}:
        raise BadInput(f"{path}: attention_types = {shown(content['attention_types'])}: must name "
                       f"global or local for each of {content['num_layers']} layers")
    return tuple(i for i, layer in enumerate(layers) if layer == "local")


def config_to_json(config):
    """GPTConfig -> (Family, the content of a config.json). BadInput if no published architecture
    has this combination of settings."""
    c = with_biases(spelled_out(config))
    family = GPT_NEO if c.attn_scale else GPT2
    if c.rope_base:
        family = QWEN2 if c.qkv_bias else LLAMA
    if c.qk_norm:
        family = QWEN3
    content = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": "float32",
    }
    content |= {key: getattr(c, name) for name, key in family.keys.items()}
    content |= family.written
    if not c.rope_base:
        content["activation_function"] = "gelu" if c.exact_gelu else "gelu_new"
    if c.rope_scaling:
        content["rope_scaling"] = dict(zip(LLAMA3_KEYS, c.rope_scaling), rope_type="llama3")
    if family is GPT_NEO:
        kinds = ["local" if i in c.local_layers else "global" for i in range(c.n_layer)]
        content |= {"attention_layers": kinds, "attention_types": [[kinds, 1]]}
    reread = config_of(family, content, "this policy")
    if spelled_out(reread) != c:
        raise BadInput(f"{config}: no published architecture has these settings together")
    return family, content


def with_biases(c):
    """The GPTConfig with biases, for a GPT-2 or GPT-Neo without, such as nanoGPT's: published ones
    always have biases, and with biases of 0 they compute the same."""
    if c.bias or c.rope_base or c.rms or c.swiglu:
        return c
    return replace(c, bias=True, qkv_bias=c.qkv_bias or not c.attn_scale)


def spelled_out(c):
    """The GPTConfig with its defaults written out."""
    return replace(
        c, n_kv_head=c.n_kv_head or c.n_head, head_dim=c.head_dim or c.n_embd // c.n_head,
        n_inner=c.n_inner or 4 * c.n_embd,
        qkv_bias=c.bias if c.qkv_bias is None else c.qkv_bias)
