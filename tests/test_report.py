"""What a run prints: numbers in its lines, and each warning in its case alone."""
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from grpo import Loss
from run import report
from common.supervised import Progress
from run.flags import notes, problems, problems_of_evaluation
from run.report import StepLog, print_iteration, print_verdict, print_warnings, reward_of
from run.settings import Settings
from worlds import printed, refusal

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves; memory is 812 MB."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(report.time, "monotonic", lambda: now.time)
    monkeypatch.setattr(report, "memory", lambda device: 812 * 2 ** 20)
    return now


def a_loss(**parts):
    return Loss(**{name: torch.tensor(x, requires_grad=True) for name, x in parts.items()})


FOUR_ROWS = SimpleNamespace(ended=torch.ones(4), **dict.fromkeys(
    ("attention_mask", "completion_mask", "sampled_mask"), torch.ones(4, 2, dtype=torch.bool)))

# what each line must hold, whatever its words
NUMBERED = """
[Micro 0] 1. | mem=812 MB | time=0.000s
[Micro 0] 2. | 4 rows | mem=812 MB | time=1.500s
[Micro 0] 3. | mem=812 MB | time=0.250s | rewards=0.5000±0.3536
[Micro 0] 4. | mem=812 MB | time=0.125s | pg_loss=-0.012345 | beta*kl=0.001234 | total=-0.011111
[Micro 1] 4. | time=0.000s | pg_loss=0.250000 | critic=2.000000 | beta*kl=0.001000 | total=2.251000
5. | mem=812 MB | step=1.000s | time=2.875s
"""


def test_a_function_of_weight_0_has_no_part_in_the_verdict():
    cfg = Settings(reward_funcs=("a", "watched"), reward_weights=(2.0, 0.0))
    for watched in (math.nan, None, 1e9):
        row = {"rewards/a": 0.5, "rewards/watched": watched}
        assert reward_of({k: x for k, x in row.items() if x is not None}, cfg) == 1.0


def test_a_verdict_knows_that_a_clip_is_on():
    cfg = Settings(reward_funcs=("a",), reward_weights=(1.0,), expect_rise=0.3)
    rows = [{"rewards/a": 0.1}, {"rewards/a": 0.2}]
    for name, share in (("clip_ratio/region_mean", 0.3), ("cispo_clip_ratio", 0.3),
                        ("clip_ratio/region_mean", 0.0), ("loss", 0.3)):
        metrics = [{name: share}, {name: None}]
        assert ("clip" in refusal(print_verdict, rows, cfg, metrics)) == (
            share > 0 and "clip" in name), "it blames the clip, or does not, without reason"


def test_the_numbered_lines_have_times_scores_and_losses(clock, capsys):
    log = StepLog(CPU, micro_batch_size=2, on=True)
    clock.time += 1.5
    log.generated(FOUR_ROWS)
    clock.time += 0.25
    log.scored(torch.tensor([0.25, 0.75, math.nan]))
    clock.time += 0.125
    log.loss(a_loss(policy=-0.012345, kl=0.001234))
    log.loss(a_loss(policy=0.5, entropy=-0.25, kl=0.001, critic=2.0))
    clock.time += 1.0
    log.stepped()
    lines = capsys.readouterr().out.splitlines()
    for line, parts in zip(lines, NUMBERED.strip().splitlines(), strict=True):
        number, *rest = parts.split(" | ")
        assert line.startswith(number)
        assert all(part in line for part in rest), line
    StepLog(CPU, micro_batch_size=4, on=True).generated(FOUR_ROWS)
    assert "4 rows" not in capsys.readouterr().out, "one micro-batch has them all"


def test_a_log_that_is_off_says_nothing(capsys):
    log = StepLog(None, micro_batch_size=4, on=False)
    log.generated(FOUR_ROWS)
    log.scored(None)
    log.loss(None)
    log.stepped()
    assert capsys.readouterr().out == ""


