"""Pictures of runs: lines show what the rows hold, the same runs give the same file, and bad input
gets one line."""
import importlib.util
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import plot
from run.script import BadInput

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None,
                                      reason="matplotlib is missing: pip install matplotlib")
USUAL = ("reward", "reward_std", "kl", "entropy", "completions/mean_length",
         "completions/clipped_ratio", "grad_norm", "loss")
INFLUENCE = ("tracin/positive_ratio", "tracin/selected_ratio", "tracin/target_cosine",
             "tracin/std_ip")


def metrics_row(iteration, names=USUAL, **other):
    """A row of metrics.jsonl in which no two numbers are equal."""
    numbers = {name: 0.01 * i + 0.1 / (iteration + 1) for i, name in enumerate(names, 1)}
    return {"iteration": iteration} | numbers | other


def eval_row(iteration, **other):
    return {"iteration": iteration, "judge/toxicity": 0.2 / (iteration + 1), "ended": 0.5,
            "eval_judge/toxicity": 0.3 / (iteration + 1)} | other


def make_run(folder, rows, evaluations=()):
    os.makedirs(folder)
    for name, content in (("metrics.jsonl", rows), ("eval.jsonl", evaluations)):
        with open(os.path.join(folder, name), "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in content)
    return str(folder)


@pytest.fixture
def run(tmp_path):
    """A run of five iterations with influence and three evaluations."""
    rows = [metrics_row(i, USUAL + INFLUENCE) for i in range(1, 6)]
    return make_run(tmp_path / "toxicity", rows, [eval_row(i) for i in (0, 3, 5)])


@pytest.fixture
def plain(tmp_path):
    """A run without influence, without a judge and without eval.jsonl."""
    folder = make_run(tmp_path / "plain", [metrics_row(i, reward=0.1 * i) for i in range(1, 4)])
    os.remove(os.path.join(folder, "eval.jsonl"))
    return folder


def figure_of(*folders, panels=None):
    """(Figure, {panel: its Axes}) as main draws it."""
    runs = dict(zip(plot.short_names(folders), map(plot.read_run, folders)))
    panels = plot.choose_panels(panels, runs)
    with plot.look():
        figure = plot.draw_figure(runs, panels)
    assert len(figure.axes) == len(panels), "each panel has its own axes, and there are no others"
    return figure, dict(zip(panels, figure.axes))


def lines_of(ax):
    """{(run, metric): (x, y, Line2D)}"""
    lines = {}
    for line in ax.lines:
        run, metric = line.get_label().split(": ")
        lines[run, metric] = list(line.get_xdata()), list(line.get_ydata()), line
    return lines


def marked(line):
    return np.array(line.get_markevery()).tolist()


# --------------------------------------------------------------------------------------------------
# what is drawn


@needs_matplotlib
def test_lines_hold_what_the_rows_hold(run, rows):
    _, axes = figure_of(run)
    drawn = {}
    for ax in axes.values():
        drawn |= {metric: (x, y) for (_, metric), (x, y, _) in lines_of(ax).items()}
    metrics = rows(os.path.join(run, "metrics.jsonl"))
    evaluations = rows(os.path.join(run, "eval.jsonl"))
    iterations = [1, 2, 3, 4, 5]
    expected = {name: (iterations, [row[name] for row in metrics]) for name in USUAL + INFLUENCE}
    del expected["reward_std"]
    _, clipped = expected.pop("completions/clipped_ratio")
    expected["completions/ended_ratio"] = iterations, [1 - share for share in clipped]
    for name in ("judge/toxicity", "eval_judge/toxicity"):
        expected[name] = [0, 3, 5], [row[name] for row in evaluations]
    assert drawn == expected


@needs_matplotlib
def test_grpo_writes_every_metric_that_is_drawn(grpo, tmp_path):
    out = tmp_path / "run"
    grpo(out, "--tracin=reward", "--beta=0.1", "--max_iters=2")
    grpo(out, "--tracin=reward", "--beta=0.1", "--max_iters=3", "--resume=True")
    _, axes = figure_of(str(out))
    assert list(axes) == list(plot.PANELS), "a panel has no data: its metric has another name"
    for panel, ax in axes.items():
        lines = lines_of(ax)
        assert [metric for _, metric in lines] == list(plot.PANELS[panel][1:])
        for x, _, _ in lines.values():
            assert x == ([0, 2, 3] if panel == "toxicity" else [1, 2, 3]), panel


@needs_matplotlib
def test_toxicity_is_marked_at_evaluations_and_the_judge_is_dashed(run):
    _, axes = figure_of(run)
    lines = lines_of(axes["toxicity"])
    _, _, solid = lines["toxicity", "eval_judge/toxicity"]
    _, _, dashed = lines["toxicity", "judge/toxicity"]
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert "eval judge (dashed: judge)" in axes["toxicity"].get_title(loc="left")
    for line in (solid, dashed):
        assert line.get_marker() == "o" and marked(line) == [True] * 3
    _, _, reward = lines_of(axes["reward"])["toxicity", "reward"]
    assert not any(marked(reward)), "a line through every iteration needs no dots"


@needs_matplotlib
def test_missing_numbers_are_gaps_and_lonely_ones_are_dots(tmp_path):
    content = [metrics_row(i) for i in range(1, 7)]
    content[1]["kl"] = content[3]["kl"] = None
    del content[5]["kl"]
    evaluations = [eval_row(0), eval_row(6, **{"judge/toxicity": None})]
    _, axes = figure_of(make_run(tmp_path / "gaps", content, evaluations))
    x, y, line = lines_of(axes["kl"])["gaps", "kl"]
    assert x == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(value) for value in y] == [False, True, False, True, False, True]
    dots = [dot and not math.isnan(value) for dot, value in zip(marked(line), y)]
    assert dots == [True, False, True, False, True, False], "no line reaches these values"
    assert math.isnan(lines_of(axes["toxicity"])["gaps", "judge/toxicity"][1][1])


