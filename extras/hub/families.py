"""How models are published, one table per family: names of tensors, config.json to GPTConfig and
back.

Known are GPT-2, GPT-Neo, Llama, Qwen2 and Qwen3. Another family that model.py can compute is one
more entry of FAMILIES. What a published model has and model.py has not is refused: here, if it is a
key of config.json that no tensor shows, and in extras/hub/policy.py, if a tensor has no place.
"""
import re
from dataclasses import dataclass, replace

from model import GPTConfig
from common.script import BadInput, shown


@dataclass
class Family:
    architecture: str   # as config.json names it
    names: dict         # module here -> modules there; several are stacked along the rows
    keys: dict          # field of GPTConfig -> key of config.json
    only: dict          # key of config.json -> the values it may have where it is given
    fields: dict        # of GPTConfig, where config.json says nothing else
    transposed: bool = False    # matrices are published as (in, out)


# activation_function -> GPTConfig.exact_gelu
GELU = {"gelu": True, "gelu_new": False}

GPT2_NAMES = dict(wte="transformer.wte", wpe="transformer.wpe", h="transformer.h",
                  ln_f="transformer.ln_f")
NEO_NAMES = GPT2_NAMES | {
    "attn.c_attn": "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj",
    "attn.c_proj": "attn.attention.out_proj",
}
LLAMA_NAMES = {
    "wte": "model.embed_tokens", "h": "model.layers", "ln_f": "model.norm",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "mlp.c_fc": "mlp.gate_proj mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
}
GGUF_NAMES = {
    "wte": "token_embd", "h": "blk", "ln_f": "output_norm", "lm_head": "output",
    "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "attn_q attn_k attn_v", "attn.c_proj": "attn_output",
    "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm",
    "mlp.c_fc": "ffn_gate ffn_up", "mlp.c_proj": "ffn_down",
}
GPT2_KEYS = dict(
    tied="tie_word_embeddings", vocab_size="vocab_size", block_size="n_positions", n_embd="n_embd", n_inner="n_inner",
    n_layer="n_layer", n_head="n_head", norm_eps="layer_norm_epsilon")
NUMBERS = dict(tied="tie_word_embeddings", vocab_size="vocab_size", block_size="max_position_embeddings", n_embd="hidden_size",
               n_inner="intermediate_size")
NEO_KEYS = NUMBERS | dict(n_layer="num_layers", n_head="num_heads", window="window_size",
                          norm_eps="layer_norm_epsilon")
LLAMA_KEYS = NUMBERS | dict(
    n_layer="num_hidden_layers", n_head="num_attention_heads", n_kv_head="num_key_value_heads",
    head_dim="head_dim", norm_eps="rms_norm_eps")
REQUIRED = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "window")
LLAMA_FIELDS = dict(tied=False, bias=False, rms=True, swiglu=True, qkv_bias=False, norm_eps=1e-6)
ONLY = dict(quantization_config=(), is_causal=(True,), add_cross_attention=(False,))
ONLY_GELU = ONLY | dict(activation_function=tuple(GELU))
ONLY_GPT2 = ONLY_GELU | dict(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,))
ONLY_ROTARY = ONLY | dict(
    hidden_act=("silu", "swish"), partial_rotary_factor=(1,), attention_chunk_size=())
ONLY_LLAMA = ONLY_ROTARY | dict(
    sliding_window=(), attention_bias=(False,), mlp_bias=(False,))
