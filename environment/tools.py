"""Tools that a policy calls in its text, NAME(ARGUMENT):

    What is 347*86? calc(347*86) = 29842. It is 29842.

A config file's table `tools = {"calc": calc}` is all there is to say. From it come the environment
that answers, the list that a prompt shows, and the check that the prompts name no other tool. A
tool takes the argument's text and returns what is put behind the call. Everything here is a pure
function of texts and the table.
"""
import inspect
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


def answer_call(name, argument, tools):
    """What is put behind a call: " = " and the tool's result, or " error: " and the reason."""
    if name not in tools:
        return one_line(ERROR, f"no tool {name!r}; there is {', '.join(tools)}")
    try:
        result = tools[name](argument)
        return one_line(ANSWER, result)
    except (Exception, SystemExit) as e:    # the policy's doing, which it sees and may mend
        return one_line(ERROR, str(e) or type(e).__name__)


def one_line(opening, result):
    """An answer on one line, cut after LONGEST characters. It holds no call, which nobody made:
    f(3) in it becomes f (3)."""
    text = PARTS.sub(lambda part: f"{part[1]} (" if part[1] else part[0], str(result))
    return opening + " ".join(text.split())[:LONGEST]


def reply(transcript, tools):
    """What the environment adds to a completion that reached STOP or its end.

    The answer of the last call, if no word stands behind it; "" where there is nothing to answer.
    """
    calls = find_calls(transcript)
    if not calls:
        return ""
    last = calls[-1]
    behind = transcript[last.end:]
    if re.search(r"\w", behind) or ANSWERED.match(behind):
        return ""
    return answer_call(last.name, transcript[last.start:last.end - 1], tools)


def tool_environment(tools):
    """The environment of a config file with this table."""
    def environment(prompts, transcripts):
        return [reply(transcript, tools) for transcript in transcripts]
    return environment


def call_metrics(completions):
    """TRL's metrics: calls per completion that were answered, and the share that failed.

    They are read from the texts: behind a call that was answered stands its answer.
    """
    answers = []
    for text in completions:
        behind = [ANSWERED.match(text, call.end) for call in find_calls(text)]
        answers += [match[1] for match in behind if match]
    return {
        "tools/call_frequency": len(answers) / max(1, len(completions)),
        "tools/failure_frequency": answers.count(ERROR) / max(1, len(answers))}


# ------------------------------------------------------------------------------------------------
# the prompts


def list_tools(tools):
    """The list that a prompt shows: a line for each tool, its call and the start of its docstring.
    """
    lines = []
    for name, tool in tools.items():
        about = (inspect.getdoc(tool) or "").partition("\n")[0]
        lines.append(f"{name}({parameter_of(tool)}): {about}".removesuffix(": "))
    return "\n".join(lines)


def parameter_of(tool):
    """The name of a tool's argument, as its def has it; "text" for one that tells none."""
    try:
        return next(iter(inspect.signature(tool).parameters), "text")
    except (TypeError, ValueError):     # some functions written in C
        return "text"


def check_tools(tools):
    """BadInput for a table of which no call could be answered."""
    if not isinstance(tools, dict):
        raise BadInput(f"tools = {shown(tools)}: must be a dict of functions by name")
    for name, tool in tools.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadInput(f"tools: the name {shown(name)} must be a word, as in calc(12*7)")
        if not callable(tool):
            raise BadInput(f"tools[{name!r}] = {shown(tool)}: must be a function of one text")


def check_prompts_name(tools, prompts):
    """BadInput where a text of `prompts` shows a call of a tool that the table lacks."""
    for text in prompts:
        for call in find_calls(text):
            if call.name not in tools:
                raise BadInput(
                    f"the prompt {shown(text)} shows a tool {call.name!r}, and tools has "
                    f"{', '.join(map(repr, tools))}: one of the two is misspelt, or the text is no "
                    "call and needs an environment of your own (docs/tools.md)")
