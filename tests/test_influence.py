"""
Influence inside GRPO: targets, selection, the step. By brute force: one autograd backward per row.
The tape itself: test_tape.py.
"""
import copy
import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
import tracin
from common.files import ROOT
from grpo import collect
from loss import Step, loss_of
from rollout import completion_entropies, completion_logprobs
from run.check import check
from run.settings import Settings
from tracin import HeldOut, positive, target_coefficients
from worlds import (
    assert_refused,
    PROMPTS, TOKENIZER, assert_close, generator_of, gradient, number_gpt, refusal, settings,
    setup_of, shaken, skip_for, skip_without, steps_of, whole_step)

# 2 prompts of 8 completions
ROWS = 16
ALL_ROWS = torch.arange(ROWS)
HELD_OUT = torch.tensor([0, 3, 4, 9, 10, 15])       # rows of a held-out batch that count
NAN = math.nan


def cfg_of(functions=None, tracin_select="positive", tracin="off", **knobs):
    """Settings, also with what the config file's functions are asked for."""
    skip_for(tracin=tracin, tracin_select=tracin_select)
    cfg = settings(num_generations=8, **knobs)
    return check(replace(cfg, functions=cfg.functions | (functions or {}), tracin=tracin,
                         tracin_select=tracin_select))


def setup_for(cfg, lr=.05, prompts=PROMPTS):
    return setup_of(cfg, prompts=prompts, reference=shaken(number_gpt(), .05), lr=lr)


def world_of(cfg, seed=7, **more):
    setup = setup_for(cfg, **more)
    return setup, collect(setup, setup.prompts, cfg, seed)


