"""--debug_step: an iteration taken apart. Its numbers are those of the run."""
import math
import re

import pytest

import grpo
from rollout import completion_logprobs
from worlds import read_rows, skip_without

NO_JUDGE = ("--judge=None", "--eval_judge=None")


@pytest.fixture
def taken_apart(run_grpo, tmp_path):
    """taken_apart(flags): what is printed. Nothing is written."""
    def start(*flags):
        files = sorted(tmp_path.rglob("*"))
        out = run_grpo(tmp_path / "none", *flags, "--debug_step=True")
        assert sorted(tmp_path.rglob("*")) == files, "a command that only looks has written"
        return out

    return start


def part_of(out, title):
    """The lines of a phase."""
    return out.split(f". {title}", 1)[1].split("\n--- ", 1)[0]


def numbers(text):
    return [float(x) for x in re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?|nan", text)]


def test_the_first_iteration_and_the_evaluations_around_it_are_those_of_the_run(
        run_grpo, taken_apart, tmp_path):
    flags = ["--beta=0.1", "--max_iters=1", "--max_grad_norm=0", "--learning_rate=1e-3",
             "--mini_batch_size=4", "--num_iterations=2"]
    out = taken_apart(*flags)
    run_grpo(f"{tmp_path}/run", *flags)
    m, = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert f" {m['loss']:.6f}" in part_of(out, "loss")
    samples = read_rows(tmp_path / "run" / "samples.jsonl")
    scored = [row for row in samples if row["reward"] is not None]
    best = max(scored, key=lambda row: row["reward"])
    shown = numbers(part_of(out, "rollout"))
    assert round(best["reward"], 4) in shown and round(best["advantage"], 4) in shown
    before, after = read_rows(tmp_path / "run" / "eval.jsonl")
    for title, row in (("evaluation before", before), ("evaluation after", after)):
        text = part_of(out, title)
        for name in ("rewards/judge", "perplexity", "distinct_2"):
            assert re.search(rf"^  {name} +{row[name]:.4f}\b", text, re.M), f"{title}: {name}"
    change = after["perplexity"] - before["perplexity"]
    assert f"{change:+.4f}" in part_of(out, "evaluation after")


def test_the_step_after_a_checkpoint_is_that_of_the_run(run_grpo, taken_apart, tmp_path):
    """There the KL is not 0, so its share of loss and gradient says something."""
    flags = ["--beta=0.5", "--learning_rate=1e-2"]
    run_grpo(f"{tmp_path}/run", *flags, "--max_iters=2")
    out = taken_apart(f"{tmp_path}/run")
    loss = part_of(out, "loss")
    run_grpo(f"{tmp_path}/run", *flags, "--max_iters=3", "--resume=True")
    m = read_rows(tmp_path / "run" / "metrics.jsonl")[2]
    assert f" {m['loss']:.6f}" in loss, "it is not the third iteration"
    assert m["kl_grad_share"] > 0.01
    assert f" {m['kl_grad_share']:.3f} " in loss
    before, after = re.search(r"KL.*?: (\S+) -> (\S+)", part_of(out, "moved")).groups()
    assert float(before) == pytest.approx(m["kl"], abs=1e-4) and before != after


@pytest.mark.parametrize("flags", [
    ["--scale_rewards=batch"], ["--scale_rewards=group"], ["--scale_rewards=none"],
    ["--kl_in=reward", "--beta=0.5", "--kl_estimator=k1"]], ids=["batch", "group", "none", "kl"])
def test_rewards_and_divisor_give_the_advantages(flags, run_grpo, taken_apart, tmp_path):
    """Of the step after a checkpoint where the KL is taken off the reward, which is 0 before."""
    if "--kl_in=reward" in flags:
        run_grpo(f"{tmp_path}/run", *flags, "--max_iters=1", "--learning_rate=1e-2")
        flags = [f"{tmp_path}/run"]
    groups = part_of(taken_apart(*flags), "advantages").split("  group ")[1:]
    assert len(groups) == 4
    for group in groups:
        head, rewards, advantages = group.rstrip().split("\n")[:3]
        mean, divisor = numbers(head)
        expected = [0.0 if math.isnan(r) else (r - mean) / divisor for r in numbers(rewards)]
        # all of them are printed to four digits
        assert numbers(advantages) == pytest.approx(expected, abs=5.1e-5 + 2e-4 / divisor)


def tables(text):
    """The tables of tokens in a phase: of each completion a list of {column: text}."""
    found = []
    for block in text.split("    token ")[1:]:
        title, *lines = block.splitlines()
        names = title.split()                                   # loss, then of numbers
        cells = [re.search(r" (yes|no) +-?\d.*", line) for line in lines]
        found.append([dict(zip(names, cell[0].split())) for cell in cells if cell])
    return found


def column(table, name):
    return [float(row[name]) for row in table]


def test_tokens_have_the_log_probs_of_sampler_trainer_and_reference(taken_apart):
    """Which are the same model before the update. After it the trainer alone is another."""
    out = taken_apart("--beta=0.1", "--temperature=0.7", "--learning_rate=1e-3",
                      "--scale_rewards=none")
    before = tables(part_of(out, "rollout"))
    after = tables(part_of(out, "moved"))
    totals = re.findall(r"log-prob (\S+), of the reference (\S+)$", out, re.M)[:2]
    assert len(before) == len(after) == len(totals) == 2, "the best and the worst completion"
    for old, new, sums, sign in zip(before, after, totals, (-1, 1)):
        assert {row["loss"] for row in old} == {"yes"}
        sampler = column(old, "sampler")
        assert [sum(sampler)] * 2 == pytest.approx([float(x) for x in sums], abs=1e-2)
        assert column(old, "trainer") == pytest.approx(sampler, 1e-3, 1e-5)
        assert column(old, "reference") == pytest.approx(sampler, 1e-3, 1e-5)
        assert all(sign * x > 0 for x in column(old, "gradient")), "the step goes the wrong way"
        assert column(new, "sampler") == sampler
        assert column(new, "reference") == column(old, "reference"), "the reference has moved"
        assert column(new, "trainer") != pytest.approx(sampler, 1e-3), "the trainer has not moved"


def test_faults_can_be_seen_in_the_columns(taken_apart, monkeypatch):
    """A trainer that leaves the temperature out; a reference that learns, too."""
    with monkeypatch.context() as patch:
        patch.setattr("loss.completion_logprobs",
                      lambda model, rollout, temperature, *more: completion_logprobs(
                          model, rollout, 1.0, *more))
        patch.setattr("run.meter.check_ratio", lambda *_: None)
        out = taken_apart("--temperature=0.5")
    best = tables(part_of(out, "rollout"))[0]
    assert column(best, "trainer") != pytest.approx(column(best, "sampler"), abs=0.01)

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "reference_logprobs", lambda setup, rollout, cfg: completion_logprobs(
            setup.policy, rollout, cfg.temperature).detach())
        out = taken_apart("--beta=0.1", "--learning_rate=1e-3")
    best = tables(part_of(out, "moved"))[0]
    assert column(best, "reference") == column(best, "trainer")


