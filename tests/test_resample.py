"""Dynamic sampling (zero_std_groups = "resample") beside a plain Python of it."""
import os
import re
import statistics
from dataclasses import replace

import pytest
import torch

import grpo as trainer
from common.script import seed_for
from data.prompts import Prompt, draw_prompts
from data.tokenizer import texts_of
from run.metrics import batch_metrics
from worlds import (
    WORDS, letters, nets_of, read_rows, refusal, settings, shaken, untimed_metrics,
    word_gpt)

TEXTS = ("I am", "you are so", "what", "the end of it", "no", "why would you say that", "it is",
         "a b c d", "and then", "o")
PROMPTS = [Prompt(text, WORDS.encode_ordinary(text), {"text": text}) for text in TEXTS]
DULL = TEXTS[::2]       # whatever is said after these has the same reward
G = 4


def some_dull(prompts, completions):
    found = letters(prompts, completions)
    return [.25 if prompt in DULL else x for prompt, x in zip(prompts, found)]


def setup_and_cfg(function=some_dull, **knobs):
    knobs = dict(num_prompts=5, num_generations=G, max_completion_length=8, max_resamples=2,
                 zero_std_groups="resample") | knobs
    cfg = settings(function, **knobs)
    return nets_of(cfg, word_gpt(), PROMPTS, WORDS, shaken(word_gpt(), .02), .05), cfg


def groups_by_hand(setup, cfg, prompts, seed):
    """[(prompt, completion, reward) of each row] of each group."""
    completions = texts_of(setup.tokenizer, trainer.sample_groups(setup, prompts, cfg, seed))
    told = [prompt.text for prompt in prompts for _ in range(G)]
    rows = list(zip(told, completions, cfg.functions["reward"](told, completions)))
    return [rows[i:i + G] for i in range(0, len(rows), G)]


def resampled_by_hand(setup, cfg, it):
    """The groups of iteration `it`, and how many were sampled in each round."""
    first = draw_prompts(setup.prompts, it, cfg.num_prompts, cfg.seed)
    groups = groups_by_hand(setup, cfg, first, seed_for(cfg.seed, "rollout", it))
    sizes = [len(groups)]
    order = draw_prompts(setup.prompts, it, len(PROMPTS), seed_for(cfg.seed, "resample"))
    queue = [p for p in order if p not in first] + [p for p in order if p in first]
    for number in range(cfg.max_resamples):
        kept = [rows for rows in groups if len({row[2] for row in rows}) > 1]
        missing = cfg.num_prompts - len(kept)
        if missing == 0:
            break
        further = queue[:missing]
        queue = queue[missing:] + further
        seed = seed_for(cfg.seed, "resample", it, number)
        groups = kept + groups_by_hand(setup, cfg, further, seed)
        sizes.append(missing)
    return groups, sizes


def differing(groups):
    return [len({row[2] for row in rows}) > 1 for rows in groups]


@pytest.mark.parametrize("it", range(4))
def test_groups_are_those_of_plain_python(it):
    setup, cfg = setup_and_cfg()
    groups, sizes = resampled_by_hand(setup, cfg, it)
    assert len(sizes) > 1 and any(differing(groups)), "this world resamples nothing"
    batch, _ = trainer.sample_iteration(setup, it, cfg)
    prompts, completions, rewards = zip(*sum(groups, []))
    assert tuple(prompt.text for prompt in batch.prompts) == prompts
    assert tuple(batch.completions) == completions, "a row has another row's completion"
    assert batch.rewards.tolist() == pytest.approx(rewards), "a row has another row's reward"
    assert texts_of(setup.tokenizer, batch.rollout) == batch.completions
    for g, rows in enumerate(groups):
        rewards = [row[2] for row in rows]
        mean = statistics.mean(rewards)
        expected = [(x - mean) / (statistics.stdev(rewards) + 1e-4) for x in rewards]
        found = batch.advantages[g * G:(g + 1) * G].tolist()
        assert found == pytest.approx(expected, abs=1e-4), f"advantages of group {g} are wrong"
    steps = list(trainer.optimizer_steps(batch, cfg, 3))
    learned = [g * G + i for g, on in enumerate(differing(groups)) for i in range(G) if on]
    assert steps[0].rows.tolist() == learned, "the step must leave out what is still equal"
    # ends the run if rows of several rounds have another padding or log-prob than the trainer's
    trainer.update(setup, batch, None, cfg, 3, check=True)

    m = batch_metrics(batch, cfg)
    assert m["resample/rounds"] == len(sizes) - 1 <= cfg.max_resamples
    assert m["resample/used"] == pytest.approx(sum(differing(groups)) / sum(sizes))
    assert [groups for groups, *_ in batch.rounds] == sizes


def test_what_is_of_the_batch_is_of_the_last_batch():
    setup, cfg = setup_and_cfg(scale_rewards="batch", top_entropy_quantile=.4, beta=.1)
    batch, _ = trainer.sample_iteration(setup, 1, cfg)
    assert len(batch.rounds) > 1
    found = {name: getattr(batch, name) for name in ("advantages", "policy_mask", "ref_logp")}
    trainer.add_advantages(setup, batch, cfg)
    for name, x in found.items():
        assert torch.equal(x, getattr(batch, name)), f"{name}: of the batch before resampling"


