"""
Settings reach the step: what grpo.collect and grpo.update do with them on a tiny GPT, against
log-probs computed row by row, without padding, mask or cache. The arithmetic: test_loss.py.
"""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
from config import Settings
from grpo import collect, learning_rate, sync_reference, update
from run.metrics import batch_metrics
from rollout import Rollout, generate
from worlds import (
    WORD_PROMPTS, WORDS, forcing, forward, generator_of, gradient, letters, nets_of, plain_logps,
    refusal, shaken, steps_of, word_gpt, words)

NAN, INF = math.nan, math.inf


def nets_and_batch(cfg, policy=None, reference=None, seed=7, optimizer=None, lr=.05):
    setup = nets_of(cfg, policy or word_gpt(), WORD_PROMPTS, WORDS, reference, lr, optimizer)
    return setup, collect(setup, WORD_PROMPTS, cfg, seed)


def moved():
    return shaken(word_gpt(), .02)


def weights_of(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def close(a, b, tolerance=1e-5):
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def test_the_first_step_is_reinforce_and_the_second_is_clipped():
    cfg = words(num_iterations=2)
    setup, batch = nets_and_batch(cfg, lr=.02)
    tokens = batch.loss_mask.sum()
    reinforce = 0.0
    for A, logp in zip(batch.advantages, plain_logps(setup.policy, batch.rollout)):
        reinforce -= A * logp.sum() / tokens
    expected = gradient(reinforce, setup.trained)
    (first, second), _ = steps_of(setup, batch, cfg)
    assert close(first, expected), "the first step's gradient is not that of -A logp / tokens"

    again, _ = nets_and_batch(cfg, lr=.02)
    update(again, batch, None, words(), 3)     # the first step alone
    clipped = 0.0
    rows = plain_logps(again.policy, batch.rollout)
    for A, new, old in zip(batch.advantages, rows, batch.rollout.logp):
        ratio = (new - old[:len(new)]).exp()
        clipped -= torch.min(ratio * A, ratio.clamp(.8, 1.2) * A).sum() / tokens
    assert close(second, gradient(clipped, again.trained), 1e-4), (
        "the second step's gradient is not that of the clipped ratio to the sampler")
    assert not close(first, second, .05)


def spied(monkeypatch):
    """Rows and number of rows of each call of loss_of."""
    calls = []
    plain = grpo.loss_of

    def spy(setup, policy, batch, rows, step, cfg):
        calls.append((rows.tolist(), step.num_rows, step.num_tokens))
        return plain(setup, policy, batch, rows, step, cfg)

    monkeypatch.setattr(grpo, "loss_of", spy)
    return calls


def test_passes_mini_batches_and_micro_batches(monkeypatch):
    cfg = words(num_iterations=2, mini_batch_size=4, micro_batch_size=2)
    setup, batch = nets_and_batch(cfg)
    calls = spied(monkeypatch)

    def order_of(seed):
        """Rows in the order in which the 8 micro-batches of each pass take them."""
        calls.clear()
        assert update(setup, batch, None, cfg, seed)["num_steps"] == 8
        rows = [row for call in calls for row in call[0]]
        return rows[:16], rows[16:]

    first, second = order_of(3)
    assert sorted(first) == sorted(second) == list(range(16)), "a pass takes each row once"
    assert first != second, "the second pass has the order of the first"
    for one, other in zip(calls[::2], calls[1::2]):
        rows = one[0] + other[0]
        assert one[1:] == other[1:] == (4, int(batch.loss_mask[rows].sum()))
        lengths = batch.rollout.completion_mask[rows].sum(1).tolist()
        assert lengths == sorted(lengths), "rows of like length share a micro-batch"
    assert order_of(4)[0] != first, "the seed chooses the order"
    steps = grpo.optimizer_steps(batch, cfg, 3)
    one, two = torch.cat([step.rows for step in steps]).view(2, 16)
    assert not torch.equal(two, one[one]), "the second pass shuffles just as the first did"


@pytest.mark.parametrize("knobs", [
    dict(beta=.1), dict(mask_truncated_completions=True), dict(entropy_coef=.1),
    dict(importance_sampling_level="sequence", loss_type="grpo"), dict(top_entropy_quantile=.4),
    dict(zero_std_groups="drop", loss_type="dr_grpo"), dict(loss_type="bnpo")])
def test_the_size_of_micro_batches_changes_memory_only(knobs):
    def step_in_pieces(size):
        cfg = words(micro_batch_size=size, **knobs)
        setup, batch = nets_and_batch(cfg, reference=moved())
        shaken(setup.policy, .01)        # ratios and clips differ
        (step,), m = steps_of(setup, batch, cfg)
        return step, m["policy_loss"]

    whole, loss = step_in_pieces(16)
    for size in (5, 1):
        step, found = step_in_pieces(size)
        same = close(step, whole) and found == pytest.approx(loss, abs=1e-5)
        assert same == (knobs.get("loss_type") != "bnpo")


def test_the_gradient_is_scaled_down_to_max_grad_norm():
    cfg = words()
    (free,), m = steps_of(*nets_and_batch(cfg), cfg)
    capped_cfg = replace(cfg, max_grad_norm=.01)
    (capped,), _ = steps_of(*nets_and_batch(cfg), capped_cfg)
    assert m["grad_norm"] == pytest.approx(float(free.norm()), rel=1e-4)
    assert close(capped, free * (.01 / free.norm()), 1e-4)


@pytest.mark.parametrize("decay, warmup, expected", [
    ("constant", 2, [.5, 1, 1, 1]), ("linear", 2, [.5, 1, 1, .5]),
    ("cosine", 0, [1, .853553, .5, .146447])])
def test_learning_rates(decay, warmup, expected):
    cfg = words(lr_decay=decay, warmup_iters=warmup, max_iters=4, learning_rate=1.0)
    assert [learning_rate(it, cfg) for it in range(4)] == pytest.approx(expected, abs=1e-6)


def test_the_reference_follows_the_policy():
    cfg = words(beta=.1, ref_model_sync_steps=1)
    setup, _ = nets_and_batch(cfg)
    setup.policy, setup.reference = moved(), shaken(word_gpt(), .02, seed=6)
    before = weights_of(setup.reference)
    sync_reference(setup, .25)
    expected = .75 * before + .25 * weights_of(setup.policy)
    assert close(weights_of(setup.reference), expected, 1e-6), (
        "the reference is not 3/4 of itself and 1/4 of the policy")
    sync_reference(setup, 1.0)
    assert torch.equal(weights_of(setup.reference), weights_of(setup.policy))


def equal_at_first(prompts, completions):
    """Equal rewards for the first two prompts, near 833."""
    few = [prompt.text for prompt in WORD_PROMPTS[:2]]
    return [833.5426 if p in few else x for p, x in zip(prompts, letters(prompts, completions))]


def sometimes(prompts, completions):
    """The same, and says nothing about every third completion."""
    found = equal_at_first(prompts, completions)
    return [None if i in (0, 3, 6) else x for i, x in enumerate(found)]


@pytest.mark.parametrize("loss_type", ("grpo", "dapo"))
def test_dropped_groups_leave_the_divisor(loss_type):
    functions = {"sometimes": sometimes, "half": lambda completions: [.5] * len(completions)}
    cfg = words(functions, loss_type=loss_type)
    batch = nets_and_batch(cfg)[1]
    assert (batch.advantages[:8] == 0).all()
    assert (batch.advantages[8:] != 0).any()
    assert batch_metrics(batch, cfg)["frac_reward_zero_std"] == .5
    (kept,), _ = steps_of(*nets_and_batch(cfg), cfg)
    drop = replace(cfg, zero_std_groups="drop")
    (dropped,), _ = steps_of(*nets_and_batch(drop), drop)
    rows_left = .5
    tokens_left = float(batch.loss_mask[8:].sum() / batch.loss_mask.sum())
    assert tokens_left < .9
    assert close(kept, dropped * (tokens_left if loss_type == "dapo" else rows_left))


def test_all_groups_dropped_is_no_step():
    cfg = words(lambda completions: [.1] * len(completions), zero_std_groups="drop")
    for how, steps in (("drop", 0), ("keep", 1)):
        policy = word_gpt()
        # weight decay would show a step without gradient
        decaying = torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.5)
        setup, batch = nets_and_batch(cfg, policy, optimizer=decaying)
        m = update(setup, batch, None, replace(cfg, zero_std_groups=how), 3)
        assert m["num_steps"] == steps
        assert m["loss"] == m["grad_norm"] == 0
        assert torch.equal(weights_of(policy), weights_of(word_gpt())) == (steps == 0)


