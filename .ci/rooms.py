"""
Delete extras in a copy of the project and compare what is left with the whole.

    python .ci/rooms.py                  # each extra, then all of them: some minutes each
    python .ci/rooms.py critic all       # these
    python .ci/rooms.py all --fast       # with a fast part of the core's tests, as CI does

The core's tests must pass. Two small runs, and the commands that look at them, must write and
print the same digits.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", "shared")
SMALL = ["--max_iters=2", "--num_prompts=4", "--num_generations=8", "--num_eval_prompts=4",
         "--num_eval_generations=2", "--threads=1", "--expect_rise=0", "--eval_interval=1"]
RUNS = {"self": ["config/toxicity.py", "--tracin=self"], "quick": ["config/quick_test.py"]}
COMMANDS = [["tracin.py", "out/self"],
            ["evaluate.py", "out/self", "--num_eval_prompts=2"],
            ["sample.py", "out/self", "--prompt=You are"], ["plot.py", "out/quick", "out/self"]]
FAST = [f"tests/test_{name}.py" for name in ("algorithm", "config", "loss", "rollout", "step")]


def python(top, *argv):
    """What a command prints in this copy, and its exit code."""
    done = subprocess.run([sys.executable, *argv], cwd=top, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    timed = re.compile(" s left$")
    lines = [line for line in done.stdout.splitlines() if not timed.search(line)]
    return "\n".join(lines).strip(), done.returncode


def digits_of(top):
    """{what: digits, as text} of the runs and of the commands that look at them, without times."""
    found = {}
    for name, flags in RUNS.items():
        text, code = python(top, "grpo.py", *flags, *SMALL, f"--out_dir=out/{name}")
        if code:
            sys.exit(text)
        for log in ("metrics", "samples", "eval"):
            with open(f"{top}/out/{name}/{log}.jsonl", encoding="utf-8") as f:
                rows = [json.loads(line) | {"step_time": 0} for line in f]
            found[f"{log} of {name}"] = json.dumps(rows)
    # `tracin.py RUN` is what extras/explain does
    commands = [argv for argv in COMMANDS
                if argv[0] != "tracin.py" or os.path.isdir(f"{top}/extras/explain")]
    return found | {" ".join(argv): python(top, *argv) for argv in commands}


def main(argv):
    tests = FAST if "--fast" in argv else ["tests"]
    entries = sorted(name for name in os.listdir(f"{ROOT}/extras") if "." not in name)
    names = [name for name in argv if name != "--fast"] or [*entries, "all"]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        whole = digits_of(shutil.copytree(ROOT, f"{folder}/whole", ignore=NOT_COPIED))
        for name in names:
            top = shutil.copytree(ROOT, f"{folder}/{name}", ignore=NOT_COPIED)
            shutil.rmtree(f"{top}/extras" if name == "all" else f"{top}/extras/{name}")
            found = digits_of(top)
            others = [what for what in found if found[what] != whole[what]]
            text, code = python(top, "-m", "pytest", "-q", *tests)
            said = f"OTHER DIGITS: {', '.join(others)}" if others else "the same digits"
            print(f"without {name}: {said}; tests: {text.splitlines()[-1]}", flush=True)
            if others or code:
                print(text, *(found[what] for what in others), sep="\n")
                failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
