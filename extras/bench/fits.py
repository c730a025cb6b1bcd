"""
What fits on a card? The memory of a run by formula: for models of published shapes, or for a run.

    python -m extras.bench fits
    python -m extras.bench fits config/toxicity.py --lora_rank=8

P weights, C channels, L layers, V = vocab_size; GB are 2 ** 30 bytes. At GPT-2's shape, 128 rows of
10 + 128 tokens in micro-batches of 64, it counts 8.9 GB where an H100 took 8.4 before decoding kept
weights of its own, and with influence 16.3 where it took 13.3 (docs/gpus.md).
"""
from typing import NamedTuple

from fast import is_half

LOGITS = 2 ** 27        # fast.LOGITS_KEPT
CARDS = (24, 80)        # GB
SPARE = 1.1             # a tenth, for what is not counted


class Shape(NamedTuple):
    """A model, by its published config.json."""
    weights: float      # millions
    V: int
    C: int
    L: int
    inner: int          # channels inside an MLP
    kv: int             # channels of the keys of a layer
    gated: int = 3      # matrices of an MLP: 3, or 2 without a gate
    half: bool = True   # published in bfloat16, see fast.to_half


SHAPES = {
    "GPT-2 (124M)": Shape(124, 50257, 768, 12, 3072, 768, 2, False),
    "Qwen2.5-0.5B": Shape(494, 151936, 896, 24, 4864, 128),
    "Llama-3.2-1B": Shape(1236, 128256, 2048, 16, 8192, 512),
    "Llama-3.2-3B": Shape(3213, 128256, 3072, 28, 8192, 1024)}


class Job(NamedTuple):
    """What of a run takes memory. rows: of an optimizer step; sampled: at once."""
    rows: int
    prompt: int         # tokens
    new: int            # tokens
    micro_batch: int
    sampled: int
    lora: bool = False
    influence: bool = False
    recompute: bool = False     # activation_checkpointing


def shape_of(policy):
    """The Shape of a model.GPT."""
    c = policy.config
    head = c.head_dim or c.n_embd // c.n_head
    return Shape(
        sum(p.numel() for p in policy.parameters()) / 1e6, c.vocab_size, c.n_embd, c.n_layer,
        c.n_inner or 4 * c.n_embd, head * (c.n_kv_head or c.n_head), 2 + c.swiglu,
        is_half(policy.h[0].mlp))


def memory_of(shape, job):
    """{part: bytes} of an iteration in bfloat16 on a GPU, trained weights in float32."""
    P = 1e6 * shape.weights
    head = shape.V * shape.C        # tied to the embedding
    frozen = 2 * P + 2 * head if shape.half else 4 * P
    copied = head if job.lora and shape.half else P
    tokens = min(job.rows, job.micro_batch) * (job.prompt + job.new)
    # bytes of a layer and a token: inputs and outputs in bfloat16 that the backward needs
    per_token = 2 * (14 * shape.C + 3 * shape.inner)
    kept = shape.L * per_token
    if job.recompute:       # the inputs of all layers, and what one of them needs
        kept = shape.L * 2 * shape.C + per_token
    parts = {
        # policy and reference; with LoRA they share the base
        "weights": frozen + (0 if job.lora else 4 * P),
        # of sampling, which keeps them, and of the loss
        "bfloat16 copies": 2 * 2 * copied,
        # a gradient and two moments of AdamW
        "gradient, AdamW": 0 if job.lora else 12 * P,
        # sampling keeps them, so that its graphs stay valid; its logits are there three times
        "keys and values": job.sampled * (
            2 * 2 * shape.L * shape.kv * (job.prompt + job.new) + 3 * 4 * shape.V),
        "activations": kept * tokens,
        "logits": 3 * 4 * min(LOGITS, job.micro_batch * job.new * shape.V)}
    if job.influence:
        # for each layer its input and the gradient of its output; for adapters only the input
        layer = 8 * shape.C + shape.gated * shape.inner
        numbers = shape.L * layer + shape.V + shape.C
        if job.lora:
            numbers = shape.L * layer // 2
        parts["tape"] = 2 * numbers * job.rows * job.new
        # the target's gradient, and two more on the way to it
        parts["target"] = 0 if job.lora else 12 * P
    return parts


def total(parts):
    """GB at the peak. A step does not read keys and values, but they stay allocated."""
    return sum(parts.values()) / 2 ** 30


def largest_micro_batch(shape, job, gb):
    """The most rows of a micro-batch with which the job fits on a card: a power of two, or all; 0
    if none fits."""
    sizes = [2 ** i for i in range(job.rows.bit_length()) if 2 ** i < job.rows] + [job.rows]
    return max((n for n in sizes if SPARE * total(memory_of(shape, job._replace(micro_batch=n)))
                < gb), default=0)


def print_fits():
    """Print the table of docs/gpus.md: 64 rows of 128 + 256 tokens, micro-batches of 4."""
    print("| model | trained | GB | with influence | micro-batch: 24, 80 GB | with influence |")
    print("|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        for trained in ("all weights", "LoRA"):
            jobs = [Job(64, 128, 256, 4, 64, trained == "LoRA", influence)
                    for influence in (False, True)]
            gb = [f"{total(memory_of(shape, job)):.1f}" for job in jobs]
            sizes = [", ".join(str(largest_micro_batch(shape, job, card) or "no")
                               for card in CARDS) for job in jobs]
            print("|", " | ".join([name, trained, *gb, *sizes]), "|")


def job_of(cfg, longest):
    """The Job of settings, for prompts of at most `longest` tokens."""
    rows = cfg.num_prompts * cfg.num_generations
    return Job(
        min(cfg.mini_batch_size or rows, rows), longest, cfg.max_completion_length,
        cfg.micro_batch_size, min(cfg.decode_batch_size or rows, rows), bool(cfg.lora_rank),
        cfg.tracin != "off", cfg.activation_checkpointing)


def print_fits_of(policy, prompts, cfg):
    """Print the parts for a run, and the largest micro_batch_size by card."""
    job = job_of(cfg, max(len(prompt.ids) for prompt in prompts))
    shape = shape_of(policy)
    parts = memory_of(shape, job)
    for part, x in parts.items():
        print(f"{part:18} {x / 2 ** 30:7.2f} GB")
    print(f"{'all':18} {total(parts):7.2f} GB, with micro_batch_size = {job.micro_batch}")
    for card in CARDS:
        n = largest_micro_batch(shape, job, card)
        print(f"{card} GB: " + (f"micro_batch_size = {n}" if n else "does not fit"))
