"""Whole runs on a tiny model: what they print and leave behind, how they continue after an
interruption, what they refuse."""
import errno
import functools
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import stat
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import evaluate
import grpo
from common.files import load_file, read_json, save_file
from data.weights import load_gpt
from run.checkpoint import LOGS, newest_checkpoint
from run.evaluation import perplexity_under
from run.policy import load_policy, load_run
from run.sampling import sample_completions
from run.settings import load_settings
from worlds import (
    assert_near, assert_refused, mean_token, printed, random_ids, read_rows, refusal, settings,
    setup_of, skip_without, untimed_metrics, write_rows)

explain = importlib.import_module("explain.__main__")
NOISE = """
import itertools, os, random
import numpy, torch
random.seed(5), numpy.random.seed(6), torch.manual_seed(7)
reward_funcs = ("judge", "noise")
_calls = itertools.count(1)


def noise(prompts, completions):
    found = [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in completions]
    if next(_calls) == int(os.environ.get("CALL", 5)) and "SIGNAL" in os.environ:   # iteration 3
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        if "FAILS" in os.environ:
            raise ChildProcessError("Ctrl-C has ended it too")
    return found
"""
FINISHED = ["--beta=0.1", "--micro_batch_size=8", "--eval_interval=2", "--keep_checkpoints=1"]
SIX = ["--max_iters=6", "--eval_interval=3", "--save_interval=2"]


@pytest.fixture(scope="module")
def finished(run_grpo, tmp_path_factory):
    """Folder of a run of three iterations in two micro-batches each. Only for reading."""
    where = str(tmp_path_factory.mktemp("finished") / "run")
    run_grpo(where, *FINISHED)
    return where


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """A config file whose reward draws from the three global random generators."""
    path = tmp_path_factory.mktemp("noise") / "noise.py"
    path.write_text(NOISE)
    return str(path)


@pytest.fixture(scope="module")
def six(run_grpo, noise, tmp_path_factory):
    """Folder of a run of six iterations that nothing interrupted. Only for reading."""
    where = str(tmp_path_factory.mktemp("six") / "run")
    run_grpo(where, noise, *SIX)
    return where


@pytest.fixture
def copy_of_six(six, tmp_path):
    return shutil.copytree(six, tmp_path / "run")


@pytest.fixture
def go_on(copy_of_six, noise, run_grpo):
    """go_on("--max_iters=7") continues the copy."""
    return functools.partial(run_grpo, copy_of_six, noise, *SIX, "--resume=True")


