"""Settings: names, types, values, files. Each mistake gets one line that says what to do."""
import glob
import json
import math
import os
import random
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
from run.checkpoint import write_run_config
from run.folder import claimed_folder
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
    needs_more = name in ("sync_ref_model", "bootstrap_truncated_completions")
    value = not value if type(value) is bool and not needs_more else value
    assert getattr(load_settings([f"--{name}={value}"]), name) == value


def test_underscores_and_modules_are_private(write):
    cfg = load_settings([write("import math\nimport os.path as where\nfrom os import path\n"
                               "_n = 2\nbeta = math.sqrt(_n)")])
    assert cfg.beta == math.sqrt(2)


# ------------------------------------------------------------------------------------------------
# flags

@pytest.mark.parametrize("argv, expected", [
    (["--beta", "0.1"], dict(beta=0.1)), (["--lora_alpha", "1e-3"], dict(lora_alpha=1e-3)),
    (["--reward_weights", "(-1,)"], dict(reward_weights=(-1,))),
    (["--reward_weights=[-0.5]"], dict(reward_weights=(-0.5,))),
    (["--out_dir", "-x"], dict(out_dir="-x")), (["--speed", "head"], dict(speed=("head",))),
    (["--comments", "None", "--beta", "1"], dict(comments=None, beta=1.0)),
    (["--resume"], dict(resume=True)), (["--resume", "--beta", "0.1"], dict(resume=True, beta=0.1)),
    (["--log_micro", "false"], dict(log_micro=False)),
    (["--debug_step", "True"], dict(debug_step=True)),
    (["--resume", "{file}"], dict(resume=True, seed=7)),
    (["--beta", "2", "{file}", "--max_iters", "3"], dict(beta=2.0, seed=7, max_iters=3)),
    (["--beta=0.1", "--beta=0.2"], dict(beta=0.2)),
    (["--compile"], dict(compile=("generate", "judge", "reference", "update")))])
def test_flags_as_people_type_them(argv, expected, write):
    path = write("seed = 7")
    cfg = load_settings([path if arg == "{file}" else arg for arg in argv])
    assert {name: getattr(cfg, name) for name in expected} == expected


@pytest.mark.parametrize("argv, parts", [
    (["--beta"], ["--beta=VALUE"]), (["--beta", "--seed=1"], ["--beta=VALUE"]),
    (["--out_dir", "a.py"], ["--out_dir=a.py"]), (["--resume", "out/x"], ["--resume=out/x"]),
    (["--compile", "update"], ["--compile=update"]), (["--beta", "high"], ["--beta high", "float"]),
    (["--bata", "1"], ["--bata", "'beta'"]), (["--bata"], ["'beta'"]), (["-beta=1"], ["--name"]),
    (["-1"], ["-1", "--name"]), (["--"], ["--name"]), (["--=3"], ["--name"])])
def test_flags_that_could_mean_two_things_are_refused(argv, parts):
    message = refusal(*argv)
    assert all(part in message for part in parts), message


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
@pytest.mark.parametrize("text", ["1e400", "-1e400", "1e39", "nan", "1" + "0" * 400])
def test_a_number_is_finite(write, name, text):
    assert name in refusal(write(f"{name} = float('{text}')" if text[-1] != "0" else
                                 f"{name} = {text}"))
    if text != "nan":
        assert f"{name} = " in refusal(f"--{name}={text}")


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name] is int])
@pytest.mark.parametrize("value", ["2 ** 63", "-2 ** 63", "10 ** 5000"])
def test_a_whole_number_has_64_bits(write, name, value):
    message = refusal(write(f"{name} = {value}"))
    assert f"{name} = " in message and len(message) < 500


@pytest.mark.parametrize("name", ["adam_beta1", "adam_beta2"])
def test_moments_must_forget(name):
    assert f"{name} = 1.0: must be below 1" in refusal(f"--{name}=1")


TEXTS = [name for name in NAMES if str in typing.get_args(TYPES[name]) or TYPES[name] is str]


@pytest.mark.parametrize("name", sorted(set(TEXTS) - CHOICES.keys()))
@pytest.mark.parametrize("text, reason", [
    ("", "empty"), ("a\0b", "NUL"), ("out/\udcff", "UTF-8"), ("out/" + "x" * 300, "300 bytes")])
def test_text_is_what_a_file_can_be_called(name, text, reason):
    message = refusal(f"--{name}={text}")
    assert f"{name} = " in message and reason in message and len(message) < 300


@pytest.mark.parametrize("text", [
    "speed = (__import__('numpy').zeros(3),)", "tracin_layers = (1,)", "lora_layers = (None,)",
    "device = 'meta'",
    "reward_weights = (10 ** 400,)", "prompt_words = (1, 10 ** 400)", "beta = 0.1j",
    "reward_funcs = ('judge', 'judge')", "policy = b'gpt2'",
    "out_dir = __import__('pathlib').Path()"])
def test_odd_values_of_a_file_are_one_line(write, text):
    assert text.split()[0] in refusal(write(text))


def test_a_group_needs_two():
    message = refusal("--num_generations=1")
    assert "num_generations = 1" in message and "at least 2" in message


@pytest.mark.parametrize("size", [7, 48])
def test_mini_batches_must_divide_the_rows(size):
    message = refusal("--num_prompts=6", "--num_generations=4", f"--mini_batch_size={size}")
    assert "6 * 4 = 24" in message and f"mini_batch_size = {size}" in message


@pytest.mark.parametrize("flags", [
    ("--num_prompts=10",), ("--num_prompts=7", "--num_generations=3"), ("--micro_batch_size=7",),
    ("--mini_batch_size=128", "--micro_batch_size=100"), ("--micro_batch_size=1000",),
    ("--num_generations=6", "--decode_batch_size=64")])