def test_gradient_norms_before_and_after_clipping(taken_apart):
    text = part_of(taken_apart("--max_grad_norm=0.01"), "gradient norms")
    *layers, total = text.strip().split("\n")[1:]
    before, after = zip(*(numbers(line)[-2:] for line in layers))
    norm, clipped, _ = numbers(total)
    assert clipped == pytest.approx(0.01) and norm > 0.01
    assert math.hypot(*before) == pytest.approx(norm, 1e-2)
    assert math.hypot(*after) == pytest.approx(clipped, 1e-2)


NONE_ARE_EQUAL = """
def reward(completions):
    return [sum(ord(c) * 7 ** i for i, c in enumerate(text)) % 10007 for text in completions]
"""


def test_what_the_step_moved(taken_apart, tmp_path):
    """Uphill: of two completions the better one gets likelier, beside the other."""
    (tmp_path / "rule.py").write_text(NONE_ARE_EQUAL)
    moved = part_of(taken_apart(tmp_path / "rule.py", *NO_JUDGE, "--num_prompts=1", "--beta=0.1",
                                "--num_generations=2", "--learning_rate=1e-3"), "moved")
    pairs = re.findall(r"log-prob (\S+) -> (\S+)", moved)
    (best, better), (worst, worse) = [[float(x) for x in pair] for pair in pairs]
    assert better - best > worse - worst, moved
    assert numbers(moved.split("std ")[1])[0] > 1e-3, "the ratio did not move"
    still = part_of(taken_apart("--learning_rate=1e-30"), "moved")
    assert "  0 of " in still


