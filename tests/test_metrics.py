"""The numbers of an iteration beside plain Python, their names, and what ends a run."""
import math
from statistics import mean, stdev
from typing import get_args, get_type_hints

import pytest
import torch

import grpo
import tracin
from run import metrics
from common.guards import logp_error
from run.metrics import batch_metrics, rollout_toxicity
from run.settings import Settings
from worlds import (
    forward, generator_of, gradient, letters, mean_token, number_gpt, refusal, settings, setup_of,
    shaken, world)

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
            own = (logp[i] - batch.rollout.logp[i])[mask].tolist()
            kl += [math.exp(r) * (math.exp(x) - x - 1) for r, x in zip(own, d)]
    below = mean(float(ratio < low and A < 0) for ratio, A in units)
    above = mean(float(ratio > high and A > 0) for ratio, A in units)
    ratios = [ratio for ratio, _ in units]
    found = {"ratio": mean(ratios), "ratio_std": stdev(ratios), "ratio_min": min(ratios),
             "ratio_max": max(ratios)}
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
    *(dict(loss_type=name) for name in get_args(get_type_hints(Settings)["loss_type"])),
    dict(importance_sampling_level="sequence", loss_type="grpo"), dict(beta=0.1),
    dict(importance_sampling_level="sequence", loss_type="grpo", beta=0.1),
    dict(use_bias_correction_kl=False, beta=0.1),
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


def test_the_spread_of_the_ratio_leaves_out_what_has_no_loss():
    """Where its ratio is 1, though all others are above, or below."""
    mask = torch.tensor([[True, True, False]])
    for ratios in ([1.2, 1.4], [0.5, 0.7]):
        found = metrics.ratio_spread(
            metrics.spread_parts(torch.tensor([[*ratios, 1.0]]), mask)[None])
        assert found == pytest.approx({"ratio_std": stdev(ratios), "ratio_min": min(ratios),
                                       "ratio_max": max(ratios)})
    assert metrics.ratio_spread(metrics.spread_parts(torch.ones(1, 3), mask & False)[None]) == {}


def updated(cfg, check=True, **more):
    setup, batch = world(cfg, **more)
    metrics = grpo.update(setup, batch, None, cfg, seed=1, check=check)
    return metrics | batch_metrics(batch, cfg)


