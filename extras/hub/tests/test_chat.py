"""Lists of messages, as a chat template writes them."""
import pytest
from jinja2.exceptions import SecurityError

from common.files import ROOT
from data.prompts import encode_prompt
from extras.hub.tests.published import chat_core
from extras.hub.tokenizer import Tokenizer
from run.policy import load_policy
from run.settings import load_settings
from worlds import assert_refused

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


def write(template, messages, **arguments):
    tokenizer = chat(template)
    tokenizer.give_template(arguments)
    return tokenizer.decode(tokenizer.encode_chat(messages, "x")[1])


@pytest.mark.parametrize("template, expected", [
    ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}docs{% endif %}", ""),
    ("{{ tools is defined }} {{ documents is defined }}", "True True"),
    ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abHic"),
    ("{%- generation -%}  b\n  {%- endgeneration %}", "b"),
    ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
    ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}", "user"),
    ("{{ {'b': 1, 'a': '\u00fc<'} | tojson }}", '{"b": 1, "a": "\u00fc<"}'),
    ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}", '{\n "a": 2,\n "b": 1\n}')])
def test_a_template_gets_what_transformers_gives_it(template, expected):
    assert write(template, [{"role": "user", "content": "Hi"}]) == expected


MARKED = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}[assistant]{% endif %}")
STRIPPED = MARKED.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("template, begun, ends", [
    (MARKED, "The answer is", "[assistant]The answer is"),
    (MARKED, "The answer is ", "[assistant]The answer is "),
    (MARKED, "", "[assistant]"),
    (MARKED, "user<|im_end|>", "[assistant]user<|im_end|>"),
    (STRIPPED, "  The answer is ", "[assistant]The answer is")])
def test_an_answer_that_has_begun_goes_on(template, begun, ends):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": begun}]
    found = write(template, messages)
    assert found.endswith(ends), "the policy would begin a second answer"
    assert messages[1]["content"] == begun
    assert write(template, messages[:1]).endswith("2+2?<|im_end|>\n[assistant]")
    assert chat(template).encode_chat(messages, "x")[0] == "2+2?"


THINKS = "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"


def test_arguments_of_a_template_reach_it_and_one_that_it_never_asks_for_is_refused():
    asked = [{"role": "user", "content": "Hi"}]
    assert write(THINKS, asked) == "Hi"
    assert write(THINKS, asked, enable_thinking=False) == "Hi<think></think>"
    assert write("{{ tools[0].name }}", asked, tools=[{"name": "f"}]) == "f"
    assert_refused("enable_thoughts", write, THINKS, asked, enable_thoughts=False)
    cfg = load_settings([f"--policy={ROOT}/data/policy.pt", "--chat_template_kwargs={'a': False}"])
    assert_refused("chat_template_kwargs", load_policy, cfg)


def test_what_is_wrong_with_messages_is_one_line():
    for template, messages, name in (
            (TEMPLATE, [ASKED[1], "Hello"], "message 2"),
            ("{{ messages[0].content }}", [ASKED[1], {"role": "assistant", "content": "b"}],
             "continue")):
        assert_refused(("asked.jsonl: row 2", name), encode_prompt, chat(template), messages,
                       "asked.jsonl: row 2")


def test_a_template_is_run_in_a_sandbox():
    with pytest.raises(SecurityError):
        write("{{ ''.__class__.__mro__ }}", ASKED)
    with pytest.raises(ValueError, match="no system"):
        write("{{ raise_exception('no system') }}", ASKED)
