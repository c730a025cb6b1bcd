"""Studies: the maths by hand and by brute force, runs that stop and go on, what is refused."""
import itertools
import json
import math
import os
import random
import signal
import statistics
import time
from types import SimpleNamespace

import pytest

import grpo as trainer
import plot
from config import load_settings
from data.comments import get_splits
from run.compare import (as_markdown, differences_of, holm, least_p, paired_difference,
                         permutation_p, summarise, t_quantile, value_on_line, verdict)
from run.files import write_json
from run.script import BadInput
from study import found_wrong, going_on, jobs_of, read_study, row_of, thirds

STUDY = """
'''Does a part do as well as all?'''
config = {config!r}
arms = {{"all": {{}}, "half": {{"tracin": "reward"}}}}
seeds = (1, 2)
grid = {{"beta": (0.1,)}}
measure = "eval_judge/toxicity"
controls = ("all",)
tested = ("half",)
"""


@pytest.fixture
def made(tiny, tmp_path):
    """A study of two arms and two seeds of the tiny world: .path, .config, .out; rewrite it by
    .write(old, new)."""
    config = tmp_path / "tiny.py"
    flags = (flag.removeprefix("--").split("=", 1) for flag in tiny.flags)
    lines = [name + " = " + (x if x[0] in "0123456789(" else repr(x)) for name, x in flags]
    config.write_text("\n".join(lines + ["log_micro = False", ""]))
    path = tmp_path / "halves.py"
    path.write_text(STUDY.format(config=str(config)))

    def write(old, new):
        assert old in path.read_text(), f"the study of this test has no {old!r} to change"
        path.write_text(path.read_text().replace(old, new))

    return SimpleNamespace(path=str(path), config=str(config), out=str(tmp_path / "out"),
                           write=write)


def logs_of(folder):
    """The bytes of what a run measured, without times, and its last weights."""
    texts = [open(os.path.join(folder, name), "rb").read()
             for name in ("samples.jsonl", "eval.jsonl")]
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        rows = [json.loads(line) for line in f]
    return texts, [{k: v for k, v in row.items() if k != "step_time"} for row in rows]


# ------------------------------------------------------------------------------------------------
# the maths


def test_permutation_p_by_hand():
    assert permutation_p([1, 2, 3, 4, 5]) == 2 / 32, "only all signs and their opposites are as far"
    assert permutation_p([1, -1]) == 1, "a sum of 0 is no evidence"
    assert permutation_p([0.1, 0.2, -0.3]) == 1, "digits of a sum of 0 are no evidence"


def test_permutation_p_by_brute_force():
    rng = random.Random(0)
    d = [rng.gauss(0.4, 1) for _ in range(8)]
    sums = [abs(sum(s * x for s, x in zip(signs, d)))
            for signs in itertools.product((-1, 1), repeat=8)]
    assert permutation_p(d) == sum(s >= abs(sum(d)) - 1e-12 for s in sums) / 256
    many = [rng.gauss(0.2, 1) for _ in range(30)]
    z = abs(sum(many)) / math.sqrt(sum(x * x for x in many))
    normal = 2 * (1 - statistics.NormalDist().cdf(z))
    assert permutation_p(many) == pytest.approx(normal, abs=0.02), "random flips of 30 differences"
    assert permutation_p([1.0] * 30) == 1 / 20001, "p is never 0: the true signs are one of them"


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []


def test_line_is_read_between_and_beyond_its_points():
    points = [(0, 1), (1, 3), (2, 5)]
    assert [value_on_line(points, x) for x in (0.5, 4)] == pytest.approx([2, 9])
    assert value_on_line([(0, 0), (1, 3), (2, 0)], 5) == pytest.approx(1), "least squares: slope 0"
    assert value_on_line([(1, 2), (1, 4)], 7) == 3, "without a slope: the mean"


@pytest.mark.parametrize("freedom, known", [(1, 12.706), (4, 2.776), (19, 2.093)])
def test_t_quantile(freedom, known):
    assert t_quantile(freedom) == pytest.approx(known, abs=1e-3)


