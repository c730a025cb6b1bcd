"""
What the notes ask to see, so that no later change takes it away.

The project began with five diaries of people who lost days to silent mistakes in GRPO:
    000     influence: which numbers show that it works
    001     influence: what a target must be
    002     a loss of 0.0000, and minutes for an iteration
    003     one step of GRPO taken apart, in ten phases
    004     ratio, environment, reference and values: what was silently wrong
Each was lost once, without anybody's noticing. Numbers are checked by hand elsewhere; here it is
asked that they are there, that the settings are, and that failures of the notes, provoked in runs,
are named.
"""
import re

import pytest
import torch

from common.files import ROOT
from rollout import Rollout
from worlds import load_settings, read_rows, skip_without

# ------------------------------------------------------------------------------------------------
# numbers, lines and settings

# note: names in metrics.jsonl
LOGGED = {
    "000, which rollouts": """
        tracin/positive_ratio tracin/negative_ratio tracin/zero_ratio tracin/mean_ip tracin/std_ip
        tracin/min_ip tracin/max_ip tracin/fallback tracin/selected_ratio tracin/empty_steps""",
    "000, the target": """
        tracin/target_advantage_min tracin/target_advantage_max tracin/target_loss
        tracin/target_loss_min tracin/target_loss_max tracin/target_rows tracin/target_grad_norm
        tracin/target_grad_norm/wte.weight tracin/target_grad_norm/wpe.weight tracin/target_cosine
        num_completion_tokens num_steps""",
    "001": "tracin/target_contrast tracin/self_share",
    "002": """
        kl kl_loss reward reward_std reward_min reward_max frac_reward_zero_std
        identical_completions logp entropy""",
    "003": "advantage_std advantage_min advantage_max grad_norm kl_grad_share",
    "004": """
        ratio ratio_std ratio_min ratio_max forced ref_tensors_differing
        sampling/sampling_logp_difference/mean""",
    "the lines below": """
        loss policy_loss step_time clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean
        completions/clipped_ratio completions/mean_length completions/mean_terminated_length
        rewards/judge/mean rewards/judge/std"""}
OF_A_CRITIC = """
    val/mean val/std returns/mean val/grad_norm critic_loss val/var_explained"""
LINES = ("iter 1/2: ", "[Micro 0] 1.", "[Micro 0] 2.", "[Micro 0] 3.", "[Micro 0] 4.", "5.",
         "reference synced")
# note: settings that it asks for
SETTINGS = {
    "000, its target": """
        tracin=reward tracin_select=positive tracin_val_prompts=16 tracin_val_size=64
        tracin_val_select=worst""",
    "000, other targets": "tracin=self tracin_val_prompts=2 tracin_val_select=balanced",
    "000, beside plain GRPO": "tracin=reward tracin_select=all",
    "001": "tracin=contrastive tracin_val_prompts=0",
    "002": "compile=False num_prompts=1 micro_batch_size=4",
    "003": """
        eval_temperature=0.8 top_p=0.9 temperature=0.5 scale_rewards=batch loss_type=dr_grpo
        kl_estimator=k1 beta=0.1""",
    "004": "ref_model_sync_steps=100 beta=0.1 gae_gamma=0.99 gae_lambda=0.95"}


@pytest.fixture(scope="module")
def run(run_grpo, tmp_path_factory):
    """What a run prints, and its metrics: with influence on held-out rollouts, a KL and a reference
    that is copied."""
    folder = tmp_path_factory.mktemp("influence") / "run"
    out = run_grpo(folder, "--tracin=reward", "--tracin_val_prompts=2", "--beta=0.1",
                   "--max_iters=2", "--ref_model_sync_steps=1", "--ref_model_mixup_alpha=1",
                   "--eval_interval=1")
    return out, read_rows(folder / "metrics.jsonl")


@pytest.mark.parametrize("note", LOGGED)
def test_numbers_are_logged_and_explained(note, run):
    names = LOGGED[note].split()
    for m in run[1]:
        assert m.keys() >= set(names), f"metrics.jsonl lacks {set(names) - m.keys()}"
    with open(f"{ROOT}/docs/running.md", encoding="utf-8") as f:
        page = f.read()
    for name in names:
        family, _, last = name.rpartition("/")
        short = re.escape("target_grad_norm/NAME" if family.count("/") else last)
        assert re.search(rf"`([\w/]*/)?{short}`", page), f"docs/running.md does not explain {name}"


