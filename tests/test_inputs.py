"""
A run and its inputs: what it has read is kept by its content, so that a file or a run that becomes
another one under the same name is said, and warnings never compare with what it was before. What an
optimizer counts, and the policy that a run began from, outlive an interruption.
"""
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from common.files import ROOT, load_file, save_file
from run.checkpoint import newest_checkpoint
from run.policy import load_policy
from run.settings import load_settings
from worlds import assert_refused, read_rows, untimed_metrics

OWN = ("--judge=None", "--eval_judge=None", "--save_interval=2", "--eval_interval=2")


def weights_of(folder):
    return load_file(newest_checkpoint(str(folder)), "run")["policy"]


def assert_same_weights(one, other, what):
    a = weights_of(one)
    b = weights_of(other)
    assert all(torch.equal(a[name], b[name]) for name in a), what


@pytest.fixture
def start(run_grpo, tiny):
    """start(folder, ...) runs on the tiny policy."""
    return lambda folder, *argv: run_grpo(folder, f"--policy={tiny.policy}", *argv)


def config_of(folder, score):
    """The text of a config file with the prompts in a folder. score: of a completion t."""
    return (f"prompts, eval_prompts = {str(folder / 'pp.txt')!r}, {str(folder / 'pe.txt')!r}\n"
            f"def reward(prompts, completions): return [{score} for t in completions]\n")


@pytest.fixture
def files(tmp_path):
    """Prompts, evaluation prompts and a config file."""
    (tmp_path / "pp.txt").write_text("I am\nyou are so\nwhat\nthe end of it\n")
    (tmp_path / "pe.txt").write_text("they said\nwe will\nmy dog\nthe page\n")
    (tmp_path / "own.py").write_text(config_of(tmp_path, "float(t.count('e'))"))
    return tmp_path


# ------------------------------------------------------------------------------------------------
# an optimizer

COUNTING = """
import torch

class _Plain:       # all that an optimizer must have
    def __init__(self, parameters, lr):
        self.param_groups = [dict(params=parameters, lr=lr)]
        self.state = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad

    def zero_grad(self, set_to_none):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def state_dict(self):
        return dict(k=self.param_groups[0]["k"])

    def load_state_dict(self, state):
        self.param_groups[0]["k"] = state["k"]

class _Counting(BASE):
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] /= group["k"]
        super().step()

def optimizer(named_parameters, learning_rate):
    made = _Counting([p for _, p in named_parameters], lr=RATE * learning_rate)
    made.param_groups[0]["k"] = 0
    return made

def reward(prompts, completions):
    return [float(text.count("e")) for text in completions]
"""


@pytest.mark.parametrize("base", ["torch.optim.SGD", "_Plain"])
def test_what_an_optimizer_counts_in_its_groups_goes_on(base, start, tmp_path):
    """As Schedule-Free and Prodigy do. The rate alone is a setting."""
    config = tmp_path / "config.py"
    text = COUNTING.replace("BASE", base)
    config.write_text(text.replace("RATE", "1"))
    flags = (*OWN, str(config), "--learning_rate=1.0")
    start(tmp_path / "whole", *flags, "--max_iters=4")
    start(tmp_path / "parts", *flags, "--max_iters=2")
    start(tmp_path / "parts", *flags, "--max_iters=4", "--resume=True")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts", "the count began anew")

    config.write_text(text.replace("RATE", "2"))
    start(tmp_path / "parts", *flags, "--max_iters=5", "--resume=True")
    assert read_rows(tmp_path / "parts/metrics.jsonl")[-1]["learning_rate"] == 2.0 / 5


def test_an_optimizer_that_no_checkpoint_can_hold_ends_the_run_after_its_first_step(
        start, tmp_path):
    config = tmp_path / "config.py"
    config.write_text("import collections, torch\n"
                      "class _Odd(torch.optim.SGD):\n"
                      "    def step(self):\n"
                      "        super().step()\n"
                      "        for p in self.param_groups[0]['params']:\n"
                      "            self.state[p]['seen'] = collections.deque([1])\n"
                      "def optimizer(named_parameters, learning_rate):\n"
                      "    weights = [p for _, p in named_parameters]\n"
                      "    return _Odd(weights, lr=learning_rate)\n"
                      "def reward(completions): return list(map(len, completions))\n")
    assert_refused(("optimizer", "deque"), start, tmp_path / "run", *OWN, str(config))
    its = [row["iteration"] for row in read_rows(tmp_path / "run/metrics.jsonl")]
    assert its == [1], "it was found in the middle of a run"


# ------------------------------------------------------------------------------------------------
# processes that a reward forks

POOLS = """
import multiprocessing, os, signal, sys, time
from common.signals import interrupts


def hears_the_terminal(number):
    os.kill(os.getpid(), signal.SIGINT)
    return number


with interrupts() as stopped:
    for _ in range(5):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(hears_the_terminal, range(4)) == [0, 1, 2, 3]
    assert not stopped()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopped()
"""


