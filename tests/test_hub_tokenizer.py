"""hub/tokenizer.py against byte-pair merging written out, on files in the published layouts that
the tests make."""
import functools
import json
import random
import unicodedata
from collections import Counter

import pytest
import regex  # comes with tiktoken

from data.tokenizer import end_tokens, byte_alphabet, load_tokenizer
from hub.tokenizer import gguf_tokenizer, main, read_tokenizer
from run.script import BadInput

CHAR = {b: c for c, b in byte_alphabet().items()}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>",
           "<|end_of_text|> \u2581"]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
DIGITS = dict(type="Digits", individual_digits=True)
TEXTS = ["", " ", "don't I'll WE'VE 'S they're 'd", "a    b     c  ", "\n\n\t \r\n x\r\n\r\ny",
         "a  1   22 \t3\n4",
         "1234567 3.14 \u00bd\u2167\u0663 a1b2", "the theatre, the other there!!! ???",
         "\U0001f642\U0001f469\u200d\U0001f467 na\u00efve e\u0301 \u4e2d\u6587 \u2028\u00a0x",
         "x" * 300, "there " * 60,
         "".join(map(chr, range(256))), *SPECIAL, "a</s>b<|endoftext|><|im_start|>"]


def cut(text, form):
    """The words of a text, as the published pre-tokenizers cut them."""
    if form in ("qwen2", "llama3"):
        return regex.findall(LLAMA3, text) if form == "llama3" else regex.findall(
            QWEN2, unicodedata.normalize("NFC", text))
    stretches = regex.findall(r"\p{N}|\P{N}+", text) if form == "digits" else [text]
    return [word for stretch in stretches for word in regex.findall(GPT2, stretch)]


def merge(word, order):
    """The tokens of a word: the pair of neighbours that is first in the list of merges is joined,
    the leftmost of them."""
    parts = [CHAR[b] for b in word.encode()]
    while found := [(order[p], i) for i, p in enumerate(zip(parts, parts[1:])) if p in order]:
        i = min(found)[1]
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


@functools.cache
def learned(form):
    """80 merges learned the plain way, and a vocabulary that numbers the tokens in another order,
    special ones in between."""
    words = Counter(tuple(CHAR[b] for b in word.encode()) for text in TEXTS
                    for word in cut(text, form))
    merges = []
    for _ in range(80):
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        merges.append(min(pairs, key=lambda p: (-pairs[p], p)))
        words = Counter({tuple(merge_one(word, merges[-1])): n for word, n in words.items()})
    tokens = list(CHAR.values()) + [a + b for a, b in merges]
    random.Random(1).shuffle(tokens)
    return {t: i for i, t in enumerate(SPECIAL[:4] + tokens + SPECIAL[4:])}, merges


def merge_one(word, pair):
    out = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def split(pattern):
    return dict(type="Sequence", pretokenizers=[
        dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False),
        BYTE_LEVEL | dict(use_regex=False)])


def whole(form, **changes):
    """The content of a tokenizer.json."""
    vocabulary, merges = learned(form)
    pre = dict(gpt2=BYTE_LEVEL, digits=dict(type="Sequence", pretokenizers=[DIGITS, BYTE_LEVEL]),
               qwen2=split(QWEN2),
               llama3=split(LLAMA3))[form]
    return dict(version="1.0", normalizer=dict(type="NFC") if form == "qwen2" else None,
                pre_tokenizer=pre,
                added_tokens=[dict(id=vocabulary[t], content=t, special=True) for t in SPECIAL],
                model=dict(type="BPE",
                           vocab={t: i for t, i in vocabulary.items() if t not in SPECIAL},
                           merges=[" ".join(m) for m in merges])) | changes


def write(folder, **contents):
    """Files by their names with _ for the dot."""
    for name, content in contents.items():
        stem, _, end = name.rpartition("_")
        (folder / f"{stem}.{end}").write_text(content if type(content) is str
                                              else json.dumps(content), encoding="utf-8")
    return str(folder)


def write_form(folder, source, form):
    vocabulary, merges = learned(form)
    if source == "gguf":
        pre = dict(gpt2="gpt-2", digits="smollm", qwen2="qwen2", llama3="llama-bpe")[form]
        return gguf_tokenizer({"tokenizer.ggml." + k: v for k, v in dict(
            model="gpt2", pre=pre, tokens=sorted(vocabulary, key=vocabulary.get),
            merges=[" ".join(m) for m in merges],
            bos_token_id=0, eos_token_id=2).items()})
    if source == "whole":
        named = dict(bos_token="<s>", eos_token="</s>")
        return read_tokenizer(write(folder, tokenizer_json=whole(form),
                                    tokenizer_config_json=named))
    return read_tokenizer(write(folder, vocab_json=vocabulary,
                                config_json=dict(bos_token_id=0, eos_token_id=2, pad_token_id=1),
                                merges_txt="#version: 0.2\n"
                                + "".join(f"{a} {b}\n" for a, b in merges)))


