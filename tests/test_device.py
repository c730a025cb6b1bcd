"""run/device.py: devices, precision, free memory."""
import math

import pytest
import torch

from run.device import free_memory, pick_device, pick_dtype
from run.script import BadInput


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device that must be missing is here")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_missing_device_is_bad_input(name):
    with pytest.raises(BadInput, match=f"device = '{name}': not on this machine"):
        pick_device(name)


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


def test_pick_device_and_dtype(monkeypatch):
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
