"""Lists of messages, as a chat template writes them."""
from data.prompts import encode_prompt
from extras.hub.tests.published import chat_core
from extras.hub.tokenizer import Tokenizer
from worlds import refusal

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == "stop" %}{% break %}{% endif %}
    {%- set text = message | tojson %}[{{ text }}]
{%- endfor %}
{%- if add_generation_prompt and not tools %}answer:{% endif %}"""
ASKED = [{"role": "system", "content": "the other", "name": None},
         {"role": "user", "content": "Is a<b?"}]


def chat(template=TEMPLATE):
    return Tokenizer(chat_core(), "chat", [299], {"bos_token": "<s>"}, template)


def test_messages_are_what_the_template_writes():
    tokenizer = chat()
    stop = [*ASKED, {"role": "stop", "content": ""}]
    for messages in (ASKED, stop):
        text, ids = encode_prompt(tokenizer, messages, "x")
        assert text == "Is a<b?", "rewards and logs see what the user said last"
        assert tokenizer.decode(ids) == ('<s>[{"role": "system", "content": "the other"}]'
                                         '[{"role": "user", "content": "Is a<b?"}]answer:')
    again = [*ASKED, {"role": "user", "content": "And c?"}]
    assert encode_prompt(tokenizer, again, "x")[0] == "And c?"
    assert encode_prompt(tokenizer, ASKED[:1], "x")[0] == "the other", "no user says anything"
    tokenizer.before_text = [7]
    assert encode_prompt(tokenizer, "a b", "x") == ("a b", [7, *tokenizer.encode_ordinary("a b")])
    assert encode_prompt(tokenizer, "", "x")[1] == []


def test_what_is_wrong_with_messages_is_one_line():
    for template, messages, said in (
            (TEMPLATE, [], "the list of messages is empty"),
            (TEMPLATE, [ASKED[1], "Hello"], "message 2 is 'Hello': must be"),
            (TEMPLATE, [{"role": "user", "content": 3}], "message 1 is"),
            (TEMPLATE, [{"role": "user", "content": "\ud800"}], "must be text"),
            ("{{ raise_exception('no\nsystem') }}", ASKED, "messages: ValueError: no system"),
            ("{{ ''.__class__.__mro__ }}", ASKED, "refuses the messages"),
            ("{% set _ = messages.append(1) %}", ASKED, "refuses the messages"),
            ("{% if %}", ASKED, "refuses the messages"),
            ("{{ '\ud800' }}", ASKED, "writes is no text")):
        assert said in refusal(encode_prompt, chat(template), messages, "asked.jsonl: row 2")
