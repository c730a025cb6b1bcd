"""What influence scores, what is kept, and how long a step is: each setting against autograd or
plain Python."""
import itertools
import math
from dataclasses import replace

import pytest
import torch

import grpo
import tracin
from config import load_settings
from docs import cosine as picture
from grpo import Step, collect_target, update
from sample import completion_logprobs
from run.script import BadInput, seed_for
from test_critic import with_critic
from test_grpo import (PROMPTS, gpt, moved, nets_of, same_weights, sample, settings,
                       weights_of)
from test_influence import (
    close, flat, flat_grad, rest_gradient, row_gradients, run_of, read, step,
    target_gradient)
from tracin import select, target_coefficients

ALL_ROWS = torch.arange(16)


# ------------------------------------------------------------------------------------------------
# what keeps all rows

@pytest.mark.parametrize("critic", (False, True))
@pytest.mark.parametrize("again", (False, True))
def test_rows_that_are_dropped_keep_the_rest_of_their_loss(critic, again):
    """In two passes of two mini-batches, with activation_checkpointing too."""
    policy = with_critic(gpt()) if critic else gpt()
    cfg = settings(tracin="self", tracin_select="top", beta=.1, num_iterations=2, mini_batch_size=8,
                   micro_batch_size=3, activation_checkpointing=again, loss_type="dr_grpo",
                   critic=critic, value_coef=.5)
    batch = sample(policy, cfg, moved(gpt()))
    # of a mini-batch the divisors are half as large
    g = 2 * row_gradients(policy, batch, cfg)
    policy.recompute = again
    seen, _ = step(policy, batch, cfg, lr=0.0)
    assert len(seen) == 4 and (batch.weights == 0).sum() == 8
    kept = batch.weights @ g
    rest = 2 * rest_gradient(policy, batch, cfg)
    for first, second in (seen[:2], seen[2:]):
        both = flat(first, policy) + flat(second, policy)
        assert close(both, kept + rest)
        assert not close(both, kept), "the rest weighs too little to be seen"


def test_a_step_that_keeps_no_row_takes_the_rest():
    policy = gpt()
    cfg = settings(tracin="self", tracin_select="top", tracin_fraction=0.0, beta=.1,
                   num_iterations=2)
    batch = sample(policy, cfg, moved(gpt()))
    rest = rest_gradient(policy, batch, cfg)
    seen, m = step(policy, batch, cfg, lr=0.0)
    assert m["num_steps"] == 2 and not batch.weights.any()
    assert all(close(flat(gradient, policy), rest) for gradient in seen)
    policy = gpt()
    cfg = replace(cfg, tracin_kl="kept")
    before = weights_of(policy)
    seen, m = step(policy, batch, cfg)
    assert not seen and m["num_steps"] == 0 and same_weights(policy, before)


@pytest.mark.parametrize("factor", (1.0, 1.1))
def test_the_first_step_checks_the_rest_too(factor, monkeypatch):
    """And in bfloat16 its rounding is not taken for an error of the scores."""
    summed = tracin.Tape.backward_summed
    monkeypatch.setattr(
        tracin.Tape, "backward_summed", lambda tape, loss: summed(tape, factor * loss))
    cfg = settings(tracin="advantage", beta=.1, critic=True, value_coef=5.0)
    for dtype in (torch.float32, torch.bfloat16):
        policy = with_critic(gpt())
        batch = sample(policy, cfg, moved(gpt()), dtype=dtype)
        if factor == 1:
            step(policy, batch, cfg, dtype=dtype, first=True)
            continue
        with pytest.raises(SystemExit, match="do not add up"):
            step(policy, batch, cfg, dtype=dtype, first=True)


def test_adams_scaling_is_that_of_the_whole_gradient():
    policy = gpt()
    cfg = settings(tracin="reward", tracin_adam=True, beta=50.0)
    batch = sample(policy, cfg, moved(gpt()))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, eps=.01)
    g = row_gradients(policy, batch, cfg)
    whole = g.sum(0) + rest_gradient(policy, batch, cfg)
    G = target_gradient(policy, batch, ALL_ROWS, cfg)
    step(policy, batch, cfg, optimizer)
    scale = 1 / (whole.abs() + .01)     # of a first step, where v is the gradient's square
    assert close(batch.influence, g @ (G * scale), 1e-3)
    assert not close(g @ (G / (g.sum(0).abs() + .01)), g @ (G * scale), .01)


