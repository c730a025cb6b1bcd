"""
Influence inside GRPO: targets, selection, the step, what is logged and said. The tape itself:
test_tracin.py.
"""
import contextlib
import copy
import functools
import gc
import json
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from config import load_settings
from data.prompts import Prompt
from grpo import Step, update
from model import (
    GPT, GPTConfig, add_lora, completion_entropies, completion_logprobs, completion_states)
from run.files import save_gpt
from run.metrics import batch_metrics, influence_metrics
from run.report import describe_cost, diagnose_influence
from run.script import BadInput, seed_for
from test_grpo import (
    FLOAT, gpt, moved, nets_of, same_weights, sample, settings, weights_of, without)
from selection import choose_targets, select, target_coefficients
from tracin import Tape
from waits import Waits

MANY = [Prompt(text, ids, {}) for text, ids in (
    ("a", [3, 4]), ("b", [5]), ("c", [9, 8, 7]), ("d", [2, 2]), ("e", [11]), ("f", [6, 1]),
    ("g", [13, 3]), ("h", [20]))]
# a row's loss is a multiple of its log-prob
UNIT = dict(kl_in="reward", kl_estimator="k1", beta=.1)
SHARE = {"contracted": 0.0}    # of the memory that 16 gradients need


def trained(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def tape_of(policy, way):
    memory = 16 * sum(p.numel() * p.element_size() for p in trained(policy))
    return Tape(policy, memory=SHARE[way] * memory, fewest=0)


def step(policy, batch, cfg, optimizer=None, target=None, lr=.05, way="contracted", dtype=FLOAT,
         first=False):
    """grpo.update -> the gradient {parameter: tensor} of each of its steps, and its metrics. The
    weights move."""
    optimizer = optimizer or torch.optim.SGD(trained(policy), lr=lr)
    seen, plain = [], optimizer.step

    def spy():
        seen.append({p: p.grad.clone() for p in policy.parameters() if p.grad is not None})
        plain()

    optimizer.step = spy
    nets = nets_of(policy, cfg, optimizer=optimizer, dtype=dtype)
    metrics = update(nets, batch, target, cfg, 3, first=first)
    return seen, metrics


def flat(gradient, policy):
    return torch.cat([gradient[p].flatten() for p in trained(policy)])


def split(x, policy):
    """A flat vector over all weights -> [(parameter, its part)]."""
    parameters = list(policy.parameters())
    parts = x.split([p.numel() for p in parameters])
    return [(p, part.view_as(p)) for p, part in zip(parameters, parts)]


def flat_grad(loss, policy, **more):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained(policy), **more)])


def row_gradients(policy, batch, cfg):
    """Gradient of each row's part of what influence scores, one autograd backward each: (N,
    weights). With tracin_kl = "all" the policy's part, which is what is left without the rest."""
    cfg = without_rest(cfg)
    nets = nets_of(policy, replace(cfg, tracin="off"))
    N = len(batch.loss_mask)
    whole = Step(0, torch.arange(N), N, int(batch.loss_mask.sum()))
    losses = (grpo.loss_of(nets, policy, batch, torch.tensor([i]), whole, cfg).total
              for i in range(N))
    return torch.stack([flat_grad(loss, policy) for loss in losses])


def without_rest(cfg):
    beta = 0.0 if cfg.kl_in_loss else cfg.beta
    return replace(cfg, beta=beta, entropy_coef=0.0, value_coef=0.0)


def rest_gradient(policy, batch, cfg, rows=None):
    """Gradient of what all rows (or these) keep with tracin_kl = "all": KL, entropy and the
    critic's loss, written out on the sampler's weights. 0 with "kept"."""
    mask = batch.loss_mask.float()
    if rows is not None:
        mask = mask * torch.zeros(len(mask), 1).index_fill(0, torch.as_tensor(rows), 1)
    share = {       # of each token in the mean
        "dapo": torch.ones_like(mask) / batch.loss_mask.sum(),
        "grpo": torch.ones_like(mask) / batch.loss_mask.sum(1, keepdim=True).clamp(min=1) / len(mask),
        "dr_grpo": torch.ones_like(mask) / len(mask) / cfg.max_completion_length}[cfg.loss_type]
    logp = completion_logprobs(policy, batch.rollout, cfg.temperature)
    rest = 0.0 * logp.sum()
    if cfg.kl_in_loss:
        d = (batch.ref_logp - logp) * batch.loss_mask
        kl = d.exp() - 1 - d        # k3
        if cfg.corrects_kl:
            kl = kl * (logp - logp.detach()).exp()
        rest = rest + cfg.beta * (kl * share * mask).sum()
    if cfg.entropy_coef:
        entropies = completion_entropies(policy, batch.rollout, cfg.temperature)
        rest = rest - cfg.entropy_coef * (entropies * mask).sum() / batch.loss_mask.sum()
    if cfg.critic:
        h, _, _, where = completion_states(policy, batch.rollout)
        errors = (policy.value_head(h) - batch.returns[where]).square() / 2
        rest = rest + cfg.value_coef * (errors * (share * mask)[where]).sum()
    return flat_grad(rest, policy, materialize_grads=True)


