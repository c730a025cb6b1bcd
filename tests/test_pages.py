"""
What README.md and the pages promise, mechanically: commands parse, files and settings that are
named are there, links lead to headings, examples run. Not what they say.
"""
import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import ROOT
from run.settings import PARTS, load_settings

ROOT = Path(ROOT)
PAGES = sorted(str(path.relative_to(ROOT)) for path in [
    ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("extras/*/README.md")])
OF_NOW = [path for path in PAGES if path != "docs/results.md"]
# files of a run, and of the user; of a published model, and of those who read along
NOT_OURS = re.compile(
    r"mine|my_|RUN|HOST|NAME|FILE|CONFIG|^out\b|^ckpt|^config\.(json|py)$|^(tokenizer|vocab|merges)"
    r"|\.(jsonl|csv|txt|html|json|gguf|safetensors|jinja|png)$|/home|~|\*|\.\.\.")
MODULES = ("pytest", "venv", "pip", "torch")


def page_of(path):
    return (ROOT / path).read_text(encoding="utf-8")


def blocks(text, language):
    """The code blocks of a page in a language; "": those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if re.fullmatch(language, name)]


def source_files():
    return [path for path in ROOT.rglob("*.py") if not {".venv", "out"} & set(path.parts)]


SOURCE = {path: path.read_text(encoding="utf-8") for path in source_files()}


def flags_of_commands():
    """Flags that commands have beside the settings: the keys of what own_flags is given."""
    names = set()
    for text in SOURCE.values():
        if "own_flags" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
                names |= {keyword.arg for keyword in node.keywords}
            if isinstance(node, ast.Dict):
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return names


FLAGS = {"help", *PARTS, *flags_of_commands()}


def commands_of(text):
    """The commands in a page's blocks -> lists of words, without comments."""
    for block in blocks(text, "(?:bash|sh)?"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r"&&|\|\||;|\|", line):
                try:
                    words = shlex.split(command, comments=True)
                except ValueError:
                    continue    # what a command prints, with an apostrophe
                if words and words[0] in ("python", "python3", "torchrun", "uv"):
                    yield words


def script_of(words):
    """(the script of a command as a path or a module, its arguments)."""
    words = [word for word in words if word not in ("uv", "run", "python", "python3", "torchrun")]
    while words and words[0].startswith("--"):      # torchrun's own
        words = words[1:]
    return (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])


def is_gone(path):
    """Of an extra that was deleted."""
    parts = Path(path).parts
    return parts[:1] == ("extras",) and not (ROOT / "extras" / parts[1]).is_dir()


def an_extra_is_gone():
    """Whether a folder of extras/ that a page names was deleted: names in it are nowhere then."""
    folders = set(re.findall(r"\bextras/([a-z]+)/", " ".join(map(page_of, PAGES))))
    return any(is_gone(f"extras/{name}") for name in folders)


def faults_of(words):
    """What is wrong with a command, in words."""
    script, arguments = script_of(words)
    if is_gone(script.replace(".", "/")) or script.partition(".")[0] in MODULES:
        return
    module = ROOT / script.replace(".", "/")
    if not any(map(Path.exists, (ROOT / script, module / "__main__.py", Path(f"{module}.py")))):
        yield f"there is no {script}"
        return
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
            if name not in FLAGS:
                yield f"there is no flag --{name}"
        elif argument.endswith(".py") and not NOT_OURS.search(argument):
            if not is_gone(argument) and not (ROOT / argument).is_file():
                yield f"there is no {argument}"
    configs = [x for x in arguments if x.endswith(".py")]
    if script == "grpo.py" and configs and not any(map(NOT_OURS.search, configs)):
        if not any(map(is_gone, configs)):
            flags = [x for x in arguments if x.partition("=")[0][2:] in PARTS]
            load_settings([*(str(ROOT / x) for x in configs), *flags])


@pytest.mark.parametrize("path", OF_NOW)
def test_commands_can_be_typed(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = list(commands_of(page_of(path)))
    for words in commands:
        faults = list(faults_of(words))
        assert not faults, f"{path}: {' '.join(words)}: {', '.join(faults)}"
    if path == "README.md":
        assert len(commands) > 2, "README.md has no commands: are they no longer in code blocks?"


WORDS = set(re.findall(r"\w+", " ".join(SOURCE.values())))


def named(text):
    """What stands in backticks, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def is_there(path):
    """A file or folder, from the top or as the end of a path."""
    return (ROOT / path).exists() or any(str(p).endswith("/" + path) for p in SOURCE)


@pytest.mark.parametrize("path", [path for path in OF_NOW if path != "docs/trl.md"])
def test_what_is_named_is_there(path):
    """Files, flags, and names with an underscore, which are code, if only of an example."""
    shown = set(re.findall(r"\w+", " ".join(blocks(page_of(path), "(?:python|diff)"))))
    for text in named(page_of(path)):
        flags = re.findall(r"(?<![\w-])--(\w+)", text) if re.match("--|python", text) else ()
        for flag in flags:
            assert flag in FLAGS | shown, f"{path}: there is no flag {text}"
        if re.fullmatch(r"[\w./-]+\.(py|md)|[\w.-]+/", text) and not NOT_OURS.search(text):
            assert is_gone(text) or is_there(text.rstrip("/")) or (
                (ROOT / path).parent / text).exists(), f"{path}: there is no file {text}"
        elif match := re.fullmatch(r"([a-z]\w*_\w+)( = .*|=.*|\(.*)?", text):
            assert match[1] in WORDS | shown or an_extra_is_gone(), (
                f"{path}: no code has the name {match[1]}")


def heading_ids(text):
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_to_a_heading(path):
    for link, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page_of(path)):
        target = (ROOT / path).parent / link if link else ROOT / path
        if link.startswith("http") or target.suffix != ".md" or not target.exists():
            continue
        assert heading in heading_ids(target.read_text(encoding="utf-8")), (
            f"{path}: {link}#{heading}: there is no such heading")


def examples():
    """Python of README.md, and what shows tape.py, wherever it stands."""
    for path in PAGES:
        for block in blocks(page_of(path), "python"):
            if path == "README.md" or re.search("^from tape import", block, re.MULTILINE):
                yield path, block


@pytest.mark.parametrize("path, block", list(examples()))
def test_an_example_runs_alone(path, block, tmp_path):
    """Beside the files at the top that it imports, as one who copies them out has it."""
    for module in re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE):
        if (ROOT / f"{module}.py").exists():
            shutil.copy(ROOT / f"{module}.py", tmp_path)
    (tmp_path / "example.py").write_text(block)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, f"{path}: {done.stderr}"


def test_tape_is_shown_by_an_example():
    assert any("from tape import" in block for _, block in examples())
