"""lesson.py runs, its numbers agree, and it is the notebook that stands beside it."""
import json
import os
import re

import pytest

pytest.importorskip("matplotlib")
from conftest import ROOT  # noqa: E402
from explain.notebook import cells_of, notebook_of  # noqa: E402

NUMBER = r"([+-]?\d[\d.]*(?:e[+-]?\d+)?)"


def test_the_lesson_runs_and_its_numbers_agree(tmp_path, monkeypatch):
    import matplotlib
    matplotlib.use("Agg")
    for name in ("config", "lesson.py"):
        os.symlink(os.path.join(ROOT, name), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lesson.py", "--n_layer=1", "--n_embd=32", "--n_head=2",
                                     "--pretrain_tokens=20000", "--num_prompts=2"])
    with open("lesson.py") as f:
        cells = notebook_of(f.read())["cells"]
    printed = "".join(out["text"] for cell in cells for out in cell.get("outputs", ())
                      if out["output_type"] == "stream")
    drawn = [out for cell in cells for out in cell.get("outputs", ()) if "data" in out]
    assert len(os.listdir("out/lesson")) == len(drawn) == 7

    assert float(re.search(f"ratio {NUMBER}", printed)[1]) == pytest.approx(1, abs=1e-5)
    assert float(re.search(f"from section 6: {NUMBER}", printed)[1]) < 1e-5
    words, influence = re.search(
        rf"tokens add up to {NUMBER}, the influence of\s+rollout \d+ is {NUMBER}", printed).groups()
    assert float(words) == pytest.approx(float(influence), rel=1e-3)
    assert float(re.search(rf"two halves is {NUMBER}", printed)[1]) < 1


def test_the_notebook_is_the_lesson():
    with open(os.path.join(ROOT, "lesson.py"), encoding="utf-8") as f:
        cells = cells_of(f.read())
    with open(os.path.join(ROOT, "lesson.ipynb"), encoding="utf-8") as f:
        notebook = json.load(f)
    assert [cell["source"] for cell in notebook["cells"]] == [body for _, body in cells], \
        "lesson.py has changed: python -m explain.notebook"
    assert os.path.getsize(os.path.join(ROOT, "lesson.ipynb")) < 2 ** 20
