"""The critic: advantages and values against plain Python, in the loss, in a step, in influence."""
import math
from dataclasses import replace
from statistics import mean, stdev, variance
from types import SimpleNamespace

import pytest
import torch

import grpo
from extras.critic import gae, token_advantages, value_loss
from run.metrics import batch_metrics
from rollout import completion_logprobs, completion_states, generate
from run.settings import Settings
from worlds import (
    END, PROMPTS, assert_near, forcing, forward, generator_of, gradient, settings, setup_of,
    shaken, skip_without, steps_of, untimed_metrics)

PLAIN = Settings(whiten_advantages=False)
CRITIC = dict(critic=True, value_coef=.5)


def cases(N=40, T=9):
    """Random rewards, values and sampled tokens. Some rows have gaps, where an environment spoke
    and values are garbage; one has no sampled token."""
    generator = generator_of(0)
    rewards, values = torch.randn(2, N, T, generator=generator)
    sampled = torch.rand(N, T, generator=generator) < .7
    sampled[0] = False
    sampled[1] = True
    return rewards * sampled, torch.where(sampled, values, 100 * values), sampled


def speaking(setup):
    """The setup with a value head that says something."""
    shaken(setup.policy.value_head, .3, seed=3)
    return setup


def critic_world(seed=1, **knobs):
    """Setup with a critic that says something, and a Batch that they have sampled."""
    cfg = settings(**CRITIC | knobs)
    setup = speaking(setup_of(cfg))
    return cfg, setup, grpo.collect(setup, setup.prompts, cfg, seed)


