"""hub/fetch.py and huggingface_hub against a server on the loopback that answers like the hub."""
import concurrent.futures
import hashlib
import http.server
import json
import os
import random
import re
import resource
import sys
import threading
import time
import urllib.parse
from types import SimpleNamespace

import pytest

import hub.fetch as module
from hub.fetch import fetch
from hub.tensors import load_tensors
from run.script import BadInput

huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="needs pip install -r requirements-hub.txt")
constants = pytest.importorskip("huggingface_hub.constants")

GPT2 = "openai-community/gpt2"
DEAD = "http://127.0.0.1:1"  # nobody answers there
UNWANTED = {"pytorch_model.bin": b"pickle", "tf_model.h5": b"h5", "README.md": b"# GPT-2",
            "onnx/model.safetensors": b"another model", "rust_model.ot": b"ot"}


def refused(*needles, call):
    """The one line with which call() is refused. It holds every needle."""
    with pytest.raises(BadInput) as caught:
        call()
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and len(line) < 1000, line
    for needle in needles:
        assert str(needle) in line, (needle, line)
    return line


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub: the revision, the list of files, the files.

    self.hub: .repos {name: {revision: {file: bytes}}}, names of data sets begin with datasets/;
    .asked [(method, path, Range)]; .cut {file: [bytes to send before the connection is cut, ...]};
    .odd {path: an answer of its own}; .gated and .private, names that need the token `let-me-in`.
    """

    protocol_version = "HTTP/1.1"
    API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/?]+)(?:\?.*)?")
    RESOLVE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")

    def log_message(self, *args):
        pass

    def do_GET(self):
        hub = self.hub
        hub.asked.append((self.command, self.path, self.headers.get("Range")))
        if self.path in hub.odd:
            return hub.odd[self.path](self)
        if api := self.API.fullmatch(self.path):
            kind, name, what, revision = api.groups()
            name = name if kind == "models" else f"datasets/{name}"
            return self.answer_api(name, what, urllib.parse.unquote(revision))
        if resolve := self.RESOLVE.fullmatch(self.path):
            return self.answer_file(*map(urllib.parse.unquote, resolve.groups()))
        if self.path.startswith("/cdn/"):
            return self.send_file(*hub.cdn[self.path], {})
        self.answer(404)

    do_HEAD = do_GET

    def files_at(self, name, revision):
        """(commit, files), or None after an answer that says why not."""
        hub = self.hub
        allowed = self.headers.get("Authorization") == "Bearer let-me-in"
        if name not in hub.repos or (name in hub.private and not allowed):
            self.refuse(404 if allowed else 401, "RepoNotFound")
            return None
        for at, files in hub.repos[name].items():
            if revision in (at, commit_of(files)):
                return commit_of(files), files
        self.refuse(404, "RevisionNotFound")
        return None

    def answer_api(self, name, what, revision):
        found = self.files_at(name, revision)
        if found is None:
            return
        commit, files = found
        content = dict(id=name.removeprefix("datasets/"), sha=commit, siblings=[])
        if what == "tree":
            content = [dict(type="file", path=path, size=len(data), oid=git_hash(data))
                       for path, data in files.items()]
        self.answer(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def answer_file(self, name, revision, path):
        hub = self.hub
        found = self.files_at(name, revision)
        if found is None:
            return
        commit, files = found
        if name in hub.gated and self.headers.get("Authorization") != "Bearer let-me-in":
            return self.refuse(hub.gated[name], "GatedRepo")
        if path not in files:
            return self.refuse(404, "EntryNotFound", **{"X-Repo-Commit": commit})
        data = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_hash(data)}"'}
        if not path.endswith(".safetensors"):
            return self.send_file(path, data, headers)
        sha = hashlib.sha256(data).hexdigest()  # a large file lies in a content network
        hub.cdn[f"/cdn/{sha}"] = path, data
        self.answer(302, **headers | {
            "Location": f"http://localhost:{hub.port}/cdn/{sha}", "X-Linked-ETag": f'"{sha}"',
            "X-Linked-Size": hub.sizes.get(path, len(data))})

    def send_file(self, path, data, headers):
        begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        body = data[begin:]
        cuts = self.hub.cut.get(path) if self.command == "GET" else None
        sent = body[:cuts.pop(0)] if cuts else body
        self.answer(206 if begin else 200, sent, len(body), **headers)

    def refuse(self, status, code, **headers):
        said = {"X-Error-Code": code, "X-Error-Message": f"{code}: said by\tthe server"}
        self.answer(status, **said, **headers)

    def answer(self, status, body=b"", length=None, **headers):
        self.hub.tokens.append((self.path, self.headers.get("Authorization")))
        self.send_response(status)
        self.send_header("Content-Length", len(body) if length is None else length)
        self.send_header("Connection", "close")
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def commit_of(files):
    text = repr(sorted((path, git_hash(data)) for path, data in files.items()))
    return hashlib.sha1(text.encode()).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server, and huggingface_hub set to it with an empty cache."""
    rng = random.Random(0)
    hub = SimpleNamespace(asked=[], tokens=[], cut={}, odd={}, cdn={}, sizes={}, gated={},
                          private=set(), bye=threading.Event())
    hub.gpt2 = {"config.json": b"{}", "vocab.json": b'{"a": 0}', "merges.txt": b"#",
                "model.safetensors": rng.randbytes(300_000)}
    hub.repos = {GPT2: {"main": hub.gpt2 | UNWANTED}}
    handler = type("Handler", (Hub,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.port = server.server_address[1]
    hub.url = f"http://127.0.0.1:{hub.port}"
    hub.cache = tmp_path / "cache" / "hub"
    hub.snapshots = hub.cache / "models--openai-community--gpt2" / "snapshots"

    def downloads():
        """Names of the files that were asked for, their metadata included."""
        resolved = [Hub.RESOLVE.fullmatch(path) for _, path, _ in hub.asked]
        return sorted({urllib.parse.unquote(match[3]) for match in resolved if match})

    def use(endpoint=hub.url, offline=False):
        """What the environment says, which huggingface_hub reads when it is imported."""
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        hosts = frozenset({"huggingface.co", "127.0.0.1"})
        values = dict(ENDPOINT=endpoint, HUGGINGFACE_CO_URL_TEMPLATE=template, HF_URL_HOSTS=hosts,
                      HF_HUB_CACHE=str(hub.cache), HF_HUB_OFFLINE=offline,
                      HF_TOKEN_PATH=str(tmp_path / "no token"))
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")

    hub.use, hub.downloads = use, downloads
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN", "HF_HUB_CACHE",
                 "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # else 10 MB: what a cut keeps
    use()
    huggingface_hub.close_session()
    yield hub
    huggingface_hub.close_session()
    hub.bye.set()
    server.shutdown()
    server.server_close()
    thread.join()


def content(folder):
    """{file: bytes} of a folder, the files below included."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with open(path, "rb") as f:
                found[os.path.relpath(path, folder)] = f.read()
    return found


# --------------------------------------------------------------------------------------------------
# what is downloaded, and when

def test_the_first_call_downloads_a_model_into_the_cache_that_others_use(hub):
    folder = fetch("gpt2")
    assert folder == str(hub.snapshots / commit_of(hub.repos[GPT2]["main"]))
    assert content(folder) == hub.gpt2 and hub.downloads() == sorted(hub.gpt2)
    for name in hub.gpt2:
        theirs = huggingface_hub.try_to_load_from_cache(GPT2, name)
        assert theirs == os.path.join(folder, name)


def test_the_second_call_downloads_nothing_and_needs_no_network(hub):
    folder = fetch("gpt2")
    hub.asked.clear()
    for name in ("gpt2", "openai-community/gpt2", "gpt2@main"):
        assert fetch(name) == folder and hub.downloads() == []
    assert fetch("gpt2", ["vocab.json"]) == folder and hub.downloads() == []
    hub.use(DEAD)
    assert fetch("gpt2") == folder
    hub.use(offline=True)
    hub.asked.clear()
    assert fetch("gpt2") == folder and hub.asked == []


def test_files_that_other_tools_have_cached_are_used_without_a_network(hub):
    for name in hub.gpt2:
        huggingface_hub.hf_hub_download(GPT2, name)
    hub.use(offline=True)
    assert content(fetch("gpt2")) == hub.gpt2


def test_a_branch_that_moved_is_downloaded_again_without_the_files_that_stayed(hub):
    before = fetch("gpt2")
    hub.asked.clear()
    hub.repos[GPT2]["main"] = hub.gpt2 | {"config.json": b'{"new": 1}'}
    folder = fetch("gpt2")
    assert folder != before and content(folder)["config.json"] == b'{"new": 1}'
    assert content(before) == hub.gpt2
    fetched = [path for method, path, _ in hub.asked if method == "GET" and "/api/" not in path]
    assert [path.rsplit("/", 1)[1] for path in fetched] == ["config.json"]


@pytest.mark.parametrize("name, repo, revision", [
    ("gpt2", GPT2, "main"), ("gpt2-medium", "openai-community/gpt2-medium", "main"),
    ("gpt2-large", "openai-community/gpt2-large", "main"),
    ("gpt2-xl", "openai-community/gpt2-xl", "main"),
    ("distilgpt2@v1", "distilbert/distilgpt2", "v1"), ("a/b.c-d", "a/b.c-d", "main"),
    ("a/b@refs/pr/1", "a/b", "refs/pr/1"), ("a/b@feature/x.y", "a/b", "feature/x.y"),
    ("datasets/allenai/real", "datasets/allenai/real", "main"),
    ("datasets/o/n@refs/pr/12", "datasets/o/n", "refs/pr/12")])
def test_names_and_revisions(hub, name, repo, revision):
    hub.repos = {repo: {"another": {"sub/x.json": b"0"}, revision: {"sub/x.json": b"1", "y": b""}}}
    folder = fetch(name, ["sub/x.json"])
    assert content(folder) == {"sub/x.json": b"1"} and hub.downloads() == ["sub/x.json"]
    commit = commit_of(hub.repos[repo][revision])
    assert os.path.basename(folder) == commit
    hub.asked.clear()
    assert fetch(f"{name.split('@')[0]}@{commit}", ["sub/x.json"]) == folder
    assert hub.asked == []  # what a commit holds never changes
    hub.use(offline=True)
    assert fetch(name, ["sub/x.json"]) == folder


def test_several_files_of_a_data_set_and_names_that_look_like_patterns(hub):
    files = {"a.jsonl": b"1", "data/b.jsonl": b"2", "data/[x]*.jsonl": b"3", "data/x1.jsonl": b"4"}
    hub.repos = {"datasets/o/n": {"main": files}}
    folder = fetch("datasets/o/n", ["data/b.jsonl", "data/[x]*.jsonl"])
    assert content(folder) == {name: files[name] for name in ("data/b.jsonl", "data/[x]*.jsonl")}
    line = refused("datasets/o/n", "data/c.jsonl, d.jsonl not found at revision main",
                   call=lambda: fetch("datasets/o/n", ["data/c.jsonl", "a.jsonl", "d.jsonl"]))
    assert "a.jsonl" not in line
    refused("none.jsonl not found", call=lambda: fetch("datasets/o/n", ["none.jsonl"]))


def test_names_that_are_none(hub):
    for name in ("gpt-2", "no/such/folder/here", "../x", "a/../b", "/gpt2", "a/b?c", "a b", "",
                 "x@", "./gpt2", "a/..", "a/b@", "a/b@../c", "datasets/a/b/c", "a/b\n"):
        refused(repr(name), "no such folder", call=lambda: fetch(name))
    for file in ("../x", "/etc/passwd", "a/../../x", "./x"):
        refused(repr(file), call=lambda: fetch("gpt2", [file]))
    assert hub.asked == []
    for name in ("a--b/c", "a/b.git", "a/" + "b" * 99, "é/b"):
        assert "network" not in refused(name, call=lambda: fetch(name))
    assert hub.asked == []


def test_a_local_folder_is_only_looked_at(tmp_path, hub):
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
    os.rename(name + "/model.safetensors", name + "/model.safetensors.index.json")
    assert fetch(tmp_path / "mine") == name


# --------------------------------------------------------------------------------------------------
# weights

def test_a_model_with_a_pickle_only(hub):
    hub.repos["a/b"] = {"main": {"config.json": b"{}", "pytorch_model.bin": b"PK"}}
    refused("a/b", "only pytorch_model.bin, a pickle", "NAME@refs/pr/1", "save_pretrained",
            call=lambda: fetch("a/b"))
    assert not [p for m, p, _ in hub.asked if m == "GET" and p.endswith("pytorch_model.bin")]
    hub.repos["a/b"]["refs/pr/1"] = hub.repos["a/b"]["main"] | {"model.safetensors": b"x"}
    assert content(fetch("a/b@refs/pr/1"))["model.safetensors"] == b"x"
    hub.repos["a/c"] = {"main": {"config.json": b"{}"}}
    refused("a/c", "no model.safetensors", call=lambda: fetch("a/c"))
    hub.repos["a/d"] = {"main": {"model.safetensors": b"x"}}
    refused("a/d", "config.json not found", call=lambda: fetch("a/d"))


def test_shards(hub):
    files = dict(hub.gpt2)
    data = files.pop("model.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    files |= {"model.safetensors.index.json": index, "one.safetensors": data}
    hub.repos = {GPT2: {"main": files | {"three.safetensors": b"3"}}}
    refused("gpt2", "two.safetensors not found, which model.safetensors.index.json names",
            call=lambda: fetch("gpt2"))
    files["two.safetensors"] = b"2"
    hub.repos[GPT2]["main"] = files | {"three.safetensors": b"3"}
    folder = fetch("gpt2")
    assert content(folder) == files
    hub.asked.clear()
    assert fetch("gpt2") == folder and hub.downloads() == []
    hub.use(offline=True)
    assert fetch("gpt2") == folder
    os.remove(os.path.join(folder, "two.safetensors"))
    refused("gpt2", "HF_HUB_OFFLINE", call=lambda: fetch("gpt2"))
    hub.use()
    assert content(fetch("gpt2")) == files


@pytest.mark.parametrize("file", ["../../../x.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_an_index_that_names_a_file_elsewhere(hub, file):
    index = json.dumps({"weight_map": {"a": file}}).encode()
    hub.repos["a/b"] = {"main": {"config.json": b"{}", "model.safetensors.index.json": index}}
    refused("model.safetensors.index.json", file, call=lambda: fetch("a/b"))


# --------------------------------------------------------------------------------------------------
# logins

@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_how_to_log_in_and_comes_with_the_token(hub, status, monkeypatch):
    hub.gated[GPT2] = status
    refused("gpt2", "gated", "ask for access", "HF_TOKEN", call=lambda: fetch("gpt2"))
    monkeypatch.setenv("HF_TOKEN", "let-me-in")
    assert content(fetch("gpt2")) == hub.gpt2
    assert {token for path, token in hub.tokens if path.startswith("/cdn/")} == {None}


def test_a_private_model_needs_the_token_and_a_model_that_is_not_there_says_so(hub, monkeypatch):
    hub.private.add(GPT2)
    refused("gpt2", "no such model or data set, or a private one", "HF_TOKEN",
            call=lambda: fetch("gpt2"))
    monkeypatch.setenv("HF_TOKEN", "let-me-in")
    assert content(fetch("gpt2")) == hub.gpt2
    refused("a/b", "no such model", "404", call=lambda: fetch("a/b"))
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refused("a/b", "no such model", "401", call=lambda: fetch("a/b"))
    refused("datasets/a/b", "no such model or data set",
            call=lambda: fetch("datasets/a/b", ["x.json"]))


def test_a_revision_that_is_not_there(hub):
    for name in ("gpt2@v9", "gpt2@refs/pr/9", f"gpt2@{'0' * 40}"):
        refused(name, "no such revision", call=lambda: fetch(name))


def test_the_token_of_a_login_is_used(hub, monkeypatch, tmp_path):
    hub.private.add(GPT2)
    (tmp_path / "token").write_text("let-me-in")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert content(fetch("gpt2")) == hub.gpt2


# --------------------------------------------------------------------------------------------------
# what goes wrong on the way

def ranges(hub):
    return [asked for method, path, asked in hub.asked if method == "GET" and "/cdn/" in path]


def test_a_cut_connection_is_resumed_where_it_broke(hub):
    hub.cut["model.safetensors"] = [100_000, 50_000]
    assert content(fetch("gpt2")) == hub.gpt2
    assert ranges(hub) == [None, "bytes=100000-", "bytes=150000-"]


def test_a_connection_that_breaks_for_good_leaves_the_other_files(hub):
    hub.cut["model.safetensors"] = [100_000] + [0] * 99
    refused("gpt2", "no network", "give the folder", call=lambda: fetch("gpt2"))
    folder = hub.snapshots / commit_of(hub.repos[GPT2]["main"])
    refused("no model.safetensors", call=lambda: load_tensors(str(folder)))
    hub.cut.clear()
    hub.asked.clear()
    assert content(fetch("gpt2")) == hub.gpt2
    assert ranges(hub) == [None] and "model.safetensors" in hub.downloads()


@pytest.mark.parametrize("size", [299_999, 300_001])
def test_a_file_of_another_size_than_promised_is_refused(hub, size):
    hub.sizes["model.safetensors"] = size
    refused("gpt2", str(size), call=lambda: fetch("gpt2"))
    assert not (hub.snapshots / commit_of(hub.repos[GPT2]["main"]) / "model.safetensors").exists()


REVISION = "/api/models/openai-community/gpt2/revision/main"


@pytest.mark.parametrize("status", [400, 404, 418, 429, 500, 503])
def test_a_server_that_refuses(hub, status):
    hub.odd[REVISION] = lambda handler: handler.answer(status)
    refused("gpt2", f"the server answered {status}", "HF_ENDPOINT", call=lambda: fetch("gpt2"))


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b"{}", b"null", b'{"sha": 3}',
                                  b'{"id": "a/b", "sha": "main"}', b"\xff"])
def test_a_server_that_is_no_hub(hub, body):
    hub.odd[REVISION] = lambda handler: handler.answer(200, body)
    refused("gpt2", call=lambda: fetch("gpt2"))


def test_answers_without_the_headers_of_a_hub(hub):
    path = f"/{GPT2}/resolve/{commit_of(hub.repos[GPT2]['main'])}/config.json"
    hub.odd[path] = lambda handler: handler.answer(200, b"{}")
    refused("gpt2", "X-Repo-Commit", "HF_ENDPOINT", call=lambda: fetch("gpt2"))
    hub.odd[path] = lambda handler: handler.wfile.write(b"nonsense\r\n\r\n")
    refused("gpt2", call=lambda: fetch("gpt2"))
    hub.odd[path] = lambda handler: handler.answer(302, Location=path)
    refused("gpt2", call=lambda: fetch("gpt2"))


@pytest.mark.parametrize("endpoint", [DEAD, "http://no.such.host.invalid", "huggingface.co",
                                      "http://a b", "http://[", "ftp://127.0.0.1/"])
def test_an_endpoint_that_is_out_of_reach(hub, endpoint):
    hub.use(endpoint)
    refused("gpt2", f"no network to {endpoint}?", "give the folder", "HF_ENDPOINT",
            call=lambda: fetch("gpt2"))


def test_offline_with_an_empty_cache_or_half_a_model(hub):
    hub.use(offline=True)
    refused("gpt2", "not all of it is in the cache", "HF_HUB_OFFLINE", call=lambda: fetch("gpt2"))
    hub.use()
    huggingface_hub.hf_hub_download(GPT2, "config.json")
    hub.asked.clear()
    hub.use(offline=True)
    refused("gpt2", "HF_HUB_OFFLINE", call=lambda: fetch("gpt2"))
    hub.use(DEAD)
    refused("gpt2", "no network", call=lambda: fetch("gpt2"))
    assert hub.asked == []


def test_a_full_disk_and_a_cache_that_cannot_be_written(hub):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        refused("gpt2", "the cache could not be written (File too large)", "HF_HOME",
                call=lambda: fetch("gpt2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(fetch("gpt2")) == hub.gpt2
    hub.cache = hub.cache / "file"
    hub.cache.write_text("")
    hub.use()
    refused("gpt2", f"{hub.cache}/models", "could not be written (Not a directory)",
            call=lambda: fetch("gpt2"))


def test_two_at_once_agree(hub):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        folder, *others = pool.map(fetch, ["gpt2"] * 4)
    assert others == [folder] * 3 and content(folder) == hub.gpt2


def test_without_the_package_one_line_says_what_to_install(hub, monkeypatch):
    with monkeypatch.context() as m:
        for name in list(sys.modules):
            if name.split(".")[0] == "huggingface_hub":
                m.setitem(sys.modules, name, None)
        refused("huggingface_hub", "pip install -r requirements-hub.txt",
                call=lambda: fetch("gpt2"))


# --------------------------------------------------------------------------------------------------
# the command

def test_the_command(hub, script):
    done = script("hub.fetch", "gpt2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(hub.snapshots / commit_of(hub.repos[GPT2]["main"]))
    assert "       300,000 bytes  model.safetensors" in lines and len(lines) == 5
    done = script("hub.fetch", "gpt3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: 'gpt3': no such folder")
    assert len(done.stderr.splitlines()) == 1
    done = script("hub.fetch", "a/b")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: a/b: no such")
    for argv in ([], ["a/b", "c/d"], ["--help"]):
        refused("usage: python -m hub.fetch", call=lambda: module.main(argv))
