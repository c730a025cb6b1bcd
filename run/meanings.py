"""
What each number of a run means, for `python grpo.py --help=metrics`. The meaning stands in the
docstring of the function that computes the number:

    Metrics:
        reward, reward_std: of all completions
        rewards/NAME/mean: of each reward function, whose name stands for NAME

The measures of an evaluation begin with `Measures:`.
"""
import ast
import glob
import re
import textwrap

from common.files import ROOT, read_text

FILES = ("run/log.py", "run/meter.py", "run/metrics.py", "grpo.py", "extras/environment/tools.py",
         "extras/variants/**/*.py", "run/evaluation.py")
TITLE = {"Metrics": "Metrics of an iteration, metrics.jsonl",
         "Measures": "Measures of an evaluation, eval.jsonl"}


def tables(path, title):
    """The rows "names: meaning" below a title in the docstrings of a file."""
    for node in ast.walk(ast.parse(read_text(path))):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        _, _, table = (ast.get_docstring(node) or "").partition(f"{title}:\n")
        for row in re.split(r"\n(?!     )", table.partition("\n\n")[0].rstrip()):
            if row:
                names, _, meaning = " ".join(row.split()).partition(": ")
                yield names.split(", "), meaning


def meanings(title="Metrics"):
    """{name: meaning} of the numbers of an iteration, or of the "Measures" of an evaluation."""
    paths = [path for pattern in FILES for path in sorted(
        glob.glob(f"{glob.escape(ROOT)}/{pattern}", recursive=True))]
    rows = [row for path in paths for row in tables(path, title)]
    return {name: meaning for names, meaning in rows for name in names}


def listed(title):
    """The meanings as text, each below its names."""
    lines = [f"{TITLE[title]}:"]
    by_meaning = {}
    for name, meaning in meanings(title).items():
        by_meaning.setdefault(meaning, []).append(name)
    for meaning, names in by_meaning.items():
        lines += textwrap.wrap(", ".join(names), 100, initial_indent="    ",
                               subsequent_indent="    ", break_on_hyphens=False)
        lines += textwrap.wrap(meaning, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def text_of_all():
    return "\n\n".join(listed(title) for title in TITLE)
