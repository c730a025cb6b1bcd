# As config/chess.py, and Stockfish judges the moves of P: and their evaluations. The weights of its
# three parts are those of RookWorld's authors.
#     pip install chess && apt-get install stockfish
#     python grpo.py config/chess_stockfish.py
from config.chess import *

out_dir = "out/chess_stockfish"

reward_funcs += ("p_engine_best", "p_engine_moves", "p_engine_values")
reward_weights += (0.5, 0.3, 0.2)


def questions(n, seed):
    """As in config/chess.py; rows of P:, half of them, have Stockfish's evaluation of every legal
    move, 0.05 s each."""
    return lines.questions(min(n, 1024), seed, history=1, judge=lines.stockfish)


def p_engine_best(prompts, completions, evaluations):
    """P: 1.0 for Stockfish's best move, 0.8 to 0.2 for its next four; 0.1 legal, -1 illegal."""
    return rewards.where_known(rewards.best_by_rank, completions, evaluations)


def p_engine_moves(prompts, completions, evaluations):
    """P: share of Stockfish's five best moves that are candidates."""
    return rewards.where_known(rewards.overlap, completions, evaluations)


def p_engine_values(prompts, completions, evaluations):
    """P: 1 / (1 + mean error of the evaluations in pawns)."""
    return rewards.where_known(rewards.closeness, completions, evaluations)
