"""The policy's prompts: starts of held-out comments, or the rows of a file or of a function.

A file is read, then prompts are selected, then they are split into those of training and those of
the evaluation.
"""
import os
import random
import re
from typing import NamedTuple

import torch

from data.chat import encode_prompt, with_messages
from data.comments import as_text
from hub.files import fetch
from run.files import read_rows, read_text
from run.script import BadInput, seed_for, shown

SEED = 0    # of what a config file makes up


class Prompt(NamedTuple):
    text: str
    ids: list   # its tokens
    row: dict   # all columns of its row in the file, for rewards; without columns {"text": text}


def load_prompts(cfg, tokenizer, splits):
    """Return the training prompts, the evaluation prompts and the other held-out prompts.

    Each is a list of Prompt. They come from the files that the settings name, else from the config
    file's `questions`, else from the splits of the comments. The evaluation takes the first
    num_eval_prompts of the held-out prompts. A prompt has at least one token, and block_size leaves
    room for a completion. Raises BadInput for a file, row or setting that does not allow this.
    """
    limit = cfg.block_size - cfg.max_completion_length
    if limit < 1:
        raise BadInput(f"max_completion_length = {cfg.max_completion_length}: leaves no room for a "
                       f"prompt in block_size = {cfg.block_size}")

    if cfg.prompts:
        train = prompts_of_file(cfg.prompts, cfg, tokenizer, limit)
    elif "questions" in cfg.functions:
        train = prompts_of_questions(cfg, tokenizer, limit)
    else:
        train = prompts_of_comments(splits["train_prompts"], cfg, tokenizer, limit)
    if cfg.eval_prompts:
        held_out = prompts_of_file(cfg.eval_prompts, cfg, tokenizer, limit)
    elif cfg.prompts or "questions" in cfg.functions:
        train, held_out = split_prompts(train)
    else:
        held_out = prompts_of_comments(splits["eval_prompts"], cfg, tokenizer, limit)

    for name, prompts in (("training", train), ("evaluation", held_out)):
        if not prompts:
            raise BadInput(f"prompts = {cfg.prompts!r}, eval_prompts = {cfg.eval_prompts!r}: no "
                           f"{name} prompts; give a longer file or one for each")
    n = cfg.num_eval_prompts
    if cfg.tracin_val_prompts and cfg.tracin != "off" and len(held_out) <= n:
        raise BadInput(f"tracin_val_prompts = {cfg.tracin_val_prompts}: no held-out prompts are "
                       f"left beside num_eval_prompts = {n}")
    return train, held_out[:n], held_out[n:]


def read_prompt(tokenizer, content, row, where):
    """Make a Prompt of a text or a list of messages; `where` names it in a BadInput."""
    text, ids = encode_prompt(tokenizer, content, where)
    return Prompt(text, ids, with_messages(row, content))


def draw_prompts(prompts, it, num_prompts, seed):
    """Return the prompts of iteration it: all come once in random order, then again in another."""
    n = len(prompts)
    drawn, orders = [], {}
    for j in range(it * num_prompts, (it + 1) * num_prompts):
        epoch = j // n
        if epoch not in orders:
            generator = torch.Generator().manual_seed(seed_for(seed, "prompts", epoch))
            orders[epoch] = torch.randperm(n, generator=generator).tolist()
        drawn.append(prompts[orders[epoch][j % n]])
    return drawn


def split_prompts(prompts):
    """Hold out every fifth prompt of a single file, by a hash of its text -> (train, held out)."""
    train = [prompt for prompt in prompts if seed_for(prompt.text) % 5]
    held_out = [prompt for prompt in prompts if seed_for(prompt.text) % 5 == 0]
    return train, held_out


# --------------------------------------------------------------------------------------------------
# from the comments


def prompts_of_comments(comments, cfg, tokenizer, limit):
    """Take the first words of each comment, their number drawn from prompt_words; 0 takes them all.

    Comments that leave nothing to complete, or whose start is longer than `limit` tokens, are
    skipped.
    """
    prompts = []
    for text, _ in comments:
        words = text.split(" ")
        count = random.Random(text).randint(*cfg.prompt_words)
        if len(words) <= count:
            continue
        start = " ".join(words[:count]) if count else text
        _, ids = encode_prompt(tokenizer, start, "a comment")
        if 1 <= len(ids) <= limit:
            prompts.append(Prompt(start, ids, {"text": start}))
    return prompts


