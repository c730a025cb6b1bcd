# The world of the hunt: made-up sentences that end after their fifth word or later, and as reward a
# rule that pays for short ones with many e. A batch serves several steps, so ratios are not all 1.
#     python -m extras.hunt
import random as _random

from config.lesson import *

out_dir = "out/hunt"
policy = "train"
vocab_size = 1536
block_size = 32
n_layer = 2
n_embd = 64
pretrain_tokens = 130_000
seed = 1
max_iters = 15
num_prompts = 8
num_generations = 8
micro_batch_size = 32
mini_batch_size = 32
num_iterations = 2
temperature = 0.8
beta = 0.1
expect_rise = 0.0
log_micro = False
learning_rate = 5e-4
threads = 0

_WORDS = [group.split() for group in (  # each is one token
    "the my our these", "old little free small new great good big", "men people",
    "need see get keep help made left", "the a my our", "old little free small new great good big",
    "home school book life work world", "here there now then again")]


def texts(n, seed):
    """Sentences of five to eight words, for pretraining."""
    rng = _random.Random(seed)
    return [" ".join([rng.choice(group) for group in _WORDS][:rng.randint(5, 8)]) for _ in range(n)]


def questions(n, seed):
    """The first three words of such sentences."""
    return [{"text": " ".join(text.split()[:3])} for text in texts(n, seed)]


def reward(prompts, completions):
    """Minus the share of other letters than e in the sentence, minus a tenth for each word more
    than two. None, not known, where somebody helps."""
    rewards = []
    for prompt, text in zip(prompts, completions):
        letters = (prompt + text).replace(" ", "")
        others = 1 - letters.count("e") / len(letters)
        too_long = max(0, len(text.split()) - 2) / 10
        rewards.append(None if "help" in text else -others - too_long)
    return rewards