ONLY_QWEN = ONLY_ROTARY | dict(use_sliding_window=(False,))

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", GPT2_NAMES, GPT2_KEYS, ONLY_GPT2, {}, transposed=True),
    "gpt_neo": Family("GPTNeoForCausalLM", NEO_NAMES, NEO_KEYS, ONLY_GELU,
                      dict(qkv_bias=False, attn_scale=1.0)),
    "llama": Family("LlamaForCausalLM", LLAMA_NAMES, LLAMA_KEYS, ONLY_LLAMA, LLAMA_FIELDS),
    "qwen2": Family("Qwen2ForCausalLM", LLAMA_NAMES, LLAMA_KEYS, ONLY_QWEN,
                    LLAMA_FIELDS | dict(qkv_bias=True)),
    "qwen3": Family("Qwen3ForCausalLM", LLAMA_NAMES, LLAMA_KEYS,
                    ONLY_QWEN | dict(attention_bias=(False,)),
                    LLAMA_FIELDS | dict(qk_norm=True, head_dim=128)),
}
# of rope_type = "llama3", in the order of model.scale_frequency
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def pieces(model, names, name, rows):
    """[(published name, its rows)] of what is stacked, in this order, into the tensor `name`."""
    module, leaf = name.rsplit(".", 1)
    prefix = ""
    block = re.match(r"h\.(\d+)\.(.+)", module)
    if block:
        prefix = f"{names['h']}.{block[1]}."
        module = block[2]
    parts = names.get(module, module).split()
    sizes = [rows // len(parts)] * len(parts)
    if len(parts) == 3:  # queries, keys, values
        attn = model.h[0].attn
        sizes = [attn.hs * heads for heads in (attn.n_head, attn.n_kv_head, attn.n_kv_head)]
    return [(f"{prefix}{part}.{leaf}", size) for part, size in zip(parts, sizes)]


def config_from_json(content, path):
    """The content of a config.json -> (key of FAMILIES, GPTConfig). BadInput for what is not built
    here."""
    named = content.get("architectures") or [content.get("model_type")]
    kinds = [kind for kind, family in FAMILIES.items() if named[0] in (kind, family.architecture)]
    if not kinds:
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise BadInput(f"{path}: architecture {shown(named[0])} is none that a policy can have: "
                       f"{known}")
    kind = kinds[0]
    family = FAMILIES[kind]
    check_only(family.only, content, path)
    fields = dict(family.fields)
    for name, key in family.keys.items():
        if content.get(key) is not None:
            fields[name] = content[key]
        if name in REQUIRED and not fields.get(name):
            raise BadInput(f"{path}: {key} is missing in config.json")
    aliases = dict(num_hidden_layers=(fields["n_layer"],), num_attention_heads=(fields["n_head"],))
    check_only(aliases, content, path)
    if fields.get("rms"):      # Llama's kind of block
        fields |= fields_of_rope(content, path)
    else:
        fields["exact_gelu"] = GELU[content.get("activation_function", "gelu_new")]
    if kind == "gpt_neo":
        fields["local_layers"] = local_layers(content, path)
    return kind, GPTConfig(**fields)


def check_only(table, content, path):
    """BadInput for a key whose value means other arithmetic than the one here."""
    for key, values in table.items():
        value = content.get(key)
        if value is not None and value not in values:
            only = f", only {', '.join(map(repr, values))}" if values else ""
            raise BadInput(f"{path}: {key} = {shown(value)} is not supported{only}")


def local_layers(content, path):
    """Numbers of GPT-Neo's layers that see a window only. attention_types is [[kinds, times], ...].
    """
    layers = []
    types = content.get("attention_types")
    for kinds, times in types or ():
        layers += kinds * times
    if len(layers) != content["num_layers"] or not set(layers) <= {"global", "local"}:
        raise BadInput(f"{path}: attention_types = {shown(types)}: must name "
                       f"global or local for each of {content['num_layers']} layers")
    check_only(dict(attention_layers=(layers,)), content, path)
    return tuple(i for i, layer in enumerate(layers) if layer == "local")


def fields_of_rope(content, path):
    """The fields of rotary positions. transformers 5 writes rope_parameters; 4 writes rope_scaling
    beside rope_theta."""
    if set(content.get("layer_types") or ()) - {"full_attention"}:
        raise BadInput(f"{path}: layer_types: only 'full_attention' is supported")
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    check_only(dict(rope_type=("default", "llama3"), partial_rotary_factor=(1,)),
               rope | dict(rope_type=kind), path)
    check_only(dict(rope_scaling=({}, rope)), content, path)
    fields = dict(rope_base=rope.get("rope_theta") or content.get("rope_theta") or 1e4)
    if kind == "llama3":
        factor, low, high, positions = (rope[key] for key in LLAMA3_KEYS)
        if low >= high:
            raise BadInput(f"{path}: low_freq_factor = {low} must be below high_freq_factor")
        check_only(dict(original_max_position_embeddings=(positions,)), content, path)
        fields["rope_scaling"] = (factor, low, high, positions)
    return fields


def config_to_json(config):
    """GPTConfig -> (key of FAMILIES, the content of a config.json). BadInput when no published
    architecture has these settings together."""
    c = spelled_out(config)
    kind = "gpt_neo" if c.attn_scale else "gpt2"
    if c.rope_base:
        kind = "qwen2" if c.qkv_bias else "llama"
    if c.qk_norm:
        kind = "qwen3"
    family = FAMILIES[kind]
    content = dict(architectures=[family.architecture], model_type=kind)
    content |= {key: getattr(c, name) for name, key in family.keys.items()}
    if c.rope_base:
        content |= dict(hidden_act="silu", rope_theta=c.rope_base)
    else:
        content |= dict(activation_function="gelu" if c.exact_gelu else "gelu_new")
    if c.rope_scaling:
        numbers = dict(zip(LLAMA3_KEYS, c.rope_scaling, strict=True))
        content["rope_scaling"] = dict(rope_type="llama3") | numbers
    if kind == "gpt_neo":
        kinds = ["local" if i in c.local_layers else "global" for i in range(c.n_layer)]
        content |= dict(attention_layers=kinds, attention_types=[[kinds, 1]])
    if kind == "gpt2":      # transformers' default is 0.1
        content |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    _, again = config_from_json(content, "this policy")
    if spelled_out(again) != c:
        raise BadInput(f"{config}: no published architecture has these settings together")
    return kind, content


def spelled_out(c):
    """The GPTConfig with every value that stands for another one replaced by it."""
    return replace(
        c, n_kv_head=c.n_kv_head or c.n_head, head_dim=c.head_dim or c.n_embd // c.n_head,
        n_inner=c.n_inner or 4 * c.n_embd,
        qkv_bias=c.bias if c.qkv_bias is None else c.qkv_bias)
