"""Pictures of runs: lines show what the rows hold, and bad input gets one line."""
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
import matplotlib  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402

import plot  # noqa: E402
from common.files import ROOT  # noqa: E402
from worlds import assert_refused, command, printed, read_rows, refusal, write_rows  # noqa: E402

METRICS = [metric for _, log, metric in plot.PANELS if log == "metrics"]
TITLES = [title for title, *_ in plot.PANELS]
def make_run(folder, rows=(), evaluations=(), source=None, **settings):
    os.makedirs(folder)
    settings = {"out_dir": str(folder), "seed": 1, "beta": 0.1} | settings
    content = {"settings": settings, "source": source}
    (folder / "config.json").write_text(json.dumps(content))
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "eval.jsonl", evaluations)
    return str(folder)


def rewarded(*rewards):
    """Rows of metrics.jsonl with these rewards."""
    return [{"iteration": i, "reward": x} for i, x in enumerate(rewards, 1)]


@pytest.fixture
def run(tmp_path):
    """A run of five iterations with influence and three evaluations; one value is null."""
    rows = [{"iteration": i} | {name: j + 0.1 / i for j, name in enumerate(METRICS)}
            for i in range(1, 6)]
    rows[2]["kl"] = None
    rows = [row | {"extra": 0.5} for row in rows]
    evaluations = [{"iteration": i, "perplexity": 20.0 + i, "ended": 0.5, "kl": 7.0,
                    "eval_judge/toxicity": 0.3 / (i + 1)} for i in (0, 3, 5)]
    return make_run(tmp_path / "run", rows, evaluations)


def figure_of(*folders):
    """{title: its lines} as main draws them, and the Figure."""
    figure = plot.draw_runs(plot.groups_of(folders))
    return {ax.get_title(): ax.lines for ax in figure.axes}, figure


def assert_line(line, x, y):
    known = [(place, value) for place, value in zip(x, y) if value is not None]
    np.testing.assert_allclose(line.get_xydata(), known)


def test_lines_hold_what_the_rows_hold(run):
    drawn, _ = figure_of(run)
    assert list(drawn) == TITLES
    for title, log, metric in plot.PANELS:
        rows = read_rows(os.path.join(run, f"{log}.jsonl"))
        line, = drawn[title]
        assert_line(line, [row["iteration"] for row in rows], [row[metric] for row in rows])


def test_seeds_of_a_run_are_their_mean_and_range(tmp_path):
    values = {1: [0.5, 0.7, None, 0.9], 2: [0.1, 0.2, 0.3, 0.4], 3: [0.6, 0.6, 0.6]}
    runs = [make_run(tmp_path / f"seed{seed}", rewarded(*rewards), seed=seed)
            for seed, rewards in values.items()]
    other = make_run(tmp_path / "other", rewarded(0.8), beta=0.5)
    edited = make_run(tmp_path / "edited", rewarded(0.8), source="def reward(): 1", seed=4)
    drawn, figure = figure_of(*runs[:2], other, runs[2], edited)
    lines = drawn["reward, mean"]
    assert len({line.get_color() for line in lines}) == len(lines) == 3, (
        "a colour for the three seeds, the other beta, the other reward")
    # iterations that not all seeds have reached would make the mean jump
    assert_line(lines[0], [1, 2, 3], [0.4, 0.5, None])
    ax, = figure.axes
    band, = ax.collections      # a single run has no range
    corners = band.get_paths()[0].to_polygons()[0]
    assert corners.max(0).tolist() == [2, 0.7] and corners.min(0).tolist() == [1, 0.1]
    names = ["".join(text.get_text().split()) for text in figure.legends[0].get_texts()]
    assert names[0].startswith(runs[0]) and "3" in names[0].removeprefix(runs[0])
    assert names[1:] == [other, edited]


@pytest.mark.parametrize("names", [
    "a", ["_hidden", "price_$x$_$", "two words"], ["W" * 200, "i" * 60]], ids=str)