def snapshot(folder):
    """{path: bytes} of all files below a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def bits(content):
    """Tensors, dicts and lists as they are saved: equal where all of them are, bit for bit."""
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


def checkpoint_of(folder):
    return load_file(newest_checkpoint(folder), "run")


def rewrite_checkpoint(folder, **changes):
    content = checkpoint_of(folder) | changes
    del content["kind"]
    save_file(newest_checkpoint(folder), "run", **content)


def assert_same_run(one, other):
    """All but times, bit for bit."""
    a = checkpoint_of(one)
    b = checkpoint_of(other)
    for key in ("iteration", "policy", "reference", "optimizer", "influence", "num_tokens",
                "base_hash", "random"):
        assert bits(a[key]) == bits(b[key]), f"the checkpoints differ in {key}"
    assert untimed_metrics(one) == untimed_metrics(other)
    for name in ("samples.jsonl", "eval.jsonl"):
        written = Path(one, name).read_bytes()
        assert written and written == Path(other, name).read_bytes(), f"{name} differs"


def test_a_run_leaves_its_files(finished, six):
    assert {"config.json", *LOGS, "ckpt_000003.pt"} <= set(os.listdir(finished))
    kept = sorted(path.name for path in Path(six).glob("ckpt_*.pt"))
    assert kept == ["ckpt_000004.pt", "ckpt_000006.pt"], "the newest and the one before"
    assert Path(six, "config.py").read_text() == NOISE
    about = read_json(f"{six}/config.json")
    assert about["functions"] == ["noise"]
    assert about["torch"] == torch.__version__


def test_metrics_samples_and_evaluations(finished):
    metrics, samples, evals = (read_rows(f"{finished}/{name}") for name in LOGS)
    assert [row["iteration"] for row in metrics] == [1, 2, 3]
    assert [row["iteration"] for row in samples] == [1] * 16 + [2] * 16 + [3] * 16
    assert [row["iteration"] for row in evals] == [0, 2, 3]
    assert {"rewards/judge", "eval_judge/toxicity", "perplexity"} <= evals[0].keys()
    for i, row in enumerate(metrics):
        rewards = [sample["reward"] for sample in samples[16 * i:16 * i + 16]]
        known = [x for x in rewards if x is not None]       # None: the judge abstained
        assert row["reward"] == pytest.approx(statistics.mean(known), abs=1e-5)
    for i in range(0, len(samples), 4):
        prompts = [sample["prompt"] for sample in samples[i:i + 4]]
        assert len(set(prompts)) == 1, "a group is of one prompt"
        assert sum(sample["advantage"] for sample in samples[i:i + 4]) == pytest.approx(0, abs=1e-4)


def test_a_second_start_leaves_the_first_run_alone(run_grpo, copy_of_six, tmp_path):
    before = snapshot(copy_of_six)
    assert_refused((str(copy_of_six), "--resume", "--out_dir"), run_grpo,
                   f"{copy_of_six}/", "--max_iters=0")      # a slash changes nothing
    assert snapshot(copy_of_six) == before
    assert os.listdir(tmp_path) == [copy_of_six.name]
    Path(tmp_path, "other.py").write_text(NOISE + "pass")
    assert_refused(str(copy_of_six), run_grpo, copy_of_six, f"{tmp_path}/other.py", *SIX)


@pytest.mark.parametrize("name", ["samples.jsonl", "config.py", "config.json"])
def test_a_folder_of_other_files_is_left_alone(name, run_grpo, tmp_path):
    where = tmp_path / "run"
    where.mkdir()
    (where / name).write_text("years of work")
    before = snapshot(tmp_path)
    for flag in ("--max_iters=0", "--resume=True"):
        assert_refused((str(where), "--out_dir"), run_grpo, where, flag)
    assert snapshot(tmp_path) == before


def test_a_folder_where_a_run_is_at_work(run_grpo, finished, tmp_path, monkeypatch):
    where = tmp_path / "run"
    prepare = grpo.prepare
    asked = []

    def meanwhile(*args):
        for flag in ("--max_iters=0", "--resume=True"):
            assert_refused(str(where), run_grpo, where, flag)
            asked.append(flag)
        return prepare(*args)

    monkeypatch.setattr(grpo, "prepare", meanwhile)
    run_grpo(where, *FINISHED)
    assert len(asked) == 2
    assert_same_run(finished, where)


LINKS = {"link": Path.symlink_to, "hard link": Path.hardlink_to,
         "pipe": lambda path, notes: os.mkfifo(path), "folder": lambda path, notes: path.mkdir()}


@pytest.mark.parametrize("name", [".lock", *LOGS])
@pytest.mark.parametrize("kind", LINKS)
def test_a_run_writes_through_no_link(name, kind, copy_of_six, noise, go_on, run_grpo, tmp_path):
    years = "years of work" * 10 ** 5       # long enough to go on with
    notes = tmp_path / "notes"
    notes.write_text(years)
    path = copy_of_six / name
    path.unlink()
    LINKS[kind](path, notes)
    for message in (refusal(go_on, "--max_iters=7"),
                    refusal(run_grpo, copy_of_six, "--max_iters=0")):
        assert name in message
        assert "remove" not in message, "who obeys would lose the run"
    assert notes.read_text() == years, f"what {name} leads to was written to"


def test_the_advice_about_links_loses_nothing(copy_of_six, six, tmp_path, go_on):
    os.symlink(tmp_path / "samples.jsonl", tmp_path / "other")
    shutil.move(copy_of_six / "samples.jsonl", tmp_path / "samples.jsonl")
    os.symlink(tmp_path / "samples.jsonl", copy_of_six / "samples.jsonl")
    for name in (".lock", "metrics.jsonl", "eval.jsonl"):       # as `cp -al` makes them
        os.link(copy_of_six / name, tmp_path / name)
    message = refusal(go_on)
    command = re.search("`(.*)`", message)[1]
    names = re.search("each F of (.*):", message)[1].split(", ")
    assert sorted(names) == sorted([".lock", *LOGS])
    for name in names:
        subprocess.run(command.replace("F", name), shell=True, check=True, cwd=copy_of_six)
    go_on()
    assert_same_run(six, copy_of_six)


class Crash(Exception):
    pass


def dies(*args, **more):
    raise Crash


@pytest.mark.parametrize("flags", [
    ("--beta=0.1", "--lora_rank=2", "--ref_model_sync_steps=2", "--ref_model_mixup_alpha=1"),
    ("--num_iterations=2", "--mini_batch_size=8", "--lr_decay=cosine", "--warmup_iters=2",
     "--top_k=20", "--weight_decay=0.1"),
    ("--tracin=reward", "--tracin_adam=True", "--beta=0.1", "--tracin_val_prompts=2",
     "--tracin_target_ema=0.5")],
    ids=["lora-sync", "steps", "tracin"])
def test_crashed_and_resumed_is_as_if_nothing_had_been(flags, run_grpo, tmp_path, monkeypatch):
    if "--lora_rank=2" in flags:
        skip_without("lora")
    argv = (*flags, "--max_iters=5")
    run_grpo(f"{tmp_path}/whole", *argv)
    update = grpo.update
    left = iter(range(3))

    def dies_in_the_fourth(*args, **more):
        if next(left, None) is None:
            raise Crash
        return update(*args, **more)

    with monkeypatch.context() as m, pytest.raises(Crash):
        m.setattr(grpo, "update", dies_in_the_fourth)
        run_grpo(f"{tmp_path}/parts", *argv)
    assert len(read_rows(f"{tmp_path}/parts/metrics.jsonl")) == 3
    assert checkpoint_of(f"{tmp_path}/parts")["iteration"] == 2
    out = run_grpo(f"{tmp_path}/parts", *argv)
    assert "ckpt_000002.pt" in out and "repeated iterations 3" in out
    assert_same_run(f"{tmp_path}/whole", f"{tmp_path}/parts")


def test_a_resumed_run_says_how_far_its_repetition_is_from_the_run(finished, run_grpo, tmp_path):
    """As on a GPU, where a repeated iteration may sample other tokens."""
    where = tmp_path / "run"
    shutil.copytree(finished, where)
    os.remove(where / "ckpt_000003.pt")
    rows = read_rows(where / "metrics.jsonl")
    rows[2]["reward"] += 0.25
    write_rows(where / "metrics.jsonl", rows)
    out = run_grpo(where, *FINISHED)
    note = [line for line in out.splitlines() if line.startswith("note: repeated iterations 3")]
    assert note and "0.25" in note[0], "nothing says how far the rewards are from those before"
    again = run_grpo(where, *FINISHED, "--max_iters=4", "--resume=True")
    assert "repeated" not in again, "nothing was repeated"


@pytest.mark.parametrize("flags", [
    ("--beta=0.1", "--top_p=0.9", "--dtype=bfloat16"),
    ("--tracin=reward", "--tracin_leave_one_out=True", "--lora_rank=2",
     "--activation_checkpointing=True")], ids=["plain", "influence"])
def test_a_run_works_with_torchs_deterministic_algorithms(flags, run_grpo, tmp_path):
    """torch refuses operations that it knows no deterministic form of; the numbers stay."""
    if "--lora_rank=2" in flags:
        skip_without("lora")
    run_grpo(tmp_path / "plain", *flags, "--max_iters=2")
    torch.use_deterministic_algorithms(True)
    try:
        run_grpo(tmp_path / "fixed", *flags, "--max_iters=2")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_run(str(tmp_path / "plain"), str(tmp_path / "fixed"))


@pytest.mark.parametrize("part", ("grpo.prepare", "run.run.evaluate", "grpo.update"))
def test_killed_before_the_second_checkpoint(part, finished, run_grpo, tmp_path, monkeypatch):
    argv = (tmp_path / "run", *FINISHED)
    with monkeypatch.context() as m, pytest.raises(Crash):
        m.setattr(part, dies)
        run_grpo(*argv)
    run_grpo(*argv)     # the same command
    assert_same_run(finished, f"{tmp_path}/run")


@pytest.mark.parametrize("number, iteration, code, said", [
    (signal.SIGKILL, 2, -9, ""), (signal.SIGHUP, 3, 130, "iteration 3")])
def test_signals(number, iteration, code, said, tiny, noise, six, run_grpo, tmp_path):
    where = tmp_path / "run"
    command = [sys.executable, grpo.__file__, *tiny.flags, noise, f"--out_dir={where}", *SIX]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"SIGNAL": str(int(number))})
    assert done.returncode == code and said in done.stderr, done.stderr
    text = run_grpo(where, noise, *SIX)
    assert f"{where}/ckpt_00000{iteration}.pt" in text
    assert_same_run(six, where)
    assert_refused(str(where), run_grpo, where, noise, *SIX)


# number of the reward's call that fails: the iteration that is saved
FAILED = {2: None, 4: 1, 5: 2, 6: 3, 10: 6}     # the first evaluation, the second, ..., the last


@pytest.mark.parametrize("call", FAILED)
def test_nothing_is_lost_where_ctrl_c_makes_a_reward_fail(
        call, noise, six, run_grpo, tmp_path, monkeypatch):
    """A terminal sends the signal to all processes of a command, so a reward's own child dies."""
    where = tmp_path / "run"
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt, match="ended it too") as e:
        for name, x in (("SIGNAL", int(signal.SIGINT)), ("CALL", call), ("FAILS", 1)):
            m.setenv(name, str(x))
        run_grpo(where, noise, *SIX)
    if FAILED[call]:
        assert f"iteration {FAILED[call]}" in str(e.value)
        assert checkpoint_of(where)["iteration"] == FAILED[call]
    assert "after/before" in run_grpo(where, noise, *SIX)
    assert_same_run(six, where)


