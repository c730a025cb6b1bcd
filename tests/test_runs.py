"""
Whole runs on a tiny model, by what they promise: what a run leaves behind; nothing of anybody's is
lost; after any interruption it goes on with the same bits; what is damaged or does not fit is
refused; evaluate.py measures what it trained, and other runs start from it.
"""
import functools
import io
import math
import os
import re
import shutil
import signal
import statistics
import sys
from pathlib import Path

import pytest
import torch

import evaluate
import grpo
import model
from common.files import load_file, read_json, save_file
from data.weights import load_gpt
from run.checkpoint import LOGS, newest_checkpoint
from run.policy import load_policy, load_run
from run.settings import load_settings
from worlds import (
    assert_near, assert_refused, flip_a_bit, printed, random_ids, read_rows, refusal,
    skip_without, untimed_metrics)

# a reward that draws from the three global generators, and may send a signal or fail in one call
NOISE = """
import itertools, os, random
import numpy, torch
random.seed(5), numpy.random.seed(6), torch.manual_seed(7)
reward_funcs = ("judge", "noise")
_calls = itertools.count(1)


def noise(prompts, completions):
    found = [random.random() + numpy.random.rand() + float(torch.rand(())) for _ in completions]
    if next(_calls) == int(os.environ.get("CALL", 0)):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        if "FAILS" in os.environ:
            raise ChildProcessError("Ctrl-C has ended it too")
    return found
"""
SIX = ["--beta=0.1", "--micro_batch_size=8", "--max_iters=6", "--eval_interval=3",
       "--save_interval=2"]


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """A config file with the reward above."""
    path = tmp_path_factory.mktemp("noise") / "noise.py"
    path.write_text(NOISE)
    return str(path)


@pytest.fixture(scope="module")
def whole(run_grpo, noise, tmp_path_factory):
    """Folder of a run of six iterations that nothing interrupted. Only for reading."""
    where = tmp_path_factory.mktemp("whole") / "run"
    run_grpo(where, noise, *SIX)
    return where


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of that run."""
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def go_on(copy, noise, run_grpo):
    """go_on("--max_iters=7") continues the copy."""
    return functools.partial(run_grpo, copy, noise, *SIX, "--resume=True")


@pytest.fixture(scope="module", params=["plain", "lora", "critic"])
def trained(request, run_grpo, noise, tmp_path_factory):
    """Folder of a run of two iterations, of each kind that keeps its weights in another way. Only
    for reading."""
    flags = {"plain": [], "lora": ["--lora_rank=2"], "critic": ["--critic=True"]}[request.param]
    if flags:
        skip_without(request.param)
    where = tmp_path_factory.mktemp(request.param) / "run"
    run_grpo(where, noise, *flags, "--learning_rate=1e-2", "--max_iters=2")
    return where


def snapshot(folder):
    """{path: bytes} of all files below a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def bits(content):
    """Tensors, dicts and lists as they are saved: equal where all of them are, bit for bit."""
    torch.save(content, file := io.BytesIO())
    return file.getvalue()


def checkpoint_of(folder):
    return load_file(newest_checkpoint(str(folder)), "run")


def rewrite_checkpoint(folder, **changes):
    content = checkpoint_of(folder) | changes
    del content["kind"]
    save_file(newest_checkpoint(str(folder)), "run", **content)


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


def columns(text):
    """{measure: (before, after)} of the printed table."""
    found = re.findall(r"^(\S+) +(-?\d+\.\d{4}|inf) +(-?\d+\.\d{4}|inf) ", text, re.M)
    return {name: (float(before), float(after)) for name, before, after in found}


class Crash(BaseException):       # as a kill: nothing is saved on the way
    pass


def dies(*args, **more):
    raise Crash


# ------------------------------------------------------------------------------------------------
# what a run leaves

