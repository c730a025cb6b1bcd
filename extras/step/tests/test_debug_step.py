"""--debug_step: an iteration taken apart, with the numbers of the run."""
import math
import re

import pytest

from worlds import read_rows, skip_without

PHASES = ["rollout", "rewards", "loss", "gradient norms", "red flags"]


def phases_of(out):
    return re.findall(r"^--- \d+\. (\w+(?: (?:norms|flags))?)", out, re.M)


def test_an_iteration_is_taken_apart(grpo, tmp_path):
    flags = ["--beta=0.1", "--max_iters=1", "--max_grad_norm=0", "--learning_rate=1e-3",
             "--mini_batch_size=4", "--num_iterations=2"]
    out = grpo(f"{tmp_path}/none", "--debug_step=True", *flags)
    assert phases_of(out) == PHASES, out
    assert not (tmp_path / "none").exists(), "nothing is written"

    grpo(f"{tmp_path}/run", *flags)      # the same iteration
    m, = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert f"= loss {m['loss']:.6f}" in out
    assert f"  all {m['grad_norm']:.3e} before" in out
    samples = read_rows(tmp_path / "run" / "samples.jsonl")
    scored = [row for row in samples if row["reward"] is not None]
    best = max(scored, key=lambda row: row["reward"])
    assert f"reward {best['reward']:.4f}, advantage {best['advantage']:+.4f}" in out


def test_influence_is_taken_apart_too(grpo, tmp_path):
    out = grpo(tmp_path, "--debug_step=True", "--tracin=reward", "--tracin_val_prompts=2")
    assert phases_of(out) == PHASES[:3] + ["influence"] + PHASES[3:]
    assert "helps most" in out
    assert "a weighted sum of the scores" in out, "the printed check is not the one that ran"


FIRST_IS_EQUAL = """
def reward(prompts, completions):
    return [0.5 if prompt == prompts[0] else sum(map(ord, text)) % 101 / 101
            for prompt, text in zip(prompts, completions)]
"""


ALL_ARE_EQUAL = "def reward(completions): return [0] * len(completions)"


@pytest.mark.parametrize("rule", [FIRST_IS_EQUAL, ALL_ARE_EQUAL], ids=["first", "all"])
def test_rows_without_influence_neither_help_nor_harm(rule, grpo, tmp_path):
    (tmp_path / "rule.py").write_text(rule)
    out = grpo(tmp_path / "run", tmp_path / "rule.py", "--judge=None", "--eval_judge=None",
               "--debug_step=True", "--tracin=reward", "--zero_std_groups=drop")
    found = [float(x) for x in re.findall(r"most \((\S+)\)", out)]
    assert len(found) == (2 if rule == FIRST_IS_EQUAL else 0), "rows of no step have no influence"
    assert found == sorted(found, reverse=True) and not math.isnan(sum(found)), out


def test_a_critic_is_taken_apart_too(grpo, tmp_path):
    skip_without("critic")
    out = grpo(tmp_path, "--debug_step=True", "--critic=True")
    assert phases_of(out) == PHASES
    assert "by token, of a critic" in out
