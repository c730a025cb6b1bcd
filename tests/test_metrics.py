"""The numbers of an iteration beside plain Python, their names, and what ends a run."""
import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch

import grpo
import tracin
from run import metrics
from run.metrics import batch_metrics, logp_error, mean_influence, rollout_toxicity
from worlds import generator_of, letters, mean_token, settings, whole_step, world

CLIP = 0.01     # so narrow that a pass after a step is clipped


def batch_of(cfg):
    """Setup, whose steps change nothing, and a batch whose ratios are not 1, as after a step."""
    setup, batch = world(cfg, lr=0)
    noise = torch.randn(batch.rollout.logp.shape, generator=generator_of(1))
    batch.rollout.logp += 0.05 * noise * batch.rollout.sampled_mask
    return setup, batch


def by_hand(setup, batch, cfg):
    """ratio, clip ratios and KL, a token (or a row) at a time."""
    with torch.no_grad():
        loss = grpo.loss_of(setup, setup.policy, batch, slice(None), whole_step(batch), cfg)
    low, high = cfg.clip_range
    units = []      # (ratio, advantage) of each token, or of each row
    kl = []
    for i, mask in enumerate(batch.loss_mask):
        log_ratios = (loss.logp[i] - batch.rollout.logp[i])[mask].tolist()
        if cfg.importance_sampling_level == "sequence" and log_ratios:
            log_ratios = [sum(log_ratios) / len(log_ratios)]
        units += [(math.exp(x), float(batch.advantages[i])) for x in log_ratios]
        if cfg.beta:
            d = (batch.ref_logp[i] - loss.logp[i])[mask].tolist()
            kl += [math.exp(x) - x - 1 for x in d]
    n = len(units)
    below = sum(ratio < low and A < 0 for ratio, A in units) / n
    above = sum(ratio > high and A > 0 for ratio, A in units) / n
    found = {"ratio": sum(ratio for ratio, _ in units) / n}
    if cfg.loss_type == "cispo":
        found["cispo_clip_ratio"] = above
    elif cfg.loss_type != "sapo":
        found["clip_ratio/low_mean"] = below
        found["clip_ratio/high_mean"] = above
        found["clip_ratio/region_mean"] = below + above
    if kl:
        found["kl"] = sum(kl) / len(kl)
    return found


