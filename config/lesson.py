# The small world of the lessons: made-up sentences; the reward is the share of the letter e.
#     python docs/lesson/lesson.py, then influence.py
#     python grpo.py config/lesson.py        # the same world, trained
import random as _random

from config.quick_test import *

out_dir = "out/lesson_run"
device = "cpu"  # pictures are drawn from its tensors
threads = 1  # the same digits on any number of cores
policy = "data/lesson.pt"
max_completion_length = 10
seed = 112  # four prompts that differ, and a story that is far from an edge
num_prompts = 4
num_generations = 6
micro_batch_size = 24
max_iters = 30
learning_rate = 1e-3
beta = 0.0
expect_rise = 0.1

_WORDS = [group.split() for group in (  # each is one token
    "the a my", "old little young free small new", "man woman boy girl mother father",
    "needs gets takes makes", "the a my", "old red little black free new",
    "house book school line room home", "here today again between never together")]


def texts(n, seed):
    """Sentences of eight words, which the policy was pretrained on."""
    rng = _random.Random(seed)
    return [" ".join(map(rng.choice, _WORDS)) for _ in range(n)]


def questions(n, seed):
    """The first three words of such sentences."""
    return [{"text": " ".join(text.split()[:3])} for text in texts(n, seed)]


def reward(prompts, completions):
    """Share of the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]
