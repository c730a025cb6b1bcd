"""`python sample.py RUN`: what a policy says, and what the judges make of it."""
import ast
import io
import re

import pytest
import torch

from grpo import prepare, read_inputs
import sample as speak
from run.settings import load_settings
from worlds import assert_refused, command, printed, read_rows, refusal

LINE = re.compile(r"^ +(\d\.\d{3}) +(\d\.\d{3})  ('.*'|\".*\")$")


@pytest.fixture(scope="module")
def run(run_grpo, tmp_path_factory):
    """A run of three iterations whose steps are so large that the policy must change."""
    out = tmp_path_factory.mktemp("speak") / "run"
    run_grpo(out, "--learning_rate=0.01", "--beta=0")
    return str(out)


def say(run, *argv):
    """The lines printed, from the first prompt on."""
    lines = printed(speak.main, [run, *argv]).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("'"))
    return lines[first:]


def spoken(lines):
    """[(score by each judge, the completion)] of the lines that hold a completion."""
    return [m.groups() for m in map(LINE.match, lines) if m]


def test_completions_have_the_scores_of_the_judges(run):
    lines = say(run, "--prompt=a green river", "--num=3")
    assert lines[0] == "'a green river'"
    assert lines[1].split()[:2] == ["judge", "eval_judge"]
    assert len(spoken(lines)) == 3
    assert len(spoken(say(run, "--prompt=a green river"))) == 5
    cfg = load_settings([run])
    judges = prepare(cfg, read_inputs(cfg, may_train=False)).judges.values()
    for *scores, text in spoken(lines):
        for score, judge in zip(scores, judges, strict=True):
            toxicity = torch.sigmoid(judge([ast.literal_eval(text)]))
            assert float(score) == pytest.approx(float(toxicity), abs=6e-4)


def test_before_shows_the_policy_from_before_training_with_the_same_noise(run):
    lines = say(run, "--prompt=your quiet", "--before=True", "--num=4")
    _, second = [i for i, line in enumerate(lines) if "eval_judge" in line]
    before, after = spoken(lines[:second]), spoken(lines[second:])
    assert len(before) == len(after) == 4
    assert spoken(say(run, "--prompt=your quiet", "--num=4")) == after != before
    assert len(set(spoken(say(run, "--prompt=the old", "--top_k=1")))) == 1, "settings are heard"


def test_a_reward_is_a_column_unless_it_needs_an_answer(run_grpo, tmp_path):
    config = tmp_path / "sums.py"
    config.write_text("""
reward_funcs = ('judge', 'length', 'right')
def length(prompts, completions):
    return [float(len(c)) for c in completions]
def right(prompts, completions, answer):
    return [a == c for a, c in zip(answer, completions)]
def questions(n, seed):
    return [{'text': f'{i} + 1 =', 'answer': str(i + 1)} for i in range(20)]
""")
    run = f"{tmp_path}/run"
    run_grpo(run, str(config), "--eval_judge=None", "--max_iters=1")
    for row in read_rows(f"{run}/samples.jsonl"):
        assert row["row"]["answer"] == str(int(row["prompt"].split()[0]) + 1)
        assert row["scores"]["length"] == len(row["completion"])
    lines = say(run, str(config), "--prompt=7 + 1 =", "--num=2")
    assert [line for line in lines if "no column for 'right'" in line], "it went without a word"
    lines = [line for line in lines if not line.startswith("note: ")]
    assert lines[1].split()[:3] == ["judge", "length", "after"]
    for line in lines[2:]:
        _, number, text = line.split(None, 2)
        assert float(number) == len(ast.literal_eval(text))


def test_the_command_and_its_refusals(run):
    assert_refused("24", speak.main, [run, f"--prompt={'river ' * 40}"])
    assert "usage" in refusal(speak.main, [])
    assert_refused("--num", speak.main, [run, "--prompt=a", "--num=0"])
    lines = command("sample.py", run, "--prompt=a green", "--num=2").splitlines()
    assert len(spoken(lines)) == 2, lines


def test_without_a_prompt_it_reads_lines(run, monkeypatch):
    """An overlong one is an error of its own; the next is answered as if it were --prompt."""
    lines = io.StringIO(f"a green river\n\nriver{' river' * 39}\nmy grumble\r\n")
    monkeypatch.setattr("sys.stdin", lines)
    found = say(run, "--num=2")
    first, second = (say(run, "--num=2", f"--prompt={text}") for text in (
        "a green river", "my grumble"))
    assert found[:len(first)] == first and found[-len(second):] == second
    overlong, *_, error = found[len(first):-len(second)]
    assert "river river" in overlong and error.startswith("error: ")