def row_gradients(setup, batch, cfg):
    """(N, weights): the policy's part of each row's loss, one backward each."""
    step = whole_step(batch)
    losses = (loss_of(setup, setup.policy, batch, row, step, cfg)
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


def likely_seven(policy, tokenizer, batch):
    """A function of the config file as target: a number to raise."""
    assert tokenizer is TOKENIZER and len(batch.completions) == ROWS
    logits = policy.lm_head(policy(torch.tensor([[3, 1, 4, 1, 5, 9]])))
    return logits.log_softmax(-1)[0, :, 7].mean()


def target_gradient(setup, batch, rows, cfg):
    """By autograd: what tracin.target_coefficients promises."""
    if cfg.tracin == "target":
        return -gradient(likely_seven(setup.policy, TOKENIZER, batch), setup.trained)
    if cfg.tracin == "self":
        step = Step(0, rows, len(rows), int(batch.loss_mask[rows].sum()))
        loss = loss_of(setup, setup.policy, batch, rows, step, cfg)
        return gradient(loss.policy, setup.trained)
    coef = target_coefficients(batch, rows, cfg.hook("tracin") or cfg.tracin)
    logp = completion_logprobs(setup.policy, batch.rollout, cfg.temperature)
    return gradient((coef * logp.sum(1)).sum(), setup.trained)


agree = functools.partial(assert_close, tolerance=2e-4)


# ------------------------------------------------------------------------------------------------
# a step

KL = dict(beta=.1)


@pytest.mark.parametrize("target, held, knobs", [
    ("self", False, KL), ("self", True, KL | dict(micro_batch_size=3)),
    ("self", False, KL | dict(top_entropy_quantile=.5)), ("self", True, KL | dict(lora_rank=2)),
    ("reward", False, KL | dict(micro_batch_size=3)), ("reward", True, KL),
    ("reward", False, KL | dict(entropy_coef=.05)),
    ("reward", False, KL | dict(lora_rank=2, micro_batch_size=3)),
    ("reward", False, KL | dict(top_entropy_quantile=.5)),
    # a row's loss is a multiple of its log-prob, and nothing is left besides
    ("advantage", False, KL | dict(kl_in="reward", kl_estimator="k1")),
    ("advantage", True, KL | dict(entropy_coef=.05)), ("contrastive", False, KL),
    ("contrastive", True, dict(micro_batch_size=8)), ("target", False, KL),
    ("target", False, dict(micro_batch_size=3))])
def test_influence_and_step_against_one_backward_per_row(target, held, knobs):
    cfg = cfg_of({"target": likely_seven}, tracin=target, **knobs)
    setup = setup_for(cfg)
    if cfg.lora_rank:
        shaken(setup.policy, .05)    # adapters that do something; frozen weights too
    batch, other = (collect(setup, PROMPTS, cfg, seed) for seed in (7, 8))
    held_out = HeldOut(other, HELD_OUT) if held else None
    g = row_gradients(setup, batch, cfg)
    G = target_gradient(setup, *(held_out or (batch, ALL_ROWS)), cfg)
    rest = rest_gradient(setup, batch, cfg)
    (step,), m = steps_of(setup, batch, cfg, held_out, check=True)
    agree(batch.influence, g @ G, "influences")
    kept = (batch.influence > 0).float()
    assert torch.equal(batch.row_weights, kept) and kept.sum() > 2, (
        "the rows that are kept are not those of positive influence")
    agree(step, kept @ g + rest, "the gradient of kept rows and the rest of the loss")
    assert m["tracin/target_grad_norm"] == pytest.approx(float(G.norm()), rel=1e-4)
    assert math.isnan(m["tracin/target_cosine"]) == (target == "target"), (
        "nothing is known of the noise of a target in one piece")


@pytest.mark.parametrize("knobs", [
    dict(tracin="self", beta=.1), dict(tracin="advantage"),
    dict(tracin="reward", beta=.1, entropy_coef=.05)])
def test_leave_one_out_and_self_share(knobs):
    skip_without("variants")
    cfg = cfg_of(**knobs)
    setup, batch = world_of(cfg)
    g = row_gradients(setup, batch, cfg)
    own = g.square().sum(1)
    if cfg.tracin != "self":    # the target's part of row i as a multiple of g_i
        coef = target_coefficients(batch, ALL_ROWS, cfg.tracin)
        own = own * coef * -batch.loss_mask.sum() / batch.advantages
    raw = g @ target_gradient(setup, batch, ALL_ROWS, cfg)
    for leave_one_out, expected, every in ((False, raw, 4), (True, raw - own, 1)):
        cfg = replace(cfg, tracin_leave_one_out=leave_one_out)
        _, m = steps_of(setup_for(cfg), batch, cfg)
        agree(batch.influence, expected, f"leave one out: {leave_one_out}", tolerance=1e-3)
        share = own[::every].abs().sum() / raw[::every].abs().sum()     # of all rows, or of four
        assert m["tracin/self_share"] == pytest.approx(float(share), rel=1e-3)


@pytest.mark.parametrize("knobs", [
    dict(tracin="reward", mini_batch_size=8),
    dict(tracin="target", functions={"target": likely_seven}),
    dict(tracin="reward", functions={"advantage": lambda batch: batch.rollout.logp})])
def test_own_parts_that_are_not_known_are_not_left_out_in_silence(knobs):
    skip_without("variants")
    cfg = cfg_of(**knobs, tracin_leave_one_out=True)
    setup, batch = world_of(cfg)
    assert_refused("tracin_leave_one_out", steps_of, setup, batch, cfg)


def soft(influence, batch):
    """Weights of all kinds: above 1, between, 0 and below 0."""
    assert len(batch.rewards) == len(batch.completions) == len(influence)
    return [(0.0, .25, 1.0, 1.5, -.5)[i % 5] for i in range(len(influence))]


@pytest.mark.parametrize("how, loss_type, normalizer", [
    ("top", "dapo", "norm"), ("top", "grpo", "all"), ("weigh", "dr_grpo", "norm"),
    ("weigh", "dapo", "all")])
def test_later_passes_weigh_the_rows_as_the_first(how, loss_type, normalizer):
    cfg = cfg_of({"weigh": soft}, how, "self", num_iterations=3, micro_batch_size=5,
                 loss_type=loss_type, tracin_normalizer=normalizer)
    setup, batch = world_of(cfg, lr=0.0)        # the weights stay, so all passes are alike
    g = row_gradients(setup, batch, cfg)
    steps, _ = steps_of(setup, batch, cfg)
    share = (batch.row_weights > 0).float()
    if how == "weigh":
        share = torch.tensor(soft(batch.influence, batch))
    factor = 1.0 if normalizer == "all" else g.sum(0).norm() / (share @ g).norm()
    agree(batch.row_weights, share * factor, "the weights of rows")
    assert 0 < (share != 0).sum() < ROWS and len(steps) == 3
    for step in steps:
        agree(step, (share * factor) @ g, "a step")


@pytest.mark.parametrize("target", ("self", "reward"))
def test_all_rows_kept_are_plain_grpo(target):
    """In passes, mini-batches and micro-batches, with a KL."""
    found = []
    for more in ({}, dict(tracin=target, tracin_select="all")):
        cfg = cfg_of(num_iterations=2, mini_batch_size=8, micro_batch_size=4, beta=.1, **more)
        setup, batch = world_of(cfg)
        found.append(steps_of(setup, batch, cfg)[0])
    assert len(found[0]) == len(found[1]) == 4
    for plain, kept in zip(*found):
        agree(kept, plain, "a step that keeps all rows")


def test_nothing_selected_is_no_step():
    knobs = dict(tracin="self", tracin_select="top", tracin_fraction=0.0, num_iterations=2)
    cfg = cfg_of(**knobs)
    steps, m = steps_of(*world_of(cfg), cfg)
    assert not steps and m["num_steps"] == 0 < m["tracin/empty_steps"]
    cfg = cfg_of(**knobs, beta=.1)          # the KL is learned from all rows all the same
    setup, batch = world_of(cfg)
    rest = rest_gradient(setup, batch, cfg)
    steps, _ = steps_of(setup, batch, cfg)
    assert len(steps) == 2
    agree(steps[0], rest, "the gradient of the KL")


# ------------------------------------------------------------------------------------------------
# the target

@pytest.mark.parametrize("kind, rewards, expected", [
    ("reward", [8, 4, 6], [-1, 1, 0]),      # the target's loss falls as the best gets likelier
    ("reward", [1, NAN, 3], [1, 0, -1]), ("reward", [NAN] + [.1] * 7, [0] * 8),
    ("advantage", [1, NAN, 3], [-1, 0, -3]),
    ("contrastive", [.1, .9, .5, .7, .3], [1, -1, 0, -1, 1]),
    ("contrastive", [1, 0, 0, 1, 0, 1, 0, 0], [-1, .6, .6, -1, .6, -1, .6, .6]),    # ties
    ("contrastive", [NAN, .3, .3, .3], [0] * 4), ("contrastive", [NAN] * 3, [0] * 3)])
def test_coefficients_of_targets(kind, rewards, expected):
    """Times the number of rows. The advantages are the rewards."""
    skip_for(tracin=kind)
    n = len(rewards)
    rewards = torch.tensor(rewards, dtype=torch.float32)
    batch = SimpleNamespace(rewards=rewards, advantages=rewards.clone())
    kind = Settings(tracin=kind).hook("tracin") or kind
    coef = target_coefficients(batch, torch.arange(n), kind)
    assert (n * coef).tolist() == pytest.approx(expected, rel=1e-3)


def test_the_target_is_halved_by_prompt_and_one_prompt_has_no_halves():
    cfg = cfg_of(tracin="self", beta=.1)
    setup, batch = world_of(cfg)
    g = row_gradients(setup, batch, cfg)
    first, second = g[:8].sum(0), g[8:].sum(0)
    _, m = steps_of(setup, batch, cfg)
    expected = float(first @ second / first.norm() / second.norm())
    assert m["tracin/target_cosine"] == pytest.approx(expected, abs=1e-4)
    _, m = steps_of(*world_of(cfg, prompts=PROMPTS[:1]), cfg)
    assert math.isnan(m["tracin/target_cosine"]), "not 0: nothing is known of its noise"


def test_a_target_function_is_given_the_held_out_rollouts():
    """The function that docs/influence.md shows: reward times log-prob, not normalised."""
    page = open(f"{ROOT}/docs/influence.md").read()
    code, = (code for code in page.split("```") if "\ndef target(" in code)
    shown = {}
    exec(code.removeprefix("python\n"), shown)
    cfg = cfg_of({"target": shown["target"]}, tracin="target",
                 tracin_val_prompts=shown["tracin_val_prompts"])
    setup, batch = world_of(cfg)
    other = collect(setup, PROMPTS, cfg, 8)
    g = row_gradients(setup, batch, cfg)
    logp = completion_logprobs(setup.policy, other.rollout)[HELD_OUT].sum(1)
    number = (other.rewards[HELD_OUT] * logp).mean()
    by_hand = -gradient(number, setup.trained)
    _, m = steps_of(setup, batch, cfg, HeldOut(other, HELD_OUT))
    agree(batch.influence, g @ by_hand, "influences")
    assert m["tracin/target_loss"] == pytest.approx(-float(number.detach()))


def test_a_reward_of_their_own_scores_held_out_rollouts_only():
    def shouted(prompts, completions):
        return [100.0 + len(text) for text in completions]

    cfg = cfg_of({"shouted": shouted}, tracin="reward", tracin_val_prompts=2, tracin_val_size=5)
    cfg = check(replace(cfg, tracin_val_reward="shouted"))
    setup, batch = world_of(cfg)
    held_out, rows = grpo.collect_held_out(setup, 0, cfg)
    assert held_out.rewards.tolist() == shouted(None, held_out.completions) and len(rows) == 5
    assert torch.equal(batch.rewards, world_of(cfg_of())[1].rewards)


@pytest.mark.parametrize("knobs, function", [
    (dict(kl_in="reward"), "reward"), ({}, "advantage"), ({}, "target"), ({}, "policy_tokens")])
def test_the_reference_scores_held_out_rollouts_for_who_looks_at_it(knobs, function):
    """A KL in the loss is no part of a target; one in the reward is, and functions may read it."""
    cfg = cfg_of(tracin="reward", tracin_val_prompts=2, beta=.1, **knobs)
    setup = setup_for(cfg)
    functions = {"policy_tokens": lambda batch: batch.loss_mask & (batch.ref_logp < 0)}
    function_of = functions.get(function, lambda batch: batch.rewards.clone())
    cfg.functions.setdefault(function, function_of)
    assert grpo.collect_held_out(setup, 0, cfg).batch.ref_logp is not None


def test_the_target_is_averaged_over_steps():
    cfg = cfg_of(tracin="reward", tracin_target_ema=.8)
    setup, batch = world_of(cfg, lr=0.0)
    batches = [batch, collect(setup, PROMPTS, cfg, 8)]
    g = row_gradients(setup, batches[1], cfg)
    a, b = (target_gradient(setup, batch, ALL_ROWS, cfg) for batch in batches)
    assert torch.cosine_similarity(a, b, 0) > -.3
    for batch in batches:
        _, m = steps_of(setup, batch, cfg)
    expected = (.8 * .2 * a + .2 * b) / (1 - .8 ** 2)
    assert m["tracin/target_age"] == 2
    agree(batches[1].influence, g @ expected, "influences on the average")

    # it starts again where the target points elsewhere
    average = cfg.hook("average")(cfg_of(tracin_target_ema=.5))
    for g, expected, share in (([1.0, 0], [1, 0], 1), ([0.0, 1], [1 / 3, 2 / 3], 2 / 3),
                               ([-9.0, -9], [-9, -9], 1)):
        found, of_newest = average.update({0: torch.tensor(g)})
        assert found[0].tolist() == pytest.approx(expected)
        assert of_newest == pytest.approx(share)


def test_influence_in_steps_of_adamw():
    """What AdamW multiplies with, also with two groups of parameters. In the first step the second
    moment is the squared gradient of all rows and of the rest; a row's own part is scaled alike."""
    skip_without("variants")
    from extras.variants.tracin_adam import adam_scale
    a, b = trained = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    groups = [dict(params=[a], betas=(0.0, .9)), dict(params=[b], betas=(0.0, .99), eps=.1)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0)
    for _ in range(3):
        slope = {p: torch.randn(3) for p in trained}
        scale = adam_scale(optimizer, slope)
        expected = {p: p.detach() - slope[p] * scale[p] for p in trained}
        for p in trained:
            p.grad = slope[p]
        optimizer.step()
        for p in trained:
            agree(p.detach(), expected[p], "a step of AdamW")

    cfg = cfg_of(tracin="reward", tracin_adam=True, tracin_leave_one_out=True, beta=.1)
    setup, batch = world_of(cfg)
    setup.optimizer = torch.optim.AdamW(setup.trained, lr=1e-4, eps=.01)
    g = row_gradients(setup, batch, cfg)
    everything = g.sum(0) + rest_gradient(setup, batch, cfg)
    scale = 1 / (everything.abs() + .01)
    coef = target_coefficients(batch, ALL_ROWS, "reward")
    own = (g.square() @ scale) * coef * -batch.loss_mask.sum() / batch.advantages
    G = target_gradient(setup, batch, ALL_ROWS, cfg)
    steps_of(setup, batch, cfg)
    agree(batch.influence, g @ (G * scale) - own, "influences", tolerance=1e-3)


# ------------------------------------------------------------------------------------------------
# selection

def select(influence, how, **offered):
    """As tracin.selection_of does."""
    cfg = Settings(tracin_select=how)
    return cfg.call("tracin_select", positive, **{"influence": influence, "cfg": cfg} | offered)


@pytest.mark.parametrize("how, fraction, rows", [
    ("positive", .5, [0, 3, 5]), ("top", .17, [0, 3]),
    ("top", 0.0, []), ("bottom", .5, [1, 4, 6]), ("drop", 1.0, [0, 2, 3, 5]),
    ("drop", .34, [0, 1, 2, 3, 5, 7, 8, 9])])
def test_select(how, fraction, rows):
    skip_for(tracin_select=how)
    influence = torch.tensor([3.0, -1, 0, 2, -5, 1, -2, -.5, -.1, -.2])
    keep, fallback = select(influence, how, cfg=SimpleNamespace(tracin_fraction=fraction))
    assert keep.nonzero()[:, 0].tolist() == rows and not fallback


def test_controls_keep_as_many_as_positive_does():
    skip_without("variants")
    influence = torch.tensor([3.0, -1, 2, -5, 1, -2])
    batch = SimpleNamespace(row_advantages=torch.tensor([9, .1, -2, .3, 1, -.2, 0]),
                            rewards=torch.tensor([9, 1, 5, NAN, 2, 3, 0]))
    rows = torch.arange(1, 7)
    for how, kept in dict(bottom=[1, 3, 5], top_advantage=[1, 2, 3], top_reward=[1, 3, 4]).items():
        keep, _ = select(influence, how, batch=batch, rows=rows, generator=None)
        assert keep.nonzero()[:, 0].tolist() == kept, how
    generator = generator_of(1)
    drawn = torch.stack([select(influence, "random", generator=generator)[0] for _ in range(50)])
    assert (drawn.sum(1) == 3).all() and (drawn.sum(0) > 10).all(), "it has favourites"


def test_what_weigh_does_to_its_batch_stays_there():
    """Also to a row of a prompt's columns, which the completions of a prompt share."""
    seen = []

    def careless(influence, batch):
        seen.extend(len(prompt.row.pop("tests")) for prompt in batch.prompts)
        batch.completions.reverse()
        batch.rewards.zero_()
        batch.scores.zero_()
        return torch.ones_like(influence)

    cfg = cfg_of({"weigh": careless}, "weigh", "self")
    prompts = [prompt._replace(row={"tests": [1, 2]}) for prompt in PROMPTS]
    setup, batch = world_of(cfg, prompts=prompts)
    before = copy.deepcopy((batch.prompts, batch.completions, batch.rewards, batch.scores))
    steps_of(setup, batch, cfg)
    assert seen == [2] * ROWS, "a row has what is left of another one's column"
    after = batch.prompts, batch.completions, batch.rewards, batch.scores
    for x, y in zip(after, before):
        assert torch.equal(x, y) if torch.is_tensor(x) else x == y


# ------------------------------------------------------------------------------------------------
# the check of the first step

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


# mistake: (owner, function, its result -> another result)
MISTAKES = {
    "another's score of the same sign": (tracin.Recording, "scores", swapped),
    "scores whose errors cancel": (tracin.Recording, "scores", apart),
    "less is learned": (tracin.Recording, "policy_gradient", lambda g: times(.99, g)),
    "what is learned is not a number": (
        tracin.Recording, "policy_gradient", lambda g: times(NAN, g)),
    "the target is a little less": (tracin, "target_of", lambda target: target._replace(
        halves=[times(.99, half) for half in target.halves]))}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_first_step_is_checked_against_ordinary_backwards(mistake, monkeypatch):
    owner, name, spoil = MISTAKES[mistake]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: spoil(right(*given)))
    cfg = cfg_of(tracin="reward", beta=.1, micro_batch_size=8)
    assert "influence" in refusal(steps_of, *world_of(cfg), cfg, check=True)


@pytest.mark.parametrize("rest", [dict(entropy_coef=.01), dict(beta=.1)])
def test_groups_without_spread_stop_no_run(rest):
    """All of a group right or all wrong, as verifiable rewards are at first: every influence is 0,
    and the sums that are compared hold nothing but rounding."""
    cfg = cfg_of(tracin="reward", **rest)
    setup, batch = world_of(cfg)
    batch.advantages = torch.zeros(ROWS)
    batch.rewards = (ALL_ROWS // 8).float()
    steps_of(setup, batch, cfg, check=True)
    assert not batch.influence.any(), "a rollout without advantage has influence"


def test_bnpo_passes_the_check_of_the_first_step():
    """A part of the rollouts has other divisors than all: nothing can be compared with it."""
    cfg = cfg_of(tracin="reward", loss_type="bnpo", micro_batch_size=5)
    setup, batch = world_of(cfg)
    steps_of(setup, batch, cfg, check=True)
    assert batch.influence.isfinite().all()
