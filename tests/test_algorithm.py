"""
Is this GRPO? The tests to read first, and to run after every change to the algorithm:

    python -m pytest tests/test_algorithm.py        # a few seconds

Each looks for one classic mistake and fails with a sentence that names it. The other files test the
same code in depth. The world (worlds.py): a GPT with 12 tokens and random weights. Token 0 ends a
completion. A text is its tokens in words, "3 1 4".
"""
import itertools

import pytest
import torch
from torch.nn import functional as F

from grpo import collect, group_advantages, policy_mask_of, update
from loss import kl_estimate
from run.settings import Settings
from rollout import Sampling, completion_logprobs, truncate
from worlds import (
    END, PROMPTS, TOKENIZER, forward, gradient, loss_of_rows, mean_token, plain_logps, settings,
    shaken, skip_for, world)

# ------------------------------------------------------------------------------------------------
# the advantage and its sign

def test_the_advantage_is_the_reward_less_the_mean_of_its_group():
    rewards = torch.tensor([1.0, 2.0, 6.0, 20.0, 30.0, 70.0])
    found = group_advantages(rewards, 3, scale_rewards="none").tolist()
    assert found == pytest.approx([-2, -1, 3, -20, -10, 30]), (
        f"rewards 1, 2, 6 of one group and 20, 30, 70 of another give the advantages {found}; less "
        "their group's mean, 3 and 40, they are -2, -1, 3 and -20, -10, 30")
    found = group_advantages(rewards, 3, scale_rewards="group").tolist()
    expected = [x / 7 ** 0.5 for x in (-2, -1, 3)] * 2      # 7: (4 + 1 + 9) / (3 - 1)
    assert found == pytest.approx(expected, rel=1e-3), (
        f"rewards 1, 2, 6 of one group and 20, 30, 70 of another give the scaled advantages "
        f"{found}; over the standard deviation of their own group (n - 1) they are {expected}")


def test_a_step_makes_the_better_completion_likelier():
    cfg = settings(num_prompts=1, num_generations=2)
    for prompt, seed in itertools.product(PROMPTS, range(2)):
        setup, batch = world(cfg, seed, prompts=[prompt], lr=.001)
        before = completion_logprobs(setup.policy, batch.rollout).sum(1).detach()        # (2,)
        update(setup, batch, None, cfg, seed=1)
        after = completion_logprobs(setup.policy, batch.rollout).sum(1).detach()
        order = batch.rewards.argsort(descending=True)
        better, worse = (after - before)[order].tolist()
        assert better > worse or batch.rewards[0] == batch.rewards[1], (
            f"a step on two completions of {prompt.text!r} changed the log-prob of the better one "
            f"by {better:+.4f} and of the worse one by {worse:+.4f}: the better one must gain on "
            "it. Is the sign of the advantage or of the loss wrong?")


# ------------------------------------------------------------------------------------------------
# groups

def test_each_completion_is_compared_with_those_of_its_own_prompt():
    asked = []

    def reward(prompts, completions):
        asked.extend(prompts)
        return mean_token(prompts, completions)

    _, batch = world(settings(reward, scale_rewards="none"))
    P = batch.rollout.tokens.shape[1] - batch.loss_mask.shape[1]
    for i, text in enumerate(asked):
        present = batch.rollout.attention_mask[i, :P]
        found = TOKENIZER.decode(batch.rollout.tokens[i, :P][present].tolist())
        assert found == text, (
            f"row {i} was sampled after the prompt {found!r} but judged as an answer to {text!r}")
    rewards = batch.rewards.tolist()
    advantages = batch.advantages.tolist()
    for i, text in enumerate(asked):
        own = [r for r, other in zip(rewards, asked) if other == text]
        expected = rewards[i] - sum(own) / len(own)
        assert advantages[i] == pytest.approx(expected, abs=1e-3), (
            f"row {i} has the advantage {advantages[i]:.3f}; its reward less the mean of the "
            f"{len(own)} completions of its own prompt {text!r} is {expected:.3f}. Are the groups "
            "mixed up?")


