"""
Ten faults to hunt by what a run prints.

    python -m extras.hunt                   # the ten, by what their users complain of
    python -m extras.hunt 0                 # a healthy run; 0 --influence: with influence
    python -m extras.hunt 3                 # a run with fault 3 in it
    python -m extras.hunt 3 --hint          # where to look
    python -m extras.hunt 3 --guess=loss.py:90      # is it this line of your files?
    python -m extras.hunt 3 --answer        # the line, why it is wrong, who had it
    python -m extras.hunt --score           # found, minutes, hints
    python -m extras.hunt 3 --copy=FOLDER   # writes the project with fault 3 in it
    python -m extras.hunt 3 --check=FOLDER  # is that copy, which you have edited, healed?

Any --name=value of grpo.py goes to the run: --temperature=1, --seed=2, --debug_step=True. The fault
is planted in a copy that is deleted afterwards. Do not read faults.py, which tells all of them.
A run's own warnings are held back until --answer; --warnings shows them.

    python -m extras.hunt --table=3         # runs all of them on 3 seeds: which number shows each
    python -m extras.hunt --table=3 --first_seed=4
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common.cli import own_flags, run_script
from common.errors import BadInput
from common.files import ROOT, read_json, read_log, write_json
from extras.hunt.faults import FAULTS, INFLUENCE, Seen

CONFIG = "extras/hunt/config/hunt.py"
CACHE = "out/prepared"      # cache_dir, if no flag says so
NOT_COPIED = (".*", "out", "venv", "env", "wandb", "shared", "docs", "tests", "__pycache__", "*.pt",
              "hunt")
SCORE = "out/hunt_score.json"
NEAR = 2        # lines: a guess may name the comment above
NUM_SHOWN = 16  # completions, those of two prompts
CHECKED = 3     # iterations of a copy that are compared with a healthy run's


# ------------------------------------------------------------------------------------------------
# a copy with a fault, and its run


def write_copy(folder, fault):
    """The project in a new folder, with a Fault planted, or None."""
    skipped = shutil.ignore_patterns(*NOT_COPIED)
    itself = os.path.realpath(folder)       # it may lie within the project

    def ignored(path, names):
        own = [name for name in names if itself == os.path.realpath(f"{path}/{name}")]
        return {*skipped(path, names), *own}

    shutil.copytree(ROOT, folder, ignore=ignored)
    os.makedirs(os.path.dirname(f"{folder}/{CONFIG}"))
    shutil.copy(f"{ROOT}/{CONFIG}", f"{folder}/{CONFIG}")   # the answers stay here
    if fault is None:
        return
    path = f"{folder}/{fault.file}"
    with open(path, encoding="utf-8") as f:
        source = f.read()
    if source.count(fault.old) != 1:
        raise BadInput(f"{fault.file} has changed, so this fault cannot be planted: update "
                       "extras/hunt/faults.py")
    with open(path, "w", encoding="utf-8") as f:
        f.write(source.replace(fault.old, fault.new))


def without_cause(line):
    """A line of a run, less what names the cause: its warnings, and what a stop suspects."""
    repeated = r"warnings of this run|  (\d+ )?iterations? [^:]*\d: "
    if re.match(rf"WARNING|note: \d+ sampled|{repeated}", line):
        return ""
    return re.sub("( nats on a token): by .*", r"\1", line)


def causes_in(printed):
    """The lines that without_cause shortens or leaves out, each warning once."""
    repeated = r"warnings of this run|  "
    return [line for line in printed.splitlines()
            if line != without_cause(line) and not re.match(repeated, line)]


def run_copy(folder, flags, quiet=False, warnings=True):
    """Run the small world with the project in a folder -> Seen. quiet: print nothing. warnings:
    print what names the cause, too."""
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1")
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, f"{folder}/grpo.py", f"{folder}/{CONFIG}",
                   f"--out_dir={out}/run", *flags]
        process = subprocess.Popen(command, env=env, text=True, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not quiet:
                print(line if warnings else without_cause(line), end="", flush=True)
        process.wait()
        logs = [f"{out}/run/{name}.jsonl" for name in ("metrics", "samples", "eval")]
        return Seen("".join(lines), *(read_log(log) if os.path.exists(log) else []
                                      for log in logs), code=process.returncode)


def mark_of(folder, flags):
    """A name for the run of a folder's files with these flags, by this torch."""
    content = hashlib.sha256(repr((flags, torch.__version__)).encode())
    for path in sorted(Path(folder).rglob("*.py")):
        content.update(path.read_bytes())
    return content.hexdigest()[:12]


