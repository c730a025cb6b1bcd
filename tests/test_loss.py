"""
Advantages and loss in depth: against losses that TRL computes, and every knob against loops in
plain Python. test_algorithm.py is the short version, for reading.
"""
import itertools
import math
import statistics

import pytest
import torch

from grpo import group_advantages
from common.variants import variants_of
from judge.rewards import total_reward
from loss import kl_estimate
from run.settings import Settings
from worlds import assert_near, generator_of, gradient, loss_of_rows

NAN, INF = math.nan, math.inf
SCALES = ("group", "batch", "none")

# every value of a setting that is here, so that a new one is tested without a word
LOSSES = ("dapo", *variants_of("loss_type"))
LEVELS = ("token", *variants_of("importance_sampling_level"))
every_loss = pytest.mark.parametrize("loss_type", LOSSES)
# the losses that plain_loss spells out: one that you add has its own, or a line there
every_spelled_loss = pytest.mark.parametrize("loss_type", [x for x in LOSSES if x in (
    "dapo", "bnpo", "cispo", "dr_grpo", "grpo", "sapo")])
every_level = pytest.mark.parametrize("level", LEVELS)


def level_of(level):
    """The setting, which is one of extras/variants."""
    return {} if level == "token" else {"importance_sampling_level": level}


# ------------------------------------------------------------------------------------------------
# rewards and advantages

def plain_advantages(rewards, G, scale):
    """Advantages in plain Python; NaN: nobody scored the row."""
    known = [r for r in rewards if not math.isnan(r)]
    out = []
    for start in range(0, len(rewards), G):
        rows = rewards[start:start + G]
        group = [r for r in rows if not math.isnan(r)]
        spread = {"group": group, "batch": known, "none": []}[scale]
        std = statistics.stdev(spread) if len(spread) > 1 else 0
        divisor = 1 if scale == "none" else std + 1e-4
        for r in rows:
            if math.isnan(r) or max(group) == min(group):
                out.append(0.0)
            else:
                out.append((r - statistics.fmean(group)) / divisor)
    return out


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_against_plain_python(scale):
    for groups in ("1 0 3 3.5   2 2 2 2   -1 5 0 0", "nan 3 nan nan   1 2 3 4",
                   ".1 nan .7 .2   nan nan nan nan   1 1 nan 1", "0 0 0 1e-3   5 5 5 nan"):
        rewards = [float(x) for x in groups.split()]
        found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 4, scale)
        assert found.tolist() == pytest.approx(plain_advantages(rewards, 4, scale), abs=1e-12)


def test_an_abstention_counts_as_the_functions_mean_over_the_group():
    """And as nothing where the whole group has none."""
    scores = torch.tensor([[1.0, 2.0], [NAN, 2.0], [3.0, NAN], [NAN, NAN],
                           [1.0, NAN], [2.0, NAN], [3.0, NAN], [NAN, NAN]])
    found = total_reward(scores, (2.0, -1.0), 4).tolist()
    assert found == pytest.approx([0.0, 2.0, 4.0, NAN, 2.0, 4.0, 6.0, NAN], nan_ok=True)


def test_a_function_of_weight_0_changes_nothing():
    """To the bit, wherever it stands, also where it alone knows a row."""
    g = generator_of(5)
    for place in (0, 1, 2):
        scores = torch.randn(24, 2, generator=g).double()
        scores = scores.masked_fill(torch.rand(24, 2, generator=g) < .3, NAN)
        watched = torch.randn(24, 1, generator=g).double() * 1e3
        more = torch.cat([scores[:, :place], watched, scores[:, place:]], 1)
        weights = [.7, -.2]
        weights.insert(place, 0)
        total, found = total_reward(scores, (.7, -.2), 4), total_reward(more, weights, 4)
        assert torch.equal(found.nan_to_num(-9), total.nan_to_num(-9)), "it changes the reward"


@pytest.mark.parametrize("weights, scores", [
    ((.1, .7, .3, .1), [(0, 300, 0, 100), (100, 0, 700, 0)]),
    ((.1, .2, -.3), [(1, 1, 1), (.3, .3, .3), (1e6, 1e6, 1e6)]),     # the terms cancel
    ((1e8,), [(.1 + .2,), (.3,)])])
