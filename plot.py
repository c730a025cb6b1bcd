"""Draws the curves of a run, or of several over each other, as PNG or SVG (pip install matplotlib).

    python plot.py out/toxicity                            # writes out/toxicity/curves.png
    python plot.py out/seed1 out/seed2 --out=curves.svg    # a colour for each run
    python plot.py out/study/wrong                         # a study: its measure against the KL

A row of metrics.jsonl describes rollouts sampled before the iteration's step. An evaluation at
iteration t comes after t steps. Where a row has no value, the line has a gap.
"""
import math
import os

import numpy as np

from common.files import read_json, read_rows, replacing, undamaged
from common.script import BadInput, optional, own_flags, run_script

with optional("matplotlib"):
    import matplotlib
    from matplotlib.figure import Figure

PANELS = [  # title, log, metric of the solid line, metric of the dashed line
    ("reward, mean", "metrics", "reward"),
    ("toxicity, eval judge (dashed: judge)", "eval", "eval_judge/toxicity", "judge/toxicity"),
    ("KL to reference, nats per token", "metrics", "kl"),
    ("entropy, nats per token", "metrics", "entropy"),
    ("mean length, tokens", "metrics", "completions/mean_length"),
    ("share of completions cut", "metrics", "completions/clipped_ratio"),
    ("gradient norm before clipping", "metrics", "grad_norm"),
    ("share of rollouts kept (dashed: influence > 0)", "metrics", "tracin/selected_ratio",
     "tracin/positive_ratio"),
    ("cosine of the target's two halves", "metrics", "tracin/target_cosine")]
LOOK = {"font.size": 9, "axes.grid": True, "grid.color": "0.9", "lines.markersize": 3}


def read_run(folder):
    """{"metrics": rows, "eval": rows} of a run."""
    return {log: read_rows(os.path.join(folder, f"{log}.jsonl")) for log in ("metrics", "eval")}


def draw_runs(runs):
    """The Figure of all panels that have data. runs: {name: what read_run returns}."""
    panels = [panel for panel in PANELS if has_data(panel, runs)]
    if not panels:
        raise BadInput(f"{', '.join(runs)}: nothing to draw yet; wait for the first iteration")
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8.6, 0.3 + 2.2 * rows), layout="constrained")
    for place, (title, log, *metrics) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, place, title=title)
        for i, run in enumerate(runs.values()):
            for metric, style in zip(metrics, ("-", "--")):
                x = [row["iteration"] for row in run[log]]
                y = [math.nan if row.get(metric) is None else row[metric] for row in run[log]]
                ax.plot(x, y, style, color=f"C{i}", marker="o" if log == "eval" else None)
    if len(runs) > 1:
        solid = figure.axes[0].lines[::len(panels[0]) - 2]
        figure.legend(solid, list(runs), loc="outside upper left", ncols=3)
    return figure


def has_data(panel, runs):
    _, log, metric, *_ = panel
    return any(row.get(metric) is not None for run in runs.values() for row in run[log])


def draw_study(found):
    """The Figure of a study's table.json: each arm's measure against the root of its KL."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    ax = figure.subplots()
    for arm, by_seed in found["points"].items():
        points = np.array(list(by_seed.values()))                       # (seeds, points, 2)
        x, y = points.mean(0).T
        error = points[:, :, 1].std(0) / max(1, len(points) - 1) ** 0.5
        ax.errorbar(x, np.exp(y), yerr=np.exp(y) * error, marker="o", markersize=4, label=arm)
    ax.set_xlabel("sqrt(KL to the starting policy)")
    ax.set_title(f"{found['name']}: {found['measure']}")
    ax.legend()
    return figure


def main(argv):
    own, folders = own_flags(argv, {"out": ""})
    if not folders or any(arg.startswith("--") for arg in folders):
        raise BadInput("usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg]")
    path = own["out"] or os.path.join(folders[0], "curves.png")
    if not path.endswith((".png", ".svg")):
        raise BadInput(f"--out={path}: must end in .png or .svg")
    table = os.path.join(folders[0], "table.json")
    with matplotlib.rc_context(LOOK), undamaged(", ".join(folders)):
        if os.path.exists(table):
            figure = draw_study(read_json(table))
        else:
            figure = draw_runs({folder: read_run(folder) for folder in folders})
        with replacing(path) as tmp:
            figure.savefig(tmp, format=path[-3:], dpi=192)
    print(path)


if __name__ == "__main__":
    run_script(main)