def target_gradient(policy, batch, rows, cfg):
    """Gradient of the target loss of some rows of a batch, by autograd."""
    if cfg.tracin == "self":
        cfg = without_rest(cfg)
        nets = nets_of(policy, replace(cfg, tracin="off"))
        whole = Step(0, rows, len(rows), int(batch.loss_mask[rows].sum()))
        loss = grpo.loss_of(nets, policy, batch, rows, whole, cfg).total
    else:
        coef = target_coefficients(cfg.tracin, batch.rewards[rows], batch.advantages[rows])
        logp = completion_logprobs(policy, batch.rollout[rows], cfg.temperature)
        loss = (coef * logp.sum(1)).sum()
    return flat_grad(loss, policy)


def close(a, b, tolerance=2e-4):
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def with_lora(policy):
    for name, p in add_lora(policy, 2, 8.0).named_parameters():
        if name.endswith("B.weight"):
            generator = torch.Generator().manual_seed(p.numel())
            torch.nn.init.normal_(p, std=.1, generator=generator)
    return policy


# ------------------------------------------------------------------------------------------------
# influence and step, exact

ROWS = dict(kl=dict(beta=.1), unit=UNIT, clipped=dict(beta=.1, loss_type="grpo", epsilon=.1),
            entropy=dict(beta=.1, entropy_coef=.05))
TARGETS = ("self", "reward", "advantage", "contrastive")


@functools.cache
def sampled(knobs, lora):
    """(batch, held-out batch, gradient of each row of the first, that of what all rows keep)"""
    policy = with_lora(gpt()) if lora else gpt()
    cfg, reference = settings(micro_batch_size=8, **ROWS[knobs]), moved(gpt())
    batch = sample(policy, cfg, reference)
    held_out = sample(policy, cfg, reference, seed=8)
    rest = rest_gradient(policy, batch, cfg)
    return batch, held_out, row_gradients(policy, batch, cfg), rest


@pytest.mark.parametrize("lora, way", (
    (False, "contracted"), (True, "contracted")))
@pytest.mark.parametrize("held", (False, True))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knobs", ROWS)
def test_influence_and_step_against_one_backward_per_row(target, knobs, held, lora, way):
    policy = with_lora(gpt()) if lora else gpt()
    cfg = settings(tracin=target, micro_batch_size=8, **ROWS[knobs])
    batch, held_out, g, rest = sampled(knobs, lora)
    batch = copy.copy(batch)
    chosen = torch.tensor([0, 3, 4, 9, 10, 15])
    G = target_gradient(policy, *((held_out, chosen) if held else (batch, torch.arange(16))), cfg)
    seen, m = step(policy, batch, cfg, target=(held_out, chosen) if held else None, way=way)
    assert close(batch.influence, g @ G) and m["tracin/invariant_error"] < 1e-5
    kept = (batch.influence > 0).float()
    assert torch.equal(batch.weights, kept) and kept.sum() > 2
    assert close(flat(seen[0], policy), kept @ g + rest)
    assert m["tracin/target_grad_norm"] == pytest.approx(float(G.norm()), rel=1e-4)


@pytest.mark.parametrize("way", SHARE)
@pytest.mark.parametrize("target, knobs", (
    ("self", dict(beta=.1)), ("reward", UNIT),
    ("advantage", UNIT), ("reward", dict(beta=.1, entropy_coef=.05))))
def test_leave_one_out(target, knobs, way):
    policy, cfg = gpt(), settings(tracin=target, **knobs)
    batch = sample(policy, cfg, moved(gpt()))
    g = row_gradients(policy, batch, cfg)
    before = copy.deepcopy(policy)
    step(policy, batch, cfg)
    own = torch.ones(16)
    if target != "self":    # as a multiple of g_i
        coef = target_coefficients(target, batch.rewards, batch.advantages)
        own = coef * -batch.loss_mask.sum() / batch.advantages
    own_part = own * g.square().sum(1)
    expected = batch.influence - own_part
    step(before, batch, replace(cfg, tracin_leave_one_out=True), way=way)
    assert close(batch.influence, expected, 1e-3)
    assert own_part.abs().max() > .1 * expected.abs().max()


