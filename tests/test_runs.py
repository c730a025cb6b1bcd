"""Whole runs on a tiny model: what they print and leave behind, how they go on after an
interruption, what they refuse."""
import contextlib
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

import evaluate
import grpo as trainer
import judge.train
import pretrain
import run.loop
from config import Settings, load_settings
MERGED = {}
from run.checkpoint import say_what_differs
from run.files import load_file, save_file
from run.report import Progress, duration
from run.script import BadInput, run_script

NOISE = """
import os, random, time
import numpy, torch
random.seed(5), numpy.random.seed(6), torch.manual_seed(7)
reward_funcs = ("judge", "noise")

def noise(prompts, completions):
    time.sleep(float(os.environ.get("SLOW", 0)))
    return [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in completions]
"""
FINISHED = ["--beta=0.1", "--micro_batch_size=8", "--eval_interval=2"]
SIX = ["--max_iters=6", "--eval_interval=3", "--save_interval=2"]


@pytest.fixture(scope="session")
def finished(grpo, tmp_path_factory):
    """A run of three iterations in two micro-batches each: .dir and .text, what it printed. Only
    for reading."""
    where = str(tmp_path_factory.mktemp("finished") / "run")
    return SimpleNamespace(dir=where, text=grpo(where, *FINISHED))


@pytest.fixture(scope="session")
def noise(tmp_path_factory):
    """A config file whose reward draws from the three global random generators."""
    path = tmp_path_factory.mktemp("noise") / "noise.py"
    path.write_text(NOISE)
    return str(path)


@pytest.fixture(scope="session")
def six(grpo, noise, tmp_path_factory):
    """Folder of a run of six iterations that nothing interrupted. Only for reading."""
    where = str(tmp_path_factory.mktemp("six") / "run")
    grpo(where, noise, *SIX)
    return where


@pytest.fixture
def copy_of_six(six, tmp_path):
    return shutil.copytree(six, tmp_path / "run")


def snapshot(folder):
    """{path: bytes} of all files below a folder."""
    paths = [os.path.join(d, name) for d, _, names in os.walk(folder) for name in names]
    return {path: open(path, "rb").read() for path in paths}


