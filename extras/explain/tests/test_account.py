"""`python tracin.py RUN --prompt --completion`: its shares add up to what happened and are those of
brute force, its predictions are those of training again, and what it replays is the run."""
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import vector_to_parameters

import grpo
import tracin
from common.seeds import seed_for
from extras.explain import target as targets
from extras.explain.account import backwards, make_account, smoothness, smoothness_by, train_again
from extras.explain.groups import at_random, rows_of, splits_of, sums_of
from extras.explain.number import total
from extras.explain.question import row_of
from extras.explain.repeat import flat, repeat_run
from extras.explain.tables import token_parts
from extras.explain.target import HeldOut, sentence_target, thinned
from rollout import completion_logprobs, generate
from run.optimizer import learning_rate
from worlds import TOKENIZER, forcing, number_gpt, refusal, settings, setup_of, shaken, skip_without


def odd_reward(prompts, completions):
    return [sum(map(ord, text)) % 7 for text in completions]


def coarse_reward(prompts, completions):
    """Equal in half of the groups of two."""
    return [sum(map(ord, text)) // 2 % 2 for text in completions]


ITERATIONS = 3
FUNCTIONS = {"weigh": lambda influence, batch: [0.3 * (i % 3) for i in range(len(influence))]}
CURVED = {"kl_in": "loss", "beta": 0.2}
# every kind of run: settings that differ
KINDS = {
    "plain": {},
    "mini-batches and passes": dict(mini_batch_size=6, num_iterations=2, micro_batch_size=4),
    "positive": dict(tracin="advantage", num_iterations=2, **CURVED),
    "weigh": dict(tracin="reward", tracin_select="weigh"),
    "lora, a reference that follows": dict(lora_rank=2, ref_model_sync_steps=1, **CURVED),
    "critic, kl in reward": dict(critic=True, value_clip=0.03, num_iterations=2, beta=0.2,
                                 kl_in="reward", kl_estimator="k1"),
    "kl and entropy": dict(entropy_coef=0.1, top_entropy_quantile=0.5, **CURVED),
    "clipped": dict(max_grad_norm=0.1, num_iterations=2),
    "rates": dict(warmup_iters=2, lr_decay="cosine", weight_decay=0.5),
    "truncated": dict(mask_truncated_completions=True, top_k=6, temperature=0.7),
    "bnpo": dict(loss_type="bnpo", micro_batch_size=4),
    "sequence, dropped groups": dict(loss_type="grpo", importance_sampling_level="sequence",
                                     num_iterations=2, zero_std_groups="drop"),
    "cispo": dict(loss_type="cispo", epsilon_high=2.0, num_iterations=2),
    "environment": dict(environment=True),
    "resampled": dict(functions=coarse_reward, num_generations=2, zero_std_groups="resample",
                      max_resamples=20)}


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """Everything in float64, what grpo computes in float32 too."""
    to_default = torch.set_default_dtype
    to_default(torch.float64)
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: None)     # rewards set float32
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield
    to_default(torch.float32)


def setup_for(cfg, answers=False):
    """A random policy with AdamW, whose eps is large enough to be smooth."""
    policy = number_gpt().double()
    if cfg.mask_truncated_completions:      # some end, so that there is something to learn from
        towards = policy.wte.weight[TOKENIZER.eot_token].detach()
        policy.ln_f.bias.data += 2 * towards / towards.norm()
    setup = setup_of(cfg, policy, reference=shaken(number_gpt(), 0.05).double())
    if cfg.lora_rank or cfg.critic:
        shaken(setup.policy, 0.05)
    matrices = [p for p in setup.trained if p.dim() > 1]
    others = [p for p in setup.trained if p.dim() <= 1]
    decays = [dict(params=matrices), dict(params=others, weight_decay=0.0)]
    setup.optimizer = torch.optim.AdamW(
        decays, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=1e-2, weight_decay=cfg.weight_decay,
        fused=True)
    if answers:     # tokens 2 to 4 of every row are given
        given = torch.tensor([-1, 3, 4, -1, -1]).expand(12, 5)
        setup.generate = lambda *args, **how: generate(*args, **how | {"respond": forcing(given)})
    return setup


def run_of(knobs, iterations=ITERATIONS, **more):
    """A RepeatedRun and a sentence that it says."""
    knobs = dict(functions=odd_reward, max_iters=iterations, learning_rate=0.02) | knobs | more
    for extra in ("lora_rank", "critic"):
        if extra in knobs:
            skip_without(extra.removesuffix("_rank"))
    answers = knobs.pop("environment", False)
    select = knobs.pop("tracin_select", "positive")     # its function is not there yet
    cfg = settings(**knobs)
    cfg = replace(cfg, functions=cfg.functions | FUNCTIONS, tracin_select=select)
    setup = setup_for(cfg, answers)
    run = repeat_run(setup, cfg, iterations)
    assert run.steps[0].it == 0, "the first iteration took no step"
    return run, row_of([2, 3], [4, 1, 0], setup.device)


