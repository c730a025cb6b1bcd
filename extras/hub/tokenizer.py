"""A published model's own tokenizer, read by the package `tokenizers`. It has the methods of
tiktoken.Encoding that the project calls. Only byte-level BPE: GPT-2, GPT-Neo, RoBERTa, Llama 3,
SmolLM2, Qwen2, Qwen3.

No text becomes a special token, whatever it says. Only encode_marked reads special tokens, in a
chat that a template has written.
"""
import os

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data.tokenizer import GPT2_PATTERN, byte_alphabet
from extras.hub.chat import write_chat
from extras.hub.files import one_line, read_gguf
from common.files import read_json, read_text
from common.script import BadInput

LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
# name in GGUF files -> how it cuts a text into words
GGUF_PATTERNS = {
    "gpt-2": GPT2_PATTERN,
    "smollm": GPT2_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}
BYTE_OF = byte_alphabet()


class Tokenizer:
    """core: a tokenizers.Tokenizer. source: its name in errors. ends: ids, the tokenizer's own
    first. names: {"eos_token": text, ...}, also for the chat template."""

    def __init__(self, core, source, ends, names, template=None):
        if not isinstance(core.decoder, decoders.ByteLevel):
            raise BadInput(f"{source}: only byte-level tokenizers are supported")
        if not ends:
            raise BadInput(f"{source}: no end token; name eos_token in tokenizer_config.json or "
                           "eos_token_id in config.json")
        self.core = core
        self.source = source
        self.end_tokens = tuple(dict.fromkeys(ends))
        self.eot_token = ends[0]
        self.names = names
        self.chat_template = template
        # ids that the model's own tokenizer puts before a text
        some = core.encode("a")
        self.before_text = some.ids[:some.special_tokens_mask.index(0)]
        self.n_vocab = max(core.get_vocab().values()) + 1

    def check_fit(self, vocab_size):
        """Raise BadInput for ids that a model does not have. A fine-tune may add tokens that it
        never uses."""
        added = self.core.get_added_tokens_decoder().keys() - {*self.end_tokens, *self.before_text}
        largest = max(set(self.core.get_vocab().values()) - added)
        if largest >= vocab_size:
            raise BadInput(f"{self.source}: its tokenizer gives ids up to {largest}, but the model "
                           f"has {vocab_size} tokens: they do not belong together")

    def encode_ordinary(self, text):
        self.core.encode_special_tokens = True      # as text
        return self.core.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages, where):
        """Encode a list of messages -> (its text for rewards and logs, its ids)."""
        said, text = write_chat(self.chat_template, self.names, messages, where)
        with one_line(f"{where}: what the chat template writes is no text", "change the template"):
            return said, self.encode_marked(text)

    def encode_marked(self, text):
        """Encode a text, in which the special tokens are written out."""
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
    """Read tokenizer.json, or vocab.json and merges.txt, and the configs beside them."""
    def path_of(name):
        return os.path.join(folder, name)

    def read(name):
        return read_json(path_of(name), missing={})

    def known(ids):
        """The ids of a config that the tokenizer has: one, several or none."""
        ids = ids if isinstance(ids, list) else [ids]
        return [i for i in ids if i is not None and core.id_to_token(i) is not None]

    if os.path.exists(path_of("tokenizer.json")):
        core = tokenizers.Tokenizer.from_file(path_of("tokenizer.json"))
    else:
        core = gpt2_core(path_of("vocab.json"), path_of("merges.txt"))
    config = read("special_tokens_map.json") | read("tokenizer_config.json")
    names = {key: x["content"] if isinstance(x, dict) else x
             for key, x in config.items() if key.endswith("_token") and x}
    own = known(core.token_to_id(names.get("eos_token", "")))
    # no others end a completion if generation_config.json names some
    ends = (known(read("generation_config.json").get("eos_token_id"))
            or own + known(read("config.json").get("eos_token_id")))
    ends = sorted(ends, key=lambda i: i not in own)     # the tokenizer's own first
    template = config.get("chat_template")
    if isinstance(template, list):      # several, each with a name
        template = {x["name"]: x["template"] for x in template}.get("default")
    if os.path.exists(path_of("chat_template.jinja")):
        template = read_text(path_of("chat_template.jinja"))
    return Tokenizer(core, folder, ends, names, template)


def gpt2_core(vocab, merges, vocab_size=None):
    """Read vocab.json and merges.txt, the files of GPT-2, GPT-Neo and RoBERTa. vocab_size: cut them
    down as data/tokenizer.py does."""
    vocabulary, merges = models.BPE.read_file(vocab, merges)
    if vocab_size:
        end = vocab_size - 1
        vocabulary = {token: i for token, i in vocabulary.items() if i < end}
        vocabulary["<|endoftext|>"] = end
        merges = merges[:end - 256]
    core = bpe_core(vocabulary, merges, GPT2_PATTERN)
    # special are the tokens that no merge makes
    made = {left + right for left, right in merges}
    core.add_special_tokens([t for t in vocabulary if t not in BYTE_OF and t not in made])
    return core


def from_gguf(path):
    """Read the tokenizer in the metadata of a GGUF file. It cuts words and merges them as llama.cpp
    does."""
    metadata, _ = read_gguf(path)
    template = metadata.get("tokenizer.chat_template")
    metadata = {key.removeprefix("tokenizer.ggml."): x for key, x in metadata.items()}
    pre = metadata.get("pre")
    if pre not in GGUF_PATTERNS:
        raise BadInput(f"{path}: tokenizer.ggml.pre = {pre!r}: must be one of "
                       f"{', '.join(GGUF_PATTERNS)}, which are byte-level")
    tokens = metadata["tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    core = bpe_core(vocabulary, merges, GGUF_PATTERNS[pre])
    if pre == "llama-bpe":      # a word that is a token is that token, even if no merges make it
        core.model.ignore_merges = True
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        core.pre_tokenizer = pre_tokenizers.Sequence([digits, core.pre_tokenizer])
    kinds = metadata.get("token_type", [])     # 3: control, 4: user-defined
    core.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind in (3, 4)])
    # the beginning of a text; the ends of a text, of a turn and of a message
    ids = {role: metadata[f"{role}_token_id"] for role in ("bos", "eos", "eot", "eom")
           if f"{role}_token_id" in metadata}
    names = {f"{role}_token": tokens[i] for role, i in ids.items()}
    bos = ids.pop("bos", None)
    if bos is not None and metadata.get("add_bos_token", pre == "llama-bpe"):
        core.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)])
    return Tokenizer(core, path, list(ids.values()), names, template)


def bpe_core(vocabulary, merges, pattern):
    """A tokenizers.Tokenizer of byte-level BPE. merges: (left, right), in order."""
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, characters])
    core.decoder = decoders.ByteLevel()
    return core
