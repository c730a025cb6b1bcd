# A policy learns to use a tool: products that it cannot compute, and a calculator that can.
#     python grpo.py config/calculator.py
#     python grpo.py config/calculator.py --max_turns=0 --out_dir=out/no_calculator    # without it
import random as _random

from environment.calc import calc

out_dir = "out/calculator"
tools = {"calc": calc}  # answers `calc(347*86)` with ` = 29842`

vocab_size = 300  # every digit is a token
block_size = 64
n_layer = 2
n_embd = 128
pretrain_tokens = 2_000_000
max_completion_length = 44

max_iters = 40
eval_interval = 0
learning_rate = 3e-4
beta = 0.0
judge = None
eval_judge = None
num_eval_prompts = 64
num_eval_generations = 8


def texts(n, seed):
    """Exercises of a pupil who knows the products of digits, guesses all others, and at times asks
    the calculator."""
    rng = _random.Random(seed)
    return [_exercise(rng) for _ in range(n)]


def _exercise(rng):
    if rng.random() < 0.25:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        return f"What is {a}*{b}? It is {a * b}."
    a, b = _factors(rng)
    if rng.random() < 0.3:
        return f"What is {a}*{b}? calc({a}*{b}) = {a * b}. It is {a * b}."
    guess = round(a * b * rng.uniform(0.9, 1.1))
    return f"What is {a}*{b}? It is {guess}."


def _factors(rng):
    return rng.randint(100, 999), rng.randint(10, 99)


def questions(n, seed):
    rng = _random.Random(seed)
    factors = [_factors(rng) for _ in range(n)]
    return [{"text": f"What is {a}*{b}?", "answer": str(a * b)} for a, b in factors]


def reward(prompts, completions, answer):
    """1 for the right answer in the policy's own words."""
    return [float(text.endswith(f"It is {right}.")) for text, right in zip(completions, answer)]
