"""Draws the curves of a run, or of several over each other, as PNG or SVG (pip install matplotlib).

    python plot.py out/toxicity                            # writes out/toxicity/curves.png
    python plot.py out/seed1 out/seed2 --out=curves.svg    # a colour for each run
    python plot.py out/toxicity --panels=reward,toxicity   # these panels, in this order
    python plot.py out/study/clean                         # a study: its measure against the KL

A row of metrics.jsonl describes the rollouts of an iteration, which are sampled before its step. An
evaluation at iteration t comes after t steps. Where a row has no value, the line has a gap.
"""
import math
import os

import numpy as np

from run.files import read_json, read_rows, replacing
from run.script import BadInput, optional, run_script

with optional("matplotlib"):
    import matplotlib
    from matplotlib.figure import Figure

PANELS = {  # name: title, log, metric of the solid line, metric of the dashed line
    "reward": ("reward, mean", "metrics", "reward"),
    "toxicity": ("toxicity, eval judge (dashed: judge)", "eval", "eval_judge/toxicity",
                 "judge/toxicity"),
    "kl": ("KL to reference, nats per token", "metrics", "kl"),
    "entropy": ("entropy, nats per token", "metrics", "entropy"),
    "length": ("mean length, tokens", "metrics", "completions/mean_length"),
    "clipped": ("share of completions that were cut", "metrics", "completions/clipped_ratio"),
    "grad_norm": ("gradient norm before clipping", "metrics", "grad_norm"),
    "selected": ("share of rollouts kept (dashed: influence > 0)", "metrics",
                 "tracin/selected_ratio", "tracin/positive_ratio"),
    "cosine": ("cosine of the target's two halves", "metrics", "tracin/target_cosine"),
}
LOOK = {"font.size": 9, "axes.grid": True, "grid.color": "0.9", "lines.markersize": 3}
USAGE = ("usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg] "
         f"[--panels=reward,toxicity]; panels: {', '.join(PANELS)}")


def read_run(folder):
    """{"metrics": rows, "eval": rows} of a run."""
    metrics = os.path.join(folder, "metrics.jsonl")
    evaluations = os.path.join(folder, "eval.jsonl")
    if not os.path.exists(metrics):
        raise BadInput(f"{metrics}: no such file; give the folder of a run, such as out/toxicity")
    return {"metrics": read_rows(metrics),
            "eval": read_rows(evaluations) if os.path.exists(evaluations) else []}


def choose_panels(asked, runs):
    """Names of panels: all that have data, or those in `asked`, such as "reward,toxicity"."""
    there = []
    for name, (_, log, metric, *_) in PANELS.items():
        if any(row.get(metric) is not None for run in runs.values() for row in run[log]):
            there.append(name)
    panels = asked.split(",") if asked else there
    for panel in panels:
        if panel not in there:
            raise BadInput(f"--panels: there is no {panel!r} here; choose from {', '.join(there)}")
    if not panels:
        raise BadInput(f"{', '.join(runs)}: nothing to draw yet; wait for the first iteration")
    return panels


def draw_runs(runs, panels):
    """The Figure of some panels. runs: {name: what read_run returns}."""
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8.6, 0.3 + 2.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes[len(panels):]:
        ax.remove()
    for ax, panel in zip(axes, panels):
        title, log, *metrics = PANELS[panel]
        ax.set_title(title)
        for i, (name, run) in enumerate(runs.items()):
            for metric, style in zip(metrics, ("-", "--")):
                x = [row["iteration"] for row in run[log]]
                y = [math.nan if row.get(metric) is None else row[metric] for row in run[log]]
                ax.plot(x, y, style, color=f"C{i}", marker="o" if log == "eval" else None)
    if len(runs) > 1:
        solid = axes[0].lines[::len(PANELS[panels[0]]) - 2]
        figure.legend(solid, list(runs), loc="outside upper left", ncols=3)
    return figure


def draw_study(found):
    """The Figure of a study's table.json: each arm's measure against the root of its KL."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    ax = figure.subplots()
    for arm, by_seed in found["points"].items():
        points = np.array(list(by_seed.values()))                       # (seeds, points, 2)
        if len(points):
            x, y = points.mean(0).T
            error = points[:, :, 1].std(0) / max(1, len(points) - 1) ** 0.5
            ax.errorbar(x, np.exp(y), yerr=np.exp(y) * error, marker="o", markersize=4, label=arm)
    ax.set_xlabel("sqrt(KL to the starting policy)")
    ax.set_title(f"{found['name']}: {found['measure']}")
    ax.legend()
    return figure


def main(argv):
    options = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith("--") and "=" in arg)
    folders = [arg for arg in argv if not arg.startswith("--")]
    odd = options.keys() - {"out", "panels"} or len(options) + len(folders) != len(argv)
    if not folders or odd:
        raise BadInput(USAGE)
    path = options.get("out", os.path.join(folders[0], "curves.png"))
    if not path.endswith((".png", ".svg")):
        raise BadInput(f"--out={path}: must end in .png or .svg")
    table = os.path.join(folders[0], "table.json")
    with matplotlib.rc_context(LOOK):
        if os.path.exists(table):
            figure = draw_study(read_json(table))
        else:
            runs = {folder: read_run(folder) for folder in folders}
            figure = draw_runs(runs, choose_panels(options.get("panels"), runs))
        with replacing(path) as tmp:
            figure.savefig(tmp, format=path[-3:], dpi=192)
    print(path)


if __name__ == "__main__":
    run_script(main)
