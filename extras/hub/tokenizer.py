"""A published model's tokenizer, read by the package `tokenizers`, with the methods of
tiktoken.Encoding that the project calls. Only byte-level BPE: GPT-2, GPT-Neo, RoBERTa, Llama 3,
SmolLM2, Qwen2, Qwen3.

A text never becomes a special token, whatever it says. Only encode_marked reads special tokens, in
a chat that a template has written.
"""
import math
import os

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data.tokenizer import GPT2_PATTERN, GPT2_SIZE, byte_alphabet
from extras.hub.chat import write_chat
from extras.hub.files import read_gguf
from common.errors import BadInput, shown
from common.files import read_json, read_text

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
# model_type -> the class of its tokenizer, if tokenizer_config.json does not name one
CLASSES = {"gpt2": "GPT2Tokenizer", "gpt_neo": "GPT2Tokenizer", "roberta": "RobertaTokenizer",
           "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
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
        self.template_arguments = {}    # further ones, such as enable_thinking
        # ids that the model's tokenizer puts before a text
        example = core.encode("a")
        self.before_text = example.ids[:example.special_tokens_mask.index(0)]
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

    @property
    def special_tokens_set(self):
        """The special tokens, written out, under tiktoken's name for them."""
        return {token.content for token in self.core.get_added_tokens_decoder().values()
                if token.special}

    def give_template(self, arguments):
        """Set variables of the chat template: {name: value}. BadInput for a name that it does not
        use, and would ignore."""
        for name in arguments:
            if name not in (self.chat_template or ""):
                raise BadInput(f"chat_template_kwargs: the chat template of {self.source} does not "
                               f"ask for {shown(name)}")
        self.template_arguments = arguments

    def encode_chat(self, messages, where):
        """Encode a list of messages -> (its text for rewards and logs, its ids)."""
        names = self.names | self.template_arguments
        said, text = write_chat(self.chat_template, names, messages, where)
        return said, self.encode_marked(text)

    def encode_marked(self, text):
        """Encode a text with special tokens written out."""
        self.core.encode_special_tokens = False
        return self.core.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self.core.decode(ids, skip_special_tokens=False)


def from_folder(folder):
    """Read tokenizer.json, or vocab.json and merges.txt, and the configs beside them."""
    def path_of(name):
        return os.path.join(folder, name)

    def read(name):
        return read_json(path_of(name), missing={})

    def known(ids):
        """The ids of a config that the tokenizer has: one, several or none."""
        ids = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        return [i for i in ids if core.id_to_token(i) is not None]

    config = read("special_tokens_map.json") | read("tokenizer_config.json")
    template = config.get("chat_template")
    if isinstance(template, list):      # several, each with a name
        template = {x["name"]: x["template"] for x in template}.get("default")
    if os.path.exists(path_of("chat_template.jinja")):
        template = read_text(path_of("chat_template.jinja"))
    names = {key: content_of(x) for key, x in config.items() if key.endswith("_token")}
    names = {key: x for key, x in names.items() if isinstance(x, str)}      # not add_bos_token

    added = added_tokens(config, read("added_tokens.json"), names, template or "")
    model = read("config.json")
    kind = config.get("tokenizer_class") or CLASSES.get(model.get("model_type"), "")
    kind = kind.removesuffix("Fast")
    in_one = os.path.exists(path_of("tokenizer.json"))
    if in_one:
        core = tokenizers.Tokenizer.from_file(path_of("tokenizer.json"))
        without_training(core)
    else:
        core = from_two_files(folder, kind, {token: i for i, (token, _) in added.items()})
    add_tokens(core, folder, added, config, names)
    if kind in CLASSES.values():
        set_prefix_space(core, bool(config.get("add_prefix_space")))
    if not in_one and config.get("add_bos_token"):
        put_before(core, names.get("bos_token"))
    eos = known(core.token_to_id(names.get("eos_token", "")))
    eos = [i for i in eos if i < model.get("vocab_size", math.inf)]     # the model may lack it
    # if generation_config.json names end tokens, they are the only ones
    ends = (known(read("generation_config.json").get("eos_token_id"))
            or eos + known(model.get("eos_token_id")))
    ends = sorted(ends, key=lambda i: i not in eos)     # the tokenizer's own first
    return Tokenizer(core, folder, ends, names, template)


def content_of(token):
    """The text of a token in a config: a text, or a dict that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def extra_tokens(config):
    """Further special tokens that a tokenizer_config.json names, in order."""
    return [content_of(token) for key in ("additional_special_tokens", "extra_special_tokens")
            for token in config.get(key) or ()]


def added_tokens(config, numbers, names, template):
    """The tokens that a folder adds to its vocabulary -> {id: (token, whether it is special)}.
    numbers: {token: id} from added_tokens.json, which does not say what is special: we take tokens
    that have a name, or that the chat template writes."""
    named = {*names.values(), *extra_tokens(config)}
    added = {i: (token, token in named or token in template) for token, i in numbers.items()}
    for i, token in (config.get("added_tokens_decoder") or {}).items():
        added[int(i)] = token["content"], bool(token.get("special"))
    return dict(sorted(added.items()))


def add_tokens(core, folder, added, config, names):
    """core <- the tokens of added_tokens, then named tokens that do not have an id yet."""
    there = core.get_added_tokens_decoder()
    for i, (token, special) in added.items():
        if i not in there or there[i].content != token:
            core.add_tokens([tokenizers.AddedToken(token, normalized=not special, special=special)])
        if core.token_to_id(token) != i:
            raise BadInput(f"{folder}: its configs give {shown(token)} the id {i}, and its "
                           f"tokenizer has {core.token_to_id(token)}: they do not belong together")
    others = [token for token in (*names.values(), *extra_tokens(config))
              if core.token_to_id(token) is None]
    core.add_special_tokens(others)


def without_training(core):
    """core <- without what its training has left in tokenizer.json: truncation, padding, and
    dropout of merges."""
    core.no_truncation()
    core.no_padding()
    if getattr(core.model, "dropout", None):
        core.model.dropout = None


def set_prefix_space(core, value):
    """core <- whether it puts a space before a text that does not begin with one."""
    cut = core.pre_tokenizer
    for part in cut if isinstance(cut, pre_tokenizers.Sequence) else [cut]:
        if isinstance(part, pre_tokenizers.ByteLevel):
            part.add_prefix_space = value


def put_before(core, token):
    """core <- a special token to begin every text with."""
    core.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], special_tokens=[(token, core.token_to_id(token))])


def from_two_files(folder, kind, added):
    """Read vocab.json and merges.txt as the class `kind` of transformers does. added: {token: id}
    of further tokens."""
    files = [os.path.join(folder, name) for name in ("vocab.json", "merges.txt")]
    if not all(map(os.path.exists, files)):
        raise BadInput(f"{folder}: has neither tokenizer.json nor vocab.json and merges.txt. (Only "
                       "byte-level BPE is supported; tokenizer.model is sentencepiece's, and is "
                       "not read)")
    if kind not in CLASSES.values():
        raise BadInput(f"{folder}: tokenizer_class = {shown(kind)}: without tokenizer.json only "
                       f"{', '.join(dict.fromkeys(CLASSES.values()))} are supported")
    core = gpt2_core(*files, added=added)
    if kind == "Qwen2Tokenizer":
        core.normalizer = normalizers.NFC()
        core.pre_tokenizer = cut_by(GGUF_PATTERNS["qwen2"])
    return core


def gpt2_core(vocab, merges, vocab_size=None, added=None):
    """Read vocab.json and merges.txt, the files of GPT-2, GPT-Neo and RoBERTa. vocab_size: cut them
    down as data/tokenizer.py does. added: {token: id} of further tokens."""
    vocabulary, merges = models.BPE.read_file(vocab, merges)
    if vocab_size:
        end = min(vocab_size, GPT2_SIZE) - 1
        vocabulary = {token: i for token, i in vocabulary.items() if i < end}
        vocabulary["<|endoftext|>"] = end
        merges = merges[:end - 256]
    added = added or {}
    core = bpe_core(added | vocabulary, merges, GPT2_PATTERN)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)   # by the same pattern
    # tokens that no merge makes are special
    made = {left + right for left, right in merges}
    core.add_special_tokens([token for token in vocabulary if token not in BYTE_OF
                             and token not in made and token not in added])
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
        put_before(core, tokens[bos])
    return Tokenizer(core, path, list(ids.values()), names, template)


def cut_by(pattern):
    """A pre-tokenizer that cuts a text into words by a pattern, and writes them in the characters
    of BYTE_OF."""
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, characters])


def bpe_core(vocabulary, merges, pattern):
    """A tokenizers.Tokenizer of byte-level BPE. merges: (left, right), in order."""
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = cut_by(pattern)
    core.decoder = decoders.ByteLevel()
    return core