def test_truncated_completions_carry_no_loss():
    cfg = words(mask_truncated_completions=True)
    _, batch = nets_and_batch(cfg)
    ended = batch.rollout.ended
    assert 0 < ended.sum() < 16
    expected = batch.rollout.completion_mask & ended[:, None]
    assert torch.equal(batch.loss_mask, expected), "all tokens of those that ended carry loss"
    step, = grpo.optimizer_steps(batch, cfg, seed=3)
    assert step.num_tokens == int(expected.sum()), "the others count in the divisor"


def test_the_entropy_bonus_is_the_mean_over_tokens_with_loss():
    cfg = words(entropy_coef=.3, loss_type="grpo", mask_truncated_completions=True)
    setup, batch = nets_and_batch(cfg)
    assert batch.loss_mask.sum() < batch.rollout.completion_mask.sum()
    m = update(setup, batch, None, cfg, 3)
    bonus = .3 * float(batch.rollout.entropy[batch.loss_mask].mean())
    found = m["policy_loss"] - m["loss"]
    assert found == pytest.approx(bonus, rel=1e-4), (
        f"the entropy takes {found:.4f} off the loss: must be 0.3 times its mean, {bonus:.4f}")


def forced_batch(cfg, policy, reference, **sampling):
    """A Batch with forced tokens. Row 1 is forced from its second token on."""
    generator = generator_of(2)
    ids = torch.randint(3, 100, (16, 8), generator=generator)
    forced = ids.where(torch.rand(16, 8, generator=generator) < .3, -1)
    forced[1] = ids[1]
    setup = nets_of(cfg, policy, WORD_PROMPTS, WORDS, reference)
    more = dict(respond=forcing(forced)) | sampling
    setup.generate = lambda *args, **kwargs: generate(*args, **kwargs | more)
    return setup, collect(setup, WORD_PROMPTS, cfg, 7)


