"""`python tracin.py RUN --next_iteration`: it scores exactly what the run would do next, its words
add up, a plain backward is the judge, and whatever a policy wrote stays text."""
import functools
import html
import importlib
import math
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

import grpo
import tape
from data.tokenizer import load_tokenizer
from extras.explain.page import page, visible
from extras.explain.sentences import likeness, own_units, sentences_of
from extras.explain.words import Piece, pieces_of
from run.checkpoint import newest_checkpoint
from worlds import assert_refused, command, printed, read_rows, seed_of, skip_without

explain = importlib.import_module("extras.explain.next_iteration")
script = importlib.import_module("extras.explain.__main__")
RULE = """
judge = eval_judge = None


def reward(prompts, completions):
    return [text.count("e") + 0.1 * len(text) for text in completions]
"""
TARGET = """
def target(policy, tokenizer, batch):
    return -policy.ln_f.weight.square().sum() - policy.wpe.weight.square().sum()
"""
SETTINGS = {
    "self": ["--tracin=self"],
    "off": [],
    "one backward": [
        "--tracin=advantage", "--tracin_leave_one_out=True", "--tracin_adam=True", "--top_k=20",
        "--lora_rank=2", "--zero_std_groups=drop", "--num_iterations=2", "--temperature=0.8"],
    "held out": [
        "--tracin=reward", "--tracin_val_prompts=3", "--tracin_target_ema=0.8", "--beta=0.1",
        "--entropy_coef=0.01", "--ref_model_sync_steps=2"]}


@pytest.fixture(scope="module")
def run(run_grpo, tmp_path_factory):
    """run(name of SETTINGS): the folder of such a run, made once."""
    there = tmp_path_factory.mktemp("explained")
    (there / "rule.py").write_text(RULE)

    @functools.cache
    def make(name):
        folder = str(there / name)
        if "--lora_rank=2" in SETTINGS[name]:
            skip_without("lora")
        run_grpo(folder, there / "rule.py", "--max_iters=4", *SETTINGS[name])
        return folder

    return make


def text_of(folder):
    """The run's copy of its config file, which runs because it is named."""
    return os.path.join(folder, "config.py")


def sampled(folder, before=False):
    """Rows that explain samples after a checkpoint, and what it knows of them."""
    cfg = explain.settings_of(folder, [text_of(folder)])
    found = []

    def sample():
        setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
        found.append(explain.next_iteration(setup, newest_checkpoint(folder, before), cfg))

    printed(sample)
    return found[0].rows, found[0], cfg


def recorded(folder, iteration):
    """Rows of samples.jsonl that were scored."""
    return [row for row in read_rows(os.path.join(folder, "samples.jsonl"))
            if row["iteration"] == iteration and row.get("influence", 0.0) is not None]


# ------------------------------------------------------------------------------------------------
# the iteration that comes next


def in_order(rows, scored):
    """Rows of a step, which may have mixed them, in the order of the batch."""
    return [rows[i] for i in scored.recording.step.rows.argsort()]


@pytest.mark.parametrize("name", SETTINGS)
def test_it_samples_what_the_run_writes_next(run, run_grpo, tmp_path, name):
    """Bit for bit: texts, rewards, influences and weights, from both checkpoints."""
    folder = shutil.copytree(run(name), tmp_path / "run")
    rows, scored, cfg = sampled(str(folder))
    next_rows = in_order(rows, scored)
    rows, before, _ = sampled(str(folder), before=True)
    earlier = in_order(rows, before)
    run_grpo(folder, text_of(folder), "--max_iters=5", "--resume=True", *SETTINGS[name])
    for rows, iteration in ((next_rows, 5), (earlier, 3)):
        written = recorded(str(folder), iteration)
        assert len(written) == len(rows) > 8
        for row, other in zip(rows, written):
            same = row.keys() & other.keys()
            assert same >= {"prompt", "completion", "reward", "advantage"}
            assert {k: row[k] for k in same} == {k: other[k] for k in same}
    assert "agrees with" in explain.check(scored)


def test_words_add_up_and_a_wrong_tape_is_seen(run, monkeypatch):
    for name in SETTINGS:
        rows, scored, cfg = sampled(run(name))
        z = own_units(rows)
        size = float(z.abs().max())
        for j in range(len(rows)):
            pieces = explain.words_of(scored, cfg, j)
            total = sum(piece.influence for piece in pieces)
            assert total == pytest.approx(float(z[j]), abs=1e-5 * size), name
            assert "".join(piece.text for piece in pieces) == rows[j]["completion"]
    products = tape.products
    monkeypatch.setattr(tape, "products", lambda b, a, G: (G.dim() > 1) * products(b, a, G))
    _, scored, cfg = sampled(run("self"))
    assert "CONTRADICTS" in explain.check(scored)


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


def test_it_prints_and_writes_a_page_and_changes_nothing_else(run, tmp_path):
    folder = run("self")
    before = contents(folder)
    text = printed(script.main, [folder, text_of(folder), "--next_iteration"])
    after = contents(folder)
    shown = after.pop("influence.html").decode()
    before.pop("influence.html", None)
    assert before == after
    assert "'self'" in text and "nan" not in text
    assert "agrees with" in text, "no plain backward was made"
    z = own_units(sampled(folder)[0])
    listed = min(5, int((z > 0).sum())) + min(5, int((z < 0).sum()))
    assert text.count(", iteration 5, ") == shown.count("<article>") == listed
    assert text.count(", weight 0:") == int((z < 0).sum().clamp(max=5)), "those that are dropped"
    (tmp_path / "mine.py").write_text(RULE + TARGET)
    text = printed(script.main, [run("off"), str(tmp_path / "mine.py"), "--tracin=target",
                                 "--next_iteration"])
    assert "'target'" in text and "agrees with" in text


