"""
The arithmetic of GRPO: against the published worked example, against loops in plain Python, and knob by knob on a tiny GPT.
"""
import copy
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
from config import load_settings
from evaluate import evaluate
from grpo import (
    collect, group_advantages, grpo_loss, kl_estimate, learning_rate, loss_of, pick, sync,
    total_reward, update)
from run.report import describe_batch, diagnose
from judge import score
from model import GPT, GPTConfig, add_lora, completion_logprobs
from run.script import BadInput
from sample import Rollout, generate, pad_left, truncate
from run.device import autocast
from run.script import derive
from run.files import save_gpt
from data.tokenizer import load_tokenizer

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
NAN, INF = math.nan, math.inf

# ---------------------------------------------------------------------------------------------------------------
# the worked example: losses, gradients and metrics as TRL's own code computes them

LOGP = [[-1.0, -.5, -2.0, -.1], [-1.5, -.7], [-.3, -1.2, -.9], [-2.0]]
OLD = [[-1.1, -.9, -2.0, -.1], [-1.2, -.6], [-.3, -1.6, -.8], [-1.5]]
REF = [[-1.2, -.6, -1.8, -.2], [-1.4, -.9], [-.5, -1.1, -1.0], [-1.8]]
REWARDS = [1, 0, 3, 3.5]


def padded(rows):
    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows], dtype=torch.float64)


def example(**fields):
    """Arguments of grpo_loss; `fields` replaces some of them."""
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), 4)
    return dict(logp=padded(LOGP).requires_grad_(), old_logp=padded(OLD), ref_logp=padded(REF), advantages=advantages,
                mask=torch.arange(4) < torch.tensor([[4], [2], [3], [1]]), max_completion_length=6) | fields


def floats(metrics):
    return {k: float(x) for k, x in metrics.items()}


def run_example(**fields):
    """Loss, d(loss)/d(logp) by row without the padding, metrics."""
    arguments = example(**fields)
    loss, metrics = grpo_loss(**arguments)
    loss.backward()
    return float(loss.detach()), [g[:len(row)].tolist() for g, row in zip(arguments["logp"].grad, LOGP)], floats(metrics)


def test_example_advantages():
    expected = [-.529623, -1.134906, .680944, .983585]
    assert group_advantages(torch.tensor(REWARDS), 4).tolist() == pytest.approx(expected, abs=1e-6)


COLUMNS = [dict(), dict(beta=.04), dict(beta=.04, use_bias_correction_kl=True), dict(delta=1.3), dict(epsilon_high=.28),
           dict(importance_sampling_level="sequence")]
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
    (dict(loss_type="grpo"), [[.036583, .049382, .033101, .033101], [0, .128363], [-.056745, 0, -.051345], [-.149144]]),
    (dict(loss_type="dapo"), DAPO),
    (dict(loss_type="bnpo"), DAPO),
    (dict(loss_type="dr_grpo"), [[.024388, .032921, .022068, .022068], [0, .042788], [-.028373, 0, -.025673], [-.024857]]),
    (dict(loss_type="grpo", importance_sampling_level="sequence"), [[.037509] * 4, [.116148] * 2, [-.062713] * 3, [-.149144]]),
    (dict(loss_type="cispo", epsilon_high=1.3),
     [[.058532, .068851, .052962, .052962], [.084076, .102691], [-.068094, -.088523, -.061614], [-.059657]]),
    (dict(loss_type="sapo"),
     [[.036471, .046230, .033101, .033101], [.103173, .128043], [-.056745, -.079734, -.051229], [-.143517]]),
    (dict(loss_type="grpo", beta=.04),
     [[.037036, .049619, .032548, .033339], [-.000526, .129270], [-.056141, -.000351, -.051028], [-.151358]])])
def test_example_gradients(knobs, expected):
    for row, wanted in zip(run_example(**knobs)[1], expected):
        assert row == pytest.approx(wanted, abs=1e-6)


def test_example_metrics():
    loss, _, metrics = run_example(loss_type="grpo", beta=.04)
    assert metrics["policy_loss"] == pytest.approx(.068692, abs=6e-7) and metrics["tokens"] == 10
    assert {k: v for k, v in metrics.items() if "clip" in k or k == "kl"} == pytest.approx({
        "kl": .012385, "clip_ratio/low_mean": .1, "clip_ratio/high_mean": .1, "clip_ratio/region_mean": .2,
        "clip_ratio/low_min": 0, "clip_ratio/high_max": 1 / 3}, abs=6e-7)
    gaps = [a - b for new, old in zip(LOGP, OLD) for a, b in zip(new, old)]
    assert metrics["ratio"] == pytest.approx(sum(map(math.exp, gaps)) / 10)


def test_clip_metrics_count_the_side_that_binds():
    # ratios above 1.2: rows 0 and 2, one token each; below .8: one in row 1, one in row 3
    for sign, expected in ((1, (0, .2, .2)), (-1, (.2, 0, .2))):
        metrics = run_example(advantages=sign * torch.ones(4))[2]
        assert [metrics[f"clip_ratio/{k}_mean"] for k in ("low", "high", "region")] == pytest.approx(expected)
        assert metrics["clip_ratio/high_max"] == pytest.approx(1 / 3 if sign > 0 else 0) and metrics["clip_ratio/low_min"] == 0
    assert "kl" not in metrics
    cispo = run_example(loss_type="cispo", epsilon_high=1.3, advantages=torch.ones(4))[2]
    assert cispo["cispo_clip_ratio"] == pytest.approx(.2) and "clip_ratio/low_mean" not in cispo


# ---------------------------------------------------------------------------------------------------------------
# KL estimators, enumerated: in ten rows of one token the shares are the probabilities, so the mean is the expectation

P, Q = (.5, .3, .2), (.4, .4, .2)
TO_Q_P, TO_P_Q = (.1, -.1, 0), (.098938, -.093885, -.005053)  # the exact gradients of KL(q, p) and of KL(p, q)


@pytest.mark.parametrize("estimator, corrected, value, gradient", [
    ("k1", False, .025267, (0, 0, 0)), ("k2", False, .024862, TO_P_Q), ("k3", False, .025267, TO_Q_P),
    ("k3", True, .025267, TO_P_Q)])
def test_kl_expectation_and_gradient(estimator, corrected, value, gradient):
    z = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    drawn = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    logp, ref = z.log_softmax(0)[drawn][:, None], torch.tensor(Q, dtype=torch.float64).log()[drawn][:, None]
    loss, metrics = grpo_loss(logp, logp.detach(), ref, torch.zeros(10), torch.ones(10, 1), loss_type="grpo", beta=1.0,
                              kl_estimator=estimator, use_bias_correction_kl=corrected)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(value, abs=6e-7) and metrics["kl"] == pytest.approx(value, abs=6e-7)
    assert z.grad.tolist() == pytest.approx(gradient, abs=6e-7)
    assert float(kl_estimate(logp.detach(), ref, estimator).mean()) == pytest.approx(value, abs=6e-7)


def test_k3_is_never_negative_and_exact_near_zero():
    d = torch.tensor([-8.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 8.0])
    k3 = kl_estimate(torch.zeros(7), d, "k3")
    # exp(d) - 1 - d in float32 would have no digit left at 1e-4
    assert k3[3] == 0 and (k3 >= 0).all() and k3[4] == pytest.approx(5e-9, rel=.05)


# ---------------------------------------------------------------------------------------------------------------
# advantages

def plain_advantages(rewards, G, scale):
    known, out = [r for r in rewards if not math.isnan(r)], []
    for i in range(0, len(rewards), G):
        group = [r for r in rewards[i:i + G] if not math.isnan(r)]
        for r in rewards[i:i + G]:
            spread = {"group": group, "batch": known, "none": []}[scale]
            divisor = 1 if scale == "none" else statistics.stdev(spread) + 1e-4 if len(spread) > 1 else 1e-4
            out.append(0.0 if math.isnan(r) or max(group) == min(group) else (r - statistics.fmean(group)) / divisor)
    return out


@pytest.mark.parametrize("scale", ("group", "batch", "none"))
@pytest.mark.parametrize("rewards", [
    [1, 0, 3, 3.5, 2, 2, 2, 2, -1, 5, 0, 0], [.1, NAN, .7, .2, NAN, NAN, NAN, NAN, 1, 1, NAN, 1], [0, 0, 0, 1e-3, 5, 5, 5, NAN],
    [NAN, 3, NAN, NAN, 1, 2, 3, 4]])
def test_advantages_against_plain_python(rewards, scale):
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 4, scale)
    assert found.tolist() == pytest.approx(plain_advantages(rewards, 4, scale), abs=1e-12)
    assert all(a == 0 for a, r in zip(found.tolist(), rewards) if math.isnan(r))


