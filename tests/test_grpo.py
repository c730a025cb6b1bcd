"""
The arithmetic of GRPO: against a published worked example, against loops in plain Python, and knob
by knob on a tiny GPT. test_algorithm.py is the short version, for reading.
"""
import copy
import functools
import itertools
import json
import math
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import model
import sample as sampling
from config import Settings, load_settings
from evaluate import distinct, evaluate
from grpo import (
    Step, collect, decoupled_advantages, draw_prompts, gradient_of, group_advantages,
    grpo_loss, kl_estimate, learning_rate, loss_of, sync_reference, total_reward, update)
from run.build import build
from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from judge.rewards import score
from judge.scorer import says_nothing
from model import GPT, GPTConfig, add_lora
from sample import completion_logprobs
from run.attention import use_attention_by_hand
from run.debug import row_norms
from run.device import autocast
from run.files import save_gpt
from run.fused_head import FusedHead, fused_logprobs
from run.metrics import batch_metrics, loss_metrics
from run.processes import all_reduce
from run.report import diagnose
from run.script import BadInput, seed_for
from sample import generate, truncate
import selection
from tracin import Influence

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
NAN, INF = math.nan, math.inf


def floats(metrics):
    return {name: float(x) for name, x in metrics.items()}


def loss_and_metrics(logp, old_logp, ref_logp, advantages, mask, policy_mask=None, num_rows=None,
                     num_tokens=None, **knobs):
    """grpo_loss and its metrics, of rows that are a whole step unless num_rows and num_tokens say
    otherwise. knobs: settings of the loss."""
    cfg = replace(Settings(), **knobs)
    step = SimpleNamespace(num_rows=num_rows or len(logp), num_tokens=num_tokens or int(mask.sum()))
    loss, terms = grpo_loss(
        logp, old_logp, ref_logp, advantages, mask, policy_mask, step, cfg)
    batch = SimpleNamespace(mask=mask.bool(), advantages=advantages)
    return loss, loss_metrics(Forward(loss, logp, terms, batch), cfg)


# ------------------------------------------------------------------------------------------------
# the worked example: losses, gradients and metrics as TRL's own code computes them

LOGP = [[-1.0, -.5, -2.0, -.1], [-1.5, -.7], [-.3, -1.2, -.9], [-2.0]]
OLD = [[-1.1, -.9, -2.0, -.1], [-1.2, -.6], [-.3, -1.6, -.8], [-1.5]]
REF = [[-1.2, -.6, -1.8, -.2], [-1.4, -.9], [-.5, -1.1, -1.0], [-1.8]]
REWARDS = [1, 0, 3, 3.5]


def padded(rows):
    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows], dtype=torch.float64)


def example(**fields):
    """The tensors that grpo_loss takes; `fields` replaces some of them."""
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), 4)
    return dict(
        logp=padded(LOGP).requires_grad_(), old_logp=padded(OLD), ref_logp=padded(REF),
        advantages=advantages, mask=torch.arange(4) < torch.tensor([[4], [2], [3], [1]]),
        policy_mask=None) | fields


def run_example(**fields):
    """Loss, d(loss)/d(logp) by row without the padding, metrics. fields: tensors and settings."""
    arguments = example(**fields)
    loss, metrics = loss_and_metrics(**arguments, max_completion_length=6)
    loss.backward()
    gradient = [g[:len(row)].tolist() for g, row in zip(arguments["logp"].grad, LOGP)]
    return float(loss.detach()), gradient, floats(metrics)


def test_example_advantages():
    expected = [-.529623, -1.134906, .680944, .983585]
    assert group_advantages(torch.tensor(REWARDS), 4).tolist() == pytest.approx(expected, abs=1e-6)


PLAIN_KL = dict(beta=.04, use_bias_correction_kl=False)
COLUMNS = [dict(), PLAIN_KL, dict(beta=.04, use_bias_correction_kl=True), dict(delta=1.3),
           dict(epsilon_high=.28), dict(importance_sampling_level="sequence")]
TABLE = [("grpo", [.068692, .069246, .069164, .062343, .064153, .045048]),
         ("dapo", [.165871, .166366, .166346, .155712, .160423, .140468]),
         ("bnpo", [.165871, .166366, .166346, .155712, .160423, .140468]),
         ("dr_grpo", [.069113, .069319, .069311, .064880, .066843, .058528])]


@pytest.mark.parametrize("loss_type, knobs, expected", [
    *((name, knobs, value) for name, values in TABLE for knobs, value in zip(COLUMNS, values)),
    ("cispo", dict(epsilon_high=1.3), -.100753),
    ("sapo", dict(), .003302),
    ("sapo", dict(importance_sampling_level="sequence"), .004329)])
def test_example_losses(loss_type, knobs, expected):
    assert run_example(loss_type=loss_type, **knobs)[0] == pytest.approx(expected, abs=6e-7)


DAPO = [[.058532, .079010, .052962, .052962], [0, .102691], [-.068094, 0, -.061614], [-.059657]]


@pytest.mark.parametrize("knobs, expected", [
    (dict(loss_type="grpo"),
     [[.036583, .049382, .033101, .033101], [0, .128363], [-.056745, 0, -.051345], [-.149144]]),
    (dict(loss_type="dapo"), DAPO),
    (dict(loss_type="bnpo"), DAPO),
    (dict(loss_type="dr_grpo"),
     [[.024388, .032921, .022068, .022068], [0, .042788], [-.028373, 0, -.025673], [-.024857]]),
    (dict(loss_type="grpo", importance_sampling_level="sequence"),
     [[.037509] * 4, [.116148] * 2, [-.062713] * 3, [-.149144]]),
    (dict(loss_type="cispo", epsilon_high=1.3),
     [[.058532, .068851, .052962, .052962], [.084076, .102691], [-.068094, -.088523, -.061614],
      [-.059657]]),
    (dict(loss_type="sapo"),
     [[.036471, .046230, .033101, .033101], [.103173, .128043], [-.056745, -.079734, -.051229],
      [-.143517]]),
    (dict(loss_type="grpo", **PLAIN_KL),
     [[.037036, .049619, .032548, .033339], [-.000526, .129270], [-.056141, -.000351, -.051028],
      [-.151358]])])
def test_example_gradients(knobs, expected):
    for row, wanted in zip(run_example(**knobs)[1], expected):
        assert row == pytest.approx(wanted, abs=1e-6)


def test_example_metrics():
    loss, _, metrics = run_example(loss_type="grpo", **PLAIN_KL)
    assert metrics["policy_loss"] == pytest.approx(.068692, abs=6e-7) and metrics["tokens"] == 10
    found = {name: x for name, x in metrics.items() if "clip" in name or name == "kl"}
    expected = {
        "kl": .012385, "clip_ratio/low_mean": .1, "clip_ratio/high_mean": .1,
        "clip_ratio/region_mean": .2, "clip_ratio/low_min": 0, "clip_ratio/high_max": 1 / 3}
    assert found == pytest.approx(expected, abs=6e-7)
    gaps = [a - b for new, old in zip(LOGP, OLD) for a, b in zip(new, old)]
    assert metrics["ratio"] == pytest.approx(sum(map(math.exp, gaps)) / 10)


def test_clip_metrics_count_the_side_that_binds():
    # ratios above 1.2: rows 0 and 2, one token each; below .8: one in row 1, one in row 3
    for sign, expected in ((1, (0, .2, .2)), (-1, (.2, 0, .2))):
        metrics = run_example(advantages=sign * torch.ones(4))[2]
        found = [metrics[f"clip_ratio/{side}_mean"] for side in ("low", "high", "region")]
        assert found == pytest.approx(expected)
        assert metrics["clip_ratio/high_max"] == pytest.approx(1 / 3 if sign > 0 else 0)
        assert metrics["clip_ratio/low_min"] == 0
    assert "kl" not in metrics
    cispo = run_example(loss_type="cispo", epsilon_high=1.3, advantages=torch.ones(4))[2]
    assert cispo["cispo_clip_ratio"] == pytest.approx(.2) and "clip_ratio/low_mean" not in cispo


def test_clip_metrics_of_a_sequence_ratio_count_rows():
    """Three rows with loss, one without. As in TRL a row counts once, however long it is."""
    logp = torch.tensor([[.5] * 4, [.5] * 4, [-.5] * 4, [.5] * 4])
    mask = torch.arange(4) < torch.tensor([4, 1, 2, 0])[:, None]
    A = torch.tensor([1.0, -1.0, -1.0, 1.0])
    _, metrics = loss_and_metrics(logp, torch.zeros(4, 4), None, A, mask,
                                  importance_sampling_level="sequence")
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 3), "one row of three, not 4 of 7"
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx((2 * math.exp(.5) + math.exp(-.5)) / 3)


def test_a_row_without_loss_is_not_the_least_clipped_one():
    mask = torch.arange(4) < torch.tensor([4, 0])[:, None]
    for level in ("token", "sequence"):
        _, metrics = loss_and_metrics(torch.full((2, 4), -.5), torch.zeros(2, 4), None,
                                      -torch.ones(2), mask, importance_sampling_level=level)
        assert metrics["clip_ratio/low_min"] == 1, "the only row with loss is clipped everywhere"


# ------------------------------------------------------------------------------------------------
# KL estimators, enumerated: in ten rows of one token the shares are the probabilities, so the mean
# is the expectation

P, Q = (.5, .3, .2), (.4, .4, .2)
TO_Q_P = (.1, -.1, 0)                       # the exact gradients of KL(q, p)
TO_P_Q = (.098938, -.093885, -.005053)      # and of KL(p, q)


@pytest.mark.parametrize("estimator, corrected, value, gradient", [
    ("k1", False, .025267, (0, 0, 0)), ("k2", False, .024862, TO_P_Q),
    ("k3", False, .025267, TO_Q_P), ("k3", True, .025267, TO_P_Q)])
def test_kl_expectation_and_gradient(estimator, corrected, value, gradient):
    z = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    logp = z.log_softmax(0)[drawn][:, None]
    ref = torch.tensor(Q, dtype=torch.float64).log()[drawn][:, None]
    loss, metrics = loss_and_metrics(
        logp, logp.detach(), ref, torch.zeros(10), torch.ones(10, 1), loss_type="grpo", beta=1.0,
        kl_estimator=estimator, use_bias_correction_kl=corrected)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(value, abs=6e-7)
    assert metrics["kl"] == pytest.approx(value, abs=6e-7)
    assert z.grad.tolist() == pytest.approx(gradient, abs=6e-7)
    estimate = kl_estimate(logp.detach(), ref, estimator).mean()
    assert float(estimate) == pytest.approx(value, abs=6e-7)


def test_k3_is_never_negative_and_exact_near_zero():
    d = torch.tensor([-8.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 8.0])
    k3 = kl_estimate(torch.zeros(7), d, "k3")
    # exp(d) - 1 - d in float32 would have no digit left at 1e-4
    assert k3[3] == 0 and (k3 >= 0).all() and k3[4] == pytest.approx(5e-9, rel=.05)


# ------------------------------------------------------------------------------------------------
# advantages

def plain_advantages(rewards, G, scale):
    known = [r for r in rewards if not math.isnan(r)]
    out = []
    for i in range(0, len(rewards), G):
        group = [r for r in rewards[i:i + G] if not math.isnan(r)]
        spread = {"group": group, "batch": known, "none": []}[scale]
        divisor = 1
        if scale != "none":
            divisor = (statistics.stdev(spread) if len(spread) > 1 else 0) + 1e-4
        for r in rewards[i:i + G]:
            if math.isnan(r) or max(group) == min(group):
                out.append(0.0)
            else:
                out.append((r - statistics.fmean(group)) / divisor)
    return out


