"""Tensor files that others made: safetensors and GGUF, in and out.

Both formats are a table and raw numbers. Pickles (.bin, others' .pt) run the code inside them, so
they are never opened. A broken or hostile file is one BadInput that names the file and the defect.
"""
import contextlib
import math
import os

import numpy as np
import torch

from run.files import read_json, replacing
from run.script import BadInput, optional

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.int16, torch.int8, torch.uint8, torch.bool}


@contextlib.contextmanager
def reading(path, kind):
    """Turns whatever goes wrong while a file is read into one line that names the file."""
    if not os.path.isfile(path):
        raise BadInput(f"{path}: no such file")
    try:
        yield
    except BadInput:
        raise
    except Exception as e:  # the packages raise their own errors, and a dozen of Python's
        why = " ".join(str(e).split()) or type(e).__name__  # names in the file may hold newlines
        raise BadInput(f"{path}: not a readable {kind} file: {why[:400]}; "
                       "download it again") from e


# --------------------------------------------------------------------------------------------------
# safetensors

def read_safetensors(path):
    """{name: tensor} of one file, on the CPU. The numbers stay in the file until they are used."""
    with optional("-r requirements-hub.txt"):
        from safetensors.torch import load_file
    with reading(path, "safetensors"):
        tensors = load_file(path)
    check_dtypes(path, tensors)
    return tensors


def check_dtypes(path, tensors):
    """Raises BadInput for numbers that no model here can have, such as floats of 8 bits."""
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise BadInput(f"{path}: tensor {name[:80]!r} is {x.dtype}, which is not supported")


def load_tensors(path):
    """{name: tensor} of a safetensors file, or of a folder: one file, or an index and its shards.

    Raises BadInput for a folder without them, a shard that is missing, and a file that is broken.
    """
    if not os.path.isdir(path):
        return read_safetensors(path)
    if os.path.exists(os.path.join(path, WEIGHTS)):
        return read_safetensors(os.path.join(path, WEIGHTS))
    if os.path.exists(os.path.join(path, INDEX)):
        return read_shards(path)
    has_pickle = os.path.exists(os.path.join(path, PICKLE))
    raise BadInput(f"{path}: {why_no_weights(has_pickle)}")


def read_shards(folder):
    """{name: tensor} of the files that the index in `folder` names."""
    shard_of = read_index(folder)
    tensors = {}
    for file in sorted(set(shard_of.values())):
        path = os.path.join(folder, file)
        if not os.path.exists(path):
            raise BadInput(f"{folder}: {file} is missing, which {INDEX} names; download it again")
        for name, x in read_safetensors(path).items():
            if shard_of.get(name) == file:
                tensors[name] = x
    lacking = sorted(shard_of.keys() - tensors.keys())
    if lacking:
        raise BadInput(f"{folder}: the shards lack {str(lacking[:3])[:200]}, which {INDEX} names")
    return tensors


