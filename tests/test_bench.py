"""bench.py: what it counts against torch's own counter, what it times, and what it prints."""
import functools
import importlib.util
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
import grpo
from config import Settings, load_settings
from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from judge import scorer
from run import prove
from run.script import BadInput

CPU = torch.device("cpu")
TINY = dict(
    vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=64, num_prompts=4, num_generations=4,
    prompt_words=(3, 6), max_completion_length=8, micro_batch_size=8, judge_vocab_size=300,
    reward_weights=(1.0,), reward_funcs=("judge",))
RULE = dict(
    functions={"rule": lambda prompts, completions: list(range(len(completions)))},
    reward_funcs=("rule",))


class Words:
    eot_token = 299

    def decode(self, ids):
        return " ".join(map(str, ids))


def inputs(cfg, policy, prompts):
    return bench.inputs_from(cfg, CPU, policy, Words(), prompts)


# ------------------------------------------------------------------------------------------------
# the least that a phase must do


@pytest.mark.parametrize("ends", [True, False])
def test_counted_flops_are_those_that_torch_counts(ends, monkeypatch):
    """Without padding to the last one, since torch computes both halves of a causal square; else of
    real tokens only."""
    cfg = Settings(**TINY | RULE | dict(max_completion_length=16, beta=0.1, micro_batch_size=16))
    seeds = [torch.Generator().manual_seed(i) for i in range(4)]
    prompts = [Prompt("", torch.randint(299, (5,), generator=seed).tolist(), {}) for seed in seeds]
    policy = bench.policy_that_ends(cfg, 10 if ends else None)
    nets = bench.own_nets(cfg, inputs(cfg, policy, prompts))
    done = {}

    def counted(name, plain):
        def run(*args, **kwargs):
            # attention as two products
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                out = plain(*args, **kwargs)
            is_reference = name == "policy forward" and not torch.is_grad_enabled()
            done["reference" if is_reference else name] = counter.get_total_flops()
            return out
        return run

    nets.generate = counted("generate", nets.generate)
    nets.logprobs = counted("policy forward", nets.logprobs)
    monkeypatch.setattr(torch.Tensor, "backward", counted("policy backward", torch.Tensor.backward))
    batch, target = bench.iteration(nets, cfg, 1)

    found = bench.count(nets, cfg, batch, None, [])
    mask = batch.loss_mask
    read = int(batch.rollout.attention_mask.sum() - (~mask).sum()) - 16
    assert found["policy forward"][0] == read                   # every token but the last is read
    assert found["generate"][0] == int(mask.sum())
    assert target is None
    if ends:
        assert len(mask.sum(1).unique()) > 3
        assert all(n > found[phase][1] > 0.4 * n for phase, n in done.items())
        return
    pair = 4 * 2 * 64                                           # products, layers, channels
    square = 16 * 20 * 19 / 2                                   # pairs above the diagonal
    upper = {"generate": 4 * 5 * 4 / 2, "reference": square, "policy forward": square,
             "policy backward": 2 * square}
    assert done == {phase: found[phase][1] + pair * n for phase, n in upper.items()}


def test_bytes_of_a_decode_are_weights_at_every_step_and_the_cache_so_far():
    cfg = Settings(**TINY | RULE | dict(num_prompts=1))
    policy = bench.policy_that_ends(cfg, 20)
    nets = bench.own_nets(cfg, inputs(cfg, policy, [Prompt("", [1, 2, 3], {})]))
    batch, _ = bench.iteration(nets, cfg, 0)
    weights = sum(p.numel() for name, p in policy.named_parameters()
                  if p.dim() == 2 and name != "wpe.weight")
    lengths = batch.loss_mask.sum(1).tolist()
    # layers, keys and values, channels
    cache = sum(2 * 2 * 64 * (3 + t) for n in lengths for t in range(1, n))
    found = bench.count(nets, cfg, batch, None, [])
    assert found["generate"][2] == 4 * (weights * max(lengths) + cache)


def test_what_the_judge_reads_is_counted():
    cfg = Settings(**TINY)
    given = inputs(cfg, bench.policy_that_ends(cfg, 20), [Prompt("", [1, 2, 3], {})] * 4)
    nets = bench.own_nets(cfg, given)
    weights = bench.linear_weights(nets.judges["judge"].model)
    clock = bench.Clock(nets)
    batch, _ = bench.iteration(nets, cfg, 0, clock)
    rows = scorer.encode(load_tokenizer(300), batch.completions, bench.JUDGE_SHAPE["block_size"])
    tokens = sum(map(len, rows))
    found = bench.count(nets, cfg, batch, None, clock.judged)
    assert found["judge"] == (tokens, 2 * weights * tokens, 4 * weights)


