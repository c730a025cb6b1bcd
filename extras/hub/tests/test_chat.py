"""Lists of messages, as a chat template writes them."""
import functools
import sys
from types import SimpleNamespace

import pytest

from data.prompts import encode_prompt
from extras.hub.chat import encode_chat
from worlds import WORDS, refusal

pytest.importorskip("jinja2")

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == "stop" %}{% break %}{% endif %}
    {%- set text = message | tojson %}[{{ text }}]
{%- endfor %}
{%- if add_generation_prompt and not tools %}answer:{% endif %}"""
ASKED = [{"role": "system", "content": "the other", "name": None},
         {"role": "user", "content": "Is a<b?"}]


def chat(template=TEMPLATE):
    """A stand-in for a published tokenizer."""
    tokenizer = SimpleNamespace(
        chat_template=template, names={"bos_token": "<s>"}, source="chat",
        before_text=[7], encode_ordinary=WORDS.encode_ordinary, encode_marked=lambda text: [text])
    tokenizer.encode_chat = functools.partial(encode_chat, tokenizer)
    return tokenizer


def test_messages_are_what_the_template_writes():
    text, (rendered,) = encode_prompt(chat(), ASKED, "x")
    assert text == "Is a<b?", "rewards and logs see what the user said last"
    assert rendered == ('<s>[{"role": "system", "content": "the other"}]'
                        '[{"role": "user", "content": "Is a<b?"}]answer:')
    stop = [*ASKED, {"role": "stop", "content": ""}]
    assert encode_prompt(chat(), stop, "x")[1] == [rendered]
    assert encode_prompt(chat(), "a b", "x") == ("a b", [7, *WORDS.encode_ordinary("a b")])
    assert encode_prompt(chat(), "", "x")[1] == []


def test_what_is_wrong_with_messages_is_one_line():
    for template, messages, said in (
            (TEMPLATE, [], "the list of messages is empty"),
            (TEMPLATE, [ASKED[1], "Hello"], "message 2 is 'Hello': must be"),
            (TEMPLATE, [{"role": "user", "content": 3}], "message 1 is"),
            (TEMPLATE, [{"role": "user", "content": "\ud800"}], "must be text"),
            (None, ASKED, "this policy has no chat template"),
            ("{{ raise_exception('no\nsystem') }}", ASKED, "refuses the messages: 'no\\nsystem'"),
            ("{{ ''.__class__.__mro__ }}", ASKED, "refuses the messages"),
            ("{% set _ = messages.append(1) %}", ASKED, "refuses the messages"),
            ("{% if %}", ASKED, "refuses the messages")):
        assert said in refusal(encode_prompt, chat(template), messages, "asked.jsonl: row 2")


def test_jinja2_is_needed_for_messages_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install jinja2" in refusal(encode_prompt, chat(), ASKED, "x")
    assert encode_prompt(chat(), "the other", "x")[1]
