"""Influence inside GRPO: targets, selection, the step, what is logged and said. The tape itself: test_tracin.py."""
import copy
import functools
import json
import math
from dataclasses import replace

import pytest
import torch

import grpo
from config import load_settings
from run.report import describe_batch
from grpo import loss_of, update
from run.script import BadInput
from model import add_lora, completion_logprobs
from run.files import save_gpt
from tracin import Tape, adam_scale, choose_targets, select, target_coefficients
from run.report import describe_cost, diagnose_influence
from test_grpo import FLOAT, gpt, letters, moved, quiet, sample, same_weights, settings, weights_of

MANY = [("a", [3, 4]), ("b", [5]), ("c", [9, 8, 7]), ("d", [2, 2]), ("e", [11]), ("f", [6, 1]), ("g", [13, 3]), ("h", [20])]
UNIT = dict(kl_in="reward", kl_estimator="k1", beta=.1)   # the loss of a row is a multiple of its log-prob
SHARE = {"contracted": 0.0, "kept": 1.0, "mixed": 0.4}    # of the memory that the gradients of 16 rows need


def tape_of(policy, way):
    memory = 16 * sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    return Tape(policy, memory=SHARE[way] * memory, fewest=0)


def step(policy, b, s, optimizer=None, held_out=None, lr=.05, way="contracted"):
    """(the gradient that update steps with, metrics), the weights moved."""
    optimizer = optimizer or torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=lr)
    seen, plain = [], optimizer.step

    def spy():
        seen.append({p: p.grad.clone() for p in policy.parameters() if p.grad is not None})
        plain()

    optimizer.step = spy
    m = update(policy, policy, optimizer, b, s, 3, FLOAT, quiet, False, held_out, tape_of(policy, way))
    return seen, m


def row_gradients(policy, b, s):
    """Gradient of each row's part of the loss, one autograd backward each: (N, weights)."""
    parameters, tokens = [p for p in policy.parameters() if p.requires_grad], int(b.mask.sum())
    return torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(
        loss_of(policy, b, torch.tensor([i]), s, FLOAT, len(b.mask), tokens)[0], parameters)]) for i in range(len(b.mask))])