# ------------------------------------------------------------------------------------------------
# how long a step is

@pytest.mark.parametrize("target", ("self", "reward"))
@pytest.mark.parametrize("fraction", (.3, .5))
def test_norm_gives_the_step_the_length_of_all_rows(fraction, target):
    policy = gpt()
    cfg = settings(tracin=target, tracin_select="top", tracin_fraction=fraction, beta=.1,
                   tracin_normalizer="norm", tracin_layers=("mlp",), num_iterations=2)
    batch = sample(policy, cfg, moved(gpt()))
    g = row_gradients(policy, batch, cfg)
    rest = rest_gradient(policy, batch, cfg)
    seen, _ = step(policy, batch, cfg, lr=0.0)
    kept = (batch.weights != 0).float() @ g
    expected = kept * g.sum(0).norm() / kept.norm()
    assert abs(g.sum(0).norm() / kept.norm() - 1) > .01, "the kept rows are as long by themselves"
    for gradient in seen:
        assert close(flat(gradient, policy), expected + rest)
    assert float((batch.weights @ g).norm()) == pytest.approx(float(g.sum(0).norm()), rel=1e-4)


# ------------------------------------------------------------------------------------------------
# the average of the target's gradient

def averages(gradients, decay):
    """Of gradients in plain Python, each corrected for the start at 0."""
    mean = [0.0] * len(gradients[0])
    found = []
    for i, gradient in enumerate(gradients):
        mean = [decay * m + (1 - decay) * x for m, x in zip(mean, gradient)]
        found.append([m / (1 - decay ** (i + 1)) for m in mean])
    return found


def recorded(influence, batch, cfg):
    whole = Step(0, ALL_ROWS, 16, int(batch.loss_mask.sum()))
    with influence.record(batch, whole, True):
        for positions in grpo.micro_batches(grpo.sort_key(batch, whole, cfg), cfg):
            influence.forward_backward(positions)


@pytest.mark.parametrize("target, knobs", (
    ("self", {}), ("reward", dict(beta=.1)), ("reward", dict(tracin_val_prompts=4, beta=.1))))
def test_rows_are_scored_against_an_average(target, knobs, monkeypatch):
    """And only the newest gradient's share of it holds a row's own part."""
    monkeypatch.setattr(tracin, "ELSEWHERE", -2.0)
    leave = not knobs.get("tracin_val_prompts")
    cfg = settings(tracin=target, tracin_target_ema=.7, tracin_leave_one_out=leave, **knobs)
    policy = gpt()
    nets = nets_of(policy, cfg)
    targets = []
    for seed in range(3):
        batch = sample(policy, cfg, moved(gpt()), seed=seed)
        held_out = (sample(policy, cfg, seed=9 + seed), ALL_ROWS) if not leave else None
        g = row_gradients(policy, batch, cfg)
        G = target_gradient(policy, *(held_out or (batch, ALL_ROWS)), cfg)
        targets.append(G.tolist())
        mean = torch.tensor(averages(targets, .7)[-1])
        own = 0.0
        if leave:
            coef = torch.ones(16)
            if target == "reward":
                coef = target_coefficients(target, batch.rewards, batch.advantages)
                coef = coef * -batch.loss_mask.sum() / batch.advantages
            own = coef * g.square().sum(1) * .3 / (1 - .7 ** (seed + 1))
        recorded(nets.influence, batch, cfg)
        found = nets.influence.keep_helpful(held_out, 0, check=True)
        assert close(found.scores, g @ mean - own, 1e-3)
        assert found.true_error < 1e-5
        policy.zero_grad(set_to_none=True)
    assert not close(mean, torch.tensor(targets[-1]), .1), "the average is the newest gradient"


