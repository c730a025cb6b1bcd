"""run/device.py: devices, precision, free memory."""
import math
import os

import pytest
import torch

from config import load_settings
from run.device import fast_dtype, free_memory, pick_device, pick_dtype, set_up_gpu
from run.script import BadInput

no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@no_gpu_here
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_missing_device_is_bad_input(name):
    with pytest.raises(BadInput, match=f"device = '{name}': not on this machine"):
        pick_device(name)


@no_gpu_here
def test_a_driver_that_torch_cannot_use_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("run.device.DRIVER", tmp_path / "version")
    pick_device("auto")
    assert not capsys.readouterr().out, "a machine without a GPU needs no note"
    (tmp_path / "version").write_text("NVRM")
    assert pick_device("auto") == torch.device("cpu")
    assert "note: device = 'auto' is the CPU" in capsys.readouterr().out


def test_a_process_without_a_gpu_of_its_own_is_bad_input(monkeypatch):
    monkeypatch.setattr("run.device.rank_and_size", lambda: (5, 8))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for number in (2, 3):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        with pytest.raises(BadInput) as caught:
            pick_device("cuda")
        message = str(caught.value)
        assert f"process {number} of this machine has no GPU of its own" in message
        assert "there are 2; start torchrun with --nproc_per_node=2" in message
    assert pick_device("cpu") == torch.device("cpu"), "who asks for the CPU needs no GPU"


def gpu_that_has_bfloat16(has_it, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_it)


def test_pick_device_and_dtype(monkeypatch):
    gpu_that_has_bfloat16(True, monkeypatch)
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(BadInput, match="device = 'toaster'"):
        pick_device("toaster")
    wanted = {
        ("auto", "cpu"): torch.float32, ("auto", "cuda"): torch.bfloat16,
        ("float32", "cpu"): torch.float32, ("float32", "cuda"): torch.float32,
        ("bfloat16", "cpu"): torch.bfloat16, ("bfloat16", "cuda"): torch.bfloat16}
    for (name, device), dtype in wanted.items():
        assert pick_dtype(name, torch.device(device)) == dtype
    for has_it, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_it)
        assert pick_dtype("fast", torch.device("cpu")) == dtype
        assert pick_dtype("fast", torch.device("cuda")) == torch.bfloat16


def test_no_bfloat16_on_a_gpu_that_emulates_it(monkeypatch, capsys):
    """A T4, for instance."""
    gpu_that_has_bfloat16(False, monkeypatch)
    gpu = torch.device("cuda")
    for name in ("auto", "fast"):
        assert pick_dtype(name, gpu) == torch.float32
        line, = capsys.readouterr().out.splitlines()
        assert line.startswith(f"note: dtype = {name!r} is float32 on this GPU")
    assert fast_dtype("cuda") == pick_dtype("float32", gpu) == torch.float32
    assert not capsys.readouterr().out
    with pytest.raises(BadInput, match="dtype = 'bfloat16': .* set dtype = 'float32'"):
        pick_dtype("bfloat16", gpu)


@pytest.fixture
def torchs_own_way():
    """What set_up_gpu changes is put back."""
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


def test_a_gpu_computes_in_full_float32_and_without_cudnn_attention(torchs_own_way):
    torch.backends.cuda.enable_cudnn_sdp(True)
    for before in ("high", "medium"):    # a container's variable turns TF32 on
        torch.set_float32_matmul_precision(before)
        set_up_gpu(allow_tf32=False, deterministic=False)
        assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    set_up_gpu(allow_tf32=True, deterministic=True)
    assert torch.get_float32_matmul_precision() == "high"
    # only warned, torch keeps attention's backward in no fixed order
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_deterministic_code_is_not_compiled():
    with pytest.raises(BadInput, match="deterministic = True with compile = .'judge',.: .* set"):
        load_settings(["--deterministic=True", "--compile=judge"])


@no_gpu
def test_a_gpu_is_set_up_where_it_is_picked(torchs_own_way):
    torch.backends.cuda.enable_cudnn_sdp(True)
    pick_device("cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled(), "a CPU run changed how GPUs compute"
    pick_device("cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@no_gpu
def test_deterministic_runs_on_a_gpu_resume_to_the_same_bits(tiny, script, rows, tmp_path):
    def run(name, *more):
        folder = tmp_path / name
        found = script("grpo.py", *tiny.flags, f"--out_dir={folder}", "--device=cuda",
                       "--deterministic=True", "--tracin=reward", "--save_interval=1", *more)
        assert found.returncode == 0, found.stderr + found.stdout
        return folder

    whole = run("whole", "--max_iters=4")
    run("parts", "--max_iters=2")
    parts = run("parts", "--max_iters=4", "--resume=True")
    assert rows(whole / "samples.jsonl") == rows(parts / "samples.jsonl")
    for a, b in zip(rows(whole / "metrics.jsonl"), rows(parts / "metrics.jsonl"), strict=True):
        assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"]


@pytest.mark.parametrize("free, files", (
    (math.inf, {}),
    (math.inf, {"meminfo": "MemTotal: 9 kB"}),
    (700 * 1024, {}),
    (700 * 1024, {"": ("max", 10, 0, 0)}),
    (500_000, {"": (600_000, 100_000, 0, 0)}),
    (533_000, {"": (600_000, 100_000, 30_000, 3_000)}),             # a container's own
    (500_000, {"group": "0::/", "": (600_000, 100_000, 0, 0)}),
    (500_000, {"group": "1:cpu:/b\n0::/a/b", "": ("max", 3, 0, 0), "a": (600_000, 100_000, 0, 0),
               "a/b": (800_000, 9, 0, 0)}),
    (400_000, {"group": "0::/a/b", "a": (600_000, 100_000, 0, 0), "a/b": (500_000, 100_000, 0, 0)}),
    (500_000, {"group": "0::/elsewhere/b", "": (600_000, 100_000, 0, 0),
               "a/b": (8, 4, 0, 0)}),                               # a name outside the container
    (700 * 1024, {"group": "0::/a", "b": (8, 4, 0, 0)}),
    (700 * 1024, {"": (10 ** 9, 0, 0, 0)})))
def test_free_memory(free, files, tmp_path):
    meminfo = "MemFree: 100 kB\nMemAvailable:  700 kB\n"
    found = {"meminfo": meminfo, "group": "4:memory:/old"} | files
    if files or free < math.inf:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "meminfo").write_text(found.pop("meminfo"))
        (tmp_path / "proc" / "self" / "cgroup").write_text(found.pop("group"))
        for folder, (limit, used, inactive, active) in found.items():
            folder = tmp_path / "sys" / "fs" / "cgroup" / folder
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            (folder / "memory.stat").write_text(
                f"file 9\ninactive_anon 5\ninactive_file {inactive}\nactive_file {active}\n")
    assert free_memory(torch.device("cpu"), str(tmp_path)) == free


def test_free_memory_here_and_on_a_gpu(monkeypatch):
    assert 2 ** 20 < free_memory(torch.device("cpu")) < 2 ** 50
    gpu = dict(mem_get_info=(1000, 9000), memory_reserved=500, memory_allocated=300)
    for name, n in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, n=n: n)
    assert free_memory(torch.device("cuda")) == 1200
