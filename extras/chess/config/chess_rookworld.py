# The published policy of note 003, 124M weights trained on both tasks, with that note's settings.
#     pip install chess -r extras/hub/requirements.txt
#     python grpo.py extras/chess/config/chess_rookworld.py
from extras.chess.config.chess import *

out_dir = "out/chess_rookworld"
policy = "jrahn/RookWorld-LM-124M"

max_iters = 100
num_prompts = 4
num_generations = 4
max_completion_length = 256
temperature = 0.95      # the note samples P: at 0.5 and A: at 0.95; an iteration here holds both
top_p = 0.95
learning_rate = 1e-6
num_eval_prompts = 64
num_eval_generations = 2


def questions(n, seed):
    """Positions as in extras/chess/config/chess.py, with the game's last ten moves."""
    return chess.questions(n, seed)
