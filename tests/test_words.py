"""run/words.py: the influence of every token by itself, and where a word was pushed."""
import math

import pytest
import torch

from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig, add_lora
from sample import completion_states
from run.words import Piece, Row, derivative, logprob_changes, pieces_of, places_of, row_alone
from sample import generate
from tracin import Tape

BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("lora", [False, True])
def test_tokens_add_up_to_the_score_of_their_rollout(dtype, lora):
    """On the tape the rows stand side by side, padded; here each is alone."""
    torch.manual_seed(0)
    policy = GPT(GPTConfig(40, 24, 2, 2, 16, n_kv_head=1, rope_base=1e4 * lora))
    policy = add_lora(policy, 2, 4.0) if lora else policy
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.1 * torch.randn_like(p)
    policy = policy.to(dtype).eval()
    forced = torch.full((6, 8), -1)
    forced[1:4, 1:4] = torch.tensor([9, 7, 11])
    rollout = generate(policy, [[1, 2, 3, 4, 5], [6]], 3, 8, seed=1, eos=tuple(range(20, 30)),
                       top_k=30, temperature=0.8, forced=forced)
    lengths = rollout.completion_mask.sum(1)
    assert len(lengths.unique()) > 1 and not rollout.attention_mask[3, 0]
    assert (rollout.completion_mask & ~rollout.sampled_mask).any() and not rollout.allowed.all()

    slope = torch.randn(rollout.completion_mask.shape).to(dtype)
    with Tape(policy) as tape:
        tape.rows(6, tokens=rollout.sampled_mask.nonzero()[:, 0])
        h, targets, allowed, where = completion_states(policy, rollout)
        logits = (policy.lm_head(h) / 0.8).masked_fill(~allowed, -math.inf)
        logp = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (slope[where] * logp).sum().backward()
    names = {p: name for name, p in policy.named_parameters() if p.requires_grad}
    G = {p: torch.randn_like(p) for p in names}
    scores = tape.dot(G).double()

    D = {names[p]: g for p, g in G.items()}
    rows = [row_alone(rollout, i, 0.8) for i in range(6)]
    found = [slope[i, :len(row.chosen)] * logprob_changes(policy, D, row)
             for i, row in enumerate(rows)]
    size = max(float(influence.abs().sum()) for influence in found)
    for row, influence, score in zip(rows, found, scores.tolist()):
        gap = abs(float(influence.double().sum()) - score)
        assert gap < BOUNDS[dtype] * size, "the tokens do not add up to their rollout's score"
        assert not influence[~row.chosen].any(), "a token that was not drawn has influence"


def test_methods_agree_in_float64():
    torch.manual_seed(0)
    policy = add_lora(GPT(GPTConfig(50, 16, 2, 2, 16)), 2, 4.0).double()
    allowed = torch.rand(4, 50) < 0.8
    some_allowed = allowed.double().argmax(1)
    tokens = torch.randint(50, (9,)).index_put_((torch.arange(5, 9),), some_allowed)
    allowed[2, some_allowed[2]] = False     # of a token that was not drawn
    row = Row(tokens, torch.tensor([True, True, False, True]), allowed, 0.7)
    slope = torch.randn(4).double()
    D = {k: torch.randn_like(p) for k, p in policy.named_parameters() if p.requires_grad}
    brute, jvp, difference = (derivative(method, policy, D, row, slope)
                              for method in ("brute", "jvp", "finite_difference"))
    assert brute != 0 and jvp == pytest.approx(brute, rel=1e-12)
    assert difference == pytest.approx(brute, rel=1e-6)


def pieces(ids, chosen=None):
    tokenizer = load_tokenizer(300)
    n = len(ids)
    chosen = torch.ones(n, dtype=torch.bool) if chosen is None else torch.tensor(chosen)
    row = Row(torch.tensor([5, *ids]), chosen, None, 1.0)
    return pieces_of(row, torch.arange(1.0, n + 1), torch.ones(n), tokenizer, (299,))


def test_tokens_that_share_a_character_are_one_piece():
    tokenizer = load_tokenizer(300)
    euro, face = (tokenizer.encode_ordinary(c) for c in "€🙂")
    assert len(euro) == 3 and len(face) == 4
    odd = euro[1]       # a byte that begins no character
    ids = [*tokenizer.encode_ordinary(" a"), *euro, odd, *face, *euro[:2], 299]
    found = pieces(ids)
    texts = [piece.text for piece in found]
    assert texts[-5:] == ["€", "\ufffd", "🙂", "\ufffd", ""]
    assert "".join(texts) == tokenizer.decode(ids[:-1])
    assert sum(piece.influence for piece in found) == sum(range(1, len(ids) + 1))
    assert found[-5].influence == sum(range(len(ids) - 10, len(ids) - 7))
    assert [piece.change for piece in found[-5:]] == [3, 1, 4, 2, 1]


def test_an_end_token_that_was_given_is_text():
    found = pieces([65, 299, 66], [False, False, True])
    assert [piece.text for piece in found] == ["b", "<|endoftext|>", "c"]
    assert [piece.chosen for piece in found] == [False, False, True]


def test_where_a_word_stands():
    texts = ["the", " cat", " c", "ats", " cat", "<x>", " cat"]
    found = [Piece(text, 2.0 ** j, float(j), text != "<x>") for j, text in enumerate(texts)]
    places = places_of(" cat", found)
    assert [place.exact for place in places] == [True, False, True, True]
    assert [place.influence for place in places] == [2, 4 + 8, 16, 64]
    assert [place.change for place in places] == [1, 5, 4, 6]
    assert places[0].text == "the« cat» cats cat<x> cat"
    assert [place.exact for place in places_of("cat", found)] == [False] * 4
    assert places_of("<x>", found) == [] and places_of("dog", found) == []
    whole, = places_of("the cat cats", found)
    assert whole.exact and whole.influence == 1 + 2 + 4 + 8
    assert len(places_of("aa", [Piece("aaaa", 1.0, 1.0, True)])) == 2
