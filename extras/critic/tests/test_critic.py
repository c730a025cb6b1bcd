"""The critic: advantages and values against plain Python, in the loss, in a step, in influence."""
import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
from config import Settings, load_settings
from conftest import ROOT
from extras.critic import explained_variance, gae, token_advantages, value_loss, whiten
from run.metrics import batch_metrics
from rollout import completion_logprobs, completion_states, generate
from worlds import (
    END, PROMPTS, forcing, gradient, nets_of, printed, read_rows, seed_of, settings, shaken,
    whole_step, world)

PLAIN = Settings(whiten_advantages=False)
CRITIC = dict(critic=True, value_coef=.5)


def cases(seed=0, N=40, T=9):
    """Random rewards, values and sampled tokens; some rows have gaps, one has no sampled token."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    rewards, values = torch.randn(2, N, T, generator=generator)
    sampled = torch.rand(N, T, generator=generator) < .7
    sampled[0] = False
    sampled[1] = True
    return rewards * sampled, values * sampled, sampled


def as_rollout(values, sampled):
    return SimpleNamespace(values=values, sampled_mask=sampled)


def speaking(setup):
    """The setup with a value head that says something."""
    shaken(setup.policy.value_head, .3, seed=3)
    return setup


def critic_world(seed=1, **knobs):
    """Setup with a critic that says something, and a Batch that they have sampled."""
    cfg = settings(**CRITIC | knobs)
    setup = speaking(nets_of(cfg))
    return cfg, setup, grpo.collect(setup, setup.prompts, cfg, seed)


def loss_of(cfg, setup, batch, rows=slice(None)):
    step = whole_step(batch)
    return grpo.loss_of(setup, setup.policy, batch, step.rows[rows], step, cfg)


def plain_gae(rewards, values, gamma, lam):
    """Of one episode, in lists: A_t as the sum that defines it."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def test_gae_against_plain_python():
    rewards, values, sampled = cases()
    for gamma in (0.0, .9, 1.0):
        for lam in (0.0, .95, 1.0):
            found = gae(rewards, values, sampled, gamma, lam)
            assert (found[~sampled] == 0).all()
            for i, here in enumerate(sampled):
                rows = rewards[i][here].tolist(), values[i][here].tolist()
                expected = plain_gae(*rows, gamma, lam)
                assert found[i][here].tolist() == pytest.approx(expected, abs=1e-5)


def test_rewards_are_centered_and_stand_at_the_last_sampled_token():
    _, values, sampled = cases()
    rewards = torch.randn(len(sampled), generator=torch.Generator().manual_seed(seed_of(1)))
    rewards[2] = math.nan
    penalty = torch.rand(values.shape) * sampled
    A, returns = token_advantages(as_rollout(values, sampled), rewards, penalty, PLAIN)
    mean = float(rewards[~rewards.isnan()].mean())
    for i, here in enumerate(sampled):
        if i == 2:
            assert not A[i].any() and returns[i][here][-1].isnan(), "nobody scored it"
            continue
        r = [-float(x) for x in penalty[i][here]]
        if r:
            r[-1] += float(rewards[i]) - mean
        expected = plain_gae(r, values[i][here].tolist(), 1.0, .95)
        assert A[i][here].tolist() == pytest.approx(expected, abs=1e-5)
        assert torch.allclose(returns[i][here], (A + values)[i][here])
    white, _ = token_advantages(as_rollout(values, sampled), rewards, penalty, Settings())
    known = sampled & ~rewards.isnan()[:, None]
    assert white[known].mean().abs() < 1e-5 and white[known].std() == pytest.approx(1, abs=1e-3)


def test_whitening_and_value_loss_are_those_of_trl():
    """Of its PPOTrainer, which TRL had up to 1.12: (x - mean) / sqrt(var + 1e-8) with n - 1 over
    the tokens, and half the larger of two squared errors."""
    _, x, sampled = cases()
    some = x[sampled].double()
    expected = (some - some.mean()) / (some.var() + 1e-8).sqrt()
    assert torch.allclose(whiten(x, sampled)[sampled].double(), expected, atol=1e-5)
    values, old, returns = torch.randn(3, 200)
    found = value_loss(values, old, returns, .2)
    for v, o, r, loss in zip(values.tolist(), old.tolist(), returns.tolist(), found.tolist()):
        near = min(max(v, o - .2), o + .2)
        assert loss == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, abs=1e-5)
    assert torch.allclose(value_loss(values, old, returns), (values - returns).square() / 2)


