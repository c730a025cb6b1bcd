# As config/chess.py, and Stockfish judges the moves of P: and their evaluations. The weights of its
# three parts are those of RookWorld's authors.
#     pip install chess && apt-get install stockfish
#     python grpo.py config/chess_stockfish.py
from config.chess import *
from tasks.chess import p_engine_best, p_engine_moves, p_engine_values

out_dir = "out/chess_stockfish"

reward_funcs += ("p_engine_best", "p_engine_moves", "p_engine_values")
reward_weights += (0.5, 0.3, 0.2)


def questions(n, seed):
    """As in config/chess.py. Rows of P:, half of them, have Stockfish's evaluation of every legal
    move, 0.05 s each."""
    return chess.add_evaluations(chess.questions(min(n, 1024), seed, history=1))