def read_index(folder):
    """{tensor name: file name} of the index in `folder`. Every file must lie in this folder."""
    path = os.path.join(folder, INDEX)
    shard_of = read_json(path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise BadInput(f"{path}: holds no weight_map; download it again")
    for file in shard_of.values():
        is_name = isinstance(file, str) and file == os.path.basename(file) and "\\" not in file
        if not is_name or not file.endswith(".safetensors"):
            raise BadInput(f"{path}: {str(file)[:80]!r} is not the name of a safetensors file "
                           "beside it")
    return shard_of


def why_no_weights(has_pickle):
    """Why a model without safetensors cannot be read, and the way out."""
    if not has_pickle:
        return "no model.safetensors here"
    return (f"only {PICKLE}, a pickle, which can run code and is never opened; look for a revision "
            "that has model.safetensors (NAME@refs/pr/1), or let transformers write one: "
            "CLASS.from_pretrained(NAME).save_pretrained(DIR)")


def save_tensors(path, tensors):
    """Write {name: tensor} as a safetensors file, which appears whole or not at all.

    No two tensors may share memory. BadInput when the file cannot be written.
    """
    with optional("-r requirements-hub.txt"):
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    check_dtypes(path, tensors)
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with replacing(path) as tmp:
        open(tmp, "wb").close()
        mode = os.stat(tmp).st_mode
        try:
            save_file(tensors, tmp, metadata={"format": "pt"})  # transformers asks for the format
        except SafetensorError as e:
            raise OSError(str(e)) from e
        os.chmod(tmp, mode)  # save_file lets nobody else read its file


# --------------------------------------------------------------------------------------------------
# GGUF, llama.cpp's format

# no model has more than these; a file that says so is made to fill the memory
MAX_ENTRIES = 2 ** 16    # of the metadata; also tensors
MAX_TEXTS = 2 ** 21      # in the arrays of the metadata: tokens and merges


def gguf_metadata(path):
    """{key: value} of a GGUF file. BadInput names the file and the defect."""
    with reading(path, "GGUF"):
        return metadata_of(open_gguf(path))


def read_gguf(path):
    """(metadata, {name: float32 tensor}) of a GGUF file, quantised weights multiplied out.

    Shapes are in torch's order; the file has the fastest dimension first. Names and layouts stay
    llama.cpp's: in Llama models the rows of attn_q and attn_k are interleaved for its rotary
    embedding. BadInput names the file, the tensor and the defect.
    """
    with reading(path, "GGUF"):
        reader = open_gguf(path)
        return metadata_of(reader), {t.name: to_float32(t) for t in reader.tensors}


def metadata_of(reader):
    """{key: value} in Python's types, without the three numbers of the header."""
    header = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    fields = reader.fields.items()
    return {key: field.contents() for key, field in fields if key not in header}


def to_float32(tensor):
    """A tensor of the reader as float32 of torch, in memory of its own."""
    from gguf import dequantize

    try:
        with np.errstate(all="ignore"):  # scales that are not finite
            values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as e:
        raise ValueError(f"tensor {tensor.name[:80]!r} has type {tensor.tensor_type.name}, which "
                         "is not supported") from e
    return torch.from_numpy(np.require(values, np.float32, ["C", "ALIGNED", "WRITEABLE"]))


def open_gguf(path):
    """The package's reader on a file, held against the length of the file.

    By itself GGUFReader trusts the counts in the file: it loops beyond the end, and tensors may
    lie on top of each other. The methods here are its private ones, so the version is pinned, and
    the tests break if another version goes around them.
    """
    with optional("-r requirements-hub.txt"):
        from gguf import GGUFReader, GGUFValueType

    class BoundedReader(GGUFReader):
        texts = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            """`count` numbers at `offset`. Everything that is read comes through here."""
            if self.byte_order != "I":
                raise ValueError("it is big-endian")
            wanted = int(count) * np.dtype(dtype).itemsize
            left = len(self.data) - int(offset)
            if wanted > left:
                raise ValueError(f"cut short at byte {offset}: {wanted} more are needed, "
                                 f"{left} are there")
            return np.frombuffer(self.data, dtype, int(count), int(offset))

        def _build_fields(self, offset, count):
            check_count("metadata entries", count, MAX_ENTRIES)
            return super()._build_fields(offset, count)

        def _build_tensor_info(self, offset, count):
            check_count("tensors", count, MAX_ENTRIES)
            return super()._build_tensor_info(offset, count)

        def _get_field_parts(self, offset, kind):
            if kind != GGUFValueType.ARRAY:
                return super()._get_field_parts(offset, kind)
            item = self._get(offset, np.uint32)
            count = self._get(offset + 4, np.uint64)
            number = self.gguf_scalar_to_np.get(item[0])
            if number is not None:  # all at once, where the package would make an array of each
                values = self._get(offset + 12, number, count[0])
                types = [GGUFValueType.ARRAY, GGUFValueType(item[0])]
                return 12 + values.nbytes, [item, count, values], [2], types
            if item[0] != GGUFValueType.STRING:
                raise ValueError(f"an array of type {item[0]} at byte {offset}")
            self.texts += int(count[0])
            check_count("texts", self.texts, MAX_TEXTS)
            return super()._get_field_parts(offset, kind)

        def _build_tensors(self, start, fields):
            check_tensor_table(fields, int(start), int(self.alignment), len(self.data))
            super()._build_tensors(start, fields)

    return BoundedReader(path)


def check_count(what, count, limit):
    if count > limit:
        raise ValueError(f"{count} {what}: more than {limit} are not read")


def check_tensor_table(fields, start, alignment, file_size):
    """Holds names, shapes and places of the tensors against the file before any is cut out.

    fields: the reader's table. start: the byte that offsets count from. Raises ValueError.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = 0
    for field in sorted(fields, key=lambda field: int(field.parts[5][0])):
        _, name, _, dims, kind, offset = field.parts
        shape = dims.tolist()[::-1]
        offset = int(offset[0])
        kind = GGMLQuantizationType(kind[0])
        what = f"tensor {field.name[:80]!r} of {shape} {kind.name}"
        if len(shape) > 4 or math.prod(max(n, 1) for n in shape) >= 2 ** 60:
            raise ValueError(f"{what}: impossible shape")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // block * block_bytes
        in_blocks = (shape[-1] if shape else 1) % block == 0
        if not in_blocks or offset % alignment or offset < end or start + offset + size > file_size:
            raise ValueError(f"{what} lies at {offset}: cut short, overlapping or misaligned")
        end = offset + size
