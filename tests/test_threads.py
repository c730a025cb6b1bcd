"""The number of threads of a run, and what it says when another process slows it down."""
import json
import os
from types import SimpleNamespace

import pytest
import torch

import run.fit
import run.threads
from config import Settings
from run.threads import Pace, choose_threads, use_threads

CPU = torch.device("cpu")


@pytest.fixture
def two_threads(monkeypatch):
    """A machine of two cores on which nobody has said how many to use."""
    for name in run.threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def chosen(seconds, monkeypatch, cfg=Settings(), device=CPU, had=None):
    """choose_threads where the test work takes so many seconds: {threads: those of each round}."""
    rounds = {threads: iter(times) for threads, times in seconds.items()}
    monkeypatch.setattr(run.threads, "seconds_of_work", lambda threads: next(rounds[threads]))
    return choose_threads(cfg, device, had)


QUIET = {2: [0.05], 1: [0.09]}      # one round: more would raise StopIteration
BUSY = {2: [0.4, 0.1, 0.4], 1: [0.09, 0.09, 0.09]}
ONE_HICCUP = {2: [0.4, 0.05], 1: [0.09, 0.09]}
NO_DIFFERENCE = {2: [0.1, 0.1, 0.1], 1: [0.09, 0.09, 0.09]}


@pytest.mark.parametrize("seconds, expected", [
    (QUIET, 2), (BUSY, 1), (ONE_HICCUP, 2), (NO_DIFFERENCE, 2)])
def test_one_thread_only_where_it_is_clearly_faster(
        seconds, expected, two_threads, monkeypatch, capsys):
    found = chosen(seconds, monkeypatch)
    said = capsys.readouterr().out
    assert found == expected, f"work that takes {seconds} s was given {found} threads"
    assert said.startswith(f"threads: {expected}") and said.count("\n") == 1
    assert ("another process is busy" in said) == (expected == 1)


def test_the_real_work_is_timed_with_each_number(two_threads):
    assert run.threads.seconds_of_work(1) > 0 and torch.get_num_threads() == 1
    assert run.threads.all_or_one(2) in (1, 2) and torch.get_num_threads() == 2


def test_setting_and_variable_win_without_timing(two_threads, monkeypatch, capsys):
    untimed = {}
    assert chosen(untimed, monkeypatch, Settings(threads=3)) == 3
    assert chosen(untimed, monkeypatch, device=torch.device("cuda")) == 2, "CUDA is left alone"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert chosen(untimed, monkeypatch) == 2
    assert chosen(untimed, monkeypatch, Settings(threads=1)) == 1
    assert capsys.readouterr().out == "", "a user who chose the number need not be told"


def test_a_run_that_goes_on_keeps_its_number(two_threads, monkeypatch, capsys):
    assert chosen({}, monkeypatch, had=1) == 1
    assert capsys.readouterr().out == ""
    assert chosen({}, monkeypatch, had=64) == 2, "more threads than this machine has"
    assert "had 64 threads until now, this is with 2" in capsys.readouterr().out
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert chosen({}, monkeypatch, had=1) == 2
    assert "had 1 threads until now, this is with 2" in capsys.readouterr().out


def test_the_number_holds_in_the_block_only(two_threads):
    with use_threads(Settings(threads=1), CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), use_threads(Settings(threads=3), CPU):
        1 / 0
    assert torch.get_num_threads() == 2, "a run that stops leaves its number behind"


def test_a_run_notes_its_number_and_goes_on_with_it(grpo, two_threads, monkeypatch, tmp_path):
    where = tmp_path / "run"

    def number():
        return json.load(open(where / "config.json"))["threads"]

    monkeypatch.setattr(run.threads, "all_or_one", lambda most: 1)
    grpo(where, "--max_iters=1")
    assert number() == 1
    monkeypatch.setattr(run.threads, "all_or_one", lambda most: 2)
    grpo(where, "--max_iters=2", "--resume=True")
    assert number() == 1, "the run had one thread: with two its digits are others"
    grpo(where, "--max_iters=3", "--resume=True", "--threads=2")
    assert number() == 2, "--threads was not heard"
    os.remove(where / "config.json")
    grpo(where, "--max_iters=3", "--resume=True", "--threads=0")
    assert number() == 2, "without a config.json the number is chosen anew"


def slow_lines(seconds, capsys, device=CPU, in_a_row=3):
    pace = Pace("an iteration", device, in_a_row)
    for x in seconds:
        pace.add(x)
    return capsys.readouterr().out.splitlines()


def test_a_run_that_becomes_slow_says_so_once(two_threads, capsys):
    line, = slow_lines([1.0] * 6 + [4.0] * 9 + [1.0] * 6 + [4.0] * 9, capsys)
    assert "4.00 s, 4 times the median" in line and "--threads=1" in line


@pytest.mark.parametrize("seconds", [
    [1.0] * 6 + [2.9] * 9,                  # not slow enough
    [1.0] * 6 + [9.0, 9.0, 1.0] * 5,        # never three in a row
    [9.0] * 3 + [1.0] * 20,                 # the first ones, which compile
    [4.0] * 3])
def test_a_run_of_usual_pace_says_nothing(seconds, two_threads, capsys):
    assert slow_lines(seconds, capsys) == []


def test_slow_steps_are_nothing_to_say_where_threads_do_not_wait(two_threads, capsys):
    slow = [1.0] * 6 + [9.0] * 9
    assert slow_lines(slow, capsys, torch.device("cuda")) == []
    torch.set_num_threads(1)
    assert slow_lines(slow, capsys) == []


def test_iterations_of_a_run_are_watched(grpo, two_threads, monkeypatch, tmp_path):
    monkeypatch.setattr(run.threads, "SLOW", 0)     # every step is slow
    text = grpo(tmp_path / "run", "--threads=2")
    assert text.count("note: an iteration takes") == 1


def test_steps_of_a_fit_are_watched(two_threads, monkeypatch, capsys, tmp_path):
    clock = SimpleNamespace(now=0.0)
    seconds = iter([1.0] * 10 + [5.0] * 10)

    def loss_at(step):
        clock.now += next(seconds)
        return weight.weight.sum()

    weight = torch.nn.Linear(1, 1)
    monkeypatch.setattr(run.fit, "time", SimpleNamespace(time=lambda: clock.now))
    run.fit.fit(weight, [], loss_at, 20, str(tmp_path / "partial.pt"), "policy")
    assert "a step of policy takes 5.00 s, 5 times the median" in capsys.readouterr().out
