"""
The arithmetic of GRPO: against a published worked example, and every knob against loops in plain
Python. test_algorithm.py is the short version, for reading.
"""
import itertools
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from config import Settings
from grpo import (
    Batch, all_equal, decoupled_advantages, group_advantages, grpo_loss, kl_estimate, total_reward)
from rollout import Rollout
from worlds import seed_of

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
LEVELS = ("token", "sequence")
NAN, INF = math.nan, math.inf


def loss_of_rows(logp, old_logp, ref_logp, advantages, mask, policy_mask=None, num_rows=None,
                 num_tokens=None, **knobs):
    """grpo_loss of rows that are a whole step, unless num_rows and num_tokens say otherwise.
    knobs: settings of the loss."""
    step = SimpleNamespace(num_rows=num_rows or len(logp), num_tokens=num_tokens or int(mask.sum()))
    rollout = Rollout(mask, mask, mask, mask, old_logp, old_logp, mask.any(1))
    batch = Batch(rollout, advantages, mask, policy_mask, ref_logp)
    return grpo_loss(logp, batch, step, replace(Settings(), **knobs))


# the worked example: losses as TRL's own code computes them
LOGP = [[-1.0, -.5, -2.0, -.1], [-1.5, -.7], [-.3, -1.2, -.9], [-2.0]]
OLD = [[-1.1, -.9, -2.0, -.1], [-1.2, -.6], [-.3, -1.6, -.8], [-1.5]]
REF = [[-1.2, -.6, -1.8, -.2], [-1.4, -.9], [-.5, -1.1, -1.0], [-1.8]]
REWARDS = torch.tensor([1, 0, 3, 3.5], dtype=torch.float64)


def padded(rows):
    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows], dtype=torch.float64)


def example(**knobs):
    """-> Loss of the example."""
    mask = torch.arange(4) < torch.tensor([[4], [2], [3], [1]])
    return loss_of_rows(padded(LOGP), padded(OLD), padded(REF), group_advantages(REWARDS, 4), mask,
                        max_completion_length=6, **knobs)


PLAIN_KL = dict(beta=.04, use_bias_correction_kl=False)
COLUMNS = [dict(), PLAIN_KL, dict(beta=.04, use_bias_correction_kl=True), dict(delta=1.3),
           dict(epsilon_high=.28), dict(importance_sampling_level="sequence")]
TABLE = {"grpo": [.068692, .069246, .069164, .062343, .064153, .045048],
         "dapo": [.165871, .166366, .166346, .155712, .160423, .140468],
         "bnpo": [.165871, .166366, .166346, .155712, .160423, .140468],
         "dr_grpo": [.069113, .069319, .069311, .064880, .066843, .058528]}


def test_the_worked_example():
    found = group_advantages(REWARDS, 4).tolist()
    assert found == pytest.approx([-.529623, -1.134906, .680944, .983585], abs=1e-6)
    losses = [(loss_type, knobs, value) for loss_type, row in TABLE.items()
              for knobs, value in zip(COLUMNS, row)]
    losses += [("cispo", dict(epsilon_high=1.3), -.100753), ("sapo", dict(), .003302),
               ("sapo", dict(importance_sampling_level="sequence"), .004329)]
    for loss_type, knobs, value in losses:
        found = float(example(loss_type=loss_type, **knobs).total)
        assert found == pytest.approx(value, abs=6e-7), (
            f"the {loss_type} loss of the example with {knobs} is {found:.6f}, TRL's is {value}")


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    k3 = kl_estimate(torch.zeros(7), torch.tensor([-8.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 8.0]), "k3")
    assert k3[3] == 0 and (k3 >= 0).all() and k3[4] == pytest.approx(5e-9, rel=.05)


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
def test_advantages_against_plain_python(scale):
    for rewards in ([1, 0, 3, 3.5, 2, 2, 2, 2, -1, 5, 0, 0], [NAN, 3, NAN, NAN, 1, 2, 3, 4],
                    [.1, NAN, .7, .2, NAN, NAN, NAN, NAN, 1, 1, NAN, 1],
                    [0, 0, 0, 1e-3, 5, 5, 5, NAN]):
        found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 4, scale)
        assert found.tolist() == pytest.approx(plain_advantages(rewards, 4, scale), abs=1e-12)


