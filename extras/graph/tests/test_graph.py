"""The step without a graph samples what rollout.decode does; graphs are few."""
import copy
import math

import pytest
import torch

from extras import graph
from extras.graph import BLOCK, Decoder, HalfWeights, draw_by_blocks, generate_by_graph
from fast import to_half
from rollout import completion_logprobs, generate
from run import precision
from worlds import (
    SHAPES, WORDS, WORD_PROMPTS, CastsOfMatrices, assert_near, generator_of, printed, random_gpt,
    same_rollout, setup_of, shaken, skip_without, with_lora, word_gpt, words)

PROMPTS = [[5, 6, 7], [3, 4], [9]]

# ------------------------------------------------------------------------------------------------
# from logits to a token


def test_a_million_draws_are_those_of_the_distribution_function():
    """Beside float64: u lies between what is before the token and that with it."""
    generator = generator_of(0)
    logits = 3 * torch.randn(3 * BLOCK, generator=generator)
    logits[torch.rand(len(logits), generator=generator) < 0.3] = -math.inf
    logits[BLOCK:BLOCK + 70] = -30.0        # tokens that are hardly ever drawn
    for empty in (slice(0, 0), slice(0, BLOCK), slice(BLOCK, 2 * BLOCK), slice(2 * BLOCK, None)):
        some = logits.clone()
        some[empty] = -math.inf
        probs = some.softmax(0)
        exact = some.double().softmax(0)
        cdf = exact.cumsum(0)
        for _ in range(25):
            u = torch.rand(10_000, generator=generator)
            u[:2] = torch.tensor([0, 1 - 2 ** -24])
            token = draw_by_blocks(probs.expand(len(u), -1).contiguous(), u)
            assert (probs[token] > 0).all(), "a token of probability 0 is drawn"
            assert (u <= cdf[token] + 1e-6).all() and (u >= cdf[token] - exact[token] - 1e-6).all()


# ------------------------------------------------------------------------------------------------
# the step


def assert_same_tokens(model, prompts=PROMPTS, T=20, decoder=None, **how):
    """The rollout of a decoder, which is that of rollout.decode."""
    how = dict(seed=3, eos=(0,)) | how
    expected = generate(model, prompts, 4, T, **how)
    found = generate(model, prompts, 4, T, decode=decoder or Decoder(model), **how)
    same_rollout(found, expected)
    return found


@pytest.mark.parametrize("shape", [*SHAPES, "lora"])
def test_a_step_draws_the_same_tokens(shape):
    model = random_gpt(**SHAPES.get(shape, {}))
    if shape == "lora":
        model = with_lora(model)
    for how in (dict(eos=(0, 1, 2, 3)), dict(batch_size=4), dict(temperature=0.7), dict(T=1)):
        found = assert_same_tokens(model, **how)
        logp = completion_logprobs(model, found, how.get("temperature", 1.0))
        assert_near(logp, found.logp, 1e-4)
    assert_same_tokens(model, [[5, 6], [3, 4]])     # none is padded


def test_a_critic_is_asked():
    skip_without("critic")
    from extras.critic import ValueHead
    model = random_gpt()
    model.value_head = shaken(ValueHead(32), 0.3)
    assert assert_same_tokens(model).values.std() > 0.05


def test_what_a_decoder_does_not_take_goes_the_plain_way(monkeypatch):
    def respond(first, r, rows, t, column):     # writes a token after each fourth one
        if t == 4:
            r.tokens[rows, column + 1] = 11
            r.sampled_mask[rows, t + 1] = False

    def read(*args):
        raise AssertionError("read by a step")

    model = random_gpt()
    decoder = Decoder(model, read=read)
    assert not assert_same_tokens(model, decoder=decoder, respond=respond).sampled_mask.all()
    assert_same_tokens(model, decoder=decoder, top_k=5)
    assert_same_tokens(random_gpt(seed=1), decoder=decoder)
    with pytest.raises(AssertionError, match="by a step"):
        assert_same_tokens(model, decoder=decoder)
    assert generate_by_graph(torch.nn.Linear(2, 2)) is generate, "a policy that is no GPT"


# ------------------------------------------------------------------------------------------------
# graphs, as on a GPU