def test_without_equal_groups_nothing_changes():
    setup, cfg = setup_and_cfg(letters)
    batch, _ = trainer.sample_iteration(setup, 0, cfg)
    assert len(batch.rounds) == 1, "groups were sampled that nobody needs"
    plain, _ = trainer.sample_iteration(setup, 0, replace(cfg, zero_std_groups="keep"))
    assert batch.completions == plain.completions
    assert torch.equal(batch.advantages, plain.advantages)
    assert torch.equal(batch.rollout.tokens, plain.rollout.tokens)


def test_all_equal_in_all_rounds_is_no_step(monkeypatch):
    """And no prompt is asked again while others are left."""
    setup, cfg = setup_and_cfg(lambda completions: [.5] * len(completions), max_resamples=3)
    sample_groups = trainer.sample_groups
    asked = []

    def noted(setup, prompts, *more):
        asked.extend(prompt.text for prompt in prompts)
        return sample_groups(setup, prompts, *more)

    monkeypatch.setattr("grpo.sample_groups", noted)
    batch, _ = trainer.sample_iteration(setup, 0, cfg)
    assert [groups for groups, *_ in batch.rounds] == [5] * 4, "not one more round than asked for"
    assert sorted(asked[:10]) == sorted(TEXTS), "a prompt came twice before all had come"
    assert sorted(asked[10:]) == sorted(TEXTS)
    m = trainer.update(setup, batch, None, cfg, 3, check=True) | batch_metrics(batch, cfg)
    assert (m["num_steps"], m["resample/rounds"], m["resample/used"]) == (0, 3, 0)


def test_a_target_of_held_out_prompts_is_not_resampled():
    setup, cfg = setup_and_cfg(tracin="reward", tracin_val_prompts=4)
    _, held_out = trainer.sample_iteration(setup, 0, cfg)
    prompts = draw_prompts(setup.val_prompts, 0, 4, cfg.seed)
    assert held_out.batch.prompts[::G] == prompts and len(held_out.batch.rounds) == 1


RULE = """
def reward(prompts, completions):
    return [0.25 if len(prompt) % 2 else sum(map(ord, text)) % 101 / 101
            for prompt, text in zip(prompts, completions)]
"""


def test_a_run(grpo, tmp_path, monkeypatch):
    """Killed and continued it is the same run. Its files name the prompts that were sampled, and
    count the tokens of all rounds."""
    rule = tmp_path / "rule.py"
    rule.write_text(RULE)
    flags = (rule, "--judge=None", "--eval_judge=None", "--zero_std_groups=resample",
             "--max_iters=4", "--log_micro=False")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    update = trainer.update
    sample_groups = trainer.sample_groups
    lengths = []
    drawn = []

    def counted(*args):
        rollout = sample_groups(*args)
        prompts = rollout.attention_mask[:, :-rollout.logp.shape[1]]
        lengths.append(int(prompts.sum() + rollout.completion_mask.sum()))
        drawn.append(int(rollout.sampled_mask.sum()))
        return rollout

    with monkeypatch.context() as patch:
        patch.setattr("grpo.sample_groups", counted)
        out = grpo(whole, *flags)
    assert "[Micro" not in out, "--log_micro=False is not heard"

    def dies(setup, batch, *more, **names):
        if os.path.exists(parts / "ckpt_000002.pt"):      # in iteration 3
            raise RuntimeError("killed")
        return update(setup, batch, *more, **names)

    with monkeypatch.context() as patch:
        patch.setattr("grpo.update", dies)
        with pytest.raises(RuntimeError, match="killed"):
            grpo(parts, *flags)
    grpo(parts, *flags)
    rows = read_rows(whole / "samples.jsonl")
    assert rows == read_rows(parts / "samples.jsonl"), "the continued run sampled something else"
    metrics = untimed_metrics(whole)
    assert metrics == untimed_metrics(parts), "the continued run learned something else"
    assert metrics[-1]["num_tokens"] == sum(lengths), "not the tokens of all rounds"
    assert max(m["resample/rounds"] for m in metrics) > 0
    speeds = map(int, re.findall(r"(\d+) tok/s", out))
    for m, speed in zip(read_rows(whole / "metrics.jsonl"), speeds, strict=True):
        sampled = sum(drawn.pop(0) for _ in range(1 + m["resample/rounds"]))
        assert abs(speed - sampled / m["step_time"]) < .51, "tok/s is not of all rounds"
    for row in rows:
        expected = .25 if len(row["prompt"]) % 2 else sum(map(ord, row["completion"])) % 101 / 101
        assert row["reward"] == pytest.approx(expected), "a completion is under another's prompt"


@pytest.mark.parametrize("flags", ["--critic=True", "--max_resamples=0",
                                   "--multi_objective_aggregation=normalize_then_sum"])
def test_refusals(flags):
    name = flags[2:].partition("=")[0]
    assert name in refusal(settings, zero_std_groups="resample", **{name: flags.partition("=")[2]})
