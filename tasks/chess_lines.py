"""Chess as two tasks of text: positions of random games, prompts and right completions.

    A: (the rules)  "A: FEN+move+history+"  ->  "FEN after+reward+terminated+truncated"
    P: (the play)   "P: FEN "               ->  "M: five moves E: their evaluations B: the best"

Moves are in UCI (e2e4, e7e8q). The history of A: is that of the game, at most 10 moves, oldest
first; the move itself is the last of it. Evaluations are in pawns, as the side to move sees them.
This is the format of RookWorld-LM. docs/chess.md has more.
"""
import itertools
import random
import shutil
from typing import NamedTuple

from run.script import BadInput, optional, seed_for

with optional("chess"):
    import chess
    import chess.engine

PLIES = (2, 6)      # positions after so many moves of a game: the opening, where FENs are short
HISTORY = 10        # moves, at most
CANDIDATES = 5      # moves, fewer where fewer are legal
MATE = 100.0        # pawns that a mate is worth
VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9,
          chess.KING: 0}


class Position(NamedTuple):
    fen: str
    history: list   # moves that led here, oldest first
    move: str       # the one that the game goes on with


# --------------------------------------------------------------------------------------------------
# positions


def positions(seed, asked, plies=PLIES):
    """Yield positions of random legal games without end: to ask about, or to learn from.

    No board is in both: a hash of it decides, so that a policy is never asked about a position
    whose line it has read.
    """
    rng = random.Random(seed)
    while True:
        for position in random_game(rng, plies[1]):
            board = position.fen.rsplit(" ", 2)[0]      # less the counters
            is_asked = seed_for(board) % 5 == 0
            if is_asked == asked and len(position.history) >= plies[0]:
                yield position


def random_game(rng, most):
    """Play random legal moves from the start -> at most `most` + 1 positions."""
    board = chess.Board()
    history = []
    while len(history) <= most and not board.is_game_over():
        move = rng.choice(list(board.legal_moves)).uci()
        yield Position(board.fen(), list(history), move)
        board.push_uci(move)
        history.append(move)


def texts(n, seed, history=HISTORY):
    """n lines to learn from, two of A: for one of P:, which is learned sooner."""
    rng = random.Random(seed)
    lines = []
    for i, position in enumerate(itertools.islice(positions(seed, asked=False), n)):
        fen = position.fen
        if i % 3 == 2:
            line = play_prompt(fen) + play_answer(material_after(fen), rng)
        else:
            line = rules_prompt(position, history) + rules_answer(fen, position.move)
        lines.append(line)
    return lines


def questions(n, seed, history=HISTORY, judge=None):
    """n rows with a prompt and what its completion is judged by, the two tasks in turn.

    answer is the right completion of A:, legal the legal moves of P:; each is None in rows of the
    other task. judge(fens) yields {move: pawns} for each: the `evaluations` of the rows of P:.
    """
    rows = []
    for i, position in enumerate(itertools.islice(positions(seed, asked=True), n)):
        fen = position.fen
        if i % 2:
            row = dict(text=play_prompt(fen), answer=None, legal=legal(fen))
        else:
            answer = rules_answer(fen, position.move)
            row = dict(text=rules_prompt(position, history), answer=answer, legal=None)
        rows.append(row | dict(fen=fen))
    if judge:
        found = iter(list(judge([row["fen"] for row in rows if row["legal"]])))
        for row in rows:
            row["evaluations"] = next(found) if row["legal"] else None
    return rows


# --------------------------------------------------------------------------------------------------
# A: the rules


def rules_prompt(position, history=HISTORY):
    """The prompt of a position with the last `history` moves, the move itself among them."""
    moves = [*position.history, position.move][-history:]
    return f"A: {position.fen}+{position.move}+{' '.join(moves)}+"


def rules_answer(fen, move):
    """What a move leads to, by the rules: "FEN after+reward+terminated+truncated".

    The reward is the mover's: 1.0 for mate, 0.5 for a draw, 0.001 while the game goes on. An
    illegal move leaves the position as it is, with -1.0 and truncated 1. A FEN knows of no
    repetition; the 75-move rule it knows.
    """
    board = chess.Board(fen)
    if move not in legal(fen):
        return f"{board.fen()}+-1.0+0+1"
    board.push_uci(move)
    outcome = board.outcome()
    if outcome is None:
        return f"{board.fen()}+0.001+0+0"
    reward = 0.5 if outcome.winner is None else 1.0
    return f"{board.fen()}+{reward}+1+0"


# --------------------------------------------------------------------------------------------------
# P: the play


def play_prompt(fen):
    return f"P: {fen} "


def legal(fen):
    return [move.uci() for move in chess.Board(fen).legal_moves]


def play_answer(evaluations, rng):
    """The completion that names the best moves of {move: pawns}, in random order.

    Moves of equal value are taken by chance.
    """
    moves = list(evaluations)
    rng.shuffle(moves)
    best_first = sorted(moves, key=lambda move: -evaluations[move])[:CANDIDATES]
    best = best_first[0]
    rng.shuffle(best_first)
    values = " ".join(f"{evaluations[move]:.1f}" for move in best_first)
    return f"M: {' '.join(best_first)} E: {values} B: {best}"


def material_after(fen):
    """{legal move: the mover's material less the other's after it, in pawns}. The player of `texts`
    sees no further."""
    board = chess.Board(fen)
    balance = sum(len(board.pieces(kind, board.turn)) * value
                  - len(board.pieces(kind, not board.turn)) * value
                  for kind, value in VALUES.items())
    return {move.uci(): float(balance + gain(board, move)) for move in board.legal_moves}


def gain(board, move):
    """Pawns that a move wins: what it takes, and what a pawn becomes."""
    taken = 0
    if board.is_en_passant(move):
        taken = VALUES[chess.PAWN]
    elif board.is_capture(move):
        taken = VALUES[board.piece_type_at(move.to_square)]
    if move.promotion:
        taken += VALUES[move.promotion] - VALUES[chess.PAWN]
    return taken


def find_stockfish():
    """Path of the program, or None. Debian puts games where only users look."""
    return shutil.which("stockfish") or shutil.which("/usr/games/stockfish")


def stockfish(fens, nodes=10_000):
    """Yield {legal move: pawns} by Stockfish for each FEN.

    One thread and a number of nodes, not of seconds, so that the same engine says the same again.
    """
    path = find_stockfish()
    if path is None:
        raise BadInput("stockfish: no such program on PATH; apt-get install stockfish, or take "
                       "config/chess.py, which needs no engine")
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        engine.configure({"Threads": 1, "Hash": 16})
        for fen in fens:
            board = chess.Board(fen)
            found = engine.analyse(board, chess.engine.Limit(nodes=nodes), game=object(),
                                   multipv=board.legal_moves.count())
            yield {line["pv"][0].uci(): pawns(line["score"]) for line in found}


def pawns(score):
    """An engine's score as the side to move sees it, in pawns, a mate as MATE of them."""
    return score.relative.score(mate_score=int(100 * MATE)) / 100
