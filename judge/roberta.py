"""A published judge: RoBERTa (Liu et al. 2019) with a classification head, from config.json, tokenizer files and safetensors.

Such are facebook/roberta-hate-speech-dynabench-r4-target (labels nothate, hate) and s-nlp/roberta_toxicity_classifier
(neutral, toxic). Tensors keep their published names. B texts, T tokens, C = hidden_size, nh heads of hs = C / nh.
"""
import os

import torch
from torch.nn import functional as F

from hub.fetch import fetch
from hub.tensors import load_tensors
from hub.tokenizer import read_tokenizer
from judge.scorer import check_finite, log_odds
from run.files import read_json
from run.script import BadInput

TOXIC = ("hate", "toxic", "toxicity")  # labels that need not be pointed out
CONFIG = dict(vocab_size=50265, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
              max_position_embeddings=512, type_vocab_size=2, pad_token_id=1)  # what config.json leaves out is this
UNUSED = ("roberta.embeddings.position_ids", "roberta.pooler.dense.weight", "roberta.pooler.dense.bias")  # in old files


def classify(w, c, idx, real):
    """Tensors w by name, config c, idx (B, T) with <s> first, real (B, T) False on padding at the right -> logits (B, labels).

    Unlike GPT: each LayerNorm comes after its residual sum, every token sees every other, and positions count from
    pad_token_id + 1.
    """
    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], c["layer_norm_eps"])

    def heads(x):
        return x.view(*x.shape[:2], c["num_attention_heads"], -1).transpose(1, 2)                   # (B, nh, T, hs)

    e = "roberta.embeddings."
    pos = c["pad_token_id"] + real.cumsum(1) * real                                                 # (B, T)
    x = w[e + "word_embeddings.weight"][idx] + w[e + "position_embeddings.weight"][pos] + w[e + "token_type_embeddings.weight"][0]
    x = norm(x, e + "LayerNorm")                                                                    # (B, T, C)
    for i in range(c["num_hidden_layers"]):
        layer = f"roberta.encoder.layer.{i}."
        q, k, v = (heads(linear(x, layer + "attention.self." + name)) for name in ("query", "key", "value"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :]).transpose(1, 2).reshape(x.shape)
        x = norm(x + linear(y, layer + "attention.output.dense"), layer + "attention.output.LayerNorm")
        y = linear(F.gelu(linear(x, layer + "intermediate.dense")), layer + "output.dense")
        x = norm(x + y, layer + "output.LayerNorm")
    return linear(torch.tanh(linear(x[:, 0], "classifier.dense")), "classifier.out_proj")


def shapes(c, labels):
    """{name: shape} of all tensors."""
    C, wide, e = c["hidden_size"], c["intermediate_size"], "roberta.embeddings."
    linears, norms = {"classifier.dense": (C, C), "classifier.out_proj": (labels, C)}, [e + "LayerNorm"]
    for i in range(c["num_hidden_layers"]):
        layer = f"roberta.encoder.layer.{i}."
        linears |= {layer + "attention." + name: (C, C) for name in ("self.query", "self.key", "self.value", "output.dense")}
        linears |= {layer + "intermediate.dense": (wide, C), layer + "output.dense": (C, wide)}
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
    found = {e + name + "_embeddings.weight": (c[size], C) for name, size in (
        ("word", "vocab_size"), ("position", "max_position_embeddings"), ("token_type", "type_vocab_size"))}
    for name, shape in [*linears.items(), *((name, (C,)) for name in norms)]:
        found |= {name + ".weight": shape, name + ".bias": shape[:1]}
    return found