def refusal(call, *args):
    with pytest.raises(BadInput) as caught:
        call(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def same(a, b):
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_run(one, other, rows, also=()):
    """All but times; `also`: "random", the states of the global generators, for a reward that seeds
    and uses them."""
    a, b = (load_file(os.path.join(d, "ckpt.pt"), "run") for d in (one, other))
    for key in ("iteration", "policy", "reference", "optimizer", "num_tokens", "base_hash", *also):
        assert same(a[key], b[key]), key
    apart = ("step_time",)
    a, b = ([{k: v for k, v in row.items() if k not in apart}
             for row in rows(os.path.join(d, "metrics.jsonl"))] for d in (one, other))
    assert a == b
    for name in ("samples.jsonl", "eval.jsonl"):
        a, b = (open(os.path.join(d, name), "rb").read() for d in (one, other))
        assert a == b and a, name


# ------------------------------------------------------------------------------------------------
# what a run leaves behind

def test_a_run_leaves_its_files(finished):
    assert sorted(os.listdir(finished.dir)) == [
        "ckpt.pt", "ckpt_prev.pt", "config.json", "eval.jsonl", "metrics.jsonl", "samples.jsonl"]


def test_config_json(finished, tiny):
    about = json.load(open(os.path.join(finished.dir, "config.json")))
    made_by = about["torch"], about["python"], about["device"]
    assert made_by == (torch.__version__, platform.python_version(), "cpu")
    assert about["source"] is None and {"git", "threads"} <= about.keys()
    flags = [*tiny.flags, f"--out_dir={finished.dir}", *FINISHED]
    again = load_settings([os.path.join(finished.dir, "config.json")])
    assert again.public() == load_settings(flags).public()


def test_config_json_holds_the_config_file(six, noise):
    assert json.load(open(os.path.join(six, "config.json")))["source"] == open(noise).read()
    assert callable(load_settings([os.path.join(six, "config.json")]).functions["noise"])


def test_metrics(finished, rows):
    found = rows(os.path.join(finished.dir, "metrics.jsonl"))
    assert [row["iteration"] for row in found] == [1, 2, 3]
    for row in found:
        assert {"loss", "policy_loss", "kl", "grad_norm", "reward", "reward_std",
                "rewards/judge/mean", "entropy", "num_tokens", "learning_rate", "step_time",
                "frac_reward_zero_std", "completions/clipped_ratio", "clip_ratio/region_mean",
                "sampling/importance_sampling_ratio/mean"} <= row.keys()
        known = [x for x in row.values() if x is not None]
        assert all(isinstance(x, (int, float)) and math.isfinite(x) for x in known)
        assert abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4
        assert row["grad_norm"] > 0
    tokens = [row["num_tokens"] for row in found]
    assert tokens == sorted(tokens) and tokens[0] > 0


def test_samples(finished, rows):
    found = rows(os.path.join(finished.dir, "samples.jsonl"))
    assert [row["iteration"] for row in found] == [i for i in (1, 2, 3) for _ in range(16)]
    fields = {"iteration", "prompt", "completion", "reward", "advantage"}
    assert all(row.keys() == fields for row in found)
    for start in range(0, len(found), 4):
        group = found[start:start + 4]
        assert len({row["prompt"] for row in group}) == 1
        assert abs(sum(row["advantage"] for row in group)) < 1e-4
    for row in rows(os.path.join(finished.dir, "metrics.jsonl")):
        rewards = [x["reward"] for x in found if x["iteration"] == row["iteration"]]
        known = [r for r in rewards if r is not None]   # None: the judge abstained
        assert abs(sum(known) / len(known) - row["reward"]) < 1e-5


def test_evaluations(finished, rows):
    found = rows(os.path.join(finished.dir, "eval.jsonl"))
    assert [row["iteration"] for row in found] == [0, 2, 3]
    for row in found:
        assert {"rewards/judge", "judge/toxicity", "eval_judge/toxicity", "eval_judge/expected_max",
                "perplexity", "distinct_2", "mean_length", "ended"} <= row.keys()
        assert len(row["samples"]) == 4
    assert [x["prompt"] for x in found[0]["samples"]] == [x["prompt"] for x in found[2]["samples"]]


def test_no_iterations(grpo, rows, tmp_path):
    text = grpo(tmp_path / "run", "--max_iters=0")
    assert [row["iteration"] for row in rows(tmp_path / "run" / "eval.jsonl")] == [0]
    assert "after/before" in text


# ------------------------------------------------------------------------------------------------
# what a run prints

MEM, T = r"mem=\d+ ?MB", r"time=\d+\.\d{3}s"
NUMBER = r"-?\d+\.\d{6}"
SHAPES = [
    rf"\[Micro 0\] 1\. Iteration start: {MEM}, time=0\.000s",
    rf"\[Micro 0\] 2\. Samples generated \(16 rows for all micro-batches\): {MEM}, {T}",
    rf"\[Micro 0\] 3\. Samples scored: {MEM}, {T}, rewards=-?\d+\.\d{{4}}±\d+\.\d{{4}}",
    *[rf"\[Micro {i}\] 4\. Loss computed: {MEM}, {T}, pg_loss={NUMBER}, kl={NUMBER}, total={NUMBER}"
      for i in (0, 1)],
    rf"5\. Optimizer step finished: {MEM}, (step=\d+\.\d{{3}}s, )?{T} total",
    r"iter \d/3: loss -?\d+\.\d+ \(main -?\d+\.\d+, kl -?\d+\.\d+\), reward -?\d+\.\d+, "
    r"grad_norm \d+\.\d+, \d+ tok/s, time (\d\.\d\d|\d\d\.\d|\d{3,})m?s, eta \d+m\d\ds"]


def test_log_lines(finished):
    lines = [line for line in finished.text.splitlines() if re.match(r"\[Micro|5\. |iter ", line)]
    assert len(lines) == 3 * len(SHAPES)
    for i, line in enumerate(lines):
        assert re.fullmatch(SHAPES[i % len(SHAPES)], line), line


@pytest.mark.parametrize("seconds, text", [
    (0.0434, "43.4ms"), (0.43548, "435ms"), (0.9996, "1.00s"), (4.351, "4.35s"), (9.996, "10.0s"),
    (31.47946, "31.5s"), (105.2, "105s"), (1250.4, "1250s")])
def test_a_duration_has_three_digits(seconds, text):
    assert duration(seconds) == text


def test_progress_is_a_line_every_while_in_a_file_and_one_line_on_a_terminal(monkeypatch):
    for is_terminal, between in ((False, ""), (True, "\x1b[A\x1b[K")):
        out = io.StringIO()
        out.isatty = lambda: is_terminal
        monkeypatch.setattr(sys, "stdout", out)
        progress = Progress("policy", "step", 40, start=10)
        assert not progress.is_due(), "nothing has taken long yet"
        progress.last -= 11
        assert progress.is_due(), "10 seconds without a word"
        progress.began -= 4
        progress.show(20, "loss 4.421, ")
        assert not progress.is_due(), "it was only just said"
        progress.show(40)
        expected = ("policy: step 20/40, loss 4.421, 8 s left\n" + between
                    + "policy: step 40/40, 0 s left\n")
        assert out.getvalue() == expected, "steps done before the start count for no time"


def test_a_long_evaluation_says_how_far_it_is(grpo, monkeypatch, tmp_path):
    monkeypatch.setattr("run.report.Progress.EVERY", -1)
    text = grpo(tmp_path / "run", "--max_iters=0")
    for part in ("sampling", "perplexity"):
        assert f"evaluation, {part}: completion 12/12, 0 s left\n" in text, text


def test_times_add_up(finished):
    parts, totals = 0.0, 0
    for line in finished.text.splitlines():
        if line.startswith("[Micro"):
            parts += float(re.search(r"time=([\d.]+)s", line)[1])
        elif line.startswith("5. "):
            parts += float(re.search(r"step=([\d.]+)s", line)[1])
            assert abs(parts - float(re.search(r"time=([\d.]+)s total", line)[1])) < 0.0005 * 7
            parts, totals = 0.0, totals + 1
    assert totals == 3


def test_one_micro_batch_needs_no_note(grpo, tmp_path):
    text = grpo(tmp_path / "run", "--max_iters=1")
    assert re.search(rf"^\[Micro 0\] 2\. Samples generated: {MEM}, {T}$", text, re.M)
    assert "[Micro 1]" not in text


def test_log_micro_off_changes_the_lines_alone(grpo, finished, rows, tmp_path):
    text = grpo(tmp_path / "run", *FINISHED, "--log_micro=False")
    assert "[Micro" not in text and "5. Optimizer" not in text
    assert text.count("\niter ") == 3
    assert_same_run(finished.dir, tmp_path / "run", rows)


def test_table_of_before_and_after(finished, rows):
    first, *_, last = rows(os.path.join(finished.dir, "eval.jsonl"))
    table = finished.text[finished.text.index("after/before"):]
    for name in ("judge/toxicity", "eval_judge/expected_max", "perplexity"):
        assert re.search(rf"^{name} +{first[name]:.4f} +{last[name]:.4f} ", table, re.M)
    assert table.count("before: ") == table.count("after:  ") == 4


def test_settings_are_printed(finished):
    line = next(line for line in finished.text.splitlines() if line.startswith("settings: "))
    assert "beta=0.1" in line and "n_layer=1" in line


# ------------------------------------------------------------------------------------------------
# a second start

def test_a_second_start_leaves_the_first_run_alone(grpo, tmp_path):
    where = tmp_path / "run"
    grpo(where, "--max_iters=1")
    before = snapshot(where)
    text = grpo(where, "--max_iters=1")
    assert f"{where}: holds another run" in text
    assert f"{where}-2" in text and "--resume=True" in text
    assert snapshot(where) == before and (tmp_path / "run-2" / "ckpt.pt").exists()
    grpo(where, "--max_iters=0")
    assert (tmp_path / "run-3" / "ckpt.pt").exists()


def test_a_second_start_with_a_slash_at_the_end(copy_of_six, grpo, tmp_path):
    before = snapshot(copy_of_six)
    grpo(f"{copy_of_six}/", "--max_iters=0")
    assert snapshot(copy_of_six) == before and (tmp_path / "run-2" / "ckpt.pt").exists()


def test_the_folder_of_a_foreign_project_is_left_alone(grpo, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    grpo(tmp_path / "run", "--max_iters=0")
    assert os.listdir(tmp_path / "run") == ["thesis.txt"]
    assert (tmp_path / "run-2" / "ckpt.pt").exists()


# ------------------------------------------------------------------------------------------------
# going on

class Crash(Exception):
    pass


@pytest.fixture
def crash(monkeypatch, grpo):
    """crash(iteration, out_dir, ...) runs grpo and dies in that iteration, as the machine might."""
    def start(iteration, *argv):
        update, calls = trainer.update, []

        def dies(*args, **more):
            calls.append(1)
            if len(calls) == iteration:
                raise Crash
            return update(*args, **more)

        with monkeypatch.context() as m:
            m.setattr(trainer, "update", dies)
            with pytest.raises(Crash):
                grpo(*argv)

    return start


def signalled(script, flags, where, number):
    """Sends a signal to a run of six iterations once three are logged -> the process, ended, and
    its stderr."""
    process = script("grpo.py", *flags, f"--out_dir={where}", *SIX, wait=False)
    deadline, log = time.time() + 60, os.path.join(where, "metrics.jsonl")
    while not (os.path.exists(log) and open(log).read().count("\n") >= 3):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert open(log).read().count("\n") < 6  # it was not simply done
    return process, err


@pytest.mark.parametrize("flags, said", [
    ([], "was interrupted here, it goes on"), (["--resume=True"], "resumed")])
def test_killed_and_started_again_is_as_if_nothing_had_been(
        flags, said, script, tiny, noise, six, grpo, rows, tmp_path, monkeypatch):
    where = tmp_path / "run"
    monkeypatch.setenv("SLOW", "0.1")
    process, _ = signalled(script, [*tiny.flags, noise], where, signal.SIGKILL)
    monkeypatch.delenv("SLOW")
    assert process.returncode == -signal.SIGKILL
    assert load_file(str(where / "ckpt.pt"), "run")["iteration"] in (2, 4)
    text = grpo(where, noise, *SIX, *flags)
    assert said in text and not (tmp_path / "run-2").exists()
    assert f"resumed {where}/ckpt.pt after" in text and "iter 6/" in text and "iter 1/" not in text
    assert_same_run(six, where, rows, ["random"])
    grpo(where, noise, *SIX, "--max_iters=0", *flags)
    assert (tmp_path / "run-2").exists() == (not flags), "a finished run was gone on with"


def test_a_file_of_prompts_that_changed_is_said(grpo, tmp_path):
    prompts = tmp_path / "prompts.txt"
    lines = [f"the {word} cat {i}" for i in range(10) for word in ("green", "small")]
    prompts.write_text("\n".join(lines))
    flags = (f"--prompts={prompts}", "--resume=True")
    grpo(tmp_path / "run", *flags, "--max_iters=1")
    assert "other contents" not in grpo(tmp_path / "run", *flags, "--max_iters=2")
    prompts.write_text("\n".join(lines[:-1] + ["another"]))
    text = grpo(tmp_path / "run", *flags, "--max_iters=3")
    assert "WARNING: resumed with other contents of prompts: a file has changed" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_saves_and_says_how_to_go_on(
        number, script, tiny, noise, six, rows, tmp_path, monkeypatch):
    where = tmp_path / "run"
    monkeypatch.setenv("SLOW", "0.1")
    process, err = signalled(script, [*tiny.flags, noise], where, number)
    monkeypatch.delenv("SLOW")
    iteration = load_file(str(where / "ckpt.pt"), "run")["iteration"]
    assert process.returncode == 130 and iteration == len(rows(where / "metrics.jsonl"))
    heard, end = err.splitlines()
    assert heard.startswith("signal heard: "), heard
    assert end == (f"interrupted: saved after iteration {iteration}; the same command goes on, or: "
                   f"python grpo.py {where} --resume=True")
    trainer.main([str(where), "--resume=True"])  # as told
    assert_same_run(six, where, rows, ["random"])


@pytest.mark.parametrize("flags", [
    ("--beta=0.1", "--sync_ref_model=True", "--ref_model_sync_steps=2"),
    ("--beta=0.1", "--lora_rank=2"),
    ("--beta=0.1", "--lora_rank=2", "--sync_ref_model=True", "--ref_model_sync_steps=2",
     "--ref_model_mixup_alpha=1"),
    ("--num_iterations=2", "--mini_batch_size=8", "--lr_decay=cosine", "--warmup_iters=2",
     "--top_k=20", "--weight_decay=0.1"),
    ("--tracin=reward", "--tracin_adam=True", "--beta=0.1", "--tracin_val_prompts=2")],
    ids=["sync", "lora", "lora-sync", "steps", "tracin"])
def test_crashed_and_resumed_is_as_if_nothing_had_been(flags, crash, grpo, rows, tmp_path):
    argv = (*flags, "--max_iters=5")
    grpo(tmp_path / "whole", *argv)
    crash(4, tmp_path / "parts", *argv)
    assert len(rows(tmp_path / "parts" / "metrics.jsonl")) == 3
    assert load_file(str(tmp_path / "parts" / "ckpt.pt"), "run")["iteration"] == 2
    grpo(tmp_path / "parts", *argv, "--resume=True")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", rows)


def test_crashed_in_the_first_iteration(crash, grpo, finished, rows, tmp_path):
    argv = (tmp_path / "run", *FINISHED)
    crash(1, *argv)
    grpo(*argv, "--resume=True")
    assert_same_run(finished.dir, tmp_path / "run", rows)


@pytest.mark.parametrize("part", ["prepare", "evaluate"])
def test_killed_before_the_first_checkpoint(part, finished, grpo, rows, tmp_path, monkeypatch):
    def dies(*args):
        raise Crash

    argv = (tmp_path / "run", *FINISHED)
    with monkeypatch.context() as m, pytest.raises(Crash):
        m.setattr(trainer, part, dies)
        grpo(*argv)
    assert not (tmp_path / "run" / "ckpt.pt").exists()
    grpo(*argv)     # the same command
    assert_same_run(finished.dir, tmp_path / "run", rows)


def test_killed_between_the_two_renames(copy_of_six, six, noise, grpo, rows):
    os.remove(copy_of_six / "ckpt.pt")
    assert load_file(str(copy_of_six / "ckpt_prev.pt"), "run")["iteration"] == 4
    assert "ckpt_prev.pt after 4 iterations" in grpo(copy_of_six, noise, *SIX, "--resume=True")
    assert_same_run(six, copy_of_six, rows, ["random"])


def test_the_checkpoint_before_can_be_renamed(copy_of_six, six, noise, grpo, rows):
    os.replace(copy_of_six / "ckpt_prev.pt", copy_of_six / "ckpt.pt")
    grpo(copy_of_six, noise, *SIX, "--resume=True")
    assert_same_run(six, copy_of_six, rows, ["random"])


def test_half_a_log_line_is_cut_off(copy_of_six, six, noise, grpo, rows):
    os.replace(copy_of_six / "ckpt_prev.pt", copy_of_six / "ckpt.pt")
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        with open(copy_of_six / name, "a") as f:
            f.write('{"iteration": 7, "lo')
    grpo(copy_of_six, noise, *SIX, "--resume=True")
    assert_same_run(six, copy_of_six, rows, ["random"])


def test_resuming_a_finished_run_prints_its_table(copy_of_six, noise, grpo):
    before = snapshot(copy_of_six)
    text = grpo(copy_of_six, noise, *SIX, "--resume=True")
    assert "after/before" in text and not re.search(r"^(iter|eval) \d|^\[Micro", text, re.M)
    changed = {os.path.basename(k) for k, v in snapshot(copy_of_six).items() if before.get(k) != v}
    assert changed <= {"config.json"}


def test_a_finished_run_can_be_made_longer(noise, six, grpo, rows, tmp_path):
    grpo(tmp_path / "run", noise, *SIX, "--max_iters=3")
    grpo(tmp_path / "run", noise, *SIX, "--resume=True")
    assert_same_run(six, tmp_path / "run", rows, ["random"])


def test_config_json_of_a_run_resumes_it(crash, noise, six, grpo, rows, tmp_path):
    crash(4, tmp_path / "run", noise, *SIX)
    trainer.main([str(tmp_path / "run"), "--resume=True"])
    assert_same_run(six, tmp_path / "run", rows, ["random"])


def as_older(settings):
    """Settings as runs wrote them when four words of speed were settings of their own."""
    older = {name: word in settings["speed"] for name, word in MERGED.items()}
    return {name: value for name, value in settings.items() if name != "speed"} | older


def test_an_older_run_is_resumed_with_the_speed_it_had(crash, grpo, rows, tmp_path, capsys):
    argv = (*SIX, "--speed=('attention', 'graphs')")
    grpo(tmp_path / "whole", *argv)
    parts = tmp_path / "parts"
    crash(4, parts, *argv)
    about = json.loads((parts / "config.json").read_text())
    about["settings"] = as_older(about["settings"])
    assert about["settings"]["fused_head"] is False and about["settings"]["cuda_graphs"] is True
    (parts / "config.json").write_text(json.dumps(about))
    checkpoint = load_file(str(parts / "ckpt.pt"), "run")
    checkpoint["settings"] = as_older(checkpoint["settings"])
    save_file(str(parts / "ckpt.pt"), **checkpoint)

    trainer.main([f"{parts}/config.json", "--resume=True", "--trust=True"])
    said = capsys.readouterr().out
    assert f"resumed {parts}/ckpt.pt after 2 iterations" in said
    assert "resumed with another" not in said, "a setting changed on the way"
    assert "speed=('attention', 'graphs')" in said, "the words of speed are not those it had"
    assert_same_run(tmp_path / "whole", parts, rows)
    evaluate.main([str(parts), "--trust=True"])
    first, *_, last = rows(parts / "eval.jsonl")
    assert_table_is(capsys.readouterr().out, first, last)


def test_a_speed_that_an_older_run_did_not_have_is_named_on_resume(capsys):
    older = as_older(Settings(speed=("attention", "head", "retire")).public())
    say_what_differs(dict(settings=older, source=None, inputs={}), Settings(), {})
    said = capsys.readouterr().out
    assert "resumed with another speed: ('attention', 'head', 'retire') -> " in said, said


def test_changed_settings_are_named_on_resume(copy_of_six, noise, grpo):
    text = grpo(copy_of_six, noise, *SIX, "--learning_rate=1e-3", "--resume=True")
    assert "learning_rate: 0.0001 -> 0.001" in text


def test_resume_where_nothing_is_starts_and_says_so(grpo, tmp_path):
    text = grpo(tmp_path / "run", "--max_iters=1", "--resume=True")
    assert "no checkpoint to resume" in text and "iter 1/" in text


def shorten(path):
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize("damage, part", [
    (lambda path, tiny: shorten(path), "cut short"),
    (lambda path, tiny: os.truncate(path, 0), "not a readable checkpoint"),
    (lambda path, tiny: shutil.copy(tiny.policy, path), "'policy'"),
    (lambda path, tiny: shutil.copy(__file__, path), "not a readable"),
    (lambda path, tiny: torch.save({"kind": "run"}, path), "base_hash"),
    (lambda path, tiny: torch.save([1], path), "something else")],
    ids=["half", "empty", "policy", "text", "keys", "list"])
def test_a_bad_checkpoint_is_refused(damage, part, copy_of_six, tiny, noise, grpo):
    path = str(copy_of_six / "ckpt.pt")
    damage(path, tiny)
    before = snapshot(copy_of_six)
    message = refusal(grpo, copy_of_six, noise, *SIX, "--resume=True")
    assert path in message and part in message and "ckpt_prev.pt" in message
    assert snapshot(copy_of_six) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "eval.jsonl"])