def target_gradient(policy, t, rows, s):
    """Gradient of the target loss of some rows of a batch, by autograd."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if s.tracin == "self":
        loss = loss_of(policy, t, rows, s, FLOAT, len(rows), int(t.mask[rows].sum()))[0]
    else:
        rho = target_coefficients(s.tracin, t.rewards[rows], t.advantages[rows])
        loss = (rho * completion_logprobs(policy, t.rollout[rows], s.temperature).sum(1)).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def close(a, b, tolerance=2e-4):
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def with_lora(policy):
    for name, p in add_lora(policy, 2, 8.0).named_parameters():
        if name.endswith("B.weight"):
            torch.nn.init.normal_(p, std=.1, generator=torch.Generator().manual_seed(p.numel()))
    return policy


ROWS = dict(kl=dict(beta=.1), unit=UNIT, clipped=dict(beta=.1, loss_type="grpo", epsilon=.1))


@functools.cache
def sampled(knobs, lora):
    """(batch, held-out batch, gradient of each row of the first)"""
    policy, s, reference = with_lora(gpt()) if lora else gpt(), settings(micro_batch_size=8, **ROWS[knobs]), moved(gpt())
    b, t = sample(policy, s, reference), sample(policy, s, reference, seed=8)
    return b, t, row_gradients(policy, b, s)


@pytest.mark.parametrize("lora, way", ((False, "contracted"), (True, "contracted"), (False, "kept"), (True, "mixed")))
@pytest.mark.parametrize("held", (False, True))
@pytest.mark.parametrize("target", ("self", "reward", "advantage", "contrastive"))
@pytest.mark.parametrize("knobs", ROWS)
def test_influence_and_step_against_one_backward_per_row(target, knobs, held, lora, way):
    policy, s = with_lora(gpt()) if lora else gpt(), settings(tracin=target, micro_batch_size=8, **ROWS[knobs])
    b, t, g = copy.copy(sampled(knobs, lora)[0]), *sampled(knobs, lora)[1:]
    chosen = torch.tensor([0, 3, 4, 9, 10, 15])
    G = target_gradient(policy, *((t, chosen) if held else (b, torch.arange(16))), s)
    seen, m = step(policy, b, s, held_out=(t, chosen) if held else None, way=way)
    assert close(b.influence, g @ G) and m["tracin/invariant_error"] < 1e-5
    kept = (b.influence > 0).float()
    assert torch.equal(b.weights, kept) and kept.sum() > 2
    assert close(torch.cat([seen[0][p].flatten() for p in policy.parameters() if p.requires_grad]), kept @ g)
    assert m["tracin/target_grad_norm"] == pytest.approx(float(G.norm()), rel=1e-4)


@pytest.mark.parametrize("way", SHARE)
@pytest.mark.parametrize("target, knobs", (("self", dict(beta=.1)), ("reward", UNIT), ("advantage", UNIT)))
def test_leave_one_out(target, knobs, way):
    policy, s = gpt(), settings(tracin=target, **knobs)
    b = sample(policy, s, moved(gpt()))
    g = row_gradients(policy, b, s)
    before = copy.deepcopy(policy)
    step(policy, b, s)
    own = torch.ones(16)
    if target != "self":
        own = target_coefficients(target, b.rewards, b.advantages) * -b.mask.sum() / b.advantages   # as a multiple of g_i
    expected = b.influence - own * g.square().sum(1)
    step(before, b, replace(s, tracin_leave_one_out=True), way=way)
    assert close(b.influence, expected, 1e-3) and (own * g.square().sum(1)).abs().max() > .1 * expected.abs().max()


def test_leave_one_out_needs_to_know_the_own_part():
    with pytest.raises(BadInput, match="tracin_leave_one_out"):
        settings(tracin="reward", beta=.1, tracin_leave_one_out=True)


def test_off_is_plain_grpo_bit_for_bit_and_all_is_within_rounding():
    s = settings(num_iterations=2, mini_batch_size=8, micro_batch_size=4, beta=.1, sort_by_length=False)
    policies = [gpt() for _ in range(5)]
    b = sample(policies[0], s, moved(gpt()))
    rows, hand = torch.arange(16), policies[0]
    optimizer = torch.optim.AdamW(hand.parameters(), lr=s.learning_rate)
    for epoch in range(2):  # the loop of GRPO written out
        rows = rows[torch.randperm(16, generator=torch.Generator().manual_seed(grpo.derive(3, epoch)))]
        for mini in rows.split(8):
            for micro in mini.split(4):
                loss_of(hand, b, micro, s, FLOAT, 8, int(b.mask[mini].sum()))[0].backward()
            torch.nn.utils.clip_grad_norm_(hand.parameters(), math.inf)
            optimizer.step(), optimizer.zero_grad(set_to_none=True)
    for policy, way in zip(policies[1:], ("off", *SHARE)):
        optimizer = torch.optim.AdamW(policy.parameters(), lr=s.learning_rate)
        knobs = dict(tracin="off") if way == "off" else dict(tracin="self", tracin_select="all")
        update(policy, policy, optimizer, b, replace(s, **knobs), 3, FLOAT, quiet, False,
               recorder=None if way == "off" else tape_of(policy, way))
    assert same_weights(policies[1], weights_of(hand)) and not same_weights(gpt(), weights_of(hand))
    for policy in policies[2:]:
        # Adam divides by sqrt(v): where a gradient is 0 but for rounding, a step of the size of the learning rate may differ
        gap = torch.cat([(p - q).detach().abs().flatten() for p, q in zip(policy.parameters(), hand.parameters())])
        assert float(gap.quantile(.99)) < 1e-5


@pytest.fixture
def doubles(monkeypatch):
    """float64 from end to end; log-probs are float32 otherwise, whatever the model is."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MEMORY_KNOBS = {
    "self": dict(tracin="self", beta=.1), "lora": dict(tracin="self"), "one backward": dict(tracin="reward", **UNIT),
    "two backwards": dict(tracin="reward", beta=.1), "leave one out": dict(tracin="self", tracin_leave_one_out=True),
    "held out": dict(tracin="contrastive", tracin_val_prompts=4),
    "adam, layers": dict(tracin="advantage", tracin_adam=True, tracin_layers=("h.1", "ln_f")),
    "steps": dict(tracin="self", mini_batch_size=8, num_iterations=2, tracin_normalizer="kept", tracin_select="drop"),
    "drop": dict(tracin="advantage", zero_std_groups="drop", tracin_select="top", tracin_fraction=.3)}


