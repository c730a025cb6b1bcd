"""
run/decoder.py against sample.decode and GPT.forward.

A CUDA graph is taken for what it is: the operations of one run, done again on the same memory with
no Python between them.
"""
import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

from by_hand import PROMPTS, SHAPES, random_gpt, random_ids, with_lora
from critic import ValueHead
from model import add_lora
from sample import completion_logprobs
from run.attention import use_attention_by_hand
from run.decoder import Decoder, decode_step, step_states
from run.device import autocast
from run.script import BadInput
from sample import decode, generate

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh",
           "bincount", "repeat_interleave")


class Recorded(TorchDispatchMode):
    """Notes the operations of a step and does them again, into the memory of the first time. Like a
    capture it refuses what waits for the device, to tell a number or a shape."""

    def __enter__(self):
        self.operations = []
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split("::")[1].split(".")[0]
        by_mask = name in ("index", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or name in WAITING:
            raise RuntimeError(f"{op.name()} waits for the device")
        out = op(*args, **(kwargs or {}))
        self.operations.append((op, args, kwargs or {}, out))
        return out

    def replay(self):
        for op, args, kwargs, out in self.operations:
            again = op(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again)):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class RecordingDecoder(Decoder):
    def __init__(self, model, bucket=64, drop=True):
        super().__init__(model, graphs=False, drop=drop, bucket=bucket)
        self.graphs = True

    def capture(self, step):
        memory = []
        for own in filter(None, self.buffers.values()):
            found = [*vars(own.rollout).values(), *vars(own).values()]
            memory += [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in memory]
        with Recorded() as graph:
            step()
        for x, y in zip(memory, before):  # a capture does nothing
            x.copy_(y)
        self.captured.append(graph)
        return graph


@pytest.fixture
def graph_rules(monkeypatch):
    # what a CPU alone may ask is not asked
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr("sample.CHECK_EVERY", {"cpu": 1, "cuda": 3})


BATCHES = [[[3, 1, 4], [5], [2, 1]], [[3, 1], [5, 0], [2, 1]],
           [[1], [2], [3, 4, 5, 1, 2, 3, 0]], [[1], [2], [3]]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("truncation", [{}, dict(top_k=4, top_p=0.9)])
@pytest.mark.parametrize("batch_size", [0, 8])
def test_graphs_sample_what_plain_decoding_samples(shape, truncation, batch_size, graph_rules):
    model = random_gpt(6, block_size=40, **SHAPES[shape])
    if shape == "lora":
        add_lora(model, 2, 4.0)
    decoder, widths = RecordingDecoder(model, bucket=8), set()
    for seed, prompts in enumerate(BATCHES):
        plain = generate(model, prompts, 8, 20, eos=5, seed=seed, **truncation)
        r = generate(model, prompts, 8, 20, eos=5, seed=seed, batch_size=batch_size, decode=decoder,
                     **truncation)
        for name in ("tokens", "attention_mask", "mask", "ended"):
            assert torch.equal(getattr(r, name), getattr(plain, name)), name
        assert not truncation or torch.equal(r.allowed[r.completion_mask], plain.allowed[r.completion_mask])
        for name in ("logp", "entropy"):
            torch.testing.assert_close(getattr(r, name), getattr(plain, name), atol=1e-5, rtol=0)
        widths.add(r.tokens.shape[1])
        with torch.no_grad():  # a step of the optimizer, in place
            for p in model.parameters():
                p += 0.02 * torch.randn(p.shape)
    graphs = {key for own in decoder.buffers.values() for key in own.graphs}
    assert len(widths) > 1 and {n for n, _ in graphs} >= ({8, 4} if batch_size else {24, 12})
    assert {S for _, S in graphs} > {8, 16} and 3 < len(decoder.captured)


def test_graphs_are_taken_once(graph_rules):
    model = random_gpt(10)
    decoder = RecordingDecoder(model, bucket=8, drop=False)
    for seed in range(4):
        generate(model, [[3, 1, 4], [5]], 8, 12, eos=9, seed=seed, decode=decoder)
    assert len(decoder.captured) == 2  # columns up to 8 and up to 16


def test_wider_rollouts_take_new_buffers_and_the_old_graphs_live_on(graph_rules):
    model = random_gpt(10, block_size=40)
    decoder, widths = RecordingDecoder(model, bucket=8, drop=False), []
    for width in (2, 20, 3, 21):
        generate(model, [[1] * width, [5]], 4, 6, eos=9, seed=0, decode=decoder)
        own, = decoder.buffers.values()
        widths.append((own.rollout.tokens.shape[1], len(decoder.captured), len(own.graphs)))
    assert widths == [(8, 1, 1), (32, 2, 2), (32, 3, 3), (32, 4, 3)]
    # the pool that graphs share is gone with the last of them
    assert len(set(map(id, decoder.captured))) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.skipif(
    not has_triton(), reason="there is no Triton for this GPU"))])