@pytest.mark.parametrize("source, form", [("parts", "gpt2")] + [
    (source, form) for source in ("whole", "gguf")
    for form in ("gpt2", "digits", "qwen2", "llama3")])
def test_published_files_number_tokens_as_the_vocabulary_and_merge_in_the_merges_order(
    source, form, tmp_path):
    t, (vocabulary, merges) = write_form(tmp_path, source, form), learned(form)
    rng, order = random.Random(0), {m: i for i, m in enumerate(merges)}
    texts = TEXTS + ["".join(rng.choices("ther o1\n\t\r '.\u00e9\u0301<|>", k=rng.randint(1, 30)))
                     for _ in range(300)]
    for text in texts:
        ids = t.encode_ordinary(text)
        assert ids == [vocabulary[part] for word in cut(text, form)
                       for part in merge(word, order)], text
        assert t.decode(ids) == (unicodedata.normalize("NFC", text) if form == "qwen2" else text)
        assert not set(ids) & {vocabulary[x] for x in SPECIAL}
    assert t.encode_ordinary_batch(texts, num_threads=2) == [t.encode_ordinary(text)
                                                             for text in texts]
    assert (t.eot_token, t.bos_token, t.n_vocab) == (2, 0, len(vocabulary))
    assert [t.decode([vocabulary[x]]) for x in SPECIAL] == SPECIAL
    assert b"".join(map(t.decode_single_token_bytes,
                        t.encode_ordinary("\u4e2d"))) == "\u4e2d".encode()
    assert max(map(len, (merge(word, order)
                         for word in cut("there", form)))) < 5  # the merges are in use


@pytest.mark.parametrize("ignore", [True, False])
def test_llama_3_takes_a_word_of_the_vocabulary_whole_though_no_merge_makes_it(ignore, tmp_path):
    content = whole("llama3")
    vocabulary = content["model"]["vocab"]
    vocabulary["qzjxw"] = 9999
    content["model"]["ignore_merges"] = ignore
    files = dict(tokenizer_json=content, config_json=dict(eos_token_id=2))
    t = read_tokenizer(write(tmp_path, **files))
    parts = [vocabulary[c] for c in "qzjxw"]
    assert t.encode_ordinary("qzjxw") == ([9999] if ignore else parts)
    assert t.encode_ordinary("qzjxwq") == [*parts, vocabulary["q"]]
    vocabulary |= {"qz": 9997, "jxw": 9998}
    files["tokenizer_json"] = content
    if ignore:
        assert "no merge makes the token 'qz" in refusal(read_tokenizer, write(tmp_path, **files))


def test_qwens_text_is_normalised():
    t = write_form(None, "gguf", "qwen2")
    assert t.encode_ordinary("e\u0301") == t.encode_ordinary("\u00e9")


def test_a_lone_surrogate_is_no_crash():
    assert write_form(None, "gguf", "gpt2").decode(
        write_form(None, "gguf", "gpt2").encode_ordinary("a\ud800b")) == "a\ufffdb"


def test_merges_may_be_lists_too(tmp_path):
    content = whole("gpt2")
    content["model"]["merges"] = [list(m) for m in learned("gpt2")[1]]
    t = read_tokenizer(write(tmp_path, tokenizer_json=content, config_json=dict(eos_token_id=2)))
    assert t.encode_ordinary(TEXTS[7]) == write_form(tmp_path, "gguf",
                                                     "gpt2").encode_ordinary(TEXTS[7])


def test_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path):
    t = write_form(tmp_path, "whole", "gpt2")
    assert t.decode([*t.encode_ordinary("the"), 10 ** 6, t.n_vocab]) == "the"


def test_a_byte_that_the_vocabulary_lacks_is_left_out(tmp_path):
    content = whole("gpt2")
    del content["model"]["vocab"][CHAR[4]]
    t = read_tokenizer(write(tmp_path, tokenizer_json=content, config_json=dict(eos_token_id=2)))
    ids = t.encode_ordinary("the\x04the\x05")
    assert t.decode(ids) == "thethe\x05" and all(type(i) is int for i in ids)


def test_added_tokens_of_a_fine_tune_are_known(tmp_path):
    write_form(tmp_path, "parts", "gpt2")
    t = read_tokenizer(write(tmp_path, added_tokens_json={"[PAD]": 500},
                             tokenizer_config_json=dict(eos_token="[PAD]")))
    assert (t.eot_token, t.n_vocab, t.decode([500])) == (500, 501, "[PAD]")
    assert 500 not in t.encode_ordinary("[PAD]")