def test_sums_that_are_equal_but_for_rounding_teach_nothing(weights, scores):
    for order in itertools.permutations(scores):
        rows = torch.tensor([*order, *order], dtype=torch.float64)
        total = total_reward(rows, weights, len(rows))
        assert len(set(total.tolist())) == 1
        assert not group_advantages(total, len(rows)).any()


def test_a_large_number_that_all_rewards_have_in_common_hides_nothing():
    rewards = torch.arange(1.0, 5).double()
    far = total_reward(1e8 + rewards[:, None], (1.0,), 4)
    assert_near(group_advantages(far, 4), group_advantages(rewards, 4))


# ------------------------------------------------------------------------------------------------
# the loss: an example with losses as TRL's own code computes them

LOGP = [[-1.0, -.5, -2.0, -.1], [-1.5, -.7], [-.3, -1.2, -.9], [-2.0]]
OLD = [[-1.1, -.9, -2.0, -.1], [-1.2, -.6], [-.3, -1.6, -.8], [-1.5]]
REF = [[-1.2, -.6, -1.8, -.2], [-1.4, -.9], [-.5, -1.1, -1.0], [-1.8]]
REWARDS = torch.tensor([1, 0, 3, 3.5], dtype=torch.float64)
COLUMNS = [dict(), dict(beta=.04, use_bias_correction_kl=False),
           dict(beta=.04, use_bias_correction_kl=True), dict(delta=1.3), dict(epsilon_high=.28),
           dict(importance_sampling_level="sequence")]
TABLE = """
grpo     .068692  .069246  .069164  .062343  .064153  .045048
dapo     .165871  .166366  .166346  .155712  .160423  .140468
bnpo     .165871  .166366  .166346  .155712  .160423  .140468
dr_grpo  .069113  .069319  .069311  .064880  .066843  .058528
"""


def padded(rows):
    return torch.tensor([row + [0.0] * (4 - len(row)) for row in rows], dtype=torch.float64)


def test_the_example_has_the_losses_of_trl():
    losses = [("cispo", dict(epsilon_high=1.3), -.100753), ("sapo", dict(), .003302),
              ("sapo", dict(importance_sampling_level="sequence"), .004329)]
    for line in TABLE.strip().splitlines():
        loss_type, *values = line.split()
        losses += [(loss_type, knobs, float(x)) for knobs, x in zip(COLUMNS, values, strict=True)]
    mask = torch.arange(4) < torch.tensor([[4], [2], [3], [1]])
    for loss_type, knobs, value in losses:
        found = float(loss_of_rows(
            padded(LOGP), padded(OLD), group_advantages(REWARDS, 4), mask, padded(REF),
            loss_type=loss_type, max_completion_length=6, **knobs).total)
        assert found == pytest.approx(value, abs=6e-7), (
            f"the {loss_type} loss of the example with {knobs} is {found:.6f}, TRL's is {value}")


# ------------------------------------------------------------------------------------------------
# the loss: a token at a time

def plain_loss(logp, old, advantages, mask, ref, policy_mask, cfg, num_rows, num_tokens):
    high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    total = 0.0
    for i, A in enumerate(advantages):
        tokens = mask[i].nonzero()[:, 0]
        for t in tokens:
            log_ratio = logp[i, t] - old[i, t]
            if cfg.importance_sampling_level == "sequence":
                log_ratio = (logp[i, tokens] - old[i, tokens]).mean()
            ratio = log_ratio.exp()
            if cfg.loss_type == "cispo":
                objective = ratio.detach().clamp(max=high) * A * logp[i, t]
            elif cfg.loss_type == "sapo":
                tau = cfg.sapo_temperature_pos if A > 0 else cfg.sapo_temperature_neg
                objective = 4 / tau * (tau * (ratio - 1)).sigmoid() * A
            else:
                clipped = ratio.clamp(1 - cfg.epsilon, 1 + high)
                objective = torch.min(ratio.clamp(max=cfg.delta or INF) * A, clipped * A)
            loss = -objective * policy_mask[i, t]
            if cfg.beta:
                d = ref[i, t] - logp[i, t]
                kl = {"k1": -d, "k2": d ** 2 / 2, "k3": d.exp() - 1 - d}[cfg.kl_estimator]
                own = (logp[i, t] - old[i, t]).exp()    # at sequence level too
                loss = loss + cfg.beta * kl * (own if cfg.use_bias_correction_kl else 1)
            by_row = num_rows * len(tokens)
            divisor = {"grpo": by_row, "sapo": by_row, "dapo": num_tokens, "cispo": num_tokens,
                       "dr_grpo": num_rows * cfg.max_completion_length,
                       "bnpo": mask.sum() * num_rows / len(logp)}[cfg.loss_type]
            total = total + loss / divisor
    return total


