"""hub/export.py: what leaves is what came in, merged or as an adapter, with its tokenizer."""
import json
import os

import pytest
import torch

import export as export_script
import hub.export
import hub.policy
from data.tokenizer import load_tokenizer
from hub.export import export
from hub.tensors import gguf_metadata, load_tensors
from hub.tokenizer import gguf_tokenizer, read_tokenizer
from model import GPT, GPTConfig, add_lora
from run.files import load_gpt
from test_hub_policy import (LAYOUTS, LLAMA, every_layout, ids_of, logits, make_tensors, refusal,
                             write, write_gguf)

TOKENIZER = {"tokenizer.json": "{}", "vocab.json": "{}",
             "generation_config.json": '{"eos_token_id": 3}', "other.txt": ""}


def with_tokenizer(folder):
    for name, text in TOKENIZER.items():
        with open(os.path.join(folder, name), "w") as f:
            f.write(text)
    return folder


@every_layout
def test_export_gives_back_the_tensors_and_settings_it_was_loaded_from(layout, tmp_path):
    c, tensors = LAYOUTS[layout] | dict(eos_token_id=3), make_tensors(LAYOUTS[layout])
    source = with_tokenizer(write(tmp_path / "in", c))
    export(hub.policy.load(source)[0], tmp_path / "out", source)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    back = load_tensors(tmp_path / "out" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], x) for name, x in tensors.items())
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: found[k] for k in ("architectures", "model_type", "eos_token_id")} == {
        k: c[k] for k in ("architectures", "model_type", "eos_token_id")}
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "generation_config.json",
                                                    "model.safetensors",
                                                    "tokenizer.json", "vocab.json"]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 3}
    again, idx = hub.policy.load(tmp_path / "out")[0], torch.tensor(ids_of(9))
    assert torch.equal(logits(again, idx), logits(hub.policy.load(source)[0], idx))


@pytest.mark.parametrize("merge_first", [False, True])
@pytest.mark.parametrize("layers", [("c_attn", "c_proj", "c_fc"), ("c_fc",), ("c_attn",)])
@pytest.mark.parametrize("layout", ["gpt2", "gpt_neo", "llama", "qwen2 tied", "qwen3"])
def test_lora_leaves_merged_or_as_an_adapter_whose_parts_add_up_to_the_same(
    layout, layers, merge_first, tmp_path):
    source = write(tmp_path / "in", LAYOUTS[layout])
    model, idx = add_lora(hub.policy.load(source)[0], 3, 6.0, layers), torch.tensor(ids_of(9))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("B.weight"):
                p.copy_(0.2 * torch.randn(p.shape,
                                          generator=torch.Generator().manual_seed(len(name))))
    expected, before = logits(model, idx), logits(hub.policy.load(source)[0], idx)
    assert float((expected - before).abs().max()) > 0.05
    for module in model.modules():
        if merge_first and hasattr(module, "merge"):
            module.merge()
    export(model, tmp_path / "merged", source)
    torch.testing.assert_close(logits(hub.policy.load(tmp_path / "merged")[0], idx), expected,
                               rtol=0, atol=1e-4)

    export(model, tmp_path / "adapter", source, adapter="someone/base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"],
            config["fan_in_fan_out"]) == (
        3, 6.0, "someone/base", layout == "gpt2")
    adapter = load_tensors(tmp_path / "adapter" / "adapter_model.safetensors")
    tensors = make_tensors(LAYOUTS[layout])
    targets = set()
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        update = 2.0 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        tensors[module + ".weight"] += update.T if layout == "gpt2" else update
        targets.add(module.split(".")[-1])
    assert 2 * len(targets & set(config["target_modules"])) == len(targets) + len(
        config["target_modules"])
    torch.testing.assert_close(logits(hub.policy.load(
        write(tmp_path / "by_hand", LAYOUTS[layout], tensors))[0], idx), expected,
                               rtol=0, atol=1e-4)


def test_exported_dtype(tmp_path):
    source = write(tmp_path / "in", LLAMA)
    model = hub.policy.load(source)[0]
    for dtype in ("bfloat16", "float16"):
        export(model, tmp_path / dtype, source, dtype=dtype)
        back = load_tensors(tmp_path / dtype / "model.safetensors")
        assert all(torch.equal(back[name], x.to(getattr(torch, dtype)))
                   for name, x in make_tensors(LLAMA).items())
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == dtype
    assert "dtype = 'int8'" in refusal(export, model, tmp_path / "int8", source, dtype="int8")


@pytest.mark.parametrize("shape", [
    dict(bias=False), dict(causal=False), dict(rms=True), dict(qkv_bias=False), dict(swiglu=True),
    dict(rope_base=100.0),
    dict(rope_base=100.0, rms=True, swiglu=True), dict(window=3, local_layers=(0,)),
    dict(head_dim=6),
    dict(attn_scale=0.5, qkv_bias=False), dict(rope_base=1e4, rms=True, swiglu=True, bias=False,
                                               qkv_bias=True, qk_norm=True)])
def test_shape_that_nobody_publishes_is_refused(shape, tmp_path):
    message = refusal(export, GPT(GPTConfig(300, 16, 1, 2, 8, **shape)), tmp_path / "out",
                      load_tokenizer(300))
    assert "no published architecture" in message and not os.listdir(tmp_path)


