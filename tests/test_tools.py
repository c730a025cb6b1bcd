"""Tools: what a call is, what answers it, the list in the prompt, and the calculator."""
import random

import pytest

from environment.calc import LARGEST, calc
from environment.tools import (call_metrics, check_prompts_name, find_calls, list_tools,
                               reply, tool_environment)
from run.script import BadInput

TABLE = {"calc": calc}


@pytest.mark.parametrize("text, argument", [
    ("calc(12*7)", "12*7"), ("so I say calc( 12*7 )", " 12*7 "), ("calc((1+2)*3)", "(1+2)*3"),
    ("calc(1) = 1, calc(2)", "2"), ("(calc(2)", "2"), ("((( calc(2)", "2"), ("calc()", ""),
    ("calc(3) error: what ( was ) that? calc(\n4)", "\n4")])
def test_the_call_that_ends_a_text_is_found(text, argument):
    call = find_calls(text)[-1]
    assert (call.name, call.end) == ("calc", len(text))
    assert text[call.start:call.end - 1] == argument


def test_the_parser_takes_any_text():
    rng = random.Random(0)
    pieces = ["calc", "(", ")", "(", ")", "1", "*", " ", "\n", "=", "é", "\0", "_", "🙂", " = "]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        for call in find_calls(text):
            opening = text[:call.start]
            assert opening.endswith(f"{call.name}(") and text[call.end - 1] == ")", repr(text)
        added = reply(text, TABLE)
        assert added.startswith((" = ", " error: ")) or not added, f"{text!r} got {added!r}"
    for text in ("(" * 50_000 + ")" * 50_000, "a" * 100_000 + ")", "f(" * 50_000 + ")" * 50_000):
        reply(text, TABLE)


@pytest.mark.parametrize("text, added", [
    ("calc(12*7)", " = 84"), ("I think", ""), ("calc(12*7) = 84", ""), ("calc(12*7", ""),
    ("(12*7)", ""), ("calc((1+2)", ""), (")", ""), ("calc(12*7).\n", " = 84"),
    ("calc(12*7) so", ""), ("calc(1/0) error: division by zero", ""), ("calc(1) = ?", ""),
    ("calx(1)", " error: no tool 'calx'; there is calc"), ("calc(1/0)", " error: division by zero"),
    ("calc(one)", " error: only numbers, + - * / // % ** and brackets"),
    ("calc()", " error: only numbers, + - * / // % ** and brackets")])
def test_a_call_is_answered_with_its_result_or_its_error(text, added):
    assert reply(text, TABLE) == added
    assert tool_environment(TABLE)(["?", "?"], ["no call", text]) == ["", added]


def test_what_a_tool_does_wrong_is_an_answer():
    def fails(text):
        raise SystemExit

    table = {"fails": fails, "long": lambda text: "ab \n" * 9999, "none": lambda text: None}
    assert reply("fails(1)", table) == " error: SystemExit"
    assert reply("none(1)", table) == " = None"
    assert len(reply("long(1)", table)) < 250 and "\n" not in reply("long(1)", table)


def test_the_list_of_a_prompt_holds_the_names_of_the_table():
    def send_slack_message(text):
        """Send a message.

        And more that no prompt shows."""

    table = {"calc": calc, "send_slack_message": send_slack_message, "say": str.upper}
    shown = list_tools(table)
    assert [call.name for call in find_calls(shown)] == list(table)
    assert "\nsend_slack_message(text): Send a message.\n" in shown and shown.count("\n") == 2
    check_prompts_name(table, [shown + "\nWhat is 2*2?", "What is (2*2)?"])


def test_a_prompt_that_names_another_tool_is_an_error():
    """Note 004: the prompt said slack_send_message, the table send_slack_message."""
    table = {"send_slack_message": str}
    with pytest.raises(BadInput) as error:
        check_prompts_name(table, ["Hello", "You have slack_send_message(text). Hello"])
    assert "'slack_send_message'" in str(error.value), "the name in the prompt is not named"
    assert "'send_slack_message'" in str(error.value), "the name in the table is not named"


@pytest.mark.parametrize("texts, calls, failures", [
    (["It is 4."], 0, 0), ([], 0, 0),
    (["calc(2*2) = 4. It is 4.", "It is 4."], 1 / 2, 0),
    (["calc(1) = 1 calc(x) error: no", "calc(2", "calc(3)", "calx(1) error: no"], 3 / 4, 2 / 3),
    (["f(2) is calc(2) = 2", "(calc(2) = 2) = 2", "calc(2).\n = 2"], 1, 0)])
def test_calls_and_failures_are_counted_in_the_texts(texts, calls, failures):
    m = call_metrics(texts)
    assert m == {"tools/call_frequency": calls, "tools/failure_frequency": failures}


# --------------------------------------------------------------------------------------------------
# the calculator


def expression(rng, depth):
    if depth == 0:
        return rng.choice([str(rng.randrange(100)), f"{rng.randrange(100) / 4}"])
    a, b = expression(rng, rng.randrange(depth)), expression(rng, rng.randrange(depth))
    op = rng.choice(["+", "-", "*", "/", "//", "%", " * ", " - "])
    return rng.choice([f"({a}){op}({b})", f"{a}{op}{b}", f"-{a}{op}{b}", f"({a}**{b})"])


def test_calc_computes_what_python_computes():
    rng = random.Random(0)
    computed = 0
    for _ in range(500):
        text = expression(rng, 2)
        try:
            result = calc(text)
        except (ValueError, ArithmeticError):
            continue
        computed += 1
        assert float(result) == pytest.approx(eval(text), rel=1e-9, abs=1e-9), text
    assert computed > 250, "most expressions are refused"
    assert [str(calc(x)) for x in ("347*86", " 6/2 ", "1/4", "2**90/2**88", "-2**2", "1.50")] == [
        "29842", "3", "0.25", "4", "-4", "1.5"]


@pytest.mark.parametrize("text", [
    "9**9**9", "2**200", "9" * 31, "1" + "+1" * 60, "-" * 101 + "1", "(" * 60 + "1" + ")" * 60,
    "0.1**-99", "99**99", "(1.0**100)**101", "(-8)**.5", "1/0", "0**-1", "5%0", "9.0**99",
    "__import__('os')", "calc", "1 if 1 else 2", "1e5", "0x1f", "1_000", "2j", "True", "'a'*9",
    "", " ", "()", "(1,2)", "1 2", "3(4)", "(*1)", "...", "1=1", "\n", "1\n+1", "²", "٣", "\0",
    "007"])
def test_calc_refuses_at_once_what_is_no_small_arithmetic(text):
    with pytest.raises((ValueError, ArithmeticError)):
        calc(text)
    assert reply(f"calc({text})", TABLE)[:8] in (" error: ", ""), text


def test_calc_takes_any_text_of_its_characters():
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choices("0123456789.+-*/%() ", k=rng.randrange(1, 100)))
        try:
            assert abs(float(calc(text))) <= LARGEST and len(str(calc(text))) < 40
        except (ValueError, ArithmeticError):
            pass
