"""What a run prints: the numbers in its lines, its verdict, and what a warning knows to be right.
That each fires in its case: test_notes.py."""
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from common.progress import Progress
from loss import Loss
from run import report
from run.flags import notes, problems, problems_of_evaluation
from run.report import Clock, Warned, print_iteration, print_verdict, print_warnings
from run.settings import Settings as AllSettings
from worlds import printed, refusal, skip_for

CPU = torch.device("cpu")
Settings = partial(AllSettings, reward_funcs=(), reward_weights=())


# ------------------------------------------------------------------------------------------------
# lines

@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves; memory is 812 MB."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(report.time, "monotonic", lambda: now.time)
    monkeypatch.setattr(report, "memory", lambda device: 812 * 2 ** 20)
    return now


def numbers_in(text):
    return re.findall(r"-?\d+(?:\.\d+)?", text)


def a_loss(kl_by_token=None, kl_in_reward=None, **parts):
    mask = torch.tensor([[True, True, False]])
    known = kl_by_token or kl_in_reward
    batch = SimpleNamespace(
        loss_mask=mask, ref_logp=torch.zeros(1, 3) if known else None,
        kl=torch.tensor([kl_in_reward or [0.0, 0.0, 0.0]]))
    by_token = torch.tensor([kl_by_token]) if kl_by_token else None
    parts = {name: torch.tensor(x, requires_grad=True) for name, x in parts.items()}
    return Loss(**parts, kl_by_token=by_token, batch=batch)


FOUR_ROWS = SimpleNamespace(ended=torch.ones(4), **dict.fromkeys(
    ("attention_mask", "completion_mask", "sampled_mask"), torch.ones(4, 2, dtype=torch.bool)))

# how each line begins, and the numbers that it must hold, whatever its words
NUMBERED = """
[Micro 0] 1. | 812 | 0.000
[Micro 0] 2. | 812 | 1.500
[Micro 0] 3. | 812 | 0.250 | 0.5000 | 0.3536
[Micro 0] Ref | 812 | 0.125
[Micro 0] Held | 812 | 4.000
[Micro 0] 4. | 812 | 0.500 | -0.012345 | 0.020000 | 0.001234 | -0.011111
[Micro 1] 4. | 812 | 0.000 | 0.250000 | 2.000000 | 0.300000 | 0.000000 | 2.250000
Influence | 812 | 2.000
5. | 812 | 1.000 | 9.375
"""


def test_the_numbered_lines_have_memory_times_scores_and_losses(clock):
    def iteration(on):
        log = Clock(CPU, on)
        clock.time += 1.5
        log.sampled(FOUR_ROWS)
        clock.time += 0.25
        log.end("score", torch.tensor([0.25, 0.75, math.nan]))
        clock.time += 0.125
        log.end("reference")
        clock.time += 4
        log.sampled(FOUR_ROWS, "held-out")
        clock.time += 0.5
        log.loss(a_loss(policy=-0.012345, kl=0.001234, kl_by_token=[0.03, 0.01, 9.0]))
        log.loss(a_loss(policy=0.5, entropy=-0.25, critic=2.0, kl_in_reward=[0.2, 0.4, 9.0]))
        log.end("record")
        clock.time += 2
        log.end("influence")
        clock.time += 1.0
        log.end("update")
        clock.time += 0.25
        log.end("sync")
        logs.append(log)
        assert sum(log.seconds.values()) == clock.time - log.start, "the phases do not add up"

    logs = []
    lines = printed(iteration, True).splitlines()
    for line, parts in zip(lines, NUMBERED.strip().splitlines(), strict=True):
        start, *numbers = parts.split(" | ")
        assert line.startswith(start)
        assert set(numbers) <= set(numbers_in(line.removeprefix(start))), line
    assert printed(iteration, False) == "", "it was turned off"
    for log in logs:
        assert log.num_sampled == 16, "tok/s is of held-out rollouts, too, which take time"
        assert log.seconds == {
            "sample": 1.5, "score": 0.25, "reference": 0.125, "held-out": 4.0, "record": 0.5,
            "influence": 2.0, "update": 1.0, "sync": 0.25}, "time is booked elsewhere"