def test_ceilings_are_rates_of_this_machine():
    matrix, copies = bench.ceilings(CPU, torch.float32, seconds=0)
    assert 1e9 < matrix < 1e14
    assert 1e8 < copies < 1e13


# ------------------------------------------------------------------------------------------------
# clocks


def made_up_nets(**given):
    """What a Clock wraps, on a layer of three weights."""
    layer = torch.nn.Linear(3, 3)
    return SimpleNamespace(
        device=CPU, generate=functools.partial(lambda **kwargs: kwargs, decode="a decoder"),
        reward_funcs={"rule": len}, logprobs=layer, influence=None, judges={},
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1), **given)


def test_a_phase_has_what_it_calls_and_not_what_another_calls(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    nets = made_up_nets()

    def keep_helpful():
        nets.logprobs(torch.ones(3)).sum().backward()
        clock.loss({})

    nets.influence = SimpleNamespace(keep_helpful=keep_helpful)
    clock = bench.Clock(nets)
    nets.influence.keep_helpful()
    nets.optimizer.step()
    assert {k: v for k, v in clock.seconds.items() if v} == {
        "the rest": 1, "influence": 1, "optimiser": 1}
    assert next(ticks) == 4     # the clock is read at the start and at three boundaries


def test_every_second_of_an_iteration_belongs_to_one_phase(monkeypatch):
    """On a clock that the work moves: by 1, 10, 100, ... in each phase, by 0.25 between them."""
    now = [0.0]

    def works(seconds):
        def run(*args, **kwargs):
            now[0] += seconds
            return args or kwargs
        return run

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    nets = made_up_nets()
    nets.generate = functools.partial(works(1), decode="a decoder")
    nets.reward_funcs = {"one": works(10), "two": works(20)}
    nets.logprobs = works(100)
    nets.influence = SimpleNamespace(keep_helpful=works(10000))
    clock = bench.Clock(nets)
    between = works(0.25)

    assert nets.generate(seed=3) == dict(decode="a decoder", seed=3)
    between()
    assert nets.reward_funcs["one"]("prompts", "completions") == ("prompts", "completions")
    nets.reward_funcs["two"]()
    with torch.no_grad():
        nets.logprobs()
    for _ in range(2):
        between()
        nets.logprobs()
        works(1000)()           # loss and backward
        clock.loss({})
    between()
    nets.influence.keep_helpful()
    works(5)()                  # clipping
    nets.optimizer.step()
    between()
    clock.lap("the rest")
    assert clock.seconds == {
        "generate": 1, "judge": 30, "reference": 100, "policy forward": 200,
        "policy backward": 2000, "influence": 10000, "optimiser": 5, "the rest": 1.25}
    assert sum(clock.seconds.values()) == now[0]
    clock.begin()
    assert not any(clock.seconds.values())


def test_what_decoder_and_influence_keep_counts_as_memory_of_the_iteration(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    cfg = Settings(**TINY | RULE)
    given = inputs(cfg, bench.policy_that_ends(cfg, None), [Prompt("", [1, 2, 3], {})] * 4)
    knobs = dict(
        plain={}, compiled=dict(compile=("generate",)), recorded=dict(tracin="self"),
        lora=dict(lora_rank=2), bf16=dict(compile=("generate",), dtype="bfloat16"))
    held = {}
    for name, changes in knobs.items():
        turned = replace(cfg, **changes)
        own = inputs(turned, given.base, given.prompts)
        job = bench.ready(turned, own)
        held[name] = bench.held(job.nets)
    cache = 2 * 2 * 16 * 64 * 64                        # layers, k and v, rows, channels, positions
    copies = 299 * 64 + 2 * 12 * 64 ** 2                # Linear weights
    assert held["plain"] == held["lora"] == 0
    assert held["recorded"] == 16 * 10 * 64 * 4         # rows, weights and biases of norms
    assert held["compiled"] == pytest.approx(4 * cache, rel=0.05)
    assert held["bf16"] == pytest.approx(2 * (cache + copies), rel=0.05)
    watch, watch_more = bench.stopwatch(CPU), bench.stopwatch(CPU, 2 ** 30)
    assert watch_more()[2] - watch()[2] == pytest.approx(2 ** 30, rel=0.01)
    monkeypatch.setattr(bench, "stopwatch", lambda device, held=0: lambda: (1.0, 1.0, held))
    assert bench.in_turns({"": job}, 1)[""][0].peak == held["bf16"]


def test_nets_of_the_bench_share_nothing_that_a_setting_changes():
    """The attention by hand that one of them uses must not be in the others, nor moving weights."""
    cfg = Settings(**TINY | RULE | dict(beta=0.1))
    given = inputs(cfg, bench.policy_that_ends(cfg, None), [Prompt("", [1, 2, 3], {})] * 4)
    before = [p.clone() for p in given.base.parameters()]
    by_hand = bench.own_nets(cfg, given)
    plain = bench.own_nets(replace(cfg, speed=()), given)
    bench.iteration(by_hand, cfg, 0)
    assert all(torch.equal(p, q) for p, q in zip(given.base.parameters(), before))
    assert not any(torch.equal(p, q) for p, q in zip(by_hand.policy.parameters(), before))
    for nets, expected in ((by_hand, True), (plain, False)):
        for model in (nets.policy, nets.reference):
            assert ("attend" in vars(model.h[0].attn)) == expected


# ------------------------------------------------------------------------------------------------
# phase by phase


@pytest.fixture
def run(capsys, comments, monkeypatch):
    """bench.main on few comments -> {first column: the others}, lines. The ceilings are given."""
    def table(*argv):
        flags = [f"--{k}={v if type(v) is str else repr(v)}" for k, v in TINY.items()]
        bench.main([*argv, *flags, f"--comments={comments}", "--device=cpu"])
        lines = capsys.readouterr().out.splitlines()
        return {line[:17].strip(): line[17:].split() for line in lines}, lines

    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e13, 1e12))
    monkeypatch.setattr(bench.gc, "collect", lambda: None)      # slow beside what other tests left
    return table


