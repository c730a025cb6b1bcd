"""Every key of a config.json that transformers reads is honoured, refused by name, or known to
leave the logits alone."""
import json

import pytest
import torch

import hub.policy
from hub.layouts import ALIASES, ARCHITECTURES, KEYS, LLAMA3_KEYS, ONLY_OF
from judge.roberta import DEFAULTS, ONLY_ROBERTA, read_roberta_config
from run.script import BadInput
from test_hub_policy import GPT2, LLAMA, LLAMA3, NEO, QWEN2, QWEN3, make_tensors, write

BASES = dict(gpt2=GPT2, gpt_neo=NEO, llama=LLAMA, qwen2=QWEN2, qwen3=QWEN3)
# about training, files, memory, generation, other heads, or the form of what a call returns
HARMLESS = """
    _name_or_path attention_dropout attention_probs_dropout_prob attn_pdrop bos_token_id
    chunk_size_feed_forward classifier_dropout dtype embd_pdrop embed_dropout eos_token_id
    hidden_dropout_prob id2label initializer_range label2id max_window_layers output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type resid_dropout resid_pdrop
    return_dict sliding_window summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj transformers_version use_cache""".split()
HARMLESS_OF = dict(roberta=["tie_word_embeddings"])  # a classifier has no such head
# read by functions of their own in hub/layouts.py and judge/roberta.py
ELSEWHERE = dict(
    gpt2=["activation_function"],
    gpt_neo=["activation_function", "attention_layers", "attention_types"],
    llama=["rope_parameters"],
    qwen2=["rope_parameters", "layer_types"],
    qwen3=["rope_parameters", "layer_types"],
    roberta=["hidden_act"],
)
# the keys of the classes of transformers 5.23, without those of all classes
IN_5_23 = dict(
    gpt2="""activation_function add_cross_attention attn_pdrop embd_pdrop hidden_size
        layer_norm_epsilon max_position_embeddings n_embd n_head n_inner n_layer n_positions
        num_attention_heads num_hidden_layers reorder_and_upcast_attn resid_pdrop
        scale_attn_by_inverse_layer_idx scale_attn_weights""",
    gpt_neo="""activation_function attention_dropout attention_layers attention_types
        classifier_dropout embed_dropout hidden_size intermediate_size layer_norm_epsilon
        max_position_embeddings num_attention_heads num_heads num_hidden_layers num_layers
        resid_dropout window_size""",
    llama="""attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
        max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
        pretraining_tp rms_norm_eps rope_parameters""",
    qwen2="""attention_dropout hidden_act hidden_size intermediate_size layer_types
        max_position_embeddings max_window_layers num_attention_heads num_hidden_layers
        num_key_value_heads rms_norm_eps rope_parameters sliding_window use_sliding_window""",
    qwen3="""attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
        layer_types max_position_embeddings max_window_layers num_attention_heads
        num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters sliding_window
        use_sliding_window""",
    roberta="""add_cross_attention attention_probs_dropout_prob classifier_dropout hidden_act
        hidden_dropout_prob hidden_size intermediate_size is_decoder layer_norm_eps
        max_position_embeddings num_attention_heads num_hidden_layers type_vocab_size""",
)
every_kind = pytest.mark.parametrize("kind", IN_5_23)


def known(kind):
    """All keys that this project says something about."""
    keys = {*HARMLESS, *HARMLESS_OF.get(kind, ()), *ELSEWHERE[kind], "architectures", "model_type"}
    if kind == "roberta":
        return keys | DEFAULTS.keys() | ONLY_ROBERTA.keys()
    return keys | {*KEYS[kind].values()} | ONLY_OF[kind].keys() | ALIASES.get(kind, {}).keys()


@every_kind
def test_every_key_of_transformers_5_23_is_known(kind):
    unknown = {*IN_5_23[kind].split()} - known(kind)
    assert not unknown, f"{kind}: nothing says what becomes of {unknown} in a config.json"


@every_kind
def test_every_key_of_the_transformers_that_is_installed_is_known(kind):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers")
    config = transformers.AutoConfig.for_model(kind)
    unknown = {*config.to_dict(), *config.attribute_map} - known(kind)
    assert not unknown, f"{kind}: nothing says what becomes of {unknown} in a config.json"


def other_values(values):
    """Values that mean something else than these."""
    others = [True, False, 3, 0.5, "other", {"0": {"num_key_value_heads": 4}}, ["x"]]
    return [value for value in others if value not in values]


@pytest.mark.parametrize("kind", BASES)
def test_keys_that_are_not_built_are_refused_by_name_and_may_be_null(kind, tmp_path):
    assert ONLY_OF.keys() == ARCHITECTURES.keys()
    for key, values in ONLY_OF[kind].items():
        for value in [None, *values]:
            hub.policy.load(write(tmp_path / "m", BASES[kind] | {key: value}))
        for value in other_values(values):
            folder = write(tmp_path / "m", BASES[kind] | {key: value})
            with pytest.raises(BadInput, match=rf"{folder}: config.json: {key} = .* not supp"):
                hub.policy.load(folder)


@pytest.mark.parametrize("key", ONLY_ROBERTA)
def test_a_judge_of_other_arithmetic_is_refused_by_name(key, tmp_path):
    values = ONLY_ROBERTA[key]
    config = dict(model_type="roberta")
    for value in [None, *values]:
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        read_roberta_config("judge", str(tmp_path))
    for value in other_values(values):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(BadInput, match=rf"^judge: config.json: {key} = .* not supported"):
            read_roberta_config("judge", str(tmp_path))


