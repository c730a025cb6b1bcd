"""
Settings reach the step: what grpo.collect and grpo.update do with them on a tiny GPT, against
log-probs computed row by row, without padding, mask or cache. The arithmetic: test_loss.py.
"""
import copy
import math
from dataclasses import replace

import pytest
import torch

import grpo
from grpo import collect, learning_rate, sync_reference, update
from run.metrics import batch_metrics, tensors_differing
from rollout import generate
from worlds import (
    WORD_PROMPTS, WORDS, forcing, gradient, letters, nets_of, refusal, seed_of, shaken, steps_of,
    with_lora, word_gpt, words)

NAN, INF = math.nan, math.inf


def nets_and_batch(cfg, policy=None, reference=None, seed=7, optimizer=None, lr=.05):
    setup = nets_of(cfg, policy or word_gpt(), WORD_PROMPTS, WORDS, reference, lr, optimizer)
    return setup, collect(setup, WORD_PROMPTS, cfg, seed)


def moved():
    return shaken(word_gpt(), .02)


def plain_logps(policy, rollout):
    """Log-probs of each completion's tokens, one row at a time: [(tokens of the row,)]."""
    T = rollout.completion_mask.shape[1]
    rows = []
    for i, ids in enumerate(rollout.tokens):
        prompt = ids[:-T][rollout.attention_mask[i, :-T]]
        completion = ids[-T:][rollout.completion_mask[i]]
        h = policy(torch.cat([prompt, completion])[None, :-1])[0, len(prompt) - 1:]
        logp = policy.lm_head(h).log_softmax(-1)
        rows.append(logp.gather(1, completion[:, None])[:, 0])
    return rows


