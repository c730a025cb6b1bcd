"""
Text to token ids and back, from the files that models are published with: byte-level BPE.

    python -m hub.tokenizer gpt2 "some text"    # pieces and ids; or a model's folder, or .gguf file

A regular expression cuts the text into words. Within a word, the pair of neighbours that comes
first in the list of merges is joined, again and again. tiktoken does both. Its ranks are the bytes
and then the merges in order; the vocabulary says which id a rank has. No text becomes a special
token, whatever it says, but for a chat that a template has written (encode_marked).
"""
import contextlib
import json
import os
import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import tiktoken

from data.tokenizer import GPT2_PATTERN, byte_alphabet, load_tokenizer
from hub.layouts import short
from hub.tensors import gguf_metadata
from run.files import read_json, read_text
from run.script import BadInput, run_script

# what belongs to a tokenizer in a published folder; any of these may be missing
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                   "generation_config.json")

# GPT-2's with every digit alone. Digits are cut off first, so for the blanks before a digit the
# text ends there
DIGITS_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"""
)
LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
GGUF_PATTERNS = {"gpt-2": GPT2_PATTERN, "smollm": DIGITS_PATTERN, "llama-bpe": LLAMA3_PATTERN,
                 "qwen2": QWEN2_PATTERN}

# a pattern must give back all of this
PROBE = "It's a TEST,  12345 of\r\n\n\tevery kind: _x_ $1.50 naïve e\u0301 中文 🙂\u2028\x00 "
BYTE_OF = byte_alphabet()


class Tokenizer:
    """What the project uses of tiktoken.Encoding, with a published vocabulary's numbering.

    vocabulary: {token: id}. merges: "left right" or [left, right], as the files write them.
    Entries that are neither a byte nor made by a merge, such as special tokens, are decoded and
    never encoded. A byte without an entry is left out, and its neighbours are not joined.
    nfc: text is brought to Unicode's form C first. words: tokens that a whole word becomes, even if
    no merge makes them (Llama 3's ignore_merges). BadInput names `source`.
    """

    def __init__(self, source, vocabulary, merges, pattern, *, eos, bos=None, pad=None, nfc=False,
                 words=()):
        tokens = rank_tokens(source, vocabulary, merges, words)
        token_of = {i: token for token, i in vocabulary.items()}
        check_ids(source, vocabulary, token_of, eos)
        ranks = {to_bytes(token): rank for rank, token in enumerate(tokens)}
        self.core = make_core(source, pattern, ranks)
        self.ids = [vocabulary.get(token) for token in tokens]  # rank -> id
        self.nfc = nfc
        self.bytes_of = {i: to_bytes(token) for i, token in token_of.items()}
        self.n_vocab = max(token_of) + 1
        self.eot_token = eos
        self.end_tokens = (eos,)
        self.bos_token = bos if type(bos) is int and bos in token_of else None
        self.pad_token = pad if type(pad) is int and pad in token_of else None
        special = vocabulary.keys() - set(tokens)
        self.special_tokens = {token: i for token, i in vocabulary.items() if token in special}
        self.added_tokens = self.special_tokens     # those that encode_marked recognises
        self.before_text = []       # ids that the model's own tokenizer puts before a text
        self.chat_template = None   # for data/chat.py
        self.names = {}             # what a template knows as bos_token, eos_token, ...

    def encode_ordinary(self, text):
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        with no_panic(self.core.name):
            ranks = self.core.encode_ordinary(text)
        ids = [self.ids[rank] for rank in ranks]
        return [i for i in ids if i is not None]

    def encode_marked(self, text):
        """The ids of a text in which the added tokens stand for themselves."""
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        marks = "|".join(map(re.escape, longest_first)) or "(?!)"   # which is nowhere
        ids = []
        for part in re.split(f"({marks})", text):
            mark = self.added_tokens.get(part)
            ids += self.encode_ordinary(part) if mark is None else [mark]
        return ids

    def encode_ordinary_batch(self, texts, num_threads=2):
        with ThreadPoolExecutor(num_threads) as threads:
            return list(threads.map(self.encode_ordinary, texts))

    def decode(self, ids):
        """The text of these ids. What is no UTF-8 becomes U+FFFD; ids without a token, nothing."""
        raw = b"".join(self.bytes_of.get(i, b"") for i in ids)
        return raw.decode("utf-8", errors="replace")

    def decode_single_token_bytes(self, i):
        return self.bytes_of[i]


def to_bytes(token):
    """The bytes of a token as the files write it. A special token is its own text."""
    if set(token) <= BYTE_OF.keys():
        return bytes(BYTE_OF[c] for c in token)
    return token.encode("utf-8", "replace")


def rank_tokens(source, vocabulary, merges, words):
    """The tokens that encoding can make, by rank: the bytes, what each merge makes, the words.

    Where two merges make the same token, the first counts. tiktoken would also make a word of two
    tokens inside a longer one, so a word that is two tokens must be a merge.
    """
    tokens = dict.fromkeys(BYTE_OF)
    for number, merge in enumerate(merges, 1):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        token = "".join(pair)
        known = {*pair, token} <= vocabulary.keys()
        if len(pair) != 2 or not known or not set(token) <= BYTE_OF.keys():
            raise BadInput(f"{source}: merge {number}, {short(merge)}, is not of two tokens of the "
                           "vocabulary to a third")
        tokens[token] = None
    for word in words:
        halves = ((word[:i], word[i:]) for i in range(1, len(word)))
        if word not in tokens and any({*pair} <= vocabulary.keys() for pair in halves):
            raise BadInput(f"{source}: ignore_merges: no merge makes the token {short(word)}, but "
                           "two tokens could")
        tokens[word] = None
    return list(tokens)


def check_ids(source, vocabulary, token_of, eos):
    whole = all(type(i) is int and i >= 0 for i in token_of)
    if not whole or len(token_of) < len(vocabulary):
        raise BadInput(f"{source}: ids must be whole numbers from 0, each given once")
    if type(eos) is not int or eos not in token_of:
        raise BadInput(f"{source}: end token {short(eos)} is not in the vocabulary")


def make_core(source, pattern, ranks):
    """tiktoken.Encoding of a pattern and {bytes: rank}. BadInput for a pattern that loses text."""
    try:
        core = tiktoken.Encoding(source, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as e:
        raise BadInput(f"{source}: the regular expression {short(pattern)} is not one "
                       f"({str(e)[:200]})") from e
    with no_panic(source):
        ids = core.encode_ordinary(PROBE)
    if core.decode(ids) != PROBE:
        raise BadInput(f"{source}: the regular expression {short(pattern)} leaves parts of a text "
                       "out")
    return core


@contextlib.contextmanager
def no_panic(source):
    """BadInput in place of a panic of tiktoken, which is no Exception: a regular expression may be
    one that backtracks without end."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        why = str(e)[:200]
        raise BadInput(f"{source}: its regular expression cannot cut a text ({why})") from e


# --------------------------------------------------------------------------------------------------
# from a folder

def read_tokenizer(folder):
    """Tokenizer of a published model: tokenizer.json, or vocab.json and merges.txt, in `folder`.

    The end token is what tokenizer_config.json names, else special_tokens_map.json, config.json or
    generation_config.json. RoBERTa's <s> and <pad> are .bos_token and .pad_token. Raises BadInput
    for files that are missing, broken or not byte-level BPE as known here.
    """
    if not os.path.isdir(folder):
        raise BadInput(f"{folder}: no such folder")
    names = ("tokenizer_config.json", "special_tokens_map.json", "config.json",
             "generation_config.json")
    files = {name: read_json(os.path.join(folder, name), missing={}) for name in names}
    path = os.path.join(folder, "tokenizer.json")
    try:
        whole = read_json(path, missing={})
        if whole:
            vocabulary, merges, pattern, nfc, words = read_whole(path, whole)
        else:
            path = os.path.join(folder, "merges.txt")
            vocabulary, merges = read_vocab_and_merges(folder, files["config.json"])
            pattern, nfc, words = GPT2_PATTERN, False, ()
        if files["tokenizer_config.json"].get("add_prefix_space"):
            raise BadInput(f"{folder}: add_prefix_space = true in tokenizer_config.json is not "
                           "supported")
        special = {role: special_id(files.values(), vocabulary, role)
                   for role in ("eos", "bos", "pad")}
        if special["eos"] is None:
            raise BadInput(f"{folder}: no end token; name eos_token in tokenizer_config.json or "
                           "eos_token_id in config.json")
        tokenizer = Tokenizer(path, vocabulary, merges, pattern, nfc=nfc, words=words, **special)
        tokenizer.end_tokens = all_ends(files.values(), tokenizer)
        config = files["tokenizer_config.json"]
        if whole:
            tokenizer.added_tokens = {x["content"]: x["id"] for x in whole.get("added_tokens", [])}
            tokenizer.before_text = ids_before(whole.get("post_processor"), tokenizer)
        elif config.get("add_bos_token") and special["bos"] is not None:
            tokenizer.before_text = [special["bos"]]
        tokenizer.chat_template = read_template(folder, config.get("chat_template"))
        tokenizer.names = names_of([config, files["special_tokens_map.json"]])
        return tokenizer
    except BadInput:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        raise BadInput(f"{path}: not a tokenizer file as published "
                       f"({type(e).__name__}: {str(e)[:200]})") from e


def read_vocab_and_merges(folder, config):
    """(vocabulary, merges) of the two files that GPT-2, GPT-Neo and RoBERTa come with."""
    vocabulary = read_json(os.path.join(folder, "vocab.json"), missing={})
    vocabulary |= read_json(os.path.join(folder, "added_tokens.json"), missing={})
    path = os.path.join(folder, "merges.txt")
    if not vocabulary or not os.path.exists(path):
        raise BadInput(f"{folder}: holds neither tokenizer.json nor vocab.json and merges.txt")
    kind = config.get("model_type", "gpt2")
    if kind not in ("gpt2", "gpt_neo", "roberta"):
        raise BadInput(f"{folder}: tokenizer.json is missing, and vocab.json does not say how "
                       f"{short(kind)} cuts text")
    with open(path, encoding="utf-8", newline="\n") as f:
        lines = [line.strip() for line in f]
    return vocabulary, [line for line in lines if line and not line.startswith("#version")]


def read_whole(path, content):
    """(vocabulary, merges, pattern, nfc, words) of a tokenizer.json. BadInput for others."""
    model = content["model"]
    normalizer = content.get("normalizer")
    added = content.get("added_tokens", [])
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    unknown = {key: model[key] for key in options if model.get(key)}
    if model.get("type", "BPE") != "BPE":
        unknown["type"] = model["type"]
    if normalizer not in (None, {"type": "NFC"}):
        unknown["normalizer"] = normalizer
    for token in added:
        if not token["content"].strip():
            unknown["added token of blanks"] = token["content"]
    if unknown:
        raise BadInput(f"{path}: not byte-level BPE as known here: {str(unknown)[:300]}")
    special = {token["content"]: token["id"] for token in added}
    words = ()
    if model.get("ignore_merges"):
        words = [token for token in model["vocab"]
                 if token not in special and set(token) <= BYTE_OF.keys()]
    pattern = pattern_of(path, content["pre_tokenizer"])
    return model["vocab"] | special, model["merges"], pattern, normalizer is not None, words


def pattern_of(path, pre):
    """The regular expression that cuts as a pre_tokenizer of tokenizer.json does."""
    *cuts, last = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if last["type"] == "ByteLevel" and last["add_prefix_space"] is False and len(cuts) < 2:
        cut = cuts[0] if cuts else None
        cuts_itself = last.get("use_regex", True)
        if cuts_itself and cut is None:
            return GPT2_PATTERN
        if cuts_itself and cut == {"type": "Digits", "individual_digits": True}:
            return DIGITS_PATTERN
        isolates = cut and (cut["type"], cut.get("behavior")) == ("Split", "Isolated")
        if isolates and cut.get("invert") is False and not cuts_itself:
            return cut["pattern"]["Regex"]
    raise BadInput(f"{path}: pre_tokenizer {json.dumps(pre)[:300]}: only ByteLevel is known here, "
                   "alone or after Digits or Split")


def special_id(files, vocabulary, role):
    """Id of the "eos", "bos" or "pad" token by the first of the files that knows it, else None."""
    for content in files:
        token = content.get(f"{role}_token")
        if isinstance(token, dict):
            token = token["content"]
        if token is not None:
            return vocabulary.get(token, token)  # a token that is not there is refused by its name
        i = content.get(f"{role}_token_id")
        if isinstance(i, list):
            i = i[0]
        if i is not None:
            return i
    return None


def all_ends(files, tokenizer):
    """Its end token, then every other one that the files name: any of them ends a completion."""
    ends = [tokenizer.eot_token]
    for content in files:
        named = content.get("eos_token_id")
        ends += named if isinstance(named, list) else [named]
    known = [i for i in ends if type(i) is int and i in tokenizer.bytes_of]
    return tuple(dict.fromkeys(known))


def ids_before(post_processor, tokenizer):
    """The ids that a post_processor of tokenizer.json puts before a text, such as Llama 3's <bos>.

    What it puts after a text stays out: prompts are starts of texts.
    """
    post = post_processor or {}
    ids = []
    for step in post["processors"] if post.get("type") == "Sequence" else [post]:
        for part in step["single"] if step.get("type") == "TemplateProcessing" else []:
            if "SpecialToken" not in part:
                break
            ids += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    unknown = [i for i in ids if i not in tokenizer.bytes_of]
    if unknown:
        raise ValueError(f"post_processor puts the unknown id {unknown[0]} before a text")
    return ids


def read_template(folder, named):
    """The chat template of a folder, or None.

    It is a file of its own, or what tokenizer_config.json has: a text, or several by their names.
    """
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(path):
        return read_text(path)
    if isinstance(named, list):
        return {x["name"]: x["template"] for x in named}.get("default")
    return named


def names_of(files):
    """{"bos_token": its text, ...} of the special tokens that the first of the files names."""
    names = {}
    for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        for content in files:
            token = content.get(f"{role}_token")
            token = token["content"] if isinstance(token, dict) else token
            if token is not None:
                names.setdefault(f"{role}_token", token)
    return names


# --------------------------------------------------------------------------------------------------
# from a GGUF file

def gguf_tokenizer(metadata, source="the GGUF file"):
    """Tokenizer from the metadata of a GGUF file. BadInput when it is not known here."""
    def value(key):
        return metadata.get(f"tokenizer.ggml.{key}")

    model, pre = value("model"), value("pre")
    if model != "gpt2" or str(pre) not in GGUF_PATTERNS:
        raise BadInput(f"{source}: tokenizer.ggml.model = {short(model)}, pre = {short(pre)}: "
                       f"must be 'gpt2' and one of {', '.join(GGUF_PATTERNS)}")
    tokens, merges = value("tokens"), value("merges")
    for texts in (tokens, merges):
        if type(texts) is not list or not all(type(text) is str for text in texts):
            raise BadInput(f"{source}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing "
                           "or no list of texts")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(source, vocabulary, merges, GGUF_PATTERNS[pre], nfc=pre == "qwen2",
                          eos=value("eos_token_id"), bos=value("bos_token_id"),
                          pad=value("padding_token_id"))
    ends = [value("eot_token_id"), value("eom_token_id")]   # of a turn, of a message
    tokenizer.end_tokens = all_ends([dict(eos_token_id=ends)], tokenizer)
    roles = dict(bos=tokenizer.bos_token, eos=tokenizer.eot_token, pad=tokenizer.pad_token)
    tokenizer.names = {f"{role}_token": tokens[i] for role, i in roles.items() if i is not None}
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    kinds = value("token_type")
    if type(kinds) is list:     # 3: control, 4: user-defined
        tokenizer.added_tokens = {tokens[i]: i for i, kind in enumerate(kinds) if kind in (3, 4)}
    puts_bos = value("add_bos_token")
    if puts_bos is None:
        puts_bos = pre == "llama-bpe"       # llama.cpp's default
    if puts_bos and tokenizer.bos_token is not None:
        tokenizer.before_text = [tokenizer.bos_token]
    return tokenizer


# --------------------------------------------------------------------------------------------------
# the command

def main(argv):
    if len(argv) != 2:
        raise BadInput('usage: python -m hub.tokenizer gpt2_or_folder "some text"')
    name, text = argv
    if name.endswith(".gguf"):
        tokenizer = gguf_tokenizer(gguf_metadata(name), name)
    elif name == "gpt2":
        tokenizer = load_tokenizer()
    else:
        tokenizer = read_tokenizer(name)
    show(tokenizer, text)


def show(tokenizer, text):
    """Print the pieces of a text with their ids, and what the tokenizer makes of them."""
    ids = tokenizer.encode_ordinary(text)
    for i in ids:
        piece = tokenizer.decode([i])
        if chr(0xfffd) in piece:  # a part of a character is shown as its bytes
            piece = tokenizer.decode_single_token_bytes(i)
        print(f"{i:8}  {piece!r}")
    again = tokenizer.decode(ids)
    same = "the same text" if again == text else repr(again)
    end = tokenizer.eot_token
    print(f"{len(ids)} tokens for {len(text)} characters; decoded to {same}; the end token is "
          f"{end}, {tokenizer.decode([end])!r}, of {tokenizer.n_vocab}")
    special = getattr(tokenizer, "special_tokens", {"<|endoftext|>": end})
    for token, i in special.items():
        if token in text:
            print(f"note: {token!r} in a text is no special token; the one by that name has id {i}")


if __name__ == "__main__":
    run_script(main)