@pytest.mark.parametrize("base, changes, says", [
    (GPT2, dict(hidden_size=24), "hidden_size = 24 contradicts n_embd = 12"),
    (GPT2, dict(num_attention_heads=2), "num_attention_heads = 2 contradicts n_head = 4"),
    (NEO, dict(num_hidden_layers=2), "num_hidden_layers = 2 contradicts num_layers = 3"),
    (NEO, dict(attention_layers=["global", "local", "global"]),
     "attention_layers = .* contradicts attention_types"),
    (LLAMA, dict(rope_parameters=dict(rope_theta=9.0)), "rope_theta = 9.0 contradicts .* = 50.0"),
    (LLAMA, dict(rope_scaling=LLAMA3, rope_parameters=dict(rope_type="default")),
     "rope_parameters = .* contradicts rope_scaling = "),
    (LLAMA, dict(rope_scaling=LLAMA3, rope_parameters=LLAMA3 | dict(factor=4)),
     "rope_parameters = .* contradicts rope_scaling = "),
    (LLAMA, dict(rope_scaling=LLAMA3, original_max_position_embeddings=8),
     "original_max_position_embeddings = 24 contradicts .* = 8"),
    (LLAMA, dict(rope_scaling=LLAMA3 | dict(high_freq_factor=1.0)),
     "low_freq_factor = 1.0 must be below high_freq_factor = 1.0"),
    *((LLAMA, dict(rope_scaling=LLAMA3 | {key: value}), f"config.json: {key} = ")
      for key in LLAMA3_KEYS for value in (None, 0, -1.0, "8", True, float("inf"), 10 ** 400)),
    (LLAMA, dict(rope_theta=0), "rope_theta = 0"),
    (QWEN2, dict(rope_parameters=dict(full_attention=dict(rope_theta=50.0))),
     "full_attention in rope_parameters is not supported"),
    (LLAMA, dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor")])
def test_what_contradicts_itself_is_refused(base, changes, says, tmp_path):
    folder = write(tmp_path / "m", base | changes)
    with pytest.raises(BadInput, match=f"{folder}: .*{says}"):
        hub.policy.load(folder)


@pytest.mark.parametrize("base, changes", [
    (GPT2, dict(hidden_size=12, num_hidden_layers=2)),
    (NEO, dict(attention_layers=["global", "local", "local"])),
    (LLAMA, dict(rope_parameters=dict(rope_theta=50.0), rope_scaling=None)),
    (LLAMA, dict(rope_parameters=dict(rope_type="default"), rope_scaling=dict(type="default")))])
def test_what_is_said_twice_alike_is_read(base, changes, tmp_path):
    once = hub.policy.load(write(tmp_path / "once", base))[0]
    twice = hub.policy.load(write(tmp_path / "twice", base | changes))[0]
    assert once.config == twice.config


# --------------------------------------------------------------------------------------------------
# against transformers: any value of any key gives the same logits there and here, or is refused

# keys of no config class that transformers reads all the same, in this version or in older ones
MORE = """attention_chunk_size compression_config configuration_files decoder fusion_config head_dim
    hidden_act is_causal is_decoder layer_types mlp_bias n_ctx num_kv_shared_layers num_labels
    original_max_position_embeddings partial_rotary_factor per_layer_config pruned_heads
    quantization_config rope_parameters rope_scaling rope_theta scale_attn_weights sliding_window
    text_config tie_last_hidden_states tie_word_embeddings torch_dtype transformers_weights
    use_sliding_window window_size""".split()
VALUES = [None, True, False, 2, 0.5, "gelu", {"0": {"num_key_value_heads": 1}}]
ROPES = [{}, {"rope_theta": 7.0}, {"type": "linear", "factor": 2}, LLAMA3,
         LLAMA3 | {"rope_theta": 7.0}, {"rope_type": "default", "factor": 8.0}]
VALUES_OF = dict(
    rope_parameters=ROPES,
    rope_scaling=ROPES,
    layer_types=[["full_attention"] * 2, ["sliding_attention"] * 2],
    attention_layers=[["global", "local", "local"], ["local", "global", "local"]],
    attention_types=[[[["local"], 3]], [[["global"], 1], [["local"], 2]]],
    activation_function=["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"],
)


@pytest.mark.parametrize("kind", BASES)
def test_any_value_of_any_key_is_read_as_transformers_reads_it_or_refused(kind, tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(kind)
    tensors = make_tensors(BASES[kind])
    idx = torch.randint(23, (2, 20), generator=torch.Generator().manual_seed(1))
    folder = write(tmp_path / "m", BASES[kind], tensors)
    read = 0
    wrong = []
    for key in sorted({*config.to_dict(), *config.attribute_map, *MORE} - {"model_type"}):
        for value in VALUES + VALUES_OF.get(key, []):
            (tmp_path / "m" / "config.json").write_text(json.dumps(BASES[kind] | {key: value}))
            try:
                ours = hub.policy.load(folder)[0]
            except BadInput:
                continue
            try:
                theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
                with torch.no_grad():
                    expected = theirs(idx).logits
            except Exception:  # no file of theirs
                continue
            with torch.no_grad():
                gap = (ours.lm_head(ours(idx)) - expected).abs().max()
            read += 1
            if not gap < 1e-5:
                wrong.append((key, value, float(gap)))
    print(f"\n{kind}: {read} read alike")
    assert read > 100
    assert not wrong, f"{wrong}: transformers reads another model of this key, value"