def test_metrics_of_the_loss_are_those_of_plain_python():
    cases = [dict(loss_type=name) for name in
             ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")]
    cases += [dict(importance_sampling_level="sequence", loss_type="grpo"),
              dict(beta=0.1), dict(mask_truncated_completions=True, beta=0.1),
              dict(mask_truncated_completions=True, importance_sampling_level="sequence",
                   loss_type="grpo")]
    some_clipped = 0
    for case in cases:
        high = 1 + CLIP if case.get("loss_type") == "cispo" else CLIP
        cfg = settings(letters, epsilon=CLIP, epsilon_high=high, **case)
        setup, batch = batch_of(cfg)
        expected = by_hand(setup, batch, cfg)
        for size in (12, 5):        # in one piece, and in three
            found = grpo.update(setup, batch, None, replace(cfg, micro_batch_size=size), seed=1)
            found = {name: found[name] for name in expected}
            assert found == pytest.approx(expected, 1e-5, 1e-6), case
        some_clipped += expected.get("clip_ratio/low_mean", 0) > 0
        some_clipped += expected.get("clip_ratio/high_mean", 0) > 0
    assert some_clipped > 8


def updated(cfg, check=True, **more):
    setup, batch = world(cfg, **more)
    metrics = grpo.update(setup, batch, None, cfg, seed=1, check=check)
    return metrics | batch_metrics(batch, cfg)


def test_an_update_has_these_metrics():
    always = {
        "ratio", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "loss", "policy_loss", "grad_norm", "num_steps",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "reward", "reward_std", "reward_min", "reward_max",
        "frac_reward_zero_std", "entropy", "num_completion_tokens", "forced",
        "completions/clipped_ratio", "completions/mean_length",
        "completions/mean_terminated_length", "rewards/reward/mean", "rewards/reward/std"}
    plain = updated(settings()).keys()
    assert plain >= always
    more = updated(settings(beta=0.1, entropy_coef=0.1))
    assert more.keys() - plain >= {"kl", "kl_loss", "entropy_loss"}
    more = updated(settings(tracin="reward"))
    assert more.keys() - plain >= {"tracin/" + name for name in (
        "positive_ratio", "mean_ip", "selected_ratio", "self_share", "fallback",
        "target_grad_norm", "target_cosine", "target_contrast", "empty_steps")}
    own_loss = updated(settings(tracin="self"))
    assert own_loss.keys() - more.keys() == {"tracin/invariant_error"}


def test_an_update_sums_over_its_micro_batches_and_steps():
    """Equal whatever the micro-batches; the steps' losses are averaged."""
    for case in (dict(), dict(num_iterations=2, mini_batch_size=4, beta=0.1, learning_rate=0.1)):
        found = [updated(settings(micro_batch_size=size, **case)) for size in (12, 5)]
        assert found[0] == pytest.approx(found[1], 1e-4, 1e-6)
    assert found[0]["num_steps"] == 6
    assert found[0]["ratio"] != 1.0
    assert found[0]["sampling/sampling_logp_difference/max"] < 1e-5, "of the first pass alone"


def test_a_metric_that_a_reader_adds_is_logged(monkeypatch):
    """Whatever its name, and whatever the micro-batches: the mean over the tokens of the update."""
    plain = metrics.loss_metrics

    def more(loss, cfg):
        mask = loss.batch.loss_mask
        rank = torch.arange(mask.shape[1]) * mask       # a token's place in its completion
        return plain(loss, cfg) | {"mean_place": (rank.sum(), mask.sum()),
                                   "rows_per_loss": (len(mask), 1)}

    monkeypatch.setattr(metrics, "loss_metrics", more)
    whole, parts = (updated(settings(micro_batch_size=size)) for size in (12, 5))
    assert whole["mean_place"] == pytest.approx(parts["mean_place"]) and whole["mean_place"] > 1
    assert (whole["rows_per_loss"], parts["rows_per_loss"]) == (12, 4)


def test_losses_of_a_step_without_rows_count(monkeypatch):
    first = lambda scores, batch, rows, *more: (torch.ones(len(rows)) * (0 in rows), False)
    monkeypatch.setattr(tracin, "row_weights_of", first)
    m = updated(settings(tracin="self", mini_batch_size=4), lr=0)
    every = updated(settings(mini_batch_size=4), lr=0)
    assert (m["num_steps"], every["num_steps"]) == (1, 3)
    assert m["loss"] == pytest.approx(every["loss"], abs=1e-5)


def test_kl_in_the_reward_is_logged_per_token():
    cfg = settings(beta=0.1, kl_in="reward", kl_estimator="k1")
    setup, batch = world(cfg)
    batch.kl = torch.rand_like(batch.rollout.logp) * batch.rollout.sampled_mask
    m = grpo.update(setup, batch, None, cfg, seed=1)
    expected = batch.kl.sum() / batch.rollout.sampled_mask.sum()
    assert m["kl"] == pytest.approx(float(expected)) and "kl_loss" not in m


def test_metrics_of_a_batch_are_those_of_plain_python():
    cfg = settings({"a": letters, "b": mean_token}, weights=(1.0, 0.5))
    _, batch = world(cfg)
    batch.rewards[3] = math.nan
    r = batch.rollout
    m = batch_metrics(batch, cfg)
    known = [x for x in batch.rewards.tolist() if not math.isnan(x)]
    lengths = r.sampled_mask.sum(1).tolist()
    expected = {
        "reward": mean(known), "reward_std": stdev(known), "reward_min": min(known),
        "reward_max": max(known), "completions/mean_length": mean(lengths),
        "completions/clipped_ratio": 1 - mean(map(float, r.ended)),
        "num_completion_tokens": sum(lengths), "forced": 0.0, "frac_reward_zero_std": 0.0,
        "entropy": mean(x for row, n in zip(r.entropy.tolist(), lengths) for x in row[:n]),
        "rewards/b/mean": mean(batch.scores[:, 1].tolist())}
    assert {name: m[name] for name in expected} == pytest.approx(expected, 1e-5)


def test_a_batch_without_rewards():
    cfg = settings(lambda prompts, completions: [None] * len(completions))
    _, batch = world(cfg)
    m = batch_metrics(batch, cfg)
    assert math.isnan(m["reward"]) and math.isnan(m["reward_min"])
    assert m["frac_reward_zero_std"] == 1.0


def test_metrics_of_influence():
    cfg = settings(tracin="reward")
    setup, batch = world(cfg)
    m = grpo.update(setup, batch, None, cfg, seed=1)
    scores = batch.influence.tolist()
    assert m["tracin/positive_ratio"] == pytest.approx(sum(x > 0 for x in scores) / 12)
    kept = float((batch.row_weights != 0).float().mean())
    assert m["tracin/selected_ratio"] == pytest.approx(kept)
    assert m["tracin/mean_ip"] == pytest.approx(sum(scores) / 12)
    assert m["tracin/target_contrast"] == pytest.approx(1.0)
    steps = [{"tracin/selected_ratio": x, "tracin/mean_ip": 2 * x} for x in (0.0, 1.0)]
    assert mean_influence(steps) == {
        "tracin/selected_ratio": 0.5, "tracin/mean_ip": 1.0, "tracin/empty_steps": 1}


def test_the_error_is_the_largest_in_float32_and_the_mean_in_bfloat16():
    gaps = torch.tensor([0.0, -0.02])
    assert logp_error(gaps, torch.float32) == (pytest.approx(0.02), 1e-3)
    assert logp_error(gaps, torch.bfloat16) == (pytest.approx(0.01), 0.05)


def test_toxicity_is_of_all_rollouts_in_every_iteration():
    setup, batch = world(settings())

    def judge(completions):
        assert completions == batch.completions
        return torch.linspace(-2, 2, 12)

    setup.judges = {"judge": judge}
    assert rollout_toxicity(batch, setup) == {}, "that is the judge of the reward"
    setup.judges = {"eval_judge": judge}
    expected = sum(1 / (1 + math.exp(-x)) for x in torch.linspace(-2, 2, 12).tolist()) / 12
    assert rollout_toxicity(batch, setup) == {"eval_judge/toxicity": pytest.approx(expected, 1e-5)}
