"""Files: written under a temporary name and renamed; read without running any code in them."""
import contextlib
import csv
import errno
import gzip
import importlib.util
import io
import json
import os
import pickle
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


# errors of disks without fsync: some network and FUSE disks, folders on Windows
CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)


def flush(path):
    """Wait until a file, or the names in a folder, are on the disk. False if the disk has no
    fsync."""
    try:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as e:
        if e.errno not in CANNOT_FLUSH:
            raise
        return False
    return True


@contextlib.contextmanager
def replacing(path):
    """Yield a temporary name. The file or folder made there takes the name `path` at the end: a
    reader sees the old one or the new one, never half of it, even after a power failure."""
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        remove(tmp)     # it may be a link
        yield tmp
        flush(tmp)
        os.replace(tmp, path)
        flush(os.path.dirname(path) or ".")
    except OSError as e:
        raise BadInput(f"{path}: could not be written ({e.strerror or e}); what was saved before "
                       "is still there") from e
    finally:
        remove(tmp)


def is_plain(path):
    """True if `path` is free, or a regular file with one hard link. Writing to a link would change
    a file of a different folder, and writing to a pipe would wait."""
    is_file = os.path.isfile(path) and not os.path.islink(path)
    return os.stat(path).st_nlink == 1 if is_file else not os.path.lexists(path)


@contextlib.contextmanager
def opened_text(path):
    """Open a UTF-8 file for reading, unpacked if it ends in .gz. BadInput names the line that is
    not UTF-8."""
    if not os.path.isfile(path):    # reading a pipe would wait, a device may be endless
        raise BadInput(f"{path}: no such file")

    # read it as text; find the line only if there is an error
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as f:
            yield f
    except (OSError, EOFError, zlib.error) as e:
        raise BadInput(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    except UnicodeDecodeError as e:
        with opener(path, "rb") as f:
            line = next(n for n, x in enumerate(f, 1) if x.decode(errors="ignore").encode() != x)
        raise BadInput(f"{path}: line {line} is not UTF-8; save the file as UTF-8 text") from e


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
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path}: cannot be read as JSON ({e})") from e


def write_json(path, content):
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8", errors="backslashreplace") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def csv_rows(lines, path):
    """Rows of a .csv file with a header, as dicts. Refuse a quote that never closes: it would
    swallow the rows after it."""
    csv.field_size_limit(2 ** 30)
    reader = csv.DictReader(lines, strict=True)     # strict: refuses such a quote
    number = 0      # number of the last whole row
    line = 1        # line where the next row begins
    try:
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise BadInput(f"{path}: row {number} has a different number of columns than the "
                               "header: quote a value that holds a comma")
            line = reader.line_num + 1
            yield row
    except csv.Error as e:
        raise BadInput(f"{path}: row {number + 1}, which begins in line {line}, cannot be read "
                       f"({e}): a value that begins with a quote must end with one; write a quote "
                       "inside it twice") from e


def json_row(line, number, path):
    """A line of a .jsonl file as a dict."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
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
    """Rows of a run's log. If the run was killed, or is still writing, drop its half last line."""
    if not os.path.isfile(path):
        raise BadInput(f"{path}: no such file")
    with open(path, "rb") as f:
        *lines, last = f.read().split(b"\n")

    # is the last line whole?
    try:
        json.loads(last)
        lines.append(last)
    except (ValueError, RecursionError):
        pass
    return [json_row(line, number, path)
            for number, line in enumerate(filter(bytes.strip, lines), 1)]


def read_back(file):
    """Read what torch.save wrote, as load_torch does, but tensors without their numbers, which is
    fast."""
    return torch.load(file, map_location="meta", weights_only=True)


# errors of torch.save and torch.load for a value that is neither a table, a number nor a tensor
NOT_DATA = (pickle.PickleError, AttributeError, TypeError)


def not_data(value, where=""):
    """Where in a value there is something that a file could not give back, and what it is; "" if
    nowhere."""
    # look into plain tables; a tensor is fine
    items = ()
    if type(value) is dict:
        items = value.items()
    elif type(value) in (list, tuple):
        items = enumerate(value)
    elif not torch.is_tensor(value):
        try:
            torch.save(value, file := io.BytesIO())
            read_back(io.BytesIO(file.getvalue()))
        except NOT_DATA:
            return f"{where} = {shown(value)}"
    for key, x in items:
        if place := not_data(key, f"{where}, a key") or not_data(x, f"{where}[{key!r}]"):
            return place
    return ""


