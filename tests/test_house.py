"""What keeps the house readable, checked on the source itself."""
import ast
import os
from collections import Counter

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONAL = {"datasets", "gguf", "huggingface_hub", "jinja2", "matplotlib", "profanity_check",
            "safetensors", "tokenizers", "transformers", "trl", "wandb"}
ROOMS = ("", "config", "data", "environment", "hub", "judge", "run", "study", "tasks")


def module_name(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


PATHS = sorted(os.path.join(room, name) for room in ROOMS
               for name in os.listdir(os.path.join(ROOT, room)) if name.endswith(".py"))
TEXTS = {path: open(os.path.join(ROOT, path), encoding="utf-8").read() for path in PATHS}
TREES = {module_name(path): ast.parse(text) for path, text in TEXTS.items()}
FUNCTIONS = {module: [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
             for module, tree in TREES.items()}


def imports(tree):
    """(node, module name) of every import below a node."""
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            yield n, n.module
            yield from ((n, f"{n.module}.{alias.name}") for alias in n.names)
        elif isinstance(n, ast.Import):
            yield from ((n, alias.name) for alias in n.names)


NEEDS = {module: {name for _, name in imports(tree)} & TREES.keys() - {module}
         for module, tree in TREES.items()}


def test_imports_run_in_no_circle():
    left = {module: set(needs) for module, needs in NEEDS.items()}
    while ready := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"these files import each other in a circle: {sorted(left)}"


@pytest.mark.parametrize("module", ["critic", "model", "sample", "tracin"])
def test_the_method_can_be_copied_out(module):
    needs = NEEDS[module]
    assert not needs, (
        f"{module}.py imports {needs} of the project, so it cannot be copied out alone")


def test_run_imports_nothing_of_the_rooms_above_it():
    below = ("run", "critic", "model", "sample", "tracin", "config")
    for module in (m for m in TREES if m.split(".")[0] == "run"):
        above = {m for m in NEEDS[module] if m.split(".")[0] not in below}
        assert not above, f"{module} imports {above}: run/ is for what any run needs"


def test_grpo_takes_from_run_only_what_the_loop_names():
    known = {f"run.{name}" for name in (
        "debug", "device", "loop", "metrics", "processes", "prove", "report", "script",
        "selfcheck", "size")}
    new = {m for m in NEEDS["grpo"] if m.startswith("run.")} - known
    assert not new, f"grpo.py imports {new}: does a reader of GRPO have to know it?"


@pytest.mark.parametrize("module", sorted(TREES))
def test_a_file_reads_easily(module):
    path = next(p for p in PATHS if module_name(p) == module)
    for f in FUNCTIONS[module]:
        length = f.end_lineno - f.lineno + 1
        assert length <= 60, f"{path}: {f.name} has {length} lines: give a part of it a name"
        for _, name in (x for statement in f.body for x in imports(statement)):
            package = name.split(".")[0]
            assert package in OPTIONAL, f"{path}: {f.name} imports {name}: that goes to the top"
    mocks = [name for _, name in imports(TREES[module]) if "mock" in name]
    assert not mocks, f"{path} imports a mock: mocks are for tests"


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_lines_have_at_most_100_columns(folder):
    for name in sorted(os.listdir(os.path.join(ROOT, folder))):
        if name.endswith(".py"):
            with open(os.path.join(ROOT, folder, name), encoding="utf-8") as f:
                wide = [i for i, line in enumerate(f, 1) if len(line.rstrip("\n")) > 100]
            assert not wide, f"{folder}/{name}: lines {wide} are wider than 100 columns"


def test_a_name_means_one_thing():
    names = Counter(n.name for tree in TREES.values() for n in tree.body
                    if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
    # of every command, of every config
    everywhere = {"main", "reward", "environment", "texts", "questions", "weigh", "wrong"}
    twice = {name for name, count in names.items() if count > 1} - everywhere
    assert not twice, f"functions or classes of these names stand in two files: {sorted(twice)}"