def test_off_is_plain_grpo_bit_for_bit_and_all_is_within_rounding():
    cfg = settings(num_iterations=2, mini_batch_size=8, micro_batch_size=4, beta=.1,
                   speed=without("sort"))
    policies = [gpt() for _ in range(3)]
    batch = sample(policies[0], cfg, moved(gpt()))
    rows, hand = torch.arange(16), policies[0]
    nets = nets_of(hand, cfg)
    optimizer = torch.optim.AdamW(hand.parameters(), lr=cfg.learning_rate)
    for epoch in range(2):  # the loop of GRPO written out
        generator = torch.Generator().manual_seed(seed_for(3, epoch))
        rows = rows[torch.randperm(16, generator=generator)]
        for mini in rows.split(8):
            whole = Step(epoch, mini, 8, int(batch.loss_mask[mini].sum()))
            for micro in mini.split(4):
                grpo.loss_of(nets, hand, batch, micro, whole, cfg).total.backward()
            torch.nn.utils.clip_grad_norm_(hand.parameters(), math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    for policy, way in zip(policies[1:], ("off", *SHARE)):
        optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate)
        knobs = dict(tracin="off") if way == "off" else dict(tracin="self", tracin_select="all")
        knobs = replace(cfg, **knobs)
        nets = nets_of(policy, knobs, optimizer=optimizer)
        update(nets, batch, None, knobs, 3)
    assert same_weights(policies[1], weights_of(hand))
    assert not same_weights(gpt(), weights_of(hand))
    for policy in policies[2:]:
        # Adam divides by sqrt(v): where a gradient is 0 but for rounding, a step of the size of the
        # learning rate may differ
        gaps = [(p - q).detach().abs().flatten()
                for p, q in zip(policy.parameters(), hand.parameters())]
        assert float(torch.cat(gaps).quantile(.99)) < 1e-5


# ------------------------------------------------------------------------------------------------
# what must not matter

