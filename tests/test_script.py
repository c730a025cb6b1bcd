"""run/script.py: seeds, hashes, signals, exit codes."""
import copy
import os
import shlex
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


# ------------------------------------------------------------------------------------------------
# where the output goes

PRINTS = """
import sys
sys.path.insert(0, {root!r})
from run.script import run_script

def main(argv):
    for i in range({lines}):
        print("gr\\u00fc\\u00df \\u4e2d \\ud800", i)
    print("\\u00e4", file=sys.stderr)

run_script(main)
"""


def shell(command, lines=1, **more):
    """What bash says and returns for a command in which PYTHON is a program that prints."""
    program = shlex.quote(PRINTS.format(root=ROOT, lines=lines))
    command = command.replace("PYTHON", f"{sys.executable} -c {program}")
    env = dict(os.environ, **more)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env,
                          errors="replace")


@pytest.mark.parametrize("more", [
    dict(PYTHONIOENCODING="latin-1"), dict(LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")])
def test_a_character_that_the_output_lacks_is_printed_as_its_number(more):
    done = shell("PYTHON | cat -v; exit ${PIPESTATUS[0]}", **more)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert r"\ud800 0" in done.stdout and "gr" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_quietly(unbuffered):
    done = shell("PYTHON | head -1; exit ${PIPESTATUS[0]}", 20000, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (141, ""), done.stderr
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("lines, unbuffered", [(1, ""), (20000, ""), (1, "1")])
def test_output_that_is_full_is_one_line(lines, unbuffered):
    done = shell("PYTHON > /dev/full", lines=lines, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "stopped: standard output: No space left on device", done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_output_that_is_closed_is_left_alone():
    done = shell("PYTHON >&-")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_other_errors_of_the_system_keep_their_traceback():
    def main(argv):
        open("/nowhere/at/all")

    with pytest.raises(FileNotFoundError):
        run_script(main)


def test_running_out_of_memory_is_one_line():
    with pytest.raises(SystemExit, match="stopped: out of memory .*; lower micro_batch_size"):
        run_script(lambda argv: torch.empty(2 ** 57))
    with pytest.raises(RuntimeError, match="odd"):
        run_script(lambda argv: exec("raise RuntimeError('odd')"))
