"""Each word of the setting `speed` turns one piece of code on, and changes no result."""
import contextlib
import math
import os
import sys
from types import SimpleNamespace

import pytest

import model
import sample
from config import Settings
from conftest import ROOT
from grpo import micro_batches

FILES = {os.path.join(ROOT, "run", name): word for name, word in (
    ("attention.py", "attention"), ("decoder.py", "graphs"), ("fused_head.py", "head"))}
ON_A_CPU = {word for word in Settings.speed if word != "graphs"}
SPEEDS = [(), *(tuple(other for other in Settings.speed if other != word)
                for word in Settings.speed)]
SPLIT = ("padding", "step_time")    # metrics that are about how the work was done


@contextlib.contextmanager
def watched():
    """Yields the set of the words of speed whose code runs inside the block."""
    words = set()

    def see(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename in FILES:
            words.add(FILES[code.co_filename])
        if event == "call" and code is sample.drop_finished.__code__:
            words.add("retire")
        if event == "c_call" and code is micro_batches.__code__ and arg.__name__ == "argsort":
            words.add("sort")

    sys.setprofile(see)
    try:
        yield words
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def run_with(grpo, tmp_path_factory):
    """run_with(speed) -> .dir of a run of one iteration, .words whose code ran in it."""
    done = {}

    def start(speed):
        if speed not in done:
            folder = tmp_path_factory.mktemp("speed") / "run"
            with pytest.MonkeyPatch.context() as patch, watched() as words:
                patch.setattr(model, "LOGITS_AT_ONCE", 7 * 300)     # seven tokens at a time
                grpo(folder, "--max_iters=1", "--beta=0.1", "--micro_batch_size=4", "--device=cpu",
                     f"--speed={speed}")
            done[speed] = SimpleNamespace(dir=folder, words=words)
        return done[speed]

    return start


@pytest.mark.parametrize("speed", [Settings.speed, *SPEEDS], ids=" ".join)
def test_only_the_words_of_speed_run(speed, run_with):
    ran = run_with(speed).words
    expected = ON_A_CPU & set(speed)
    for word in sorted(ran - expected):
        assert False, f"speed = {speed} leaves {word!r} out, yet its code ran"
    for word in sorted(expected - ran):
        assert False, f"speed = {speed} names {word!r}, yet its code did not run"


@pytest.mark.parametrize("speed", SPEEDS, ids=" ".join)
def test_speed_changes_no_result(speed, run_with, rows):
    fast, slow = run_with(Settings.speed).dir, run_with(speed).dir
    for name in ("samples.jsonl", "eval.jsonl", "metrics.jsonl"):
        for a, b in zip(rows(fast / name), rows(slow / name), strict=True):
            assert a.keys() == b.keys()
            for field in a.keys() - set(SPLIT):
                same = a[field] == b[field]
                if isinstance(a[field], float):
                    same = math.isclose(a[field], b[field], rel_tol=1e-5, abs_tol=1e-6)
                assert same, (f"{name}, {field}: {a[field]} with all words of speed, {b[field]} "
                              f"with speed = {speed}")
