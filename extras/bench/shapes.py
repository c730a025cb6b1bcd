"""The cost of influence beside a forward and backward, here and with dattri-LLM: `python -m
extras.bench tape`."""
import importlib.util
import statistics
import time

import torch

from model import GPT, GPTConfig
from tape import Tape, add

PROMPT = 4      # tokens
SHAPES = ((3, 256, 2048, 64, 39), (6, 384, 512, 32, 128), (2, 256, 50257, 16, 64))
DROPPED = 0.4   # share of rows to drop, those with the lowest scores


def random_loss(n_layer, C, V, N, T):
    """A model with random weights, and the loss of N rollouts of T random tokens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(V, block_size=PROMPT + T, n_layer=n_layer, n_head=4, n_embd=C))
    tokens = torch.randint(V, (N, PROMPT + T))
    advantages = torch.randn(N)

    def loss():
        logits = model.lm_head(model(tokens[:, :-1])[:, -T:])                       # (N, T, V)
        logp = logits.log_softmax(-1).gather(2, tokens[:, -T:, None])[..., 0]
        return (advantages * logp.sum(1)).sum()

    return model, loss


def with_tape(model, N, loss):
    """A step with influence on the sum of all rows -> scores (N,), the gradient of kept rows."""
    with Tape(model, N) as tape:
        tape.rows(torch.arange(N))
        loss().backward()
    target = tape.gradient(torch.ones(N))
    scores = tape.dot(target)
    dropped = torch.zeros(N).index_fill(0, scores.argsort()[:round(DROPPED * N)], 1.0)
    return scores, add(target, tape.gradient(dropped), -1)


def with_dattri(model, N, loss):
    """The same by dattri-LLM 0.1.0. It scores a tied matrix as two matrices."""
    from dattri_llm import REGISTER_ALL, DataSelectionCallback, HookManager, HookManagerConfig
    selection = DataSelectionCallback(model, selection_kwargs={
        "threshold": DROPPED, "threshold_mode": "bottom_fraction"})
    manager = HookManager(model, HookManagerConfig(linear_io=REGISTER_ALL), [selection])
    with manager.collect(deregister_on_exit=True):
        loss().backward()
    return selection.last_scores, {p: p.grad for p in model.parameters()}


def compare_tape(repeat):
    """Print a line for each shape, in units of a plain forward and backward, which take turns with
    the other ways."""
    ways = {"plain": lambda model, N, loss: loss().backward(), "tape": with_tape}
    if importlib.util.find_spec("dattri_llm"):
        ways["dattri-LLM"] = with_dattri
    else:
        print("note: dattri-LLM is left out: pip install dattri-llm==0.1.0")
    for shape in SHAPES:
        n_layer, C, V, N, T = shape
        model, loss = random_loss(*shape)
        seconds = {name: [] for name in ways}
        for _ in range(repeat + 1):
            for name, step in ways.items():
                start = time.perf_counter()
                step(model, N, loss)
                seconds[name].append(time.perf_counter() - start)
                model.zero_grad(set_to_none=True)
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        unit = medians.pop("plain")
        ratios = ", ".join(f"with {name} {x / unit:.2f} of it" for name, x in medians.items())
        print(f"{n_layer} x {C}, V {V}, {N} x {T} tokens: {unit:.3f} s, {ratios}", flush=True)