METRICS = {
    "iteration": 12, "loss": -0.0111, "policy_loss": -0.0111, "kl_loss": 0.0012, "reward": 0.57,
    "reward_std": 0.19, "kl": 0.012, "entropy": 3.084, "completions/mean_length": 24.25,
    "grad_norm": 0.83, "step_time": 2.0, "forced": 0.125, "num_steps": 1}


def test_the_line_of_an_iteration():
    def line(cfg=Settings(), **changes):
        return printed(print_iteration, METRICS | changes, cfg, 2480, 100.9)

    assert line().count("\n") == 1
    # iteration, reward and spread, KL, entropy, length, norm, loss and its parts, tokens a second,
    # seconds, what is left
    parts = "12 100 0.5700 0.1900 0.0120 3.08 24.2 0.830 -0.0111 -0.0123 0.0012 1240 2.00 1 40"
    assert numbers_in(line()) == parts.split()
    assert {"-0.0123", "0.3000", "0.0012"} < set(numbers_in(line(critic_loss=0.3, loss=0.2889)))
    assert "-0.0133" in line(entropy_loss=-0.001), "the policy's part holds the bonus"
    assert "12.5" in line(Settings(functions={"environment": None})), "the environment's share"
    assert "1.50" in line(**{"tools/call_frequency": 1.5})
    assert "0.06" in line(**{"val/var_explained": 0.06})
    several = line(num_steps=4, ratio=1.01, ratio_std=0.28, **{"clip_ratio/region_mean": 0.413})
    assert {"1.010", "0.280", "41.3"} <= set(numbers_in(several)), "what the clip does is not shown"


def test_the_line_of_influence():
    """Counts of those that were scored, before the selection; then how many are kept."""
    batch = SimpleNamespace(influence=torch.tensor([1.0, -1.0, 0.0, 2.0, math.nan]),
                            row_weights=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]))
    m = {f"tracin/{name}": x for name, x in dict(
        positive_ratio=0.5, negative_ratio=0.25, zero_ratio=0.25, mean_ip=0.5, std_ip=1.29,
        min_ip=-1.0, max_ip=2.0, target_rows=64, target_cosine=0.09, self_share=0.57).items()}
    said = numbers_in(printed(report.print_influence, m, batch))
    assert said == "4 2 1 1 0.5 1.29 -1 2 2 64 0.09 0.57".split()


def test_progress_is_a_line_every_ten_seconds(clock):
    """Of 500 steps, 100 were done before."""
    def steps():
        progress = Progress("policy", "step", 500, start=100)
        for done in range(101, 121):
            clock.time += 1
            if progress.is_due():
                progress.show(done, "loss 4.421, ")

    said = printed(steps)
    assert said.count("\n") == 1 and said.startswith("policy: ")
    assert numbers_in(said) == ["111", "500", "4.421", "389"]


# ------------------------------------------------------------------------------------------------
# the verdict

def test_a_verdict_is_of_the_rewards_that_are_known():
    cfg = Settings(expect_rise=0.3)
    for known in ([0.5], [0.4, 0.6]):
        rows = [{"prompt_rewards": x} for x in ([0.1, None, 0.2], [None, *known])]
        assert "0.150" in printed(print_verdict, rows, cfg)
        refusal(print_verdict, rows[::-1], cfg)
    refusal(print_verdict, [{"prompt_rewards": [0.1]}, {"prompt_rewards": [None]}], cfg)


# ------------------------------------------------------------------------------------------------
# warnings

GOOD = {
    "iteration": 30, "reward": 0.5, "reward_min": 0.0, "reward_max": 1.0, "reward_std": 0.3,
    "frac_reward_zero_std": 0.5, "num_completion_tokens": 9, "num_steps": 1, "grad_norm": 0.8,
    "advantage_min": -1.2, "advantage_max": 1.5, "advantage_group_mean": 1e-8,
    "tokens_without_loss": 0, "identical_completions": 0.1, "entropy": 2.0,
    "logp": -2.0, "loss": 0.01, "step_time": 2.0, "ratio_min": 0.9, "ratio_max": 1.1,
    "sampling/sampling_logp_difference/mean": 0.0, "completions/clipped_ratio": 0.5}