def save_file(path, kind, **content):
    """Write a checkpoint of this kind: "policy", "judge", "run", ... BadInput for content that
    could not be read again; the file that was there then stays."""
    with replacing(path) as tmp:
        open(tmp, "wb").close()     # raises a clear error if a file cannot be made here
        try:
            torch.save({"kind": kind, **content}, tmp)
            read_back(tmp)
        except RuntimeError as e:   # how torch reports it
            raise OSError("the disk is full, or a file may not be that large") from e
        except NOT_DATA as e:
            raise BadInput(f"{path}: not written, since it could not be read again: "
                           f"{not_data(content) or shown(e)}: must be a tensor, a number, text, or "
                           "a dict or list of these; what was saved before is still there") from e


def check_sums(path):
    """Raise ValueError if a check sum is wrong. torch does not check them."""
    with zipfile.ZipFile(path) as f:
        if f.testzip():
            raise ValueError


def load_torch(path, kind=None, tables_only=False):
    """Read what torch.save wrote, onto the CPU: tables and numbers only, never code. Look for a
    relative path here, then beside the code: data/policy.pt. BadInput if it is missing or broken.
    kind: what the file should be, for the advice. tables_only: tensors without their numbers, which
    is fast."""
    here = path if os.path.exists(path) else os.path.join(ROOT, path)
    if not os.path.isfile(here):
        raise BadInput(f"{path}: no such file")
    try:
        if tables_only:
            return read_back(here)
        check_sums(here)
        return torch.load(here, map_location="cpu", weights_only=True)
    except Exception as e:  # torch reports broken files in a dozen ways
        if "Weights only load failed" in str(e):
            raise BadInput(f"{path}: holds objects, and only tables of tensors and plain numbers "
                           "are opened: save it again, model.state_dict() for a model and float(x) "
                           "for a number of numpy") from e
        advice = " (a run continues from the one before, once this is moved away)" * (kind == "run")
        raise BadInput(
            f"{path}: not a readable checkpoint, perhaps damaged or cut short{advice}") from e


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
    """The dict that save_file wrote, on the CPU: see load_torch. BadInput for a different kind."""
    content = load_torch(path, kind)
    check_kind(content, kind, path)
    return content


@contextlib.contextmanager
def undamaged(path):
    """Around code that uses a loaded file: if something in it is missing or malformed, end in one
    line."""
    try:
        yield
    except BadInput:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as e:
        raise BadInput(f"{path}: damaged, or not a file of this project ({shown(e, 150)})") from e


def load_weights(path, module, weights):
    """module <- weights, in the module's own precision. BadInput unless names and shapes are the
    same."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError) as e:
        raise BadInput(f"{path}: does not fit these settings ({shown(e, 150)})") from e


MOMENTS = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
           getattr(torch.optim, "Muon", None): {"momentum_buffer"}}     # torch 2.8 lacks it


def load_optimizer(optimizer, state):
    """optimizer <- the moments in state. ValueError if one is missing, or its shape is not its
    weight's: AdamW would not notice, and would read and write memory that is not its own."""
    # the groups of torch's optimizers hold settings: keep the current ones, not the file's. An
    # optimizer from elsewhere may count in its groups (Schedule-Free, Prodigy): keep only its rate
    groups = optimizer.state_dict()["param_groups"]
    if not type(optimizer).__module__.startswith("torch."):
        rates = [{name: group[name] for name in ("lr", "initial_lr") if name in group}
                 for group in groups]
        groups = [was | rate for was, rate in zip(state["param_groups"], rates, strict=True)]
    optimizer.load_state_dict(state | {"param_groups": groups})

    # are all moments there, each with its weight's shape?
    wanted = MOMENTS.get(type(optimizer))
    if wanted is None:      # a user's optimizer: its moments are unknown
        return
    for p, moments in optimizer.state.items():
        if not wanted <= moments.keys():        # with amsgrad there is one more
            raise ValueError(f"the moments are {sorted(moments)}, must be {sorted(wanted)}")
        for name, x in moments.items():
            shape = () if name == "step" else p.shape
            if x.shape != shape or not x.is_contiguous() or not x.is_floating_point():
                raise ValueError(f"{name} is {tuple(x.shape)} for weights {tuple(p.shape)}")
