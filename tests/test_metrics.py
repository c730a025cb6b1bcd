"""The numbers of an iteration beside plain Python."""
import math
import pkgutil
from statistics import mean, stdev

import pytest
import torch

import grpo
import tracin
from common.variants import variants_of
from loss import loss_of
from run import metrics
from run.flags import notes, problems
from run.meter import Meter, piece_of, spread_of
from run.metrics import batch_metrics, kl_grad_share
from run.report import silent_clock
from worlds import (
    forward, generator_of, gradient, letters, mean_token, number_gpt, settings, shaken, world)

CLIP = 0.01     # so narrow that a pass after a step is clipped


def logged(setup, batch, cfg, held_out=None, **more):
    meter = grpo.Meter(setup, cfg, **more)
    return grpo.update(setup, batch, held_out, cfg, 1, meter) | batch_metrics(batch, cfg)


def assert_logged(m, expected, rel=1e-4):
    for name, x in expected.items():
        assert m[name] == pytest.approx(x, rel, 1e-6, nan_ok=True), (
            f"{name} is {m[name]}, in plain Python {x}")


# ------------------------------------------------------------------------------------------------
# of the rollouts

def test_metrics_of_a_batch():
    """One row, and a whole function, have no reward: they are left out, and are no 0."""
    functions = {"a": letters, "b": mean_token,
                 "silent": lambda completions: [None] * len(completions)}
    cfg = settings(functions, weights=(1.0, 0.5, 1.0))
    setup, batch = world(cfg)
    batch.rewards[3] = batch.scores[3] = math.nan
    # three of the first group are alike, and one of the second is like these
    batch.completions[:] = ["a", "b", "a", "c", "a", "d", "a", "b", "c", "d", "e", "f"]
    r = batch.rollout
    known = [x for x in batch.rewards.tolist() if not math.isnan(x)]
    lengths = r.sampled_mask.sum(1).tolist()
    A = batch.advantages.tolist()
    assert_logged(logged(setup, batch, cfg), {
        "advantage_group_mean": max(abs(mean(A[:6])), abs(mean(A[6:]))),
        "rewards/a/abstained": 1 / 12, "rewards/silent/abstained": 1.0,
        "advantage_std": stdev(A), "advantage_min": min(A), "advantage_max": max(A),
        "identical_completions": 3 / 12,
        "logp": mean(x for row, n in zip(r.logp.tolist(), lengths) for x in row[:n]),
        "reward": mean(known), "reward_std": stdev(known), "reward_min": min(known),
        "reward_max": max(known), "completions/mean_length": mean(lengths),
        "completions/clipped_ratio": 1 - mean(map(float, r.ended)),
        "num_completion_tokens": sum(lengths), "forced": 0.0, "frac_reward_zero_std": 0.0,
        "entropy": mean(x for row, n in zip(r.entropy.tolist(), lengths) for x in row[:n]),
        "rewards/b/mean": mean(x for x in batch.scores[:, 1].tolist() if not math.isnan(x)),
        "rewards/silent/mean": math.nan})
    padded = sum(r.attention_mask.flatten().tolist()) - sum((~r.completion_mask).flatten().tolist())
    assert metrics.num_tokens(batch) == padded, "padding counts, or a token does not"


def negative_kl(loss_of):
    def loss(*args):
        found = loss_of(*args)
        found.kl = -found.kl
        return found

    return loss


# kind of the warning: which function is wrong, and what is made of it
WRONG = {
    "mask": ("grpo.loss_mask_of", lambda right: lambda rollout, cfg: (
        right(rollout, cfg) & right(rollout, cfg).roll(-1, 1))),
    "baseline": ("grpo.group_advantages", lambda right: lambda rewards, *_: (
        rewards - rewards.nanmean()).nan_to_num(0.0)),
    "kl sign": ("loss.grpo_loss", negative_kl)}


def test_a_batch_that_nobody_scored():
    cfg = settings(lambda prompts, completions: [None] * len(completions))
    setup, batch = world(cfg)
    m = logged(setup, batch, cfg)
    assert math.isnan(m["reward"]) and math.isnan(m["reward_min"])
    assert m["frac_reward_zero_std"] == 1.0
    assert "reward" in dict(problems(m, cfg))