def account_of(run, sentence, predicts=False, **how):
    """The Account of a sentence."""
    return make_account(run, sentence_target(run.setup, run.cfg, sentence), predicts, **how)


def held_out_of(setup, cfg, count=6):
    """The reward on two prompts, by completions of each."""
    return HeldOut("reward", setup, cfg, setup.reward_funcs, [1.0], setup.eval_prompts, count)


# ------------------------------------------------------------------------------------------------
# by brute force


def slope_by_hand(setup, cfg, weights, sentence):
    vector_to_parameters(weights, setup.trained)
    logp = completion_logprobs(setup.policy, sentence, cfg.temperature).sum()
    return flat(torch.autograd.grad(logp, setup.trained, materialize_grads=True))


def whole(setup, cfg, k):
    """The gradient of step k."""
    return flat(tracin.gradient_of(setup, cfg, k.batch, k.step).values())


def part(setup, cfg, k, i, name="policy"):
    """Rollout i's part of the gradient of step k, by a backward of its own."""
    factors = torch.zeros_like(k.batch.row_weights)
    factors[i] = k.batch.row_weights[i]
    batch = replace(k.batch, row_weights=factors)
    return flat(tracin.gradient_of(setup, cfg, batch, k.step, name).values())


def by_hand(run, slopes):
    """Shares (I, N) with AdamW's moments unrolled for each rollout alone. slopes: of the target at
    each state."""
    setup, cfg, states, steps = run
    b1, b2 = cfg.adam_beta1, cfg.adam_beta2
    eps = setup.optimizer.param_groups[0]["eps"]
    weights = [x[0] for x in states]
    v = torch.zeros_like(weights[0])
    per_unit = []       # what a unit of m does to the sentence in each step
    clips = []
    for t, k in enumerate(steps):
        vector_to_parameters(weights[t], setup.trained)
        g = whole(setup, cfg, k)
        limit = cfg.max_grad_norm or float("inf")
        clips.append(min(1.0, limit / (float(g.norm()) + 1e-6)))
        v = b2 * v + (1 - b2) * (clips[-1] * g) ** 2
        c1, c2 = 1 - b1 ** (t + 1), 1 - b2 ** (t + 1)
        slope = (slopes[t] + slopes[t + 1]) / 2
        rate = learning_rate(k.it, cfg)
        per_unit.append(-rate / c1 / ((v / c2).sqrt() + eps) * slope)
    shares = torch.zeros(run.shape)
    for s, k in enumerate(steps):
        vector_to_parameters(weights[s], setup.trained)
        for i in k.step.rows.tolist():
            m = (1 - b1) * clips[s] * part(setup, cfg, k, i)
            for t in range(s, len(steps)):
                shares[k.it, i] += per_unit[t] @ m
                m = b1 * m
    return shares


def held_out_slope_by_hand(setup, cfg, weights, count):
    """grad of the expected reward by the score function, a completion at a time, by the weights
    that drew them; and the mean reward."""
    vector_to_parameters(weights, setup.trained)
    rollout, scores = held_out_of(setup, cfg, count).sample()
    r = scores[:, 0]
    signal = []
    for i in range(len(r)):
        first = i // count * count
        others = [r[j] for j in range(first, first + count) if j != i]
        baseline = sum(others) / len(others)
        signal.append((r[i] - baseline) / len(r))
    total = 0.0
    for i, x in enumerate(thinned(torch.stack(signal), seed_for("thinned"))):
        logp = completion_logprobs(setup.policy, rollout[[i]], cfg.eval_temperature).sum()
        total = total + x * flat(torch.autograd.grad(logp, setup.trained, materialize_grads=True))
    return total, r.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_shares_add_up_and_are_those_of_brute_force(kind):
    """Of a sentence's log-prob, and of the reward on held-out prompts."""
    run, sentence = run_of(KINDS[kind])
    setup, cfg = run.setup, run.cfg
    weights = [x[0] for x in run.states]
    found = account_of(run, sentence)
    check_shares(run, found, [slope_by_hand(setup, cfg, x, sentence) for x in weights])

    found = make_account(run, held_out_of(setup, cfg))
    by_score = [held_out_slope_by_hand(setup, cfg, x, 6) for x in weights]
    check_shares(run, found, [slope for slope, _ in by_score])
    for t, (_, value) in enumerate(by_score):
        assert abs(found.values[t].sum() - value) < 1e-9
    off = (found.gains.sum(0) - found.together).abs().max()
    assert off < 1e-9 * found.shares.abs().max(), "the shares of a fold are another fold's"


