# As extras/chess/config/chess.py, and Stockfish judges P:, with the weights of RookWorld's authors.
#     pip install chess && apt-get install stockfish
#     python grpo.py extras/chess/config/chess_stockfish.py
from extras.chess.config.chess import *
from extras.chess import p_engine_best, p_engine_moves, p_engine_values

out_dir = "out/chess_stockfish"

reward_funcs += ("p_engine_best", "p_engine_moves", "p_engine_values")
reward_weights += (0.5, 0.3, 0.2)


def questions(n, seed):
    """With Stockfish's evaluation of every legal move, 0.05 s each, in rows of P:."""
    return chess.add_evaluations(chess.questions(min(n, 1024), seed, history=1))