def test_explained_variance():
    returns = torch.tensor([0.0, 1, 2, 3])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 7.0), returns) == 0
    assert explained_variance(-returns, returns) == -3
    assert math.isnan(explained_variance(returns, torch.ones(4)))


def values_by_forward(policy, r):
    """Values (N, T) of the sampled tokens by a forward pass."""
    states = completion_states(policy, r)
    values = policy.value_head(states.h).detach()
    return torch.zeros(r.logp.shape).index_put(states.where, values)


def test_recorded_values_are_those_of_a_forward_pass():
    policy = speaking(nets_of(settings(**CRITIC))).policy
    ids = [prompt.ids for prompt in PROMPTS]
    forced = torch.full((8, 6), -1)
    forced[1:4, 2] = 5
    for more in ({}, dict(batch_size=4), dict(top_k=9), dict(respond=forcing(forced))):
        r = generate(policy, ids, 4, 6, seed=7, eos=END, **more)
        assert r.values.std() > .05 and (r.values[~r.sampled_mask] == 0).all()
        assert (r.values - values_by_forward(policy, r)).abs().max() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert policy.value_head(torch.randn(5, 16)).dtype == torch.float32


def test_the_loss_is_that_of_the_policy_plus_that_of_the_values():
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        cfg, setup, batch = critic_world(loss_type=loss_type, value_clip=.1)
        shaken(setup.policy, .02, seed=9)
        out = loss_of(cfg, setup, batch)
        values = values_by_forward(setup.policy, batch.rollout)
        logp = completion_logprobs(setup.policy, batch.rollout).detach()
        policy_part = critic_part = 0.0
        N = len(batch.loss_mask)
        for i, row in enumerate(batch.loss_mask):
            for t in row.nonzero()[:, 0].tolist():
                divisor = {"dapo": int(batch.loss_mask.sum()), "grpo": N * int(row.sum()),
                           "dr_grpo": N * cfg.max_completion_length}[loss_type]
                A, R = float(batch.advantages[i, t]), float(batch.returns[i, t])
                ratio = math.exp(logp[i, t] - batch.rollout.logp[i, t])
                policy_part -= min(ratio * A, min(max(ratio, .8), 1.2) * A) / divisor
                old, v = float(batch.rollout.values[i, t]), float(values[i, t])
                near = min(max(v, old - .1), old + .1)
                critic_part += .5 * max((v - R) ** 2, (near - R) ** 2) / 2 / divisor
        assert float(out.policy.detach()) == pytest.approx(policy_part, abs=1e-5)
        assert float(out.critic.detach()) == pytest.approx(critic_part, rel=1e-4)
        assert float(out.total.detach()) == pytest.approx(policy_part + critic_part, rel=1e-4)
        N = len(batch.loss_mask)
        parts = [gradient(loss_of(cfg, setup, batch, rows).total, setup.trained)
                 for rows in (slice(5), slice(5, N))]
        whole = gradient(loss_of(cfg, setup, batch).total, setup.trained)
        assert torch.allclose(sum(parts), whole, atol=1e-5), "micro-batches add up"


def test_the_kl_in_the_reward_is_taken_off_token_by_token():
    cfg = settings(**CRITIC, kl_in="reward", kl_estimator="k1", beta=.3, gae_lambda=1.0,
                   whiten_advantages=False)
    setup = speaking(nets_of(cfg))
    shaken(setup.policy, .1, seed=9)
    batch = grpo.collect(setup, setup.prompts, cfg, 1)
    sampled = batch.rollout.sampled_mask
    gap = (batch.rollout.logp - batch.ref_logp) * sampled
    assert gap.abs().max() > .01 and torch.allclose(batch.kl * sampled, gap)
    rewards = batch.rewards - batch.rewards.mean()
    for i, row in enumerate(sampled):
        for t in row.nonzero()[:, 0].tolist():
            expected = float(rewards[i] - .3 * gap[i, t:].sum() - batch.rollout.values[i, t])
            assert float(batch.advantages[i, t]) == pytest.approx(expected, abs=1e-4)