def test_what_the_rollouts_leave_of_a_gradient_is_the_rest_of_the_loss():
    """The share of one part alone takes no pass of its own, and is that of such a pass."""
    run, sentence = run_of(CURVED)
    found = account_of(run, sentence)
    by_pass = torch.zeros(ITERATIONS).double()
    end = found.target.at(run.states[-1][0])
    for k, before, *_, G in backwards(run, found.target, end):
        vector_to_parameters(before[0].clone(), run.setup.trained)
        g = flat(tracin.gradient_of(run.setup, run.cfg, k.batch, k.step, "kl").values())
        by_pass[k.it] += float(G[0] @ g)
    assert by_pass[1:].abs().min() > 0
    assert (found.rest["kl"][0] - by_pass).abs().max() < 1e-9 * found.shares.abs().max()


def permuted(shares, steps, seed):
    """Shares (F, I, N), had the gradients of each step been dealt out among its rollouts."""
    generator = torch.Generator().manual_seed(seed)
    dealt = shares.clone()
    for k in steps:     # of one step in each iteration
        rows = k.step.rows
        dealt[:, k.it, rows] = shares[:, k.it, rows[torch.randperm(len(rows), generator=generator)]]
    return dealt


def test_a_permuted_account_has_the_same_sum_and_its_groups_tell_nothing():
    """The control: one of two prompts is paid, for odd digits, and its rollouts have the whole sum;
    with gradients dealt out anew no prompt has more than as many at random."""
    def odd(prompts, completions):
        return [(prompt == min(prompts)) * sum(map(text.count, "13579"))
                for prompt, text in zip(prompts, completions)]

    run, _ = run_of(dict(functions=odd, num_generations=64), learning_rate=1e-3)
    shares = make_account(run, held_out_of(run.setup, run.cfg, 200)).shares

    def away(shares):       # how far the group furthest from chance is, in standard deviations
        rows = rows_of(run, shares)
        split = splits_of(rows)["prompt"]
        sums = sums_of(rows, split).sum(0)
        return max(abs(float(x) - chance.value) / chance.error
                   for x, chance in zip(sums, at_random(rows, split)) if chance.error)

    dealt = [permuted(shares, run.steps, seed) for seed in range(40)]
    for one in dealt:
        assert (one.sum((1, 2)) - shares.sum((1, 2))).abs().max() < 1e-9
    by_chance = sorted(map(away, dealt))
    assert by_chance[20] < 1.5, "groups of permuted gradients differ from chance"
    assert away(shares) > by_chance[-1], "the groups of the run tell no more than permuted ones"


def check_shares(run, found, slopes):
    setup, cfg, states, steps = run
    weights = [x[0] for x in states]
    along = sum(float((a + b) / 2 @ (y - x))
                for a, b, x, y in zip(slopes, slopes[1:], weights, weights[1:]))
    shares = found.shares.sum(0)
    size = float(shares.abs().max())
    assert abs(found.together.sum() - along) < 1e-9 * size, "shares do not add up to the steps"
    parts = {name for name, share in found.rest.items() if share.any()}
    assert bool(parts & {"kl", "entropy", "critic"}) == cfg.has_rest
    assert ("decay" in parts) == (cfg.weight_decay > 0)
    error = (shares - by_hand(run, slopes)).abs().max()
    assert error < 1e-9 * size, "a share is not its rollout's own"
    if cfg.tracin != "off" and not cfg.mini_batch_size:
        dropped = torch.stack([k.batch.row_weights == 0 for k in steps if k.step.epoch == 0])
        assert dropped.any() and not shares[dropped].any(), "a dropped rollout has a share"


@pytest.mark.parametrize("kind", ["mini-batches and passes", "environment"])
def test_words_of_a_rollout_add_up(kind):
    """To its share, and to its effect."""
    run, sentence = run_of(KINDS[kind])
    places = {(k.it, int(j)) for k in run.steps for j in k.step.rows}
    for predicts in (False, True):
        found = account_of(run, sentence, predicts)
        expected = found.effects if predicts else found.shares[0]
        words = token_parts(run, found.directions, places)
        for place in places:
            assert abs(words[place].sum() - expected[place]) < 1e-9 * expected.abs().max()


