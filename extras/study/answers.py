"""
The answers to heldout.py and mirrored.py together, by the criteria that are written there.

    python -m extras.study extras/study/heldout.py
    python -m extras.study extras/study/mirrored.py
    python -m extras.study.answers
"""
from statistics import fmean

from common.files import read_json
from common.script import BadInput, run_script
from extras.study.__main__ import SURE, holm, mean_and_error, permutation_p, read_study

BETTER = {"all": ("all",), "random and top_advantage": ("random", "top_advantage"),
          "trusted": ("trusted",), "drop lowest": ("drop lowest",)}


def read_table(name):
    """What extras.study wrote of a study, if all of its seeds are complete."""
    found = read_json(f"out/study/{name}/table.json")
    missing = set(map(str, read_study(f"extras/study/{name}.py").seeds)) - found["ends"]["all"].keys()
    if missing:
        raise BadInput(f"{name}: {len(missing)} seeds are not complete; an answer needs all")
    return found


def comparison(found, control):
    """(what is compared, differences by seed, whether it decides): log toxicity at equal KL."""
    equal = found["equal"]
    differences = [y - equal[control][seed] for seed, y in equal["held-out"].items()]
    decides = all(reached(found["points"][arm].values(), found["x"])
                  for arm in ("held-out", control))
    return f"log toxicity less that of {control}", differences, decides


def reached(runs, x):
    """Tell whether an arm was near sqrt(KL) x. runs: its points (sqrt(KL), log toxicity) by seed"""
    least = fmean(min(points)[0] for points in runs)
    largest = fmean(max(points)[0] for points in runs)
    return 0.8 * least <= x <= 1.25 * largest


def asked_of(founds):
    """{question: [comparison]}, of {study: its table}. Below 0: yes."""
    asked = {f"{name}: is held-out better than {better}?":
             [comparison(found, control) for control in controls]
             for name, found in founds.items() for better, controls in BETTER.items()}
    ends = founds["mirrored"]["ends"]["held-out"].values()
    asked["mirrored: does influence rank wrong rollouts below right ones?"] = [
        ("0.5 less auc", [0.5 - end["auc"] for end in ends], True),
        ("auc reward less auc", [end["auc reward"] - end["auc"] for end in ends], True),
        ("auc |advantage| less auc", [end["auc |advantage|"] - end["auc"] for end in ends], True)]
    return asked


def as_text(asked):
    """Each question with its answer and its comparisons; Holm over the comparisons of all."""
    ps = [permutation_p(d) for comparisons in asked.values() for _, d, _ in comparisons]
    corrected = iter(holm(ps))
    lines = []
    for question, comparisons in asked.items():
        answer = "Yes"
        shown = []
        for what, differences, decides in comparisons:
            mean, error = mean_and_error(differences)
            alone = permutation_p(differences)
            p = next(corrected)
            where = "" if decides else "; decides nothing"
            if mean >= 0 or p >= SURE or not decides:
                answer = "No"
            shown.append(f"    {what}: {mean:+.3f} ± {error:.3f}, p {alone:.2g}, after Holm {p:.2g}"
                         f"{where}")
        lines += [f"{question} {answer}", *shown]
    return "\n".join(lines)


def main(argv):
    print(as_text(asked_of({name: read_table(name) for name in ("heldout", "mirrored")})))


if __name__ == "__main__":
    run_script(main)
