"""Settings: names, types, values, files, runs. Each mistake gets one line that says what to do."""
import glob
import json
import os
import subprocess
import sys
import typing

import pytest

from config import HINTS, load_settings, types_of
from config.check import ABOVE, AT_LEAST, AT_MOST, BELOW
from conftest import ROOT
from worlds import refusal

NAMES = list(HINTS)
CHOICES = {name: typing.get_args(hint) for name, hint in HINTS.items()
           if typing.get_origin(hint) is typing.Literal}
CONFIGS = sorted(path for path in glob.glob(os.path.join(ROOT, "**", "config", "*.py"), recursive=True)
                 if os.path.basename(path) not in ("__init__.py", "check.py"))


@pytest.fixture
def write(tmp_path):
    """write("beta = 1") -> path of a config file that holds it."""
    def to(text, name="a.py"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to


def refused(*argv):
    return refusal(load_settings, [str(a) for a in argv])


def test_every_setting_can_be_given_as_a_flag():
    for name in NAMES:
        value = getattr(load_settings([]), name)
        assert type(value) in types_of(name), name
        if type(value) is bool:
            value = not value
        assert getattr(load_settings([f"--{name}={value}"]), name) == value


# ------------------------------------------------------------------------------------------------
# flags as people type them

FLAGS = [
    ("--lora_alpha=1e-3", dict(lora_alpha=1e-3)), ("--beta=1", dict(beta=1.0)),
    ("--reward_weights=[-0.5]", dict(reward_weights=(-0.5,))),
    ("--reward_funcs=judge", dict(reward_funcs=("judge",))),
    ("--prompt_words=[2, 3]", dict(prompt_words=(2, 3))), ("--out_dir=-x", dict(out_dir="-x")),
    ("--out_dir=a=b", dict(out_dir="a=b")), ("--out_dir=7", dict(out_dir="7")),
    ("--out_dir=True", dict(out_dir="True")), ("--comments=None", dict(comments=None)),
    ("--comments=a b.csv", dict(comments="a b.csv")), ("--delta=None", dict(delta=None)),
    ("--policy='a.pt'", dict(policy="a.pt")), ("--compile", dict(compile=True)),
    ("--log_micro=FALSE", dict(log_micro=False))]


def test_flags(write):
    for flag, expected in FLAGS:
        cfg = load_settings([flag])
        for name, value in expected.items():
            found = getattr(cfg, name)
            assert found == value and type(found) is type(value), flag
    cfg = load_settings(["--resume", write("seed = 7\nbeta = 1.0"), "--beta=0.1", "--beta=0.2"])
    assert (cfg.resume, cfg.seed, cfg.beta) == (True, 7, 0.2)


TYPED = [   # flags, and parts of the one line
    ("--bata=1", "--bata=1", "did you mean 'beta'"),
    ("--qqqq=1", "no setting 'qqqq'"), ("--functions=1", "no setting 'functions'"),
    ("--source=x", "no setting 'source'"), ("--speed=head", "no setting 'speed'"),
    ("--beta", "--beta=VALUE"), ("--beta 0.1", "--beta=VALUE"),
    ("-beta=1", "--name=value"), ("-1", "--name"), ("--", "--name"), ("--=3", "--name"),
    ("nowhere.py", "nowhere.py"), ("out/nowhere", "nowhere"),
    # types
    ("--max_iters=1.5", "max_iters", "must be int"), ("--max_iters=ten", "'ten'", "int"),
    ("--max_iters=None", "int"), ("--max_iters=", "int"), ("--seed=True", "int"),
    ("--beta=high", "must be float"), ("--delta=x", "float or None"), ("--log_micro=None", "bool"),
    ("--compile=update", "bool"), ("--prompt_words=3", "tuple"), ("--out_dir=None", "str"),
    ("--reward_funcs=[['x']]", "reward_funcs", "['x']"), ("--reward_funcs=()", "reward_funcs"),
    # numbers and text
    ("--beta=1e400", "beta = inf"), ("--beta=-1e400", "beta"), ("--beta=1" + "0" * 320, "beta"),
    ("--seed=9223372036854775808", "seed", "2 ** 63"), ("--learning_rate=0", "above 0"),
    ("--threads=100000", "threads = 100000", "at most"), ("--out_dir=", "out_dir", "empty"),
    ("--adam_beta2=1", "below 1"),
    ("--prompt_words=('a','b')", "prompt_words"), ("--prompt_words=(5,3)", "prompt_words"),
    ("--reward_weights=('a',)", "reward_weights"), ("--vocab_size=100", "257"),
    # two settings
    ("--num_generations=1", "at least 2"), ("--n_head=5", "n_head = 5"),
    ("--num_prompts=6 --num_generations=4 --mini_batch_size=7", "6 * 4 = 24", "= 7"),
    ("--num_generations=4 --decode_batch_size=3", "decode_batch_size = 3", "= 4"),
    ("--delta=1.2", "delta = 1.2"), ("--delta=1.2 --epsilon_high=0.3", "1.3"),
    ("--loss_type=cispo", "epsilon_high", "5.0"),
    ("--loss_type=cispo --epsilon_high=0.28", "epsilon_high", "5.0"),
    ("--use_bias_correction_kl=True --kl_in=reward", "k1"),
    ("--multi_objective_aggregation=normalize_then_sum --kl_in=reward", "kl_in = 'loss'"),
    ("--multi_objective_aggregation=normalize_then_sum --zero_std_groups=drop", "'keep'"),
    ("--critic=True --zero_std_groups=drop", "critic = True"),
    ("--critic=True --importance_sampling_level=sequence", "critic = True"),
    ("--reward_weights=(1,2)", "(1, 2)"), ("--judge=None", "judge = None", "'train'"),
    ("--reward_funcs=('judge','judge') --reward_weights=(1,2)", "twice"),
    ("--reward_funcs=nobody", "'nobody'"),
    ("--tracin_val_reward=nobody --tracin_val_prompts=1", "'nobody'"),
    ("--tracin=target", "no function target"), ("--tracin_select=weigh", "no function weigh"),
    ("--tracin=self --loss_type=bnpo --num_iterations=2", "bnpo"),
    ("--tracin=reward --tracin_leave_one_out=True --critic=True", "critic = False"),
    ("--tracin=reward --tracin_leave_one_out=True --tracin_val_prompts=2", "self-influence"),
    ("--tracin_val_size=3", "tracin_val_size"), ("--tracin_val_reward=judge", "which is 0"),
    ("--tracin=reward --tracin_val_prompts=2 --tracin_val_size=1", "at least 2"),
    ("--stop_strings=('x',)", "environment"), ("--stop_strings=(1,)", "must be text")]


def test_what_is_typed_wrongly_is_one_line():
    for line, *parts in TYPED:
        message = refused(*line.split(" "))
        assert all(part in message for part in parts), message
        assert len(message) < 500


def test_every_range_is_checked():
    def check_refuses(name, bound, step, wanted):
        kind = float if float in types_of(name) else int
        value = kind(bound + step)
        assert f"{name} = {value}: must be {wanted}" in refused(f"--{name}={value}")

    for name, bound in AT_LEAST.items():
        check_refuses(name, bound, -1, "at least")
    for name, bound in AT_MOST.items():
        check_refuses(name, bound, 1, "at most")
    for name, bound in ABOVE.items():
        check_refuses(name, bound, 0, "above")
    for name, bound in BELOW.items():
        check_refuses(name, bound, 0, "below")


def test_every_number_is_finite(write):
    for name in NAMES:
        if float in types_of(name):
            assert name in refused(write(f"{name} = float('nan')"))


def test_choices(write, tmp_path):
    for name, choices in CHOICES.items():
        message = refused(f"--{name}=nonsense")
        assert f"{name} = 'nonsense'" in message and all(choice in message for choice in choices)
        for choice in choices:
            more = ["--epsilon_high=5"] if choice == "cispo" else []
            if name == "tracin_val_select":
                more = ["--tracin_val_prompts=2"]
            if choice in ("target", "weigh"):
                more = [write(f"def {choice}(*arguments): pass")]
            assert getattr(load_settings([f"--{name}={choice}", *more]), name) == choice


# ------------------------------------------------------------------------------------------------
# config files

CONSTANT = "def reward(prompts, completions):\n    return [{}] * len(completions)\n"


def test_every_config_of_the_project_loads():
    for path in CONFIGS:
        load_settings([path])


def test_private_names_and_modules(write):
    cfg = load_settings([write("import math\nfrom os import path\n_n = 2\nbeta = math.sqrt(_n)")])
    assert cfg.beta == 2 ** 0.5


FAILING = [
    ("beta = 1 / 0", "ZeroDivisionError"), ("raise ValueError('first\\nsecond')", "first second"),
    ("beta = = 1", "SyntaxError"), ("import no_such_module", "no_such_module"),
    ("import sys; sys.exit(3)", "SystemExit"), ("def f():\n    f()\nf()", "Recursion"),
    ("num_generation = 4", "'num_generations'"), ("max_iters = 'ten'", "int, not str"),
    ("beta = 0.1j", "complex"), ("seed = 10 ** 30", "2 ** 63"),
    ("reward_weights = (10 ** 400,)", "reward_weights"),
    (CONSTANT.replace("reward", "rewrd").format(1), "'rewrd' is not used"),
    ("stop_strings = ('',)\ndef environment(prompts, transcripts): pass", "stop_strings")]


def test_a_file_that_fails_is_one_line(write):
    for text, part in FAILING:
        path = write(text)
        message = refused(path)
        assert part in message
        if "Error" in part:
            assert path in message


def test_files_build_on_each_other_and_functions_are_rewards(write):
    one = write("beta = 0.1\nseed = 5\n" + CONSTANT.format(1), "one.py")
    two = write("beta = 0.2\n" + CONSTANT.format(2), "two.py")
    cfg = load_settings([one, two, "--seed=9"])
    assert (cfg.beta, cfg.seed, cfg.reward_funcs) == (0.2, 9, ("reward",))
    assert cfg.functions["reward"]([], ["x"]) == [2]
    assert cfg.source == open(one).read() + "\n" + open(two).read()


def test_a_named_function_that_raises_is_one_line(write):
    cfg = load_settings([write("tracin = 'target'\ndef target(*a):\n    raise KeyError('x')")])
    assert "target raised KeyError" in refusal(cfg.functions["target"], 1, 2, 3)


def test_tools_are_a_table_and_the_only_ones_who_answer(write):
    assert "a dict" in refused(write("tools = ['twice']"))
    both = "tools = {'twice': lambda text: 2 * text}\ndef environment(prompts, transcripts): pass"
    assert "both would answer" in refused(write(both))


# ------------------------------------------------------------------------------------------------
# a run is a config

def test_a_run_is_a_config(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("beta = 0.9\n" + CONSTANT.format(1))
    folder = tmp_path / "run"
    folder.mkdir()
    settings = dict(beta=0.3, seed=4, out_dir="out/elsewhere", prompt_words=[1, 2])
    noted = dict(settings=settings, functions=["reward"], files=[str(mine)])
    (folder / "config.json").write_text(json.dumps(noted))
    (folder / "config.py").write_text(mine.read_text())
    for path in (f"{folder}", f"{folder}/"):
        cfg = load_settings([path, "--seed=5"])
        assert (cfg.beta, cfg.seed, cfg.prompt_words) == (0.3, 5, (1, 2))
        assert cfg.out_dir == str(folder), "it would write to another run's folder"
        assert cfg.functions["reward"]([], [""]) == [1] and "beta = 0.9" in cfg.source
    other = tmp_path / "other.py"
    other.write_text(CONSTANT.format(2))    # named: it is what is meant
    assert load_settings([str(folder), str(other)]).functions["reward"]([], [""]) == [2]

    mine.write_text(CONSTANT.format(3))     # no longer what the run was made with
    assert "has changed, is gone" in refused(folder)
    mine.unlink()
    (folder / "config.py").write_text("raise SystemExit('a run that is looked at ran its code')")
    assert "name a config file" in refused(folder)
    (folder / "config.json").write_text(json.dumps(dict(settings=settings)))
    cfg = load_settings([str(folder)])      # needs no function; its text is still the run's
    assert cfg.functions == {} and cfg.source.startswith("raise")


def test_a_strangers_run_runs_nothing(tmp_path):
    mine, theirs = tmp_path / "mine.py", tmp_path / "run" / "config.py"
    theirs.parent.mkdir()
    beside = f"/proc/self/cwd/{os.path.relpath(mine)}"      # where the archive was unpacked
    for path, functions in ((theirs, ["reward"]), (beside, ["reward"]), (mine, [])):
        for place in (mine, theirs):
            place.write_text("raise SystemExit('it ran')")
        noted = dict(settings={}, functions=functions, files=[str(path)])
        (theirs.parent / "config.json").write_text(json.dumps(noted))
        said = refused(theirs.parent) if functions else load_settings([str(theirs.parent)])
        assert not functions or "name a config file" in said


def test_a_config_json_that_is_none(tmp_path):
    for text, part in (("{", "JSON"), ("[]", "has no settings"), ("{}", "has no settings"),
                       ('{"settings": {"speed": []}}', "another version"),
                       ('{"settings": {}, "functions": [5]}', "damaged"),
                       ('{"settings": {}, "files": 5}', "damaged"),
                       ('{"settings": {"seed": "x"}}', "must be int")):
        (tmp_path / "config.json").write_text(text)
        message = refused(tmp_path)
        assert part in message and "config.json" in message


# ------------------------------------------------------------------------------------------------
# help

def test_help():
    for argv, code in ((["--help"], 0), ([], 2)):
        done = subprocess.run([sys.executable, os.path.join(ROOT, "grpo.py"), *argv],
                              capture_output=True, text=True)
        assert done.returncode == code and "usage: python grpo.py" in done.stdout, done.stderr
        assert all((f"\n{name}: " in done.stdout) == (code == 0) for name in NAMES)