@pytest.mark.parametrize("flag, target, iteration", [
    ("--before", "reward", 3), ("--tracin=advantage", "advantage", 5)])
def test_rollouts_that_the_run_keeps_are_not_called_dropped(run, flag, target, iteration):
    """A run drops none by a target that is not its own."""
    folder = run("off")
    text = command("tracin.py", folder, text_of(folder), "--next_iteration", flag)
    assert f"'{target}'" in text and f"Iteration {iteration}:" in text
    page_text = open(os.path.join(folder, "influence.html"), encoding="utf-8").read()
    assert "dropped" not in text + page_text
    assert "weight" not in text, "a rollout has another weight than the run gives it"


def test_what_cannot_be_started_is_one_line(monkeypatch):
    assert_refused("usage", script.main, [])
    monkeypatch.setattr(script, "rank_and_size", lambda: (0, 2))
    assert_refused("torchrun", script.main, ["out/run"])


# ------------------------------------------------------------------------------------------------
# words and sentences


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


def noise(n, count=300):
    return torch.randn(n, count, generator=torch.Generator().manual_seed(seed_of(0))).tolist()


INFLUENCES = {      # of a row, and the sign of its rank correlation with that
    "reward": (lambda row: math.exp(row["reward"]), 1),
    "|advantage|": (lambda row: abs(row["advantage"]), 1),
    "length": (lambda row: -len(row["completion"]), -1),
    "own part": (lambda row: row["own_part"], 1)}


@pytest.mark.parametrize("name", INFLUENCES)
def test_what_influence_follows_is_named(name):
    """By ranks within an iteration; iterations may differ in all else."""
    influence, sign = INFLUENCES[name]
    rows = [dict(iteration=i // 100, completion="e" * (5 + i % 7), reward=a, advantage=b,
                 weight=1.0, own_part=c) for i, (a, b, c) in enumerate(zip(*noise(3)))]
    for row in rows:
        row["influence"] = influence(row)
    found = likeness(rows, own_units(rows), list)
    assert found[name] == pytest.approx(sign, abs=.1)
    assert all(abs(r) < .3 for other, r in found.items() if other != name)
    text = sentences_of(rows, [], list)[-1]
    assert f"{name}: " in text and ("rises" if sign > 0 else "falls") in text
    alike = [row | dict(reward=1.0) for row in rows]
    assert "reward" not in likeness(alike, own_units(alike), list), "all rewards are equal"


def test_sentences_have_the_numbers_of_what_was_planted():
    influence = [9.0] * 2 + [1.0] * 8 + [-1.0] * 10
    rows = [dict(iteration=0, completion="e", reward=a, advantage=b, influence=x,
                 weight=float(x > 0)) for a, b, x in zip(*noise(2, 20), influence)]
    metrics = [{"tracin/target_cosine": x, "tracin/self_share": 0.9}
               for x in (0.5, None, 0.25, math.nan)]
    shares, target, itself, *_ = sentences_of(rows, metrics, list)
    assert "50%" in shares and "28%" in shares, "18 and 10 of 36"
    assert "0.38" in target and "90%" in itself
    unknown = [row | dict(reward=math.nan) for row in rows[:5]] + rows[5:]
    assert "nan" not in " ".join(sentences_of(unknown, metrics, list))
    silent = [{"tracin/target_cosine": math.nan, "tracin/self_share": math.nan}]
    assert len(sentences_of(rows, silent, list)) == 3, "a sentence about a number that is NaN"


def test_the_helpful_are_compared_within_their_iteration():
    rows = [dict(iteration=it, reward=r, advantage=0.0, influence=x, weight=1.0, completion="e" * n)
            for it, r, x, n in ((0, 1, .1, 2), (0, 0, -.2, 4), (1, 11, 3, 1), (1, 9, -9, 3))]
    found, = (text for text in sentences_of(rows, [], list) if "the helpful" in text)
    assert "reward by 1.5," in found        # 1 - 0 and 11 - 9, not 6 - 4.5 of all
    assert "length in tokens by 2" in found
    rows = [row | {"influence": 1.0} for row in rows]
    assert not [text for text in sentences_of(rows, [], list) if "the helpful" in text]


# ------------------------------------------------------------------------------------------------
# the page

NASTY = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(2)>", "&lt;b&gt; &#60;",
         "a\x00b\x1b[31m\x7f\x85", "\ud800 half", "line\n\ttab \u2028", "été 🙂 {0}")


def nasty_page():
    cards = []
    for j, text in enumerate(NASTY):
        pieces = [Piece(text, 1.0 - j, True), Piece("  ", 0.5, True), Piece(text, 0.0, False),
                  Piece("", -0.1, True)]
        cards.append((f"iteration 1 {text}", text, pieces))
    lists = {"Most helpful": cards, "Most harmful": []}
    return page(f"run {NASTY[1]}", NASTY[2], NASTY, [lists])


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


def test_the_page_can_be_read_on_a_phone():
    viewport = '<meta name="viewport" content="width=device-width'
    assert viewport in nasty_page(), "it would be 980 px wide"


def test_what_a_tooltip_says_is_on_the_page_too():
    """A phone has none. The tints of a list say nothing without the number that they begin at."""
    pieces = [Piece("weak", 0.011, True), Piece("bad", -0.38, True), Piece("given", 9.0, False),
              Piece("", 0.25, True), Piece("fine", 0.125, True)]
    text = html.unescape(re.sub("<style.*?</style>|<.*?>", " ", page("a", "b", [], [{
        "Most harmful": [("facts", "prompt", pieces)]}]), flags=re.DOTALL))
    assert "bad -0.38, [end] +0.25, fine +0.12" in text
