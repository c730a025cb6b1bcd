"""The policy's prompts: starts of held-out comments, or the rows of a file."""
import os
import random
import re

from hub.fetch import fetch
from run.script import BadInput
from run.files import read_rows
from run.script import derive


def field_of(row, name):
    """The value of a row's field, or with a dotted name of the field inside a field. KeyError when there is none."""
    for part in [name] if name in row else name.split("."):
        if not isinstance(row, dict):
            raise KeyError(name)
        row = row[part]
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
        if not path.endswith((".txt", ".csv", ".jsonl")):
            raise BadInput(f"{path}: prompts must be a .txt, .csv or .jsonl file")
        if path.startswith("datasets/") and not os.path.exists(path):
            match = re.fullmatch("(datasets/[^/@]+/[^/@]+(?:@refs/[^/]+/[^/]+|@[^/]+)?)/(.+)", path)
            if not match:
                raise BadInput(f"{path}: no such file, and a published one is datasets/OWNER/NAME/FILE")
            path = os.path.join(fetch(match[1], [match[2]]), match[2])
        if path.endswith(".txt"):
            if s.min_prompt_toxicity > 0:
                raise BadInput(f"min_prompt_toxicity = {s.min_prompt_toxicity}: {path} does not tell it; set it to 0, or give a "
                               ".csv or .jsonl file")
            try:
                numbered = list(enumerate(open(path, encoding="utf-8").read().splitlines(), 1))
            except (OSError, ValueError) as e:
                raise BadInput(f"{path}: cannot be read ({e})") from e
        else:
            numbered = []
            for number, row in enumerate(read_rows(path), 1):
                name = s.prompt_toxicity_field
                try:  # RealToxicityPrompts has a null where its classifier gave no number: not toxic
                    if s.min_prompt_toxicity > 0 and not float(field_of(row, name) or 0) >= s.min_prompt_toxicity:
                        continue
                    name = s.prompt_field or s.text_field
                    text = field_of(row, name)
                except KeyError:
                    raise BadInput(f"{path}: row {number} has no field {name!r}; it has {sorted(map(str, row))}")
                except (TypeError, ValueError):
                    raise BadInput(f"{path}: row {number} has {name} = {field_of(row, name)!r}: must be a number")
                if text is None:
                    raise BadInput(f"{path}: row {number} has nothing in its field {name!r}")
                numbered.append((number, str(text)))
        found = [(number, text, tokenizer.encode_ordinary(text)) for number, text in numbered]
        if s.max_prompt_tokens:
            most, before = min(s.max_prompt_tokens, limit), len(found)
            found = [row for row in found if 1 <= len(row[2]) <= most]
            if len(found) < before:
                print(f"{path}: {before - len(found)} of {before} prompts are empty or longer than {most} tokens and are left "
                      "out")
        if 0 < s.max_prompts < len(found):
            found = random.Random(derive("prompts", s.prepare_seed)).sample(found, s.max_prompts)
        for number, _, ids in found:
            if not 1 <= len(ids) <= limit:
                raise BadInput(f"{path}: prompt {number} has {len(ids)} tokens: must be 1 to {limit} (block_size {s.block_size} "
                               f"less max_completion_length {s.max_completion_length}); max_prompt_tokens leaves longer ones out")
        if not found:
            raise BadInput(f"{path}: holds no prompts" + f" with {s.prompt_toxicity_field} of {s.min_prompt_toxicity} or more"
                           * (s.min_prompt_toxicity > 0) + f" of at most {s.max_prompt_tokens} tokens" * (s.max_prompt_tokens > 0))
        return [(text, ids) for _, text, ids in found]

    for name in ("prompt_field", "min_prompt_toxicity", "max_prompt_tokens", "max_prompts"):
        if getattr(s, name) and not (s.prompts or s.eval_prompts):
            raise BadInput(f"{name} = {getattr(s, name)!r}: it is about the prompts of a file, which `prompts` does not name")
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
