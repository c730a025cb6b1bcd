"""Files: written to a temporary name and renamed, read without running what is in them."""
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

from common.script import BadInput, shown

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def file_of_package(name, module, package):
    """The path of a file in an installed package, which is never imported."""
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


# what a disk answers that cannot do it: some network and FUSE disks, folders on Windows
CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF)


def flush(path):
    """Wait until a file, or the names in a folder, are on the disk. False where that disk cannot
    be waited for."""
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
    reader sees the old one or the new one, never half, also after a power failure."""
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
    """Whether a file can be written in place: nothing is there, or a regular file that has no
    other link. A link leads to a file of another folder, and a pipe is waited for."""
    is_file = os.path.isfile(path) and not os.path.islink(path)
    return os.stat(path).st_nlink == 1 if is_file else not os.path.lexists(path)


@contextlib.contextmanager
def opened_text(path):
    """A UTF-8 file to read; one that ends in .gz is unpacked. BadInput names the line of what is no
    text."""
    if not os.path.isfile(path):    # a pipe is waited for, a device may have no end
        raise BadInput(f"{path}: no such file")

    # text, a line at a time; errors say which one
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
    """What a JSON file holds, or `missing`, if given, when there is no such file."""
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
    """Rows of a .csv file with a header, as dicts. A quote that never closes would swallow the rows
    behind it, so it is refused."""
    # strict refuses such a quote
    csv.field_size_limit(2 ** 30)
    reader = csv.DictReader(lines, strict=True)
    number = 0      # of the last whole row
    line = 1        # where the next one begins
    try:
        if reader.fieldnames is not None and not any(map(str.strip, reader.fieldnames)):
            raise BadInput(f"{path}: line 1 is empty, and must be the header")
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                raise BadInput(f"{path}: row {number} has a different number of columns than the "
                               "header: quote a value that holds a comma")
            line = reader.line_num + 1
            yield row
    except csv.Error as e:
        raise BadInput(f"{path}: row {number + 1}, which begins in line {line}, cannot be read "
                       f"({e}): a value that begins with a quote ends with one, and a quote inside "
                       "is written twice") from e


def json_row(line, number, path):
    """A line of a .jsonl file as a dict."""
    if line[:1] in ("[", b"["):
        raise BadInput(f"{path}: row {number} begins a JSON array: write one object a line")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path}: row {number} is not a JSON object ({e})") from e
    if not isinstance(row, dict):
        raise BadInput(f"{path}: row {number} is {shown(row)}: must be a JSON object")
    return row


def without_nul(lines, path):
    """These lines, refused where they are no UTF-8: plain English in UTF-16 looks like it."""
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise BadInput(f"{path}: line {number} holds NUL, so it is not UTF-8; save the file as "
                           "UTF-8 text")
        yield line


def ending_of(path):
    """".txt", ".csv" or ".jsonl", also of a packed file: rows.csv.gz."""
    return os.path.splitext(str(path).removesuffix(".gz"))[1]


def each_row(path):
    """Rows of a .csv (with a header) or .jsonl file as dicts; of a .txt file {"text": line}. One by
    one: the file may be large. BadInput names the row."""
    ending = ending_of(path)
    if ending not in (".txt", ".csv", ".jsonl"):
        raise BadInput(f"{path}: must end in .txt, .csv or .jsonl, or one of these and .gz")

    # line by line
    with opened_text(path) as text:
        lines = without_nul(text, path)
        if ending == ".txt":
            for line in lines:
                yield {"text": line.rstrip("\r\n")}
        elif ending == ".csv":
            yield from csv_rows(lines, path)
        else:
            for number, line in enumerate(filter(str.strip, lines), 1):
                yield json_row(line, number, path)


def read_rows(path):
    return list(each_row(path))


def read_log(path):
    """Rows of a log of a run. Of a run that was killed, or is at work, half a last line is left
    out."""
    if not os.path.isfile(path):
        raise BadInput(f"{path}: no such file")
    with open(path, "rb") as f:
        *lines, last = f.read().split(b"\n")

    # a half last line is still being written, or never will be
    try:
        json.loads(last)
        lines.append(last)      # it is whole
    except (ValueError, RecursionError):
        pass

    # all others are whole
    return [json_row(line, number, path)
            for number, line in enumerate(filter(bytes.strip, lines), 1)]


def read_back(file):
    """Read what torch.save wrote as load_torch does, its tables alone: tensors without their
    numbers, which takes no time."""
    return torch.load(file, map_location="meta", weights_only=True)


# what torch.save and reading it raise for a value that is neither a table, a number nor a tensor
NOT_DATA = (pickle.PickleError, AttributeError, TypeError)


def not_data(value, where=""):
    """Where in a value something stands that a file cannot give back, and what it is; "" if
    nothing does."""
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
        if found := not_data(key, f"{where}, a key") or not_data(x, f"{where}[{key!r}]"):
            return found
    return ""


def save_file(path, kind, **content):
    """Write a checkpoint of this kind: "policy", "judge", "run", ... BadInput for what could not be
    read again, before it takes the place of what can."""
    with replacing(path) as tmp:
        open(tmp, "wb").close()     # says why, where no file can be made
        try:
            torch.save({"kind": kind, **content}, tmp)
            read_back(tmp)
        except RuntimeError as e:   # how torch reports it
            raise OSError("the disk is full, or a file may not be that large") from e
        except NOT_DATA as e:
            raise BadInput(f"{path}: is not written, since it could not be read again: "
                           f"{not_data(content) or shown(e)}: must be a tensor, a number, text, or "
                           "a dict or list of these; what was saved before is still there") from e


def check_sums(path):
    """Raise ValueError if a check sum is wrong, which torch does not look at."""
    with zipfile.ZipFile(path) as f:
        if f.testzip():
            raise ValueError


def load_torch(path, kind=None, tables_only=False):
    """What torch.save wrote, on the CPU: tables and numbers only, nothing in it is run. A relative
    path is looked for here, then beside the code: data/policy.pt. BadInput when it is missing or
    broken. kind: what the file should be, for the advice. tables_only: tensors without their
    numbers, at once."""
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
    found = content.get("kind") if isinstance(content, dict) else None
    if found is None:
        raise BadInput(f"{path}: is no checkpoint of this project, of kind {kind!r}, and none of "
                       "nanoGPT's train.py, with model_args; weights alone, a state_dict(), have "
                       "no shape")
    if found != kind:
        raise BadInput(f"{path}: holds {found!r} where a checkpoint of kind {kind!r} is needed")


def load_file(path, kind):
    """The dict that save_file wrote, on the CPU: see load_torch. BadInput for another kind."""
    content = load_torch(path, kind)
    check_kind(content, kind, path)
    return content


@contextlib.contextmanager
def undamaged(path):
    """Around code that uses a loaded file: what is missing or malformed in it ends in one line."""
    try:
        yield
    except BadInput:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError) as e:
        raise BadInput(f"{path}: damaged, or not a file of this project ({shown(e, 200)})") from e


def load_weights(path, module, weights):
    """module <- weights, in the module's own precision. BadInput where names or shapes are not the
    same."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError) as e:
        raise BadInput(f"{path}: does not fit these settings ({shown(e, 300)})") from e


