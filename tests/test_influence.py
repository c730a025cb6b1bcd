"""
Influence inside GRPO: targets, selection, the step. By brute force: one autograd backward per row.
The tape itself: test_tape.py.
"""
import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
import tracin
from common.files import ROOT
from grpo import Batch, Step, collect, try_functions, update
from rollout import completion_entropies, completion_logprobs
from run.check import check
from tracin import choose_targets, row_weights_of, select, target_coefficients
from tape import cosine
from worlds import (
    WORDS, WORD_PROMPTS, assert_refused, generator_of, gradient, inputs_of, refusal, setup_of,
    shaken, steps_of, whole_step, word_gpt, words)

# a row's loss is a multiple of its log-prob, and nothing is left besides
UNIT = dict(kl_in="reward", kl_estimator="k1", beta=.1)
ALL_ROWS = torch.arange(16)
NAN = math.nan


def with_functions(cfg, functions, **more):
    return check(replace(cfg, functions=cfg.functions | functions, **more))


def setup_for(cfg, policy=None, lr=.05, optimizer=None, prompts=WORD_PROMPTS):
    policy = policy or word_gpt()
    return setup_of(cfg, policy, prompts, WORDS, shaken(word_gpt(), .02), lr, optimizer)


def batch_of(cfg, seed=7, prompts=WORD_PROMPTS, policy=None):
    return collect(setup_for(cfg, policy, prompts=prompts), prompts, cfg, seed)


def row_gradients(setup, batch, cfg):
    """(N, weights): the policy's part of each row's loss, one backward each."""
    step = whole_step(batch)
    losses = (grpo.loss_of(setup, setup.policy, batch, row, step, cfg)
              for row in step.rows.split(1))
    return torch.stack([gradient(loss.policy, setup.trained) for loss in losses])


def rest_gradient(setup, batch, cfg):
    """Of what all rows keep, KL and entropy, written out on the sampler's weights, for dapo."""
    logp = completion_logprobs(setup.policy, batch.rollout, cfg.temperature)
    rest = 0.0 * logp.sum()
    if cfg.kl_in_loss:
        d = (batch.ref_logp - logp) * batch.loss_mask
        rest = rest + cfg.beta * ((d.exp() - 1 - d) * (logp - logp.detach()).exp()).sum()
    if cfg.entropy_coef:
        entropies = completion_entropies(setup.policy, batch.rollout, cfg.temperature)
        rest = rest - cfg.entropy_coef * (entropies * batch.loss_mask).sum()
    return gradient(rest / batch.loss_mask.sum(), setup.trained)


def target_gradient(setup, batch, rows, cfg):
    """By autograd: what tracin.target_coefficients promises."""
    if cfg.tracin == "target":
        return -gradient(likely_seven(setup.policy, WORDS, batch), setup.trained)
    if cfg.tracin == "self":
        step = Step(0, rows, len(rows), int(batch.loss_mask[rows].sum()))
        loss = grpo.loss_of(setup, setup.policy, batch, rows, step, cfg)
        return gradient(loss.policy, setup.trained)
    coef = target_coefficients(batch, rows, cfg.tracin)
    logp = completion_logprobs(setup.policy, batch.rollout, cfg.temperature)
    return gradient((coef * logp.sum(1)).sum(), setup.trained)


def close(a, b, tolerance=2e-4):
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def likely_seven(policy, tokenizer, batch):
    """A function of the config file as target: a number to raise."""
    assert tokenizer is WORDS and len(batch.completions) == 16
    logits = policy.lm_head(policy(torch.tensor([[3, 1, 4, 1, 5, 9]])))
    return logits.log_softmax(-1)[0, :, 7].mean()


ROWS = dict(kl=dict(beta=.1), unit=UNIT, entropy=dict(beta=.1, entropy_coef=.05),
            small_micro=dict(micro_batch_size=3), lora=dict(beta=.1, lora_rank=2),
            quantile=dict(beta=.1, top_entropy_quantile=.5))