@pytest.mark.parametrize("name", MEMORY_KNOBS)
@pytest.mark.parametrize("dtype, tolerance", ((torch.float32, 1e-5), (torch.float64, 1e-10)))
def test_memory_changes_nothing_but_the_way(name, dtype, tolerance, request):
    """Influence, weights, every step's gradient and metrics."""
    if dtype == torch.float64:
        request.getfixturevalue("doubles")
    s = replace(settings(**MEMORY_KNOBS[name]), micro_batch_size=5)   # uneven
    start = with_lora(gpt()) if name == "lora" else gpt()
    b, t = sample(start, s, moved(gpt())), sample(start, s, moved(gpt()), seed=8)
    if name == "drop":
        b.rewards[4:8], b.advantages[4:8] = .5, 0.0
    found = {}
    for way in SHARE:
        policy = copy.deepcopy(start)
        optimizer = (torch.optim.AdamW if "adam" in name else torch.optim.SGD)(policy.parameters(), lr=.05)
        seen, m = step(policy, b, s, optimizer, (t, torch.arange(9)) if name == "held out" else None, way=way)
        seen = [torch.cat([g.flatten() for g in G.values()]) for G in seen]
        found[way] = b.influence.clone(), b.weights.clone(), seen, m
        share = m.pop("tracin/kept_gradients")
        assert share == 0 if way == "contracted" else .95 < share <= 1 if way == "kept" else .1 < share < .95
        assert seen[0].dtype == dtype and len(seen) == (4 if name == "steps" else 1)
    influence, weights, seen, m = found["contracted"]
    assert influence.isnan().sum() == (4 if name == "drop" else 0) and 0 < weights.sum()
    for other in (found["kept"], found["mixed"]):
        assert close(other[0].nan_to_num(), influence.nan_to_num(), tolerance) and torch.equal(other[1] > 0, weights > 0)
        assert close(other[1], weights, tolerance) and all(map(close, other[2], seen, [tolerance] * len(seen)))
        assert other[3].keys() == m.keys() and m["tracin/invariant_error"] < tolerance
        for k in m:
            assert other[3][k] == pytest.approx(m[k], rel=20 * tolerance, abs=20 * tolerance, nan_ok=True), k


def test_bfloat16_in_both_ways():
    exact = None
    for dtype, way in ((FLOAT, "contracted"), *((torch.bfloat16, way) for way in SHARE)):
        policy, s = gpt(), settings(tracin="reward", num_prompts=8, **UNIT)
        b = sample(policy, s, moved(gpt()), prompts=MANY)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        m = update(policy, policy, optimizer, b, s, 3, dtype, quiet, False, None, tape_of(policy, way))
        exact = b.influence.clone() if exact is None else exact
        assert spearman(b.influence, exact) > .98 and (b.influence.sign() == exact.sign()).float().mean() > .9
        assert m["tracin/invariant_error"] < 5e-2 and "invariant" not in diagnose_influence(m, replace(s, dtype="bfloat16"))
    assert not torch.equal(b.influence, exact)


@pytest.mark.parametrize("way", SHARE)
@pytest.mark.parametrize("held", (False, True))
def test_a_row_that_is_not_a_number_stops_before_the_step(way, held):
    policy, s = gpt(), settings(tracin="self", beta=.1)
    b = sample(policy, s, moved(gpt()))
    t, before = copy.deepcopy(b), weights_of(policy)
    b.advantages[5] = math.nan
    with pytest.raises(SystemExit, match="influence is not finite"):
        step(policy, b, s, held_out=(t, torch.arange(16)) if held else None, way=way)
    assert same_weights(policy, before)


def cosine(a, b):
    return float(a @ b / a.norm() / b.norm())


@pytest.mark.parametrize("held, way", ((False, "contracted"), (False, "kept"), (True, "contracted")))
@pytest.mark.parametrize("target, knobs", (("self", dict(beta=.1)), ("reward", UNIT), ("advantage", dict(beta=.1))))
@pytest.mark.parametrize("prompts, halves", ((1, (range(0, 8, 2), range(1, 8, 2))), (2, (range(4), range(4, 8))),
                                             (5, (range(8), range(8, 20)))))
