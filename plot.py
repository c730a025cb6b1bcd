"""Draw the curves of one run, or of several together, as a picture (pip install matplotlib).

    python plot.py out/toxicity                             # writes out/toxicity/curves.png
    python plot.py out/beta0.1 out/beta0.2                  # a colour for each
    python plot.py out/seed1 out/seed2 --out=curves.svg     # seeds of one run: mean and range
    python plot.py out/seed1 out/seed2 --panels=3           # only the first three panels
    python plot.py out/toxicity --panels=reward,kl,tracin/std_ip    # by their names in the logs

Runs that differ only in their seed share a colour: the line is their mean, the band their range.
A row of metrics.jsonl describes rollouts sampled before the step of its iteration. An evaluation at
iteration t comes after t steps. A missing value leaves a gap in the line.
"""
import json
import math
import os
import textwrap

from common.cli import exit_codes, own_flags, run_script
from common.errors import BadInput, optional
from common.files import read_log, replacing
from run.settings import read_run, settings_that_are

with exit_codes(), optional("matplotlib"):      # without it: one line
    import matplotlib
    import numpy as np
    from cycler import cycler
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
LETTERS = 42    # of a run's name that fit into WIDTH, whatever letters they are
LOOK = {"font.size": 10, "axes.grid": True, "grid.color": "0.9", "lines.markersize": 3.5,
        "axes.titlesize": 10, "svg.fonttype": "none", "text.parse_math": False}
# ten colours, each with its own marker; the next ten runs have dashed lines, and so on
LINES = cycler(linestyle=("-", "--", ":", "-.")) * (
    matplotlib.rcParamsDefault["axes.prop_cycle"] + cycler(marker="osD^v<>pX*"))


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


def panels_of(flag, groups):
    """The panels that --panels=flag names -> [(title, log, metric)]. flag: names of numbers in the
    logs, separated by commas; a number or "" gives all PANELS."""
    if not flag or flag.isdecimal():
        return PANELS
    known = {name: (name, log, name) for runs in groups.values() for run in runs
             for log in ("eval", "metrics") for row in run[log][:1] for name in row}
    known |= {panel[2]: panel for panel in PANELS}
    for name in flag.split(","):
        if name not in known:
            raise BadInput(f"--panels={flag}: {name!r} is in no log; a number, or names from: "
                           f"{', '.join(sorted(known))}")
    return [known[name] for name in flag.split(",")]


def curves_of(runs, log, metric):
    """The iterations that all runs have, and their values (runs, iterations). Skip runs without
    this log."""
    runs = [run for run in runs if run[log]] or runs
    curves = [{row["iteration"]: row.get(metric) for row in run[log]} for run in runs]
    x = [it for it in curves[0] if all(it in curve for curve in curves)]
    return x, np.array([[curve[it] for it in x] for curve in curves], float)    # None: NaN


def draw_curve(ax, x, y, all_marked):
    """Draw the mean of a group's runs, y (runs, iterations), and their range. Mark all values, or
    only those without a neighbour, which no line would show."""
    mean = y.mean(0)
    gap = np.isnan(np.pad(mean, 1, constant_values=np.nan))
    marked = gap[:-2] & gap[2:] | all_marked
    line, = ax.plot(x, mean, markevery=marked.nonzero()[0].tolist())
    if len(y) > 1:
        ax.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)


def draw_runs(groups, flag=""):
    """Draw the panels that have data -> Figure. groups: from groups_of. flag: the value of
    --panels, a number for the first so many, or names (see panels_of)."""
    # what there is to draw
    panels = []
    for title, log, metric in panels_of(flag, groups):
        curves = [curves_of(runs, log, metric) for runs in groups.values()]
        if not all(np.isnan(y).all() for _, y in curves):
            panels.append((title, log, curves))
    if flag.isdecimal():
        panels = panels[:int(flag)]
    if not panels:
        raise BadInput(f"{', '.join(groups)}: nothing to draw yet; wait for the first iteration")

    # the names of the runs above, three panels in a row
    names = [textwrap.fill(name, LETTERS) for name in groups]
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    height = 0.4 + 0.2 * sum(1 + name.count("\n") for name in names) + 2.0 * rows
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    for place, (title, log, curves) in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, place, title=title)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        ax.set_prop_cycle(LINES)
        for x, y in curves:
            draw_curve(ax, x, y, all_marked=log == "eval")
        if log == "eval":       # the y axis begins at 0, or below the least value
            ax.margins(y=0.1)
            ax.update_datalim([(0, 0)], updatex=False)
            ax.autoscale_view()
            if ax.dataLim.y0 == 0:
                ax.set_ylim(bottom=0)
    figure.supxlabel("iteration", fontsize=LOOK["font.size"])
    figure.legend(figure.axes[0].lines, names, loc="outside upper left", frameon=False)
    return figure


def main(argv):
    flags, folders = own_flags(argv, {"out": "", "panels": ""})
    if not folders:
        raise BadInput("usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg] "
                       "[--panels=N or --panels=NAME,NAME]")
    path = flags["out"] or os.path.join(folders[0], "curves.png")
    with matplotlib.rc_context(LOOK), replacing(path) as tmp:
        figure = draw_runs(groups_of(folders), flags["panels"])
        figure.savefig(tmp, format=path.rpartition(".")[2], dpi=192)
    print(path)


if __name__ == "__main__":
    run_script(main)
