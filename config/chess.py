# Chess by rule: a small policy learns what a move does to a position (A:) and which moves are legal
# (P:). docs/chess.md has the formats, the rewards and what to expect.
#     pip install chess
#     python grpo.py config/chess.py
import tasks.chess_lines as lines
import tasks.chess_rewards as rewards

out_dir = "out/chess"
judge = None
eval_judge = None

# one token a character: a FEN is easier to change where its squares are tokens. Prompts have up to
# 82 of them, completions 79 with the end token
vocab_size = 257
block_size = 164
max_completion_length = 80
n_layer = 4
n_head = 4
n_embd = 128
pretrain_tokens = 5_000_000
_HISTORY = 1            # the move alone, as after a reset; the published policy knows up to 10
dtype = "fast"

max_iters = 60
eval_interval = 30
num_prompts = 32
num_generations = 8
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
    return lines.texts(n, seed, _HISTORY)


def questions(n, seed):
    """Positions of other random games, with what completions of A: and P: are judged by."""
    return lines.questions(min(n, 1500), seed, _HISTORY)  # half of them A:


def a_format(prompts, completions, answer):
    """A: 1 for a well-formed FEN, a number and two flags."""
    return rewards.where_known(rewards.state_format, completions, answer)


def a_exact(prompts, completions, answer):
    """A: 1 for the right FEN, character by character."""
    return rewards.where_known(rewards.right_position, completions, answer)


def a_distance(prompts, completions, answer):
    """A: characters to mend in the FEN, fewer is better: the weight is negative."""
    return rewards.where_known(rewards.distance, completions, answer)


def a_outcome(prompts, completions, answer):
    """A: share of reward, terminated and truncated that are right."""
    return rewards.where_known(rewards.right_outcome, completions, answer)


def p_format(prompts, completions, legal):
    """P: 1 for five moves, as many evaluations, and a best move."""
    return rewards.where_known(rewards.play_format, completions, legal)


def p_legal(prompts, completions, legal):
    """P: share of the candidates that are different legal moves."""
    return rewards.where_known(rewards.legal_share, completions, legal)


def p_best(prompts, completions, legal):
    """P: 1 if the best move is legal and among the candidates."""
    return rewards.where_known(rewards.best_is_candidate, completions, legal)
