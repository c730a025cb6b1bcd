"""`python tracin.py RUN`: it scores exactly what the run would do next, its words add up, a plain
backward is the judge, and whatever a policy wrote stays text."""
import html
import importlib
import json
import math
import os
import re
import shutil

import pytest
import torch

import grpo
import tape
from config import load_settings
from data.tokenizer import load_tokenizer
from explain import account, story
from explain.page import page, visible
from explain.sentences import own_units, sentences_of
from explain.words import Piece, Row, pieces_of
from worlds import command, printed, read_rows, refusal, seed_of

explain = importlib.import_module("explain.__main__")
CONFIG = """
device = "cpu"
vocab_size, n_layer, n_embd, n_head, block_size, max_completion_length = 300, 1, 32, 2, 32, 8
pretrain_tokens, prompt_words = 40_000, (2, 4)
num_prompts, num_generations, micro_batch_size = 4, 4, 8
judge = eval_judge = None
num_eval_prompts, num_eval_generations, eval_interval, save_interval, max_iters = 2, 2, 0, 2, 4
learning_rate, log_micro, tracin = 1e-3, False, "self"


def reward(prompts, completions):
    return [text.count("e") + 0.1 * len(text) for text in completions]
"""
TARGET = """
def target(policy, tokenizer, batch):
    return -policy.ln_f.weight.square().sum() - policy.wpe.weight.square().sum()
"""
SETTINGS = {
    "self": [],
    "off": ["--tracin=off"],
    "one backward": [
        "--tracin=advantage", "--tracin_leave_one_out=True", "--tracin_adam=True", "--top_k=20",
        "--lora_rank=2", "--zero_std_groups=drop", "--num_iterations=2", "--temperature=0.8"],
    "held out": [
        "--tracin=reward", "--tracin_val_prompts=3", "--tracin_target_ema=0.8", "--beta=0.1",
        "--entropy_coef=0.01", "--ref_model_sync_steps=2"],
    "micro-batches": ["--loss_type=bnpo", "--micro_batch_size=4"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory, comments):
    """run(name of SETTINGS): the folder of such a run, made once."""
    there = tmp_path_factory.mktemp("explained")
    (there / "config.py").write_text(CONFIG)
    made = []

    def make(name, *more):
        folder = str(there / name)
        if name not in made:
            printed(grpo.main, [str(there / "config.py"), f"--comments={comments}",
                                f"--cache_dir={there}/prepared", f"--out_dir={folder}",
                                *SETTINGS.get(name, more)])
            made.append(name)
        return folder

    return make


def text_of(folder):
    """The run's copy of its config file, which runs because it is named."""
    return os.path.join(folder, "config.py")


def sampled(folder, *flags, name="ckpt.pt"):
    """Rows that explain samples after a checkpoint."""
    cfg = explain.settings_of(folder, [text_of(folder), *flags], "", "")
    found = []

    def sample():
        setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
        found.append(explain.next_iteration(setup, os.path.join(folder, name), cfg))

    printed(sample)
    return found[0].rows, found[0], cfg


def recorded(folder, iteration):
    """Rows of samples.jsonl that were scored."""
    return [row for row in read_rows(os.path.join(folder, "samples.jsonl"))
            if row["iteration"] == iteration and row.get("influence", 0.0) is not None]


def best_of(rows):
    """The one of highest advantage whose text can be asked for."""
    encode = load_tokenizer(300).encode_ordinary
    there_is_room = [row for row in rows if row["completion"]
                     and len(encode(row["prompt"])) + len(encode(row["completion"])) <= 32]
    return max(there_is_room, key=lambda row: row["advantage"])


def listed(rows):
    """How many are among the five that help most and the five that harm most."""
    z = own_units(rows)
    return min(5, int((z > 0).sum())) + min(5, int((z < 0).sum()))


# ------------------------------------------------------------------------------------------------
# the iteration that comes next


@pytest.mark.parametrize("name", SETTINGS)
def test_it_samples_what_the_run_writes_next(run, tmp_path, name):
    """Bit for bit: texts, rewards, influences and weights, from both checkpoints."""
    folder = shutil.copytree(run(name), tmp_path / "run")
    next_rows, scored, cfg = sampled(str(folder))
    earlier, _, _ = sampled(str(folder), name="ckpt_prev.pt")
    printed(grpo.main, [str(folder), text_of(folder), f"--out_dir={folder}", "--resume=True",
                        "--max_iters=5", *SETTINGS[name]])
    for rows, iteration in ((next_rows, 5), (earlier, 3)):
        written = recorded(folder, iteration)
        assert len(rows) == len(written) > 8
        for row, other in zip(rows, written):
            same = row.keys() & other.keys()
            assert same >= {"prompt", "completion", "reward", "advantage"}
            assert {k: row[k] for k in same} == {k: other[k] for k in same}
    assert "agrees with" in explain.check(scored, cfg)


def test_words_add_up_and_a_wrong_tape_is_seen(run, monkeypatch):
    for name in SETTINGS:
        rows, scored, cfg = sampled(run(name))
        words = explain.words_of(scored, cfg, range(len(rows)))
        z = own_units(rows)
        size = float(z.abs().max())
        for j, pieces in words.items():
            total = sum(piece.influence for piece in pieces)
            assert total == pytest.approx(float(z[j]), abs=1e-5 * size), name
            assert "".join(piece.text for piece in pieces) == rows[j]["completion"]
    monkeypatch.setattr(tape.Vector, "dot", lambda a, b, G: 0 * (b @ G))
    _, scored, cfg = sampled(run("self"))
    assert "CONTRADICTS" in explain.check(scored, cfg)


def test_it_prints_and_writes_a_page_and_changes_nothing_else(run, tmp_path):
    folder = run("self")
    before = {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}
    text = printed(explain.main, [folder, text_of(folder)])
    after = {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}
    shown = after.pop("influence.html").decode()
    before.pop("influence.html", None)
    assert before == after
    assert "64 rollouts, target 'self'" in text and "nan" not in text
    assert "Iteration 5: the tape agrees with" in text and "<small>iteration 5, " in shown
    assert text.count("  iteration ") == listed(sum((recorded(folder, i) for i in range(5)), []))
    assert shown.count("<article>") == listed(sampled(folder)[0])
    (tmp_path / "mine.py").write_text(CONFIG + TARGET)
    text = printed(explain.main, [run("off"), str(tmp_path / "mine.py"), "--tracin=target"])
    assert "target 'target'" in text and "agrees with" in text
    text = command("tracin.py", run("off"), text_of(run("off")), "--before")
    assert "16 rollouts, target 'reward'" in text
    assert "Iteration 3: the tape agrees with" in text


@pytest.mark.parametrize("name, flags", [
    ("off", []), ("off", ["--tracin=advantage"]),
    ("self", ["--next=True", "--prompt=the", "--completion= cat"])])
def test_rollouts_that_the_run_keeps_are_not_called_dropped(run, name, flags):
    """A run drops none by a target that is not its own."""
    folder = run(name)
    text = printed(explain.main, [folder, text_of(folder), *flags])
    page_text = open(os.path.join(run(name), "influence.html"), encoding="utf-8").read()
    assert "dropped" not in text + page_text
    weights = re.findall(r"weight (\S+?)[:<]", text + page_text)
    assert set(weights) == {"1"}, "a rollout has another weight than the run gives it"


def test_what_makes_the_model_say_this(run):
    """A rollout that says it, of positive advantage, is for it."""
    folder = run("off")
    best = best_of(recorded(folder, 3))
    argv = [folder, text_of(folder), "--before", "--next=True", f"--prompt={best['prompt']}",
            f"--completion={best['completion']}"]
    helpful, harmful = printed(explain.main, argv).split("Most harmful")
    assert f"iteration 3, reward {best['reward']:.3f}" in helpful
    assert f"-> {best['completion'][:48]!r}" in helpful


def test_refusals(run):
    folder = run("self")
    for argv in ([], [folder, "--prompt=the"]):
        assert "usage" in refusal(explain.main, argv)
    for flag in ("--since=1", "--parts=2", "--hessian=False"):
        line = refusal(explain.main, [folder, flag])
        assert line.startswith(flag) and "the account of a sentence" in line
    line = refusal(explain.main, [folder, "--account=True", "--before"])
    assert line.startswith("--before") and "the next iteration" in line
    long = "--completion=" + "long " * 40
    asked = [folder, text_of(folder), "--prompt=the", long]
    assert "together 32 at most" in refusal(explain.main, [*asked, "--next=True"])


# ------------------------------------------------------------------------------------------------
# the account of the whole run: its arithmetic is in test_account.py

NUMBER = "[+-][0-9.]+"


def told(folder, *flags):
    """What the account prints, and the numbers of its last line by name."""
    text = printed(explain.main, [folder, text_of(folder), *flags])
    line = re.findall("^account: .*$", text, re.M)[-1]
    assert re.fullmatch(
        f"account: rollouts {NUMBER}, rest {NUMBER}(, [a-z]+ {NUMBER})*, together {NUMBER} nats; "
        f"true change {NUMBER} \\([0-9.]+ % off\\)", line)
    return text, {name: float(x) for name, x in re.findall(f"([a-z]+) ({NUMBER})", line)}


def said_by(folder):
    """Flags that ask for a completion of the run."""
    row = best_of(read_rows(os.path.join(folder, "samples.jsonl")))
    return [f"--prompt={row['prompt']}", f"--completion={row['completion']}"]


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read()
            for name in os.listdir(folder) if not name.endswith(".html")}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_account_repeats_the_run_and_adds_up(run, name):
    """To the same bits, from its start and from a checkpoint, and nothing else is left behind."""
    folder = run(name)
    before = contents(folder)
    asked = ["--account=True", "--parts=8"]
    text, whole = told(folder, *asked, "--hessian=False")
    assert "ends at other weights" not in text and "without the Hessian" in text
    size = max(map(abs, whole.values()))
    assert abs(whole["together"] - whole["change"]) < story.TOO_FAR * size
    shown = open(os.path.join(folder, "account.html"), encoding="utf-8").read()
    assert shown.count("<article>") == text.count(", without it ") + story.WORST
    for since in (2, 3):        # there is a checkpoint at 2
        text, later = told(folder, *asked, f"--since={since}")
        assert "ends at other weights" not in text and "with the Hessian" in text
        assert f"iterations {since + 1} to 4" in text
        assert later["momentum"], "a step since has none of the momentum from before"
        assert abs(later["together"] - later["change"]) < story.TOO_FAR * size
    assert contents(folder) == before


