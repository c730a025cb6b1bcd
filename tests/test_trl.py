"""
Where this project departs from TRL on purpose: the rows of docs/trl.md that nothing else tests.

`python .ci/planted.py "(TRL"` undoes one departure after the other, and names the test of each.
"""
import math

import pytest
import torch

import grpo
from run.metrics import batch_metrics
from run.settings import Settings
from worlds import forward, gradient, read_rows, settings, setup_of, skip_without, world


def scores_by_prompt(prompts, completions):
    """Equal for the first prompt, and for the second as many as the completion has words."""
    return [1.0 if prompt == prompts[0] else float(len(text.split())) + i / 100
            for i, (prompt, text) in enumerate(zip(prompts, completions))]


@pytest.mark.parametrize("size", (3, 7))
def test_equal_rewards_give_advantages_of_exactly_0(size):
    """Row 5. The mean of equal numbers is not always one of them."""
    rewards = torch.rand(200, 1, dtype=torch.float64).expand(200, size)
    assert (rewards.mean(1) != rewards[:, 0]).any(), "no rounding to be seen"
    found = grpo.group_advantages(rewards.flatten(), size)
    assert not found.any(), f"row 5: equal rewards give an advantage of {found.abs().max():.1e}"


def test_groups_are_counted_whatever_the_advantages_are_divided_by():
    """Row 8."""
    for scale in ("group", "batch", "none"):
        cfg = settings(scores_by_prompt, scale_rewards=scale)
        _, batch = world(cfg)
        found = batch_metrics(batch, cfg)["frac_reward_zero_std"]
        assert found == 0.5, f"row 8: one group of two teaches nothing, with {scale} it is {found}"


def test_a_rate_is_that_of_its_iteration_whatever_steps_it_takes():
    """Row 10."""
    cfg = settings(lr_decay="linear", max_iters=4, num_iterations=3, mini_batch_size=4)
    setup, batch = world(cfg)
    grpo.set_learning_rate(setup.optimizer, 2, cfg)
    expected = setup.optimizer.param_groups[0]["lr"]
    rates = []
    meter = grpo.Meter(
        setup, cfg, watch=lambda *_: rates.append(setup.optimizer.param_groups[0]["lr"]))
    grpo.update(setup, batch, None, cfg, 3, meter)
    assert rates == [expected] * 9, f"row 10: the rate moves within an iteration: {rates}"


def test_the_reference_follows_by_iterations_and_not_by_steps(run_grpo, tmp_path):
    """Row 11: two steps in each of three iterations."""
    run_grpo(tmp_path / "run", "--beta=0.1", "--ref_model_sync_steps=2", "--num_iterations=2")
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    synced = [row["iteration"] for row in rows if "ref_tensors_differing" in row]
    assert [row["num_steps"] for row in rows] == [2, 2, 2] and synced == [2], (
        f"row 11: the reference followed after iterations {synced}, must after the second alone")


def test_a_mini_batch_without_loss_is_no_step():
    """Row 12: AdamW's momentum would move the weights."""
    cfg = settings()
    setup, batch = world(cfg)
    setup.optimizer = torch.optim.AdamW(setup.trained, lr=0.01)
    grpo.update(setup, batch, None, cfg, 3)     # now it has momentum
    before = [p.detach().clone() for p in setup.trained]
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    m = grpo.update(setup, batch, None, cfg, 3)
    assert m["num_steps"] == 0, "row 12: it is counted as a step"
    assert all(map(torch.equal, setup.trained, before)), "row 12: the weights moved"


def test_the_entropy_bonus_is_of_all_tokens_whatever_the_quantile():
    """Row 13."""
    found = []
    for quantile in (1.0, 0.3):
        cfg = settings(entropy_coef=0.3, top_entropy_quantile=quantile)
        setup, batch = world(cfg)
        found.append(grpo.update(setup, batch, None, cfg, 3)["entropy_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5), (
        f"row 13: the bonus is {found[0]:.4f} of all tokens, {found[1]:.4f} with a quantile")


def test_a_group_with_one_score_counts_as_one_of_equal_rewards():
    """Row 17."""
    nan = math.nan
    rewards = torch.tensor([[nan, 3, nan], [nan, nan, nan], [1, 2, nan]]).double()
    batch = grpo.Batch(rollout=None, rewards=rewards.flatten())
    assert batch.equal_rows(3).view(3, 3)[:, 0].tolist() == [True, True, False], (
        "row 17: groups with at most one score teach nothing")
    assert not grpo.group_advantages(rewards.flatten(), 3)[:6].any(), "row 17"


@pytest.mark.parametrize("size", (1e-12, 1.0, 1e12))
def test_rewards_are_equal_beside_their_size(size):
    """Row 18: rewards of any size teach, and rounding of any size does not."""
    different = size * torch.tensor([1.0, 1.001, 1.0, 1.0], dtype=torch.float64)
    rounding = size * torch.tensor([1.0, 1 + 1e-12, 1.0, 1.0], dtype=torch.float64)
    teaches = [grpo.group_advantages(x, 4, "none").any() for x in (different, rounding)]
    assert teaches == [True, False], f"row 18: of rewards near {size:g}"


def test_the_critic_starts_without_a_clip():
    """PPO's fifth row: it is in units of the reward."""
    assert Settings().value_clip is None


def test_the_values_share_the_policys_forward_pass():
    """PPO's first row: what the values learn moves the policy's own weights."""
    skip_without("critic")
    cfg = settings(critic=True, num_generations=6)
    setup = setup_of(cfg)
    with torch.no_grad():
        setup.policy.value_head.linear.weight += 0.1
    batch = grpo.collect(setup, setup.prompts, cfg, 1)
    loss = forward(setup, batch, cfg)
    assert gradient(loss.critic, [setup.policy.wte.weight]).any(), (
        "PPO's row 1: the values' loss does not reach the policy")
