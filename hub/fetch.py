"""
Published models: their files onto this machine, and the tensors out of the files.

    python -m hub.fetch gpt2        # or owner/name, owner/name@revision: prints the folder, its files and their sizes

In the order of the file: tensor files (safetensors, GGUF), the download.
Two formats are read, both nothing but a table and raw numbers; pickles (.bin, .pt of others) run what is in them and are
never opened. Everything read here came from someone else: each length and offset is held against the file before it is used,
so a broken or hostile file is one BadInput that names it, and memory is bounded by the file's own size.
"""
import contextlib
import fcntl
import hashlib
import http.client
import json
import math
import os
import re
import string
import struct
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import torch

from run.script import BadInput
from run.script import run_script


# ---------------------------------------------------------------------------------------------------------------
# tensor files. By hand and not by the packages safetensors and gguf: two dependencies less for a page that is plain to read

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
MAX_HEADER = 100_000_000  # bytes, the format's own limit
WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@contextlib.contextmanager
def reading(path, kind):
    """Whatever is wrong with the file, as one line that names it."""
    try:
        yield
    except (ValueError, OSError, RecursionError) as e:
        why = " ".join(str(e).split())  # names in the file may hold newlines
        raise BadInput(f"{path}: not a readable {kind} file: {why}; fetch it again") from e


def map_file(path):
    """The file's bytes as a uint8 tensor, mapped: read when touched, and changes to it never reach the file."""
    if not os.path.isfile(path):
        raise BadInput(f"{path}: no such file")
    try:
        size = os.path.getsize(path)
        return torch.from_file(os.fspath(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    except (OSError, RuntimeError) as e:
        raise BadInput(f"{path}: cannot be read ({str(e).splitlines()[0]})") from e


def parse_json(text):
    """The dict in the JSON `text` (bytes). ValueError for anything else, and for a name that stands twice in one object."""
    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name stands twice in the JSON")
        return dict(pairs)

    found = json.loads(str(text, "utf-8"), object_pairs_hook=unique)
    if not isinstance(found, dict):
        raise ValueError("the JSON is not an object")
    return found


def is_int(x):
    return type(x) is int and x >= 0  # a bool is no number here


def numel(shape):
    """Product of the dimensions; ValueError for what no tensor has, before torch meets it."""
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_int, shape)) \
            or math.prod(max(n, 1) for n in shape) >= 2 ** 60:
        raise ValueError(f"impossible shape {str(shape)[:80]}")
    return math.prod(shape)


def cut(data, begin, size, dtype, shape):
    """The `size` bytes of `data` from `begin` as a tensor: a view of the mapped file, a copy where the numbers lie askew."""
    raw = data[begin:begin + size]
    return (raw.clone() if begin % dtype.itemsize else raw).view(dtype).view(shape)


def read_safetensors(path):
    """{name: tensor} on the CPU, views of the mapped file. BadInput names the file and the defect.

    Layout: 8 bytes length of the header, the header {name: {dtype, shape, data_offsets}} as JSON, the numbers without gaps.
    """
    data = map_file(path)
    with reading(path, "safetensors"):
        view = memoryview(data.numpy())
        length = struct.unpack_from("<Q", view)[0] if len(view) >= 8 else 0
        if not 2 <= length <= min(MAX_HEADER, len(view) - 8):
            raise ValueError(f"header of {length} bytes in a file of {len(view)}")
        table = parse_json(view[8:8 + length])
        table.pop("__metadata__", None)
        start = at = 8 + length
        found = {}
        for name, entry in table.items():
            try:
                dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
                if not is_int(begin) or not is_int(end) or end - begin != numel(shape) * dtype.itemsize:
                    raise ValueError("the bytes do not match the shape")
            except (ValueError, TypeError, KeyError) as e:
                raise ValueError(f"tensor {name[:80]!r}: {str(entry)[:200]} ({e!s:.80})") from e
        for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            (begin, end), dtype = entry["data_offsets"], DTYPES[entry["dtype"]]
            if start + begin != at or start + end > len(view):
                raise ValueError(f"tensor {name[:80]!r} lies at {begin} to {end}: a gap, an overlap or cut short")
            found[name] = cut(data, at, end - begin, dtype, entry["shape"])
            at = start + end
        if at != len(view):
            raise ValueError(f"{len(view) - at} bytes after the last tensor")
    return {name: found[name] for name in table}


@contextlib.contextmanager
def writing(path):
    """A full disk, or one that may not be written, as one line."""
    try:
        yield
    except OSError as e:
        raise BadInput(f"{path}: could not be written ({e.strerror}); make room, or choose another folder") from e


