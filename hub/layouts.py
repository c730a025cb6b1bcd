"""How published models are written down: names of tensors, and config.json to GPTConfig and back.

Known are GPT-2, GPT-Neo, Llama, Qwen2 and Qwen3, and the last three as GGUF.
"""
import re
from dataclasses import replace

from model import GPTConfig
from run.script import BadInput

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# --------------------------------------------------------------------------------------------------
# names of tensors: module here -> modules there. Several are stacked along the rows, in this order.
# What a table leaves out has the same name there

GPT2_NAMES = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "h": "transformer.h",
    "ln_f": "transformer.ln_f",
}
NEO_NAMES = GPT2_NAMES | {
    "attn.c_attn":
        "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj",
    "attn.c_proj": "attn.attention.out_proj",
}
LLAMA_NAMES = {
    "wte": "model.embed_tokens",
    "h": "model.layers",
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.gate_proj mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "ln_f": "model.norm",
}
GGUF_NAMES = {
    "wte": "token_embd",
    "h": "blk",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_q attn_k attn_v",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_gate ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_f": "output_norm",
    "lm_head": "output",
}
NAMES = {"gpt2": GPT2_NAMES, "gpt_neo": NEO_NAMES, "llama": LLAMA_NAMES, "qwen2": LLAMA_NAMES,
         "qwen3": LLAMA_NAMES}
# of gpt2 alone: its published matrices are (in, out)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# published tensors that are no weights
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
           ".rotary_emb.inv_freq")


