"""
Chess as two tasks of text: positions of random games, prompts, right completions, rewards.

    A: (the rules)  "A: FEN+move+history+"  ->  "FEN after+reward+terminated+truncated"
    P: (the play)   "P: FEN "               ->  "M: five moves E: their evaluations B: the best"

Moves are in UCI (e2e4, e7e8q). The history of A: has at most 10 moves, oldest first, and ends with
the move itself. Evaluations are in pawns, for the side to move. README.md has more.
"""
import random
import re
import shutil

from common.errors import BadInput, optional
from common.seeds import seed_for

with optional("chess"):
    import chess
    import chess.engine

PLIES = (2, 6)      # moves before a position, fewest and most: the opening, where FENs are short
HISTORY = 10        # moves, at most
CANDIDATES = 5      # moves; fewer if fewer are legal
MATE = 10_000       # centipawns for a mate
VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9}
MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
NUMBER = re.compile(r"-?\d{1,6}(\.\d{1,6})?", re.ASCII)
STATE = re.compile(rf"[\w/-]+( [\w/-]+){{5}}\+{NUMBER.pattern}\+[01]\+[01]", re.ASCII)
PLAY = re.compile(r"M:[^:]* E:(?P<values>[^:]*) B:(?P<best>[^:]*)")
BY_RANK = (1.0, 0.8, 0.6, 0.4, 0.2)     # of the engine's first five moves

# --------------------------------------------------------------------------------------------------
# positions


def positions(n, seed, for_prompts):
    """n positions from random games -> [(chess.Board, its next move)]. A hash splits them: a
    position is either for prompts or for texts to learn from, never both."""
    rng = random.Random(seed)
    sampled = []
    while len(sampled) < n:
        board = chess.Board()
        while board.ply() <= PLIES[1] and not board.is_game_over():
            move = rng.choice(list(board.legal_moves))
            is_for_prompts = seed_for(board.epd()) % 5 == 0     # the FEN without its counters
            if is_for_prompts == for_prompts and board.ply() >= PLIES[0]:
                sampled.append((board.copy(), move))
            board.push(move)
    return sampled[:n]


def texts(n, seed, history=HISTORY):
    """n lines to learn from, two of A: for each one of P:, which is learned faster."""
    rng = random.Random(seed)
    lines = []
    for i, (board, move) in enumerate(positions(n, seed, for_prompts=False)):
        if i % 3 == 2:
            line = play_prompt(board) + play_answer(material_after(board), rng)
        else:
            line = rules_prompt(board, move, history) + rules_answer(board, move)
        lines.append(line)
    return lines


def questions(n, seed, history=HISTORY):
    """n rows with a prompt, the two tasks in turn. A: has `answer`, the right completion; P: has
    `legal`, the legal moves. The other column is None."""
    rows = []
    for i, (board, move) in enumerate(positions(n, seed, for_prompts=True)):
        row = dict(fen=board.fen(), answer=None, legal=None, evaluations=None)
        if i % 2:
            moves = [move.uci() for move in board.legal_moves]
            row |= dict(text=play_prompt(board), legal=moves)
        else:
            row |= dict(text=rules_prompt(board, move, history), answer=rules_answer(board, move))
        rows.append(row)
    return rows


# --------------------------------------------------------------------------------------------------
# prompts and right completions


def rules_prompt(board, move, history=HISTORY):
    moves = [move.uci() for move in (*board.move_stack, move)]
    return f"A: {board.fen()}+{moves[-1]}+{' '.join(moves[-history:])}+"


def rules_answer(board, move):
    """The right completion of A:. The reward is the mover's: 1.0 for mate, 0.5 for a draw, 0.001
    while the game continues. Games here are never truncated."""
    board = board.copy()
    board.push(move)
    outcome = board.outcome()
    if outcome is None:
        return f"{board.fen()}+0.001+0+0"
    reward = 0.5 if outcome.winner is None else 1.0
    return f"{board.fen()}+{reward}+1+0"


def play_prompt(board):
    return f"P: {board.fen()} "


def play_answer(evaluations, rng):
    """The completion that names the best moves of {move: pawns}, in random order. Ties are broken
    at random."""
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


def material_after(board):
    """{legal move: the mover's material minus the opponent's after it, in pawns}."""
    material = {}
    for move in list(board.legal_moves):
        board.push(move)
        material[move.uci()] = sum(
            value * (len(board.pieces(kind, not board.turn)) - len(board.pieces(kind, board.turn)))
            for kind, value in VALUES.items())
        board.pop()
    return material


