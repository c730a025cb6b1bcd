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

PLACES = ("run/*.py", "extras/**/*.py")     # files where a docstring may have such a table
TITLE = {"Metrics": "Metrics of an iteration, metrics.jsonl",
         "Measures": "Measures of an evaluation, eval.jsonl"}


def tables(source, title):
    """The rows "names: meaning" below a title in the docstrings of a file's text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        _, _, table = (ast.get_docstring(node) or "").partition(f"{title}:\n")
        for row in re.split(r"\n(?!     )", table.partition("\n\n")[0].rstrip()):
            if row:
                names, _, meaning = " ".join(row.split()).partition(": ")
                yield names.split(", "), meaning


def meanings(title="Metrics"):
    """{name: meaning} of the numbers of an iteration, or of the "Measures" of an evaluation."""
    found = {}
    for place in PLACES:
        for path in sorted(glob.glob(f"{glob.escape(ROOT)}/{place}", recursive=True)):
            source = read_text(path)
            if f"  {title}:\n" in source:       # few files have one, and parsing takes long
                for names, meaning in tables(source, title):
                    found |= dict.fromkeys(names, meaning)
    return found


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