@needs_matplotlib
def test_the_band_is_one_std_around_a_single_reward(run, plain):
    _, axes = figure_of(run)
    band, = axes["reward"].collections
    x, y = lines_of(axes["reward"])["toxicity", "reward"][:2]
    _, std = plot.read_run(run)["reward_std"]
    corners = {(a, round(b, 9)) for a, b in band.get_paths()[0].vertices.tolist()}
    low = {(a, round(b - s, 9)) for a, b, s in zip(x, y, std)}
    high = {(a, round(b + s, 9)) for a, b, s in zip(x, y, std)}
    assert corners == low | high
    assert axes["reward"].get_title(loc="left") == "reward, mean ± std"
    _, axes = figure_of(run, plain)
    assert not axes["reward"].collections, "bands of several runs would hide each other"
    assert axes["reward"].get_title(loc="left") == "reward, mean"


@needs_matplotlib
def test_several_runs_keep_their_colours_and_share_one_legend(run, plain):
    figure, axes = figure_of(run, plain)
    colors = {}
    for ax in axes.values():
        assert ax.get_legend() is None
        for (name, _), (_, _, line) in lines_of(ax).items():
            colors.setdefault(name, set()).add(line.get_color())
    assert colors == {"toxicity": {plot.COLORS[0]}, "plain": {plot.COLORS[1]}}
    legend, = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["toxicity", "plain"]
    assert [line.get_color() for line in legend.get_lines()] == list(plot.COLORS[:2])
    assert [name for name, _ in lines_of(axes["spread"])] == ["toxicity"]


def test_names_are_as_short_as_tells_runs_apart():
    assert plot.short_names(["out/a", "out/b/"]) == ["a", "b"]
    assert plot.short_names(["x/seed1", "y/seed1", "x/seed2"]) == ["x/seed1", "y/seed1", "x/seed2"]
    assert plot.short_names(["/run", "/a/run"]) == ["/run", "a/run"]
    assert plot.short_names(["out/a"]) == ["a"]


@needs_matplotlib
def test_a_name_is_no_formula(tmp_path, capsys):
    folder = make_run(tmp_path / "$x_1$", [metrics_row(1)])
    out = str(tmp_path / "name.svg")
    plot.main([folder, f"--out={out}"])
    assert ">$x_1$</text>" in open(out).read()


@needs_matplotlib
def test_axes(run):
    _, axes = figure_of(run)
    assert axes["spread"].get_yscale() == "log"
    assert all(ax.get_yscale() == "linear" for panel, ax in axes.items() if panel != "spread")
    for panel, ax in axes.items():
        assert (ax.get_ylim()[0] == 0) == (panel not in ("reward", "length", "spread")), panel
        first, last = ax.get_xlim()
        assert first <= 0 and last >= 5, "all panels show the same iterations"
        assert all(tick == int(tick) for tick in ax.get_xticks())
    assert [panel for panel, ax in axes.items() if ax.get_xlabel() == "iteration"] == [
        "selected", "cosine", "spread"], "the lowest of each column"