def test_a_missing_log_is_refused(name, copy_of_six, noise, grpo):
    os.remove(copy_of_six / name)
    before = snapshot(copy_of_six)
    assert name in refusal(grpo, copy_of_six, noise, *SIX, "--resume=True")
    assert snapshot(copy_of_six) == before


def test_missing_checkpoints_do_not_cost_the_logs(copy_of_six, noise, grpo):
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        os.remove(copy_of_six / name)
    before = snapshot(copy_of_six)
    assert "ckpt.pt" in refusal(grpo, copy_of_six, noise, *SIX, "--resume=True")
    assert snapshot(copy_of_six) == before


def test_another_starting_policy_is_refused(copy_of_six, tiny, noise, grpo, tmp_path):
    content = load_file(tiny.policy, "policy")
    content["model"]["ln_f.bias"] += 1
    save_file(str(tmp_path / "other.pt"), **content)
    before = snapshot(copy_of_six)
    other = f"--policy={tmp_path / 'other.pt'}"
    message = refusal(grpo, copy_of_six, noise, *SIX, "--resume=True", other)
    assert "another policy" in message and snapshot(copy_of_six) == before


@pytest.mark.parametrize("flags", [
    ("--lora_rank=2",), ("--beta=0.1", "--sync_ref_model=True")], ids=["lora", "sync"])
