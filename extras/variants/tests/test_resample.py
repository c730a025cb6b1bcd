"""Dynamic sampling (zero_std_groups = "resample") beside a plain Python of it."""
import itertools
import math
from statistics import mean, stdev

import pytest
import torch

import grpo
from common.seeds import seed_for
from data.prompts import Prompt, draw_prompts
from run.metrics import batch_metrics, rollout_toxicity
from run.log import sample_rows
from run.sampling import sample_completions
from worlds import WORDS, letters, settings, setup_of, shaken, untimed_metrics, word_gpt

TEXTS = ("I am", "you are so", "what", "the end of it", "no", "why would you say that", "it is",
         "a b c d", "and then", "o")
PROMPTS = [Prompt(text, WORDS.encode_ordinary(text), {"text": text}) for text in TEXTS]
DULL = TEXTS[::2]       # whatever is said after these has the same reward
G = 4


def some_dull(prompts, completions):
    found = letters(prompts, completions)
    return [.25 if prompt in DULL else x for prompt, x in zip(prompts, found)]


def all_dull(prompts, completions):
    return [.25] * len(completions)


def setup_and_cfg(function=some_dull, **knobs):
    knobs = dict(num_prompts=5, num_generations=G, max_completion_length=8, max_resamples=2,
                 zero_std_groups="resample", scale_rewards="batch") | knobs
    cfg = settings(function, **knobs)
    return setup_of(cfg, word_gpt(), PROMPTS, WORDS, shaken(word_gpt(), .02), .05), cfg


def differs(rows):
    return len({reward for _, _, reward in rows}) > 1


def groups_by_hand(setup, cfg, prompts, seed):
    """[(prompt, completion, reward) of each row] of each group."""
    completions = sample_completions(setup, setup.policy, prompts, cfg, seed).texts
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
        kept = list(filter(differs, groups))
        missing = cfg.num_prompts - len(kept)
        if missing == 0:
            break
        further = queue[:missing]
        queue = queue[missing:] + further
        seed = seed_for(cfg.seed, "resample", it, number)
        groups = kept + groups_by_hand(setup, cfg, further, seed)
        sizes.append(missing)
    return groups, sizes


@pytest.mark.parametrize("function, it", [
    (some_dull, 0), (some_dull, 1), (some_dull, 3), (letters, 0), (all_dull, 0)])
def test_groups_are_those_of_plain_python(function, it):
    setup, cfg = setup_and_cfg(function)
    groups, sizes = resampled_by_hand(setup, cfg, it)
    assert function == letters or len(sizes) > 1, "this world resamples nothing"
    batch = grpo.collect_iteration(setup, it, cfg)
    assert batch.rounds == sizes
    prompts, completions, rewards = zip(*sum(groups, []))
    assert tuple(prompt.text for prompt in batch.prompts) == prompts
    assert tuple(batch.completions) == completions, "a row has another row's completion"
    assert batch.rewards.tolist() == pytest.approx(rewards), "a row has another row's reward"
    means = [mean(row[2] for row in rows) for rows in groups for _ in rows]
    spread = stdev(rewards)      # of the last batch, not of the one before
    expected = [(x - of_group) / (spread + 1e-4) for x, of_group in zip(rewards, means)]
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-4)
    differ = [differs(rows) for rows in groups for _ in rows]
    learned = [i for step in grpo.optimizer_steps(batch, cfg, 3) for i in step.rows.tolist()]
    assert learned == list(itertools.compress(range(5 * G), differ)), "some are still equal"
    # ends the run if rows of several rounds have another padding or log-prob than the trainer's
    meter = grpo.Meter(setup, cfg, check=True)
    m = grpo.update(setup, batch, None, cfg, 3, meter) | batch_metrics(batch, cfg)
    assert m["num_steps"] == any(differ)
    assert m["resample/rounds"] == len(sizes) - 1 <= cfg.max_resamples
    assert m["resample/used"] == pytest.approx(sum(differ) / G / sum(sizes))