INFLUENCE = {
    "tracin/selected_ratio": 0.6, "tracin/empty_steps": 0, "tracin/fallback": 0.0,
    "tracin/positive_ratio": 0.6, "tracin/target_contrast": 1.0, "tracin/target_cosine": 0.9,
    "tracin/self_share": 0.1, "tracin/target_rows": 64}
EVERYTHING = GOOD | INFLUENCE | {
    "kl": 0.1, "kl_loss": 0.01, "kl_grad_share": 0.2,
    "val/var_explained": 0.5, "val/std": 0.1, "val/mean": 0.2,
    "tools/failure_frequency": 0, "rewards/a/std": 0.3, "rewards/b/std": 0.2, "rewards/a/mean": 0.5,
    "rewards/b/mean": 0.25,
    "ref_tensors_differing": 0, "ref_distance_left": 0.0}
del EVERYTHING["advantage_group_mean"]      # with a critic advantages are by token
PLAIN = Settings()
FULL = Settings(tracin="self", beta=0.1, critic=True,
                reward_funcs=("a", "b"), reward_weights=(0.5, 1.0),
                functions={"tools": {"add": len}, "environment": None})
FULL.ref_model_mixup_alpha = 1.0        # a setting of extras/variants, which may be gone
GROUPS = torch.tensor([[0.0, 0.5, 1.0], [0.2, 0.2, 0.6]])


def found(m, cfg=FULL, first=GOOD, groups=GROUPS):
    return dict(problems(m, cfg, [first], groups))


def test_nothing_is_said_of_a_healthy_iteration():
    """What each warning is of: test_notes.py."""
    assert found(GOOD, PLAIN) == {} == found(EVERYTHING)


CONSTANT = dict(reward_min=0.5, reward_max=0.5, advantage_min=0.0, advantage_max=0.0)
EQUAL = dict(frac_reward_zero_std=1.0, advantage_min=0.0, advantage_max=0.0)
TINY = dict(advantage_min=-1e-8, advantage_max=1e-8)
ONE_ANSWER = {"identical_completions": 1.0, "entropy": 0.01, "kl": 0.5, "kl_loss": 0.05,
              "kl_grad_share": 1.5, "completions/clipped_ratio": 1.0}
VALUES = {"val/var_explained": 0.5, "val/std": 0.1}
SYNCED = dict(kl=0.1, kl_loss=0.01, ref_tensors_differing=9)
OWN = dict(functions={"advantage": None})
# what is the case: settings, what differs from GOOD metrics, the warnings that it has
EDGES = {
    "groups of equal rewards": ({}, EQUAL, "advantages"),
    "advantages near zero": ({}, TINY, "advantages"),
    "rewards that cancel in their sum": (
        dict(multi_objective_aggregation="normalize_then_sum"), EQUAL | {"reward_min": 1.0}, ""),
    "a critic is a baseline of its own": (dict(critic=True), EQUAL | VALUES, ""),
    "own advantages near zero": (OWN, TINY, "advantages"),
    "own advantages that are dropped": (OWN | dict(zero_std_groups="drop"), EQUAL | {
        "advantage_max": 1.0}, "dropped"),
    "a gradient that is small": ({}, dict(grad_norm=5e-5), ""),
    "no gradient where nothing teaches": ({}, CONSTANT | {"grad_norm": 0.0}, "equal"),
    "a ratio of 1 in a single step": ({}, dict(ratio_min=1.0, ratio_max=1.0), ""),
    "a ratio of 1 in four": ({}, dict(ratio_min=1.0, ratio_max=1 + 1e-6, num_steps=4), "steps"),
    "one answer, and the reward has risen": (dict(beta=0.1), ONE_ANSWER | {"reward": 0.95}, ""),
    "one answer, and it has not": (
        dict(beta=0.1), ONE_ANSWER | {"reward": 0.6}, "identical entropy kl_share length"),
    "a k1 below 0": (dict(beta=0.1, kl_estimator="k1"), dict(kl=-0.01, kl_loss=1e-3), ""),
    "a KL that the loss has with the other sign": (
        dict(beta=0.1), dict(kl=1e-4, kl_loss=-1e-3), "kl_sign"),
    "advantages of a group that do not add up to 0": (
        {}, dict(advantage_group_mean=0.01), "baseline"),
    "a sync that mixes and does nothing": (
        dict(beta=0.1, ref_model_mixup_alpha=0.6), SYNCED | {"ref_distance_left": 1.0}, "sync"),
    "a target function that knows no halves": (dict(tracin="target"), INFLUENCE | {
        "tracin/target_cosine": math.nan, "tracin/self_share": math.nan,
        "tracin/target_contrast": 0.1}, ""),
    "own parts that are left out": (
        dict(tracin="self", tracin_leave_one_out=True), INFLUENCE | {"tracin/self_share": 0.9}, "")}