def test_settings_that_do_not_fit_the_checkpoint_are_refused(flags, copy_of_six, noise, grpo):
    before = snapshot(copy_of_six)
    message = refusal(grpo, copy_of_six, noise, *SIX, "--resume=True", *flags)
    assert "ckpt.pt" in message and snapshot(copy_of_six) == before


@pytest.mark.parametrize("calls", range(6))
def test_a_signal_at_any_moment_is_not_promised_more_than_was_saved(
        calls, grpo, tmp_path, monkeypatch):
    asked = iter(range(100))

    def interrupts():
        return contextlib.nullcontext(lambda: next(asked) >= calls)

    monkeypatch.setattr(run.loop, "interrupts", interrupts)
    with pytest.raises(KeyboardInterrupt) as caught:
        grpo(tmp_path / "run", "--max_iters=9", "--save_interval=5", "--eval_interval=0")
    checkpoint = tmp_path / "run" / "ckpt.pt"
    if calls == 0:  # before the first iteration
        assert "policy and judges are saved" in str(caught.value) and not checkpoint.exists()
    else:
        saved = load_file(str(checkpoint), "run")["iteration"]
        assert f"iteration {saved};" in str(caught.value)


# ------------------------------------------------------------------------------------------------
# one step taken apart

def debug_groups(text):
    """(mean, divisor, rewards, advantages) of each group that is printed."""
    number = r"-?\d+\.\d+"
    row = rf"((?:{number} ?)+)"
    found = re.findall(rf"group \d+: mean ({number}), divisor ({number}), rewards {row}, "
                       rf"advantages {row}", text)
    return [(float(mean), float(divisor), *([float(x) for x in xs.split()] for xs in lists))
            for mean, divisor, *lists in found]