@pytest.mark.parametrize("knobs", (dict(), dict(mask_truncated_completions=True, top_k=9)))
def test_metrics_and_samples_are_of_all_that_was_sampled(knobs):
    """Not of the groups that are left, which were chosen by their rewards."""
    called = []

    def noted(prompts, completions):
        found = some_dull(prompts, completions)
        called.extend(zip(prompts, completions, found))
        return found

    setup, cfg = setup_and_cfg(noted, **knobs)
    batch = grpo.collect_iteration(setup, 0, cfg)
    assert len(batch.rounds) > 1 and len(called) == G * sum(batch.rounds)
    groups = [called[i:i + G] for i in range(0, len(called), G)]
    rewards = [reward for _, _, reward in called]
    learned = [reward for rows in groups if differs(rows) for _, _, reward in rows]
    rollouts = [part.rollout for part in (batch, *batch.replaced)]
    entropies = [x for r in rollouts for row, mask, end in zip(r.entropy, r.sampled_mask, r.ended)
                 for x in row[mask].tolist() if end or not cfg.mask_truncated_completions]
    m = batch_metrics(batch, cfg)
    expected = {
        "reward": mean(rewards), "reward_std": stdev(rewards), "rewards/reward/mean": mean(rewards),
        "frac_reward_zero_std": mean(not differs(rows) for rows in groups),
        "completions/mean_length": mean(
            n for r in rollouts for n in r.sampled_mask.sum(1).tolist()),
        "completions/clipped_ratio": 1 - mean(float(x) for r in rollouts for x in r.ended),
        "entropy": mean(entropies), "resample/reward": mean(learned)}
    assert {name: m[name] for name in expected} == pytest.approx(expected, rel=1e-5)

    # a row for each of them; `learned` says which have a part in a step
    rows = sample_rows(0, batch, cfg)
    found = sorted((row["prompt"], row["completion"], row["reward"]) for row in rows)
    assert found == sorted(called)
    assert sorted(row["reward"] for row in rows if row["learned"]) == sorted(learned)

    def judge(completions):
        assert sorted(completions) == sorted(text for _, text, _ in called)
        return torch.tensor([0.0, math.log(3)] * (len(completions) // 2))   # 1/2 and 3/4

    setup.judges = {"eval_judge": judge}
    assert rollout_toxicity(batch, setup) == {"eval_judge/toxicity": pytest.approx(5 / 8)}
    setup.judges = {"judge": judge}
    assert rollout_toxicity(batch, setup) == {}, "that is the judge of the reward"


def test_dropped_groups_are_marked_in_the_samples():
    setup, cfg = setup_and_cfg(zero_std_groups="drop")
    batch = grpo.collect_iteration(setup, 0, cfg)
    rows = sample_rows(0, batch, cfg)
    assert {row["prompt"] in DULL for row in rows} == {True, False}
    assert all(row["learned"] != (row["prompt"] in DULL) for row in rows)


def test_a_target_of_held_out_prompts_is_not_resampled():
    setup, cfg = setup_and_cfg(tracin="reward", tracin_val_prompts=4)
    held_out = grpo.collect_held_out(setup, 0, cfg)
    prompts = draw_prompts(setup.val_prompts, 0, 4, cfg.seed)
    assert held_out.batch.prompts[::G] == prompts and len(held_out.batch.rounds) == 1


RULE = """
judge = eval_judge = None
zero_std_groups = "resample"
log_micro = False

def reward(prompts, completions):
    return [0.25 if len(prompt) % 2 else sum(map(ord, text)) % 101 / 101
            for prompt, text in zip(prompts, completions)]
"""


def test_a_run_counts_the_tokens_of_all_rounds_and_goes_on_after_a_break(
        run_grpo, tmp_path, monkeypatch):
    rule = tmp_path / "rule.py"
    rule.write_text(RULE)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tokens = []

    def noted(*args):
        samples = sample_completions(*args)
        r = samples.rollout
        after_the_end = ~r.completion_mask      # which attention_mask holds too
        tokens.append(int(r.attention_mask.sum() - after_the_end.sum()))
        return samples

    with monkeypatch.context() as patch:
        patch.setattr("grpo.sample_completions", noted)
        out = run_grpo(whole, rule, "--max_iters=4")
    assert "iter 1/4" in out and "[Micro" not in out, "log_micro = False is not heard"
    run_grpo(parts, rule, "--max_iters=2")
    run_grpo(parts, rule, "--max_iters=4", "--resume=True")
    metrics = untimed_metrics(whole)
    assert metrics == untimed_metrics(parts), "the continued run learned something else"
    assert max(m["resample/rounds"] for m in metrics) > 0
    assert metrics[-1]["num_tokens"] == sum(tokens), "not the tokens of all rounds"
