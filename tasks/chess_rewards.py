"""How completions of the two tasks of chess_lines.py are judged, part by part, from text alone.

Whatever a policy writes has a score: nothing here raises on malformed text.
"""
import re
from typing import NamedTuple

from tasks.chess_lines import CANDIDATES

MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?", re.ASCII)
NUMBER = re.compile(r"-?\d{1,6}(\.\d{1,6})?", re.ASCII)
RANK = re.compile(r"[1-8pnbrqkPNBRQK]+")
FIELDS = re.compile(r"[wb] (-|K?Q?k?q?(?<! )) (-|[a-h][36]) [0-9]{1,3} [0-9]{1,3}")
PLAY = re.compile(r"M:(?P<moves>[^:]*) E:(?P<values>[^:]*) B:(?P<best>[^:]*)")
BY_RANK = (1.0, 0.8, 0.6, 0.4, 0.2)     # of the engine's first five moves


def where_known(score, completions, truths):
    """Score each completion by its truth; None where the task is another one and there is none."""
    return [None if truth is None else score(text, truth)
            for text, truth in zip(completions, truths)]


# --------------------------------------------------------------------------------------------------
# A: "FEN after+reward+terminated+truncated"


def state_format(text, answer):
    """1.0 for a well-formed FEN, a number and two flags, else 0.0."""
    fen, *outcome = text.split("+")
    if len(outcome) != 3 or not NUMBER.fullmatch(outcome[0]):
        return 0.0
    return float(is_fen(fen) and set(outcome[1:]) <= {"0", "1"})


def is_fen(text):
    """Tell whether a text has the form of a FEN: eight ranks of eight squares, and five fields."""
    board, _, others = text.partition(" ")
    ranks = board.split("/")
    return (len(ranks) == 8 and all(RANK.fullmatch(rank) and squares(rank) == 8 for rank in ranks)
            and FIELDS.fullmatch(others) is not None)


def squares(rank):
    return sum(int(c) if c.isdigit() else 1 for c in rank)


def right_position(text, answer):
    """1.0 if the position is that of the answer, character by character, else 0.0."""
    return float(position_of(text) == position_of(answer))


def distance(text, answer):
    """Characters that are wrong in the position, at most as many as the right one has."""
    right = position_of(answer)
    found = position_of(text)[:2 * len(right)]
    return float(min(edit_distance(found, right), len(right)))


def right_outcome(text, answer):
    """Share of reward, terminated and truncated that are right."""
    found = text.split("+")[1:4]
    right = answer.split("+")[1:4]
    return sum(a == b for a, b in zip(found, right)) / len(right)


def position_of(text):
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
# P: "M: five moves E: their evaluations B: the best"


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


def play_format(text, legal):
    """1.0 for five moves (or all, where fewer are legal), as many numbers, and a best move."""
    play = read_play(text)
    wanted = min(CANDIDATES, len(legal))
    right_counts = len(play.moves) == len(play.values) == wanted
    are_moves = all(MOVE.fullmatch(move) for move in [*play.moves, play.best])
    return float(right_counts and are_moves and all(map(NUMBER.fullmatch, play.values)))


def legal_share(text, legal):
    """Share of the candidates that are legal moves; a move counts once, a missing one is wrong."""
    moves = candidates(text)
    wanted = min(CANDIDATES, len(legal))
    return len(set(moves) & set(legal)) / max(len(moves), wanted)


def candidates(text):
    """What stands behind M:, also in a completion that breaks off there or goes wrong later."""
    before, _, rest = text.partition("M:")
    return [] if before.strip() else rest.partition("E:")[0].split()


def best_is_candidate(text, legal):
    """1.0 if the best move is legal and one of the candidates, else 0.0."""
    play = read_play(text)
    return float(play.best in play.moves and play.best in legal)


# --------------------------------------------------------------------------------------------------
# P: by an engine's {legal move: pawns}


def best_by_rank(text, evaluations):
    """1.0 for the engine's first move, then 0.8 to 0.2; 0.1 legal, -1.0 illegal, -0.5 missing."""
    best = read_play(text).best
    if not best:
        return -0.5
    if best not in evaluations:
        return -1.0
    top = top_moves(evaluations)
    return BY_RANK[top.index(best)] if best in top else 0.1


def overlap(text, evaluations):
    """Share of the engine's first five moves that are among the candidates."""
    top = top_moves(evaluations)
    return len(set(candidates(text)) & set(top)) / len(top)


def closeness(text, evaluations):
    """1 / (1 + mean absolute error in pawns) of the evaluations; 0.0 if a move has none."""
    play = read_play(text)
    pairs = list(zip(play.moves, play.values))
    known = all(move in evaluations and NUMBER.fullmatch(value) for move, value in pairs)
    if not pairs or not known or len(play.moves) != len(play.values):
        return 0.0
    errors = [abs(float(value) - evaluations[move]) for move, value in pairs]
    return 1 / (1 + sum(errors) / len(errors))


def top_moves(evaluations):
    """The five moves with the highest evaluations, the best first."""
    return sorted(evaluations, key=lambda move: -evaluations[move])[:CANDIDATES]