TARGETS = ("self", "reward", "advantage", "contrastive")


@pytest.mark.parametrize("target, held", [
    *((target, held) for target in TARGETS for held in (False, True)), ("target", False)])
@pytest.mark.parametrize("name", ROWS)
def test_influence_and_step_against_one_backward_per_row(name, target, held):
    cfg = words(**dict(micro_batch_size=8) | ROWS[name])
    cfg = with_functions(cfg, {"target": likely_seven} if target == "target" else {}, tracin=target)
    setup = setup_for(cfg)
    if cfg.lora_rank:
        shaken(setup.policy, .05)    # adapters that do something; frozen weights too
    batch, held_out = (collect(setup, WORD_PROMPTS, cfg, seed) for seed in (7, 8))
    given = tracin.HeldOut(held_out, torch.tensor([0, 3, 4, 9, 10, 15])) if held else None
    g = row_gradients(setup, batch, cfg)
    G = target_gradient(setup, *(given or (batch, ALL_ROWS)), cfg)
    rest = rest_gradient(setup, batch, cfg)
    seen, m = steps_of(setup, batch, cfg, given, check=True)
    assert close(batch.influence, g @ G), (
        "influences are not <gradient of the row, gradient of the target>")
    assert m.get("tracin/invariant_error", 0) < 1e-5
    kept = (batch.influence > 0).float()
    assert torch.equal(batch.row_weights, kept) and kept.sum() > 2, (
        "the rows that are kept are not those of positive influence")
    assert close(seen[0], kept @ g + rest), (
        "the step is not the gradient of the kept rows and of the rest of the loss")
    assert m["tracin/target_grad_norm"] == pytest.approx(float(G.norm()), rel=1e-4)
    assert math.isnan(m["tracin/target_cosine"]) == (target == "target"), (
        "nothing is known of the noise of a target in one piece")


@pytest.mark.parametrize("knobs", [
    dict(tracin="self", beta=.1), dict(tracin="reward", **UNIT), dict(tracin="advantage"),
    dict(tracin="contrastive"), dict(tracin="reward", beta=.1, entropy_coef=.05)])
def test_leave_one_out_and_self_share(knobs):
    cfg = words(**knobs)
    batch = batch_of(cfg)
    setup = setup_for(cfg)
    g = row_gradients(setup, batch, cfg)
    own = g.square().sum(1)
    if cfg.tracin != "self":    # the target's part of row i as a multiple of g_i
        coef = target_coefficients(batch, ALL_ROWS, cfg.tracin)
        own = own * coef * -batch.loss_mask.sum() / batch.advantages
    raw = g @ target_gradient(setup, batch, ALL_ROWS, cfg)
    for leave_one_out, expected, every in ((False, raw, 4), (True, raw - own, 1)):
        cfg = replace(cfg, tracin_leave_one_out=leave_one_out)
        _, m = steps_of(setup_for(cfg), batch, cfg)
        assert close(batch.influence, expected, 1e-3), f"leave one out: {leave_one_out}"
        share = own[::every].abs().sum() / raw[::every].abs().sum()     # of all rows, or of four
        assert m["tracin/self_share"] == pytest.approx(float(share), rel=1e-3)


@pytest.mark.parametrize("target", ("self", "reward"))
def test_all_rows_kept_are_plain_grpo(target):
    knobs = dict(num_iterations=2, mini_batch_size=8, micro_batch_size=4, beta=.1)
    batch = batch_of(words(**knobs))
    found = []
    for more in ({}, dict(tracin=target, tracin_select="all")):
        cfg = words(**knobs, **more)
        found.append(steps_of(setup_for(cfg), copy.copy(batch), cfg)[0])
    plain, kept = found
    assert len(plain) == len(kept) == 4 and all(close(a, b) for a, b in zip(kept, plain))


