"""
What fits on a card? The memory of a run by formula, for models of published shapes.

    python -m extras.bench fits

P weights, C channels, L layers, V = vocab_size; GB are 2 ** 30 bytes. At GPT-2's shape, 128 rows of
10 + 128 tokens in micro-batches of 64, it counts 8.4 GB where an H100 took 8.4, and with influence
15.8 where it took 13.3 (docs/gpus.md).
"""
from typing import NamedTuple

LOGITS = 2 ** 27        # fast.LOGITS_KEPT


class Shape(NamedTuple):
    """A model, by its published config.json."""
    weights: float      # millions
    V: int
    C: int
    L: int
    inner: int          # channels inside an MLP
    kv: int             # channels of the keys of a layer
    gated: int = 3      # matrices of an MLP: 3, or 2 without a gate


SHAPES = {
    "GPT-2 (124M)": Shape(124, 50257, 768, 12, 3072, 768, 2),
    "Qwen2.5-0.5B": Shape(494, 151936, 896, 24, 4864, 128),
    "Llama-3.2-1B": Shape(1236, 128256, 2048, 16, 8192, 512),
    "Llama-3.2-3B": Shape(3213, 128256, 3072, 28, 8192, 1024)}


def memory_of(shape, rows, prompt, new, micro_batch, lora=False, influence=False):
    """{part: bytes} of an iteration in bfloat16 on a GPU, weights in float32."""
    P = 1e6 * shape.weights
    tokens = min(rows, micro_batch) * (prompt + new)
    # bytes of a layer and a token: inputs and outputs in bfloat16 that the backward needs
    per_token = 2 * (14 * shape.C + 3 * shape.inner)
    parts = {
        # policy and reference; with LoRA they share the base
        "weights": 4 * P if lora else 8 * P,
        "bfloat16 copies": 2 * P,
        # a gradient and two moments of AdamW
        "gradient, AdamW": 0 if lora else 12 * P,
        "keys and values": 2 * 2 * shape.L * shape.kv * rows * (prompt + new),
        "activations": shape.L * per_token * tokens,
        "logits": 3 * 4 * min(LOGITS, micro_batch * new * shape.V)}
    if influence:
        # for each layer its input and the gradient of its output; for adapters only the input
        layer = 8 * shape.C + shape.gated * shape.inner
        numbers = shape.L * layer + shape.V + shape.C
        if lora:
            numbers = shape.L * layer // 2
        parts["tape"] = 2 * numbers * rows * new
        # the target's gradient, and two more on the way to it
        parts["target"] = 0 if lora else 12 * P
    return parts


def total(parts):
    """GB at the peak. A step does not read keys and values, but they stay allocated."""
    return sum(parts.values()) / 2 ** 30


def print_fits():
    """Print the table of docs/gpus.md: 64 rows of 128 + 256 tokens, micro-batches of 4."""
    print("| model | | weights | bfloat16 | gradient, AdamW | keys | activations, logits | "
          "with influence | all | fits |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        for lora in (False, True):
            plain = memory_of(shape, 64, 128, 256, 4, lora)
            more = memory_of(shape, 64, 128, 256, 4, lora, influence=True)
            gb = {part: x / 2 ** 30 for part, x in plain.items()}
            sums = total(plain), total(more)
            fits = [next((f"{card} GB" for card in (24, 80) if 1.1 * x < card), "no") for x in sums]
            print(f"| {name} | {'LoRA' if lora else 'full'} | {gb['weights']:.1f} | "
                  f"{gb['bfloat16 copies']:.1f} | {gb['gradient, AdamW']:.1f} | "
                  f"{gb['keys and values']:.1f} | {gb['activations'] + gb['logits']:.1f} | "
                  f"+{sums[1] - sums[0]:.1f} | {sums[0]:.1f} | {fits[0]}; {fits[1]} |")