@contextlib.contextmanager
def replacing(path):
    """A file to write, which takes the name `path` when it is whole."""
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        with writing(path):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(tmp, "wb") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(tmp, path)
    finally:
        if os.path.lexists(tmp):
            os.remove(tmp)


def write_safetensors(path, tensors, metadata=None):
    """Write {name: tensor} where readers of the format, transformers among them, open it. The file is whole or not there.

    metadata {str: str}; the default {"format": "pt"} is what transformers asks for. Tensors that share memory are written twice.
    """
    code = {dtype: name for name, dtype in DTYPES.items()}
    for name, x in tensors.items():
        if x.dtype not in code or name == "__metadata__":
            raise BadInput(f"{path}: tensor {name!r} of {x.dtype} cannot be written to safetensors")
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # wide ones first: every tensor lies aligned
    header, at = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name in order:
        x = tensors[name]
        header[name] = {"dtype": code[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.numel() * x.dtype.itemsize]}
        at += x.numel() * x.dtype.itemsize
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            f.write(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def shards(folder):
    """{tensor name: file name} of the index in `folder`. BadInput when a file lies elsewhere or is no safetensors."""
    path = os.path.join(folder, INDEX)
    with reading(path, "index"), open(path, "rb") as f:
        found = parse_json(f.read(MAX_HEADER)).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ValueError("no weight_map")
        for name in found.values():
            if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors") or "\\" in name:
                raise ValueError(f"{str(name)[:80]!r} is not the name of a safetensors file beside it")
    return found


def load_tensors(path):
    """{name: tensor} of a safetensors file, or of a folder's model.safetensors or the shards that its index names."""
    if os.path.isfile(path):
        return read_safetensors(path)
    if os.path.exists(os.path.join(path, WEIGHTS)):
        return read_safetensors(os.path.join(path, WEIGHTS))
    if not os.path.exists(os.path.join(path, INDEX)):
        raise BadInput(f"{path}: {no_weights(os.path.exists(os.path.join(path, PICKLE)))}")
    where, found = shards(path), {}
    for file in sorted(set(where.values())):
        if not os.path.exists(os.path.join(path, file)):
            raise BadInput(f"{path}: {file} is missing, which {INDEX} names; fetch it again")
        for name, x in read_safetensors(os.path.join(path, file)).items():
            if where.get(name) == file:
                found[name] = x
    if len(found) < len(where):
        raise BadInput(f"{path}: the shards lack {str(sorted(where.keys() - found.keys())[:3])[:200]}, which {INDEX} names")
    return found


def no_weights(pickle):
    """Why a model without safetensors cannot be read; pickle: there is a pytorch_model.bin."""
    if not pickle:
        return "no model.safetensors here"
    return ("only pytorch_model.bin, a pickle, which can run code and is never opened; look for a revision that has "
            "model.safetensors (NAME@refs/pr/1), or let transformers write one: CLASS.from_pretrained(NAME).save_pretrained(DIR)")


GGUF_NUMBERS = dict(enumerate(["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"])) | {10: "<u8", 11: "<i8", 12: "<f8"}
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34),
              30: ("BF16", 1, 2)}  # number: name, values of a block, bytes of a block
GGUF_OTHERS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
               24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}