def straight_error(rate):
    """How far the sums are from the true changes of some sentences, relative to their shares. One
    iteration: the rollouts are the same at any rate."""
    run, _ = run_of(KINDS["environment"], 1, learning_rate=rate)
    found = [account_of(run, row_of([2, 3], [4, i, 0], run.setup.device)) for i in range(1, 6)]
    off = torch.cat([one.together - one.change for one in found])
    return float(off.norm() / torch.stack([one.shares.abs().sum() for one in found]).norm())


def test_small_steps_are_a_straight_line():
    """The sum is the true change but for the curve within a step, which falls with its square."""
    error = straight_error(2e-5)
    assert error < 1e-4, f"small steps: off by {error:.1e} of the shares"
    half = straight_error(1e-5)
    assert 3.5 < error / half < 4.5, f"half the step: errors {error:.1e}, {half:.1e}: no quarter"


# ------------------------------------------------------------------------------------------------
# by training again


def trained_again(world, factors):
    """f and the weights at the end of the run on its own rollouts, by grpo.update, with factors
    (I, N) on their losses."""
    run, sentence = world
    setup, cfg, states, steps = run
    vector_to_parameters(states[0][0].clone(), setup.trained)       # steps are in place
    setup.optimizer.state.clear()
    cfg = replace(cfg, tracin="off")        # rollouts are weighed as they were
    for k in {k.it: k for k in steps}.values():     # the last step knows all weights
        batch = replace(k.batch, row_weights=k.batch.row_weights * factors[k.it])
        grpo.set_learning_rate(setup.optimizer, k.it, cfg)
        grpo.update(setup, batch, None, cfg, seed_for(cfg.seed, "rows", k.it))
    with torch.no_grad():
        logp = completion_logprobs(setup.policy, sentence, cfg.temperature)
    return float(logp.sum()), flat(setup.trained).detach().clone()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (
    "cispo", "environment", "resampled", "truncated")])     # the first is refused
def test_the_derivative_is_that_of_training_again(kind):
    world = run_of(KINDS[kind])
    run, sentence = world
    effects = account_of(run, sentence, predicts=True, damping=0.0).effects     # (I, N)
    ones = torch.ones_like(effects)
    f, theta = trained_again(world, ones)
    assert (theta - run.states[-1][0]).abs().max() < 1e-9, "training again is another run"
    same = train_again(run, ones)
    assert (same - run.states[-1][0]).abs().max() < 1e-9, "repeating its steps is another run"
    size = float(effects.abs().max())
    assert size > 0
    compared = 0
    for it in (run.steps[0].it, run.steps[-1].it):
        for i in effects[it].abs().topk(2).indices.tolist():
            e = torch.zeros_like(effects)
            e[it, i] = 1e-6
            more, _ = trained_again(world, 1 + e)
            less, _ = trained_again(world, 1 - e)
            if abs(more - 2 * f + less) > 1e-4 * 1e-6 * size:
                continue        # a token is at the edge of the clip range: there is no derivative
            error = abs((more - less) / 2e-6 - float(effects[it, i]))
            assert error < 1e-5 * size, f"iteration {it}, rollout {i}: off by {error / size:.1e}"
            compared += 1
    assert compared > 1


def test_smoothness_is_that_of_three_trainings():
    world = run_of(KINDS["mini-batches and passes"])
    z = torch.randn(ITERATIONS, 12, generator=torch.Generator().manual_seed(7))
    start, middle, end = (trained_again(world, 1 + size * z)[1] for size in (0.0, 0.1, 0.2))
    agree = torch.where((middle - start) * (end - middle) > 0, 1.0, -1.0)
    weights = (end - start).abs()
    by_hand = float((agree * weights).sum() / weights.sum())
    assert abs(smoothness_by(world[0], seed=7) - by_hand) < 1e-6
    draws = [smoothness_by(world[0], seed_for("smoothness", i)) for i in range(3)]
    assert len(set(draws)) == 3
    assert smoothness(world[0]) == pytest.approx(sum(draws) / 3), "the mean of three draws"
    assert by_hand < 1


def test_a_layer_that_is_never_used_changes_nothing():
    """It has no gradient, so AdamW counts no steps for it."""
    found = []
    for unused in (False, True):
        run, sentence = run_of({}, 2)
        setup = run.setup
        vector_to_parameters(run.states[0][0].clone(), setup.trained)
        if unused:
            setup.policy.unused = torch.nn.Linear(2, 2)
            setup.trained.insert(0, setup.policy.unused.weight)
        setup.policy.requires_grad_(True)
        setup.optimizer = torch.optim.AdamW(setup.trained, lr=0.02, eps=1e-2, weight_decay=0.0)
        run = repeat_run(setup, run.cfg, 2)
        account = account_of(run, sentence, predicts=True, damping=0.0)
        found.append((account.shares, account.effects))
    for x, y in zip(*found):
        assert (x - y).abs().max() < 1e-9


