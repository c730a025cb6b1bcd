"""A number without a meaning is noise: each number that a run logs is explained by --help=metrics,
and each that is explained there is logged by some run."""
import re

import pytest

from run.meanings import meanings
from worlds import command, read_rows, skip_without

OWN = """
max_turns = 1
reward_funcs = ("judge", "length")

def length(completions):
    return [float(len(text)) for text in completions]

def after(cfg):
    cfg.beta = cfg.beta + 0.1
"""
TOOLS = """
max_turns = 1
prompts = {prompts!r}
tools = {{"add": lambda text: "2"}}
"""
HELD_OUT = ["--tracin=reward", "--tracin_val_prompts=2", "--tracin_target_ema=0.5"]
# what a run must be like, for its numbers to be logged: (config, flags, folder of extras/ that it
# needs)
RUNS = {
    "plain": (OWN, ["--beta=0.1", "--entropy_coef=0.01", "--ref_model_sync_steps=1"],
              "variants"),
    "influence": ("", HELD_OUT, None),
    "influence on itself": ("", ["--tracin=self"], None),
    "cispo": ("", ["--loss_type=cispo", "--epsilon_high=5.0"], "variants"),
    "resampling": ("", ["--zero_std_groups=resample"], "variants"),
    "critic": ("", ["--critic=True"], "critic"),
    "tools": (TOOLS, ["--max_completion_length=16"], "environment")}


@pytest.fixture(scope="module")
def logged(run_grpo, tmp_path_factory):
    """Names in the logs of these runs: (of iterations, of evaluations)."""
    found = {"metrics": set(), "eval": set()}
    for name, (config, flags, extra) in RUNS.items():
        if extra:
            skip_without(extra)
        folder = tmp_path_factory.mktemp("runs")
        (folder / "prompts.txt").write_text("".join(f"add(1) {i} is\n" for i in range(40)))
        (folder / "own.py").write_text(
            config.format(prompts=str(folder / "prompts.txt")) if config is TOOLS else
            config or "max_iters = 1\n")
        run_grpo(folder / "run", folder / "own.py", "--max_iters=2", *flags)
        for log, names in found.items():
            names |= {key for row in read_rows(folder / f"run/{log}.jsonl") for key in row}
    return found["metrics"], found["eval"] - {"iteration", "prompt_rewards", "samples"}


def pattern(name):
    return re.compile(re.escape(name).replace("NAME", r"[^/]+"))


@pytest.mark.parametrize("which, title", [(0, "Metrics"), (1, "Measures")])
def test_each_number_that_is_logged_has_a_meaning_and_each_meaning_a_number(which, title, logged):
    names = logged[which]
    known = [pattern(name) for name in meanings(title)]
    unknown = sorted(name for name in names if not any(p.fullmatch(name) for p in known))
    assert not unknown, f"--help=metrics does not say what these mean: {unknown}"
    unused = [p.pattern for p in known if not any(p.fullmatch(name) for name in names)]
    assert not unused, f"--help=metrics explains what no run logs: {unused}"
    assert all(meanings(title).values()), "a name without a meaning"


def test_help_prints_each_name_and_its_meaning():
    text = " ".join(command("grpo.py", "--help=metrics").split())
    for title in ("Metrics", "Measures"):
        for name, meaning in meanings(title).items():
            assert name in text and meaning in text, name