@pytest.mark.parametrize("rest", [dict(entropy_coef=.01), dict(beta=.1)])
def test_groups_without_spread_stop_no_run(rest):
    """All of a group right or all wrong, as verifiable rewards are at first: every influence is 0,
    and the sums that are compared hold nothing but rounding."""
    for seed in range(5):
        cfg = words(tracin="reward", **rest)
        batch = batch_of(cfg, seed)
        batch.advantages = torch.zeros(16)
        batch.rewards = (ALL_ROWS // cfg.num_generations % 2).float()
        steps_of(setup_for(cfg), batch, cfg, check=True)
        assert not batch.influence.any(), "a rollout without advantage has influence"


@pytest.mark.parametrize("target", TARGETS)
def test_bnpo_passes_the_check_of_the_first_step(target):
    """A part of the rollouts has other divisors than all: nothing can be compared with it."""
    cfg = words(tracin=target, loss_type="bnpo", micro_batch_size=5)
    batch = batch_of(cfg)
    steps_of(setup_for(cfg), batch, cfg, check=True)
    assert batch.influence.isfinite().all()


def test_the_target_is_halved_by_prompt_and_one_prompt_has_no_halves():
    cfg = words(tracin="self", beta=.1)
    setup = setup_for(cfg)
    batch = batch_of(cfg)
    alone = row_gradients(setup, batch, cfg)
    first, second = alone[:8].sum(0), alone[8:].sum(0)
    _, m = steps_of(setup, batch, cfg)
    expected = float(first @ second / first.norm() / second.norm())
    assert m["tracin/target_cosine"] == pytest.approx(expected, abs=1e-4)

    one = words(tracin="self", num_prompts=1, num_generations=16, beta=.1)
    batch = batch_of(one, prompts=WORD_PROMPTS[:1])
    _, m = steps_of(setup_for(one, prompts=WORD_PROMPTS[:1]), batch, one)
    assert math.isnan(m["tracin/target_cosine"]), "not 0: nothing is known of its noise"


@pytest.mark.parametrize("kind, rewards, expected", [
    ("reward", [8, 4, 6], [-1, 1, 0]),      # the target's loss falls as the best gets likelier
    ("reward", [1, NAN, 3], [1, 0, -1]),
    ("reward", [.1] * 7, [0] * 7),          # equal rewards have nothing to tell
    ("reward", [NAN] + [.1] * 7, [0] * 8),
    ("advantage", [1, NAN, 3], [-1, 0, -3]),
    ("contrastive", [.1, .9, .5, .7, .3], [1, -1, 0, -1, 1]),
    ("contrastive", [.1, NAN, .5, .7], [1, 0, 0, -1]),
    ("contrastive", [1, 0, 0, 1, 0, 1, 0, 0], [-1, .6, .6, -1, .6, -1, .6, .6]),    # ties
    ("contrastive", [NAN, .3, .3, .3], [0] * 4),
    *((kind, [NAN] * 3, [0] * 3) for kind in TARGETS[1:])])
def test_coefficients_of_targets(kind, rewards, expected):
    """Times the number of rows. The advantages are the rewards."""
    n = len(rewards)
    rewards = torch.tensor(rewards, dtype=torch.float32)
    batch = SimpleNamespace(rewards=rewards, advantages=rewards.clone())
    coef = target_coefficients(batch, torch.arange(n), kind)
    assert (n * coef).tolist() == pytest.approx(expected, rel=1e-3)


def test_which_held_out_rollouts_are_the_target():
    rewards = torch.tensor([.1, .9, .5, .7, .3, .2])
    g = generator_of(1)
    assert choose_targets(rewards, 2, "best", g).tolist() == [1, 3]
    assert sorted(choose_targets(rewards, 0, "random", g).tolist()) == list(range(6))
    assert choose_targets(rewards, 2, "worst", g).tolist() == [5, 0]
    assert choose_targets(rewards, 4, "balanced", g).tolist() == [1, 3, 5, 0]
    assert choose_targets(rewards, 3, "balanced", g).tolist() == [1, 3, 0]
    for how in ("best", "worst", "balanced"):
        assert sorted(choose_targets(rewards, 0, how, g).tolist()) == list(range(6))
    rewards[1] = NAN
    assert choose_targets(rewards, 2, "best", g).tolist() == [3, 2]
    assert choose_targets(rewards, 2, "worst", g).tolist() == [5, 0]
    assert choose_targets(rewards, 2, "balanced", g).tolist() == [3, 0]


def test_a_target_function_is_given_the_held_out_rollouts():
    """The function that docs/influence.md shows: reward times log-prob, not normalised."""
    page = open(f"{ROOT}/docs/influence.md").read()
    code, = (code for code in page.split("```") if "\ndef target(" in code)
    shown = {}
    exec(code.removeprefix("python\n"), shown)
    cfg = with_functions(words(), {"target": shown["target"]}, tracin="target",
                         tracin_val_prompts=shown["tracin_val_prompts"])
    setup = setup_for(cfg)
    batch, other = batch_of(cfg), batch_of(cfg, seed=8)
    g = row_gradients(setup, batch, cfg)
    rows = torch.tensor([1, 3, 4, 8, 15])
    logp = completion_logprobs(setup.policy, other.rollout)[rows].sum(1)
    by_hand = -gradient((other.rewards[rows] * logp).mean(), setup.trained)
    _, m = steps_of(setup, batch, cfg, tracin.HeldOut(other, rows))
    assert close(batch.influence, g @ by_hand)
    assert m["tracin/target_loss"] == pytest.approx(
        -float((other.rewards[rows] * logp.detach()).mean()))


def test_a_reward_of_their_own_scores_held_out_rollouts_only():
    def shouted(prompts, completions):
        return [100.0 + len(text) for text in completions]

    cfg = words(tracin="reward", tracin_val_prompts=4, tracin_val_size=5)
    cfg = with_functions(cfg, {"shouted": shouted}, tracin_val_reward="shouted")
    setup = setup_for(cfg)
    held_out, rows = grpo.collect_held_out(setup, 0, cfg)
    assert held_out.rewards.tolist() == shouted(None, held_out.completions) and len(rows) == 5
    batch = collect(setup, WORD_PROMPTS, cfg, 7)
    assert torch.equal(batch.rewards, batch_of(words()).rewards)


@pytest.mark.parametrize("name, returned", [
    ("target", 3.0), ("target", torch.tensor(1.0)),     # which does not depend on the policy
    ("target", torch.tensor(NAN, requires_grad=True)), ("weigh", [1.0] * 15), ("weigh", [NAN] * 4),
    ("weigh", None), ("weigh", torch.zeros(99, 99))])
def test_a_function_that_returns_something_else_is_named_before_anything_is_trained(
        name, returned):
    knobs = dict(tracin="target") if name == "target" else dict(tracin="self",
                                                                tracin_select="weigh")
    cfg = with_functions(words(), {name: lambda **given: returned}, **knobs)
    assert_refused(name, try_functions, cfg, inputs_of(word_gpt(), WORD_PROMPTS, WORDS))


@pytest.mark.parametrize("name", ("target", "weigh"))
def test_what_a_function_does_to_its_batch_stays_there(name):
    """Columns, texts and rewards. Rows of one prompt are one object."""
    prompts = [prompt._replace(row={"text": prompt.text, "tests": [1, 2]})
               for prompt in WORD_PROMPTS]
    seen = []

    def careless(batch):
        seen.extend(len(prompt.row.pop("tests")) for prompt in batch.prompts)
        for column in (batch.completions, batch.prompts):
            column.reverse()
        batch.rewards.zero_()
        batch.scores.zero_()

    def target(policy, tokenizer, batch):
        careless(batch)
        return policy.lm_head.weight.sum()

    def weigh(influence, batch):
        careless(batch)
        return torch.ones_like(influence)

    knobs = dict(tracin="target") if name == "target" else dict(tracin="self",
                                                                tracin_select="weigh")
    cfg = with_functions(words(num_iterations=2), dict(target=target, weigh=weigh), **knobs)
    setup = setup_for(cfg, prompts=prompts)
    batch = collect(setup, prompts, cfg, 7)
    before = copy.deepcopy((batch.prompts, batch.completions, batch.rewards, batch.scores))
    update(setup, batch, None, cfg, 3)
    assert seen == [2] * 16, "a row has what is left of another one's column"
    after = batch.prompts, batch.completions, batch.rewards, batch.scores
    for x, y in zip(after, before):
        assert torch.equal(x, y) if torch.is_tensor(x) else x == y


@pytest.mark.parametrize("how, fraction, rows", [
    ("positive", .5, [0, 3, 5]), ("all", .5, list(range(10))), ("top", .2, [0, 3]),
    ("top", .17, [0, 3]), ("top", 0.0, []), ("bottom", .5, [1, 4, 6]), ("drop", 1.0, [0, 2, 3, 5]),
    ("drop", .34, [0, 1, 2, 3, 5, 7, 8, 9])])
def test_select(how, fraction, rows):
    influence = torch.tensor([3.0, -1, 0, 2, -5, 1, -2, -.5, -.1, -.2])
    keep, fallback = select(influence, how, fraction)
    assert keep.nonzero()[:, 0].tolist() == rows and not fallback


def test_the_fallback_keeps_the_better_half():
    influence = torch.cat([-torch.arange(1.0, 21), torch.zeros(5)])     # those of 0 do not count
    keep, fallback = select(influence, "positive")
    assert fallback and keep.tolist() == [True] * 10 + [False] * 15
    influence[18:20] = 1.0      # one in ten
    keep, fallback = select(influence, "positive")
    assert not fallback and torch.equal(keep, influence > 0)


def test_controls_keep_as_many_as_positive_does():
    generator = generator_of(1)
    random_differs = 0
    for positive in range(13):
        influence, advantages, rewards = torch.rand(3, 12, generator=generator) + .1
        influence[torch.randperm(12, generator=generator)[positive:]] *= -1
        advantages[::2] *= -1
        rewards[3] = NAN
        keys = {"positive": influence, "bottom": -influence, "top_advantage": advantages.abs(),
                "top_reward": rewards.nan_to_num(0)}
        count = max(positive, 6 if positive < 2 else 0)
        for how, key in keys.items():
            keep, fallback = select(influence, how, .5, generator, advantages, rewards)
            assert keep.nonzero()[:, 0].tolist() == sorted(key.topk(count).indices.tolist()), how
            assert fallback == (positive < 2)
        keep, _ = select(influence, "random", .5, generator)
        random_differs += not torch.equal(keep, influence > 0)
        assert keep.sum() == count
    assert random_differs > 5


def test_top_advantage_with_a_critic_is_a_mean_over_drawn_tokens():
    drawn = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    rollout = SimpleNamespace(sampled_mask=drawn)
    batch = Batch(rollout=rollout, advantages=torch.tensor([[.4] * 4, [1.0, 0, 0, 0]]),
                  loss_mask=drawn, rewards=torch.zeros(2))
    cfg = words(tracin="self", tracin_select="top_advantage")
    recording = SimpleNamespace(batch=batch, cfg=cfg, step=SimpleNamespace(rows=torch.arange(2)))
    weights, _ = row_weights_of(recording, torch.tensor([1.0, -1]), None)
    assert weights.tolist() == [0, 1], "padding counts, or the sum"


def soft(influence, batch):
    """Weights of all kinds: above 1, between, 0 and below 0."""
    assert len(batch.rewards) == len(batch.completions) == len(influence)
    return [(0.0, .25, 1.0, 1.5, -.5)[i % 5] for i in range(len(influence))]


@pytest.mark.parametrize("normalizer", ("all", "norm"))
@pytest.mark.parametrize("loss_type", ("dapo", "grpo", "dr_grpo"))
@pytest.mark.parametrize("how", ("top", "weigh"))
def test_later_passes_weigh_the_rows_as_the_first(how, loss_type, normalizer):
    cfg = words(tracin="self", num_iterations=3, micro_batch_size=5, loss_type=loss_type,
                tracin_normalizer=normalizer)
    cfg = with_functions(cfg, {"weigh": soft}, tracin_select=how)
    batch = batch_of(cfg)
    setup = setup_for(cfg, lr=0.0)        # the weights stay, so all passes are alike
    g = row_gradients(setup, batch, cfg)
    seen, _ = steps_of(setup, batch, cfg)
    share = (batch.row_weights > 0).float()
    if how == "weigh":
        share = torch.tensor(soft(batch.influence, batch))
    factor = 1.0 if normalizer == "all" else g.sum(0).norm() / (share @ g).norm()
    assert torch.allclose(batch.row_weights, share * factor, rtol=1e-4)
    assert 0 < (share != 0).sum() < 16 and len(seen) == 3
    for gradient in seen:
        assert close(gradient, (share * factor) @ g)


@pytest.mark.parametrize("beta", (0.0, .1))
def test_a_dropped_rollout_of_any_size_leaves_nothing_behind(beta):
    """Were it subtracted from the gradient of all rollouts, its rounding would be left."""
    cfg = words(tracin="self", beta=beta, micro_batch_size=5)
    cfg = with_functions(cfg, {"weigh": soft}, tracin_select="weigh")
    batch = batch_of(cfg)
    batch.advantages[5] = 1e7
    setup = setup_for(cfg)
    g = row_gradients(setup, batch, cfg)
    rest = rest_gradient(setup, batch, cfg)
    (found,), _ = steps_of(setup, batch, cfg, check=True)
    assert batch.row_weights[5] == 0 and g[5].norm() > 1e5 * found.norm()
    assert close(found, batch.row_weights @ g + rest)


def swapped(scores):
    """The best changes places with the least of those that help."""
    pair = [int(scores.argmax()), int(scores.where(scores > 0, math.inf).argmin())]
    scores[pair] = scores[pair[::-1]]
    return scores


def apart(scores):
    """The best is better, the worst worse; with weights from 1 to 2 the sum is as it was."""
    pair = [int(scores.argmax()), int(scores.argmin())]
    change = torch.stack([scores.max(), -scores.max()]) / torch.linspace(1, 2, len(scores))[pair]
    scores[pair] += .1 * change.to(scores)
    return scores


def times(factor, gradient):
    return {p: factor * g for p, g in gradient.items()}


def forget(result, recording, rows):
    """Of what was recorded before, the records of one weight, which the target then lacks too."""
    next(iter(recording.tape.records.values())).clear()


# mistake: (owner, function, its result and what it was called with -> another result)
MISTAKES = {
    "a call of a layer is lost": (tracin.Recording, "begin", forget),
    "another's score of the same sign": (
        tracin.Recording, "scores", lambda scores, *given: swapped(scores)),
    "scores whose errors cancel": (
        tracin.Recording, "scores", lambda scores, *given: apart(scores)),
    "less is learned": (
        tracin.Recording, "policy_gradient", lambda g, *given: times(.99, g)),
    "what is learned is not a number": (
        tracin.Recording, "policy_gradient", lambda g, *given: times(NAN, g)),
    "the target is a little less": (tracin, "target_of", lambda target, *given: (
        target._replace(halves=[times(.99, half) for half in target.halves])))}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_first_step_is_checked_against_ordinary_backwards(mistake, monkeypatch):
    owner, name, spoil = MISTAKES[mistake]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: spoil(right(*given), *given))
    cfg = words(tracin="reward", beta=.1, micro_batch_size=8)
    assert "influence" in refusal(steps_of, setup_for(cfg), batch_of(cfg), cfg, check=True)


