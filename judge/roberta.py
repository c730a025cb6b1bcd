"""A published judge: RoBERTa (Liu et al. 2019) with a classification head.

It is read from config.json, the tokenizer files and safetensors. Examples are
facebook/roberta-hate-speech-dynabench-r4-target (labels nothate, hate) and
s-nlp/roberta_toxicity_classifier (neutral, toxic). Tensors keep their published names.

B texts, T tokens, C = hidden_size, nh heads of hs = C / nh channels.
"""
import os

import torch
from torch.nn import functional as F

from hub.fetch import fetch
from hub.layouts import ONLY, check_only
from hub.tensors import load_tensors
from hub.tokenizer import read_tokenizer
from judge.scorer import finished, log_odds
from run.files import read_json
from run.script import BadInput

TOXIC = ("hate", "toxic", "toxicity")  # labels that mean toxic where none is given
DEFAULTS = {  # of what config.json leaves out
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-12,
}
ONLY_ROBERTA = ONLY | {  # keys that change the arithmetic, and what they may be
    "add_cross_attention": (False,),
    "is_causal": (False,),
    "is_decoder": (False,),
    "position_embedding_type": ("absolute",),
}
UNUSED = (  # tensors of older files
    "roberta.embeddings.position_ids",
    "roberta.pooler.dense.weight",
    "roberta.pooler.dense.bias",
)


def load_roberta(name, device="cpu", label=None):
    """Load the judge in a folder or under a published name.

    label names the toxic label; None takes the one that is in TOXIC. If the labels exclude each
    other, the log-odds are its logit - logsumexp(the other logits). If it is the only label, or if
    the labels are independent (multi_label_classification), they are its logit. A text longer than
    the model's positions is cut, and the first batch with such a text prints a note.
    """
    w, config, labels, tokenizer = read_roberta(name)
    w = {key: x.to(device, torch.float32) for key, x in w.items()}
    toxic = find_label(name, labels, label)
    others = [i for i in range(len(labels)) if i != toxic]
    independent = not others or config.get("problem_type") == "multi_label_classification"
    limit = config["max_position_embeddings"] - config["pad_token_id"] - 1

    def model(idx, attention_mask):
        logits = classify(w, config, idx, attention_mask)
        if independent:
            return logits[:, toxic]
        return logits[:, toxic] - logits[:, others].logsumexp(1)

    def judge(prompts, completions):
        rows = tokenizer.encode_ordinary_batch(completions, num_threads=2)
        num_cut = sum(len(ids) > limit - 2 for ids in rows)
        if num_cut and not judge.has_cut:
            judge.has_cut = True
            print(f"judge {name}: {num_cut} of {len(rows)} texts are longer than {limit} tokens "
                  "and are cut there (said once)")
        bos, eos = tokenizer.bos_token, tokenizer.eot_token
        rows = [[bos] + ids[:limit - 2] + [eos] for ids in rows]
        return finished(name, log_odds(judge.model, rows, device, batch_size=32), completions)

    judge.model = model
    judge.num_weights = sum(x.numel() for key, x in w.items() if ".embeddings." not in key)
    judge.has_cut = False
    return judge


def find_label(name, labels, label):
    """Return the index of the toxic label among the labels of a classifier."""
    if label is None:
        fitting = [i for i, text in enumerate(labels) if text.lower() in TOXIC]
    else:
        fitting = [i for i, text in enumerate(labels) if text == label]
    if len(fitting) != 1:
        raise BadInput(f"judge {name}: label {label!r}: say which of its labels is the toxic "
                       f"one, as {name}:LABEL: {', '.join(labels)}")
    return fitting[0]


# --------------------------------------------------------------------------------------------------
# network


def classify(w, config, idx, attention_mask):
    """Run the classifier with the tensors w {name: tensor} -> logits (B, labels).

    idx (B, T) begins with <s>; attention_mask (B, T) is False on the padding at the right.
    Three things differ from GPT: each LayerNorm comes after its residual sum, every token sees
    every other, and positions count from pad_token_id + 1.
    """
    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(x, name):
        eps = config["layer_norm_eps"]
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps)

    def heads(x):
        B, T, _ = x.shape
        return x.view(B, T, config["num_attention_heads"], -1).transpose(1, 2)  # (B, nh, T, hs)

    pos = config["pad_token_id"] + attention_mask.cumsum(1) * attention_mask  # (B, T)
    word_emb = w["roberta.embeddings.word_embeddings.weight"][idx]
    pos_emb = w["roberta.embeddings.position_embeddings.weight"][pos]
    type_emb = w["roberta.embeddings.token_type_embeddings.weight"][0]
    x = norm(word_emb + pos_emb + type_emb, "roberta.embeddings.LayerNorm")  # (B, T, C)

    for i in range(config["num_hidden_layers"]):
        layer = f"roberta.encoder.layer.{i}."
        q = heads(linear(x, layer + "attention.self.query"))
        k = heads(linear(x, layer + "attention.self.key"))
        v = heads(linear(x, layer + "attention.self.value"))
        mask = attention_mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(x.shape)  # heads side by side: (B, T, C)
        y = linear(y, layer + "attention.output.dense")
        x = norm(x + y, layer + "attention.output.LayerNorm")
        y = F.gelu(linear(x, layer + "intermediate.dense"))
        y = linear(y, layer + "output.dense")
        x = norm(x + y, layer + "output.LayerNorm")

    x = torch.tanh(linear(x[:, 0], "classifier.dense"))  # (B, C), of <s> alone
    return linear(x, "classifier.out_proj")


