"""Files: written to a temporary name and renamed, read without running what is in them."""
import contextlib
import csv
import io
import json
import os
import shutil
import typing
import zipfile
from dataclasses import asdict

import torch

from model import GPT, GPTConfig
from run.script import BadInput, uninterrupted


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

    BadInput when the disk is full or may not be written. Signals wait until it is written.
    """
    with uninterrupted(), replacing(path) as tmp, open(tmp, "wb") as f:
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
        reason = damage(path)
        content = None if reason else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch reports broken files in a dozen ways
        raise BadInput(f"{path}: not a readable checkpoint, perhaps cut short "
                       f"({type(e).__name__})") from e
    if reason:
        raise BadInput(f"{path}: damaged, {reason}")
    found = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(found, str) or not found:
        found = "something else"
    if found != kind:
        raise BadInput(f"{path}: holds {found!r} where a checkpoint of kind "
                       f"{kind!r} is needed")
    return content


def damage(path):
    """What is wrong with a .pt file that torch itself does not look at; None: nothing."""
    with zipfile.ZipFile(path) as z:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in z.infolist()):
            return "a part of it is compressed"     # and may be far larger than the file
        return "a check sum is wrong" if z.testzip() else None


# --------------------------------------------------------------------------------------------------
# weights


def is_plain(x):
    """True for an ordinary tensor that holds as many numbers as its shape says."""
    if type(x) is not torch.Tensor or x.layout != torch.strided or x.device.type != "cpu":
        return False
    return x.numel() * x.element_size() <= x.untyped_storage().nbytes()


def is_dense(x):
    """True for an ordinary tensor of floats that holds as many numbers as its shape says."""
    return is_plain(x) and x.is_floating_point()


def check_tensors(found, wanted):
    """Raises ValueError unless `found` holds finite tensors of the names and shapes of `wanted`."""
    if not isinstance(found, dict):
        raise ValueError("there are no tensors")
    odd = [name for name in (*wanted, *found) if (name in wanted) != (name in found)]
    if odd:
        raise ValueError(f"{odd[0]!r} is {'missing' if odd[0] in wanted else 'not of this model'}")
    for name, x in found.items():
        if not is_dense(x) or x.shape != wanted[name].shape:
            shape = tuple(getattr(x, "shape", ()))
            raise ValueError(f"{name} has shape {shape}, not {tuple(wanted[name].shape)}")
        if not x.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")


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
        weights = content["model"]
        config = shape_of(content["config"], len(weights))
        with torch.device("meta"):      # shapes only: nothing of the claimed size is made
            wanted = make(config).state_dict()
        check_tensors(weights, wanted)
        model = make(config)
        model.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as e:
        raise BadInput(f"{path}: weights and shape do not fit ({str(e).splitlines()[0]})") from e
    return model


def shape_of(fields, num_tensors):
    """GPTConfig of a file's fields. ValueError for one of another type or out of range."""
    hints = typing.get_type_hints(GPTConfig)
    for name, value in fields.items():
        types = typing.get_args(hints[name]) or (hints[name],)
        numbers = value if isinstance(value, tuple) else (value or 0,)
        if type(value) not in types and not (float in types and type(value) is int):
            raise ValueError(f"{name} = {value!r:.50}")
        if not all(isinstance(x, int | float) and 0 <= x < 2 ** 31 for x in numbers):
            raise ValueError(f"{name} = {value!r:.50}")
    config = GPTConfig(**fields)
    if not 0 < config.n_layer <= num_tensors:
        raise ValueError(f"n_layer = {config.n_layer} with {num_tensors} tensors")
    return config


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