def test_cuda_graphs_sample_what_plain_decoding_samples(shape, dtype, bound, compile):
    """Their kernels round differently, so a draw near the border of two tokens can turn and the
    rest of its row with it: what each sampled is held against the forward pass of its own tokens.
    """
    model = random_gpt(50, block_size=200, **SHAPES[shape]).cuda()
    if shape == "lora":
        add_lora(model, 2, 4.0)
    decoders = [Decoder(model, dtype, compile=compile) for _ in range(2)]
    batches = [([3, 1], {}), ([5, 5, 2], {}), ([90, 1], {}), ([7, 3], dict(top_p=0.9)),
               ([1, 2], {})]
    for seed, (widths, truncation) in enumerate(batches):
        prompts = [[1] * w for w in widths]
        with autocast(model.wte.weight.device, dtype):
            plain, *others = (
                generate(model, prompts, 8, 60, eos=9, seed=seed, decode=d, **truncation)
                for d in (decode, *decoders))
            forward = [completion_logprobs(model, r, 1.0).detach() for r in others]
        for r, logp in zip(others, forward):
            # the first token is drawn by the prompt's pass, the second by the first step
            same = r.tokens[:, max(widths)] == plain.tokens[:, max(widths)]
            assert same.all(), "the first tokens, which no graph has drawn"
            gap = (r.logp[:, :2] - plain.logp[:, :2]).abs().median()
            assert float(gap) < bound, "the first two log-probs of the graphs"
            gaps = (r.logp - logp).abs()[r.completion_mask]
            worst = gaps.max() if dtype == torch.float32 else gaps.mean()
            assert float(worst) < bound, "log-probs of a graph and of the forward pass"
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn_like(p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_cuda_graphs_outlive_those_of_another_decoder():
    model = random_gpt(50, block_size=100).cuda()
    sampled = functools.partial(generate, model, [[3, 1], [5]], 8, 40, eos=9, seed=0)
    plain, kept, other = sampled(), Decoder(model), Decoder(model)
    for decoder in (kept, other, kept, other):
        sampled(decode=decoder)
    del decoder, other
    torch.cuda.empty_cache()
    assert torch.equal(sampled(decode=kept).tokens, plain.tokens)


def test_without_dropping_every_row_is_computed_to_the_end(graph_rules):
    model = random_gpt(8)
    plain = {drop: functools.partial(decode, drop=drop) for drop in (True, False)}
    buffered = {drop: Decoder(model, graphs=False, drop=drop) for drop in (True, False)}
    for decoders in (plain, buffered):
        rows, results = [], []
        # the last layer of GPT.forward and of step_states
        hook = model.ln_f.register_forward_hook(lambda module, inputs, out: rows.append(len(out)))
        for drop in (True, False):
            results.append(generate(
                model, [[3, 1, 4], [5]], 8, 12, eos=7, seed=2, decode=decoders[drop]))
        hook.remove()
        end = rows.index(2, 1)
        assert rows[end:] == [2] + 11 * [16]
        assert rows[0] == 2 and min(rows[1:end]) <= 8 < max(rows[1:end])
        assert torch.equal(results[0].tokens, results[1].tokens)
        assert torch.equal(results[0].logp != 0, results[1].logp != 0)


@pytest.mark.parametrize("lora", [False, True])
def test_bfloat16_copies_of_the_weights_sample_what_autocast_samples(lora):
    model = random_gpt(40)
    if lora:
        add_lora(model, 2, 4.0)
    decoder, alone = Decoder(model, torch.bfloat16, graphs=False), Decoder(model, graphs=False)
    assert alone.model is model and not alone.copies
    before = [p.clone() for p in model.parameters()]
    for seed in range(3):
        with autocast("cpu", torch.bfloat16):
            results = [generate(model, PROMPTS, 8, 12, eos=9, seed=seed, decode=d)
                       for d in (decoder, alone)]
        for x, y in zip(*(vars(r).values() for r in results)):
            assert x is y is None or torch.equal(x, y)
        for p, q in zip(model.parameters(), before):
            assert torch.equal(p, q) and p.dtype == torch.float32
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape)
        before = [p.clone() for p in model.parameters()]
    assert decoder.model.lm_head.weight.dtype == torch.bfloat16
    assert decoder.model.wte.weight is model.wte.weight