@pytest.mark.parametrize("scale", ("group", "batch", "none"))
@pytest.mark.parametrize("rewards", [
    [1, 0, 3, 3.5, 2, 2, 2, 2, -1, 5, 0, 0],
    [.1, NAN, .7, .2, NAN, NAN, NAN, NAN, 1, 1, NAN, 1],
    [0, 0, 0, 1e-3, 5, 5, 5, NAN],
    [NAN, 3, NAN, NAN, 1, 2, 3, 4]])
def test_advantages_against_plain_python(rewards, scale):
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 4, scale)
    assert found.tolist() == pytest.approx(plain_advantages(rewards, 4, scale), abs=1e-12)
    assert all(a == 0 for a, r in zip(found.tolist(), rewards) if math.isnan(r))


@pytest.mark.parametrize("G", (2, 4, 8))
def test_advantages_are_bounded(G):
    bound = (G - 1) / math.sqrt(G)
    extreme = torch.eye(G, dtype=torch.float64)[0] * 1e6
    noise = torch.randn(300 * G, generator=torch.Generator().manual_seed(0))
    assert group_advantages(extreme, G).abs().max() == pytest.approx(bound, rel=1e-6)
    assert group_advantages(noise, G).abs().max() <= bound


@pytest.mark.parametrize("scale", ("group", "batch", "none"))
@pytest.mark.parametrize("G", (1, 3, 5, 6, 7, 8))
def test_equal_rewards_give_exactly_zero(G, scale):
    # the float32 mean of equal numbers is often another number
    values = torch.rand(200, generator=torch.Generator().manual_seed(G)) * 100 - 50
    rewards = values.repeat_interleave(G)
    assert rewards.dtype == torch.float32 and (group_advantages(rewards, G, scale) == 0).all()
    with_gaps = rewards.index_fill(0, torch.arange(0, len(rewards), G), NAN)
    assert (group_advantages(with_gaps, G, scale) == 0).all()


@pytest.mark.parametrize("scale", ("group", "batch", "none"))
def test_advantages_do_not_see_a_shift(scale):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(32, generator=generator, dtype=torch.float64)
    by_group = torch.arange(4.0).repeat_interleave(8)
    shifted = rewards + (torch.tensor([5.0]) if scale == "batch" else by_group)
    found, again = (group_advantages(r, 8, scale) for r in (rewards, shifted))
    assert torch.allclose(found, again, atol=1e-12)


def test_total_reward():
    """An abstention counts as the function's mean over the group, and as nothing where the whole
    group has none."""
    scores = torch.tensor([[1.0, 2.0], [NAN, 2.0], [3.0, NAN], [NAN, NAN],
                           [1.0, NAN], [2.0, NAN], [3.0, NAN], [NAN, NAN]])
    found = total_reward(scores, (2.0, -1.0), 4).tolist()
    expected = [0.0, 2.0, 4.0, NAN, 2.0, 4.0, 6.0, NAN]
    assert found == pytest.approx(expected, nan_ok=True)


def decoupled_by_hand(scores, weights, G):
    """Advantages of rows of scores (None: abstained), written out: as TRL's normalize_then_sum."""
    totals = []
    for start in range(0, len(scores), G):
        group = scores[start:start + G]
        columns = []
        for column in zip(*group):
            known = [x for x in column if x is not None]
            mean, std = statistics.fmean(known), statistics.stdev(known)
            columns.append([None if x is None else (x - mean) / (std + 1e-4) for x in column])
        for row in zip(*columns):
            parts = [w * x for w, x in zip(weights, row) if x is not None]
            totals.append(sum(parts) if parts else None)
    known = [x for x in totals if x is not None]
    mean, std = statistics.fmean(known), statistics.stdev(known)
    return [0.0 if x is None else (x - mean) / (std + 1e-4) for x in totals]


def test_rewards_normalised_before_they_are_summed():
    scores = [[1, 100], [2, 300], [4, None], [None, None],
              [0, 10], [1, 10.5], [.5, 11], [0, 12]]
    weights = (1.0, .5)
    expected = decoupled_by_hand(scores, weights, 4)
    x = torch.tensor([[NAN if s is None else s for s in row] for row in scores])
    found = decoupled_advantages(x, weights, 4)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    summed = group_advantages(total_reward(x, weights, 4), 4, "batch")
    assert (found - summed).abs().max() > .5, "a reward of large numbers drowns the other"


def test_multi_objective_aggregation_reaches_the_batch():
    functions = {"letters": letters, "length": lambda prompts, texts: [100 * len(t) for t in texts]}
    policy = gpt()
    found = {}
    for how in ("sum_then_normalize", "normalize_then_sum"):
        cfg = settings(functions, (1.0, .5), multi_objective_aggregation=how)
        batch = sample(policy, cfg)
        found[how] = batch.advantages
        assert torch.equal(batch.rewards, total_reward(batch.scores, (1.0, .5), 4))
    expected = decoupled_advantages(batch.scores, (1.0, .5), 4)
    assert torch.equal(found["normalize_then_sum"], expected)
    assert not torch.allclose(found["sum_then_normalize"], expected)


# ------------------------------------------------------------------------------------------------
# the loss against loops

def plain_loss(logp, old, ref, advantages, mask, policy_mask, loss_type, level, delta, high,
               estimator, corrected, beta, num_rows, num_tokens, epsilon=.2, L=9, tau_neg=1.05,
               tau_pos=1.0):
    """Loss and d(loss)/d(logp), on lists; the derivatives by hand."""
    high = epsilon if high is None else high
    total, grad = 0.0, [[0.0] * len(row) for row in logp]
    for i, A in enumerate(advantages):
        tokens = [t for t, on in enumerate(mask[i]) if on]
        for t in tokens:
            over = tokens if level == "sequence" else [t]   # the tokens that the ratio depends on
            rho = math.exp(sum(logp[i][u] - old[i][u] for u in over) / len(over))
            by_rho = by_logp = 0.0
            if loss_type == "cispo":
                value, by_logp = -min(rho, high) * A * logp[i][t], -min(rho, high) * A
            elif loss_type == "sapo":
                tau = tau_pos if A > 0 else tau_neg
                gate = 1 / (1 + math.exp(-tau * (rho - 1)))
                value, by_rho = -4 / tau * gate * A, -4 * gate * (1 - gate) * A
            else:
                free, clipped = min(rho, delta or INF) * A, min(max(rho, 1 - epsilon), 1 + high) * A
                value = -min(free, clipped)
                if free < clipped:
                    by_rho = -A * (rho < (delta or INF))
                else:
                    by_rho = -A * (1 - epsilon < rho < 1 + high)
            if policy_mask and not policy_mask[i][t]:
                value = by_rho = by_logp = 0.0
            if beta:
                d = ref[i][t] - logp[i][t]
                kl, slope = {"k1": (-d, 1), "k2": (d * d / 2, -d),
                             "k3": (math.exp(d) - 1 - d, 1 - math.exp(d))}[estimator]
                value += beta * kl * (rho if corrected else 1)
                by_rho += beta * kl * corrected
                by_logp += beta * slope * (rho if corrected else 1)
            divisor = {
                "grpo": num_rows * len(tokens), "sapo": num_rows * len(tokens),
                "dr_grpo": num_rows * L, "dapo": num_tokens, "cispo": num_tokens,
                "bnpo": sum(map(sum, mask)) * num_rows / len(logp)}[loss_type]
            total += value / divisor
            grad[i][t] += by_logp / divisor
            for u in over:
                grad[i][u] += by_rho * rho / len(over) / divisor
    return total, grad


def random_rows():
    """Eight rows of unequal length, one of them empty, in which every branch of the clip occurs at
    both levels."""
    g = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    old = -1.5 + .5 * noise(8, 7)
    logp = old + .25 * noise(8, 7) + torch.tensor([.5, -.5, .1, 0, -.1, .4, 0, -.4])[:, None]
    mask = torch.arange(7) < torch.tensor([7, 5, 3, 1, 6, 4, 0, 7])[:, None]
    advantages = torch.tensor([1.2, -.7, .4, -1.1, .9, -.6, .5, .8], dtype=torch.float64)
    return logp, old, logp + .3 * noise(8, 7), advantages, mask, torch.rand(8, 7, generator=g) < .4


def test_random_rows_reach_every_branch():
    logp, old, _, A, mask, _ = random_rows()
    gap = (logp - old) * mask
    by_row = (gap.sum(1) / mask.sum(1).clamp(min=1))[:, None].exp().expand(8, 7)
    for rho in (gap.exp(), by_row):
        for sign in (1, -1):
            x = rho[mask & (sign * A[:, None] > 0)]
            assert (x < .8).any() and ((x > .8) & (x < 1.2)).any() and (x > 1.3).any()


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_against_plain_python(loss_type, level):
    logp, old, ref, advantages, mask, policy_mask = random_rows()
    lists = [x.tolist() for x in (logp, old, ref, advantages, mask, policy_mask)]
    kl = [("k3", False, 0.0), *itertools.product(("k1", "k2", "k3"), (False, True), (.1,))]
    seen = set()
    cases = itertools.product(
        (None, 1.3), (None, .28), kl, (False, True), ((None, None), (11, 57)))
    for delta, high, (estimator, corrected, beta), masked, (rows, tokens) in cases:
        x = logp.clone().requires_grad_()
        ceiling = (high or 0) + 1 if loss_type == "cispo" else high
        loss, metrics = loss_and_metrics(
            x, old, ref, advantages, mask, policy_mask if masked else None, rows, tokens,
            loss_type=loss_type, importance_sampling_level=level, delta=delta, epsilon_high=ceiling,
            beta=beta, kl_estimator=estimator, use_bias_correction_kl=corrected,
            max_completion_length=9)
        loss.backward()
        value, gradient = plain_loss(
            *lists[:5], lists[5] if masked else None, loss_type, level, delta, ceiling, estimator,
            corrected, beta, rows or 8, tokens or int(mask.sum()))
        case = (delta, high, estimator, corrected, beta, masked, rows)
        assert float(loss.detach()) == pytest.approx(value, abs=1e-7), case
        expected = torch.tensor(gradient, dtype=torch.float64)
        assert torch.allclose(x.grad, expected, atol=1e-7), case
        if beta:
            mean = float(kl_estimate(logp, ref, estimator)[mask].mean())
            assert metrics["kl"] == pytest.approx(mean), case
        seen.add(round(value, 9))
    # each knob that this loss has makes another number
    assert len(seen) == {"cispo": 2, "sapo": 1}.get(loss_type, 4) * 7 * 2 * 2


def test_sapo_temperatures():
    logp, old, _, A, mask, _ = random_rows()

    def loss(A, **temperatures):
        found, _ = loss_and_metrics(logp, old, None, A, mask, loss_type="sapo", **temperatures)
        return float(found)

    plain = [x.tolist() for x in (logp, old, logp, A, mask)]
    expected, _ = plain_loss(*plain, None, "sapo", "token", None, None, "k3", False, 0.0, 8, 33,
                             tau_neg=2.0, tau_pos=.5)
    found = loss(A, sapo_temperature_neg=2.0, sapo_temperature_pos=.5)
    assert found == pytest.approx(expected, abs=1e-7)
    for sign, idle in ((1, "sapo_temperature_neg"), (-1, "sapo_temperature_pos")):
        assert loss(sign * A.abs(), **{idle: .5}) == loss(sign * A.abs())


# ------------------------------------------------------------------------------------------------
# what must change nothing