def test_an_average_starts_anew_where_the_gradient_turns():
    cfg = settings(tracin="self", tracin_target_ema=.9)
    nets = nets_of(gpt(), cfg)
    p, q = nets.trained[:2]
    influence = nets.influence

    def seen(x, y):
        G = {p: torch.full_like(p, x), q: torch.full_like(q, y * math.sqrt(p.numel() / q.numel()))}
        mean, share = influence.averaged(G)
        return float(mean[p].flatten()[0]), share

    assert seen(1.0, 0.0) == (pytest.approx(1.0), pytest.approx(1.0))
    # the cosine with the average, (1, 0): -0.2 is noise, -0.4 is elsewhere
    x, share = seen(-.2, math.sqrt(1 - .04))
    assert share == pytest.approx(.1 / .19) and x == pytest.approx((.09 - .02) / .19)
    nets = nets_of(gpt(), cfg)
    p, q = nets.trained[:2]
    influence = nets.influence
    seen(1.0, 0.0)
    x, share = seen(-.4, math.sqrt(1 - .16))
    assert share == pytest.approx(1.0) and x == pytest.approx(-.4) and influence.age == 1


def test_the_age_of_an_average_is_logged():
    policy = gpt()
    cfg = settings(tracin="self", tracin_target_ema=.9)
    nets = nets_of(policy, cfg)
    batch = sample(policy, cfg, None)
    ages = [update(nets, batch, None, cfg, 3)["tracin/target_age"] for _ in range(2)]
    assert ages == [1, 2], "a reader of the log cannot see how many steps are in the average"


def test_cosines_of_the_picture_are_of_halves_that_share_no_rollout(monkeypatch):
    for name, value in (("LARGEST", 64), ("SMALLEST", 16), ("DRAWS", 1), ("STREAM", 8)):
        monkeypatch.setattr(picture, name, value)
    cfg = settings()
    nets = nets_of(gpt(), cfg)
    rows = picture.cosines_by_size(nets, cfg, 0)
    assert [row["rollouts"] for row in rows] == [16] * 4 + [32] * 2 + [64]
    quarters = [picture.target_gradient(nets, cfg, 8, seed_for("size", 0, 0, i)) for i in range(4)]
    halves = [picture.average_of(*quarters[:2]), picture.average_of(*quarters[2:])]
    assert rows[4]["cosine"] == pytest.approx(tracin.cosine(*halves), rel=1e-5)
    averages = {}
    first, *_ = picture.cosines_of_averages(nets, cfg, 0, averages)
    G, H = (pair[0] for pair in (averages[0.0], averages[0.97]))
    assert first["cosine"] == pytest.approx(tracin.cosine(*averages[0.0]), rel=1e-5)
    assert tracin.cosine(G, H) == pytest.approx(1.0), "one step is its own average, but for length"


# ------------------------------------------------------------------------------------------------
# held-out rollouts

def test_held_out_rollouts_serve_for_several_iterations_times_their_ratio():
    cfg = settings(tracin="reward", tracin_val_prompts=4, tracin_val_every=3, beta=.1)
    policy = gpt()
    nets = nets_of(policy, cfg)
    targets = [collect_target(nets, it, cfg) for it in range(4)]
    assert targets[0].batch is targets[1].batch is targets[2].batch is not targets[3].batch
    batch, rows = targets[3]
    later = moved(policy, .05)
    new = sample(later, cfg, policy)
    coef = target_coefficients("reward", batch.rewards[rows], batch.advantages[rows])
    logp = completion_logprobs(later, batch.rollout[rows])
    ratio = (logp - batch.rollout.logp[rows]).detach().exp()
    G = flat_grad((coef[:, None] * ratio * logp * batch.loss_mask[rows]).sum(), later)
    without = flat_grad((coef[:, None] * completion_logprobs(later, batch.rollout[rows])
                         * batch.loss_mask[rows]).sum(), later)
    g = row_gradients(later, new, cfg)
    step(later, new, cfg, target=(batch, rows), lr=0.0)
    assert close(new.influence, g @ G)
    assert not close(new.influence, g @ without, .01), "the policy has hardly moved"
    once = nets_of(policy, replace(cfg, tracin_val_every=1))
    collect_target(once, 0, once.influence.cfg)
    assert once.influence.held_out is None, "rollouts that serve once outlive their iteration"


def test_a_reward_of_their_own_scores_held_out_rollouts_only():
    def shouted(prompts, completions):
        return [100.0 + len(text) for text in completions]

    cfg = settings(tracin="reward", tracin_val_prompts=4)
    cfg = replace(cfg, functions=cfg.functions | {"shouted": shouted}, tracin_val_reward="shouted")
    nets = nets_of(gpt(), cfg.check())
    held_out = collect_target(nets, 0, cfg).batch
    assert held_out.rewards.tolist() == shouted(None, held_out.completions)
    batch = grpo.collect(nets, PROMPTS, cfg, 7)
    plain = sample(gpt(), replace(cfg, tracin_val_reward=None))
    assert torch.equal(batch.rewards, plain.rewards) and batch.scores.shape == (16, 1)