def test_the_target_is_halved_by_prompt(prompts, halves, target, knobs, held, way):
    """Its noise is the cosine of two gradients that share no prompt; with one prompt, of every other rollout."""
    s = settings(tracin=target, num_prompts=prompts, num_generations=8 if prompts == 1 else 4, **knobs)
    b, t = (sample(gpt(), s, moved(gpt()), seed=seed, prompts=MANY[:prompts]) for seed in (7, 8))
    n = len(b.mask)
    rows, t = (torch.arange(n).roll(3), t) if held else (torch.arange(n), b)  # the target's rows come in any order
    if held and prompts == 1:
        halves = [[(i - 3) % n for i in half] for half in halves]
    policy = gpt()
    if target == "self":
        alone = row_gradients(policy, t, s)
    else:
        logp = completion_logprobs(policy, t.rollout, s.temperature).sum(1)
        alone = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(x, [*policy.parameters()], retain_graph=True)])
                             for x in target_coefficients(target, t.rewards, t.advantages) * logp])
    _, m = step(policy, b, s, held_out=(t, rows) if held else None, way=way)
    expected = cosine(*(alone[list(half)].sum(0) for half in halves))
    assert m["tracin/target_cosine"] == pytest.approx(expected, abs=1e-4)
    assert m["tracin/target_grad_norm"] == pytest.approx(float(alone.sum(0).norm()), rel=1e-4)
    assert abs(expected - cosine(alone[::2].sum(0), alone[1::2].sum(0))) > 1e-3 or prompts == 1


def test_select():
    x = torch.tensor([3.0, -1, 0, 2, -5, 1, -2, -.5, -.1, -.2])
    def kept(*args): return select(x, *args)[0].nonzero()[:, 0].tolist()
    assert kept("positive") == [0, 3, 5] and kept("all") == list(range(10)) and kept("top", .2) == [0, 3]
    assert kept("drop", 1.0) == [0, 2, 3, 5] and kept("drop", .34) == [0, 1, 2, 3, 5, 7, 8, 9] and kept("bottom") == [1, 4, 6]
    drawn = {tuple(select(x, "random", generator=torch.Generator().manual_seed(i))[0].nonzero()[:, 0].tolist()) for i in range(20)}
    assert all(len(rows) == 3 for rows in drawn) and len(drawn) > 10
    few = torch.tensor([-float(i) for i in range(1, 21)])
    keep, fallback = select(few, "positive")
    assert fallback and keep.tolist() == [True] * 10 + [False] * 10
    few[19] = few[18] = 1.0   # one in ten
    assert not select(few, "positive")[1]
    assert select(x, "top", 0.0)[0].sum() == 0


def test_choose_targets_and_coefficients():
    rewards, g = torch.tensor([.1, .9, .5, .7, .3, .2]), torch.Generator().manual_seed(1)
    assert choose_targets(rewards, 2, "best", g).tolist() == [1, 3] and choose_targets(rewards, 2, "worst", g).tolist() == [5, 0]
    assert sorted(choose_targets(rewards, 4, "balanced", g).tolist()) == [0, 1, 3, 5]
    assert sorted(choose_targets(rewards, 0, "random", g).tolist()) == list(range(6))
    assert len(set(choose_targets(rewards, 3, "random", g).tolist())) == 3
    rho = target_coefficients("reward", rewards, rewards)
    assert rho.sum().abs() < 1e-6 and rho.argmin() == 1 and float(rho.std()) == pytest.approx(1 / 6, rel=1e-3)
    assert torch.equal(target_coefficients("advantage", rewards, torch.arange(6.0)), -torch.arange(6.0) / 6)
    assert (target_coefficients("contrastive", rewards, rewards) * 6).tolist() == [1, -1, -1, -1, 1, 1]