def test_the_values_of_a_critic_are_logged(run_grpo, tmp_path):
    """And where they do not move, it is said."""
    skip_without("critic")
    out = run_grpo(tmp_path / "run", "--critic=True", "--value_coef=0")
    names = set(OF_A_CRITIC.split())
    assert all(m.keys() >= names for m in read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert re.search("WARNING: .*value_coef", out), "nothing is said of values that do not move"


@pytest.mark.parametrize("start", LINES)
def test_each_part_of_an_iteration_has_its_line(start, run):
    assert f"\n{start}" in run[0]


@pytest.mark.parametrize("note", SETTINGS)
def test_a_setting_is_there(note):
    load_settings([f"--{flag}" for flag in SETTINGS[note].split()])


# phase of --debug_step, by its title: what it shows, whatever its words
PHASES = {
    "set-up": [r"policy.*float32.*cpu", "reference.*frozen", "num_generations 4.*beta 0.5"],
    "evaluation before": [r"rewards/judge +-?\d"],
    "rollout": [r"best.*row \d", r"worst.*row \d", "reference"],
    "rewards": [r"judge: mean -?\d"],
    "advantages": [r"group 0: mean -?\d.*divisor.*\n +rewards .*\n +adv"],
    "loss": [r"gradient -?\d.*KL -?\d.*= loss -?\d", r"KL.*gradient is \d", "ratio.*std.*min.*max"],
    "gradient norms": [r"wte.weight +\d", r"all +\d.*max_grad_norm"],
    "moved": ["tensors changed", r"ratio.*\n.*KL.* -> \d", r"best.*log-prob -\S+ -> -"],
    "evaluation after": [r"rewards/judge +-?\d\S+ +[+-]\d"],
    "red flags": [r"\w"]}


@pytest.fixture(scope="module")
def taken_apart(run_grpo, tmp_path_factory):
    """What --debug_step prints of the iteration after a checkpoint."""
    skip_without("step")
    run = tmp_path_factory.mktemp("step") / "run"
    run_grpo(run, "--beta=0.5", "--max_iters=1")
    return run_grpo(run, run, "--debug_step=True")


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_is_taken_apart(phase, taken_apart):
    found = re.search(rf"^--- \d+\. {phase}(.*?)(?=^---|\Z)", taken_apart, re.M | re.S)
    assert found, f"there is no phase {phase!r}:\n{taken_apart}"
    for line in PHASES[phase]:
        assert re.search(line, found[1]), f"{phase} lacks {line}:\n{found[1]}"


# ------------------------------------------------------------------------------------------------
# failures

RANDOM = """
import random

def reward(completions):
    return [random.random() for _ in completions]
"""
CONSTANT = "def reward(completions): return [0.5 for _ in completions]"
BY_PROMPT = "def reward(prompts, completions): return [float(len(p)) for p in prompts]"
ONE_OF_TWO = """
reward_funcs = ("length", "flat")

def length(completions):
    return [float(len(text)) for text in completions]

def flat(completions):
    return [1.0 for _ in completions]
"""
ROUNDING = "def reward(completions): return [1e-6 * len(text) for text in completions]"
LETTERS = "def reward(completions): return [float(text.count('e')) for text in completions]"
RELATIVE = """
def reward(completions):
    counts = [text.count("e") for text in completions]
    return [count - sum(counts) / len(counts) for count in counts]
"""
FALLING = """
_calls = []

def reward(completions):
    _calls.append(1)
    return [len(text) - 30.0 * len(_calls) for text in completions]
"""
HELD_OUT = ("--tracin=reward", "--tracin_val_prompts=4", "--tracin_val_size=4")
# the failure of a note: its config ("": the judge), the flags of the run, and the thing or the
# remedy that each line must name
FAILURES = {
    "002, 003: the policy is certain of one answer": (
        RANDOM, ["--temperature=1e-3"], ["completions.*temperature", "log-probs.*temperature"]),
    "000, 002: all rewards are equal": (CONSTANT, ["--tracin=reward"], ["0.5", "no rollout"]),
    "002: all advantages are near zero": (BY_PROMPT, [], [r"advantages.*\[\d"]),
    "002: one reward of two never varies": (ONE_OF_TWO, [], ["'flat'"]),
    "002: the spread of rewards is rounding": (ROUNDING, [], ["rounding"]),
    "002: no token is learned from": (
        LETTERS, ["--mask_truncated_completions=True", "--max_completion_length=1"],
        ["mask_truncated_completions"]),
    "002: a loss of 0.0000 is right": (LETTERS, ["--loss_type=grpo"], ["0.0000"]),
    "003: the KL rules": (
        RANDOM, ["--beta=1e4", "--learning_rate=1e-2", "--eval_interval=1"], ["KL.*lower beta"]),
    "003: the KL holds nothing": (
        LETTERS, ["--learning_rate=0.1", "--beta=1e-6"], ["KL.*raise beta"]),
    "003: the held-out reward fell": (FALLING, [], ["held-out reward"]),
    "003: the entropy has collapsed": (
        RELATIVE, ["--learning_rate=0.03", "--max_iters=14"], ["entropy"]),
    "003: the text has collapsed": (
        LETTERS, ["--learning_rate=0.03", "--max_iters=8"], ["distinct_2"]),
    "001: a target of the best": (
        "", [*HELD_OUT, "--tracin_val_select=best"], ["tracin_val_select"]),
    "000: a target that is noise": (
        RANDOM, ["--tracin=reward", "--num_prompts=2"], ["num_prompts"])}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_named(failure, run_grpo, tmp_path):
    config, flags, names = FAILURES[failure]
    if config:
        config += "\njudge = eval_judge = None\n"
    path = tmp_path / "failure.py"
    path.write_text(config or "max_iters = 2\n")
    out = run_grpo(tmp_path / "run", path, *flags)
    said = [line for line in out.splitlines() if line.startswith(("WARNING: ", "note: "))]
    for name in names:
        assert any(re.search(name, line) for line in said), (
            f"nothing names {name}, where {failure.partition(': ')[2]}: {said}")


def test_a_sync_that_does_nothing_is_named(run_grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Parameter, "lerp_", lambda self, *more: self, raising=False)
    out = run_grpo(tmp_path / "run", "--beta=0.1", "--ref_model_sync_steps=1", "--max_iters=2")
    assert re.search("WARNING: .*sync", out)


def test_a_rollout_without_log_probs_is_refused():
    with pytest.raises(TypeError, match="logp"):
        Rollout(tokens=None, attention_mask=None)