def test_batch_sizes_need_no_second_setting(flags):
    load_settings(flags)


def test_a_group_is_decoded_whole():
    message = refusal("--num_generations=4", "--decode_batch_size=3")
    assert "decode_batch_size = 3" in message and "num_generations = 4" in message


@pytest.mark.parametrize("flags, high", [
    (["--epsilon=0.2"], "epsilon = 1.2"), (["--epsilon_high=0.3"], "epsilon_high = 1.3")])
def test_delta_must_exceed_the_clip(flags, high):
    message = refusal("--delta=1.2", *flags)
    assert "delta = 1.2" in message and f"above 1 + {high}" in message
    assert load_settings(["--delta=1.31", *flags]).delta == 1.31


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
    "x = open('/nowhere/at/all')", "exit()", "import sys; sys.exit('bye')", "raise SystemExit(0)",
    "raise BaseException('odd')", "def f():\n    f()\nf()", "beta = " + "(" * 5000, "x = 1\0"])
def test_a_file_that_fails_is_one_line_naming_it(write, text):
    path = write(text)
    assert path in refusal(path)


def test_a_file_that_ends_python_says_so(write):
    assert "exit(3)" in refusal(write("import sys\nsys.exit(3)"))


def test_a_file_in_another_encoding_names_the_line(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes("beta = 0.1\n# größer\n".encode("latin-1"))
    message = refusal(path)
    assert str(path) in message and "line 2" in message and "UTF-8" in message


def test_a_folder_is_no_config(tmp_path):
    (tmp_path / "a.py").mkdir()
    assert "a.py: cannot be read" in refusal(tmp_path / "a.py")


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
    for seed in (1, 2):
        with claimed_folder(replace(cfg, seed=seed)) as (where, _):
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
    found = load_settings([path, "--trust=True"])   # it was not signed then
    assert found.speed == ("attention", "graphs", "retire"), "sort and head were off in that run"
    for name in older.keys() - MERGED.keys():
        value = getattr(found, name)
        value = list(value) if isinstance(value, tuple) else value
        assert value == older[name], f"{name} was {older[name]!r} and is read as {value!r}"


# ------------------------------------------------------------------------------------------------
# anything at all

ODD = ["", "0", "-1", "1e400", "-1e-400", "nan", "inf", "True", "None", "()", "(1,)", "[[]]", "{}",
       "{[]: 1}", "(" * 300, "-" * 300, "9" * 30, "9" * 5000, "2 ** 3", "0x10", "1_0", "1j",
       "b'x'", "'", "a\0b", "\udcff", "\u2028", "x" * 300, "/", "..", "self", "judge", "head",
       "(1, 2)", "(-1, 2)", "(1e400,)", "('judge',)", "('judge', 'judge')", "('', )", "...", "f''",
       "off", "cispo", "sequence", "reward", "12", "0.5", "1.0", "2", "1" + "0" * 400, "lambda: 0"]
OBJECTS = ["object()", "float", "10 ** 5000", "float('nan')", "1e400", "[{}]", "b''", "range(3)",
           "{'a'}", "__import__('torch').zeros(2, 2)", "__import__('numpy').float64(1)",
           "'\\ud800'", "exit", "exit()", "(lambda: 1 / 0)()", "''.x", "None", "()", "0", "-1",
           "'x'", "0.5"]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_typed_is_refused_in_a_line_or_works(seed, write):
    rng = random.Random(seed)
    names = [*NAMES, "resume", "debug_step", "functions", "source", "bata", "", "a b"]
    for _ in range(150):
        argv = []
        for _ in range(rng.randint(1, 3)):
            form = rng.choice(["--{}={}", "--{}={}", "--{} {}", "--{}", "-{}={}", "{}{}"])
            text = form.format(rng.choice(names), rng.choice(ODD))
            argv += text.split(" ", 1)
        if rng.random() < 0.3:
            argv.insert(0, write(f"{rng.choice(names[:-2])} = {rng.choice(OBJECTS)}"))
        try:
            load_settings(argv)
        except BadInput as e:
            assert len(str(e).split("\n")) == 1, f"{argv} is refused in several lines: {e}"


# ------------------------------------------------------------------------------------------------
# help

def test_the_help_holds_every_setting_with_its_meaning(script):
    done = script("grpo.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in [*NAMES, "resume", "debug_step"]:
        assert re.search(rf"^{name}: ", done.stdout, re.M), f"--help does not list {name}"
    assert "# loss\n" in done.stdout and "weight of the KL to the reference" in done.stdout
    assert "functions" not in done.stdout.split("# run\n")[1].split("# evaluation")[1]


@pytest.mark.parametrize("name, command", [
    ("grpo.py", "grpo.py"), ("pretrain.py", "pretrain.py"), ("judge.train", "-m judge.train")])
def test_without_arguments_a_command_says_how_to_call_it(name, command, script):
    done = script(name)
    assert (done.returncode, done.stderr) == (2, "")
    assert f"usage: python {command} " in done.stdout
    assert f"python {command} config/quick_test.py" in done.stdout
    assert f"python {command} --help" in done.stdout


@pytest.mark.parametrize("name, part", [
    ("evaluate.py", "python evaluate.py out/toxicity"), ("tracin.py", "--method=ghost|brute"),
    ("sample.py", "--before=True"), ("plot.py", "--panels="), ("export.py", "--adapter=gpt2"),
    ("bench.py", "python bench.py levers")])
def test_every_command_has_help(name, part, script):
    done = script(name, "--help")
    assert (done.returncode, done.stderr) == (0, "") and part in done.stdout


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
