"""
Files are written whole or not at all, and what is read is checked and never run. Around them:
devices, exit codes, signals.
"""
import errno
import io
import os
import signal
import subprocess
import sys

import pytest
import torch

import common.device
from common.device import machine, pick_device, pick_dtype
from common.files import ROOT, load_file, read_log, replacing, save_file
from common.cli import run_script
from common.errors import BadInput
from common.seeds import hash_of
from common.signals import interrupts
from data.weights import load_gpt, save_gpt
from worlds import assert_refused, random_gpt

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# a file is written whole or not at all

def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    """Whether a disk is full, torch says so in its own words, or Ctrl-C comes between."""
    path = f"{tmp_path}/new/a.pt"
    save_file(path, "run", x=torch.arange(3))
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(),
                  RuntimeError("PytorchStreamWriter failed")):
        def fails(content, path):
            open(path, "w").write("half")
            raise error

        with monkeypatch.context() as m, pytest.raises(type(error)):
            m.setattr(torch, "save", fails)
            save_file(path, "run", x=1)
        with pytest.raises(type(error)), replacing(f"{path}.folder") as tmp:
            os.makedirs(f"{tmp}/sub")
            raise error
        assert torch.equal(load_file(path, "run")["x"], torch.arange(3))
        assert os.listdir(tmp_path / "new") == ["a.pt"]


