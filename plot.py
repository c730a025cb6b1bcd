"""Draw the curves of one run, or of several together, as PNG or SVG (pip install matplotlib).

    python plot.py out/toxicity                            # writes out/toxicity/curves.png
    python plot.py out/seed1 out/seed2 --out=curves.svg    # a colour for each run

A row of metrics.jsonl describes rollouts sampled before the step of its iteration. An evaluation at
iteration t comes after t steps. A missing value leaves a gap in the line.
"""
import math
import os

from common.files import read_rows, replacing, undamaged
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
    ("share of completions truncated", "metrics", "completions/clipped_ratio"),
    ("gradient norm before clipping", "metrics", "grad_norm"),
    ("share of rollouts kept (dashed: influence > 0)", "metrics", "tracin/selected_ratio",
     "tracin/positive_ratio"),
    ("cosine of the target's two halves", "metrics", "tracin/target_cosine")]
LOOK = {"font.size": 9, "axes.grid": True, "grid.color": "0.9", "lines.markersize": 3}


def read_run(folder):
    """Read the logs of a run -> {"metrics": rows, "eval": rows}."""
    return {log: read_rows(os.path.join(folder, f"{log}.jsonl")) for log in ("metrics", "eval")}


def draw_runs(runs):
    """Draw every panel that has data -> Figure. runs: {name: what read_run returns}."""
    panels = [panel for panel in PANELS if has_data(panel, runs)]
    if not panels:
        raise BadInput(f"{', '.join(runs)}: nothing to draw yet; wait for the first iteration")
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8.6, 0.3 + 2.2 * rows), layout="constrained")
    for place, (title, log, *metrics) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, place, title=title)
        for i, (name, run) in enumerate(runs.items()):
            x = [row["iteration"] for row in run[log]]
            for metric, style in zip(metrics, ("-", "--")):
                y = [math.nan if row.get(metric) is None else row[metric] for row in run[log]]
                ax.plot(x, y, style, color=f"C{i}", marker="o" if log == "eval" else None,
                        label=name if style == "-" else None)
    if len(runs) > 1:
        lines, names = figure.axes[0].get_legend_handles_labels()       # the solid ones
        figure.legend(lines, names, loc="outside upper left", ncols=3)
    return figure


def has_data(panel, runs):
    _, log, metric, *_ = panel
    return any(row.get(metric) is not None for run in runs.values() for row in run[log])


def main(argv):
    own, folders = own_flags(argv, {"out": ""})
    if not folders or any(arg.startswith("--") for arg in folders):
        raise BadInput("usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg]")
    path = own["out"] or os.path.join(folders[0], "curves.png")
    if not path.endswith((".png", ".svg")):
        raise BadInput(f"--out={path}: must end in .png or .svg")
    with matplotlib.rc_context(LOOK), undamaged(", ".join(folders)):
        figure = draw_runs({folder: read_run(folder) for folder in folders})
        with replacing(path) as tmp:
            figure.savefig(tmp, format=path[-3:], dpi=192)
    print(path)


if __name__ == "__main__":
    run_script(main)