@pytest.mark.parametrize("case", EDGES)
def test_a_warning_knows_what_is_right(case):
    knobs, changes, kinds = EDGES[case]
    skip_for(**knobs)
    shown = {kind.replace(" ", "_") for kind in found(GOOD | changes, Settings(**knobs))}
    assert shown == set(kinds.split()), f"{case}: warned of {shown or 'nothing'}"


def test_small_is_meant_beside_what_it_is_measured_by():
    """A gradient beside the first one, a spread of the rewards in a group beside what is added to
    it, however far the groups are apart."""
    small = GOOD | {"grad_norm": 5e-5}
    assert list(found(small, PLAIN, first=GOOD | {"grad_norm": 80.0})) == ["gradient"]
    apart = GROUPS.double() * 1e-6 + torch.tensor([[0.0], [300.0]])
    unscaled = Settings(scale_rewards="none")
    for cfg, groups, kinds in ((PLAIN, apart, ["rounding"]), (unscaled, apart, []),
                               (PLAIN, GROUPS * 1e-5, ["rounding"]), (PLAIN, GROUPS * 1e-2, [])):
        assert list(found(GOOD, cfg, groups=groups)) == kinds


def flags_between(after, cfg=PLAIN, kls=(0.1,) * 5, **before):
    """Kinds of the flags of an evaluation, after one with the rewards 0.5 of 8 prompts."""
    before = {"prompt_rewards": [0.5] * 8, "distinct_2": 0.9, "kl": 0.0} | before
    rows = [{"kl": kl} for kl in kls]
    return [kind for kind, _ in problems_of_evaluation(before, before | after, cfg, rows)]


def test_what_fell_between_two_evaluations():
    """More than three standard errors of the prompts' changes, of those that have both rewards."""
    changes = [0.3, -0.4, 0.2, -0.5, 0.6, -0.2, 0.1, -0.1]      # of mean 0, standard error 0.13
    for shift, kinds in ((-0.38, []), (-0.42, ["fell"]), (0.42, [])):
        assert flags_between({"prompt_rewards": [0.5 + x + shift for x in changes]}) == kinds
    assert flags_between({"prompt_rewards": [None] * 5 + [0.1] * 3}) == [], "too few to say"
    assert flags_between({"prompt_rewards": [None] * 4 + [0.1] * 4}) == ["fell"]
    assert flags_between({"distinct_2": 0.1}) == ["distinct"]
    assert flags_between({"distinct_2": 0.5}) == []


def test_the_kl_of_an_evaluation_is_held_beside_the_logged_one():
    """Not at the beginning, or where the reference follows the policy."""
    assert flags_between({"kl": 0.6}) == ["reference"] and flags_between({"kl": 0.4}) == []
    assert flags_between({"kl": 0.6}, kls=(0.1,) * 4) == [] == flags_between({"kl": 0.6}, kls=())
    assert flags_between({"kl": 0.04}, kls=(0.001,) * 5) == []
    skip_for(ref_model_sync_steps=4)
    assert flags_between({"kl": 0.6}, Settings(beta=0.1, ref_model_sync_steps=4)) == []


def test_a_warning_comes_back_after_ten_iterations_and_a_note_never():
    for m, cfg, expected in ((EVERYTHING | {"kl": 9.0}, FULL, [1, 11, 21]),
                             (GOOD | {"loss": 1e-6}, PLAIN, [1])):
        warned = Warned()
        said = [it for it in range(1, 24) if printed(
            print_warnings, m | {"iteration": it}, cfg, warned)]
        assert said == expected