def read_gguf(path):
    """(metadata, {name: float32 tensor}) of a GGUF file, version 2 or 3: llama.cpp's format, quantised weights multiplied out.

    Shapes are in torch's order (the file has the fastest dimension first). Names and layouts stay llama.cpp's: in Llama models
    the rows of attn_q and attn_k are interleaved for its rotary embedding. BadInput names the file, the tensor and the defect.
    """
    data = map_file(path)
    with reading(path, "GGUF"):
        view, at = memoryview(data.numpy()), 0

        def take(n):
            nonlocal at
            if n > len(view) - at:
                raise ValueError(f"cut short at byte {at}: {n} more are needed, {len(view) - at} are there")
            at += n
            return view[at - n:at]

        def numbers(kind, n=1):
            raw = take(n * np.dtype(kind).itemsize)
            if kind == "?" and max(raw, default=0) > 1:
                raise ValueError(f"a truth value that is neither 0 nor 1 before byte {at}")
            return np.frombuffer(raw, kind).tolist()

        def string():
            return str(take(*numbers("<u8")), "utf-8")

        def value(kind, depth=0):
            if kind == GGUF_STRING:
                return string()
            if kind == GGUF_ARRAY and depth < 4:
                (kind,), (n,) = numbers("<u4"), numbers("<u8")
                if kind in GGUF_NUMBERS:
                    return numbers(GGUF_NUMBERS[kind], n)
                return [value(kind, depth + 1) for _ in range(n)]  # each takes bytes: a wrong n ends soon
            if kind not in GGUF_NUMBERS:
                raise ValueError(f"value of unknown type {kind}, or arrays too deep, before byte {at}")
            return numbers(GGUF_NUMBERS[kind])[0]

        if bytes(take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, (n_tensors, n_values) = numbers("<u4")[0], numbers("<u8", 2)
        if version not in (2, 3):
            raise ValueError(f"version {version}, not 2 or 3 (or big-endian)")
        metadata, table = {}, {}
        for _ in range(n_values):
            key = string()
            if key in metadata:
                raise ValueError(f"{key[:80]!r} stands twice")
            metadata[key] = value(*numbers("<u4"))
        for _ in range(n_tensors):
            name = string()
            if name in table:
                raise ValueError(f"tensor {name[:80]!r} stands twice")
            (n,) = numbers("<u4")
            shape = numbers("<u8", n)[::-1] if n <= 4 else [n]
            table[name] = (shape, *numbers("<u4"), *numbers("<u8"))
            if n > 4 or table[name][1] not in GGUF_TYPES:
                kind = table[name][1]
                raise ValueError(f"tensor {name[:80]!r} has {n} dimensions and type {GGUF_OTHERS.get(kind, kind)}; read are "
                                 f"up to 4 and {', '.join(kind for kind, _, _ in GGUF_TYPES.values())}")
        alignment = metadata.get("general.alignment", 32)
        if not is_int(alignment) or not 1 <= alignment <= 2 ** 20:
            raise ValueError(f"general.alignment = {str(alignment)[:40]}")
        start = at + -at % alignment
        tensors, last = dict.fromkeys(table), 0
        for name, (shape, kind, offset) in sorted(table.items(), key=lambda item: item[1][2]):
            kind, block, size = GGUF_TYPES[kind]
            size = numel(shape) // block * size
            if (shape[-1] if shape else 1) % block or offset % alignment or offset < last or start + offset + size > len(view):
                raise ValueError(f"tensor {name[:80]!r} of {shape} {kind} lies at {offset}: cut short, overlapping or misaligned")
            tensors[name] = dequantise(data[start + offset:start + offset + size], kind).view(shape)
            last = offset + size
    return metadata, tensors


def dequantise(raw, kind):
    """raw (bytes,) uint8 of a GGUF tensor -> its values (n,) in float32. 32 values are one or two float16 and 32 codes."""
    if kind in ("F32", "F16", "BF16"):
        return raw.clone().view(DTYPES[kind]).float()  # a copy of its own, which lies aligned
    raw = raw.view(-1, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind])                                 # (blocks, bytes)
    d = raw[:, :2].clone().view(torch.float16).float()                                             # (blocks, 1) the scale
    if kind == "Q8_0":
        return (raw[:, 2:].view(torch.int8).float() * d).view(-1)
    codes = raw[:, 4 if kind == "Q4_1" else 2:]                                                    # (blocks, 16) two codes a byte
    codes = torch.cat([codes & 15, codes >> 4], 1)                                                 # (blocks, 32)
    if kind == "Q4_0":
        return ((codes.to(torch.int8) - 8).float() * d).view(-1)
    return (codes.float() * d + raw[:, 2:4].clone().view(torch.float16).float()).view(-1)


# ---------------------------------------------------------------------------------------------------------------
# download, with the standard library, from what serves {endpoint}/{owner/name}/resolve/{revision}/{file}: the hub, its mirrors

SHORT = {"distilgpt2": "distilbert/distilgpt2"} | {f"gpt2{size}": f"openai-community/gpt2{size}"
                                                   for size in ("", "-medium", "-large", "-xl")}
OPTIONAL = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
            "generation_config.json", "added_tokens.json", "chat_template.jinja")
TIMEOUT = 30   # seconds without a byte
ATTEMPTS = 5   # a connection that is cut is taken up again
OTHERWISE = "download it elsewhere and give the folder, or set HF_ENDPOINT to a mirror"


