"""What a run prints: numbers in its lines, and each warning in its case alone."""
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from config import Settings
from grpo import Loss
from run import report
from common.supervised import Progress
from run.report import StepLog, print_iteration, print_warnings, problems
from worlds import printed

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves; memory is 812 MB."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(report.time, "time", lambda: now.time)
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
    "iteration": 30, "reward": 0.5, "reward_min": 0.0, "reward_max": 1.0,
    "frac_reward_zero_std": 0.5, "num_completion_tokens": 9, "num_steps": 1,
    "sampling/sampling_logp_difference/mean": 0.0, "completions/clipped_ratio": 0.5}
INFLUENCE = {
    "tracin/selected_ratio": 0.6, "tracin/empty_steps": 0, "tracin/fallback": 0.0,
    "tracin/positive_ratio": 0.6, "tracin/target_contrast": 1.0, "tracin/target_cosine": 0.9,
    "tracin/self_share": 0.1, "tracin/invariant_error": 1e-7}
EVERYTHING = GOOD | INFLUENCE | {"kl": 0.1, "val/var_explained": 0.5, "tools/failure_frequency": 0}
# kind | what is wrong | words of its sentence
CASES = """
reward | "reward": NaN, "reward_min": NaN, "reward_max": NaN | returned None
equal | "reward_min": 0.5, "reward_max": 0.5 | of the batch are 0.5,
tokens | "num_completion_tokens": 0 | no completion tokens carry loss
ratio | "sampling/sampling_logp_difference/mean": 0.0512 | disagree by 0.051 nats
kl | "kl": 5.25 | KL 5.2 nats per token is exploding
length | "completions/clipped_ratio": 1.0 | truncated at 32 tokens
tools | "tools/failure_frequency": 1.0 | every call was answered with an error
critic | "val/var_explained": -0.2 | explains -0.20 of the returns' variance
empty | "tracin/empty_steps": 1 | kept no rollout
fallback | "tracin/fallback": 1.0, "tracin/positive_ratio": 0.05 | only 5% of the rollouts
contrast | "tracin/target_contrast": 0.2 | spread 0.20 times as wide
noise | "tracin/target_cosine": 0.05 | cosine 0.05; raise
self | "tracin/self_share": 1.18 | 1.18 times all influence
invariant | "tracin/invariant_error": 2e-3 | relative error 2.0e-03
"""
PLAIN = Settings()
FULL = Settings(tracin="self", beta=0.1, critic=True,
                functions={"tools": {"add": len}, "environment": None})


def found(m, cfg=FULL, dtype=torch.float32):
    return dict(problems(m, cfg, dtype))


def test_each_warning_fires_in_its_case_alone():
    assert found(GOOD, PLAIN) == {} == found(EVERYTHING)
    for line in CASES.strip().splitlines():
        kind, wrong, words = line.split(" | ")
        shown = found(EVERYTHING | json.loads("{" + wrong + "}"))
        assert list(shown) == [kind], kind
        assert words in shown[kind] and "nan" not in shown[kind], shown[kind]


def test_groups_of_equal_rewards_teach_nothing_without_a_critic():
    equal = GOOD | {"frac_reward_zero_std": 1.0}
    assert list(found(equal, PLAIN)) == ["groups"]
    assert list(found(equal | {"reward": math.nan}, PLAIN)) == ["reward"], "nothing was scored"
    by_reward = Settings(multi_objective_aggregation="normalize_then_sum")
    assert found(equal | {"reward_min": 1.0}, by_reward) == {}, "rewards that cancel teach"
    critic = Settings(critic=True)
    assert found(equal | {"val/var_explained": 0.5}, critic) == {}, "its baseline is its own"


def test_a_warning_about_a_metric_that_is_not_there_is_a_mistake():
    """A misspelled name must not be a warning that never comes."""
    for missing in re.findall(r'\w \| "(.+?)"', CASES):
        if missing == "tracin/invariant_error":         # not every step computes it
            continue
        some = {name: x for name, x in EVERYTHING.items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            found(some)


def test_a_run_lacks_the_metrics_that_its_settings_do_not_bring():
    no_step = GOOD | {"num_completion_tokens": 0, "num_steps": 0}
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