@pytest.mark.parametrize("flags", [
    ("--scale_rewards=group",), ("--scale_rewards=batch",), ("--scale_rewards=none",),
    ("--scale_rewards=batch", "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1")])
def test_debug_step_prints_what_an_advantage_is_made_of(flags, grpo, tmp_path):
    text = grpo(tmp_path / "run", "--debug_step=True", *flags)
    groups = debug_groups(text)
    assert len(groups) == 4
    for mean, divisor, rewards, advantages in groups:
        by_hand = [(r - mean) / divisor for r in rewards]
        assert by_hand == pytest.approx(advantages, rel=2e-3, abs=2e-3), flags
    if flags == ("--scale_rewards=batch",):
        assert f"std of the batch {statistics.stdev(sum((g[2] for g in groups), [])):.3f}" in text


def test_debug_step_shows_the_striking_rows_and_why(grpo, tmp_path):
    text = grpo(tmp_path / "run", "--debug_step=True")
    rewards = [r for _, _, rs, _ in debug_groups(text) for r in rs]
    for why, extreme in (("best", max), ("worst", min)):
        row, reward = re.search(rf"{why} reward: row (\d+), reward (-?\d+\.\d+)", text).groups()
        assert float(reward) == extreme(rewards) == rewards[int(row)]
    assert re.search(r"largest gradient, norm \d\.\d+e-\d+: row \d+, ", text)


@pytest.mark.parametrize("flags", [("--tracin=self",), (
    "--tracin=reward", "--tracin_val_prompts=2", "--num_eval_prompts=2", "--tracin_select=top")])