def test_the_warnings_of_a_run_stand_once_more_at_its_end():
    warned = Warned()
    for it in (3, 4, 9):
        printed(print_warnings, EVERYTHING | {"kl": 9.0 + it, "iteration": it}, FULL, warned)
    said = printed(warned.repeat)
    assert said.count("KL") == 1 and numbers_in(said)[:4] == ["3", "3", "9", "18.0"], said
    assert printed(Warned().repeat) == "", "a healthy run has none"


# ------------------------------------------------------------------------------------------------
# success, and what looks like it

RISEN = GOOD | {"reward": 0.99}


def noted(m, cfg=PLAIN, first=GOOD, **more):
    return [kind for kind, _ in notes(m, cfg, [first], **more)]


def test_a_solved_task_is_noted_and_not_warned_of():
    ones = CONSTANT | dict(reward=1.0, reward_min=1.0, reward_max=1.0, frac_reward_zero_std=1.0)
    assert noted(GOOD | ones) == ["solved"] and not found(GOOD | ones, PLAIN)
    nearly = GOOD | {"reward": 0.99}        # no rise of half a spread is possible
    assert noted(GOOD | ones, first=nearly) == ["solved"]
    assert not found(GOOD | ones, PLAIN, first=nearly)
    from_the_start = GOOD | ones | {"reward_std": 0.0}
    assert not noted(from_the_start, first=from_the_start), "a constant reward is no success"
    assert list(found(from_the_start, PLAIN, first=from_the_start)) == ["equal"]
    several = EVERYTHING | {"rewards/b/std": 0.0, "rewards/b/mean": 1.0}
    assert not found(several, FULL, first=EVERYTHING), "a reward of several that is solved"
    assert list(found(several | {"rewards/b/mean": 0.0}, FULL, first=EVERYTHING)) == ["constant"]


def test_tokens_without_loss_are_noted_where_no_setting_leaves_them_out():
    """Whoever edits grpo.loss_mask_of may mean it."""
    masked = GOOD | {"tokens_without_loss": 3}
    assert noted(masked) == ["mask"] and not found(masked, PLAIN)
    assert not noted(masked, Settings(mask_truncated_completions=True))


@pytest.mark.parametrize("sign", [{"identical_completions": 0.75}, {"entropy": 0.3}])
def test_a_collapse_is_told_though_the_reward_has_risen(sign):
    assert noted(RISEN | sign) == ["one answer"] and not found(RISEN | sign, PLAIN)
    assert len(found(GOOD | sign, PLAIN)) == 1 and not noted(GOOD | sign)


def test_a_loss_of_0_is_called_right_only_where_all_else_is():
    zero = GOOD | {"loss": 1e-6}
    assert noted(zero) == ["zero"]
    assert not noted(zero, warned=True), "beside a warning"
    assert not noted(zero | {"grad_norm": 4e-4}), "beside a gradient of 0.000"
    assert not noted(zero | {"num_steps": 4}), "the ratio is not 1 in the second step"
    assert noted(zero | {"reward": 0.99, "identical_completions": 0.75}) == ["one answer"]


def test_a_gradient_of_100_times_the_median_is_named_from_the_fifth_iteration_on():
    for norm, norms, kinds in ((81.0, [0.8] * 4, ["explosive"]), (79.0, [0.8] * 4, []),
                               (81.0, [0.8] * 3, []), (81.0, [0.0] * 9, [])):
        earlier = [GOOD | {"grad_norm": x} for x in norms]
        said = [kind for kind, _ in problems(
            GOOD | {"grad_norm": norm}, PLAIN, earlier, GROUPS)]
        assert said == kinds, f"{norm} after {norms}: {said}"


def test_a_large_target_shows_its_noise_in_the_line_of_influence_and_is_not_warned_of():
    """The shipped job has 256 rollouts."""
    noisy = EVERYTHING | {"tracin/target_cosine": -0.02, "tracin/self_share": 1.67}
    assert list(found(noisy)) == ["noise", "self"]
    assert found(noisy | {"tracin/target_rows": 256}) == {}
