"""--debug_step: an iteration taken apart, with the numbers of the run."""
import math
import re

import pytest

from worlds import read_rows, skip_without

PHASES = ["set-up", "evaluation before", "rollout", "rewards", "advantages", "loss",
          "gradient norms", "moved", "evaluation after", "red flags"]


def phases_of(out):
    return re.findall(r"^--- \d+\. (set-up|\w+(?: (?:norms|flags|before|after)\b)?)", out, re.M)


def part_of(out, title):
    """The lines of a phase."""
    return out.split(f". {title}", 1)[1].split("\n--- ", 1)[0]


def numbers(text):
    return [float(x) for x in re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?|nan", text)]


def test_an_iteration_is_taken_apart(run_grpo, tmp_path):
    flags = ["--beta=0.1", "--max_iters=1", "--max_grad_norm=0", "--learning_rate=1e-3",
             "--mini_batch_size=4", "--num_iterations=2"]
    out = run_grpo(f"{tmp_path}/none", "--debug_step=True", *flags)
    assert phases_of(out) == PHASES, out
    assert not (tmp_path / "none").exists(), "nothing is written"

    run_grpo(f"{tmp_path}/run", *flags)      # the same iteration
    m, = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert f"= loss {m['loss']:.6f}" in out
    samples = read_rows(tmp_path / "run" / "samples.jsonl")
    scored = [row for row in samples if row["reward"] is not None]
    best = max(scored, key=lambda row: row["reward"])
    assert f"reward {best['reward']:.4f}, advantage {best['advantage']:+.4f}" in out

    # the evaluations around it are those of the run
    before, after = read_rows(tmp_path / "run" / "eval.jsonl")
    for title, row in (("evaluation before", before), ("evaluation after", after)):
        text = part_of(out, title)
        for name in ("rewards/judge", "perplexity", "distinct_2"):
            assert re.search(rf"^  {name} +{row[name]:.4f}\b", text, re.M), f"{title}: {name}"
    change = after["perplexity"] - before["perplexity"]
    assert f"{change:+.4f}" in part_of(out, "evaluation after")


def test_the_step_after_a_checkpoint_is_that_of_the_run(run_grpo, tmp_path):
    """There the KL is not 0, so its share of loss and gradient says something."""
    flags = ["--beta=0.5", "--learning_rate=1e-2"]
    run_grpo(f"{tmp_path}/run", *flags, "--max_iters=2")
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    out = run_grpo(f"{tmp_path}/run", f"{tmp_path}/run", "--debug_step=True")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == files
    run_grpo(f"{tmp_path}/run", *flags, "--max_iters=3", "--resume=True")
    m = read_rows(tmp_path / "run" / "metrics.jsonl")[2]
    assert f"= loss {m['loss']:.6f}" in out, "it is not the third iteration"
    assert m["kl_grad_share"] > 0.01
    assert f"gradient is {m['kl_grad_share']:.3f} of the policy's" in out
    first, second = re.search(r"these tokens \(k3\): (\S+) -> (\S+)", out).groups()
    assert float(first) == pytest.approx(m["kl"], abs=1e-4) and first != second


@pytest.mark.parametrize("flags", [
    ["--scale_rewards=batch"], ["--scale_rewards=group"], ["--scale_rewards=none"],
    ["--scale_rewards=group", "--kl_in=reward", "--beta=0.5", "--kl_estimator=k1"]],
    ids=["batch", "group", "none", "kl"])
def test_rewards_and_divisor_give_the_advantages(flags, run_grpo, tmp_path):
    """Also after a checkpoint, where the KL that is taken off the reward is not 0."""
    run_grpo(f"{tmp_path}/run", *flags, "--max_iters=1", "--learning_rate=1e-2")
    out = run_grpo(f"{tmp_path}/run", f"{tmp_path}/run", "--debug_step=True")
    text = part_of(out, "advantages")
    groups = text.split("  group ")[1:]
    assert len(groups) == 4
    for group in groups:
        head, rewards, advantages = group.rstrip().split("\n")[:3]
        mean, divisor = numbers(head)
        expected = [0.0 if math.isnan(r) else (r - mean) / divisor for r in numbers(rewards)]
        assert numbers(advantages) == pytest.approx(expected, abs=2e-4 / divisor)


def test_rewards_of_its_evaluations_are_those_of_the_run(run_grpo, tmp_path):
    """A function of weight 0 that abstains changes no sum; the iteration is told as in a run."""
    (tmp_path / "two.py").write_text("""
def counted(prompts, completions, iteration):
    return [100.0 * iteration + len(text) for text in completions]

def watched(prompts, completions):
    return [None] * len(completions)

reward_funcs = ("counted", "watched")
reward_weights = (1.0, 0.0)
""")
    flags = [str(tmp_path / "two.py"), "--judge=None", "--eval_judge=None"]
    run_grpo(f"{tmp_path}/run", *flags, "--max_iters=2", "--eval_interval=1")
    out = run_grpo(f"{tmp_path}/none", f"{tmp_path}/run", *flags, "--debug_step=True")
    expected = read_rows(f"{tmp_path}/run/eval.jsonl")[-1]["rewards/counted"]
    reward, = re.findall(r"^  reward +(\S+)", part_of(out, "evaluation before"), re.M)
    assert float(reward) == pytest.approx(expected, abs=1e-3)
    reward, *_ = re.findall(r"^  reward +(\S+)", part_of(out, "evaluation after"), re.M)
    assert 300 < float(reward) < 400


def test_gradient_norms_before_and_after_clipping(run_grpo, tmp_path):
    out = run_grpo(tmp_path, "--debug_step=True", "--max_grad_norm=0.01")
    *layers, total = part_of(out, "gradient norms").strip().split("\n")[1:]
    before, after = zip(*(numbers(line)[-2:] for line in layers))
    norm, clipped, _ = numbers(total)
    assert clipped == pytest.approx(0.01) and norm > 0.01
    assert math.hypot(*before) == pytest.approx(norm, 1e-2)
    assert math.hypot(*after) == pytest.approx(clipped, 1e-2)


def test_what_the_step_moved(run_grpo, tmp_path):
    """Uphill: the best completion gets likelier, the worst less likely."""
    out = run_grpo(tmp_path, "--debug_step=True", "--learning_rate=1e-3", "--beta=0.1")
    moved = part_of(out, "moved")
    pairs = re.findall(r"log-prob (\S+) -> (\S+)", moved)
    (best, better), (worst, worse) = [[float(x) for x in pair] for pair in pairs]
    assert better - best > worse - worst, moved
    assert numbers(moved.split("std ")[1])[0] > 1e-3, "the ratio did not move"
    still = part_of(run_grpo(tmp_path, "--debug_step=True", "--learning_rate=1e-30"), "moved")
    assert "  0 of " in still


def test_influence_is_taken_apart_too(run_grpo, tmp_path):
    out = run_grpo(tmp_path, "--debug_step=True", "--tracin=reward", "--tracin_val_prompts=2")
    assert phases_of(out) == PHASES[:6] + ["influence"] + PHASES[6:]
    assert "helps most" in out
    assert "a weighted sum of the scores" in out, "the printed check is not the one that ran"


FIRST_IS_EQUAL = """
def reward(prompts, completions):
    return [0.5 if prompt == prompts[0] else sum(map(ord, text)) % 101 / 101
            for prompt, text in zip(prompts, completions)]
"""


ALL_ARE_EQUAL = "def reward(completions): return [0] * len(completions)"


@pytest.mark.parametrize("rule", [FIRST_IS_EQUAL, ALL_ARE_EQUAL], ids=["first", "all"])
def test_rows_without_influence_neither_help_nor_harm(rule, run_grpo, tmp_path):
    (tmp_path / "rule.py").write_text(rule)
    out = run_grpo(tmp_path / "run", tmp_path / "rule.py", "--judge=None", "--eval_judge=None",
               "--debug_step=True", "--tracin=reward", "--zero_std_groups=drop")
    found = [float(x) for x in re.findall(r"most \((\S+)\)", out)]
    assert len(found) == (2 if rule == FIRST_IS_EQUAL else 0), "rows of no step have no influence"
    assert found == sorted(found, reverse=True) and not math.isnan(sum(found)), out


def test_a_critic_is_taken_apart_too(run_grpo, tmp_path):
    skip_without("critic")
    out = run_grpo(tmp_path, "--debug_step=True", "--critic=True")
    assert phases_of(out) == PHASES
    assert "of a critic" in part_of(out, "advantages")


ANSWERED = """
def environment(prompts, transcripts):
    return [" of course" if "of course" not in text else None for text in transcripts]


def reward(completions):
    return [float(len(text)) for text in completions]
"""


def test_environment_tokens_are_printed_as_such(run_grpo, tmp_path):
    skip_without("environment")
    (tmp_path / "answers.py").write_text(ANSWERED)
    out = run_grpo(tmp_path / "run", tmp_path / "answers.py", "--judge=None", "--eval_judge=None",
               "--debug_step=True", "--max_completion_length=16")
    assert re.search(r"' of' environment|'course' environment|environment '", out), out
    assert "' of' 0.00" not in out