def test_a_run_leaves_logs_checkpoints_and_its_config(whole):
    metrics, samples, evals = (read_rows(whole / name) for name in LOGS)
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["iteration"] for row in samples] == [it for it in range(1, 7) for _ in range(16)]
    assert [row["iteration"] for row in evals] == [0, 3, 6]
    assert {"rewards/judge", "eval_judge/toxicity", "perplexity"} <= evals[0].keys()
    for i, row in enumerate(metrics):
        rewards = [sample["reward"] for sample in samples[16 * i:16 * i + 16]]
        known = [x for x in rewards if x is not None]       # None: the judge abstained
        assert row["reward"] == pytest.approx(statistics.mean(known), abs=1e-5)
    for i in range(0, len(samples), 4):
        group = samples[i:i + 4]
        assert len({sample["prompt"] for sample in group}) == 1, "a group is of one prompt"
        assert sum(sample["advantage"] for sample in group) == pytest.approx(0, abs=1e-4)

    kept = sorted(path.name for path in whole.glob("ckpt_*.pt"))
    assert kept == ["ckpt_000004.pt", "ckpt_000006.pt"], "the newest and the one before"
    about = read_json(whole / "config.json")
    assert (about["functions"], about["torch"]) == (["noise"], torch.__version__)
    assert (whole / "config.py").read_text() == NOISE


def test_a_run_whose_reward_rises_as_expected_works(run_grpo, tmp_path):
    rises = tmp_path / "rises.py"
    rises.write_text("def reward(completions): return list(map(len, completions))")
    text = run_grpo(tmp_path / "run", rises, "--judge=None", "--eval_judge=None", "--max_iters=4",
                    "--learning_rate=1e-2", "--expect_rise=0.1")
    assert "verdict: works" in text


def test_neither_recomputed_blocks_nor_deterministic_algorithms_change_a_run(
        run_grpo, tmp_path, monkeypatch):
    """torch refuses operations that it knows no deterministic form of."""
    flags = ("--tracin=reward", "--beta=0.1", "--max_iters=2")
    run_grpo(tmp_path / "plain", *flags)
    calls = []
    checkpoint = model.checkpoint
    monkeypatch.setattr(model, "checkpoint", lambda *given, **how: (
        calls.append(1), checkpoint(*given, **how))[1])
    torch.use_deterministic_algorithms(True)
    try:
        run_grpo(tmp_path / "fixed", *flags, "--activation_checkpointing=True")
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls, "activation_checkpointing does nothing"
    assert_same_run(tmp_path / "plain", tmp_path / "fixed")


def test_a_run_without_rewards_stops_after_three_iterations_and_again_after_three(
        run_grpo, tmp_path):
    """The judge is down. Nothing would be learned, until max_iters."""
    path = tmp_path / "down.py"
    path.write_text("def reward(completions): return [None] * len(completions)\n")
    for done in (3, 6):
        refusal(run_grpo, tmp_path / "run", path, "--max_iters=9")
        assert (tmp_path / f"run/ckpt_{done:06d}.pt").exists(), "it did not stop, or did not save"
        assert len(read_rows(tmp_path / "run/metrics.jsonl")) == done


def test_expect_rise_ends_a_run_with_a_verdict(copy, go_on):
    assert "verdict" in refusal(go_on, "--expect_rise=1000")


# ------------------------------------------------------------------------------------------------
# nothing of anybody's is lost

def test_another_command_leaves_a_run_alone(run_grpo, copy, tmp_path):
    """Other settings, and another config file."""
    other = tmp_path / "other.py"
    other.write_text(NOISE + "pass")
    before = snapshot(tmp_path)
    assert_refused((str(copy), "--resume", "--out_dir"), run_grpo, f"{copy}/", "--max_iters=0")
    assert_refused(str(copy), run_grpo, copy, other, *SIX)
    assert snapshot(tmp_path) == before


def test_a_folder_of_other_files_is_left_alone(run_grpo, tmp_path):
    (tmp_path / "samples.jsonl").write_text("years of work")
    before = snapshot(tmp_path)
    for flag in ("--max_iters=0", "--resume=True"):
        assert_refused((str(tmp_path), "--out_dir"), run_grpo, tmp_path, flag)
    assert snapshot(tmp_path) == before