@pytest.mark.parametrize("scale", ("group", "batch", "none"))
def test_equal_rewards_give_exactly_zero(scale):
    """Also where a function says nothing about some rows: what is filled in is the equal number to
    the last bit, so that the group counts as one without spread."""
    generator = torch.Generator().manual_seed(seed_of(0))
    for G in (1, 3, 5, 6, 7, 8):
        values = torch.rand(300, generator=generator) * 1000 - 500
        rewards = values.repeat_interleave(G)
        assert (group_advantages(rewards, G, scale) == 0).all()
        other = torch.full_like(rewards, .5)
        silent = torch.rand(len(rewards), generator=generator) < .4
        scores = torch.stack([rewards.masked_fill(silent, NAN), other], 1)
        total = total_reward(scores, (1.0, 1.0), G)
        assert all_equal(total.view(-1, G)).all()
        assert (group_advantages(total, G, scale) == 0).all()


def test_total_reward():
    """An abstention counts as the function's mean over the group, and as nothing where the whole
    group has none."""
    scores = torch.tensor([[1.0, 2.0], [NAN, 2.0], [3.0, NAN], [NAN, NAN],
                           [1.0, NAN], [2.0, NAN], [3.0, NAN], [NAN, NAN]])
    found = total_reward(scores, (2.0, -1.0), 4).tolist()
    assert found == pytest.approx([0.0, 2.0, 4.0, NAN, 2.0, 4.0, 6.0, NAN], nan_ok=True)


def decoupled_by_hand(scores, weights, G):
    """Advantages of rows of scores (None: abstained), written out: as TRL's normalize_then_sum."""
    totals = []
    for start in range(0, len(scores), G):
        columns = []
        for column in zip(*scores[start:start + G]):
            known = [x for x in column if x is not None]
            mean, std = statistics.fmean(known), statistics.stdev(known)
            columns.append([None if x is None else (x - mean) / (std + 1e-4) for x in column])
        for row in zip(*columns):
            parts = [w * x for w, x in zip(weights, row) if x is not None]
            totals.append(sum(parts) if parts else None)
    known = [x for x in totals if x is not None]
    mean, std = statistics.fmean(known), statistics.stdev(known)
    return [0.0 if x is None else (x - mean) / (std + 1e-4) for x in totals]