# --------------------------------------------------------------------------------------------------
# from a function

NUM_QUESTIONS = 4096


def prompts_of_questions(cfg, tokenizer, limit):
    """Return the prompts that the config file makes up, in its order.

    Its function questions(n, seed) returns at most n rows: dicts with the prompt's "text" and
    whatever else rewards ask for. Raises BadInput for anything else.
    """
    rows = cfg.functions["questions"](NUM_QUESTIONS, SEED)
    if not isinstance(rows, list) or len(rows) > NUM_QUESTIONS:
        raise BadInput(f"questions({NUM_QUESTIONS}, {SEED}) returned {shown(rows)}: must be a list "
                       f"of at most {NUM_QUESTIONS} rows")
    found = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("text"), (str, list)):
            raise BadInput(f"questions: row {number} is {shown(row)}: must be a dict with the "
                           "prompt as \"text\"")
        found.append(read_prompt(tokenizer, row["text"], row, f"questions: row {number}"))
    return fitting("questions", found, limit)


# --------------------------------------------------------------------------------------------------
# from a file: select


def prompts_of_file(path, cfg, tokenizer, limit):
    """Return the prompts of a file."""
    path = find_file(path)
    read = read_lines if path.endswith(".txt") else read_table
    found = [read_prompt(tokenizer, content, row, f"{path}: row {number}")
             for number, content, row in read(path, cfg)]
    return fitting(path, found, limit)


def fitting(path, prompts, limit):
    """Keep the prompts of 1 to `limit` tokens and print how many are left out."""
    fit = [prompt for prompt in prompts if 1 <= len(prompt.ids) <= limit]
    left_out = len(prompts) - len(fit)
    if left_out:
        print(f"{path}: {left_out} of {len(prompts)} prompts are empty or longer than {limit} "
              "tokens (block_size - max_completion_length) and are left out")
    return fit


# --------------------------------------------------------------------------------------------------
# from a file: read


def find_file(path):
    """Return the local path of a file of prompts; "datasets/OWNER/NAME/FILE" is downloaded."""
    if not path.endswith((".txt", ".csv", ".jsonl")):
        raise BadInput(f"{path}: prompts must be a .txt, .csv or .jsonl file")
    if os.path.exists(path) or not path.startswith("datasets/"):
        return path
    revision = "@refs/[^/]+/[^/]+|@[^/]+"
    match = re.fullmatch(f"(datasets/[^/@]+/[^/@]+(?:{revision})?)/(.+)", path)
    if not match:
        raise BadInput(f"{path}: no such file; a published one is datasets/OWNER/NAME/FILE")
    name, file = match.groups()
    return os.path.join(fetch(name, [file]), file)


def read_lines(path, cfg):
    """Read a .txt file of one prompt a line -> list of (line number, text, row)."""
    lines = read_text(path).splitlines()
    return [(number, text, {"text": text}) for number, text in enumerate(lines, 1)]


def read_table(path, cfg):
    """Read a .csv or .jsonl file -> list of (number, content, row).

    The content is the text of the prompt, or its list of messages.
    """
    name = cfg.prompt_field or cfg.text_field
    numbered = []
    for number, row in enumerate(read_rows(path), 1):
        where = f"{path}: row {number}"
        content = field_of(row, name, where)
        if content is None:
            raise BadInput(f"{where} has nothing in its field {name!r}")
        if not isinstance(content, list):
            content = as_text(content, name, where)
        numbered.append((number, content, row))
    return numbered


def field_of(row, name, where):
    """Return the field `name` of a row; "a.b" is field b inside field a."""
    path = [name] if name in row else name.split(".")  # a field may have a dot in its name
    value = row
    for part in path:
        if not isinstance(value, dict) or part not in value:
            names = sorted(map(str, row))
            raise BadInput(f"{where} has no field {name!r}; it has {names}")
        value = value[part]
    return value