def test_a_broken_disk_replaces_nothing_and_one_without_fsync_serves(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(number, "the disk says")

    path = f"{tmp_path}/a.pt"
    save_file(path, "run", x=0)
    monkeypatch.setattr(os, "fsync", fails)
    number = errno.EIO
    with pytest.raises(OSError, match="disk says"):
        save_file(path, "run", x=1)
    assert load_file(path, "run")["x"] == 0, "what may not be on the disk has replaced what is"
    number = errno.EINVAL
    save_file(path, "run", x=2)
    assert load_file(path, "run")["x"] == 2


def test_a_policy_comes_back_in_float32(tmp_path):
    model = random_gpt().to(torch.bfloat16)
    path = f"{tmp_path}/a.pt"
    save_gpt(path, model, loss=1.25)
    back = load_gpt(path)
    assert back.config == model.config
    assert load_file(path, "policy")["loss"] == 1.25
    assert all(x.dtype == torch.float32 for x in back.state_dict().values())
    assert hash_of(back) == hash_of(model.float())
    assert back.lm_head.weight is back.wte.weight


# ------------------------------------------------------------------------------------------------
# what is read is checked, and never run

def test_a_damaged_checkpoint_is_one_line(tmp_path):
    path = tmp_path / "cut.pt"
    for nothing in (path, tmp_path):
        assert_refused(str(nothing), load_gpt, str(nothing))
    save_gpt(str(path), random_gpt())
    data = path.read_bytes()
    for content in (b"", data[:1000], data[:len(data) // 2], data[:-1], b"not a checkpoint"):
        path.write_bytes(content)
        assert_refused("cut.pt", load_gpt, str(path))
    for content in ([1, 2], torch.zeros(3), dict(model=1), dict(kind="judge")):
        torch.save(content, path)
        assert_refused(("cut.pt", "policy"), load_gpt, str(path))


def test_code_in_a_file_is_not_run(tmp_path):
    proof = tmp_path / "proof"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(proof),)      # what pickle calls

    torch.save(dict(kind="policy", x=Evil()), tmp_path / "evil.pt")
    assert_refused("evil.pt", load_file, f"{tmp_path}/evil.pt", "policy")
    assert not proof.exists()


def test_half_a_last_line_of_a_log_is_left_out(tmp_path):
    """A kill within a write leaves it, and a run that is at work may."""
    log = tmp_path / "log.jsonl"
    whole = '{"a": "\u00fc\u2028"}\n{"a": 2}\n'.encode()
    rows = [{"a": "\u00fc\u2028"}, {"a": 2}]
    for cut in range(1, len(whole) + 1):
        log.write_bytes(whole[:cut])
        done = whole[:cut].count(b"}")      # an editor may leave out the last line's end
        assert read_log(log) == rows[:done], whole[:cut]
    log.write_bytes(b'{"a": 1}\n{"a":\n{"a": 3}\n')
    assert_refused("row 2", read_log, log)


# ------------------------------------------------------------------------------------------------
# devices and memory

def test_devices_and_precisions(monkeypatch):
    gpu = torch.device("cuda")
    for threads in (2, 1):
        assert pick_device("cpu", threads) == CPU
        assert torch.get_num_threads() == threads
    for name in ("quantum", "meta", "cuda:99"):
        assert_refused(("device", name), pick_device, name)
    for best in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(common.device, "fast_dtype", lambda device: best)
        for device, auto in ((CPU, torch.float32), (gpu, best)):
            found = [pick_dtype(name, device) for name in ("float32", "bfloat16", "fast", "auto")]
            assert found == [torch.float32, torch.bfloat16, best, auto]
        expected = "high" if best == torch.bfloat16 else "highest"
        assert torch.get_float32_matmul_precision() == expected, "TF32 goes with bfloat16 alone"


def test_a_gpu_has_a_number(monkeypatch):
    """torch.cuda.set_device refuses "cuda", on any build of torch: here its own check is asked."""
    plain = torch.zeros
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: plain(*size))
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    for name, number in (("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)):
        assert pick_device(name) == torch.device("cuda", number), f"device = {name!r}"
    monkeypatch.setattr(common.device, "rank_and_size", lambda: (5, 8))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda:1"), "a process has its machine's next GPU"
    assert chosen == [0, 0, 0, 3, 1]


def test_a_command_says_what_it_computes_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
    line = machine(torch.device("cuda", 1), torch.bfloat16)
    assert "cuda:1" in line and "Card 1" in line and "bfloat16" in line


# ------------------------------------------------------------------------------------------------
# signals

@pytest.fixture
def hangups():
    """They are heard, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_first_signal_asks_and_the_second_interrupts(capfd):
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt), interrupts() as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            assert capfd.readouterr().err.startswith("interrupted: ")
            signal.raise_signal(number)
        assert signal.getsignal(number) == before


def test_a_command_under_nohup_hears_no_hangup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


SCRIPT = """
import time
from common.cli import run_script
from common.signals import interrupts

def main(argv):
    with interrupts() as stop:
        print("ready", flush=True)
        while not stop():
            time.sleep(0.01)
        print("on with it", flush=True)
        open("saved", "w").close()

run_script(main)
"""


def test_a_lost_connection_does_not_end_what_prints_to_it(hangups, tmp_path):
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ROOT}, start_new_session=True)
    os.close(theirs)
    assert b"ready" in os.read(ours, 100)
    os.close(ours)
    for _ in range(2):      # a shell may send it twice
        process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0 and (tmp_path / "saved").exists()


# ------------------------------------------------------------------------------------------------
# exit codes and output

def raising(error):
    def main(argv):
        raise error
    return main


@pytest.mark.parametrize("error, code, text", [
    (BadInput("x = 1: no"), 2, "error: x = 1: no\n"), (SystemExit("stopped"), "stopped", ""),
    (KeyboardInterrupt(), 130, "interrupted\n")])
def test_errors_become_exit_codes(error, code, text, capsys):
    with pytest.raises(SystemExit) as caught:
        run_script(raising(error))
    assert caught.value.code == code
    assert capsys.readouterr().err == text


def test_running_out_of_memory_is_one_line_and_other_errors_are_not():
    with pytest.raises(SystemExit, match="out of memory.*micro_batch_size"):
        run_script(lambda argv: torch.empty(2 ** 57))
    for error in (RuntimeError("odd"), ConnectionError("a reward's server is down"), KeyError("x")):
        with pytest.raises(type(error)):    # with its traceback: it may be a user's function's
            run_script(raising(error))


def test_output_that_knows_few_characters(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    run_script(lambda argv: print("gr\u00fc\u00df \ud800", flush=True))
    assert ascii_only.buffer.getvalue() == b"gr\\xfc\\xdf \\ud800\n"