@needs_matplotlib
def test_titles_do_not_run_into_each_other(run):
    figure, axes = figure_of(run)
    figure.draw_without_rendering()
    boxes = {}
    for panel, ax in axes.items():
        texts = [child for child in ax.get_children() if hasattr(child, "get_text")]
        title, = [text for text in texts if text.get_text() == ax.get_title(loc="left")]
        boxes[panel] = title.get_window_extent()
    for panel, box in boxes.items():
        assert box.x1 < figure.bbox.x1, f"the title of {panel} leaves the picture"
        assert box.count_overlaps(boxes.values()) == 1, f"the title of {panel} covers another one"


@needs_matplotlib
def test_an_axis_shows_values_below_zero(tmp_path):
    folder = make_run(tmp_path / "k1", [metrics_row(i, kl=-0.1 * i) for i in (1, 2)])
    _, axes = figure_of(folder)
    assert axes["kl"].get_ylim()[0] <= -0.2


# --------------------------------------------------------------------------------------------------
# which panels


@needs_matplotlib
def test_panels_are_those_asked_for_in_that_order(run):
    _, axes = figure_of(run, panels="toxicity,reward")
    titles = [ax.get_title(loc="left") for ax in axes.values()]
    assert titles == ["toxicity, eval judge (dashed: judge)", "reward, mean ± std"]


@needs_matplotlib
def test_panels_are_by_default_those_with_data(run, plain):
    usual = ["reward", "kl", "entropy", "length", "ended", "grad_norm", "loss"]
    assert list(figure_of(plain)[1]) == usual
    here = [panel for panel in plot.PANELS if panel != "rollouts"]
    assert list(figure_of(run)[1]) == here
    assert list(figure_of(plain, run)[1]) == list(plot.PANELS)


@needs_matplotlib
@pytest.mark.parametrize("count, evaluations, panels", [
    (0, [eval_row(0)], ["toxicity"]),
    (1, [], ["reward", "kl", "entropy", "length", "ended", "grad_norm", "loss"])])
@pytest.mark.filterwarnings("error")
def test_runs_of_no_iteration_and_of_one(tmp_path, capsys, count, evaluations, panels):
    folder = make_run(tmp_path / "short", [metrics_row(i + 1) for i in range(count)], evaluations)
    _, axes = figure_of(folder)
    assert list(axes) == panels
    for ax in axes.values():
        assert all(tick == int(tick) for tick in ax.get_xticks())
        for _, _, line in lines_of(ax).values():
            assert marked(line) == [True], "a single value has no line, so it needs a dot"
    plot.main([folder])


# --------------------------------------------------------------------------------------------------
# files


@needs_matplotlib
def test_the_default_file(run, plain, capsys, monkeypatch):
    plot.main([run])
    assert capsys.readouterr().out == f"{run}/curves.png\n"
    content = open(f"{run}/curves.png", "rb").read()
    assert content.startswith(b"\x89PNG")
    width = int.from_bytes(content[16:20], "big")
    assert width == 2 * 830, "twice the width of a README, for sharp letters"
    parent, here = os.path.split(os.path.dirname(run))
    monkeypatch.chdir(parent)
    plot.main([f"{here}/toxicity", plain])
    assert capsys.readouterr().out == f"{here}/curves.png\n", "of several runs it lies beside them"
    assert os.path.exists(f"{here}/curves.png")


@needs_matplotlib
def test_svg_is_small_light_text_and_always_the_same(run, plain, tmp_path, capsys):
    first, second = str(tmp_path / "new" / "a.svg"), str(tmp_path / "b.svg")
    plot.main([run, plain, f"--out={first}"])
    text = open(first).read()
    assert len(text) < 100_000
    assert 'width="622.5pt"' in text, "830 pixels"
    assert ">reward, mean</text>" in text and ">toxicity</text>" in text
    background, *_ = text.split("axes_1")
    assert "fill: #ffffff" in background, "dark letters need a white ground in dark mode too"
    assert "<dc:date>" not in text and "<image" not in text
    code = ("import sys, plot; plot.main(sys.argv[1:]); "
            "assert 'matplotlib.pyplot' not in sys.modules")
    environment = dict(os.environ, PYTHONHASHSEED="7", PYTHONDONTWRITEBYTECODE="1")
    subprocess.run([sys.executable, "-c", code, run, plain, f"--out={second}"], cwd=ROOT,
                   env=environment, check=True)
    assert open(second).read() == text, "another process writes another file"