def test_layers_normalizer_and_adam():
    s = settings(tracin="reward", **UNIT)
    b = sample(gpt(), s, moved(gpt()))
    found = {}
    for name, knobs in dict(plain={}, layers=dict(tracin_layers=("mlp",)), kept=dict(tracin_normalizer="kept"),
                            adam=dict(tracin_adam=True)).items():
        policy = gpt()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        g = row_gradients(policy, b, s)
        for p, x in zip(policy.parameters(), g.sum(0).split([p.numel() for p in policy.parameters()])):
            p.grad = x.view_as(p) + .1 * x.abs().mean()
        before = [p.detach().clone() for p in policy.parameters()]
        optimizer.step(), optimizer.zero_grad()
        with torch.no_grad():
            for p, x in zip(policy.parameters(), before):
                p.copy_(x)
        seen, m = step(policy, b, replace(s, **knobs), optimizer)
        found[name] = b.influence.clone(), b.weights.clone(), seen[0]
        G = target_gradient(gpt(), b, torch.arange(16), s)
        if name == "layers":
            part = torch.cat([torch.full((p.numel(),), float("mlp" in n)) for n, p in policy.named_parameters()])
            assert close(b.influence, g @ (G * part))
        if name == "adam":
            assert not close(b.influence, g @ G, .01)
    share = float(b.mask.sum() / (b.mask.sum(1) * (found["kept"][0] > 0)).sum())
    assert torch.allclose(found["kept"][1], found["plain"][1] * share) and share > 1
    for p, q in zip(found["kept"][2].values(), found["plain"][2].values()):
        assert torch.allclose(p, share * q, atol=1e-6)


def spearman(a, b):
    return float(torch.corrcoef(torch.stack([a.argsort().argsort().double(), b.argsort().argsort().double()]))[0, 1])


def test_counterfactual(capsys):
    """Influence against the true change of the target's loss when the same step is taken without the row."""
    s, prompts = settings(tracin="reward", num_prompts=8, **UNIT), MANY
    start = gpt()
    b = sample(start, s, moved(gpt()), prompts=prompts)
    found = {}
    for name, adam in (("sgd", False), ("adam", False), ("adam, aware", True)):
        warm = name != "sgd"
        base = copy.deepcopy(start)
        g = row_gradients(base, b, s)
        optimizer = torch.optim.AdamW(base.parameters(), lr=1e-4) if warm else torch.optim.SGD(base.parameters(), lr=1e-3)
        if warm:  # a state like that of a running training: other batches have been seen
            others = [row_gradients(base, sample(base, s, moved(gpt()), seed=i, prompts=prompts), s).sum(0) for i in range(5)]
            for i in range(300):
                for p, x in zip(base.parameters(), others[i % 5].split([p.numel() for p in base.parameters()])):
                    p.grad = x.view_as(p)
                optimizer.step()
            for p, q in zip(base.parameters(), start.parameters()):
                p.data.copy_(q.data)
        state = copy.deepcopy(optimizer.state_dict())

        def target_after(weights):
            policy = copy.deepcopy(base)
            o = type(optimizer)(policy.parameters(), lr=1e-4 if warm else 1e-3)
            o.load_state_dict(copy.deepcopy(state))
            for p, x in zip(policy.parameters(), (weights @ g).split([p.numel() for p in policy.parameters()])):
                p.grad = x.view_as(p)
            o.step()
            rho = target_coefficients("reward", b.rewards, b.advantages)
            with torch.no_grad():
                return float((rho * completion_logprobs(policy, b.rollout).double().sum(1)).sum())

        full = target_after(torch.ones(32))
        change = torch.tensor([target_after(torch.ones(32).index_fill(0, torch.tensor(i), 0)) - full for i in range(32)])
        policy = copy.deepcopy(base)
        o = type(optimizer)(policy.parameters(), lr=0.0)
        o.load_state_dict(copy.deepcopy(state))
        step(policy, b, replace(s, tracin_adam=adam), o)
        found[name] = spearman(b.influence, change)
    with capsys.disabled():
        print("\nSpearman of influence and true change:", {k: round(v, 4) for k, v in found.items()})
    assert found["sgd"] > .99 and found["adam, aware"] > found["adam"]


def test_later_passes_keep_the_rows_of_the_first(monkeypatch):
    policy, s = gpt(), settings(tracin="self", tracin_select="top", num_iterations=3, mini_batch_size=8, micro_batch_size=4)
    b, seen = sample(policy, s), []
    monkeypatch.setattr(grpo, "loss_of", lambda p, b, rows, *more, **kw: seen.append(rows) or loss_of(p, b, rows, *more, **kw))
    step(policy, b, s, lr=1e-3)
    seen = torch.cat(seen).tolist()
    kept = (b.weights > 0).nonzero()[:, 0].tolist()
    assert sorted(seen[:16]) == list(range(16)) and sorted(seen[16:]) == sorted(2 * kept) and 0 < len(kept) < 16


