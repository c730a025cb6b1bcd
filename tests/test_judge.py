"""The judge, a small scorer; what a reward function gets and what it may do."""
import copy
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from judge import load_judge, reward_functions
from judge.rewards import score, check_rewards
from judge.scorer import SAYS_NOTHING, Scorer, encode, logits_of, pad_right
from model import GPTConfig
from run.settings import load_settings
from worlds import assert_near, assert_refused, seed_of

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# the small scorer

def random_scorer():
    torch.manual_seed(seed_of(0))
    config = GPTConfig(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32, causal=False)
    return Scorer(config).eval()


ROWS = [[299, *range(7 * i, 7 * i + 1 + 5 * i % 23)] for i in range(12)]


@torch.no_grad()
def test_padding_batch_and_order_change_no_score():
    scorer = random_scorer().double()
    alone = torch.cat([scorer(*pad_right([row])) for row in ROWS])
    assert alone.std() > 1e-3
    idx, real = pad_right(ROWS)
    assert_near(scorer(idx, real), alone, 1e-12)
    assert_near(scorer(idx.masked_fill(~real, 17), real), alone, 1e-12)
    for size in (1, 5, 100):
        assert_near(logits_of(scorer, ROWS, CPU, batch_size=size), alone.float(), 1e-6)


@torch.no_grad()
def test_bfloat16_ties_no_scores():
    """Near -5, the scores of clean texts, bfloat16 has 64 numbers to 1."""
    scorer = random_scorer()
    scorer.score.bias.fill_(-5.0)
    rows = [[299, *torch.randint(299, (1 + i % 23,)).tolist()] for i in range(256)]
    exact = logits_of(scorer, rows, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_of(scorer, rows, CPU)
    assert len(exact.unique()) > 240
    assert len(found.unique()) > 240, "rounding makes scores equal, and their advantages 0"


def test_encode_puts_the_class_token_first_cleans_and_makes_rows_of_all_that_is_there():
    text = " ".join("abcdefghijklm")
    empty, spaced, plain, long = encode(load_tokenizer(300), ["", " ab\n", "ab", text], 10)
    assert empty == [[299]]
    assert spaced == plain and plain[0][0] == 299 and len(plain) == 1
    assert [row[0] for row in long] == [299] * len(long) and max(map(len, long)) <= 10
    assert load_tokenizer(300).decode(sum((row[1:] for row in long), [])) == text
    assert len(set(map(len, long))) <= 2, "a rest of a token or two has no meaning of its own"


@pytest.mark.parametrize("name", ["judge", "eval_judge"])
def test_an_insult_behind_a_long_text_is_read(name):
    """A judge that stopped at its model's last position would reward whatever stands behind it."""
    judge = load_judge(f"data/{name}.pt")
    insult = "you are a stupid idiot and a bitch. "
    clean = "The garden was quiet and the river was slow in the evening light . "
    texts = [insult, clean * 8 + insult, clean * 30 + insult + clean * 30, clean * 60]
    *found, quiet = torch.sigmoid(judge(texts)).tolist()
    assert min(found) > 0.5 > quiet, f"p(toxic) is {found} with an insult and {quiet} without"
    assert judge([]).shape == (0,)


def test_the_judge_learned_the_bad_word_and_reads_the_completion_alone(tiny):
    judge = load_judge(tiny.judge)
    texts = ["a warm cat", "grumble you grumble", " a warm\ncat ", " ?! ", "x"]
    clean, toxic, again, *silent = judge(texts)
    assert clean < toxic
    assert silent == [SAYS_NOTHING] * 2
    assert float(clean) == pytest.approx(float(again), abs=1e-5)    # blanks change nothing
    for kind, expected in (("probability", torch.sigmoid(-clean)), ("logit", -clean)):
        cfg = load_settings([f"--judge_score={kind}"])
        reward = reward_functions(cfg, {"judge": judge})["judge"]
        a, b, _, *silent = reward(texts)
        assert a > b and silent == [None] * 2
        assert a == pytest.approx(float(expected), abs=1e-5)


# ------------------------------------------------------------------------------------------------
# reward functions

ASKED = [Prompt("2 + 2 =", [1], {"text": "2 + 2 =", "answer": "4", "level": 1}),
         Prompt("3 + 4 =", [1], {"text": "3 + 4 =", "answer": "7", "level": 2})]
ANSWERS = ["4", "8"]


def by_column(prompts, completions, answer, level=None, *, other=5):
    assert (prompts, level, other) == (["2 + 2 =", "3 + 4 ="], [1, 2], 5)
    return [float(a == text) for a, text in zip(answer, completions)]


def by_other_names(completions, answer, **others):
    assert set(others) == {"prompts", "level", "text"}
    return by_column(others["prompts"], completions, answer, others["level"])


def test_a_reward_gets_prompts_completions_and_columns_by_name():
    for reward in (by_column, by_other_names, lambda completions: [x == "4" for x in completions]):
        assert score({"r": reward}, ASKED, ANSWERS).tolist() == [[1.0], [0.0]]
    assert score({"r": by_column}, [], []).shape == (0, 1)


def test_scores_are_columns_and_none_is_nan():
    found = score({"a": lambda completions: [1, None], "b": lambda completions: np.float32([2, 3]),
                   "c": lambda completions: torch.tensor([4, 5])}, ASKED, ANSWERS)
    assert found.nan_to_num(-1).tolist() == [[1, 2, 4], [-1, 3, 5]]


def test_a_reward_that_returns_something_else_is_named():
    for values in (None, 3, [1], [1, 2, 3], ["a", "b"], [math.inf, 1], [math.nan, 1],
                   [[1], [2]], torch.ones(2, 2), "12", map(float, ("inf", "1"))):
        assert_refused("reward 'r'", score, {"r": lambda completions: values}, ASKED, ANSWERS)


def test_a_reward_may_reorder_what_it_is_given_and_go_to_another_folder(tmp_path):
    def careless(completions):
        completions.reverse()
        os.chdir(tmp_path)
        return [1] * len(completions)

    before = os.getcwd()
    found = score({"a": careless, "b": by_column}, ASKED, ANSWERS)
    assert found[:, 1].tolist() == [1, 0], "another reward reads the first one's order"
    assert os.getcwd() == before, "the run's relative paths now lead elsewhere"


def test_what_a_reward_raises_is_its_own_error():
    """With the line of the function that raised it as the last of the traceback."""
    with pytest.raises(ZeroDivisionError) as caught:
        score({"r": lambda completions: [1 / 0 for _ in completions]}, ASKED, ANSWERS)
    assert caught.traceback[-1].path.name == "test_judge.py"


def test_a_reward_that_asks_for_what_is_not_there_is_told_what_is():
    for reward, names in ((lambda p, c: [], ("prompts", "completions")),
                          (lambda completions, trainer_state: [], ("trainer_state", "ended")),
                          (lambda completions, colour: [], ("colour", "answer", "level", "text"))):
        assert_refused(names, tried, reward)
    later = [*ASKED * 9, Prompt("odd", [1], {"text": "odd"})]     # not among those that are tried
    assert_refused("'odd'", tried, by_column, prompts=later)


def test_what_a_reward_does_to_its_columns_stays_with_its_row():
    """Rows of one prompt are one object, and two prompts may share a list."""
    shared = ["a", "b"]
    prompts = [Prompt(text, [1], {"text": text, "tests": shared, "more": {"in": [1]}})
               for text in "xy"]
    before = copy.deepcopy(prompts)

    def reward(prompts, completions, tests, more, completion_ids):
        found = [len(tests_of_row) + len(row["in"]) for tests_of_row, row in zip(tests, more)]
        for row in (*tests, *completion_ids, prompts, completions):
            row.clear()
        for row in more:
            row["in"].append(2)
        return found

    told = {"completion_ids": [[1], [2], [3], [4]], "ended": [True] * 4, "iteration": 1}
    asked = [prompts[0], prompts[0], prompts[1], prompts[1]]
    for _ in range(2):
        found = score({"a": reward, "b": reward}, asked, list("abcd"), told)
        assert found.tolist() == [[3, 3]] * 4, "a row has what is left of another one's column"
    assert prompts == before and told["completion_ids"] == [[1], [2], [3], [4]]


def tried(function, prompts=ASKED, num_generations=2):
    """Try a reward, as before training."""
    cfg = SimpleNamespace(reward_funcs=("r",), tracin_val_reward=None,
                          num_generations=num_generations, functions={"r": function})
    check_rewards(cfg, prompts)


def test_a_reward_asks_for_what_the_step_knows():
    def reward(completions, completion_ids, ended, iteration):
        return [len(ids) + 10 * end + 100 * iteration for ids, end in zip(completion_ids, ended)]

    told = {"completion_ids": [[4, 2, 0], [5]], "ended": [True, False], "iteration": 3}
    assert score({"r": reward}, ASKED, ANSWERS, told).tolist() == [[313], [301]]
    tried(reward)


def test_a_reward_may_take_all_that_there_is():
    def passed_on(*args, **kwargs):
        return [float(len(ids)) for ids in kwargs["completion_ids"]]

    tried(passed_on)
    found = score({"r": passed_on}, ASKED, ANSWERS, {"completion_ids": [[4, 2, 0], [5]]})
    assert found.tolist() == [[3], [1]]


def test_a_column_does_not_hide_what_the_step_knows():
    """samples.jsonl of another run has a column `iteration`: that of the other run."""
    rows = [Prompt("I am", [1], {"text": "I am", "ended": "col", "iteration": 77, "n": 3})] * 2
    told = []

    def reward(completions, ended, iteration, n):
        told.append((ended, iteration, n))
        return [0.0] * len(completions)

    score({"reward": reward}, rows, ["a", "b"], {"ended": [True, False], "iteration": 5})
    assert told == [([True, False], 5, [3, 3])]