def read_roberta(name):
    """(tensors, config, names of the labels, tokenizer) of a folder or published name. BadInput names what does not fit."""
    folder = fetch(name)
    given = read_json(os.path.join(folder, "config.json"))
    c = CONFIG | dict(layer_norm_eps=1e-12) | given
    kind = given.get("model_type"), c.get("hidden_act", "gelu")
    if kind != ("roberta", "gelu"):
        raise BadInput(f"{name}: model_type and hidden_act in config.json are {kind}: a judge must be 'roberta' with 'gelu'")
    bad = [key for key in CONFIG if type(c[key]) is not int or not 0 < c[key] < (1000 if key.startswith("num") else 10 ** 6)]
    bad += ["layer_norm_eps"] if type(c["layer_norm_eps"]) is not float else []
    bad = bad or ["hidden_size", "num_attention_heads"] * (c["hidden_size"] % c["num_attention_heads"] > 0) + [
        "max_position_embeddings", "pad_token_id"] * (c["max_position_embeddings"] < c["pad_token_id"] + 4)
    if bad:
        raise BadInput(f"{name}: config.json gives {', '.join(f'{key} = {c[key]!r}' for key in bad)}, which cannot be")
    try:
        named = {int(i): str(label) for i, label in c.get("id2label", {0: "LABEL_0", 1: "LABEL_1"}).items()}
        labels = [named[i] for i in range(len(named))]
    except (AttributeError, ValueError, KeyError) as e:
        raise BadInput(f"{name}: id2label in config.json must name the labels 0, 1, ...") from e
    w = {key: x for key, x in load_tensors(folder).items() if key not in UNUSED}
    if not any(key.startswith("classifier.") for key in w):
        raise BadInput(f"{name}: a base model, it has no classifier.* tensors; a judge must be trained to classify texts")
    right, found = shapes(c, len(labels)), {key: tuple(x.shape) for key, x in w.items()}
    wrong = [f"{key} is {found.get(key, 'missing')}, must be {shape}" for key, shape in right.items() if found.get(key) != shape]
    wrong += [f"{key} {found[key]} is not RoBERTa's" for key in found if key not in right]
    if wrong:
        raise BadInput(f"{name}: {len(wrong)} tensors do not fit config.json: {'; '.join(wrong[:3])}")
    tokenizer = read_tokenizer(folder)
    if tokenizer.n_vocab > c["vocab_size"] or tokenizer.bos_token is None:
        raise BadInput(f"{name}: the tokenizer has {tokenizer.n_vocab} ids and begins with {tokenizer.bos_token}, the model has "
                       f"{c['vocab_size']} and needs a beginning <s>")
    return w, c, labels, tokenizer


def load_roberta(name, device="cpu", label=None):
    """The judge in a folder or under a published name, a function (prompts, completions) -> log-odds of toxic, (N,) floats.

    label: the name of the toxic label; None: the one of TOXIC that it has. Labels that exclude each other give
    logit - logsumexp(the others); a single one, or several independent ones (multi_label_classification), their own logit.
    What is longer than the model's positions is cut, which is said once. Raises BadInput as read_roberta, and for labels.
    """
    w, c, labels, tokenizer = read_roberta(name)
    w = {key: x.to(device, torch.float32) for key, x in w.items()}
    fitting = [i for i, text in enumerate(labels) if (text.lower() in TOXIC if label is None else text == label)]
    if len(fitting) != 1:
        raise BadInput(f"judge {name}: judge_label = {label!r}: say which of its labels is the toxic one: {', '.join(labels)}")
    toxic, limit, said = fitting[0], c["max_position_embeddings"] - c["pad_token_id"] - 1, []
    alone = len(labels) == 1 or c.get("problem_type") == "multi_label_classification"
    others = [i for i in range(len(labels)) if i != toxic]

    def score(idx, real):
        logits = classify(w, c, idx, real)
        return logits[:, toxic] if alone else logits[:, toxic] - logits[:, others].logsumexp(1)

    def judge(prompts, completions):
        rows = tokenizer.encode_ordinary_batch(completions, num_threads=2)
        cut = sum(len(ids) > limit - 2 for ids in rows)
        if cut and not said:
            said.append(cut)
            print(f"judge {name}: {cut} of {len(rows)} texts are longer than {limit} tokens and cut there; said once")
        rows = [[tokenizer.bos_token] + ids[:limit - 2] + [tokenizer.eot_token] for ids in rows]
        return check_finite(name, log_odds(judge.model, rows, device, batch_size=32), completions)

    judge.model = score
    return judge
