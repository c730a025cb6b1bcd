"""Draw the curves of one run, or of several together, as a picture (pip install matplotlib).

    python plot.py out/toxicity                             # writes out/toxicity/curves.png
    python plot.py out/beta0.1 out/beta0.2                  # a colour for each
    python plot.py out/seed1 out/seed2 --out=curves.svg     # seeds of one run: mean and range
    python plot.py out/toxicity --panels=reward,kl,tracin/std_ip    # by their names in the logs

Runs that differ only in their seed share a colour: the line is their mean, the band their range.
A row of metrics.jsonl describes rollouts sampled before the step of its iteration. An evaluation at
iteration t comes after t steps. A missing value is left out of the line.
"""
import json
import math
import os

from common.cli import exit_codes, own_flags, run_script
from common.errors import BadInput, optional
from common.files import read_log, replacing
from run.settings import read_run, settings_that_are

with exit_codes(), optional("matplotlib"):      # without it: one line
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

PANELS = [  # title, log, metric
    ("toxicity, eval judge", "eval", "eval_judge/toxicity"),
    ("perplexity under the\npolicy before", "eval", "perplexity"),
    ("share that ends\nby itself", "eval", "ended"),
    ("reward, mean", "metrics", "reward"),
    ("KL to reference,\nnats per token", "metrics", "kl"),
    ("entropy,\nnats per token", "metrics", "entropy"),
    ("mean length, tokens", "metrics", "completions/mean_length"),
    ("gradient norm\nbefore clipping", "metrics", "grad_norm"),
    ("share of rollouts kept", "metrics", "tracin/selected_ratio"),
    ("share with\npositive influence", "metrics", "tracin/positive_ratio"),
    ("cosine of the\ntarget's two halves", "metrics", "tracin/target_cosine")]
WIDTH = 6.6     # inches; three panels can still be read on a phone
LOOK = {"font.size": 10, "axes.grid": True, "grid.color": "0.9", "lines.markersize": 3.5,
        "axes.titlesize": 10, "svg.fonttype": "none", "text.parse_math": False}


def read_logs(folder):
    """Read the logs of a run -> {"metrics": rows, "eval": rows}."""
    return {log: read_log(os.path.join(folder, f"{log}.jsonl")) for log in ("metrics", "eval")}


def kind_of(folder):
    """A key that runs share if they differ only in their seed: settings, text of the config."""
    run = read_run(folder)
    free = ("seed", *settings_that_are("free"))
    settings = {name: x for name, x in run["settings"].items() if name not in free}
    return json.dumps([settings, run["source"]])


def groups_of(folders):
    """Runs grouped by all but their seed -> {name: the logs of each run}."""
    groups = {}
    for folder in {os.path.realpath(folder): folder for folder in folders}.values():
        groups.setdefault(kind_of(folder), []).append(folder)
    named = {}
    for first, *more in groups.values():
        name = f"{first}: mean and range of {1 + len(more)} seeds" if more else first
        named[name] = [read_logs(folder) for folder in (first, *more)]
    return named


def panels_of(names, groups):
    """The panels of --panels=NAME,NAME -> [(title, log, metric)]; "": all PANELS."""
    if not names:
        return PANELS
    known = {name: (name, log, name) for runs in groups.values() for run in runs
             for log in ("eval", "metrics") for row in run[log][:1] for name in row}
    known |= {panel[2]: panel for panel in PANELS}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise BadInput(f"--panels={names}: {unknown[0]!r} is in no log; there are: "
                       f"{', '.join(sorted(known))}")
    return [known[name] for name in names.split(",")]


def curves_of(runs, log, metric):
    """The iterations that all runs have, and their values (runs, iterations). Skip runs without
    this log."""
    runs = [run for run in runs if run[log]] or runs
    curves = [{row["iteration"]: row.get(metric) for row in run[log]} for run in runs]
    x = [it for it in curves[0] if all(it in curve for curve in curves)]
    return x, np.array([[curve[it] for it in x] for curve in curves], float)    # None: NaN


def draw_curve(ax, x, y):
    """Draw the mean of a group's runs, y (runs, iterations), and their range."""
    is_known = ~np.isnan(y).any(0)
    x, y = np.array(x)[is_known], y[:, is_known]
    line, = ax.plot(x, y.mean(0), marker="o" if len(x) <= 30 else None)
    if len(y) > 1:
        ax.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)


def draw_runs(groups, names=""):
    """Draw the panels that have data -> Figure. groups: from groups_of. names: see panels_of."""
    # what there is to draw
    panels = []
    for title, log, metric in panels_of(names, groups):
        curves = [curves_of(runs, log, metric) for runs in groups.values()]
        if not all(np.isnan(y).all() for _, y in curves):
            panels.append((title, log, curves))
    if not panels:
        raise BadInput(f"{', '.join(groups)}: nothing to draw yet; wait for the first iteration")

    # three panels in a row, the names of the runs above them
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(WIDTH, 0.4 + 2.0 * rows), layout="constrained")
    for place, (title, log, curves) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, place, title=title)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        for x, y in curves:
            draw_curve(ax, x, y)
        if log == "eval":       # a share or a perplexity is read beside 0
            ax.update_datalim([(0, 0)], updatex=False)
    figure.supxlabel("iteration", fontsize=LOOK["font.size"])
    figure.legend(figure.axes[0].lines, list(groups), frameon=False, loc="lower left",
                  bbox_to_anchor=(0, 1))    # outside: savefig makes room for it
    return figure


def main(argv):
    flags, folders = own_flags(argv, {"out": "", "panels": ""})
    if not folders:
        raise BadInput("usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg] "
                       "[--panels=NAME,NAME]")
    path = flags["out"] or os.path.join(folders[0], "curves.png")
    with matplotlib.rc_context(LOOK), replacing(path) as tmp:
        figure = draw_runs(groups_of(folders), flags["panels"])
        figure.savefig(tmp, format=path.rpartition(".")[2], dpi=192, bbox_inches="tight")
    print(path)


if __name__ == "__main__":
    run_script(main)
