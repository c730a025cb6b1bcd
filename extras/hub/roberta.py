"""A published judge: RoBERTa (Liu et al. 2019) with a classification head.

Its layers are torch's own. Examples are
facebook/roberta-hate-speech-dynabench-r4-target (labels nothate, hate) and
s-nlp/roberta_toxicity_classifier (neutral, toxic).

B texts, T tokens, C = hidden_size.
"""
import os
from types import SimpleNamespace

import torch
import torch.nn as nn

from extras.hub.families import check_only
from extras.hub.files import fetch, load_tensors, one_line
from extras.hub.tokenizer import from_folder
from common.files import read_json
from common.script import BadInput, shown

TOXIC = ("hate", "toxic", "toxicity")  # labels that mean toxic where none is named
# key of config.json -> the values it may have, if it is there
ONLY = dict(model_type=("roberta",), hidden_act=("gelu",), is_decoder=(False,),
            add_cross_attention=(False,), position_embedding_type=("absolute",),
            quantization_config=())
DEFAULTS = dict(num_attention_heads=12, layer_norm_eps=1e-12, type_vocab_size=2, bos_token_id=0,
                pad_token_id=1, eos_token_id=2, id2label={"0": "LABEL_0", "1": "LABEL_1"})


# published names -> names here, to be replaced one after the other
NAMES = {
    "roberta.embeddings.": "",
    "roberta.encoder.layer.": "encoder.layers.",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
    "classifier.": "",
}
PARTS = ("query", "key", "value")   # of torch's self_attn.in_proj, in this order


class Roberta(nn.Module):
    def __init__(self, c, num_labels):
        super().__init__()
        C = c.hidden_size
        self.pad = c.pad_token_id
        self.word_embeddings = nn.Embedding(c.vocab_size, C)
        self.position_embeddings = nn.Embedding(c.max_position_embeddings, C)
        self.token_type_embeddings = nn.Embedding(c.type_vocab_size, C)
        self.LayerNorm = nn.LayerNorm(C, c.layer_norm_eps)
        layer = nn.TransformerEncoderLayer(
            C, c.num_attention_heads, c.intermediate_size, dropout=0.0, activation="gelu",
            layer_norm_eps=c.layer_norm_eps, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            layer, c.num_hidden_layers, enable_nested_tensor=False)
        self.dense = nn.Linear(C, C)
        self.out_proj = nn.Linear(C, num_labels)
        self.toxic = 0
        self.others = []        # labels that exclude the toxic one

    def forward(self, idx, attention_mask):
        """Log-odds of toxic (B,). idx (B, T) begins with <s>; attention_mask (B, T) is False on
        padding."""
        pos = self.pad + attention_mask.cumsum(1) * attention_mask      # they count from pad + 1
        x = self.word_embeddings(idx) + self.position_embeddings(pos)                   # (B, T, C)
        x = self.LayerNorm(x + self.token_type_embeddings.weight[0])
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        x = torch.tanh(self.dense(x[:, 0]))                                  # (B, C), of <s> alone
        logits = self.out_proj(x)                                                  # (B, labels)
        if not self.others:
            return logits[:, self.toxic]
        return logits[:, self.toxic] - logits[:, self.others].logsumexp(1)


def load_roberta(name, device="cpu"):
    """Load a published judge -> (Roberta, a function that encodes texts as its rows of ids).

    name: a folder or a published name. OWNER/NAME:LABEL names the label that means toxic; without
    it, the label is the one in TOXIC. The log-odds are its logit - logsumexp(the other logits), or
    its logit if there are no others or the labels are independent (multi_label_classification).
    A text that is longer than the model's positions is cut.
    """
    label = None
    if not os.path.isdir(name) and ":" in name:
        name, _, label = name.rpartition(":")

    def encode(texts):
        return [[bos, *tokenizer.encode_ordinary(text)[:most], eos] for text in texts]

    folder = fetch(name)
    with one_line(name, "its files must be a RoBERTa classifier's"):
        config = read_json(os.path.join(folder, "config.json"))
        config = DEFAULTS | {key: value for key, value in config.items() if value is not None}
        check_only(ONLY, config, name)
        tokenizer = from_folder(folder)
        labels = [config["id2label"][i] for i in sorted(config["id2label"], key=int)]
        model = read_model(folder, config, len(labels)).to(device)
        if tokenizer.largest >= config["vocab_size"]:
            raise ValueError(f"the tokenizer gives ids up to {tokenizer.largest}")
        bos = config["bos_token_id"]
        eos = config["eos_token_id"]
        if config["pad_token_id"] in (bos, eos):
            raise ValueError("pad_token_id is that of <s> or </s>")     # they would be masked
        model.toxic = find_label(name, labels, label)
        most = config["max_position_embeddings"] - config["pad_token_id"] - 3   # beside <s>, </s>
        idx = torch.tensor(encode(["a"]), device=device)
        model(idx, idx != eos)      # a number that does not fit fails here
    if config.get("problem_type") != "multi_label_classification":
        model.others = [i for i in range(len(labels)) if i != model.toxic]
    return model, encode


def find_label(name, labels, label):
    """Return the number of the toxic label."""
    fitting = [i for i, text in enumerate(labels)
               if text == label or label is None and text.lower() in TOXIC]
    if len(fitting) != 1:
        raise BadInput(f"judge {name}: toxic label {shown(label)}: name the one that means toxic, "
                       f"{name}:LABEL, out of {', '.join(labels)}")
    return fitting[0]


def read_model(folder, config, num_labels):
    """Make a Roberta of the folder's tensors. Names or shapes that do not fit are an error."""
    tensors = {key: x.float() for key, x in load_tensors(folder).items()
               if ".pooler." not in key and not key.endswith("position_ids")}
    if config["num_hidden_layers"] > len(tensors):      # too many would fill the memory
        raise ValueError(f"{len(tensors)} tensors for {config['num_hidden_layers']} layers")
    with torch.device("meta"):
        model = Roberta(SimpleNamespace(**config), num_labels)
    model.load_state_dict(renamed(tensors), assign=True)
    return model.eval().requires_grad_(False)


def renamed(tensors):
    """Name published tensors as torch's modules do."""
    state = {}
    for name, x in tensors.items():
        for there, here in NAMES.items():
            name = name.replace(there, here)
        state[name] = x
    for query in [name for name in state if ".query." in name]:
        parts = [state.pop(query.replace("query", part)) for part in PARTS]
        state[query.replace("attention.self.query.", "self_attn.in_proj_")] = torch.cat(parts)
    return state