ANSWERED = """
def environment(prompts, transcripts):
    return [" of course" if "of course" not in text else None for text in transcripts]


def reward(completions):
    return [float(len(text)) for text in completions]
"""


def test_environment_tokens_are_printed_as_such(taken_apart, tmp_path):
    skip_without("environment")
    (tmp_path / "answers.py").write_text(ANSWERED)
    out = taken_apart(tmp_path / "answers.py", *NO_JUDGE, "--max_completion_length=16",
                      "--stop_strings=(' ',)")      # most completions have one, so are answered
    lines = re.findall(r"^    (?:' of'|' course'|'course') .*", out, re.M)
    assert any("environment" in line for line in lines), out
    assert all(" no " in line for line in lines if "environment" in line), "it carries loss"


SOME_ARE_EQUAL = """
def reward(prompts, completions):
    return [0.5 if prompt == prompts[0] else sum(map(ord, text)) % 101 / 101
            for prompt, text in zip(prompts, completions)]
"""
ALL_ARE_EQUAL = "def reward(completions): return [0] * len(completions)"


@pytest.mark.parametrize("rule, shown", [(SOME_ARE_EQUAL, 2), (ALL_ARE_EQUAL, 0)])
def test_influence_is_taken_apart_and_rows_without_it_neither_help_nor_harm(
        rule, shown, taken_apart, tmp_path):
    (tmp_path / "rule.py").write_text(rule)
    out = taken_apart(tmp_path / "rule.py", *NO_JUDGE, "--tracin=reward",
                      "--zero_std_groups=drop")
    found = [float(x) for x in re.findall(r"most \((\S+)\)", out)]
    assert len(found) == shown, "rows of no step have no influence"
    assert found == sorted(found, reverse=True) and not math.isnan(sum(found)), out


INFLUENCES = {
    "self": ["--tracin=self"],
    "leave one out": [
        "--tracin=advantage", "--tracin_leave_one_out=True", "--tracin_adam=True", "--top_k=20",
        "--zero_std_groups=drop", "--temperature=0.8"],
    "held out": [
        "--tracin=reward", "--tracin_val_prompts=3", "--tracin_target_ema=0.8", "--beta=0.1",
        "--entropy_coef=0.01"]}


@pytest.mark.parametrize("name", INFLUENCES)
def test_influence_is_the_runs_and_its_words_add_up(name, run_grpo, taken_apart, tmp_path):
    """Of the iteration after a checkpoint, and taking it apart changes none of the numbers."""
    skip_without("explain")
    (tmp_path / "rule.py").write_text(NONE_ARE_EQUAL)
    run, flags = f"{tmp_path}/run", [tmp_path / "rule.py", *NO_JUDGE, *INFLUENCES[name]]
    run_grpo(run, *flags, "--max_iters=2")
    text = part_of(taken_apart(run, *flags), "influence")
    run_grpo(run, *flags, "--max_iters=3", "--resume=True")
    written = [row["influence"] for row in read_rows(f"{run}/samples.jsonl")
               if row["iteration"] == 3 and row["influence"] is not None]
    shown = [float(x) for x in re.findall(r"most \((\S+)\)", text)]
    assert shown == pytest.approx([max(written), min(written)], rel=1e-2), "of another step"
    for influence, table in zip(shown, tables(text), strict=True):
        words = column(table, "influence")
        assert len(words) > 1
        size = sum(map(abs, words))
        assert sum(words) == pytest.approx(influence, rel=1e-2, abs=1e-3 * size)
