"""
The tests whose numbers depend on a CPU's arithmetic, by one that this machine would not choose.

    python .ci/arithmetic.py                # chosen by the commit
    python .ci/arithmetic.py avx2           # this one
    python .ci/arithmetic.py all tests      # every one, and all tests below these folders
"""
import itertools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# what a CPU without these instructions computes: by torch, by MKL and by oneDNN
INSTRUCTIONS = {
    "native": {},
    "default": dict(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE",
                    ONEDNN_MAX_CPU_ISA="SSE41"),
    "avx2": dict(ATEN_CPU_CAPABILITY="avx2", MKL_CBWR="AVX2", ONEDNN_MAX_CPU_ISA="AVX2")}
WORLDS = ("0", "1", "2", "3", "12")
BFLOAT16 = ("no", "yes")    # whether the CPU says that it multiplies it fast: tests/conftest.py
FILES = (
    "tests/test_lesson.py", "tests/test_runs.py", "tests/test_step.py", "tests/test_influence.py",
    "extras/explain/tests", "extras/torchrun/tests")


def arithmetics():
    """{name: environment}, each combination once."""
    return {f"{name}, world {world}, bfloat16 {half}":
            found | dict(WORLD_SEED=world, TEST_BFLOAT16=half)
            for (name, found), world, half in itertools.product(
                INSTRUCTIONS.items(), WORLDS, BFLOAT16)}


def chosen(words):
    """The names to run: those that hold all words, or one that the commit chooses."""
    names = list(arithmetics())
    if words == "all":
        return names
    if words:
        return [name for name in names if words in name]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    return [names[int(commit, 16) % len(names)]]


def main(words="", *files):
    """The exit code: 0 if all tests pass in all that are chosen."""
    failed = 0
    files = files or [file for file in FILES if (ROOT / file).exists()]
    for name in chosen(words):
        print(f"arithmetic: {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *files]
        environment = os.environ | arithmetics()[name]
        failed |= subprocess.run(command, cwd=ROOT, env=environment).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