# ------------------------------------------------------------------------------------------------
# alignment

@pytest.mark.parametrize("temperature", (1.0, 0.6))
def test_each_log_prob_is_of_its_token_given_the_tokens_before_it(temperature):
    cfg = settings(temperature=temperature, num_generations=16, max_completion_length=10)
    setup, batch = world(cfg)
    r = batch.rollout
    assert len(r.completion_mask.sum(1).unique()) > 1, "choose another seed: rows end together"
    trainer = completion_logprobs(setup.policy, r, temperature).detach()
    for i, row in enumerate(plain_logps(setup.policy, r, temperature)):
        for name, logp in (("sampler", r.logp), ("trainer", trainer)):
            for t, expected in enumerate(row.tolist()):
                found = float(logp[i, t])
                assert found == pytest.approx(expected, abs=1e-4), (
                    f"the {name}'s log-prob at position {t} of row {i} is {found:.4f}; that of its "
                    f"token after those before it, at temperature {temperature}, is "
                    f"{expected:.4f}. Is it of another position, is padding read, does a row read "
                    "the cache of another one, or is the temperature another?")


def test_the_reference_scores_at_the_sampling_temperature():
    _, batch = world(settings(beta=0.1, temperature=0.6))
    gap = float((batch.ref_logp - batch.rollout.logp).abs().max())
    assert gap < 1e-4, (
        f"the reference, still a copy of the policy, gives tokens log-probs up to {gap:.3f} off "
        "the sampler's at temperature 0.6: is it asked at another temperature?")


# ------------------------------------------------------------------------------------------------
# masks

def test_a_completion_is_its_tokens_up_to_and_with_the_end_token():
    lengths = set()
    for seed in range(5):
        _, batch = world(settings(), seed)
        T = batch.loss_mask.shape[1]
        for i, ids in enumerate(batch.rollout.tokens[:, -T:].tolist()):
            length = ids.index(END) + 1 if END in ids else T
            expected = [int(t < length) for t in range(T)]
            found = batch.loss_mask[i].int().tolist()
            assert found == expected, (
                f"the loss mask of row {i}, tokens {ids}, is {found}; it must be {expected}: 1 up "
                "to the first end token (0) and on it, 0 after it")
            lengths.add(length)
    assert len(lengths) > 2, f"all completions have lengths {lengths}"


def test_padding_is_not_read():
    cfg = settings()
    setup, batch = world(cfg)

    def loss_and_slope():
        loss = forward(setup, batch, cfg).total
        return float(loss.detach()), gradient(loss, setup.trained)

    loss, slope = loss_and_slope()
    P = batch.rollout.tokens.shape[1] - batch.loss_mask.shape[1]
    after_the_end = F.pad(~batch.loss_mask, (P, 0), value=False)
    for where, padding in (("before the prompts", ~batch.rollout.attention_mask),
                           ("after the completions", after_the_end)):
        assert padding.any(), f"choose another seed: there is no padding {where}"
        batch.rollout.tokens[padding] = 7
        new_loss, new_slope = loss_and_slope()
        gap = float((new_slope - slope).abs().max())
        assert abs(new_loss - loss) < 1e-6 and gap < 1e-6, (
            f"other ids in the padding {where} changed the loss by {new_loss - loss:.2e} and the "
            f"gradient by up to {gap:.2e}: nothing may read them")


# ------------------------------------------------------------------------------------------------
# which tokens

