"""
Published models: their files onto this machine, and their tensors out of these files.

Two formats are read, both nothing but a table and raw numbers; pickles (.bin, .pt of others) run what is in them and are
never opened. Everything read here came from someone else: each length and offset is held against the file before it is used,
so a broken or hostile file is one BadInput that names it, and memory stays a small multiple of the file's size.
"""
import contextlib
import json
import math
import os
import struct

import numpy as np
import torch

from model import BadInput


# ---------------------------------------------------------------------------------------------------------------
# tensor files. By hand and not by the packages safetensors and gguf: two dependencies less for a page that is plain to read

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
MAX_HEADER = 100_000_000  # bytes, the format's own limit
INDEX = "model.safetensors.index.json"


@contextlib.contextmanager
def reading(path, kind):
    """Whatever is wrong with the file, as one line that names it."""
    try:
        yield
    except (ValueError, OSError, RecursionError) as e:
        raise BadInput(f"{path}: not a readable {kind} file: {e}; fetch it again") from e


def map_file(path):
    """The file's bytes as a uint8 tensor, mapped: read when touched, and changes to it never reach the file."""
    if not os.path.isfile(path):
        raise BadInput(f"{path}: no such file")
    size = os.path.getsize(path)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


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
    if len(shape) > 8 or not all(is_int(n) for n in shape) or math.prod(max(n, 1) for n in shape) >= 2 ** 60:
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
        at, found = 8 + length, {}
        for name, entry in table.items():
            if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
                raise ValueError(f"tensor {name[:80]!r} has no dtype, shape and data_offsets")
            if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
                raise ValueError(f"tensor {name[:80]!r} has dtype {str(entry['dtype'])[:20]!r}, not one of {', '.join(DTYPES)}")
            offsets = entry["data_offsets"]
            if not isinstance(entry["shape"], list) or not isinstance(offsets, list) or len(offsets) != 2 \
                    or not all(map(is_int, offsets)):
                raise ValueError(f"tensor {name[:80]!r} has shape {str(entry['shape'])[:40]}, offsets {str(offsets)[:40]}")
            begin, end = offsets
            if end - begin != numel(entry["shape"]) * DTYPES[entry["dtype"]].itemsize:
                raise ValueError(f"tensor {name[:80]!r}: {str(entry['shape'])[:40]} of {entry['dtype']} "
                                 f"are not the bytes {str(begin)[:20]} to {str(end)[:20]}")
        for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            if begin != at - 8 - length or end > len(view) - 8 - length:
                raise ValueError(f"tensor {name[:80]!r} lies at {str(begin)[:20]} to {str(end)[:20]}: a gap, an overlap or cut short")
            found[name] = cut(data, at, end - begin, DTYPES[entry["dtype"]], entry["shape"])
            at += end - begin
        if at != len(view):
            raise ValueError(f"{len(view) - at} bytes after the last tensor")
    return {name: found[name] for name in table}


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
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        with open(tmp, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                f.write(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        raise BadInput(f"{path}: could not be written ({e.strerror}); {at} bytes are needed") from e
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)


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
    if os.path.exists(os.path.join(path, "model.safetensors")):
        return read_safetensors(os.path.join(path, "model.safetensors"))
    if not os.path.exists(os.path.join(path, INDEX)):
        raise BadInput(f"{path}: holds no model.safetensors" + pickle_hint(os.path.exists(os.path.join(path, "pytorch_model.bin"))))
    where, found = shards(path), {}
    for file in sorted(set(where.values())):
        if not os.path.exists(os.path.join(path, file)):
            raise BadInput(f"{path}: {file} is missing, which {INDEX} names; fetch it again")
        for name, x in read_safetensors(os.path.join(path, file)).items():
            if where.get(name) == file:
                found[name] = x
    if len(found) < len(where):
        raise BadInput(f"{path}: the shards lack {', '.join(sorted(where.keys() - found.keys())[:3])}, which {INDEX} names")
    return found


def pickle_hint(there):
    """What to say about a model that is there as a pickle only."""
    return ("" if not there else ", only pytorch_model.bin, a pickle, which can run code and is never opened here; convert it where "
            "transformers is installed: AutoModel.from_pretrained(...).save_pretrained(folder) writes model.safetensors")


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
            tensors[name] = dequantise(cut(data, start + offset, size, torch.uint8, -1), kind).view(shape)
            last = offset + size
    return metadata, tensors


def dequantise(raw, kind):
    """raw (bytes,) uint8 of a GGUF tensor -> its values (n,) in float32. A block of 32 values is one or two float16 and 32 codes."""
    if kind in ("F32", "F16", "BF16"):
        dtype = DTYPES[kind]
        return cut(raw.clone() if raw.storage_offset() % dtype.itemsize else raw, 0, len(raw), dtype, -1).float()
    raw = raw.view(-1, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind])                                 # (blocks, bytes)
    d = raw[:, :2].clone().view(torch.float16).float()                                             # (blocks, 1) the scale
    if kind == "Q8_0":
        return (raw[:, 2:].view(torch.int8).float() * d).view(-1)
    codes = raw[:, 4 if kind == "Q4_1" else 2:]                                                    # (blocks, 16) two codes a byte
    codes = torch.cat([codes & 15, codes >> 4], 1)                                                 # (blocks, 32)
    if kind == "Q4_0":
        return ((codes.to(torch.int8) - 8).float() * d).view(-1)
    return (codes.float() * d + raw[:, 2:4].clone().view(torch.float16).float()).view(-1)
