"""Faults can be planted, are seen where they are, and a copy that is mended is called healed."""
import contextlib
import io
import os

import pytest

from common.files import ROOT
from extras.hunt import __main__ as hunt
from extras.hunt.faults import FAULTS, Seen
from worlds import printed, refusal

TINY = ["--threads=1", "--n_layer=1", "--n_embd=32", "--n_head=2", "--pretrain_tokens=20000",
        "--num_prompts=4", "--num_eval_prompts=4", "--num_eval_generations=2",
        "--mini_batch_size=16"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.sign.__name__)
def test_a_fault_can_be_planted(fault):
    with open(f"{ROOT}/{fault.file}", encoding="utf-8") as f:
        source = f.read()
    assert source.count(fault.old) == 1, f"{fault.file} has another line now: update faults.py"
    compile(source.replace(fault.old, fault.new), fault.file, "exec")


@pytest.mark.parametrize("number", range(1, 1 + len(FAULTS)))
def test_only_the_answer_tells_the_line(number):
    fault = FAULTS[number - 1]
    line = fault.old.strip().splitlines()[0]
    assert line in printed(hunt.main, [str(number), "--answer"])
    hint = printed(hunt.main, [str(number), "--hint"])
    assert fault.place in hint
    assert line not in hint + printed(hunt.main, [])