def test_a_pool_of_forked_processes_ends(tmp_path):
    """multiprocessing ends its workers by SIGTERM, perhaps before they have begun, and waits for
    them. A Ctrl-C, which they hear too, is this process's to answer."""
    (tmp_path / "pools.py").write_text(POOLS)
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, tmp_path / "pools.py"], env=environment, timeout=120,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("interrupted") == 1, "workers answered what is not for them"


# ------------------------------------------------------------------------------------------------
# the policy that a run began from

def test_a_run_goes_on_when_the_run_that_it_began_from_moves_on_and_goes(start, run_grpo, tmp_path):
    parent = tmp_path / "parent"
    own = tmp_path / "own.py"
    own.write_text("def reward(completions): return [float(t.count('e')) for t in completions]\n")
    flags = (*OWN, str(own), f"--policy={parent}", "--beta=0.1")
    start(parent, *OWN, str(own), "--max_iters=2", "--learning_rate=1e-2")
    run_grpo(tmp_path / "whole", *flags, "--max_iters=3")
    run_grpo(tmp_path / "parts", *flags, "--max_iters=1")
    as_it_was = f"{parent}/ckpt_000002.pt"
    shutil.copy(as_it_was, tmp_path / "mine.pt")

    start(parent, *OWN, str(own), "--max_iters=3", "--resume=True", "--learning_rate=1e-2")
    run_grpo(tmp_path / "parts", *flags, "--max_iters=2", "--resume=True")
    shutil.rmtree(parent)
    run_grpo(tmp_path / "parts", *flags, "--max_iters=3", "--resume=True")
    assert_same_weights(tmp_path / "whole", tmp_path / "parts", "it went on from another policy")
    assert untimed_metrics(tmp_path / "whole") == untimed_metrics(tmp_path / "parts")

    # a grandchild, and a checkpoint as a policy, under any name
    policy, tokenizer = load_policy(load_settings([f"--policy={tmp_path}/parts"]))
    assert tokenizer.n_vocab == 300
    run_grpo(tmp_path / "third", *flags[:-2], f"--policy={tmp_path}/mine.pt", "--max_iters=0")
    says = [read_rows(tmp_path / name / "eval.jsonl")[0]["samples"] for name in ("third", "whole")]
    assert says[0] == says[1], "the checkpoint is not the policy that the run began from"


# ------------------------------------------------------------------------------------------------
# what its names stand for

def goes_on(start, files, *more):
    """Continue a run of two iterations in its folder -> what is printed."""
    flags = ("--max_iters=3", "--resume=True", *more)
    return start(files / "run", *OWN, str(files / "own.py"), *flags)


def said(text):
    return [line for line in text.splitlines() if line.startswith("resumed with")]


@pytest.mark.parametrize("name, content, what", [
    ("pp.txt", "idiots like\nshut up you\nstupid\ngo on\n", "prompts"),
    ("pe.txt", "idiots like\nshut up you\nstupid\ngo on\n", "eval_prompts"),
    ("own.py", "t.count('e') - 100.0", "text of the config file")],
    ids=["prompts", "evaluation", "config"])
def test_another_file_of_the_same_name_is_said_and_no_warning_compares(
        name, content, what, start, files):
    start(files / "run", *OWN, str(files / "own.py"), "--max_iters=2")
    (files / name).write_text(config_of(files, content) if name == "own.py" else content)
    text = goes_on(start, files)
    lines = said(text)
    assert len(lines) == 1 and what in lines[0], f"said: {lines}"
    between = rf"\nchanged between them: {what} \(after iteration 2\)"
    assert re.search(between, text), "the table compares two different things, and nothing says so"
    assert "fell" not in text, "a warning compares two different rewards"

    # it compares again what it has measured since then
    text = goes_on(start, files, "--max_iters=4")
    assert not said(text) and re.search(between, text)


def test_other_settings_of_the_evaluation_are_said_below_the_table(start, files):
    start(files / "run", *OWN, str(files / "own.py"), "--max_iters=2")
    text = goes_on(start, files, "--eval_temperature=0.5")
    assert len(said(text)) == 1 and "changed between them: eval_temperature" in text


def test_another_judge_of_the_same_name_is_said(start, tiny, files):
    judge = files / "judge.pt"
    shutil.copy(tiny.judge, judge)
    flags = (f"--judge={judge}", "--eval_judge=None", "--max_iters=1")
    start(files / "run", *flags)
    content = load_file(str(judge), "judge")
    del content["kind"]
    content["model"]["score.bias"] += 1
    save_file(str(judge), "judge", **content)
    text = start(files / "run", *flags, "--max_iters=2", "--resume=True")
    assert len(said(text)) == 1 and "weights of judge" in said(text)[0]
    assert "changed between them: weights of judge" in text


# ------------------------------------------------------------------------------------------------
# functions of a config file

