"""
run/decoder.py against sample.decode. A CUDA graph is taken for what it is: the operations of one run, done again on the
same memory with no Python between them.
"""

class Recorded(TorchDispatchMode):
    """Notes the operations of a step and does them again, into the memory of the first time. Like a capture it refuses what
    waits for the device, to tell a number or a shape."""

    def __enter__(self):
        self.operations = []
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split("::")[1].split(".")[0]
        by_mask = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh", "bincount",
                               "repeat_interleave"):
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
    def __init__(self, model, bucket=64, graphs=True):
        super().__init__(model, graphs=False, bucket=bucket)
        self.graphs = graphs

    def capture(self, step):
        own = [x for (rollout, *rest, _) in filter(None, self.states.values()) for x in (*vars(rollout).values(), *rest)
               if x is not None]
        before = [x.clone() for x in own]
        with Recorded() as graph:
            step()
        for x, y in zip(own, before):  # a capture does nothing
            x.copy_(y)
        return graph, None


@pytest.fixture
def graph_rules(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # what a CPU alone may ask is not asked
    for module in ("sample", "run.decoder"):
        monkeypatch.setattr(sys.modules[module], "LOOK_EVERY", {"cpu": 1, "cuda": 3})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("truncation", [{}, dict(top_k=4, top_p=0.9)])
@pytest.mark.parametrize("batch_size", [0, 8])
def test_graphs_sample_what_plain_decoding_samples(shape, truncation, batch_size, graph_rules):
    model = random_gpt(6, block_size=40, **SHAPES[shape])
    if shape == "lora":
        add_lora(model, 2, 4.0)
    decoder, widths = RecordingDecoder(model, bucket=8), set()
    for seed, prompts in enumerate([[[3, 1, 4], [5], [2, 1]], [[3, 1], [5, 0], [2, 1]], [[1], [2], [3, 4, 5, 1, 2, 3, 0]],
                                    [[1], [2], [3]]]):
        plain = generate(model, prompts, 8, 20, eos=5, seed=seed, **truncation)
        r = generate(model, prompts, 8, 20, eos=5, seed=seed, batch_size=batch_size, decoder=decoder, **truncation)
        for name in ("tokens", "real", "mask", "ended"):
            assert torch.equal(getattr(r, name), getattr(plain, name)), name
        assert not truncation or torch.equal(r.kept[r.mask], plain.kept[r.mask])
        for name in ("logp", "entropy"):
            torch.testing.assert_close(getattr(r, name), getattr(plain, name), atol=1e-5, rtol=0)
        widths.add(r.tokens.shape[1])
        with torch.no_grad():  # a step of the optimiser, in place
            for p in model.parameters():
                p += 0.02 * torch.randn(p.shape)
    graphs = {key for *_, found in decoder.states.values() for key in found}
    assert len(widths) > 1 and {n for n, _ in graphs} >= ({8, 4} if batch_size else {24, 12})
    assert {S for _, S in graphs} > {8, 16} and 3 < len(decoder.captured)


def test_graphs_are_taken_once(graph_rules):
    model = random_gpt(10)
    decoder = RecordingDecoder(model, bucket=8)
    for seed in range(4):
        generate(model, [[3, 1, 4], [5]], 8, 12, eos=9, seed=seed, retire=False, decoder=decoder)
    assert len(decoder.captured) == 2  # columns up to 8 and up to 16


def test_wider_rollouts_take_new_buffers_and_the_old_graphs_live_on(graph_rules):
    model = random_gpt(10, block_size=40)  # the pool that graphs share is gone with the last of them
    decoder, widths = RecordingDecoder(model, bucket=8), []
    for width in (2, 20, 3, 21):
        generate(model, [[1] * width, [5]], 4, 6, eos=9, seed=0, retire=False, decoder=decoder)
        (own, *_, graphs), = decoder.states.values()
        widths.append((own.tokens.shape[1], len(decoder.captured), len(graphs)))
    assert widths == [(8, 1, 1), (32, 2, 2), (32, 3, 3), (32, 4, 3)] and len(set(map(id, decoder.captured))) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_graphs_sample_what_plain_decoding_samples(shape, dtype, compile):
    model, decoders = random_gpt(50, block_size=200, **SHAPES[shape]).cuda(), []
    if shape == "lora":
        add_lora(model, 2, 4.0)
    decoders = [Decoder(model, dtype, compile=compile) for _ in range(2)]
    for seed, (widths, truncation) in enumerate([([3, 1], {}), ([5, 5, 2], {}), ([90, 1], {}), ([7, 3], dict(top_p=0.9)),
                                                ([1, 2], {})]):
        prompts = [[1] * w for w in widths]
        with autocast(model.wte.weight.device, dtype):
            plain, *others = (generate(model, prompts, 8, 60, eos=9, seed=seed, decoder=d, **truncation)
                              for d in (None, *decoders))
        for r in others:
            if dtype == torch.float32:
                assert torch.equal(r.tokens, plain.tokens) and torch.equal(r.ended, plain.ended)
                torch.testing.assert_close(r.logp, plain.logp, atol=1e-4, rtol=0)
            else:  # the first token is drawn by the prompt's pass, the second by the first step: later ones may part
                same = r.tokens[:, max(widths)] == plain.tokens[:, max(widths)]
                assert same.all() and float((r.logp[:, :2] - plain.logp[:, :2]).abs().median()) < 0.05
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn_like(p)


def test_without_retiring_every_row_is_computed_to_the_end(graph_rules):
    model = random_gpt(8)
    for decoder in (None, RecordingDecoder(model, graphs=False)):
        rows, results = [], []
        hook = model.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
        for retire in (True, False):
            results.append(generate(model, [[3, 1, 4], [5]], 8, 12, eos=7, seed=2, retire=retire, decoder=decoder))
        hook.remove()
        end = rows.index(2, 1)
        assert rows[end:] == [2] + 11 * [16] and rows[0] == 2 and min(rows[1:end]) <= 8 < max(rows[1:end])
        assert torch.equal(results[0].tokens, results[1].tokens) and torch.equal(results[0].logp != 0, results[1].logp != 0)


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
            results = [generate(model, PROMPTS, 8, 12, eos=9, seed=seed, decoder=d) for d in (decoder, alone)]
        for x, y in zip(*(vars(r).values() for r in results)):
            assert x is y is None or torch.equal(x, y)
        assert all(torch.equal(p, q) and p.dtype == torch.float32 for p, q in zip(model.parameters(), before))
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn(p.shape)
        before = [p.clone() for p in model.parameters()]
    assert decoder.model.lm_head.weight.dtype == torch.bfloat16 and decoder.model.wte.weight is model.wte.weight


def test_compiled_step_samples_the_same_and_is_compiled_a_few_times_only():
    torch._dynamo.reset()
    model, counts = random_gpt(6, block_size=64), []
    decoder, compiled = Decoder(model, graphs=False, bucket=8), CompileCounter()
    decoder.step = torch.compile(decode_step, dynamic=True, fullgraph=True, backend=compiled)
    for seed, width in enumerate((3, 1, 7, 11, 20, 24, 30, 34)):
        prompts = [[1] * width, [2] * (width // 2 + 1)] + [[3]] * (seed % 2)
        plain, r = (generate(model, prompts, 8, 12, eos=5, seed=seed, decoder=d) for d in (None, decoder))
        assert torch.equal(r.tokens, plain.tokens) and torch.allclose(r.logp, plain.logp, atol=1e-5)
        counts.append(compiled.frame_count)
    assert 1 <= counts[-1] <= 6 and counts[-1] == counts[4], counts


def test_graphs_where_there_are_none_are_bad_input():
    model = random_gpt(10)
    with pytest.raises(BadInput, match="cuda_graphs = True.*set it False"):
        generate(model, PROMPTS, 4, 6, eos=9, seed=0, decoder=Decoder(model))