@pytest.mark.parametrize("kind", [None, *WRONG])
def test_what_an_editor_of_the_algorithm_gets_wrong_is_flagged(kind, monkeypatch):
    def reward(prompts, completions):
        return [None if i % 5 == 0 else x for i, x in enumerate(letters(prompts, completions))]

    if kind:
        name, wrong = WRONG[kind]
        monkeypatch.setattr(name, wrong(pkgutil.resolve_name(name)))
    cfg = settings(reward, beta=0.1, scale_rewards="none")
    setup, batch = world(cfg, lr=0, reference=shaken(number_gpt()))
    m = grpo.update(setup, batch, None, cfg, seed=1) | batch_metrics(batch, cfg)
    m["step_time"] = 1.0
    found = dict([*problems(m, cfg), *notes(m, cfg)])
    found.pop("zero", None)     # the loss may be near 0
    assert found.keys() == ({kind} if kind else set()), found


@pytest.mark.parametrize("masks", (False, True))
def test_sampled_tokens_without_loss_are_counted(masks):
    """And the entropy is that of the tokens with loss."""
    cfg = settings(mask_truncated_completions=masks)
    _, batch = world(cfg)
    r = batch.rollout
    assert 0 < r.ended.sum() < 12, "choose another seed: there is only one kind"
    truncated = int(r.sampled_mask[~r.ended].sum())
    assert_logged(batch_metrics(batch, cfg), {
        "tokens_without_loss": masks * truncated,
        "num_completion_tokens": int(r.sampled_mask.sum()) - masks * truncated,
        "entropy": float(r.entropy[batch.loss_mask].mean())})


@pytest.mark.parametrize("knobs", [
    dict(), dict(scale_rewards="batch"), dict(scale_rewards="none"),
    dict(scale_rewards="mean", judge_score="probability"), dict(kl_in="reward", beta=0.1),
    dict(multi_objective_aggregation="normalize_then_sum")])
def test_advantages_add_up_to_0_in_each_group_also_where_rewards_are_not_known(knobs):
    def known(function, every):
        return lambda prompts, completions: [
            None if i % every == 0 else x for i, x in enumerate(function(prompts, completions))]

    functions = {"a": known(letters, 5), "b": known(mean_token, 10)}
    cfg = settings(functions, weights=(1.0, 0.5), **knobs)
    _, batch = world(cfg, reference=shaken(number_gpt()))
    m = batch_metrics(batch, cfg)
    assert m["advantage_max"] > 1e-3, "nothing to add up"
    assert m["advantage_group_mean"] < 1e-6 * m["advantage_max"]


# ------------------------------------------------------------------------------------------------
# of the loss

def by_hand(setup, batch, cfg, knobs):
    """ratio, clip ratios and KL, a token (or a row) at a time."""
    logp = forward(setup, batch, cfg).logp.detach()
    low, high = cfg.clip_range
    if cfg.loss_type == "cispo":
        high = cfg.epsilon_high
    units = []      # (ratio, advantage) of each token, or of each row
    kl = []
    for i, mask in enumerate(batch.loss_mask):
        own = (logp[i] - batch.rollout.logp[i])[mask].tolist()
        if cfg.beta:
            d = (batch.ref_logp[i] - logp[i])[mask].tolist()
            kl += [math.exp(r) * (math.exp(x) - x - 1) for r, x in zip(own, d)]
        if knobs.get("importance_sampling_level") and own:
            own = [mean(own)]
        units += [(math.exp(x), float(batch.advantages[i])) for x in own]
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


SEQUENCE = dict(importance_sampling_level="sequence", loss_type="grpo")


@pytest.mark.parametrize("knobs", [
    *(dict(loss_type=name) for name in ("dapo", *variants_of("loss_type"))
      if name in ("dapo", "bnpo", "cispo", "dr_grpo", "grpo", "sapo")),     # by_hand knows these
    dict(beta=0.1), SEQUENCE | dict(beta=0.1), dict(use_bias_correction_kl=False, beta=0.1),
    SEQUENCE | dict(mask_truncated_completions=True)])