ALWAYS = {"generate", "judge", "policy forward", "policy backward", "optimiser", "the rest", "all"}
HELD_OUT = ["--tracin=reward", "--beta=0.1", "--tracin_val_prompts=2", "--num_iterations=2",
            "--num_eval_prompts=2"]


@pytest.mark.parametrize("knobs, shown", [
    ([], set()), (["--beta=0.1"], {"reference"}), (["--tracin=self"], {"influence"}),
    (HELD_OUT, {"influence", "reference"})])
def test_the_table_names_the_phases_that_run_and_their_times_add_up(knobs, shown, run):
    def functions():
        return (grpo.completion_logprobs, torch.Tensor.backward, torch.autograd.grad,
                scorer.log_odds, grpo.clip_grad_norm_)

    before = functions()
    found, lines = run("--repeat=1", *knobs)
    assert ALWAYS | shown == set(found) & {*bench.PHASES, "all"}
    seconds = {phase: float(found[phase][0]) for phase in found if phase in bench.PHASES}
    assert sum(seconds.values()) == pytest.approx(float(found["all"][0]), abs=0.005)
    assert min(seconds.values()) >= 0
    for phase in seconds:
        if phase != "the rest":
            assert float(found[phase][-1].rstrip("x")) > 0.5    # x floor
    assert "peak memory" in lines[-1] and "padding" in lines[-1]
    assert before == functions()


def test_a_judge_whose_work_is_not_counted_has_its_seconds_and_no_floor(capsys, tmp_path, comments):
    config = tmp_path / "rule.py"
    config.write_text("def reward(prompts, completions):\n    return list(map(len, completions))\n")
    tiny = {k: v for k, v in TINY.items() if not k.startswith("reward")}
    flags = [f"--{k}={v!r}" for k, v in tiny.items()]
    flags += [f"--comments={comments}", "--device=cpu", "--eval_judge=nowhere.pt"]  # not asked for
    bench.main([str(config), "--repeat=1", *flags])
    row, = [line for line in capsys.readouterr().out.splitlines() if line.startswith("judge")]
    assert len(row.split()) == 3 and row.endswith("%" + " " * 27)


# ------------------------------------------------------------------------------------------------
# levers

