"""Studies: the statistics by hand and by brute force, runs that are made once, what is refused."""
import itertools
import math
import os
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest

import extras.study.__main__ as studies
from extras.study.__main__ import (
    as_markdown, compare, holm, mean_and_error, permutation_p, read_study, runs_of, summarise,
    value_on_line)
from worlds import assert_refused, printed, read_rows, seed_of, write_rows

STUDY = """
config = {config!r}
arms = {{"all": {{}}, "half": {{"tracin": "reward", "tracin_val_prompts": 1}}}}
seeds = (1, 2)
measure = "eval_judge/toxicity"
"""


@pytest.fixture
def made(tiny, tmp_path, monkeypatch):
    """A study of two arms and two seeds of the tiny world: .path; rewrite it by .write(old, new).
    Tests run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "tiny.py"
    with open(config, "w") as f:
        for flag in [*tiny.flags, *tiny.judges]:
            name, x = flag.removeprefix("--").split("=", 1)
            f.write(f"{name} = {x if x[0] in '0123456789(' else repr(x)}\n")
    path = tmp_path / "halves.py"
    path.write_text(STUDY.format(config=str(config)))

    def write(old, new):
        assert old in path.read_text(), f"the study of this test has no {old!r} to change"
        path.write_text(path.read_text().replace(old, new))

    return SimpleNamespace(path=str(path), write=write)


# ------------------------------------------------------------------------------------------------
# statistics


def test_permutation_p_by_hand_and_by_brute_force():
    assert permutation_p([1.0, 2, 3, 4, 5]) == 2 / 32, "only all signs and their opposites"
    assert permutation_p([1, -1]) == permutation_p([0.1, 0.2, -0.3]) == 1, "a sum of 0"
    rng = random.Random(seed_of(0))
    d = [rng.gauss(0.4, 1) for _ in range(17)]      # the first that are too many to do all
    sums = np.zeros(1)
    for x in d:
        sums = np.concatenate([sums + x, sums - x])     # of all signs
    all_flips = (abs(sums) >= abs(sum(d)) - 1e-12).mean()
    assert permutation_p(d) == pytest.approx(all_flips, abs=.006)
    assert permutation_p([1.0] * 30) == 1 / 100_000, "p is never 0: the true signs are one of them"


def test_holm_line_and_error_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []
    points = [(0, 1), (1, 3), (2, 5)]
    assert value_on_line(points, 0.5) == pytest.approx(2)
    assert value_on_line(points, 4) == pytest.approx(9)
    assert value_on_line([(0, 0), (1, 3), (2, 0)], 5) == pytest.approx(1), "not by least squares"
    assert value_on_line([(1, 2), (1, 4)], 7) == 3, "without a slope: the mean"
    assert mean_and_error([1, 3]) == (2, 1)
    assert math.isnan(mean_and_error([1])[1])


def test_arms_are_compared_by_seed_and_corrected_together():
    rng = random.Random(seed_of(1))
    shifts = {"all": 0.0, "random": -0.6, "ours": -0.3, "best": -0.9}
    logs = {arm: [shift + rng.gauss(0, 0.02) for _ in range(12)] for arm, shift in shifts.items()}
    found = compare(logs, ("all", "random"), ("ours", "best"))
    d = [ours - other for ours, other in zip(logs["ours"], logs["all"])]
    assert found["ours", "all"] == (*mean_and_error(d), 4 * permutation_p(d))
    mean, error, p = found["ours", "random"]
    assert mean == pytest.approx(0.3, abs=0.05)
    assert 0 < error < 0.03
    assert p == 4 * 2 / 2 ** 12


def made_up(tmp_path):
    """A study and its runs, whose evaluations lie on lines: log measure = -1 - sqrt(KL) - shift."""
    study = SimpleNamespace(
        name="made-up", measure="|m|", arms={"all": {}, "ours": {}}, controls=("all",),
        tested=("ours",), seeds=range(6))
    runs = []
    for arm, seed in itertools.product(study.arms, study.seeds):
        rows = []
        for it in (0, 8, 16):
            root = (it + seed) / 100
            shift = 0.3 * (arm == "ours") * (1 + seed / 100)
            rows.append({"iteration": it, "kl": root ** 2, "|m|": math.exp(-1 - root - shift)})
        folder = tmp_path / f"{arm}{seed}"
        folder.mkdir()
        write_rows(folder / "eval.jsonl", rows)
        runs.append(SimpleNamespace(arm=arm, seed=seed, folder=str(folder), iterations=16))
    return study, runs


def test_the_table_of_made_up_runs(tmp_path):
    study, runs = made_up(tmp_path)
    os.remove(f"{runs[-1].folder}/eval.jsonl")      # so the last seed is not complete
    found = summarise(study, runs)
    assert found["seeds"] == [0, 1, 2, 3, 4]
    x = found["x"]
    assert x == pytest.approx(0.14), "the median of .08 to .12 and .16 to .20"
    assert found["compared"]["all"] == pytest.approx([-1 - x] * 5)
    ours = [-1 - x - 0.3 * (1 + seed / 100) for seed in range(5)]
    assert found["compared"]["ours"] == pytest.approx(ours)
    text = as_markdown(study, found)
    assert "5 of 6 seeds are complete" in text
    assert r" | \|m\| | " in text, "a | in a name is no border of the table"
    percent = 100 * math.expm1(-0.306)
    row, = re.findall(r"^\| ours \|.*", text, re.M)
    assert f"| {percent:.0f} % ± 0, p {2 / 32:.2g} |" in row, row


# ------------------------------------------------------------------------------------------------
# runs


def test_runs_are_made_once_and_the_table_is_read_from_them(made, tmp_path, monkeypatch):
    made.write("seeds = (1, 2)", "seeds = (1,)")
    text = printed(studies.main, [made.path, "--workers=2"])
    folders = sorted(path for path in (tmp_path / "out/study/halves").iterdir() if path.is_dir())
    assert [path.name.rsplit("_", 1)[0] for path in folders] == ["all_seed1", "half_seed1"]
    end = read_rows(folders[0] / "eval.jsonl")[-1]
    assert f"| all | {end['eval_judge/toxicity']:.4g} ± nan |" in text
    assert (tmp_path / "out/study/halves/table.json").exists()
    monkeypatch.setattr(studies, "ROOT", "no/where")     # no run can be made from here on
    again = printed(studies.main, [made.path])
    assert again.split("# halves")[1] == text.split("# halves")[1]
    made.write("toxicity", "toxic")
    assert_refused("eval_judge/toxic", studies.main, [made.path])
    made.write("toxic", "toxicity")
    made.write('"tracin": "reward"', '"tracin": "advantage"')
    study = read_study(made.path)
    left, = [run for run in runs_of(study, "out/study/halves")
             if not studies.evaluations_of(run, study.measure)]
    assert left.arm == "half", "an arm that was changed runs again, and no other"
    assert "not done" in printed(studies.make, left), "a run has failed, and nobody says so"


@pytest.mark.parametrize("old, new, name", [
    ('"tracin": "reward"', '"tracing": "reward"', "--tracing"),
    ("arms = {", "controls = ('al',); arms = {", "'al'"),
    ("arms = {", "few = 3; arms = {", "'few'")])
def test_what_cannot_work_is_refused_before_the_first_run(old, new, name, made, tmp_path):
    made.write(old, new)
    assert_refused(name, studies.main, [made.path])
    assert not (tmp_path / "out").exists()
