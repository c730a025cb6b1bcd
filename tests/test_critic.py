"""The critic: advantages and values against plain Python, in the loss, in a run, in influence."""
import copy
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import critic
import explain
import grpo
from config import Settings
from critic import ValueHead, explained_variance, gae, token_advantages, value_loss, whiten
from evaluate import open_run
from grpo import Step, loss_of, update
from hub.export import merged_tensors
from sample import completion_logprobs, completion_states
from pretrain import policy_of
from run.content import read_checkpoint
from run.decoder import Decoder
from run.report import diagnose, print_iteration, print_warnings
from run.script import BadInput
from run.selfcheck import check_method
from sample import decode, generate
from test_algorithm import PROMPTS as SMALL_PROMPTS
from test_algorithm import settings as small_settings, world as small_world
from test_forced import forced_ids
from test_grpo import END, PROMPTS, gpt, moved, nets_of, sample, settings
from test_influence import (
    close, flat, flat_grad, rest_gradient, row_gradients, step, with_lora)
from selection import target_coefficients

PROMPT_IDS = [ids for _, ids, _ in PROMPTS]
PLAIN = Settings(center_rewards=False, whiten_advantages=False)


def with_critic(policy, size=.3):
    """The policy with a value head that says something."""
    policy.value_head = ValueHead(policy.config.n_embd)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in policy.value_head.parameters():
            p += size * torch.randn(p.shape, generator=generator)
    return policy


def cases(seed=0, N=40, T=9):
    """Random rewards, values and chosen tokens; some rows have gaps, one has no chosen token."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, N, T, generator=generator)
    chosen = torch.rand(N, T, generator=generator) < .7
    chosen[0] = False
    chosen[1] = True
    return rewards * chosen, values * chosen, chosen


def plain_gae(rewards, values, gamma, lam):
    """Of one episode, in lists: A_t as the sum that defines it."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def as_rollout(values, chosen, value_after=None):
    return SimpleNamespace(values=values, chosen=chosen, value_after=value_after)


# ------------------------------------------------------------------------------------------------
# the arithmetic

@pytest.mark.parametrize("gamma", (0.0, .9, 1.0))
@pytest.mark.parametrize("lam", (0.0, .95, 1.0))
def test_gae_against_plain_python(gamma, lam):
    rewards, values, chosen = cases()
    found = gae(rewards, values, chosen, gamma, lam)
    assert (found[~chosen] == 0).all()
    for i, here in enumerate(chosen):
        expected = plain_gae(rewards[i][here].tolist(), values[i][here].tolist(), gamma, lam)
        assert found[i][here].tolist() == pytest.approx(expected, abs=1e-5)


def test_without_values_every_token_gets_the_reward():
    _, values, chosen = cases()
    rewards = torch.randn(len(chosen))
    cfg = replace(PLAIN, gae_lambda=1.0)
    A, returns = token_advantages(as_rollout(0 * values, chosen), rewards, 0.0, cfg)
    assert torch.equal(A, rewards[:, None] * chosen) and torch.equal(A, returns)


def test_a_cut_completion_goes_on_with_the_value_after_it():
    _, values, chosen = cases()
    rewards, after = torch.randn(2, len(chosen))
    cfg = replace(PLAIN, gae_gamma=.9)
    A, returns = token_advantages(as_rollout(values, chosen, after), rewards, 0.0, cfg)
    for i, here in enumerate(chosen):
        n = int(here.sum())
        r = [0.0] * (n - 1) + [float(rewards[i])] * (n > 0)
        # one token more, with the value after the last one and nothing to come
        longer = plain_gae([*r, float(after[i])], [*values[i][here].tolist(), float(after[i])],
                           .9, .95)[:n]
        assert A[i][here].tolist() == pytest.approx(longer, abs=1e-5)
    assert torch.allclose(returns[chosen], (A + values)[chosen])


def test_rewards_can_be_centered():
    _, values, chosen = cases()
    rewards = torch.randn(len(chosen))
    rewards[2] = math.nan
    found = token_advantages(
        as_rollout(values, chosen), rewards, 0.0, replace(PLAIN, center_rewards=True))
    expected = token_advantages(as_rollout(values, chosen), rewards - rewards.nanmean(), 0.0, PLAIN)
    for a, b in zip(found, expected):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))