def pieces(model, names, name, rows):
    """[(published name, its rows)] of what is stacked, in this order, into the tensor `name`.

    names: one of the tables above. rows: of the whole tensor.
    """
    module, leaf = name.rsplit(".", 1)
    block = re.match(r"h\.(\d+)\.(.+)", module)
    prefix = ""
    if block:
        prefix = f"{names['h']}.{block[1]}."
        module = block[2]
    parts = names.get(module, module).split()
    sizes = [rows // len(parts)] * len(parts)
    if len(parts) == 3:  # queries, keys, values
        attn = model.h[0].attn
        sizes = [attn.hs * heads for heads in (attn.n_head, attn.n_kv_head, attn.n_kv_head)]
    return [(f"{prefix}{part}.{leaf}", size) for part, size in zip(parts, sizes)]


# --------------------------------------------------------------------------------------------------
# config.json: field of GPTConfig -> key there

COMMON_KEYS = dict(vocab_size="vocab_size", tied="tie_word_embeddings")
GPT2_KEYS = COMMON_KEYS | dict(
    block_size="n_positions", n_layer="n_layer", n_head="n_head", n_embd="n_embd",
    n_inner="n_inner", norm_eps="layer_norm_epsilon")
NEO_KEYS = COMMON_KEYS | dict(
    block_size="max_position_embeddings", n_layer="num_layers", n_head="num_heads",
    n_embd="hidden_size", n_inner="intermediate_size", norm_eps="layer_norm_epsilon",
    window="window_size")
LLAMA_KEYS = COMMON_KEYS | dict(
    block_size="max_position_embeddings", n_layer="num_hidden_layers",
    n_head="num_attention_heads", n_embd="hidden_size", n_inner="intermediate_size",
    norm_eps="rms_norm_eps", rope_base="rope_theta", n_kv_head="num_key_value_heads",
    head_dim="head_dim")
KEYS = {"gpt2": GPT2_KEYS, "gpt_neo": NEO_KEYS, "llama": LLAMA_KEYS, "qwen2": LLAMA_KEYS,
        "qwen3": LLAMA_KEYS}

# fields that the architecture itself decides
LLAMA_FIELDS = dict(bias=False, rms=True, swiglu=True, qkv_bias=False)
FIXED_FIELDS = {
    "gpt2": {},
    "gpt_neo": dict(qkv_bias=False, attn_scale=1.0),
    "llama": LLAMA_FIELDS,
    "qwen2": LLAMA_FIELDS | dict(qkv_bias=True),
    "qwen3": LLAMA_FIELDS | dict(qk_norm=True),
}

# keys that a config.json may leave out, and what they are then
DEFAULTS = dict(n_inner=0, layer_norm_epsilon=1e-5, window_size=256, rms_norm_eps=1e-6,
                num_key_value_heads=0, head_dim=0, tie_word_embeddings=False)
DEFAULTS_OF = {
    "gpt2": DEFAULTS | dict(tie_word_embeddings=True),
    "gpt_neo": DEFAULTS | dict(tie_word_embeddings=True, intermediate_size=0),
    "llama": DEFAULTS,
    "qwen2": DEFAULTS,
    "qwen3": DEFAULTS | dict(head_dim=128),
}

# transformers reads these keys too, and they change the arithmetic: each may be left out, null or
# one of these values. tests/test_hub_keys.py lists all that transformers reads
ONLY = dict(
    is_causal=(True,),
    is_encoder_decoder=(False,),
    per_layer_config=({},),
    pruned_heads=({},),
    quantization_config=(),
    compression_config=(),
    configuration_files=(),   # names of other config files
    fusion_config=(),
    transformers_weights=(),  # name of another file with weights
    sliding_window=(),
    attention_chunk_size=(),
)
ONLY_GPT2 = ONLY | dict(
    add_cross_attention=(False,),
    reorder_and_upcast_attn=(False,),
    scale_attn_by_inverse_layer_idx=(False,),
    scale_attn_weights=(True,),
)
ONLY_ROTARY = ONLY | dict(hidden_act=("silu", "swish"), partial_rotary_factor=(1,))
ONLY_LLAMA = ONLY_ROTARY | dict(attention_bias=(False,), mlp_bias=(False,))
ONLY_QWEN2 = ONLY_ROTARY | dict(use_sliding_window=(False,))
del ONLY_QWEN2["sliding_window"]  # not looked at without use_sliding_window
ONLY_QWEN3 = ONLY_QWEN2 | dict(attention_bias=(False,))
ONLY_OF = {"gpt2": ONLY_GPT2, "gpt_neo": ONLY, "llama": ONLY_LLAMA, "qwen2": ONLY_QWEN2,
           "qwen3": ONLY_QWEN3}
# other names of the same number, which must not contradict it
GPT2_ALIASES = dict(hidden_size="n_embd", max_position_embeddings="n_positions",
                    num_attention_heads="n_head", num_hidden_layers="n_layer")
NEO_ALIASES = dict(num_attention_heads="num_heads", num_hidden_layers="num_layers")
ALIASES = {"gpt2": GPT2_ALIASES, "gpt_neo": NEO_ALIASES}
# fields must be below 2 ** 31, or below this: no file makes a model of ten million layers
MOST = dict(n_layer=1000, rope_base=1e18)

GELU = ("gelu", "gelu_python")
GELU_BY_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# of rope_type = "llama3", in the order of model.scale_frequency
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def config_from_json(content, path):
    """The content of a config.json -> (key of ARCHITECTURES, GPTConfig).

    Raises BadInput for another architecture, and for what is missing, impossible or unsupported.
    """
    kind = architecture_of(content, path)
    try:
        check_only(ONLY_OF[kind], content)
        if kind.startswith("gpt"):
            more = dict(exact_gelu=read_gelu(content))
        else:
            check_layer_types(content)
            theta, scaling = read_rope(content)
            more = dict(rope_scaling=scaling)
            content = content | dict(rope_theta=theta)
        fields = read_fields(kind, content)
        check_aliases(ALIASES.get(kind, {}), content)
        if kind == "gpt_neo":
            more["local_layers"] = read_local_layers(content, fields)
        check_heads(fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
        raise BadInput(f"{path}: config.json: {str(e)[:300]}") from e
    return kind, GPTConfig(**fields, **FIXED_FIELDS[kind], **more)


def architecture_of(content, path):
    given = content.get("architectures")
    if not given:
        given = [ARCHITECTURES.get(str(content.get("model_type")))]
    for kind, name in ARCHITECTURES.items():
        if given == [name]:
            return kind
    raise BadInput(f"{path}: architecture {short(given)} is none that a policy can have: "
                   f"{', '.join(ARCHITECTURES.values())}")


def short(value):
    """A value of a strange file, for a message of one line."""
    try:
        return repr(value)[:100]
    except RecursionError:
        return "nested too deep"


def check_only(table, content):
    """ValueError for a key whose value means other arithmetic than the one here."""
    for key, values in table.items():
        value = content.get(key)
        if value is not None and value not in values:
            only = f", only {values[0]!r}" if values else ""
            raise ValueError(f"{key} = {short(value)} is not supported{only}")


def check_aliases(aliases, content):
    for alias, key in aliases.items():
        if alias in content and content[alias] != content.get(key):
            raise ValueError(f"{alias} = {short(content[alias])} contradicts "
                             f"{key} = {short(content.get(key))}")


def read_gelu(content):
    """Whether the activation is GELU itself, and not its approximation by tanh."""
    name = content.get("activation_function", "gelu_new")
    if name not in GELU + GELU_BY_TANH:
        raise ValueError(f"activation_function = {short(name)} is not supported, only "
                         f"{', '.join(GELU + GELU_BY_TANH)}")
    return name in GELU


def check_layer_types(content):
    for kind in content.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(f"layer_types with {short(kind)} is not supported, only "
                             "'full_attention'")


def read_rope(content):
    """(rope_theta, the four numbers of rope_type = "llama3" or ()) of a config.json.

    transformers 5 writes rope_parameters; 4 writes rope_scaling beside rope_theta. A file that has
    both, or that gives one number twice, must not contradict itself: which one counts depends on
    the version.
    """
    found = {}
    for name in ("rope_parameters", "rope_scaling"):
        if content.get(name):
            found[name] = read_rope_dict(content, content[name])
    if len(set(found.values())) > 1:
        raise ValueError(f"rope_parameters = {short(content['rope_parameters'])} contradicts "
                         f"rope_scaling = {short(content['rope_scaling'])}")
    if not found:
        return rope_number(content, {}, "rope_theta", 1e4), ()
    return next(iter(found.values()))


def read_rope_dict(content, rope):
    """The result of `read_rope` for one of its two dicts."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    for key, value in rope.items():
        if type(value) is dict:
            raise ValueError(f"{key} in rope_parameters is not supported")
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type = {short(kind)} is not supported, only 'default', 'llama3'")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("partial_rotary_factor is not supported, only 1")
    theta = rope_number(content, rope, "rope_theta", 1e4)
    if kind == "default":
        return theta, ()
    scaling = tuple(rope_number(content, rope, key) for key in LLAMA3_KEYS)
    factor, low, high, positions = scaling
    if not low < high:
        raise ValueError(f"low_freq_factor = {low} must be below high_freq_factor = {high}")
    return theta, scaling


def rope_number(content, rope, key, default=None):
    """A positive number that stands in `rope`, or beside it in `content`, or in both."""
    values = [part[key] for part in (rope, content) if part.get(key) is not None] or [default]
    for value in values:
        if type(value) not in (int, float) or not 0 < value < 1e18:
            raise ValueError(f"{key} = {short(value)}")
    if values[0] != values[-1]:
        raise ValueError(f"{key} = {values[0]} contradicts {key} = {values[-1]}")
    return values[0]


def read_fields(kind, content):
    """{field of GPTConfig: value}. ValueError for a value of another type, or beyond its range."""
    defaults = DEFAULTS_OF[kind]
    fields = {}
    for field, key in KEYS[kind].items():
        value = content.get(key)
        if value is None:
            value = defaults.get(key)
        wanted = type(getattr(GPTConfig, field))
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        least = 0 if key in defaults else 1
        if not fits or not least <= value < MOST.get(field, 2 ** 31):
            raise ValueError(f"{key} = {short(value)}")
        fields[field] = value
    return fields


def read_local_layers(content, fields):
    """Numbers of the layers that see a window only. attention_types is [[kinds, times], ...]."""
    n_layer = fields["n_layer"]
    layers = []
    for kinds, times in content["attention_types"]:
        if len(kinds) * times > n_layer - len(layers):     # a hostile file may say 10 ** 12
            raise ValueError("attention_types is of more layers than num_layers")
        layers += kinds * times
    if not set(layers) <= {"global", "local"} or len(layers) != n_layer:
        raise ValueError(f"attention_types = {short(content['attention_types'])}")
    if content.get("attention_layers") not in (None, layers):
        raise ValueError(f"attention_layers = {short(content['attention_layers'])} contradicts "
                         f"attention_types = {short(content['attention_types'])}")
    local = tuple(i for i, layer in enumerate(layers) if layer == "local")
    if local and fields["window"] == 0:
        raise ValueError("window_size = 0")
    return local


def check_heads(fields):
    """Queries share keys and values evenly; rotary positions turn pairs of channels."""
    n_head = fields["n_head"]
    n_kv_head = fields.get("n_kv_head")
    hs = fields.get("head_dim") or fields["n_embd"] // n_head
    pairs = "rope_base" not in fields or (hs >= 2 and hs % 2 == 0)
    if n_head % (n_kv_head or 1) or not pairs:
        raise ValueError(f"{n_head} heads of {hs} channels, {n_kv_head} of them for keys and "
                         "values")


def config_to_json(config):
    """GPTConfig -> (key of ARCHITECTURES, the content of a config.json).

    Raises BadInput when no published architecture has these settings together.
    """
    c = spelled_out(config)
    kind = architecture_for(c)
    content = dict(architectures=[ARCHITECTURES[kind]], model_type=kind)
    content |= {key: getattr(c, field) for field, key in KEYS[kind].items()}
    if c.rope_base:
        content["hidden_act"] = "silu"
    else:
        content["activation_function"] = "gelu" if c.exact_gelu else "gelu_new"
    if c.rope_scaling:
        numbers = dict(zip(LLAMA3_KEYS, c.rope_scaling, strict=True))
        content["rope_scaling"] = dict(rope_type="llama3") | numbers
    if kind == "gpt_neo":
        kinds = ["local" if i in c.local_layers else "global" for i in range(c.n_layer)]
        content["attention_layers"] = kinds
        content["attention_types"] = [[kinds, 1]]
    if spelled_out(config_from_json(content, "this policy")[1]) != c:
        raise BadInput(f"{config}: no published architecture has these settings together")
    return kind, content


def architecture_for(c):
    """The only architecture that could have these settings; whether it has is another question."""
    if not c.rope_base:
        return "gpt_neo" if c.attn_scale else "gpt2"
    if c.qk_norm:
        return "qwen3"
    return "qwen2" if c.qkv_bias else "llama"


def spelled_out(c):
    """The GPTConfig with every value that stands for another one replaced by it."""
    return replace(
        c,
        n_kv_head=c.n_kv_head or c.n_head,
        head_dim=c.head_dim or c.n_embd // c.n_head,
        n_inner=c.n_inner or 4 * c.n_embd,
        qkv_bias=c.bias if c.qkv_bias is None else c.qkv_bias,
        local_layers=tuple(c.local_layers),
    )
