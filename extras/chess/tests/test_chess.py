"""Chess as two tasks: truths against positions known by heart, scores against completions made by
hand."""
import shutil

import pytest

from common.files import ROOT
from data.prompts import Prompt
from judge.rewards import score
from run.settings import load_settings
from worlds import refusal, skip_without

pytest.importorskip("chess")

from chess import Board, Move   # noqa: E402
from extras import chess        # noqa: E402


def legal(fen):
    return [move.uci() for move in Board(fen).legal_moves]


START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
MATE = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
ANSWER = f"{AFTER_E4}+0.001+0+0"

# position | move | what it leads to | why
MOVES = f"""
{START} | e2e4 | {ANSWER} | a move
4k3/8/8/8/8/8/8/R3K2R w KQ - 3 9 | e1g1 | 4k3/8/8/8/8/8/8/R4RK1 b - - 4 9+0.001+0+0 | castling
4k3/8/8/8/8/8/8/R3K2R w KQ - 3 9 | a1b1 | 4k3/8/8/8/8/8/8/1R2K2R b K - 4 9+0.001+0+0 | its right
4k3/8/8/8/3p4/8/4P3/4K3 w - - 7 20 | e2e4 | 4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 20+0.001+0+0 | shown
4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 20 | d4e3 | 4k3/8/8/8/8/4p3/8/4K3 w - - 0 21+0.001+0+0 | en passant
8/P6k/8/8/8/8/8/K7 w - - 5 60 | a7a8q | Q7/7k/8/8/8/8/8/K7 b - - 0 60+0.001+0+0 | promotion
8/P6k/8/8/8/8/8/K7 w - - 5 60 | a7a8n | N7/7k/8/8/8/8/8/K7 b - - 0 60+0.5+1+0 | one knight
{MATE} | d8h4 | rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3+1.0+1+0 | mate
7k/8/6K1/8/8/8/8/5Q2 w - - 0 1 | f1f7 | 7k/5Q2/6K1/8/8/8/8/8 b - - 1 1+0.5+1+0 | stalemate
"""


def answer_to(fen, move):
    return chess.rules_answer(Board(fen), Move.from_uci(move))


def test_what_a_move_leads_to():
    for line in MOVES.strip().splitlines():
        fen, move, answer, why = line.split(" | ")
        assert answer_to(fen, move) == answer, f"{move}: {why}"


def scores(names, text, **row):
    """What these rewards give a completion of a row."""
    columns = {column: [x] for column, x in row.items()}
    return [getattr(chess, name)(completions=[text], **columns)[0] for name in names.split()]


def test_texts_are_perfect_completions():
    """Every line of the pretraining would get full marks as a completion, in the published form."""
    for i, line in enumerate(chess.texts(80, 3)):
        fen = " ".join(line.replace("+", " ").split(" ")[1:7])
        if i % 3 == 2:
            text = line.removeprefix(f"P: {fen} ")
            material = chess.material_after(Board(fen))
            assert scores("p_format p_legal p_best p_engine_values", text, legal=[*material],
                          evaluations=material) == [1] * 4, line
            assert material[text.split()[-1]] == max(material.values())
        else:
            move, history, answer = line.removeprefix(f"A: {fen}+").split("+", 2)
            board = Board()
            for before in history.split(" ")[:-1]:
                board.push_uci(before)
            assert board.fen() == fen and history.split(" ")[-1] == move
            assert answer == answer_to(fen, move)
            assert scores("a_format a_exact a_outcome", answer, answer=answer) == [1] * 3, line
    for fen, move, pawns in [("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 20", "d4e3", 1),
                             ("1n2k3/P7/8/8/8/8/8/4K3 w - - 0 1", "a7b8q", 9)]:
        assert chess.material_after(Board(fen))[move] == pawns


def test_questions_know_their_answers_and_no_question_was_a_text():
    rows = chess.questions(80, 3, history=2)
    for rules, play in zip(rows[::2], rows[1::2]):
        _, move, history, _ = rules["text"].removeprefix(f"A: {rules['fen']}").split("+")
        assert len(history.split(" ")) == 2, "its last two moves"
        assert rules["answer"] == answer_to(rules["fen"], move) and rules["legal"] is None
        assert play["text"] == f"P: {play['fen']} "
        assert play["legal"] == legal(play["fen"]) and play["answer"] is None
    assert rows == chess.questions(90, 3, 2)[:80] != chess.questions(80, 4, 2)
    learned = {text.partition("+")[0].split(" ")[1] for text in chess.texts(600, 3)}
    assert not learned & {row["fen"].split(" ")[0] for row in rows}