def test_only_seeds_that_both_have_are_compared():
    c = paired_difference({1: 1.0, 2: 3.0, 3: 9.0}, {1: 0.0, 2: 0.0, 4: 5.0})
    assert (c["n"], c["mean"]) == (2, 2) and c["high"] == pytest.approx(2 + 12.706, abs=1e-2)


def arms_with(shifts, n=12):
    """{arm: {seed: log measure}}, shifted by arm, with noise that is small beside 0.1."""
    rng = random.Random(1)
    return {arm: {seed: shift + rng.gauss(0, 0.02) for seed in range(n)}
            for arm, shift in shifts.items()}


@pytest.mark.parametrize("shift, word", [(-0.3, "win"), (0.0, "no"), (0.3, "no")])
def test_verdict(shift, word):
    logs = arms_with({"all": 0.0, "random": 0.0, "ours": shift})
    found = differences_of(logs, ("all", "random"), ("ours",))["ours"]
    assert verdict(found).startswith(f"{word}:"), f"{found} is called {verdict(found)!r}"


def test_verdict_needs_every_control_and_enough_seeds():
    logs = arms_with({"all": 0.0, "random": -0.6, "ours": -0.3})
    found = differences_of(logs, ("all", "random"), ("ours",))["ours"]
    assert verdict(found).startswith("no: not better than random "), "it beats one control of two"
    few = {arm: dict(list(by_seed.items())[:5]) for arm, by_seed in logs.items()}
    found = differences_of(few, ("all",), ("ours",))["ours"]
    assert verdict(found).startswith("not decided"), "five seeds cannot reach p < 0.01"


def test_least_p_is_what_equal_signs_give():
    for seeds in (5, 8, 11):
        logs = {arm: dict.fromkeys(range(seeds), x) for arm, x in (("a", 0), ("b", 1), ("c", -1))}
        c = differences_of(logs, ("a", "b"), ("c", "a"))
        study = SimpleNamespace(tested=("c", "a"), controls=("a", "b"), seeds=range(seeds), few={})
        assert least_p(study) == pytest.approx(min(1, max(x["corrected"] for x in c["c"].values())))


def evaluated(kl, measure):
    return {"kl": kl, "m": measure, "perplexity": 9.0}


def run_with(*evaluations):
    return {"evaluations": [evaluated(0, 1), *evaluations], "kept": None, "cosine": 0.5,
            "kl_last": 0.1}


def test_summary_compares_at_equal_kl():
    """`far` only goes further on the same line: much lower at its end, equal at equal KL."""
    study = SimpleNamespace(
        name="s", about="", quick=True, arms={"all": {}, "far": {}}, seeds=(1, 2),
        grid={"beta": (1, 2, 3)}, setting="beta", values=(1, 2, 3), measure="m",
        controls=("all",), tested=("far",))

    def line(root):
        return run_with(evaluated(root ** 2, math.exp(-root)))

    rows = {(arm, value, seed): line(start + 0.1 * value) for seed in (1, 2) for value in (1, 2, 3)
            for arm, start in (("all", 0.2), ("far", 0.5))}
    summary = summarise(study, rows, {})
    assert summary["x"] == pytest.approx(0.55)
    assert summary["equal"]["far"]["all"]["mean"] == pytest.approx(0)
    assert summary["end"]["far"]["all"]["mean"] == pytest.approx(-0.3)
    assert [summary["arms"][arm]["outside"] for arm in ("all", "far")] == [2, 2]
    text = as_markdown(summary)
    assert "says nothing" in text and "-26 %" in text, "the table lacks the quick mark or the end"
    del rows["far", 2, 2]
    left = summarise(study, rows, {})["arms"]["far"]["seeds"]
    assert left == 1, "a seed counts when it is complete"


# ------------------------------------------------------------------------------------------------
# wrong rewards


