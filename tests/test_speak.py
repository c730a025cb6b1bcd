"""speak.py, which is `python sample.py RUN`: what a policy says, and what the judges make of it."""
import io
import re

import pytest
import torch

import speak
from evaluate import open_run
from run.script import BadInput

EXPLANATION = "the judges' numbers are probabilities of toxic; other rewards are as they are\n"
LINE = re.compile(r"^ +(\d\.\d{3}) +(\d\.\d{3})  ('.*'|\".*\")$")


@pytest.fixture(scope="module")
def run(grpo, tmp_path_factory):
    """A run of three iterations whose steps are so large that the policy must change."""
    out = tmp_path_factory.mktemp("speak") / "run"
    grpo(out, "--learning_rate=0.01", "--beta=0")
    return str(out)


@pytest.fixture
def say(run, capsys):
    """say("--num=2") -> the lines printed after the one that explains the numbers."""
    def start(*argv):
        capsys.readouterr()
        speak.main([run, *argv])
        return after_explanation(capsys.readouterr().out)
    return start


def after_explanation(text):
    before, explanation, after = text.partition(EXPLANATION)
    assert explanation, f"the numbers are not explained: {text!r}"
    return after.splitlines()


def spoken(lines):
    """[(score by each judge, the completion)] of the lines that hold a completion."""
    found = [LINE.match(line) for line in lines]
    return [m.groups() for m in found if m]


def test_it_prints_as_many_completions_as_asked_with_a_score_of_each_judge(say):
    lines = say("--prompt=a green river", "--num=3")
    assert lines[0] == "'a green river'", "the prompt is not shown first"
    assert lines[1].split()[:2] == ["judge", "eval_judge"], f"the columns are not named: {lines[1]}"
    assert "after 3 iterations" in lines[1], "the policy's iteration is not named"
    assert len(spoken(lines)) == 3, f"3 completions asked for, printed: {lines[2:]}"
    assert len(spoken(say("--prompt=a green river"))) == 5, "5 completions unless --num says else"


def test_scores_are_the_judges_on_prompt_and_completion(run):
    cfg, nets, policy, _ = open_run(run, [])
    said = speak.speak(nets, policy, cfg, "my grumble", 4)
    completions = [completion for completion, _ in said]
    for name, judge in nets.judges.items():
        with torch.no_grad():
            expected = torch.sigmoid(judge(["my grumble"] * 4, completions))
        got = torch.tensor([scores[name] for _, scores in said])
        torch.testing.assert_close(got, expected, msg=f"{name} scored something else")


def test_the_same_prompt_gets_the_same_answer_and_another_seed_another(say):
    first = spoken(say("--prompt=the old"))
    assert spoken(say("--prompt=the old")) == first, "the same command gave other completions"
    assert spoken(say("--prompt=the old", "--seed=7")) != first, "--seed changes nothing"
    assert spoken(say("--prompt=the small")) != first, "the prompt changes nothing"


def test_sampling_settings_reach_the_sampler(say):
    greedy = spoken(say("--prompt=the old", "--num=4", "--top_k=1"))
    assert len(set(greedy)) == 1, "with top_k = 1 all completions must be the same"
    short = spoken(say("--prompt=the old", "--max_completion_length=1", "--temperature=2"))
    longer = spoken(say("--prompt=the old", "--temperature=2"))
    assert max(len(c) for *_, c in short) < max(len(c) for *_, c in longer), \
        "max_completion_length = 1 is no shorter than 8"