@pytest.mark.parametrize("files, end", [
    (dict(tokenizer_config_json=dict(eos_token="<|im_start|>"), config_json=dict(eos_token_id=2)),
     "<|im_start|>"),
    (dict(tokenizer_config_json=dict(eos_token=dict(content="<|endoftext|>", lstrip=False))),
     "<|endoftext|>"),
    (dict(special_tokens_map_json=dict(eos_token="</s>"),
          generation_config_json=dict(eos_token_id=1)), "</s>"),
    (dict(tokenizer_config_json=dict(eos_token=None), config_json=dict(eos_token_id=[3, 2])),
     "<unk>"),
    (dict(generation_config_json=dict(eos_token_id=0)), "<s>")])
def test_the_end_token_is_the_one_the_files_name(files, end, tmp_path):
    t = read_tokenizer(write(tmp_path, tokenizer_json=whole("gpt2"), **files))
    assert t.decode([t.eot_token]) == end


def test_every_end_token_that_the_files_name_ends_a_completion(tmp_path):
    t = read_tokenizer(write(
        tmp_path, tokenizer_json=whole("gpt2"), config_json=dict(eos_token_id=1),
        tokenizer_config_json=dict(eos_token="</s>"),
        generation_config_json=dict(eos_token_id=[3, 1, 10 ** 6, "x"])))
    assert t.eot_token == 2 and end_tokens(t) == (2, 1, 3), "the tokenizer's own first, each once"


def refusal(function, *args):
    with pytest.raises(BadInput) as caught:
        function(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


MODEL = whole("gpt2")["model"]
BAD_WHOLE = {
    "type": (dict(model=dict(type="Unigram", vocab=[["a", 0.0]])), "Unigram"),
    "type-with-vocab": (dict(model=MODEL | dict(type="WordPiece")), "WordPiece"),
    "byte-fallback": (dict(model=MODEL | dict(byte_fallback=True)), "byte_fallback"),
    "normalizer": (dict(normalizer=dict(type="Lowercase")), "Lowercase"),
    "pre": (dict(pre_tokenizer=dict(type="Metaspace", replacement="x")), "Metaspace"),
    "prefix-space": (dict(pre_tokenizer=BYTE_LEVEL | dict(add_prefix_space=True)),
                     "add_prefix_space"),
    "two-splits": (dict(pre_tokenizer=dict(type="Sequence",
                                           pretokenizers=[DIGITS, DIGITS, BYTE_LEVEL])), "Digits"),
    "grouped-digits": (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[
        DIGITS | dict(individual_digits=False), BYTE_LEVEL])), "Digits"),
    "no-pre": (dict(pre_tokenizer=None), "TypeError"),
    "removed": (dict(pre_tokenizer=json.loads(json.dumps(split(QWEN2)).replace(
        "Isolated", "Removed"))), "Removed"),
    "inverted": (dict(pre_tokenizer=json.loads(json.dumps(split(QWEN2)).replace(
        '"invert": false', '"invert": true'))), "Split"),
    "pattern": (dict(pre_tokenizer=split("(a")), r"'\(a'"),
    "leaves-out": (dict(pre_tokenizer=split(r"\w+")), "leaves"),
    "backtracks": (dict(pre_tokenizer=split(r"(?:)|[\s\S]")), "cannot cut a text"),
    "merge": (dict(model=MODEL | dict(merges=[*MODEL["merges"], "zq zq"])), "merge 81, 'zq zq'"),
    "merge-of-three": (dict(model=MODEL | dict(merges=["t h e"])), "merge 1"),
    "merges": (dict(model=MODEL | dict(merges=5)), "TypeError"),
    "no-merges": (dict(model=dict(type="BPE", vocab={"a": 0})), "merges"),
    "id": (dict(model=MODEL | dict(vocab=MODEL["vocab"] | {"t": -1})), "whole numbers"),
    "text-id": (dict(model=MODEL | dict(vocab=MODEL["vocab"] | {"t": "7"})), "whole numbers"),
    "same-id": (dict(model=MODEL | dict(vocab=MODEL["vocab"] | {"t": MODEL["vocab"]["h"]})),
                "once"),
    "blanks-added": (dict(added_tokens=[dict(id=2, content="  ", special=False)]), "added token"),
}


@pytest.mark.parametrize("name", BAD_WHOLE)
def test_a_tokenizer_json_that_is_not_understood_is_named(name, tmp_path):
    changes, said = BAD_WHOLE[name]
    folder = write(tmp_path, tokenizer_json=whole("gpt2", **changes),
                   config_json=dict(eos_token_id=2))
    message = refusal(read_tokenizer, folder)
    assert "tokenizer.json" in message and regex.search(said, message)


