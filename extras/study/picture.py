"""The picture of a study: each arm's measure against the KL (pip install matplotlib).

    python -m extras.study.picture out/study/wrong      # writes out/study/wrong/curves.png
"""
import os

import numpy as np

from common.files import read_json, replacing, undamaged
from common.script import BadInput, optional, run_script

with optional("matplotlib"):
    from matplotlib.figure import Figure


def draw(found):
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
    ax.grid(color="0.9")
    ax.legend()
    return figure


def main(argv):
    if len(argv) != 1 or argv[0].startswith("--"):
        raise BadInput("usage: python -m extras.study.picture out/study/NAME")
    path = os.path.join(argv[0], "curves.png")
    with undamaged(argv[0]):
        figure = draw(read_json(os.path.join(argv[0], "table.json")))
    with replacing(path) as tmp:
        figure.savefig(tmp, format="png", dpi=192)
    print(path)


if __name__ == "__main__":
    run_script(main)
