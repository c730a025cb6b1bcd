"""Lists of messages as a chat model reads them: in its chat template.

A message is {"role": "user", "content": "Hello"}. A published chat model comes with a template, a
small program of jinja2 that writes the messages with the model's own marks between them. It runs
in jinja2's sandbox.
"""
import datetime
import functools
import json

from jinja2.sandbox import ImmutableSandboxedEnvironment

from extras.hub.files import one_line
from common.script import BadInput, shown


def write_chat(template, names, messages, where):
    """Write a list of messages as the chat template does, up to where the policy's answer begins ->
    (the last thing that the user says, the whole text). names: {"eos_token": text, ...}, which a
    template may ask for. where: names the prompt in a BadInput."""
    if not messages:
        raise BadInput(f"{where}: the list of messages is empty")
    read = [read_message(message, f"{where}: message {number}")
            for number, message in enumerate(messages, 1)]
    said = [message["content"] for message in read if message["role"] == "user"]
    # a template may divide by zero, or raise whatever it likes
    with one_line(f"{where}: the chat template refuses the messages", "change them"):
        text = compile_template(template).render(
            messages=read, add_generation_prompt=True, **names)
    return said[-1] if said else read[-1]["content"], text


def read_message(message, where):
    """Return a message as a template may read it, without fields that are None."""
    match message:
        case {"role": str(), "content": str()}:
            return {name: x for name, x in message.items() if x is not None}
    raise BadInput(f'{where} is {shown(message)}: must be {{"role": ..., "content": ...}}, both '
                   "texts")


@functools.cache
def compile_template(text):
    """Compile a chat template in the environment that transformers gives one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # jinja2's own filter of this name escapes < and >, which models do not read
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    return environment.from_string(text)


def raise_exception(message):
    raise ValueError(message)