def test_a_regular_expression_that_fails_later_is_one_line_too(tmp_path):
    changes = dict(pre_tokenizer=split(r"(?:(?:a|a)*)*(?!x)b|[\s\S]"))
    t = read_tokenizer(write(tmp_path, tokenizer_json=whole("gpt2", **changes),
                             config_json=dict(eos_token_id=2)))
    assert t.decode(t.encode_ordinary("the cat")) == "the cat"
    assert "cannot cut a text" in refusal(t.encode_ordinary, "a" * 46)


@pytest.mark.parametrize("files, said", [
    ({}, "holds neither"), (dict(vocab_json={"a": 0}), "holds neither"),
    (dict(tokenizer_json="{"), "tokenizer.json"),
    (dict(tokenizer_json="[1]"), "no JSON object"),
    (dict(tokenizer_json='{"a": "' + chr(0xdc80)), "tokenizer.json"),
    (dict(tokenizer_json="[" * 100_000), "tokenizer.json"),
    (dict(tokenizer_json=whole("gpt2")), "no end token"),
    (dict(tokenizer_json=whole("gpt2"), config_json=dict(eos_token_id=10 ** 9)),
     "end token 1000000000"),
    (dict(tokenizer_json=whole("gpt2"), config_json=dict(eos_token_id=[])), "IndexError"),
    (dict(tokenizer_json=whole("gpt2"), tokenizer_config_json=dict(eos_token="<none>")),
     "end token '<none>'"),
    (dict(tokenizer_json=whole("gpt2"),
          tokenizer_config_json=dict(eos_token="</s>", add_prefix_space=True)), "add_prefix_space"),
    (dict(vocab_json=learned("gpt2")[0], merges_txt="t h\n",
          config_json=dict(model_type="qwen2", eos_token_id=2)), "'qwen2'"),
    (dict(vocab_json=learned("gpt2")[0], merges_txt="#version: 0\nth\n",
          config_json=dict(eos_token_id=2)), ".txt: merge 1,")])
def test_a_folder_that_cannot_be_read_is_named(files, said, tmp_path):
    for name, content in files.items():  # a lone surrogate stands for a byte that is no UTF-8
        stem, _, end = name.rpartition("_")
        content = content if type(content) is str else json.dumps(content)
        (tmp_path / f"{stem}.{end}").write_bytes(content.encode("utf-8", "surrogateescape"))
    message = refusal(read_tokenizer, str(tmp_path))
    assert str(tmp_path) in message and said in message


def test_no_folder_is_named(tmp_path):
    assert "no such folder" in refusal(read_tokenizer, str(tmp_path / "x"))


@pytest.mark.parametrize("changes", [
    dict(model="llama"), dict(pre="tekken"), dict(pre=None), dict(pre=["gpt-2"]),
    dict(tokens=None), dict(tokens=[1, 2]),
    dict(merges=3),
    dict(merges=["a"]), dict(eos_token_id=None), dict(eos_token_id=99), dict(eos_token_id=[2])])
def test_gguf_metadata_that_is_not_understood_is_named(changes):
    metadata = dict(model="gpt2", pre="gpt-2", tokens=["a", "b", "</s>"], merges=[], eos_token_id=2)
    gguf_tokenizer({"tokenizer.ggml." + k: v for k, v in metadata.items()})
    assert "x.gguf" in refusal(gguf_tokenizer, {"tokenizer.ggml." + k: v
                                                for k, v in (metadata | changes).items()}, "x.gguf")


def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path):
    rng, text = random.Random(0), json.dumps(whole("qwen2"))
    write(tmp_path, config_json=dict(eos_token_id=2))
    refused = 0
    for _ in range(300):
        damaged = list(text)
        for i in rng.sample(range(len(text)), rng.randint(1, 3)):
            damaged[i] = rng.choice(['"', "{", "]", ",", "0", "-", "\\", "a", "\u0120", ""])
        try:
            read_tokenizer(write(tmp_path, tokenizer_json="".join(damaged))).encode_ordinary(
                TEXTS[7])
        except BadInput as e:
            assert "tokenizer.json" in str(e)
            refused += 1
    assert 50 < refused < 300


def test_the_script_prints_pieces_and_ids(tmp_path, capsys):
    t, text = write_form(tmp_path, "whole", "gpt2"), "the \U0001faa8</s><|endoftext|>"
    for name, n, encode in (("gpt2", 50257, load_tokenizer().encode_ordinary),
                            (str(tmp_path), t.n_vocab, t.encode_ordinary)):
        main([name, text])
        lines = capsys.readouterr().out.splitlines()
        pieces = [line.split(maxsplit=1) for line in lines[:len(encode(text))]]
        said, *notes = lines[len(pieces):]
        assert [int(i) for i, _ in pieces] == encode(text)
        assert any(piece[:2] in ("b'", 'b"') for _, piece in pieces)
        assert f"of {n}" in said
        assert "the same text" in said
        assert any("'<|endoftext|>' in a text" in x for x in notes)
    assert "usage" in refusal(main, [])