def test_nothing_selected_is_no_step():
    policy, s = gpt(), settings(tracin="self", tracin_select="top", tracin_fraction=0.0, num_iterations=2)
    b = sample(policy, s)
    before = weights_of(policy)
    seen, m = step(policy, b, s)
    assert not seen and m["num_steps"] == 0 and same_weights(policy, before)
    assert "empty" in diagnose_influence(m, s)


def test_diagnoses_of_real_batches():
    prompts = [("a", [3, 4])] * 8
    s = settings(tracin="reward", num_prompts=8, num_generations=4)
    b, t = sample(gpt(), s, prompts=prompts), sample(gpt(), s, seed=9, prompts=prompts)

    def said(s, chosen=None):
        _, m = step(gpt(), b, s, held_out=None if chosen is None else (t, chosen))
        return diagnose_influence(m | describe_batch(b, s), s)

    best = choose_targets(t.rewards, 4, "best", None)
    assert "contrast" in said(s, best) and "contrast" not in said(s, torch.arange(32))
    alike = replace(t, rewards=torch.full((32,), .5))
    _, m = step(gpt(), b, s, held_out=(alike, torch.arange(32)))
    assert "contrast" in diagnose_influence(m, s)
    assert "self" in said(replace(s, tracin="self")) and "noise" in said(replace(s, tracin="self"))
    opposite = replace(b, rewards=1 - b.rewards)   # the target wants what training drives away
    _, m = step(gpt(), b, s, held_out=(opposite, torch.arange(32)))
    assert m["tracin/positive_ratio"] < .5


@pytest.mark.parametrize("change, kind", (({"tracin/fallback": 1.0}, "fallback"), ({"tracin/invariant_error": .01}, "invariant"),
                                          ({"tracin/target_cosine": .05}, "noise"), ({"tracin/self_share": .6}, "self"), ({}, None)))
def test_diagnoses_of_metrics(change, kind):
    fine = {"tracin/selected_ratio": .5, "tracin/empty_steps": 0, "tracin/fallback": 0.0, "tracin/positive_ratio": .5, "tracin/target_contrast": 1.0,
            "tracin/target_cosine": .5, "tracin/target_rows": 64, "tracin/self_share": .1, "tracin/invariant_error": 1e-7}
    assert list(diagnose_influence(fine | change, settings())) == ([kind] if kind else [])


def test_a_run_logs_influence_and_weight(tmp_path, capsys):
    save_gpt(str(tmp_path / "policy.pt"), gpt())
    for name, text in (("comments.csv", "text,is_offensive\nfine,0\n"), ("prompts.txt", "I am\nyou are so\nwhat\n"),
                       ("eval.txt", "the end of it\nand now\nso\n"),
                       ("rule.py", "def reward(prompts, completions):\n    return [len(c) % 3 for c in completions]\n")):
        (tmp_path / name).write_text(text)
    knobs = dict(out_dir=tmp_path / "run", policy=tmp_path / "policy.pt", comments=tmp_path / "comments.csv",
                 prompts=tmp_path / "prompts.txt", eval_prompts=tmp_path / "eval.txt", vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32, num_prompts=4,
                 num_generations=4, max_completion_length=8, max_iters=2, judge=None, eval_judge=None, num_eval_generations=2,
                 num_eval_prompts=1, log_micro=False, device="cpu", tracin="reward", tracin_val_prompts=2)
    grpo.main([str(tmp_path / "rule.py"), *(f"--{k}={v}" for k, v in knobs.items())])
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 32 and all((row["weight"] > 0) == (row["influence"] > 0) for row in rows)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ("positive_ratio", "negative_ratio", "mean_ip", "std_ip", "min_ip", "max_ip", "selected_ratio", "self_share",
             "target_grad_norm", "target_loss", "invariant_error", "target_rows")
    assert all(f"tracin/{name}" in row for row in metrics for name in names)
    assert metrics[0]["tracin/positive_ratio"] == sum(row["influence"] > 0 for row in rows[:16]) / 16
    knobs["num_eval_prompts"] = 3
    with pytest.raises(BadInput, match="tracin_val_prompts"):
        grpo.main([str(tmp_path / "rule.py"), *(f"--{k}={v}" for k, v in knobs.items())])


@pytest.mark.parametrize("name", ("toxicity_tracin", "toxicity_tracin_lora", "tracin_16_best", "tracin_128_random"))
def test_configs_load(name):
    assert load_settings([f"config/{name}.py"]).tracin != "off"