def test_before_shows_the_policy_from_before_training_with_the_same_noise(say, run):
    lines = say("--prompt=your quiet", "--before=True", "--num=4")
    titles = [i for i, line in enumerate(lines) if "eval_judge" in line]
    assert len(titles) == 2, f"two policies, two tables; printed: {lines}"
    assert "before training" in lines[titles[0]], "the policy from before training comes first"
    before, after = spoken(lines[:titles[1]]), spoken(lines[titles[1]:])
    assert len(before) == len(after) == 4
    assert before != after, "the policy before training is the trained one"
    assert spoken(say("--prompt=your quiet", "--num=4")) == after, \
        "--before changes what the trained policy says"

    cfg, nets, _, _ = open_run(run, [])
    base = [text for text, _ in speak.speak(nets, nets.base, cfg, "your quiet", 4)]
    assert [eval(c) for *_, c in before] == base, "the first table is not the base policy's"


def test_a_reward_of_the_config_is_shown_beside_the_judges(grpo, tiny, tmp_path, capsys):
    config = tmp_path / "length.py"
    config.write_text("reward_funcs = ('length',)\n"
                      "def length(prompts, completions):\n"
                      "    return [float(len(c)) for c in completions]\n")
    grpo(tmp_path / "run", str(config), "--eval_judge=None", "--max_iters=1")
    capsys.readouterr()
    speak.main([str(tmp_path / "run"), "--prompt=my kettle", "--num=2"])
    lines = after_explanation(capsys.readouterr().out)
    names = lines[1].split()
    assert names[:2] == ["judge", "length"], f"the reward is a column beside the judge: {names}"
    for line in lines[2:]:
        line = line.strip().split(None, 1)[1]
        number, text = line.split(None, 1)
        assert float(number) == len(eval(text)), f"not the length of its completion: {line}"


def test_a_reward_that_needs_an_answer_is_left_out_with_a_note(grpo, tmp_path, capsys):
    config = tmp_path / "sums.py"
    config.write_text("reward_funcs = ('judge', 'right')\n"
                      "def right(prompts, completions, answer):\n"
                      "    return [a == c for a, c in zip(answer, completions)]\n")
    (tmp_path / "sums.csv").write_text(
        "text,answer\n" + "".join(f"{i} + 1 =,{i + 1}\n" for i in range(20)))
    grpo(tmp_path / "run", str(config), f"--prompts={tmp_path / 'sums.csv'}", "--max_iters=0")
    capsys.readouterr()
    speak.main([str(tmp_path / "run"), "--prompt=7 + 1 =", "--num=2"])
    lines = after_explanation(capsys.readouterr().out)
    assert lines[1].startswith("note: no column for 'right': ") and "'answer'" in lines[1], lines
    assert len(spoken(lines)) == 2, f"the judges' columns must remain: {lines}"


def test_prompts_are_read_from_the_input_and_a_bad_line_does_not_end_it(say, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a green\n\n" + "river " * 40 + "\nthe old\n"))
    lines = say("--num=1")
    assert lines[0] == "'a green'"
    assert sum(line.startswith("error: prompt 'river") for line in lines) == 1, lines
    assert "'the old'" in lines, "a prompt that is too long ended the program"
    assert len(spoken(lines)) == 2, "an empty line is no prompt"


@pytest.mark.parametrize("prompt", ["", "river " * 40])
def test_a_prompt_that_does_not_fit_ends_in_one_line(run, prompt):
    with pytest.raises(BadInput, match="must be 1 to 24 "):
        speak.main([run, f"--prompt={prompt}"])


@pytest.mark.parametrize("argv", [[], ["--prompt=a"], ["RUN", "--num=0"], ["RUN", "--num=two"],
                                  ["RUN", "--before=yes"]])
def test_a_wrong_command_gets_the_usage(argv):
    with pytest.raises(BadInput, match="usage: python sample.py RUN"):
        speak.main(argv)


def test_sample_py_is_the_command(run, script):
    done = script("sample.py", run, "--prompt=a green", "--num=2")
    assert done.returncode == 0, done.stderr
    assert len(spoken(done.stdout.splitlines())) == 2, done.stdout
    missing = script("sample.py", run + "-not", "--prompt=a")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: "), f"not one line: {missing.stderr}"
    assert missing.stderr.count("\n") == 1, f"not one line: {missing.stderr}"
