"""What keeps the house readable, checked on the source itself."""
import ast
import os
from collections import Counter

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONAL = {"datasets", "gguf", "huggingface_hub", "matplotlib", "profanity_check", "safetensors", "tokenizers",
            "transformers", "trl", "wandb"}
ROOMS = ("", "config", "data", "hub", "judge", "run")


def module_name(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


PATHS = sorted(os.path.join(room, name) for room in ROOMS for name in os.listdir(os.path.join(ROOT, room)) if name.endswith(".py"))
TEXTS = {path: open(os.path.join(ROOT, path), encoding="utf-8").read() for path in PATHS}
TREES = {module_name(path): ast.parse(text) for path, text in TEXTS.items()}
FUNCTIONS = {module: [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] for module, tree in TREES.items()}


def imports(tree):
    """(node, module name) of every import below a node."""
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            yield n, n.module
            yield from ((n, f"{n.module}.{alias.name}") for alias in n.names)
        elif isinstance(n, ast.Import):
            yield from ((n, alias.name) for alias in n.names)


NEEDS = {module: {name for _, name in imports(tree)} & TREES.keys() - {module} for module, tree in TREES.items()}


def test_imports_run_in_no_circle():
    left = {module: set(needs) for module, needs in NEEDS.items()}
    while ready := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"these files import each other in a circle: {sorted(left)}"


@pytest.mark.parametrize("module, allowed", [("model", set()), ("sample", set()), ("tracin", set())])
def test_the_method_can_be_copied_out(module, allowed):
    assert NEEDS[module] <= allowed, f"{module}.py imports {NEEDS[module] - allowed} of the project, so it cannot be copied out alone"


def test_run_does_not_know_the_method():
    for module in (m for m in TREES if m.split(".")[0] == "run"):
        above = {m for m in NEEDS[module] if m.split(".")[0] not in ("run", "model", "sample", "tracin", "config")}
        assert not above, f"{module} imports {above}: run/ is for what any run needs, arrows into it point one way"


@pytest.mark.parametrize("module", sorted(TREES))
def test_a_file_reads_easily(module):
    path = next(p for p in PATHS if module_name(p) == module)
    wide = [i for i, line in enumerate(TEXTS[path].splitlines(), 1) if len(line) > 100]
    assert not wide, f"{path}: lines {wide} are wider than 100 columns"
    for f in FUNCTIONS[module]:
        length = f.end_lineno - f.lineno + 1
        assert length <= 60, f"{path}: {f.name} has {length} lines, more than 60: give a part of it a name"
        for _, name in (x for statement in f.body for x in imports(statement)):
            assert name.split(".")[0] in OPTIONAL, f"{path}: {f.name} imports {name} inside; imports stand at the top"
    assert not any("mock" in name for _, name in imports(TREES[module])), f"{path} imports a mock: mocks are for tests"


def test_a_name_means_one_thing():
    names = Counter(n.name for tree in TREES.values() for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)))
    twice = {name for name, count in names.items() if count > 1} - {"main", "reward"}  # every command's, every config's
    assert not twice, f"functions or classes of these names stand in two files: {sorted(twice)}"