@pytest.mark.parametrize("name, said", (
    ("nothing", "neither 'judge' nor a function"), ("", "must not be empty"),
    ("judge", "judge = None")))
def test_a_reward_that_is_missing_is_named(name, said):
    cfg = settings(tracin="reward", tracin_val_prompts=4)
    with pytest.raises(BadInput, match=f"tracin_val_reward = '{name}'.*{said}"):
        replace(cfg, tracin_val_reward=name).check()
    for knobs in (dict(tracin_val_reward="letters"), dict(tracin_val_every=2)):
        with pytest.raises(BadInput, match="tracin_val_prompts, which is 0"):
            replace(cfg, tracin_val_prompts=0, **knobs).check()


# ------------------------------------------------------------------------------------------------
# controls at equal counts

def chosen(influence, how, **more):
    keep, fallback = select(influence, how, **more)
    return keep.nonzero()[:, 0].tolist(), fallback


@pytest.mark.parametrize("prompts", ([0] * 4 + [1] * 4 + [2] * 4, [5] * 1 + [1] * 4 + [0] * 7))
def test_controls_keep_as_many_as_positive_does(prompts):
    generator = torch.Generator().manual_seed(1)
    prompts = torch.tensor(prompts)
    for positive in range(13):
        influence = torch.rand(12, generator=generator) + .1
        influence[torch.randperm(12, generator=generator)[positive:]] *= -1
        rewards = torch.rand(12, generator=generator)
        more = dict(generator=generator, advantages=rewards - .5, rewards=rewards, prompts=prompts)
        rows, fallback = chosen(influence, "positive", **more)
        assert fallback == (positive < 2)
        for how in ("bottom", "random", "top_advantage", "pods"):
            others, other_fallback = chosen(influence, how, **more)
            assert len(others) == len(rows) and other_fallback == fallback, how
        largest = sorted(range(12), key=lambda i: -abs(float(rewards[i]) - .5))[:len(rows)]
        assert chosen(influence, "top_advantage", **more)[0] == sorted(largest)


def test_pods_keeps_the_rewards_that_spread_widest_in_each_prompt():
    generator = torch.Generator().manual_seed(2)
    prompts = torch.arange(3).repeat_interleave(6)[torch.randperm(18, generator=generator)]
    for positive in (6, 9, 14, 17):
        influence = torch.ones(18)
        influence[positive:] = -1
        rewards = torch.rand(18, generator=generator).square()
        rows, _ = chosen(influence, "pods", rewards=rewards, prompts=prompts)
        sizes = []
        for number in range(3):
            group = (prompts == number).nonzero()[:, 0].tolist()
            kept = [i for i in rows if i in group]
            sizes.append(len(kept))
            spreads = [float(rewards[list(subset)].var(correction=0))
                       for subset in itertools.combinations(group, len(kept))]
            assert float(rewards[kept].var(correction=0)) == pytest.approx(max(spreads))
        assert sum(sizes) == positive and max(sizes) - min(sizes) <= 1
    rewards[0] = math.nan
    rows, _ = chosen(influence, "pods", rewards=rewards, prompts=prompts)
    assert len(rows) == 17, "a reward that is not known is in the middle"