def test_forced_tokens_are_seen_and_carry_no_loss():
    cfg = words(beta=.1)
    setup, batch = forced_batch(cfg, word_gpt(), moved())
    sampled = batch.rollout.sampled_mask
    assert torch.equal(batch.loss_mask, sampled)
    assert sampled[1].sum() == 1
    assert 10 < sampled.sum() < batch.rollout.completion_mask.sum() - 10
    for i, expected in enumerate(plain_logps(setup.policy, batch.rollout)):
        own = sampled[i, :len(expected)]
        found = batch.rollout.logp[i, :len(expected)]
        assert close(found[own], expected[own].detach()), "what was forced before is not seen"
    loss = forward(setup, batch, cfg)
    slope = gradient(loss.total, [loss.logp]).view_as(sampled)
    assert not slope[~sampled].any(), "a forced token carries loss"
    assert slope[sampled].all(), "a sampled token carries no loss"


@pytest.mark.parametrize("knobs", [
    dict(kl_in="reward", kl_estimator="k1"), dict(entropy_coef=.1)])
def test_a_forced_token_that_sampling_would_not_draw_gives_no_nan(knobs):
    """Outside of top_k its log-prob is -inf, and 0 * inf would be NaN."""
    cfg = words(beta=.1, top_k=4, **knobs)
    setup, batch = forced_batch(cfg, word_gpt(), moved())
    forced = batch.rollout.completion_mask & ~batch.rollout.sampled_mask
    tokens = batch.rollout.tokens[:, -8:]
    drawable = batch.rollout.allowed.gather(2, tokens[:, :, None])[:, :, 0]
    assert (forced & ~drawable).any()
    assert batch.ref_logp.isfinite().all()
    assert batch.advantages.isfinite().all()
    assert batch.kl.isfinite().all()
    (step,), m = steps_of(setup, batch, cfg)
    assert step.isfinite().all()
    assert math.isfinite(m["loss"])


