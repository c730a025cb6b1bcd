"""Lists of messages as a chat model reads them: in its chat template.

A message is {"role": "user", "content": "Hello"}. A published chat model comes with a template, a
small program of jinja2 that writes the messages with the model's own marks between them. It runs
in jinja2's sandbox.
"""
import datetime
import functools
import json

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import BadInput, shown

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "       # marks where an unfinished answer goes on


def write_chat(template, names, messages, where):
    """Write a list of messages as the chat template does, up to where the policy's answer begins ->
    (the user's last message, the whole text). If the last message is the assistant's, it is the
    beginning of the policy's answer.

    names: {"eos_token": text, ...}, and other variables of the template. where: names the prompt in
    a BadInput.
    """
    read = [read_message(message, f"{where}: message {number}")
            for number, message in enumerate(messages, 1)]
    said = [message["content"] for message in read if message["role"] == "user"]
    said = said[-1] if said else read[-1]["content"]
    goes_on = read[-1]["role"] == "assistant"
    if goes_on:
        read[-1]["content"] += CONTINUED
    variables = {"tools": None, "documents": None} | names      # None unless somebody sets them
    text = compile_template(template).render(
        messages=read, add_generation_prompt=not goes_on, **variables)
    if goes_on:
        text = text_until_mark(text, where)
    return said, text


def text_until_mark(text, where):
    """Cut a rendered chat at the mark. The template may have stripped the mark's blank."""
    mark = CONTINUED.rstrip()
    if mark not in text:
        raise BadInput(f"{where}: the last message is the assistant's, which the policy would "
                       "continue, and the chat template leaves it out")
    start, _, rest = text.rpartition(mark)
    return start if rest.startswith(" ") else start.rstrip()


def read_message(message, where):
    """Check a message -> the message as a template reads it, without fields that are None."""
    match message:
        case {"role": str(), "content": str()}:
            return {name: x for name, x in message.items() if x is not None}
    raise BadInput(f'{where} is {shown(message)}: must be {{"role": ..., "content": ...}}, both '
                   "texts")


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks answers for training; here it writes its
    content."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller):
        return caller()


@functools.cache
def compile_template(text):
    """Compile a chat template in the same environment as transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    return environment.from_string(text)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON text. jinja2's own filter of this name escapes < and >, which models do not read."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_exception(message):
    raise ValueError(message)
