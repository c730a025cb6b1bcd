# The small world of lesson.py: made-up sentences, and as reward the share of the letter e.
#     python lesson.py
#     python grpo.py config/lesson.py        # the same world, trained
import random as _random

from config.quick_test import *

out_dir = "out/lesson"
policy = "train"
pretrain_tokens = 150_000
block_size = 32
max_completion_length = 20
num_prompts = 4
num_generations = 6
micro_batch_size = 24
max_iters = 20
beta = 0.0

_WORDS = [group.split() for group in (
    "the a my", "old green small quiet sweet warm", "cat tree dog queen bird bee",
    "sees likes finds keeps paints meets", "the a my", "old green small quiet sweet warm",
    "river street lamp wheel book moon", "here today again between nearby")]


def texts(n, seed):
    """Sentences of eight words, for pretraining."""
    rng = _random.Random(seed)
    return [" ".join(map(rng.choice, _WORDS)) for _ in range(n)]


def questions(n, seed):
    """The first three words of such sentences."""
    return [{"text": " ".join(text.split()[:3])} for text in texts(n, seed)]