def fetch(name, files=None, cache=None, endpoint=None):
    """The folder with a published model's files; downloads what is not in the cache yet, and nothing when all is there.

    name: a local folder (only looked at), or "owner/name" or one of SHORT, then "@revision" (a branch, tag or commit) if not
        "main"; what "main" was at the first download stays until its folder is removed. "datasets/owner/name" has data sets.
    files: names, all required; None: config.json, the weights as safetensors (one file, or an index and its shards), and those
        of OPTIONAL that exist.
    cache: the folder of all models; else the environment's GRPO_TRACIN_CACHE, else ~/.cache/grpo-tracin.
    endpoint: the server; else the environment's HF_ENDPOINT, else https://huggingface.co.

    A file gets its name when its size, and its hash where the server gives one, are right. BadInput names URL or file.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        missing = [f for f in files or ["config.json"] if not os.path.isfile(os.path.join(name, f))]
        if missing:
            raise BadInput(f"{name}: {', '.join(missing)} missing in this folder")
        if files is None and not any(os.path.isfile(os.path.join(name, f)) for f in (WEIGHTS, INDEX)):
            raise BadInput(f"{name}: {no_weights(os.path.exists(os.path.join(name, PICKLE)))}")
        return name
    match = re.fullmatch(r"(\w[\w.-]*(?:/\w[\w.-]*){0,2})(?:@(\w[\w./-]*))?", name)
    repo, revision = (SHORT.get(match[1], match[1]), match[2] or "main") if match else ("", "")
    if "/" not in repo:
        raise BadInput(f"{name!r}: no such folder, and no published name: owner/name, owner/name@revision, {', '.join(SHORT)}")
    cache = cache or os.environ.get("GRPO_TRACIN_CACHE") or os.path.expanduser("~/.cache/grpo-tracin")
    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    base = f"{endpoint}/{repo}/resolve/{urllib.parse.quote(revision, safe='')}/"
    folder = os.path.join(cache, f"{repo}@{revision}".replace("/", "--"))
    record, known = os.path.join(folder, "fetched.json"), {}  # {file: bytes, or null where the server has no such file}

    def get(file, required=True):
        """True with the file in the folder; False when the server has none, BadInput if it is required."""
        path, url = os.path.join(folder, file), base + urllib.parse.quote(file)
        asked = file in known and (known[file] is not None or not required)
        if not asked or known[file] is not None and (not os.path.isfile(path) or os.path.getsize(path) != known[file]):
            known[file] = download(url, path)
            if required and known[file] is None:
                raise BadInput(f"{url}: not there (404): look at the name, the revision and the files of the model")
            with replacing(record) as f:
                f.write(json.dumps(known, indent=1).encode())
        return known[file] is not None

    with writing(folder):
        os.makedirs(folder, exist_ok=True)
        lock = open(os.path.join(folder, ".lock"), "w") if os.access(folder, os.W_OK) else None  # a shared cache is only read
    with lock or contextlib.nullcontext():
        if lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one downloads, the others wait and find the files
        with contextlib.suppress(OSError, ValueError), open(record, "rb") as f:
            known.update(parse_json(f.read()))
        for file in files or ["config.json"]:
            if file != os.path.normpath(file) or os.path.isabs(file) or file.startswith(".."):
                raise BadInput(f"{file!r}: not the name of a file in {repo}")
            get(file)
        for file in OPTIONAL if files is None else ():
            get(file, required=False)
        if files is None and not get(WEIGHTS, required=False):
            if not get(INDEX, required=False):
                os.remove(record)  # so that it is asked again: they may be published later
                pickle = request(base + PICKLE, {}, "HEAD")[0].status != 404
                raise BadInput(f"{base}{WEIGHTS}: {no_weights(pickle)}")
            for file in sorted(set(shards(folder).values())):
                get(file)
    return folder


class Stay(urllib.request.HTTPRedirectHandler):
    """Redirects are followed by `request`, which has to see the headers on the way."""

    def redirect_request(self, *args):
        return None


def request(url, headers, method="GET"):
    """(response, tag, size): redirects followed, whatever the status at the end. BadInput when there is no answer.

    The hub describes a large file (X-Linked-ETag: its SHA-256, X-Linked-Size) and redirects to a content network, whose own
    ETag is no hash of the content; a small file's ETag is its git hash. tag and size are "" where the server gives none.
    """
    first, origin, tag, size = url, None, "", ""
    for _ in range(10):
        host = re.match("https?://[^/?#]*", url)
        origin = origin or host
        if not host or origin[0].startswith("https:") and not host[0].startswith("https:"):
            raise BadInput(f"{first}: leads to {url[:200]!r}, which is not https (or http for a mirror)")
        try:
            response = urllib.request.build_opener(Stay).open(urllib.request.Request(url, headers=headers | {
                "User-Agent": "grpo-tracin", "Accept-Encoding": "identity"}, method=method), timeout=TIMEOUT)
        except urllib.error.HTTPError as e:
            response = e  # an answer all the same
        except (OSError, ValueError, http.client.HTTPException) as e:
            reason = getattr(e, "reason", e)
            reason = f"no answer in {TIMEOUT} s" if isinstance(reason, TimeoutError) else " ".join(str(reason).split())[:200]
            raise BadInput(f"{url}: {reason}; no network? {OTHERWISE}") from e
        tag = tag or response.headers.get("X-Linked-ETag", "")
        size = size or response.headers.get("X-Linked-Size", "")
        if response.status not in (301, 302, 303, 307, 308) or "Location" not in response.headers:
            if not tag and host[0] == origin[0]:
                tag = response.headers.get("ETag", "")
            return response, tag.removeprefix("W/").strip('"'), size
        response.close()
        url = urllib.parse.urljoin(url, urllib.parse.quote(response.headers["Location"], safe=string.punctuation))
    raise BadInput(f"{first}: more than 10 redirects; {OTHERWISE}")


def download(url, path):
    """Bytes of `url` at `path`, whole and checked; None when the server has no such file (404).

    What has come is kept in path.partial, the server's tag of the content in path.partial.tag; a later call asks for the rest
    and begins again when the tag is another. (Not by If-Range: the tag is the hub's, and the content network has its own.)
    """
    partial, note = path + ".partial", path + ".partial.tag"
    with writing(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        for attempt in range(ATTEMPTS):
            time.sleep(attempt)
            at = os.path.getsize(partial) if os.path.exists(partial) and os.path.exists(note) else 0
            response, tag, size = request(url, {"Range": f"bytes={at}-"} if at else {})
            with response:
                if response.status == 404:
                    return None
                if response.status in (401, 403):
                    raise BadInput(f"{url}: refused ({response.status}): no such model, or one that needs a login; {OTHERWISE}")
                if at and response.status in (206, 416):
                    with open(note) as f:
                        if not tag or f.read() != tag or not response.headers.get("Content-Range", "").startswith(f"bytes {at}-"):
                            os.remove(note)  # the rest of something else: next time from the beginning
                            continue
                elif response.status != 200:
                    raise BadInput(f"{url}: the server answered {response.status}; try again later")
                at = at if response.status == 206 else 0
                length = response.headers.get("Content-Length", "")
                if not re.fullmatch("[0-9]{1,18}", size or length):
                    raise BadInput(f"{url}: the server does not say how long the file is; {OTHERWISE}")
                size = int(size or at + int(length))
                if not at:  # the old content goes before the new tag comes
                    with open(partial, "wb"), open(note, "w") as f:
                        f.write(tag)
                reason = receive(response, partial, at, size, os.path.basename(path))
            got = os.path.getsize(partial)
            if got >= size:
                break
        else:
            raise BadInput(f"{url}: cut off after {got} of {size} bytes ({reason}); the same command goes on from there")
        found = None
        if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", tag):
            kind = hashlib.sha256() if len(tag) == 64 else hashlib.sha1(b"blob %d\0" % got)
            with open(partial, "rb") as f:
                found = hashlib.file_digest(f, lambda: kind).hexdigest()
        if got != size or found not in (None, tag):
            os.remove(partial)
            raise BadInput(f"{url}: {size} bytes with hash {tag} were promised, {got} with {found} came, and were removed; "
                           f"try again, or {OTHERWISE}")
        os.replace(partial, path)
        with contextlib.suppress(FileNotFoundError):
            os.remove(note)
    return size


def receive(response, partial, at, size, what):
    """Append a response's body to the file `partial`, which holds `at` of `size` bytes. Returns why it ended."""
    began, shown, begin, tty = time.time(), time.time(), at, sys.stderr.isatty()
    with open(partial, "ab") as f:
        while at <= size:
            try:
                block = response.read1(2 ** 20)
            except (OSError, http.client.HTTPException) as e:
                return str(e) or type(e).__name__
            f.write(block)
            at, now = at + len(block), time.time()
            if now - shown > (0.2 if tty else 10) or tty and not block:
                shown, rate = now, (at - begin) / 1e6 / max(now - began, 1e-9)
                bar = f"[{'#' * (24 * at // max(size, 1)):24}] " if tty else ""
                print(f"{what}: {bar}{at / 1e6:.1f} of {size / 1e6:.1f} MB, {rate:.1f} MB/s",
                      end="\r" if tty and block else "\n", file=sys.stderr, flush=True)
            if not block:
                break
        f.flush()
        os.fsync(f.fileno())
    return "the connection ended"


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise BadInput("usage: python -m hub.fetch NAME, where NAME is owner/name, owner/name@revision or one of " + ", ".join(SHORT))
    folder = fetch(argv[0])
    print(folder)
    for file in sorted(os.listdir(folder)):
        if file not in (".lock", "fetched.json"):
            print(f"{os.path.getsize(os.path.join(folder, file)):>14,} bytes  {file}")


if __name__ == "__main__":
    run_script(main)
