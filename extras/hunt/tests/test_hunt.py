"""Faults can be planted, are seen where they are, and a copy that is mended is called healed."""
import os

import pytest

from common.files import ROOT
from extras.hunt import __main__ as hunt
from extras.hunt.faults import FAULTS
from worlds import printed, refusal

TINY = ["--threads=1", "--n_layer=1", "--n_embd=32", "--n_head=2", "--pretrain_tokens=20000",
        "--num_prompts=4", "--num_eval_prompts=4", "--num_eval_generations=2",
        "--mini_batch_size=16", "--max_iters=2"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Settings of a world that is smaller still."""
    return [*TINY, f"--cache_dir={tmp_path_factory.mktemp('prepared')}"]


@pytest.fixture(scope="module")
def healthy(flags):
    return hunt.run_with(None, flags, quiet=True)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.sign.__name__)
def test_a_fault_can_be_planted(fault):
    with open(f"{ROOT}/{fault.file}", encoding="utf-8") as f:
        source = f.read()
    count = source.count(fault.old)
    assert count == 1, f"{fault.file} has this {count} times, update faults.py: {fault.old!r}"
    compile(source.replace(fault.old, fault.new), fault.file, "exec")


@pytest.mark.parametrize("number", range(1, 1 + len(FAULTS)))
def test_only_the_answer_tells_the_line(number):
    fault = FAULTS[number - 1]
    line = fault.old.strip().splitlines()[0]
    assert line in printed(hunt.main, [str(number), "--answer"])
    hint = printed(hunt.main, [str(number), "--hint"])
    assert fault.place in hint
    assert line not in hint + printed(hunt.main, [])


@pytest.mark.parametrize("number", [2, 7])
def test_a_fault_is_seen_in_its_own_run_and_in_no_healthy_one(number, flags, healthy):
    fault = FAULTS[number - 1]
    broken = hunt.run_with(fault, flags, quiet=True)
    assert len(healthy.metrics) == 2, healthy.printed
    assert fault.sign(broken)[1], f"{fault.complaint} Nothing shows it:\n{broken.printed}"
    assert not fault.sign(healthy)[1], "a healthy run shows the sign of a fault"
    assert hunt.first_difference(healthy.metrics, healthy.metrics) is None
    if broken.metrics:
        assert hunt.first_difference(broken.metrics, healthy.metrics), "it would be called healed"


def test_a_copy_is_healed_by_other_words_for_the_same_line(tmp_path, flags):
    fault = FAULTS[1]
    folder = str(tmp_path / "broken")
    printed(hunt.main, ["2", f"--copy={folder}"])
    assert not os.path.exists(f"{folder}/extras/hunt/faults.py"), "the copy holds the answers"
    path = f"{folder}/{fault.file}"
    with open(path, encoding="utf-8") as f:
        source = f.read()
    with open(path, "w", encoding="utf-8") as f:
        f.write(source.replace(fault.new, "loss.kl = (0.5 + 0.5) * cfg.beta * aggregate("))
    assert "healed" in printed(hunt.main, ["2", f"--check={folder}", *flags])


@pytest.mark.parametrize("argv", [["11"], ["x"], ["1", "2"], ["0", "--answer"], ["1", "--check=."],
                                  ["1", "--copy=."]])
def test_bad_input_is_one_line(argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(hunt.main, argv)
