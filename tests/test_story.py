"""`python tracin.py RUN --prompt --completion`: it repeats the run, says what adds up, refuses what
it cannot answer and leaves nothing behind. Its arithmetic is in test_account.py."""
import functools
import importlib
import json
import os
import re
import shutil

import pytest
import torch

from explain import story
from explain import told as told_module
from explain.account import replay
from explain.told import TOO_FAR
from worlds import assert_refused, printed, read_rows, refusal, skip_without

explain = importlib.import_module("explain.__main__")
accounts = importlib.import_module("explain.account")
RULE = """
judge = eval_judge = None


def reward(prompts, completions):
    return [1.0 * (text.count("e") + 0.1 * len(text)) for prompt, text in zip(prompts, completions)]
"""
JUDGED = """
def reward(prompts, completions):
    return [text.count("e") for text in completions]


def target(policy, tokenizer, batch):
    return policy.ln_f.weight.square().sum()
"""
TIED = RULE.replace("1.0", "len(prompt) % 2")       # some prompts teach nothing
KINDS = {
    "plain": [],
    "self": ["--tracin=self"],
    "one backward": [
        "--tracin=advantage", "--tracin_leave_one_out=True", "--tracin_adam=True", "--top_k=20",
        "--lora_rank=2", "--num_iterations=2", "--temperature=0.8"],
    "held out": [
        "--tracin=reward", "--tracin_val_prompts=3", "--tracin_target_ema=0.8", "--beta=0.1",
        "--entropy_coef=0.01", "--ref_model_sync_steps=2"],
    "resample": ["--zero_std_groups=resample"]}
ASKED = ["--prompt=you are", "--completion= green"]
NUMBER = "[+-][0-9.]+"


@pytest.fixture(scope="module")
def run(run_grpo, tmp_path_factory):
    """run(name of KINDS), run(another name, flags): the folder of such a run, made once."""
    there = tmp_path_factory.mktemp("told")
    (there / "rule.py").write_text(RULE)
    (there / "tied.py").write_text(TIED)

    @functools.cache
    def make(name, *flags):
        folder = there / name
        if name == "one backward":
            skip_without("lora")
        rule = "tied.py" if name == "resample" else "rule.py"
        run_grpo(folder, there / rule, "--max_iters=4", *KINDS.get(name, flags))
        return str(folder)

    return make


def told(folder, *flags):
    """What the account prints, and the numbers of its last line by name."""
    text = printed(explain.main, [folder, f"{folder}/config.py", *flags])
    line = re.findall("^account: .*$", text, re.M)[-1]
    assert re.fullmatch(
        f"account: rollouts {NUMBER}, rest {NUMBER}, together {NUMBER} nats; "
        f"true change {NUMBER} \\([0-9.]+ % off\\)", line)
    return text, {name: float(x) for name, x in re.findall(f"([a-z]+) ({NUMBER})", line)}


def told_of_reward(folder, *flags):
    """What is printed, and the numbers of its last line by name."""
    text = printed(explain.main, [folder, f"{folder}/config.py", *flags])
    line = re.findall("^account: rollouts.*$", text, re.M)[-1]
    return text, {name: float(x) for name, x in re.findall(f"([a-z]+) ({NUMBER})", line)}


def curve_of(text):
    """The column of the number in the table by iteration."""
    rows = re.findall("^  [0-9]+ +([0-9.-]+) +[+-]", text, re.M)
    return [float(x) for x in rows]


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read()
            for name in os.listdir(folder) if not name.endswith(".html")}


@pytest.mark.parametrize("kind", KINDS)
def test_it_repeats_the_run_and_adds_up(run, kind):
    """To the same bits, from its start and from a checkpoint, and nothing else is left behind."""
    folder = run(kind)
    before = contents(folder)
    asked = ["--account=True", "--parts=8"]
    text, whole = told(folder, *asked, "--hessian=False")
    assert "ends at other weights" not in text
    size = max(map(abs, whole.values()))
    assert abs(whole["together"] - whole["change"]) < TOO_FAR * size
    rows = read_rows(f"{folder}/samples.jsonl")
    said = {f"{row['prompt'][:48]!r} -> {row['completion'][:72]!r}" for row in rows}
    cards = re.findall("^  share .*?: (.*)$", text, re.M)
    assert cards and said.issuperset(cards), "a completion is under another one's prompt"
    shown = open(os.path.join(folder, "account.html"), encoding="utf-8").read()
    assert shown.count("<article>") == len(cards) + story.WORST
    for since in (2, 3):        # there is a checkpoint at 2
        text, later = told(folder, *asked, f"--since={since}")
        assert "ends at other weights" not in text
        assert f"iterations {since + 1} to 4" in text
        assert "from momentum" in text, "a step since has none of the momentum from before"
        assert abs(later["together"] - later["change"]) < TOO_FAR * size
    assert contents(folder) == before


