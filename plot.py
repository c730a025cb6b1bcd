"""Draws the curves of a run, or of several over each other, as PNG or SVG (pip install matplotlib).

    python plot.py out/toxicity                            # writes out/toxicity/curves.png
    python plot.py out/seed1 out/seed2 --out=curves.svg    # a colour for each run
    python plot.py out/toxicity --panels=reward,toxicity   # these panels, in this order
    python plot.py out/study/clean                         # a study: writes study.png there

A row of metrics.jsonl describes the rollouts of an iteration, which are sampled before its step. An
evaluation at iteration t comes after t steps. Where a row has no value, the line has a gap.
"""
import contextlib
import math
import os

import numpy as np

from run.files import read_json, read_rows
from run.script import BadInput, run_script

PANELS = {  # name: title, metric of the solid line, metric of the dashed line
    "reward": ("reward, mean", "reward"),
    "toxicity": ("toxicity, eval judge (dashed: judge)", "eval_judge/toxicity", "judge/toxicity"),
    "rollouts": ("toxicity of the rollouts, eval judge", "rollouts/toxicity"),
    "kl": ("KL to reference, nats per token", "kl"),
    "entropy": ("entropy, nats per token", "entropy"),
    "length": ("mean length, tokens", "completions/mean_length"),
    "ended": ("share of completions that ended", "completions/ended_ratio"),
    "grad_norm": ("gradient norm before clipping", "grad_norm"),
    "loss": ("loss", "loss"),
    "positive": ("share of rollouts with influence > 0", "tracin/positive_ratio"),
    "selected": ("share of rollouts selected", "tracin/selected_ratio"),
    "cosine": ("cosine of the target's two halves", "tracin/target_cosine"),
    "spread": ("std of influence, log scale", "tracin/std_ip"),
}
THIRDS = {     # of a study: name: title
    "wrong_kept": "share of wrong rollouts kept",
    "auc": "chance that a wrong rollout has the lower influence",
    "planted": "share of rollouts with the planted string"}
METRICS = {metric for _, *metrics in PANELS.values() for metric in metrics}
METRICS |= {"reward_std", "completions/clipped_ratio"}
# Okabe and Ito (2008): colour-blind readers can tell these apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
SOLID_AND_DASHED = dict(linestyle="-"), dict(linestyle="--", markerfacecolor="white")
WIDTH = 830 / 96  # inches: an SVG is 830 pixels wide
LOOK = {
    "font.size": 9, "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "figure.constrained_layout.w_pad": 0.08, "axes.titlesize": 9, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "0.6",
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": "0.9", "grid.linewidth": 0.6,
    "xtick.color": "0.6", "xtick.labelcolor": "0.2",
    "ytick.color": "0.6", "ytick.labelcolor": "0.2",
    "lines.linewidth": 1.2, "lines.markersize": 3.5, "legend.frameon": False,
    "savefig.dpi": 192, "svg.fonttype": "none", "svg.hashsalt": "plot.py",
}
USAGE = ("usage: python plot.py RUN [RUN ...] [--out=FILE.png or FILE.svg] "
         f"[--panels=reward,toxicity]; panels: {', '.join(PANELS)}")


def read_run(folder):
    """Returns the curves of a run: {metric: (iterations, values)}."""
    metrics = os.path.join(folder, "metrics.jsonl")
    evaluations = os.path.join(folder, "eval.jsonl")
    if not os.path.exists(metrics):
        raise BadInput(f"{metrics}: no such file; give the folder of a run, such as out/toxicity")
    curves = read_curves(metrics)
    if "eval_judge/toxicity" in curves:     # the evaluations have this name too
        curves["rollouts/toxicity"] = curves.pop("eval_judge/toxicity")
    if os.path.exists(evaluations):
        measures = read_curves(evaluations)
        measures.pop("kl", None)    # to the starting policy; the panel has the rollouts'
        curves |= measures
    if "completions/clipped_ratio" in curves:
        x, clipped = curves["completions/clipped_ratio"]
        curves["completions/ended_ratio"] = x, 1 - clipped
    return curves


def read_curves(path):
    """The curves of one file that have any value; NaN, drawn as a gap, where a row has none."""
    try:
        rows = read_rows(path)
        x = np.array([int(row["iteration"]) for row in rows])
        y = np.array([[row.get(metric) for row in rows] for metric in METRICS], dtype=float)
    except (KeyError, TypeError, ValueError) as e:
        reason = str(e).removeprefix(f"{path}: ")
        raise BadInput(f"{path}: a row must hold an iteration and numbers or null ({reason}); mend "
                       "or remove the row that does not") from e
    return {metric: (x, y) for metric, y in zip(METRICS, y) if not np.isnan(y).all()}


