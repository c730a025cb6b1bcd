"""Models by strangers: whatever stands in their files, they are read or refused in one line."""
import json
import random

import pytest
import torch

import hub.policy
from hub.tensors import save_tensors
from hub.tokenizer import Tokenizer
from model import GPT
from run.script import BadInput
from test_hub_policy import GPT2, LLAMA, LLAMA3, NEO, QWEN3, make_tensors, write_gguf
from test_hub_tensors import mutate
from test_hub_tokenizer import whole

# what the text of a JSON value becomes
HOSTILE = ["null", "true", "-1", "0", "1", "7", "1.5", "1e400", "NaN", "-Infinity", "9" * 400,
           "9" * 5000,
           str(2 ** 31), str(2 ** 63), str(10 ** 12), '""', '"x"', r'"\ud800"', r'"\u0000"',
           '"' + "x" * 10 ** 5 + '"', "[]", "{}", "[null]", '{"a": 1}', '{"a": 1, "a": 2}', 
           "[[[]]]",
           "[" * 800 + "]" * 800, '{"a":' * 800 + "1" + "}" * 800, "[" * 10 ** 5,
           '{"a":' * 10 ** 5]
COUNT = 60
BASES = [GPT2, NEO, QWEN3, LLAMA | dict(rope_scaling=LLAMA3)]


def damaged(rng, content):
    """The text of a JSON file in which some values are others."""
    content = json.loads(json.dumps(content))
    texts = rng.choices(HOSTILE, k=rng.choice((1, 1, 1, 2, 3)))
    for number in range(len(texts)):
        part, deeper = content, True
        while deeper:
            key = rng.choice(list(part) if type(part) is dict else range(len(part)))
            deeper = type(part[key]) in (dict, list) and part[key] and rng.random() < 0.8
            if deeper:
                part = part[key]
        part[key] = f"@{number}@"
    text = json.dumps(content)
    for number, hostile in enumerate(texts):
        text = text.replace(f'"@{number}@"', hostile)
    return text


def outcome(path):
    """Read a model and its tokenizer and use them. True when that worked, False when one line
    says why not."""
    try:
        model, where = hub.policy.load(str(path))
        tokenizer = hub.policy.tokenizer_of(where)
        ids = tokenizer.encode_ordinary("the other there")
        assert type(tokenizer) is Tokenizer and type(tokenizer.decode(ids)) is str
    except BadInput as e:
        line = str(e)
        assert str(path) in line, line[:300]
        assert len(line.splitlines()) == 1 and len(line) < 2000, line[:300]
        return False
    assert type(model) is GPT
    with torch.no_grad():
        assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, model.config.n_embd)
    return True


def write_folder(folder, base, tokenizer):
    save_tensors(str(folder / "model.safetensors"), make_tensors(base))
    (folder / "config.json").write_text(json.dumps(base | dict(eos_token_id=2)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert outcome(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("base", BASES, ids=lambda base: base["model_type"])
def test_json_with_hostile_values_is_read_or_refused(file, base, tmp_path):
    rng = random.Random(base["model_type"] + file)
    tokenizer = whole("qwen2")
    write_folder(tmp_path, base, tokenizer)
    content = tokenizer if file == "tokenizer.json" else base | dict(eos_token_id=2)
    were_read = 0
    for _ in range(COUNT):
        (tmp_path / file).write_text(damaged(rng, content))
        were_read += outcome(tmp_path)
    assert were_read < COUNT, "no file was refused"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors", "m.gguf"])
def test_files_with_damaged_bytes_are_read_or_refused(file, tmp_path):
    rng = random.Random(file)
    path = tmp_path
    if file == "m.gguf":
        content = whole("llama3")
        vocabulary = content["model"]["vocab"] | {
            token["content"]: token["id"] for token in content["added_tokens"]}
        tokens = {"model": "gpt2", "pre": "llama-bpe", "eos_token_id": 2,
                  "tokens": sorted(vocabulary, key=vocabulary.get),
                  "merges": content["model"]["merges"]}
        path = tmp_path / file
        write_gguf(path, LLAMA, make_tensors(LLAMA), "llama",
                   **{f"tokenizer.ggml.{key}": value for key, value in tokens.items()})
        assert outcome(path)
    else:
        write_folder(path, LLAMA, whole("llama3"))
    whole_file = (tmp_path / file).read_bytes()
    were_read = 0
    for _ in range(COUNT):
        (tmp_path / file).write_bytes(mutate(rng, whole_file))
        were_read += outcome(path)
    assert were_read < COUNT, "no file was refused"