@pytest.fixture
def doubles(monkeypatch):
    """float64 from end to end; log-probs are float32 otherwise, whatever the model is."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MEMORY_KNOBS = {
    "self": dict(tracin="self", beta=.1), "lora": dict(tracin="self"),
    "one backward": dict(tracin="reward", **UNIT),
    "two backwards": dict(tracin="reward", beta=.1),
    "leave one out": dict(tracin="self", tracin_leave_one_out=True),
    "held out": dict(tracin="contrastive", tracin_val_prompts=4),
    "adam, layers": dict(tracin="advantage", tracin_adam=True, tracin_layers=("h.1", "ln_f")),
    "steps": dict(tracin="self", mini_batch_size=8, num_iterations=2, tracin_normalizer="kept",
                  tracin_select="drop"),
    "drop": dict(tracin="advantage", zero_std_groups="drop", tracin_select="top",
                 tracin_fraction=.3)}


def ranks(x):
    return x.argsort().argsort().double()


def spearman(a, b):
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def test_bfloat16_in_both_ways():
    exact = None
    for dtype, way in ((FLOAT, "contracted"), *((torch.bfloat16, way) for way in SHARE)):
        policy, cfg = gpt(), settings(tracin="reward", num_prompts=8, **UNIT)
        batch = sample(policy, cfg, moved(gpt()), prompts=MANY)
        _, m = step(policy, batch, cfg, lr=0.0, way=way, dtype=dtype)
        exact = batch.influence.clone() if exact is None else exact
        same_sign = batch.influence.sign() == exact.sign()
        assert spearman(batch.influence, exact) > .98 and same_sign.float().mean() > .9
        assert m["tracin/invariant_error"] < 5e-2
        assert "invariant" not in diagnose_influence(m, cfg, torch.bfloat16)
    assert not torch.equal(batch.influence, exact)


@pytest.mark.parametrize("way", SHARE)
@pytest.mark.parametrize("held", (False, True))
def test_a_row_that_is_not_a_number_stops_before_the_step(way, held):
    policy, cfg = gpt(), settings(tracin="self", beta=.1)
    batch = sample(policy, cfg, moved(gpt()))
    held_out, before = copy.deepcopy(batch), weights_of(policy)
    batch.advantages[5] = math.nan
    target = (held_out, torch.arange(16)) if held else None
    with pytest.raises(SystemExit, match="influence is not finite"):
        step(policy, batch, cfg, target=target, way=way)
    assert same_weights(policy, before)


# ------------------------------------------------------------------------------------------------
# the target, the selection

def cosine(a, b):
    return float(a @ b / a.norm() / b.norm())


@pytest.mark.parametrize("held, way", (
    (False, "contracted"), (True, "contracted")))
@pytest.mark.parametrize("target, knobs", (
    ("self", dict(beta=.1)), ("reward", UNIT), ("advantage", dict(beta=.1))))
@pytest.mark.parametrize("prompts, halves", (
    (1, (range(0, 8, 2), range(1, 8, 2))), (2, (range(4), range(4, 8))),
    (5, (range(8), range(8, 20)))))
def test_the_target_is_halved_by_prompt(prompts, halves, target, knobs, held, way):
    """Its noise is the cosine of two gradients that share no prompt; with one prompt, of every
    other rollout."""
    cfg = settings(tracin=target, num_prompts=prompts, num_generations=8 if prompts == 1 else 4,
                   **knobs)
    batch, t = (sample(gpt(), cfg, moved(gpt()), seed=seed, prompts=MANY[:prompts])
                for seed in (7, 8))
    n = len(batch.loss_mask)
    rows = torch.arange(n)
    if held:
        rows = rows.roll(3)     # the target's rows come in any order
    else:
        t = batch
    if held and prompts == 1:
        halves = [[(i - 3) % n for i in half] for half in halves]
    policy = gpt()
    if target == "self":
        alone = row_gradients(policy, t, cfg)
    else:
        logp = completion_logprobs(policy, t.rollout, cfg.temperature).sum(1)
        losses = target_coefficients(target, t.rewards, t.advantages) * logp
        alone = torch.stack([flat_grad(x, policy, retain_graph=True) for x in losses])
    _, m = step(policy, batch, cfg, target=(t, rows) if held else None, way=way)
    expected = cosine(*(alone[list(half)].sum(0) for half in halves))
    assert m["tracin/target_cosine"] == pytest.approx(expected, abs=1e-4)
    assert m["tracin/target_grad_norm"] == pytest.approx(float(alone.sum(0).norm()), rel=1e-4)
    every_other = cosine(alone[::2].sum(0), alone[1::2].sum(0))
    assert abs(expected - every_other) > 1e-3 or prompts == 1


def test_select():
    x = torch.tensor([3.0, -1, 0, 2, -5, 1, -2, -.5, -.1, -.2])

    def kept(*args, **more):
        return select(x, *args, **more)[0].nonzero()[:, 0].tolist()

    assert kept("positive") == [0, 3, 5] and kept("all") == list(range(10))
    assert kept("top", .2) == [0, 3] and kept("bottom") == [1, 4, 6]
    assert kept("drop", 1.0) == [0, 2, 3, 5] and kept("drop", .34) == [0, 1, 2, 3, 5, 7, 8, 9]
    drawn = {tuple(kept("random", generator=torch.Generator().manual_seed(i))) for i in range(20)}
    assert all(len(rows) == 3 for rows in drawn) and len(drawn) > 10
    few = torch.tensor([-float(i) for i in range(1, 21)])
    keep, fallback = select(few, "positive")
    assert fallback and keep.tolist() == [True] * 10 + [False] * 10
    few[19] = few[18] = 1.0   # one in ten
    assert not select(few, "positive")[1]
    assert select(x, "top", 0.0)[0].sum() == 0


def test_choose_targets_and_coefficients():
    rewards, g = torch.tensor([.1, .9, .5, .7, .3, .2]), torch.Generator().manual_seed(1)
    assert choose_targets(rewards, 2, "best", g).tolist() == [1, 3]
    assert choose_targets(rewards, 2, "worst", g).tolist() == [5, 0]
    assert sorted(choose_targets(rewards, 4, "balanced", g).tolist()) == [0, 1, 3, 5]
    assert sorted(choose_targets(rewards, 0, "random", g).tolist()) == list(range(6))
    assert len(set(choose_targets(rewards, 3, "random", g).tolist())) == 3
    coef = target_coefficients("reward", rewards, rewards)
    assert coef.sum().abs() < 1e-6 and coef.argmin() == 1
    assert float(coef.std()) == pytest.approx(1 / 6, rel=1e-3)
    advantages = torch.arange(6.0)
    assert torch.equal(target_coefficients("advantage", rewards, advantages), -advantages / 6)
    coef = target_coefficients("contrastive", rewards, rewards)
    assert (coef * 6).tolist() == [1, -1, -1, -1, 1, 1]


def test_layers_normalizer_and_adam():
    cfg = settings(tracin="reward", **UNIT)
    batch = sample(gpt(), cfg, moved(gpt()))
    found = {}
    for name, knobs in dict(plain={}, layers=dict(tracin_layers=("mlp",)),
                            kept=dict(tracin_normalizer="kept"),
                            adam=dict(tracin_adam=True)).items():
        policy = gpt()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        g = row_gradients(policy, batch, cfg)
        for p, x in split(g.sum(0), policy):
            p.grad = x + .1 * x.abs().mean()
        before = [p.detach().clone() for p in policy.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, x in zip(policy.parameters(), before):
                p.copy_(x)
        seen, m = step(policy, batch, replace(cfg, **knobs), optimizer)
        found[name] = batch.influence.clone(), batch.weights.clone(), seen[0]
        G = target_gradient(gpt(), batch, torch.arange(16), cfg)
        if name == "layers":
            part = torch.cat([torch.full((p.numel(),), float("mlp" in n))
                              for n, p in policy.named_parameters()])
            assert close(batch.influence, g @ (G * part))
        if name == "adam":
            assert not close(batch.influence, g @ G, .01)
    kept = found["kept"][0] > 0
    share = float(batch.loss_mask.sum() / (batch.loss_mask.sum(1) * kept).sum())
    assert torch.allclose(found["kept"][1], found["plain"][1] * share) and share > 1
    for p, q in zip(found["kept"][2].values(), found["plain"][2].values()):
        assert torch.allclose(p, share * q, atol=1e-6)


def warmed(policy, start, cfg):
    """AdamW with a state like that of a running training: it has seen other batches."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    others = []
    for seed in range(5):
        batch = sample(policy, cfg, moved(gpt()), seed=seed, prompts=MANY)
        others.append(row_gradients(policy, batch, cfg).sum(0))
    for i in range(300):
        for p, x in split(others[i % 5], policy):
            p.grad = x
        optimizer.step()
    for p, q in zip(policy.parameters(), start.parameters()):
        p.data.copy_(q.data)
    return optimizer