def test_metrics_of_the_loss(knobs):
    high = 1 + CLIP if knobs.get("loss_type") == "cispo" else CLIP
    cfg = settings(epsilon=CLIP, epsilon_high=high, micro_batch_size=5, **knobs)
    # a setup whose steps change nothing, and a batch whose ratios are not 1, as after a step
    setup, batch = world(cfg, lr=0, reference=shaken(number_gpt()))
    noise = torch.randn(batch.rollout.logp.shape, generator=generator_of(1))
    batch.rollout.logp += 0.05 * noise * batch.rollout.sampled_mask
    expected = by_hand(setup, batch, cfg, knobs)
    m = logged(setup, batch, cfg)
    assert_logged(m, expected)
    clips = {name for name in m if "clip_ratio" in name}
    assert clips <= expected.keys(), "this loss_type clips in another way"
    assert m["policy_loss"] == pytest.approx(m["loss"]), "as TRL's it holds the KL"
    if "importance_sampling_level" not in knobs:
        assert all(0 < m[name] < 1 for name in clips), "choose another seed: nothing is clipped"


@pytest.mark.parametrize("ratios", ([1.2, 1.4], [0.5, 0.7]))
def test_the_spread_of_the_ratio_leaves_out_what_has_no_loss(ratios):
    """There its ratio is 1, though all others are above, or below."""
    mask = torch.tensor([[True, True, False]])
    nothing = piece_of(torch.ones(1, 3), mask & False, around=1.0)
    assert spread_of([]) == spread_of([nothing], around=1.0) == (0, 0, 0, 0, 0), "of nothing"
    some = piece_of(torch.tensor([[*ratios, 1.0]]), mask, around=1.0)
    expected = [2, sum(ratios) / 2, stdev(ratios), min(ratios), max(ratios)]
    assert [*spread_of([nothing, some], around=1.0)] == pytest.approx(expected, rel=1e-6)


def test_an_update_sums_over_micro_batches_and_means_over_steps():
    def updated(check=True, lr=0.01, **knobs):
        cfg = settings(**knobs)
        setup, batch = world(cfg, lr=lr)
        return logged(setup, batch, cfg, check=check)

    several = dict(num_iterations=2, mini_batch_size=4, beta=0.1)
    found, same = (updated(micro_batch_size=size, **several) for size in (12, 3))
    assert found == pytest.approx(same, 1e-4, 1e-6), "micro-batches change the metrics"
    assert found["num_steps"] == 6 and found["ratio"] != 1.0
    assert found["sampling/sampling_logp_difference/max"] < 1e-5, "before the first step alone"
    once, twice = (updated(lr=0, num_iterations=n, entropy_coef=0.1) for n in (1, 2))
    for name in ("loss", "grad_norm"):
        assert once[name] == pytest.approx(twice[name], 1e-4), "not the mean over the steps"


def test_a_metric_that_a_reader_adds_is_logged(monkeypatch):
    """Whatever its name: what its sums add up to, divided by what its counts add up to."""
    plain = metrics.loss_metrics
    more = lambda loss, cfg: plain(loss, cfg) | {"rows_per_loss": (len(loss.logp), 1)}
    monkeypatch.setattr("run.meter.loss_metrics", more)
    cfg = settings(micro_batch_size=5)
    assert logged(*world(cfg), cfg)["rows_per_loss"] == 4


def test_kl_in_the_reward_is_logged_per_token():
    cfg = settings(beta=0.1, kl_in="reward", kl_estimator="k1")
    setup, batch = world(cfg)
    batch.kl = torch.rand_like(batch.rollout.logp) * batch.rollout.sampled_mask
    m = logged(setup, batch, cfg)
    expected = batch.kl.sum() / batch.rollout.sampled_mask.sum()
    assert m["kl"] == pytest.approx(float(expected)) and "kl_loss" not in m


