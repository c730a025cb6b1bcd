"""What the tape adds to a forward and backward: the case `tape` of this command."""
import statistics
import time

import torch

from model import GPT, GPTConfig
from rollout import Rollout, completion_logprobs
from tape import Tape, add

PROMPT = 4      # tokens
SHAPES = ((3, 256, 2048, 64, 39), (6, 384, 512, 32, 128), (2, 256, 50257, 16, 64))
PARTS = ("record", "target", "scores", "kept")


def random_loss(n_layer, C, V, N, T):
    """A model with random weights, and the loss of N rollouts of T random tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(V, block_size=PROMPT + T, n_layer=n_layer, n_head=4, n_embd=C))
    tokens = torch.randint(V, (N, PROMPT + T))
    everywhere = torch.ones(N, T, dtype=torch.bool)
    zeros = torch.zeros(N, T)
    rollout = Rollout(tokens, torch.ones_like(tokens, dtype=torch.bool), everywhere, everywhere,
                      zeros, zeros, everywhere[:, 0])
    advantages = torch.randn(N)

    def loss():
        return (advantages * completion_logprobs(model, rollout).sum(1)).sum()

    return model, rollout, loss


def with_tape(model, rollout, loss):
    """What a step with influence does, and the seconds of each of PARTS. Four of ten rows go."""
    N = len(rollout.tokens)
    half = (torch.arange(N) % 2).float()
    times = [time.perf_counter()]
    with Tape(model, N) as tape:
        owners = rollout.sampled_mask.nonzero()[:, 0]
        tape.rows(torch.arange(N), flat={model.lm_head: owners})
        loss().backward()
    times.append(time.perf_counter())
    G = add(tape.gradient(half), tape.gradient(1 - half))
    times.append(time.perf_counter())
    scores = tape.dot(G)
    times.append(time.perf_counter())
    dropped = torch.zeros(N).index_fill(0, scores.argsort()[:int(0.4 * N)], 1.0)
    add(G, tape.gradient(dropped), -1)
    times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:])]


def compare_tape(repeat):
    """A line for each shape, in units of forward and backward alone, which take turns with it."""
    for shape in SHAPES:
        model, rollout, loss = random_loss(*shape)
        plain = []
        taped = []
        for _ in range(repeat + 1):
            start = time.perf_counter()
            loss().backward()
            plain.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
            taped.append(with_tape(model, rollout, loss))
        unit = statistics.median(plain[1:])
        seconds = [statistics.median(part) for part in zip(*taped[1:])]
        parts = ", ".join(f"{name} {x / unit:.2f}" for name, x in zip(PARTS, seconds))
        n_layer, C, V, N, T = shape
        print(f"{n_layer} x {C}, V {V}, {N} x {T} tokens: {unit:.3f} s, with a tape "
              f"{sum(seconds) / unit:.2f} of it ({parts})", flush=True)