def test_a_reward_that_asks_for_more_is_explained(run_grpo, tmp_path):
    """What training tells it, the account tells it, too: the curve is the run's own."""
    (tmp_path / "asks.py").write_text("""
judge = eval_judge = None

def reward(prompts, completions, completion_ids, ended, iteration):
    return [len(set(ids)) + end for ids, end in zip(completion_ids, ended)]
""")
    folder = str(tmp_path / "run")
    run_grpo(folder, tmp_path / "asks.py", "--max_iters=2")
    text, _ = told_of_reward(folder, "--hessian=False")
    last = read_rows(f"{folder}/eval.jsonl")[-1]["rewards/reward"]
    assert curve_of(text)[-1] == pytest.approx(last, abs=.006)


@pytest.mark.parametrize("kind", ["plain", "one backward", "held out"])
def test_the_held_out_reward_is_that_of_the_evaluation(run, kind):
    """Without any flag: the curve is the run's own, the parts add up, and the page says so."""
    folder = run(kind)
    before = contents(folder)
    text, found = told_of_reward(folder)
    evaluated = {row["iteration"]: row["rewards/reward"] for row in
                 read_rows(f"{folder}/eval.jsonl")}
    curve = curve_of(text)
    assert len(curve) == 4
    for iteration in evaluated.keys() - {0}:
        assert curve[iteration - 1] == pytest.approx(evaluated[iteration], abs=0.02, rel=1e-3)
    assert abs(found["change"] - (evaluated[4] - evaluated[0])) < 0.02
    assert abs(found["rollouts"] + found["rest"] - found["together"]) < 0.02
    assert "nats" not in text and "nan" not in text
    shown = open(os.path.join(folder, "account.html"), encoding="utf-8").read()
    assert "<svg" in shown and "Iteration by iteration" in shown
    listed = "no rollouts are listed" not in text
    assert ("<article>" in shown) == ("Shares of the tokens" in shown) == listed
    assert contents(folder) == before
    assert told_of_reward(folder, "--target=reward")[1] == found
    other = told_of_reward(folder, "--held_out=40")[0]
    assert "40 completions of 4 held-out prompts" in other


def test_a_judge_and_a_function_are_explained(run_grpo, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(JUDGED)
    folder = f"{tmp_path}/judged"
    run_grpo(folder, config, "--max_iters=2", "--learning_rate=1e-3")
    first, last = read_rows(f"{folder}/eval.jsonl")
    _, found = told_of_reward(folder, "--target=eval_judge", "--hessian=False")
    clean = first["eval_judge/toxicity"] - last["eval_judge/toxicity"]
    assert found["change"] == pytest.approx(clean, abs=2e-3 * abs(clean) + 1e-6)
    text, found = told_of_reward(folder, "--target=target", "--hessian=False", "--parts=4")
    policy = torch.load(f"{folder}/ckpt_000002.pt")["policy"]
    start = torch.load(f"{folder}/ckpt_000000.pt")["policy"]
    name = "ln_f.weight"
    change = float(policy[name].square().sum() - start[name].square().sum())
    assert found["change"] == pytest.approx(change, abs=0.01 * abs(change))
    assert abs(found["together"] - found["change"]) < 0.05 * abs(found["change"])
    assert "--target=nothing: must be one of eval_judge, judge, reward, target" in refusal(
        explain.main, [folder, f"{folder}/config.py", "--target=nothing"])


def test_what_cannot_be_trusted_is_not_listed(run, monkeypatch):
    folder = run("plain")
    monkeypatch.setattr(story, "SMOOTH", 2.0)       # as if the run were rough
    text, _ = told(folder, *ASKED)
    assert "The run is rough" in text and "without it" not in text and "  share " in text
    monkeypatch.setattr(story, "SMOOTH", -2.0)
    text, _ = told(folder, *ASKED)
    assert "The run is smooth" in text and "without it" in text
    monkeypatch.setattr(told_module, "USELESS", 0.0)
    text, _ = told(folder, *ASKED)
    assert "no rollouts are listed" in text and "  share " not in text
    assert "The sentence" in text and "Iteration by iteration" in text


@pytest.mark.parametrize("keep, kept", [
    (0, [0, 1, 2, 3, 4]), (1, [3, 4]), (3, [2, 3, 4])])
def test_it_starts_from_the_last_checkpoint_that_was_kept(run, tmp_path, monkeypatch, keep, kept):
    """Also where a link has the name of a checkpoint."""
    folder = run(f"keeps {keep}", "--save_interval=1", f"--keep_checkpoints={keep}")
    names = [name for name in os.listdir(folder) if name.endswith(".pt")]
    assert sorted(int(name[5:-3]) for name in names) == kept
    if 1 not in kept:
        (tmp_path / "mine.txt").write_text("mine")
        os.symlink(tmp_path / "mine.txt", f"{folder}/ckpt_000001.pt")
    starts = []

    def watched(setup, cfg, start, *rest):
        starts.append(start)
        return replay(setup, cfg, start, *rest)

    monkeypatch.setattr(story, "replay", watched)
    text, _ = told(folder, *ASKED, "--since=2", "--hessian=False")
    assert starts == [2 if 2 in kept else 0] and "ends at other weights" not in text


def test_weights_on_the_way_lie_in_files_where_memory_is_short(run, monkeypatch):
    folder = run("plain")
    before = contents(folder)
    in_memory = told(folder, *ASKED, "--hessian=False")
    monkeypatch.setattr(accounts, "free_memory", lambda device: 0)
    assert told(folder, *ASKED, "--hessian=False") == in_memory

    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "account", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explain.main([folder, f"{folder}/config.py", *ASKED])
    assert contents(folder) == before


def test_several_sentences_share_a_replay(run, tmp_path):
    folder = run("plain")
    text, _ = told(folder, "--account=True", "--hessian=False")
    assert text.count("account: rollouts") == story.WORST
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps(dict(prompt="the", completion=" cat")))
    together, _ = told(folder, f"--prompts={path}", *ASKED, "--hessian=False")
    assert together.count("account: rollouts") == 2 and "'the' -> ' cat'" in together
    alone, _ = told(folder, *ASKED, "--hessian=False")
    assert alone.splitlines()[-3] in together


