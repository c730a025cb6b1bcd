"""
The rules of the house: who imports whom, what stands above what, how wide and how long. How much
there is is printed, and breaks no rule. CI calls this after the tests; pytest knows nothing of it.

    python .ci/house.py [CHECKOUT]      # exit code 1: a rule is broken
"""
import ast
import io
import re
import signal
import subprocess
import sys
import tokenize
from pathlib import Path

COLUMNS = {".py": 100, ".md": 120}
WIDE = ("|", "![", "$$", "python3 -m venv")     # lines of a page that may be wider
LINES = 50      # of a function
PAGES = ("nano.py", "nano_tracin.py")     # each the method on one page
METHOD = ("grpo.py", "loss.py", "tracin.py", "tape.py", "rollout.py", "model.py")
# a room imports at its top what is to its right; the last two import nothing of the project
ROOMS = ("docs", "extras", "sample.py", "evaluate.py", "grpo.py", "plot.py",
         "run", "tracin.py", "loss.py", "nano.py", "nano_tracin.py", "judge",
         "config", "data", "common", "model.py", "rollout.py", "fast.py", "tape.py")
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.STRING)
FSTRING = [getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END")]


def token_count(text):
    """Tokens without comments and strings. From Python 3.12 on an f-string is many; not here."""
    count = inside = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in FSTRING:
            inside += 1 if token.type == FSTRING[0] else -1
        elif not inside and token.type not in NOT_CODE:
            count += 1
    return count


def sums_of(pages, code, tests):
    """{what is counted: number}, to look at. Arguments: {path: text}."""
    tokens = {path: token_count(text) for path, text in code.items()}
    core = {path: n for path, n in tokens.items() if not path.startswith("extras/")}
    docs = [text for path, text in pages.items() if path.startswith(("docs/", "extras/"))]
    settings = code["run/settings.py"].split("class Settings")[1].split("    # beside the settings")[0]
    return {
        "tokens of the method": sum(core.get(path, 0) for path in METHOD),
        "tokens without extras and tests": sum(core.values()),
        "tokens without tests": sum(tokens.values()),
        "tokens of tests": sum(map(token_count, tests.values())),
        "settings": len(re.findall(r"^    [a-z_0-9]+: .*=", settings, re.MULTILINE)),
        "characters of README.md": len(pages["README.md"]),
        "bytes of docs and of the extras' pages": sum(len(text.encode()) for text in docs)}


def text_faults(path, text, top):
    """Wide lines, but for rows of tables and pictures; links that lead nowhere."""
    most = COLUMNS[path[-3:]]
    for i, line in enumerate(text.split("\n"), 1):
        if len(line) > most and not (path.endswith(".md") and line.startswith(WIDE)):
            yield f"{path}:{i}: {len(line)} columns: at most {most}"
    for target in re.findall(r"\]\(([^)#]+)", text) if path.endswith(".md") else ():
        if not target.startswith("http") and not (top / path).parent.joinpath(target).exists():
            yield f"{path}: links to {target}, which is not there"


def downward(path, tree):
    """References to a definition that stands further down: a reader would have to turn back."""
    line = {}
    for n in tree.body:
        targets = getattr(n, "targets", [getattr(n, "target", None)])
        names = [n.name] if isinstance(n, (ast.FunctionDef, ast.ClassDef)) else [
            target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            line.setdefault(name, n.lineno)
    for definition in tree.body:
        if not isinstance(definition, (ast.FunctionDef, ast.ClassDef)):
            continue
        arguments = {x.arg for x in ast.walk(definition) if isinstance(x, ast.arg)}
        for n in ast.walk(definition):
            if not isinstance(n, ast.Name) or n.id in arguments:
                continue
            if line.get(n.id, 0) > definition.end_lineno:
                yield f"{path}:{n.lineno}: {definition.name} uses {n.id}, which stands further down"


def above(other, path):
    """Whether a file is of a room that the other's must not import."""
    places = {room: i for i, room in enumerate(ROOMS)}
    a = places.get(other.split("/")[0])
    b = places.get(path.split("/")[0])
    return None not in (a, b) and a != b and (a < b or path in ROOMS[-2:])


def code_faults(path, tree, modules, needs):
    """Imports upwards, modules as arguments, long functions. Add what is imported to needs."""
    main = [n for n in tree.body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)]
    skipped = {n for statement in main for n in ast.walk(statement)}
    held = set()        # names of modules
    for n in ast.walk(tree):
        if n in skipped or not isinstance(n, (ast.Import, ast.ImportFrom)):
            continue
        for alias in n.names:
            full = alias.name if isinstance(n, ast.Import) else f"{n.module}.{alias.name}"
            found = modules.get(full) or modules.get(getattr(n, "module", None), path)
            needs[path] |= {found} - {path}
            held |= {alias.asname or alias.name} if full in modules else set()
            if n in tree.body and above(found, path):
                yield f"{path}:{n.lineno}: imports {found}, which is above it"
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef) and n.end_lineno - n.lineno >= LINES:
            yield f"{path}:{n.lineno}: {n.name} has {n.end_lineno - n.lineno + 1} lines"
        if isinstance(n, ast.Call):
            given = [*n.args, *(keyword.value for keyword in n.keywords)]
            names = held & {x.id for x in given if isinstance(x, ast.Name)}
            yield from (f"{path}:{n.lineno}: hands over the module {name}" for name in names)
        if isinstance(n, ast.Subscript) and ast.unparse(n) == "sys.modules[__name__]":
            yield f"{path}:{n.lineno}: hands over itself"


def circle(needs):
    """Those that import each other, and what is between two such circles."""
    left = set(needs)
    while True:
        needed = {other for path in left for other in needs[path]}
        kept = {path for path in left & needed if needs[path] & left}
        if kept == left:
            return sorted(left)
        left = kept


def main(top):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=top, capture_output=True, text=True, check=True)
    files = {path: (top / path).read_text(encoding="utf-8") for path in listed.stdout.split()
             if (top / path).is_file() and not path.startswith(".ci/")}
    pages = {path: text for path, text in files.items() if path.endswith(".md")}
    tests = {path: text for path, text in files.items() if "tests" in path.split("/")[:-1]}
    code = {path: files[path] for path in sorted(files.keys() - pages.keys() - tests.keys())}
    faults = []
    for name, count in sums_of(pages, code, tests).items():
        print(f"{name}: {count}")
    for path, text in files.items():
        faults += text_faults(path, text, top)
    modules = {path[:-3].removesuffix("/__init__").replace("/", "."): path for path in code}
    needs = {path: set() for path in code}
    for path in code:
        tree = ast.parse(code[path])
        faults += code_faults(path, tree, modules, needs)
        faults += downward(path, tree) if path in (*METHOD, *PAGES) else ()
    rooms = {}
    for path, others in needs.items():
        # nobody imports a command: __main__.py is no part of the room that others import
        room, *others = (x.split("/") if x.endswith("__main__.py") else
                         x.split("/")[:1 + x.startswith("extras/")] for x in (path, *others))
        rooms.setdefault("/".join(room), set()).update("/".join(x) for x in others if x != room)
    for kind, graph in (("files", needs), ("rooms", rooms)):
        if found := circle(graph):
            faults.append(f"these {kind} import each other in a circle: {', '.join(found)}")
    faults = list(dict.fromkeys(faults))
    print(*faults, f"{len(faults)} rules broken", sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # `house.py | head` ends without a traceback
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
