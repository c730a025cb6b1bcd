"""Chess as two tasks: truths against positions known by heart, scores against completions made by
hand."""
import itertools
import random
import shutil
import sys

import pytest

from config import load_settings
from conftest import ROOT, TINY
from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from grpo import main
from judge.rewards import score
from model import GPTConfig
from run.script import BadInput
from test_published import make_gpt2

chess = pytest.importorskip("chess")

import tasks.chess_lines as lines
import tasks.chess_rewards as rewards

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"

MOVES = [   # position, move, what it leads to
    ("the note's example", START, "e2e4", f"{AFTER_E4}+0.001+0+0"),
    ("castling short moves the rook and ends both rights", "4k3/8/8/8/8/8/8/R3K2R w KQ - 3 9",
     "e1g1", "4k3/8/8/8/8/8/8/R4RK1 b - - 4 9+0.001+0+0"),
    ("castling long as Black counts the move", "r3k2r/8/8/8/8/8/8/4K3 b kq - 3 9", "e8c8",
     "2kr3r/8/8/8/8/8/8/4K3 w - - 4 10+0.001+0+0"),
    ("a rook that moves ends one right", "4k3/8/8/8/8/8/8/R3K2R w KQ - 3 9", "a1b1",
     "4k3/8/8/8/8/8/8/1R2K2R b K - 4 9+0.001+0+0"),
    ("two steps beside a pawn show the square en passant", "4k3/8/8/8/3p4/8/4P3/4K3 w - - 7 20",
     "e2e4", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 20+0.001+0+0"),
    ("en passant takes the pawn that is elsewhere", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 20", "d4e3",
     "4k3/8/8/8/8/4p3/8/4K3 w - - 0 21+0.001+0+0"),
    ("a pawn becomes a queen", "8/P6k/8/8/8/8/8/K7 w - - 5 60", "a7a8q",
     "Q7/7k/8/8/8/8/8/K7 b - - 0 60+0.001+0+0"),
    ("a lone knight mates nobody: a draw", "8/P6k/8/8/8/8/8/K7 w - - 5 60", "a7a8n",
     "N7/7k/8/8/8/8/8/K7 b - - 0 60+0.5+1+0"),
    ("fool's mate", "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2", "d8h4",
     "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3+1.0+1+0"),
    ("stalemate is a draw", "7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "f1f7",
     "7k/5Q2/6K1/8/8/8/8/8 b - - 1 1+0.5+1+0"),
    ("75 moves without a pawn or a capture are a draw", "7k/8/8/8/8/8/8/R6K w - - 149 90", "a1b1",
     "7k/8/8/8/8/8/8/1R5K b - - 150 90+0.5+1+0"),
    ("an illegal move changes nothing", START, "e2e5", f"{START}+-1.0+0+1"),
    ("no move at all is illegal too", START, "", f"{START}+-1.0+0+1"),
]


@pytest.mark.parametrize("fen, move, answer", [case[1:] for case in MOVES],
                         ids=[case[0] for case in MOVES])
def test_what_a_move_leads_to(fen, move, answer):
    assert lines.rules_answer(fen, move) == answer


def test_prompts_have_the_published_form():
    """Note 003: "P: FEN " with a trailing blank, "A: FEN+move+history+" with the move last."""
    first = lines.Position(START, [], "e2e4")
    assert lines.rules_prompt(first) == f"A: {START}+e2e4+e2e4+"
    assert lines.play_prompt(START) == f"P: {START} "
    long = lines.Position(START, [f"a{i}" for i in range(30)], "e2e4")
    history = lines.rules_prompt(long).split("+")[2].split()
    assert history == [f"a{i}" for i in range(21, 30)] + ["e2e4"], (
        "the history has the last 10 moves, oldest first, the move itself among them")


@pytest.mark.parametrize("fen, move, value", [
    ("4k3/8/8/3p4/4P3/8/8/4K3 w - - 0 1", "e4d5", 1.0),     # takes the only other pawn
    ("4k3/8/8/3p4/4P3/8/8/4K3 w - - 0 1", "e1d1", 0.0),
    ("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 20", "d4e3", 1.0),    # en passant
    ("1n2k3/P7/8/8/8/8/8/4K3 w - - 0 1", "a7b8q", 9.0),     # takes a knight, becomes a queen
    ("1n2k3/P7/8/8/8/8/8/4K3 w - - 0 1", "a7a8n", 0.0)])
def test_material_after_a_move(fen, move, value):
    assert lines.material_after(fen)[move] == value


def test_material_is_that_of_the_position_after():
    for fen, _, move in itertools.islice(lines.positions(5, asked=False, plies=(20, 60)), 60):
        board = chess.Board(fen)
        mover = board.turn
        board.push_uci(move)
        found = sum(lines.VALUES[p.piece_type] * (1 if p.color == mover else -1)
                    for p in board.piece_map().values())
        assert lines.material_after(fen)[move] == found, f"{move} in {fen}"


# --------------------------------------------------------------------------------------------------
# texts and questions


def test_texts_are_perfect_completions():
    """Every line of the pretraining would get full marks as a completion."""
    for i, line in enumerate(lines.texts(80, 3)):
        if i % 3 == 2:
            fen = " ".join(line.split(" ")[1:7])
            prompt = lines.play_prompt(fen)
            legal = lines.legal(fen)
            completion = line.removeprefix(prompt)
            scores = [judge(completion, legal) for judge in
                      (rewards.play_format, rewards.legal_share, rewards.best_is_candidate)]
            play = rewards.read_play(completion)
            best = max(map(float, play.values))
            assert play.values[play.moves.index(play.best)] == f"{best:.1f}", line
            assert rewards.closeness(completion, lines.material_after(fen)) == 1
        else:
            fen, move, history, *answer = line.removeprefix("A: ").split("+")
            assert history.split()[-1] == move
            answer = "+".join(answer)
            assert answer == lines.rules_answer(fen, move)
            scores = [judge(answer, answer) for judge in
                      (rewards.state_format, rewards.right_position, rewards.right_outcome)]
        assert scores == [1, 1, 1], f"{line!r}: {scores}"


def test_questions_know_their_answers():
    rows = lines.questions(80, 3)
    for row in rows:
        assert (row["answer"] is None) != (row["legal"] is None)
        if row["answer"]:
            fen, move, history, end = row["text"].removeprefix("A: ").split("+")
            assert row["answer"] == lines.rules_answer(fen, move) and end == ""
            assert move in lines.legal(fen)
            assert 3 <= len(history.split()) <= 7
        else:
            fen = row["text"].removeprefix("P: ").removesuffix(" ")
            assert row["legal"] == lines.legal(fen) != []
    assert sum(row["answer"] is None for row in rows) == 40


def test_the_seed_decides_and_no_question_was_a_text():
    """A board is asked or learned from, never both, whatever the seeds."""
    assert lines.texts(60, 3) == lines.texts(60, 3) != lines.texts(60, 4)
    assert lines.questions(60, 3) == lines.questions(60, 3) != lines.questions(60, 4)
    assert lines.questions(30, 3) == lines.questions(60, 3)[:30]

    def boards(texts):
        return {" ".join(text.partition("+")[0].split(" ")[1:5]) for text in texts}

    learned = boards(lines.texts(600, 3))
    asked = boards(row["text"] for seed in (3, 4) for row in lines.questions(150, seed))
    assert not learned & asked


# --------------------------------------------------------------------------------------------------
# scores


ANSWER = f"{AFTER_E4}+0.001+0+0"
STATES = [  # completion, format, right position, distance, share of the outcome
    (ANSWER, 1, 1, 0, 1),
    (ANSWER.replace("0.001", "0.01"), 1, 1, 0, 2 / 3),
    (ANSWER.replace("+0+0", "+1+1"), 1, 1, 0, 1 / 3),
    (ANSWER.replace("4P3", "3P4"), 1, 0, 2, 1),
    (ANSWER.replace("4P3", "4P"), 0, 0, 1, 1),                  # a rank of five squares
    (ANSWER.replace(" KQkq", " "), 0, 0, 4, 1),                 # no castling field
    (ANSWER.replace("+0+0", "+0+2"), 0, 1, 0, 2 / 3),           # no flag
    (ANSWER + "+0", 0, 1, 0, 1),
    (AFTER_E4, 0, 1, 0, 0),
    ("", 0, 0, len(AFTER_E4), 0),
    ("x" * 500, 0, 0, len(AFTER_E4), 0)]


@pytest.mark.parametrize("text, well_formed, right, distance, outcome", STATES)
def test_scores_of_a_position(text, well_formed, right, distance, outcome):
    assert rewards.state_format(text, ANSWER) == well_formed
    assert rewards.right_position(text, ANSWER) == right
    assert rewards.distance(text, ANSWER) == distance
    assert rewards.right_outcome(text, ANSWER) == pytest.approx(outcome)


LEGAL = lines.legal(START)
FIVE = "e2e4 d2d4 g1f3 c2c4 b1c3"
ZEROS = "0.0 0.0 0.0 0.0 0.0"
PLAYS = [   # completion, format, share of legal candidates, best among them
    (f"M: {FIVE} E: {ZEROS} B: e2e4", 1, 1, 1),
    (f"M: {FIVE}    E: {ZEROS}      B: e2e4 ", 1, 1, 1),        # padded, as published
    (f"M: {FIVE} E: {ZEROS} B: a2a3", 1, 1, 0),                 # legal, but no candidate
    (f"M: {FIVE} E: {ZEROS} B: e4", 0, 1, 0),
    (f"M: {FIVE} E: 0.0 0.0 B: e2e4", 0, 1, 1),
    (f"M: {FIVE} E: 0.0 0.0 0.0 0.0 nan B: e2e4", 0, 1, 1),
    (f"M: {FIVE}", 0, 1, 0),                                    # breaks off
    (f"M: e2e4 e2e5 g1f3 e1e2 b1c3 E: {ZEROS} B: e2e5", 1, .6, 0),
    (f"M: e2e4 e2e4 e2e4 e2e4 e2e4 E: {ZEROS} B: e2e4", 1, .2, 1),
    ("M: e2e4 E: 0.0 B: e2e4", 0, .2, 1),
    (f"M: {FIVE} a2a3 E: {ZEROS} 0.0 B: e2e4", 0, 1, 1),
    (f"nonsense M: {FIVE} E: {ZEROS} B: e2e4", 0, 0, 0),
    ("", 0, 0, 0)]


@pytest.mark.parametrize("text, well_formed, share, best", PLAYS)
def test_scores_of_candidates(text, well_formed, share, best):
    assert rewards.play_format(text, LEGAL) == well_formed
    assert rewards.legal_share(text, LEGAL) == pytest.approx(share)
    assert rewards.best_is_candidate(text, LEGAL) == best


def test_where_few_moves_are_legal_few_are_wanted():
    cornered = lines.legal("7k/8/5K2/8/8/8/8/6Q1 b - - 0 1")
    assert cornered == ["h8h7"]
    assert rewards.play_format("M: h8h7 E: -9.0 B: h8h7", cornered) == 1
    assert rewards.legal_share("M: h8h7 E: -9.0 B: h8h7", cornered) == 1
    assert rewards.legal_share("M: h8h7 h8g8 E: -9.0 0.0 B: h8h7", cornered) == 0.5


def test_scores_by_an_engine():
    known = {"a2a3": .5, "b2b3": .4, "c2c3": .3, "d2d3": .2, "e2e3": .1, "f2f3": 0., "g2g3": -1.}
    values = " ".join(["0.0"] * 5)
    text = f"M: a2a3 b2b3 e2e3 f2f3 e2e9 E: {values} B: "
    ranks = [rewards.best_by_rank(text + best, known) for best in (*known, "e2e9", "")]
    assert ranks == [1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.1, -1.0, -0.5]
    assert rewards.overlap(text + "a2a3", known) == pytest.approx(3 / 5)
    assert rewards.closeness(text + "a2a3", known) == 0, "an illegal move has no evaluation"
    assert rewards.closeness("M: a2a3 g2g3 E: 0.5 1.0 B: a2a3", known) == pytest.approx(1 / 2)


def test_the_edit_distance_is_levenshteins():
    assert rewards.edit_distance("kitten", "sitting") == 3
    assert rewards.edit_distance("", "abc") == rewards.edit_distance("abc", "") == 3
    assert rewards.edit_distance("flaw", "lawn") == 2


def test_no_text_makes_a_score_raise():
    rng = random.Random(0)
    legal = dict.fromkeys(LEGAL, 0.1)
    pieces = [*"+:. \n0159-/٣²kK", "M:", "E:", "B:", "e2e4", "1e999", "-0.0", "nan", AFTER_E4]
    scores = [(rewards.state_format, ANSWER), (rewards.right_position, ANSWER),
              (rewards.distance, ANSWER), (rewards.right_outcome, ANSWER),
              (rewards.play_format, LEGAL), (rewards.legal_share, LEGAL),
              (rewards.best_is_candidate, LEGAL), (rewards.best_by_rank, legal),
              (rewards.overlap, legal), (rewards.closeness, legal)]
    for perfect in (ANSWER, f"M: {FIVE} E: {ZEROS} B: e2e4"):
        for _ in range(80):
            text = list(perfect if rng.random() < 0.7 else "")
            for _ in range(rng.randint(0, 6)):
                at = rng.randint(0, len(text))
                text[at:at + rng.randint(0, 2)] = [rng.choice(pieces)]
            text = "".join(text)
            for judge, truth in scores:
                value = judge(text, truth)
                limit = len(AFTER_E4) if judge is rewards.distance else 1
                assert isinstance(value, float) and abs(value) <= limit, f"{judge}: {text!r}"


# --------------------------------------------------------------------------------------------------
# Stockfish


@pytest.mark.skipif(not lines.find_stockfish(), reason="Stockfish is not installed")
def test_stockfish_sees_a_mate_and_says_the_same_again():
    mate = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
    first, second = (list(lines.stockfish([START, mate], nodes=500)) for _ in range(2))
    assert first == second
    assert rewards.top_moves(first[1])[0] == "d8h4"
    assert first[1]["d8h4"] > 90
    assert sorted(first[0]) == sorted(LEGAL)


def test_without_stockfish_one_line_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BadInput, match="apt-get install stockfish"):
        next(lines.stockfish([START]))