def test_refusals(run, tmp_path):
    folder = str(tmp_path / "run")
    shutil.copytree(run("plain"), folder)

    def refuses(names, *flags, config=f"{folder}/config.py"):
        assert_refused(names, explain.main, [folder, config, *flags])

    refuses("--target", *ASKED, "--target=reward")
    refuses(("--target", "reward"), "--target=judge")
    for flag in ("--prompt=the", "--completion=a"):
        refuses("tokens", flag)
    refuses("'before'", *ASKED, "--before=True")        # that is for the next iteration
    refuses("32", "--prompt=the", "--completion=" + "long " * 40)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the", "completion": ["a"]}')
    refuses("completion", f"--prompts={rows}")
    refuses("completion", "--prompt=the", "--completion=\ud800")        # half a character
    for prompt in ('{"a": 1}', "null"):
        rows.write_text(f'{{"prompt": {prompt}, "completion": "a"}}')
        refuses("sentence", f"--prompts={rows}")
    rows.write_text("")
    refuses(str(rows), f"--prompts={rows}")
    for half in ("--prompt=\ud800", "--completion=\ud800"):
        assert "\ud800" not in refusal(explain.main, [folder, f"{folder}/config.py", *ASKED, half])
    top_k = run("one backward")
    assert_refused("completion", explain.main, [
        top_k, f"{top_k}/config.py", "--prompt=the", "--completion=\u20ac\u20ac"])
    refuses("learning_rate", *ASKED, "--learning_rate=1.0")
    harmless = ["--micro_batch_size=3", "--eval_interval=9", "--since=3", "--hessian=False"]
    assert "account: rollouts" in told(folder, *ASKED, *harmless)[0]
    refuses("--since", *ASKED, "--since=4")
    changed = tmp_path / "changed.py"
    changed.write_text(RULE.replace("0.1", "0.2"))
    refuses(folder, *ASKED, config=str(changed))
    assert_refused(folder, explain.main, [folder, *ASKED])


def test_checkpoints_of_another_run_are_seen(run, tmp_path):
    folder = str(tmp_path / "run")
    shutil.copytree(run("plain"), folder)
    path = os.path.join(folder, "ckpt_000004.pt")
    content = torch.load(path)

    def refuses(*names):
        assert_refused(names, explain.main, [folder, f"{folder}/config.py", *ASKED])

    with open(path, "r+b") as f:        # one bit of a weight
        f.seek(os.path.getsize(path) // 2)
        byte, = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    refuses(path)
    content["policy"]["h.0.ln_1.weight"] += 1e-3
    torch.save(content, path)
    assert "ends at other weights" in told(folder, *ASKED, "--hessian=False")[0]
    content["policy"]["h.0.ln_1.weight"] += 5
    torch.save(content, path)
    refuses("--threads=1")
    torch.save(content | {"base_hash": "other"}, path)
    refuses(path, "policy")
    os.remove(path)
    os.remove(os.path.join(folder, "ckpt_000002.pt"))
    refuses(folder)
