"""Published RoBERTa classifiers as judges, against a network by hand."""
import json
from types import SimpleNamespace

import pytest
import torch

from common.files import read_json
from extras.hub.files import load_tensors, save_tensors
from extras.hub.tokenizer import from_folder
from judge import load_judge
from run.setup import load_judges
from extras.hub.tests.published import make_roberta, put, roberta_by_hand
from worlds import assert_refused, printed

CPU = torch.device("cpu")
TEXTS = ["the other theatre", "there " * 12, "a b  c\n1 2", "the </s><pad> <s> there",
         "\U0001f642 don't"]


def by_hand(folder):
    """Logits (pieces, labels) of each of TEXTS. The model has 26 - 1 - 1 positions, so that the
    long one is read in two halves."""
    config = read_json(f"{folder}/config.json")
    tokenizer = from_folder(folder)
    tensors = load_tensors(folder)
    found = []
    for text in TEXTS:
        ids = tokenizer.encode_ordinary(text)
        half = (len(ids) + 1) // 2
        pieces = [ids] if len(ids) <= 22 else [ids[:half], ids[half:]]
        found.append(torch.stack([
            roberta_by_hand(config, tensors, [0, *piece, 2]) for piece in pieces]))
    return found


SOFTMAX, SIGMOID = "single_label_classification", "multi_label_classification"


@pytest.mark.parametrize("labels, label, problem, toxic, others", [
    (("nothate", "hate"), "", SOFTMAX, 1, [0]),
    (("Toxic", "neutral"), "", None, 0, [1]),
    (("ok", "hate", "spam"), "", None, 1, [0, 2]),
    (("LABEL_0", "LABEL_1"), ":LABEL_1", None, 1, [0]),
    (("toxicity",), "", None, 0, []),
    (("toxicity", "threat"), "", SIGMOID, 0, []),
    (("toxicity", "insult"), ":insult", SIGMOID, 1, [])])
def test_a_classifier_gives_the_logit_of_its_toxic_label_and_says_how_it_reads_several(
        labels, label, problem, toxic, others, tmp_path):
    """The same logits are p = 0.04 by softmax and 0.76 by sigmoid, and files rarely say which."""
    folder = make_roberta(tmp_path, labels, problem_type=problem, type_vocab_size=2)
    scores = []
    for z in by_hand(folder):
        against = z[:, others].logsumexp(1) if others else 0.0
        scores.append(z[:, toxic] - against)
    assert max(map(len, scores)) == 2, "none is too long"
    expected = torch.stack([score.max() for score in scores])
    assert expected.std() > 2e-3, "texts must differ by more than what is allowed below"
    found = load_judge(folder + label)(TEXTS)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    said = printed(load_judge, folder + label)
    assert ("softmax" in said) == (len(labels) > 2)
    assert ("sigmoid" in said) == (problem == SIGMOID)


# what config.json says instead | what the refusal names
REFUSALS = """
"id2label": {"0": "a", "1": "b"} | a, b
"id2label": {"0": "toxic", "1": "hate"} | toxic, hate
"model_type": "bert" | model_type
"is_decoder": true | is_decoder
"hidden_act": "relu" | hidden_act
"position_embedding_type": "relative_key" | position_embedding_type
"num_hidden_layers": 1 | layer.1
"vocab_size": 100 | word_embeddings
"""


def test_what_is_no_classifier_is_one_line(tmp_path):
    folder = make_roberta(tmp_path)
    config = read_json(f"{folder}/config.json")
    for line in REFUSALS.strip().splitlines():
        changes, name = line.split(" | ")
        put(folder, config=config | json.loads("{" + changes + "}"))
        assert_refused(name, load_judge, folder)
    put(folder, config={key: x for key, x in config.items() if key != "id2label"})
    assert_refused("LABEL_0, LABEL_1", load_judge, folder)
    put(folder, config=config)
    assert_refused("'toxic'", load_judge, folder + ":toxic")
    tensors = load_tensors(folder)
    base = {name: x for name, x in tensors.items() if not name.startswith("classifier.")}
    save_tensors(f"{folder}/model.safetensors", base)
    assert_refused("classifier", load_judge, folder)
    save_tensors(f"{folder}/model.safetensors", tensors)
    put(folder, vocab=read_json(f"{folder}/vocab.json") | {"a": 999})
    assert_refused("999", load_judge, folder)


def test_one_judge_in_both_roles_is_read_once_and_that_is_said(tmp_path):
    folder = make_roberta(tmp_path)
    for other, same in ((folder, True), (folder + ":nothate", False)):
        cfg = SimpleNamespace(judge=folder, eval_judge=other)
        assert ("not an independent check" in printed(load_judges, cfg, CPU)) == same
        judges = load_judges(cfg, CPU)
        assert (judges["judge"] is judges["eval_judge"]) == same
