"""Faults can be planted, are seen where they are, and a copy that is mended is called healed."""
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
    count = source.count(fault.old)
    assert count == 1, f"{fault.file} has this {count} times, update faults.py: {fault.old!r}"
    compile(source.replace(fault.old, fault.new), fault.file, "exec")


@pytest.mark.parametrize("number", range(1, 1 + len(FAULTS)))
def test_only_the_answer_tells_the_line(number):
    fault = FAULTS[number - 1]
    line = fault.old.strip().splitlines()[0]
    assert line in printed(hunt.main, [str(number), "--answer"])
    hint = printed(hunt.main, [str(number), "--hint"])
    assert fault.place in hint
    assert line not in hint + printed(hunt.main, [])


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

    def run_copy(folder, flags, quiet=False):
        with open(f"{folder}/loss.py", encoding="utf-8") as f:
            is_healthy = FAULTS[1].old in f.read()
        found.append((is_healthy, flags))
        if "--bad" in flags:
            return Seen("a line\nerror: no such flag\n", [], [], [])
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


def test_a_healthy_run_that_fails_is_not_kept(runs, tmp_path):
    for _ in range(2):
        assert "no such flag" in refusal(hunt.main, ["2", "--check=.", "--bad"])
    assert runs == [(True, ["--max_iters=3", "--bad"])] * 2


def test_the_seeds_of_the_table_can_be_chosen(runs):
    refusal(hunt.main, ["--table=2", "--first_seed=7", "--bad"])    # these runs show no sign
    assert {flag for _, flags in runs for flag in flags if "seed" in flag} == {
        "--seed=7", "--seed=8"}


@pytest.mark.parametrize("argv", [["11"], ["x"], ["1", "2"], ["0", "--answer"], ["1", "--check=."],
                                  ["1", "--copy=."]])
def test_bad_input_is_one_line(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(hunt.main, argv)