def test_debug_step_shows_influence(flags, grpo, tmp_path):
    text = grpo(tmp_path / "run", "--debug_step=True", *flags)
    assert re.findall(r"^--- (\d)\. ", text, re.M) == list("12345678")
    error = re.search(r"<G_train, G_target>, .* to (\S+) of the sum of \|influence\|", text)[1]
    assert float(error) < 1e-4, "the influences do not add up"
    helpful, harmful = re.search(r"most helpful(.*)most harmful(.*?)---", text, re.S).groups()
    for part, sign, title in ((helpful, 1, "helpful"), (harmful, -1, "harmful")):
        found = [sign * float(x) for x in re.findall(r"influence (\S+),", part)]
        assert found == sorted(found, reverse=True) and all(x > 0 for x in found), title
        assert len(found) <= 3 and (found or "none" in part)
    share = re.search(r"(\d+) % are kept", text)[1]
    assert share == "50" or "top" not in flags[-1]


@pytest.mark.parametrize("flags", [(), (
    "--beta=0.1", "--lora_rank=2", "--micro_batch_size=2", "--num_prompts=1", "--max_grad_norm=0"),
    ("--micro_batch_size=5",)], ids=["plain", "more", "ragged"])
def test_debug_step_prints_seven_phases_and_writes_nothing(flags, grpo, tiny, tmp_path):
    before = snapshot(tiny.cache)
    text = grpo(tmp_path / "run", "--debug_step=True", *flags)
    assert re.findall(r"^--- (\d)\. ", text, re.M) == list("1234567")
    assert not re.search(r"\bnan\b", text)
    assert snapshot(tiny.cache) == before and not os.listdir(tmp_path)


# ------------------------------------------------------------------------------------------------
# prompts

@pytest.mark.parametrize("name, text", [
    ("a.txt", "the green cat\nmy small river\n"),
    ("a.csv", "text\nthe green cat\nmy small river\n"),
    ("a.jsonl", '{"text": "the green cat"}\n{"text": "my small river"}\n')])
def test_prompts_from_a_file(name, text, grpo, rows, tmp_path):
    (tmp_path / name).write_text(text)
    (tmp_path / "eval.txt").write_text("our warm kettle\nthe old train")
    grpo(tmp_path / "run", "--max_iters=1", f"--prompts={tmp_path / name}",
         f"--eval_prompts={tmp_path / 'eval.txt'}")
    asked = [row["prompt"] for row in rows(tmp_path / "run" / "samples.jsonl")]
    assert sorted(asked) == 8 * ["my small river"] + 8 * ["the green cat"]
    shown = [x["prompt"] for x in rows(tmp_path / "run" / "eval.jsonl")[0]["samples"]]
    assert shown == ["our warm kettle", "the old train"]


SUMS = "text,answer\n" + "".join(f"sum {i} and {i},{2 * i}\n" for i in range(12))
BY_ANSWER = """
def reward(prompts, completions, answer):
    for prompt, x in zip(prompts, answer):
        assert prompt == f"sum {int(x) // 2} and {int(x) // 2}", "not the row of this prompt"
    return [len(text) % 3 + int(x) for text, x in zip(completions, answer)]
"""


@pytest.fixture
def sums(tmp_path):
    """Flags of a run whose reward reads the column answer of its prompts' file."""
    (tmp_path / "sums.csv").write_text(SUMS)
    (tmp_path / "rule.py").write_text(BY_ANSWER)
    return [tmp_path / "rule.py", f"--prompts={tmp_path / 'sums.csv'}", "--judge=None",
            "--eval_judge=None", "--num_prompts=2"]


def test_a_reward_reads_a_column_and_the_samples_keep_the_row(sums, grpo, rows, tmp_path):
    held_out = ("--tracin=reward", "--tracin_val_prompts=1", "--num_eval_prompts=1")
    grpo(tmp_path / "run", *sums, *held_out, "--max_iters=2")
    found = rows(tmp_path / "run" / "samples.jsonl")
    assert len(found) == 2 * 2 * 4
    for row in found:
        assert row["row"]["text"] == row["prompt"], "the row of another prompt"
        assert row["reward"] == len(row["completion"]) % 3 + int(row["row"]["answer"])


def test_the_samples_keep_no_row_that_says_nothing_new(six, rows):
    assert all("row" not in row for row in rows(os.path.join(six, "samples.jsonl")))


# ------------------------------------------------------------------------------------------------
# refused: in one line, with exit code 2, before any training, and nothing is overwritten

@pytest.fixture
def fresh(tiny, tmp_path, monkeypatch):
    """Start grpo.py with nothing prepared yet; training anything fails the test."""
    for module in ("pretrain", "judge.train"):
        monkeypatch.setattr(sys.modules[module], "fit",
                            lambda *args, **more: pytest.fail("trained before it looked"))

    def start(*argv):
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.main([*tiny.flags, f"--cache_dir={tmp_path / 'cache'}",
                          f"--out_dir={tmp_path / 'run'}", *argv])

    return start


@pytest.mark.parametrize("name, text, part", [
    ("none.txt", None, "none.txt"), ("a.txt", "", "no prompts"),
    ("a.txt", "one\n\ntwo\n", "prompt 2"),
    ("a.txt", "one\n" + "x" * 100, "1 to 24"), ("a.csv", "words\nx\n", "row 1")])