def test_whitening_and_value_loss_are_those_of_trl():
    """Of its PPOTrainer, which TRL had up to 1.12: (x - mean) / sqrt(var + 1e-8) with n - 1 over
    the tokens, and half the larger of two squared errors."""
    _, x, chosen = cases()
    some = x[chosen].double()
    expected = (some - some.mean()) / (some.var() + 1e-8).sqrt()
    assert torch.allclose(whiten(x, chosen)[chosen].double(), expected, atol=1e-5)
    values, old, returns = torch.randn(3, 200)
    for v, o, r, found in zip(*(y.tolist() for y in (
            values, old, returns, value_loss(values, old, returns, .2)))):
        near = min(max(v, o - .2), o + .2)
        assert found == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, abs=1e-5)
    assert torch.allclose(value_loss(values, old, returns), (values - returns).square() / 2)


def test_explained_variance():
    returns = torch.tensor([0.0, 1, 2, 3])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 7.0), returns) == 0
    assert explained_variance(-returns, returns) == -3
    assert math.isnan(explained_variance(returns, torch.ones(4)))


def test_a_chain_with_known_values():
    """A walk to and fro on five states, one end of which pays 1 and the other nothing: from state i
    the value is (i + 1) / 6."""
    generator = torch.Generator().manual_seed(0)
    true = torch.arange(1, 6) / 6
    head = ValueHead(5)
    optimizer = torch.optim.Adam(head.parameters(), lr=.05)
    N, T = 64, 40
    for _ in range(30):
        at = torch.randint(5, (N,), generator=generator)
        state = torch.zeros(N, T, dtype=torch.long)
        chosen = torch.zeros(N, T, dtype=torch.bool)
        for t in range(T):
            alive = (at >= 0) & (at < 5)
            chosen[:, t] = alive
            state[:, t] = at.clamp(0, 4)
            at = at + torch.where(torch.rand(N, generator=generator) < .5, 1, -1) * alive
        features = torch.eye(5)[state]                                              # (N, T, 5)
        with torch.no_grad():
            values = head(features) * chosen
        rewards = (at == 5).float()
        _, returns = token_advantages(as_rollout(values, chosen), rewards, 0.0, PLAIN)
        for _ in range(2):
            loss = value_loss(head(features)[chosen], values[chosen], returns[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    found = head(torch.eye(5)).detach()
    assert explained_variance(found, true) > .95, f"values {found.tolist()}, true {true.tolist()}"


# ------------------------------------------------------------------------------------------------
# values while sampling

def teacher_forced(policy, r):
    """Values (N, T) of the chosen tokens by a forward pass."""
    h, _, _, where = completion_states(policy, r)
    return torch.zeros(r.completion_mask.shape, device=h.device).index_put(where, policy.value_head(h))


@pytest.mark.parametrize("more", [
    {}, dict(batch_size=4), dict(top_k=9), dict(forced=forced_ids()),
    dict(decode=lambda *a, **k: decode(*a, **k, drop=False)), dict(decode="decoder")],
    ids=["plain", "parts", "top_k", "forced", "keep", "decoder"])
def test_recorded_values_are_those_of_a_forward_pass(more):
    policy = with_critic(gpt())
    if more.get("decode") == "decoder":
        more = dict(decode=Decoder(policy, graphs=False))
    r = generate(policy, PROMPT_IDS, 4, 8, seed=7, eos=END, **more)
    expected = teacher_forced(policy, r)
    assert r.values.shape == r.completion_mask.shape and r.values.std() > .1
    assert (r.values - expected).abs().max() < 1e-5
    assert (r.values[~r.sampled_mask] == 0).all()
    part = r[3:5]
    assert torch.equal(part.values, r.values[3:5]), "rows of a rollout keep their values"
    assert generate(gpt(), PROMPT_IDS, 1, 2, seed=7, eos=END).values is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_graphs_record_the_values_of_a_forward_pass():
    policy = with_critic(gpt()).cuda()
    decoder = Decoder(policy)
    for seed in (7, 8, 9):      # by itself, captured, replayed
        r = generate(policy, PROMPT_IDS, 4, 8, seed=seed, eos=END, decode=decoder)
        expected = teacher_forced(policy, r)
        assert r.values.std() > .1 and (r.values - expected).abs().max() < 1e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("knobs", [
    dict(bootstrap_truncated_completions=True), dict(beta=.1, kl_in="reward", kl_estimator="k1"),
    dict(tracin="advantage")], ids=lambda knobs: next(iter(knobs)))
def test_an_iteration_on_a_gpu(knobs):
    cfg = small_settings(critic=True, **knobs)
    nets, _ = small_world(cfg, torch.device("cuda"))
    check_method(nets, cfg, grpo.collect, grpo.optimizer_steps, grpo.loss_of)
    for seed in (1, 2):
        batch = grpo.collect(nets, SMALL_PROMPTS, cfg, seed)
        m = update(nets, batch, None, cfg, seed, first=True)
    assert batch.rollout.values.std() > 0 and m["val/grad_norm"] > 0


def test_the_head_stays_in_float32():
    policy = with_critic(gpt())
    decoder = Decoder(policy, torch.bfloat16, graphs=False)
    assert decoder.model.value_head.linear.weight is policy.value_head.linear.weight
    h = torch.randn(5, policy.config.n_embd)
    with torch.autocast("cpu", torch.bfloat16):
        found = policy.value_head(h)
    assert torch.equal(found, policy.value_head(h)) and found.dtype == torch.float32


def test_the_value_after_a_cut_completion():
    policy = with_critic(gpt(end=3.0))
    r = generate(policy, PROMPT_IDS, 4, 8, seed=7, eos=END)
    found = critic.values_after(policy, r, size=3).detach()
    assert r.ended.any() and not r.ended.all()
    assert (found[r.ended] == 0).all()
    for i in (~r.ended).nonzero()[:, 0].tolist():
        ids = r.tokens[i][r.attention_mask[i]][None]
        alone = policy.value_head(policy(ids))[0, -1].detach()
        assert float(found[i]) == pytest.approx(float(alone), abs=1e-5)


# ------------------------------------------------------------------------------------------------
# the loss

CRITIC = dict(critic=True, value_coef=.5)


def whole_step(batch):
    n = len(batch.loss_mask)
    return Step(0, torch.arange(n), n, int(batch.loss_mask.sum()))


def forward(policy, batch, cfg, rows=slice(None)):
    whole = whole_step(batch)
    nets = nets_of(policy, replace(cfg, tracin="off"))
    return loss_of(nets, policy, batch, whole.rows[rows], whole, cfg)


@pytest.mark.parametrize("loss_type", ("dapo", "grpo", "dr_grpo"))
def test_the_loss_is_that_of_the_policy_plus_that_of_the_values(loss_type):
    policy = with_critic(gpt())
    cfg = settings(loss_type=loss_type, value_clip=.1, **CRITIC)
    batch = sample(policy, cfg)
    later = moved(policy)
    out = forward(later, batch, cfg)
    values = teacher_forced(later, batch.rollout).detach()
    logp = completion_logprobs(later, batch.rollout).detach()
    policy_part = critic_part = 0.0
    for i, row in enumerate(batch.loss_mask):
        for t in row.nonzero()[:, 0].tolist():
            divisor = {"dapo": int(batch.loss_mask.sum()), "grpo": 16 * int(row.sum()),
                       "dr_grpo": 16 * cfg.max_completion_length}[loss_type]
            A, R = float(batch.advantages[i, t]), float(batch.returns[i, t])
            ratio = math.exp(logp[i, t] - batch.rollout.logp[i, t])
            policy_part -= min(ratio * A, min(max(ratio, .8), 1.2) * A) / divisor
            old, v = float(batch.rollout.values[i, t]), float(values[i, t])
            near = min(max(v, old - .1), old + .1)
            critic_part += .5 * max((v - R) ** 2, (near - R) ** 2) / 2 / divisor
    assert float(out.terms.policy_loss.detach()) == pytest.approx(policy_part, abs=1e-5)
    assert float(out.terms.critic_loss.detach()) == pytest.approx(critic_part, rel=1e-4)
    assert float(out.loss.detach()) == pytest.approx(policy_part + critic_part, rel=1e-4)


def test_micro_batches_add_up():
    policy = with_critic(gpt())
    cfg = settings(entropy_coef=.1, **CRITIC)
    batch = sample(policy, cfg)
    whole = flat_grad(forward(policy, batch, cfg).loss, policy)
    parts = [flat_grad(forward(policy, batch, cfg, rows).loss, policy)
             for rows in (slice(5), slice(5, 16))]
    assert close(sum(parts), whole)


def test_the_kl_in_the_reward_is_taken_off_token_by_token():
    policy, reference = with_critic(gpt()), moved(gpt())
    cfg = settings(kl_in="reward", kl_estimator="k1", beta=.3, gae_lambda=1.0,
                   whiten_advantages=False, center_rewards=False, **CRITIC)
    batch = sample(policy, cfg, reference)
    gap = (batch.rollout.logp - batch.ref_logp) * batch.rollout.sampled_mask
    assert batch.kl == pytest.approx(float(gap.sum() / batch.loss_mask.sum()))
    for i, row in enumerate(batch.rollout.sampled_mask):
        for t in row.nonzero()[:, 0].tolist():
            expected = float(batch.rewards[i] - .3 * gap[i, t:].sum() - batch.rollout.values[i, t])
            assert float(batch.advantages[i, t]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("knobs", [
    dict(gae_gamma=.5), dict(gae_lambda=.5), dict(whiten_advantages=False), dict(value_coef=.1),
    dict(value_clip=.01), dict(center_rewards=False), dict(critic=False),
    dict(bootstrap_truncated_completions=True)], ids=lambda knobs: next(iter(knobs)))
def test_every_setting_does_something(knobs):
    policy = with_critic(gpt(end=3.0))
    found = []
    for more in ({}, knobs):
        cfg = settings(**(CRITIC | more))
        batch = sample(policy, cfg)
        found.append(float(forward(moved(policy), batch, cfg).loss.detach()))
    assert abs(found[0] - found[1]) > 1e-4


def test_the_head_is_zero_at_first_and_the_last_to_be_saved():
    cfg = small_settings(critic=True)
    nets, batch = small_world(cfg)
    assert not batch.rollout.values.any() and nets.policy.value_head.linear.weight.requires_grad
    assert list(nets.policy.state_dict())[-2:] == [
        "value_head.linear.weight", "value_head.linear.bias"]


def test_without_a_critic_its_settings_do_nothing():
    found = []
    for knobs in ({}, dict(gae_lambda=.1, value_coef=7.0, value_clip=.1, center_rewards=False)):
        policy = gpt()
        cfg = settings(beta=.1, kl_in="reward", **knobs)
        batch = sample(policy, cfg, moved(gpt()))
        assert batch.advantages.shape == (16,) and batch.returns is None
        update(nets_of(policy, cfg), batch, None, cfg, 3)
        found.append(torch.cat([p.flatten() for p in policy.parameters()]))
    assert torch.equal(*found)


def test_a_completion_that_nobody_scored_teaches_nothing():
    policy = with_critic(gpt())
    cfg = settings(num_iterations=2, **CRITIC)
    nets = nets_of(policy, cfg)
    batch = sample(policy, cfg)
    rewards = batch.rewards.clone()
    rewards[3] = math.nan
    A, returns = token_advantages(batch.rollout, rewards, 0.0, cfg)
    batch = replace(batch, advantages=A, returns=returns, rewards=rewards)
    others = A[batch.loss_mask & (torch.arange(16) != 3)[:, None]]
    assert not A[3].any() and float(others.mean()) == pytest.approx(0, abs=1e-5)
    later = moved(policy)       # whose values are not those recorded
    gradient = flat_grad(forward(later, batch, cfg, slice(3, 4)).loss, later)
    assert not gradient.any(), "neither the policy nor the critic may learn from it"
    m = update(nets, batch, None, cfg, 3)
    assert all(map(math.isfinite, m.values()))


def test_values_are_learned_through_the_loop():
    """The reward is a matter of the prompt alone, so a critic can know it all."""
    def by_prompt(prompts, completions):
        return [float(sum(map(ord, text)) % 7) for text in prompts]

    policy = with_critic(gpt(), 0.0)
    cfg = settings({"by_prompt": by_prompt}, num_iterations=4, critic=True, value_coef=1.0)
    nets = nets_of(policy, cfg, optimizer=torch.optim.Adam(policy.parameters(), lr=5e-3))
    for it in range(12):
        batch = grpo.collect(nets, PROMPTS, cfg, it)
        update(nets, batch, None, cfg, it)
    known = batch.loss_mask
    assert explained_variance(batch.rollout.values[known], batch.returns[known]) > .95


# ------------------------------------------------------------------------------------------------
# influence

@pytest.mark.parametrize("kl", ("all", "kept"))
@pytest.mark.parametrize("way", ("contracted", "kept"))
@pytest.mark.parametrize("target, lora", (
    ("self", False), ("reward", False), ("advantage", False), ("advantage", True)))
def test_influence_against_one_backward_per_row(target, lora, way, kl):
    policy = with_critic(with_lora(gpt()) if lora else gpt())
    cfg = settings(tracin=target, micro_batch_size=8, beta=.1, critic=True, value_coef=.01,
                   tracin_kl=kl)
    batch = sample(policy, cfg, moved(policy))
    g = row_gradients(policy, batch, cfg)
    G = g.sum(0)
    if target != "self":
        logp = completion_logprobs(policy, batch.rollout)
        A = batch.advantages
        if target == "reward":
            A = -16 * target_coefficients("reward", batch.rewards, A)[:, None]
        G = flat_grad(-(A * logp).sum() / 16, policy, materialize_grads=True)
    seen, m = step(policy, batch, cfg, way=way, first=True)
    assert close(batch.influence, g @ G) and m["tracin/invariant_error"] < 1e-5
    kept = (batch.influence > 0).float()
    rest = rest_gradient(with_critic(with_lora(gpt()) if lora else gpt()), batch, cfg)
    assert kept.sum() > 2 and close(flat(seen[0], policy), kept @ g + rest)
    head = policy.value_head.linear.weight
    assert seen[0][head].any(), "the critic learns"


@pytest.mark.parametrize("kl", ("all", "kept"))
def test_leave_one_out_with_a_critic(kl):
    policy = with_critic(gpt())
    cfg = settings(tracin="self", tracin_leave_one_out=True, tracin_kl=kl, **CRITIC)
    batch = sample(policy, cfg)
    g = row_gradients(policy, batch, cfg)
    step(policy, batch, cfg)
    assert close(batch.influence, g @ g.sum(0) - g.square().sum(1), 1e-3)
    with pytest.raises(BadInput, match="critic = False"):
        settings(tracin="reward", tracin_leave_one_out=True, **CRITIC)


@pytest.mark.parametrize("kl", ("all", "kept"))
def test_later_passes_weigh_the_critic_as_the_first(kl):
    policy = with_critic(gpt())
    cfg = settings(tracin_kl=kl, **CRITIC)
    batch = sample(policy, cfg)
    batch.weights[:] = torch.arange(16) % 3
    later = whole_step(batch)._replace(epoch=1)
    loss = loss_of(nets_of(policy, cfg), policy, batch, later.rows, later, cfg).loss
    g = row_gradients(policy, batch, cfg)
    rest = rest_gradient(policy, batch, cfg)
    assert close(flat_grad(loss, policy), batch.weights @ g + rest)


# ------------------------------------------------------------------------------------------------
# a run

RUN = ("--critic=True", "--judge=None", "--eval_judge=None", "--log_micro=False", "--lora_rank=2",
       "--learning_rate=0.01", "--num_iterations=2", "--save_interval=2", "--eval_interval=0",
       "--beta=0.1", "--sync_ref_model=True", "--ref_model_sync_steps=3", "--tracin=advantage",
       "--bootstrap_truncated_completions=True")


@pytest.fixture(scope="module")
def run(grpo, tmp_path_factory):
    """.out: what a run of four iterations printed. .folder, and .resumed: one in two parts."""
    where = tmp_path_factory.mktemp("critic")
    rule = where / "rule.py"
    rule.write_text("def reward(prompts, completions):\n"
                    "    return [sum(map(ord, text)) % 101 / 101 for text in completions]\n")
    out = grpo(where / "whole", rule, *RUN, "--max_iters=4")
    grpo(where / "parts", rule, *RUN, "--max_iters=2")
    grpo(where / "parts", rule, *RUN, "--max_iters=4", "--resume=True")
    return SimpleNamespace(out=out, folder=where / "whole", resumed=where / "parts")


def test_a_resumed_run_is_the_same(run, rows):
    a, b = (read_checkpoint(str(folder / "ckpt.pt")) for folder in (run.folder, run.resumed))
    assert a["policy"]["value_head.linear.weight"].any()
    assert all(torch.equal(x, b["policy"][name]) for name, x in a["policy"].items())
    for name in ("metrics.jsonl", "samples.jsonl"):
        for x, y in zip(rows(run.folder / name), rows(run.resumed / name), strict=True):
            assert x | {"step_time": 0} == y | {"step_time": 0}


def test_the_line_and_the_metrics_of_a_run(run, rows):
    assert ": loss " in run.out and ", critic 0." in run.out
    m = rows(run.folder / "metrics.jsonl")
    assert m[0]["val/mean"] == 0 == m[0]["val/std"] and m[-1]["val/std"] > 0
    assert all(row["val/grad_norm"] > 0 and row["critic_loss"] > 0 for row in m)
    assert m[-1]["val/var_explained"] < 1 and m[-1]["returns/mean"] != 0
    first = rows(run.folder / "samples.jsonl")[:16]
    assert len({row["advantage"] for row in first}) > 8


def test_other_commands_open_such_a_run(run, capsys):
    path = str(run.folder / "ckpt.pt")
    policy, _ = policy_of(path, read_checkpoint(path))
    head = policy.value_head.linear.weight
    assert head.any()
    _, _, trained, _ = open_run(str(run.folder), [])
    assert torch.equal(trained.value_head.linear.weight, head)
    explain.main([str(run.folder)])
    explain.main([str(run.folder), "--prompt=the green", "--completion= garden"])
    out = capsys.readouterr().out
    assert "Yes: brute agrees with both" in out and "most for it" in out
    error = re.search(r"tape beside ordinary autograd: error (\S+)", out)
    assert float(error[1]) < 1e-4
    names = merged_tensors(policy, {}, "gpt2")
    assert not any("value" in name for name in names), "export leaves the critic behind"


def test_a_run_does_not_go_on_without_its_critic(run, grpo):
    with pytest.raises(BadInput, match="critic was True, not False"):
        grpo(run.folder, os.path.join(run.folder.parent, "rule.py"), *RUN, "--critic=False",
             "--bootstrap_truncated_completions=False", "--max_iters=5", "--resume=True")


def test_a_step_taken_apart(grpo, tmp_path):
    out = grpo(tmp_path / "apart", "--critic=True", "--debug_step=True")
    assert "row 0, returns" in out and " + critic 0." in out and "value_head.linear.weight" in out


def test_one_completion_of_each_prompt_is_enough():
    cfg = small_settings(critic=True, num_generations=1)
    nets, batch = small_world(cfg)
    m = update(nets, batch, None, cfg, seed=1, first=True)
    assert batch.advantages.any() and m["grad_norm"] > 0
    check_method(nets, cfg, grpo.collect, grpo.optimizer_steps, grpo.loss_of)


@pytest.mark.parametrize("knobs, expected", [
    (dict(critic=False, num_generations=1), "at least 2"),
    (dict(importance_sampling_level="sequence"), "importance_sampling_level = 'token'"),
    (dict(zero_std_groups="drop"), "zero_std_groups = 'keep'"),
    (dict(multi_objective_aggregation="normalize_then_sum"), "'sum_then_normalize'"),
    (dict(value_clip=0.0), "above 0"), (dict(value_coef=-1.0), "at least 0"),
    (dict(gae_lambda=1.5), "from 0 to 1"), (dict(gae_gamma=-.1), "from 0 to 1"),
    (dict(critic=False, bootstrap_truncated_completions=True), "critic = True"),
    (dict(bootstrap_truncated_completions=True, mask_truncated_completions=True), "unset one")])
def test_what_cannot_work_is_refused(knobs, expected):
    with pytest.raises(BadInput, match=expected):
        settings(**(dict(critic=True) | knobs))


def test_warnings(capsys):
    cfg = settings(**CRITIC)
    m = {"iteration": 25, "reward": 1.0, "reward_min": 0.0, "reward_max": 2.0, "advantage_max": 1.0,
         "sampling/sampling_logp_difference/mean": 0.0, "num_completion_tokens": 9,
         "logp_min": -1.0, "frac_identical_groups": 0.0, "completions/clipped_ratio": 0.5,
         "grad_norm": 1.0, "loss": .1235, "policy_loss": .1201, "critic_loss": .0034,
         "rewards/letters/std": 1.0, "step_time": 1.0, "val/mean": 1.0, "val/std": .5,
         "val/var_explained": .3}
    assert diagnose(m, cfg) == {}
    assert "do not move" in diagnose(m | {"val/std": 0.0}, cfg)["values"]
    assert diagnose(m | {"val/std": 0.0, "iteration": 1}, cfg) == {}
    assert diagnose(m | {"val/std": 0.0, "val/mean": math.nan}, cfg) == {}, "no token is known"
    assert "less than a constant" in diagnose(m | {"val/var_explained": -.1}, cfg)["explained"]
    assert diagnose(m | {"val/var_explained": -.1, "iteration": 20}, cfg) == {}
    print_iteration(m | {"forced": 0.0}, cfg, 100, 5)
    print_warnings(m, cfg, torch.float32, {})
    assert "loss 0.1235 (main 0.1201, critic 0.0034, kl 0.0000)" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# what is broken is named before training

def negative_advantages(*arguments):
    A, returns = critic.token_advantages(*arguments)
    return -A, returns


def negative_errors(*arguments):
    return -critic.value_errors(*arguments)


@pytest.mark.parametrize("name, broken, expected", [
    ("token_advantages", negative_advantages, "another order"),
    ("value_errors", negative_errors, "towards their returns")])
def test_the_check_before_a_run_finds(name, broken, expected, monkeypatch):
    cfg = small_settings(critic=True)
    nets, _ = small_world(cfg)

    def check():
        check_method(nets, cfg, grpo.collect, grpo.optimizer_steps, grpo.loss_of)

    check()
    monkeypatch.setattr(grpo, name, broken)
    with pytest.raises(SystemExit, match=expected):
        check()


@pytest.mark.parametrize("knobs", [
    dict(beta=.1), dict(beta=.1, kl_in="reward", kl_estimator="k1"), dict(gae_gamma=0.0),
    dict(gae_lambda=0.0), dict(whiten_advantages=False), dict(center_rewards=False),
    dict(value_clip=.2), dict(loss_type="grpo"), dict(loss_type="sapo"), dict(entropy_coef=.1),
    dict(bootstrap_truncated_completions=True)], ids=lambda knobs: next(iter(knobs)))
def test_the_check_before_a_run_passes(knobs):
    cfg = small_settings(critic=True, **knobs)
    nets, _ = small_world(cfg)
    check_method(nets, cfg, grpo.collect, grpo.optimizer_steps, grpo.loss_of)


def test_a_copy_of_the_policy_has_the_head():
    """sync_ref_model copies it, so that parameters go in pairs."""
    cfg = small_settings(critic=True, beta=.1, sync_ref_model=True)
    nets, _ = small_world(cfg)
    nets.policy = copy.deepcopy(nets.policy)
    with torch.no_grad():
        nets.policy.value_head.linear.weight += 1
    assert grpo.sync_reference(nets, 1.0) == {"ref_tensors_differing": 0}
