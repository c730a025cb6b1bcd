"""run/files.py: a file is written whole or not at all; what is read is checked and never run."""
import errno
import json
import os
import random
import resource
import stat

import pytest
import torch

from by_hand import random_gpt
from run.files import (find_below, load_file, load_gpt, read_json, replacing, save_file, save_gpt,
                       write_json)
from run.script import BadInput


def test_find_below_searches_subfolders_and_names_what_is_missing(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.json").write_text("1")
    assert find_below(tmp_path, "x.json") == str(tmp_path / "a" / "b" / "x.json")
    with pytest.raises(BadInput, match="y.json is missing below"):
        find_below(tmp_path, "y.json")


class Full:
    """A file on a disk that is full after 1000 bytes."""

    def __init__(self, f):
        self.f, self.flush = f, f.flush

    def write(self, data):
        if self.f.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.f.write(data)


def test_save_file_that_fails_midway_leaves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / "a.pt")
    save_file(path, "policy", x=torch.arange(3))

    monkeypatch.setattr(torch, "save", lambda content, f, save=torch.save: save(content, Full(f)))
    with pytest.raises(BadInput, match="a.pt: could not be written .No space left on device."):
        save_file(path, "policy", x=torch.arange(40000))
    assert torch.equal(load_file(path, "policy")["x"], torch.arange(3))
    assert os.listdir(tmp_path) == ["a.pt"]


def test_save_file_makes_folders_replaces_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = str(tmp_path / "new" / "folder" / "a.pt")
    for x in (1, 2):
        save_file(path, "run", x=x, nested=dict(y=[1.5, None, "z"]))
    assert load_file(path, "run") == dict(kind="run", x=2, nested=dict(y=[1.5, None, "z"]))
    assert os.listdir(tmp_path / "new" / "folder") == ["a.pt"]
    monkeypatch.chdir(tmp_path)
    save_file("bare.pt", "run", x=3)
    assert load_file("bare.pt", "run")["x"] == 3


def test_missing_file_is_bad_input(tmp_path):
    path = str(tmp_path / "none.pt")
    with pytest.raises(BadInput, match="none.pt: no such file"):
        load_file(path, "policy")


def test_broken_file_is_bad_input(tmp_path):
    path = str(tmp_path / "cut.pt")
    save_gpt(path, random_gpt())
    with open(path, "rb") as f:
        data = f.read()
    ends = (0, 1, 10, 100, 1000, len(data) // 2, len(data) - 20, len(data) - 1)
    broken = [data[:n] for n in ends]
    for content in broken + [bytes(2000), b"not a checkpoint", random.Random(0).randbytes(5000)]:
        with open(path, "wb") as f:
            f.write(content)
        with pytest.raises(BadInput, match="cut.pt: not a readable checkpoint"):
            load_gpt(path)
    with pytest.raises(BadInput, match="not a readable checkpoint"):
        load_file(str(tmp_path), "policy")


@pytest.mark.parametrize("change", [
    dict(n_head=3), dict(n_head=0), dict(n_layer=5), dict(n_embd=16), dict(no_such_field=1)])
def test_a_shape_that_does_not_fit_its_weights_is_bad_input(change, tmp_path):
    path = str(tmp_path / "p.pt")
    model = random_gpt()
    config = vars(model.config) | change
    save_file(path, "policy", config=config, model=model.state_dict())
    with pytest.raises(BadInput, match="p.pt: weights and shape do not fit"):
        load_gpt(path)


def test_file_of_another_kind_is_bad_input(tmp_path):
    path = str(tmp_path / "other.pt")
    save_file(path, "judge", x=1)
    wrong_kind = "other.pt: holds 'judge' where a checkpoint of kind 'policy'"
    with pytest.raises(BadInput, match=wrong_kind):
        load_gpt(path)
    for content in ([1, 2], torch.zeros(3), dict(model=1), dict(kind=None)):
        torch.save(content, path)
        with pytest.raises(BadInput, match="other.pt: holds 'something else' where"):
            load_file(path, "policy")


def test_code_in_a_file_is_not_run(tmp_path):
    path, proof = str(tmp_path / "evil.pt"), tmp_path / "proof"
    with open(path, "wb") as f:
        # a pickle that calls os.mkdir(proof)
        f.write(b"cos\nmkdir\n(V" + str(proof).encode() + b"\ntR.")
    with pytest.raises(BadInput, match="evil.pt"):
        load_file(path, "policy")
    torch.save(dict(kind="policy", x=os.mkdir), path)
    with pytest.raises(BadInput, match="evil.pt"):
        load_file(path, "policy")
    assert not proof.exists()


@pytest.mark.parametrize("bias", [True, False])
def test_policy_comes_back_bit_for_bit(tmp_path, bias):
    model, path = random_gpt(bias=bias), str(tmp_path / "policy.pt")
    save_gpt(path, model, loss=1.25)
    back = load_gpt(path)
    assert back.config == model.config and load_file(path, "policy")["loss"] == 1.25
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, x in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], x), name
    assert back.lm_head.weight is back.wte.weight and os.listdir(tmp_path) == ["policy.pt"]


