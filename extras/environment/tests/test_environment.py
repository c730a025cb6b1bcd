"""
What answers a completion while it is sampled: an environment, or tools. Its words are read and
never learned, and what is sampled around them is what a loop over single rows samples.
"""
from dataclasses import replace

import pytest
import torch

import sample
from common.files import ROOT
from data.prompts import Prompt
from run.check import check
from run.evaluation import evaluate
from grpo import collect
from run.metrics import batch_metrics
from run.sampling import sample_completions
from rollout import empty_rollout, generate
from extras.environment.tools import (
    answer_calls, calc, call_metrics, check_prompts_name, reply)
from extras.environment import answering, check_environment
from run.settings import load_settings
from worlds import (
    WORDS, WORD_PROMPTS, assert_refused, settings, setup_of, word_gpt)

T = 20
STOPS = tuple("aihlmrsu ?")     # none is in <|endoftext|>
END = WORDS.eot_token


def game(prompts, transcripts):
    """Ends some episodes, says nothing to some, and speaks stop strings itself."""
    last = [sum(map(ord, prompt + text)) % 7 for prompt, text in zip(prompts, transcripts)]
    return [None if n == 0 else "" if n == 1 else f" {n}t" for n in last]


def with_game(function=game, **knobs):
    cfg = settings(**dict(max_turns=3, max_completion_length=T, num_generations=8) | knobs)
    cfg.functions = cfg.functions | {"environment": function}
    return check(replace(cfg, stop_strings=STOPS))


def test_a_config_file_that_cannot_answer_is_one_line(tmp_path):
    for text, name in (
            ("stop_strings = ('x',)", "stop_strings"),
            ("tools = {'a': len}\ndef environment(prompts, transcripts): pass", "environment")):
        (tmp_path / "a.py").write_text(text)
        assert_refused(name, load_settings, [str(tmp_path / "a.py")])


# ------------------------------------------------------------------------------------------------
# turns


def row_by_hand(policy, prompt, u, max_turns):
    """(ids, which of them are the policy's, ended, answers) of a completion: a full forward pass a
    token."""
    ids = []
    own = []
    answers = 0
    while len(ids) < T:
        h = policy(torch.tensor([prompt.ids + ids]))[0, -1]
        cdf = policy.lm_head(h).softmax(0).cumsum(0)
        token = int((cdf <= u[len(ids)] * cdf[-1]).sum())
        ids.append(token)
        own.append(True)
        if token != END and not set(WORDS.decode([token])) & set(STOPS):
            continue
        answer, = game([prompt.text], [WORDS.decode([i for i in ids if i != END])])
        if answer is None or token == END and not answer or answer and answers == max_turns:
            return ids, own, True, answers
        forced = WORDS.encode_ordinary(answer)[:T - len(ids)]
        ids += forced
        own += [False] * len(forced)
        answers += bool(forced)
    return ids, own, False, answers


