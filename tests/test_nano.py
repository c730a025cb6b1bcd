"""
nano.py and nano_tracin.py compute what grpo.py does with its two configs, and need what it needs.

Each page is run as it stands, with a few small numbers, beside grpo.py with the same numbers.
"""
import io
import itertools
import re
import tomllib

import pytest
import torch

import data.comments
import grpo
from common.files import ROOT, read_rows, read_text
from run.settings import load_settings
from worlds import printed, seed_of

CONFIGS = {"nano.py": "config/toxicity.py", "nano_tracin.py": "config/toxicity_tracin.py"}
SMALL = ["max_iters=2", "num_prompts=3", "num_generations=4", "num_eval_prompts=3",
         "num_eval_generations=2", "micro_batch_size=5", "max_completion_length=24"]
NAMES = ("toxicity", "kept", "reward", "±", "kl", "grad_norm")      # what a page prints


@pytest.fixture(autouse=True)
def few_comments_on_a_cpu(monkeypatch):
    """Reading all comments takes longer than training on a few. A page takes a GPU if it can."""
    each_row = data.comments.each_row
    monkeypatch.setattr(data.comments, "each_row", lambda path: itertools.islice(
        each_row(path), 2000))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run_page(page, flags, monkeypatch):
    """What a page prints, with nine digits where it has four, and its variables."""
    source = read_text(f"{ROOT}/{page}").replace(":.4f}", ":.9f}")
    variables = {"__name__": "__main__"}
    monkeypatch.setattr("sys.argv", [page, *flags])
    return printed(exec, compile(source, page, "exec"), variables), variables


def numbers_of_page(text):
    """[(where, number)] in the order in which they are printed."""
    found = []
    it = 1
    for name, number in re.findall(rf"({'|'.join(NAMES)}) (\d+\.\d{{9}})", text):
        found.append((f"{name} of iteration {it}", float(number)))
        it += name == "grad_norm"
    return found


def numbers_of_program(folder):
    """The same, of a run of grpo.py."""
    before, after = (row["eval_judge/toxicity"] for row in read_rows(f"{folder}/eval.jsonl"))
    found = [("toxicity of iteration 1", before)]
    for it, row in enumerate(read_rows(f"{folder}/metrics.jsonl"), 1):
        row |= {"kept": row.get("tracin/selected_ratio"), "±": row["reward_std"]}
        found += [(f"{name} of iteration {it}", row[name]) for name in NAMES[1:]
                  if row[name] is not None]
    return [*found, (f"toxicity of iteration {it + 1}", after)]


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("page", CONFIGS)
def test_a_page_gives_the_digits_of_the_program(page, seed, tmp_path, monkeypatch):
    flags = [*SMALL, f"seed={seed_of(seed)}"]
    text, _ = run_page(page, flags, monkeypatch)
    printed(grpo.main, [
        CONFIGS[page], *(f"--{flag}" for flag in flags), f"--out_dir={tmp_path}", "--device=cpu",
        "--dtype=float32", f"--threads={torch.get_num_threads()}"])
    of_page = numbers_of_page(text)
    of_program = numbers_of_program(tmp_path)
    assert [where for where, _ in of_page] == [where for where, _ in of_program], (
        f"{page} does not print the numbers that are compared: {text}")
    for (where, found), (_, expected) in zip(of_page, of_program):
        assert found == pytest.approx(expected, rel=2e-6, abs=2e-9), (
            f"{page} and grpo.py {CONFIGS[page]} have parted. First they differ in {where}: "
            f"{found} on the page, {expected} by the program. Change both, or neither")


@pytest.mark.parametrize("page", CONFIGS)
def test_a_page_has_the_settings_of_the_config(page, monkeypatch):
    _, variables = run_page(page, [*SMALL, "max_iters=0"], monkeypatch)
    cfg = load_settings([f"{ROOT}/{CONFIGS[page]}"])
    for name, value in variables["settings"].items():
        assert value == getattr(cfg, name), (
            f"{page} has {name} = {value}, {CONFIGS[page]} has {getattr(cfg, name)}")


@pytest.mark.parametrize("page, flag", list(zip(CONFIGS, ["max_itres=2", "num_prompts=1.5"])))
def test_a_typo_ends_a_page_at_once_with_one_line(page, flag, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with pytest.raises(SystemExit) as caught:
        run_page(page, [flag], monkeypatch)
    assert caught.value.code == 2
    line = stderr.getvalue()
    assert line.count("\n") == 1 and flag in line and "max_iters" in line, f"it said: {line}"


@pytest.mark.parametrize("script", ["grpo.py", *CONFIGS])
def test_uv_installs_what_pip_does(script):
    """The block of inline metadata (PEP 723) that `uv run SCRIPT` reads."""
    block, = re.findall(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", read_text(f"{ROOT}/{script}"))
    metadata = tomllib.loads(re.sub("(?m)^# ?", "", block))
    lines = [line.partition("#")[0].strip() for line in
             read_text(f"{ROOT}/requirements.txt").splitlines()]
    assert sorted(metadata["dependencies"]) == sorted(filter(None, lines)), (
        f"the dependencies of {script} are not those of requirements.txt")