def test_rewards_that_are_normalised_before_they_are_summed():
    scores = [[1, 100], [2, 300], [4, None], [None, None], [0, 10], [1, 10.5], [.5, 11], [0, 12]]
    x = torch.tensor([[NAN if s is None else s for s in row] for row in scores])
    found = decoupled_advantages(x, (1.0, .5), 4)
    assert found.tolist() == pytest.approx(decoupled_by_hand(scores, (1.0, .5), 4), abs=1e-5)
    summed = group_advantages(total_reward(x, (1.0, .5), 4), 4, "batch")
    assert (found - summed).abs().max() > .5, "a reward of large numbers drowns the other"


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
                by_rho = -A * (1 - epsilon < rho < 1 + high)
                if free < clipped:
                    by_rho = -A * (rho < (delta or INF))
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
    both levels: logp, old, ref, advantages, mask, policy_mask."""
    g = torch.Generator().manual_seed(seed_of(3))

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    old = -1.5 + .5 * noise(8, 7)
    # no token leaves its row's side of the clip: log 1.3 is .26, log .8 is -.22
    ratio = .4 * torch.rand(8, 7, generator=g, dtype=torch.float64) - .2
    logp = old + ratio + torch.tensor([.5, -.5, .1, 0, -.1, .5, 0, -.4])[:, None]
    mask = torch.arange(7) < torch.tensor([7, 5, 3, 1, 6, 4, 0, 7])[:, None]
    advantages = torch.tensor([1.2, -.7, .4, -1.1, .9, -.6, .5, .8], dtype=torch.float64)
    policy_mask = torch.rand(8, 7, generator=g) < .4
    policy_mask[:, 0] = True
    return logp, old, logp + .3 * noise(8, 7), advantages, mask, policy_mask


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_loss_against_plain_python(loss_type, level):
    """With policy_mask at sequence level too: it takes tokens out of the sum, and the ratio of the
    others is still that of the whole row."""
    logp, old, ref, advantages, mask, policy_mask = random_rows()
    lists = [x.tolist() for x in (logp, old, ref, advantages, mask, policy_mask)]
    kl = [("k3", False, 0.0), *itertools.product(("k1", "k2", "k3"), (False, True), (.1,))]
    seen = set()
    cases = itertools.product((None, 1.3), (None, .28), kl, (False, True), ((None, None), (11, 57)))
    for delta, high, (estimator, corrected, beta), masked, (rows, tokens) in cases:
        x = logp.clone().requires_grad_()
        ceiling = (high or 0) + 1 if loss_type == "cispo" else high
        loss = loss_of_rows(
            x, old, ref, advantages, mask, policy_mask if masked else None, rows, tokens,
            loss_type=loss_type, importance_sampling_level=level, delta=delta, epsilon_high=ceiling,
            beta=beta, kl_estimator=estimator, use_bias_correction_kl=corrected,
            max_completion_length=9)
        loss.total.backward()
        value, gradient = plain_loss(
            *lists[:5], lists[5] if masked else None, loss_type, level, delta, ceiling, estimator,
            corrected, beta, rows or 8, tokens or int(mask.sum()))
        case = (delta, high, estimator, corrected, beta, masked, rows)
        found = float(loss.total.detach())
        assert found == pytest.approx(value, abs=1e-7), (
            f"the {loss_type} loss at {level} level is {found:.7f}, in plain Python {value:.7f}: "
            f"{case}")
        assert torch.allclose(x.grad, torch.tensor(gradient, dtype=torch.float64), atol=1e-7), (
            f"the gradient of the {loss_type} loss at {level} level is not that of plain Python: "
            f"{case}")
        seen.add(round(value, 9))
    # each knob that this loss has makes another number
    assert len(seen) == {"cispo": 2, "sapo": 1}.get(loss_type, 4) * 7 * 2 * 2


def test_temperatures_of_sapo():
    logp, old, _, A, mask, _ = random_rows()
    plain = [x.tolist() for x in (logp, old, logp, A, mask)]
    expected, _ = plain_loss(*plain, None, "sapo", "token", None, None, "k3", False, 0.0, 8, 33,
                             tau_neg=2.0, tau_pos=.5)
    found = loss_of_rows(logp, old, None, A, mask, loss_type="sapo", sapo_temperature_neg=2.0,
                         sapo_temperature_pos=.5)
    assert float(found.total) == pytest.approx(expected, abs=1e-7)


def loss_and_gradient(data=None, **knobs):
    logp, old, ref, advantages, mask, policy_mask = data or random_rows()
    x = logp.clone().requires_grad_()
    ceiling = 1.3 if knobs["loss_type"] == "cispo" else None
    knobs = dict(epsilon_high=ceiling, beta=.1, max_completion_length=9) | knobs
    loss = loss_of_rows(x, old, ref, advantages, mask, policy_mask, **knobs).total
    loss.backward()
    return float(loss.detach()), x.grad


@pytest.mark.parametrize("loss_type", LOSSES)
def test_nothing_reads_what_stands_under_the_mask(loss_type):
    logp, old, ref, A, mask, policy_mask = random_rows()
    wide = F.pad(mask, (0, 3))
    for level, garbage in itertools.product(LEVELS, (0.0, -7.0, 1e4, NAN, INF, -INF)):
        knobs = dict(loss_type=loss_type, importance_sampling_level=level)
        loss, grad = loss_and_gradient(**knobs)
        spoiled = [F.pad(x, (0, 3)).masked_fill(~wide, sign * garbage)
                   for x, sign in ((logp, 1), (old, -1), (ref, 1))]
        data = (*spoiled, A, wide, torch.cat([policy_mask | ~mask, ~wide[:, 7:]], 1))
        found, found_grad = loss_and_gradient(data=data, **knobs)
        assert found == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(found_grad[:, :7], grad, atol=1e-12)
        assert (found_grad[~wide] == 0).all()