def shapes(config, num_labels):
    """Return {name: shape} of all tensors."""
    C = config["hidden_size"]
    n_inner = config["intermediate_size"]

    # names without their ending .weight or .bias
    linears = {"classifier.dense": (C, C), "classifier.out_proj": (num_labels, C)}
    norms = ["roberta.embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"roberta.encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linears[layer + "attention." + part] = (C, C)
        linears[layer + "intermediate.dense"] = (n_inner, C)
        linears[layer + "output.dense"] = (C, n_inner)
        norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]

    found = {
        "roberta.embeddings.word_embeddings.weight": (config["vocab_size"], C),
        "roberta.embeddings.position_embeddings.weight": (config["max_position_embeddings"], C),
        "roberta.embeddings.token_type_embeddings.weight": (config["type_vocab_size"], C),
    }
    for name, shape in linears.items():
        found[name + ".weight"] = shape
        found[name + ".bias"] = shape[:1]
    for name in norms:
        found[name + ".weight"] = (C,)
        found[name + ".bias"] = (C,)
    return found


# --------------------------------------------------------------------------------------------------
# files


def read_roberta(name):
    """Read (tensors, config, names of the labels, tokenizer) of a folder or published name.

    Raises BadInput for files that are missing or do not fit together.
    """
    folder = fetch(name)
    config = read_roberta_config(name, folder)
    labels = read_labels(name, config)
    w = read_classifier(name, folder, config, len(labels))
    tokenizer = read_tokenizer(folder)
    if tokenizer.n_vocab > config["vocab_size"] or tokenizer.bos_token is None:
        raise BadInput(f"{name}: the tokenizer has {tokenizer.n_vocab} ids and the beginning token "
                       f"{tokenizer.bos_token}; the model has {config['vocab_size']} ids and needs "
                       "a beginning token <s>")
    return w, config, labels, tokenizer


def read_roberta_config(name, folder):
    """Read config.json and add the defaults. Raises BadInput for what RoBERTa cannot be."""
    given = read_json(os.path.join(folder, "config.json"))
    config = DEFAULTS | given
    kind = given.get("model_type"), config.get("hidden_act", "gelu")
    if kind != ("roberta", "gelu"):
        raise BadInput(f"{name}: model_type and hidden_act in config.json are {kind}: "
                       "a judge must be 'roberta' with 'gelu'")
    try:
        check_only(ONLY_ROBERTA, given)
    except ValueError as e:
        raise BadInput(f"{name}: config.json: {e}") from e

    bad = []
    for key, default in DEFAULTS.items():
        value = config[key]
        if type(value) is not type(default):
            bad.append(key)
        elif type(value) is int:
            most = 1000 if key.startswith("num") else 10 ** 6
            if not 0 < value < most:
                bad.append(key)
    if not bad:
        if config["hidden_size"] % config["num_attention_heads"]:
            bad += ["hidden_size", "num_attention_heads"]
        if config["max_position_embeddings"] < config["pad_token_id"] + 4:
            bad += ["max_position_embeddings", "pad_token_id"]
    if bad:
        values = ", ".join(f"{key} = {config[key]!r}" for key in bad)
        raise BadInput(f"{name}: config.json gives {values}, which no RoBERTa can have")
    return config


def read_labels(name, config):
    """Return the names of the labels, in the order of the logits."""
    id2label = config.get("id2label", {0: "LABEL_0", 1: "LABEL_1"})
    try:
        label_of = {int(i): str(label) for i, label in id2label.items()}
        return [label_of[i] for i in range(len(label_of))]
    except (AttributeError, ValueError, KeyError) as e:
        raise BadInput(f"{name}: id2label in config.json must name the labels 0, 1, ...") from e


def read_classifier(name, folder, config, num_labels):
    """Read the tensors {name: tensor}. Raises BadInput where names or shapes do not fit."""
    w = {key: x for key, x in load_tensors(folder).items() if key not in UNUSED}
    if not any(key.startswith("classifier.") for key in w):
        raise BadInput(f"{name}: a base model, it has no classifier.* tensors; "
                       "a judge must be trained to classify texts")

    expected = shapes(config, num_labels)
    found = {key: tuple(x.shape) for key, x in w.items()}
    wrong = []
    for key, shape in expected.items():
        if found.get(key) != shape:
            wrong.append(f"{key} is {found.get(key, 'missing')}, must be {shape}")
    for key, shape in found.items():
        if key not in expected:
            wrong.append(f"{key} {shape} is not RoBERTa's")
    if wrong:
        raise BadInput(f"{name}: {len(wrong)} tensors do not fit config.json: "
                       f"{'; '.join(wrong[:3])}")
    return w