@pytest.mark.parametrize("make, says", [
    (torch.optim.RAdam, "RAdam"),
    (lambda p: torch.optim.AdamW([dict(params=p[:1], lr=1.0), dict(params=p[1:])]), "lr")],
    ids=["RAdam", "two rates"])
def test_an_optimizer_that_is_not_known_is_refused_by_name(make, says):
    cfg = settings(functions=odd_reward)
    setup = setup_for(cfg)
    setup.optimizer = make(setup.trained)
    before = flat(setup.trained).detach().clone()
    assert says in refusal(repeat_run, setup, cfg, 1)
    assert torch.equal(before, flat(setup.trained)), "it was refused after a step"


# ------------------------------------------------------------------------------------------------
# the expected reward


def test_the_slope_is_that_of_the_expected_reward(monkeypatch):
    """By enumeration of all completions of two tokens: mean and slope of the reward, by many
    samples, are the exact ones within their own noise, also where the reward abstains."""
    def abstaining(prompts, completions):
        return [None if text.startswith("3") else sum(map(ord, text)) % 7 for text in completions]

    cfg = settings(functions=abstaining, max_completion_length=2)
    setup = setup_for(cfg)
    weights = flat(setup.trained).detach().clone()
    exact_value, exact = enumerated(setup, cfg, abstaining)
    values = []
    slopes = []
    for i in range(8):      # samples of their own
        monkeypatch.setattr(targets, "seed_for", lambda *names, i=i: seed_for(*names, i))
        point = held_out_of(setup, cfg, 2000).at(weights)
        values.append(float(point.parts.sum()))
        slopes.append(point.slope.sum(0))
    slopes = torch.stack(slopes).double()                                           # (8, W)
    assert abs(sum(values) / 8 - exact_value) < 0.1
    error = (slopes.mean(0) - exact).norm()
    noise = (slopes.var(0).sum() / 8).sqrt()        # of the mean
    assert noise < 0.3 * exact.norm(), "too few samples to say anything"
    assert error < 1.5 * noise, f"the slope is off by {error / noise:.2f} times its noise"


def test_the_stated_noise_is_how_much_other_samples_differ(monkeypatch):
    """Of the value, and of the slope along a direction, by 60 seeds of the held-out sample."""
    cfg = settings(functions=odd_reward)
    setup = setup_for(cfg)
    weights = flat(setup.trained).detach().clone()
    direction = torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    held_out = held_out_of(setup, cfg, 24)
    found = []
    for seed in range(60):
        monkeypatch.setattr(targets, "seed_for", lambda *what, i=seed: seed_for(*what, i))
        point = held_out.at(weights)
        found.append((total(point.value), total(point.slope @ direction)))
    for numbers in zip(*found):
        values = torch.tensor([number.value for number in numbers])
        stated = torch.tensor([number.error for number in numbers]).square().mean().sqrt()
        assert 0.7 < stated / values.std() < 1.4, "the errors are not those of other samples"


def test_thinning_changes_nothing_on_average():
    """Small signals are drawn by their size, and then count for those that are not."""
    signal = torch.tensor([0.1, 0.4, -0.2, 0.0, 5.0, -6.0, 0.01, 0.3, 1.0, 0.0, 3.0])
    many = torch.stack([thinned(signal, seed) for seed in range(4000)])         # (4000, N)
    error = (many.mean(0) - signal).abs()
    assert (error < 4 * many.std(0) / 4000 ** 0.5 + 1e-6).all()
    assert (many == 0).double().mean() > 0.5, "hardly anything was left out"
    largest = signal.abs().argmax()
    assert (many[:, largest] == signal[largest]).all()
    assert not thinned(torch.zeros(3), 1).any()


def enumerated(setup, cfg, reward):
    """The mean of the known rewards over both prompts, and its gradient (W,)."""
    total = known = 0.0
    for prompt in setup.eval_prompts:
        for first in range(12):
            for second in range(12) if first else [None]:
                ids = [first] if second is None else [first, second]
                row = row_of(prompt.ids, ids, setup.device)
                p = completion_logprobs(setup.policy, row, cfg.eval_temperature).sum().exp()
                text = TOKENIZER.decode([i for i in ids if i])
                r, = reward([prompt.text], [text])
                if r is not None:
                    total = total + p * r
                    known = known + p
    mean = total / known
    slope = flat(torch.autograd.grad(mean, setup.trained, materialize_grads=True))
    return float(mean.detach()), slope