def plain_gae(rewards, values, gamma, lam):
    """Of one episode, in lists: A_t as the sum that defines it."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def test_gae_is_the_sum_that_defines_it_over_the_tokens_that_were_sampled():
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
    rollout = SimpleNamespace(values=values, sampled_mask=sampled)
    rewards = torch.randn(len(sampled))
    rewards[2] = math.nan
    penalty = torch.rand(values.shape) * sampled
    by_token = -penalty
    for i, here in enumerate(sampled):
        if here.any():
            by_token[i, here.nonzero()[-1]] += rewards[i] - rewards.nanmean()
    scored = ~rewards.isnan()
    expected = gae(by_token, values, sampled, 1.0, .95)
    A, returns = token_advantages(rollout, rewards, penalty, PLAIN)
    assert_near(A[scored], expected[scored])
    assert_near(returns[scored], (A + values)[scored])
    other = replace(PLAIN, gae_gamma=.9, gae_lambda=.5)
    A_of_others, _ = token_advantages(rollout, rewards, penalty, other)
    assert_near(A_of_others[scored], gae(by_token, values, sampled, .9, .5)[scored])
    assert not A[2].any(), "nobody scored it"
    assert returns[2][sampled[2]][-1].isnan(), "nobody scored it"
    known = sampled & scored[:, None]
    white, same = token_advantages(rollout, rewards, penalty, Settings())
    some = A[known]         # whitened as TRL's PPOTrainer did, up to 1.12
    assert_near(white[known], (some - some.mean()) / (some.var() + 1e-8).sqrt())
    assert_near(same[known], returns[known])


def test_the_loss_of_values_is_that_of_trl():
    """Of its PPOTrainer: half the larger of two squared errors. A value whose return nobody knows
    learns nothing."""
    values, old, returns = torch.randn(3, 200)
    near = torch.max(torch.min(values, old + .2), old - .2)
    larger = torch.max((values - returns) ** 2, (near - returns) ** 2)
    assert_near(value_loss(values, old, returns, .2), larger / 2)
    assert_near(value_loss(values, old, returns), (values - returns) ** 2 / 2)
    returns[::2] = math.nan
    value_loss(values.requires_grad_(), old, returns, .2).sum().backward()
    assert not values.grad[::2].any() and values.grad[1::2].any()


def values_by_forward(policy, r):
    """Values (N, T) of the sampled tokens by a forward pass."""
    states = completion_states(policy, r)
    values = policy.value_head(states.h).detach()
    return torch.zeros(r.logp.shape).index_put(states.where, values)


def test_recorded_values_are_those_of_a_forward_pass():
    policy = speaking(setup_of(settings(**CRITIC))).policy
    ids = [prompt.ids for prompt in PROMPTS]
    forced = torch.full((8, 6), -1)
    forced[1:4, 2] = 5
    for more in ({}, dict(batch_size=4), dict(top_k=9), dict(respond=forcing(forced))):
        r = generate(policy, ids, 4, 6, seed=7, eos=(END,), **more)
        assert r.values.std() > .05
        assert (r.values[~r.sampled_mask] == 0).all()
        assert_near(r.values, values_by_forward(policy, r))
    with torch.autocast("cpu", torch.bfloat16):
        assert policy.value_head(torch.randn(5, 16)).dtype == torch.float32


@pytest.mark.parametrize("loss_type", ("dapo", "grpo"))
def test_the_loss_is_that_of_the_policy_plus_that_of_the_values(loss_type):
    cfg, setup, batch = critic_world(loss_type=loss_type, value_clip=.1)
    shaken(setup.policy, .02, seed=9)
    out = forward(setup, batch, cfg)
    mask = batch.loss_mask
    N = len(mask)
    divisor = {"dapo": mask.sum(), "grpo": N * mask.sum(1, keepdim=True)}[loss_type]
    ratio = (completion_logprobs(setup.policy, batch.rollout) - batch.rollout.logp).exp()
    A = batch.advantages
    policy = -torch.min(ratio * A, ratio.clamp(.8, 1.2) * A) / divisor
    values = values_by_forward(setup.policy, batch.rollout)
    critic = cfg.value_coef * value_loss(values, batch.rollout.values, batch.returns, .1) / divisor
    assert_near(out.policy, policy[mask].sum())
    assert_near(out.critic, critic[mask].sum(), 1e-4)
    assert_near(out.total, out.policy + out.critic)
    first = gradient(forward(setup, batch, cfg, slice(5)).total, setup.trained)
    others = gradient(forward(setup, batch, cfg, slice(5, N)).total, setup.trained)
    assert_near(first + others, gradient(out.total, setup.trained))


def test_the_kl_in_the_reward_is_taken_off_token_by_token():
    cfg = settings(**CRITIC, kl_in="reward", kl_estimator="k1", beta=.3, gae_lambda=1.0,
                   whiten_advantages=False)
    setup = speaking(setup_of(cfg))
    shaken(setup.policy, .1, seed=9)
    batch = grpo.collect(setup, setup.prompts, cfg, 1)
    sampled = batch.rollout.sampled_mask
    kl = (batch.rollout.logp - batch.ref_logp) * sampled
    assert kl.abs().max() > .01
    assert_near(batch.kl * sampled, kl)
    later = kl.flip(1).cumsum(1).flip(1)        # of a token and those after it
    rewards = (batch.rewards - batch.rewards.mean()).float()
    expected = rewards[:, None] - .3 * later - batch.rollout.values
    assert_near(batch.advantages[sampled], expected[sampled], 1e-4)


def test_values_are_learned_and_one_completion_of_each_prompt_is_enough():
    """The reward depends on the prompt alone, which a group cannot see and the critic learns."""
    def by_prompt(prompts, completions):
        return [float(len(prompt)) for prompt in prompts]

    cfg = settings(by_prompt, critic=True, value_coef=1.0, num_generations=1)
    setup = setup_of(cfg)
    setup.optimizer = torch.optim.Adam(setup.trained, lr=.01)
    for it in range(20):
        batch = grpo.collect(setup, setup.prompts, cfg, it)
        if it == 0:
            assert not batch.rollout.values.any(), "the head is zero at first"
        metrics = grpo.update(setup, batch, None, cfg, it, grpo.Meter(setup, cfg, check=it == 0))
        assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    values = batch.rollout.values.sum(1) / batch.rollout.sampled_mask.sum(1)
    spread = float(batch.rewards[1] - batch.rewards[0])
    assert float(values[1] - values[0]) == pytest.approx(spread, rel=.5)


def test_influence_against_one_backward_per_row():
    """tracin = "advantage" with a critic: the target's coefficients are by token, and the values'
    loss is learned from all rows."""
    cfg, setup, batch = critic_world(tracin="advantage", micro_batch_size=5)
    plain = replace(cfg, tracin="off")
    N = len(batch.loss_mask)
    rows = torch.stack([
        gradient(forward(setup, batch, plain, slice(i, i + 1)).policy, setup.trained)
        for i in range(N)])
    rest = gradient(forward(setup, batch, plain).critic, setup.trained)
    logp = completion_logprobs(setup.policy, batch.rollout)
    target = gradient((-batch.advantages * logp).sum() / N, setup.trained)
    (step,), _ = steps_of(setup, batch, cfg, check=True)
    torch.testing.assert_close(batch.influence, rows @ target, rtol=1e-4, atol=1e-5)
    kept = rows[batch.influence > 0].sum(0) + rest
    torch.testing.assert_close(step, kept, rtol=1e-3, atol=1e-4)


def test_metrics_of_the_critic_are_those_of_plain_python():
    cfg, setup, batch = critic_world(epsilon=.05, max_grad_norm=.01)
    m = batch_metrics(batch, cfg)
    values = batch.rollout.values[batch.loss_mask].tolist()
    returns = batch.returns[batch.loss_mask].tolist()
    expected = {"val/mean": mean(values), "val/std": stdev(values), "returns/mean": mean(returns)}
    assert {name: m[name] for name in expected} == pytest.approx(expected, 1e-4)
    left = [r - v for r, v in zip(returns, values)]
    explained = 1 - variance(left) / variance(returns)
    assert m["val/var_explained"] == pytest.approx(explained, 1e-4)

    shaken(setup.policy, .02, seed=9)
    loss = forward(setup, batch, cfg)
    ratio = loss.ratio[batch.loss_mask]
    A = batch.advantages[batch.loss_mask]       # of tokens
    low = float(((ratio < .95) & (A < 0)).float().mean())
    high = float(((ratio > 1.05) & (A > 0)).float().mean())
    assert low > 0 and high > 0, "nothing is clipped here"
    head = gradient(loss.total, setup.policy.value_head.parameters())
    m = grpo.update(setup, batch, None, cfg, 3)
    assert m["clip_ratio/low_mean"] == pytest.approx(low)
    assert m["clip_ratio/high_mean"] == pytest.approx(high)
    assert m["critic_loss"] > 0
    assert m["grad_norm"] > .01, "nothing is clipped here"
    assert m["val/grad_norm"] == pytest.approx(float(head.norm()), 1e-3), "before clipping"


def test_a_run_goes_on_where_it_stopped(run_grpo, tmp_path):
    flags = ("--critic=True", "--beta=0.1", "--ref_model_sync_steps=2", "--tracin=reward")
    run_grpo(f"{tmp_path}/whole", *flags, "--max_iters=3")
    run_grpo(f"{tmp_path}/parts", *flags, "--max_iters=1")
    run_grpo(f"{tmp_path}/parts", *flags, "--max_iters=3", "--resume=True")
    whole = untimed_metrics(f"{tmp_path}/whole")
    assert whole == untimed_metrics(f"{tmp_path}/parts"), "a resumed run has other numbers"
    skip_without("step")
    text = run_grpo(f"{tmp_path}/none", f"{tmp_path}/whole", *flags, "--debug_step=True")
    assert "agree with plain backwards" in text
