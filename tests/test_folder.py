"""run/folder.py, run/trust.py: which folder a run gets, who has it, and whose Python is run."""
import json
import math
import os
import random
import signal
import subprocess
import sys

import pytest
import torch

from config import load_settings
from conftest import ROOT
from run.checkpoint import append_rows, write_run_config
from run.content import LOGS
from run.files import save_file
from run.folder import claimed_folder
from run.script import BadInput
from run.trust import is_own, signature_of

CPU = torch.device("cpu")
REWARD = """
import pathlib
pathlib.Path({proof!r}).write_text("executed")

def reward(prompts, completions):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def settings(tmp_path):
    """settings("--seed=2", ...) with folders below tmp_path."""
    def make(*flags):
        own = (f"--out_dir={tmp_path}/run", f"--cache_dir={tmp_path}/cache", "--max_iters=4")
        return load_settings([*own, *flags])

    return make


def claim(cfg):
    """(name of the folder that a run gets, whether a run in it goes on)."""
    with claimed_folder(cfg) as (folder, goes_on):
        return os.path.basename(folder), goes_on


def leave(cfg, folder, iteration=None, rows=0):
    """Leaves a folder as a run that was killed does: `rows` in its logs, and a checkpoint of
    `iteration`, whose tensors nobody asks for here."""
    os.makedirs(folder, exist_ok=True)
    write_run_config(str(folder), cfg, CPU)
    append_rows(str(folder), "eval.jsonl", [{"iteration": 0, "samples": []}])
    for name in LOGS[:2]:
        append_rows(str(folder), name, [{"iteration": i} for i in range(rows)])
    sizes = {name: os.path.getsize(folder / name) for name in LOGS}
    if iteration is not None:
        optimizer = dict(state={}, param_groups=[dict(lr=1e-4)])
        states = dict(python=(), numpy=(), torch=None, cuda=[])
        save_file(str(folder / "ckpt.pt"), "run", base_hash="x", policy={}, reference=None,
                  optimizer=optimizer, random=states, logs=sizes, num_tokens=0,
                  iteration=iteration, settings=cfg.public(), source=cfg.source, inputs={})


def refused(cfg):
    with pytest.raises(BadInput) as caught:
        claim(cfg)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------
# the same command

@pytest.mark.parametrize("iteration, flags, expected", [
    (2, [], ("run", True)), (4, [], ("run-2", False)), (2, ["--seed=2"], ("run-2", False)),
    (2, ["--max_iters=5"], ("run-2", False)), (2, ["--log_micro=False"], ("run", True))],
    ids=["interrupted", "finished", "another seed", "more iterations", "other lines"])
def test_the_same_command_goes_on_with_an_interrupted_run(
        iteration, flags, expected, settings, tmp_path):
    leave(settings(), tmp_path / "run", iteration, rows=3)
    before = files(tmp_path / "run")
    assert claim(settings(*flags)) == expected
    assert files(tmp_path / "run") == before, "claiming a folder changed what a run left"


def test_an_interrupted_run_that_was_moved_aside_is_found(settings, tmp_path, capsys):
    leave(settings(), tmp_path / "run", 4, rows=4)
    aside = settings(f"--out_dir={tmp_path}/run-2")
    leave(aside, tmp_path / "run-2", 1, rows=1)
    assert claim(settings()) == ("run-2", True)
    assert "was interrupted here, it goes on" in capsys.readouterr().out


def test_another_text_of_the_config_file_is_another_run(settings, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("beta = 0.1\n")
    leave(settings(str(config)), tmp_path / "run", 2, rows=2)
    assert claim(settings(str(config))) == ("run", True)
    config.write_text("beta = 0.1  # and a thought\n")
    assert claim(settings(str(config))) == ("run-2", False)


@pytest.mark.parametrize("rows, expected", [(0, ("run", True)), (2, ("run-2", False))])
def test_a_run_without_a_checkpoint_begins_again_where_nothing_is_lost(
        rows, expected, settings, tmp_path):
    leave(settings(), tmp_path / "run", rows=rows)
    assert claim(settings()) == expected


def test_a_run_killed_while_it_prepared_leaves_a_folder_for_any_run(settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("process 1 on a machine that is no more")
    assert claim(settings()) == ("run", False)


@pytest.mark.parametrize("name, text", [
    ("samples.jsonl", '{"mine": 1}\n'), ("thesis.txt", "years"), ("config.json", '{"model": 1}')])
def test_what_is_no_run_is_never_touched(name, text, settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(text)
    before = files(tmp_path / "run")
    message = refused(settings("--resume=True"))
    assert str(tmp_path / "run") in message and name in message
    assert claim(settings()) == ("run-2", False) and files(tmp_path / "run") == before


# ------------------------------------------------------------------------------------------------
# two programs

def test_a_live_run_keeps_its_folder(settings, tmp_path, capsys):
    leave(settings(), tmp_path / "run", 2, rows=2)
    with claimed_folder(settings()) as (folder, _):
        assert folder == f"{tmp_path}/run"
        assert claim(settings()) == ("run-2", False)
        assert f"process {os.getpid()} on " in capsys.readouterr().out
        assert f"process {os.getpid()} on " in refused(settings("--resume=True"))
    assert claim(settings()) == ("run", True)


CLAIM = """
import sys, time
from config import load_settings
from run.folder import claimed_folder
cfg = load_settings(sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
with claimed_folder(cfg) as (folder, _):
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_runs_started_at_once_get_folders_of_their_own(tmp_path):
    flags = [f"--out_dir={tmp_path}/run", f"--cache_dir={tmp_path}/cache"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    started = [subprocess.Popen([sys.executable, "-c", CLAIM, *flags], **pipes) for _ in range(3)]
    try:
        assert [p.stdout.readline() for p in started] == 3 * ["ready\n"]
        for p in started:       # now, all at once
            p.stdin.write("\n")
            p.stdin.flush()
        got = []
        for p in started:
            line = p.stdout.readline()
            while " " in line:      # a sentence
                line = p.stdout.readline()
            got.append(os.path.basename(line.strip()))
    finally:
        for p in started:
            p.send_signal(signal.SIGKILL)
            p.communicate()
    assert sorted(got) == ["run", "run-2", "run-3"]
    assert claim(load_settings(flags)) == ("run", False), "a dead process still has its folder"


# ------------------------------------------------------------------------------------------------
# links, leftovers, odd names

def test_links_are_not_followed(settings, tmp_path):
    mine = tmp_path / "mine.txt"
    for link in (".lock", "metrics.jsonl"):
        mine.write_text(1000 * "mine")
        leave(settings(), tmp_path / "run", 2, rows=2)
        if (tmp_path / "run" / link).exists():
            os.remove(tmp_path / "run" / link)
        os.symlink(mine, tmp_path / "run" / link)
        for flags in ((), ("--resume=True",)):
            assert str(tmp_path / "run") in refused(settings(*flags))
        assert mine.read_text() == 1000 * "mine", f"a link named {link} was written through"
        os.remove(tmp_path / "run" / link)


def test_leftovers_of_a_killed_run_are_removed(settings, tmp_path):
    leave(settings(), tmp_path / "run", 2, rows=2)
    for name in ("ckpt_new.pt", "ckpt_new.pt.77.tmp", "config.json.77.tmp", "notes.tmp"):
        (tmp_path / "run" / name).write_text("half")
    assert claim(settings()) == ("run", True)
    left = {"config.json", "ckpt.pt", *LOGS, "notes.tmp"}
    assert set(os.listdir(tmp_path / "run")) == left, "only what runs leave behind is removed"


@pytest.mark.parametrize("flags", ([], ["--resume=True"]))
@pytest.mark.parametrize("kind", ("link", "rows"))
def test_an_evaluation_log_of_somebody_is_left_alone(kind, flags, settings, tmp_path):
    """It may be a link to a file elsewhere, or hold more than a run's first evaluation."""
    leave(settings(), tmp_path / "run")
    for name in LOGS:
        (tmp_path / "run" / name).unlink(missing_ok=True)
    victim = tmp_path / "victim.txt"
    victim.write_text('{"iteration": 0, "samples": []}\n{"mine": 1}\n')
    log = tmp_path / "run" / "eval.jsonl"
    log.symlink_to(victim) if kind == "link" else log.write_text(victim.read_text())
    if flags:
        assert "has rows" in refused(settings(*flags))
    else:
        assert claim(settings()) == ("run-2", False)
    assert log.read_text() == victim.read_text() and "mine" in victim.read_text()


def test_another_number_of_threads_is_the_same_run(settings, tmp_path):
    leave(settings(), tmp_path / "run", 2, rows=2)
    assert claim(settings("--threads=1")) == ("run", True)


@pytest.mark.parametrize("flag, part", [
    ("--n_layer=2", "n_layer was 4, not 2"), ("--lora_rank=2", "lora_rank was 0, not 2")])
def test_another_shape_is_refused_before_anything_is_trained(flag, part, settings, tmp_path):
    leave(settings(), tmp_path / "run", 2, rows=2)
    (tmp_path / "run" / "ckpt_prev.pt").write_bytes((tmp_path / "run" / "ckpt.pt").read_bytes())
    message = refused(settings("--resume=True", flag))
    assert part in message and "rename" not in message, message


VALUES = [None, True, -1, 0, 1.5, math.nan, math.inf, 2 ** 70, "", "\0", "\udcff", "x" * 300, [],
          {}, [["a"]], ["judge"], {"x": 1}, "../..", "train"]


@pytest.mark.parametrize("seed", range(2))
def test_a_wrong_config_json_is_read_or_refused(seed, settings, tmp_path):
    folder = tmp_path / "run"
    leave(settings(), folder, 2, rows=2)
    whole = (folder / "config.json").read_text()
    rng = random.Random(seed)
    for _ in range(75):
        about = json.loads(whole)
        into = rng.choice([about, about["settings"]])
        into[rng.choice(list(into))] = rng.choice(VALUES)
        text = json.dumps(about)
        if rng.random() < 0.2:
            text = text[:rng.randrange(len(text))]
        (folder / "config.json").write_text(text)
        assert claim(settings())[0] in ("run", "run-2")
        try:
            load_settings([str(folder / "config.json")])
        except BadInput as e:
            assert len(str(e).splitlines()) == 1


@pytest.mark.parametrize("text", [
    "", "{", "[1]\n", '{"iteration": 0}\n', '{"iteration": 0, "samples": [1]}\n', "\xff\xfe"])
def test_evaluations_that_are_none_are_refused(text, settings, tmp_path):
    leave(settings(), tmp_path / "run", 2, rows=2)
    size = os.path.getsize(tmp_path / "run" / "eval.jsonl")
    (tmp_path / "run" / "eval.jsonl").write_bytes(text.encode("latin-1").ljust(size))
    assert "eval.jsonl" in refused(settings())


# ------------------------------------------------------------------------------------------------
# whose Python

@pytest.fixture
def run_with_reward(settings, tmp_path):
    """Path of the config.json of a run with a reward; proof: a file that its text writes."""
    config, proof = tmp_path / "mine.py", tmp_path / "proof"
    config.write_text(REWARD.format(proof=str(proof)))
    leave(settings(str(config)), tmp_path / "run", 2, rows=2)
    proof.unlink()
    return str(tmp_path / "run" / "config.json"), proof


def edit(path, **changes):
    with open(path) as f:
        about = json.load(f)
    with open(path, "w") as f:
        json.dump(about | changes, f)


def test_the_python_of_an_own_run_is_executed(run_with_reward):
    path, proof = run_with_reward
    assert load_settings([path]).functions["reward"]([], ["x"]) == [1.0] and proof.exists()


@pytest.mark.parametrize("change", [
    dict(signature=None), dict(signature="0" * 64), dict(signature=["x"]), "text", "key"],
    ids=["unsigned", "wrong", "no text", "changed", "another user"])
def test_the_python_of_strangers_is_executed_only_by_name(
        change, run_with_reward, tmp_path, monkeypatch):
    path, proof = run_with_reward
    if change == "key":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    elif change == "text":
        edit(path, source=json.load(open(path))["source"] + "\n")
    else:
        edit(path, **change)
    with pytest.raises(BadInput, match="'reward' is Python of somebody else's run.*--trust=True"):
        load_settings([path])
    alone = load_settings([path, "--reward_funcs=judge"])   # no function of it is needed
    assert alone.functions == {} and not proof.exists(), "a stranger's Python was executed"
    write_run_config(str(tmp_path), alone, CPU)
    signed = json.load(open(tmp_path / "config.json"))["signature"]
    assert signed is None, "a stranger's text was signed without being trusted"
    assert "reward" in load_settings([path, "--trust=True"]).functions and proof.exists()


def test_a_strangers_reward_does_not_score_held_out_rollouts_either(run_with_reward):
    path, proof = run_with_reward
    edit(path, signature=None)
    flags = ["--reward_funcs=judge", "--tracin=advantage", "--tracin_val_prompts=2"]
    assert load_settings([path, *flags])
    with pytest.raises(BadInput, match="'reward' is Python of somebody else's run.*--trust=True"):
        load_settings([path, *flags, "--tracin_val_reward=reward"])
    assert not proof.exists(), "a stranger's Python was executed"


def test_a_stranger_does_not_choose_where_is_written(settings, tmp_path):
    leave(settings("--cache_dir=mine"), tmp_path / "run", 2, rows=2)
    path = str(tmp_path / "run" / "config.json")
    assert load_settings([path]).cache_dir == "mine"
    asked = dict(cache_dir="/tmp/x", out_dir="/tmp/y", wandb_project="theirs", seed=5)
    edit(path, settings=json.load(open(path))["settings"] | asked)
    cfg = load_settings([path])
    assert cfg.seed == 5 and cfg.wandb_project is None
    assert (cfg.cache_dir, cfg.out_dir) == ("out/prepared", str(tmp_path / "run"))
    assert load_settings([path, "--trust=True"]).cache_dir == "/tmp/x"


def test_a_file_cannot_ask_to_be_trusted(run_with_reward):
    path, proof = run_with_reward
    settings = json.load(open(path))["settings"]
    edit(path, signature=None, settings=settings | dict(trust=True, resume=True))
    with pytest.raises(BadInput, match="--trust=True"):
        load_settings([path])
    assert not load_settings([path, "--reward_funcs=judge"]).resume
    assert not proof.exists()


def test_without_a_place_for_a_key_an_own_run_says_so(
        run_with_reward, settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    leave(settings(str(tmp_path / "mine.py")), tmp_path / "run-2")
    assert "will need --trust=True" in capsys.readouterr().out
    assert signature_of("text", {}, make=True) is None
    assert not is_own(dict(source="text", settings={}, signature=None))


def test_the_key_is_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    about = dict(source="text", settings=dict(seed=1, speed=("head",)))
    about["signature"] = signature_of(**about, make=True)
    assert is_own(json.loads(json.dumps(about)))
    assert not is_own(about | dict(settings=dict(seed=2))), "settings are signed too"
    assert not is_own(about | dict(signature="\u00e9"))
    assert os.stat(tmp_path / "grpo-tracin" / "key").st_mode & 0o777 == 0o600