def test_a_folder_where_a_run_is_at_work_is_left_alone(copy, go_on, monkeypatch):
    asked = []

    def meanwhile(*args):
        monkeypatch.undo()
        before = snapshot(copy)
        assert_refused(str(copy), go_on, "--max_iters=7")
        assert snapshot(copy) == before
        asked.append(1)
        raise Crash

    monkeypatch.setattr(grpo, "prepare", meanwhile)
    with pytest.raises(Crash):
        go_on("--max_iters=7")
    assert asked, "the run did not begin"


def test_a_run_writes_through_no_link(copy, go_on, tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("years of work" * 10 ** 5)     # long enough to go on with
    before = notes.read_bytes()
    (copy / "samples.jsonl").unlink()
    for its, make in ((7, Path.symlink_to), (8, Path.hardlink_to)):     # `cp -al` makes the second
        make(copy / "samples.jsonl", notes)
        go_on(f"--max_iters={its}")
        assert notes.read_bytes() == before, "the run has changed a file of a different folder"
        (copy / "samples.jsonl").unlink()


def test_a_run_keeps_as_many_checkpoints_as_keep_checkpoints_says(run_grpo, tmp_path):
    run = tmp_path / "run"
    for keep, its, left in ((0, 4, "01234"), (3, 6, "456")):
        run_grpo(run, "--save_interval=1", "--resume=True", f"--keep_checkpoints={keep}",
                 f"--max_iters={its}")
        assert "".join(sorted(path.name[10] for path in run.glob("ckpt_0*.pt"))) == left


# ------------------------------------------------------------------------------------------------
# after any interruption it goes on with the same bits

@pytest.mark.parametrize("flags", [
    ("--beta=0.1", "--lora_rank=2", "--ref_model_sync_steps=2", "--ref_model_mixup_alpha=1",
     "--num_iterations=2", "--mini_batch_size=8", "--lr_decay=cosine", "--warmup_iters=2",
     "--top_k=20", "--weight_decay=0.1"),
    ("--tracin=reward", "--tracin_adam=True", "--beta=0.1", "--tracin_val_prompts=2",
     "--tracin_target_ema=0.5")], ids=["grpo", "tracin"])
def test_crashed_and_resumed_is_as_if_nothing_had_been(flags, run_grpo, tmp_path, monkeypatch):
    """The same command goes on from the checkpoint, and repeats what came after it."""
    if "--lora_rank=2" in flags:
        skip_without("lora")
    argv = (*flags, "--max_iters=4")
    run_grpo(tmp_path / "whole", *argv)
    update = grpo.update
    left = iter(range(3))

    def dies_in_the_fourth(*args, **more):
        if next(left, None) is None:
            raise Crash
        return update(*args, **more)

    with monkeypatch.context() as m, pytest.raises(Crash):
        m.setattr(grpo, "update", dies_in_the_fourth)
        run_grpo(tmp_path / "parts", *argv)
    assert len(read_rows(tmp_path / "parts/metrics.jsonl")) == 3
    assert checkpoint_of(tmp_path / "parts")["iteration"] == 2
    assert "ckpt_000002.pt" in run_grpo(tmp_path / "parts", *argv)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_killed_again_and_again_before_the_first_iteration_is_done(
        noise, whole, run_grpo, tmp_path, monkeypatch):
    """While it prepares, writes config.json, then config.py, evaluates, and learns."""
    where = tmp_path / "run"
    for part in ("grpo.prepare", "run.checkpoint.write_json", "run.checkpoint.replacing",
                 "run.run.evaluate", "grpo.update"):
        with monkeypatch.context() as m, pytest.raises(Crash):
            m.setattr(part, dies)
            run_grpo(where, noise, *SIX)
        (where / "ckpt_000002.pt.123.tmp").write_text("half a checkpoint")
    run_grpo(where, noise, *SIX)
    assert_same_run(whole, where)
    assert set(os.listdir(where)) == set(os.listdir(whole)), "a half was left behind"


# number of the reward's call, whether it fails after the signal: the iteration that is saved
INTERRUPTED = {"in iteration 3": (4, False, 3), "so that iteration 3 fails": (4, True, 2)}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_nothing_is_lost_where_ctrl_c_makes_a_reward_fail(
        when, noise, whole, run_grpo, tmp_path, monkeypatch):
    """A terminal sends the signal to all processes of a command, so a reward's own child dies."""
    call, fails, saved = INTERRUPTED[when]
    where = tmp_path / "run"
    error = ChildProcessError if fails else KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(error):
        m.setenv("SIGNAL", str(int(signal.SIGINT)))
        m.setenv("CALL", str(call))
        if fails:
            m.setenv("FAILS", "1")
        run_grpo(where, noise, *SIX)
    assert checkpoint_of(where)["iteration"] == saved
    assert columns(run_grpo(where, noise, *SIX)), "it did not come to its end"
    assert_same_run(whole, where)


@pytest.mark.parametrize("call, saved", [(4, 2), (9, 6)])
def test_a_reward_that_fails_once_costs_no_whole_iteration(
        call, saved, noise, whole, run_grpo, tmp_path, monkeypatch):
    """In iteration 3, or in the last evaluation: as after Ctrl-C, and the user's own line is named.
    """
    where = tmp_path / "run"
    sparse = [flag for flag in SIX if "save_interval" not in flag] + ["--save_interval=50"]
    with monkeypatch.context() as m:
        m.setenv("SIGNAL", "0")     # none
        m.setenv("CALL", str(call))
        m.setenv("FAILS", "1")
        with pytest.raises(ChildProcessError) as failed:
            run_grpo(where, noise, *sparse)
    assert failed.traceback[-1].path.name == "noise.py", "the user's own line is not the last"
    assert checkpoint_of(where)["iteration"] == saved
    assert columns(run_grpo(where, noise, *sparse)), "it did not come to its end"
    assert_same_run(whole, where)


def test_half_an_iteration_is_not_saved(noise, whole, run_grpo, tmp_path, monkeypatch):
    """What fails after Ctrl-C and a step goes back to the last checkpoint."""
    where = tmp_path / "run"
    update = grpo.update
    left = iter(range(3))     # iteration 2 is saved, 3 is not

    def fails_behind_the_fourth_step(*args, **more):
        metrics = update(*args, **more)
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
            raise ChildProcessError
        return metrics

    with monkeypatch.context() as m, pytest.raises(ChildProcessError):
        m.setattr(grpo, "update", fails_behind_the_fourth_step)
        run_grpo(where, noise, *SIX)
    assert checkpoint_of(where)["iteration"] == 2
    run_grpo(where, noise, *SIX)
    assert_same_run(whole, where)


def test_the_checkpoint_before_serves_and_half_lines_of_logs_are_cut(copy, whole, go_on):
    os.remove(copy / "ckpt_000006.pt")
    for name in LOGS:
        with open(copy / name, "a") as f:
            f.write('{"iteration": 7, "lo')
    assert "ckpt_000004.pt" in go_on()
    assert_same_run(whole, copy)


def test_a_finished_run_is_printed_again_and_made_longer(noise, whole, run_grpo, tmp_path):
    where = tmp_path / "run"
    run_grpo(where, noise, *SIX, "--max_iters=3")
    before = snapshot(where)
    for resume in ([], ["--resume"]):
        text = run_grpo(where, noise, *SIX, "--max_iters=3", *resume)
        assert columns(text), "the table is missing"
        assert not re.search(r"^(iter|eval) \d|^\[Micro", text, re.M), "it did an iteration"
    assert snapshot(where) == before
    run_grpo(where, noise, *SIX, "--resume")
    assert_same_run(whole, where)


# ------------------------------------------------------------------------------------------------
# what is damaged or does not fit is refused, and kept

def lose_the_checkpoints(run):
    for path in run.glob("ckpt_*.pt"):
        path.unlink()


# what happens to the folder of a run
DAMAGE = {
    "cut short": lambda run: os.truncate(run / "ckpt_000006.pt", 1000),
    "a flipped bit": lambda run: flip_a_bit(run / "ckpt_000006.pt"),
    "no checkpoint": lose_the_checkpoints}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_refused_and_kept(what, copy, go_on):
    DAMAGE[what](copy)
    before = snapshot(copy)
    assert_refused(str(copy), go_on, "--max_iters=12")
    assert snapshot(copy) == before


def test_a_policy_that_the_run_did_not_begin_from_is_refused(copy, tiny, noise, go_on, tmp_path):
    content = load_file(tiny.policy, "policy")
    content["model"]["ln_f.bias"] += 1
    other = f"--policy={tmp_path}/other.pt"
    save_file(f"{tmp_path}/other.pt", **content)
    before = snapshot(copy)
    assert_refused("policy", go_on, other)
    assert_refused("policy", evaluate.main, [str(copy), noise, other])
    assert snapshot(copy) == before


def test_a_run_of_another_version_can_be_read(copy):
    content = checkpoint_of(copy)
    rewrite_checkpoint(copy, settings=content["settings"] | {"speed": 1})
    policy, _ = load_run(str(copy))
    assert bits(dict(policy.state_dict())) == bits(dict(content["policy"]))


def test_a_run_goes_on_with_other_settings_of_reference_and_target(run_grpo, tmp_path):
    """They are said. The reference begins as the base; no average holds another target."""
    flags = ("--beta=0.1", "--save_interval=1", "--tracin_target_ema=0.5")
    moving = (*flags, "--tracin=advantage", "--max_iters=2", "--ref_model_sync_steps=2")
    run_grpo(tmp_path / "late", *flags, "--tracin=reward", "--max_iters=1")
    base = load_file(str(tmp_path / "late/ckpt_000000.pt"), "run")["policy"]
    text = run_grpo(tmp_path / "late", *moving, "--resume=True")
    assert "ref_model_sync_steps: 0 -> 2" in text
    ages = [row["tracin/target_age"] for row in read_rows(tmp_path / "late/metrics.jsonl")]
    assert ages == [1, 1], "the average holds gradients of the target before"
    last = checkpoint_of(tmp_path / "late")
    for name, x in last["reference"].items():
        expected = 0.4 * base[name] + 0.6 * last["policy"][name]     # as ref_model_mixup_alpha says
        assert_near(x, expected, what=f"the reference's {name}")


def test_a_checkpoint_never_holds_what_is_not_finite(run_grpo, tmp_path, monkeypatch):
    update = grpo.update

    def poisoned(setup, *args, **more):
        metrics = update(setup, *args, **more)
        next(iter(setup.optimizer.state.values()))["exp_avg_sq"][0] = math.inf
        return metrics

    monkeypatch.setattr(grpo, "update", poisoned)
    assert "iteration 1" in refusal(run_grpo, tmp_path / "run", "--save_interval=1")
    assert checkpoint_of(tmp_path / "run")["iteration"] == 0


# ------------------------------------------------------------------------------------------------
# bad input is found before anything is trained

@pytest.fixture
def fresh(run_grpo, tmp_path, monkeypatch):
    """Start grpo.py; an iteration fails the test."""
    monkeypatch.setattr(grpo, "train",
                        lambda *args, **more: pytest.fail("trained before it looked"))
    return lambda *argv: run_grpo(tmp_path / "run", *argv)


# flag | what the refusal names
REFUSALS = """
--comments=nowhere.csv | nowhere.csv
--policy=nowhere.pt | nowhere.pt
--judge={policy} | {policy}
--max_completion_length=32 | block_size
--prompt_words=(30, 40) | prompts
--wandb_project=x | wandb
"""


def test_bad_settings_are_found_before_anything_is_trained(fresh, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = snapshot(tiny.weights)
    for line in REFUSALS.strip().splitlines():
        flag, name = line.format(policy=tiny.policy, judge=tiny.judge).split(" | ")
        assert_refused(name, fresh, flag)
    assert snapshot(tiny.weights) == before


def test_a_reward_of_wrong_arguments_is_found_before_anything_is_trained(fresh, tmp_path):
    (tmp_path / "config.py").write_text("def reward(completions, colour): return 3")
    assert_refused("colour", fresh, str(tmp_path / "config.py"))


def test_a_run_whose_judge_is_down_saves_and_stops(run_grpo, tmp_path):
    """It would train nothing to the end, and say so once."""
    (tmp_path / "down.py").write_text("""
import os
judge = eval_judge = None
def reward(completions):
    return [None if os.path.exists(f"{os.path.dirname(__file__)}/down") else 1.0 * len(text)
            for text in completions]
""")
    start = functools.partial(run_grpo, tmp_path / "run", tmp_path / "down.py", "--max_iters=7",
                              "--eval_interval=0", "--save_interval=7")
    (tmp_path / "down").touch()
    assert "iteration 3" in refusal(start)
    (tmp_path / "down").unlink()
    start()
    rewards = [row["reward"] for row in read_rows(tmp_path / "run/metrics.jsonl")]
    assert rewards[:3] == [None] * 3 and None not in rewards[3:] and len(rewards) == 7


def test_a_longer_run_says_that_its_rate_jumps(run_grpo, tmp_path):
    """With a decay to max_iters the two halves are not those of one run."""
    flags = ("--lr_decay=linear", "--eval_interval=0")
    run_grpo(tmp_path / "run", *flags, "--max_iters=1")
    said = run_grpo(tmp_path / "run", *flags, "--max_iters=2", "--resume=True")
    assert "lr_decay = 'linear'" in said


# ------------------------------------------------------------------------------------------------
# evaluate.py measures what was trained

def test_evaluate_repeats_the_last_evaluation_and_changes_nothing(trained, noise):
    before = snapshot(trained)
    text = printed(evaluate.main, [str(trained), noise])
    assert snapshot(trained) == before
    first, *_, last = read_rows(trained / "eval.jsonl")
    samples = last.pop("samples")
    del last["prompt_rewards"]
    found = columns(text)
    del last["iteration"], last["rewards/noise"], found["rewards/noise"]     # is another each time
    assert found == {name: (round(first[name], 4), round(x, 4)) for name, x in last.items()}
    assert all(f"after:  {row['completion']!r}" in text for row in samples)


def test_evaluate_takes_functions_and_settings_of_its_own(copy, noise):
    """The functions from a config file that is named: nothing in a run's folder is executed."""
    assert_refused("CONFIG.py", evaluate.main, [str(copy)])
    cold = ["--eval_temperature=1e-4", "--temperature=2.0", "--num_eval_prompts=2"]
    found = columns(printed(evaluate.main, [str(copy), noise, *cold]))
    assert "rewards/noise" in found
    assert found["eval_judge/expected_max"] == found["eval_judge/toxicity"], (
        "near temperature 0 all completions of a prompt are the likeliest one")
    assert found["perplexity"][0] == 1 and found["kl"][0] == 0, (
        "perplexity and KL are of the distribution that is sampled from")


# ------------------------------------------------------------------------------------------------
# the folder of a run is a policy, the one it trained last

def test_other_runs_start_from_the_folder_of_a_run(trained, tiny, noise, run_grpo, tmp_path):
    """With what it said last, by a plain model: adapters are merged, a critic stays behind."""
    last, _ = load_run(str(trained))
    policy, tokenizer = load_policy(load_settings([f"--policy={trained}"]))
    idx = random_ids(2, 9, 300)
    with torch.no_grad():
        assert_near(policy.lm_head(policy(idx)), last.lm_head(last(idx)))
    assert policy.state_dict().keys() == load_gpt(tiny.policy).state_dict().keys()
    assert tokenizer.n_vocab == 300

    second = tmp_path / "second"
    run_grpo(second, noise, "--max_iters=0", f"--policy={trained}")
    after = read_rows(trained / "eval.jsonl")[-1]
    before = read_rows(second / "eval.jsonl")[0]
    said, says = ([row["completion"] for row in rows["samples"]] for rows in (after, before))
    assert says == said, "it does not begin with what the other one said last"
    assert load_policy(load_settings([f"--policy={second}"]))[1].n_vocab == 300
