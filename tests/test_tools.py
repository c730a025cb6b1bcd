"""Tools: what a call is, what answers it, the list in the prompt, and the calculator."""
import json
import os
import random

import pytest

import grpo
from config import load_settings
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


def test_what_an_answer_says_is_no_call():
    table = {"find": lambda text: "(as f(x) = 3)\nin g(h(2)) item(s)", "calc": calc}
    text = "find(x)"
    answer = reply(text, table)
    assert answer == " = (as f (x) = 3) in g (h (2)) item (s)"
    assert reply(text + answer, table) == "", "the policy's end is no call, and stays its end"
    assert reply(f"{text}{answer} calc(2)", table) == " = 2"
    assert call_metrics([text + answer])["tools/call_frequency"] == 1


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


# --------------------------------------------------------------------------------------------------
# a run

RUN = '''
from config.calculator import *
from string import ascii_lowercase as _letters

n_layer = 1
n_embd = 32
n_head = 2
block_size = 20
max_completion_length = 18
pretrain_tokens = 120_000
max_prompts = 20
num_prompts = num_eval_prompts = 2
max_iters = 1

def texts(n, seed):
    return [f"{_letters[i % 26]} calc(2) = 2." for i in range(n)]

def questions(n, seed):
    return [{"text": _letters[i], "answer": "2"} for i in range(n)]
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """load(*flags, more="") -> arguments of a run of a policy that knows one exercise by heart."""
    folder = tmp_path_factory.mktemp("tools")

    def load(*flags, more=""):
        path = folder / f"config{len(os.listdir(folder))}.py"
        path.write_text(RUN + more)
        return [str(path), "--device=cpu", f"--cache_dir={folder}/prepared", *flags]

    return load


def test_a_run_calls_and_its_answers_carry_no_loss(world, rows, tmp_path, capsys):
    grpo.main(world(f"--out_dir={tmp_path}/out"))
    printed = capsys.readouterr().out
    row, = rows(tmp_path / "out" / "metrics.jsonl")
    called = [" calc(2) = 2" in x["completion"] for x in rows(tmp_path / "out" / "samples.jsonl")]
    assert sum(called) > 3, "the policy does not call, so this test shows nothing"
    assert row["tools/call_frequency"] >= sum(called) / len(called)
    assert row["forced"] > 0 and f"{row['tools/call_frequency']:.2f} calls" in printed
    before = rows(tmp_path / "out" / "eval.jsonl")[0]
    assert before["tools/call_frequency"] > 0 and before["tools/failure_frequency"] < 1

    cfg = load_settings(world())
    nets = grpo.prepare(cfg, grpo.read_inputs(cfg))
    r = grpo.collect(nets, nets.prompts[:2], cfg, 0).rollout
    tokens = r.tokens[:, -r.completion_mask.shape[1]:]
    forced = r.completion_mask & ~r.sampled_mask
    spoken = [nets.tokenizer.decode(ids[own].tolist()) for ids, own in zip(tokens, forced)]
    assert spoken.count(" = 2") > 2, f"the calculator's tokens count as the policy's: {spoken}"


def test_without_turns_there_are_no_tools(world, rows, tmp_path):
    grpo.main(world(f"--out_dir={tmp_path}/out", "--max_turns=0"))
    row, = rows(tmp_path / "out" / "metrics.jsonl")
    assert row["forced"] == 0
    for name in (*row, *rows(tmp_path / "out" / "eval.jsonl")[0]):
        assert not name.startswith("tools/"), f"{name} is measured where no tool answers"


def test_no_tools_is_no_environment(world):
    cfg = load_settings(world(more="\ntools = {}\ndel calc"))
    assert not cfg.answers and cfg.stop_strings == () and cfg.call_metrics(["calc(1) = 1"]) == {}


@pytest.mark.parametrize("more, message", [
    ("tools = [calc]", "must be a dict of functions by name"),
    ("tools = {'my calc': calc}", "tools: the name 'my calc' must be a word"),
    ("tools = {'calc': 3}", "tools['calc'] = 3: must be a function"),
    ("def environment(prompts, transcripts): return transcripts", "who answers?"),
    ("def other(text): return text", "function 'other' is not used")])
def test_a_table_that_cannot_answer_is_one_line(world, more, message):
    with pytest.raises(BadInput) as error:
        load_settings(world(more=more))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_run_does_not_begin_with_a_misnamed_tool(world):
    more = "\n_letters = [f'calk(2) {i}' for i in range(26)]\nblock_size = 40"
    with pytest.raises(BadInput, match="'calk', and tools has 'calc'"):
        grpo.read_inputs(load_settings(world(more=more)))
    grpo.read_inputs(load_settings(world("--max_turns=0", more=more)))


def test_a_strangers_tools_are_not_left_out(world, tmp_path):
    grpo.main(world(f"--out_dir={tmp_path}/out", "--max_iters=0"))
    path = tmp_path / "out" / "config.json"
    assert load_settings([str(path)]).answers, "a run's own config.json has its tools"
    about = json.loads(path.read_text())
    about["source"] = "tools = {'calc': len}"
    path.write_text(json.dumps(about))
    with pytest.raises(BadInput, match="'tools' is Python of somebody else's run"):
        load_settings([str(path), "--reward_funcs=('judge',)", "--judge=train"])