METRICS = dict(iteration=12, loss=-0.0111, policy_loss=-0.0111, kl_loss=0.0012, reward=0.57,
               grad_norm=0.83, step_time=2.0, forced=0.125)


def line(cfg=Settings(), **changes):
    return printed(print_iteration, METRICS | changes, cfg, 2480, 100.9)


def test_the_line_of_an_iteration():
    found = line()
    assert found.count("\n") == 1
    for part in ("iter 12/100: ", "loss -0.0111 (main -0.0123, beta*kl 0.0012)", "reward 0.5700",
                 "grad_norm 0.830", "1240 tok/s", "time 2.00s", "eta 1m40s"):
        assert part in found
    assert "(main -0.0123, critic 0.3000, beta*kl 0.0012)" in line(critic_loss=0.3, loss=0.2889)
    assert "(main -0.0133, beta*kl 0.0012)" in line(entropy_loss=-0.001), "main holds the bonus"
    assert " 12.5 % environment" in line(Settings(functions={"environment": None}))
    assert " 1.50 calls" in line(**{"tools/call_frequency": 1.5})


def test_progress_is_a_line_every_ten_seconds(clock, capsys):
    progress = Progress("policy", "step", 500, start=100)
    for done in range(101, 121):
        clock.time += 1
        if progress.is_due():
            progress.show(done, "loss 4.421, ")
    assert capsys.readouterr().out == "policy: step 111/500, loss 4.421, 389 s left\n"


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
    "tracin/self_share": 0.1, "tracin/invariant_error": 1e-7}
EVERYTHING = GOOD | INFLUENCE | {
    "kl": 0.1, "kl_loss": 0.01, "kl_grad_share": 0.2,
    "val/var_explained": 0.5, "val/std": 0.1, "val/mean": 0.2,
    "tools/failure_frequency": 0, "rewards/a/std": 0.3, "rewards/b/std": 0.2, "rewards/a/mean": 0.5,
    "rewards/b/mean": 0.25, "rewards/a/abstained": 0.0, "rewards/b/abstained": 0.0,
    "ref_tensors_differing": 0, "ref_distance_left": 0.0}
# kind | what is wrong | words of its sentence
CASES = """
reward | "reward": NaN, "reward_min": NaN, "reward_max": NaN | returned None
equal | "reward_min": 0.5, "reward_max": 0.5 | of the batch are 0.5,
constant b | "rewards/b/std": 0.0 | 'b' gave every completion 0.25
tokens | "num_completion_tokens": 0 | no completion tokens carry loss
identical | "identical_completions": 0.75 | 75% of the completions
logp | "logp": -1e-4 | mean -1.0e-04
entropy | "entropy": 0.1 | from 2.000 to 0.100
gradient | "grad_norm": 5e-7 | grad_norm 5.0e-07
ratio | "sampling/sampling_logp_difference/mean": 0.0512 | disagree by 0.051 nats
steps | "ratio_min": 1.0, "ratio_max": 1.0, "num_steps": 4 | ratio is 1 in all 4 steps
kl | "kl": 5.25 | KL 5.2 nats per token is exploding
negative | "kl": -0.01 | KL -0.01 is negative
kl sign | "kl_loss": -0.01 | in the loss is -0.01, while the KL is 0.1
sum | "reward": 0.6 | by their weights are 0.5
mask | "tokens_without_loss": 3 | 3 sampled tokens carry no loss
kl share | "kl_grad_share": 3.0 | 3.0 times the policy's
kl share | "kl_grad_share": 1e-5, "kl": 0.4 | at a KL of 0.40
length | "completions/clipped_ratio": 1.0 | truncated at 32 tokens
tools | "tools/failure_frequency": 1.0 | every call was answered with an error
values | "val/std": 0.0 | all are 0.2
critic | "val/var_explained": -0.2 | explains -0.20 of the returns' variance
sync | "ref_tensors_differing": 3 | 3 tensors of the reference
empty | "tracin/empty_steps": 1 | kept no rollout
fallback | "tracin/fallback": 1.0, "tracin/positive_ratio": 0.05 | only 5% of the rollouts
contrast | "tracin/target_contrast": 0.2 | spread 0.20 times as wide
noise | "tracin/target_cosine": 0.05 | cosine 0.05; raise
self | "tracin/self_share": 1.18 | 1.18 times all influence
invariant | "tracin/invariant_error": 2e-3 | relative error 2.0e-03
"""
PLAIN = Settings()
FULL = Settings(tracin="self", beta=0.1, critic=True, ref_model_mixup_alpha=1.0,
                reward_funcs=("a", "b"), reward_weights=(0.5, 1.0),
                functions={"tools": {"add": len}, "environment": None})
