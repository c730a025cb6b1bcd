"""The lesson on speed names each technique of the ladder, its lines, and what it gives here."""
import os
import re
import runpy

import pytest

matplotlib = pytest.importorskip("matplotlib")
from common.files import ROOT  # noqa: E402
from extras.bench import ladder  # noqa: E402
from worlds import printed  # noqa: E402


def test_the_lesson_has_each_technique_with_its_lines_and_its_gain(tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(f"{ROOT}/docs/lesson")
    monkeypatch.setattr("sys.argv", [
        "speed.py", "--threads=1", "--num_prompts=1", "--num_generations=2", "--device=cpu",
        "--max_completion_length=3", "--dtype=float32"])
    found = {}
    out = printed(lambda: found.update(runpy.run_path(f"{ROOT}/docs/lesson/speed.py")))
    matplotlib.pyplot.close("all")
    assert found["WHAT"].keys() == {rung.name for rung in ladder.RUNGS}, "the ladder has changed"
    rows = found["rows"]
    assert rows == ["plain float32", *(
        rung.name for rung in ladder.rungs_for(found["setup"], found["cfg"]))]
    for name in rows[1:]:
        place = re.search(rf"^{name}: .*\((.*):(\d+), (\d+) lines\)$", out, re.M)
        file, first, count = place.groups()
        with open(f"{ROOT}/{file}", encoding="utf-8") as f:
            lines = f.read().splitlines()[int(first) - 1:][:int(count)]
        assert re.match("@|class |def ", lines[0]) and lines[-1].startswith("    "), "not its lines"
        gain, = re.search(rf"^{name}: .* is ([\d.]+) times as fast", out, re.M).groups()
        assert float(gain) == pytest.approx(found["gains"][name], abs=0.01)
        may_round = name in ("attention by formula", "bfloat16", "casts kept")
        assert may_round or f"\n{name}: 100% of" in out, f"{name} samples something else"
    assert os.path.getsize("out/lesson/s_ladder.png")
