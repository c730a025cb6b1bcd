"""Files: written under a temporary name and renamed; read without running any code in them."""
import contextlib
import csv
import errno
import gzip
import importlib.util
import json
import os
import shutil
import zipfile
import zlib
from pathlib import Path

import torch

from common.errors import BadInput, shown

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def file_of_package(name, module, package):
    """The path of a file in an installed package. The package is not imported."""
    spec = importlib.util.find_spec(module)
    for folder in spec.submodule_search_locations if spec else []:
        for path in Path(folder).rglob(name):
            return str(path)
    raise BadInput(f"{name} is missing: pip install {package}")


def remove(path):
    """Remove a file, a link or a folder, if there is one."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        os.remove(path)


CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)     # some network and FUSE disks


def flush(path):
    """Wait until a file is on the disk, if the disk can tell: a power failure then loses none of
    it."""
    with open(path, "rb+") as f:
        try:
            os.fsync(f.fileno())
        except OSError as e:
            if e.errno not in CANNOT_FLUSH:
                raise


@contextlib.contextmanager
def replacing(path):
    """Yield a temporary name. The file or folder made there takes the name `path` at the end: a
    reader sees the old one or the new one, never half of it."""
    tmp = f"{path}.{os.getpid()}.tmp"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        yield tmp
        if os.path.isfile(tmp):
            flush(tmp)
        os.replace(tmp, path)
    finally:
        remove(tmp)


@contextlib.contextmanager
def opened_text(path):
    """Open a UTF-8 file for reading, unpacked if it ends in .gz."""
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as f:
            yield f
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: is not UTF-8 ({e.reason}): save the file as UTF-8 text") from e


def read_text(path):
    with opened_text(path) as f:
        return f.read()


def read_json(path, missing=None):
    """The content of a JSON file, or `missing`, if given, when the file does not exist."""
    if missing is not None and not os.path.exists(path):
        return missing
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as e:
        raise BadInput(f"{path}: cannot be read as JSON ({e})") from e


def write_json(path, content):
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8", errors="backslashreplace") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def csv_rows(lines, path):
    """Rows of a .csv file with a header, as dicts. Refuse a quote that never closes: it would
    swallow the rows after it."""
    csv.field_size_limit(2 ** 30)
    number = 0      # of the last whole row
    try:
        for number, row in enumerate(csv.DictReader(lines, strict=True), 1):
            if None in row or None in row.values():
                raise BadInput(f"{path}: row {number} has a different number of columns than the "
                               "header: quote a value that holds a comma")
            yield row
    except csv.Error as e:
        raise BadInput(f"{path}: row {number + 1} cannot be read ({e}): a value that begins with a "
                       "quote must end with one; write a quote inside it twice") from e


def json_row(line, number, path):
    """A line of a .jsonl file as a dict."""
    try:
        row = json.loads(line)
    except ValueError as e:
        raise BadInput(f"{path}: row {number} is not a JSON object ({e})") from e
    if not isinstance(row, dict):
        raise BadInput(f"{path}: row {number} is {shown(row)}: must be a JSON object")
    return row


def ending_of(path):
    """The ending of a path without .gz: ".csv" for rows.csv and rows.csv.gz."""
    return os.path.splitext(str(path).removesuffix(".gz"))[1]


def each_row(path):
    """Yield the rows of a .csv (with a header) or .jsonl file as dicts, a .txt file's lines as
    {"text": line}. One at a time: the file may be large. BadInput names the row."""
    ending = ending_of(path)
    if ending not in (".txt", ".csv", ".jsonl"):
        raise BadInput(f"{path}: must end in .txt, .csv or .jsonl, or one of these and .gz")

    with opened_text(path) as text:
        if ending == ".txt":
            for line in text:
                yield {"text": line.rstrip("\r\n")}
        elif ending == ".csv":
            yield from csv_rows(text, path)
        else:
            for number, line in enumerate(filter(str.strip, text), 1):
                yield json_row(line, number, path)


def read_rows(path):
    return list(each_row(path))


def read_log(path):
    """Rows of a run's log, without the half line of a run that was killed or is still writing."""
    try:
        with open(path, "rb") as f:
            *lines, last = f.read().split(b"\n")
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from e
    with contextlib.suppress(ValueError):       # an editor may leave out the last line's end
        json.loads(last)
        lines.append(last)
    return [json_row(line, number, path) for number, line in enumerate(lines, 1)]


def save_file(path, kind, **content):
    """Write a checkpoint of this kind: "policy", "judge", "run", ..."""
    with replacing(path) as tmp:
        torch.save({"kind": kind, **content}, tmp)


def is_damaged(path):
    """Whether a check sum of a .pt file is wrong, which torch does not look at."""
    if not zipfile.is_zipfile(path):        # torch's older format has none
        return False
    with zipfile.ZipFile(path) as f:
        return f.testzip() is not None


def load_torch(path, device="cpu"):
    """Read what torch.save wrote: tables and numbers only, never code. Look for a relative path
    here, then beside the code: data/policy.pt. device "meta": tensors without their numbers, which
    is fast."""
    place = path if os.path.exists(path) else os.path.join(ROOT, path)
    if not os.path.isfile(place):
        raise BadInput(f"{path}: no such file")
    try:
        if device != "meta" and is_damaged(place):
            raise ValueError
        return torch.load(place, map_location=device, weights_only=True)
    except Exception as e:  # torch reports broken files in a dozen ways
        if "Weights only load failed" in str(e):    # its advice would run what is inside
            raise BadInput(f"{path}: holds objects, and only tables of tensors and plain numbers "
                           "are opened: save it again, model.state_dict() for a model and float(x) "
                           "for a number of numpy") from e
        raise BadInput(f"{path}: not a readable checkpoint, perhaps damaged or cut short (a run "
                       "continues from the one before, once this is moved away)") from e


def check_kind(content, kind, path):
    """Raise BadInput unless save_file wrote this for that kind."""
    actual = content.get("kind") if isinstance(content, dict) else None
    if actual is None:
        raise BadInput(f"{path}: is neither a checkpoint of this project, of kind {kind!r}, nor "
                       "one of nanoGPT's train.py, with model_args; a bare state_dict() does not "
                       "say its shape")
    if actual != kind:
        raise BadInput(f"{path}: holds {actual!r} where a checkpoint of kind {kind!r} is needed")


def load_file(path, kind):
    """The dict that save_file wrote, on the CPU. BadInput for a different kind."""
    content = load_torch(path)
    check_kind(content, kind, path)
    return content