@torch.no_grad()
def test_a_loop_over_single_rows_samples_the_same():
    cfg = with_game()
    respond = answering(WORDS, cfg, [prompt for prompt in WORD_PROMPTS for _ in range(8)])
    ids = [prompt.ids for prompt in WORD_PROMPTS]
    r = generate(word_gpt(), ids, 8, T, seed=7, eos=(END,), batch_size=8, respond=respond)
    turns = set()
    noise = torch.rand(32, T, generator=torch.Generator().manual_seed(7))
    tokens = r.tokens[:, -r.completion_mask.shape[1]:]
    is_end = (tokens == END) & r.completion_mask
    for i, u in enumerate(noise):
        expected, own, ended, answers = row_by_hand(
            word_gpt(), WORD_PROMPTS[i // 8], u, cfg.max_turns)
        turns.add(answers)
        n = int(r.completion_mask[i].sum())
        assert tokens[i, :n].tolist() == expected, f"row {i} is another one"
        assert r.sampled_mask[i, :n].tolist() == own
        assert r.ended[i] == ended
    assert {0, 1, 2, 3} == turns, "not a test of several turns"
    assert (is_end[:, :-1] & r.completion_mask[:, 1:]).any(), "no row went on after its end token"
    assert 3 < r.ended.sum() < 29
    assert not replace(cfg, max_turns=0).answers


def drawn(texts):
    """A rollout whose rows are these texts after a prompt of one token; the last token of each was
    just drawn."""
    ids = torch.tensor([WORDS.encode_ordinary(text) for text in texts])
    N, n = ids.shape
    prompt = torch.ones(N, 1, dtype=torch.long)
    r = empty_rollout(prompt, prompt > 0, 1, n + 8, END)
    r.tokens[:, 1:1 + n] = ids
    r.completion_mask[:, :n] = True
    return r


def test_a_stop_string_counts_once_and_where_it_is_complete():
    heard = []

    def listen(prompts, transcripts):
        heard.extend(transcripts)
        return [""] * len(transcripts)

    def heard_after(r, *stop_strings):
        heard.clear()
        cfg = replace(with_game(listen), stop_strings=stop_strings)
        t = int(r.completion_mask.sum(1).max()) - 1
        answering(WORDS, cfg, WORD_PROMPTS)(0, r, torch.arange(len(r.tokens)), t, t + 1)
        return heard

    found = heard_after(drawn(["x</a>", "x</b>", "</a>y", "</a>>"]), "</a>", ">>>>>>>")
    assert found == ["x</a>"], "the last of these completed it one token before"
    assert heard_after(drawn(["ab é", "ab è"]), "é") == ["ab é"], "a stop string of two bytes"
    r = drawn(["y</a>"] * 3)
    r.sampled_mask[1, :4] = False       # it was forced, but for its last token
    r.completion_mask[2, 4:] = False    # it ended before
    assert heard_after(r, "</a>") == ["y</a>"], "of a turn's own words, and while the row runs"


def test_what_samples_hears_the_environment_and_is_given_columns():
    seen = []

    def tell(prompts, transcripts, number, **columns):
        assert columns == {"text": prompts}
        seen.extend(zip(prompts, number))
        return [" 77"] * len(prompts)

    prompts = [Prompt(text, ids, {"text": text, "number": i})
               for i, (text, ids, _) in enumerate(WORD_PROMPTS)]
    cfg = with_game(tell, num_eval_generations=3, num_generations=2)
    setup = setup_of(cfg, policy=word_gpt(), prompts=prompts, tokenizer=WORDS)
    check_environment(cfg, prompts)
    for sampling in (lambda: sample_completions(setup, setup.policy, prompts, cfg, 3),
                     lambda: evaluate(setup, setup.policy, cfg)):
        seen.clear()
        sampling()
        assert set(seen) == {(prompt.text, prompt.row["number"]) for prompt in prompts}
    assert_refused("'number'", sample.complete, setup, setup.policy, cfg, "you are", 3)


def test_metrics_count_what_the_policy_drew():
    cfg = with_game(num_eval_generations=8)
    setup = setup_of(cfg, policy=word_gpt(), prompts=WORD_PROMPTS, tokenizer=WORDS)
    batch = collect(setup, WORD_PROMPTS, cfg, 7)
    own = int(batch.loss_mask.sum())
    share = own / int(batch.rollout.completion_mask.sum())
    assert .1 < share < .9
    m = batch_metrics(batch, cfg)
    assert m["forced"] == pytest.approx(1 - share)
    assert m["completions/mean_length"] == pytest.approx(own / len(batch.loss_mask))
    setup.generate = lambda *args, **more: batch.rollout
    assert evaluate(setup, setup.policy, cfg)[0]["mean_length"] == pytest.approx(
        m["completions/mean_length"])


@pytest.mark.parametrize("function, name", [
    (lambda transcripts, answer: [], ("'answer'", "'last'")),
    (lambda prompts, completions: [], "transcripts")])
def test_what_an_environment_does_wrong_is_one_line(function, name):
    known = [Prompt(text, ids, row | {"answer": 1}) for text, ids, row in WORD_PROMPTS]
    prompts = [*known, Prompt("last", [1], {"text": "last"})]
    assert_refused(name, check_environment, with_game(function), prompts)


# ------------------------------------------------------------------------------------------------
# tools

TABLE = {"calc": calc}
REPLIES = {
    "calc(12*7)": " = 84", "calc( (1+2)*3 )": " = 9", "calc(12*7).\n": " = 84",
    "calc(1) = 1, calc(2)": " = 2", "(calc(2)": " = 2", "calc(2))": " = 2",
    "I think": "", "calc(12*7": "", "(12*7)": "", ")": "",              # nothing was called
    "calc(12*7) = 84": "", "calc(12*7) so": "", "calc(1) = ?": "",      # or it is answered
    "calc(1/0) error: division by zero": ""}
FAILS = ("é(1)", "calx(1)", "calc(1/0)", "calc(9**9)", "calc(one)")


def test_a_call_is_answered_with_its_result_or_its_error():
    for text, added in REPLIES.items():
        assert reply(text, TABLE) == added, text
        assert answer_calls(TABLE, ["?", "?"], ["no call", text]) == ["", added]
    for text in FAILS:
        assert reply(text, TABLE).startswith(" error: "), text
    table = {"long": lambda text: "ab \n" * 9999, "find": lambda text: "(as f(x) = 3)\nin g(h(2))"}
    assert len(reply("long(1)", table)) < 250
    assert "\n" not in reply("long(1)", table)
    answer = reply("find(x)", table)
    assert answer == " = (as f (x) = 3) in g (h (2))", "what an answer says is no call"
    assert reply("find(x)" + answer, table) == ""
    for text in ("(" * 50_000 + ")" * 50_000, "a" * 100_000 + ")", "f(" * 50_000 + ")" * 50_000):
        reply(text, TABLE)      # is read at once


def test_calls_and_failures_are_counted_in_the_texts():
    texts = ["calc(1) = 1 calc(x) error: no", "calc(2", "calc(3)", "calx(1) error: no"]
    assert call_metrics(texts) == {"tools/call_frequency": 3 / 4, "tools/failure_frequency": 2 / 3}
    assert set(call_metrics([]).values()) == {0}


def test_prompts_and_table_name_the_same_tools():
    """Another name is refused: tests/test_notes.py."""
    table = {"calc": calc, "send_slack_message": str}
    check_prompts_name(table, ["calc(2*2), send_slack_message(text)", "What is (2*2)?"])


def test_the_config_file_loads_and_its_tool_answers():
    cfg = load_settings([f"{ROOT}/extras/environment/config/calculator.py"])
    prompts = [Prompt(row["text"], [1], row) for row in cfg.functions["questions"](50, 1)]
    check_environment(cfg, prompts)
    r = drawn(["calc(12*7)"])
    t = int(r.completion_mask.sum()) - 1
    answering(WORDS, cfg, prompts)(0, r, torch.arange(1), t, t + 1)
    assert WORDS.decode(r.tokens[0, t + 2:][~r.sampled_mask[0, t + 1:]].tolist()) == " = 84"


def test_a_stop_string_needs_somebody_who_answers():
    assert_refused("stop_strings", load_settings, ["--stop_strings=('x',)"])