def short_names(folders):
    """The last parts of each path, as few as tell the runs apart."""
    paths = [tuple(os.path.abspath(folder).split(os.sep)) for folder in folders]
    if len(set(paths)) < len(paths):
        raise BadInput(f"{', '.join(folders)}: a run is given twice; give each run once")
    n = 1
    while len({path[-n:] for path in paths}) < len(paths):
        n += 1
    return ["/".join(path[-n:]) for path in paths]


def choose_panels(asked, runs):
    """Names of panels: all that have data, or those in `asked`, such as "reward,toxicity"."""
    known = set().union(*runs.values())
    there = [panel for panel, (_, *metrics) in PANELS.items() if known.intersection(metrics)]
    if not there:
        raise BadInput(f"{', '.join(runs)}: nothing to draw yet; wait for the first iteration")
    panels = asked.split(",") if asked else there
    for panel in panels:
        if panel not in there:
            trouble = "has no data here" if panel in PANELS else "is no panel"
            raise BadInput(f"--panels: {panel!r} {trouble}; choose from {', '.join(there)}")
    return panels


@contextlib.contextmanager
def look():
    """Within this block matplotlib draws in the style above and ignores the user's matplotlibrc."""
    try:
        from matplotlib import style
    except ImportError as e:
        raise BadInput("plot.py needs matplotlib: pip install matplotlib") from e
    with style.context(LOOK, after_reset=True):
        yield


def draw_figure(runs, panels):
    """Returns the Figure of some panels. runs: {name: curves}; panels: names in PANELS."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    columns = min(len(panels), 2 if len(panels) <= 8 else 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(WIDTH, 0.5 + 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for ax in grid[len(panels):]:
        ax.remove()
    for i, panel in enumerate(panels):
        draw_panel(grid[i], panel, runs)
        if i + columns >= len(panels):  # no panel is below this one
            grid[i].set_xlabel("iteration")
            grid[i].tick_params(labelbottom=True)
    lines = [Line2D([], [], color=color) for color in COLORS[:len(runs)]]
    in_a_row = max(1, 110 // (8 + max(map(len, runs))))
    legend = figure.legend(lines, list(runs), loc="outside upper left", ncols=in_a_row)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in the name of a folder is no formula
    return figure


def draw_panel(ax, panel, runs):
    """Draws the lines of a panel, a colour for each run, and around a single reward its spread."""
    title, *metrics = PANELS[panel]
    for (name, curves), color in zip(runs.items(), COLORS):
        for metric, style in zip(metrics, SOLID_AND_DASHED):
            if metric in curves:
                x, y = curves[metric]
                gaps = np.isnan(np.pad(y, 1, constant_values=math.nan))
                alone = gaps[:-2] & gaps[2:]  # no line reaches these values
                ax.plot(x, y, color=color, label=f"{name}: {metric}", clip_on=False,
                        marker="o", markevery=alone | (panel == "toxicity"), **style)
    if panel == "reward" and len(runs) == 1 and "reward_std" in curves:
        x, mean = curves["reward"]
        _, std = curves["reward_std"]
        ax.fill_between(x, mean - std, mean + std, color=color, alpha=0.15)
        title += " ± std"
    ax.set_title(title)
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if panel == "spread":
        ax.set_yscale("log", nonpositive="mask")
        ax.minorticks_off()
        low, high = ax.get_ylim()
        if high < 1000 * low:  # too few powers of ten for an axis
            ax.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    elif panel not in ("reward", "length") and ax.dataLim.y0 >= 0:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:g}")


# ------------------------------------------------------------------------------------------------
# a study: what study.py has written into table.json


def draw_study(summary):
    """Returns the Figure of a study: the measure against KL, the differences to the first control
    at equal KL, and what was found in thirds of the runs."""
    from matplotlib.figure import Figure
    parts = [name for name in THIRDS
             if any(name in arm["thirds"] for arm in summary["arms"].values())]
    rows = 1 + math.ceil(len(parts) / 2)
    figure = Figure(figsize=(WIDTH, 1.1 + 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False).ravel()
    styles = styles_of(summary)
    draw_frontier(grid[0], summary, styles)
    draw_differences(grid[1], summary, styles)
    for ax, name in zip(grid[2:], parts):
        draw_thirds(ax, name, summary, styles)
    for ax in grid[2 + len(parts):]:
        ax.remove()
    name = summary["name"] + ": quick, says nothing" * summary["quick"]
    legend = figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper left", ncols=6,
                           title=name, alignment="left")
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def styles_of(summary):
    """{arm: how its line looks}: tested arms in front, lines of the others dashed."""
    styles = {}
    for i, arm in enumerate(summary["arms"]):
        tested = arm in summary["tested"]
        styles[arm] = dict(
            color=COLORS[i % len(COLORS)], marker=MARKERS[(i + i // len(COLORS)) % len(MARKERS)],
            linestyle="-" if tested else ":", zorder=3 if tested else 2, markersize=4.5,
            markerfacecolor=None if tested else "white", elinewidth=0.8)
    return styles


def draw_frontier(ax, summary, styles):
    """The measure against the root of the KL, means over seeds with standard errors."""
    for arm, style in styles.items():
        points = np.array(summary["arms"][arm]["frontier"], dtype=float)    # (points, x and y, 2)
        if len(points):
            (x, x_error), (y, y_error) = points.transpose(1, 2, 0)
            ax.errorbar(x, y, xerr=x_error, yerr=y_error, label=arm, **style)
    ax.axvline(summary["x"], color="0.6", linewidth=0.8, zorder=1)
    ax.set_title(f"{summary['measure']}, at the end")
    ax.set_xlabel("sqrt(KL to the starting policy), nats per token; line: equal KL")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:g}")


def draw_differences(ax, summary, styles):
    """Differences to the first control at equal KL, in percent, with 95 % intervals."""
    control = summary["controls"][0]
    arms = [arm for arm in styles if summary["equal"][arm].get(control)]
    for i, arm in enumerate(arms):
        c = summary["equal"][arm][control]
        mean, low, high = 100 * np.expm1([c["mean"], c["low"], c["high"]])
        style = styles[arm] | {"linestyle": "", "elinewidth": 1.2}
        ax.errorbar(mean, i, xerr=[[mean - low], [high - mean]], **style)
    ax.axvline(0, color="0.6", linewidth=0.8, zorder=1)
    ax.set_yticks(range(len(arms)), arms)
    ax.invert_yaxis()
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_title(f"difference to {control} at equal KL")
    ax.set_xlabel("%, below 0: better; bars: 95 % over seeds")


def draw_thirds(ax, name, summary, styles):
    """What was found in each third of the runs, means over seeds with standard errors."""
    shown = [arm for arm in styles if name in summary["arms"][arm]["thirds"]]
    for i, arm in enumerate(shown):
        y, error = np.array(summary["arms"][arm]["thirds"][name], dtype=float).T
        x = np.arange(1, 4) + 0.03 * (i - (len(shown) - 1) / 2)     # side by side
        ax.errorbar(x, y, yerr=error, **styles[arm])
    if name == "auc":
        ax.axhline(0.5, color="0.6", linewidth=0.8, zorder=1)
    ax.set_title(THIRDS[name])
    ax.set_xticks((1, 2, 3), ("first third", "second third", "last third"))
    ax.yaxis.set_major_formatter("{x:g}")


# ------------------------------------------------------------------------------------------------


def write(figure, path):
    """Writes a PNG or an SVG, without a date: the same curves give the same bytes."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    except OSError as e:
        raise BadInput(f"{path}: cannot be written ({e.strerror}); choose another --out") from e


