"""run/script.py: seeds, hashes, signals, exit codes."""
import copy
import signal
import subprocess
import sys

import pytest
import torch

from by_hand import random_gpt
from conftest import ROOT
from run.script import BadInput, hash_of, interrupts, run_script, seed_for, uninterrupted


def test_a_seed_is_stable_and_depends_on_every_argument():
    assert seed_for(1, "rollout", 0) == 29435854404557282
    cases = [(), (1,), (2,), ("1",), (1, 2), (2, 1), (12,), (1, "rollout", 0), (1, "rollout", 1),
             (1, "rows", 0), (2, "rollout", 0)]
    seeds = [seed_for(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    for seed in seeds:
        torch.manual_seed(seed)


def test_hash_of_changes_with_any_weight():
    model, hashes = random_gpt(), set()
    assert hash_of(model) == hash_of(copy.deepcopy(model))
    for p in model.parameters():
        hashes.add(hash_of(model))
        with torch.no_grad():
            p.view(-1)[-1] += 1
    assert len(hashes | {hash_of(model)}) == len(list(model.parameters())) + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        with interrupts() as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_signal_says_at_once_that_it_was_heard(capfd):
    with interrupts():
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err.startswith("signal heard: "), "nothing says so"


def test_signals_wait_for_a_file_to_be_whole(capfd):
    done = []
    with pytest.raises(KeyboardInterrupt, match="at once"):
        with interrupts() as stop:
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                assert "is finished first" in capfd.readouterr().err
                done.append("written")
            done.append("after the second signal")
    assert done == ["written"] and stop()


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
CHILD = """
import os, time
from run.script import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(30)
print("it outlived its parent")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")
def test_a_worker_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE,
                              text=True, cwd=ROOT)
    worker = int(parent.stdout.readline())
    parent.kill()
    assert parent.stdout.read() == "", f"process {worker} outlived its parent"
    parent.wait()


@pytest.mark.parametrize("error, code, text", [
    (BadInput("x = 1: no"), 2, "error: x = 1: no\n"),
    (KeyboardInterrupt("saved"), 130, "interrupted: saved\n")])
def test_run_script_turns_errors_into_exit_codes(error, code, text, capsys):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_script(main)
    assert exit_.value.code == code and capsys.readouterr().err == text