def test_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    model, t = GPT(GPTConfig(300, 16, 1, 2, 8)), load_tokenizer(300)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        assert f"{tmp_path / name}: holds something already" in refusal(
            export, model, tmp_path / name, t)
    assert "300 tokens, the model only 257" in refusal(export, GPT(GPTConfig(257, 16, 1, 2, 8)),
                                                       tmp_path / "out", t)
    assert "no LoRA adapter" in refusal(export, model, tmp_path / "out", t, adapter="gpt2")

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(hub.export, "save_tensors", full)
        assert "No space left" in refusal(export, model, tmp_path / "out", t)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert os.listdir(tmp_path / "full") == ["mine"]
    (tmp_path / "out").mkdir()  # empty is as good as not there
    export(model, tmp_path / "out", t)
    assert "model.safetensors" in os.listdir(tmp_path / "out")


def test_tokenizer_of_a_gguf_file_leaves_with_the_policy(tmp_path):
    tokens = ["<|end|>", "<|user|>", *"abcdefgh123", "Ġ", "ab", "Ġa", "abc", "Ġabc"]
    meta = {"model": "gpt2", "pre": "smollm", "tokens": tokens,
            "merges": ["a b", "Ġ a", "ab c", "Ġ abc"], "eos_token_id": 0}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), "llama",
                      **{f"tokenizer.ggml.{key}": value for key, value in meta.items()},
                      **{"tokenizer.chat_template": "{{ x }}"})
    model, source = hub.policy.load(path)
    export(model, tmp_path / "out", source)
    t = read_tokenizer(str(tmp_path / "out"))
    text = "abc abcab  a12 3<|end|>"
    assert t.encode_ordinary(text) == gguf_tokenizer(gguf_metadata(path)).encode_ordinary(text)
    assert t.eot_token == 0
    assert t.encode_ordinary("abc abc12") == [tokens.index(x) for x in ("abc", "Ġabc", "1", "2")]
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())[
        "chat_template"] == "{{ x }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    assert torch.equal(hub.policy.load(tmp_path / "out")[0].wte.weight, model.wte.weight)


@pytest.mark.parametrize("vocab_size", [257, 300, 2000])
def test_merges_of_an_exported_tokenizer_rebuild_its_tokens(vocab_size, tmp_path):
    export(GPT(GPTConfig(vocab_size, 16, 1, 2, 8)), tmp_path / "out", load_tokenizer(vocab_size))
    whole = json.loads((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
    assert vocab == json.loads((tmp_path / "out" / "vocab.json").read_text(encoding="utf-8"))
    lines = (tmp_path / "out" / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["#version: 0.2", *merges] and len(merges) == vocab_size - 257
    assert [vocab["".join(merge.split(" "))] for merge in merges] == list(
        range(256, vocab_size - 1))
    assert all(vocab[part] < 256 + i for i, merge in enumerate(merges) for part in merge.split(" "))
    assert merges[:3] == ["Ġ t", "Ġ a", "h e"][:len(merges)]  # as in GPT-2's own merges.txt
    assert vocab["<|endoftext|>"] == vocab_size - 1 == whole["added_tokens"][0]["id"]
    t = read_tokenizer(str(tmp_path / "out"))
    text = "It's a TEST,  12345 of\r\n\n\tevery kind: naïve 中文 🙂 "
    assert t.encode_ordinary(text) == load_tokenizer(vocab_size).encode_ordinary(text)
    assert t.eot_token == vocab_size - 1


def test_command_exports_a_run_and_a_policy_file(tiny, grpo, tmp_path, capsys):
    idx = torch.arange(20)[None]
    export_script.main([tiny.policy, str(tmp_path / "policy")])
    base = hub.policy.load(tmp_path / "policy")[0]
    assert torch.equal(logits(base, idx), logits(load_gpt(tiny.policy), idx))
    assert "model.safetensors" in capsys.readouterr().out
    grpo(tmp_path / "run", "--max_iters=1", "--lora_rank=2", "--learning_rate=0.01")
    export_script.main([str(tmp_path / "run"), str(tmp_path / "merged"), "--dtype=float32"])
    assert "usage: python export.py" in refusal(
        export_script.main, [str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter="])
    export_script.main([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter=base"])
    merged = hub.policy.load(tmp_path / "merged")[0]
    adapter = load_tensors(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "transformer.h.0.mlp.c_fc"
    update = 2 * adapter[f"base_model.model.{name}.lora_B.weight"] @ adapter[
        f"base_model.model.{name}.lora_A.weight"]
    scale = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] / 2
    torch.testing.assert_close(merged.h[0].mlp.c_fc.weight - base.h[0].mlp.c_fc.weight,
                               update * scale / 2, rtol=0, atol=1e-6)
    assert float(update.abs().max()) > 1e-5
    for argv in ([], ["a"], [tiny.policy, "b", "--what=1"], [tiny.policy, "b", "--dtype"],
                 ["a", "b", "c"]):
        assert "python export.py RUN_OR_PT FOLDER" in refusal(export_script.main, argv)
    assert "no such file" in refusal(export_script.main,
                                     [str(tmp_path / "nothing.pt"), str(tmp_path / "out")])


def test_default_settings_are_gpt2_by_position_and_in_the_names_of_its_tensors():
    model = GPT(GPTConfig(50, 24, 2, 4, 32))
    modules = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    blocks = [f"h.{i}.{module}.{x}" for i in range(2) for module in modules
              for x in ("weight", "bias")]
    assert list(model.state_dict()) == ["wte.weight", "wpe.weight", *blocks, "ln_f.weight",
                                        "ln_f.bias", "lm_head.weight"]
    assert model.h[0].attn.c_attn.weight.shape == (96, 32)
    assert model.h[0].mlp.c_fc.weight.shape == (128, 32)