def test_a_file_or_folder_takes_its_name_when_it_is_whole(tmp_path):
    path = str(tmp_path / "new" / "x")
    with replacing(path) as tmp, open(tmp, "w") as f:
        f.write("old")
        assert not os.path.exists(path)
    with replacing(path) as tmp:
        with open(tmp, "w") as f:
            f.write("new")
        assert open(path).read() == "old"
    assert open(path).read() == "new" and os.listdir(tmp_path / "new") == ["x"]
    with replacing(str(tmp_path / "folder")) as tmp:
        os.makedirs(f"{tmp}/sub")
    assert os.listdir(tmp_path / "folder") == ["sub"] and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("error, seen", [
    (OSError(28, "No space left on device"), BadInput), (OSError("odd"), BadInput),
    (ValueError("mine"), ValueError), (KeyboardInterrupt(), KeyboardInterrupt)])
@pytest.mark.parametrize("folder", [False, True])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, error, seen, folder):
    path = tmp_path / "x"
    path.mkdir() if folder else path.write_text("old")
    with pytest.raises(seen) as caught:
        with replacing(str(path)) as tmp:
            os.mkdir(tmp) if folder else open(tmp, "w").close()
            raise error
    assert os.listdir(tmp_path) == ["x"] and (folder or path.read_text() == "old")
    if seen is BadInput:
        assert str(caught.value).startswith(f"{path}: could not be written (")


def test_json_comes_back_and_a_full_disk_keeps_the_old_file(tmp_path):
    path, content = str(tmp_path / "x.json"), {"ä": [1, 2.5, None], "b": {"c": "中"}}
    before = os.umask(0o022)
    write_json(path, content)
    os.umask(before)
    assert read_json(path) == content == json.load(open(path, encoding="utf-8"))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(BadInput, match="x.json: could not be written .File too large."):
            write_json(path, {"long": "x" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_json(path) == content and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("data, says", [
    (b"{", "cannot be read as JSON"), (b"", "cannot be read as JSON"),
    (b"[1]", "holds no JSON object"),
    (b"null", "holds no JSON object"), (b'{"a": "\xff"}', "cannot be read as JSON"),
    (b'{"a":' + b"[" * 100_000, "cannot be read as JSON"),
    (b'{"n": {"a": 1, "a": 2}}', "cannot be read as JSON (a name stands twice")])
def test_what_is_no_object_is_named(tmp_path, data, says):
    path = tmp_path / "x.json"
    path.write_bytes(data)
    for missing in (None, {}):
        with pytest.raises(BadInput) as caught:
            read_json(path, missing)
        assert str(caught.value).startswith(f"{path}: {says}") and "\n" not in str(caught.value)


def test_a_missing_file_may_have_a_default(tmp_path):
    assert read_json(tmp_path / "x.json", missing={}) == {}
    with pytest.raises(BadInput, match="x.json: no such file"):
        read_json(tmp_path / "x.json")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        read_json(tmp_path, missing={})
