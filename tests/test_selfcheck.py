"""run/selfcheck.py: a broken method is stopped before training, an unbroken one never is."""
import functools
import itertools
import os

import pytest
import torch

import grpo as trainer
from run.loop import print_verdict
from run.script import BadInput
from run.selfcheck import check_method
from test_algorithm import settings, world

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
group_advantages = trainer.group_advantages
kl_estimate = trainer.kl_estimate
clipped_objective = trainer.clipped_objective
aggregate = trainer.aggregate
loss_masks = trainer.loss_masks
grpo_loss = trainer.grpo_loss
kl_penalty = trainer.kl_penalty


@functools.cache
def nets():
    return world(settings())[0]


def checked(**knobs):
    """What the check of a run with these settings says; None: all is well."""
    if knobs.get("loss_type") == "cispo":
        knobs |= dict(epsilon_high=5.0)
    cfg = settings(**knobs)
    try:
        check_method(nets(), cfg, trainer.collect, trainer.optimizer_steps, trainer.loss_of)
    except (SystemExit, BadInput) as e:
        return str(e)


# ------------------------------------------------------------------------------------------------
# what is right passes

@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_setting_passes(loss_type, level):
    for scale, kl_in, estimator in itertools.product(
            ("group", "batch", "none"), ("loss", "reward"), ("k1", "k2", "k3")):
        knobs = dict(loss_type=loss_type, importance_sampling_level=level, scale_rewards=scale,
                     kl_in=kl_in, kl_estimator=estimator, beta=0.04)
        assert checked(**knobs) is None, f"a run with {knobs} is refused"


@pytest.mark.parametrize("knobs", [
    dict(use_bias_correction_kl=True, beta=0.1), dict(delta=2.0, epsilon=0.0),
    dict(top_entropy_quantile=0.2, mask_truncated_completions=True),
    dict(num_iterations=3, mini_batch_size=4, micro_batch_size=2, zero_std_groups="drop"),
    dict(temperature=0.5, top_k=4, speed=()), dict(tracin="self"), dict(num_generations=2)])
def test_rarer_settings_pass(knobs):
    assert checked(**knobs) is None


def test_the_check_leaves_random_numbers_and_weights_alone():
    before = [p.clone() for p in nets().policy.parameters()]
    state = torch.get_rng_state()
    assert checked(beta=0.1) is None
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, nets().policy.parameters()))
    assert all(p.grad is None for p in nets().policy.parameters())


def test_a_loss_type_of_ones_own_passes(monkeypatch):
    def sum_over(divisor):
        return lambda x, mask, step, cfg: (x * mask).sum() / divisor(mask, step)

    def new_type():
        cfg = settings()
        cfg.loss_type = "mine"
        check_method(nets(), cfg, trainer.collect, trainer.optimizer_steps, trainer.loss_of)

    monkeypatch.setattr(trainer, "aggregate", sum_over(lambda mask, step: 7 * step.num_rows))
    new_type()
    monkeypatch.setattr(trainer, "aggregate", sum_over(lambda mask, step: mask.sum()))
    with pytest.raises(SystemExit, match="micro-batches add up to"):
        new_type()


# ------------------------------------------------------------------------------------------------
# what is broken is named

def advantage_sign(rewards, G, scale):
    return -group_advantages(rewards, G, scale)


def groups_across_prompts(rewards, G, scale):
    B = len(rewards) // G
    return group_advantages(rewards.view(B, G).T.flatten(), G, scale).view(G, B).T.flatten()


def std_over_prompts(rewards, G, scale):
    r = rewards.view(-1, G)
    return ((r - r.mean(1, keepdim=True)) / (r.std(0) if scale == "group" else 1)).flatten()


def std_of_the_batch(rewards, G, scale):
    return group_advantages(rewards, G, "batch" if scale == "group" else scale)


def no_baseline(rewards, G, scale):
    return rewards / 100


def ignore_mask(x, mask, step, cfg):
    return aggregate(x, torch.ones_like(mask), step, cfg)


def mean_over_positions(x, mask, step, cfg):
    return (x * mask).mean()


def divide_by_rows(x, mask, step, cfg):
    return (x * mask).sum() / step.num_rows


def mean_of_micro_batch(x, mask, step, cfg):
    return (x * mask).sum() / mask.sum()


def forget_the_end_token(rollout, cfg):
    mask, policy_mask = loss_masks(rollout, cfg)
    return mask & mask.roll(-1, 1), policy_mask


def loss_on_padding(rollout, cfg):
    mask, policy_mask = loss_masks(rollout, cfg)
    return torch.ones_like(mask), policy_mask


def loss_sign(*arguments):
    loss, terms = grpo_loss(*arguments)
    return -loss, terms


def ratio_upside_down(logp, old_logp, mask, cfg):
    return (old_logp - logp).exp()


def kl_sign(logp, ref_logp, estimator):
    return -kl_estimate(logp, ref_logp, estimator)


def reference_and_policy_exchanged(logp, ref_logp, estimator):
    return kl_estimate(ref_logp, logp, "k1")