def test_wrong_rollouts_are_counted_within_iterations():
    def sample(iteration, wrong, influence, advantage=1.0):
        return {"iteration": iteration, "influence": influence, "weight": float(influence > 0),
                "advantage": advantage, "scores": {"wrong": float(wrong)}}

    rows = [sample(1, True, -1), sample(1, False, 1), sample(1, False, -1), sample(1, True, 9, 0.0),
            sample(2, True, 100), sample(2, False, 200)]
    found = found_wrong(rows)
    assert found == {"wrong_kept": 0.5, "right_kept": 2 / 3, "auc": (0.75 + 1) / 2}
    assert [len(part) for part in thirds(rows, 3)] == [4, 2, 0]


# ------------------------------------------------------------------------------------------------
# runs


def test_runs_in_a_worker_are_those_of_grpo_alone_and_what_failed_or_changed_runs_again(
        made, script, grpo, rows, tmp_path):
    made.write("seeds = (1, 2)", "seeds = (1,)")
    made.write('"half": {', '"odd": {"learning_rate": 1e38}, "half": {')
    done = script("study.py", made.path, f"--out={made.out}", "--workers=1")
    assert done.returncode == 1 and "runs failed" in done.stderr, done.stdout + done.stderr
    assert "2/3 odd_beta0.1_seed1: failed: SystemExit: stopped" in done.stdout
    assert "Failed: odd_beta0.1_seed1" in done.stdout and "| half | 1 " in done.stdout
    grpo(tmp_path / "alone", "--tracin=reward", "--seed=1", "--beta=0.1", "--threads=1")
    assert logs_of(tmp_path / "alone") == logs_of(os.path.join(made.out, "half_beta0.1_seed1")), (
        "a run after others in a worker differs from the same run alone")

    half = jobs_of(read_study(made.path), made.out)[2]
    folder = os.path.join(made.out, half.name)
    before = logs_of(folder)
    trainer.main([*half.argv, *going_on(half.argv, folder)])
    assert logs_of(folder) == before, "a run that ended before its row was written ran on"
    assert not os.path.exists(f"{folder}-2"), "it went to another folder"

    made.write('"tracin": "reward"', '"tracin": "self"')
    script("study.py", made.path, f"--out={made.out}", "--workers=1")
    found = [row["arm"] for row in rows(os.path.join(made.out, "rows.jsonl"))]
    assert found == ["all", "odd", "half", "odd", "half"], "only these two are to run again"
    assert os.path.exists(os.path.join(made.out, "half_beta0.1_seed1_old1", "samples.jsonl"))


def test_a_study_that_is_interrupted_goes_on(made, script, rows):
    made.write("seeds = (1, 2)", "seeds = (1,)")
    made.write('"half": {"tracin": "reward"}', '"half": {"max_iters": 2}')
    made.write('"all": {}', '"all": {"max_iters": 60, "save_interval": 1000}')
    process = script("study.py", made.path, f"--out={made.out}", "--workers=2", wait=False)
    log = os.path.join(made.out, "all_beta0.1_seed1", "metrics.jsonl")
    while not os.path.exists(log) or len(rows(log)) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "2 of 2 runs are left" in err, err
    done = len(rows(log))
    assert done < 60, "the run did not stop"
    again = script("study.py", made.path, f"--out={made.out}", "--workers=2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [row["iteration"] for row in rows(log)] == list(range(1, 61))
    with open(os.path.join(made.out, "all_beta0.1_seed1.log")) as f:
        text = f.read().split("Traceback")[-1]
    assert f"iter {done + 1}/60" in text, "it did not go on from where it was"
    assert sorted(os.listdir(made.out)) == [
        "all_beta0.1_seed1", "all_beta0.1_seed1.log", "half_beta0.1_seed1",
        "half_beta0.1_seed1.log", "rows.jsonl", "table.json", "table.txt"]


def test_a_folder_whose_run_has_not_ended_gives_no_row(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"iteration": 0, "samples": []}\n')
    with pytest.raises(BadInput, match="ends after iteration 0 of 6"):
        row_of(str(tmp_path), 6)


# ------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize("old, new, named", [
    ("seeds = (1, 2)", "", "no seeds"),
    ("seeds = (1, 2)", "seeds = 5", "seeds = 5"),
    ("seeds = (1, 2)", "seeds = (1, 2)\nseed = 1", "'seed' is no name"),
    ('controls = ("all",)', 'controls = ("al",)', "'al' is no arm; there are all, half"),
    ('"tracin": "reward"', '"tracing": "reward"', "arm 'half'"),
    ('"tracin": "reward"', '"tracin": "rewards"', "arm 'half'"),
    ("(0.1,)", "()", "grid = {'beta': ()}"),
    ("(0.1,)", "0.1", "grid = {'beta': 0.1}"),
    ("tiny.py", "nowhere.py", "nowhere.py"),
    ("seeds", "seeds = = 1", "SyntaxError")])
