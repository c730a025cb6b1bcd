"""
From a batch to the weights: which rows and tokens a step learns from, in which order, what the
optimizer does with the gradient, and what stops a run. The arithmetic of a loss: test_loss.py.
"""
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from grpo import Meter, collect, optimizer_steps, update
from loss import losses, micro_batches
from rollout import completion_entropies, generate
from run.metrics import batch_metrics
from run.optimizer import learning_rate
from run.report import Clock, silent_clock
from worlds import (
    PROMPTS, assert_close, assert_near, forcing, forward, gradient, inputs_of, letters, number_gpt,
    plain_logps, random_ids, refusal, setup_of, settings, shaken, steps_of, world)

NAN, INF = math.nan, math.inf


def moved():
    return shaken(number_gpt(), .05, seed=6)


def weights_of(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# ------------------------------------------------------------------------------------------------
# which rows, in which order

def test_the_second_step_is_clipped_and_begins_with_no_gradient():
    """The first one is REINFORCE. Both beside completions that are read one by one."""
    cfg = settings(num_iterations=2, epsilon=.05)
    setup, batch = world(cfg)

    def expected(setup):
        loss = 0.0
        rows = plain_logps(setup.policy, batch.rollout)
        for A, logp, old_logp in zip(batch.advantages, rows, batch.rollout.logp):
            ratio = (logp - old_logp[:len(logp)]).exp()
            loss -= torch.min(ratio * A, ratio.clamp(.95, 1.05) * A).sum()
        return gradient(loss / batch.loss_mask.sum(), setup.trained)

    first = expected(setup)
    (one, two), _ = steps_of(setup, batch, cfg)
    assert_close(one, first, "the first step's gradient")
    again, _ = world(cfg)
    update(again, batch, None, settings(), 3)     # the first step alone
    assert_close(two, expected(again), "the second step's gradient", 1e-4)


@pytest.mark.parametrize("loss_type", ("dapo", "bnpo"))
def test_passes_mini_batches_and_micro_batches(loss_type):
    """bnpo divides by the tokens of a micro-batch, so its rows are mixed even in one mini-batch,
    and are not put in order by length: those of one prompt may all be long."""
    cfg = settings(num_iterations=2, mini_batch_size=4, micro_batch_size=2, loss_type=loss_type)
    _, batch = world(cfg)
    steps = list(optimizer_steps(batch, cfg, 3))
    assert [step.epoch for step in steps] == [0] * 3 + [1] * 3, "12 rows, 4 a step, twice"
    first, second = torch.cat([step.rows for step in steps]).view(2, 12)
    assert first.unique().tolist() == second.unique().tolist() == list(range(12)), (
        "a pass takes each row once")
    assert not torch.equal(first, second), "the second pass has the order of the first"
    other = torch.cat([step.rows for step in optimizer_steps(batch, cfg, 4)])
    assert not torch.equal(other[:12], first), "the seed does not choose the order"
    whole, _ = optimizer_steps(batch, replace(cfg, mini_batch_size=0), 3)
    assert (whole.rows.tolist() == list(range(12))) == (loss_type != "bnpo")
    lengths = batch.rollout.completion_mask.sum(1)
    for step in steps:
        assert step[2:] == (4, int(batch.loss_mask[step.rows].sum())), (
            "the divisors of a step are not its rows and its tokens with loss")
        pieces = micro_batches(batch.rollout, step.rows, cfg)
        assert [len(piece) for piece in pieces] == [2, 2]
        in_order = step.rows if loss_type == "bnpo" else step.rows[
            lengths[step.rows].argsort(stable=True)]
        assert torch.equal(torch.cat(pieces), in_order), "rows of a length share a micro-batch"


@pytest.mark.parametrize("knobs", [
    dict(beta=.1, entropy_coef=.1), dict(importance_sampling_level="sequence", loss_type="grpo"),
    dict(top_entropy_quantile=.4), dict(mask_truncated_completions=True, loss_type="dr_grpo"),
    dict(loss_type="bnpo")])
def test_the_size_of_micro_batches_changes_memory_only(knobs):
    found = []
    for size in (12, 5, 1):
        cfg = settings(micro_batch_size=size, **knobs)
        setup, batch = world(cfg, reference=moved())
        shaken(setup.policy, .01)        # ratios and clips differ
        (step,), m = steps_of(setup, batch, cfg)
        found.append(torch.cat([step, torch.tensor([m["policy_loss"]])]))
    for other in found[1:]:
        same = torch.allclose(other, found[0], rtol=1e-4, atol=1e-5 * float(found[0].abs().max()))
        assert same == (knobs.get("loss_type") != "bnpo"), "the step depends on micro-batches"


def sometimes(prompts, completions):
    """Equal rewards for the first prompt; nothing about some completions."""
    found = [833.5426 if prompt == PROMPTS[0].text else x
             for prompt, x in zip(prompts, letters(prompts, completions))]
    return [None if i in (0, 3, 8) else x for i, x in enumerate(found)]


@pytest.mark.parametrize("loss_type", ("grpo", "dapo"))
def test_dropped_groups_leave_the_divisor(loss_type):
    functions = {"sometimes": sometimes, "half": lambda completions: [.5] * len(completions)}
    keep = settings(functions, loss_type=loss_type)
    drop = replace(keep, zero_std_groups="drop")
    setup, batch = world(keep)
    assert (batch.advantages != 0).view(2, 6).any(1).tolist() == [False, True], "groups that teach"
    assert batch_metrics(batch, keep)["frac_reward_zero_std"] == .5
    (kept,), _ = steps_of(setup, batch, keep)
    (dropped,), _ = steps_of(*world(drop), drop)
    tokens = batch.loss_mask.sum(1)
    left = {"grpo": .5, "dapo": float(tokens[6:].sum() / tokens.sum())}[loss_type]
    assert_close(kept, dropped * left, "the step with equal rewards kept")


class Waits(TorchDispatchMode):
    """What would wait for a GPU, if the tensors were there: [name of an operation]."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = []
        plain = torch.Tensor.tolist
        monkeypatch.setattr(torch.Tensor, "tolist",
                            lambda x: self.found.append("tolist") or plain(x))

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            x is not None and x.dtype == torch.bool
            for x in (args[1] if isinstance(args[1], (list, tuple)) else ()))
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            self.found.append(name)
        return op(*args, **(kwargs or {}))


def test_a_micro_batch_waits_for_a_gpu_once(monkeypatch):
    cfg = settings(beta=0.1, micro_batch_size=3)
    setup, batch = world(cfg, reference=moved())
    step = next(optimizer_steps(batch, cfg, 1))
    for log, expected in ((silent_clock, 4), (Clock(setup.device, on=True), 8)):
        with Waits(monkeypatch) as waits:
            for loss, _ in losses(setup, setup.policy, batch, step, cfg):
                loss.total.backward()
                log.loss(loss)
        assert waits.found == expected * ["tolist"], "for the size of each, and for its line"


def test_an_infinite_log_prob_of_the_sampler_ends_the_run():
    """The loss is NaN then, though the better completion's ratio is clipped."""
    cfg = settings()
    setup, batch = world(cfg)
    row = int(batch.advantages.argmax())
    batch.rollout.logp = batch.rollout.logp.clone()
    batch.rollout.logp[row, 0] = -INF
    assert batch.loss_mask[row, 0] and batch.advantages[row] > 0
    before = [p.clone() for p in setup.trained]
    assert "log-prob" in refusal(update, setup, batch, None, cfg, seed=1)
    assert all(map(torch.equal, setup.trained, before)), "a step was taken"


# ------------------------------------------------------------------------------------------------
# which tokens

def test_truncated_completions_carry_no_loss():
    cfg = settings(mask_truncated_completions=True)
    _, batch = world(cfg)
    ended = batch.rollout.ended
    assert 0 < ended.sum() < 12
    expected = batch.rollout.completion_mask & ended[:, None]
    assert torch.equal(batch.loss_mask, expected), "all tokens of those that ended carry loss"
    step, = optimizer_steps(batch, cfg, seed=3)
    assert step.num_tokens == int(expected.sum()), "the others count in the divisor"


@pytest.mark.parametrize("knobs", (
    dict(num_iterations=3), dict(num_iterations=2, mini_batch_size=6, micro_batch_size=5)))
def test_the_entropy_quantile_is_of_each_step_as_the_policy_is_then(knobs):
    """As TRL: entropies of now, at or above their quantile."""
    cfg = settings(top_entropy_quantile=.3, **knobs)
    setup, batch = world(cfg, lr=.5)
    masks = []

    def watch(step, norm):
        entropy = completion_entropies(setup.policy, batch.rollout, cfg.temperature)[step.rows]
        mask = batch.loss_mask[step.rows]
        expected = mask & (entropy >= entropy[mask].quantile(.7))
        assert torch.equal(batch.policy_mask[step.rows] & mask, expected), (
            "the tokens of a step are not those of which the policy is least sure now")
        masks.append(expected)

    update(setup, batch, None, cfg, 3, Meter(setup, cfg, watch=watch))
    assert not torch.equal(masks[0], masks[-1]), "the steps changed no entropy: another rate?"


def test_the_entropy_bonus_is_the_mean_over_tokens_with_loss():
    cfg = settings(entropy_coef=.3, loss_type="grpo", mask_truncated_completions=True)
    setup, batch = world(cfg)
    m = update(setup, batch, None, cfg, 3)
    bonus = .3 * float(batch.rollout.entropy[batch.loss_mask].mean())
    found = m["policy_loss"] - m["loss"]
    assert found == pytest.approx(bonus, rel=1e-4), (
        f"the entropy takes {found:.4f} off the loss: must be 0.3 times its mean, {bonus:.4f}")


@pytest.mark.parametrize("knobs", [
    dict(), dict(top_k=4, kl_in="reward", kl_estimator="k1"), dict(top_k=4, entropy_coef=.1)])
def test_forced_tokens_carry_no_loss(knobs):
    """Outside of top_k the log-prob of one is -inf, and 0 * inf would be NaN."""
    cfg = settings(beta=.1, **knobs)
    forced = random_ids(12, 5, 12).where(random_ids(12, 5, 10, seed=2) < 3, -1)
    setup = setup_of(cfg, reference=moved())
    setup.generate = lambda *args, **more: generate(*args, **more | {"respond": forcing(forced)})
    batch = collect(setup, PROMPTS, cfg, 7)
    r = batch.rollout
    is_forced = r.completion_mask & ~r.sampled_mask
    assert is_forced.sum() > 5 < r.sampled_mask.sum()
    if cfg.top_k:
        drawable = r.allowed.gather(2, r.tokens[:, -r.logp.shape[1]:, None])[:, :, 0]
        assert (is_forced & ~drawable).any()
    loss = forward(setup, batch, cfg)
    slope = gradient(loss.policy, [loss.logp]).view_as(is_forced)
    assert not slope[~r.sampled_mask].any(), "a forced token is learned from"
    assert slope[r.sampled_mask].any()
    for x in (batch.ref_logp, batch.advantages, batch.kl, *steps_of(setup, batch, cfg)[0]):
        assert x.isfinite().all()


# ------------------------------------------------------------------------------------------------
# what is done with the gradient

def test_the_gradient_is_scaled_down_to_max_grad_norm():
    cfg = settings()
    (free,), m = steps_of(*world(cfg), cfg)
    (capped,), _ = steps_of(*world(cfg), replace(cfg, max_grad_norm=.01))
    assert m["grad_norm"] == pytest.approx(float(free.norm()), rel=1e-4), "it is that before"
    assert_close(capped, free * (.01 / free.norm()), "the gradient after clipping", 1e-4)


@pytest.mark.parametrize("decay, warmup, expected", [
    ("constant", 2, [.5, 1, 1, 1]), ("linear", 2, [.5, 1, 1, .5]),
    ("cosine", 0, [1, .853553, .5, .146447])])
def test_learning_rates(decay, warmup, expected):
    cfg = settings(lr_decay=decay, warmup_iters=warmup, max_iters=4, learning_rate=1.0)
    assert [learning_rate(it, cfg) for it in range(4)] == pytest.approx(expected, abs=1e-6)


def test_matrices_decay_and_no_bias_or_gain_does():
    """In the optimizer of a run. Without a gradient AdamW does nothing else."""
    cfg = settings(weight_decay=.1, learning_rate=.5)
    setup = grpo.prepare(cfg, inputs_of(number_gpt()))
    before = [p.detach().clone() for p in setup.policy.parameters()]
    for p in setup.trained:
        p.grad = torch.zeros_like(p)
    setup.optimizer.step()
    for now, then in zip(setup.policy.parameters(), before, strict=True):
        expected = .95 * then if now.dim() == 2 else then
        assert_near(now.detach(), expected, what=f"a weight of {now.dim()} dimensions")


@pytest.mark.parametrize("rank", (0, 2))
def test_equal_rewards_teach_nothing_while_the_policy_is_the_reference(rank):
    """The KL in the reward is 0 then. Sampler and reference differ by rounding, of which the
    group's standard deviation would make a whole step."""
    cfg = settings(lambda completions: [1.0] * len(completions), beta=.05, kl_in="reward",
                   kl_estimator="k1", lora_rank=rank)
    setup, batch = world(cfg)
    batch.rollout.logp += 1e-6 * torch.rand(batch.rollout.logp.shape) * batch.rollout.sampled_mask
    grpo.add_advantages(setup, batch, cfg)
    assert not batch.advantages.any(), "rounding is trained on"
    shaken(setup.policy, .01)
    apart = grpo.collect(setup, setup.prompts, cfg, 1)
    assert apart.advantages.any() and apart.kl.any(), "they are apart now, and there is a KL"


# ------------------------------------------------------------------------------------------------
# what stops a run before the step

def spoil_moments(setup, batch):
    """And, after a step with them, the weights."""
    setup.optimizer.state[setup.trained[0]]["exp_avg"] = torch.tensor([INF])
    setup.policy.wpe.weight.data.fill_(NAN)


# what is made wrong: what the line that ends the run names, and how
SPOILS = {
    "a weight": ("wpe.weight", lambda setup, batch: setup.policy.wpe.weight.data.fill_(NAN)),
    "a moment": ("moment", spoil_moments),
    "an advantage": ("reward", lambda setup, batch: batch.advantages.fill_(INF)),
    "a gradient": ("gradient", lambda setup, batch: setup.policy.ln_f.weight.register_hook(
        lambda g: g * NAN)),
    "a log-prob": ("log-prob", lambda setup, batch: batch.rollout.logp[0].fill_(INF)),
    "a log-prob below": ("log-prob", lambda setup, batch: batch.rollout.logp[0].fill_(-INF))}


@pytest.mark.parametrize("what", SPOILS)
def test_what_is_not_finite_is_named(what):
    name, spoil = SPOILS[what]
    setup, batch = world(settings())
    spoil(setup, batch)
    before = weights_of(setup.policy)
    said = refusal(update, setup, batch, None, settings(), 3)
    assert name in said, f"the line does not name {what}: {said}"
    assert torch.equal(weights_of(setup.policy).nan_to_num(7), before.nan_to_num(7)), (
        "a step was taken")


def test_a_dropout_of_the_model_is_off_where_it_is_trained():
    """Trainer and sampler must agree about every token, so a policy is in eval mode throughout."""
    base = number_gpt()
    base.h[0].mlp.add_module("dropout", torch.nn.Dropout(.5))
    setup = grpo.prepare(settings(), inputs_of(base.train()))
    assert not any(part.training for part in setup.policy.modules()), "a layer is in train mode"


def test_a_model_with_dropout_is_found_out():
    setup, batch = world(settings())
    setup.policy.lm_head.register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, .1))
    meter = Meter(setup, settings(), check=True)
    assert "ratio" in refusal(update, setup, batch, None, settings(), 3, meter)
    assert update(setup, batch, None, settings(), 3)["num_steps"] == 1