def lose_record(tape):
    tape.records.pop()


def lose_kept(tape):
    tape.kept = {(p, first): g for (p, first), g in tape.kept.items() if first}  # the first micro-batch


@pytest.mark.parametrize("way, lose", (("contracted", lose_record), ("kept", lose_kept),
                                       ("mixed", lose_record), ("mixed", lose_kept)))
def test_the_first_step_is_checked_against_an_ordinary_backward(way, lose, monkeypatch):
    policy, s = gpt(), settings(tracin="self", beta=.1, micro_batch_size=8)
    b = sample(policy, s, moved(gpt()))

    def error(check):
        policy = gpt()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        m = update(policy, policy, optimizer, b, s, 3, FLOAT, quiet, check, None, tape_of(policy, way))
        return m["tracin/invariant_error"]

    assert error(True) < 1e-5
    leave = Tape.__exit__
    monkeypatch.setattr(Tape, "__exit__", lambda tape, *error: (leave(tape, *error), lose(tape))[0])
    assert error(False) < 1e-5 and error(True) > 2e-3   # the tape by itself cannot know


@pytest.mark.parametrize("knobs, backwards", ((dict(tracin="self", beta=.1), 1), (dict(tracin="reward", **UNIT), 1), (dict(tracin="reward", beta=.1), 2)))
def test_the_cost_that_is_printed_is_paid(knobs, backwards, monkeypatch):
    policy, s = gpt(), settings(micro_batch_size=16, **knobs)
    b, calls, backward = sample(policy, s, moved(gpt())), [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda x, *more: calls.append(1) or backward(x, *more))
    step(policy, b, s)
    rows = 1 if backwards == 1 else 3   # the target goes backward in two halves of the rows
    assert len(calls) == rows and describe_cost(s, 10 ** 6).count(f"{backwards} backward") == 1


def test_the_cost_of_a_held_out_target_is_said():
    s = settings(tracin="reward", tracin_val_prompts=8, tracin_val_size=10)
    assert "32 held-out rollouts" in describe_cost(s, 1) and ", 10 of them" in describe_cost(s, 1)


@pytest.mark.parametrize("knobs, weights, said", (
    (dict(), 2 ** 26, "16 x 67.1 M weights = 4.00 GB, of which tracin_memory lets all be kept"),
    (dict(), 2 ** 27 + 1, "8 GB be kept, the rest is contracted"),
    (dict(mini_batch_size=8), 2 ** 26 + 1, "8 x 67.1 M weights = 2.00 GB"),
    (dict(mini_batch_size=8), 2 ** 26 + 1, "all be kept"), (dict(mini_batch_size=8), 2 ** 28 + 1, "8 GB be kept"),
    (dict(tracin_memory=.5), 2 ** 23, "16 x 8.4 M weights = 0.50 GB, of which tracin_memory lets all be kept"),
    (dict(tracin_memory=.25), 2 ** 23, "0.25 GB be kept, the rest"), (dict(tracin_memory=0), 2 ** 23, "0 GB be kept, the rest"),
    (dict(num_prompts=8, num_generations=32, tracin_memory=9.5), 10 ** 7,
     "256 x 10.0 M weights = 9.54 GB, of which tracin_memory lets 9.5 GB")))
def test_the_memory_that_is_asked_for_is_said(knobs, weights, said):
    text = describe_cost(settings(tracin="self", **knobs), weights)
    assert said in text and ("all be kept" in text) != ("the rest is contracted" in text) and text.count("\n") == 0


def run_of(tmp_path, **more):
    """Run grpo.py on 16 rollouts of 24 tokens and more, which the tape wants on a CPU."""
    save_gpt(str(tmp_path / "policy.pt"), gpt(end=-9.0))
    comments = "text,is_offensive\nfine,0\n"
    rule = "def reward(prompts, completions):\n    return [sum(map(ord, c)) % 7 for c in completions]\n"
    for name, text in (("comments.csv", comments), ("prompts.txt", "I am\nyou\nwhat\n"), ("eval.txt", "so\n"), ("rule.py", rule)):
        (tmp_path / name).write_text(text)
    knobs = dict(policy=tmp_path / "policy.pt", comments=tmp_path / "comments.csv", prompts=tmp_path / "prompts.txt",
                 eval_prompts=tmp_path / "eval.txt", vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32, num_prompts=4,
                 num_generations=4, max_completion_length=24, max_iters=2, judge=None, eval_judge=None, num_eval_prompts=1,
                 num_eval_generations=2, log_micro=False, device="cpu", tracin="reward", micro_batch_size=8)
    grpo.main([str(tmp_path / "rule.py"), *(f"--{k}={v}" for k, v in (knobs | more).items())])


