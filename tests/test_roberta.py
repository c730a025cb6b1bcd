"""judge/roberta.py on tiny checkpoints in the published layout, against the network written out in
float64."""
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from config import load_settings
from hub.tensors import save_tensors
from judge.roberta import classify, load_roberta, read_roberta
from judge import load_judge
from judge.scorer import SAYS_NOTHING, pad_right
from judge.train import get_judges
from run.script import BadInput
from test_hub_tokenizer import learned

TEXTS = ["the other theatre", "", "there " * 5, "x", "a b  c\n1 2", "the </s><pad> <s> there",
         "\U0001f642 don't"]
CPU = torch.device("cpu")


@pytest.fixture
def make(tmp_path):
    """make(labels=[...], tensors={...}, **config) -> folder of a random classifier in which no
    tensor is at its initial value."""
    def folder(labels=("nothate", "hate"), tensors=None, seed=0, **changes):
        vocabulary, merges = learned("gpt2")
        C, wide, layers = 24, 40, 2
        config = dict(model_type="roberta", vocab_size=len(vocabulary) + 3, hidden_size=C,
                      num_hidden_layers=layers,
                      num_attention_heads=3, intermediate_size=wide, max_position_embeddings=26,
                      type_vocab_size=1,
                      layer_norm_eps=1e-5, hidden_act="gelu", bos_token_id=0, pad_token_id=1,
                      eos_token_id=2,
                      id2label={str(i): x for i, x in enumerate(labels)}) | changes
        sizes = {f"roberta.embeddings.{k}_embeddings.weight": (n, C) for k, n in (
            ("word", config["vocab_size"]), ("position", 26),
            ("token_type", config["type_vocab_size"]))}
        lines = {"classifier.dense": (C, C), "classifier.out_proj": (len(labels), C)}
        norms = ["roberta.embeddings.LayerNorm"]
        for i in range(layers):
            at = f"roberta.encoder.layer.{i}."
            lines |= {at + "attention.self.query": (C, C), at + "attention.self.key": (C, C),
                      at + "attention.self.value": (C, C),
                      at + "attention.output.dense": (C, C), at + "intermediate.dense": (wide, C),
                      at + "output.dense": (C, wide)}
            norms += [at + "attention.output.LayerNorm", at + "output.LayerNorm"]
        for name, shape in lines.items():
            sizes |= {name + ".weight": shape, name + ".bias": shape[:1]}
        for name in norms:
            sizes |= {name + ".weight": (C,), name + ".bias": (C,)}
        g = torch.Generator().manual_seed(seed)
        w = {k: torch.randn(shape, generator=g) * 0.4 + ("LayerNorm.weight" in k)
             for k, shape in sizes.items()} | (tensors or {})
        save_tensors(str(tmp_path / "model.safetensors"),
                     {k: x for k, x in w.items() if x is not None})
        for name, content in (("config.json", config), ("vocab.json", vocabulary)):
            (tmp_path / name).write_text(json.dumps(content))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(
            f"{a} {b}\n" for a, b in merges), encoding="utf-8")
        return str(tmp_path)

    return folder