GROUPS = torch.tensor([[0.0, 0.5, 1.0], [0.2, 0.2, 0.6]])


def found(m, cfg=FULL, dtype=torch.float32, first=GOOD, groups=GROUPS):
    return dict(problems(m, cfg, dtype, first, groups))


def test_each_warning_fires_in_its_case_alone():
    assert found(GOOD, PLAIN) == {} == found(EVERYTHING)
    for line in CASES.strip().splitlines():
        kind, wrong, words = line.split(" | ")
        shown = found(EVERYTHING | json.loads("{" + wrong + "}"))
        assert list(shown) == [kind], kind
        assert words in shown[kind] and "nan" not in shown[kind], shown[kind]


def test_groups_of_equal_rewards_teach_nothing_without_a_critic():
    equal = GOOD | {"frac_reward_zero_std": 1.0, "advantage_min": 0.0, "advantage_max": 0.0}
    assert list(found(equal, PLAIN)) == ["advantages"]
    assert "[0 0.5 1], [0.2 0.2 0.6]" in found(equal, PLAIN)["advantages"], "rewards by group"
    tiny = GOOD | {"advantage_min": -1e-8, "advantage_max": 1e-8}
    assert list(found(tiny, PLAIN)) == ["advantages"]
    assert list(found(equal | {"reward": math.nan}, PLAIN)) == ["reward"], "nothing was scored"
    by_reward = Settings(multi_objective_aggregation="normalize_then_sum")
    assert found(equal | {"reward_min": 1.0}, by_reward) == {}, "rewards that cancel teach"
    critic = Settings(critic=True)
    values = {"val/var_explained": 0.5, "val/std": 0.1}
    assert found(equal | values, critic) == {}, "its baseline is its own"


def test_advantages_of_the_config_file_that_teach_nothing():
    """They are near zero, or what goes by rewards leaves no rollout to learn from."""
    equal = GOOD | {"reward_min": 0.5, "reward_max": 0.5, "frac_reward_zero_std": 1.0}
    own = dict(functions={"advantage": None})
    assert found(equal, Settings(**own)) == {}
    assert "keep" in found(equal, Settings(**own, zero_std_groups="drop"))["dropped"]
    assert found(GOOD, Settings(**own, zero_std_groups="drop")) == {}
    small = {"advantage_min": -1e-8, "advantage_max": 1e-8}
    assert list(found(GOOD | small, Settings(**own))) == ["advantages"]


def test_advantages_of_a_group_add_up_to_0():
    """To a thousandth of the largest; a critic, or a function, has a baseline of its own."""
    assert list(found(GOOD | {"advantage_group_mean": 0.01}, PLAIN)) == ["baseline"]
    assert found(GOOD | {"advantage_group_mean": 1e-3}, PLAIN) == {}
    large = {"advantage_min": -120.0, "advantage_max": 150.0, "advantage_group_mean": 0.01}
    assert found(GOOD | large, PLAIN) == {}
    assert found(GOOD | {"advantage_group_mean": 1.0}, Settings(functions={"advantage": len})) == {}
    without = EVERYTHING.copy()
    del without["advantage_group_mean"]
    assert found(without) == {}, "a critic's are by token"


