"""
Settings reach the step: what grpo.collect and grpo.update do with them on a tiny GPT, against
log-probs computed row by row, without padding, mask or cache. The arithmetic: test_loss.py.
"""
import math
from dataclasses import replace

import pytest
import torch

import grpo
from grpo import collect, learning_rate, sync_reference, update
from run.metrics import batch_metrics
from rollout import Rollout, completion_entropies, generate
from run.settings import Settings
from worlds import (
    WORDS, WORD_PROMPTS, forcing, forward, gradient, inputs_of, letters, plain_logps, random_ids,
    refusal, setup_of, shaken, steps_of, word_gpt, words)

NAN, INF = math.nan, math.inf


def nets_and_batch(cfg, policy=None, reference=None, seed=7, optimizer=None, lr=.05):
    setup = setup_of(cfg, policy or word_gpt(), WORD_PROMPTS, WORDS, reference, lr, optimizer)
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

    def expected(setup):
        """Of the loss of completions read one by one."""
        loss = 0.0
        rows = plain_logps(setup.policy, batch.rollout)
        for A, logp, old_logp in zip(batch.advantages, rows, batch.rollout.logp):
            ratio = (logp - old_logp[:len(logp)]).exp()
            loss -= torch.min(ratio * A, ratio.clamp(.8, 1.2) * A).sum() / tokens
        return gradient(loss, setup.trained)

    first = expected(setup)
    steps, _ = steps_of(setup, batch, cfg)
    assert close(steps[0], first), "the first step's gradient is not that of A times the ratio"
    again, _ = nets_and_batch(cfg, lr=.02)
    update(again, batch, None, words(), 3)     # the first step alone
    second = expected(again)
    assert close(steps[1], second, 1e-4), (
        "the second step's gradient is not that of the clipped ratio to the sampler")
    assert not close(first, second, .05)


def test_passes_mini_batches_and_micro_batches():
    cfg = words(num_iterations=2, mini_batch_size=4, micro_batch_size=2)
    _, batch = nets_and_batch(cfg)
    steps = list(grpo.optimizer_steps(batch, cfg, 3))
    assert [step.epoch for step in steps] == [0] * 4 + [1] * 4
    first, second = torch.cat([step.rows for step in steps]).view(2, 16)
    assert first.unique().tolist() == second.unique().tolist() == list(range(16)), (
        "a pass takes each row once")
    assert not torch.equal(first, second), "the second pass has the order of the first"
    assert not torch.equal(second, first[first]), "the second pass shuffles just as the first did"
    other = torch.cat([step.rows for step in grpo.optimizer_steps(batch, cfg, 4)])
    assert not torch.equal(other[:16], first), "the seed chooses the order"
    lengths = batch.rollout.completion_mask.sum(1)
    for step in steps:
        assert step[2:] == (4, int(batch.loss_mask[step.rows].sum()))
        pieces = grpo.micro_batches(batch.rollout, step.rows, cfg)
        assert [len(piece) for piece in pieces] == [2, 2]
        in_pieces = lengths[torch.cat(pieces)]
        assert torch.equal(in_pieces, lengths[step.rows].sort().values), (
            "rows of similar length share a micro-batch")
        # a short completion of bnpo would share its divisor with short ones alone
        unsorted = grpo.micro_batches(batch.rollout, step.rows, replace(cfg, loss_type="bnpo"))
        assert torch.equal(torch.cat(unsorted), step.rows)


@pytest.mark.parametrize("knobs", [
    dict(beta=.1), dict(mask_truncated_completions=True), dict(entropy_coef=.1),
    dict(importance_sampling_level="sequence", loss_type="grpo"), dict(top_entropy_quantile=.4),
    dict(zero_std_groups="drop", loss_type="dr_grpo"), dict(loss_type="bnpo")])