def last_line(seen):
    return " ".join(seen.printed.strip().splitlines()[-1:])


def healthy_metrics(flags):
    """Rows of metrics.jsonl of a healthy run. They are kept in cache_dir, until the flags or the
    files of the project are others."""
    with tempfile.TemporaryDirectory() as folder:
        write_copy(f"{folder}/project", None)
        prefix = "--cache_dir="
        caches = [flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)]
        cache_dir = [CACHE, *caches][-1]
        path = f"{cache_dir}/hunt-{mark_of(folder, flags)}.json"
        if not os.path.exists(path):
            print("\na healthy run to compare with: kept for the next time", flush=True)
            seen = run_copy(f"{folder}/project", flags, quiet=True)
            if not seen.metrics:
                raise SystemExit(f"the healthy run fails: {last_line(seen)}")
            os.makedirs(cache_dir, exist_ok=True)
            write_json(path, seen.metrics)
    return read_json(path)


def run_with(fault, flags, quiet=False, warnings=True):
    """Run a copy with a Fault, or None, in it -> Seen."""
    with tempfile.TemporaryDirectory() as folder:
        write_copy(f"{folder}/project", fault)
        return run_copy(f"{folder}/project", flags, quiet, warnings)


# ------------------------------------------------------------------------------------------------
# the score card


def noted(number, **facts):
    """What the score card has of a fault, with these facts added: began (seconds), hints, guesses,
    minutes until it was found, given_up, causes (lines that were held back)."""
    card = read_json(SCORE, missing={})
    row = card.setdefault(str(number), {"hints": 0, "guesses": 0})
    row.update(facts)
    if facts:
        os.makedirs(os.path.dirname(SCORE), exist_ok=True)
        write_json(SCORE, card)
    return row


def note_found(number):
    """Found, unless its answer was read before. The clock starts at the first run of a fault."""
    row = noted(number)
    if "given_up" in row or "minutes" in row:
        return
    now = time.time()
    noted(number, minutes=round((now - row.get("began", now)) / 60, 1))
    if all("minutes" in noted(i) for i in range(1, len(FAULTS) + 1)):
        print_score()


def print_score():
    print(f"\n{'fault':>5}{'found':>12}{'minutes':>9}{'hints':>7}{'guesses':>9}")
    rows = {i: noted(i) for i in range(1, len(FAULTS) + 1)}
    for i, row in rows.items():
        words = "answer read" if "given_up" in row else "yes" if "minutes" in row else "-"
        print(f"{i:5}{words:>12}{row.get('minutes', '-'):>9}{row['hints']:>7}{row['guesses']:>9}")
    found = [row for row in rows.values() if "minutes" in row]
    minutes, hints = (sum(row[name] for row in found) for name in ("minutes", "hints"))
    print(f"{len(found)} of {len(rows)} found in {minutes:.0f} minutes, with {hints} hints. "
          f"Delete {SCORE} to start anew")


# ------------------------------------------------------------------------------------------------
# what is shown


def cell(x):
    return f"{'-':>11}" if x is None else f"{x:11.4g}"