# what a variant changes, the phases that it concerns, and what it costs there in the test below, in
# times what it was
LEVERS = {
    "speed without 'attention'": ("generate", 2), "speed without 'head'": ("update", 3),
    "speed without 'retire'": ("generate", 4), "speed without 'sort'": ("update", 5),
    "activation_checkpointing = True": ("update", 6), "compile = ('generate',)": ("generate", 7),
    "compile = ('judge',)": ("judge", 8), "compile = ('reference',)": ("reference", 9),
    "compile = ('update',)": ("update", 10)}
INFLUENCE = {
    "tracin_memory = 0.0": ("update + influence", 11), "tracin = 'off'": ("update + influence", 12)}


def difference(base, cfg):
    """What levers should call it."""
    found = []
    for name, value in vars(cfg).items():
        before = getattr(base, name)
        if name == "speed":
            found += [f"speed without {word!r}" for word in before if word not in value]
            found += [f"speed with {word!r}" for word in value if word not in before]
        elif value != before:
            found.append(f"{name} = {value!r}")
    return ", ".join(found) or "as set"


@pytest.mark.parametrize("tracin", ["off", "self"])
def test_each_lever_is_one_setting_changed_and_its_number_is_of_its_phase(tracin, run, monkeypatch):
    """On a clock that stands still but in the phase that the variant at work concerns."""
    levers = LEVERS
    if tracin == "self":
        levers = LEVERS | INFLUENCE
        del levers["compile = ('update',)"]
    clock, ran, compiled = [0.0], [], []
    plain_nets, plain_collect = bench.own_nets, bench.collect

    def collect(nets, prompts, cfg, seed, log):
        ran.append((cfg, prompts, seed))
        return plain_collect(nets, prompts, cfg, seed, log)

    def slow(phase, plain):
        def run(*args, **kwargs):
            here = "reference" if phase == "update" and not torch.is_grad_enabled() else phase
            if not ran:         # paths are tried before the first iteration
                return plain(*args, **kwargs)
            at_work = difference(ran[0][0], ran[-1][0])
            concerned, times = levers.get(at_work, ("none", 1))
            clock[0] += times if here in concerned.split(" + ") else 1
            return plain(*args, **kwargs)
        return run

    def slow_nets(cfg, given, judge_shape):
        nets = plain_nets(cfg, given, judge_shape)
        generate = slow("generate", nets.generate.func)
        nets.generate = functools.partial(generate, **nets.generate.keywords)
        nets.reward_funcs = {name: slow("judge", f) for name, f in nets.reward_funcs.items()}
        nets.logprobs = slow("update", nets.logprobs)
        if nets.influence:
            nets.influence.keep_helpful = slow("influence", nets.influence.keep_helpful)
        return nets

    def compile_nothing(part, **options):
        compiled.append(type(part).__name__)
        return part

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(bench, "collect", collect)
    monkeypatch.setattr(bench, "own_nets", slow_nets)
    monkeypatch.setattr(torch.Tensor, "backward", slow("update", torch.Tensor.backward))
    _, lines = run("levers", "--repeat=2", "--beta=0.1", f"--tracin={tracin}")

    rows = {line[:31].strip(): line[31:].split() for line in lines
            if line[:31].strip() in {"as set", *levers}}
    assert set(rows) == {"as set", *levers}
    # the settings as they are twice, then of each variant its warm-up and two rounds of both
    ways = [(difference(ran[0][0], cfg), repr(rest)) for cfg, *rest in ran]
    blocks = [ways[i:i + 5] for i in range(2, len(ways), 5)]
    assert {block[0][0] for block in blocks} == set(levers)
    assert len({seed for _, seed in ways}) == 3
    for warm, *rounds in blocks:
        for (way, given), (other, same) in (rounds[:2], rounds[2:]):
            assert {way, other} == {"as set", warm[0]}
            assert given == same
    assert sorted(compiled) == ["GPT"] * (1 + (tracin == "off")) + ["Scorer", "function"]
    base = float(rows["as set"][-5])
    for way, (phase, times) in levers.items():
        found = rows[way]
        (seconds, was, x), (whole, low, _, whole_x, _) = found[-8:-5], found[-5:]
        assert " ".join(found[:-8]) == phase
        assert float(seconds) == pytest.approx(float(was) * float(x), rel=0.01)
        assert low[1:-1] == whole
        assert float(whole_x) == pytest.approx(float(whole) / base, abs=0.006)
        if way != "tracin = 'off'":
            assert float(x) == times
            assert float(whole) == base + float(seconds) - float(was)
    if tracin == "self":    # two forwards and backwards, and the pass that forms influence is gone
        assert [float(x) for x in rows["tracin = 'off'"][-8:-5]] == [48, 5, 9.6]