@pytest.mark.parametrize("how", ("pods", "top_advantage"))
@pytest.mark.parametrize("critic", (False, True))
def test_controls_reach_the_step(how, critic):
    policy = with_critic(gpt()) if critic else gpt()
    cfg = settings(tracin="reward", tracin_select=how, critic=critic, mini_batch_size=8)
    batch, held_out = (sample(policy, cfg, seed=seed) for seed in (7, 8))
    step(policy, batch, cfg, target=(held_out, ALL_ROWS), lr=0.0)
    generator = torch.Generator().manual_seed(grpo.seed_for(3, 0))
    A = batch.advantages.mean(1) if critic else batch.advantages
    for rows in torch.randperm(16, generator=generator).split(8):
        keep, _ = select(batch.influence[rows], how, advantages=A[rows],
                         rewards=batch.rewards[rows], prompts=rows // 4)
        assert torch.equal(batch.weights[rows] != 0, keep) and 0 < keep.sum() < 8


# ------------------------------------------------------------------------------------------------
# functions of the config file, and what is written

def test_weigh_may_read_the_rows_of_its_influences(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "_given = []\n"
        "def weigh(influence, batch):\n"
        "    _given.append((influence, batch))\n"
        "    return batch.rewards\n")
    weigh = load_settings([str(config)]).functions["weigh"]
    cfg = settings(tracin="self", mini_batch_size=8, micro_batch_size=4)
    cfg = replace(cfg, tracin_select="weigh", functions=cfg.functions | {"weigh": weigh}).check()
    batch = sample(gpt(), cfg)
    step(gpt(), batch, cfg, lr=0.0)
    assert torch.equal(batch.weights, batch.rewards)
    given = weigh.__wrapped__.__globals__["_given"]
    generator = torch.Generator().manual_seed(grpo.seed_for(3, 0))
    for rows, (influence, part) in zip(torch.randperm(16, generator=generator).split(8), given):
        assert torch.equal(influence, batch.influence[rows])
        assert torch.equal(part.scores, batch.scores[rows])
        assert part.completions == [batch.completions[i] for i in rows.tolist()]
        assert torch.equal(part.rollout.tokens, batch.rollout.tokens[rows])
        assert torch.equal(part.advantages, batch.advantages[rows])


def test_weigh_may_have_parameters_of_its_own():
    def weigh(influence, least=0.0):
        return influence > least

    cfg = settings(tracin="self")
    cfg = replace(cfg, tracin_select="weigh", functions=cfg.functions | {"weigh": weigh}).check()
    batch = sample(gpt(), cfg)
    step(gpt(), batch, cfg, lr=0.0)
    assert torch.equal(batch.weights > 0, batch.influence > 0)


def test_scores_of_several_reward_functions_are_written(tmp_path, capsys):
    rule = ("[len(c) for c in completions]\n\n"
            "def vowels(prompts, completions):\n"
            "    return [None if 'e' in c else c.count('a') for c in completions]")
    run_of(tmp_path, gpt(), rule, "so\n", "I am\nyou\n", out_dir=tmp_path / "run", max_iters=1,
           max_completion_length=8, reward_funcs=("reward", "vowels"), reward_weights=(1.0, 0.0))
    rows = read(tmp_path / "run" / "samples.jsonl")
    for row in rows:
        text = row["completion"]
        vowels = None if "e" in text else text.count("a")
        assert row["scores"] == {"reward": len(text), "vowels": vowels}
        assert row["reward"] == len(text), "a function of weight 0 is only recorded"
    assert {row["scores"]["vowels"] for row in rows} > {None}


@pytest.mark.parametrize("every, stop, knobs", (
    (3, 1, {}), (3, 3, {}), (1, 2, {}), (3, 1, dict(top_k=20, critic=True))))
def test_a_resumed_run_has_its_average_and_its_rollouts(every, stop, knobs, tmp_path, capsys):
    """Bit for bit, in the middle of a window too."""
    def run(name, iterations, **more):
        run_of(tmp_path, gpt(), "[sum(map(ord, c)) % 7 for c in completions]", "so\nand\nit\n",
               "I am\nyou\nwhat\n", out_dir=tmp_path / name, max_iters=iterations,
               max_completion_length=8, tracin_val_prompts=2, tracin_val_every=every, beta=.1,
               tracin_target_ema=.8, learning_rate=.01, eval_interval=0, **knobs, **more)

    run("whole", 5)
    run("parts", stop)
    run("parts", stop + 1, resume=True)     # saves the rollouts that it was given
    run("parts", 5, resume=True)
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    assert read(whole / "samples.jsonl") == read(parts / "samples.jsonl")
    contents = [torch.load(path / "ckpt.pt", weights_only=True) for path in (whole, parts)]
    for field in ("policy", "influence"):
        assert same_tensors(*(content[field] for content in contents)), field
    assert contents[0]["influence"]["age"] > 1


def same_tensors(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tensors(a[name], b[name]) for name in a)
    return torch.equal(a, b) if torch.is_tensor(a) else a == b