def print_metrics(rows, healthy=()):
    """The metrics of the first, the middle and the last iteration; beside them those of a healthy
    run."""
    iterations = [rows[i]["iteration"] for i in (0, len(rows) // 2, -1)]
    runs = {"this run": rows, "a healthy run": healthy} if healthy else {"this run": rows}
    table = [{m["iteration"]: m for m in run}.get(it, {}) for run in runs.values()
             for it in iterations]
    print("\n" + " " * 40 + "".join(f"{title:>33}" for title in runs))
    print(f"{'metrics.jsonl, iteration':40}" + "".join(map(cell, iterations * len(runs))))
    for name in sorted(rows[-1].keys() - {"iteration"}):
        print(f"{name:40}" + "".join(cell(m.get(name)) for m in table))


def print_samples(rows):
    """The first rows of the first and of the last iteration."""
    names = [name for name in ("reward", "advantage", "influence", "weight") if name in rows[0]]
    for iteration in (rows[0]["iteration"], rows[-1]["iteration"]):
        print(f"\nsamples.jsonl, iteration {iteration}: {', '.join(names)}")
        here = [row for row in rows if row["iteration"] == iteration]
        for row in here[:NUM_SHOWN]:
            numbers = "".join(cell(row[name]) for name in names)
            print(f"{numbers}  {row['prompt']!r} -> {row['completion']!r}")


def show(number, flags, warnings):
    """The run of a fault, or of none (0). It ends with the run's own exit code."""
    fault = FAULTS[number - 1] if number else None
    if fault and "began" not in noted(number):
        noted(number, began=time.time())
    seen = run_with(fault, flags, warnings=warnings or not fault)
    causes = causes_in(seen.printed) if fault else []
    if causes:
        noted(number, causes=causes)
    if seen.metrics:
        print_metrics(seen.metrics, healthy_metrics(flags) if fault else ())
        print_samples(seen.samples)
    if causes and not warnings:
        print(f"\nheld back: what names the cause ({len(causes)}). --answer shows it")
    if seen.code:
        sys.exit(seen.code)


def print_list():
    for number, fault in enumerate(FAULTS, 1):
        print(f"{number:3}  {fault.complaint}")
    print("\npython -m extras.hunt 0 is a healthy run, python -m extras.hunt 1 one with the first "
          "fault; --help")


def lines_of(file, text):
    """The numbers of the lines that a text has in a file of the project."""
    with open(f"{ROOT}/{file}", encoding="utf-8") as f:
        before, found, _ = f.read().partition(text)
    first = before.count("\n") + 1
    return range(first, first + found.rstrip("\n").count("\n") + 1) if found else range(0)


def check_guess(number, guess):
    """Say whether the fault is in FILE:LINE. A neighbour, where a mistake has the same effect, is
    right too."""
    fault = FAULTS[number - 1]
    file, _, line = guess.rpartition(":")
    file = Path(file).as_posix()        # judge\rewards.py and ./loss.py, too
    if not line.isdigit() or not os.path.isfile(f"{ROOT}/{file}"):
        raise BadInput(f"--guess={guess}: must be FILE:LINE of the project, like loss.py:90")
    noted(number, guesses=noted(number)["guesses"] + 1)

    def is_near(place):
        lines = lines_of(*place)
        return file == place[0] and any(abs(int(line) - x) <= NEAR for x in lines)

    if is_near((fault.file, fault.old)):
        print("right: this is the line. --answer tells who had it")
        return note_found(number)
    if any(map(is_near, fault.neighbours)):
        print("right: a mistake here has the same effect. This time it is planted elsewhere: "
              "--answer shows where")
        return note_found(number)
    print("no, not there")


def print_answer(number):
    fault = FAULTS[number - 1]
    print(f"{fault.file} has\n")
    print("\n".join("    " + line for line in fault.new.splitlines() or ["(nothing)"]))
    print("\nwhere there should be\n")
    print("\n".join("    " + line for line in fault.old.splitlines()))
    print(f"\n{fault.why}\n\nWho had it: {fault.who}\n\nWhat gives it away: {fault.number}")
    print("\nIn these lines a mistake has the same effect on the policy, and counts as found:")
    for file, text in fault.neighbours:
        line = lines_of(file, text)[0]
        with open(f"{ROOT}/{file}", encoding="utf-8") as f:
            print(f"    {file}:{line}    {f.read().splitlines()[line - 1].strip()}")
    row = noted(number)
    causes = row.get("causes", ["nothing: it has not been run yet, or the run has no word for it"])
    print("\nThis would have told you:", *causes, sep="\n    ")
    if "minutes" not in row:
        noted(number, given_up=True)


# ------------------------------------------------------------------------------------------------
# is it healed?


def first_difference(found, expected):
    """The first metric that differs, as (iteration, name, value, expected); None if none does."""
    for m, e in zip(found, expected):
        for name in sorted(e.keys() - {"step_time"}):
            x = m.get(name)
            known = x is not None and e[name] is not None
            if x != e[name] and not (known and abs(x - e[name]) <= 1e-5 + 1e-3 * abs(e[name])):
                return m["iteration"], name, x, e[name]
    return None


def check_copy(folder, number, flags):
    """Say whether a copy is healed: whether its run has the numbers of a healthy one."""
    if not os.path.isfile(f"{folder}/grpo.py"):
        raise BadInput(f"--check={folder}: has no grpo.py; --copy=FOLDER makes such a copy")
    flags = [f"--max_iters={CHECKED}", *flags]
    expected = healthy_metrics(flags)
    found = run_copy(os.path.abspath(folder), flags, quiet=True)
    if len(found.metrics) < len(expected):
        raise SystemExit(f"not healed: the run ends early: {last_line(found)}")
    differs = first_difference(found.metrics, expected)
    if differs:
        iteration, name, x, e = differs
        raise SystemExit(f"not healed: in iteration {iteration} {name} is {x}, in a healthy run it "
                         f"is {e}")
    print(f"healed: {len(expected)} iterations have the numbers of a healthy run")
    note_found(number)


# ------------------------------------------------------------------------------------------------
# are they told apart?


def print_table(seeds, flags):
    """Each fault's sign in its own run, in a healthy one, and in those of the others. Exit code 1
    where a sign is not that of its fault alone."""
    wrong = []
    for seed in seeds:
        more = [*flags, f"--seed={seed}"]
        healthy = {influence: run_with(None, [*influence, *more], quiet=True)
                   for influence in ((), INFLUENCE)}
        runs = [run_with(fault, [*fault.flags, *more], quiet=True) for fault in FAULTS]
        for number, fault in enumerate(FAULTS, 1):
            value, is_shown = fault.sign(runs[number - 1])
            usual, is_usual = fault.sign(healthy[fault.flags])
            others = [i for i, seen in enumerate(runs, 1) if i != number and fault.sign(seen)[1]]
            if others or is_usual or not is_shown:
                wrong.append((seed, number))
            print(f"seed {seed}  fault {number:2}  {fault.sign.__name__:24}{value:12.5g}"
                  f"  healthy{usual:12.5g}  also in {others or 'no other'}", flush=True)
    if wrong:
        raise SystemExit(f"not told apart (seed, fault): {wrong}")
    print("each is told apart from the others and from a healthy run")


def main(argv):
    own, rest = own_flags(argv, dict(hint=False, answer=False, influence=False, copy="", check="",
                                     table=0, first_seed=1, guess="", score=False,
                                     warnings=False))
    flags = [arg for arg in rest if arg.startswith("--")]
    numbers = [arg for arg in rest if not arg.startswith("--")]
    if own["table"]:
        first = own["first_seed"]
        return print_table(range(first, first + own["table"]), flags)
    if own["score"]:
        return print_score()
    if not numbers:
        return print_list()
    if len(numbers) > 1 or numbers[0] not in map(str, range(len(FAULTS) + 1)):
        raise BadInput(f"{' '.join(numbers)}: must be one number, 0 to {len(FAULTS)}; "
                       "python -m extras.hunt lists them")
    if numbers == ["0"]:
        if own["hint"] or own["answer"] or own["copy"] or own["check"] or own["guess"]:
            raise BadInput("0 is the healthy run: there is nothing to find")
        return show(0, [*INFLUENCE, *flags] if own["influence"] else flags, True)
    number = int(numbers[0])
    fault = FAULTS[number - 1]
    flags = [*fault.flags, *flags]
    if own["hint"]:
        noted(number, hints=1)
        print(f"look at: {fault.place}")
    elif own["guess"]:
        check_guess(number, own["guess"])
    elif own["answer"]:
        print_answer(number)
    elif own["copy"]:
        if os.path.lexists(own["copy"]):
            raise BadInput(f"--copy={own['copy']}: is there already: name a new folder")
        write_copy(own["copy"], fault)
        print(f"{own['copy']}: the project with fault {number}. Edit it, then "
              f"python -m extras.hunt {number} --check={own['copy']}")
    elif own["check"]:
        check_copy(own["check"], number, flags)
    else:
        show(number, flags, own["warnings"])


if __name__ == "__main__":
    run_script(main)