def test_a_study_that_cannot_work_is_refused_in_one_line(made, old, new, named):
    made.write(old, new)
    with pytest.raises(BadInput) as e:
        jobs_of(read_study(made.path), made.out)
    assert named in str(e.value) and "\n" not in str(e.value)


def test_runs_go_seed_by_seed_and_quick_shrinks_them(made):
    made.write('grid = {"beta": (0.1,)}', 'grid = {"beta": (0.1, 0.2)}\nquick = {"max_iters": 1}')
    made.write("seeds = (1, 2)", "seeds = range(1, 9)")
    study = read_study(made.path)
    names = [job.name for job in jobs_of(study, made.out)]
    assert names[:5] == ["all_beta0.1_seed1", "all_beta0.2_seed1", "half_beta0.1_seed1",
                         "half_beta0.2_seed1", "all_beta0.1_seed2"] and len(names) == 32
    made.write("seeds = range(1, 9)", 'seeds = range(1, 9)\nfew = {"half": 3}')
    fewer = [job.seed for job in jobs_of(read_study(made.path), made.out) if job.arm == "half"]
    assert fewer == [1, 1, 2, 2, 3, 3], "an arm of few seeds does not get the first ones"
    quick = jobs_of(read_study(made.path, quick=True), made.out)
    assert len(quick) == 8 and all("--max_iters=1" in job.argv for job in quick)


# ------------------------------------------------------------------------------------------------
# pictures, and what is read once


def test_a_study_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arms = ("all", "random", "ours")
    study = SimpleNamespace(
        name="s", about="", quick=True, arms=dict.fromkeys(arms), seeds=(1, 2, 3),
        grid={"beta": (1, 2)}, setting="beta", values=(1, 2), measure="m",
        controls=("all", "random"), tested=("ours",))
    found = {"wrong_kept": 0.5, "right_kept": 0.6, "auc": 0.7}
    rows = {(arm, value, seed): run_with(evaluated(0.1 * value + 0.01 * seed, 0.2 / value))
            | ({"wrong": [found] * 3} if arm == "ours" else {})
            for arm in arms for value in (1, 2) for seed in (1, 2, 3)}
    write_json(tmp_path / "table.json", summarise(study, rows, {}))
    plot.main([str(tmp_path), f"--out={tmp_path}/study.svg"])
    text = (tmp_path / "study.svg").read_text()
    for shown in ("says nothing", "difference to all at equal KL", "ours", "last third",
                  "share of wrong rollouts kept"):
        assert shown in text, f"the picture does not show {shown!r}"
    with pytest.raises(BadInput, match="--panels"):
        plot.main([str(tmp_path), "--panels=reward"])


def test_comments_are_read_once_and_again_when_they_change(make_comments, tmp_path):
    path = tmp_path / "comments.csv"
    cfg = load_settings([f"--comments={make_comments(path, 40)}"])
    first = get_splits(cfg)
    first["judge_a"] = ()       # a caller's own dict
    assert get_splits(cfg)["judge_a"] and get_splits(cfg)["judge_b"] is first["judge_b"]
    make_comments(path, 80)
    os.utime(path, (1, 1))
    assert sum(map(len, get_splits(cfg).values())) > 40, "the file changed and was not read again"
