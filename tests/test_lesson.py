"""lesson.py runs, its numbers agree, and the notebook beside it is the same."""
import json
import os
import re
import runpy

import pytest

matplotlib = pytest.importorskip("matplotlib")
from common.files import ROOT  # noqa: E402

NUMBER = r"([+-]?\d[\d.]*(?:e[+-]?\d+)?)"


def test_the_lesson_runs_and_its_numbers_agree(tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lesson.py", "--n_layer=1", "--n_embd=32", "--n_head=2",
                                     "--pretrain_tokens=20000", "--num_prompts=2"])
    runpy.run_path(os.path.join(ROOT, "docs/lesson/lesson.py"))
    matplotlib.pyplot.close("all")
    printed = capsys.readouterr().out
    assert len(os.listdir("out/lesson")) == 8

    assert float(re.search(f"ratio {NUMBER}", printed)[1]) == pytest.approx(1, abs=1e-5)
    assert float(re.search(f"from section 6: {NUMBER}", printed)[1]) < 1e-5
    words, influence = re.search(
        rf"tokens add up to {NUMBER}, the influence of\s+rollout \d+ is {NUMBER}", printed).groups()
    assert float(words) == pytest.approx(float(influence), rel=1e-3)
    assert float(re.search(rf"two halves is {NUMBER}", printed)[1]) < 1
    shares, change = re.search(
        rf"shares add up to {NUMBER}, the log-prob changed by {NUMBER}", printed).groups()
    assert float(shares) == pytest.approx(float(change), abs=1e-4)
    assert float(re.search(f"derivatives are off by {NUMBER}%", printed)[1]) < 20


def test_the_notebook_is_the_lesson():
    with open(os.path.join(ROOT, "docs/lesson/lesson.ipynb"), encoding="utf-8") as f:
        cells = json.load(f)["cells"]
    in_notebook = [line for cell in cells for line in "".join(cell["source"]).splitlines() if line]
    with open(os.path.join(ROOT, "docs/lesson/lesson.py"), encoding="utf-8") as f:
        lines = [line.rstrip("\n") for line in f if not line.startswith("# %%")]
    in_lesson = [re.sub("^# ?", "", line) for line in lines if line.strip("#\n")]
    assert in_notebook == in_lesson, (
        "lesson.py has changed: jupytext --to ipynb --set-kernel python3 --execute lesson.py")
    assert os.path.getsize(os.path.join(ROOT, "docs/lesson/lesson.ipynb")) < 2 ** 20


@pytest.mark.parametrize("flag", ["--beta=x", "--nope=1", "--device=nowhere", "beta", "--beta"])
def test_a_slip_in_a_flag_is_one_line(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)     # it runs from any folder
    monkeypatch.setattr("sys.argv", ["lesson.py", flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(os.path.join(ROOT, "docs/lesson/lesson.py"))
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
