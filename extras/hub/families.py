"""How models are published: the names of their tensors, and config.json to GPTConfig and back.

Each family has one table: GPT-2, GPT-Neo, Llama, Qwen2, Qwen3. Another family that model.py can
compute is one more table in FAMILIES. A model that would compute something else is refused: here if
a key of config.json says so, in extras/hub/policy.py if a tensor has no place.
"""
from dataclasses import dataclass, replace

from model import GPTConfig
from common.script import BadInput, shown


@dataclass
class Family:
    model_type: str     # this and the next as in config.json
    architecture: str
    names: dict         # module here -> module there
    stacked: dict       # module here -> the modules there that it holds, from its first row on
    keys: dict          # field of GPTConfig -> key of config.json
    only: dict          # key of config.json -> the values it may have, if it is there
    fields: dict        # field of GPTConfig -> its value where config.json has none
    written: dict       # key of config.json -> the value that an export has
    transposed: tuple = ()      # endings of the matrices that are published as (in, out)


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names={
        "wte": "transformer.wte",
        "wpe": "transformer.wpe",
        "h": "transformer.h",
        "ln_f": "transformer.ln_f",
    },
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
    },
    fields={},
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},    # if missing: 0.1
    transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
)
GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    names=GPT2.names | {"attn.c_proj": "attn.attention.out_proj"},
    stacked={
        "attn.c_attn": (
            "attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    },
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
    names={
        "wte": "model.embed_tokens",
        "h": "model.layers",
        "ln_f": "model.norm",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "attn.q_norm": "self_attn.q_norm",      # Qwen3 alone has these two
        "attn.k_norm": "self_attn.k_norm",
        "mlp.c_proj": "mlp.down_proj",
    },
    stacked={
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    },
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
    only={"attention_bias": (False,), "mlp_bias": (False,), "sliding_window": ()},
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
    only={"use_sliding_window": (False,)},
    fields=LLAMA.fields | {"qkv_bias": True},
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    only={"use_sliding_window": (False,), "attention_bias": (False,)},
    fields=LLAMA.fields | {"qk_norm": True, "head_dim": 128},
)
FAMILIES = (GPT2, GPT_NEO, LLAMA, QWEN2, QWEN3)

# llama.cpp's files, and their metadata in place of config.json
GGUF = {
    "names": {
        "wte": "token_embd",
        "h": "blk",
        "ln_f": "output_norm",
        "lm_head": "output",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_proj": "attn_output",
        "attn.q_norm": "attn_q_norm",
        "attn.k_norm": "attn_k_norm",
        "mlp.c_proj": "ffn_down",
    },
    "stacked": {
        "attn.c_attn": ("attn_q", "attn_k", "attn_v"),
        "mlp.c_fc": ("ffn_gate", "ffn_up"),
    },
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
        "tied": "tie_word_embeddings",
    },
    "only": {
        "rope.scaling.type": ("none",),
        "rope.scaling.factor": (0, 1),
        "rope.scale_linear": (0, 1),
        "attention.causal": (True,),
    },
}
GGUF_FAMILIES = {family.model_type: replace(family, **GGUF) for family in (LLAMA, QWEN2, QWEN3)}