def add_evaluations(rows, nodes=10_000):
    """Give rows of P: their evaluations, {legal move: pawns} by Stockfish. With one thread and a
    limit in nodes, not seconds, the same engine repeats its evaluations."""
    path = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")    # Debian's place
    if path is None:
        raise BadInput("stockfish: not on PATH; apt-get install stockfish, or take "
                       "extras/chess/config/chess.py, which needs no engine")
    limit = chess.engine.Limit(nodes=nodes)
    with chess.engine.SimpleEngine.popen_uci(path) as engine:
        engine.configure({"Threads": 1, "Hash": 16})
        for row in rows:
            if row["legal"]:
                board = chess.Board(row["fen"])
                lines = engine.analyse(board, limit, game=object(), multipv=len(row["legal"]))
                row["evaluations"] = {
                    line["pv"][0].uci(): line["score"].relative.score(mate_score=MATE) / 100
                    for line in lines}
    return rows


# --------------------------------------------------------------------------------------------------
# rewards; they take any text without raising


def by(column):
    """Make a reward function from score(completion, truth), with the truth from this column. Rows
    of the other task do not have it: abstain."""
    def decorate(score):
        def reward(completions, **columns):
            truths = columns[column]
            return [None if truth is None else float(score(text, truth))
                    for text, truth in zip(completions, truths)]
        return reward
    return decorate


@by("answer")
def a_format(text, answer):
    """A: 1 for a well-formed FEN, a number and two flags."""
    if not STATE.fullmatch(text):
        return False
    try:
        chess.Board(fen_of(text))
    except ValueError:
        return False
    return True


@by("answer")
def a_exact(text, answer):
    """A: 1 for the right FEN, character by character."""
    return fen_of(text) == fen_of(answer)


@by("answer")
def a_distance(text, answer):
    """A: characters to correct in the FEN, at most as many as it has. The weight is negative."""
    right = fen_of(answer)
    return min(edit_distance(fen_of(text), right), len(right))


@by("answer")
def a_outcome(text, answer):
    """A: share of reward, terminated and truncated that are right."""
    return sum(a == b for a, b in zip(text.split("+")[1:4], answer.split("+")[1:4])) / 3


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


def read_play(text):
    """Moves, evaluations and best move of a completion; only the moves, then [] and "", if the rest
    is cut off or malformed. Evaluations are [] unless all are numbers."""
    opening = re.match(r"\s*M:(.*?)(E:|\Z)", text, re.DOTALL)
    moves = opening[1].split() if opening else []
    whole = PLAY.fullmatch(text.strip())
    if whole is None:
        return moves, [], ""
    values = whole["values"].split()
    are_numbers = all(map(NUMBER.fullmatch, values))
    return moves, [float(x) for x in values] if are_numbers else [], whole["best"].strip()


@by("legal")
def p_format(text, legal):
    """P: 1 for five moves (or all, where fewer are legal), as many numbers, and a best move."""
    moves, values, best = read_play(text)
    right_counts = len(moves) == len(values) == min(CANDIDATES, len(legal))
    return right_counts and all(map(MOVE.fullmatch, [*moves, best]))


@by("legal")
def p_legal(text, legal):
    """P: share of the candidates that are distinct legal moves. A missing one is wrong."""
    moves, _, _ = read_play(text)
    wanted = min(CANDIDATES, len(legal))
    return len(set(moves) & set(legal)) / max(len(moves), wanted)


@by("legal")
def p_best(text, legal):
    """P: 1 if the best move is legal and among the candidates."""
    moves, _, best = read_play(text)
    return best in moves and best in legal


@by("evaluations")
def p_engine_best(text, evaluations):
    """P: 1 for the engine's best move, 0.8 to 0.2 for its next four, 0.1 for other legal moves, -1
    for an illegal one, -0.5 for none."""
    _, _, best = read_play(text)
    top = top_moves(evaluations)
    if best in top:
        return BY_RANK[top.index(best)]
    if best in evaluations:
        return 0.1
    return -1.0 if best else -0.5


@by("evaluations")
def p_engine_moves(text, evaluations):
    """P: share of the engine's five best moves that are candidates."""
    moves, _, _ = read_play(text)
    top = top_moves(evaluations)
    return len(set(moves) & set(top)) / len(top)


@by("evaluations")
def p_engine_values(text, evaluations):
    """P: 1 / (1 + mean error of the evaluations in pawns); 0 if a move is illegal or a
    number does not parse."""
    moves, values, _ = read_play(text)
    if not moves or len(moves) != len(values) or not set(moves) <= set(evaluations):
        return 0.0
    errors = [abs(value - evaluations[move]) for move, value in zip(moves, values)]
    return 1 / (1 + sum(errors) / len(errors))