def test_the_size_of_micro_batches_changes_memory_only(knobs):
    found = []
    for size in (16, 5, 1):
        cfg = words(micro_batch_size=size, **knobs)
        setup, batch = nets_and_batch(cfg, reference=moved())
        shaken(setup.policy, .01)        # ratios and clips differ
        (step,), m = steps_of(setup, batch, cfg)
        found.append((step, m["policy_loss"]))
    for step, loss in found[1:]:
        same = close(step, found[0][0]) and loss == pytest.approx(found[0][1], abs=1e-5)
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


def test_matrices_decay_and_no_bias_or_gain_does():
    """In the optimizer of a run. Without a gradient AdamW does nothing else."""
    cfg = words(weight_decay=.1, learning_rate=.5)
    policy = word_gpt()
    before = [p.detach().clone() for p in policy.parameters()]
    setup = grpo.prepare(cfg, inputs_of(policy, WORD_PROMPTS, WORDS))
    for p in setup.trained:
        p.grad = torch.zeros_like(p)
    setup.optimizer.step()
    kinds = set()
    for now, then in zip(setup.policy.parameters(), before, strict=True):
        kinds.add(now.dim())
        expected = .95 * then if now.dim() == 2 else then
        assert close(now.detach(), expected, 1e-6), "not matrices alone decay, or they do not"
    assert kinds == {1, 2}


@pytest.mark.parametrize("knobs", (dict(num_iterations=3), dict(mini_batch_size=8),
                                   dict(num_iterations=2, micro_batch_size=5)))
def test_the_entropy_quantile_is_of_each_step_as_the_policy_is_then(knobs):
    """As TRL: entropies of now, at or above their quantile. And all steps have one rate."""
    cfg = words(top_entropy_quantile=.3, **knobs)
    setup, batch = nets_and_batch(cfg, lr=.5)
    masks = []

    def watch(step, norm):
        entropy = completion_entropies(setup.policy, batch.rollout, cfg.temperature)[step.rows]
        mask = batch.loss_mask[step.rows]
        expected = mask & (entropy >= entropy[mask].quantile(.7))
        assert torch.equal(batch.policy_mask[step.rows] & mask, expected)
        masks.append(expected)

    update(setup, batch, None, cfg, 3, watch=watch)
    assert len(masks) > 1
    if len(masks) == 3:
        assert not torch.equal(masks[0], masks[2]), "the steps changed no entropy: another rate?"


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


def sometimes(prompts, completions):
    """Equal rewards for the first two prompts, near 833; nothing about some completions."""
    few = [prompt.text for prompt in WORD_PROMPTS[:2]]
    found = [833.5426 if p in few else x for p, x in zip(prompts, letters(prompts, completions))]
    return [None if i in (0, 3, 6) else x for i, x in enumerate(found)]


@pytest.mark.parametrize("loss_type", ("grpo", "dapo"))
def test_dropped_groups_leave_the_divisor(loss_type):
    functions = {"sometimes": sometimes, "half": lambda completions: [.5] * len(completions)}
    cfg = words(functions, loss_type=loss_type)
    setup, batch = nets_and_batch(cfg)
    assert (batch.advantages != 0).view(2, 8).any(1).tolist() == [False, True]
    assert batch_metrics(batch, cfg)["frac_reward_zero_std"] == .5
    (kept,), _ = steps_of(setup, batch, cfg)
    drop = replace(cfg, zero_std_groups="drop")
    (dropped,), _ = steps_of(*nets_and_batch(drop), drop)
    left = {"grpo": .5, "dapo": float(batch.loss_mask[8:].sum() / batch.loss_mask.sum())}
    assert left["dapo"] < .9
    assert close(kept, dropped * left[loss_type])