def test_an_update_has_these_metrics():
    always = {
        "ratio", "ratio_std", "ratio_min", "ratio_max", "clip_ratio/low_mean",
        "clip_ratio/high_mean", "clip_ratio/region_mean",
        "loss", "policy_loss", "grad_norm", "num_steps",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "reward", "reward_std", "reward_min", "reward_max",
        "advantage_std", "advantage_min", "advantage_max", "identical_completions", "logp",
        "frac_reward_zero_std", "entropy", "num_completion_tokens", "forced",
        "completions/clipped_ratio", "completions/mean_length",
        "completions/mean_terminated_length", "rewards/reward/mean", "rewards/reward/std",
        "rewards/reward/abstained", "advantage_group_mean", "tokens_without_loss"}
    plain = updated(settings()).keys()
    assert plain >= always
    more = updated(settings(beta=0.1, entropy_coef=0.1))
    assert more.keys() - plain >= {"kl", "kl_loss", "entropy_loss"}
    more = updated(settings(tracin="reward"))
    assert more.keys() - plain >= {"tracin/" + name for name in (
        "positive_ratio", "negative_ratio", "zero_ratio", "mean_ip", "std_ip", "min_ip", "max_ip",
        "selected_ratio", "self_share", "fallback", "target_loss", "target_loss_min",
        "target_loss_max", "target_advantage_min", "target_advantage_max", "target_rows",
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
    first = lambda recording, influence, *more: (
        torch.ones(len(influence)) * (0 in recording.step.rows), False)
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
    # three of the first group are alike, and one of the second is like these
    batch.completions[:] = ["a", "b", "a", "c", "a", "d", "a", "b", "c", "d", "e", "f"]
    r = batch.rollout
    m = batch_metrics(batch, cfg)
    known = [x for x in batch.rewards.tolist() if not math.isnan(x)]
    lengths = r.sampled_mask.sum(1).tolist()
    A = batch.advantages.tolist()
    by_group = [mean(A[i:i + cfg.num_generations]) for i in range(0, 12, cfg.num_generations)]
    expected = {
        "advantage_group_mean": max(map(abs, by_group)), "rewards/a/abstained": 1 / 12,
        "advantage_std": stdev(A), "advantage_min": min(A), "advantage_max": max(A),
        "identical_completions": 3 / 12,
        "logp": mean(x for row, n in zip(r.logp.tolist(), lengths) for x in row[:n]),
        "reward": mean(known), "reward_std": stdev(known), "reward_min": min(known),
        "reward_max": max(known), "completions/mean_length": mean(lengths),
        "completions/clipped_ratio": 1 - mean(map(float, r.ended)),
        "num_completion_tokens": sum(lengths), "forced": 0.0, "frac_reward_zero_std": 0.0,
        "entropy": mean(x for row, n in zip(r.entropy.tolist(), lengths) for x in row[:n]),
        "rewards/b/mean": mean(x for x in batch.scores[:, 1].tolist() if not math.isnan(x))}
    assert {name: m[name] for name in expected} == pytest.approx(expected, 1e-5)


def test_sampled_tokens_without_loss_are_counted():
    """Not those of truncated completions, where a setting masks them."""
    for masks in (False, True):
        cfg = settings(mask_truncated_completions=masks)
        _, batch = world(cfg)
        assert 0 < int(batch.rollout.ended.sum()) < 12, "the world has only one kind"
        assert batch_metrics(batch, cfg)["tokens_without_loss"] == 0
        lost = int(batch.loss_mask[:, 0].sum())
        batch.loss_mask = batch.loss_mask.clone()
        batch.loss_mask[:, 0] = False
        m = batch_metrics(batch, cfg)
        assert m["tokens_without_loss"] == lost
        assert m["num_completion_tokens"] == int(batch.loss_mask.sum())


BASELINES = {
    "group": {}, "batch": dict(scale_rewards="batch"), "none": dict(scale_rewards="none"),
    "mean": dict(scale_rewards="mean", judge_score="probability"),
    "kl": dict(kl_in="reward", beta=0.1),
    "by function": dict(multi_objective_aggregation="normalize_then_sum")}


@pytest.mark.parametrize("case", BASELINES)
def test_advantages_add_up_to_0_in_each_group_also_where_rewards_are_not_known(case):
    def known(function, every):
        return lambda prompts, completions: [
            None if i % every == 0 else x for i, x in enumerate(function(prompts, completions))]

    functions = {"a": known(letters, 5), "b": known(mean_token, 10)}
    cfg = settings(functions, weights=(1.0, 0.5), **BASELINES[case])
    _, batch = world(cfg, reference=shaken(number_gpt()))
    m = batch_metrics(batch, cfg)
    assert m["advantage_max"] > 1e-3, "nothing to add up"
    assert m["advantage_group_mean"] < 1e-6 * m["advantage_max"]


def test_a_batch_without_rewards():
    cfg = settings(lambda prompts, completions: [None] * len(completions))
    _, batch = world(cfg)
    m = batch_metrics(batch, cfg)
    assert math.isnan(m["reward"]) and math.isnan(m["reward_min"])
    assert m["frac_reward_zero_std"] == 1.0


def test_metrics_of_influence():
    for size in (0, 4):     # one step, or three
        cfg = settings(tracin="reward", mini_batch_size=size)
        setup, batch = world(cfg, lr=0)
        batch.rewards[:6] = 0.5
        batch.advantages[:6] = 0.0      # a group that teaches nothing has influence 0
        m = grpo.update(setup, batch, None, cfg, seed=1)
        scores = batch.influence.tolist()
        expected = {
            "tracin/positive_ratio": mean(float(x > 0) for x in scores),
            "tracin/negative_ratio": mean(float(x < 0) for x in scores),
            "tracin/zero_ratio": mean(float(x == 0) for x in scores),
            "tracin/selected_ratio": mean(float(x != 0) for x in batch.row_weights.tolist()),
            "tracin/mean_ip": mean(scores), "tracin/std_ip": stdev(scores),
            "tracin/min_ip": min(scores), "tracin/max_ip": max(scores)}
        assert {name: m[name] for name in expected} == pytest.approx(expected), size
        shares = (m[f"tracin/{kind}_ratio"] for kind in ("positive", "negative", "zero"))
        assert sum(shares) == pytest.approx(1)


def values_by_hand(kind, rewards, advantages):
    """What each rollout of a target is worth."""
    if kind == "reward":
        return [(r - mean(rewards)) / (stdev(rewards) + 1e-4) for r in rewards]
    if kind == "contrastive":
        middle = sorted(rewards)[len(rewards) // 2]
        return [1.0 if r >= middle else -1.0 for r in rewards]
    return advantages


@pytest.mark.parametrize("kind", ("self", "reward", "advantage", "contrastive"))
def test_metrics_of_a_target(kind):
    """Of the batch, and of some held-out rollouts; the loss is minus value times log-prob."""
    cfg = settings(mean_token, tracin=kind)
    setup, batch = world(cfg)
    other = grpo.collect(setup, setup.prompts, cfg, seed=5)
    for held_out in (None, tracin.HeldOut(other, torch.tensor([1, 2, 4, 6, 7, 8, 10, 11]))):
        source, rows = held_out or (batch, torch.arange(12))
        m = grpo.update(setup, batch, held_out, cfg, seed=1)
        logps = source.rollout.logp.sum(1)[rows].tolist()
        advantages = source.advantages[rows].tolist()
        values = values_by_hand(kind, source.rewards[rows].tolist(), advantages)
        losses = [-value * logp for value, logp in zip(values, logps)]
        expected = {
            "tracin/target_rows": len(rows), "tracin/target_loss": mean(losses),
            "tracin/target_loss_min": min(losses), "tracin/target_loss_max": max(losses),
            "tracin/target_advantage_min": min(advantages),
            "tracin/target_advantage_max": max(advantages)}
        assert {name: m[name] for name in expected} == pytest.approx(expected, 1e-3), kind


def test_the_kls_share_of_the_gradient():
    for steps in (dict(), dict(mini_batch_size=4)):     # of the first step
        cfg = settings(beta=0.3, micro_batch_size=5, **steps)
        setup, batch = world(cfg, reference=shaken(number_gpt()))
        step = next(grpo.optimizer_steps(batch, cfg, 1))
        norms = []
        for part in ("kl", "policy"):
            loss = grpo.loss_of(setup, setup.policy, batch, step.rows, step, cfg)
            norms.append(float(gradient(getattr(loss, part), setup.trained).norm()))
        m = grpo.update(setup, batch, None, cfg, seed=1, compare_kl=True)
        assert m["kl_grad_share"] == pytest.approx(norms[0] / norms[1], 1e-3)


@pytest.mark.parametrize("rank", (0, 2))
def test_a_sync_counts_the_tensors_that_differ(rank):
    cfg = settings(beta=0.1, ref_model_sync_steps=1, lora_rank=rank)
    setup = setup_of(cfg)
    shaken(setup.policy)
    weights = list(setup.policy.parameters())
    moved = sum(not torch.equal(p, r) for p, r in zip(weights, setup.reference.parameters()))
    found = grpo.sync_reference(setup, 0.6)
    assert found == {"ref_tensors_differing": moved, "ref_distance_left": pytest.approx(0.4)}
    found = grpo.sync_reference(setup, 1.0)
    assert found == {"ref_tensors_differing": 0, "ref_distance_left": 0.0}


def test_the_targets_gradient_is_measured_as_a_whole_and_on_the_first_weights():
    cfg = settings(tracin="reward")
    setup, batch = world(cfg, lr=0)
    rewards = batch.rewards
    values = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    loss = -(values * forward(setup, batch, cfg).logp.sum(1)).mean()
    names, weights = zip(*setup.policy.named_parameters())
    norms = [float(g.norm()) for g in torch.autograd.grad(loss, weights)]
    m = grpo.update(setup, batch, None, cfg, seed=1)
    assert m["tracin/target_grad_norm"] == pytest.approx(math.hypot(*norms), 1e-3)
    for name, norm in zip(names[:3], norms):
        assert m[f"tracin/target_grad_norm/{name}"] == pytest.approx(norm, 1e-3), name
    assert sum(name.startswith("tracin/target_grad_norm/") for name in m) == 3


def spoil_weights(setup, batch):
    setup.policy.wpe.weight.data.fill_(math.nan)


def spoil_moments(setup, batch):
    """And, after a step with them, the weights."""
    setup.optimizer.state[setup.trained[0]]["exp_avg"] = torch.tensor([math.inf])
    spoil_weights(setup, batch)


def spoil_rewards(setup, batch):
    batch.advantages.fill_(math.inf)


def spoil_logps(setup, batch):
    batch.rollout.logp.fill_(-math.inf)


# what is made wrong, and what the line that ends the run names
NOT_FINITE = {"wpe.weight": spoil_weights, "moment": spoil_moments, "reward": spoil_rewards,
              "log-prob": spoil_logps}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_named(name):
    for check in (False, True):     # in the first iteration of a run the ratio is checked, too
        setup, batch = world(settings())
        NOT_FINITE[name](setup, batch)
        before = setup.trained[0].clone()
        found = refusal(grpo.update, setup, batch, None, settings(), seed=1, check=check)
        assert name in found, found
        assert torch.equal(setup.trained[0], before), "a step was taken"


def test_an_environments_token_under_the_loss_stops_the_run():
    for kind in ("off", "self"):
        cfg = settings(tracin=kind, micro_batch_size=5)
        setup, batch = world(cfg)
        batch.rollout.sampled_mask = batch.rollout.sampled_mask.clone()     # not the loss's
        batch.rollout.sampled_mask[7, 0] = False        # as if an environment had written it
        before = [p.clone() for p in setup.trained]
        assert "1 token" in refusal(grpo.update, setup, batch, None, cfg, seed=1)
        assert all(map(torch.equal, before, setup.trained)), "a step was taken"


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


def test_a_function_that_knows_no_row_is_null_in_that_iteration_alone():
    """Two tasks: each function abstains on the other's rows."""
    cfg = settings({"words": lambda completions: [None] * len(completions), "sums": letters},
                   weights=(1.0, 1.0))
    _, batch = world(cfg)
    m = batch_metrics(batch, cfg)
    assert math.isnan(m["rewards/words/mean"])
    assert m["rewards/sums/mean"] == pytest.approx(mean(batch.scores[:, 1].tolist()))
    assert m["reward"] == pytest.approx(m["rewards/sums/mean"])
    assert batch.advantages.isfinite().all() and batch.advantages.any()