def refusal(function, *args):
    with pytest.raises(BadInput) as caught:
        function(*args)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def logits_by_hand(w, c, ids):
    """Logits (labels,) of one unpadded list of ids in float64, one head and one query at a time."""
    w = {k.replace("roberta.", "").replace("encoder.layer.", ""): x.double() for k, x in w.items()}
    hs = c["hidden_size"] // c["num_attention_heads"]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + c["layer_norm_eps"]).sqrt() * w[
            name + ".weight"] + w[name + ".bias"]

    x = torch.stack([w["embeddings.word_embeddings.weight"][i] + w[
        "embeddings.position_embeddings.weight"][2 + t]
                     + w["embeddings.token_type_embeddings.weight"][0] for t, i in enumerate(ids)])
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(c["num_hidden_layers"]):
        q, k, v = (linear(x, f"{layer}.attention.self.{name}")
                   for name in ("query", "key", "value"))
        mixed = torch.zeros_like(x)
        for t in range(len(ids)):
            for j in range(0, len(x[0]), hs):
                weight = torch.stack([(q[t, j:j + hs] @ k[u, j:j + hs] / math.sqrt(hs)).exp()
                                      for u in range(len(ids))])
                mixed[t, j:j + hs] = weight / weight.sum() @ v[:, j:j + hs]
        x = norm(x + linear(mixed, f"{layer}.attention.output.dense"),
                 f"{layer}.attention.output.LayerNorm")
        y = linear(x, f"{layer}.intermediate.dense")
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = norm(x + linear(y, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return linear(torch.tanh(linear(x[0], "classifier.dense")), "classifier.out_proj")


def rows_of(texts, tokenizer, limit=24):
    return [[0, *tokenizer.encode_ordinary(text)[:limit - 2], 2] for text in texts]


@pytest.mark.parametrize("changes", [{}, dict(type_vocab_size=2, labels=("a", "b", "toxic"))])
def test_logits_equal_a_network_written_by_hand(changes, make):
    w, c, labels, tokenizer = read_roberta(make(**changes))
    rows = rows_of(TEXTS, tokenizer)
    w = {k: x.double() for k, x in w.items()}
    found = classify(w, c, *pad_right(rows))
    by_hand = torch.stack([logits_by_hand(w, c, row) for row in rows])
    assert found.shape == (len(TEXTS), len(labels)) and by_hand.std(0).min() > 0.05
    assert (found - by_hand).abs().max() < 1e-12


@pytest.mark.parametrize("labels, label, problem, expected", [
    (("nothate", "hate"), None, None, lambda z: z[1] - z[0]),
    (("Toxic", "neutral"), None, None, lambda z: z[0] - z[1]),
    (("ok", "hate", "spam"), None, None, lambda z: z[1] - (z[0].exp() + z[2].exp()).log()),
    (("LABEL_0", "LABEL_1"), "LABEL_1", None, lambda z: z[1] - z[0]),
    (("toxicity",), None, None, lambda z: z[0]),
    (("toxicity", "threat", "insult"), None, "multi_label_classification", lambda z: z[0]),
    (("toxicity", "threat", "insult"), "insult", "multi_label_classification", lambda z: z[2]),
    (("toxicity", "insult"), "insult", "single_label_classification", lambda z: z[1] - z[0])])
def test_scores_are_log_odds_of_the_toxic_label(labels, label, problem, expected, make):
    folder = make(labels=labels, problem_type=problem)
    w, c, _, tokenizer = read_roberta(folder)
    odds = load_judge(folder, "cpu", label)(["p"] * len(TEXTS), TEXTS)
    by_hand = [float(expected(logits_by_hand(w, c, row))) for row in rows_of(TEXTS, tokenizer)]
    by_hand[1] = by_hand[3] = SAYS_NOTHING      # "" and "x"
    assert odds.shape == (len(TEXTS),)
    assert odds.dtype == torch.float32
    assert (odds - torch.tensor(by_hand)).abs().max() < 1e-4
    assert odds.std() > 0.05


def test_batch_order_and_company_change_nothing(make):
    judge, texts = load_roberta(make()), TEXTS * 20  # more than one batch
    together = judge(["p"] * len(texts), texts)
    alone = torch.cat([judge(["p"], [text]) for text in TEXTS])
    assert (together - alone.repeat(20)).abs().max() < 1e-5
    assert (judge([], texts[::-1]).flip(0) - together).abs().max() < 1e-5
    assert torch.equal(judge(["other"], ["x"]), judge(["p"], ["x"])) and judge([], []).shape == (0,)


def test_long_texts_are_cut_and_it_is_said_once(make, capsys):
    folder = make()
    judge, (w, c, _, tokenizer) = load_roberta(folder), read_roberta(folder)
    assert len(tokenizer.encode_ordinary("Q" * 22)) == 22
    judge(["p"], ["Q" * 22])
    assert capsys.readouterr().out == ""
    odds = judge(["p"] * 3, ["1" * 23, "2" * 300, "x"])
    judge(["p"], ["3" * 300])
    told = "2 of 3 texts are longer than 24 tokens and are cut there (said once)"
    assert capsys.readouterr().out == f"judge {folder}: {told}\n"
    ids = tokenizer.encode_ordinary("2" * 300)
    assert len(ids) > 22
    z = logits_by_hand(w, c, [0, *ids[:22], 2])
    assert abs(float(z[1] - z[0]) - float(odds[1])) < 1e-4
    assert abs(odds[0] - judge(["p"], ["1" * 30])[0]) < 1e-5


def test_tensors_of_old_checkpoints_that_are_not_used_change_nothing(make):
    old = {"roberta.embeddings.position_ids": torch.arange(26)[None],
           "roberta.pooler.dense.weight": torch.ones(24, 24),
           "roberta.pooler.dense.bias": torch.ones(24)}
    odds = load_roberta(make())([], TEXTS)
    assert torch.equal(load_roberta(make(tensors=old))([], TEXTS), odds)


def test_half_precision_files_are_read(make):
    folder = make()
    w = read_roberta(folder)[0]
    odds = load_roberta(folder)([], TEXTS)
    half = load_roberta(make(tensors={k: x.half() for k, x in w.items()}))([], TEXTS)
    assert half.dtype == torch.float32 and 0 < (half - odds).abs().max() < 0.05


@pytest.mark.parametrize("changes, label, said", [
    (dict(labels=("LABEL_0", "LABEL_1")), None,
     "judge_label = None: say which of its labels is the toxic one: LABEL_0, LABEL_1"),
    (dict(labels=("toxic", "hate")), None, "toxic, hate"),
    (dict(), "rude", "'rude': say which of its labels is the toxic one: nothate, hate"),
    (dict(id2label=None), None, "id2label"),
    (dict(id2label={"1": "hate"}), None, "id2label"),
    (dict(id2label={"x": "hate"}), None, "id2label"),
    (dict(id2label={"0": "a", "1": "hate", "2": "c"}), None,
     "classifier.out_proj.weight is (2, 24), must be (3, 24)"),
    (dict(model_type="gpt2"), None, "('gpt2', 'gelu')"),
    (dict(hidden_act="gelu_new"), None, "'gelu_new'"),
    (dict(num_attention_heads=5), None, "hidden_size = 24, num_attention_heads = 5"),
    (dict(num_hidden_layers=10 ** 9), None, "num_hidden_layers = 1000000000"),
    (dict(type_vocab_size=0), None, "type_vocab_size = 0"),
    (dict(pad_token_id=23), None, "pad_token_id = 23"),
    (dict(num_hidden_layers="2"), None, "num_hidden_layers = '2'"),
    (dict(layer_norm_eps=None), None, "layer_norm_eps = None"),
    (dict(num_hidden_layers=3), None,
     "roberta.encoder.layer.2.attention.self.query.weight is missing, must be (24, 24)"),
    (dict(num_hidden_layers=1), None, "roberta.encoder.layer.1."),
    (dict(max_position_embeddings=30), None, "(26, 24), must be (30, 24)"),
    (dict(tensors={"lm_head.bias": torch.ones(3)}), None, "lm_head.bias (3,) is not RoBERTa's"),
    (dict(tensors={f"classifier.{k}.{end}": None for k in ("dense", "out_proj")
                   for end in ("weight", "bias")}), None,
     "base model"),
    (dict(eos_token_id=None), None, "no end token"), (dict(bos_token_id=None), None, "beginning")])
def test_what_is_no_judge_is_named(changes, label, said, make):
    folder = make(**changes)
    message = refusal(load_judge, folder, "cpu", label)
    assert folder in message and said in message


def test_a_tokenizer_larger_than_the_model_is_named(make):
    n = len(learned("gpt2")[0])
    message = refusal(load_judge, make(vocab_size=n - 1))
    assert f"{n} ids" in message and str(n - 1) in message


def test_a_name_that_is_neither_folder_nor_published_is_named():
    assert "nowhere" in refusal(load_judge, "nowhere")


def test_a_score_that_is_not_finite_names_judge_and_text(make):
    folder = make(tensors={"classifier.out_proj.bias": torch.tensor([0.0, math.nan])})
    message = refusal(load_judge(folder), ["p", "p"], ["the", "other"])
    assert folder in message and "nan" in message and "'the'" in message


def test_the_settings_name_the_judges_and_their_labels(make):
    folder = make(labels=("LABEL_0", "LABEL_1", "LABEL_2"))
    s = load_settings([f"--judge={folder}", "--judge_label=LABEL_2", f"--eval_judge={folder}",
                       "--eval_judge_label=LABEL_0"])
    judges = get_judges(s, dict(train_prompts=[], eval_prompts=[], judge_a=[], judge_b=[]), CPU)
    for role, label in (("judge", "LABEL_2"), ("eval_judge", "LABEL_0")):
        assert torch.equal(judges[role]([], TEXTS), load_roberta(folder, "cpu", label)([], TEXTS))


# ------------------------------------------------------------------------------------------------
# against transformers, where it is installed

@pytest.mark.parametrize("shape", [
    {}, dict(type_vocab_size=2, num_labels=3, num_attention_heads=1),
    dict(num_labels=1, num_hidden_layers=1, intermediate_size=7),
    dict(pad_token_id=4, layer_norm_eps=1e-12),
    dict(hidden_size=64, num_attention_heads=8, num_hidden_layers=5)])
def test_logits_equal_those_of_transformers(shape, make):
    transformers = pytest.importorskip(
        "transformers", reason="the comparison needs transformers: pip install transformers")
    folder = make()  # its tokenizer stays
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**dict(
        vocab_size=400, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=40, type_vocab_size=1, layer_norm_eps=1e-5, bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2) | shape)
    theirs = transformers.RobertaForSequenceClassification(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.1 * torch.randn(p.shape)
    theirs.save_pretrained(folder)
    w, c, labels, _ = read_roberta(folder)
    rows = [[0, *torch.randint(5, 400, (n,)).tolist(), 2]
            for n in (1, 5, 37 - config.pad_token_id, 0, 12)]
    idx, real = pad_right(rows)
    with torch.no_grad():
        expected = theirs(idx.masked_fill(~real, config.pad_token_id),
                          attention_mask=real.long()).logits
    found = classify(w, c, idx, real)
    assert found.shape == expected.shape == (5, len(labels)) and expected.std(0).min() > 0.01
    assert (found - expected).abs().max() < 1e-5
    print(f"largest difference {(found - expected).abs().max():.1e}")


# ------------------------------------------------------------------------------------------------
# the package alt-profanity-check

def test_profanity_check_gives_log_odds(monkeypatch):
    probability = {"aa": 0.2, "bb": 0.9, "cc": 1.0, "dd": 0.0}
    package = SimpleNamespace(predict_prob=lambda texts: [probability[t] for t in texts])
    monkeypatch.setitem(sys.modules, "profanity_check", package)
    judge = load_judge("profanity-check")
    odds = judge(["p"] * 4, list(probability))
    assert odds.dtype == torch.float32 and odds.isfinite().all() and judge([], []).shape == (0,)
    assert torch.sigmoid(odds).tolist() == pytest.approx([0.2, 0.9, 1.0, 0.0], abs=1e-5)
    assert odds[2] > 10 > -10 > odds[3]


def test_profanity_check_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "profanity_check", None)
    assert "pip install alt-profanity-check" in refusal(load_judge, "profanity-check")
