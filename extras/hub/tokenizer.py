"""A published model's own tokenizer, read by the package `tokenizers`, with the few methods of
tiktoken.Encoding that the project calls. Byte-level BPE only: GPT-2, GPT-Neo, RoBERTa, Llama 3,
SmolLM2, Qwen2, Qwen3.

No text becomes a special token, whatever it says, but for a chat that a template has written
(encode_marked).
"""
import itertools
import os

from data.tokenizer import GPT2_PATTERN, byte_alphabet
from extras.hub.chat import encode_chat
from extras.hub.files import read_gguf
from common.files import read_json, read_text
from common.script import BadInput, optional

# how GGUF files name the ways to cut a text into words
LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
GGUF_PATTERNS = {"gpt-2": GPT2_PATTERN, "smollm": GPT2_PATTERN, "llama-bpe": LLAMA3_PATTERN,
                 "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")}
BYTE_OF = byte_alphabet()


class Tokenizer:
    """core: a tokenizers.Tokenizer. ends, bos: ids, the first of each first. names: what a chat
    template knows as bos_token, eos_token, ... `source` is named in errors."""

    def __init__(self, core, source, ends, bos=(), template=None, names=()):
        if "ByteLevel" not in str(core.decoder):
            raise BadInput(f"{source}: not a byte-level tokenizer, the only kind known here")
        if not ends:
            raise BadInput(f"{source}: no end token; name eos_token in tokenizer_config.json or "
                           "eos_token_id in config.json")
        self.core = core
        self.source = source
        self.end_tokens = tuple(dict.fromkeys(ends))
        self.eot_token = ends[0]
        self.bos_token = bos[0] if bos else None
        self.chat_template = template
        self.names = dict(names)
        # ids that the model's own tokenizer puts before a text
        some = core.encode("a")
        before = zip(some.ids, itertools.takewhile(bool, some.special_tokens_mask))
        self.before_text = [i for i, _ in before]
        ids = core.get_vocab().values()
        self.n_vocab = max(ids) + 1
        # what the model must know: a fine-tune may have added tokens that it never uses
        added = core.get_added_tokens_decoder()
        self.largest = max(*(i for i in ids if i not in added), *ends, *self.before_text)

    def encode_ordinary(self, text):
        return self.encode_ordinary_batch([text])[0]

    def encode_ordinary_batch(self, texts, num_threads=None):
        self.core.encode_special_tokens = True     # as text
        rows = self.core.encode_batch_fast(texts, add_special_tokens=False)
        return [row.ids for row in rows]

    def encode_chat(self, messages, where):
        return encode_chat(self, messages, where)

    def encode_marked(self, text):
        """The ids of a text in which the added tokens stand for themselves."""
        self.core.encode_special_tokens = False
        return self.core.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.core.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, i):
        token = self.core.id_to_token(i) or ""
        if set(token) <= BYTE_OF.keys():
            return bytes(BYTE_OF[c] for c in token)
        return token.encode()


def from_folder(folder):
    """Tokenizer of tokenizer.json, or of vocab.json and merges.txt."""
    with optional("-r requirements-hub.txt"):
        import tokenizers

    def read(name):
        return read_json(os.path.join(folder, name), missing={})

    path = os.path.join(folder, "tokenizer.json")
    core = tokenizers.Tokenizer.from_file(path) if os.path.exists(path) else gpt2_core(folder)
    config = read("tokenizer_config.json")
    texts = read("special_tokens_map.json") | config    # each a text or {"content": text}
    names = {key: x["content"] if isinstance(x, dict) else x
             for key, x in texts.items() if key.endswith("_token") and x}
    model = read("config.json")
    own = ids_of("eos", core, model, names)
    ends = ids_of("eos", core, read("generation_config.json"), {})      # it alone decides
    ends = [i for i in own[:1] if i in ends] + (ends or own)            # the tokenizer's own first
    bos = ids_of("bos", core, model, names)
    template = config.get("chat_template")
    if isinstance(template, list):      # several by their names
        template = {x["name"]: x["template"] for x in template}.get("default")
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(path):
        template = read_text(path)
    return Tokenizer(core, folder, ends, bos, template, names)


def gpt2_core(folder):
    """GPT-2's, GPT-Neo's and RoBERTa's, from their two files."""
    from tokenizers import models

    vocabulary, merges = models.BPE.read_file(
        os.path.join(folder, "vocab.json"), os.path.join(folder, "merges.txt"))
    core = bpe_core(vocabulary, merges, GPT2_PATTERN)
    made = {left + right for left, right in merges}
    core.add_special_tokens([t for t in vocabulary if t not in BYTE_OF and t not in made])
    return core


def ids_of(role, core, content, names):
    """The ids that are named for a role, "eos" or "bos", and that the tokenizer has."""
    named = content.get(f"{role}_token_id")
    ids = named if isinstance(named, list) else [named]
    own = core.token_to_id(names.get(f"{role}_token", ""))
    return [i for i in [own, *ids] if i is not None and core.id_to_token(i) is not None]


def from_gguf(path):
    """Tokenizer of the metadata of a GGUF file."""
    with optional("-r requirements-hub.txt"):
        from tokenizers.processors import TemplateProcessing
    metadata, _ = read_gguf(path, weights=False)
    template = metadata.get("tokenizer.chat_template")
    metadata = {key.removeprefix("tokenizer.ggml."): x for key, x in metadata.items()}
    pre = metadata.get("pre")
    if metadata.get("model") != "gpt2" or pre not in GGUF_PATTERNS:
        raise BadInput(f"{path}: tokenizer {metadata.get('model')!r}, {pre!r}: must be 'gpt2' and "
                       f"one of {', '.join(GGUF_PATTERNS)}")
    tokens = metadata["tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    core = bpe_core(vocabulary, merges, GGUF_PATTERNS[pre], pre == "qwen2", pre == "smollm")
    # a word that is a token is that token, even if no merges lead to it
    core.model.ignore_merges = pre == "llama-bpe"
    kinds = metadata.get("token_type", [])     # 3: control, 4: user-defined
    core.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind in (3, 4)])

    roles = ("eos", "eot", "eom", "bos")    # the end of a text, a turn, a message; the beginning
    ids = {role: metadata[f"{role}_token_id"] for role in roles if f"{role}_token_id" in metadata}
    names = {f"{role}_token": tokens[i] for role, i in ids.items()}
    bos = [ids.pop("bos")] if "bos" in ids else []
    if bos and metadata.get("add_bos_token", pre == "llama-bpe"):     # llama.cpp's default
        token = tokens[bos[0]]
        core.post_processor = TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, bos[0])])
    return Tokenizer(core, path, list(ids.values()), bos, template, names)


def bpe_core(vocabulary, merges, pattern, nfc=False, digits=False):
    """A tokenizers.Tokenizer of byte-level BPE. merges: (left, right), in order."""
    with optional("-r requirements-hub.txt"):
        import tokenizers
    from tokenizers import decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    words = Split(tokenizers.Regex(pattern), "isolated")
    cuts = [words, ByteLevel(add_prefix_space=False, use_regex=False)]
    core.pre_tokenizer = Sequence([Digits(individual_digits=True), *cuts] if digits else cuts)
    core.decoder = decoders.ByteLevel()
    if nfc:
        core.normalizer = normalizers.NFC()
    return core