def test_values_are_learned_and_one_completion_of_each_prompt_is_enough():
    """The reward depends on the prompt alone, which a group cannot see and the critic learns."""
    def by_prompt(prompts, completions):
        return [float(len(prompt)) for prompt in prompts]

    cfg = settings(by_prompt, critic=True, value_coef=1.0, num_generations=1)
    setup = nets_of(cfg)
    setup.optimizer = torch.optim.Adam(setup.trained, lr=.01)
    for it in range(25):
        batch = grpo.collect(setup, setup.prompts, cfg, it)
        if it == 0:
            assert not batch.rollout.values.any(), "the head is zero at first"
        metrics = grpo.update(setup, batch, None, cfg, it, check=it == 0)
        assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    values = batch.rollout.values.sum(1) / batch.rollout.sampled_mask.sum(1)
    spread = float(batch.rewards[1] - batch.rewards[0])
    assert float(values[1] - values[0]) == pytest.approx(spread, rel=.5)


def test_a_completion_that_nobody_scored_teaches_nothing():
    def some(prompts, completions):
        return [None if i % 3 == 0 else float(i) for i in range(len(completions))]

    cfg = settings(some, **CRITIC)
    setup, batch = world(cfg)
    unknown = batch.rewards.isnan()
    assert unknown.any() and not batch.advantages[unknown].any()
    out = loss_of(cfg, setup, batch, unknown)
    assert float(out.total.detach()) == 0 and not gradient(out.total, setup.trained).any()


def test_influence_against_one_backward_per_row():
    """tracin = "advantage" with a critic: the target's coefficients are by token, and the values'
    loss is learned from all rows."""
    cfg, setup, batch = critic_world(tracin="advantage", micro_batch_size=5)
    plain = replace(cfg, tracin="off")
    rows = [gradient(loss_of(plain, setup, batch, slice(i, i + 1)).policy, setup.trained)
            for i in range(len(batch.loss_mask))]
    rest = gradient(loss_of(plain, setup, batch).critic, setup.trained)
    g = torch.stack(rows)
    logp = completion_logprobs(setup.policy, batch.rollout)
    coef = -batch.advantages / len(batch.loss_mask)
    G = gradient((coef * logp).sum(), setup.trained)
    before = torch.cat([p.detach().flatten() for p in setup.trained])
    grpo.update(setup, batch, None, cfg, 3, check=True)
    torch.testing.assert_close(batch.influence, g @ G, rtol=1e-4, atol=1e-5)
    kept = (batch.influence > 0).float() @ g + rest
    after = torch.cat([p.detach().flatten() for p in setup.trained])
    torch.testing.assert_close((before - after) / .01, kept, rtol=1e-3, atol=1e-4)


def test_metrics_clip_by_the_token_and_say_what_the_critic_knows():
    cfg, setup, batch = critic_world(epsilon=.05)
    shaken(setup.policy, .02, seed=9)
    loss = loss_of(cfg, setup, batch)
    low = high = 0
    mask = batch.loss_mask
    for ratio, A in zip(loss.ratio[mask].tolist(), batch.advantages[mask].tolist()):
        low += ratio < .95 and A < 0
        high += ratio > 1.05 and A > 0
    assert low and high, "nothing is clipped here"
    metrics = grpo.update(setup, batch, None, cfg, 3)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low / int(mask.sum()))
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high / int(mask.sum()))
    assert metrics["critic_loss"] > 0
    assert batch_metrics(batch, cfg)["val/var_explained"] < 1


def test_a_run_goes_on_where_it_stopped_and_is_explained(grpo, tmp_path):
    flags = ("--critic=True", "--beta=0.1", "--ref_model_sync_steps=2", "--tracin=reward")
    grpo(tmp_path / "whole", *flags, "--max_iters=4")
    grpo(tmp_path / "parts", *flags, "--max_iters=2")
    grpo(tmp_path / "parts", *flags, "--max_iters=4", "--resume=True")
    whole, parts = ([row | {"step_time": 0} for row in read_rows(folder / "metrics.jsonl")]
                    for folder in (tmp_path / "whole", tmp_path / "parts"))
    assert whole == parts, "a resumed run has other numbers"
    explain = importlib.import_module("explain.__main__")
    assert "the tape agrees with" in printed(explain.main, [str(tmp_path / "whole")])


def test_the_config_file_loads():
    assert load_settings([f"{ROOT}/extras/critic/config/toxicity_ppo.py"]).critic