def test_a_lever_that_is_pulled_already_is_pulled_back():
    without = tuple(word for word in Settings.speed if word != "retire")
    cfg = load_settings(["--compile=('update',)", "--activation_checkpointing=True",
                         f"--speed={without}", "--beta=0.1", "--dtype=float32"])
    found = bench.variants(cfg, torch.device("cuda"))
    assert {"activation_checkpointing = False", "speed with 'retire'", "speed without 'graphs'",
            "compile = ()", "compile = ('generate', 'update')",
            "compile = ('reference', 'update')"} <= set(found)
    assert not any("attention" in label for label in found)     # which is for CPUs
    assert found["speed with 'retire'"][1].speed == Settings.speed
    assert found["compile = ()"][0] == bench.UPDATE
    assert found["compile = ()"][1].activation_checkpointing
    cfg = load_settings(["--tracin=reward", "--tracin_memory=0", "--judge=profanity-check"])
    found = bench.variants(cfg, CPU)
    assert found["tracin_memory = 8.0"][1].tracin_memory == 8
    assert not any("judge" in x or "update" in x or "graphs" in x for x in found)


def test_attention_concerns_the_update_where_it_is_in_bfloat16():
    for dtype, concerned in (("float32", ("generate",)), ("bfloat16", ("generate", *bench.UPDATE))):
        found = bench.variants(load_settings([f"--dtype={dtype}"]), CPU)
        assert found["speed without 'attention'"][0] == concerned


