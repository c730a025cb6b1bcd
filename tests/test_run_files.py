"""run/files.py: files appear whole or not at all, and JSON is an object or a line that says why."""
import json
import os
import resource
import stat

import pytest

from run.files import read_json, replacing, write_json
from run.script import BadInput


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
    (b"{", "cannot be read as JSON"), (b"", "cannot be read as JSON"), (b"[1]", "holds no JSON object"),
    (b"null", "holds no JSON object"), (b'{"a": "\xff"}', "cannot be read as JSON"),
    (b'{"a":' + b"[" * 100_000, "cannot be read as JSON")])
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