STATES = [  # completion, format, right position, distance, share of the outcome
    (ANSWER, 1, 1, 0, 1),
    (ANSWER.replace("0.001", "0.01"), 1, 1, 0, 2 / 3),
    (ANSWER.replace("4P3", "3P4"), 1, 0, 2, 1),
    (ANSWER.replace("4P3", "4P"), 0, 0, 1, 1),                  # a rank of five squares
    (ANSWER.replace(" KQkq", " "), 0, 0, 4, 1),                 # no castling field
    (ANSWER.replace("+0+0", "+0+2"), 0, 1, 0, 2 / 3),           # no flag
    (AFTER_E4, 0, 1, 0, 0),
    ("", 0, 0, len(AFTER_E4), 0), ("x" * 500, 0, 0, len(AFTER_E4), 0)]

FIVE = "e2e4 d2d4 g1f3 c2c4 b1c3"
LEGAL = legal(START)
BY_VALUE = [*FIVE.split(), *sorted(set(LEGAL) - {*FIVE.split()})]
VALUES = {move: -0.1 * i for i, move in enumerate(BY_VALUE)}
PLAYS = [   # completion, format, legal share, best among them, engine's best, moves, values
    (f"M: {FIVE} E: 0.0 -0.1 -0.2 -0.3 -0.4 B: e2e4", 1, 1, 1, 1, 1, 1),
    (f"M: {FIVE} E: 0.0 -0.1 -0.2 -0.3 -0.4 B: g1f3", 1, 1, 1, .6, 1, 1),
    (f"M: {FIVE} E: 1.0 0.9 0.8 0.7 0.6 B: a2a3", 1, 1, 0, .1, 1, .5),
    (f"M: {FIVE} E: 1 2 B: e2e5", 0, 1, 0, -1, 1, 0),
    (f"M: {FIVE} E: 0 0 0 0 1e9 B: e2e4", 0, 1, 1, 1, 1, 0),
    ("M: e2e4 d2d4 g1f3 c2c4 a1a8 E: 0 0 0 0 0 B: e2e4", 1, .8, 1, 1, .8, 0),
    ("M: e2e4 e2e4 e2e4 e2e4 e2e4 E: 0 0 0 0 0 B: e2e4", 1, .2, 1, 1, .2, 1),
    ("M: e2e4 d2d4", 0, .4, 0, -.5, .4, 0), ("", 0, 0, 0, -.5, 0, 0)]


RULES = "a_format a_exact a_distance a_outcome"
PLAY = "p_format p_legal p_best p_engine_best p_engine_moves p_engine_values"


def test_scores_of_completions():
    for text, *expected in STATES:
        assert scores(RULES, text, answer=ANSWER) == pytest.approx(expected), text
    for text, *expected in PLAYS:
        found = scores(PLAY, text, legal=LEGAL, evaluations=VALUES)
        assert found == pytest.approx(expected), text
    assert scores(f"{RULES} {PLAY}", "", answer=None, legal=None, evaluations=None) == [None] * 10
    assert chess.edit_distance("flaw", "lawn") == 2
    assert chess.edit_distance("", "abc") == 3


@pytest.mark.parametrize("name", ["chess", "chess_stockfish", "chess_rookworld"])
def test_config_files(name, monkeypatch):
    """The longest prompt and answer fit; each part is a column, NaN where the task is the other."""
    if name == "chess_rookworld":
        skip_without("hub")
    monkeypatch.setattr(chess, "add_evaluations", lambda rows: [
        row | {"evaluations": row["legal"] and VALUES} for row in rows])
    cfg = load_settings([f"{ROOT}/extras/chess/config/{name}.py"])
    rows = cfg.functions["questions"](300, 1)
    for row in rows if cfg.policy == "train" else []:       # a token for each character
        assert len(row["text"]) + cfg.max_completion_length <= cfg.block_size
        assert len(row["answer"] or "") < cfg.max_completion_length
    prompts = [Prompt(row["text"], [1], row) for row in rows[:2]]
    functions = {name: cfg.functions[name] for name in cfg.reward_funcs}
    abstains = score(functions, prompts, ["", ""]).isnan().T                        # (K, 2)
    for name, of_rules_and_play in zip(functions, abstains.tolist()):
        assert of_rules_and_play == [name.startswith("p_"), name.startswith("a_")], name


def test_stockfish_sees_a_mate_or_one_line_says_that_it_is_missing(monkeypatch):
    rows = [{"fen": MATE, "legal": legal(MATE)}, {"fen": START, "legal": None}]
    if shutil.which("stockfish"):
        first, second = chess.add_evaluations(rows, nodes=500)
        assert chess.top_moves(first["evaluations"])[0] == "d8h4"
        assert "evaluations" not in second
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install stockfish" in refusal(chess.add_evaluations, rows)