def test_where_nothing_can_be_compiled_its_rows_say_so(run, monkeypatch):
    def compile(part, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", compile)
    _, lines = run("levers", "--repeat=1")
    assert [line for line in lines if "compile" in line] == [
        f"left out: compile '{part}': no compiler; set {fix}, or strict = False"
        for part, fix in (("generate", "compile without 'generate'"),
                          ("judge", "compile without 'judge'"),
                          ("update", "compile without 'update'"))]
    assert any("without 'sort'" in line for line in lines)
    _, lines = run("--repeat=1", "--compile=update")
    assert "note: compile 'update' off: no compiler; --strict=True makes this an error" in lines


# ------------------------------------------------------------------------------------------------
# what holds here


def test_check_names_what_does_not_hold(run, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    _, lines = run("check", "--repeat=1")
    assert lines[0].startswith(f"torch {torch.__version__}, CUDA runtime ")
    found = {line[:22].strip(): line[50:].strip() for line in lines if line[50:].strip()}
    for name in ("attention", "bfloat16", "head", "compile 'judge'", "influence, kept"):
        assert found[name] == "ok", f"{name} holds, and the table says {found[name]!r}"
    assert found["graphs"] == "not here: needs a GPU"

    fused = prove.fused_logprobs
    monkeypatch.setattr(prove, "fused_logprobs", lambda *args, **more: 0.2 + fused(*args, **more))
    with pytest.raises(SystemExit, match="a run goes without them: head$"):
        run("check", "--repeat=1")
    lines = capsys.readouterr().out.splitlines()
    verdict, = (line[50:].strip() for line in lines if line.startswith("head "))
    assert verdict.startswith("off: differs from the plain path by ")


# ------------------------------------------------------------------------------------------------
# what influence costs

SHAPE = {name: TINY[name] for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd",
                                       "num_prompts", "max_completion_length", "micro_batch_size")}


def test_the_ways_to_an_update_that_keep_the_same_rows_end_at_the_same_gradient():
    cfg = Settings(**SHAPE, tracin="self", tracin_memory=4.0, reward_funcs=("random",),
                   reward_weights=(1.0,), functions={"random": bench.random_reward})
    torch.manual_seed(0)
    prompts = bench.random_prompts(cfg, 6)
    nets = bench.own_nets(cfg, inputs(cfg, bench.new_policy(cfg), prompts))
    ways = bench.ways_to_update(nets, cfg)
    assert len(ways["generate"]().mask) == 32
    gradients = {}
    for way in ("plain", "kept", "contracted", "KL", "KL, kept", "two passes", "brute"):
        ways[way]()
        gradients[way] = torch.cat([p.grad.flatten() for p in nets.trained])
        nets.policy.zero_grad(set_to_none=True)
    size = float(gradients["plain"].abs().max())
    for way in ("contracted", "two passes"):
        torch.testing.assert_close(gradients[way], gradients["kept"], rtol=0, atol=1e-5 * size)
    for way in ("kept", "KL", "KL, kept", "brute"):     # which leave rows out
        assert (gradients[way] - gradients["plain"]).abs().max() > 1e-2 * size


def test_tracin_prints_each_way_beside_plain(capsys, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"a shape": (SHAPE, 6)})
    bench.main(["tracin", "--repeat=2", "--device=cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("a shape: 0.1 M weights, cpu, ") and "medians of 2" in lines[1]
    rows = {line[:12].strip(): line[12:].split() for line in lines[3:]}
    assert list(rows) == [
        "plain", "kept", "contracted", "KL", "KL, kept", "two passes", "brute"]
    assert rows["plain"][3:] == ["1.00x", "1.00x"]


# ------------------------------------------------------------------------------------------------
# GPT-2 and TRL

GPT2 = ["gpt2", "--repeat=1", "--num_prompts=1", "--max_completion_length=8", "--n_layer=2",
        "--n_embd=64", "--n_head=2", "--vocab_size=300", "--device=cpu"]


def test_gpt2_refuses_completions_that_leave_no_room_for_its_prompts():
    with pytest.raises(BadInput, match="max_completion_length = 128: prompts have 32 tokens"):
        bench.main([*GPT2, "--block_size=64", "--max_completion_length=128"])


@pytest.mark.parametrize("trl", [False, True])
def test_gpt2_prints_each_number_that_is_aimed_at(trl, capsys, monkeypatch):
    asked, read = [], set()
    encode, clock = scorer.encode, time.perf_counter

    def noted_encode(tokenizer, texts, size):
        read.add((tokenizer.n_vocab, size))
        return encode(tokenizer, texts, size)

    def race(cfg, *rest):
        asked.append((cfg, *rest))
        return {"TRL": (9.0, 300.0), "ours": (1.0, 120.0), "ours, influence": (2.0, 150.0)}

    # so that what is printed has digits enough
    monkeypatch.setattr(bench.time, "perf_counter", lambda: 100 * clock())
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e6, 1e9))
    monkeypatch.setattr(scorer, "encode", noted_encode)
    if trl:
        monkeypatch.setattr(bench, "against_trl", race)
    else:
        monkeypatch.setitem(sys.modules, "trl", None)
    bench.main(GPT2)
    lines = capsys.readouterr().out.splitlines()

    starts = [i for i, line in enumerate(lines)
              if "8 rows of up to 32 + 8 tokens, 0.2 M weights" in line]
    plain, influence = ({line[:17].strip(): line[17:].split() for line in lines[i:i + 12]}
                        for i in starts)
    assert "influence" in influence and "influence" not in plain
    assert read == {(50257, 9)}
    seconds = {phase: float(x[0]) for phase, x in plain.items() if phase in (*bench.PHASES, "all")}
    update = sum(seconds[phase] for phase in bench.UPDATE)
    flops = sum(float(plain[phase][3]) * seconds[phase] for phase in bench.UPDATE) * 1e12
    # none ended by itself
    assert float(plain["generate"][2]) * seconds["generate"] == pytest.approx(64, rel=0.05)

    found = {line[:36].strip(): line[36:].split() for line in lines[-10:]}
    expected = {
        "all of generate / 8 tokens, ms": 1000 * seconds["generate"] / 8,
        "policy forward + backward, ms": 1000 * update,
        "whole iteration with the judge, ms": 1000 * seconds["all"],
        "influence / plain, whole iteration": float(influence["all"][0]) / seconds["all"],
        "their share of the matrix rate, %": 100 * flops / update / 1e6}
    for what, number in expected.items():
        assert float(found[what][0]) == pytest.approx(number, rel=0.02), what
    assert {"peak memory, plain, MB", "peak memory, influence, MB"} <= set(found)
    if trl:
        assert found["TRL / this, whole iteration"][0] == "9.00"
        assert found["this / TRL, peak memory"][0] == "0.40"
        (cfg, *rest), = asked
        assert (cfg.n_layer, cfg.micro_batch_size, *rest) == (2, 64, None, CPU, 1)
    else:
        assert any(line.startswith("against TRL: no row") and "pip install trl" in line
                   for line in lines)


