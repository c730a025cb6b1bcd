"""run/files.py: a file is written whole or not at all; what is read is checked and never run."""
import errno
import os
import random

import pytest
import torch

from by_hand import random_gpt
from run.files import find_below, load_file, load_gpt, save_file, save_gpt
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
