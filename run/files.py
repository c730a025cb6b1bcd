"""Files: written to a temporary name and renamed, read without running what is in them."""
import csv
import json
import os
import zipfile
from dataclasses import asdict

import torch

from model import GPT, GPTConfig
from run.script import BadInput


def find_below(folder, name):
    """Path of the first file called `name` below `folder`; BadInput when there is none."""
    for root, _, files in sorted(os.walk(folder)):
        if name in files:
            return os.path.join(root, name)
    raise BadInput(f"{name} is missing below {folder}: reinstall the package")


def save_file(path, kind, **content):
    """Write a checkpoint of this kind ("policy", "judge", "run", ...). A reader sees the old file
    or the new, never half. BadInput when the disk is full or may not be written."""
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(tmp, "wb") as f:
            torch.save({"kind": kind, **content}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:  # torch's writer turns the first into the second
        reason = next((x.strerror or str(x) for x in (e, e.__context__) if isinstance(x, OSError)), str(e).splitlines()[0])
        raise BadInput(f"{path}: could not be written ({reason}); make room, or choose another "
                       "folder. What was saved before stands") from e
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


def load_file(path, kind):
    """The dict that save_file wrote. BadInput names the file and the reason when it is missing,
    broken or of another kind."""
    if not os.path.exists(path):
        raise BadInput(f"{path}: no such file")
    try:
        damaged = zipfile.ZipFile(path).testzip()  # torch itself does not look at the check sums
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch reports broken files in a dozen ways
        raise BadInput(f"{path}: not a readable checkpoint, perhaps cut short "
                       f"({type(e).__name__})") from e
    if damaged:
        raise BadInput(f"{path}: damaged, a check sum is wrong")
    found = content.get("kind") if isinstance(content, dict) else None
    if found != kind:
        raise BadInput(f"{path}: holds {found or 'something else'!r} where a checkpoint of kind "
                       f"{kind!r} is needed")
    return content


def save_gpt(path, model, **extra):
    """Write weights and shape of a policy."""
    save_file(path, "policy", config=asdict(model.config), model=model.state_dict(), **extra)


def load_gpt(path):
    """The policy that save_gpt wrote, on the CPU."""
    content = load_file(path, "policy")
    return load_weights(path, content, GPT)


def load_weights(path, content, make):
    """make(GPTConfig) with the weights in `content`; BadInput when they do not fit."""
    try:
        model = make(GPTConfig(**content["config"]))
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise BadInput(f"{path}: weights and shape do not fit ({str(e).splitlines()[0]})") from e
    return model


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