# `only` of all families, and of those with rotary positions
ONLY = {"quantization_config": (), "is_causal": (True,), "add_cross_attention": (False,)}
ONLY_ROTARY = {
    "hidden_act": ("silu", "swish"),
    "attention_chunk_size": (),
    "partial_rotary_factor": (1,),
    "rope_type": ("default", "llama3"),
}
# fields of GPTConfig that are never 0
REQUIRED = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "window", "rope_base")
# keys of rope_type = "llama3", in the order of model.scale_frequency
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def pieces(model, family, name, rows):
    """Name the published tensors that the tensor `name` holds -> [(published name, its rows)]."""
    module, leaf = name.rsplit(".", 1)
    prefix = ""
    if module.startswith("h."):
        _, number, module = module.split(".", 2)
        prefix = f"{family.names['h']}.{number}."
    parts = family.stacked.get(module) or (family.names.get(module, module),)
    sizes = [rows // len(parts)] * len(parts)
    if len(parts) == 3:  # queries, keys, values
        attn = model.h[0].attn
        sizes = [attn.hs * heads for heads in (attn.n_head, attn.n_kv_head, attn.n_kv_head)]
    return [(f"{prefix}{part}.{leaf}", size) for part, size in zip(parts, sizes)]


def config_from_json(content, path):
    """The content of a config.json -> (Family, GPTConfig). BadInput for what model.py does not
    compute."""
    named = (content.get("architectures") or [content.get("model_type")])[0]
    for family in FAMILIES:
        if named in (family.architecture, family.model_type):
            return family, config_of(family, content, path)
    known = ", ".join(family.architecture for family in FAMILIES)
    raise BadInput(f"{path}: architecture {shown(named)} is not supported, only {known}")


def config_of(family, content, path):
    check_only(ONLY | family.only, content, path)
    fields = dict(family.fields)
    for name, key in family.keys.items():
        if content.get(key) is not None:
            fields[name] = content[key]
        if name in REQUIRED and not fields.get(name):
            raise BadInput(f"{path}: {key} is missing")
    others = {"num_hidden_layers": (fields["n_layer"],), "num_attention_heads": (fields["n_head"],)}
    check_only(others, content, path)
    if "rope_base" in fields:
        fields |= fields_of_rope(content, path)
    else:
        fields["exact_gelu"] = content.get("activation_function") == "gelu"
    if family is GPT_NEO:
        fields["local_layers"] = local_layers(content, path)
    return GPTConfig(**fields)


def check_only(table, content, path):
    """Raise BadInput for a key whose value means another computation."""
    for key, values in table.items():
        value = content.get(key)
        if value is not None and value not in values:
            only = f", only {', '.join(map(repr, values))}" if values else ""
            raise BadInput(f"{path}: {key} = {shown(value)} is not supported{only}")


def local_layers(content, path):
    """The numbers of GPT-Neo's layers that see only a window. attention_types is
    [[kinds, times], ...]."""
    layers = []
    types = content.get("attention_types")
    for kinds, times in types or ():
        layers += kinds * times
    if len(layers) != content["num_layers"] or not set(layers) <= {"global", "local"}:
        raise BadInput(f"{path}: attention_types = {shown(types)}: must name "
                       f"global or local for each of {content['num_layers']} layers")
    check_only({"attention_layers": (layers,)}, content, path)
    return tuple(i for i, layer in enumerate(layers) if layer == "local")


def fields_of_rope(content, path):
    """The fields of rotary positions. transformers 5 writes rope_parameters, with rope_theta;
    transformers 4 writes rope_scaling, beside rope_theta."""
    if set(content.get("layer_types") or ()) - {"full_attention"}:
        raise BadInput(f"{path}: layer_types: only 'full_attention' is supported")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    check_only(ONLY_ROTARY, content | rope | {"rope_type": kind}, path)
    check_only({"rope_scaling": ({}, rope)}, content, path)
    fields = {}
    if rope.get("rope_theta"):
        fields["rope_base"] = rope["rope_theta"]
    if kind == "llama3":
        factor, low, high, positions = (rope[key] for key in LLAMA3_KEYS)
        if low >= high:
            raise BadInput(f"{path}: low_freq_factor = {low} must be below high_freq_factor")
        check_only({"original_max_position_embeddings": (positions,)}, content, path)
        fields["rope_scaling"] = (factor, low, high, positions)
    return fields


def config_to_json(config):
    """GPTConfig -> (Family, the content of a config.json). BadInput when no published architecture
    has these settings together."""
    c = spelled_out(config)
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


def spelled_out(c):
    """The GPTConfig in which no value stands for another one."""
    return replace(
        c, n_kv_head=c.n_kv_head or c.n_head, head_dim=c.head_dim or c.n_embd // c.n_head,
        n_inner=c.n_inner or 4 * c.n_embd,
        qkv_bias=c.bias if c.qkv_bias is None else c.qkv_bias)