def weights_of(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def close(a, b, tolerance=1e-5):
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def test_the_first_step_is_reinforce_and_the_second_is_clipped():
    cfg = words(num_iterations=2)
    setup, batch = nets_and_batch(cfg, lr=.02)
    tokens = batch.loss_mask.sum()
    reinforce = -sum(A * x.sum() for A, x in
                     zip(batch.advantages, plain_logps(setup.policy, batch.rollout))) / tokens
    expected = gradient(reinforce, setup.trained)
    (first, second), _ = steps_of(setup, batch, cfg)
    assert close(first, expected), "the first step's gradient is not that of -A logp / tokens"

    again = word_gpt()      # after the first step
    with torch.no_grad():
        for p, g in zip(again.parameters(), first.split([p.numel() for p in again.parameters()])):
            p -= .02 * g.view_as(p)
    clipped = 0.0
    rows = plain_logps(again, batch.rollout)
    for A, new, old in zip(batch.advantages, rows, batch.rollout.logp):
        rho = (new - old[:len(new)]).exp()
        clipped -= torch.min(rho * A, rho.clamp(.8, 1.2) * A).sum() / tokens
    assert close(second, gradient(clipped, again.parameters()), 1e-4), (
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
    m = update(setup, batch, None, cfg, 3)
    assert m["num_steps"] == 8 and len(calls) == 16, (
        f"2 passes over 16 rows, 4 at a time, took {m['num_steps']} steps: must be 8")
    first, second = ([row for rows, *_ in calls[i:i + 8] for row in rows] for i in (0, 8))
    assert sorted(first) == sorted(second) == list(range(16)) and first != second
    for i in range(0, 16, 2):
        rows = calls[i][0] + calls[i + 1][0]
        assert calls[i][1:] == (4, int(batch.loss_mask[rows].sum()))
        lengths = batch.lengths[rows].tolist()
        assert lengths == sorted(lengths), "rows of like length share a micro-batch"
    calls.clear()
    update(setup, batch, None, cfg, 4)
    assert [row for rows, *_ in calls[:8] for row in rows] != first, "the seed chooses the order"


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
    for step, policy_loss in found[1:]:
        same = close(step, found[0][0]) and policy_loss == pytest.approx(found[0][1], abs=1e-5)
        assert same == (knobs.get("loss_type") != "bnpo")


def test_the_gradient_is_scaled_down_to_max_grad_norm():
    cfg = words()
    (free,), m = steps_of(*nets_and_batch(cfg), cfg)
    capped_cfg = replace(cfg, max_grad_norm=.01)
    (capped,), m2 = steps_of(*nets_and_batch(cfg), capped_cfg)
    assert m["grad_norm"] == m2["grad_norm"] == pytest.approx(float(free.norm()), rel=1e-4)
    assert close(capped, free * (.01 / free.norm()), 1e-4)


def test_learning_rates():
    for decay, warmup, expected in (
            ("constant", 0, [1, 1, 1, 1]), ("constant", 2, [.5, 1, 1, 1]),
            ("linear", 0, [1, .75, .5, .25]), ("linear", 2, [.5, 1, 1, .5]),
            ("cosine", 0, [1, .853553, .5, .146447])):
        cfg = words(lr_decay=decay, warmup_iters=warmup, max_iters=4, learning_rate=1.0)
        assert [learning_rate(it, cfg) for it in range(4)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("lora", (False, True))
def test_the_reference_follows_the_policy(lora, capsys):
    cfg = words(beta=.1, ref_model_sync_steps=1)
    setup, _ = nets_and_batch(cfg)
    setup.policy, setup.reference = moved(), shaken(word_gpt(), .02, seed=6)
    if lora:
        setup.policy, setup.reference = with_lora(setup.policy), with_lora(setup.reference, seed=8)
    before = weights_of(setup.reference)
    sync_reference(setup, .25)
    expected = .75 * before + .25 * weights_of(setup.policy)
    assert close(weights_of(setup.reference), expected, 1e-6), (
        "the reference is not 3/4 of itself and 1/4 of the policy")
    assert tensors_differing(setup) > 0
    sync_reference(setup, 1.0)
    assert torch.equal(weights_of(setup.reference), weights_of(setup.policy))
    assert tensors_differing(setup) == 0 and "0 tensors differ" in capsys.readouterr().out


def test_lora_moves_the_adapters_only():
    cfg = words(lora_rank=2, beta=.1)
    setup, batch = nets_and_batch(cfg)
    before = {name: x.clone() for name, x in setup.policy.state_dict().items()}
    m = update(setup, batch, None, cfg, 3, check=True)
    changed = {name for name, x in setup.policy.state_dict().items() if (x != before[name]).any()}
    assert changed == {name for name in before if name.endswith("B.weight")}    # A's gradient is 0
    assert m["kl"] == pytest.approx(0, abs=1e-6)


def equal_at_first(prompts, completions):
    """Equal rewards for the first two prompts, near 833."""
    few = [prompt.text for prompt in WORD_PROMPTS[:2]]
    return [833.5426 if p in few else x for p, x in zip(prompts, letters(prompts, completions))]


def sometimes(prompts, completions):
    """The same, and says nothing about every third completion."""
    found = equal_at_first(prompts, completions)
    return [None if i in (0, 3, 6) else x for i, x in enumerate(found)]


@pytest.mark.parametrize("loss_type", ("grpo", "dr_grpo", "dapo", "bnpo"))
def test_dropped_groups_leave_the_divisor(loss_type):
    functions = {"sometimes": sometimes, "half": lambda completions: [.5] * len(completions)}
    cfg = words(functions, loss_type=loss_type)
    batch = nets_and_batch(cfg)[1]
    assert (batch.advantages[:8] == 0).all() and (batch.advantages[8:] != 0).any()
    assert batch_metrics(batch, cfg)["frac_reward_zero_std"] == .5
    (kept,), _ = steps_of(*nets_and_batch(cfg), cfg)
    drop = replace(cfg, zero_std_groups="drop")
    (dropped,), _ = steps_of(*nets_and_batch(drop), drop)
    by_tokens = loss_type in ("dapo", "bnpo")
    share = float(batch.loss_mask[8:].sum() / batch.loss_mask.sum()) if by_tokens else .5
    assert share < .9 and close(kept, dropped * share)


def test_all_groups_dropped_is_no_step():
    cfg = words(lambda completions: [.1] * len(completions), zero_std_groups="drop")
    for how, steps in (("drop", 0), ("keep", 1)):
        policy = word_gpt()
        # weight decay would show a step without gradient
        decaying = torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.5)
        setup, batch = nets_and_batch(cfg, policy, optimizer=decaying)
        m = update(setup, batch, None, replace(cfg, zero_std_groups=how), 3)
        assert m["num_steps"] == steps and m["loss"] == m["grad_norm"] == 0
        assert torch.equal(weights_of(policy), weights_of(word_gpt())) == (steps == 0)


def test_truncated_completions_carry_no_loss():
    cfg = words(mask_truncated_completions=True)
    setup, batch = nets_and_batch(cfg)
    ended = batch.rollout.ended
    assert 0 < ended.sum() < 16
    assert not batch.loss_mask[~ended].any(), "completions that did not end carry loss"
    rows = zip(batch.advantages, plain_logps(setup.policy, batch.rollout), ended)
    loss = -sum(A * x.sum() for A, x, on in rows if on) / batch.rollout.completion_mask[ended].sum()
    expected = gradient(loss, setup.trained)
    assert close(steps_of(setup, batch, cfg)[0][0], expected)


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
    generator = torch.Generator().manual_seed(seed_of(2))
    ids = torch.randint(3, 100, (16, 8), generator=generator)
    forced = ids.where(torch.rand(16, 8, generator=generator) < .3, -1)
    forced[1] = ids[1]
    setup = nets_of(cfg, policy, WORD_PROMPTS, WORDS, reference)
    more = dict(respond=forcing(forced)) | sampling
    setup.generate = lambda *args, **kwargs: generate(*args, **kwargs | more)
    return setup, collect(setup, WORD_PROMPTS, cfg, 7)


@pytest.mark.parametrize("knobs", [dict(beta=.1), dict(beta=.1, kl_in="reward", kl_estimator="k1")])
def test_forced_tokens_are_seen_and_carry_no_loss(knobs):
    cfg = words(**knobs)
    setup, batch = forced_batch(cfg, word_gpt(), moved())
    sampled = batch.rollout.sampled_mask
    assert torch.equal(batch.loss_mask, sampled) and sampled[1].sum() == 1
    assert 10 < sampled.sum() < batch.rollout.completion_mask.sum() - 10
    total = 0.0
    ref = plain_logps(setup.reference, batch.rollout)
    for i, (A, new) in enumerate(zip(batch.advantages, plain_logps(setup.policy, batch.rollout))):
        for t in sampled[i].nonzero()[:, 0].tolist():
            ratio = (new[t] - new[t].detach()).exp()
            d = (ref[i][t].detach() - new[t]) * (cfg.kl_in == "loss")
            total += (-ratio * A + cfg.beta * (d.exp() - 1 - d) * ratio) / sampled.sum()
    expected = gradient(total, setup.trained)
    assert close(steps_of(setup, batch, cfg)[0][0], expected, 1e-4)


@pytest.mark.parametrize("knobs", [
    dict(kl_in="reward", kl_estimator="k1"), dict(entropy_coef=.1), dict(kl_estimator="k3")])
def test_a_forced_token_that_sampling_would_not_draw_gives_no_nan(knobs):
    """Outside of top_k its log-prob is -inf, and 0 * inf would be NaN."""
    cfg = words(beta=.1, top_k=4, **knobs)
    setup, batch = forced_batch(cfg, word_gpt(), moved())
    forced = batch.rollout.completion_mask & ~batch.rollout.sampled_mask
    tokens = batch.rollout.tokens[:, -8:]
    drawable = batch.rollout.allowed.gather(2, tokens[:, :, None])[:, :, 0]
    assert (forced & ~drawable).any() and batch.ref_logp.isfinite().all()
    assert batch.advantages.isfinite().all() and batch.kl.isfinite().all()
    (step,), m = steps_of(setup, batch, cfg)
    assert step.isfinite().all() and math.isfinite(m["loss"])


@pytest.mark.parametrize("check", (True, False))
def test_what_is_not_finite_stops_before_the_step(check):
    def weight(setup, batch):
        setup.policy.h[1].mlp.c_fc.weight.data[3, 4] = NAN

    def reward(setup, batch):
        batch.rewards[0] = INF
        batch.advantages[0] = NAN

    def slope(setup, batch):
        setup.policy.ln_f.weight.register_hook(lambda g: g * NAN)

    for spoil in (weight, reward, slope):
        policy = word_gpt()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=.01, fused=True)
        setup, batch = nets_and_batch(words(), policy, optimizer=optimizer)
        spoil(setup, batch)
        before = weights_of(policy)
        assert refusal(update, setup, batch, None, words(), 3, check=check).startswith("stopped")
        assert torch.equal(weights_of(policy).nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_log_prob_of_the_sampler_that_is_not_finite_stops_the_run(bad):
    setup, batch = nets_and_batch(words(), word_gpt())
    batch.rollout.logp[0, 0] = bad
    before = weights_of(setup.policy)
    said = refusal(update, setup, batch, None, words(), 3, check=False)     # later in a run
    assert said.startswith("stopped") and torch.equal(weights_of(setup.policy), before)


def test_a_model_with_dropout_is_found_out():
    policy = word_gpt()
    policy.lm_head.register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, .1))
    setup, batch = nets_and_batch(words(), policy)
    assert "the ratio is not 1" in refusal(update, setup, batch, None, words(), 3, check=True)
    assert update(setup, batch, None, words(), 3, check=False)["num_steps"] == 1


