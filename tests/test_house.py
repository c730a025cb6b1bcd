"""The rules of the house, checked on the source itself: how much there is, who imports whom."""
import ast
import io
import os
import subprocess
import tokenize

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OPTIONAL = {"datasets", "gguf", "huggingface_hub", "jinja2", "matplotlib", "safetensors",
            "tokenizers", "transformers", "trl", "wandb"}
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.STRING, tokenize.ENCODING, tokenize.ENDMARKER}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def files(ending):
    """Paths of the project's files: those that git tracks or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"*{ending}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split("\n")
            if path and os.path.exists(os.path.join(ROOT, path))]


PATHS = files(".py")
CODE = [path for path in PATHS if not path.startswith("tests/")]
TREES = {path: ast.parse(read(path)) for path in CODE}


def tokens(path):
    """Tokens of Python code, without comments and strings."""
    found = tokenize.generate_tokens(io.StringIO(read(path)).readline)
    return sum(token.type not in NOT_CODE for token in found)


def lines(paths):
    return sum(read(path).count("\n") for path in paths)


def imports(tree):
    """(node, module name) of every import below a node."""
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            yield n, n.module
            yield from ((n, f"{n.module}.{alias.name}") for alias in n.names)
        elif isinstance(n, ast.Import):
            yield from ((n, alias.name) for alias in n.names)


def module_of(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path) for path in CODE}
NEEDS = {module_of(path): {name for _, name in imports(tree)} & MODULES - {module_of(path)}
         for path, tree in TREES.items()}


def test_there_is_little_to_carry():
    docs = sum(len(read(path).encode()) for path in files(".md") if path.startswith("docs/"))
    tests = [path for path in PATHS if path.startswith("tests/")]
    room_run = [path for path in CODE if path.startswith("run/")]
    caps = {
        "lines of Python without tests": (lines(CODE), 9_500),
        "tokens of Python without tests": (sum(map(tokens, CODE)), 62_000),
        "lines of tests": (lines(tests), 8_000),
        "lines of run/": (lines(room_run), 2_200),
        "files of run/": (len(room_run), 14),
        "Python files at the top level": (sum("/" not in path for path in CODE), 12),
        "tokens of grpo.py": (tokens("grpo.py"), 4_000),
        "tokens of tracin.py": (tokens("tracin.py"), 4_000),
        "tokens of model.py": (tokens("model.py"), 3_300),
        "characters of README.md": (len(read("README.md")), 9_000),
        "bytes of docs": (docs, 55_000)}
    print("".join(f"\n{name}: {count} (at most {cap})" for name, (count, cap) in caps.items()))
    over = {name: count for name, (count, cap) in caps.items() if count > cap}
    assert not over, f"more than the house allows: {over}; what can go?"


def test_imports_run_in_no_circle():
    left = {module: set(needs) for module, needs in NEEDS.items()}
    while ready := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"these files import each other in a circle: {sorted(left)}"


@pytest.mark.parametrize("module, known", [
    ("model", set()), ("tracin", set()), ("critic", set()), ("sample", {"model"})])
def test_the_method_can_be_copied_out(module, known):
    needs = NEEDS[module] - known
    assert not needs, f"{module}.py imports {needs}, so it cannot be copied out"


def test_a_file_reads_easily():
    for path, tree in TREES.items():
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for f in functions:
            length = f.end_lineno - f.lineno + 1
            assert length <= 50, f"{path}: {f.name} has {length} lines: give a part of it a name"
        for f in functions:
            for _, name in (x for statement in f.body for x in imports(statement)):
                assert name.split(".")[0] in OPTIONAL, (
                    f"{path}: {f.name} imports {name}: that goes to the top")


def test_lines_have_at_most_100_columns():
    for path in PATHS:
        wide = [i for i, line in enumerate(read(path).split("\n"), 1) if len(line) > 100]
        assert not wide, f"{path}: lines {wide} are wider than 100 columns"


def test_links_of_the_pages_lead_somewhere():
    for path in files(".md"):
        for piece in read(path).split("](")[1:]:
            target = piece.split(")")[0].split("#")[0]
            if target and not target.startswith("http"):
                found = os.path.join(ROOT, os.path.dirname(path), target)
                assert os.path.exists(found), f"{path} links to {target}, which is not there"