def spoil_weight(setup, batch):
    setup.policy.h[1].mlp.c_fc.weight.data[3, 4] = NAN


def spoil_reward(setup, batch):
    batch.rewards[0] = INF
    batch.advantages[0] = NAN


def spoil_gradient(setup, batch):
    setup.policy.ln_f.weight.register_hook(lambda g: g * NAN)


def spoil_logp(setup, batch):
    batch.rollout.logp[0, 0] = INF


def spoil_logp_below(setup, batch):
    batch.rollout.logp[0, 0] = -INF


@pytest.mark.parametrize("check", (True, False))
@pytest.mark.parametrize("spoil", (
    spoil_weight, spoil_reward, spoil_gradient, spoil_logp, spoil_logp_below))
def test_what_is_not_finite_stops_before_the_step(spoil, check):
    policy = word_gpt()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=.01, fused=True)
    setup, batch = nets_and_batch(words(), policy, optimizer=optimizer)
    spoil(setup, batch)
    before = weights_of(policy)
    assert refusal(update, setup, batch, None, words(), 3, check=check).startswith("stopped")
    assert torch.equal(weights_of(policy).nan_to_num(7), before.nan_to_num(7))


def test_a_model_with_dropout_is_found_out():
    policy = word_gpt()
    policy.lm_head.register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, .1))
    setup, batch = nets_and_batch(words(), policy)
    assert "the ratio is not 1" in refusal(update, setup, batch, None, words(), 3, check=True)
    assert update(setup, batch, None, words(), 3, check=False)["num_steps"] == 1


def test_bfloat16():
    cfg = words(beta=.1)
    setup, _ = nets_and_batch(cfg, reference=moved())
    setup.dtype = torch.bfloat16
    batch = collect(setup, WORD_PROMPTS, cfg, 7)
    assert batch.rollout.logp.dtype == batch.ref_logp.dtype == torch.float32
    assert math.isfinite(update(setup, batch, None, cfg, 3, check=True)["grad_norm"])
    assert all(p.dtype == torch.float32 for p in setup.policy.parameters())


def test_bnpo_divides_by_micro_batches_in_the_order_of_the_batch():
    """Sorted by length, a short completion would share its divisor with short ones alone."""
    completion_mask = torch.arange(9) < torch.tensor([1, 9, 1, 9])[:, None]
    rollout = SimpleNamespace(completion_mask=completion_mask)
    for loss_type, expected in (("bnpo", [[0, 1], [2, 3]]), ("dapo", [[0, 2], [1, 3]])):
        cfg = words(loss_type=loss_type, micro_batch_size=2)
        pieces = grpo.micro_batches(rollout, torch.arange(4), cfg)
        assert [piece.tolist() for piece in pieces] == expected


def test_the_entropy_quantile_of_a_very_large_batch():
    """torch.quantile takes 2 ** 24 numbers at most."""
    n = 2 ** 24 + 1
    mask = torch.ones(1, n, dtype=torch.bool)
    entropy = torch.arange(n, dtype=torch.float64)[None]
    rollout = Rollout(mask, mask, mask, mask, entropy, entropy, mask.any(1))
    _, policy_mask = grpo.loss_masks(rollout, Settings(top_entropy_quantile=0.25))
    assert int(policy_mask.sum()) == 2 ** 22 + 1 and policy_mask[0, -2 ** 22 - 1:].all()
