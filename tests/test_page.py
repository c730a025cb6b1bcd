"""run/page.py: whatever a policy wrote, the page shows it, runs nothing and asks for nothing."""
import html
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from run.page import chart, page, scatter, span, ticks, visible, words_section
from run.words import Piece

NASTY = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(2)>", "&lt;b&gt; &#60;",
         "a\x00b\x1b[31m\x7f\x85", "\ud800 half", "line\n\ttab \u2028", "\u202egnp.exe\u200b",
         "</p></article></html><!--", "]]><style>*{display:none}</style>", "{0} {x} %s", "été 🙂 中文")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def nasty_page():
    cards = []
    for j, text in enumerate(NASTY):
        pieces = [Piece(text, 1.0 - j, -1.0, True), Piece("  ", 0.5, 1.0, True),
                  Piece(text, 0.0, 0.0, False), Piece("", -0.1, 1.0, True)]
        cards.append((dict(prompt=text, reward=0.5, advantage=-1.0, weight=0.0), 1.5 - j, pieces))
    rows = [dict(iteration=i, reward=i / 9, advantage=i - 4.0, weight=float(i % 2), z=(i - 5) / 2)
            for i in range(10)]
    metrics = [{"iteration": i, "reward": 0.1 * i, "tracin/selected_ratio": 0.5} for i in (1, 2, 3)]
    evaluations = [{"iteration": i, "eval_judge/toxicity": 0.1 / (i + 1)} for i in (0, 3)]
    words = words_section(NASTY[0], {"Most helpful": cards, "Most harmful": []}, "units")
    return page(f"run {NASTY[1]}", NASTY[2], NASTY, words, rows, metrics, evaluations)


class Reader(HTMLParser):
    """Counts tags, keeps attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = {}, set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


def test_nothing_that_was_written_becomes_markup():
    text = nasty_page()
    text.encode("utf-8")        # a lone surrogate would not
    read = Reader(text)
    assert not {"script", "img", "a", "link", "iframe"} & read.tags.keys()
    assert read.tags["style"] == 1 and read.tags["article"] == len(NASTY)
    asking = [k for k in read.attributes if k.startswith("on") or k in ("src", "href")]
    assert not asking, "an attribute runs or loads something"
    assert "http" not in text.replace("http-equiv", "") and "url(" not in text
    odd = [c for c in text if not c.isprintable() and c != "\n"]
    assert not odd, "a character that no reader sees is in the page as it is"


def test_visible_shows_everything():
    shown = [html.unescape(re.sub("</?i>", "", visible(text))) for text in NASTY]
    assert shown[0] == NASTY[0] and shown[1] == NASTY[1] and shown[-1] == NASTY[-1]
    assert shown[3] == "a\\x00b\\x1b[31m\\x7f\\x85" and shown[4] == "\\ud800 half"
    assert shown[5] == "line⏎⇥tab \\u2028"


def test_tints_and_facts_of_a_rollout():
    text = nasty_page()
    first, second = text.split("<article>")[1:3]
    assert "<dt>influence</dt> <dd>+1.50</dd>" in first and "<dd>-1.00 ▼</dd>" in first
    assert "<dd>0, dropped</dd>" in first
    tokens = re.findall(r'<b style="background:rgba\((.*?),([^,]*)\)" title="(.*?)">', first)
    assert [color for color, *_ in tokens] == ["0,114,178", "0,114,178", "213,94,0"]
    assert float(tokens[0][1]) == pytest.approx(2 * float(tokens[1][1]), abs=0.02)
    assert "pushes it up" in tokens[0][2] and "pushes it down" in tokens[1][2]
    assert "<i>␣␣</i>" in first and "<i>end</i>" in first and 'class="given"' in first
    assert "rgba(0,114,178,0.00)" in second or "rgba(213,94,0,0.00)" in second
    assert "<h3>Most harmful</h3><p>none</p>" in text


def test_charts_hold_what_they_are_given():
    assert chart("empty", "x", []) == "" and scatter("reward", []) == ""
    rows = [dict(reward=float(i % 7), weight=float(i % 3), z=i / 100) for i in range(5000)]
    drawn = scatter("reward", rows)
    assert drawn.count("h0") == 3000 and "3,000 of 5,000 rollouts" in drawn
    assert drawn == scatter("reward", rows), "the sample of dots is drawn anew"
    numbers = [float(x) for x in re.findall(r"M([-0-9.]+) ", drawn)]
    assert min(numbers) >= 48 and max(numbers) <= 360
    for low, high in ((0, 1), (-3e-5, 2e-5), (0.97, 0.98), (0, 0.3), (-16.4, 9.2), (0, 1e29)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 8 and low <= min(found) and max(found) <= high
    for x in (0.0, 5.0, -1e-9):
        low, high = span([x, x])
        assert low < x < high and len(ticks(low, high)) >= 3


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")
def test_a_browser_opens_it(tmp_path):
    (tmp_path / "influence.html").write_text(nasty_page(), encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/me",
         "--enable-logging=stderr", "--dump-dom",
         (tmp_path / "influence.html").as_uri()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    # of errors, and of what the page's own policy forbids: any script, any request
    assert "CONSOLE" not in done.stderr, "the browser complains of the page"
    assert "<script" not in done.stdout and "<img" not in done.stdout
    assert done.stdout.count("<article>") == len(NASTY) and done.stdout.count("<svg") == 5
    assert "alert(1)" in done.stdout and "Over time" in done.stdout
