# A policy learns to use a tool: a calculator for products that it cannot compute in its head.
#     python grpo.py extras/environment/config/calculator.py
#     python grpo.py extras/environment/config/calculator.py --max_turns=0      # without it
import random as _random

from extras.environment.tools import calc

out_dir = "out/calculator"
tools = {"calc": calc}  # puts ` = 29842` behind `calc(347*86)`

policy = "train"
vocab_size = 300  # every digit is a token
n_layer = 2
n_embd = 128
pretrain_tokens = 1_200_000
max_completion_length = 44

max_iters = 40
learning_rate = 3e-4
judge = None
eval_judge = None
num_eval_generations = 8


def texts(n, seed):
    """Right exercises for pretraining: small and large products, some with the calculator."""
    rng = _random.Random(seed)
    return [_exercise(rng) for _ in range(n)]


def _exercise(rng):
    if rng.random() < 0.25:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
    else:
        a, b = _factors(rng, held_out=False)
    asks = b > 9 and rng.random() < 0.3     # large ones only
    working = f" calc({a}*{b}) = {a * b}." if asks else ""
    return f"What is {a}*{b}?{working} It is {a * b}."


def _factors(rng, held_out):
    """Two factors of a large product. One in eleven products is held out: never an exercise."""
    while True:
        a, b = rng.randint(100, 999), rng.randint(10, 99)
        if ((a + 2 * b) % 11 == 0) == held_out:
            return a, b


def questions(n, seed):
    rng = _random.Random(seed)
    factors = [_factors(rng, held_out=True) for _ in range(n)]
    return [{"text": f"What is {a}*{b}?", "answer": str(a * b)} for a, b in factors]


def reward(prompts, completions, answer):
    """1 where the completion's last words give the right answer."""
    return [float(text.endswith(f"It is {right}.")) for text, right in zip(completions, answer)]
