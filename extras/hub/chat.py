"""Lists of messages as a chat model reads them: in its chat template.

A message is {"role": "user", "content": "Hello"}. A published chat model comes with a template, a
small program of jinja2 that writes the messages with the model's own marks between them. It runs
in jinja2's sandbox.
"""
import datetime
import functools
import json

from common.script import BadInput, optional, shown


def encode_chat(tokenizer, messages, where):
    """Encode a list of messages -> (its text for rewards and logs, the last thing that the user
    says, its ids). where: names the prompt in a BadInput."""
    messages = read_messages(messages, where)
    said = [message["content"] for message in messages if message["role"] == "user"]
    text = said[-1] if said else messages[-1]["content"]
    rendered = render(tokenizer, messages, where)
    return text, tokenizer.encode_marked(rendered)


def read_messages(messages, where):
    """Return the messages as a template may read them, without fields that are None."""
    for number, message in enumerate(messages, 1):
        given = message if isinstance(message, dict) else {}
        if not all(isinstance(given.get(name), str) for name in ("role", "content")):
            raise BadInput(f"{where}: message {number} is {shown(message)}: must be "
                           '{"role": ..., "content": ...}, both texts')
    if not messages:
        raise BadInput(f"{where}: the list of messages is empty")
    return [{name: x for name, x in message.items() if x is not None} for message in messages]


def render(tokenizer, messages, where):
    """Write messages as the chat template does, up to where the policy's answer begins."""
    with optional("jinja2"):
        import jinja2
    try:
        return compile_template(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=True, **tokenizer.names)
    except Exception as e:      # a template may divide by zero, or raise whatever it likes
        raise BadInput(f"{where}: the chat template of {tokenizer.source} refuses the messages: "
                       f"{shown(str(e), 300)}") from e


@functools.cache
def compile_template(text):
    """Compile a chat template in the environment that transformers gives one."""
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # jinja2's own filter of this name escapes < and >, which models do not read
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    return environment.from_string(text)


def raise_exception(message):
    raise ValueError(message)