# --------------------------------------------------------------------------------------------------
# the config files


SMALL = [flag for flag in TINY if not flag.startswith((
    "--vocab_size", "--block_size", "--max_completion_length", "--pretrain", "--judge", "--prompt"))
    ] + ["--pretrain_tokens=3000", "--max_prompts=60", "--max_iters=1", "--eval_interval=0"]
PARTS = ("a_format", "a_exact", "a_distance", "a_outcome", "p_format", "p_legal", "p_best")


def config_of(name):
    return f"{ROOT}/config/{name}.py"


def folders(tmp_path):
    return [f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/prepared"]


def test_each_part_is_a_column_of_the_metrics(tmp_path, rows, capsys):
    """A run from nothing; rewards of the other task abstain and are in no mean."""
    main([config_of("chess"), *SMALL, *folders(tmp_path)])
    row, = rows(tmp_path / "out" / "metrics.jsonl")
    before, after = rows(tmp_path / "out" / "eval.jsonl")
    for name in PARTS:
        for found in (row[f"rewards/{name}/mean"], before[f"rewards/{name}"]):
            assert found is not None and 0 <= found <= 80, f"{name}: {found}"
    assert "rewards/a_distance" in capsys.readouterr().out, "the table lacks a part"


@pytest.mark.parametrize("name", ["chess", "chess_stockfish", "chess_rookworld"])
def test_the_longest_prompt_and_answer_fit(name, monkeypatch):
    monkeypatch.setattr(lines, "stockfish", lambda fens: ({} for _ in fens))
    cfg = load_settings([config_of(name)])
    tokenizer = load_tokenizer(cfg.vocab_size)
    room = cfg.block_size - cfg.max_completion_length
    for row in cfg.functions["questions"](300, 1):
        prompt = tokenizer.encode_ordinary(row["text"])
        answer = tokenizer.encode_ordinary(row["answer"] or "")
        if cfg.policy == "train":
            assert len(prompt) <= room, f"{len(prompt)} tokens: {row['text']}"
        assert len(answer) + 1 <= cfg.max_completion_length, row["answer"]


def test_rewards_by_part_of_a_whole_batch():
    """As a run calls them: a column by name, None where the task is the other one."""
    cfg = load_settings([config_of("chess")])
    asked = [row for row in lines.questions(2, 1)]
    prompts = [Prompt(row["text"], [1], row) for row in asked]
    answers = [asked[0]["answer"], "M: a1a1"]
    functions = {name: cfg.functions[name] for name in cfg.reward_funcs}
    scores = score(functions, prompts, answers)                                     # (2, K)
    assert scores[0].tolist()[:4] == [1, 1, 0, 1]
    assert scores[0, 4:].isnan().all() and scores[1, :4].isnan().all()
    assert scores[1].tolist()[4:] == [0, 0, 0]
    assert len(cfg.reward_weights) == len(cfg.reward_funcs) == scores.shape[1]


def test_a_reward_that_fails_stops_the_run():
    """Note 003 scored -0.5 in its place, which hides the fault."""
    cfg = load_settings([config_of("chess")])
    prompt = Prompt("P: ", [1], dict(text="P: ", answer=None, legal=7))
    with pytest.raises(BadInput, match="reward 'p_legal' raised TypeError"):
        score({"p_legal": cfg.functions["p_legal"]}, [prompt], ["M: e2e4"])


def test_the_published_layout_by_a_flag_alone(tmp_path, rows):
    """--policy=FOLDER: its positions and tokenizer in place of the small policy's."""
    folder = make_gpt2(str(tmp_path / "policy"), GPTConfig(300, 256, 1, 2, 16))
    flags = ["--num_prompts=2", "--num_generations=2", "--num_eval_prompts=2",
             "--num_eval_generations=1", "--max_prompts=40", "--max_iters=1", "--device=cpu"]
    main([config_of("chess"), f"--policy={folder}", *flags, *folders(tmp_path)])
    row, = rows(tmp_path / "out" / "metrics.jsonl")
    assert row["completions/max_length"] <= 80


def test_without_the_package_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "chess", None)
    monkeypatch.delitem(sys.modules, "tasks.chess_lines")
    with pytest.raises(BadInput, match="pip install chess$"):
        load_settings([config_of("chess")])


@pytest.mark.skipif(not lines.find_stockfish(), reason="Stockfish is not installed")
def test_the_engines_parts_are_columns_too():
    cfg = load_settings([config_of("chess_stockfish")])
    asked = cfg.functions["questions"](2, 1)
    prompts = [Prompt(row["text"], [1], row) for row in asked]
    evaluations = asked[1]["evaluations"]
    best = rewards.top_moves(evaluations)
    values = " ".join(f"{evaluations[move]}" for move in best)
    perfect = f"M: {' '.join(best)} E: {values} B: {best[0]}"
    scores = score({name: cfg.functions[name] for name in cfg.reward_funcs}, prompts, ["", perfect])
    assert scores[1].tolist()[4:] == pytest.approx([1.0] * 6) and scores[0, 4:].isnan().all()