def test_nothing_selected_is_no_step():
    cfg = words(tracin="self", tracin_select="top", tracin_fraction=0.0, num_iterations=2)
    setup = setup_for(cfg)
    seen, m = steps_of(setup, batch_of(cfg), cfg)
    assert not seen and m["num_steps"] == 0
    cfg = replace(cfg, beta=.1)         # the KL is learned from all rows all the same
    setup = setup_for(cfg)
    batch = batch_of(cfg)
    rest = rest_gradient(setup, batch, cfg)
    seen, _ = steps_of(setup, batch, cfg)
    assert len(seen) == 2 and close(seen[0], rest)


def test_a_row_that_is_not_a_number_stops_before_the_step():
    cfg = words(tracin="self", beta=.1)
    batch = batch_of(cfg)
    batch.advantages[5] = NAN
    setup = setup_for(cfg)
    before = setup.policy.wte.weight.detach().clone()
    assert "influence" in refusal(steps_of, setup, batch, cfg)
    assert torch.equal(setup.policy.wte.weight, before)


def test_the_target_is_averaged_over_steps():
    cfg = words(tracin="reward", tracin_target_ema=.8)
    setup = setup_for(cfg, lr=0.0)
    batches = [batch_of(cfg, seed) for seed in (7, 8)]
    g = row_gradients(setup, batches[1], cfg)
    a, b = (target_gradient(setup, batch, ALL_ROWS, cfg) for batch in batches)
    assert cosine({0: a}, {0: b}) > -.3
    for batch in batches:
        _, m = steps_of(setup, batch, cfg)
    expected = (.8 * .2 * a + .2 * b) / (1 - .8 ** 2)
    assert m["tracin/target_age"] == 2 and close(batches[1].influence, g @ expected)


