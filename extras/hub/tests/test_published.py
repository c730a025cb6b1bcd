"""Whole runs on published models: tiny folders in exactly their layouts, through the commands that
a user starts."""
import importlib.util
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import evaluate
import grpo
import extras.hub.export
from extras.hub.files import load_tensors
from extras.hub.tokenizer import from_folder
from judge import judge_rewards, load_judge
from run.policy import load_run
from model import GPTConfig
from extras.hub.tests.published import (
    chat_core, gguf_of_core, load, logits, make_chat, make_gpt2, make_prompts, make_roberta,
    write_gguf)
from common.files import read_json
from data.comments import split_of
from worlds import (
    assert_near, assert_refused, generator_of, printed, read_rows, skip_without, untimed_metrics)

NEO = GPTConfig(300, 64, 2, 2, 16, qkv_bias=False, attn_scale=1.0, window=4, local_layers=(1,))
TINY = ["--device=cpu", "--max_completion_length=6", "--num_prompts=2", "--num_generations=4",
        "--micro_batch_size=4", "--num_eval_prompts=3", "--num_eval_generations=2",
        "--save_interval=1", "--eval_interval=0", "--max_iters=2", "--learning_rate=1e-2",
        "--log_micro=False"]
TRACIN = ["--tracin=reward", "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1"]
RUNS = {"gpt2": TRACIN, "neo": ["--lora_rank=2", *TRACIN], "chat": ["--beta=0.1"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Published folders and files, only for reading; .flags has them as settings."""
    here = tmp_path_factory.mktemp("published")
    w = SimpleNamespace(
        gpt2=make_gpt2(f"{here}/gpt2"), neo=make_gpt2(f"{here}/neo", NEO),
        chat=make_chat(f"{here}/chat"), prompts=make_prompts(here / "prompts.jsonl"),
        hate=make_roberta(f"{here}/hate"),
        toxic=make_roberta(f"{here}/toxic", ("neutral", "toxic"), 2))
    metadata = gguf_of_core(chat_core(), "gpt-2") | {"qwen3.context_length": 64}
    config = read_json(f"{w.chat}/config.json")
    w.gguf = write_gguf(here / "chat.gguf", config, load_tensors(w.chat), **metadata)
    w.judges = [f"--judge={w.hate}", f"--eval_judge={w.toxic}", *TINY]
    w.flags = [f"--policy={w.gpt2}", f"--prompts={w.prompts}", "--prompt_field=prompt.text",
               *w.judges]
    return w


@pytest.fixture(autouse=True)
def no_comments(monkeypatch):
    """Nothing here needs the labelled comments: as if their package were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name: None if name == "profanity_check" else find(name))


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """finished(kind) -> folder of a run of RUNS, made at first use; only for reading."""
    made = {}

    def get(kind):
        if "--lora_rank=2" in RUNS[kind]:
            skip_without("lora")
        if kind not in made:
            made[kind] = str(tmp_path_factory.mktemp("runs") / "run")
            start(grpo.main, *flags_of(world, kind), f"--out_dir={made[kind]}")
        return made[kind]

    return get


def start(main, *argv):
    return printed(main, list(map(str, argv)))


def export_run(argv):
    extras.hub.export.main(argv, load_run)


def flags_of(world, kind):
    return [*world.flags, f"--policy={getattr(world, kind)}", *RUNS[kind]]


# ------------------------------------------------------------------------------------------------
# whole runs

@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_rewarded_by_the_judge_evaluated_again_and_leaves_as_it_is(
        kind, finished, world, tmp_path):
    folder = finished(kind)
    samples = read_rows(f"{folder}/samples.jsonl")
    completions = [row["completion"] for row in samples]
    rewards = judge_rewards(load_judge(world.hate)(completions), completions, "logit")
    for row, r in zip(samples, rewards, strict=True):       # None: the judge abstains
        assert row["reward"] == (r and pytest.approx(r, rel=1e-4, abs=1e-4))
    last = read_rows(f"{folder}/eval.jsonl")[-1]
    assert f" {last['perplexity']:.4f} " in start(evaluate.main, folder)

    start(export_run, folder, tmp_path / "out")
    base = getattr(world, kind)
    idx = torch.tensor([[7, 280, 3, 299, 44, 45]])
    exported = logits(load(f"{tmp_path}/out"), idx)
    assert_near(exported, logits(load_run(folder)[0], idx))
    assert (logits(load(base), idx) - exported).abs().max() > 1e-3, "nothing was trained"
    assert set(os.listdir(base)) <= set(os.listdir(tmp_path / "out"))


def test_a_gguf_trains_as_the_folder_that_it_was_made_of(finished, world, tmp_path):
    run = tmp_path / "run"
    start(grpo.main, *flags_of(world, "chat"), f"--policy={world.gguf}", f"--out_dir={run}")
    assert untimed_metrics(run) == untimed_metrics(finished("chat"))


def test_commands_take_published_models(finished, world, tmp_path, monkeypatch):
    folder = shutil.copytree(finished("chat"), tmp_path / "chat")
    skip_without("step")
    text = start(grpo.main, folder, "--debug_step=True", "--tracin=reward", "--kl_in=reward")
    assert "agree with plain backwards" in text
    monkeypatch.chdir(tmp_path)
    text = start(grpo.main, *flags_of(world, "chat"), "--debug_step=True")
    assert "h.1.mlp.c_fc.weight" in text
    assert os.listdir(tmp_path) == ["chat"], "a command that only looks has written"


# ------------------------------------------------------------------------------------------------
# the published configs; transformers

@pytest.mark.parametrize("config, kind, extra", [
    ("toxicity_gpt2", "gpt2", "hub"), ("toxicity_gptneo_lora", "neo", "lora"),
    ("toxicity_smollm2", "chat", "lora")])
def test_a_config_runs_on_its_own_prompts(config, kind, extra, world, tmp_path, monkeypatch):
    skip_without(extra)
    rows = [row["prompt"] for row in read_rows(world.prompts)]
    prompts = {row["text"] for row in rows if (row["toxicity"] or 0) >= 0.3}
    comments = [(f"Comment {i} is labelled offensive", 1) for i in range(200)]
    if config == "toxicity_smollm2":
        prompts = {text for text, _ in comments if split_of(text).endswith("_prompts")}
    comments += [(f"Comment {i} is not, it is clean", 0) for i in range(200)]
    monkeypatch.setattr("data.comments.load_comments", lambda: comments)
    files = {("allenai/real-toxicity-prompts", "prompts.jsonl", "dataset"): world.prompts}
    monkeypatch.setattr("huggingface_hub.hf_hub_download",
                        lambda name, file, repo_type: files[name, file, repo_type])
    # a config that another test has imported has the real one
    monkeypatch.delitem(sys.modules, "extras.hub.config.toxicity_gpt2", raising=False)
    start(grpo.main, f"extras/hub/config/{config}.py", *world.judges,
          f"--policy={getattr(world, kind)}", "--max_iters=1", f"--out_dir={tmp_path}/run")
    metrics = read_rows(f"{tmp_path}/run/metrics.jsonl")
    assert ("tracin/mean_ip" in metrics[0]) == (kind == "neo")
    assert {row["prompt"] for row in read_rows(f"{tmp_path}/run/samples.jsonl")} <= prompts


@pytest.mark.parametrize("kind", RUNS)
def test_transformers_opens_what_leaves_and_computes_the_same(kind, finished, tmp_path):
    transformers = pytest.importorskip("transformers")
    start(export_run, finished(kind), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    idx = torch.randint(300, (2, 20), generator=generator_of(0))
    found = logits(load_run(finished(kind))[0], idx)
    assert_near(theirs(idx).logits.detach(), found, 1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = from_folder(f"{tmp_path}/out")
    text = "The cat's  1234 \U0001f642"
    assert tokenizer(text, add_special_tokens=False).input_ids == ours.encode_ordinary(text)


# ------------------------------------------------------------------------------------------------
# what cannot be, in one line and before anything is made

# a flag | what the refusal names
REFUSALS = """
--policy=no/where/there | no/where/there
--policy={large} | {large}
--max_completion_length=64 | max_completion_length
--judge={hate}:toxic | nothate, hate
--prompt_field=prompt.words | prompt.words
"""


def test_refused_before_anything_is_made(world, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "collect", lambda *a, **k: pytest.fail("a rollout was sampled"))
    large = shutil.copytree(world.chat, tmp_path / "large")
    chat_core(400).save(f"{large}/tokenizer.json")
    for line in REFUSALS.strip().splitlines():
        flag, name = line.format(large=large, **vars(world)).split(" | ")
        assert_refused(name, grpo.main, [*world.flags, f"--out_dir={tmp_path}/run", flag])
        assert not (tmp_path / "run").exists()