def random_rows():
    """Eight rows with holes in their masks, one of them empty, in which every branch of the clip
    occurs at both levels: logp, old, advantages, mask, ref, policy_mask."""
    g = generator_of(3)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    old = -1.5 + .5 * noise(8, 7)
    # no token leaves its row's side of the clip: log 1.3 is .26, log .8 is -.22
    ratio = .4 * torch.rand(8, 7, generator=g, dtype=torch.float64) - .2
    logp = old + ratio + torch.tensor([.5, -.5, .1, 0, -.1, .5, 0, -.4])[:, None]
    mask = torch.rand(8, 7, generator=g) < .7
    mask[:, 0] = True
    mask[6] = False
    advantages = torch.tensor([1.2, -.7, .4, -1.1, .9, -.6, .5, .8], dtype=torch.float64)
    policy_mask = torch.rand(8, 7, generator=g) < .4
    policy_mask[:, 0] = True
    ref = logp + .3 * noise(8, 7)
    return logp.requires_grad_(), old, advantages, mask, ref.detach(), policy_mask


CLIP = itertools.product((None, 1.3), (None, .28), ("k3",), (False,), (0.0,), (False, True))
KL = itertools.product((None,), (None,), ("k1", "k2", "k3"), (False, True), (.1,), (False,))
CASES = [*CLIP, *KL]        # delta, epsilon_high, kl_estimator, its correction, beta, policy_mask


@every_level
@every_spelled_loss
def test_the_loss_against_plain_python(loss_type, level):
    """With policy_mask at sequence level too: it takes tokens out of the sum, and the ratio of the
    others is still that of the whole row."""
    logp, *data, policy_mask = random_rows()
    seen = set()
    for delta, high, estimator, corrected, beta, masked in CASES:
        knobs = dict(
            loss_type=loss_type, importance_sampling_level=level, beta=beta,
            delta=None if loss_type in ("cispo", "sapo") else delta,    # these have no clip
            epsilon_high=(high or 0) + 1 if loss_type == "cispo" else high,
            kl_estimator=estimator, use_bias_correction_kl=corrected, max_completion_length=9,
            sapo_temperature_neg=2.0, sapo_temperature_pos=.5)
        some = policy_mask if masked else torch.ones_like(policy_mask)
        found = loss_of_rows(logp, *data, some if masked else None, 11, 57, **knobs).total
        expected = plain_loss(logp, *data, some, Settings(**knobs), 11, 57)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-7), (
            f"the loss with {knobs} is {found:.7f}, token by token {expected:.7f}")
        assert torch.allclose(gradient(found, [logp]), gradient(expected, [logp]), atol=1e-7), (
            f"the gradient of the loss with {knobs} is not that of the loss token by token")
        seen.add(round(float(found.detach()), 9))
    if loss_type not in ("cispo", "sapo"):
        assert len(seen) == len(CASES), "a setting makes no difference: rows of another kind?"


@every_level
@every_loss
def test_nothing_reads_what_stands_under_the_mask(loss_type, level):
    logp, old, advantages, mask, ref, policy_mask = random_rows()
    plain = loss_of_rows(logp, old, advantages, mask, ref, policy_mask & mask, loss_type=loss_type,
                         **level_of(level), beta=.1, epsilon_high=.3).total
    found = []
    for garbage in (0.0, -7.0, NAN, INF, -INF):
        x = logp.detach().masked_fill(~mask, garbage).requires_grad_()
        others = [y.masked_fill(~mask, -garbage) for y in (old, ref)]
        loss = loss_of_rows(
            x, others[0], advantages, mask, others[1], policy_mask | ~mask, loss_type=loss_type,
            **level_of(level), beta=.1, epsilon_high=.3).total
        slope = gradient(loss, [x])
        assert not slope[~mask.flatten()].any(), "a token without loss has a gradient"
        found.append(torch.cat([loss[None], slope]).detach())
        assert_near(found[-1], found[0], atol=1e-12)
        assert_near(loss, plain, what="a loss that counts what stands under the mask", atol=1e-12)


