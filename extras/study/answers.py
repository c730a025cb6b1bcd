"""
The answers to heldout.py and mirrored.py together, by the criteria that are written there.

    python -m extras.study extras/study/heldout.py
    python -m extras.study extras/study/mirrored.py
    python -m extras.study.answers
"""
from statistics import fmean

import numpy as np

from common.files import read_json
from common.script import BadInput, run_script
from extras.study.__main__ import holm, mean_and_error, permutation_p, read_study

SURE = 0.01     # a yes needs corrected p-values below this
BETTER = {"all": ("all",), "random and top_advantage": ("random", "top_advantage"),
          "trusted": ("trusted",), "drop lowest": ("drop lowest",)}


def read_table(name):
    """Read the table.json of a study; all of its seeds must be complete."""
    found = read_json(f"out/study/{name}/table.json")
    missing = set(read_study(f"extras/study/{name}.py").seeds) - set(found["seeds"])
    if missing:
        raise BadInput(f"{name}: {len(missing)} seeds are not complete; an answer needs all")
    return found


def comparison(found, control, arm="held-out"):
    """Compare an arm with a control at equal KL: (what, differences by seed, if it decides)."""
    differences = np.subtract(found["compared"][arm], found["compared"][control])
    decides = all(reached(found["points"][x], found["x"]) for x in (arm, control))
    return f"log toxicity less that of {control}", differences.tolist(), decides


def reached(of_arm, x):
    """Tell whether an arm was near sqrt(KL) x. of_arm: by seed, its points (sqrt(KL), ...)."""
    least = fmean(min(points)[0] for points in of_arm)
    largest = fmean(max(points)[0] for points in of_arm)
    return 0.8 * least <= x <= 1.25 * largest


def asked_of(founds):
    """Collect the comparisons of each question. founds: {study: its table}. Below 0: yes."""
    asked = {}
    for name, found in founds.items():
        for better, controls in BETTER.items():
            question = f"{name}: is held-out better than {better}?"
            asked[question] = [comparison(found, control) for control in controls]
    ends = founds["mirrored"]["ends"]["held-out"]
    asked["mirrored: does influence rank wrong rollouts below right ones?"] = [
        ("0.5 less auc", [0.5 - end["auc"] for end in ends], True),
        ("auc reward less auc", [end["auc reward"] - end["auc"] for end in ends], True),
        ("auc |advantage| less auc", [end["auc |advantage|"] - end["auc"] for end in ends], True)]
    return asked


def as_text(asked):
    """Write each question with its answer and its comparisons; Holm over all comparisons."""
    ps = [permutation_p(d) for comparisons in asked.values() for _, d, _ in comparisons]
    both_ps = zip(ps, holm(ps))
    lines = []
    for question, comparisons in asked.items():
        answer = "Yes"
        shown = []
        for what, differences, decides in comparisons:
            mean, error = mean_and_error(differences)
            p, corrected = next(both_ps)
            where = "" if decides else "; decides nothing"
            shown.append(f"    {what}: {mean:+.3f} ± {error:.3f}, p {p:.2g}, "
                         f"after Holm {corrected:.2g}{where}")
            if mean >= 0 or corrected >= SURE or not decides:
                answer = "No"
        lines += [f"{question} {answer}", *shown]
    return "\n".join(lines)


def main(argv):
    print(as_text(asked_of({name: read_table(name) for name in ("heldout", "mirrored")})))


if __name__ == "__main__":
    run_script(main)