def loss_and_gradient(rows=slice(None), data=None, **knobs):
    logp, old, ref, advantages, mask, policy_mask = (x[rows] for x in data or random_rows())
    x = logp.clone().requires_grad_()
    ceiling = 1.3 if knobs["loss_type"] == "cispo" else None
    knobs = dict(epsilon_high=ceiling, beta=.1, max_completion_length=9) | knobs
    loss, metrics = loss_and_metrics(x, old, ref, advantages, mask, policy_mask, **knobs)
    loss.backward()
    return float(loss.detach()), x.grad, floats(metrics)


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("sizes", ((3, 5), (1, 1, 6), (2, 2, 2, 2)))
@pytest.mark.parametrize("loss_type", LOSSES)
def test_micro_batches_add_up(loss_type, sizes, level):
    knobs = dict(loss_type=loss_type, importance_sampling_level=level)
    loss, grad, _ = loss_and_gradient(**knobs)
    parts = [loss_and_gradient(rows.tolist(), num_rows=8, num_tokens=33, **knobs)
             for rows in torch.arange(8).split(sizes)]
    sum_of_losses = sum(part[0] for part in parts)
    joined = torch.cat([part[1] for part in parts])
    same = (sum_of_losses == pytest.approx(loss, abs=1e-12)
            and torch.allclose(joined, grad, atol=1e-12))
    assert same == (loss_type != "bnpo")


def test_bnpo_weighs_micro_batches_by_their_rows():
    loss, grad, _ = loss_and_gradient([0, 1, 2], loss_type="bnpo")
    part, part_grad, _ = loss_and_gradient([0, 1, 2], loss_type="bnpo", num_rows=8, num_tokens=33)
    assert part == pytest.approx(loss * 3 / 8) and torch.allclose(part_grad, grad * 3 / 8)


@pytest.mark.parametrize("garbage", (0.0, -7.0, 1e4, NAN, INF, -INF))
@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", LOSSES)
def test_masked_positions_and_padding_are_not_read(loss_type, level, garbage):
    knobs = dict(loss_type=loss_type, importance_sampling_level=level)
    loss, grad, metrics = loss_and_gradient(**knobs)
    logp, old, ref, A, mask, policy_mask = random_rows()
    wide = torch.cat([mask, torch.zeros(8, 3, dtype=torch.bool)], 1)
    spoiled = [F.pad(x, (0, 3)).masked_fill(~wide, sign * garbage)
               for x, sign in ((logp, 1), (old, -1), (ref, 1))]
    data = (*spoiled, A, wide, torch.cat([policy_mask | ~mask, ~wide[:, 7:]], 1))
    loss2, grad2, metrics2 = loss_and_gradient(data=data, **knobs)
    assert loss2 == pytest.approx(loss, abs=1e-12)
    assert metrics2 == pytest.approx(metrics, abs=1e-12)
    assert torch.allclose(grad2[:, :7], grad, atol=1e-12) and (grad2[~wide] == 0).all()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_row_order_changes_nothing(loss_type):
    order = [3, 0, 7, 6, 1, 5, 2, 4]
    loss, grad, metrics = loss_and_gradient(loss_type=loss_type)
    loss2, grad2, metrics2 = loss_and_gradient(order, loss_type=loss_type)
    assert loss2 == pytest.approx(loss, abs=1e-12)
    assert torch.allclose(grad2, grad[order], atol=1e-12)
    assert metrics2 == pytest.approx(metrics, abs=1e-12)


@pytest.mark.parametrize("field", ("old_logp", "ref_logp", "mask", "advantages", "policy_mask"))
@pytest.mark.parametrize("shape", (None, (4, 3), (3, 4), (4, 1), (1, 4), (5,)))
def test_missing_or_misshaped_field(field, shape):
    if field == "policy_mask" and shape is None:
        return  # that means all tokens
    missing = "missing" if shape is None else ""
    wrong = None if shape is None else torch.zeros(shape)
    arguments = example(**{field: wrong})
    step = SimpleNamespace(num_rows=4, num_tokens=10)
    with pytest.raises(ValueError, match=f"^{field}: {missing}"):
        grpo_loss(**arguments, step=step, cfg=replace(Settings(), beta=.04))


def test_reference_is_needed_only_with_beta():
    assert run_example(ref_logp=None)[0] == run_example()[0]
    with pytest.raises(BadInput, match="max_completion_length"):    # dr_grpo divides by it
        load_settings(["--loss_type=dr_grpo", "--max_completion_length=None"])


# ------------------------------------------------------------------------------------------------
# a tiny world: a GPT with some character, four prompts, rewards by rule

TOKENIZER = load_tokenizer(300)
END = TOKENIZER.eot_token
CPU = torch.device("cpu")
FLOAT = torch.float32
TEXTS = ("I am", "you are so", "what", "the end of it")
PROMPTS = [Prompt(text, TOKENIZER.encode_ordinary(text), {"text": text}) for text in TEXTS]


def gpt(seed=0, end=4.0):
    """Random weights, scaled up so that tokens differ in probability. The larger `end`, the
    likelier the end token."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32))
    with torch.no_grad():
        model.wte.weight *= 7
        model.ln_f.bias += end * model.wte.weight[END] / model.wte.weight[END].norm()
    return model


def moved(model, size=.02, seed=5):
    """A copy with noise on every weight."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += size * torch.randn(p.shape, generator=generator)
    return other