def test_top_p_keeps_the_token_that_crosses_the_line():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, expected in ((0.4, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (0.99, 4)):
        found = int((truncate(logits, Sampling((0,), top_p=top_p)) > -torch.inf).sum())
        assert found == expected, (
            f"top_p = {top_p} of probabilities 0.5, 0.3, 0.15, 0.05 keeps {found} tokens; the "
            f"fewest that have that much together are {expected}")


def test_the_entropy_quantile_keeps_the_least_certain_tokens():
    cfg = settings(top_entropy_quantile=0.3)
    setup, batch = world(cfg)
    r = batch.rollout
    mask = batch.loss_mask
    assert torch.equal(mask, r.sampled_mask), "the quantile is of the policy gradient alone"
    policy_mask = policy_mask_of(setup, batch, torch.arange(len(mask)), True, cfg)
    kept = r.entropy[mask & policy_mask]
    dropped = r.entropy[mask & ~policy_mask]
    assert float(kept.min()) >= float(dropped.max()), (
        "top_entropy_quantile keeps tokens of less entropy than some that it drops: it must keep "
        "the least certain ones")
    above = int((kept > kept.min()).sum())      # tokens of equal entropy stay together
    assert above <= 0.3 * int(mask.sum()) < len(kept) + 1, (
        f"top_entropy_quantile = 0.3 keeps {len(kept)} of {int(mask.sum())} tokens")


# ------------------------------------------------------------------------------------------------
# the sign of the KL

@pytest.mark.parametrize("estimator, value, slope", [
    ("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.3679, 0.6321)])    # k3: e^-1 and 1 - e^-1
def test_the_kl_by_hand(estimator, value, slope):
    skip_for(kl_estimator=estimator)
    logp = torch.tensor(-1.0, requires_grad=True)
    kl = kl_estimate(logp, torch.tensor(-2.0), Settings(kl_estimator=estimator))
    kl.backward()
    found = float(kl.detach())
    found_slope = float(logp.grad)
    assert found == pytest.approx(value, abs=1e-4), (
        f"{estimator} of a token with log-prob -1 under the policy and -2 under the reference is "
        f"{found:.4f}, by hand {value}. Are policy and reference exchanged?")
    assert found_slope == pytest.approx(slope, abs=1e-4), (
        f"the gradient of {estimator}, where the policy's log-prob is above the reference's, is "
        f"{found_slope:+.4f}, by hand {slope:+.4f}: descent must lower the log-prob")


def test_a_large_beta_pulls_the_policy_back_to_the_reference():
    def equal(prompts, completions):    # all advantages are 0: only the KL acts
        return [1.0] * len(completions)

    cfg = settings(equal, beta=5.0, num_generations=64)
    setup, _ = world(cfg)
    shaken(setup.policy, 0.1)
    batch = collect(setup, PROMPTS, cfg, seed=1)
    before = float(forward(setup, batch, cfg).kl_by_token.mean())
    update(setup, batch, None, cfg, seed=1)
    after = float(forward(setup, batch, cfg).kl_by_token.mean())
    assert after < 0.9 * before, (
        f"a step with beta = 5 and equal rewards took KL(policy, reference) from {before:.4f} to "
        f"{after:.4f}: it must fall. Is the KL subtracted from the loss, or left out of it, or are "
        "the reference's log-probs not the reference's?")


def test_a_completion_that_the_reference_finds_unlikely_is_worth_less():
    def equal(prompts, completions):
        return [1.0] * len(completions)

    cfg = settings(equal, beta=1.0, kl_in="reward", kl_estimator="k1", scale_rewards="none",
                   num_generations=12)
    setup, _ = world(cfg)
    shaken(setup.policy, 0.1)
    batch = collect(setup, PROMPTS, cfg, seed=2)
    log_ratio = (batch.rollout.logp - batch.ref_logp).sum(1).view(2, -1)    # policy / reference
    expected = (log_ratio.mean(1, keepdim=True) - log_ratio).flatten()
    assert batch.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-4), (
        "with kl_in = 'reward' and equal rewards the advantage is the group's mean of log(policy / "
        "reference) less the completion's own. Is the KL added to the reward, where it must be "
        "taken off, or not the sum over the row, or of another row?")


# ------------------------------------------------------------------------------------------------
# the ratio and its clip

@pytest.mark.parametrize("knobs", (
    dict(temperature=1.0), dict(temperature=0.6), dict(top_k=4), dict(top_p=0.7),
    dict(importance_sampling_level="sequence")))
def test_the_ratio_is_1_on_the_first_pass(knobs):
    cfg = settings(**knobs)
    setup, batch = world(cfg)
    worst = float((forward(setup, batch, cfg).ratio - 1).abs().max())
    assert worst < 1e-4, (
        f"with {knobs} the policy that sampled the batch has a ratio up to {worst:.4f} off 1: the "
        "log-probs in the loss are not of the distribution that the tokens were drawn from")


def test_the_ratio_compares_with_the_policy_that_sampled():
    cfg = settings()
    setup, batch = world(cfg)
    update(setup, batch, None, cfg, seed=1)
    out = forward(setup, batch, cfg)
    expected = (out.logp.detach() - batch.rollout.logp)[batch.loss_mask].exp()
    found = out.ratio[batch.loss_mask]
    gap = float((found - expected).abs().max())
    moved = float((expected - 1).abs().max())
    assert moved > 0.01 and gap < 1e-5, (
        f"after a step a sampled token's probability has changed by up to {100 * moved:.1f} %, and "
        f"the ratio in the loss is up to {gap:.4f} off that: it must compare the policy with the "
        "log-probs recorded while sampling, on every pass")


@pytest.mark.parametrize("ratio, advantage, moves", [
    (1.1, 1, True), (0.9, -1, True),        # within the clip every token moves
    (1.5, 1, False), (0.5, -1, False),      # one that has moved far enough is left alone
    (0.5, 1, True), (1.5, -1, True),        # one that has moved the wrong way comes back
    (1.25, 1, True), (0.75, -1, False)])    # the bounds are 1 - 0.2 and 1 + 0.3
@pytest.mark.parametrize("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo"))
def test_the_clip_acts_on_the_right_side(loss_type, ratio, advantage, moves):
    logp = torch.tensor([[ratio]]).log().requires_grad_()
    loss = loss_of_rows(logp, torch.zeros(1, 1), torch.tensor([float(advantage)]), logp > -9,
                        loss_type=loss_type, epsilon=0.2, epsilon_high=0.3).total
    push = 0.0 - float(gradient(loss, [logp]))
    wanted = "not move it"
    if moves:
        wanted = "raise it" if advantage > 0 else "lower it"
    assert (push != 0) == moves and push * advantage >= 0, (
        f"{loss_type} with the clip [0.8, 1.3]: descent pushes the log-prob of a token with ratio "
        f"{ratio} and advantage {advantage} by {push:+.4f}; it must {wanted}")


# ------------------------------------------------------------------------------------------------
# divisors

@pytest.mark.parametrize("loss_type, expected", [
    ("grpo", -1.5),         # (2 / 1 + 3 / 3) / 2: mean over the tokens of a row, then over rows
    ("dapo", -1.25),        # (2 + 3) / 4: mean over the tokens of the step
    ("bnpo", -1.25),        # the same where the step is one micro-batch
    ("dr_grpo", -0.5)])     # (2 + 3) / (2 * 5): rows times max_completion_length
def test_divisors_by_hand(loss_type, expected):
    example = "a row of 1 token with advantage 2 and a row of 3 tokens with advantage 1"
    logp = torch.full((2, 3), -1.0)     # new and old: the ratio is 1, the loss -advantage
    advantages = torch.tensor([2.0, 1.0])
    mask = torch.tensor([[True, False, False], [True, True, True]])

    def loss_of(rows):
        return float(loss_of_rows(
            logp[rows], logp[rows], advantages[rows], mask[rows], num_rows=2, num_tokens=4,
            loss_type=loss_type, max_completion_length=5).total)

    loss = loss_of([0, 1])
    assert loss == pytest.approx(expected), (
        f"the {loss_type} loss of {example} is {loss:.4f}, by hand {expected}. Is it divided by "
        "something else?")
    if loss_type != "bnpo":     # which depends on micro-batches
        parts = [loss_of([0]), loss_of([1])]
        assert sum(parts) == pytest.approx(expected), (
            f"the {loss_type} losses of {example}, each row in a micro-batch of its own, are "
            f"{parts}: they must add up to {expected}")