def test_counterfactual(capsys):
    """Influence against the true change of the target's loss when the same step is taken without
    the row."""
    cfg = settings(tracin="reward", num_prompts=8, **UNIT)
    start = gpt()
    batch = sample(start, cfg, moved(gpt()), prompts=MANY)
    found = {}
    for name, adam in (("sgd", False), ("adam", False), ("adam, aware", True)):
        base = copy.deepcopy(start)
        g = row_gradients(base, batch, cfg)
        if name == "sgd":
            optimizer, lr = torch.optim.SGD(base.parameters(), lr=1e-3), 1e-3
        else:
            optimizer, lr = warmed(base, start, cfg), 1e-4
        state = copy.deepcopy(optimizer.state_dict())

        def like_it(policy, lr):
            other = type(optimizer)(policy.parameters(), lr=lr)
            other.load_state_dict(copy.deepcopy(state))
            return other

        def target_after(weights):
            policy = copy.deepcopy(base)
            other = like_it(policy, lr)
            for p, x in split(weights @ g, policy):
                p.grad = x
            other.step()
            coef = target_coefficients("reward", batch.rewards, batch.advantages)
            with torch.no_grad():
                logp = completion_logprobs(policy, batch.rollout).double()
            return float((coef * logp.sum(1)).sum())

        full = target_after(torch.ones(32))
        without_row = [torch.ones(32).index_fill(0, torch.tensor(i), 0) for i in range(32)]
        change = torch.tensor([target_after(weights) - full for weights in without_row])
        policy = copy.deepcopy(base)
        step(policy, batch, replace(cfg, tracin_adam=adam), like_it(policy, 0.0))
        found[name] = spearman(batch.influence, change)
    with capsys.disabled():
        print("\nSpearman of influence and true change:",
              {k: round(v, 4) for k, v in found.items()})
    assert found["sgd"] > .99
    assert found["adam, aware"] > .98 > found["adam"] > .85


# ------------------------------------------------------------------------------------------------
# steps

def soft(influence):
    """Weights of all kinds: above 1, between, 0 and below 0."""
    return [(0.0, .25, 1.0, 1.5, -.5)[i % 5] for i in range(len(influence))]


@pytest.mark.parametrize("normalizer", ("all", "kept"))
@pytest.mark.parametrize("loss_type", ("dapo", "grpo", "dr_grpo"))
@pytest.mark.parametrize("how", ("top", "weigh"))
def test_later_passes_weigh_the_rows_as_the_first(how, loss_type, normalizer):
    policy, own = gpt(), {"weigh": soft} if how == "weigh" else {}
    cfg = settings(tracin="self", num_iterations=3, micro_batch_size=16, loss_type=loss_type,
                   beta=.1, entropy_coef=.05, tracin_normalizer=normalizer)
    cfg = replace(cfg, tracin_select=how, functions=cfg.functions | own).check()
    batch = sample(policy, cfg, moved(gpt()))
    g = row_gradients(policy, batch, cfg)
    seen, _ = step(policy, batch, cfg, lr=0.0)      # the weights stay, so all passes are alike
    share = torch.tensor(soft(g)) if own else (batch.weights > 0).float()
    units = batch.loss_mask.sum(1) if loss_type == "dapo" else torch.ones(16)
    factor = float(units.sum() / (units * share.abs()).sum()) if normalizer == "kept" else 1.0
    assert torch.allclose(batch.weights, share * factor) and 0 < (share != 0).sum() < 16
    assert len(seen) == 3
    rest = rest_gradient(policy, batch, cfg)
    for gradient in seen:
        assert close(flat(gradient, policy), (share * factor) @ g + rest)


@pytest.mark.parametrize("way", SHARE)
@pytest.mark.parametrize("knobs", (dict(beta=.1), UNIT))
def test_a_function_of_the_config_file_as_target(knobs, way):
    """It is called with policy, tokenizer and batch; rows that raise its number have positive
    influence."""
    given, policy = [], gpt()

    def target(policy, tokenizer, batch):
        given.append((tokenizer, batch))
        logits = policy.lm_head(policy(torch.tensor([[3, 1, 4, 1, 5, 9]])))
        return logits.log_softmax(-1)[0, :, 7].mean()

    cfg = settings(micro_batch_size=8, **knobs)
    cfg = replace(cfg, tracin="target", functions=cfg.functions | {"target": target}).check()
    batch = sample(policy, cfg, moved(gpt()))
    g = row_gradients(policy, batch, cfg)
    G = -flat_grad(target(policy, None, None), policy)
    seen, m = step(policy, batch, cfg, way=way, first=True)
    assert given[-1][0] is nets_of(policy, cfg).tokenizer and given[-1][1] is batch
    assert close(batch.influence, g @ G) and m["tracin/invariant_error"] < 1e-5
    kept = (batch.influence > 0).float()
    assert close(flat(seen[0], policy), kept @ g + rest_gradient(gpt(), batch, cfg))
    before = float(target(gpt(), None, None).detach())
    assert float(target(policy, None, None).detach()) > before, "the step must raise the number"
    assert m["tracin/target_grad_norm"] == pytest.approx(float(G.norm()), rel=1e-4)
    assert "tracin/target_cosine" not in m and not diagnose_influence(m, cfg, FLOAT).keys() & {
        "noise", "contrast"}, "nothing is made up about a target that has no halves"