def test_a_reward_is_the_weighed_sum_of_the_scores():
    """Where one function abstains the mean of its group stands in, so only of one alone is it known
    what the sum is."""
    one = Settings(reward_funcs=("a", "watched"), reward_weights=(2.0, 0.0))
    m = GOOD | {
        "reward": 1.0, "rewards/a/mean": 0.5, "rewards/a/std": 0.3, "rewards/a/abstained": 0.2,
        "rewards/watched/std": 1.0, "rewards/watched/abstained": 0.0}
    assert found(m, one) == {}
    assert list(found(m | {"reward": 0.9}, one)) == ["sum"]
    assert found(EVERYTHING | {"reward": 0.6, "rewards/b/abstained": 0.1}) == {}


def test_a_spread_that_is_rounding():
    """Of the rewards in a group, however far the groups are apart."""
    rounding = GROUPS * 1e-6 + torch.tensor([[0.0], [300.0]])
    for cfg in (PLAIN, Settings(scale_rewards="none")):
        assert found(GOOD | {"reward": 150.0}, cfg, groups=rounding.double()).keys() == {"rounding"}
    small = GROUPS * 1e-5
    assert list(found(GOOD | {"reward": 5e-6}, PLAIN, groups=small)) == ["rounding"]
    assert found(GOOD | {"reward": 5e-6}, Settings(scale_rewards="none"), groups=small) == {}
    assert found(GOOD, PLAIN, groups=GROUPS * 1e-2) == {}


def test_a_gradient_near_zero():
    """Below 1e-6, or a millionth of the first one."""
    small = GOOD | {"grad_norm": 5e-5}
    assert found(small, PLAIN) == {}
    assert list(found(small, PLAIN, first=GOOD | {"grad_norm": 80.0})) == ["gradient"]
    constant = {"reward_min": 0.5, "reward_max": 0.5, "advantage_min": 0.0, "advantage_max": 0.0}
    assert list(found(GOOD | {"grad_norm": 0.0} | constant, PLAIN)) == ["equal"], "it says why"


def test_a_ratio_of_1_is_right_in_a_single_step_and_where_nothing_is_learned():
    fresh = GOOD | {"ratio_min": 1.0, "ratio_max": 1.0}
    assert found(fresh, PLAIN) == {}
    several = fresh | {"num_steps": 4, "ratio_max": 1 + 1e-6}
    assert list(found(several, PLAIN)) == ["steps"]
    assert found(several | {"ratio_min": 0.9999}, PLAIN) == {}
    equal = {"reward_min": 0.5, "reward_max": 0.5, "advantage_min": 0.0, "advantage_max": 0.0}
    assert list(found(several | equal, PLAIN)) == ["equal"]


def test_where_the_reward_has_risen_one_answer_may_be_right():
    solved = GOOD | {"reward": 0.95, "identical_completions": 1.0, "entropy": 0.01, "kl": 0.5,
                     "kl_loss": 0.05, "kl_grad_share": 1.5, "completions/clipped_ratio": 1.0}
    with_kl = Settings(beta=0.1)
    assert found(solved, with_kl) == {}
    kinds = {"identical", "entropy", "kl share", "length"}
    assert found(solved | {"reward": 0.6}, with_kl).keys() == kinds


def test_a_kl_of_k1_may_be_negative_by_chance():
    k1 = Settings(beta=0.1, kl_estimator="k1")
    assert found(GOOD | {"kl": -0.01}, k1) == {}
    many = GOOD | {"kl_loss": -1e-3, "num_completion_tokens": 5000}
    assert list(found(many | {"kl": -0.01}, k1)) == ["negative"]
    assert found(many | {"kl": -1e-4}, k1) == {} == found(many | {"kl": 1e-4}, k1)
    assert list(found(many | {"kl": 1e-4}, Settings(beta=0.1))) == ["kl sign"]
    assert found(GOOD | {"kl": 1e-4}, Settings(beta=0.1, kl_in="reward")) == {}, "it has no part"