def test_compiled_step_samples_the_same_and_is_compiled_a_few_times_only():
    torch._dynamo.reset()
    model, counts = random_gpt(6, block_size=64), []
    model.value_head = ValueHead(32)
    torch.nn.init.normal_(model.value_head.linear.weight)
    decoder, compiled = Decoder(model, graphs=False, bucket=8), CompileCounter()
    decoder.step = torch.compile(decode_step, dynamic=True, fullgraph=True, backend=compiled)
    for seed, width in enumerate((3, 1, 7, 11, 20, 24, 30, 34)):
        prompts = [[1] * width, [2] * (width // 2 + 1)] + [[3]] * (seed % 2)
        plain, r = (generate(model, prompts, 8, 12, eos=5, seed=seed, decode=d)
                    for d in (decode, decoder))
        assert torch.equal(r.tokens, plain.tokens) and torch.allclose(r.logp, plain.logp, atol=1e-5)
        assert torch.allclose(r.values, plain.values, atol=1e-4) and r.values.any()
        counts.append(compiled.frame_count)
    assert 1 <= counts[-1] <= 6 and counts[-1] == counts[4], counts


def test_a_compiled_step_writes_into_the_cache_and_copies_none_of_it():
    """Of a cache that is one tensor each layer would make a new one."""
    torch._dynamo.reset()
    model = random_gpt(10, block_size=64)
    decoder, operations = Decoder(model, graphs=False, bucket=8), []

    def keep_graph(graph, inputs):
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    decoder.step = torch.compile(
        decode_step, dynamic=True, fullgraph=True, backend=aot_autograd(fw_compiler=keep_graph))
    generate(model, PROMPTS, 8, 6, eos=9, seed=0, decode=decoder)
    assert any("index_copy" in name or "index_put" in name for name in operations)
    whole = [name for name in operations if "_scatter" in name]
    assert not whole, f"a compiled step makes the cache anew: {whole}"


def test_graphs_where_there_are_none_are_bad_input():
    model = random_gpt(10)
    with pytest.raises(BadInput, match="speed: .* cpu, .* no CUDA graphs; leave out 'graphs'"):
        generate(model, PROMPTS, 4, 6, eos=9, seed=0, decode=Decoder(model))


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_is_the_forward_of_its_position(shape, padded, by_hand):
    """step_states, told the position by a tensor and given the whole width of the cache."""
    model = random_gpt(block_size=16, **SHAPES[shape])
    model = (with_lora(model) if shape == "lora" else model).double()
    if by_hand:
        use_attention_by_hand(model)
    T, S = 9, 16
    idx = random_ids(3, T)
    attention_mask = torch.ones(3, S, dtype=torch.bool)     # as a rollout has it: True to its end
    if padded:
        attention_mask = torch.arange(S) >= torch.tensor([[0], [2], [6]])
    plain, wide = model.new_cache(3, T), model.new_cache(3, S)
    whole = model(idx, attention_mask[:, :T])
    for i in range(T):
        token = idx[:, i:i + 1]
        expected = model(token, attention_mask[:, :i + 1] if padded else None, plain, i)
        at = torch.tensor([i])
        h = step_states(model, token, attention_mask, wide, at)
        torch.testing.assert_close(h, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(h[:, 0], whole[:, i], rtol=0, atol=1e-12)
        torch.testing.assert_close(wide[:, :, :, :, :T], plain, rtol=0, atol=1e-12)
    assert not wide[:, :, :, :, T:].any()