@pytest.mark.parametrize("mini_batch_size", (0, 4))     # it is that of the first step
def test_the_kls_share_of_the_gradient(mini_batch_size):
    cfg = settings(beta=0.3, micro_batch_size=5, mini_batch_size=mini_batch_size)
    setup, batch = world(cfg, reference=shaken(number_gpt()))
    step = next(grpo.optimizer_steps(batch, cfg, 1))
    norms = []
    for part in ("kl", "policy"):
        loss = loss_of(setup, setup.policy, batch, step.rows, step, cfg)
        norms.append(float(gradient(getattr(loss, part), setup.trained).norm()))
    m = kl_grad_share(setup, batch, grpo.optimizer_steps(batch, cfg, 1), cfg)
    assert_logged(m, {"kl_grad_share": norms[0] / norms[1]}, 1e-3)
    assert all(p.grad is None for p in setup.trained), "the step starts from nothing"


# ------------------------------------------------------------------------------------------------
# of influence

@pytest.mark.parametrize("mini_batch_size", (0, 4))     # one step, or three
def test_metrics_of_influence(mini_batch_size):
    cfg = settings(tracin="reward", mini_batch_size=mini_batch_size)
    setup, batch = world(cfg, lr=0)
    batch.rewards[:6] = 0.5
    batch.advantages[:6] = 0.0      # a group that teaches nothing has influence 0
    m = logged(setup, batch, cfg)
    scores = batch.influence.tolist()
    assert_logged(m, {
        "tracin/positive_ratio": mean(float(x > 0) for x in scores),
        "tracin/negative_ratio": mean(float(x < 0) for x in scores), "tracin/zero_ratio": 0.5,
        "tracin/selected_ratio": mean(float(x != 0) for x in batch.row_weights.tolist()),
        "tracin/mean_ip": mean(scores), "tracin/std_ip": stdev(scores),
        "tracin/min_ip": min(scores), "tracin/max_ip": max(scores)})


def values_by_hand(kind, rewards, advantages):
    """What each rollout of a target is worth."""
    if kind == "reward":
        return [(r - mean(rewards)) / (stdev(rewards) + 1e-4) for r in rewards]
    if kind == "contrastive":
        middle = sorted(rewards)[len(rewards) // 2]
        return [1.0 if r >= middle else -1.0 for r in rewards]
    return advantages


@pytest.mark.parametrize("kind", ("self", "reward", "advantage", "contrastive"))
@pytest.mark.parametrize("is_held_out", (False, True))
def test_metrics_of_a_target(kind, is_held_out):
    """The loss is minus value times log-prob; its gradient is one on the first weights, too."""
    cfg = settings(mean_token, tracin=kind)
    setup, batch = world(cfg, lr=0)
    source, rows, held_out = batch, torch.arange(12), None
    if is_held_out:
        source = grpo.collect(setup, setup.prompts, cfg, seed=5)
        rows = torch.tensor([1, 2, 4, 6, 7, 8, 10, 11])
        held_out = tracin.HeldOut(source, rows)
    advantages = source.advantages[rows].tolist()
    values = values_by_hand(kind, source.rewards[rows].tolist(), advantages)
    logps = forward(setup, source, cfg).logp.sum(1)[rows]
    losses = -torch.tensor(values) * logps
    expected = {
        "tracin/target_rows": len(rows), "tracin/target_loss": losses.mean().item(),
        "tracin/target_loss_min": losses.min().item(),
        "tracin/target_loss_max": losses.max().item(),
        "tracin/target_advantage_min": min(advantages),
        "tracin/target_advantage_max": max(advantages)}
    if kind == "reward":
        names, weights = zip(*setup.policy.named_parameters())
        norms = [float(g.norm()) for g in torch.autograd.grad(losses.mean(), weights)]
        expected["tracin/target_grad_norm"] = math.hypot(*norms)
        for name, norm in zip(names[:3], norms):
            expected[f"tracin/target_grad_norm/{name}"] = norm
    assert_logged(logged(setup, batch, cfg, held_out), expected, 1e-3)


def test_a_mean_of_nothing_is_not_zero():
    """A metric of one's own may count tokens of which an iteration has none."""
    cfg = settings(mean_token)
    setup, _ = world(cfg)
    meter = Meter(setup, cfg, silent_clock)
    zero = torch.zeros((), dtype=torch.float64)
    meter.count({"of nothing": (zero, 0), "of two": (zero + 3, 2)})
    m = meter.metrics()
    assert math.isnan(m["of nothing"]) and m["of two"] == 1.5
    assert m["loss"] == m["grad_norm"] == 0, "no step has no norm, and is no reason to stop"