def killed_after(name, links_to):
    """os.replace of a run that is killed in its fourth save, after the rename to a name. Its folder
    then has links with names of checkpoints."""
    replace = os.replace

    def until(source, path):
        replace(source, path)
        folder = os.path.dirname(path)
        if path.endswith(name) and os.path.exists(f"{folder}/ckpt_000002.pt"):
            for link in (f"{folder}/ckpt_000001.pt", f"{folder}/ckpt_000003.pt"):
                if not os.path.exists(link):
                    os.symlink(links_to, link)
            raise RuntimeError("killed")

    return until


@pytest.mark.parametrize("keep, killed, kept, links", [
    (0, "", [0, 1, 2, 3, 4], 0), (1, "", [3, 4], 0), (3, "", [2, 3, 4], 0),
    (0, "ckpt_000002.pt", [0, 1, 2, 3, 4], 1), (0, "ckpt_prev.pt", [0, 1, 2, 3, 4], 1),
    (3, "ckpt_prev.pt", [2, 3, 4], 2)])
def test_it_starts_from_the_last_checkpoint_that_was_kept(
        run, tmp_path, monkeypatch, keep, killed, kept, links):
    """Also where the run was killed between two renames, and where links have such names."""
    name = f"keeps {keep} {killed}"
    flags = ["--tracin=off", "--save_interval=1", f"--keep_checkpoints={keep}"]
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    if killed:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
            patch.setattr(os, "replace", killed_after(killed, mine))
            run(name, *flags)
    folder = run(name, *flags)
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pt")]
    own = [path for path in paths if not os.path.islink(path)]
    assert sorted(torch.load(path)["iteration"] for path in own) == kept
    assert len(paths) - len(own) == links and mine.read_text() == "mine", "a user's link is gone"
    replay = story.replay
    starts = []

    def watched(setup, cfg, start, *rest):
        starts.append(start)
        return replay(setup, cfg, start, *rest)

    monkeypatch.setattr(story, "replay", watched)
    text, _ = told(folder, *said_by(folder), "--since=2", "--hessian=False")
    assert starts == [2 if 2 in kept else 0] and "ends at other weights" not in text