def letters(prompts, completions):
    """A reward that looks random and is not."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def settings(functions=None, weights=None, **knobs):
    """Settings of the tiny world with the reward functions {name: function}."""
    functions = functions or {"letters": letters}
    knobs = dict(vocab_size=300, block_size=32, num_prompts=4, num_generations=4,
                 max_completion_length=8, max_grad_norm=0, learning_rate=1e-3) | knobs
    cfg = load_settings([f"--{name}={value}" for name, value in knobs.items()])
    return replace(cfg, judge=None, eval_judge=None, functions=functions,
                   reward_funcs=tuple(functions), reward_weights=weights).check()


def nets_of(policy, cfg, reference=None, optimizer=None, dtype=FLOAT, prompts=PROMPTS):
    """What grpo.build makes, around this very policy and reference instead of copies."""
    given = SimpleNamespace(device=CPU, dtype=dtype, tokenizer=TOKENIZER, prompts=prompts,
                            eval_prompts=prompts, val_prompts=prompts)
    nets = build(replace(cfg, lora_rank=0, tracin="off"), given, copy.deepcopy(policy), {}, grpo)
    nets.policy = nets.policy_fn = policy
    nets.reference = nets.reference_fn = reference or policy
    nets.trained = [p for p in policy.parameters() if p.requires_grad]
    nets.optimizer = optimizer or torch.optim.AdamW(nets.trained, lr=cfg.learning_rate)
    if "attention" in cfg.speed:
        use_attention_by_hand(nets.policy, nets.reference)
    if "head" in cfg.speed and cfg.importance_sampling_level == "token":
        nets.logprobs = fused_logprobs
    if cfg.tracin != "off":
        nets.influence = Influence(nets, cfg, loss_of, gradient_of, selection, all_reduce)
    return nets


def sample(policy, cfg, reference=None, seed=7, dtype=FLOAT, prompts=PROMPTS):
    """A Batch of completions of the prompts."""
    nets = nets_of(policy, cfg, reference, dtype=dtype, prompts=prompts)
    return collect(nets, prompts, cfg, seed)


def train(policy, batch, cfg, optimizer=None, seed=3, dtype=FLOAT, first=False, target=None):
    """grpo.update -> its metrics."""
    nets = nets_of(policy, cfg, optimizer=optimizer, dtype=dtype)
    return update(nets, batch, target, cfg, seed, first=first)


def gradients(policy, batch, cfg, **more):
    """What update hands to the optimizer at each step, as flat vectors, and its metrics. The
    weights stay as they are."""
    seen = []
    trained = [p for p in policy.parameters() if p.requires_grad]

    def step():
        seen.append(torch.cat([p.grad.flatten() for p in trained]))

    optimizer = SimpleNamespace(
        step=step, state={}, zero_grad=lambda **kwargs: policy.zero_grad())
    metrics = train(policy, batch, cfg, optimizer, **more)
    return seen, metrics


def step_of(batch, rows):
    """These rows of a batch as one optimizer step."""
    mask = batch.loss_mask[rows]
    return Step(0, rows, len(mask), int(mask.sum()))


def forward(policy, batch, cfg, rows=slice(None)):
    """grpo.loss_of these rows as one step."""
    nets = nets_of(policy, cfg)
    return loss_of(nets, policy, batch, rows, step_of(batch, rows), cfg)


def log_ratio(policy, batch, cfg):
    """log(policy / sampler) of each token (N, T)."""
    return (forward(policy, batch, cfg).logp - batch.rollout.logp).detach()


def without(*words):
    """The setting `speed` less some words."""
    return tuple(word for word in Settings.speed if word not in words)


def flat_gradient(policy, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])


def weights_of(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


def same_weights(model, before):
    return all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def plain_logps(model, rollout, temperature=1.0):
    """Log-probs of the sampled tokens, row by row, without padding, mask or cache: a list of
    (tokens of the row,)."""
    out = []
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    for tokens, present, mask in zip(rollout.tokens, rollout.attention_mask, rollout.completion_mask):
        n = int(mask.sum())
        prompt = tokens[:P][present[:P]]
        ids = torch.cat([prompt, tokens[P:P + n]])
        logits = model.lm_head(model(ids[None]))[0, len(prompt) - 1:-1] / temperature
        out.append(logits.log_softmax(-1).gather(1, tokens[P:P + n, None])[:, 0])
    return out


# ------------------------------------------------------------------------------------------------
# the gradient of a step

def test_on_policy_step_is_reinforce_and_a_second_pass_is_not():
    policy, cfg = gpt(), settings()
    batch = sample(policy, cfg)

    def reinforce():
        rows = plain_logps(policy, batch.rollout)
        total = sum(A * x.sum() for A, x in zip(batch.advantages, rows))
        return flat_gradient(policy, -total / batch.loss_mask.sum())

    (first,), _ = gradients(policy, batch, cfg)
    assert torch.allclose(first, reinforce(), atol=1e-6) and first.norm() > .01
    train(policy, batch, cfg, torch.optim.SGD(policy.parameters(), lr=.02))
    (second,), _ = gradients(policy, batch, cfg)
    assert (second - reinforce()).norm() > .01 * second.norm()
    clipped = 0.0
    rows = plain_logps(policy, batch.rollout)
    for A, new, old in zip(batch.advantages, rows, batch.rollout.logp):
        rho = (new - old[:len(new)]).exp()
        clipped -= torch.min(rho * A, rho.clamp(.8, 1.2) * A).sum() / batch.loss_mask.sum()
    assert torch.allclose(second, flat_gradient(policy, clipped), atol=1e-6)


def test_end_token_carries_gradient_and_the_first_pad_does_not():
    policy = gpt()
    a, *_, z = PROMPTS[0][1]
    rollouts = [generate(policy, [[a, END, z], PROMPTS[1][1]], 4, 8, eos=END, seed=seed)
                for seed in range(9)]
    rollout, row = next((r, i) for r in rollouts for i in range(4)
                        if r.ended[i] and 2 <= r.completion_mask[i].sum() < r.completion_mask.shape[1])
    n = int(rollout.completion_mask[row].sum())
    P = rollout.tokens.shape[1] - rollout.completion_mask.shape[1]
    # the pad is the same token
    assert rollout.tokens[row, P + n - 1] == END == rollout.tokens[row, P + n]
    completion = rollout.completions(END)[row]
    assert END not in completion and len(completion) == n - 1

    logp = completion_logprobs(policy, rollout)
    only = torch.zeros(8).index_fill(0, torch.tensor(row), 1.0)
    loss, _ = loss_and_metrics(logp, rollout.logp, None, only, rollout.completion_mask)
    by_logp, *found = torch.autograd.grad(loss, [logp, *policy.parameters()])
    assert (by_logp[row, :n] != 0).all() and (by_logp[row, n:] == 0).all()
    # without padding or mask, so the end token in the prompt is one that others look at
    plain = -plain_logps(policy, rollout)[row].sum() / rollout.completion_mask.sum()
    expected = flat_gradient(policy, plain)
    assert torch.allclose(torch.cat([g.flatten() for g in found]), expected, atol=1e-6)
    rollout.tokens[row, P - 2] = a
    assert (completion_logprobs(policy, rollout) - logp)[row, :n].abs().max() > .01


# ------------------------------------------------------------------------------------------------
# every knob acts: rollout

@pytest.mark.parametrize("temperature", (.5, 1.0, 2.0))
def test_log_probs_are_those_of_the_sampling_temperature(temperature):
    policy, cfg = gpt(), settings(temperature=temperature, beta=.1)
    batch = sample(policy, cfg, reference=moved(policy))
    for found, net in ((batch.rollout.logp, policy), (batch.ref_logp, moved(policy))):
        rows = plain_logps(net, batch.rollout, temperature)
        for row, mask, expected in zip(found, batch.rollout.completion_mask, rows):
            assert torch.allclose(row[mask], expected, atol=1e-5)
    assert log_ratio(policy, batch, cfg).abs().max() < 1e-4
    assert log_ratio(policy, batch, replace(cfg, temperature=1.3)).abs().max() > .05


def test_temperature_raises_entropy():
    entropy = []
    for temperature in (.25, .5, 1, 2):
        cfg = settings(temperature=temperature)
        entropy.append(batch_metrics(sample(gpt(), cfg), cfg)["entropy"])
    assert entropy == sorted(entropy) and entropy[-1] > entropy[0] + 1


@pytest.mark.parametrize("knob, allowed", [
    (dict(top_k=5), lambda p: p >= p.topk(5).values[-1]),
    (dict(top_p=.5), lambda p: torch.tensor([p[p > x].sum() < .5 for x in p])),
    (dict(min_p=.3), lambda p: p >= .3 * p.max())])
def test_truncated_sampling(knob, allowed):
    policy, cfg = gpt(), settings(**knob)
    batch = sample(policy, cfg)
    r, P = batch.rollout, batch.rollout.tokens.shape[1] - batch.rollout.completion_mask.shape[1]
    assert log_ratio(policy, batch, cfg).abs().max() < 1e-4                 # renormalised: ratio 1
    whole = torch.cat(plain_logps(policy, r))
    assert (r.logp[r.completion_mask] - whole).max() > .1 and (r.logp[r.completion_mask] >= whole - 1e-5).all()
    logits = policy.lm_head(policy(torch.tensor([PROMPTS[0][1]])))[0, -1]
    p = logits.detach().softmax(-1)
    keep = allowed(p)
    assert torch.equal(r.allowed[0, 0], keep)
    assert 0 < keep.sum() < 100 and keep[r.tokens[:4, P]].all()
    renormalised = float((p[r.tokens[0, P]] / p[keep].sum()).log())
    assert r.logp[0, 0] == pytest.approx(renormalised, abs=1e-5)


def test_seed_makes_the_rollout():
    policy, cfg = gpt(), settings()
    a, b, c = (sample(policy, cfg, seed=seed).rollout.tokens for seed in (7, 7, 8))
    assert torch.equal(a, b) and not (a.shape == c.shape and torch.equal(a, c))


@pytest.mark.parametrize("size", (4, 8, 12))
def test_decode_batch_size_changes_nothing(size):
    a, b = (sample(gpt(), settings(decode_batch_size=size)).rollout for size in (0, size))
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.mask, b.loss_mask) and torch.equal(a.ended, b.ended)
    assert torch.allclose(a.logp, b.logp, atol=1e-5)
    assert torch.allclose(a.entropy, b.entropy, atol=1e-5)


def test_decode_batch_size_bounds_the_decode():
    rows = []

    def decode(model, prompt, attention_mask, r, *more):
        rows.append(len(r.tokens))
        sampling.decode(model, prompt, attention_mask, r, *more)

    cfg = settings(decode_batch_size=8)
    nets = nets_of(gpt(), cfg)
    nets.generate = functools.partial(generate, decode=decode)
    collect(nets, PROMPTS, cfg, 7)
    assert rows == [8, 8]


# ------------------------------------------------------------------------------------------------
# every knob acts: reward and advantage

@pytest.mark.parametrize("scale", ("group", "batch", "none"))
def test_scale_rewards(scale):
    batch = sample(gpt(), settings(scale_rewards=scale))
    assert batch.rewards.tolist() == pytest.approx(letters(None, batch.completions))
    expected = plain_advantages(batch.rewards.tolist(), 4, scale)
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-5)


def test_scales_differ():
    group, batch, none = (sample(gpt(), settings(scale_rewards=scale)).advantages
                          for scale in ("group", "batch", "none"))
    for a, b in itertools.combinations((group, batch, none), 2):
        assert (a - b).abs().max() > .05


def test_reward_functions_get_prompts_in_step_with_completions():
    seen = []

    def look(prompts, completions):
        seen.append((prompts, completions))
        return range(len(completions))

    batch = sample(gpt(), settings({"look": look}))
    assert seen == [([text for text in TEXTS for _ in range(4)], batch.completions)]
    assert batch.completions == [TOKENIZER.decode(ids) for ids in batch.rollout.completions(END)]
    assert batch.rewards.tolist() == list(range(16))


def test_reward_weights():
    functions = {"letters": letters, "short": lambda p, c: [-len(x) for x in c]}
    cfg = settings(functions, (2.0, .5))
    batch = sample(gpt(), cfg)
    texts = batch.completions
    expected = [2 * x - .5 * len(text) for x, text in zip(letters(None, texts), texts)]
    assert batch.rewards.tolist() == pytest.approx(expected)
    assert batch.scores.shape == (16, 2)
    assert (batch.rewards - batch.scores.sum(1)).abs().max() > .1
    m = batch_metrics(batch, cfg)
    assert m["rewards/short/mean"] == pytest.approx(-statistics.fmean(map(len, texts)))
    assert m["rewards/letters/std"] == pytest.approx(statistics.stdev(letters(None, texts)))


def test_a_reward_function_may_abstain():
    def some(prompts, completions):
        return [None if i % 4 == 1 else 10.0 * i for i in range(len(completions))]

    both = sample(gpt(), settings({"letters": letters, "some": some}))
    plain = letters(None, both.completions)
    others = [10 * statistics.fmean([i, i + 2, i + 3]) for i in range(0, 16, 4)]
    expected = [x + (others[i // 4] if i % 4 == 1 else 10 * i) for i, x in enumerate(plain)]
    assert both.rewards.tolist() == pytest.approx(expected)
    alone = sample(gpt(), settings({"some": some}))
    rewards = [NAN if i % 4 == 1 else 10.0 * i for i in range(16)]
    assert alone.rewards.isnan().tolist() == [i % 4 == 1 for i in range(16)]
    expected = plain_advantages(rewards, 4, "group")
    assert alone.advantages.tolist() == pytest.approx(expected, abs=1e-5)
    assert (alone.advantages[1::4] == 0).all()
    m = batch_metrics(alone, settings({"some": some}))
    known = [10 * i for i in range(16) if i % 4 != 1]
    assert m["reward"] == pytest.approx(statistics.fmean(known)) and m["reward_min"] == 0


def test_a_batch_in_which_every_function_abstains_is_survived():
    policy = gpt()
    cfg = settings({"never": lambda prompts, completions: [None] * len(completions)})
    before = weights_of(policy)
    batch = sample(policy, cfg)
    sgd = torch.optim.SGD(policy.parameters(), lr=1.0)
    m = train(policy, batch, cfg, sgd) | batch_metrics(batch, cfg)
    assert same_weights(policy, before) and m["grad_norm"] == 0 and diagnose(m, cfg)


def by_prompt(prompts, completions):
    """Says nothing about the first two prompts."""
    silent = TEXTS[:2]
    scores = letters(prompts, completions)
    return [.1 if p in silent else x for p, x in zip(prompts, scores)]


@pytest.mark.parametrize("loss_type", ("grpo", "dr_grpo", "dapo", "bnpo"))
def test_dropped_groups_leave_the_divisor(loss_type):
    policy, cfg = gpt(), settings({"by_prompt": by_prompt}, loss_type=loss_type)
    batch = sample(policy, cfg)
    assert (batch.advantages[:8] == 0).all() and (batch.advantages[8:] != 0).any()
    (keep,), _ = gradients(policy, batch, cfg)
    (drop,), m = gradients(policy, batch, replace(cfg, zero_std_groups="drop"))
    by_tokens = loss_type in ("dapo", "bnpo")
    share = float(batch.loss_mask[8:].sum() / batch.loss_mask.sum()) if by_tokens else .5
    assert keep.norm() > 0 and share < .9 and m["num_steps"] == 1
    assert torch.allclose(keep, drop * share, atol=1e-6)


def test_all_groups_dropped_is_no_step():
    policy = gpt()
    cfg = settings({"one": lambda p, c: [.1] * len(c)}, zero_std_groups="drop")
    before = weights_of(policy)
    batch = sample(policy, cfg)

    def decaying():     # weight decay would show a step without gradient
        return torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.5)

    m = train(policy, batch, cfg, decaying())
    assert m["num_steps"] == 0 and m["loss"] == m["grad_norm"] == 0
    assert same_weights(policy, before)
    kept = train(policy, batch, replace(cfg, zero_std_groups="keep"), decaying())
    assert kept["num_steps"] == 1 and not same_weights(policy, before)


def test_kl_in_the_reward():
    policy, cfg = gpt(), settings(beta=.1, kl_in="reward", kl_estimator="k1")
    reference = moved(policy)
    batch, without = sample(policy, cfg, reference), sample(policy, settings())
    with torch.no_grad():
        both = zip(plain_logps(policy, batch.rollout), plain_logps(reference, batch.rollout))
        gap = [(p - r).sum() for p, r in both]
    # as judged, so that a judge that is stuck is seen
    assert batch.rewards.tolist() == without.rewards.tolist()
    less = torch.tensor([float(x - .1 * d) for x, d in zip(without.rewards, gap)])
    expected = group_advantages(less, cfg.num_generations, cfg.scale_rewards)
    assert batch.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert (batch.advantages - without.advantages).abs().max() > .01
    m = train(policy, batch, cfg)
    assert m["kl"] == pytest.approx(float(sum(gap) / batch.loss_mask.sum()), abs=1e-5)
    assert m["loss"] == pytest.approx(m["policy_loss"])


# ------------------------------------------------------------------------------------------------
# every knob acts: loss

def test_mask_truncated_completions():
    policy, cfg = gpt(), settings(mask_truncated_completions=True)
    batch, plain = sample(policy, cfg), sample(policy, settings())
    ended = batch.rollout.ended
    assert 2 < ended.sum() < 14 and torch.equal(batch.advantages, plain.advantages)
    assert not batch.loss_mask[~ended].any()
    assert torch.equal(batch.loss_mask[ended], batch.rollout.completion_mask[ended])
    assert torch.equal(plain.mask, batch.rollout.completion_mask)
    rows = zip(batch.advantages, plain_logps(policy, batch.rollout), ended)
    total = -sum(A * x.sum() for A, x, on in rows if on) / batch.rollout.completion_mask[ended].sum()
    (found,), m = gradients(policy, batch, cfg)
    assert torch.allclose(found, flat_gradient(policy, total), atol=1e-6)
    counted = batch_metrics(batch, cfg)["num_completion_tokens"]
    assert counted == int(batch.loss_mask.sum()) < int(batch.rollout.completion_mask.sum())


def test_top_entropy_quantile():
    policy, cfg = gpt(), settings(
        top_entropy_quantile=.3, beta=.1, use_bias_correction_kl=False)
    reference = moved(policy)
    batch = sample(policy, cfg, reference)
    chosen = batch.rollout.entropy[batch.loss_mask & batch.policy_mask]
    left = batch.rollout.entropy[batch.loss_mask & ~batch.policy_mask]
    assert chosen.min() >= left.max()
    assert len(chosen) / int(batch.loss_mask.sum()) == pytest.approx(.3, abs=.02)
    assert sample(policy, replace(cfg, top_entropy_quantile=1.0), reference).policy_mask is None
    new = completion_logprobs(policy, batch.rollout)
    tokens, total = int(batch.loss_mask.sum()), 0.0
    for i, t in batch.loss_mask.nonzero().tolist():
        d = batch.ref_logp[i, t] - new[i, t]
        kl = d.exp() - 1 - d                                            # on all tokens
        total += (-batch.advantages[i] * new[i, t] * batch.policy_mask[i, t] + .1 * kl) / tokens
    (found,), _ = gradients(policy, batch, cfg)
    assert torch.allclose(found, flat_gradient(policy, total), atol=1e-6)


@pytest.mark.parametrize("pieces", (False, True))
@pytest.mark.parametrize("knobs", [{}, dict(temperature=.7, top_k=20), dict(loss_type="grpo"),
                                   dict(mask_truncated_completions=True)])
def test_entropy_coef_takes_the_mean_entropy_off_the_loss(knobs, pieces, monkeypatch):
    policy, cfg = gpt(end=4), settings(beta=.1, entropy_coef=.2, **knobs)
    batch = sample(policy, cfg, moved(policy))
    if pieces:
        monkeypatch.setattr(model, "LOGITS_AT_ONCE", 7 * 300)
    total, P = 0.0, batch.rollout.tokens.shape[1] - batch.rollout.completion_mask.shape[1]
    for i, tokens in enumerate(batch.rollout.tokens):
        n = int(batch.loss_mask[i].sum())
        ids = torch.cat([tokens[:P][batch.rollout.attention_mask[i, :P]], tokens[P:P + n]])
        logits = policy.lm_head(policy(ids[None]))[0, len(ids) - n - 1:-1] / cfg.temperature
        if cfg.top_k:
            logits = truncate(logits, top_k=cfg.top_k)
        p = logits.softmax(-1)
        total -= (p * p.clamp(min=1e-30).log()).sum()
    bonus = flat_gradient(policy, .2 * total / batch.loss_mask.sum())
    (found,), m = gradients(policy, batch, cfg)
    (plain,), without_it = gradients(policy, batch, replace(cfg, entropy_coef=0.0))
    assert torch.allclose(found, plain - bonus, atol=1e-6) and bonus.norm() > 1e-3
    assert without_it["loss"] - m["loss"] == pytest.approx(
        float(.2 * total.detach() / batch.loss_mask.sum()), abs=1e-5)


def test_entropy_is_that_of_tokens_with_loss():
    cfg = settings(mask_truncated_completions=True)
    batch = sample(gpt(end=4), cfg)
    assert 0 < batch.loss_mask.sum() < batch.rollout.completion_mask.sum()
    expected = float(batch.rollout.entropy[batch.loss_mask].mean())
    assert batch_metrics(batch, cfg)["entropy"] == pytest.approx(expected)


def test_entropy_is_that_of_the_sampling_distribution():
    policy, cfg = gpt(), settings(temperature=.7, top_k=9)
    batch = sample(policy, cfg)
    logits = policy.lm_head(policy(torch.tensor([PROMPTS[2][1]])))[:, -1] / .7
    p = truncate(logits, top_k=9).softmax(-1)[0]
    expected = float(-(p[p > 0] * p[p > 0].log()).sum().detach())
    assert batch.rollout.entropy[8, 0] == pytest.approx(expected, abs=1e-5)
    assert (batch.rollout.entropy[~batch.rollout.completion_mask] == 0).all()


@pytest.mark.parametrize("estimator", ("k1", "k2", "k3"))
def test_beta_and_kl_estimator(estimator):
    policy, cfg = gpt(), settings(beta=.3, kl_estimator=estimator)
    reference = moved(policy)
    batch = sample(policy, cfg, reference)
    d = (torch.cat(plain_logps(reference, batch.rollout))
         - torch.cat(plain_logps(policy, batch.rollout)))
    kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[estimator]
    kl = float(kl.mean().detach())
    (found,), m = gradients(policy, batch, cfg)
    assert m["kl"] == pytest.approx(kl, rel=1e-3)
    assert m["loss"] - m["policy_loss"] == pytest.approx(.3 * kl, rel=1e-3)
    (twice,), _ = gradients(policy, batch, replace(cfg, beta=.6))
    (none,), _ = gradients(policy, batch, replace(cfg, beta=0.0))
    assert torch.allclose(twice - found, found - none, atol=1e-5) and (found - none).norm() > .01


def test_beta_zero_never_runs_the_reference():
    def forbidden(*args):
        raise AssertionError("the reference was run")

    policy, cfg = gpt(), settings()
    batch = sample(policy, cfg, forbidden)
    assert batch.ref_logp is None and "kl" not in train(policy, batch, cfg)


def test_bias_corrected_k3_has_the_gradient_of_k2_on_policy():
    policy, cfg = gpt(), settings(beta=.3, use_bias_correction_kl=False)
    batch = sample(policy, cfg, moved(policy, .05))
    (k3,), _ = gradients(policy, batch, cfg)
    (corrected,), _ = gradients(policy, batch, replace(cfg, use_bias_correction_kl=True))
    (k2,), _ = gradients(policy, batch, replace(cfg, kl_estimator="k2"))
    assert torch.allclose(corrected, k2, atol=1e-5) and (k3 - k2).norm() > .05 * k2.norm()


@pytest.mark.parametrize("knobs", [
    dict(loss_type="grpo"), dict(loss_type="dr_grpo"), dict(importance_sampling_level="sequence"),
    dict(epsilon=.05), dict(epsilon_high=.5), dict(delta=1.25),
    dict(loss_type="cispo", epsilon_high=1.1), dict(loss_type="cispo", epsilon_high=5.0),
    dict(loss_type="sapo"), dict(loss_type="sapo", sapo_temperature_neg=3.0),
    dict(loss_type="sapo", sapo_temperature_pos=3.0), dict(beta=.2),
    dict(beta=.2, use_bias_correction_kl=False), dict(beta=.2, kl_estimator="k1")])
def test_loss_settings_reach_the_loss(knobs):
    policy = gpt()
    batch = sample(policy, settings(beta=.1), reference=moved(policy, seed=6))
    later, rows = moved(policy, .05), slice(2, 13)
    with torch.no_grad():
        found, logp, *_ = forward(later, batch, settings(**knobs), rows)
        default, *_ = forward(later, batch, settings(), rows)
        plain = completion_logprobs(later, batch.rollout[rows])
    b = batch[rows]
    expected, _ = loss_and_metrics(plain, b.rollout.logp, b.ref_logp, b.advantages, b.loss_mask,
                                   max_completion_length=8, **knobs)
    assert float(found) == pytest.approx(float(expected), abs=1e-6)
    assert abs(float(found) - float(default)) > 1e-4
    assert torch.allclose(logp, plain, atol=1e-5)


# ------------------------------------------------------------------------------------------------
# every knob acts: step

def spied(monkeypatch):
    """Every call of loss_of that update makes, as (rows, num_rows, num_tokens, metrics)."""
    calls = []

    def spy(nets, policy, batch, rows, step, cfg, *more):
        out = loss_of(nets, policy, batch, rows, step, cfg, *more)
        metrics = floats(loss_metrics(out, cfg))
        calls.append((rows.tolist(), step.num_rows, step.num_tokens, metrics))
        return out

    monkeypatch.setattr(grpo, "loss_of", spy)
    return calls


def test_num_iterations(monkeypatch):
    policy = gpt()
    cfg = settings(num_iterations=3, learning_rate=.01, epsilon=.01)
    calls = spied(monkeypatch)
    batch = sample(policy, cfg)
    m = train(policy, batch, cfg, first=True)
    ratios = [metrics["ratio"] for *_, metrics in calls]
    assert m["num_steps"] == len(calls) == 3
    assert ratios[0] == pytest.approx(1, abs=1e-5) and abs(ratios[1] - 1) > 1e-3
    clipped = [metrics["clip_ratio/region_mean"] for *_, metrics in calls]
    assert clipped[0] == 0 < clipped[1]
    assert m["clip_ratio/region_mean"] == pytest.approx(statistics.fmean(clipped))
    # of the weights that sampled
    assert m["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)


def test_mini_batches(monkeypatch):
    policy = gpt()
    cfg = settings(num_iterations=2, mini_batch_size=4, micro_batch_size=2)
    calls = spied(monkeypatch)
    batch = sample(policy, cfg)
    m = train(policy, batch, cfg)
    assert m["num_steps"] == 8 and len(calls) == 16
    assert all(num_rows == 4 for _, num_rows, _, _ in calls)
    first, second = ([row for rows, *_ in calls[i:i + 8] for row in rows] for i in (0, 8))
    in_order = list(range(16))
    assert sorted(first) == sorted(second) == in_order
    assert first != second != in_order != first
    # the loss of a step, as if there were one
    loss = sum(metrics["policy_loss"] for *_, metrics in calls) / 8
    assert m["loss"] == pytest.approx(loss, abs=1e-6) and abs(loss) > 1e-3
    assert m["policy_loss"] == pytest.approx(loss, abs=1e-6)
    for i in range(0, 16, 2):
        rows = calls[i][0] + calls[i + 1][0]
        assert calls[i][2] == calls[i + 1][2] == int(batch.loss_mask[rows].sum())
    again = spied(monkeypatch)
    train(gpt(), batch, cfg, seed=4)
    assert [rows for rows, *_ in again] != [rows for rows, *_ in calls]


def test_whole_batch_keeps_its_order(monkeypatch):
    policy = gpt()
    cfg = settings(micro_batch_size=4, speed=without("sort"))
    calls = spied(monkeypatch)
    train(policy, sample(policy, cfg), cfg)
    assert [row for rows, *_ in calls for row in rows] == list(range(16))


def test_rows_of_like_length_share_a_micro_batch(monkeypatch):
    policy, found = gpt(), []
    for sort in (True, False):
        cfg = settings(micro_batch_size=4, beta=.1, speed=without() if sort else without("sort"))
        calls = spied(monkeypatch)
        batch = sample(policy, cfg, moved(policy))
        gradient, m = gradients(moved(policy, seed=6), batch, cfg)
        length = batch.loss_mask.sum(1)
        prompt = batch.rollout.attention_mask[:, :-batch.loss_mask.shape[1]].sum(1)
        order = length.argsort(stable=True) if sort else torch.arange(16)
        assert [row for rows, *_ in calls for row in rows] == order.tolist()
        places = sum(4 * int(length[rows].max() + prompt[rows].max()) for rows, *_ in calls)
        assert m["padding"] == pytest.approx(1 - int((length + prompt).sum()) / places)
        # places for completions; prompts come as they come
        columns = sum(int(length[rows].max()) for rows, *_ in calls)
        found.append((gradient[0], m, batch, columns))
        monkeypatch.undo()
    assert found[0][3] < found[1][3]
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][2].ref_logp, found[1][2].ref_logp, atol=1e-6)
    assert found[0][1]["loss"] == pytest.approx(found[1][1]["loss"], abs=1e-6)


@pytest.mark.parametrize("knobs", [
    *(dict(loss_type=name, epsilon_high=1.1 if name == "cispo" else None) for name in LOSSES),
    dict(beta=.1), dict(mask_truncated_completions=True),
    dict(importance_sampling_level="sequence", loss_type="grpo"), dict(top_entropy_quantile=.4),
    dict(zero_std_groups="drop")])
def test_micro_batch_size_changes_memory_only(knobs):
    policy = gpt()
    wide = settings({"by_prompt": by_prompt}, **knobs)
    reference = moved(policy)
    found = []
    for size in (16, 8, 2, 1):
        cfg = replace(wide, micro_batch_size=size)
        batch = sample(policy, cfg, reference)
        # off-policy, so that ratios and clips differ
        (gradient,), m = gradients(moved(policy, seed=6), batch, cfg)
        apart = ("clip_ratio/low_min", "padding")
        found.append((gradient, {name: x for name, x in m.items() if name not in apart}))
    for gradient, m in found[1:]:
        same = (torch.allclose(gradient, found[0][0], atol=1e-6)
                and m == pytest.approx(found[0][1], abs=1e-5))
        assert same == (knobs.get("loss_type") != "bnpo")


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_last_micro_batch_may_be_smaller(loss_type):
    policy = gpt()
    ceiling = 1.1 if loss_type == "cispo" else None
    cfg = settings(loss_type=loss_type, epsilon_high=ceiling, beta=.1, num_prompts=20)
    batch = sample(policy, cfg, moved(policy), prompts=PROMPTS * 5)
    (whole,), m = gradients(moved(policy, seed=6), batch, replace(cfg, micro_batch_size=80))
    for size in (64, 37):
        (ragged,), n = gradients(moved(policy, seed=6), batch, replace(cfg, micro_batch_size=size))
        error = float((ragged - whole).abs().max() / whole.abs().max())
        assert (error < 1e-5) == (loss_type != "bnpo"), (
            f"80 rows in pieces of {size}: the gradient differs by {error:.1e} of its largest part")
        assert n["kl"] == pytest.approx(m["kl"], rel=1e-5), "a metric depends on the pieces"


def test_max_grad_norm():
    policy, cfg = gpt(), settings()
    batch = sample(policy, cfg)
    (free,), m = gradients(policy, batch, cfg)
    (capped,), m2 = gradients(policy, batch, replace(cfg, max_grad_norm=.01))
    assert m["grad_norm"] == m2["grad_norm"] == pytest.approx(float(free.norm()), rel=1e-4)
    assert m["grad_norm"] > .02
    assert float(capped.norm()) == pytest.approx(.01, rel=1e-3)
    assert torch.allclose(capped, free * (.01 / free.norm()), atol=1e-6)
    (loose,), _ = gradients(policy, batch, replace(cfg, max_grad_norm=1e6))
    assert torch.equal(loose, free)


@pytest.mark.parametrize("decay, warmup, expected", [
    ("constant", 0, [1, 1, 1, 1, 1, 1]),
    ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    ("cosine", 0, [1, .5 + .25 * math.sqrt(3), .75, .5, .25, .5 - .25 * math.sqrt(3)]),
    ("constant", 4, [.25, .5, .75, 1, 1, 1]),
    ("linear", 2, [.5, 1, 1, .75, .5, .25]),
    ("cosine", 2, [.5, 1, 1, .5 + .25 * math.sqrt(2), .5, .5 - .25 * math.sqrt(2)])])
def test_learning_rate(decay, warmup, expected):
    cfg = settings(learning_rate=.02, lr_decay=decay, warmup_iters=warmup, max_iters=6)
    found = [learning_rate(it, cfg) for it in range(6)]
    assert found == pytest.approx([.02 * x for x in expected])


@pytest.mark.parametrize("rank", (0, 2))
def test_sync(rank):
    reference, policy = gpt(), moved(gpt())
    if rank:
        add_lora(reference, rank, 8.0)
        add_lora(policy, rank, 8.0)
    old, new = weights_of(reference), weights_of(moved(policy))
    policy.load_state_dict(new)
    assert any(name.endswith("B.weight") for name in new) == bool(rank)
    nets = SimpleNamespace(reference=reference, policy=policy)
    num_tensors = len(list(policy.parameters()))
    assert sync_reference(nets, .25) == {"ref_tensors_differing": num_tensors}
    for name, x in reference.state_dict().items():
        assert torch.allclose(x, .75 * old[name] + .25 * new[name], atol=1e-6)
    assert sync_reference(nets, 1.0) == {"ref_tensors_differing": 0}
    assert same_weights(reference, new) and same_weights(policy, new)


def test_training_leaves_the_reference_alone():
    policy = gpt()
    cfg = settings(beta=.1, learning_rate=.01, num_iterations=2, mini_batch_size=8)
    reference = copy.deepcopy(policy).requires_grad_(False)
    before, first = weights_of(reference), None
    for seed in range(3):
        m = train(policy, sample(policy, cfg, reference, seed=seed), cfg)
        first = m["kl"] if first is None else first
    assert same_weights(reference, before) and m["kl"] > first > 0
    pairs = zip(policy.parameters(), reference.parameters())
    assert not any(torch.equal(p, r) for p, r in pairs)


def test_lora_moves_the_adapters_only():
    policy, cfg = gpt(), settings(learning_rate=.01, beta=.1)
    base = copy.deepcopy(policy)
    torch.manual_seed(0)
    add_lora(policy, 2, 8.0)
    before, kls = weights_of(policy), []
    for seed in range(2):
        kls.append(train(policy, sample(policy, cfg, base, seed=seed), cfg, first=True)["kl"])
    changed = {name for name, x in policy.state_dict().items() if not torch.equal(x, before[name])}
    adapters = {name for name in before if name.endswith(("A.weight", "B.weight"))}
    assert changed == adapters and len(changed) == 2 * 2 * 4
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[1] > 1e-4


def test_bfloat16():
    policy, cfg = gpt(), settings(beta=.1)
    batch = sample(policy, cfg, moved(policy), dtype=torch.bfloat16)
    exact = sample(policy, cfg, moved(policy))
    assert batch.rollout.logp.dtype == batch.ref_logp.dtype == torch.float32
    assert not torch.equal(batch.rollout.logp, exact.rollout.logp)
    m = train(policy, batch, cfg, dtype=torch.bfloat16, first=True)
    smallest = m["sampling/importance_sampling_ratio/min"]
    assert .9 < smallest <= m["sampling/importance_sampling_ratio/max"] < 1.1
    assert m["num_steps"] == 1 and math.isfinite(m["grad_norm"])
    assert all(p.dtype == torch.float32 for p in policy.parameters())


# ------------------------------------------------------------------------------------------------
# what a run says about itself

def test_batch_metrics_against_plain_counting():
    cfg = settings({"by_prompt": by_prompt})
    batch = sample(gpt(), cfg)
    m = batch_metrics(batch, cfg)
    texts = batch.completions
    rewards = by_prompt([text for text in TEXTS for _ in range(4)], texts)
    groups = range(0, 16, 4)
    lengths, ended = batch.rollout.completion_mask.sum(1).tolist(), batch.rollout.ended.tolist()
    done = [n for n, e in zip(lengths, ended) if e]
    assert m == pytest.approx({
        "reward": statistics.fmean(rewards), "reward_std": statistics.stdev(rewards),
        "reward_min": min(rewards), "reward_max": max(rewards),
        "rewards/by_prompt/mean": statistics.fmean(rewards),
        "rewards/by_prompt/std": statistics.stdev(rewards),
        "advantage_max": float(batch.advantages.abs().max()),
        "frac_reward_zero_std": sum(len(set(rewards[i:i + 4])) == 1 for i in groups) / 4,
        "frac_identical_groups": sum(len(set(texts[i:i + 4])) == 1 for i in groups) / 4,
        "entropy": float(batch.rollout.entropy.sum()) / sum(lengths),
        "num_completion_tokens": sum(lengths), "forced": 0,
        "logp_min": min(float(x.min()) for x in batch.rollout.logp),
        "completions/clipped_ratio": ended.count(False) / 16,
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths), "completions/max_length": max(lengths),
        "completions/mean_terminated_length": statistics.fmean(done),
        "completions/min_terminated_length": min(done),
        "completions/max_terminated_length": max(done)}, rel=1e-5)
    assert m["frac_reward_zero_std"] == .5 and 0 < m["completions/clipped_ratio"] < 1


def test_identical_means_the_whole_group():
    cfg = settings()
    texts = [*"aaaa", *"abab", *"aaab", *"abcd"]
    batch = replace(sample(gpt(), cfg), completions=texts)
    assert batch_metrics(batch, cfg)["frac_identical_groups"] == .25


@pytest.mark.parametrize("knobs, names", [
    (dict(epsilon_high=.1), ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/high_max",
                             "clip_ratio/region_mean")),
    (dict(loss_type="cispo", epsilon_high=1.1), ("cispo_clip_ratio",))])
def test_step_metrics_do_not_see_the_split(knobs, names):
    policy, cfg = gpt(), settings(beta=.1, **knobs)
    later, batch = moved(policy, .05), sample(policy, cfg, moved(policy))
    whole = floats(loss_metrics(forward(later, batch, cfg), cfg))
    gap = log_ratio(later, batch, cfg)[batch.rollout.completion_mask]
    m = train(later, batch, replace(cfg, micro_batch_size=4))
    for name in (*names, "kl"):
        assert m[name] == pytest.approx(whole[name], abs=1e-5) and m[name] > 0
    assert {name: x for name, x in m.items() if name.startswith("sampling/")} == pytest.approx({
        "sampling/sampling_logp_difference/mean": float(gap.abs().mean()),
        "sampling/sampling_logp_difference/max": float(gap.abs().max()),
        "sampling/importance_sampling_ratio/min": float(gap.exp().min()),
        "sampling/importance_sampling_ratio/mean": float(gap.exp().mean()),
        "sampling/importance_sampling_ratio/max": float(gap.exp().max())}, rel=1e-4)


def said(policy, cfg, reference=None, later=None):
    """The lines after one iteration; `later` takes the step in place of the policy that sampled."""
    batch = sample(policy, cfg, reference)
    m = train(later or policy, batch, cfg) | batch_metrics(batch, cfg)
    return list(diagnose(m, cfg).values())


def starts(found, expected):
    """Each line found starts as expected."""
    return len(found) == len(expected) and all(map(str.startswith, found, expected))


def certain():
    """Logits scaled so hugely that every token has probability 1."""
    policy = gpt()
    with torch.no_grad():
        policy.ln_f.weight *= 1e5
        policy.ln_f.bias *= 1e5
    return policy


def endless():
    """It never ends by itself."""
    return gpt(end=-9.0)


def ones(prompts, completions):
    return [.1] * len(completions)


def prompt_length(prompts, completions):
    return [len(p) for p in prompts]


@pytest.mark.parametrize("policy, functions, knobs, expected", [
    (gpt, {"letters": letters}, {}, []),
    (gpt, {"letters": letters}, dict(beta=.1, num_iterations=2, top_k=50, temperature=.8), []),
    (gpt, {"ones": ones}, {}, ["all rewards of the batch are 0.1", "grad_norm is 0"]),
    (gpt, {"prompt_length": prompt_length}, {},
     ["all advantages are zero (rewards 4 to 13", "grad_norm is 0"]),
    (gpt, {"letters": letters, "ones": ones}, {},
     ["reward 'ones' gave every completion the same score"]),
    (endless, {"letters": letters}, {}, ["every completion was cut at 8 tokens"]),
    (endless, {"letters": letters}, dict(mask_truncated_completions=True),
     ["no completion tokens carry loss", "every completion was cut at 8 tokens", "grad_norm is 0"]),
    (certain, {"prompt_length": prompt_length}, {}, [
        "all advantages are zero", "all log-probs are zero",
        "100 % of the groups hold 4 identical completions", "every completion was cut",
        "grad_norm is 0"])])
def test_diagnosis_of_real_batches(policy, functions, knobs, expected):
    found = said(policy(), settings(functions, **knobs))
    assert starts(found, expected), found


def test_diagnosis_of_another_policy_and_of_the_kl():
    policy = gpt()
    lines = said(policy, settings(), later=moved(policy, .1))
    assert starts(lines, ["ratio off on the first pass"])
    cfg = settings()
    batch = sample(policy, cfg)
    # the mean of the ratio would not show it
    m = train(policy, batch, replace(cfg, temperature=1.3)) | batch_metrics(batch, cfg)
    assert list(diagnose(m, cfg)) == ["ratio"]
    assert abs(m["sampling/importance_sampling_ratio/mean"] - 1) < .1
    lines = said(policy, settings(beta=.1), reference=moved(certain(), .5))
    assert starts(lines, ["KL "]) and "exploding" in lines[0]


@pytest.mark.parametrize("change, expected", [
    (dict(), []),
    (dict(kl=-.01), ["KL -0.0100 is negative over 5000 tokens"]),
    (dict(kl=-.01, num_completion_tokens=4000), []),
    (dict(kl=-1e-4), []),
    (dict(kl=5.1), ["KL 5.1 nats per token is exploding"]),
    (dict(kl=4.9), []),
    ({"sampling/sampling_logp_difference/mean": .06}, ["ratio off on the first pass"]),
    ({"sampling/sampling_logp_difference/mean": .04}, []),
    ({"completions/clipped_ratio": .99}, []),
    (dict(frac_identical_groups=.25), ["25 % of the groups hold 4 identical completions"]),
    ({"rewards/letters/std": 0.0}, [])])
def test_diagnosis_of_metrics(change, expected):
    cfg = settings()
    batch = sample(gpt(), cfg)
    m = train(gpt(), batch, cfg) | batch_metrics(batch, cfg)
    m = m | dict(num_completion_tokens=5000) | change
    found = list(diagnose(m, cfg).values())
    assert starts(found, expected), found


@pytest.mark.parametrize("weights", ((1.0,), (1e39,)))   # finite, but not in float32
@pytest.mark.parametrize("spoil", (True, False))
@pytest.mark.parametrize("first", (True, False))
def test_a_loss_that_is_not_finite_stops_before_the_step(weights, spoil, first):
    centred = {"centred": lambda p, c: [x - .5 for x in letters(p, c)]}
    policy, cfg = gpt(), settings(centred, num_iterations=2, micro_batch_size=8)
    cfg = replace(cfg, reward_weights=weights)
    batch = sample(policy, cfg)
    if spoil:
        with torch.no_grad():
            policy.h[1].mlp.c_fc.weight[3, 4] = NAN

    def bits():     # NaN is not equal to itself
        return {name: x.view(torch.int32) for name, x in weights_of(policy).items()}

    before = bits()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.1)
    if weights == (1.0,) and not spoil:
        assert train(policy, batch, cfg, optimizer, first=first)["num_steps"] == 2
        return
    with pytest.raises(SystemExit, match="stopped"):
        train(policy, batch, cfg, optimizer, first=first)
    after = bits()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not optimizer.state


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    policy, cfg = gpt(), settings()
    batch, before = sample(policy, cfg), weights_of(policy)
    policy.ln_f.weight.register_hook(lambda g: g * NAN)
    with pytest.raises(SystemExit, match="grad_norm nan"):
        train(policy, batch, cfg)
    assert same_weights(policy, before)


@pytest.mark.parametrize("value", (INF, -INF, NAN))
@pytest.mark.parametrize("first", (True, False))
@pytest.mark.parametrize("mini_batch_size", (0, 4))
def test_an_old_logprob_that_is_not_finite_stops_before_the_step(value, first, mini_batch_size):
    policy, cfg = gpt(), settings(mini_batch_size=mini_batch_size, micro_batch_size=4)
    batch, before = sample(policy, cfg), weights_of(policy)
    batch.advantages[:] = 1.0       # the loss of the row is finite: the ratio to inf is 0
    batch.rollout.logp[5, 0] = value
    with pytest.raises(SystemExit, match="stopped.*log-prob of the sampled tokens is not finite"):
        train(policy, batch, cfg, first=first)
    assert same_weights(policy, before)


@pytest.mark.parametrize("name", ("exp_avg", "exp_avg_sq"))
@pytest.mark.parametrize("value", (INF, NAN))
def test_a_moment_that_is_not_finite_stops_before_the_step(name, value):
    policy, cfg = gpt(), settings()
    batch = sample(policy, cfg)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=.1, fused=True)
    train(policy, batch, cfg, optimizer)
    optimizer.state[policy.ln_f.weight][name][3] = value
    before = weights_of(policy)
    with pytest.raises(SystemExit, match="stopped.*AdamW's moments are not finite"):
        train(policy, batch, cfg, optimizer)
    assert same_weights(policy, before)


def test_the_end_of_a_run_names_its_cause():
    policy, cfg = gpt(), settings()
    batch = sample(policy, cfg)
    batch.rewards[0] = INF
    batch.advantages[0] = NAN
    with pytest.raises(SystemExit, match="A reward is too large for float32"):
        train(policy, batch, cfg)
    with torch.no_grad():
        policy.ln_f.weight[0] = NAN
    with pytest.raises(SystemExit, match="weights are not finite: its file or the checkpoint"):
        train(policy, batch, cfg)


@pytest.mark.parametrize("noise", (
    lambda module, args, out: out + .05 * torch.randn_like(out),
    lambda module, args, out: torch.nn.functional.dropout(out, .1)))
def test_a_random_model_is_found_out(noise):
    policy, cfg = gpt(), settings()
    before = weights_of(policy)
    policy.lm_head.register_forward_hook(noise)
    batch = sample(policy, cfg)
    with pytest.raises(SystemExit, match="the ratio is not 1"):
        train(policy, batch, cfg, first=True)
    assert same_weights(policy, before)
    assert train(policy, batch, cfg, first=False)["num_steps"] == 1


def test_tf32_has_the_bound_of_bfloat16():
    def rounded(module, args, out):
        return out + .01 * torch.randn_like(out)

    policy = gpt()
    policy.lm_head.register_forward_hook(rounded)
    batch = sample(policy, settings())
    with pytest.raises(SystemExit, match="the ratio is not 1"):
        train(policy, batch, settings(), first=True)
    assert train(policy, batch, settings(allow_tf32=True), first=True)["num_steps"] == 1


# ------------------------------------------------------------------------------------------------
# it learns

@pytest.mark.parametrize("beta, low, high", ((0.0, .8, 1.0), (50.0, 0.0, .06)))
def test_bandit(beta, low, high):
    policy = gpt()
    reference, prompt = copy.deepcopy(policy).requires_grad_(False), PROMPTS[0]

    def probabilities():
        with torch.no_grad():
            return policy.lm_head(policy(torch.tensor([prompt[1]])))[0, -1].softmax(-1)

    ranked = probabilities().argsort(descending=True).tolist()
    token = [t for t in ranked if t < 94][1]   # one printable character, not the likeliest

    def hit(prompts, completions):
        return [float(text == TOKENIZER.decode([token])) for text in completions]

    cfg = settings({"hit": hit}, num_prompts=1, num_generations=64, max_completion_length=1,
                   beta=beta)
    start = float(probabilities()[token])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for seed in range(50):
        batch = sample(policy, cfg, reference, seed, prompts=[prompt])
        train(policy, batch, cfg, optimizer, first=True)
    assert .005 < start < .06 and low < float(probabilities()[token]) < high


# ------------------------------------------------------------------------------------------------
# prompts and scores

@pytest.mark.parametrize("num_prompts", (1, 3, 16, 32))
def test_each_prompt_once_per_epoch(num_prompts):
    prompts = list(range(10))
    asked = []
    for it in range(120 // num_prompts + 1):
        asked += draw_prompts(prompts, it, num_prompts, seed=1)
    epochs = [asked[i:i + 10] for i in range(0, 100, 10)]
    assert all(sorted(epoch) == prompts for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10 and epochs[0] != prompts


def test_drawn_prompts_depend_on_seed_and_iteration_alone():
    prompts = list(range(10))
    forwards = [draw_prompts(prompts, it, 4, seed=1) for it in range(8)]
    random.seed(9)
    torch.manual_seed(9)
    backwards = [draw_prompts(prompts, it, 4, seed=1) for it in reversed(range(8))]
    assert backwards == forwards[::-1]
    assert [draw_prompts(prompts, it, 4, seed=2) for it in range(8)] != forwards


@pytest.mark.parametrize("function, said", [
    (lambda p, c: [0.0, 1.0, 2.0], "returned 3 numbers for 2 completions"),
    (lambda p, c: [], "returned 0 numbers for 2 completions"),
    (lambda p, c: [0.0, NAN], "returned nan for the completion 'good'"),
    (lambda p, c: [INF, 0.0], "returned inf for the completion 'bad'"),
    (lambda p, c: torch.tensor([0.0, -INF]), "returned -inf for the completion 'good'"),
    (lambda p, c: [0.0, "1"], "returned '1' for the completion 'good'"),
    (lambda p, c: torch.zeros(2, 2), "returned"), (lambda p, c: None, "returned"),
    (lambda p, c: 1.0, "returned"), (lambda p, c: torch.tensor(1.0), "returned")])
def test_score_names_function_and_completion(function, said):
    with pytest.raises(BadInput, match="^reward 'culprit' ") as error:
        score({"fine": ones, "culprit": function}, PROMPTS[:2], ["bad", "good"])
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("values", (
    [1, None], [True, None], (1.0, None), torch.tensor([1, 0]), torch.tensor([[1.0], [0.0]]),
    iter([1.0, 0.0])))
def test_score_takes(values):
    found = score({"ones": ones, "values": lambda p, c: values}, PROMPTS[:2], ["a", "b"])
    assert found.shape == (2, 2) and found[:, 0].tolist() == pytest.approx([.1, .1])
    assert found[0, 1] == 1 and (math.isnan(found[1, 1]) or found[1, 1] == 0)


# ------------------------------------------------------------------------------------------------
# evaluation

def fake_judge(prompts, completions):
    # log-odds; a length of 5 is exactly one half
    return torch.tensor([len(text) - 5.0 for text in completions])


def measured(policy, cfg, base=None, prompts=PROMPTS, judges={}, reward_funcs={},
             tokenizer=TOKENIZER, dtype=FLOAT):
    """evaluate(...) of a policy -> (measures, first completion of each prompt)."""
    nets = SimpleNamespace(
        base=base or gpt(), judges=judges, reward_funcs=reward_funcs, tokenizer=tokenizer,
        eval_prompts=prompts, device=CPU, dtype=dtype, generate=generate)
    return evaluate(nets, policy, cfg)


def telling(texts):
    """A tokenizer that decodes everything to these texts, in their order."""
    left = iter(texts)
    return SimpleNamespace(eot_token=END, decode=lambda ids: next(left))


@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16])  # of sampling; measured in float32
def test_evaluation_against_plain_counting(dtype):
    policy, base, k = gpt(), gpt(seed=1), 65                # 260 rows: more than fit at once
    cfg = settings(num_eval_generations=k, temperature=.3, top_k=1)
    judged = []

    def judge(prompts, completions):
        judged.append((prompts, completions))
        return fake_judge(prompts, completions)

    row, first = measured(policy, cfg, base, judges={"eval_judge": judge},
                          reward_funcs={"letters": letters}, dtype=dtype)
    # temperature 1 and nothing truncated, whatever the settings of the rollouts
    with autocast(CPU, dtype):
        rollout = generate(policy, [prompt.ids for prompt in PROMPTS], k, 8, eos=END,
                           seed=seed_for("evaluation"))
    texts = [TOKENIZER.decode(ids) for ids in rollout.completions(END)]
    assert judged == [([text for text in TEXTS for _ in range(k)], texts)] and first == texts[::k]
    toxicity = [1 / (1 + math.exp(5 - len(text))) for text in texts]
    groups = [toxicity[i:i + k] for i in range(0, 4 * k, k)]
    with torch.no_grad():
        base_logps = plain_logps(base, rollout)
        nll = -torch.cat(base_logps)
    drawn = [logp[mask] for logp, mask in zip(rollout.logp, rollout.completion_mask)]
    d = (torch.cat(base_logps) - torch.cat(drawn)).double()
    assert row["perplexity"] == pytest.approx(math.exp(float(nll.mean())), rel=2e-6)
    assert {name: row.pop(name) for name in ("distinct_1", "distinct_2")}
    assert row == pytest.approx({
        "rewards/letters": statistics.fmean(letters(None, texts)),
        "eval_judge/toxicity": statistics.fmean(toxicity),
        "eval_judge/toxic_share": sum(p >= .5 for p in toxicity) / len(toxicity),
        "eval_judge/expected_max": statistics.fmean(map(max, groups)),
        "eval_judge/any_toxic": sum(max(g) >= .5 for g in groups) / 4,
        "perplexity": math.exp(float(nll.mean())),
        "kl": float((d.exp() - 1 - d).mean()),
        "mean_length": float(rollout.completion_mask.sum() / (4 * k)),
        "ended": float(rollout.ended.sum() / (4 * k)),
        "says_nothing": statistics.fmean(map(says_nothing, texts))}, rel=1e-4)
    assert 0 < row["eval_judge/toxic_share"] < 1 and any(len(text) == 5 for text in texts)


def test_expected_maximum_is_within_a_prompt():
    tokenizer = telling(["aaaaaaaaaaaaaaa", "a", "b", "bb", "", "ccccc", "c", "d"])
    row, _ = measured(gpt(), settings(num_eval_generations=2), judges={"judge": fake_judge},
                      tokenizer=tokenizer)
    p = [1 / (1 + math.exp(5 - n)) for n in (15, 2, 5, 1)]
    assert row["judge/expected_max"] == pytest.approx(statistics.fmean(p))
    assert row["judge/any_toxic"] == .5 and row["judge/toxic_share"] == 2 / 8


@pytest.mark.parametrize("completions, distinct_1, distinct_2", [
    # pairs do not reach across completions
    ([[1, 2, 1], [1, 2], [], [3]], (2 / 5 + 1) / 2, (2 / 3 + 0) / 2),
    ([[1, 1, 1, 1], [1, 1, 1, 1], [1, 2], [3, 4]], (1 / 8 + 1) / 2, (1 / 6 + 1) / 2),
    ([[1], [1], [1], [1]], 1 / 2, 0), ([[], [], [], []], 0, 0)])
def test_distinct(completions, distinct_1, distinct_2):
    found = [distinct(completions, 2, n) for n in (1, 2)]
    assert found == pytest.approx([distinct_1, distinct_2])


def test_a_text_that_repeats_itself_without_a_space_is_not_diverse():
    tokenizer = load_tokenizer(512)

    def pairs(texts):
        return distinct([tokenizer.encode_ordinary(text) for text in texts], 2, 2)

    collapsed = pairs(["edededededededed", "ededededededed"])
    usual = pairs(["the cat likes the train", "your river sees our song"])
    assert collapsed < 0.2 < 0.9 < usual, (collapsed, usual)


def test_distinct_counts_the_tokens_of_the_rollout():
    policy, cfg = gpt(), settings(num_eval_generations=3)
    row, _ = measured(policy, cfg)
    rollout = generate(policy, [prompt.ids for prompt in PROMPTS], 3, 8, eos=END,
                       seed=seed_for("evaluation"))
    ids = rollout.completions(END)
    assert 0 < row["distinct_1"] == distinct(ids, 3, 1) < 1
    assert row["distinct_2"] == distinct(ids, 3, 2)


def test_evaluation_repeats_itself_and_touches_nothing():
    policy, base, cfg = gpt(), gpt(seed=1), settings(num_eval_generations=3)
    before = weights_of(policy)
    more = dict(base=base, judges={"judge": fake_judge}, reward_funcs={"letters": letters})
    a = measured(policy, cfg, **more)
    torch.manual_seed(123)
    random.seed(5)
    state = torch.get_rng_state()
    assert measured(policy, replace(cfg, seed=99), **more) == a
    assert same_weights(policy, before) and torch.equal(torch.get_rng_state(), state)
    assert measured(moved(policy), cfg, **more) != a


# ------------------------------------------------------------------------------------------------
# the script wires it together

RULE = "def reward(prompts, completions):\n    return [len(c) % 3 for c in completions]\n"


@pytest.mark.parametrize("alpha, lora_rank", ((1.0, 2), (.5, 0)))
def test_script_syncs_decays_and_keeps_the_base(tmp_path, monkeypatch, alpha, lora_rank):
    policy, steps = gpt(), []

    def spy(nets, *args, first, **more):
        group = nets.optimizer.param_groups[0]
        steps.append((group["lr"], group["betas"], group["weight_decay"], first))
        return update(nets, *args, first=first, **more)

    monkeypatch.setattr(grpo, "update", spy)
    save_gpt(str(tmp_path / "policy.pt"), policy)
    (tmp_path / "comments.csv").write_text("text,is_offensive\nfine,0\n")
    (tmp_path / "prompts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    (tmp_path / "rule.py").write_text(RULE)
    knobs = dict(
        out_dir=tmp_path / "run", policy=tmp_path / "policy.pt", comments=tmp_path / "comments.csv",
        prompts=tmp_path / "prompts.txt", eval_prompts=tmp_path / "prompts.txt", vocab_size=300,
        block_size=32, n_layer=2, n_head=2, n_embd=32, num_prompts=4, num_generations=4,
        max_completion_length=8, beta=.1, sync_ref_model=True, ref_model_sync_steps=2,
        ref_model_mixup_alpha=alpha, lora_rank=lora_rank, max_iters=4, warmup_iters=2,
        lr_decay="linear", learning_rate=.02, adam_beta1=.8, adam_beta2=.95, weight_decay=.1,
        judge=None, eval_judge=None, num_eval_generations=2, log_micro=False, device="cpu")
    flags = [f"--{name}={value}" for name, value in knobs.items()]
    grpo.main([str(tmp_path / "rule.py"), *flags])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["learning_rate"] for row in rows] == pytest.approx([.01, .02, .02, .01])
    expected = [(row["learning_rate"], (.8, .95), .1, i == 0) for i, row in enumerate(rows)]
    assert steps == expected
    assert ["ref_tensors_differing" in row for row in rows] == [False, True, False, True]
    assert (rows[1]["ref_tensors_differing"] == 0) == (alpha == 1)
    # the policy leaves the reference at once, meets it again only where it is copied
    assert [row["kl"] < 1e-6 for row in rows] == [True, False, alpha == 1, False]
    run = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    start = policy.state_dict()
    same = [torch.equal(x, start[name.replace(".base", "")]) for name, x in run["policy"].items()
            if not name.endswith(("A.weight", "B.weight"))]
    assert len(same) == len(start) and (all(same) if lora_rank else not any(same))


# ------------------------------------------------------------------------------------------------
# the head that forms its gradient in its forward

@pytest.fixture
def pieces(monkeypatch):
    """Logits are formed for seven tokens at a time."""
    monkeypatch.setattr(model, "LOGITS_AT_ONCE", 7 * 300)


@pytest.mark.parametrize("knobs", [
    {}, dict(beta=.1), dict(beta=.1, kl_estimator="k2", use_bias_correction_kl=False),
    dict(loss_type="cispo", epsilon_high=1.1), dict(loss_type="sapo"),
    dict(loss_type="grpo", delta=1.3), dict(top_entropy_quantile=.4), dict(top_p=.9),
    dict(lora_rank=2), dict(mask_truncated_completions=True), dict(tracin="self", beta=.1),
    dict(tracin="self", beta=.1, num_iterations=2), dict(tracin="self", beta=.1, tracin_kl="kept"),
    dict(tracin="reward"), dict(tracin="advantage", mini_batch_size=8, num_iterations=2),
    dict(tracin="self", tracin_layers=("wte",), lora_rank=0)])
def test_fused_head_changes_nothing(knobs, monkeypatch, pieces):
    calls, apply = [], FusedHead.apply

    def counted(*args):
        calls.append(len(args[0]))
        return apply(*args)

    monkeypatch.setattr(FusedHead, "apply", counted)
    policy, found = gpt(), []
    for fused in (True, False):
        cfg = settings(speed=without() if fused else without("head"), **knobs)
        batch = sample(policy, cfg, moved(policy))
        other = moved(policy, seed=6)                          # off-policy, so that clips differ
        torch.manual_seed(0)
        if cfg.lora_rank:
            add_lora(other, 2, 4)
        found.append(gradients(other, batch, cfg))
        # two backwards need the logits of a first pass twice, and it knows of one
        assert bool(calls) == (fused and (not cfg.two_parts or cfg.num_iterations > 1))
        calls.clear()
    (fused_steps, fused_metrics), (plain_steps, plain_metrics) = found
    for a, b in zip(fused_steps, plain_steps):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7) and a.any()
    assert fused_metrics == pytest.approx(plain_metrics, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("backwards, knobs", [
    (1, {}), (2, dict(tracin="self")), (1, dict(tracin="self", tracin_kl="kept")),
    (1, dict(lora_rank=2))])
def test_activation_checkpointing_computes_blocks_again_and_changes_nothing(backwards, knobs):
    policy, found, calls = gpt(), [], []
    for again in (False, True):
        cfg = settings(activation_checkpointing=again, beta=.1, **knobs)
        batch = sample(policy, cfg, moved(policy))
        other = moved(policy, seed=6)
        torch.manual_seed(0)
        if cfg.lora_rank:
            add_lora(other, 2, 4)
        other.recompute = again

        def count(module, args):
            calls.append(again)

        hook = other.h[0].register_forward_pre_hook(count)
        steps, _ = gradients(other, batch, cfg)
        found.append(steps)
        hook.remove()
    assert calls.count(True) == (1 + backwards) * calls.count(False) > 0
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found))


# ------------------------------------------------------------------------------------------------
# the host runs ahead of a GPU

class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for: a value or a size that Python asks for, a Python value
    that it is given."""
    ASK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount",
           "repeat_interleave", "_unique2", "lift_fresh"}

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        for name in ("tolist", "cpu", "numpy"):  # of several numbers: no operation on a CPU
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, plain):
        def method(x, *args):
            self.count += x.dim() > 0
            return plain(x, *args)
        return method

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1])
        self.count += name in self.ASK or by_mask
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_waits_for_nothing(loss_type, monkeypatch):
    cfg = replace(Settings(), loss_type=loss_type, beta=.1, epsilon_high=1.3, delta=1.5,
                  max_completion_length=6)
    for tokens in (10, 57):
        arguments = example()
        batch = SimpleNamespace(mask=arguments["mask"], advantages=arguments["advantages"])
        step = SimpleNamespace(num_rows=4, num_tokens=tokens)
        with Waits(monkeypatch) as waits:
            loss, terms = grpo_loss(**arguments, step=step, cfg=cfg)
            loss.backward()
        assert waits.count == 0
        with Waits(monkeypatch) as waits:
            metrics = loss_metrics(Forward(loss, arguments["logp"], terms, batch), cfg)
        assert waits.count == 0 and metrics
        assert all(x.shape == () and not x.requires_grad for x in metrics.values())