def printed_until(argv, code):
    """What a hunt prints that ends with this exit code."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        hunt.main(argv)
    assert ended.value.code == code
    return out.getvalue()


@pytest.fixture(autouse=True)
def score(tmp_path, monkeypatch):
    monkeypatch.setattr(hunt, "SCORE", str(tmp_path / "out/score.json"))


@pytest.mark.parametrize("number", range(1, 1 + len(FAULTS)))
def test_the_line_and_its_neighbours_count_as_found(number):
    fault = FAULTS[number - 1]
    for file, text in ((fault.file, fault.old), *fault.neighbours):
        with open(f"{ROOT}/{file}", encoding="utf-8") as f:
            assert f.read().count(text) == 1, f"{file} has changed, update faults.py: {text!r}"
        line = hunt.lines_of(file, text)[0]
        assert "right" in printed(hunt.main, [str(number), f"--guess={file}:{line}"])
        assert f"{file}:{line} " in printed(hunt.main, [str(number), "--answer"]) or (
            file == fault.file and text == fault.old)
    assert "no" in printed(hunt.main, [str(number), "--guess=nano.py:1"])


def test_the_score_card_counts_what_was_found_without_the_answer():
    fault = FAULTS[1]
    right = f"--guess=./loss.py:{hunt.lines_of(fault.file, fault.old)[0]}"
    hunt.noted(2, began=hunt.time.time() - 120)
    for flag in ("--hint", "--guess=nano.py:1", right, "--answer"):
        printed(hunt.main, ["2", flag])
    printed(hunt.main, ["7", "--answer"])       # read first, so a right guess is nothing found
    line = hunt.lines_of("loss.py", FAULTS[6].old)[0]
    printed(hunt.main, ["7", f"--guess=loss.py:{line}"])
    rows = printed(hunt.main, ["--score"]).splitlines()
    assert rows[3].split() == ["2", "yes", "2.0", "1", "2"]
    assert rows[8].split() == ["7", "answer", "read", "-", "0", "1"]
    assert rows[12].startswith("1 of 10 found in 2 minutes, with 1 hints")


def test_what_names_the_cause_is_held_back_until_the_answer(monkeypatch):
    said = ("iter 1: reward 0.1\nWARNING: kl_loss is below 0: check the sign\nnote: all well\n"
            "note: 9 sampled tokens carry no loss\n"
            "\nwarnings of this run, the last of each kind:\n  iteration 1: kl_loss is below 0\n"
            "  10 iterations from 1 to 12: kl_loss is below 0\nthe table: 3\n"
            "stopped: disagree by 0.2 nats on a token: by another temperature\n")
    assert "".join(map(hunt.without_cause, said.splitlines(keepends=True))) == (
        "iter 1: reward 0.1\nnote: all well\n\nthe table: 3\n"
        "stopped: disagree by 0.2 nats on a token\n")
    monkeypatch.setattr(hunt, "run_with", lambda *args, **more: Seen(said, [], [], [], code=1))
    assert "held back: what names the cause (3)" in printed_until(["2"], 1)
    told = printed(hunt.main, ["2", "--answer"])
    assert "check the sign" in told and "another temperature" in told
    assert "held back" not in printed_until(["2", "--warnings"], 1)


def edit(folder, old, new):
    path = f"{folder}/loss.py"
    with open(path, encoding="utf-8") as f:
        source = f.read()
    assert source.count(old) == 1
    with open(path, "w", encoding="utf-8") as f:
        f.write(source.replace(old, new))


def test_a_copy_is_told_whether_it_is_healed(tmp_path, monkeypatch):
    """It has two faults, which its run shows and a healthy one does not. Mended by other words for
    the same line, it is healed."""
    runs = []
    run_copy = hunt.run_copy
    monkeypatch.setattr(
        hunt, "run_copy", lambda *args, **more: runs.append(run_copy(*args, **more)) or runs[-1])
    folder = str(tmp_path / "broken")
    printed(hunt.main, ["2", f"--copy={folder}"])
    assert not os.path.exists(f"{folder}/extras/hunt/faults.py"), "the copy holds the answers"
    kl, ratio = FAULTS[1], FAULTS[6]
    edit(folder, ratio.old, ratio.new)
    check = ["2", f"--check={folder}", f"--cache_dir={tmp_path}/prepared", *TINY]
    assert "not healed" in refusal(hunt.main, check)
    healthy, broken = runs
    for fault in (kl, ratio):
        assert fault.sign(broken)[1], f"{fault.complaint} Nothing shows it:\n{broken.printed}"
        assert not fault.sign(healthy)[1], "a healthy run shows the sign of a fault"

    edit(folder, kl.new, "loss.kl = (0.5 + 0.5) * cfg.beta * aggregate(")
    edit(folder, ratio.new, "log_ratio = -(old_logp - logp)")
    assert "healed" in printed(hunt.main, check)
    assert len(runs) == 3, "a healthy run was not kept"


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Folders and flags of runs, which take no time: the reward is 1 in a healthy one."""
    monkeypatch.setattr(hunt, "CACHE", str(tmp_path / "prepared"))
    found = []

    def run_copy(folder, flags, quiet=False, warnings=True):
        with open(f"{folder}/loss.py", encoding="utf-8") as f:
            is_healthy = FAULTS[1].old in f.read()
        found.append((is_healthy, flags))
        if "--bad" in flags:
            return Seen("a line\nerror: no such flag\n", [], [], [], code=2)
        metrics = [{"iteration": i, "reward": float(is_healthy)} for i in range(1, 6)]
        rows = [dict(m, prompt="a", completion="b") for m in metrics]
        return Seen("", metrics, rows, [])

    monkeypatch.setattr(hunt, "run_copy", run_copy)
    return found


def test_a_healthy_runs_numbers_stand_beside_and_cost_one_run(runs):
    """For the same flags, and the same project."""
    for _ in range(2):
        out = printed(hunt.main, ["2", "--seed=3"])
        line, = [line.split() for line in out.splitlines() if line.startswith("reward")]
        assert line[1:] == ["0"] * 3 + ["1"] * 3
    assert runs == [(False, ["--seed=3"]), (True, ["--seed=3"]), (False, ["--seed=3"])]
    printed(hunt.main, ["2", "--seed=4"])
    assert runs[3:] == [(False, ["--seed=4"]), (True, ["--seed=4"])]


@pytest.mark.parametrize("number", ["0", "2"])
def test_a_run_that_fails_ends_with_its_own_exit_code(number, runs):
    printed_until([number, "--bad"], 2)
    assert len(runs) == 1, "a healthy run is made though there is nothing to compare"


@pytest.mark.parametrize("argv", [["11"], ["x"], ["1", "--copy=."], ["1", "--guess=loss.py"]])
def test_bad_input_is_one_line(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(hunt.main, argv)