def test_an_average_starts_again_where_the_target_points_elsewhere():
    average = tracin.Average(.5)
    for g, expected, share in (([1.0, 0], [1, 0], 1), ([0.0, 1], [1 / 3, 2 / 3], 2 / 3),
                               ([-9.0, -9], [-9, -9], 1)):
        found, of_newest = average.update({0: torch.tensor(g)})
        assert found[0].tolist() == pytest.approx(expected)
        assert of_newest == pytest.approx(share)


def test_adam_scale_is_what_adamw_multiplies_with():
    """Also with two groups of parameters."""
    a, b = trained = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    groups = [dict(params=[a], betas=(0.0, .9)), dict(params=[b], betas=(0.0, .99), eps=.1)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0)
    for _ in range(3):
        gradient = {p: torch.randn(3) for p in trained}
        scale = tracin.adam_scale(optimizer, gradient)
        expected = {p: p.detach() - gradient[p] * scale[p] for p in trained}
        for p in trained:
            p.grad = gradient[p]
        optimizer.step()
        for p in trained:
            assert close(p.detach(), expected[p])


def test_influence_in_steps_of_adamw():
    """In the first step the second moment is the squared gradient of all rows and of the rest. A
    row's own part has the same scale."""
    cfg = words(tracin="reward", tracin_adam=True, tracin_leave_one_out=True, beta=.1)
    setup = setup_for(cfg)
    setup.optimizer = torch.optim.AdamW(setup.trained, lr=1e-4, eps=.01)
    batch = batch_of(cfg)
    g = row_gradients(setup, batch, cfg)
    everything = g.sum(0) + rest_gradient(setup, batch, cfg)
    G = target_gradient(setup, batch, ALL_ROWS, cfg)
    scale = 1 / (everything.abs() + .01)
    coef = target_coefficients(batch, ALL_ROWS, "reward")
    own = (g.square() @ scale) * coef * -batch.loss_mask.sum() / batch.advantages
    steps_of(setup, batch, cfg)
    assert close(batch.influence, g @ (G * scale) - own, 1e-3)
