"""Files: written to a temporary name and renamed, read without running what is in them."""
import contextlib
import csv
import io
import json
import os
import shutil
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


@contextlib.contextmanager
def replacing(path):
    """Yields a temporary name. The file or folder made there takes the name `path` at the end.

    A reader sees the old one or the new one, never half. BadInput when it cannot be written.
    """
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        yield tmp
        flush_to_disk(tmp)
        os.replace(tmp, path)
    except OSError as e:
        raise BadInput(f"{path}: could not be written ({e.strerror or e}); make room, or choose "
                       "another folder. What was saved before is still there") from e
    finally:
        if os.path.isdir(tmp):
            shutil.rmtree(tmp, ignore_errors=True)
        elif os.path.lexists(tmp):
            os.remove(tmp)


def flush_to_disk(path):
    """Waits until the file or folder is on the disk, so that a crash cannot leave it empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def once(pairs):
    """The dict of a JSON object. ValueError for a name that stands twice in it."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return content


def read_json(path, missing=None):
    """The object in a JSON file, or `missing`, if given, when there is no such file.

    BadInput names a file that is not there, not readable or holds something else.
    """
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f, object_pairs_hook=once)
    except FileNotFoundError as e:
        if missing is not None:
            return missing
        raise BadInput(f"{path}: no such file") from e
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path}: cannot be read as JSON ({e})") from e
    if not isinstance(content, dict):
        raise BadInput(f"{path}: holds no JSON object")
    return content


def write_json(path, content):
    """Write an object as a JSON file, which appears whole or not at all."""
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def save_file(path, kind, **content):
    """Write a checkpoint of this kind ("policy", "judge", "run", ...), whole or not at all.

    BadInput when the disk is full or may not be written.
    """
    with replacing(path) as tmp, open(tmp, "wb") as f:
        try:
            torch.save({"kind": kind, **content}, f)
        except RuntimeError as e:  # torch's writer hides the OSError behind one of these
            if isinstance(e.__context__, OSError):
                raise e.__context__
            raise OSError(str(e).splitlines()[0]) from e


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
    except (KeyError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as e:
        raise BadInput(f"{path}: weights and shape do not fit ({str(e).splitlines()[0]})") from e
    return model


def read_text(path):
    """The text of a UTF-8 file, without a byte order mark. BadInput names the line of what is no
    text."""
    try:
        with open(path, "rb") as f:
            content = f.read()
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from e
    except ValueError as e:     # a NUL in the name
        raise BadInput(f"{str(path)!r}: cannot be read ({e})") from e
    bad = content.find(0)
    reason = "holds a NUL byte"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        bad = len(content) - len(e.object) + e.start    # e.object lacks the byte order mark
        reason = f"holds byte {e.object[e.start]:#04x}, which is not UTF-8"
    if bad >= 0:
        line = content.count(b"\n", 0, bad) + 1
        raise BadInput(f"{path}: line {line} {reason}; save the file as UTF-8 text")
    return text


def read_rows(path):
    """Rows of a .csv (with a header) or .jsonl file as dicts. BadInput names the row."""
    if not str(path).endswith((".csv", ".jsonl")):
        raise BadInput(f"{path}: must end in .csv or .jsonl")
    lines = io.StringIO(read_text(path), newline="")
    if str(path).endswith(".jsonl"):
        filled = (line for line in lines if line.strip())
        return [read_row(path, number, line) for number, line in enumerate(filled, 1)]
    csv.field_size_limit(2 ** 30)
    reader = csv.DictReader(lines)
    try:
        return list(reader)
    except csv.Error as e:
        raise BadInput(f"{path}: not a readable csv file (line {reader.line_num}: {e})") from e


def read_row(path, number, line):
    """The object in a line of JSON. BadInput for anything else, and for half a character."""
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise BadInput(f"{path}: row {number} holds half a character, "
                       f"{e.object[e.start]!r}") from e
    except (ValueError, RecursionError) as e:
        reason = getattr(e, "msg", e)
        raise BadInput(f"{path}: not a readable jsonl file (row {number}: {reason})") from e
    if type(row) is not dict:
        raise BadInput(f"{path}: row {number} is no object")
    return row