@every_level
@every_spelled_loss
def test_no_log_ratio_overflows(loss_type, level):
    """Of policy to sampler, and of reference to policy, in float32. A clip takes a token out as
    ever, and one that is to become less likely still does."""
    on = torch.ones(1, 2, dtype=torch.bool)
    high = 2.0 if loss_type == "cispo" else None
    for now, before, ref in ((-1.0, -150.0, -1.0), (-150.0, -1.0, -1.0), (-150.0, -150.0, -1.0)):
        for A in (1.0, 0.0, -1.0):
            logp = torch.full((1, 2), now).requires_grad_()
            loss = loss_of_rows(
                logp, torch.full((1, 2), before), torch.tensor([A]), on, torch.full((1, 2), ref),
                loss_type=loss_type, **level_of(level), beta=0.1, epsilon_high=high)
            slope, = torch.autograd.grad(loss.policy, logp, retain_graph=True)
            assert loss.total.isfinite() and gradient(loss.total, [logp]).isfinite().all(), (
                f"log-probs {now}, {before}, {ref} and the advantage {A} give no finite gradient")
            if A == 0 or (now > before and A > 0 and loss_type not in ("cispo", "sapo")):
                assert not slope.any(), "a token that is clipped, or has no advantage, moves"
            if now > before and A < 0 and loss_type != "sapo":
                assert (slope > 0).all(), "a token that should become less likely does not"



# ------------------------------------------------------------------------------------------------
# the KL

def completions_by_table(table):
    """Every completion of two tokens by a policy by table (4, 3): row 0 has the logits of the first
    token, row 1 + i those behind token i -> log-probs (9, 2)."""
    logp = table.log_softmax(1)
    return torch.stack([torch.stack([logp[0, i], logp[1 + i, j]])
                        for i in range(3) for j in range(3)])


def kl_by_table(table, ref, old):
    """The KL of the policy to the reference, (), over the prefixes that the sampler wrote."""
    logp = table.log_softmax(1)
    by_prefix = (logp.exp() * (logp - ref.log_softmax(1))).sum(1)               # (4,)
    reached = torch.cat([torch.ones(1, dtype=torch.float64), old.softmax(1)[0]])
    return (reached * by_prefix).sum()


def mean_over_completions(tables, **knobs):
    """Means over what the sampler writes, of the KL in the loss (with gradient) and in the log."""
    logp, old_logp, ref_logp = map(completions_by_table, tables)
    on = torch.ones(1, 2, dtype=torch.bool)
    in_loss = in_log = 0.0
    for i, weight in enumerate(old_logp.sum(1).exp()):
        loss = loss_of_rows(logp[[i]], old_logp[[i]], torch.zeros(1), on, ref_logp[[i]],
                            num_tokens=1, beta=1.0, **knobs)
        in_loss = in_loss + weight * loss.kl
        in_log += weight * loss.kl_by_token.sum()
    return in_loss, in_log


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    d = torch.tensor([-8.0, -1, -1e-4, 0, 1e-4, 1, 8])
    k3 = kl_estimate(torch.zeros(7), d, Settings())
    assert (k3 >= 0).all() and k3[3] == 0
    assert k3[4] == pytest.approx(5e-9, rel=.05)


@pytest.mark.parametrize("moved", (0.0, 0.7))
@every_level
def test_the_kl_is_the_kl_over_all_completions_of_a_table(level, moved):
    """With its correction k1 and k3 have the value and the gradient of the KL, after a step too.
    Without it k1 and k3 have the value on fresh rollouts, and k2 the gradient. What is logged is
    the KL with either."""
    g = generator_of(8)
    old, ref, step = torch.randn(3, 4, 3, generator=g, dtype=torch.float64)
    table = (old + moved * step).requires_grad_()
    right = kl_by_table(table, ref, old)
    slope = gradient(right, [table])
    for estimator, corrected in (("k1", True), ("k3", True), ("k1", False), ("k2", False),
                                 ("k3", False)):
        knobs = dict(kl_estimator=estimator, use_bias_correction_kl=corrected,
                     importance_sampling_level=level)
        found, logged = mean_over_completions((table, old, ref), **knobs)
        if estimator != "k2":
            assert_near(logged.detach(), right.detach(), 1e-9)
        if corrected or not moved and estimator != "k2":
            assert_near(found.detach(), right.detach(), 1e-9)
        if corrected or not moved and estimator == "k2":
            assert_near(gradient(found, [table]), slope, 1e-9)
