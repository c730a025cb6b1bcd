"""Settings: names, types, values, files, runs. Each mistake gets one line that names it."""
import glob
import json
import re
import runpy
import sys

import pytest

from common.files import ROOT
from common.kinds import Mark
from common.variants import variants_of
from run.settings import ELSEWHERE, PARTS, load_settings
from worlds import assert_refused, command, refusal

NAMES = list(PARTS)
NUMBERS = [name for name, parts in PARTS.items() if int in parts or float in parts]
CHOICES = {name: [x for x in parts if type(x) is str] for name, parts in PARTS.items()
           if any(type(x) is str for x in parts)}


@pytest.fixture
def write(tmp_path):
    """write("beta = 1") -> path of a config file that holds it."""
    def to(text, name="a.py"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to


def refuses(names, *argv):
    assert_refused(names, load_settings, [str(a) for a in argv])


def refuses_each(table):
    """Each line of a table: flags | names in the refusal, if not the setting of the first flag."""
    for line in table.strip().splitlines():
        flags, *names = line.split(" | ")
        flags = flags.split(" ")
        refuses(names or flags[0].lstrip("-").split("=")[0], *flags)


# ------------------------------------------------------------------------------------------------
# flags as people type them

def test_every_setting_can_be_given_as_a_flag():
    for name in NAMES:
        value = getattr(load_settings([]), name)
        assert type(value) in PARTS[name] or value in CHOICES.get(name, ()), name
        if type(value) is bool:
            value = not value
        assert getattr(load_settings([f"--{name}={value}"]), name) == value


FLAGS = [
    ("--epsilon=1e-3", 1e-3), ("--beta=1", 1.0), ("--reward_weights=[-0.5]", (-0.5,)),
    ("--reward_funcs=judge", ("judge",)), ("--prompt_words=[2, 3]", (2, 3)),
    ("--out_dir=a=b", "a=b"), ("--out_dir=7", "7"), ("--comments=None", None),
    ("--policy='a.pt'", "a.pt"),
    ("--mask_truncated_completions", True), ("--log_micro=FALSE", False)]


def test_a_flag_has_the_type_of_its_setting_and_the_last_one_counts(write):
    for flag, expected in FLAGS:
        name = flag.removeprefix("--").split("=")[0]
        found = getattr(load_settings([flag]), name)
        assert found == expected and type(found) is type(expected), flag
    cfg = load_settings(["--resume", write("seed = 7\nbeta = 1.0"), "--beta=0.1", "--beta=0.2"])
    assert (cfg.resume, cfg.seed, cfg.beta) == (True, 7, 0.2)


def test_what_is_typed_wrongly_is_one_line_that_names_it():
    refuses_each("""
--bata=1 | bata | beta
--beta 0.1 | --name=value
-beta=1
nowhere.py | nowhere.py
--max_iters=1.5
--seed=True
--beta=high
--beta=1e400
--log_micro=None
--out_dir=
""")


def test_settings_that_do_not_go_together_are_refused():
    refuses_each("""
--num_generations=1
--num_prompts=6 --num_generations=4 --mini_batch_size=7 | mini_batch_size | num_generations
--reward_weights=(1,2)
--judge=None
--reward_funcs=nobody | reward_funcs | nobody
--tracin_val_reward=judge | tracin_val_reward | tracin_val_prompts
--tracin=target
--tracin_select=weigh
""")


# a value just out of its range for each kind of range, and for each setting of a narrow one
OUT_OF_RANGE = """
num_prompts=0 num_generations=0 max_completion_length=0 micro_batch_size=0 num_iterations=0
max_resamples=0 save_interval=0 num_eval_prompts=0 num_eval_generations=0
max_iters=1000000
learning_rate=0.0 adam_eps=0.0 top_p=0.0 top_entropy_quantile=0.0
temperature=0.0 eval_temperature=0.0 sapo_temperature_neg=0.0 sapo_temperature_pos=0.0
top_p=1.1 min_p=1.1 top_entropy_quantile=1.1 ref_model_mixup_alpha=1.1 tracin_fraction=1.1
adam_beta1=1.0 adam_beta2=1.0 tracin_target_ema=1.0
gae_gamma=1.1 gae_lambda=1.1 value_clip=0.0
vocab_size=256 block_size=1 n_layer=0 n_head=0 n_embd=0 pretrain_tokens=0 judge_tokens=0
"""


def test_every_range_is_checked():
    for name in NUMBERS:
        if name != "entropy_coef":      # the one number that may be negative
            refuses(name, f"--{name}=-1")
    assert load_settings(["--entropy_coef=-1"]).entropy_coef == -1
    refuses("entropy_coef", "--entropy_coef=-1e400")
    for flag in OUT_OF_RANGE.split():
        name, value = flag.split("=")
        if name in PARTS:       # its extra may be gone
            refuses((name, value), f"--{flag}")
    for name, choices in CHOICES.items():
        more = variants_of(name) if Mark("variant") in PARTS[name] else ()
        refuses((name, "nonsense", *choices, *more), f"--{name}=nonsense")


def test_the_home_folder_stands_for_a_tilde(monkeypatch):
    """A shell writes it where a word begins, not behind the = of a flag."""
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("out_dir", "comments", "prompts", "eval_prompts", "policy", "judge", "eval_judge"):
        assert getattr(load_settings([f"--{name}=~/a.pt"]), name) == "/home/me/a.pt"


# ------------------------------------------------------------------------------------------------
# config files

CONSTANT = "def reward(prompts, completions):\n    return [{}] * len(completions)\n"


def test_every_config_of_the_project_loads():
    for path in glob.glob(f"{ROOT}/config/[!_]*.py"):
        load_settings([path])


# the text of a config file | what the one line names
FAILING = [
    ("num_generation = 4", "num_generations"), ("beta = float('nan')", "beta"),
    (CONSTANT.replace("reward", "rewrd").format(1), "rewrd")]


def test_a_file_that_fails_is_one_line_that_names_what_fails(write):
    for text, name in FAILING:
        refuses(name, write(text))


def test_files_build_on_each_other_and_functions_are_rewards(write, monkeypatch, tmp_path):
    one = write("beta = 0.1\nseed = 5\n" + CONSTANT.format(1), "base_of_a_test.py")
    two = write("beta = 0.2\n" + CONSTANT.format(2), "two.py")
    cfg = load_settings([one, two, "--seed=9"])
    assert (cfg.beta, cfg.seed, cfg.reward_funcs) == (0.2, 9, ("reward",))
    assert cfg.functions["reward"]([], ["x"]) == [2]
    assert cfg.source == open(one).read() + "\n" + open(two).read()
    assert load_settings([one, "--reward_funcs=judge"]).reward_funcs == ("judge",)
    refuses(("'rewrd'", "'reward'"), one, "--reward_funcs=rewrd")

    # a function with a task of its own would be that, and a reward
    hook = write(CONSTANT.replace("reward", "objective").format(1), "hook.py")
    refuses(("reward_funcs", "'objective'"), hook, "--reward_funcs=objective")

    monkeypatch.syspath_prepend(tmp_path)
    three = write("from base_of_a_test import *\nreward_funcs = ('length', 'reward')\n"
                  + CONSTANT.replace("reward", "length").format(3), "three.py")
    cfg = load_settings([three])
    assert [cfg.functions[name]([], [""]) for name in cfg.reward_funcs] == [[3], [1]]


def test_what_a_config_file_imports_is_no_reward(write):
    text = "from math import sqrt\nfrom random import *\nimport torch\n_n = 0.25\nbeta = sqrt(_n)\n"
    text += "class Slow(torch.optim.SGD): pass\n"
    cfg = load_settings([write(text + CONSTANT.format(1))])
    assert (cfg.beta, list(cfg.functions)) == (0.5, ["reward"])


def test_torchrun_without_its_folder_is_one_line(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setitem(sys.modules, "extras.torchrun", None)
    assert "extras/torchrun" in refusal(runpy.run_path, f"{ROOT}/common/processes.py")


# ------------------------------------------------------------------------------------------------
# a run is a config

def run_of(tmp_path, functions=()):
    """Folder of a run that noted these, with a config.py that nobody may run."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.py").write_text("raise SystemExit('looking at a run ran its code')")
    settings = dict(beta=0.3, seed=4, out_dir="out/elsewhere", prompt_words=[1, 2])
    noted = dict(settings=settings, functions=functions, source="raise SystemExit")
    (folder / "config.json").write_text(json.dumps(noted))
    return folder


def test_a_run_is_a_config(tmp_path):
    folder = run_of(tmp_path)
    for path in (f"{folder}", f"{folder}/"):
        cfg = load_settings([path, "--seed=5"])
        assert (cfg.beta, cfg.seed, cfg.prompt_words) == (0.3, 5, (1, 2))
        assert cfg.out_dir == str(folder), "it would write to another run's folder"
        assert cfg.functions == {}
        assert cfg.source.startswith("raise"), "its text is still the run's"


def test_functions_come_from_a_named_file_alone(write, tmp_path):
    folder = run_of(tmp_path, ["reward"])
    refuses("'reward'", folder)
    mine = write("beta = 0.9\n" + CONSTANT.format(1), "mine.py")
    cfg = load_settings([str(folder), mine])
    assert cfg.beta == 0.3, "the run's settings are what was trained with"
    assert cfg.source == open(mine).read()
    assert cfg.functions["reward"]([], [""]) == [1]


# ------------------------------------------------------------------------------------------------
# help

def test_help_names_every_setting_and_a_bare_command_shows_its_usage(monkeypatch, capsys):
    out = command("grpo.py", "--help=all")
    assert "usage: python grpo.py" in out
    for name in NAMES:
        assert f"\n{name}: " in out, f"{name} is not in the help"
    first = command("grpo.py", "--help")
    listed = [name for name in NAMES if f"\n{name}: " in first]
    assert {"max_iters", "beta", "learning_rate", "tracin", "judge"} <= {*listed}
    assert len(listed) <= 42 and "adam_eps" not in listed, "what is turned first is a screen or two"
    monkeypatch.setattr("sys.argv", ["grpo.py"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(f"{ROOT}/grpo.py", run_name="__main__")
    short = capsys.readouterr().out
    assert "usage: python grpo.py" in short and "\nbeta: " not in short


@pytest.mark.parametrize("flag, means", [
    ("--group_size=4", "num_generations"), ("--max_new_tokens=9", "max_completion_length"),
    ("--batch_size=32", "num_prompts"), ("--gradient_accumulation_steps=4", "micro_batch_size"),
    ("--kl_coef=0.1", "beta"), ("--lr=1e-4", "learning_rate"), ("--bf16", "dtype"),
    ("--num_train_epochs=3", "max_iters"),
    ("--per_device_train_batch_size=8", "micro_batch_size"), ("--clip_eps=0.2", "epsilon"),
    ("--tracin_val_batch_size=64", "tracin_val_size"), ("--next_iteration", "debug_step"),
    ("--loss_type=gspo", "'sequence'"),
    ("--tracin=seqloss-lastadv", "'advantage'"), ("--tracin=seqloss-reward", "'reward'")])
def test_a_name_of_the_notes_or_of_another_trainer_gets_what_means_the_same(flag, means):
    """By spelling they would be num_iterations, value_coef, vocab_size ..."""
    assert means in refusal(load_settings, [flag])


def test_names_from_elsewhere_are_no_settings_and_lead_to_one():
    for name, means in ELSEWHERE.items():
        assert name not in PARTS, f"{name} is a setting"
        assert any(word in PARTS for word in re.findall(r"\w+", means)), means
