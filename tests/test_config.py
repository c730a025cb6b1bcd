"""Settings: names, types, values, files. Each mistake gets one line that says what to do."""
import glob
import json
import math
import os
import re
import subprocess
import sys
import typing
from dataclasses import replace

import pytest
import torch

from config import MERGED, Settings, load_settings
from config.check import ABOVE_0, AT_LEAST, BETWEEN, CHOICES
from conftest import ROOT
from run.checkpoint import claim_folder, write_run_config
from run.script import BadInput

TYPES = typing.get_type_hints(Settings)
NAMES = list(Settings().public())


@pytest.fixture
def write(tmp_path):
    """write("beta = 1") -> path of a config file that holds it."""
    def to(text, name="a.py"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to


def refusal(*argv):
    """The line with which these arguments are refused."""
    with pytest.raises(BadInput) as caught:
        load_settings([str(a) for a in argv])
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_no_arguments_are_the_defaults():
    filled_in = {"reward_funcs": None, "reward_weights": None}
    assert load_settings([]).public() | filled_in == Settings().public()


def test_every_default_has_the_type_of_its_annotation():
    for name, value in Settings().public().items():
        assert isinstance(value, typing.get_args(TYPES[name]) or TYPES[name]), name


# ------------------------------------------------------------------------------------------------
# names

def test_unknown_flag_names_the_nearest():
    assert "--bata=1" in refusal("--bata=1") and "did you mean 'beta'" in refusal("--bata=1")


def test_unknown_name_in_a_file_names_file_and_nearest(write):
    path = write("num_generation = 4")
    assert path in refusal(path) and "did you mean 'num_generations'" in refusal(path)


def test_unknown_name_like_nothing_else():
    assert "'qqqq'" in refusal("--qqqq=1") and "did you mean" not in refusal("--qqqq=1")


@pytest.mark.parametrize("name", ["functions", "source"])
def test_internal_fields_are_no_settings(name):
    assert f"no setting {name!r}" in refusal(f"--{name}=x")


@pytest.mark.parametrize("name", [*NAMES, "resume", "debug_step"])
def test_every_setting_can_be_given_as_a_flag(name):
    value = getattr(load_settings([]), name)
    value = not value if type(value) is bool and name != "sync_ref_model" else value
    assert getattr(load_settings([f"--{name}={value}"]), name) == value


def test_underscores_and_modules_are_private(write):
    cfg = load_settings([write("import math\nimport os.path as where\nfrom os import path\n"
                               "_n = 2\nbeta = math.sqrt(_n)")])
    assert cfg.beta == math.sqrt(2)


def test_a_flag_needs_a_value():
    assert "--name=value" in refusal("--compile")


# ------------------------------------------------------------------------------------------------
# values

@pytest.mark.parametrize("flag, name, value", [
    ("--beta=1", "beta", 1.0),
    ("--learning_rate=3e-4", "learning_rate", 3e-4),
    ("--epsilon_high=5", "epsilon_high", 5.0),
    ("--max_iters=7", "max_iters", 7),
    ("--compile=True", "compile", ("generate", "judge", "reference", "update")),
    ("--compile=false", "compile", ()),
    ("--speed=()", "speed", ()),
    ("--speed=['head']", "speed", ("head",)),
    ("--speed=head", "speed", ("head",)),
    ("--log_micro=FALSE", "log_micro", False),
    ("--delta=None", "delta", None),
    ("--comments=None", "comments", None),
    ("--eval_judge=None", "eval_judge", None),
    ("--prompt_words=(2, 3)", "prompt_words", (2, 3)),
    ("--prompt_words=[2, 3]", "prompt_words", (2, 3)),
    ("--reward_weights=(0.5,)", "reward_weights", (0.5,)),
    ("--lora_layers=('c_attn',)", "lora_layers", ("c_attn",)),
    ("--policy=a.pt", "policy", "a.pt"),
    ("--policy='a.pt'", "policy", "a.pt"),
    ("--out_dir=a=b=c", "out_dir", "a=b=c"),
    ("--out_dir=7", "out_dir", "7"),
    ("--out_dir=1e3", "out_dir", "1e3"),
    ("--out_dir=True", "out_dir", "True"),
    ("--out_dir=(1, 2)", "out_dir", "(1, 2)"),
    ("--wandb_project=7", "wandb_project", "7"),
    ("--comments=a b.csv", "comments", "a b.csv")])
def test_literals(flag, name, value):
    found = getattr(load_settings([flag]), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("flag, wanted", [
    ("--max_iters=1.5", "int"), ("--max_iters=ten", "int"), ("--max_iters=1e3", "int"),
    ("--max_iters=None", "int"), ("--max_iters=", "int"), ("--seed=True", "int"),
    ("--beta=high", "float"), ("--beta=True", "float"), ("--beta=None", "float"),
    ("--delta=x", "float or None"), ("--compile=1", "bool or tuple"), ("--log_micro=None", "bool"),
    ("--speed=True", "tuple"), ("--prompt_words=3", "tuple"),
    ("--reward_funcs=3", "tuple or None"), ("--out_dir=None", "str"), ("--policy=None", "str")])
def test_wrong_type_is_refused(flag, wanted):
    message = refusal(flag)
    assert flag.split("=")[0][2:] in message and f"must be {wanted}" in message


@pytest.mark.parametrize("name", ["compile", "speed", "lora_layers", "reward_funcs"])
def test_a_tuple_of_odd_things_is_one_line(name):
    message = refusal(f"--{name}=[['x']]")
    assert name in message and "['x']" in message, message


def test_wrong_type_in_a_file_names_file_value_and_type(write):
    path = write("max_iters = 'ten'")
    assert all(part in refusal(path) for part in (path, "max_iters", "'ten'", "int", "str"))


@pytest.mark.parametrize("flag", [
    "--prompt_words=('a', 'b')", "--prompt_words=(1.5, 3)", "--prompt_words=(5, 3)",
    "--prompt_words=(-1, 3)", "--prompt_words=(1, 2, 3)", "--reward_weights=('a',)",
    "--reward_weights=(None,)", "--lora_layers=('c_atn',)", "--lora_layers=(1,)",
    "--speed=('heads',)", "--speed=(1,)"])
def test_members_of_tuples_are_checked(flag):
    assert flag.split("=")[0][2:] in refusal("--lora_rank=2", flag)


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_every_choice_is_checked(name):
    message = refusal(f"--{name}=nonsense")
    assert name in message and "'nonsense'" in message
    assert all(choice in message for choice in CHOICES[name])


@pytest.mark.parametrize("name, choice", [(n, c) for n in sorted(CHOICES) for c in CHOICES[n]])
def test_every_choice_is_accepted(name, choice, tmp_path):
    more = []
    if choice == "cispo":
        more = ["--epsilon_high=5"]
    if name == "tracin_val_select":
        more = ["--tracin_val_prompts=2"]
    if choice in ("target", "weigh"):       # functions of a config file
        config = tmp_path / "config.py"
        config.write_text(f"def {choice}(*arguments): pass")
        more = [str(config)]
    assert getattr(load_settings([f"--{name}={choice}", *more]), name) == choice


def is_float(name):
    return float in (TYPES[name], *typing.get_args(TYPES[name]))


OUTSIDE = [(name, low - 1) for low, names in AT_LEAST.items() for name in names]
for (low, high), names in BETWEEN.items():
    OUTSIDE += [(name, value) for name in names for value in (low - 1, high + 1)]
OUTSIDE.sort()


@pytest.mark.parametrize("name, value", OUTSIDE, ids=[f"{n}={v}" for n, v in OUTSIDE])
def test_every_range_is_checked(name, value):
    value = float(value) if is_float(name) else int(value)
    message = refusal(f"--{name}={value}")
    assert f"{name} = {value}" in message and "must be" in message


@pytest.mark.parametrize("name", ABOVE_0)
def test_zero_is_refused_where_it_means_nothing(name):
    assert re.search(rf"{name} = 0\.0: must be above 0", refusal(f"--{name}=0"))


@pytest.mark.parametrize("name", sorted(filter(is_float, NAMES)))
def test_nan_is_refused(write, name):
    assert name in refusal(write(f"{name} = float('nan')"))


def test_a_group_needs_two():
    message = refusal("--num_generations=1")
    assert "num_generations = 1" in message and "at least 2" in message


@pytest.mark.parametrize("flags", [
    ("--mini_batch_size=7",), ("--micro_batch_size=7",), ("--mini_batch_size=48",),
    ("--mini_batch_size=12", "--micro_batch_size=8")])
def test_batch_sizes_must_divide(flags):
    message = refusal("--num_prompts=6", "--num_generations=4", *flags)
    assert "6 * 4 = 24" in message
    assert all(flag[2:].replace("=", " = ") in message for flag in flags)


@pytest.mark.parametrize("flags", [
    ("--mini_batch_size=12", "--micro_batch_size=6"), ("--micro_batch_size=100",), ()])
def test_batch_sizes_that_fit(flags):
    load_settings(["--num_prompts=6", "--num_generations=4", *flags])


def test_groups_are_decoded_whole():
    message = refusal("--num_generations=4", "--decode_batch_size=6")
    assert "decode_batch_size = 6" in message and "num_generations = 4" in message


def test_delta_must_exceed_the_clip():
    message = refusal("--delta=1.2", "--epsilon=0.2")
    assert "delta = 1.2" in message and "above 1 + epsilon = 1.2" in message
    assert load_settings(["--delta=1.3"]).delta == 1.3


@pytest.mark.parametrize("flags", [(), ("--epsilon_high=0.28",)])
def test_cispo_needs_a_ceiling(flags):
    message = refusal("--loss_type=cispo", *flags)
    assert "epsilon_high" in message and "5.0" in message


def test_nothing_to_sync_at_beta_0():
    assert "beta" in refusal("--sync_ref_model=True")
    assert load_settings(["--sync_ref_model=True", "--beta=0.1"]).sync_ref_model


def test_one_weight_per_reward():
    message = refusal("--reward_weights=(1, 2)")
    assert all(part in message for part in ("(1, 2)", "2 weights", "1 reward_funcs"))


def test_the_judge_reward_needs_a_judge():
    assert "judge = None" in refusal("--judge=None") and "'train'" in refusal("--judge=None")


# ------------------------------------------------------------------------------------------------
# files

CONSTANT = "def reward(prompts, completions):\n    return [{}] * len(completions)\n"
CONFIGS = sorted(path for path in glob.glob(os.path.join(ROOT, "config", "*.py"))
                 if os.path.basename(path) not in ("__init__.py", "check.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=os.path.basename)
def test_every_config_of_the_project_loads(path):
    assert load_settings([path]).out_dir.startswith("out/")


def test_missing_file_is_named():
    assert "nowhere.py" in refusal("nowhere.py")


@pytest.mark.parametrize("text", [
    "beta = 1 / 0", "raise ValueError('first\\nsecond')", "beta = = 1", "import no_such_module",
    "x = open('/nowhere/at/all')"])
def test_a_file_that_fails_is_one_line_naming_it(write, text):
    path = write(text)
    assert path in refusal(path)


def test_a_file_builds_on_another(write):
    cfg = load_settings([write("from config.toxicity import *\nmax_iters = 7")])
    assert cfg.max_iters == 7 and cfg.out_dir == "out/toxicity"


def test_the_later_file_wins(write):
    cfg = load_settings([write("beta = 0.1\nseed = 3"), write("beta = 0.2", "b.py")])
    assert (cfg.beta, cfg.seed) == (0.2, 3)


def test_flags_override_the_file_wherever_they_stand(write):
    path = write("beta = 0.1\nseed = 3")
    for argv in ([path, "--beta=0.5"], ["--beta=0.5", path]):
        cfg = load_settings(argv)
        assert (cfg.beta, cfg.seed) == (0.5, 3)


def test_a_function_called_reward_is_the_reward(write):
    cfg = load_settings([write("_w = 2\ndef _twice(x):\n    return _w * x\n\n"
                             "def reward(prompts, completions):\n"
                             "    return [_twice(len(c)) for c in completions]")])
    assert cfg.reward_funcs == ("reward",) and cfg.reward_weights == (1.0,)
    assert cfg.functions["reward"](["a"], ["abc"]) == [6]


def test_several_rewards(write):
    cfg = load_settings([write("def short(prompts, completions):\n"
                             "    return [-len(c) for c in completions]\n\n"
                             "reward_funcs = ['judge', 'short']\nreward_weights = [1, 0.5]")])
    assert cfg.reward_funcs == ("judge", "short") and cfg.reward_weights == (1, 0.5)


def test_a_reward_needs_no_judge(write):
    assert load_settings([write(CONSTANT.format(1)), "--judge=None"]).judge is None


def test_an_unused_function_is_refused(write):
    message = refusal(write("def reword(prompts, completions):\n    return []"))
    assert "'reword'" in message and "reward_funcs" in message and "_" in message


def test_a_reward_that_is_missing_is_named(write):
    message = refusal(write("def reward(prompts, completions):\n    return []\n"
                            "reward_funcs = ('reward', 'brevity')"))
    assert "'brevity'" in message and "'reward'" in message


def test_config_json_works_as_a_config(write, tmp_path):
    path = write("_w = 3\nbeta = 0.25\nprompt_words = (2, 5)\n" + CONSTANT.format("_w"))
    cfg = load_settings([path, "--seed=9"])
    write_run_config(str(tmp_path), cfg, torch.device("cpu"))
    os.remove(path)
    again = load_settings([str(tmp_path / "config.json")])
    assert again.public() == cfg.public() and again.functions["reward"]([], ["x"]) == [3]
    assert load_settings([str(tmp_path / "config.json"), "--beta=0.5"]).beta == 0.5


def test_config_json_keeps_the_reward_of_every_file(write, tmp_path):
    cfg = load_settings([write(CONSTANT.format(5)), write("beta = 0.1", "b.py")])
    write_run_config(str(tmp_path), cfg, torch.device("cpu"))
    again = load_settings([str(tmp_path / "config.json")])
    assert again.functions["reward"]([], ["x"]) == [5]


def test_config_json_says_where_the_run_is(tmp_path):
    cfg = load_settings([f"--out_dir={tmp_path}/run"])
    for _ in range(2):
        where = claim_folder(cfg)
        write_run_config(where, replace(cfg, out_dir=where), torch.device("cpu"))
    assert where == f"{tmp_path}/run-2"
    assert load_settings([f"{where}/config.json"]).out_dir == where


@pytest.mark.parametrize("text", [
    "{", "[1, 2]", "{}", '{"settings": {"bata": 1}, "source": null}', '"text"'])
def test_a_json_file_that_is_no_config_is_refused(write, text):
    path = write(text, "c.json")
    assert path in refusal(path)


def test_config_json_is_written_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    write_run_config(str(tmp_path), load_settings([]), torch.device("cpu"))
    assert json.loads((tmp_path / "config.json").read_text())["git"] is None


# ------------------------------------------------------------------------------------------------
# the words of speed, and the settings that they were in older runs

def without(*words):
    return tuple(word for word in Settings.speed if word not in words)


def test_every_word_of_speed_is_on_unless_it_is_left_out():
    assert load_settings([]).speed == Settings.speed == without()
    for word in Settings.speed:
        assert load_settings([f"--speed={without(word)}"]).speed == without(word)


def test_a_wrong_word_of_speed_is_named_with_the_right_ones():
    message = refusal("--speed=('heads',)")
    assert "'heads'" in message and all(repr(word) in message for word in Settings.speed)


@pytest.mark.parametrize("name, word", MERGED.items())
@pytest.mark.parametrize("value", (True, False))
def test_a_setting_that_became_a_word_of_speed_is_refused_with_the_word(name, word, value, write):
    for source in (f"--{name}={value}", write(f"{name} = {value}")):
        message = refusal(source)
        assert source in message and name in message, message
        assert "speed" in message and f"leave {word!r} out" in message, message
        assert all(repr(other) in message for other in Settings.speed), message


def old_config_json(folder, **settings):
    """config.json as a run wrote it when the words of speed were settings of their own."""
    new = {name: value for name, value in Settings().public().items() if name != "speed"}
    path = folder / "config.json"
    path.write_text(json.dumps(dict(settings=new | settings, source=None)))
    return str(path)


@pytest.mark.parametrize("name, word", MERGED.items())
def test_an_older_config_json_means_what_it_meant(name, word, tmp_path):
    on = dict.fromkeys(MERGED, True)
    for settings, flags, expected in (
            (on, [], Settings.speed), (on | {name: False}, [], without(word)),
            (dict.fromkeys(MERGED, False), [], ("attention",)),
            (on, [f"--speed={without(word)}"], without(word))):
        found = load_settings([old_config_json(tmp_path, **settings), *flags]).speed
        assert found == expected, (
            f"a config.json with {settings} and the flags {flags} gave speed = {found} in place of "
            f"{expected}")


def test_config_json_of_a_real_older_run_still_means_what_it_meant():
    path = os.path.join(os.path.dirname(__file__), "config_of_an_older_run.json")
    with open(path) as f:
        older = json.load(f)["settings"]
    found = load_settings([path])
    assert found.speed == ("attention", "graphs", "retire"), "sort and head were off in that run"
    for name in older.keys() - MERGED.keys():
        value = getattr(found, name)
        value = list(value) if isinstance(value, tuple) else value
        assert value == older[name], f"{name} was {older[name]!r} and is read as {value!r}"


# ------------------------------------------------------------------------------------------------
# importing

IMPORT_ALL = """
import importlib, random, signal, sys
import numpy, torch
def state():
    return (torch.get_rng_state().tolist(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.get_default_dtype(), random.getstate(), str(numpy.random.get_state()),
            signal.getsignal(signal.SIGINT), sys.argv)
before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
assert state() == before
"""


def test_importing_has_no_side_effect(tmp_path):
    names = set()
    for folder in ("", "config", "data", "hub", "judge", "run"):
        for path in glob.glob(os.path.join(ROOT, folder, "*.py")):
            name = os.path.relpath(path, ROOT)[:-3].replace(os.sep, ".")
            names.add(name.removesuffix(".__init__"))
    assert {"grpo", "model", "judge.train", "config.toxicity", "run.loop", "hub.fetch"} <= names
    env = dict(os.environ, PYTHONPATH=ROOT, PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *sorted(names)], cwd=tmp_path, env=env,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not os.listdir(tmp_path)


@pytest.mark.parametrize("flags, part", [
    (["--tracin_val_size=16"], "tracin_val_prompts"),
    (["--tracin_val_select=best"], "tracin_val_prompts"),
    (["--tracin_val_prompts=4", "--tracin_val_size=1"], "at least 2"),
    (["--tracin=self", "--tracin_val_prompts=4", "--tracin_leave_one_out=True"], "held-out"),
    (["--tracin=reward", "--mini_batch_size=128", "--tracin_leave_one_out=True"],
     "mini_batch_size"),
    (["--use_bias_correction_kl=True", "--kl_in=reward"], "use_bias_correction_kl")])
def test_settings_that_would_do_nothing_are_refused(flags, part):
    with pytest.raises(BadInput, match=part):
        load_settings(flags)
