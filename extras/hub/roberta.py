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
from extras.hub.files import fetch, fill, load_tensors
from extras.hub.tokenizer import from_folder
from common.device import exact_linear
from common.errors import BadInput, shown
from common.files import read_json
from data.tokenizer import pieces

TOXIC = ("hate", "toxic", "toxicity")  # labels that mean toxic, unless the user names one
# key of config.json -> the values it may have, if it is there
ONLY = dict(model_type=("roberta",), hidden_act=("gelu",), is_decoder=(False,),
            position_embedding_type=("absolute",), quantization_config=())
# defaults for keys that config.json may lack
DEFAULTS = dict(bos_token_id=0, pad_token_id=1, eos_token_id=2, problem_type=None,
                id2label={"0": "LABEL_0", "1": "LABEL_1"})
# as in a Family of extras/hub/families.py; torch's layers have query, key and value in one matrix
NAMES = SimpleNamespace(
    names={
        "words.": "embeddings.word_embeddings.",
        "positions.": "embeddings.position_embeddings.",
        "types.": "embeddings.token_type_embeddings.",
        "norm.": "embeddings.LayerNorm.",
        "dense.": "classifier.dense.",
        "out.": "classifier.out_proj.",
        "layers.": "layer.",
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    },
    stacked={
        "self_attn.in_proj_": (
            "attention.self.query.", "attention.self.key.", "attention.self.value."),
    },
    transposed=(),
)


class Roberta(nn.Module):
    def __init__(self, c):
        super().__init__()
        C = c.hidden_size
        self.pad = c.pad_token_id
        self.words = nn.Embedding(c.vocab_size, C)
        self.positions = nn.Embedding(c.max_position_embeddings, C)
        self.types = nn.Embedding(c.type_vocab_size, C)
        self.norm = nn.LayerNorm(C, c.layer_norm_eps)
        layer = nn.TransformerEncoderLayer(
            C, c.num_attention_heads, c.intermediate_size, dropout=0.0, activation="gelu",
            layer_norm_eps=c.layer_norm_eps, batch_first=True)
        self.encoder = nn.TransformerEncoder(
            layer, c.num_hidden_layers, enable_nested_tensor=False)
        self.dense = nn.Linear(C, C)
        self.out = nn.Linear(C, len(c.id2label))
        self.toxic = 0
        self.others = []        # labels that exclude the toxic one

    def forward(self, idx, attention_mask):
        """Log-odds of toxic (B,). idx (B, T) begins with <s>; attention_mask (B, T) is False on
        padding."""
        pos = self.pad + attention_mask.cumsum(1) * attention_mask      # they count from pad + 1
        x = self.words(idx) + self.positions(pos) + self.types.weight[0]                # (B, T, C)
        x = self.norm(x)
        x = self.encoder(x, src_key_padding_mask=~attention_mask)
        x = torch.tanh(self.dense(x[:, 0]))                                  # (B, C), of <s> alone
        logits = exact_linear(self.out, x)                                         # (B, labels)
        if not self.others:
            return logits[:, self.toxic]
        return logits[:, self.toxic] - logits[:, self.others].logsumexp(1)


def load_roberta(name, device="cpu"):
    """Load a published judge -> (Roberta, a function that turns each text into a list of rows of
    ids).

    name: a folder or a published name. OWNER/NAME:LABEL names the label that means toxic; otherwise
    it is the label in TOXIC. The log-odds are its logit - logsumexp(the other logits), or its logit
    if it is the only label or the labels are independent (multi_label_classification). A text that
    is longer than the model's positions becomes several rows.
    """
    label = ""
    if ":" in name and not os.path.isdir(name):     # a folder: C:\models
        name, _, label = name.rpartition(":")

    def encode(texts):
        return [[[c.bos_token_id, *piece, c.eos_token_id]
                 for piece in pieces(tokenizer.encode_ordinary(text), most)] for text in texts]

    folder = fetch(name)
    config = read_json(os.path.join(folder, "config.json"))
    config = DEFAULTS | {key: x for key, x in config.items() if x is not None}
    check_only(ONLY, config, name)
    c = SimpleNamespace(**config)
    tensors = load_tensors(folder, "roberta.")
    model = fill(lambda: Roberta(c), tensors, c.hidden_size, NAMES, name)
    model.eval().requires_grad_(False).to(device)
    tokenizer = from_folder(folder)
    tokenizer.check_fit(c.vocab_size)
    most = c.max_position_embeddings - c.pad_token_id - 3       # beside <s>, </s>

    # which label is toxic, and do the others exclude it?
    labels = [c.id2label[i] for i in sorted(c.id2label, key=int)]
    model.toxic = find_label(name, labels, label)
    is_softmax = c.problem_type != "multi_label_classification"
    if is_softmax:
        model.others = [i for i in range(len(labels)) if i != model.toxic]
    if len(labels) > 2 or len(labels) == 2 and not is_softmax:
        how = "softmax: its labels exclude" if is_softmax else "sigmoid: its labels do not exclude"
        print(f"note: judge {name} is read by {how} each other, as problem_type in its config.json "
              "says, or by default; is that right?")
    return model, encode


def find_label(name, labels, label):
    """The number of the toxic label."""
    fitting = [i for i, text in enumerate(labels)
               if text == label or not label and text.lower() in TOXIC]
    if len(fitting) != 1:
        raise BadInput(f"judge {name}: toxic label {shown(label)}: name the one that means toxic, "
                       f"{name}:LABEL, out of {', '.join(labels)}")
    return fitting[0]