def test_half_an_iteration_is_not_saved(noise, six, run_grpo, tmp_path, monkeypatch):
    where = tmp_path / "run"
    update = grpo.update
    left = iter(range(2))

    def fails_behind_the_third_step(*args, **more):
        metrics = update(*args, **more)
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
            raise ChildProcessError
        return metrics

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt, match="saved last is kept"):
        m.setattr(grpo, "update", fails_behind_the_third_step)
        run_grpo(where, noise, *SIX)
    assert checkpoint_of(where)["iteration"] == 2
    run_grpo(where, noise, *SIX)
    assert_same_run(six, where)


def test_a_failure_without_a_signal_is_no_interruption(run_grpo, noise, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "update", dies)
    with pytest.raises(Crash):
        run_grpo(tmp_path / "run", noise, *SIX)


def test_a_run_that_was_killed_before_its_table_prints_it(copy_of_six, six, noise, run_grpo):
    about = read_json(f"{copy_of_six}/config.json")
    (copy_of_six / "config.json").write_text(json.dumps(about | {"is_printed": False}))
    assert "after/before" in run_grpo(copy_of_six, noise, *SIX)
    assert_same_run(six, copy_of_six)
    assert_refused(str(copy_of_six), run_grpo, copy_of_six, noise, *SIX)