def no_kl(logp, ref_logp, estimator):
    return 0 * logp


def penalty_sign(rollout, ref_logp, cfg):
    penalty, kl = kl_penalty(rollout, ref_logp, cfg)
    return -penalty, kl


BROKEN = [
    ("group_advantages", advantage_sign, {}, "the better completion of a group got the smaller"),
    ("group_advantages", groups_across_prompts, {}, "rows of different prompts are in one group"),
    ("group_advantages", no_baseline, {}, "the baseline is not the group's mean"),
    ("group_advantages", std_over_prompts, {}, "along the wrong dimension"),
    ("group_advantages", std_of_the_batch, {}, "the standard deviation of their own group"),
    ("aggregate", ignore_mask, dict(loss_type="grpo"), "divided by 32 and not by 16"),
    ("aggregate", ignore_mask, dict(loss_type="dapo"), "padding changes the loss"),
    ("aggregate", mean_over_positions, {}, "divisor: with loss_type = 'dapo'"),
    ("aggregate", divide_by_rows, {}, "divided by 8 and not by 24"),
    ("aggregate", mean_of_micro_batch, {}, "the losses of micro-batches add up to"),
    ("loss_masks", forget_the_end_token, {}, "not all tokens of a completion, the end token"),
    ("loss_masks", loss_on_padding, {}, "positions after the end of a completion carry loss"),
    ("grpo_loss", loss_sign, {}, "with a positive advantage less likely"),
    ("importance_ratio", ratio_upside_down, {}, "with a positive advantage less likely"),
    ("kl_estimate", kl_sign, dict(beta=0.1), "KL: a step moves the policy away"),
    ("kl_estimate", reference_and_policy_exchanged, dict(beta=0.1), "policy and reference are"),
    ("kl_estimate", no_kl, dict(beta=0.1), "beta = 0.1, yet the KL changes no step"),
    ("kl_penalty", penalty_sign, dict(beta=0.1, kl_in="reward", kl_estimator="k1"),
     "KL: a step moves the policy away")]


@pytest.mark.parametrize(
    "name, broken, knobs, sentence", BROKEN, ids=[f"{x[0]}-{x[1].__name__}" for x in BROKEN])
def test_what_is_broken_is_named(name, broken, knobs, sentence, monkeypatch):
    monkeypatch.setattr(trainer, name, broken)
    said = checked(**knobs)
    assert said and sentence in said, f"{broken.__name__} in place of {name}: {said}"
    assert said.startswith("stopped before training: ") and "in run/selfcheck.py" in said


def test_a_completion_scored_for_another_prompt_is_named(monkeypatch):
    def mixed(reward_funcs, prompts, completions, cfg):
        texts = list(prompts) * cfg.num_generations
        return trainer.score(reward_funcs, texts, completions)

    monkeypatch.setattr(trainer, "score_rows", mixed)
    assert "scored as an answer to another prompt" in checked()


@pytest.mark.parametrize("name, broken, sentence", [
    ("group_advantages", advantage_sign, "got the smaller advantage"),
    ("group_advantages", groups_across_prompts, "rows of different prompts"),
    ("group_advantages", std_over_prompts, "along the wrong dimension"),
    ("kl_estimate", kl_sign, "away from the reference"),
    ("aggregate", ignore_mask, "mask: padding changes the loss")])
def test_the_run_stops_before_its_first_rollout(
        name, broken, sentence, grpo, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, name, broken)
    with pytest.raises(SystemExit, match=sentence):
        grpo(tmp_path / "run", "--beta=0.1")
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "it trained, or was about to"
    assert os.listdir(tmp_path / "run") == []


# ------------------------------------------------------------------------------------------------
# the verdict at the end

def test_a_reward_that_does_not_rise_ends_with_exit_code_1(script, tiny, tmp_path):
    done = script("grpo.py", *tiny.flags, f"--out_dir={tmp_path / 'run'}", "--expect_rise=50",
                  "--max_iters=1")
    assert done.returncode == 1
    assert "verdict: does not work, the reward went from" in done.stderr
    assert "tests/test_algorithm.py" in done.stderr, "it says nothing of what to look at"


def test_a_reward_that_rises_ends_well(grpo, tmp_path):
    config = tmp_path / "letters.py"
    config.write_text("def reward(prompts, completions):\n"
                      "    return [text.count('a') / (1 + len(text)) for text in completions]\n")
    flags = [config, "--judge=None", "--eval_judge=None", "--max_iters=6", "--learning_rate=0.01"]
    text = grpo(tmp_path / "run", *flags, "--expect_rise=0.02")
    assert "verdict: works, the reward rose from" in text.splitlines()[-1]
    with pytest.raises(SystemExit, match="does not work"):
        grpo(tmp_path / "other", *flags, "--expect_rise=2", "--num_eval_prompts=2")


def test_a_reward_that_is_missing_did_not_rise():
    cfg = settings()
    cfg.expect_rise = 0.1
    rows = [{"rewards/reward": 0.5}, {"rewards/reward": None}]
    with pytest.raises(SystemExit, match="from 0.500 to nan"):
        print_verdict(rows, cfg)