@pytest.mark.parametrize("number, said", (
    (3.0, "tensor"), (torch.zeros(2, requires_grad=True), "one finite number"),
    (torch.tensor(1.0), "depends on the policy"),
    (torch.tensor(math.nan, requires_grad=True), "one finite number")))
def test_a_target_that_returns_something_else_is_told(number, said):
    cfg = settings()
    functions = cfg.functions | {"target": lambda policy, tokenizer, batch: number}
    cfg = replace(cfg, tracin="target", functions=functions).check()
    batch = sample(gpt(), cfg)
    with pytest.raises(SystemExit, match=f"target returned.*{said}"):
        step(gpt(), batch, cfg)


@pytest.mark.parametrize("weights", ([1.0] * 15, [math.nan] * 16, 1.0))
def test_weights_that_are_not_a_number_a_row_are_told(weights):
    cfg = settings()
    functions = cfg.functions | {"weigh": lambda influence: weights}
    cfg = replace(cfg, tracin="self", tracin_select="weigh", functions=functions).check()
    batch = sample(gpt(), cfg)
    with pytest.raises(SystemExit, match="weigh returned"):
        step(gpt(), batch, cfg)


@pytest.mark.parametrize("name, setting", (("target", "tracin"), ("weigh", "tracin_select")))
def test_a_function_that_raises_is_one_line_and_its_own_traceback(name, setting, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(f"tracin = 'self'\n{setting} = {name!r}\ndef {name}(*given):\n    1 / 0\n")
    function = load_settings([str(config)]).functions[name]
    with pytest.raises(BadInput) as e:
        function(None)
    assert str(e.value) == f"{name} raised ZeroDivisionError: division by zero"
    note, = e.value.__notes__
    assert "1 / 0" in note and "script.py" not in note, "only the function's own lines"


@pytest.mark.parametrize("knobs, said", (
    (dict(tracin="target"), "defines no function target"),
    (dict(tracin="self", tracin_select="weigh"), "defines no function weigh"),
    (dict(tracin="self", loss_type="bnpo", num_iterations=2), "divides by the rows at hand")))
def test_a_function_that_is_missing_is_named(knobs, said):
    with pytest.raises(BadInput, match=said):
        settings(**knobs)


def test_nothing_selected_is_no_step():
    policy = gpt()
    cfg = settings(tracin="self", tracin_select="top", tracin_fraction=0.0, num_iterations=2)
    batch = sample(policy, cfg)
    before = weights_of(policy)
    seen, m = step(policy, batch, cfg)
    assert not seen and m["num_steps"] == 0 and same_weights(policy, before)
    assert "empty" in diagnose_influence(m, cfg, FLOAT)


# ------------------------------------------------------------------------------------------------
# what is said

def test_diagnoses_of_real_batches():
    prompts = MANY[:1] * 8
    cfg = settings(tracin="reward", num_prompts=8, num_generations=4)
    batch, t = (sample(gpt(), cfg, seed=seed, prompts=prompts) for seed in (7, 9))

    def said(cfg, chosen=None):
        _, m = step(gpt(), batch, cfg, target=None if chosen is None else (t, chosen))
        return diagnose_influence(m | batch_metrics(batch, cfg), cfg, FLOAT)

    best = choose_targets(t.rewards, 4, "best", None)
    assert "contrast" in said(cfg, best) and "contrast" not in said(cfg, torch.arange(32))
    alike = replace(t, rewards=torch.full((32,), .5))
    _, m = step(gpt(), batch, cfg, target=(alike, torch.arange(32)))
    assert "contrast" in diagnose_influence(m, cfg, FLOAT)
    about_self = said(replace(cfg, tracin="self"))
    assert "self" in about_self and "noise" in about_self
    opposite = replace(batch, rewards=1 - batch.rewards)   # it wants what training drives away
    _, m = step(gpt(), batch, cfg, target=(opposite, torch.arange(32)))
    assert m["tracin/positive_ratio"] < .5


FINE = {"tracin/selected_ratio": .5, "tracin/empty_steps": 0, "tracin/fallback": 0.0,
        "tracin/positive_ratio": .5, "tracin/target_contrast": 1.0, "tracin/target_cosine": .5,
        "tracin/target_rows": 64, "tracin/self_share": .1, "tracin/invariant_error": 1e-7}


@pytest.mark.parametrize("change, kind", (
    ({"tracin/fallback": 1.0}, "fallback"), ({"tracin/invariant_error": .01}, "invariant"),
    ({"tracin/target_cosine": .05}, "noise"), ({"tracin/self_share": .6}, "self"), ({}, None)))
def test_diagnoses_of_metrics(change, kind):
    found = diagnose_influence(FINE | change, settings(), FLOAT)
    assert list(found) == ([kind] if kind else [])


def test_a_target_that_wants_the_opposite_is_said_and_the_better_half_is_kept():
    """Training and target disagree on every rollout: the target is the same batch with its rewards
    turned round."""
    policy, cfg = gpt(), settings(tracin="advantage", tracin_val_prompts=4, **UNIT)
    batch = sample(policy, cfg, moved(policy))
    opposite = replace(batch, rewards=-batch.rewards, advantages=-batch.advantages)
    _, m = step(policy, batch, cfg, target=(opposite, torch.arange(16)), lr=0.0)
    assert m["tracin/positive_ratio"] < 0.1 and m["tracin/fallback"] == 1
    moved_rows = batch.influence != 0
    kept = batch.weights > 0
    assert int(kept.sum()) == (int(moved_rows.sum()) + 1) // 2
    assert batch.influence[kept].min() >= batch.influence[~kept & moved_rows].max()
    line = diagnose_influence(m | {"tracin/empty_steps": 0}, cfg, FLOAT)["fallback"]
    share = f"{100 * m['tracin/positive_ratio']:.0f}"
    assert line.startswith(f"only {share} % of the rollouts have positive influence")


@pytest.mark.parametrize("knobs, forwards, backwards, said", (
    (dict(tracin="self", beta=.1), 1, 2, "1 forward and 1 backward serve"),
    (dict(tracin="reward", beta=.1), 1, 2, "1 forward and 1 backward serve"),
    (dict(tracin="reward", **UNIT), 1, 1, "1 forward and 1 backward serve")))
def test_the_cost_that_is_printed_is_paid(knobs, forwards, backwards, said, monkeypatch):
    policy, cfg = gpt(), settings(micro_batch_size=16, **knobs)
    batch, calls, backward = sample(policy, cfg, moved(gpt())), [], torch.Tensor.backward

    def counted(x, *given, **more):
        calls.append(1)
        return backward(x, *given, **more)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    passed = []
    policy.h[0].register_forward_pre_hook(lambda *given: passed.append(1))
    step(policy, batch, cfg)
    assert (len(passed), len(calls)) == (forwards, backwards)
    text = cost_of(cfg, 10 ** 6)
    assert said in text
    assert ("and 1 backward for the KL" in text) == (cfg.two_parts and forwards < backwards)


def cost_of(cfg, num_weights):
    return describe_cost(cfg)


def test_the_cost_of_a_held_out_target_is_said():
    text = cost_of(settings(tracin="reward", tracin_val_prompts=8, tracin_val_size=10), 1)
    assert "32 held-out rollouts" in text and ", 10 of them" in text


ALL = "of which tracin_memory lets all be kept"


def lose_record(tape):
    tape.records.pop()


def lose_kept(tape):
    # without the first micro-batch
    tape.row_grads = {(p, i): g for (p, i), g in tape.row_grads.items() if i > 0}


@pytest.mark.parametrize("way, lose", (
    ("contracted", lose_record),))
def test_the_first_step_is_checked_against_an_ordinary_backward(way, lose, monkeypatch):
    cfg = settings(tracin="self", beta=.1, micro_batch_size=8)
    batch = sample(gpt(), cfg, moved(gpt()))

    def error(first):
        _, m = step(gpt(), batch, cfg, lr=0.0, way=way, first=first)
        return m["tracin/invariant_error"]

    assert error(True) < 1e-5
    leave = Tape.__exit__

    def leave_and_lose(tape, *error):
        leave(tape, *error)
        lose(tape)

    monkeypatch.setattr(Tape, "__exit__", leave_and_lose)
    assert error(False) < 1e-5      # the tape by itself cannot know
    with pytest.raises(SystemExit, match="do not add up to the product of ordinary gradients"):
        error(True)


def test_tf32_has_the_bound_of_bfloat16_for_influences(monkeypatch):
    leave = Tape.__exit__

    def leave_with_rounding(tape, *error):
        leave(tape, *error)
        tape.records = [r._replace(b=1.01 * r.b) for r in tape.records]

    monkeypatch.setattr(Tape, "__exit__", leave_with_rounding)

    def first_step(**knobs):
        cfg = settings(tracin="self", beta=.1, **knobs)
        return step(gpt(), sample(gpt(), cfg, moved(gpt())), cfg, lr=0.0, first=True)

    with pytest.raises(SystemExit, match="do not add up"):
        first_step()
    assert first_step(allow_tf32=True)
    rough = FINE | {"tracin/invariant_error": .01}
    assert "invariant" not in diagnose_influence(rough, settings(allow_tf32=True), FLOAT)


# ------------------------------------------------------------------------------------------------
# what a step costs a GPU: waits, launches, memory

class Launches(TorchDispatchMode):
    """Counts the operations inside that a GPU would be told to do: all but views."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.total += not op.is_view
        return op(*args, **kwargs or {})


def recorded_step(layers, way="contracted", held=False, counter=None, **knobs):
    """(Influence that has recorded a step of 64 rows as it would on a GPU, the step's batch,
    held-out target or None)."""
    torch.manual_seed(0)
    policy = GPT(GPTConfig(300, 32, layers, 2, 32))
    cfg = settings(num_prompts=8, num_generations=8, micro_batch_size=16, **knobs)
    nets = nets_of(policy, cfg)
    for p in nets.trained:
        p.grad = torch.ones_like(p)
    nets.optimizer.step()       # tracin_adam needs moments
    nets.optimizer.zero_grad()
    influence = nets.influence
    batch = sample(policy, cfg, moved(policy), prompts=MANY)
    target = None
    if held:
        target = sample(policy, cfg, moved(policy), seed=8, prompts=MANY), torch.arange(0, 64, 3)
    whole = Step(0, torch.arange(64), 64, int(batch.loss_mask.sum()))
    pieces = list(grpo.micro_batches(batch.lengths[whole.rows], cfg))
    with counter or contextlib.nullcontext():
        with influence.record(batch, whole, True):
            for positions in pieces:
                influence.forward_backward(positions)
    return influence, batch, target


STEPS = {
    "self": dict(tracin="self", beta=.1), "reward": dict(tracin="reward", **UNIT),
    "held out": dict(tracin="reward", held=True, beta=.1),
    "leave one out": dict(tracin="self", tracin_leave_one_out=True, beta=.1),
    "adam": dict(tracin="self", tracin_adam=True, tracin_leave_one_out=True, beta=.1)}


@pytest.mark.parametrize("way", ("contracted",))
@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_a_gpu_a_fixed_number_of_times(name, way):
    found = []
    for layers in (2, 12):
        waits = Waits()
        influence, _, target = recorded_step(layers, way, counter=waits, **STEPS[name])
        with waits:
            kept = influence.keep_helpful(target, seed=0, check=False)
            influence_metrics(kept, influence.nets)
        found.append({line: n for line, n in waits.lines.items()
                      if line.startswith(("tracin.py", "run/metrics.py"))})
    few, many = (sum(lines.values()) for lines in found)
    assert few == many, f"the waits grow with the layers: {found}"
    assert many <= 40, f"{many} waits of influence in a step: {found[1]}"


@pytest.mark.parametrize("way, most", (("contracted", 800),))
def test_launches_of_a_layer_are_few(way, most):
    """Of a layer with 12 parameters, in 4 micro-batches: target, scores, norms of 4 rows, step."""
    found = []
    for layers in (2, 12):
        influence, *_ = recorded_step(layers, way, **STEPS["self"])
        with Launches() as launches:
            kept = influence.keep_helpful(None, seed=0, check=False)
            influence_metrics(kept, influence.nets)
        found.append(launches.total)
    each = (found[1] - found[0]) / 10
    assert each <= most, f"{each} launches for each layer"


# ------------------------------------------------------------------------------------------------
# whole runs

@pytest.mark.parametrize("name", (
    "toxicity_tracin", "toxicity_tracin_lora", "tracin_16_best", "tracin_128_random"))
def test_configs_load(name):
    assert load_settings([f"config/{name}.py"]).tracin != "off"


def run_of(folder, policy, rule, eval_prompts, prompts, **knobs):
    """Runs grpo.py in a tiny world of files; rule: the reward function's last line."""
    save_gpt(str(folder / "policy.pt"), policy)
    files = {"comments.csv": "text,is_offensive\nfine,0\n", "prompts.txt": prompts,
             "eval.txt": eval_prompts,
             "rule.py": f"def reward(prompts, completions):\n    return {rule}\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    knobs = dict(
        policy=folder / "policy.pt", comments=folder / "comments.csv",
        prompts=folder / "prompts.txt", eval_prompts=folder / "eval.txt", vocab_size=300,
        block_size=32, n_layer=2, n_head=2, n_embd=32, num_prompts=4, num_generations=4,
        max_iters=2, judge=None, eval_judge=None, num_eval_prompts=1, num_eval_generations=2,
        log_micro=False, device="cpu", tracin="reward") | knobs
    grpo.main([str(folder / "rule.py"), *(f"--{k}={v}" for k, v in knobs.items())])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_logs_influence_and_weight(tmp_path, capsys):
    def run(num_eval_prompts):
        run_of(tmp_path, gpt(), "[len(c) % 3 for c in completions]", "the end of it\nand now\nso\n",
               "I am\nyou are so\nwhat\n", out_dir=tmp_path / "run", max_completion_length=8,
               num_eval_prompts=num_eval_prompts, tracin_val_prompts=2)

    run(1)
    rows, metrics = (read(tmp_path / "run" / f"{name}.jsonl") for name in ("samples", "metrics"))
    assert len(rows) == 32
    assert all((row["weight"] > 0) == (row["influence"] > 0) for row in rows)
    names = ("positive_ratio", "negative_ratio", "mean_ip", "std_ip", "min_ip", "max_ip",
             "selected_ratio", "self_share", "target_grad_norm", "target_loss", "invariant_error",
             "target_rows")
    assert all(f"tracin/{name}" in row for row in metrics for name in names)
    positive = sum(row["influence"] > 0 for row in rows[:16])
    assert metrics[0]["tracin/positive_ratio"] == positive / 16
    with pytest.raises(BadInput, match="tracin_val_prompts"):
        run(3)