def test_bfloat16():
    cfg = words(beta=.1)
    setup = nets_of(cfg, word_gpt(), WORD_PROMPTS, WORDS, moved())
    setup.dtype = torch.bfloat16
    batch = collect(setup, WORD_PROMPTS, cfg, 7)
    assert batch.rollout.logp.dtype == batch.ref_logp.dtype == torch.float32
    m = update(setup, batch, None, cfg, 3, check=True)
    assert m["num_steps"] == 1 and math.isfinite(m["grad_norm"])
    assert all(p.dtype == torch.float32 for p in setup.policy.parameters())


@pytest.mark.parametrize("beta, low, high", ((0.0, .8, 1.0), (50.0, 0.0, .06)))
def test_bandit(beta, low, high):
    policy, prompt = word_gpt(), WORD_PROMPTS[0]

    def probabilities():
        with torch.no_grad():
            return policy.lm_head(policy(torch.tensor([prompt.ids])))[0, -1].softmax(-1)

    ranked = probabilities().argsort(descending=True).tolist()
    token = [t for t in ranked if t < 94][1]    # one printable character, not the likeliest

    def hit(prompts, completions):
        return [float(text == WORDS.decode([token])) for text in completions]

    cfg = words(hit, num_prompts=1, num_generations=64, max_completion_length=1, beta=beta)
    start = float(probabilities()[token])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    setup = nets_of(cfg, policy, [prompt], WORDS, copy.deepcopy(policy), optimizer=optimizer)
    for seed in range(50):
        update(setup, collect(setup, [prompt], cfg, seed), None, cfg, 3, check=True)
    assert .005 < start < .06 and low < float(probabilities()[token]) < high


def test_bnpo_divides_by_micro_batches_in_the_order_of_the_batch():
    """Sorted by length, a short completion would share its divisor with short ones alone."""
    lengths = torch.tensor([1, 9, 1, 9])
    for loss_type, expected in (("bnpo", [[0, 1], [2, 3]]), ("dapo", [[0, 2], [1, 3]])):
        cfg = words(loss_type=loss_type, micro_batch_size=2)
        pieces = grpo.micro_batches(lengths, torch.arange(4), cfg)
        assert [piece.tolist() for piece in pieces] == expected