@needs_matplotlib
def test_svg_of_a_readme_is_far_below_100_kb(tmp_path, capsys):
    seeds = []
    for seed in (1, 2, 3):
        rows = [metrics_row(i, reward=math.sin(seed * i)) for i in range(1, 41)]
        evaluations = [eval_row(i) for i in (0, 20, 40)]
        seeds.append(make_run(tmp_path / f"seed{seed}", rows, evaluations))
    out = str(tmp_path / "a.svg")
    plot.main([*seeds, f"--out={out}", "--panels=reward,toxicity"])
    assert os.path.getsize(out) < 50_000


@needs_matplotlib
def test_the_users_style_is_neither_used_nor_changed(run, tmp_path, capsys):
    from matplotlib import rc_context, rcParams
    other = {"figure.facecolor": "black", "font.size": 20.0, "svg.fonttype": "path"}
    out = str(tmp_path / "a.svg")
    plot.main([run, f"--out={out}"])
    before = open(out).read()
    with rc_context(other):
        plot.main([run, f"--out={out}"])
        assert open(out).read() == before
        assert {name: rcParams[name] for name in other} == other


# --------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize("argv, message", [
    ([], "usage: python plot.py RUN"),
    (["--panels=reward"], "usage: python plot.py RUN"),
    (["{run}", "--smooth=3"], "--smooth=3: no such flag"),
    (["{run}", "--out"], "--out: no such flag, or no value"),
    (["{run}", "-h"], "usage: python plot.py RUN"),
    (["{run}/nowhere"], "nowhere/metrics.jsonl: no such file; give the folder of a run"),
    (["{run}/metrics.jsonl"], "no such file; give the folder of a run"),
    (["{run}", "{run}/"], "a run is given twice"),
    (["{run}"] * 8, "8 runs: there are 7 colours"),
    (["{run}", "--out=a.pdf"], "--out=a.pdf: must end in .png or .svg"),
    (["{run}", "--out=png"], "must end in .png or .svg"),
    (["{run}", "--panels=reward,speed"], "'speed' is no panel; choose from reward, toxicity, kl"),
    (["{plain}", "--panels=toxicity"], "'toxicity' has no data here; choose from reward, kl"),
])
def test_bad_arguments_get_one_line(run, plain, argv, message):
    with pytest.raises(BadInput) as e:
        plot.main([arg.format(run=run, plain=plain) for arg in argv])
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
@pytest.mark.parametrize("line, message", [
    ('{"iteration": 6, "rew', "not a readable jsonl file"),
    ("[6]", "row 6 is no object"),
    ('{"reward": 0.5}', "'iteration'"),
    ('{"iteration": null}', "null"),
    ('{"iteration": 6, "kl": "high", "judge/toxicity": "high"}', "'high'"),
    ('{"iteration": 6, "kl": [1, 2], "judge/toxicity": [1, 2]}', "sequence"),
])
def test_bad_rows_get_one_line(tmp_path, name, line, message):
    rows = [metrics_row(i) for i in range(1, 6)]
    folder = make_run(tmp_path / "run", rows, [eval_row(i) for i in range(1, 6)])
    with open(os.path.join(folder, name), "a") as f:
        f.write(line)
    with pytest.raises(BadInput) as e:
        plot.main([folder])
    assert str(e.value).startswith(f"{folder}/{name}: ") and str(e.value).count(folder) == 1
    assert message in str(e.value) and "mend or remove" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_run_without_numbers_gets_one_line(tmp_path):
    folder = make_run(tmp_path / "new", [], [dict(iteration=0, perplexity=3.0)])
    with pytest.raises(BadInput, match="new: nothing to draw yet"):
        plot.main([folder])


@needs_matplotlib
def test_a_file_that_cannot_be_written_gets_one_line(run, tmp_path):
    (tmp_path / "taken").write_text("")
    (tmp_path / "folder.png").mkdir()
    for out in ("taken/a.png", "folder.png"):
        with pytest.raises(BadInput, match=f"{out}: cannot be written .*choose another --out"):
            plot.main([run, f"--out={tmp_path}/{out}"])


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInput, match="pip install matplotlib"):
        plot.main([run])


def test_usage_without_arguments(script):
    done = script("plot.py")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: usage: python plot.py RUN")
    assert done.stderr.count("\n") == 1