def test_weights_on_the_way_lie_in_files_where_memory_is_short(run, monkeypatch):
    folder = run("off")
    before = contents(folder)
    in_memory = told(folder, *said_by(folder), "--hessian=False")
    monkeypatch.setattr(account, "free_memory", lambda device: 0)
    assert told(folder, *said_by(folder), "--hessian=False") == in_memory

    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "account", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explain.main([folder, text_of(folder), *said_by(folder)])
    assert contents(folder) == before


def test_several_sentences_share_a_replay(run, tmp_path):
    folder = run("off")
    text, _ = told(folder, "--account=True", "--hessian=False")
    assert text.count("account: rollouts") == story.WORST
    sentences = [dict(prompt="the", completion=" cat"), dict(prompt="a", completion=" dog")]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, sentences)))
    together, _ = told(folder, f"--prompts={path}", "--hessian=False")
    alone = [told(folder, "--prompt=a", "--completion= dog", "--hessian=False")[0]]
    assert alone[0].splitlines()[-3] in together and together.count("'the' -> ' cat'") == 1


@pytest.mark.parametrize("name, parts", [("held out", 1), ("held out", 3), ("micro-batches", 1)])
def test_words_of_a_rollout_add_up_to_its_share(run, name, parts):
    folder = run(name)
    cfg = load_settings([folder, text_of(folder)])
    setup = grpo.prepare(cfg, grpo.read_inputs(cfg))
    asked = [account.row_of([5, 6], [7, 8, 9], setup.device)]
    states, taken = account.replay(setup, cfg, 0, 0, 4, folder)
    shares = account.account(setup, cfg, states, taken, asked, False, parts).shares[0]
    places = [divmod(x, shares.shape[1]) for x in shares.flatten().abs().topk(6).indices.tolist()]
    found = story.token_shares(setup, cfg, states, taken, asked[0], places, parts)
    for place, words in found.items():
        assert float(words.sum()) == pytest.approx(float(shares[place]), rel=1e-3)


