"""
Chess as two tasks of text: positions of random games, prompts, right completions, rewards.

    A: (the rules)  "A: FEN+move+history+"  ->  "FEN after+reward+terminated+truncated"
    P: (the play)   "P: FEN "               ->  "M: five moves E: their evaluations B: the best"

Moves are in UCI (e2e4, e7e8q). The history of A: is that of the game, at most 10 moves, oldest
first; the move itself is the last of it. Evaluations are in pawns, as the side to move sees them.
This is the format of RookWorld-LM. docs/tasks.md has more.
"""
import itertools
import random
import re
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
MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
NUMBER = re.compile(r"-?\d{1,6}(\.\d{1,6})?", re.ASCII)
PLAY = re.compile(r"M:(?P<moves>[^:]*) E:(?P<values>[^:]*) B:(?P<best>[^:]*)")
BY_RANK = (1.0, 0.8, 0.6, 0.4, 0.2)     # of the engine's first five moves

# --------------------------------------------------------------------------------------------------
# positions


class Position(NamedTuple):
    fen: str
    history: list   # moves that led here, oldest first
    move: str       # the one that the game goes on with


def positions(seed, asked, plies=PLIES):
    """Yield positions of random legal games without end: to ask about, or to learn from.

    A hash decides which of the two a board is for, so a policy is never asked about a position
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
            line = f"P: {fen} " + play_answer(material_after(fen), rng)
        else:
            line = rules_prompt(position, history) + rules_answer(fen, position.move)
        lines.append(line)
    return lines


def questions(n, seed, history=HISTORY, judge=None):
    """n rows with a prompt and what its completion is judged by, the two tasks in turn.

    answer is the right completion of A:, legal the legal moves of P:. Each is None in rows of the
    other task. judge(fens) yields {move: pawns} for each: the `evaluations` of the rows of P:.
    """
    rows = []
    for i, position in enumerate(itertools.islice(positions(seed, asked=True), n)):
        fen = position.fen
        if i % 2:
            row = dict(text=f"P: {fen} ", answer=None, legal=legal(fen))
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
# right completions


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


def legal(fen):
    return [move.uci() for move in chess.Board(fen).legal_moves]


def play_answer(evaluations, rng):
    """The completion that names the best moves of {move: pawns}, in random order.

    Moves of equal value are taken by chance.
    """
    moves = list(evaluations)
    rng.shuffle(moves)
    best_first = top_moves({move: evaluations[move] for move in moves})
    best = best_first[0]
    rng.shuffle(best_first)
    values = " ".join(f"{evaluations[move]:.1f}" for move in best_first)
    return f"M: {' '.join(best_first)} E: {values} B: {best}"


def top_moves(evaluations):
    """The five moves with the highest evaluations, the best first."""
    return sorted(evaluations, key=lambda move: -evaluations[move])[:CANDIDATES]


def material_after(fen):
    """{legal move: the mover's material less the other's after it, in pawns}. The player of `texts`
    sees no further."""
    board = chess.Board(fen)
    return {move.uci(): float(material(board) + gain(board, move)) for move in board.legal_moves}


def material(board):
    """The material of the side to move less the other's, in pawns."""
    return sum(len(board.pieces(kind, board.turn)) * value
               - len(board.pieces(kind, not board.turn)) * value for kind, value in VALUES.items())


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
            # as the side to move sees it, a mate as MATE pawns
            yield {line["pv"][0].uci(): line["score"].relative.score(
                mate_score=int(100 * MATE)) / 100 for line in found}


# --------------------------------------------------------------------------------------------------
# rewards of A:, None for rows of P:. No text makes a reward raise


def where_known(score, completions, truths):
    """Score each completion by its truth. None where there is none: the task is the other one."""
    return [None if truth is None else float(score(text, truth))
            for text, truth in zip(completions, truths)]


def a_format(prompts, completions, answer):
    """A: 1 for a well-formed FEN, a number and two flags."""
    def is_state(text, answer):
        fen, *outcome = text.split("+")
        if len(outcome) != 3 or not NUMBER.fullmatch(outcome[0]):
            return False
        return is_fen(fen) and set(outcome[1:]) <= {"0", "1"}
    return where_known(is_state, completions, answer)


def is_fen(text):
    """Tell whether a text has the form of a FEN, with all of its six fields."""
    fields = text.split(" ")
    try:
        chess.Board(text)
    except ValueError:
        return False
    return text.isascii() and len(fields) == 6 and fields == text.split()