def test_a_run_in_both_ways(tmp_path, capsys):
    """The setting decides, and the first influences agree."""
    found = {}
    for memory in (0, .001, 4):
        out = tmp_path / f"run{memory}"
        run_of(tmp_path, tracin_memory=memory, out_dir=out)
        said = capsys.readouterr().out
        assert (f"lets {'all' if memory == 4 else f'{memory:g} GB'} be kept" in said) and "16 x 0.0 M weights = 0.00 GB" in said
        rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found[memory] = rows, [m["tracin/kept_gradients"] for m in metrics]
        assert all(m["tracin/invariant_error"] < 1e-5 for m in metrics)
    assert found[0][1] == [0, 0] and all(.95 < x <= 1 for x in found[4][1]) and all(.2 < x < .95 for x in found[.001][1])
    influence = {memory: torch.tensor([r["influence"] for r in rows[:16]]) for memory, (rows, _) in found.items()}
    for memory in (.001, 4):
        assert close(influence[memory], influence[0], 1e-5)
        same = [[(r["completion"], r["weight"]) for r in found[m][0]] for m in (0, memory)]
        assert same[0] == same[1]                         # the second iteration has learnt from the same rows


def test_gradients_that_do_not_fit_are_refused_before_the_run(tmp_path, monkeypatch):
    weights = sum(p.numel() for p in gpt(end=-9.0).parameters())
    size, out = 16 * weights * 4, tmp_path / "out"

    class Begun(Exception):
        """It would have run."""

    def begin(*args):
        raise Begun

    def refused(free, processes=1, **knobs):
        monkeypatch.setattr(grpo, "free_memory", lambda device: free)
        monkeypatch.setattr(grpo, "begin_run", begin)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        try:
            run_of(tmp_path, out_dir=out, **knobs)
        except Begun:
            return ""
        except BadInput as e:
            assert not any(out.iterdir())                                      # the next run may have the folder
            return str(e)

    gb = size / 2 ** 30
    assert refused(3.1 * 2 ** 30, 10 ** 5) == (f"tracin_memory = 8: {10 ** 5 * gb:.1f} GB of rollouts' gradients are to be kept, "
                                               "and 3.1 GB are free; lower it")
    assert refused(size - 1) and not refused(size)
    assert refused(size / 2 - 1, mini_batch_size=8) and not refused(size / 2, mini_batch_size=8)
    assert refused(2 * size - 1, 2) and not refused(2 * size, 2)              # on one machine
    assert refused(size / 2 - 1, tracin_memory=gb / 2) and not refused(size / 2, tracin_memory=gb / 2)
    assert not refused(0, tracin_memory=0) and not refused(0, tracin="off")
    assert not refused(0, max_completion_length=21) and refused(0, max_completion_length=22)   # 3 of a prompt: 23 or 24 inputs


def test_a_target_that_wants_the_opposite_is_said_and_the_better_half_is_kept():
    """Training and target disagree on every rollout: the same batch with its rewards turned round is the target."""
    policy, s = gpt(), settings(tracin="advantage", tracin_val_prompts=4, **UNIT)
    b = sample(policy, s, moved(policy))
    t = replace(b, rewards=-b.rewards, advantages=-b.advantages)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    m = update(policy, policy, optimizer, b, s, 3, FLOAT, quiet, False, held_out=(t, torch.arange(16)))
    assert m["tracin/positive_ratio"] < 0.1 and m["tracin/fallback"] == 1
    moved_rows = int((b.influence != 0).sum())
    assert int((b.weights > 0).sum()) == (moved_rows + 1) // 2
    assert b.influence[b.weights > 0].min() >= b.influence[(b.weights == 0) & (b.influence != 0)].max()
    line = diagnose_influence(m | {"tracin/empty_steps": 0}, s)["fallback"]
    assert line.startswith(f"only {100 * m['tracin/positive_ratio']:.0f} % of the rollouts have positive influence")
