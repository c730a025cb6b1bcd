"""Draw the curves of one run, or of several together, as PNG or SVG (pip install matplotlib).

    python plot.py out/toxicity                             # writes out/toxicity/curves.png
    python plot.py out/beta0.1 out/beta0.2                  # a colour for each
    python plot.py out/seed1 out/seed2 --out=curves.svg     # seeds of one run: mean and range
    python plot.py out/seed1 out/seed2 --panels=3           # only the first three panels

Runs that differ by their seed alone share a colour: the line is their mean, the band their range.
A row of metrics.jsonl describes rollouts sampled before the step of its iteration. An evaluation at
iteration t comes after t steps. A missing value leaves a gap in the line.
"""
import json
import math
import os

import config
from common.files import read_log, replacing, undamaged
from common.script import BadInput, optional, own_flags, run_script
from run.checkpoint import FREE

with optional("matplotlib"):
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

PANELS = [  # title, log, metric
    ("toxicity, eval judge", "eval", "eval_judge/toxicity"),
    ("perplexity under the policy before", "eval", "perplexity"),
    ("share that ends by itself", "eval", "ended"),
    ("reward, mean", "metrics", "reward"),
    ("KL to reference, nats per token", "metrics", "kl"),
    ("entropy, nats per token", "metrics", "entropy"),
    ("mean length, tokens", "metrics", "completions/mean_length"),
    ("gradient norm before clipping", "metrics", "grad_norm"),
    ("share of rollouts kept", "metrics", "tracin/selected_ratio"),
    ("share with positive influence", "metrics", "tracin/positive_ratio"),
    ("cosine of the target's two halves", "metrics", "tracin/target_cosine")]
LOOK = {"font.size": 9, "axes.grid": True, "grid.color": "0.9", "lines.markersize": 3,
        "axes.titlesize": 9, "svg.fonttype": "none"}


def read_logs(folder):
    """Read the logs of a run -> {"metrics": rows, "eval": rows}."""
    return {log: read_log(os.path.join(folder, f"{log}.jsonl")) for log in ("metrics", "eval")}


def groups_of(folders):
    """{name: the logs of runs that differ by their seed alone}."""
    groups = {}
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        groups.setdefault(kind_of(folder), []).append(folder)
    named = {}
    for first, *others in groups.values():
        name = f"{first}: mean and range of {1 + len(others)} seeds" if others else first
        named[name] = [read_logs(folder) for folder in (first, *others)]
    return named


def kind_of(folder):
    """What runs have in common that differ by their seed alone: settings, text of the config."""
    if not os.path.exists(f"{folder}/config.json"):     # logs alone: a colour of its own
        return folder
    run = config.read_run(folder)
    free = (*FREE, "cache_dir", "seed")
    kept = {name: x for name, x in run["settings"].items() if name not in free}
    return json.dumps([kept, run["source"]])


def draw_runs(groups, most=len(PANELS)):
    """Draw the first panels that have data -> Figure. groups: what groups_of returns."""
    panels = []
    for title, log, metric in PANELS:
        curves = [curves_of(runs, log, metric) for runs in groups.values()]
        if not all(np.isnan(y).all() for _, y in curves):
            panels.append((title, log, curves))
    panels = panels[:most]
    if not panels:
        raise BadInput(f"{', '.join(groups)}: nothing to draw yet; wait for the first iteration")
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8.6, 0.5 + 2.1 * rows), layout="constrained")
    for place, (title, log, curves) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, place, title=title)
        ax.locator_params("x", integer=True)
        for name, (x, y) in zip(groups, curves):
            line, = ax.plot(x, y.mean(0), label=name, marker="o" if log == "eval" else None)
            if len(y) > 1:
                ax.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2,
                                linewidth=0)
        if log == "eval":
            ax.set_ylim(bottom=0)
    figure.supxlabel("iteration", fontsize=9)
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper left", ncols=3, frameon=False)
    return figure


def curves_of(runs, log, metric):
    """The iterations that all of the runs have, and their values (runs, iterations). Runs without
    this log are left out."""
    runs = [run for run in runs if run[log]] or runs
    curves = [{row["iteration"]: row.get(metric) for row in run[log]} for run in runs]
    x = [it for it in curves[0] if all(it in curve for curve in curves)]
    return x, np.array([[curve[it] for it in x] for curve in curves], float)    # None: NaN


def main(argv):
    own, folders = own_flags(argv, {"out": "", "panels": len(PANELS)})
    if not folders or any(arg.startswith("--") for arg in folders):
        raise BadInput(
            "usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg] [--panels=N]")
    path = own["out"] or os.path.join(folders[0], "curves.png")
    if not path.endswith((".png", ".svg")):
        raise BadInput(f"--out={path}: must end in .png or .svg")
    with matplotlib.rc_context(LOOK), undamaged(", ".join(folders)):
        figure = draw_runs(groups_of(folders), own["panels"])
        with replacing(path) as tmp:
            figure.savefig(tmp, format=path[-3:], dpi=192)
    print(path)


if __name__ == "__main__":
    run_script(main)