def test_loss_without_metrics_is_the_same():
    cfg = replace(Settings(), beta=.1)
    found = []
    for measure in (True, False):
        arguments = example()
        step = SimpleNamespace(num_rows=4, num_tokens=10)
        loss, terms = grpo_loss(**arguments, step=step, cfg=cfg)
        if measure:
            batch = SimpleNamespace(mask=arguments["mask"], advantages=arguments["advantages"])
            assert loss_metrics(Forward(loss, arguments["logp"], terms, batch), cfg)
        loss.backward()
        found.append((loss, arguments["logp"].grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_debug_steps_norms_are_those_of_each_rows_gradient():
    policy, cfg = gpt(), settings(beta=.1)
    nets = nets_of(policy, cfg, reference=moved(gpt()))
    batch = collect(nets, PROMPTS, cfg, 7)
    step = Step(0, torch.arange(16), 16, int(batch.loss_mask.sum()))
    norms = row_norms(nets, cfg, batch, step, loss_of)
    for row in step.rows.split(1):
        gradient = gradient_of(nets, batch, row, step, cfg, part="loss")
        norm = sum(g.square().sum() for g in gradient.values()).sqrt()
        assert float(norms[row]) == pytest.approx(float(norm), rel=1e-5)
    assert all(p.grad is None for p in policy.parameters()), "the next backward adds to these"