MOMENTS = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
           getattr(torch.optim, "Muon", None): {"momentum_buffer"}}     # torch 2.8 has none


def load_optimizer(optimizer, state):
    """optimizer <- the moments in state. ValueError where one is missing, or has another shape than
    its weights: AdamW would not notice, and read and write other memory."""
    # the groups of torch's optimizers hold settings, which are those of today, not the file's. One
    # of another class may count there (Schedule-Free, Prodigy): only its rate is a setting
    groups = optimizer.state_dict()["param_groups"]
    if not type(optimizer).__module__.startswith("torch."):
        rates = [{name: group[name] for name in ("lr", "initial_lr") if name in group}
                 for group in groups]
        groups = [was | rate for was, rate in zip(state["param_groups"], rates, strict=True)]
    optimizer.load_state_dict(state | {"param_groups": groups})

    # are the moments there, and of these weights?
    wanted = MOMENTS.get(type(optimizer))
    if wanted is None:      # a user's, of which nothing is known
        return
    for p, moments in optimizer.state.items():
        if not wanted <= moments.keys():        # with amsgrad there is one more
            raise ValueError(f"the moments are {sorted(moments)}, must be {sorted(wanted)}")
        for name, x in moments.items():
            shape = () if name == "step" else p.shape
            if x.shape != shape or not x.is_contiguous() or not x.is_floating_point():
                raise ValueError(f"{name} is {tuple(x.shape)} for weights {tuple(p.shape)}")