def test_what_the_account_refuses(run, tmp_path, monkeypatch):
    folder = str(tmp_path / "run")
    shutil.copytree(run("off"), folder)
    asked = said_by(folder)

    def refused(*flags):
        return refusal(explain.main, [folder, text_of(folder), *(flags or asked)])

    assert "together 32 at most" in refused("--prompt=the", "--completion=" + "long " * 40)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the", "completion": ["a"]}')
    assert "must be text" in refused(f"--prompts={rows}")
    for prompt in ("5", '{"a": 1}', "null"):
        rows.write_text(f'{{"prompt": {prompt}, "completion": "a"}}')
        assert refused(f"--prompts={rows}").startswith("prompt "), prompt
    rows.write_text("")
    assert "no sentence" in refused(f"--prompts={rows}")
    with_top_k = run("one backward")
    never = [with_top_k, text_of(with_top_k), "--prompt=the", "--completion=\u20ac\u20ac"]
    assert "never draws" in refusal(explain.main, never)
    assert "learning_rate = 1.0: must be 0.001" in refused(*asked, "--learning_rate=1.0")
    harmless = ["--micro_batch_size=3", "--num_eval_prompts=3", "--since=3", "--hessian=False"]
    assert "account: rollouts" in told(folder, *asked, *harmless)[0]
    assert "--since=4: must be below 4" in refused(*asked, "--since=4")
    changed = tmp_path / "changed.py"
    changed.write_text(CONFIG.replace("0.1 * len(text)", "0.2 * len(text)"))
    assert "has changed" in refusal(explain.main, [folder, str(changed), *asked])
    monkeypatch.setattr(story, "rank_and_size", lambda: (0, 2))
    assert "one process" in refused()
    monkeypatch.setattr(story, "rank_and_size", lambda: (0, 1))
    path = os.path.join(folder, "ckpt.pt")
    content = torch.load(path)
    with open(path, "r+b") as f:        # one bit of a weight
        f.seek(os.path.getsize(path) // 2)
        byte, = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    assert "damaged" in refused()
    content["policy"]["h.0.ln_1.weight"] += 1e-3
    torch.save(content, path)
    assert "ends at other weights" in told(folder, *asked, "--hessian=False")[0]
    torch.save(content | {"base_hash": "other"}, path)
    assert "another policy" in refused()
    os.remove(path)
    os.remove(os.path.join(folder, "ckpt_prev.pt"))
    assert "has no checkpoint" in refused()
    assert "name its config file too" in refusal(explain.main, [folder, *asked])


# ------------------------------------------------------------------------------------------------
# words and sentences


def test_tokens_that_share_a_character_are_one_piece():
    tokenizer = load_tokenizer(300)
    euro, face = (tokenizer.encode_ordinary(c) for c in "€🙂")
    ids = [*tokenizer.encode_ordinary(" a"), *euro, euro[1], *face, *euro[:2], 299]
    n = len(ids)
    row = Row(torch.tensor([5, *ids]), torch.ones(n, dtype=torch.bool), None, 1.0)
    found = pieces_of(row, torch.arange(1.0, n + 1), tokenizer)
    assert [piece.text for piece in found][-5:] == ["€", "\ufffd", "🙂", "\ufffd", ""]
    assert "".join(piece.text for piece in found) == tokenizer.decode(ids[:-1])
    assert sum(piece.influence for piece in found) == sum(range(1, n + 1))


def test_sentences_say_what_was_planted():
    generator = torch.Generator().manual_seed(seed_of(0))
    noise = torch.randn(2, 300, generator=generator).tolist()
    planted = [dict(iteration=i // 100, completion="e" * (5 + i % 7), reward=a, advantage=b,
                    influence=math.exp(a) - 0.5, weight=float(a > 0))
               for i, (a, b) in enumerate(zip(*noise))]
    metrics = [{"tracin/target_cosine": x} for x in (0.02, None, -0.01)]
    shares, target, likeness = sentences_of(planted, metrics, list)
    assert "tenth of 300" in shares and "dropped have" in shares
    kept = [row | {"weight": 1.0} for row in planted]
    assert "dropped" not in sentences_of(kept, metrics, list)[0]
    assert "mostly noise" in target and "0.01" in target
    assert "hardly more than reward" in likeness
    assert "mostly signal" in sentences_of(planted, [{"tracin/target_cosine": 0.8}], list)[1]
    alike = [row | dict(reward=1.0) for row in planted]
    assert "+0.00 with reward" in sentences_of(alike, [], list)[-1]


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
    return page(f"run {NASTY[1]}", NASTY[2], NASTY, lists)


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