def test_what_is_wrong_with_trl_but_its_absence_is_an_error(monkeypatch):
    def fails(*args):
        raise BadInput("compile = x")

    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e6, 1e9))
    monkeypatch.setattr(bench, "against_trl", fails)
    with pytest.raises(BadInput, match="compile = x"):
        bench.main(GPT2)


def test_trl_without_a_case_has_the_three_small_ones(monkeypatch):
    asked = []

    def race(cfg, ends, device, repeat):
        asked.append((cfg.n_embd, cfg.vocab_size, ends, repeat))

    monkeypatch.setattr(bench, "against_trl", race)
    bench.main(["trl", "--device=cpu"])
    bench.main(["trl", "--device=cpu", "--case=gpt2", "--repeat=2"])
    assert asked == [(384, 512, 55, 5), (384, 512, None, 5), (384, 50257, None, 5),
                     (768, 50257, None, 2)]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_a_case_of_trl_runs_at_another_shape(capsys):
    small = dict(vocab_size=300, n_layer=2, n_head=2, n_embd=64, num_prompts=2,
                 max_completion_length=8)
    found = bench.against_trl(Settings(**bench.GPT2 | small), None, CPU, 1)
    out = capsys.readouterr().out
    assert set(found) == {"TRL", "ours", "ours, influence"}
    assert min(x for way in found.values() for x in way) > 0
    assert "2 x 64, V 300, 2 prompts x 8, 32 + 8 tokens, micro-batches of 16" in out


def test_the_race_is_per_token_and_its_first_round_does_not_count(capsys):
    first = (9.0, 9.0, 2 ** 30, 1)
    times = {"TRL": [first, (4.0, 3.0, 2 ** 21, 500), (4.0, 3.0, 2 ** 20, 500)],
             "ours": [first, (1.0, 1.0, 2 ** 20, 250), (1.0, 1.0, 2 ** 20, 250)]}
    assert bench.print_race(times) == {"TRL": (8.0, 2 ** 21), "ours": (4.0, 2 ** 20)}
    rows = {line[:18].strip(): line[18:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["TRL"][-3:] == ["1.00x", "1.00x", "2"]
    assert rows["ours"][-3:] == ["2.00x", "1.50x", "1"]


def test_the_end_token_has_the_probability_that_the_case_asks_for():
    cfg = Settings(vocab_size=512, block_size=160, n_layer=2, n_head=4, n_embd=128)
    for mean in (20, None):
        policy = bench.policy_that_ends(cfg, mean)
        with torch.no_grad():
            logits = policy.lm_head(policy(torch.randint(511, (8, 64))))
        p = logits.softmax(-1)[..., -1]
        if mean is None:
            assert p.max() < 1e-12
        else:
            assert 0.8 < float(p.mean()) * mean < 1.25


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None,
                    reason="transformers is not installed")
def test_the_policy_in_transformers_has_the_same_logits():
    import transformers
    policy = bench.policy_that_ends(Settings(**TINY), 20)
    x = torch.randint(299, (2, 9))
    with torch.no_grad():
        theirs = bench.to_transformers(policy, transformers)(x).logits
        ours = policy.lm_head(policy(x))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------
# the command


@pytest.mark.parametrize("argv, message", [
    (["--repeat=0"], "repeat = '0': must be a whole number from 1"),
    (["tracin", "--beta=1"], "usage: python bench.py tracin"),
    (["trl", "--case=none"], r"usage: python bench.py trl .*ends\|fixed.*gpt2"),
    (["--betta=1"], "did you mean 'beta'"),
    (["levers", "--betta=1"], "did you mean 'beta'"),
    (["levers", "--picture=x.png"], "there is no setting 'picture'"),
    (["gpt2", "--n_head=5"], "n_embd = 768 is not a multiple of n_head = 5"),
    (["gpt2", "--case=ends"], "no setting 'case'"),
    (["levers", "--repeat=x"], "repeat = 'x': must be a whole number from 1"),
    (["trl", "--device=cpu"], "python bench.py trl needs .*: pip install trl"),
    (["--picture=x.png"], "picture = 'x.png': pip install matplotlib")])
def test_wrong_requests_are_one_line(argv, message, monkeypatch):
    for name in ("trl", "datasets", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)    # as if it were not installed
    with pytest.raises(BadInput, match=message):
        bench.main(argv)
