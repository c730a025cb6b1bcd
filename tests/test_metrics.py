"""The numbers of an iteration beside plain Python, their names, and what ends a run."""
import math
from statistics import mean, stdev

import pytest
import torch

import grpo
import tracin
from run import metrics
from run.metrics import batch_metrics, logp_error, rollout_toxicity
from worlds import forward, generator_of, letters, mean_token, number_gpt, settings, shaken, world

CLIP = 0.01     # so narrow that a pass after a step is clipped


def batch_of(cfg):
    """Setup, whose steps change nothing, and a batch whose ratios are not 1, as after a step."""
    setup, batch = world(cfg, lr=0, reference=shaken(number_gpt()))
    noise = torch.randn(batch.rollout.logp.shape, generator=generator_of(1))
    batch.rollout.logp += 0.05 * noise * batch.rollout.sampled_mask
    return setup, batch


def by_hand(setup, batch, cfg):
    """ratio, clip ratios and KL, a token (or a row) at a time."""
    logp = forward(setup, batch, cfg).logp.detach()
    low, high = cfg.clip_range
    units = []      # (ratio, advantage) of each token, or of each row
    kl = []
    for i, mask in enumerate(batch.loss_mask):
        log_ratios = (logp[i] - batch.rollout.logp[i])[mask].tolist()
        if cfg.importance_sampling_level == "sequence" and log_ratios:
            log_ratios = [mean(log_ratios)]
        units += [(math.exp(x), float(batch.advantages[i])) for x in log_ratios]
        if cfg.beta:
            d = (batch.ref_logp[i] - logp[i])[mask].tolist()
            kl += [math.exp(x) - x - 1 for x in d]
    below = mean(float(ratio < low and A < 0) for ratio, A in units)
    above = mean(float(ratio > high and A > 0) for ratio, A in units)
    found = {"ratio": mean(ratio for ratio, _ in units)}
    if cfg.loss_type == "cispo":
        found["cispo_clip_ratio"] = above
    elif cfg.loss_type != "sapo":
        found["clip_ratio/low_mean"] = below
        found["clip_ratio/high_mean"] = above
        found["clip_ratio/region_mean"] = below + above
    if kl:
        found["kl"] = mean(kl)
    return found


LOSSES = [
    *(dict(loss_type=name) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")),
    dict(importance_sampling_level="sequence", loss_type="grpo"), dict(beta=0.1),
    dict(mask_truncated_completions=True, beta=0.1),
    dict(mask_truncated_completions=True, importance_sampling_level="sequence", loss_type="grpo")]


def test_metrics_of_the_loss_are_those_of_plain_python():
    some_clipped = 0
    for case in LOSSES:
        high = 1 + CLIP if case.get("loss_type") == "cispo" else CLIP
        cfg = settings(letters, epsilon=CLIP, epsilon_high=high, micro_batch_size=5, **case)
        setup, batch = batch_of(cfg)
        expected = by_hand(setup, batch, cfg)
        m = grpo.update(setup, batch, None, cfg, seed=1)
        found = {name: x for name, x in m.items() if name in expected or "clip_ratio" in name}
        assert found == pytest.approx(expected, 1e-5, 1e-6), case
        assert m["policy_loss"] == pytest.approx(m["loss"]), "as TRL's it holds the KL"
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
    """Equal whatever the micro-batches; losses and norms are means over the steps."""
    for case in (dict(), dict(num_iterations=2, mini_batch_size=4, beta=0.1, learning_rate=0.1)):
        found = [updated(settings(micro_batch_size=size, **case)) for size in (12, 5)]
        assert found[0] == pytest.approx(found[1], 1e-4, 1e-6)
    assert found[0]["num_steps"] == 6
    assert found[0]["ratio"] != 1.0
    assert found[0]["sampling/sampling_logp_difference/max"] < 1e-5, "before the first step alone"
    once, twice = (updated(settings(num_iterations=n, entropy_coef=0.1), lr=0) for n in (1, 2))
    for name in ("loss", "grad_norm"):
        assert once[name] == pytest.approx(twice[name], 1e-4), "not the mean over the steps"


def test_a_metric_that_a_reader_adds_is_logged(monkeypatch):
    """Whatever its name: what its sums add up to, divided by what its counts add up to."""
    plain = metrics.loss_metrics
    more = lambda loss, cfg: plain(loss, cfg) | {"rows_per_loss": (len(loss.logp), 1)}
    monkeypatch.setattr(metrics, "loss_metrics", more)
    assert updated(settings(micro_batch_size=5))["rows_per_loss"] == 4


def test_losses_of_a_step_without_rows_count(monkeypatch):
    first = lambda scores, batch, rows, *more: (torch.ones(len(rows)) * (0 in rows), False)
    monkeypatch.setattr(tracin, "row_weights_of", first)
    m = updated(settings(tracin="self", mini_batch_size=4), lr=0)
    every = updated(settings(mini_batch_size=4), lr=0)
    assert (m["num_steps"], every["num_steps"]) == (1, 3)
    assert m["tracin/empty_steps"] == 2
    assert m["tracin/selected_ratio"] == pytest.approx(1 / 3), "it is a mean over the steps"
    assert m["loss"] == pytest.approx(every["loss"], abs=1e-5)


def test_kl_in_the_reward_is_logged_per_token():
    cfg = settings(beta=0.1, kl_in="reward", kl_estimator="k1")
    setup, batch = world(cfg)
    batch.kl = torch.rand_like(batch.rollout.logp) * batch.rollout.sampled_mask
    m = grpo.update(setup, batch, None, cfg, seed=1) | batch_metrics(batch, cfg)
    expected = batch.kl.sum() / batch.rollout.sampled_mask.sum()
    assert m["kl"] == pytest.approx(float(expected)) and "kl_loss" not in m


def test_metrics_of_a_batch_are_those_of_plain_python():
    cfg = settings({"a": letters, "b": mean_token}, weights=(1.0, 0.5))
    _, batch = world(cfg)
    batch.rewards[3] = batch.scores[3] = math.nan
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
        "rewards/b/mean": mean(x for x in batch.scores[:, 1].tolist() if not math.isnan(x))}
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
    expected = {
        "tracin/positive_ratio": mean(float(x > 0) for x in scores),
        "tracin/selected_ratio": mean(float(x != 0) for x in batch.row_weights.tolist()),
        "tracin/mean_ip": mean(scores), "tracin/target_contrast": 1.0}
    assert {name: m[name] for name in expected} == pytest.approx(expected)


def test_the_error_is_the_largest_in_float32_and_the_mean_in_bfloat16():
    assert logp_error(0.01, 0.02, torch.float32) == (0.02, 1e-3)
    assert logp_error(0.01, 0.02, torch.bfloat16) == (0.01, 0.05)


def test_toxicity_is_of_all_rollouts_in_every_iteration():
    setup, batch = world(settings())

    def judge(completions):
        assert completions == batch.completions
        return torch.tensor([0.0, math.log(3)] * 6)     # probabilities of 1/2 and 3/4

    setup.judges = {"judge": judge}
    assert rollout_toxicity(batch, setup) == {}, "that is the judge of the reward"
    setup.judges = {"eval_judge": judge}
    assert rollout_toxicity(batch, setup) == {"eval_judge/toxicity": pytest.approx(5 / 8)}