def test_a_sync_that_mixes_leaves_a_part_of_the_distance():
    mixes = Settings(beta=0.1, ref_model_mixup_alpha=0.6)
    synced = GOOD | {"kl": 0.1, "kl_loss": 0.01, "ref_tensors_differing": 9}
    assert found(synced | {"ref_distance_left": 0.4}, mixes) == {}
    assert list(found(synced | {"ref_distance_left": 1.0}, mixes)) == ["sync"]


def test_what_fell_between_two_evaluations():
    before = {"reward": 0.5, "distinct_2": 0.9, "kl": 0.0}
    for after, kinds in (
            ({"reward": 0.46, "distinct_2": 0.5}, []), ({"reward": 0.9, "distinct_2": 0.1},
             ["distinct"]), ({"reward": 0.4}, ["fell"]), ({"reward": math.nan}, []),
            ({"kl": 0.6}, ["two kls"]), ({"kl": 0.4}, [])):
        found = problems_of_evaluation(before, before | after, noise=0.02, logged_kl=0.1)
        assert [kind for kind, _ in found] == kinds
    assert not [*problems_of_evaluation(before, before | {"kl": 0.6}, noise=0.02)], "not known"


def test_notes_of_what_may_be_right(capsys):
    assert dict(notes(GOOD, [1.0] * 9)) == {}
    assert list(dict(notes(GOOD | {"step_time": 9.0}, [30.0, 1.0, 2.0, 2.0]))) == ["slow"]
    assert dict(notes(GOOD | {"step_time": 9.0}, [1.0] * 3)) == {}, "too few to compare with"
    warned = {}
    for it in (1, 2, 30):
        m = GOOD | {"iteration": it, "loss": 1e-6}
        print_warnings(m, PLAIN, torch.float32, warned, GOOD, GROUPS, [])
    assert capsys.readouterr().out.count("note: a loss of 0.0000") == 1, "said once"


def test_a_warning_about_a_metric_that_is_not_there_is_a_mistake():
    """A misspelled name must not be a warning that never comes."""
    for missing in re.findall(r'\w \| "(.+?)"', CASES):
        if missing in ("tracin/invariant_error", "kl_grad_share", "ref_tensors_differing"):
            continue        # not every iteration has them
        some = {name: x for name, x in EVERYTHING.items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            found(some, first=some)


def test_a_run_lacks_the_metrics_that_its_settings_do_not_bring():
    no_step = GOOD | {"num_completion_tokens": 0, "num_steps": 0, "logp": 0.0}
    assert list(found(no_step, Settings(tracin="self", beta=0.1))) == ["tokens"]
    unknown = {"tracin/target_cosine": math.nan, "tracin/self_share": math.nan}
    of_function = EVERYTHING | unknown
    del of_function["tracin/target_contrast"]
    assert found(of_function, Settings(tracin="target")) == {}


def test_what_is_no_problem():
    assert list(found(EVERYTHING | {"tracin/invariant_error": math.nan})) == ["invariant"]
    assert found(EVERYTHING | {"tracin/invariant_error": 2e-3}, dtype=torch.bfloat16) == {}
    leaves_out = Settings(tracin="self", tracin_leave_one_out=True)
    assert found(EVERYTHING | {"tracin/self_share": 0.9}, leaves_out) == {}
    assert found(EVERYTHING | {"val/var_explained": -0.2, "iteration": 20}) == {}


def test_a_warning_comes_back_after_ten_iterations():
    warned = {}
    said = [it for it in range(1, 24) if printed(
        print_warnings, EVERYTHING | {"iteration": it, "kl": 9.0}, FULL, torch.float32, warned)]
    assert said == [1, 11, 21]