def test_bad_prompts(name, text, part, fresh, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    message = refusal(fresh, f"--prompts={tmp_path / name}")
    assert name in message and part in message and not (tmp_path / "run").exists()


@pytest.mark.parametrize("flag, part", [
    ("--comments=nowhere.csv", "nowhere.csv"), ("--text_field=words", "'words'"),
    ("--device=quantum", "'auto'"), ("--policy=nowhere.pt", "nowhere.pt"),
    ("--judge=nowhere.pt", "nowhere.pt"), ("--eval_judge=nowhere.pt", "nowhere.pt"),
    ("--vocab_size=100", "257"), ("--judge_vocab_size=100", "257"),
    ("--judge_vocab_size=60000", "50257"), ("--max_completion_length=32", "block_size"),
    ("--n_head=5", "n_head = 5"), ("--prompt_words=(30, 40)", "prompts")])
def test_bad_settings(flag, part, fresh):
    assert part in refusal(fresh, flag)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has cuda")
def test_a_device_that_is_not_there(fresh):
    message = refusal(fresh, "--device=cuda")
    assert "device = 'cuda'" in message and "'auto'" in message


def test_lora_layers_that_are_none(fresh):
    assert "lora_layers" in refusal(fresh, "--lora_rank=2", "--lora_layers=('c_atn',)")


@pytest.mark.parametrize("flag", ["--vocab_size=400", "--block_size=64"])
def test_a_policy_of_another_shape(flag, fresh, tiny):
    message = refusal(fresh, f"--policy={tiny.policy}", flag)
    name, value = flag[2:].split("=")
    assert tiny.policy in message and f"{name} = {value}" in message and f"set {name} =" in message


@pytest.mark.parametrize("role", ["judge", "eval_judge"])
def test_a_language_model_as_judge(role, fresh, tiny):
    message = refusal(fresh, f"--{role}={tiny.policy}")
    assert tiny.policy in message and "holds 'policy'" in message and "'judge' is needed" in message


def test_a_judge_as_policy(fresh, tiny):
    assert "'policy' is needed" in refusal(fresh, f"--policy={tiny.judge}")


@pytest.mark.parametrize("name", ["out_dir", "cache_dir"])
def test_a_folder_that_cannot_be_is_found_before_anything_is_trained(name, fresh):
    assert f"{name} = " in refusal(fresh, f"--{name}={'x' * 300}")


def test_a_broken_checkpoint_is_found_before_anything_is_trained(fresh, copy_of_six):
    shorten(copy_of_six / "ckpt.pt")
    message = refusal(fresh, "--resume=True")
    assert "cut short" in message and "rename it to ckpt.pt" in message


def test_another_shape_is_found_before_anything_is_trained(fresh, copy_of_six):
    message = refusal(fresh, "--resume=True", "--n_layer=3")
    assert "n_layer was 1, not 3" in message and "rename" not in message


def test_wandb_that_is_not_installed(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in refusal(fresh, "--wandb_project=x")


def test_a_folder_that_cannot_be_written(fresh, tmp_path):
    (tmp_path / "file").write_text("mine")
    for where in (tmp_path / "file" / "run", tmp_path / "file"):
        assert f"out_dir = '{where}'" in refusal(fresh, f"--out_dir={where}")
    assert (tmp_path / "file").read_text() == "mine"


def reward_file(folder, body):
    """A config file with the reward of this body."""
    path = folder / "reward.py"
    path.write_text(f"def reward(prompts, completions):\n    {body}\n")
    return path


@pytest.mark.parametrize("body, part", [
    ("return [1.0]", "1 numbers for"), ("return [1.0] * (len(completions) + 1)", "numbers for"),
    ("return [float('nan')] * len(completions)", "nan"),
    ("return ['good'] * len(completions)", "'good'"), ("pass", "None"),
    ("return [1e300] * len(completions)", "1e+300"),
    ("return [1 / len(c) for c in completions]", "ZeroDivisionError"),  # a completion may be empty
    ("raise SystemExit(0)", "SystemExit")])
def test_a_bad_reward(body, part, grpo, tmp_path):
    message = refusal(grpo, tmp_path / "run", reward_file(tmp_path, body))
    assert "'reward'" in message and part in message
    assert not (tmp_path / "run").exists()   # found before anything is trained


def test_a_reward_that_always_abstains_does_not_crash(grpo, tmp_path):
    never = reward_file(tmp_path, "return [None] * len(completions)")
    try:
        assert "WARNING" in grpo(tmp_path / "run", never, "--max_iters=1")
    except BadInput as e:
        assert "reward" in str(e)


def test_a_reward_that_sometimes_abstains(grpo, rows, tmp_path):
    sometimes = reward_file(tmp_path, "return [None, *range(1, len(completions))]")
    grpo(tmp_path / "run", sometimes, "--max_iters=2", "--judge=None")
    found = rows(tmp_path / "run" / "samples.jsonl")
    assert [row["reward"] for row in found] == 2 * [None, *range(1, 16)]
    assert found[0]["advantage"] == 0


@pytest.mark.parametrize("main, argv, part", [
    (trainer.main, ["{tmp}/reward.py"], "'reward'"),
    (pretrain.main, ["--device=quantum"], "device"),
    (judge.train.main, ["--comments=nowhere.csv"], "nowhere.csv"),
    (evaluate.main, ["nowhere"], "nowhere")])
def test_exit_code_2_and_one_line(main, argv, part, tiny, tmp_path, monkeypatch, capsys):
    reward_file(tmp_path, "return [float('nan')] * len(completions)")
    argv = [a.format(tmp=tmp_path) for a in argv]
    flags = [*tiny.flags, f"--out_dir={tmp_path / 'run'}"]
    argv = argv + flags if main is evaluate.main else flags + argv
    monkeypatch.setattr(sys, "argv", ["x.py", *argv])
    with pytest.raises(SystemExit) as caught:
        run_script(main)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.count("\n") == 1
    assert err.startswith("error: ") and part in err


def test_a_reward_that_raises_is_one_line_and_its_own_traceback(tiny, tmp_path, script):
    path = reward_file(tmp_path, "return [1 / len(c) for c in completions]")
    done = script("grpo.py", path, *tiny.flags, f"--out_dir={tmp_path / 'run'}")
    first, second, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and first.startswith("error: reward 'reward' raised Zero")
    assert second.startswith("Traceback") and str(path) in rest[0], done.stderr
    assert "grpo.py" not in done.stderr and "judge/" not in done.stderr, done.stderr


def test_exit_code_2_of_a_script(script):
    done = script("grpo.py", "--bata=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --bata=1: there is no setting 'bata'; did you mean 'beta'?\n"


# ------------------------------------------------------------------------------------------------
# evaluate.py

def columns(text):
    """{measure: (before, after)} of the printed table."""
    found = re.findall(r"^(\S+) +(-?\d+\.\d{4}) +(-?\d+\.\d{4}) ", text, re.M)
    return {name: (float(before), float(after)) for name, before, after in found}


def assert_table_is(text, first, last):
    numbers = [k for k in last if isinstance(last[k], float)]
    assert columns(text) == {k: (round(first[k], 4), round(last[k], 4)) for k in numbers}
    assert len(numbers) > 10


def test_evaluate_reproduces_the_last_evaluation(finished, script, rows):
    before = snapshot(finished.dir)
    done = script("evaluate.py", finished.dir)
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = rows(os.path.join(finished.dir, "eval.jsonl"))
    assert_table_is(done.stdout, first, last)
    for a, b in zip(first["samples"], last["samples"]):
        assert f"before: {a['completion']!r}" in done.stdout
        assert f"after:  {b['completion']!r}" in done.stdout
    assert snapshot(finished.dir) == before


@pytest.mark.parametrize("flags", [
    ("--lora_rank=2",), ("--beta=0.1", "--sync_ref_model=True", "--ref_model_sync_steps=1")],
    ids=["lora", "sync"])
def test_evaluate_in_other_modes(flags, grpo, rows, tmp_path, capsys):
    grpo(tmp_path / "run", "--max_iters=2", "--learning_rate=1e-2", *flags)
    evaluate.main([str(tmp_path / "run")])
    first, last = rows(tmp_path / "run" / "eval.jsonl")
    assert first != last
    assert_table_is(capsys.readouterr().out, first, last)


def test_evaluate_with_the_reward_of_the_config_file(six, rows, capsys):
    evaluate.main([six, "--num_eval_prompts=2"])
    assert "rewards/noise" in columns(capsys.readouterr().out)


@pytest.mark.parametrize("argv", [(), ("--seed=1",), ("nowhere",)])
def test_evaluate_asks_which_run(argv):
    expected = "nowhere" if argv == ("nowhere",) else "which run"
    assert expected in refusal(evaluate.main, list(argv))


def test_evaluate_a_run_without_a_checkpoint(copy_of_six):
    os.remove(copy_of_six / "ckpt.pt")
    evaluate.main([str(copy_of_six)])       # killed between two renames: the one before it is there
    os.remove(copy_of_six / "ckpt_prev.pt")
    assert "ckpt.pt" in refusal(evaluate.main, [str(copy_of_six)])


def test_evaluate_with_settings_that_do_not_fit(copy_of_six):
    assert "ckpt.pt" in refusal(evaluate.main, [str(copy_of_six), "--lora_rank=2"])


# ------------------------------------------------------------------------------------------------
# options that need more than this machine

@pytest.mark.parametrize("parts, names", [
    (False, []), (True, ["GPT", "GPT", "Scorer", "decode_step"]), (("generate",), ["decode_step"]),
    (("judge",), ["Scorer"]), (("reference",), ["GPT"]), (("update",), ["GPT"])])
def test_each_part_is_compiled_when_it_is_asked_for(parts, names, grpo, tmp_path, monkeypatch):
    used = []

    def compile(module, **options):
        of, number = getattr(module, "__self__", module), len(used)
        used.append([getattr(of, "__name__", type(of).__name__), 0])

        def run(*args, **kwargs):
            used[number][1] += 1
            return module(*args, **kwargs)

        run.lm_head = getattr(of, "lm_head", None)
        return run

    monkeypatch.setattr(torch, "compile", compile)
    grpo(tmp_path / "a", "--max_iters=1", "--beta=0.1", f"--compile={parts}")
    assert sorted(name for name, _ in used if name != "<lambda>") == names
    assert all(calls for _, calls in used)


def test_a_part_that_this_run_has_not_is_named(grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    out = grpo(tmp_path / "a", "--max_iters=1", "--compile=('judge', 'reference')")
    assert "this run has no reference (beta = 0)" in out and "no judge" not in out


def test_wandb_gets_the_metrics(grpo, rows, tmp_path, monkeypatch):
    begun, logged = [], []
    fake = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.init, fake.finish = lambda **k: begun.append(k), lambda: None
    fake.log = lambda row, step: logged.append((step, row))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    grpo(tmp_path / "run", "--wandb_project=toys", "--max_iters=2")
    assert begun[0]["project"] == "toys" and begun[0]["config"]["num_prompts"] == 4
    assert [step for step, _ in logged] == sorted(step for step, _ in logged)
    metrics = [row for _, row in logged if "loss" in row]
    written = rows(tmp_path / "run" / "metrics.jsonl")
    assert [m["reward"] for m in metrics] == [row["reward"] for row in written]
    assert [step for step, row in logged if "eval/perplexity" in row] == [0, 2]


def test_wandb_is_not_imported_without_a_project(grpo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    grpo(tmp_path / "run", "--max_iters=1")


@pytest.mark.parametrize("flags", [
    ("--dtype=bfloat16",), ("--max_completion_length=1",),
    ("--num_prompts=90", "--num_generations=2", "--micro_batch_size=60"),
    ("--mask_truncated_completions=True",), ("--judge=None", "--eval_judge=None", "{ones}")],
    ids=["bfloat16", "one-token", "many-prompts", "masked", "no-judge"])
def test_odd_corners(flags, grpo, rows, tmp_path):
    ones = str(reward_file(tmp_path, "return [1] * len(completions)"))
    text = grpo(tmp_path / "run", "--max_iters=2", *(f.replace("{ones}", ones) for f in flags))
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 2 and "after/before" in text
    assert "{ones}" not in flags or "all rewards of the batch are 1" in text
