"""
Tools that a policy calls in its text, NAME(ARGUMENT):

    What is 347*86? calc(347*86) = 29842. It is 29842.

A config file only needs the table `tools = {"calc": calc}`. A tool takes the argument's text and
returns the answer to write after the call.
"""
import ast
import re
from typing import NamedTuple

from common.errors import BadInput, shown

STOP = ")"              # where a call ends, and sampling waits for the answer
ANSWER = " = "
ERROR = " error: "
# a word and its bracket, or a bracket alone. \b keeps a long word from being tried at every letter
PARTS = re.compile(r"\b([^\W\d]\w*)\(|[()]")
# what follows an answered call. A token may hold more than the bracket: calc(12*7). = 84
ANSWERED = re.compile(rf"\W*?({ANSWER}|{ERROR})")


class Call(NamedTuple):
    name: str
    start: int          # where the argument begins; it may hold brackets in pairs
    end: int            # where the text after the call begins


def find_calls(text):
    """Every NAME(ARGUMENT) of a text, in the order in which they end."""
    calls = []
    opened = []         # (name, start of the argument) of the brackets that are open
    for part in PARTS.finditer(text):
        if part[0] != ")":
            opened.append((part[1], part.end()))
        elif opened:
            name, start = opened.pop()
            if name:
                calls.append(Call(name, start, part.end()))
    return calls


def reply(transcript, tools):
    """The environment's answer to the last call of a completion that reached STOP or its end; "" if
    that call is answered already, if words follow it, or if there are no calls."""
    calls = find_calls(transcript)
    if not calls or re.search(r"[\w=]", transcript[calls[-1].end:]):
        return ""
    name, start, end = calls[-1]
    if name not in tools:
        return one_line(ERROR, f"no tool {name!r}; there is {', '.join(tools)}")
    try:
        return one_line(ANSWER, tools[name](transcript[start:end - 1]))
    except (Exception, SystemExit) as e:    # the policy sees its mistake and may correct it
        return one_line(ERROR, str(e) or type(e).__name__)


def one_line(opening, result):
    """An answer of 200 characters at most. It holds no call: f(3) becomes f (3)."""
    text = str(result).replace("(", " (")
    return opening + " ".join(text.split())[:200]


def answer_calls(tools, prompts, transcripts):
    """The environment of a config file with this table."""
    return [reply(transcript, tools) for transcript in transcripts]


def call_metrics(completions):
    """The use of tools, counted as in TRL -> {name: number}.

    Metrics:
        tools/call_frequency: answered calls per completion
        tools/failure_frequency: share of the answered calls that failed
    """
    answers = []
    for text in completions:
        behind = [ANSWERED.match(text, call.end) for call in find_calls(text)]
        answers += [match[1] for match in behind if match]
    return {
        "tools/call_frequency": len(answers) / max(1, len(completions)),
        "tools/failure_frequency": answers.count(ERROR) / max(1, len(answers))}


def check_prompts_name(tools, prompts):
    """BadInput where a prompt shows a call of a tool that the table lacks."""
    for text in prompts:
        for call in find_calls(text):
            if call.name not in tools:
                raise BadInput(f"the prompt {shown(text)} shows a tool {call.name!r}, and tools "
                               f"has {', '.join(map(repr, tools))}: correct the name")


# ------------------------------------------------------------------------------------------------
# a tool: arithmetic, and nothing else

ARITHMETIC = (ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult,
              ast.Div, ast.USub)


def calc(expression):
    """Compute an expression of numbers, + - * / and brackets."""
    if not re.fullmatch(r"[0-9.+*/() -]{1,100}", expression):
        raise ValueError("only numbers, + - * / and brackets, at most 100 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        if not all(isinstance(node, ARITHMETIC) for node in ast.walk(tree)):
            raise SyntaxError       # such as a power, which may take forever
    except SyntaxError:
        raise ValueError("not an expression") from None
    value = eval(compile(tree, "an expression", "eval"))
    return value if isinstance(value, int) else f"{value:.10g}"