def test_the_checkpoint_before_serves_and_logs_are_cut(copy_of_six, six, go_on):
    os.remove(copy_of_six / "ckpt_000006.pt")
    for name in LOGS:
        with open(copy_of_six / name, "a") as f:
            f.write('{"iteration": 7, "lo')
    assert "ckpt_000004.pt" in go_on()
    assert_same_run(six, copy_of_six)


def test_a_finished_run_is_printed_again(copy_of_six, go_on):
    before = snapshot(copy_of_six)
    text = go_on()
    assert "after/before" in text and "max_iters" in text
    assert not re.search(r"^(iter|eval) \d|^\[Micro", text, re.M), "it did an iteration"
    after = snapshot(copy_of_six)
    del before[f"{copy_of_six}/config.json"], after[f"{copy_of_six}/config.json"]
    assert after == before


def test_a_finished_run_is_made_longer(noise, six, run_grpo, tmp_path):
    run_grpo(f"{tmp_path}/longer", noise, *SIX, "--max_iters=3")
    run_grpo(f"{tmp_path}/longer", noise, *SIX, "--resume")
    assert_same_run(six, f"{tmp_path}/longer")


def flip_a_bit(run):
    content = bytearray((run / "ckpt_000006.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (run / "ckpt_000006.pt").write_bytes(content)


# damage to the folder of a run: what is done, and the file that is named
DAMAGE = {
    "cut short": (lambda run: os.truncate(run / "ckpt_000006.pt", 1000), "ckpt_000006.pt"),
    "a flipped bit": (flip_a_bit, "ckpt_000006.pt"),
    "another kind": (lambda run: torch.save({"kind": "policy"}, run / "ckpt_000006.pt"),
                     "ckpt_000006.pt"),
    "a lost log": (lambda run: os.remove(run / "samples.jsonl"), "samples.jsonl"),
    "no checkpoint": (lambda run: [os.remove(path) for path in run.glob("ckpt_*.pt")],
                      "checkpoint")}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_refused_and_kept(what, copy_of_six, go_on):
    damage, file = DAMAGE[what]
    damage(copy_of_six)
    before = snapshot(copy_of_six)
    assert_refused(file, go_on, "--max_iters=7")
    assert snapshot(copy_of_six) == before


@pytest.mark.parametrize("change", [
    dict(policy=None), dict(optimizer=None),
    dict(optimizer={"state": {0: {"step": torch.ones(())}}})], ids=str)
def test_a_checkpoint_of_other_content_is_one_line(change, copy_of_six, noise, go_on):
    rewrite_checkpoint(copy_of_six, **change)
    before = snapshot(copy_of_six)
    assert_refused("ckpt_000006.pt", go_on, "--max_iters=7")
    assert_refused("ckpt_000006.pt", explain.main, [str(copy_of_six), noise])
    assert snapshot(copy_of_six) == before


def test_a_run_that_is_resumed_with_a_moving_reference_has_the_base_as_its_first(
        run_grpo, tmp_path):
    flags = ("--beta=0.1", "--save_interval=1")
    moving = (*flags, "--max_iters=2", "--ref_model_sync_steps=2")
    run_grpo(tmp_path / "late", *flags, "--max_iters=1")
    text = run_grpo(tmp_path / "late", *moving, "--resume=True")
    assert "ref_model_sync_steps: 0 -> 2" in text, "it must name settings that are new"
    run_grpo(tmp_path / "whole", *moving)
    a, b = (checkpoint_of(tmp_path / name)["reference"] for name in ("late", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_is_resumed_with_another_target_averages_that_alone(run_grpo, tmp_path):
    flags = ("--tracin_target_ema=0.5", "--save_interval=1")
    run_grpo(tmp_path, *flags, "--tracin=reward", "--max_iters=2")
    run_grpo(tmp_path, *flags, "--tracin=advantage", "--max_iters=3", "--resume=True")
    ages = [row["tracin/target_age"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert ages == [1, 2, 1], "the average holds gradients of the target before"


def test_a_checkpoint_by_another_name_is_refused(copy_of_six, go_on):
    """Under a later name it would stay the newest: the run would begin there again and again."""
    (copy_of_six / "ckpt_000004.pt").rename(copy_of_six / "ckpt_000009.pt")
    before = snapshot(copy_of_six)
    assert_refused("ckpt_000009.pt", go_on, "--max_iters=12")
    assert snapshot(copy_of_six) == before


def test_a_file_of_the_user_that_ends_in_tmp_is_kept(copy_of_six, go_on):
    (copy_of_six / "ckpt_best.tmp").write_text("mine")
    go_on()
    assert (copy_of_six / "ckpt_best.tmp").read_text() == "mine"


def test_checkpoints_that_are_kept_remove_nothing_of_the_user(run_grpo, tmp_path):
    (tmp_path / "mine").write_text("mine")
    run = tmp_path / "run"
    run_grpo(run, "--max_iters=1", "--save_interval=1")
    for number in (0, 9):
        (run / f"ckpt_00000{number}.pt").unlink(missing_ok=True)
        os.symlink(tmp_path / "mine", run / f"ckpt_00000{number}.pt")
    (run / "ckpt_000008.pt").mkdir()
    more = ("--save_interval=1", "--keep_checkpoints=3", "--resume=True")
    assert "ckpt_000001.pt" in run_grpo(run, *more, "--max_iters=5")
    assert "ckpt_000005.pt" in run_grpo(run, *more, "--max_iters=6")
    found = {path.name[10:11]: path.is_symlink() for path in run.glob("ckpt_*.pt")}
    assert found == {"0": True, "9": True, "8": False, "4": False, "5": False, "6": False}
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("part", ["write_json", "replacing"])
def test_killed_before_config_json_or_config_py_is_there(
        part, run_grpo, noise, six, tmp_path, monkeypatch):
    where = tmp_path / "run"
    with monkeypatch.context() as m, pytest.raises(Crash):
        m.setattr(f"run.checkpoint.{part}", dies)
        run_grpo(where, noise, *SIX)
    (where / "ckpt_000002.pt.123.tmp").write_text("half a checkpoint")
    run_grpo(where, noise, *SIX, "--resume=True")
    assert_same_run(six, where)
    assert set(os.listdir(where)) == set(os.listdir(six)), "a half was left behind"


def test_a_folder_by_the_name_of_half_a_checkpoint_is_kept(copy_of_six, go_on):
    (copy_of_six / "ckpt_000007.pt.1.tmp").mkdir()
    notes = copy_of_six / "ckpt_000007.pt.1.tmp" / "notes"
    notes.write_text("years of work")
    with pytest.raises(OSError, match="directory"):
        go_on("--max_iters=7")
    assert notes.read_text() == "years of work"


def test_settings_that_do_not_fit_the_checkpoint(copy_of_six, tiny, noise, go_on, tmp_path):
    content = load_file(tiny.policy, "policy")
    content["model"]["ln_f.bias"] += 1
    save_file(f"{tmp_path}/other.pt", **content)
    before = snapshot(copy_of_six)
    for flag, name in ((f"--policy={tmp_path}/other.pt", "policy"), ("--n_layer=3", "n_layer"),
                       ("--lora_rank=2", "lora_rank")):
        assert_refused(name, go_on, flag)
    other = [str(copy_of_six), noise, f"--policy={tmp_path}/other.pt"]
    assert_refused("policy", evaluate.main, other)
    assert snapshot(copy_of_six) == before


def test_a_checkpoint_never_holds_what_is_not_finite(run_grpo, tmp_path, monkeypatch):
    update = grpo.update

    def poisoned(setup, *args, **more):
        metrics = update(setup, *args, **more)
        next(iter(setup.optimizer.state.values()))["exp_avg_sq"][0] = math.inf
        return metrics

    monkeypatch.setattr(grpo, "update", poisoned)
    assert "iteration 1" in refusal(run_grpo, f"{tmp_path}/run", "--save_interval=1")
    assert checkpoint_of(f"{tmp_path}/run")["iteration"] == 0


@pytest.fixture
def fresh(tiny, tmp_path, monkeypatch):
    """Start grpo.py with nothing prepared yet; training anything fails the test."""
    for module in ("run.pretraining", "judge.train"):
        monkeypatch.setattr(sys.modules[module], "fit",
                            lambda *args, **more: pytest.fail("trained before it looked"))

    def start(*argv):
        printed(grpo.main, [*tiny.flags, f"--cache_dir={tmp_path}/cache",
                               f"--out_dir={tmp_path}/run", *argv])

    return start


# flag | what the refusal names
REFUSALS = """
--comments=nowhere.csv | nowhere.csv
--device=quantum | device
--policy=nowhere.pt | nowhere.pt
--judge=nowhere.pt | nowhere.pt
--judge={policy} | {policy}
--policy={judge} | {judge}
--max_completion_length=32 | block_size
--prompt_words=(30, 40) | prompts
--num_prompts=1000000000 | num_prompts
--out_dir={policy}/run | out_dir
--wandb_project=x | wandb
"""


def test_bad_settings_are_found_before_anything_is_trained(fresh, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = snapshot(tiny.cache)
    for line in REFUSALS.strip().splitlines():
        flag, name = line.format(policy=tiny.policy, judge=tiny.judge).split(" | ")
        assert_refused(name, fresh, flag)
    assert snapshot(tiny.cache) == before


@pytest.mark.parametrize("text, name", [
    ("def reward(completions): return 3", "reward"),
    ("tracin = 'target'\ndef target(policy, tokenizer, batch): return 3.0", "target"),
    ("tracin = 'target'\ndef target(policy, tokenizer, batch): batch.speed", "target"),
    ("tracin = 'self'\ntracin_select = 'weigh'\ndef weigh(influence, batch): pass", "weigh")],
    ids=["reward", "a number", "an error", "nothing"])
def test_a_faulty_function_is_found_before_anything_is_trained(text, name, fresh, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(text)
    assert_refused(name, fresh, str(config))


def columns(text):
    """{measure: (before, after)} of the printed table."""
    found = re.findall(r"^(\S+) +(-?\d+\.\d{4}) +(-?\d+\.\d{4}) ", text, re.M)
    return {name: (float(before), float(after)) for name, before, after in found}


@pytest.mark.parametrize("flags", [(), ("--lora_rank=2", "--learning_rate=1e-2")])
def test_evaluate_reproduces_the_last_evaluation(flags, run_grpo, finished, tmp_path):
    where = tmp_path / "run"
    if flags:
        skip_without("lora")
        run_grpo(where, "--max_iters=2", *flags)
    else:
        shutil.copytree(finished, where)
    before = snapshot(where)
    text = printed(evaluate.main, [str(where)])
    assert snapshot(where) == before
    first, *_, last = read_rows(f"{where}/eval.jsonl")
    samples = last.pop("samples")
    del last["iteration"]
    assert columns(text) == {name: (round(first[name], 4), round(x, 4)) for name, x in last.items()}
    assert all(f"after:  {row['completion']!r}" in text for row in samples)


@pytest.mark.parametrize("changes", [
    {}, {"lora_rank": 2}, {"critic": True, "num_generations": 4}], ids=str)
def test_the_folder_of_a_run_is_a_policy_its_last_one(changes, tiny, noise, run_grpo, tmp_path):
    """Where a model is expected, what a run trained: adapters merged, without the critic."""
    for extra, name in (("lora", "lora_rank"), ("critic", "critic")):
        if name in changes:
            skip_without(extra)
    first, second, third = (f"{tmp_path}/{name}" for name in ("first", "second", "third"))
    flags = [f"--{name}={value}" for name, value in changes.items()]
    run_grpo(first, noise, *SIX, *flags, "--learning_rate=1e-2")
    trained, _ = load_run(first)
    policy, tokenizer = load_policy(load_settings([f"--policy={first}"]))
    idx = random_ids(2, 9, 300)
    with torch.no_grad():
        assert_near(policy.lm_head(policy(idx)), trained.lm_head(trained(idx)))
    assert policy.state_dict().keys() == load_gpt(tiny.policy).state_dict().keys()
    assert tokenizer.n_vocab == 300
    run_grpo(second, noise, *SIX, f"--policy={first}")
    after, before = read_rows(f"{first}/eval.jsonl")[-1], read_rows(f"{second}/eval.jsonl")[0]
    assert ([row["completion"] for row in before["samples"]]
            == [row["completion"] for row in after["samples"]])
    run_grpo(third, noise, *SIX, f"--policy={second}")
    assert load_run(third)[1].n_vocab == 300
    for judge in ("judge", "eval_judge"):
        assert_refused((judge, first), load_settings, [f"--{judge}={first}"])


def test_a_run_whose_base_was_trained_on_cannot_go_on(tiny, noise, run_grpo, tmp_path):
    first, second = f"{tmp_path}/first", f"{tmp_path}/second"
    run_grpo(first, noise, *SIX)
    run_grpo(second, noise, *SIX, f"--policy={first}")
    run_grpo(first, noise, *SIX, "--max_iters=7", "--resume=True")
    assert_refused("policy", run_grpo, second, noise, *SIX, f"--policy={first}", "--max_iters=7",
                   "--resume=True")


def test_a_run_of_another_version_has_a_policy(copy_of_six):
    content = checkpoint_of(copy_of_six)
    rewrite_checkpoint(copy_of_six, settings=content["settings"] | {"speed": 1})
    policy, _ = load_run(str(copy_of_six))
    assert bits(dict(policy.state_dict())) == bits(dict(content["policy"]))


def test_a_policy_with_a_part_that_is_not_here_is_one_line(copy_of_six, monkeypatch):
    settings = checkpoint_of(copy_of_six)["settings"]
    rewrite_checkpoint(copy_of_six, settings=settings | {"lora_rank": 2})
    monkeypatch.setattr(sys.modules["run.check"], "ROOT", str(copy_of_six))
    assert_refused(("lora_rank", "extras/lora"), load_run, str(copy_of_six))


@pytest.mark.parametrize("change", [
    dict(policy=None), dict(policy=3), dict(vocab_size=[300]), dict(lora_rank="2"), dict(critic=7)],
    ids=str)
def test_settings_of_another_type_in_a_checkpoint_are_one_line(change, copy_of_six):
    rewrite_checkpoint(copy_of_six, settings=checkpoint_of(copy_of_six)["settings"] | change)
    assert_refused([*change], load_run, str(copy_of_six))


def test_evaluate_takes_the_reward_of_the_config_file(copy_of_six, noise):
    assert_refused("CONFIG.py", evaluate.main, [str(copy_of_six)])
    os.remove(copy_of_six / "ckpt_000006.pt")
    text = printed(evaluate.main, [str(copy_of_six), noise, "--num_eval_prompts=2"])
    assert "rewards/noise" in columns(text)
    os.remove(copy_of_six / "ckpt_000004.pt")
    assert_refused(str(copy_of_six), evaluate.main, [str(copy_of_six), noise])


def test_the_evaluation_has_a_temperature_of_its_own(copy_of_six, noise):
    cold = ["--eval_temperature=1e-4", "--temperature=2.0"]
    found = columns(printed(evaluate.main, [str(copy_of_six), noise, *cold]))
    assert found["eval_judge/expected_max"] == found["eval_judge/toxicity"], (
        "near temperature 0 all completions of a prompt are the likeliest one")
    assert found["perplexity"][0] == 1 and found["kl"][0] == 0, (
        "perplexity and KL are of the distribution that is sampled from")


def test_a_perplexity_beyond_all_numbers_is_infinite():
    cfg = settings(mean_token, eval_temperature=1e-6)
    setup = setup_of(cfg)
    rollout = sample_completions(setup, setup.policy, setup.prompts, cfg, seed=1).rollout
    perplexity, _ = perplexity_under(setup.policy.requires_grad_(False), rollout, cfg)
    assert perplexity == math.inf, "tokens that are not the likeliest ones have probability 0"


def test_evaluate_never_trains(copy_of_six, noise, tmp_path):
    for flag in (f"--cache_dir={tmp_path}/none", "--judge_tokens=64000",
                 "--pretrain_tokens=1000000000000"):
        for main in (evaluate.main, explain.main):
            assert_refused("pretrain.py", main, [str(copy_of_six), noise, flag])
    for argv in ([], ["--seed=1"]):
        assert_refused("run", evaluate.main, argv)


def test_wandb_gets_the_metrics(run_grpo, tmp_path, monkeypatch):
    begun = {}
    logged = []
    fake = ModuleType("wandb")
    fake.init = begun.update
    fake.log = lambda row, step: logged.append((step, row))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run_grpo(f"{tmp_path}/run", "--wandb_project=toys", "--max_iters=2")
    assert begun["project"] == "toys" and begun["config"]["num_prompts"] == 4
    rewards = [row["reward"] for _, row in logged if "loss" in row]
    assert rewards == [row["reward"] for row in read_rows(f"{tmp_path}/run/metrics.jsonl")]
    assert [step for step, row in logged if "eval/perplexity" in row] == [0, 2]


@pytest.mark.parametrize("part", ["init", "log", "finish"])
def test_a_failing_wandb_is_a_note(part, run_grpo, tmp_path, monkeypatch):
    def fails(*args, **more):
        calls.append(part)
        raise SystemExit("no key") if part == "init" else ConnectionError("api unreachable")

    calls = []
    fake = ModuleType("wandb")
    for name in ("init", "log", "finish"):
        setattr(fake, name, fails if name == part else lambda *args, **more: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    text = run_grpo(f"{tmp_path}/run", "--wandb_project=toys", "--max_iters=2")
    note, = [line for line in text.splitlines() if line.startswith("note: wandb")]
    assert f"wandb.{part}" in note
    assert len(calls) == 1, "it is asked again and again"
    assert "after/before" in text and checkpoint_of(f"{tmp_path}/run")["iteration"] == 2


def test_a_disk_that_cannot_wait_for_a_folder(run_grpo, tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(number)

    monkeypatch.setattr(os, "fsync", of_files)
    text = run_grpo(tmp_path / "run", "--max_iters=1")
    assert re.search("^note: .*power failure", text, re.M) and "after/before" in text


def test_the_home_folder_in_a_flag(run_grpo, tmp_path, monkeypatch):
    """A shell leaves the ~ of --out_dir=~/run alone."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run_grpo("~/run", "--max_iters=1")
    assert os.listdir(tmp_path) == ["home"] and "eval.jsonl" in os.listdir(tmp_path / "home/run")


def test_the_verdict(run_grpo, tmp_path):
    rises = tmp_path / "rises.py"
    rises.write_text("def reward(prompts, completions): return list(map(len, completions))")
    flags = (rises, "--judge=None", "--eval_judge=None", "--max_iters=4", "--learning_rate=1e-2")
    assert "verdict: works" in run_grpo(f"{tmp_path}/a", *flags, "--expect_rise=0.1")
    assert "does not work" in refusal(run_grpo, f"{tmp_path}/b", *flags, "--expect_rise=1000")
