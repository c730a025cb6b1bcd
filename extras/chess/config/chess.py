# Chess by rule: a small policy learns what a move does to a position (A:) and which moves are legal
# (P:). extras/chess/README.md has the formats, the rewards and what to expect.
#     pip install chess
#     python grpo.py extras/chess/config/chess.py
from extras import chess
from extras.chess import a_distance, a_exact, a_format, a_outcome, p_best, p_format, p_legal

out_dir = "out/chess"
judge = None
eval_judge = None

# one token a character. Prompts have up to 82 of them, completions 79 with the end token
policy = "train"
vocab_size = 257
block_size = 164
max_completion_length = 80
n_embd = 128
pretrain_tokens = 5_000_000
_HISTORY = 1            # the move alone, as after a reset; the published policy knows up to 10
dtype = "fast"

max_iters = 60
eval_interval = 30
# 6e-4 from the first step, 16 prompts and beta 0.02 unlearned A: three of four exact answers
learning_rate = 2e-4
warmup_iters = 5
lr_decay = "linear"
beta = 0.1
num_eval_prompts = 250
num_eval_generations = 4

reward_funcs = ("a_format", "a_exact", "a_distance", "a_outcome", "p_format", "p_legal", "p_best")
reward_weights = (0.2, 1.0, -0.02, 0.2, 0.2, 1.0, 0.3)


def texts(n, seed):
    """Lines of random games. The P: player counts the material after its move, no more."""
    return chess.texts(n, seed, _HISTORY)


def questions(n, seed):
    """Positions of other random games, with what completions of A: and P: are judged by."""
    return chess.questions(min(n, 1500), seed, _HISTORY)    # half of them A:
