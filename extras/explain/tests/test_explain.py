"""`python tracin.py RUN`: what a policy wrote stays text, on a page that can be read anywhere."""
import html
import importlib
import re
from types import SimpleNamespace

import torch

from data.tokenizer import load_tokenizer
from extras.explain.page import Report, page, visible
from extras.explain.tables import Card
from extras.explain.tokens import Piece, pieces_of
from worlds import assert_refused

script = importlib.import_module("extras.explain.__main__")


def test_what_cannot_be_started_is_one_line(monkeypatch):
    assert_refused("usage", script.main, [])
    monkeypatch.setattr(script, "rank_and_size", lambda: (0, 2))
    assert_refused("torchrun", script.main, ["out/run"])


def test_tokens_that_share_a_character_are_one_piece():
    tokenizer = load_tokenizer(300)
    euro, face = (tokenizer.encode_ordinary(c) for c in "€🙂")
    ids = [*tokenizer.encode_ordinary(" a"), *euro, euro[1], *face, *euro[:2], 299]
    n = len(ids)
    mask = torch.ones(1, n, dtype=torch.bool)
    row = SimpleNamespace(tokens=torch.tensor([[5, *ids]]), completion_mask=mask, sampled_mask=mask)
    found = pieces_of(row, torch.arange(1.0, n + 1), tokenizer)
    assert [piece.text for piece in found][-5:] == ["€", "\ufffd", "🙂", "\ufffd", ""]
    assert "".join(piece.text for piece in found) == tokenizer.decode(ids[:-1])
    assert sum(piece.influence for piece in found) == sum(range(1, n + 1))


# ------------------------------------------------------------------------------------------------
# the page

NASTY = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(2)>", "&lt;b&gt; &#60;",
         "a\x00b\x1b[31m\x7f\x85", "\ud800 half", "line\n\ttab \u2028", "été 🙂 {0}")


def nasty_page():
    cards = []
    for j, text in enumerate(NASTY):
        pieces = [Piece(text, 1.0 - j, True), Piece("  ", 0.5, True), Piece(text, 0.0, False),
                  Piece("", -0.1, True)]
        cards.append(Card(f"iteration 1 {text}", text, pieces))
    lists = {"Most helpful": cards, "Most harmful": []}
    return page(f"run {NASTY[1]}", Report(NASTY, [], [lists]))


def test_nothing_that_was_written_becomes_markup():
    text = nasty_page()
    text.encode("utf-8")        # a lone surrogate would not
    assert not re.findall("<(script|img|a|link|iframe)[ >]", text)
    assert text.count("<style") == 1 and text.count("<article") == len(NASTY)
    assert "http" not in text.replace("http-equiv", "") and "url(" not in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    shown = [html.unescape(re.sub("</?i>", "", visible(text))) for text in NASTY]
    assert shown[0] == NASTY[0] and shown[-1] == NASTY[-1] and shown[4] == "\\ud800 half"
    assert shown[3] == "a\\x00b\\x1b[31m\\x7f\\x85" and shown[5] == "line\\n\\ttab \\u2028"
    first = text.split("<article>")[1]
    colors = re.findall(r'<b style="background:rgba\((.*?),[^,]*\)" title', first)
    assert colors == ["0,114,178", "0,114,178", "213,94,0"]


def test_what_a_tooltip_says_is_on_the_page_too():
    """A phone has none. The tints of a list say nothing without the number that they begin at."""
    pieces = [Piece("weak", 0.011, True), Piece("bad", -0.38, True), Piece("given", 9.0, False),
              Piece("", 0.25, True), Piece("fine", 0.125, True)]
    report = Report([], [], [{"Most harmful": [Card("facts", "prompt", pieces)]}])
    text = html.unescape(re.sub("<style.*?</style>|<.*?>", " ", page("a", report), flags=re.DOTALL))
    assert "bad -0.38, [end] +0.25, fine +0.12" in text