@pytest.fixture
def captures(monkeypatch):
    """Sizes that were captured: their graphs run the step itself. A size is that of a token."""
    found = []

    def capture(function, pool):
        found.append(function.args)
        return function

    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graph, "ROWS", 2)
    monkeypatch.setattr(graph, "WIDTH", 8)
    monkeypatch.setattr(graph, "CHUNK", 4)
    return found


def on_gpu(model, **how):
    decoder = Decoder(model, **how)
    decoder.on_gpu = True
    return decoder


def test_few_graphs_are_made_and_used_again(captures, monkeypatch):
    model = random_gpt(n_layer=1)
    decoder = on_gpu(model)
    for _ in range(3):
        for prompts in ([[2, 8, 8, 8]] * 4, PROMPTS, [[1]], PROMPTS):    # the largest comes first
            assert_same_tokens(model, prompts, decoder=decoder, eos=(-1,))
    assert len(set(captures)) == len(captures), "a graph is made twice"
    before = len(captures)
    assert_same_tokens(model, PROMPTS, decoder=decoder, eos=(-1,))
    assert len(captures) == before, "the same call makes further graphs"

    # more sizes than there may be graphs, and memory that grows, which makes them anew
    monkeypatch.setattr(graph, "MOST", 3)
    captures.clear()
    decoder = on_gpu(model)
    for _ in range(3):
        assert_same_tokens(model, decoder=decoder)
    assert len(captures) <= 3, "there is a graph for every size"
    memory = decoder.memory
    old = [*decoder.graphs.values()]
    assert_same_tokens(model, PROMPTS * 3, decoder=decoder)
    assert decoder.memory.N > memory.N
    assert 0 < len(decoder.graphs) <= 3
    assert not {*old} & {*decoder.graphs.values()}, "a graph writes to memory that is no more"


def test_a_temperature_of_its_own_is_a_graph_of_its_own(captures):
    model = random_gpt()
    decoder = on_gpu(model)
    for temperature in (1.0, 0.5, 1.0):
        for _ in range(2):
            assert_same_tokens(model, decoder=decoder, temperature=temperature, eos=(-1,))


# ------------------------------------------------------------------------------------------------
# bfloat16


def test_weights_are_cast_once_for_all_tokens(monkeypatch):
    monkeypatch.setattr(graph, "ROWS", 6)
    model = random_gpt()

    def casts(T):
        # a graph keeps no casts of its own, hence no cache
        with CastsOfMatrices() as found, torch.autocast(
                "cpu", torch.bfloat16, cache_enabled=False):
            generate_by_graph(model)(model, PROMPTS, 2, T, seed=3, eos=(-1,))
        return found.count

    assert casts(2) == casts(9) > 0, "sampling casts the weights for each token"


def test_weights_that_are_bfloat16_numbers_are_not_copied():
    model = random_gpt().requires_grad_(False)
    for p in model.h.parameters():
        p.copy_(p.bfloat16())
    to_half(model)
    for own, used in zip(model.h.parameters(), HalfWeights(model).model.h.parameters()):
        assert used.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("shape", ["gpt2", "lora"])
def test_a_decoder_in_bfloat16_has_the_weights_of_now(shape):
    model = random_gpt(**SHAPES.get(shape, {}))
    if shape == "lora":
        model = with_lora(model)
    before = copy.deepcopy(model)
    decoder = Decoder(model)
    how = dict(seed=3, eos=(-1,), decode=decoder)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, PROMPTS, 2, 10, **how)
    shaken(model, 0.3, seed=8)
    with torch.autocast("cpu", torch.bfloat16):
        found = generate(model, PROMPTS, 2, 10, **how)
    now, old = ((completion_logprobs(x, found, 1.0) - found.logp).abs().mean()
                for x in (model, before))
    assert now < 0.1 * old, "it samples by other weights than its model has"


# ------------------------------------------------------------------------------------------------
# the check before a run


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_graph_that_does_not_hold_is_turned_off(monkeypatch, error):
    def off(model):
        def generate_off(*args, **how):
            rollout = generate(*args, decode=Decoder(model), **how)
            rollout.logp += error
            return rollout
        return generate_off

    monkeypatch.setattr(graph, "generate_by_graph", off)
    cfg = words()
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    setup.device = torch.device("cuda")
    out = printed(precision.check_precision, setup, cfg)
    if error:
        assert out.startswith("note: CUDA graph off") and out.count("\n") == 1, out
        assert setup.generate is generate
    else:
        assert out == ""
        assert setup.generate is not generate