def check_ending(path):
    if not path.endswith((".png", ".svg")):
        raise BadInput(f"--out={path}: must end in .png or .svg")


def plot_study(folder, options):
    if "--panels" in options:
        raise BadInput("--panels: is for runs; a study has panels of its own")
    path = options.get("--out", os.path.join(folder, "study.png"))
    check_ending(path)
    with look():
        write(draw_study(read_json(os.path.join(folder, "table.json"))), path)
    print(path)


def main(argv):
    options = {}
    for arg in argv:
        flag, _, value = arg.partition("=")
        if flag in ("--out", "--panels") and value:
            options[flag] = value
        elif arg.startswith("-"):
            raise BadInput(f"{arg}: no such flag, or no value; {USAGE}")
    folders = [arg for arg in argv if not arg.startswith("-")]
    if not folders:
        raise BadInput(USAGE)
    if len(folders) == 1 and os.path.exists(os.path.join(folders[0], "table.json")):
        return plot_study(folders[0], options)
    if len(folders) > len(COLORS):
        raise BadInput(f"{len(folders)} runs: there are {len(COLORS)} colours; draw fewer at once")
    path = options.get("--out")
    if path is None:
        above = os.path.relpath(os.path.commonpath(map(os.path.abspath, folders)))
        parent = folders[0] if len(folders) == 1 else above
        path = os.path.normpath(os.path.join(parent, "curves.png"))
    check_ending(path)
    runs = dict(zip(short_names(folders), map(read_run, folders)))
    panels = choose_panels(options.get("--panels"), runs)
    with look():
        write(draw_figure(runs, panels), path)
    print(path)


if __name__ == "__main__":
    run_script(main)