def a_exact(prompts, completions, answer):
    """A: 1 for the right FEN, character by character."""
    return where_known(lambda text, right: fen_of(text) == fen_of(right), completions, answer)


def a_distance(prompts, completions, answer):
    """A: characters to mend in the FEN, at most as many as the right one has. Fewer is better: the
    weight is negative."""
    def distance(text, answer):
        right = fen_of(answer)
        return min(edit_distance(fen_of(text)[:2 * len(right)], right), len(right))
    return where_known(distance, completions, answer)


def a_outcome(prompts, completions, answer):
    """A: share of reward, terminated and truncated that are right."""
    def share(text, answer):
        return sum(a == b for a, b in zip(text.split("+")[1:4], answer.split("+")[1:4])) / 3
    return where_known(share, completions, answer)


def fen_of(text):
    return text.partition("+")[0]


def edit_distance(a, b):
    """Insertions, deletions and substitutions between two texts (Levenshtein 1966)."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(row[-1] + 1, previous[j] + 1, previous[j - 1] + (x != y)))
        previous = row
    return previous[-1]


# --------------------------------------------------------------------------------------------------
# rewards of P:, None for rows of A:


class Play(NamedTuple):
    moves: list     # what stands for moves, well-formed or not
    values: list    # what stands for evaluations
    best: str       # "" where there is none


def read_play(text):
    """The fields of a completion -> Play, empty where they are not to be found."""
    found = PLAY.fullmatch(text.strip())
    if found is None:
        return Play([], [], "")
    return Play(found["moves"].split(), found["values"].split(), found["best"].strip())


def candidates(text):
    """What stands behind M:, also in a completion that breaks off there or goes wrong later."""
    before, _, rest = text.partition("M:")
    return [] if before.strip() else rest.partition("E:")[0].split()


def p_format(prompts, completions, legal):
    """P: 1 for five moves (or all, where fewer are legal), as many numbers, and a best move."""
    def is_play(text, legal):
        play = read_play(text)
        right_counts = len(play.moves) == len(play.values) == min(CANDIDATES, len(legal))
        are_moves = all(map(MOVE.fullmatch, [*play.moves, play.best]))
        return right_counts and are_moves and all(map(NUMBER.fullmatch, play.values))
    return where_known(is_play, completions, legal)


def p_legal(prompts, completions, legal):
    """P: share of the candidates that are different legal moves. A missing one is wrong."""
    def share(text, legal):
        moves = candidates(text)
        wanted = min(CANDIDATES, len(legal))
        return len(set(moves) & set(legal)) / max(len(moves), wanted)
    return where_known(share, completions, legal)


def p_best(prompts, completions, legal):
    """P: 1 if the best move is legal and among the candidates."""
    def is_candidate(text, legal):
        play = read_play(text)
        return play.best in play.moves and play.best in legal
    return where_known(is_candidate, completions, legal)


def p_engine_best(prompts, completions, evaluations):
    """P: 1 for the engine's best move, 0.8 to 0.2 for its next four, 0.1 for other legal moves, -1
    for an illegal one, -0.5 for none."""
    def by_rank(text, evaluations):
        best = read_play(text).best
        top = top_moves(evaluations)
        if best in top:
            return BY_RANK[top.index(best)]
        if best in evaluations:
            return 0.1
        return -1.0 if best else -0.5
    return where_known(by_rank, completions, evaluations)


def p_engine_moves(prompts, completions, evaluations):
    """P: share of the engine's five best moves that are candidates."""
    def share(text, evaluations):
        top = top_moves(evaluations)
        return len(set(candidates(text)) & set(top)) / len(top)
    return where_known(share, completions, evaluations)


def p_engine_values(prompts, completions, evaluations):
    """P: 1 / (1 + mean error of the evaluations in pawns); 0 if a move or a number is none."""
    def closeness(text, evaluations):
        play = read_play(text)
        pairs = list(zip(play.moves, play.values))
        known = all(move in evaluations and NUMBER.fullmatch(value) for move, value in pairs)
        if not pairs or not known or len(play.moves) != len(play.values):
            return 0.0
        errors = [abs(float(value) - evaluations[move]) for move, value in pairs]
        return 1 / (1 + sum(errors) / len(errors))
    return where_known(closeness, completions, evaluations)