def test_every_name_is_in_the_picture_beside_its_line(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [make_run(Path(name), rewarded(0.5), [{"iteration": 0, "ended": 0.5}], beta=i)
               for i, name in enumerate(names)]
    with matplotlib.rc_context(plot.LOOK):
        figure = plot.draw_runs(plot.groups_of(folders))
        FigureCanvasAgg(figure).draw()          # its layout is known then
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(names)
    for ax in figure.axes:
        assert not legend.get_window_extent().overlaps(ax.get_tightbbox()), "it hides a panel"


def test_a_single_value_is_seen(tmp_path):
    for rewards in ([0.5], [None, 0.5, None]):
        run = make_run(tmp_path / str(len(rewards)), rewarded(*rewards))
        line, = figure_of(run)[0]["reward, mean"]
        assert len(line.get_xydata()) == 1 and line.get_marker() == "o"


def test_grpo_writes_every_metric_that_is_drawn(run_grpo, tmp_path):
    run_grpo(tmp_path / "run", "--tracin=reward", "--beta=0.1", "--max_iters=1")
    assert list(figure_of(str(tmp_path / "run"))[0]) == TITLES


def test_panels_and_the_file_are_those_that_were_asked_for(run, tmp_path):
    path = tmp_path / "mine.svg"
    assert printed(plot.main, [run, f"--out={path}", "--panels=reward"]) == f"{path}\n"
    svg = path.read_text()
    assert "</svg>" in svg and "reward, mean" in svg and TITLES[0] not in svg
    printed(plot.main, [run, f"--out={path}", "--panels=tracin/positive_ratio,extra"])
    svg = path.read_text()
    assert "extra" in svg and "reward, mean" not in svg
    elsewhere = tmp_path / "elsewhere.png"
    elsewhere.write_text("somebody's")
    curves = tmp_path / "run" / "curves.png"
    os.symlink(elsewhere, curves)
    printed(plot.main, [run])
    assert curves.read_bytes()[:4] == b"\x89PNG"
    assert elsewhere.read_text() == "somebody's", "a picture was written through a link"


@pytest.mark.parametrize("rewards", [
    [-0.0182, -0.0028, -0.0087], [-0.2, 0.3, 0.1], [0.2, 0.3, 0.25], [0.0, 0.0, 0.0],
    [-1.0, -1.0, -1.0], [-0.5, 0.0, -0.1]])
def test_a_curve_is_in_its_picture(rewards, tmp_path):
    evaluations = [{"iteration": i, "perplexity": x} for i, x in enumerate(rewards)]
    run = make_run(tmp_path / "run", rewarded(0.5, 0.5), evaluations)
    ax = next(ax for ax in plot.draw_runs(plot.groups_of([run])).axes if "perpl" in ax.get_title())
    bottom, top = ax.get_ylim()
    assert bottom <= 0 < top, "0 is not in it, or the axis is upside down"
    assert bottom <= min(rewards) and max(rewards) < top, "a value is not in the picture"


def test_what_cannot_be_drawn_is_one_line(run, tmp_path):
    assert_refused("'loss'", plot.main, [run, "--panels=kl,loss"])
    assert_refused("nothing", plot.main, [str(tmp_path / "nothing")])
    for argv in ([], ["--out=x.png"], [run, "--colour=red"]):
        refusal(plot.main, argv)
    refusal(plot.main, [make_run(tmp_path / "empty")])


@pytest.mark.parametrize("script", ["plot.py", "docs/lesson/lesson.py", "docs/lesson/influence.py"])
def test_without_matplotlib_one_line_says_what_to_install(script, run, monkeypatch, capsys):
    """README's first command does not install it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)        # an import of it fails
    # as Python does for a script; what an earlier one has imported is imported anew
    monkeypatch.syspath_prepend(os.path.dirname(f"{ROOT}/{script}"))
    monkeypatch.delitem(sys.modules, "classroom", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command(script, run)
    said = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and said.count("\n") == 0, f"more than a line: {said}"
    assert "pip install matplotlib" in said, f"does not say what to install: {said}"
