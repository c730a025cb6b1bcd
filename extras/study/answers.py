"""
Questions that a study answers with yes or no, by criteria that it wrote down before its first run.
"""
from statistics import fmean

import numpy as np

from extras.study.__main__ import holm, mean_and_error, permutation_p

SURE = 0.01     # a yes needs corrected p-values below this


def comparison(found, control, arm):
    """Compare an arm with a control at equal KL: (what, differences by seed, if it decides)."""
    differences = np.subtract(found["compared"][arm], found["compared"][control])
    decides = all(reached(found["points"][x], found["x"]) for x in (arm, control))
    return f"log toxicity less that of {control}", differences.tolist(), decides


def reached(of_arm, x):
    """Tell whether an arm was near sqrt(KL) x. of_arm: by seed, its points (sqrt(KL), ...)."""
    least = fmean(min(points)[0] for points in of_arm)
    largest = fmean(max(points)[0] for points in of_arm)
    return 0.8 * least <= x <= 1.25 * largest


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