def test_bnpo_mixes_the_rows_of_its_micro_batches():
    """It divides by the tokens of a micro-batch. Those of one prompt, side by side, may all be
    long, and would have less weight."""
    cfg = words(loss_type="bnpo", num_iterations=2, micro_batch_size=4)
    _, batch = nets_and_batch(cfg)
    orders = [step.rows.tolist() for step in grpo.optimizer_steps(batch, cfg, seed=3)]
    assert all(sorted(rows) == list(range(16)) != rows for rows in orders)
    assert orders[0] != orders[1]


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
    ids = 3 + random_ids(16, 8, 97)
    forced = ids.where(random_ids(16, 8, 10, seed=2) < 3, -1)
    forced[1] = ids[1]
    setup = setup_of(cfg, policy, WORD_PROMPTS, WORDS, reference)
    more = dict(respond=forcing(forced)) | sampling
    setup.generate = lambda *args, **kwargs: generate(*args, **kwargs | more)
    return setup, collect(setup, WORD_PROMPTS, cfg, 7)


def test_forced_tokens_carry_no_loss():
    cfg = words(beta=.1)
    setup, batch = forced_batch(cfg, word_gpt(), moved())
    sampled = batch.rollout.sampled_mask
    assert 10 < sampled.sum() < batch.rollout.completion_mask.sum() - 10
    loss = forward(setup, batch, cfg)
    slope = gradient(loss.total, [loss.logp]).view_as(sampled)
    assert torch.equal(slope != 0, sampled), "sampled tokens carry loss, forced ones none"


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
    for x in (batch.ref_logp, batch.advantages, batch.kl):
        assert x.isfinite().all()
    (step,), m = steps_of(setup, batch, cfg)
    assert step.isfinite().all()
    assert math.isfinite(m["loss"])


SPOILS = {
    "weight": lambda setup, batch: setup.policy.h[1].mlp.c_fc.weight.data.fill_(NAN),
    "advantage": lambda setup, batch: batch.advantages.fill_(NAN),
    "gradient": lambda setup, batch: setup.policy.ln_f.weight.register_hook(lambda g: g * NAN),
    "log-prob": lambda setup, batch: batch.rollout.logp[0].fill_(INF),
    "log-prob below": lambda setup, batch: batch.rollout.logp[0].fill_(-INF)}


@pytest.mark.parametrize("check", (True, False))
@pytest.mark.parametrize("what", SPOILS)
def test_what_is_not_finite_stops_before_the_step(what, check):
    policy = word_gpt()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=.01, fused=True)
    setup, batch = nets_and_batch(words(), policy, optimizer=optimizer)
    SPOILS[what](setup, batch)
    before = weights_of(policy)
    assert refusal(update, setup, batch, None, words(), 3, check=check).startswith("stopped")
    assert torch.equal(weights_of(policy).nan_to_num(7), before.nan_to_num(7))


def test_a_model_with_dropout_is_found_out():
    policy = word_gpt()
    policy.lm_head.register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, .1))
    setup, batch = nets_and_batch(words(), policy)
    assert "ratio" in refusal(update, setup, batch, None, words(), 3, check=True)
    assert update(setup, batch, None, words(), 3, check=False)["num_steps"] == 1


def test_bfloat16():
    cfg = words(beta=.1)
    setup, _ = nets_and_batch(cfg, reference=moved())
    setup.dtype = torch.bfloat16
    batch = collect(setup, WORD_PROMPTS, cfg, 7)
    assert batch.rollout.logp.dtype == batch.ref_logp.dtype == torch.float32
    assert math.isfinite(update(setup, batch, None, cfg, 3, check=True)["grad_norm"])
    assert all(p.dtype == torch.float32 for p in setup.policy.parameters())


def test_the_entropy_quantile_of_a_very_large_batch():
    """torch.quantile takes 2 ** 24 numbers at most."""
    n = 2 ** 24 + 1
    mask = torch.ones(1, n, dtype=torch.bool)
    entropy = torch.arange(n, dtype=torch.float64)[None]
    rollout = Rollout(mask, mask, mask, mask, entropy, entropy, mask.any(1))
    _, policy_mask = grpo.loss_masks(rollout, Settings(top_entropy_quantile=0.25))
    assert int(policy_mask.sum()) == 2 ** 22 + 1 and policy_mask[0, -2 ** 22 - 1:].all()
