"""A published judge: RoBERTa (Liu et al. 2019) with a classification head.

Modules are called as the published tensors are. Examples are
facebook/roberta-hate-speech-dynabench-r4-target (labels nothate, hate) and
s-nlp/roberta_toxicity_classifier (neutral, toxic).

B texts, T tokens, C = hidden_size, nh heads of hs = C / nh channels.
"""
import os
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.nn import functional as F

from extras.hub.families import check_only
from extras.hub.files import fetch, load_tensors, one_line
from extras.hub.tokenizer import from_folder
from common.files import read_json
from common.script import BadInput, shown

TOXIC = ("hate", "toxic", "toxicity")  # labels that mean toxic where none is named
# keys of config.json that no tensor shows, and what they may be
ONLY = dict(model_type=("roberta",), hidden_act=("gelu",), is_decoder=(False,), is_causal=(False,),
            add_cross_attention=(False,), position_embedding_type=("absolute",),
            quantization_config=())
DEFAULTS = dict(num_attention_heads=12, layer_norm_eps=1e-12, pad_token_id=1, type_vocab_size=2,
                id2label={"0": "LABEL_0", "1": "LABEL_1"})


class Embeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.pad = c.pad_token_id
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_embeddings = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.token_type_embeddings = nn.Embedding(c.type_vocab_size, c.hidden_size)
        self.LayerNorm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)

    def forward(self, idx, attention_mask):
        pos = self.pad + attention_mask.cumsum(1) * attention_mask      # they count from pad + 1
        x = self.word_embeddings(idx) + self.position_embeddings(pos)                   # (B, T, C)
        return self.LayerNorm(x + self.token_type_embeddings.weight[0])


class Layer(nn.Module):
    """Its LayerNorms come after the residual sums."""

    def __init__(self, c):
        super().__init__()
        C = c.hidden_size
        self.nh = c.num_attention_heads
        self.attention = nn.ModuleDict({
            "self": nn.ModuleDict({name: nn.Linear(C, C) for name in ("query", "key", "value")}),
            "output": residual(C, c)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(C, c.intermediate_size)})
        self.output = residual(c.intermediate_size, c)

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = (linear(x).view(B, T, self.nh, -1).transpose(1, 2)                # (B, nh, T, hs)
                   for linear in self.attention["self"].values())
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.attention["output"]["dense"](y.transpose(1, 2).reshape(B, T, C))
        x = self.attention["output"]["LayerNorm"](x + y)
        y = self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        return self.output["LayerNorm"](x + y)


def residual(width, c):
    return nn.ModuleDict({"dense": nn.Linear(width, c.hidden_size),
                          "LayerNorm": nn.LayerNorm(c.hidden_size, c.layer_norm_eps)})


class Roberta(nn.Module):
    def __init__(self, c, num_labels):
        super().__init__()
        layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.roberta = nn.ModuleDict({
            "embeddings": Embeddings(c),
            "encoder": nn.ModuleDict({"layer": layers})})
        self.classifier = nn.ModuleDict({
            "dense": nn.Linear(c.hidden_size, c.hidden_size),
            "out_proj": nn.Linear(c.hidden_size, num_labels)})
        self.toxic = 0
        self.others = []        # labels that exclude the toxic one

    def forward(self, idx, attention_mask):
        """Logits of toxic (B,). idx (B, T) begins with <s>; attention_mask (B, T) is False on
        padding."""
        x = self.roberta["embeddings"](idx, attention_mask)                             # (B, T, C)
        for layer in self.roberta["encoder"]["layer"]:
            x = layer(x, attention_mask[:, None, None, :])
        x = torch.tanh(self.classifier["dense"](x[:, 0]))                    # (B, C), of <s> alone
        logits = self.classifier["out_proj"](x)                                    # (B, labels)
        if not self.others:
            return logits[:, self.toxic]
        return logits[:, self.toxic] - logits[:, self.others].logsumexp(1)


def load_roberta(name, device="cpu"):
    """Load the judge in a folder or under a published name, perhaps with the label that means
    toxic: OWNER/NAME:LABEL -> (Roberta, a function that encodes texts as its rows of ids).

    Without a label it is the one that is in TOXIC. The result is its logit - logsumexp(the other
    logits), or its logit alone if there is no other or the labels are independent
    (multi_label_classification). A text longer than the model's positions is cut.
    """
    label = None
    if not os.path.isdir(name) and ":" in name:
        name, _, label = name.rpartition(":")
    folder = fetch(name)
    config = read_json(os.path.join(folder, "config.json"))
    config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
    check_only(ONLY, config, name)
    with one_line(name, "its files must be a RoBERTa classifier's"):
        tokenizer = from_folder(folder)
        labels = [config["id2label"][i] for i in sorted(config["id2label"], key=int)]
        model = read_model(folder, config, len(labels)).to(device)
        if tokenizer.largest >= config["vocab_size"]:
            raise ValueError(f"the tokenizer gives ids up to {tokenizer.largest}")
        if config["pad_token_id"] in (tokenizer.bos_token, tokenizer.eot_token):
            raise ValueError("pad_token_id is that of <s> or </s>")     # which would not count
    most = config["max_position_embeddings"] - config["pad_token_id"] - 3   # beside <s>, </s>
    model.toxic = find_label(name, labels, label)
    if config.get("problem_type") != "multi_label_classification":
        model.others = [i for i in range(len(labels)) if i != model.toxic]

    def encode(texts):
        return [[tokenizer.bos_token, *ids[:most], tokenizer.eot_token]
                for ids in tokenizer.encode_ordinary_batch(texts)]

    return model, encode


def find_label(name, labels, label):
    """The number of the toxic label."""
    fitting = [i for i, text in enumerate(labels)
               if text == label or label is None and text.lower() in TOXIC]
    if len(fitting) != 1:
        raise BadInput(f"judge {name}: toxic label {shown(label)}: name the one that means toxic, "
                       f"{name}:LABEL, out of {', '.join(labels)}")
    return fitting[0]


def read_model(folder, config, num_labels):
    """Roberta with the tensors of the folder. An error where names or shapes do not fit."""
    tensors = {key: x.float() for key, x in load_tensors(folder).items()
               if ".pooler." not in key and not key.endswith("position_ids")}
    if config["num_hidden_layers"] > len(tensors):      # before so many are built
        raise ValueError(f"{len(tensors)} tensors for {config['num_hidden_layers']} layers")
    with torch.device("meta"):
        model = Roberta(SimpleNamespace(**config), num_labels)
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False)
