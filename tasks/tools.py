"""
Tools that a policy calls in its text, NAME(ARGUMENT):

    What is 347*86? calc(347*86) = 29842. It is 29842.

A config file only needs the table `tools = {"calc": calc}`. The environment that answers is made
from it, and so is the list that a prompt shows. A tool takes the argument's text and returns what
is put behind the call. Everything here is a pure function of texts and the table.
"""
import ast
import inspect
import operator
import re
from typing import NamedTuple

from run.script import BadInput, shown

STOP = ")"              # where a call ends, and sampling waits for the answer
ANSWER = " = "
ERROR = " error: "
LONGEST = 200           # characters of an answer
# a word and its bracket, or a bracket alone. \b: a long word is read once, not from every letter
PARTS = re.compile(r"\b([^\W\d]\w*)\(|[()]")
# behind a call that was answered. A token may hold more than the bracket: calc(12*7). = 84
ANSWERED = re.compile(rf"\W*?({ANSWER}|{ERROR})")


class Call(NamedTuple):
    name: str
    start: int          # where the argument begins, which may hold brackets in pairs
    end: int            # where the text behind the call begins


def find_calls(text):
    """Every NAME(ARGUMENT) of a text, in the order in which they end."""
    found = []
    opened = []         # (name, start of the argument) of the brackets that are open
    for part in PARTS.finditer(text):
        if part[0] != ")":
            opened.append((part[1], part.end()))
        elif opened:
            name, start = opened.pop()
            if name:
                found.append(Call(name, start, part.end()))
    return found


def reply(transcript, tools):
    """What the environment adds to a completion that reached STOP or its end.

    The answer to the last call, if no word stands behind it. "" where there is nothing to answer.
    """
    calls = find_calls(transcript)
    if not calls:
        return ""
    last = calls[-1]
    behind = transcript[last.end:]
    if re.search(r"\w", behind) or ANSWERED.match(behind):
        return ""
    return answer_call(last.name, transcript[last.start:last.end - 1], tools)


def answer_call(name, argument, tools):
    """What is put behind a call: " = " and the tool's result, or " error: " and the reason."""
    if name not in tools:
        return one_line(ERROR, f"no tool {name!r}; there is {', '.join(tools)}")
    try:
        result = tools[name](argument)
        return one_line(ANSWER, result)
    except (Exception, SystemExit) as e:    # the policy sees its mistake and may mend it
        return one_line(ERROR, str(e) or type(e).__name__)


def one_line(opening, result):
    """An answer on one line, cut after LONGEST characters. An answer never holds a call: f(3) in
    it becomes f (3)."""
    text = PARTS.sub(lambda part: f"{part[1]} (" if part[1] else part[0], str(result))
    return opening + " ".join(text.split())[:LONGEST]


def tool_environment(tools):
    """The environment of a config file with this table."""
    def environment(prompts, transcripts):
        return [reply(transcript, tools) for transcript in transcripts]
    return environment


def call_metrics(completions):
    """TRL's metrics, read from the texts: answered calls per completion, and the share of these
    calls that failed."""
    answers = []
    for text in completions:
        behind = [ANSWERED.match(text, call.end) for call in find_calls(text)]
        answers += [match[1] for match in behind if match]
    return {
        "tools/call_frequency": len(answers) / max(1, len(completions)),
        "tools/failure_frequency": answers.count(ERROR) / max(1, len(answers))}


# ------------------------------------------------------------------------------------------------
# the table and the prompts


def list_tools(tools):
    """The list that a prompt shows: a line for each tool, its call and its docstring's first line.
    """
    lines = []
    for name, tool in tools.items():
        parameter = next(iter(inspect.signature(tool).parameters))
        about = (inspect.getdoc(tool) or "").partition("\n")[0]
        lines.append(f"{name}({parameter}): {about}".removesuffix(": "))
    return "\n".join(lines)


def check_tools(tools):
    """BadInput for a table with a call that could not be answered."""
    if not isinstance(tools, dict):
        raise BadInput(f"tools = {shown(tools)}: must be a dict of functions by name")
    for name, tool in tools.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadInput(f"tools: the name {shown(name)} must be a word, as in calc(12*7)")
        if not takes_one_text(tool):
            raise BadInput(f"tools[{name!r}] = {shown(tool)}: must be a function (def, not async "
                           "def) that can be called with one text")


def takes_one_text(tool):
    """Tell whether tool("text") is a call that returns an answer."""
    try:
        inspect.signature(tool).bind("text")
    except (TypeError, ValueError):     # of no function, or of one in C that tells no parameters
        return False
    return not inspect.iscoroutinefunction(tool)


def check_prompts_name(tools, prompts):
    """BadInput where a prompt shows a call of a tool that the table lacks."""
    for text in prompts:
        for call in find_calls(text):
            if call.name not in tools:
                raise BadInput(
                    f"the prompt {shown(text)} shows a tool {call.name!r}, and tools has "
                    f"{', '.join(map(repr, tools))}: mend the name, or, if the text is no call, "
                    "write an environment of your own (docs/tasks.md)")


# ------------------------------------------------------------------------------------------------
# a tool: arithmetic, which is read and never run as Python

OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos}


def calc(expression):
    """Compute an expression of numbers, + - * / and brackets."""
    if not re.fullmatch(r"[0-9.+*/() -]{1,100}", expression):
        raise ValueError("only numbers, + - * / and brackets, at most 100 characters")
    try:
        value = value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, KeyError):     # KeyError: ** or //
        raise ValueError("not an expression") from None
    return value if isinstance(value, int) else f"{value:.10g}"


def value_of(node):
    """The number that a node of the expression's tree stands for."""
    if isinstance(node, ast.UnaryOp):
        return OPERATIONS[type(node.op)](value_of(node.operand))
    if isinstance(node, ast.BinOp):
        left = value_of(node.left)
        return OPERATIONS[type(node.op)](left, value_of(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    raise SyntaxError