@pytest.mark.parametrize("G", (2, 4, 8))
def test_advantages_are_bounded(G):
    bound = (G - 1) / math.sqrt(G)
    one_hot = group_advantages(torch.eye(G, dtype=torch.float64)[0] * 1e6, G).abs().max()  # the extreme case
    noise = group_advantages(torch.randn(300 * G, generator=torch.Generator().manual_seed(0)), G)
    assert one_hot == pytest.approx(bound, rel=1e-6) and noise.abs().max() <= bound


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
    rewards = torch.rand(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shifted = rewards + (torch.tensor([5.0]) if scale == "batch" else torch.arange(4.0).repeat_interleave(8))
    assert torch.allclose(group_advantages(rewards, 8, scale), group_advantages(shifted, 8, scale), atol=1e-12)


def test_total_reward():
    scores = torch.tensor([[1.0, 2.0], [NAN, 2.0], [3.0, NAN], [NAN, NAN]])
    assert total_reward(scores, (2.0, -1.0)).tolist() == pytest.approx([0.0, -2.0, 6.0, NAN], nan_ok=True)


# ---------------------------------------------------------------------------------------------------------------
# the loss against loops

def plain_loss(logp, old, ref, advantages, mask, policy_mask, loss_type, level, delta, high, estimator, corrected, beta,
               num_rows, num_tokens, epsilon=.2, L=9, tau_neg=1.05, tau_pos=1.0):
    """Loss and d(loss)/d(logp), on lists; the derivatives by hand."""
    high, total, grad = epsilon if high is None else high, 0.0, [[0.0] * len(row) for row in logp]
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
                by_rho = -A * (rho < (delta or INF) if free < clipped else 1 - epsilon < rho < 1 + high)
            if policy_mask and not policy_mask[i][t]:
                value = by_rho = by_logp = 0.0
            if beta:
                d = ref[i][t] - logp[i][t]
                kl, slope = {"k1": (-d, 1), "k2": (d * d / 2, -d), "k3": (math.exp(d) - 1 - d, 1 - math.exp(d))}[estimator]
                value += beta * kl * (rho if corrected else 1)
                by_rho += beta * kl * corrected
                by_logp += beta * slope * (rho if corrected else 1)
            divisor = {"grpo": num_rows * len(tokens), "sapo": num_rows * len(tokens), "dr_grpo": num_rows * L,
                       "dapo": num_tokens, "cispo": num_tokens, "bnpo": sum(map(sum, mask)) * num_rows / len(logp)}[loss_type]
            total += value / divisor
            grad[i][t] += by_logp / divisor
            for u in over:
                grad[i][u] += by_rho * rho / len(over) / divisor
    return total, grad


def random_rows():
    """Eight rows of unequal length, one of them empty, in which every branch of the clip occurs at both levels."""
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
    for rho, used in ((gap.exp(), mask), ((gap.sum(1) / mask.sum(1).clamp(min=1))[:, None].exp().expand(8, 7), mask)):
        for sign in (1, -1):
            x = rho[used & (sign * A[:, None] > 0)]
            assert (x < .8).any() and ((x > .8) & (x < 1.2)).any() and (x > 1.3).any()


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_against_plain_python(loss_type, level):
    logp, old, ref, advantages, mask, policy_mask = random_rows()
    lists = [x.tolist() for x in (logp, old, ref, advantages, mask, policy_mask)]
    kl = [("k3", False, 0.0), *itertools.product(("k1", "k2", "k3"), (False, True), (.1,))]
    seen = set()
    for delta, high, (estimator, corrected, beta), masked, (rows, tokens) in itertools.product(
            (None, 1.3), (None, .28), kl, (False, True), ((None, None), (11, 57))):
        x = logp.clone().requires_grad_()
        ceiling = (high or 0) + 1 if loss_type == "cispo" else high
        loss, metrics = grpo_loss(
            x, old, ref, advantages, mask, loss_type=loss_type, importance_sampling_level=level, delta=delta,
            epsilon_high=ceiling, beta=beta, kl_estimator=estimator, use_bias_correction_kl=corrected,
            policy_mask=policy_mask if masked else None, num_rows=rows, num_tokens=tokens, max_completion_length=9)
        loss.backward()
        value, gradient = plain_loss(*lists[:5], lists[5] if masked else None, loss_type, level, delta, ceiling, estimator,
                                     corrected, beta, rows or 8, tokens or int(mask.sum()))
        case = (delta, high, estimator, corrected, beta, masked, rows)
        assert float(loss.detach()) == pytest.approx(value, abs=1e-7), case
        assert torch.allclose(x.grad, torch.tensor(gradient, dtype=torch.float64), atol=1e-7), case
        if beta:
            assert metrics["kl"] == pytest.approx(float(kl_estimate(logp, ref, estimator)[mask].mean())), case
        seen.add(round(value, 9))
    # each knob that this loss has makes another number
    assert len(seen) == {"cispo": 2, "sapo": 1}.get(loss_type, 4) * 7 * 2 * 2


def test_sapo_temperatures():
    logp, old, _, A, mask, _ = random_rows()

    def loss(A, **temperatures):
        return float(grpo_loss(logp, old, None, A, mask, loss_type="sapo", **temperatures)[0])

    plain = [x.tolist() for x in (logp, old, logp, A, mask)]
    expected = plain_loss(*plain, None, "sapo", "token", None, None, "k3", False, 0.0, 8, 33, tau_neg=2.0, tau_pos=.5)[0]
    assert loss(A, sapo_temperature_neg=2.0, sapo_temperature_pos=.5) == pytest.approx(expected, abs=1e-7)
    for sign, idle in ((1, "sapo_temperature_neg"), (-1, "sapo_temperature_pos")):
        assert loss(sign * A.abs(), **{idle: .5}) == loss(sign * A.abs())


# ---------------------------------------------------------------------------------------------------------------
# what must change nothing

def loss_and_gradient(rows=slice(None), data=None, **knobs):
    logp, old, ref, advantages, mask, policy_mask = (x[rows] for x in data or random_rows())
    x = logp.clone().requires_grad_()
    knobs = dict(epsilon_high=1.3 if knobs["loss_type"] == "cispo" else None, beta=.1, max_completion_length=9) | knobs
    loss, metrics = grpo_loss(x, old, ref, advantages, mask, policy_mask=policy_mask, **knobs)
    loss.backward()
    return float(loss.detach()), x.grad, floats(metrics)


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("sizes", ((3, 5), (1, 1, 6), (2, 2, 2, 2)))
@pytest.mark.parametrize("loss_type", LOSSES)
def test_micro_batches_add_up(loss_type, sizes, level):
    knobs = dict(loss_type=loss_type, importance_sampling_level=level)
    loss, grad, _ = loss_and_gradient(**knobs)
    parts = [loss_and_gradient(rows.tolist(), num_rows=8, num_tokens=33, **knobs) for rows in torch.arange(8).split(sizes)]
    loss2, grad2 = sum(part[0] for part in parts), torch.cat([part[1] for part in parts])
    same = loss2 == pytest.approx(loss, abs=1e-12) and torch.allclose(grad2, grad, atol=1e-12)
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
    spoiled = [F.pad(x, (0, 3)).masked_fill(~wide, sign * garbage) for x, sign in ((logp, 1), (old, -1), (ref, 1))]
    data = (*spoiled, A, wide, torch.cat([policy_mask | ~mask, ~wide[:, 7:]], 1))
    loss2, grad2, metrics2 = loss_and_gradient(data=data, **knobs)
    assert loss2 == pytest.approx(loss, abs=1e-12) and metrics2 == pytest.approx(metrics, abs=1e-12)
    assert torch.allclose(grad2[:, :7], grad, atol=1e-12) and (grad2[~wide] == 0).all()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_row_order_changes_nothing(loss_type):
    order = [3, 0, 7, 6, 1, 5, 2, 4]
    loss, grad, metrics = loss_and_gradient(loss_type=loss_type)
    loss2, grad2, metrics2 = loss_and_gradient(order, loss_type=loss_type)
    assert loss2 == pytest.approx(loss, abs=1e-12) and torch.allclose(grad2, grad[order], atol=1e-12)
    assert metrics2 == pytest.approx(metrics, abs=1e-12)


@pytest.mark.parametrize("field", ("old_logp", "ref_logp", "mask", "advantages", "policy_mask"))
@pytest.mark.parametrize("shape", (None, (4, 3), (3, 4), (4, 1), (1, 4), (5,)))
def test_missing_or_misshaped_field(field, shape):
    if field == "policy_mask" and shape is None:
        return  # that means all tokens
    with pytest.raises(ValueError, match=f"^{field}: {'missing' if shape is None else ''}"):
        grpo_loss(**example(beta=.04, **{field: shape and torch.zeros(shape)}))


def test_reference_is_needed_only_with_beta():
    assert run_example(ref_logp=None)[0] == run_example()[0]
    with pytest.raises(ValueError, match="max_completion_length"):
        grpo_loss(**example(loss_type="dr_grpo", max_completion_length=None))


# ---------------------------------------------------------------------------------------------------------------
# a tiny world: a GPT with some character, four prompts, rewards by rule

TOKENIZER = load_tokenizer(300)
END, CPU, FLOAT = TOKENIZER.eot_token, torch.device("cpu"), torch.float32
PROMPTS = [(text, TOKENIZER.encode_ordinary(text)) for text in ("I am", "you are so", "what", "the end of it")]


def gpt(seed=0, end=4.0):
    """Random weights, scaled up so that tokens differ in probability; the larger `end`, the likelier the end token."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32))
    with torch.no_grad():
        model.wte.weight *= 7
        model.ln_f.bias += end * model.wte.weight[END] / model.wte.weight[END].norm()
    return model


def moved(model, size=.02, seed=5):
    """A copy some way off."""
    other, g = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += size * torch.randn(p.shape, generator=g)
    return other


def letters(prompts, completions):
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def settings(functions=None, weights=None, **knobs):
    functions = functions or {"letters": letters}
    knobs = dict(vocab_size=300, block_size=32, num_prompts=4, num_generations=4, max_completion_length=8, max_grad_norm=0,
                 learning_rate=1e-3) | knobs
    s = load_settings([f"--{k}={v}" for k, v in knobs.items()])
    return replace(s, judge=None, eval_judge=None, functions=functions, reward_funcs=tuple(functions),
                   reward_weights=weights).check()


def quiet(*args, **kwargs):
    pass


def sample(policy, s, reference=None, seed=7, dtype=FLOAT, prompts=PROMPTS):
    return collect(policy, reference or policy, prompts, s.functions, s, TOKENIZER, seed, dtype)


def train(policy, b, s, optimizer=None, seed=3, dtype=FLOAT, check_ratio=False):
    optimizer = optimizer or torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=s.learning_rate)
    return update(policy, policy, optimizer, b, s, seed, dtype, quiet, check_ratio)


def gradients(policy, b, s, **more):
    """(what update hands to the optimiser at each step, as flat vectors; its metrics). The weights stay."""
    seen, parameters = [], [p for p in policy.parameters() if p.requires_grad]
    spy = SimpleNamespace(step=lambda: seen.append(torch.cat([p.grad.flatten() for p in parameters])),
                          zero_grad=lambda **kwargs: policy.zero_grad())
    return seen, train(policy, b, s, spy, **more)


def flat_gradient(policy, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])


def weights_of(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


def same_weights(model, before):
    return all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def plain_logps(model, rollout, temperature=1.0):
    """Log-probs of the sampled tokens, row by row: no padding, no mask, no cache; a list of (tokens of the row,)."""
    out, P = [], rollout.tokens.shape[1] - rollout.mask.shape[1]
    for tokens, real, mask in zip(rollout.tokens, rollout.real, rollout.mask):
        n, prompt = int(mask.sum()), tokens[:P][real[:P]]
        ids = torch.cat([prompt, tokens[P:P + n]])
        logits = model.lm_head(model(ids[None]))[0, len(prompt) - 1:-1] / temperature
        out.append(logits.log_softmax(-1).gather(1, tokens[P:P + n, None])[:, 0])
    return out


# ---------------------------------------------------------------------------------------------------------------
# the gradient of a step

def test_on_policy_step_is_reinforce_and_a_second_pass_is_not():
    policy, s = gpt(), settings()
    b = sample(policy, s)

    def reinforce():
        rows = plain_logps(policy, b.rollout)
        return flat_gradient(policy, -sum(A * x.sum() for A, x in zip(b.advantages, rows)) / b.mask.sum())

    (first,), _ = gradients(policy, b, s)
    assert torch.allclose(first, reinforce(), atol=1e-6) and first.norm() > .01
    train(policy, b, s, torch.optim.SGD(policy.parameters(), lr=.02))
    (second,), _ = gradients(policy, b, s)
    assert (second - reinforce()).norm() > .01 * second.norm()
    clipped = 0.0
    for A, new, old in zip(b.advantages, plain_logps(policy, b.rollout), b.rollout.logp):
        rho = (new - old[:len(new)]).exp()
        clipped -= torch.min(rho * A, rho.clamp(.8, 1.2) * A).sum() / b.mask.sum()
    assert torch.allclose(second, flat_gradient(policy, clipped), atol=1e-6)


def test_end_token_carries_gradient_and_the_first_pad_does_not():
    policy, (a, *_, z) = gpt(), PROMPTS[0][1]
    rollouts = [generate(policy, [[a, END, z], PROMPTS[1][1]], 4, 8, eos=END, seed=seed) for seed in range(9)]
    rollout, row = next((r, i) for r in rollouts for i in range(4) if r.ended[i] and 2 <= r.mask[i].sum() < r.mask.shape[1])
    n, P = int(rollout.mask[row].sum()), rollout.tokens.shape[1] - rollout.mask.shape[1]
    assert rollout.tokens[row, P + n - 1] == END == rollout.tokens[row, P + n]   # the pad is the same token
    assert END not in rollout.completions()[row] and len(rollout.completions()[row]) == n - 1

    logp = completion_logprobs(policy, rollout)
    only = torch.zeros(8).index_fill(0, torch.tensor(row), 1.0)
    loss, _ = grpo_loss(logp, rollout.logp, None, only, rollout.mask)
    by_logp, *found = torch.autograd.grad(loss, [logp, *policy.parameters()])
    assert (by_logp[row, :n] != 0).all() and (by_logp[row, n:] == 0).all()
    # without padding or mask, so the end token in the prompt is one that others look at
    expected = flat_gradient(policy, -plain_logps(policy, rollout)[row].sum() / rollout.mask.sum())
    assert torch.allclose(torch.cat([g.flatten() for g in found]), expected, atol=1e-6)
    rollout.tokens[row, P - 2] = a
    assert (completion_logprobs(policy, rollout) - logp)[row, :n].abs().max() > .01


# ---------------------------------------------------------------------------------------------------------------
# every knob acts: rollout

@pytest.mark.parametrize("temperature", (.5, 1.0, 2.0))
def test_log_probs_are_those_of_the_sampling_temperature(temperature):
    policy, s = gpt(), settings(temperature=temperature, beta=.1)
    b = sample(policy, s, reference=moved(policy))
    for found, model in ((b.rollout.logp, policy), (b.ref_logp, moved(policy))):
        for row, mask, expected in zip(found, b.rollout.mask, plain_logps(model, b.rollout, temperature)):
            assert torch.allclose(row[mask], expected, atol=1e-5)
    assert loss_of(policy, b, slice(None), s, FLOAT)[2].abs().max() < 1e-4
    assert loss_of(policy, b, slice(None), replace(s, temperature=1.3), FLOAT)[2].abs().max() > .05


def test_temperature_raises_entropy():
    entropy = [describe_batch(sample(gpt(), s), s)["entropy"] for s in (settings(temperature=t) for t in (.25, .5, 1, 2))]
    assert entropy == sorted(entropy) and entropy[-1] > entropy[0] + 1


@pytest.mark.parametrize("knob, allowed", [
    (dict(top_k=5), lambda p: p >= p.topk(5).values[-1]),
    (dict(top_p=.5), lambda p: torch.tensor([p[p > x].sum() < .5 for x in p])),
    (dict(min_p=.3), lambda p: p >= .3 * p.max())])
def test_truncated_sampling(knob, allowed):
    policy, s = gpt(), settings(**knob)
    b = sample(policy, s)
    r, P = b.rollout, b.rollout.tokens.shape[1] - b.rollout.mask.shape[1]
    assert loss_of(policy, b, slice(None), s, FLOAT)[2].abs().max() < 1e-4                       # renormalised: ratio 1
    whole = torch.cat([x for x in plain_logps(policy, r)])
    assert (r.logp[r.mask] - whole).max() > .1 and (r.logp[r.mask] >= whole - 1e-5).all()
    p = policy.lm_head(policy(torch.tensor([PROMPTS[0][1]])))[0, -1].detach().softmax(-1)
    keep = allowed(p)
    assert torch.equal(r.kept[0, 0], keep) and 0 < keep.sum() < 100 and keep[r.tokens[:4, P]].all()
    assert r.logp[0, 0] == pytest.approx(float((p[r.tokens[0, P]] / p[keep].sum()).log()), abs=1e-5)


def test_seed_makes_the_rollout():
    policy, s = gpt(), settings()
    a, b, c = (sample(policy, s, seed=seed).rollout.tokens for seed in (7, 7, 8))
    assert torch.equal(a, b) and not (a.shape == c.shape and torch.equal(a, c))


@pytest.mark.parametrize("size", (4, 8, 12))
def test_decode_batch_size_changes_nothing(size):
    a, b = (sample(gpt(), settings(decode_batch_size=size)).rollout for size in (0, size))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.mask, b.mask) and torch.equal(a.ended, b.ended)
    assert torch.allclose(a.logp, b.logp, atol=1e-5) and torch.allclose(a.entropy, b.entropy, atol=1e-5)


def test_decode_batch_size_bounds_the_decode(monkeypatch):
    rows, decode = [], sampling.decode
    monkeypatch.setattr(sampling, "decode", lambda *a: (rows.append(len(a[3].tokens)), decode(*a)))
    sample(gpt(), settings(decode_batch_size=8))
    assert rows == [8, 8]


# ---------------------------------------------------------------------------------------------------------------
# every knob acts: reward and advantage

@pytest.mark.parametrize("scale", ("group", "batch", "none"))
def test_scale_rewards(scale):
    b = sample(gpt(), settings(scale_rewards=scale))
    assert b.rewards.tolist() == pytest.approx(letters(None, b.completions))
    assert b.advantages.tolist() == pytest.approx(plain_advantages(b.rewards.tolist(), 4, scale), abs=1e-5)


def test_scales_differ():
    group, batch, none = (sample(gpt(), settings(scale_rewards=scale)).advantages for scale in ("group", "batch", "none"))
    assert min((group - batch).abs().max(), (group - none).abs().max(), (batch - none).abs().max()) > .05


def test_reward_functions_get_prompts_in_step_with_completions():
    seen = []

    def look(prompts, completions):
        seen.append((prompts, completions))
        return range(len(completions))

    b = sample(gpt(), settings({"look": look}))
    assert seen == [([text for text, _ in PROMPTS for _ in range(4)], b.completions)]
    assert b.completions == [TOKENIZER.decode(ids) for ids in b.rollout.completions()] and b.rewards.tolist() == list(range(16))


def test_reward_weights():
    s = settings({"letters": letters, "short": lambda p, c: [-len(x) for x in c]}, (2.0, .5))
    b = sample(gpt(), s)
    expected = [2 * x - .5 * len(text) for x, text in zip(letters(None, b.completions), b.completions)]
    assert b.rewards.tolist() == pytest.approx(expected)
    assert b.scores.shape == (16, 2) and (b.rewards - b.scores.sum(1)).abs().max() > .1
    m = describe_batch(b, s)
    assert m["rewards/short/mean"] == pytest.approx(-statistics.fmean(map(len, b.completions)))
    assert m["rewards/letters/std"] == pytest.approx(statistics.stdev(letters(None, b.completions)))


def test_a_reward_function_may_abstain():
    def some(prompts, completions):
        return [None if i % 4 == 1 else 10.0 * i for i in range(len(completions))]

    both = sample(gpt(), settings({"letters": letters, "some": some}))
    plain = letters(None, both.completions)
    assert both.rewards.tolist() == pytest.approx([x if i % 4 == 1 else x + 10 * i for i, x in enumerate(plain)])
    alone = sample(gpt(), settings({"some": some}))
    expected = plain_advantages([NAN if i % 4 == 1 else 10.0 * i for i in range(16)], 4, "group")
    assert alone.rewards.isnan().tolist() == [i % 4 == 1 for i in range(16)]
    assert alone.advantages.tolist() == pytest.approx(expected, abs=1e-5) and (alone.advantages[1::4] == 0).all()
    m = describe_batch(alone, settings({"some": some}))
    assert m["reward"] == pytest.approx(statistics.fmean(10 * i for i in range(16) if i % 4 != 1)) and m["reward_min"] == 0


def test_a_batch_in_which_every_function_abstains_is_survived():
    policy, s = gpt(), settings({"never": lambda prompts, completions: [None] * len(completions)})
    before, b = weights_of(policy), sample(policy, s)
    m = train(policy, b, s, torch.optim.SGD(policy.parameters(), lr=1.0)) | describe_batch(b, s)
    assert same_weights(policy, before) and m["grad_norm"] == 0 and diagnose(m, s)


def by_prompt(prompts, completions):
    """Says nothing about the first two prompts."""
    return [.1 if p in (PROMPTS[0][0], PROMPTS[1][0]) else x for p, x in zip(prompts, letters(prompts, completions))]


@pytest.mark.parametrize("loss_type", ("grpo", "dr_grpo", "dapo", "bnpo"))
def test_dropped_groups_leave_the_divisor(loss_type):
    policy, s = gpt(), settings({"by_prompt": by_prompt}, loss_type=loss_type)
    b = sample(policy, s)
    assert (b.advantages[:8] == 0).all() and (b.advantages[8:] != 0).any()
    (keep,), _ = gradients(policy, b, s)
    (drop,), m = gradients(policy, b, replace(s, zero_std_groups="drop"))
    share = float(b.mask[8:].sum() / b.mask.sum()) if loss_type in ("dapo", "bnpo") else .5
    assert keep.norm() > 0 and share < .9 and torch.allclose(keep, drop * share, atol=1e-6) and m["num_steps"] == 1


def test_all_groups_dropped_is_no_step():
    policy, s = gpt(), settings({"one": lambda p, c: [.1] * len(c)}, zero_std_groups="drop")
    before, b = weights_of(policy), sample(policy, s)
    # weight decay would show a step without gradient
    m = train(policy, b, s, torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.5))
    assert m["num_steps"] == 0 and m["loss"] == m["grad_norm"] == 0 and same_weights(policy, before)
    kept = train(policy, b, replace(s, zero_std_groups="keep"), torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.5))
    assert kept["num_steps"] == 1 and not same_weights(policy, before)


def test_kl_in_the_reward():
    policy, s = gpt(), settings(beta=.1, kl_in="reward", kl_estimator="k1")
    reference = moved(policy)
    b, without = sample(policy, s, reference), sample(policy, settings())
    with torch.no_grad():
        gap = [(p - r).sum() for p, r in zip(plain_logps(policy, b.rollout), plain_logps(reference, b.rollout))]
    assert b.rewards.tolist() == without.rewards.tolist()   # as judged, so that a judge that is stuck is seen
    less = torch.tensor([float(x - .1 * d) for x, d in zip(without.rewards, gap)])
    assert b.advantages.tolist() == pytest.approx(group_advantages(less, s.num_generations, s.scale_rewards).tolist(), abs=1e-4)
    assert (b.advantages - without.advantages).abs().max() > .01
    m = train(policy, b, s)
    assert m["kl"] == pytest.approx(float(sum(gap) / b.mask.sum()), abs=1e-5) and m["loss"] == pytest.approx(m["policy_loss"])


# ---------------------------------------------------------------------------------------------------------------
# every knob acts: loss

def test_mask_truncated_completions():
    policy, s = gpt(), settings(mask_truncated_completions=True)
    b, plain = sample(policy, s), sample(policy, settings())
    ended = b.rollout.ended
    assert 2 < ended.sum() < 14 and torch.equal(b.advantages, plain.advantages)
    assert not b.mask[~ended].any() and torch.equal(b.mask[ended], b.rollout.mask[ended])
    assert torch.equal(plain.mask, b.rollout.mask)
    rows = plain_logps(policy, b.rollout)
    total = -sum(A * x.sum() for A, x, on in zip(b.advantages, rows, ended) if on) / b.rollout.mask[ended].sum()
    (found,), m = gradients(policy, b, s)
    assert torch.allclose(found, flat_gradient(policy, total), atol=1e-6)
    assert describe_batch(b, s)["num_completion_tokens"] == int(b.mask.sum()) < int(b.rollout.mask.sum())


def test_top_entropy_quantile():
    policy, s = gpt(), settings(top_entropy_quantile=.3, beta=.1)
    reference = moved(policy)
    b = sample(policy, s, reference)
    chosen, left = b.rollout.entropy[b.mask & b.policy_mask], b.rollout.entropy[b.mask & ~b.policy_mask]
    assert chosen.min() >= left.max() and len(chosen) / int(b.mask.sum()) == pytest.approx(.3, abs=.02)
    assert sample(policy, replace(s, top_entropy_quantile=1.0), reference).policy_mask is None
    new, tokens, total = completion_logprobs(policy, b.rollout), int(b.mask.sum()), 0.0
    for i, t in b.mask.nonzero().tolist():
        d = b.ref_logp[i, t] - new[i, t]
        total += (-b.advantages[i] * new[i, t] * b.policy_mask[i, t] + .1 * (d.exp() - 1 - d)) / tokens    # the KL is on all
    (found,), _ = gradients(policy, b, s)
    assert torch.allclose(found, flat_gradient(policy, total), atol=1e-6)


def test_entropy_is_that_of_the_sampling_distribution():
    policy, s = gpt(), settings(temperature=.7, top_k=9)
    b = sample(policy, s)
    logits = policy.lm_head(policy(torch.tensor([PROMPTS[2][1]])))[:, -1] / .7
    p = truncate(logits, top_k=9).softmax(-1)[0]
    assert b.rollout.entropy[8, 0] == pytest.approx(float(-(p[p > 0] * p[p > 0].log()).sum().detach()), abs=1e-5)
    assert (b.rollout.entropy[~b.rollout.mask] == 0).all()


@pytest.mark.parametrize("estimator", ("k1", "k2", "k3"))
def test_beta_and_kl_estimator(estimator):
    policy, s = gpt(), settings(beta=.3, kl_estimator=estimator)
    reference = moved(policy)
    b = sample(policy, s, reference)
    d = torch.cat(plain_logps(reference, b.rollout)) - torch.cat(plain_logps(policy, b.rollout))
    kl = float({"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[estimator].mean().detach())
    (found,), m = gradients(policy, b, s)
    assert m["kl"] == pytest.approx(kl, rel=1e-3) and m["loss"] - m["policy_loss"] == pytest.approx(.3 * kl, rel=1e-3)
    (twice,), _ = gradients(policy, b, replace(s, beta=.6))
    (none,), _ = gradients(policy, b, replace(s, beta=0.0))
    assert torch.allclose(twice - found, found - none, atol=1e-5) and (found - none).norm() > .01


def test_beta_zero_never_runs_the_reference():
    def forbidden(*args):
        raise AssertionError("the reference was run")

    policy, s = gpt(), settings()
    b = sample(policy, s, forbidden)
    assert b.ref_logp is None and "kl" not in train(policy, b, s)


def test_bias_corrected_k3_has_the_gradient_of_k2_on_policy():
    policy, s = gpt(), settings(beta=.3)
    b = sample(policy, s, moved(policy, .05))
    (k3,), _ = gradients(policy, b, s)
    (corrected,), _ = gradients(policy, b, replace(s, use_bias_correction_kl=True))
    (k2,), _ = gradients(policy, b, replace(s, kl_estimator="k2"))
    assert torch.allclose(corrected, k2, atol=1e-5) and (k3 - k2).norm() > .05 * k2.norm()


@pytest.mark.parametrize("knobs", [
    dict(loss_type="grpo"), dict(loss_type="dr_grpo"), dict(importance_sampling_level="sequence"), dict(epsilon=.05),
    dict(epsilon_high=.5), dict(delta=1.25), dict(loss_type="cispo", epsilon_high=1.1),
    dict(loss_type="cispo", epsilon_high=5.0), dict(loss_type="sapo"), dict(loss_type="sapo", sapo_temperature_neg=3.0),
    dict(loss_type="sapo", sapo_temperature_pos=3.0), dict(beta=.2), dict(beta=.2, use_bias_correction_kl=True),
    dict(beta=.2, kl_estimator="k1")])
def test_loss_settings_reach_the_loss(knobs):
    policy = gpt()
    b = sample(policy, settings(beta=.1), reference=moved(policy, seed=6))
    later, s = moved(policy, .05), settings(**knobs)
    with torch.no_grad():
        found, _, gap, _ = loss_of(later, b, slice(2, 13), s, FLOAT)
        default, _, _, _ = loss_of(later, b, slice(2, 13), settings(), FLOAT)
        logp = completion_logprobs(later, b.rollout[2:13])
    expected, _ = grpo_loss(logp, b.rollout.logp[2:13], b.ref_logp[2:13], b.advantages[2:13], b.mask[2:13],
                            max_completion_length=8, **knobs)
    assert float(found) == pytest.approx(float(expected), abs=1e-6) and abs(float(found) - float(default)) > 1e-4
    assert torch.allclose(gap, logp - b.rollout.logp[2:13], atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------
# every knob acts: step

def spied(monkeypatch):
    """Every call of loss_of that update makes, as (rows, num_rows, num_tokens, metrics)."""
    calls = []

    def spy(policy, b, rows, s, dtype, num_rows=None, num_tokens=None, **more):
        found = loss_of(policy, b, rows, s, dtype, num_rows, num_tokens, **more)
        calls.append((rows.tolist(), num_rows, num_tokens, floats(found[1])))
        return found

    monkeypatch.setattr(grpo, "loss_of", spy)
    return calls


def test_num_iterations(monkeypatch):
    policy, s, calls = gpt(), settings(num_iterations=3, learning_rate=.01, epsilon=.01), spied(monkeypatch)
    b = sample(policy, s)
    m = train(policy, b, s, check_ratio=True)
    ratios = [metrics["ratio"] for *_, metrics in calls]
    assert m["num_steps"] == len(calls) == 3 and ratios[0] == pytest.approx(1, abs=1e-5) and abs(ratios[1] - 1) > 1e-3
    clipped = [metrics["clip_ratio/region_mean"] for *_, metrics in calls]
    assert clipped[0] == 0 < clipped[1] and m["clip_ratio/region_mean"] == pytest.approx(statistics.fmean(clipped))
    assert m["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)   # of the weights that sampled


def test_mini_batches(monkeypatch):
    policy, s, calls = gpt(), settings(num_iterations=2, mini_batch_size=4, micro_batch_size=2), spied(monkeypatch)
    b = sample(policy, s)
    m = train(policy, b, s)
    assert m["num_steps"] == 8 and len(calls) == 16 and all(num_rows == 4 for _, num_rows, _, _ in calls)
    passes = [[row for rows, *_ in calls[i:i + 8] for row in rows] for i in (0, 8)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(16)) and passes[0] != passes[1] != list(range(16)) != passes[0]
    loss = sum(metrics["policy_loss"] for *_, metrics in calls) / 8   # of a step, as if there were one
    assert m["loss"] == pytest.approx(loss, abs=1e-6) and m["policy_loss"] == pytest.approx(loss, abs=1e-6) and abs(loss) > 1e-3
    for i in range(0, 16, 2):
        rows = calls[i][0] + calls[i + 1][0]
        assert calls[i][2] == calls[i + 1][2] == int(b.mask[rows].sum())
    again = spied(monkeypatch)
    train(gpt(), b, s, seed=4)
    assert [rows for rows, *_ in again] != [rows for rows, *_ in calls]


def test_whole_batch_keeps_its_order(monkeypatch):
    policy, s, calls = gpt(), settings(micro_batch_size=4, sort_by_length=False), spied(monkeypatch)
    train(policy, sample(policy, s), s)
    assert [row for rows, *_ in calls for row in rows] == list(range(16))


def test_rows_of_like_length_share_a_micro_batch(monkeypatch):
    policy, found = gpt(), []
    for sort in (True, False):
        s, calls = settings(micro_batch_size=4, sort_by_length=sort, beta=.1), spied(monkeypatch)
        b = sample(policy, s, moved(policy))
        gradient, m = gradients(moved(policy, seed=6), b, s)
        length, prompt = b.mask.sum(1), b.rollout.real[:, :-b.mask.shape[1]].sum(1)
        assert [row for rows, *_ in calls for row in rows] == (length.argsort(stable=True) if sort else torch.arange(16)).tolist()
        places = sum(4 * int(length[list(rows)].max() + prompt[list(rows)].max()) for rows, *_ in calls)
        assert m["padding"] == pytest.approx(1 - int((length + prompt).sum()) / places)
        found.append((gradient[0], m, b, sum(int(length[list(rows)].max()) for rows, *_ in calls)))
        monkeypatch.undo()
    assert found[0][3] < found[1][3]                            # places for completions; prompts come as they come
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][2].ref_logp, found[1][2].ref_logp, atol=1e-6)
    assert found[0][1]["loss"] == pytest.approx(found[1][1]["loss"], abs=1e-6)


@pytest.mark.parametrize("knobs", [
    *(dict(loss_type=name, epsilon_high=1.1 if name == "cispo" else None) for name in LOSSES), dict(beta=.1),
    dict(mask_truncated_completions=True), dict(importance_sampling_level="sequence", loss_type="grpo"),
    dict(top_entropy_quantile=.4), dict(zero_std_groups="drop")])
def test_micro_batch_size_changes_memory_only(knobs):
    policy = gpt()
    wide = settings({"by_prompt": by_prompt}, **knobs)
    reference = moved(policy)
    found = []
    for size in (16, 8, 2, 1):
        s = replace(wide, micro_batch_size=size)
        b = sample(policy, s, reference)
        (gradient,), m = gradients(moved(policy, seed=6), b, s)    # off-policy, so that ratios and clips differ
        found.append((gradient, {k: v for k, v in m.items() if "low_min" not in k and k != "padding"}))
    for gradient, m in found[1:]:
        same = torch.allclose(gradient, found[0][0], atol=1e-6) and m == pytest.approx(found[0][1], abs=1e-5)
        assert same == (knobs.get("loss_type") != "bnpo")


def test_max_grad_norm():
    policy, s = gpt(), settings()
    b = sample(policy, s)
    (free,), m = gradients(policy, b, s)
    (capped,), m2 = gradients(policy, b, replace(s, max_grad_norm=.01))
    assert m["grad_norm"] == m2["grad_norm"] == pytest.approx(float(free.norm()), rel=1e-4) and m["grad_norm"] > .02
    assert float(capped.norm()) == pytest.approx(.01, rel=1e-3)
    assert torch.allclose(capped, free * (.01 / free.norm()), atol=1e-6)
    assert torch.equal(gradients(policy, b, replace(s, max_grad_norm=1e6))[0][0], free)


@pytest.mark.parametrize("decay, warmup, expected", [
    ("constant", 0, [1, 1, 1, 1, 1, 1]), ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    ("cosine", 0, [1, .5 + .25 * math.sqrt(3), .75, .5, .25, .5 - .25 * math.sqrt(3)]),
    ("constant", 4, [.25, .5, .75, 1, 1, 1]), ("linear", 2, [.5, 1, 1, .75, .5, .25]),
    ("cosine", 2, [.5, 1, 1, .5 + .25 * math.sqrt(2), .5, .5 - .25 * math.sqrt(2)])])
def test_learning_rate(decay, warmup, expected):
    s = settings(learning_rate=.02, lr_decay=decay, warmup_iters=warmup, max_iters=6)
    assert [learning_rate(it, s) for it in range(6)] == pytest.approx([.02 * x for x in expected])


@pytest.mark.parametrize("rank", (0, 2))
def test_sync(rank):
    reference, policy = gpt(), moved(gpt())
    if rank:
        add_lora(reference, rank, 8.0), add_lora(policy, rank, 8.0)
    old, new = weights_of(reference), weights_of(moved(policy))
    policy.load_state_dict(new)
    assert any(name.endswith("B.weight") for name in new) == bool(rank)
    assert sync(reference, policy, .25) == len(list(policy.parameters()))
    for name, x in reference.state_dict().items():
        assert torch.allclose(x, .75 * old[name] + .25 * new[name], atol=1e-6)
    assert sync(reference, policy, 1.0) == 0 and same_weights(reference, new) and same_weights(policy, new)


def test_training_leaves_the_reference_alone():
    policy, s = gpt(), settings(beta=.1, learning_rate=.01, num_iterations=2, mini_batch_size=8)
    reference = copy.deepcopy(policy).requires_grad_(False)
    before, first = weights_of(reference), None
    for seed in range(3):
        m = train(policy, sample(policy, s, reference, seed=seed), s)
        first = m["kl"] if first is None else first
    assert same_weights(reference, before) and m["kl"] > first > 0
    assert not any(torch.equal(p, r) for p, r in zip(policy.parameters(), reference.parameters()))


def test_lora_moves_the_adapters_only():
    policy, s = gpt(), settings(learning_rate=.01, beta=.1)
    base = copy.deepcopy(policy)
    torch.manual_seed(0)
    add_lora(policy, 2, 8.0)
    before, kls = weights_of(policy), []
    for seed in range(2):
        kls.append(train(policy, sample(policy, s, base, seed=seed), s, check_ratio=True)["kl"])
    changed = {name for name, x in policy.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if name.endswith(("A.weight", "B.weight"))} and len(changed) == 2 * 2 * 4
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[1] > 1e-4


def test_bfloat16():
    policy, s = gpt(), settings(beta=.1)
    b, exact = sample(policy, s, moved(policy), dtype=torch.bfloat16), sample(policy, s, moved(policy))
    assert b.rollout.logp.dtype == b.ref_logp.dtype == torch.float32 and not torch.equal(b.rollout.logp, exact.rollout.logp)
    m = train(policy, b, s, dtype=torch.bfloat16, check_ratio=True)
    assert .9 < m["sampling/importance_sampling_ratio/min"] <= m["sampling/importance_sampling_ratio/max"] < 1.1
    assert m["num_steps"] == 1 and math.isfinite(m["grad_norm"]) and all(p.dtype == torch.float32 for p in policy.parameters())


# ---------------------------------------------------------------------------------------------------------------
# what a run says about itself

def test_batch_metrics_against_plain_counting():
    s = settings({"by_prompt": by_prompt})
    b = sample(gpt(), s)
    m, rewards, G = describe_batch(b, s), by_prompt([t for t, _ in PROMPTS for _ in range(4)], b.completions), range(0, 16, 4)
    lengths, ended = b.rollout.mask.sum(1).tolist(), b.rollout.ended.tolist()
    done = [n for n, e in zip(lengths, ended) if e]
    assert m == pytest.approx({
        "reward": statistics.fmean(rewards), "reward_std": statistics.stdev(rewards), "reward_min": min(rewards),
        "reward_max": max(rewards), "rewards/by_prompt/mean": statistics.fmean(rewards),
        "rewards/by_prompt/std": statistics.stdev(rewards), "advantage_max": float(b.advantages.abs().max()),
        "frac_reward_zero_std": sum(len(set(rewards[i:i + 4])) == 1 for i in G) / 4,
        "frac_identical_groups": sum(len(set(b.completions[i:i + 4])) == 1 for i in G) / 4,
        "entropy": float(b.rollout.entropy.sum()) / sum(lengths), "num_completion_tokens": sum(lengths),
        "logp_min": min(float(x.min()) for x in b.rollout.logp), "completions/clipped_ratio": ended.count(False) / 16,
        "completions/mean_length": statistics.fmean(lengths), "completions/min_length": min(lengths),
        "completions/max_length": max(lengths), "completions/mean_terminated_length": statistics.fmean(done),
        "completions/min_terminated_length": min(done), "completions/max_terminated_length": max(done)}, rel=1e-5)
    assert m["frac_reward_zero_std"] == .5 and 0 < m["completions/clipped_ratio"] < 1


def test_identical_means_the_whole_group():
    s = settings()
    b = replace(sample(gpt(), s), completions=[*"aaaa", *"abab", *"aaab", *"abcd"])
    assert describe_batch(b, s)["frac_identical_groups"] == .25


@pytest.mark.parametrize("knobs, names", [
    (dict(epsilon_high=.1), ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean")),
    (dict(loss_type="cispo", epsilon_high=1.1), ("cispo_clip_ratio",))])
def test_step_metrics_do_not_see_the_split(knobs, names):
    policy, s = gpt(), settings(beta=.1, **knobs)
    later, b = moved(policy, .05), sample(policy, s, moved(policy))
    _, whole, gap, _ = loss_of(later, b, slice(None), s, FLOAT)
    whole, gap = floats(whole), gap[b.rollout.mask]
    m = train(later, b, replace(s, micro_batch_size=4))
    assert all(m[name] == pytest.approx(whole[name], abs=1e-5) and m[name] > 0 for name in (*names, "kl"))
    assert {k: v for k, v in m.items() if k.startswith("sampling/")} == pytest.approx({
        "sampling/sampling_logp_difference/mean": float(gap.abs().mean()),
        "sampling/sampling_logp_difference/max": float(gap.abs().max()),
        "sampling/importance_sampling_ratio/min": float(gap.exp().min()),
        "sampling/importance_sampling_ratio/mean": float(gap.exp().mean()),
        "sampling/importance_sampling_ratio/max": float(gap.exp().max())}, rel=1e-4)


def said(policy, s, reference=None, later=None):
    """The lines after one iteration; `later` takes the step in place of the policy that sampled."""
    b = sample(policy, s, reference)
    m = train(later or policy, b, s) | describe_batch(b, s)
    return list(diagnose(m, s).values())


def certain():
    """Logits scaled so hugely that every token has probability 1."""
    policy = gpt()
    with torch.no_grad():
        policy.ln_f.weight *= 1e5
        policy.ln_f.bias *= 1e5
    return policy


def ones(prompts, completions):
    return [.1] * len(completions)


def prompt_length(prompts, completions):
    return [len(p) for p in prompts]


@pytest.mark.parametrize("policy, functions, knobs, expected", [
    (gpt, {"letters": letters}, {}, []),
    (gpt, {"letters": letters}, dict(beta=.1, num_iterations=2, top_k=50, temperature=.8), []),
    (gpt, {"ones": ones}, {}, ["all rewards of the batch are 0.1", "grad_norm is 0"]),
    (gpt, {"prompt_length": prompt_length}, {}, ["all advantages are zero (rewards 4 to 13", "grad_norm is 0"]),
    (gpt, {"letters": letters, "ones": ones}, {}, ["reward 'ones' gave every completion the same score"]),
    (lambda: gpt(end=-9.0), {"letters": letters}, {}, ["every completion was cut at 8 tokens"]),
    (lambda: gpt(end=-9.0), {"letters": letters}, dict(mask_truncated_completions=True),
     ["no completion tokens carry loss", "every completion was cut at 8 tokens", "grad_norm is 0"]),
    (certain, {"prompt_length": prompt_length}, {}, [
        "all advantages are zero", "all log-probs are zero", "100 % of the groups hold 4 identical completions",
        "every completion was cut", "grad_norm is 0"])])
def test_diagnosis_of_real_batches(policy, functions, knobs, expected):
    found = said(policy(), settings(functions, **knobs))
    assert len(found) == len(expected) and all(line.startswith(start) for line, start in zip(found, expected)), found


def test_diagnosis_of_another_policy_and_of_the_kl():
    policy = gpt()
    lines = said(policy, settings(), later=moved(policy, .1))
    assert len(lines) == 1 and lines[0].startswith("ratio off on the first pass")
    b, s = sample(policy, settings()), settings()
    m = train(policy, b, replace(s, temperature=1.3)) | describe_batch(b, s)   # the mean of the ratio would not show it
    assert list(diagnose(m, s)) == ["ratio"] and abs(m["sampling/importance_sampling_ratio/mean"] - 1) < .1
    lines = said(policy, settings(beta=.1), reference=moved(certain(), .5))
    assert len(lines) == 1 and lines[0].startswith("KL ") and "exploding" in lines[0]


@pytest.mark.parametrize("change, expected", [
    (dict(), []), (dict(kl=-.01), ["KL -0.0100 is negative over 5000 tokens"]), (dict(kl=-.01, num_completion_tokens=4000), []),
    (dict(kl=-1e-4), []), (dict(kl=5.1), ["KL 5.1 nats per token is exploding"]), (dict(kl=4.9), []),
    ({"sampling/sampling_logp_difference/mean": .06}, ["ratio off on the first pass"]),
    ({"sampling/sampling_logp_difference/mean": .04}, []), ({"completions/clipped_ratio": .99}, []),
    (dict(frac_identical_groups=.25), ["25 % of the groups hold 4 identical completions"]),
    ({"rewards/letters/std": 0.0}, [])])
def test_diagnosis_of_metrics(change, expected):
    s = settings()
    b = sample(gpt(), s)
    m = train(gpt(), b, s) | describe_batch(b, s) | dict(num_completion_tokens=5000) | change
    found = list(diagnose(m, s).values())
    assert len(found) == len(expected) and all(line.startswith(start) for line, start in zip(found, expected)), found


@pytest.mark.parametrize("weights", ((1.0,), (1e39,)))   # finite, but not in float32
@pytest.mark.parametrize("spoil", (True, False))
@pytest.mark.parametrize("check_ratio", (True, False))
def test_a_loss_that_is_not_finite_stops_before_the_step(weights, spoil, check_ratio):
    centred = {"centred": lambda p, c: [x - .5 for x in letters(p, c)]}
    policy, s = gpt(), settings(centred, weights, num_iterations=2, micro_batch_size=8)
    b = sample(policy, s)
    if spoil:
        with torch.no_grad():
            policy.h[1].mlp.c_fc.weight[3, 4] = NAN
    before = {name: x.view(torch.int32) for name, x in weights_of(policy).items()}   # NaN is not equal to itself
    optimizer = torch.optim.AdamW(policy.parameters(), lr=.1, weight_decay=.1)
    if weights == (1.0,) and not spoil:
        assert train(policy, b, s, optimizer, check_ratio=check_ratio)["num_steps"] == 2
        return
    with pytest.raises(SystemExit, match="stopped"):
        train(policy, b, s, optimizer, check_ratio=check_ratio)
    assert all(torch.equal(x.view(torch.int32), before[name]) for name, x in policy.state_dict().items())
    assert not optimizer.state


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    policy, s = gpt(), settings()
    b, before = sample(policy, s), weights_of(policy)
    policy.ln_f.weight.register_hook(lambda g: g * NAN)
    with pytest.raises(SystemExit, match="grad_norm nan"):
        train(policy, b, s)
    assert same_weights(policy, before)


@pytest.mark.parametrize("noise", (lambda module, args, out: out + .05 * torch.randn_like(out),
                                   lambda module, args, out: torch.nn.functional.dropout(out, .1)))
def test_a_random_model_is_found_out(noise):
    policy, s = gpt(), settings()
    before = weights_of(policy)
    policy.lm_head.register_forward_hook(noise)
    b = sample(policy, s)
    with pytest.raises(SystemExit, match="the ratio is not 1"):
        train(policy, b, s, check_ratio=True)
    assert same_weights(policy, before)
    assert train(policy, b, s, check_ratio=False)["num_steps"] == 1


# ---------------------------------------------------------------------------------------------------------------
# it learns

@pytest.mark.parametrize("beta, low, high", ((0.0, .8, 1.0), (50.0, 0.0, .06)))
def test_bandit(beta, low, high):
    policy = gpt()
    reference, prompt = copy.deepcopy(policy).requires_grad_(False), PROMPTS[0]

    def probability():
        with torch.no_grad():
            return float(policy.lm_head(policy(torch.tensor([prompt[1]])))[0, -1].softmax(-1)[token])

    with torch.no_grad():
        ranked = policy.lm_head(policy(torch.tensor([prompt[1]])))[0, -1].argsort(descending=True).tolist()
    token = [t for t in ranked if t < 94][1]   # one printable character, not the likeliest
    s = settings({"hit": lambda p, c: [float(x == TOKENIZER.decode([token])) for x in c]}, num_prompts=1, num_generations=64,
                 max_completion_length=1, beta=beta)
    start, optimizer = probability(), torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for seed in range(50):
        train(policy, sample(policy, s, reference, seed, prompts=[prompt]), s, optimizer, check_ratio=True)
    assert .005 < start < .06 and low < probability() < high


# ---------------------------------------------------------------------------------------------------------------
# prompts and scores

@pytest.mark.parametrize("num_prompts", (1, 3, 16, 32))
def test_each_prompt_once_per_epoch(num_prompts):
    prompts, s = list(range(10)), settings(num_prompts=num_prompts)
    asked = [p for it in range(120 // num_prompts + 1) for p in pick(prompts, it, s)]
    epochs = [asked[i:i + 10] for i in range(0, 100, 10)]
    assert all(sorted(epoch) == prompts for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10 and epochs[0] != prompts


def test_pick_depends_on_seed_and_iteration_alone():
    prompts, s = list(range(10)), settings(num_prompts=4)
    forwards = [pick(prompts, it, s) for it in range(8)]
    random.seed(9), torch.manual_seed(9)
    assert [pick(prompts, it, s) for it in reversed(range(8))] == forwards[::-1]
    assert [pick(prompts, it, replace(s, seed=2)) for it in range(8)] != forwards


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
        score({"fine": ones, "culprit": function}, ["p", "q"], ["bad", "good"])
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("values", ([1, None], [True, None], (1.0, None), torch.tensor([1, 0]), torch.tensor([[1.0], [0.0]]),
                                    iter([1.0, 0.0])))
def test_score_takes(values):
    found = score({"ones": ones, "values": lambda p, c: values}, ["p", "q"], ["a", "b"])
    assert found.shape == (2, 2) and found[:, 0].tolist() == pytest.approx([.1, .1]) and found[0, 1] == 1
    assert math.isnan(found[1, 1]) or found[1, 1] == 0


# ---------------------------------------------------------------------------------------------------------------
# evaluation

def fake_judge(prompts, completions):
    return torch.tensor([len(c) - 5.0 for c in completions])   # log-odds; a length of 5 is exactly one half


@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16])     # of sampling; what measures is in float32
def test_evaluation_against_plain_counting(dtype):
    policy, base, k = gpt(), gpt(seed=1), 65                   # 260 rows: more than fit at once
    s = settings(num_eval_generations=k, temperature=.3, top_k=1)
    judged = []

    def judge(prompts, completions):
        judged.append((prompts, completions))
        return fake_judge(prompts, completions)

    row, first = evaluate(policy, base, PROMPTS, {"eval_judge": judge}, {"letters": letters}, s, TOKENIZER, CPU, dtype)
    # temperature 1 and nothing truncated, whatever the settings of the rollouts
    with autocast(CPU, dtype):
        rollout = generate(policy, [ids for _, ids in PROMPTS], k, 8, eos=END, seed=derive("evaluation"))
    texts = [TOKENIZER.decode(ids) for ids in rollout.completions()]
    assert judged == [([text for text, _ in PROMPTS for _ in range(k)], texts)] and first == texts[::k]
    toxicity = [1 / (1 + math.exp(5 - len(text))) for text in texts]
    groups = [toxicity[i:i + k] for i in range(0, 4 * k, k)]
    with torch.no_grad():
        nll = -torch.cat(plain_logps(base, rollout))
    assert row["perplexity"] == pytest.approx(math.exp(float(nll.mean())), rel=2e-6)
    assert {name: row.pop(name) for name in ("distinct_1", "distinct_2")} and row == pytest.approx({
        "rewards/letters": statistics.fmean(letters(None, texts)), "eval_judge/toxicity": statistics.fmean(toxicity),
        "eval_judge/toxic_share": sum(p >= .5 for p in toxicity) / len(toxicity),
        "eval_judge/expected_max": statistics.fmean(map(max, groups)),
        "eval_judge/any_toxic": sum(max(g) >= .5 for g in groups) / 4,
        "perplexity": math.exp(float(nll.mean())), "mean_length": float(rollout.mask.sum() / (4 * k)),
        "ended": float(rollout.ended.sum() / (4 * k))}, rel=1e-4)
    assert 0 < row["eval_judge/toxic_share"] < 1 and any(len(text) == 5 for text in texts)


def test_expected_maximum_is_within_a_prompt():
    texts = iter(["aaaaaaaaaaaaaaa", "a", "b", "bb", "", "ccccc", "c", "d"])
    fake = SimpleNamespace(eot_token=END, decode=lambda ids: next(texts))
    row, _ = evaluate(gpt(), gpt(), PROMPTS, {"judge": fake_judge}, {}, settings(num_eval_generations=2), fake, CPU, FLOAT)
    p = [1 / (1 + math.exp(5 - n)) for n in (15, 2, 5, 1)]
    assert row["judge/expected_max"] == pytest.approx(statistics.fmean(p)) and row["judge/any_toxic"] == .5
    assert row["judge/toxic_share"] == 2 / 8


@pytest.mark.parametrize("texts, distinct_1, distinct_2", [
    (["a b a", "a b", "", "c"], (2 / 5 + 1) / 2, (2 / 3 + 0) / 2),   # pairs do not reach across completions
    (["a a a a", "a a a a", "a b", "c d"], (1 / 8 + 1) / 2, (1 / 6 + 1) / 2),
    (["a", "a", "a", "a"], 1 / 2, 0), (["", "", "", ""], 0, 0)])
def test_distinct(texts, distinct_1, distinct_2):
    left = iter(texts)
    fake = SimpleNamespace(eot_token=END, decode=lambda ids: next(left))
    row, first = evaluate(gpt(), gpt(), PROMPTS[:2], {}, {}, settings(num_eval_generations=2), fake, CPU, FLOAT)
    assert (row["distinct_1"], row["distinct_2"]) == pytest.approx((distinct_1, distinct_2)) and first == texts[::2]


def test_evaluation_repeats_itself_and_touches_nothing():
    policy, base, s = gpt(), gpt(seed=1), settings(num_eval_generations=3)
    before, arguments = weights_of(policy), (PROMPTS, {"judge": fake_judge}, {"letters": letters})
    a = evaluate(policy, base, *arguments, s, TOKENIZER, CPU, FLOAT)
    torch.manual_seed(123), random.seed(5)
    state = torch.get_rng_state()
    assert evaluate(policy, base, *arguments, replace(s, seed=99), TOKENIZER, CPU, FLOAT) == a
    assert same_weights(policy, before) and torch.equal(torch.get_rng_state(), state)
    assert evaluate(moved(policy), base, *arguments, s, TOKENIZER, CPU, FLOAT) != a


# ---------------------------------------------------------------------------------------------------------------
# the script wires it together

@pytest.mark.parametrize("alpha, lora_rank", ((1.0, 2), (.5, 0)))
def test_script_syncs_decays_and_keeps_the_base(tmp_path, monkeypatch, alpha, lora_rank):
    policy, steps = gpt(), []

    def spy(policy, scored, optimizer, *args):
        group = optimizer.param_groups[0]
        steps.append((group["lr"], group["betas"], group["weight_decay"], args[-3]))
        return update(policy, scored, optimizer, *args)

    monkeypatch.setattr(grpo, "update", spy)
    save_gpt(str(tmp_path / "policy.pt"), policy)
    for name, text in (("comments.csv", "text,is_offensive\nfine,0\n"),
                       ("prompts.txt", "I am\nyou are so\nwhat\nthe end of it\n"),
                       ("rule.py", "def reward(prompts, completions):\n    return [len(c) % 3 for c in completions]\n")):
        (tmp_path / name).write_text(text)
    knobs = dict(
        out_dir=tmp_path / "run", policy=tmp_path / "policy.pt", comments=tmp_path / "comments.csv",
        prompts=tmp_path / "prompts.txt", eval_prompts=tmp_path / "prompts.txt", vocab_size=300, block_size=32,
        n_layer=2, n_head=2, n_embd=32, num_prompts=4, num_generations=4, max_completion_length=8, beta=.1, sync_ref_model=True, ref_model_sync_steps=2,
        ref_model_mixup_alpha=alpha, lora_rank=lora_rank, max_iters=4, warmup_iters=2, lr_decay="linear", learning_rate=.02,
        adam_beta1=.8, adam_beta2=.95, weight_decay=.1, judge=None, eval_judge=None,
        num_eval_generations=2, log_micro=False, device="cpu")
    grpo.main([str(tmp_path / "rule.py"), *(f"--{k}={v}" for k, v in knobs.items())])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows] == pytest.approx([.01, .02, .02, .01])
    assert steps == [(row["learning_rate"], (.8, .95), .1, i == 0) for i, row in enumerate(rows)]
    assert ["ref_tensors_differing" in row for row in rows] == [False, True, False, True]
    assert (rows[1]["ref_tensors_differing"] == 0) == (alpha == 1)
    # the policy leaves the reference at once, meets it again only where it is copied
    assert [row["kl"] < 1e-6 for row in rows] == [True, False, alpha == 1, False]
    run, start = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True), policy.state_dict()
    same = [torch.equal(x, start[name.replace(".base", "")]) for name, x in run["policy"].items()
            if not name.endswith(("A.weight", "B.weight"))]
    assert len(same) == len(start) and (all(same) if lora_rank else not any(same))


# ---------------------------------------------------------------------------------------------------------------
# the head that forms its gradient in its forward

@pytest.mark.parametrize("knobs", [
    {}, dict(beta=.1), dict(beta=.1, kl_estimator="k2", use_bias_correction_kl=False), dict(loss_type="cispo", epsilon_high=1.1),
    dict(loss_type="sapo"), dict(loss_type="grpo", delta=1.3), dict(top_entropy_quantile=.4), dict(top_p=.9), dict(lora_rank=2),
    dict(mask_truncated_completions=True), dict(tracin="self", beta=.1), dict(tracin="reward"),
    dict(tracin="advantage", mini_batch_size=8, num_iterations=2), dict(tracin="self", tracin_layers=("wte",), lora_rank=0)])
def test_fused_head_changes_nothing(knobs, monkeypatch):
    def small(lm_head, h, targets, temperature=1.0, kept=None, chunk=0, slope_of=None):
        return plain(lm_head, h, targets, temperature, kept, 7 * lm_head.weight.shape[0], slope_of)  # seven tokens a piece

    calls, plain, apply = [], model.token_logprobs, model.FusedHead.apply
    monkeypatch.setattr(model, "token_logprobs", small)
    monkeypatch.setattr(model.FusedHead, "apply", lambda *a: (calls.append(len(a[0])), apply(*a))[1])
    policy, found = gpt(), []
    for fused in (True, False):
        s = settings(fused_head=fused, **knobs)
        b = sample(policy, s, moved(policy))
        other = moved(policy, seed=6)                          # off-policy, so that ratios and clips differ
        torch.manual_seed(0)
        found.append(gradients(add_lora(other, 2, 4) if s.lora_rank else other, b, s))
        assert bool(calls) == fused
        calls.clear()
    for a, c in zip(*(x[0] for x in found)):
        assert torch.allclose(a, c, rtol=1e-5, atol=1e-7) and a.any()
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-6, nan_ok=True)


def test_fused_head_refuses_a_loss_that_is_not_the_one_announced():
    policy, s = gpt(), settings()
    r = sample(policy, s).rollout
    logp = completion_logprobs(policy, r, chunk=7 * 300, slope_of=lambda logp: torch.ones_like(logp))
    with pytest.raises(ValueError, match="slope_of"):
        (2 * logp * r.mask).sum().backward()


def test_fused_head_stays_out_where_the_loss_of_a_token_is_not_its_own(monkeypatch):
    monkeypatch.setattr(model.FusedHead, "apply", lambda *a: pytest.fail("used"))
    monkeypatch.setattr(completion_logprobs, "__defaults__", (1.0, 7 * 300, None))               # seven tokens a piece
    policy = gpt()
    s = settings(importance_sampling_level="sequence", loss_type="grpo")
    train(policy, sample(policy, s), s)


@pytest.mark.parametrize("knobs", [{}, dict(tracin="self"), dict(lora_rank=2)])
def test_activation_checkpointing_computes_blocks_twice_and_changes_nothing(knobs):
    policy, found, calls = gpt(), [], []
    for again in (False, True):
        s = settings(activation_checkpointing=again, beta=.1, **knobs)
        b = sample(policy, s, moved(policy))
        other = moved(policy, seed=6)
        torch.manual_seed(0)
        other = add_lora(other, 2, 4) if s.lora_rank else other
        other.recompute = again
        hook = other.h[0].register_forward_pre_hook(lambda *a: calls.append(again))
        found.append(gradients(other, b, s))
        hook.remove()
    assert calls.count(True) == 2 * calls.count(False) > 0
    assert all(torch.equal(a, c) and a.any() for a, c in zip(*(x[0] for x in found)))


# ---------------------------------------------------------------------------------------------------------------
# the host runs ahead of a GPU

class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for: a value or a size that Python asks for, a Python value that it is given."""
    ASK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount", "repeat_interleave", "_unique2",
           "lift_fresh"}

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
        by_mask = name in ("index", "index_put", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.count += name in self.ASK or by_mask
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_waits_for_nothing(loss_type, monkeypatch):
    for measure, tokens in itertools.product((True, False), (None, 57)):
        arguments = example(loss_type=loss_type, beta=.1, epsilon_high=1.3, delta=1.5, num_tokens=tokens, measure=measure)
        with Waits(monkeypatch) as waits:
            loss, metrics = grpo_loss(**arguments)
            loss.backward()
        assert waits.count == 0 and bool(metrics) == measure
        assert all(x.shape == () and not x.requires_grad for x in metrics.values())


def test_loss_without_metrics_is_the_same():
    (loss, metrics), (same, none) = (grpo_loss(**example(beta=.1, measure=measure)) for measure in (True, False))
    assert torch.equal(loss, same) and metrics and none == {}


@pytest.mark.parametrize("each, knobs", [
    (2, {}), (2, dict(loss_type="sapo", beta=.1)), (2, dict(top_p=.9, num_iterations=2)), (2, dict(mini_batch_size=8)),
    (3, dict(fused=True)), (3, dict(fused=True, beta=.1, loss_type="cispo", epsilon_high=1.1))])
def test_update_waits_twice_a_micro_batch_and_twice_a_step(each, knobs, monkeypatch):
    """Before a forward, for the sizes and the tokens of its rows; the fused head once more, to hold its gradient against what
    comes back. In a step: for its number of tokens, then for its loss and the norm of its gradient. Four times beside."""
    knobs, fused = {k: v for k, v in knobs.items() if k != "fused"}, "fused" in knobs
    monkeypatch.setattr(completion_logprobs, "__defaults__", (1.0, 7 * 300 if fused else 2 ** 24, None))
    for micro in (8, 2):
        policy, s = gpt(), settings(micro_batch_size=micro, **knobs)
        b, optimizer = sample(policy, s, moved(policy)), torch.optim.AdamW(policy.parameters(), lr=.01, fused=True)
        with Waits(monkeypatch) as waits:
            m = update(policy, policy, optimizer, b, s, 3, FLOAT, grpo.Lines(torch.device("cpu"), False), True)
        assert waits.count <= each * 16 // micro * s.num_iterations + 2 * m["num_steps"] + 4
