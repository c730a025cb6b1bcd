"""bench.py: what it counts against torch's own counter, what it times, and that it leaves everything as it was."""
import importlib.util
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
import grpo
from config import Settings, load_settings
from judge import scorer
from run.script import BadInput

CPU, FLOAT = torch.device("cpu"), torch.float32
TINY = dict(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=64, num_prompts=4, num_generations=4, prompt_words=(3, 6),
            max_completion_length=8, micro_batch_size=8, judge_vocab_size=300, reward_weights=(1.0,), reward_funcs=("judge",))

RULE = dict(functions={"rule": lambda prompts, completions: list(range(len(completions)))}, reward_funcs=("rule",))


@pytest.mark.parametrize("ends", [True, False])
def test_counted_flops_are_those_that_torch_counts(ends):
    """Without padding to the last one, since torch computes both halves of a causal square; else of real tokens only."""
    s = Settings(**TINY | RULE | dict(max_completion_length=16, beta=0.1, micro_batch_size=16))
    policy, done = bench.policy_that_ends(s, 10 if ends else None), {}
    prompts = [("", torch.randint(299, (5,), generator=torch.Generator().manual_seed(i)).tolist()) for i in range(4)]

    def counted(name, plain):
        def run(*args, **kwargs):
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # attention as two products
                out = plain(*args, **kwargs)
            done["reference" if name == "policy forward" and not torch.is_grad_enabled() else name] = counter.get_total_flops()
            return out
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "generate", counted("generate", grpo.generate))
        patch.setattr(grpo, "completion_logprobs", counted("policy forward", grpo.completion_logprobs))
        patch.setattr(torch.Tensor, "backward", counted("policy backward", torch.Tensor.backward))
        r = bench.rig(s, policy, Words(), prompts)
        b, target = r.run(1)
    found = bench.count(r.policy, b, None, s, FLOAT, [])
    assert found["policy forward"][0] == int(b.rollout.real.sum() - (~b.mask).sum()) - 16  # every token but the last is read
    assert found["generate"][0] == int(b.mask.sum()) and target is None
    if ends:
        assert len(b.mask.sum(1).unique()) > 3 and all(n > found[phase][1] > 0.4 * n for phase, n in done.items())
    else:
        pair = 4 * 2 * 64                                                         # products, layers, channels
        upper = {"generate": 4 * 5 * 4 / 2, "reference": 16 * 20 * 19 / 2, "policy forward": 16 * 20 * 19 / 2,
                 "policy backward": 2 * 16 * 20 * 19 / 2}                         # pairs above the diagonal
        assert done == {phase: found[phase][1] + pair * n for phase, n in upper.items()}


class Words:
    eot_token = 299

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_bytes_of_a_decode_are_weights_at_every_step_and_the_cache_so_far():
    s = Settings(**TINY | RULE | dict(num_prompts=1))
    policy = bench.policy_that_ends(s, 20)
    b = bench.rig(s, policy, Words(), [("", [1, 2, 3])]).run(0)[0]
    weights = sum(p.numel() for name, p in policy.named_parameters() if p.dim() == 2 and name != "wpe.weight")
    cache = sum(2 * 2 * 64 * (3 + t) for n in b.mask.sum(1).tolist() for t in range(1, n))   # layers, k and v, channels
    assert bench.count(policy, b, None, s, FLOAT, [])["generate"][2] == 4 * (weights * int(b.mask.sum(1).max()) + cache)


@pytest.fixture
def run(capsys, comments, monkeypatch):
    """bench.main on few comments -> {first column: the others}, lines. The ceilings are given."""
    def table(*argv):
        flags = [f"--{k}={v if type(v) is str else repr(v)}" for k, v in TINY.items()]
        bench.main([*argv, *flags, f"--comments={comments}", "--device=cpu"])
        lines = capsys.readouterr().out.splitlines()
        return {line[:17].strip(): line[17:].split() for line in lines}, lines

    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e13, 1e12))
    return table


@pytest.mark.parametrize("knobs, shown", [
    ([], set()), (["--beta=0.1"], {"reference"}), (["--tracin=self"], {"influence"}),
    (["--tracin=reward", "--beta=0.1", "--tracin_val_prompts=2", "--num_iterations=2", "--num_eval_prompts=2"],
     {"influence", "reference"})])
def test_the_table_names_the_phases_that_run_and_their_times_add_up(knobs, shown, run):
    before = grpo.generate, torch.Tensor.backward, torch.autograd.grad, scorer.log_odds, torch.nn.utils.clip_grad_norm_
    found, lines = run("--repeat=1", *knobs)
    assert {"generate", "judge", "policy forward", "policy backward", "optimiser", "the rest", "all"} | shown == set(
        found) & {*bench.PHASES, "all"}
    seconds = {phase: float(found[phase][0]) for phase in found if phase in bench.PHASES}
    assert sum(seconds.values()) == pytest.approx(float(found["all"][0]), abs=0.005) and min(seconds.values()) >= 0
    assert all(float(found[phase][-1].rstrip("x")) > 0.5 for phase in seconds if phase != "the rest")  # x floor
    assert "peak memory" in lines[-1] and "padding" in lines[-1]
    assert before == (grpo.generate, torch.Tensor.backward, torch.autograd.grad, scorer.log_odds,
                      torch.nn.utils.clip_grad_norm_)


# what a variant changes, the phases that it concerns, and what it costs there in the test below, in times what it was
LEVERS = {"fused_head = False": ("update", 2), "sort_by_length = False": ("update", 3), "retire_rows = False": ("generate", 4),
          "activation_checkpointing = True": ("update", 5), "compile = ('generate',)": ("generate", 6),
          "compile = ('judge',)": ("judge", 7), "compile = ('reference',)": ("reference", 8),
          "compile = ('update',)": ("update", 9)}
INFLUENCE = {"tracin_memory = 0.0": ("update + influence", 10), "tracin = 'off'": ("update + influence", 11)}


@pytest.mark.parametrize("tracin", ["off", "self"])
def test_each_lever_is_one_setting_changed_and_its_number_is_of_its_phase(tracin, run, monkeypatch):
    """On a clock that stands still but in the phase that the variant at work concerns."""
    levers = LEVERS if tracin == "off" else {k: v for k, v in (LEVERS | INFLUENCE).items() if k != "compile = ('update',)"}
    clock, ran, compiled = [0.0], [], []

    def name():  # of the variant at work
        return next((name for name in levers if name == changed(ran[0][0], ran[-1][0])), None)

    def changed(base, s):
        return ", ".join(f"{k} = {v!r}" for k, v in vars(s).items() if v != getattr(base, k)) or "as set"

    def collect(policy, reference, prompts, reward_funcs, s, tokenizer, seed, *args, plain=grpo.collect, **kwargs):
        ran.append((s, prompts, seed))
        return plain(policy, reference, prompts, reward_funcs, s, tokenizer, seed, *args, **kwargs)

    def slow(phase, plain):
        def run(*args, **kwargs):
            here = "reference" if phase == "update" and not torch.is_grad_enabled() else phase
            concerned, times = levers.get(name(), ("none", 1))
            clock[0] += times if here in concerned.split(" + ") else 1
            return plain(*args, **kwargs)
        return run

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "compile", lambda part, **options: compiled.append(type(part).__name__) or part)
    monkeypatch.setattr(grpo, "collect", collect)
    for phase, owner, function in (("generate", grpo, "generate"), ("judge", grpo, "score"), ("update", torch.Tensor, "backward"),
                                   ("update", grpo, "completion_logprobs"), ("influence", grpo, "keep_helpful")):
        monkeypatch.setattr(owner, function, slow(phase, getattr(owner, function)))
    _, lines = run("levers", "--repeat=2", "--beta=0.1", f"--tracin={tracin}")

    rows = {line[:31].strip(): line[31:].split() for line in lines if line[:31].strip() in {"as set", *levers}}
    assert set(rows) == {"as set", *levers}
    ways = [(changed(ran[0][0], s), repr(rest)) for s, *rest in ran]  # the settings as they are twice, then of each variant:
    blocks = [ways[i:i + 5] for i in range(2, len(ways), 5)]          # its warm-up, two rounds of both
    assert {block[0][0] for block in blocks} == set(levers) and len({seed for _, seed in ways}) == 3
    for warm, *rounds in blocks:
        for (way, given), (other, same) in (rounds[:2], rounds[2:]):
            assert {way, other} == {"as set", warm[0]} and given == same
    assert sorted(compiled) == ["GPT"] * (1 + (tracin == "off")) + ["Scorer", "function"]
    for way, (phase, times) in levers.items():
        found = rows[way]
        concerned, (seconds, was, x), (whole, low, high, whole_x, peak) = " ".join(found[:-8]), found[-8:-5], found[-5:]
        assert concerned == phase and float(seconds) == pytest.approx(float(was) * float(x), rel=0.01)
        assert low[1:-1] == whole and float(whole_x) == pytest.approx(float(whole) / float(rows["as set"][-5]), abs=0.006)
        if way != "tracin = 'off'":
            assert float(x) == times and float(whole) == float(rows["as set"][-5]) + float(seconds) - float(was)
    if tracin == "self":  # two forwards and backwards, and the pass that forms influence is gone
        assert [float(x) for x in rows["tracin = 'off'"][-8:-5]] == [44, 5, 8.8]


def test_a_lever_that_is_pulled_already_is_pulled_back():
    s = load_settings(["--compile=('update',)", "--activation_checkpointing=True", "--retire_rows=False", "--beta=0.1"])
    found = bench.variants(s, torch.device("cuda"))
    assert {"activation_checkpointing = False", "retire_rows = True", "cuda_graphs = False", "compile = ()",
            "compile = ('generate', 'update')", "compile = ('reference', 'update')"} <= set(found)
    assert found["compile = ()"][0] == bench.UPDATE and found["compile = ()"][1].activation_checkpointing
    s = load_settings(["--tracin=reward", "--tracin_memory=0", "--judge=profanity-check"])
    found = bench.variants(s, CPU)
    assert found["tracin_memory = 8.0"][1].tracin_memory == 8 and not any("judge" in x or "update" in x for x in found)


def test_where_nothing_can_be_compiled_its_rows_say_so_and_other_errors_are_not_hidden(run, monkeypatch):
    def fails(error):
        def compiled(*args):
            raise error
        return lambda part, **options: compiled

    missing = torch._dynamo.exc.BackendCompilerFailed(lambda: 0, RuntimeError("no compiler"), None)
    monkeypatch.setattr(torch, "compile", fails(missing))
    _, lines = run("levers", "--repeat=1")
    assert [line for line in lines if "compile" in line] == [
        f"left out: compile = ('{part}',): torch cannot compile on this machine (backend='<lambda>' raised:); leave it ()"
        for part in ("generate", "judge", "update")] and any("sort_by_length" in line for line in lines)
    with pytest.raises(BadInput, match="compile = .*'update'.*: torch cannot compile"):
        run("--repeat=1", "--compile=True")
    monkeypatch.setattr(torch, "compile", fails(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run("levers", "--repeat=1")


def test_what_decoder_and_recorder_keep_counts_as_memory_of_the_iteration(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    s = Settings(**TINY | RULE)
    policy, held = bench.policy_that_ends(s, None), {}
    for name, knobs in dict(plain={}, compiled=dict(compile=("generate",)), recorded=dict(tracin="self"), lora=dict(lora_rank=2),
                            bf16=dict(compile=("generate",), dtype="bfloat16")).items():
        r = bench.ready(replace(s, **knobs), policy=policy, tokenizer=Words(), prompts=[("", [1, 2, 3])] * 4)
        held[name] = r.held()
    cache = 2 * 2 * 16 * 64 * 64                                   # layers, k and v, rows, channels, positions
    copies = 299 * 64 + 2 * 12 * 64 ** 2                           # Linear weights
    assert held["plain"] == held["lora"] == 0 and held["recorded"] > 16 * 10 * 64 * 4
    assert held["compiled"] == pytest.approx(4 * cache, rel=0.05)
    assert held["bf16"] == pytest.approx(2 * (cache + copies), rel=0.05)
    watch, watch_more = bench.stopwatch(CPU), bench.stopwatch(CPU, 2 ** 30)
    assert watch_more()[2] - watch()[2] == pytest.approx(2 ** 30, rel=0.01)
    monkeypatch.setattr(bench, "stopwatch", lambda device, held=0: lambda: (1.0, 1.0, held))
    assert bench.in_turns({"": r}, 1)[""][0].peak == held["bf16"]


GPT2 = ["gpt2", "--repeat=1", "--num_prompts=1", "--max_completion_length=8", "--n_layer=2", "--n_embd=64", "--n_head=2",
        "--vocab_size=300", "--device=cpu"]


@pytest.mark.parametrize("trl", [False, True])
def test_gpt2_prints_each_number_that_is_aimed_at(trl, capsys, monkeypatch):
    asked, read, encode, clock = [], set(), scorer.encode, time.perf_counter
    monkeypatch.setattr(bench.time, "perf_counter", lambda: 100 * clock())  # so that what is printed has digits enough
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e6, 1e9))
    monkeypatch.setattr(scorer, "encode", lambda tokenizer, texts, size: read.add((tokenizer.n_vocab, size)) or encode(
        tokenizer, texts, size))
    if trl:
        monkeypatch.setattr(bench, "against_trl", lambda s, *rest: asked.append((s, *rest)) or {
            "TRL": (9.0, 300.0), "ours": (1.0, 120.0), "ours, influence": (2.0, 150.0)})
    else:
        monkeypatch.setitem(sys.modules, "trl", None)
    bench.main(GPT2)
    lines = capsys.readouterr().out.splitlines()
    plain, influence = ({line[:17].strip(): line[17:].split() for line in lines[at:at + 12]} for at, line in enumerate(lines)
                        if "8 rows of up to 32 + 8 tokens, 0.2 M weights" in line)
    found = {line[:36].strip(): line[36:].split() for line in lines[-10:]}
    assert "influence" in influence and "influence" not in plain and read == {(50257, 9)}
    s, ms = {phase: float(x[0]) for phase, x in plain.items() if phase in bench.PHASES or phase == "all"}, 1000
    assert float(plain["generate"][2]) * s["generate"] == pytest.approx(64, rel=0.05)  # none ended by itself
    assert float(found["all of generate / 8 tokens, ms"][0]) == pytest.approx(s["generate"] * ms / 8, rel=0.02)
    assert float(found["policy forward + backward, ms"][0]) == pytest.approx(
        ms * (s["policy forward"] + s["policy backward"]), rel=0.02)
    assert float(found["whole iteration with the judge, ms"][0]) == pytest.approx(ms * s["all"], rel=0.02)
    assert float(found["influence / plain, whole iteration"][0]) == pytest.approx(
        float(influence["all"][0]) / s["all"], rel=0.02)
    assert float(found["their share of the matrix rate, %"][0]) == pytest.approx(
        sum(float(plain[phase][3]) * s[phase] for phase in bench.UPDATE) * 1e12 / 1e6 * 100 / sum(
            s[phase] for phase in bench.UPDATE), rel=0.02)
    assert {"peak memory, plain, MB", "peak memory, influence, MB"} <= set(found)
    if trl:
        assert found["TRL / this, whole iteration"][0] == "9.00" and found["this / TRL, peak memory"][0] == "0.40"
        assert (asked[0][0].n_layer, asked[0][0].micro_batch_size, *asked[0][1:]) == (2, 64, None, CPU, 1)
    else:
        assert any(line.startswith("against TRL: no row") and "pip install trl" in line for line in lines)


def test_what_is_wrong_with_trl_but_its_absence_is_an_error(monkeypatch):
    def fails(*args):
        raise BadInput("compile = x")

    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e6, 1e9))
    monkeypatch.setattr(bench, "against_trl", fails)
    with pytest.raises(BadInput, match="compile = x"):
        bench.main(GPT2)


def test_trl_without_a_case_has_the_three_small_ones(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "against_trl", lambda s, ends, _, repeat: asked.append((s.n_embd, s.vocab_size, ends, repeat)))
    bench.main(["trl", "--device=cpu"])
    bench.main(["trl", "--device=cpu", "--case=gpt2", "--repeat=2"])
    assert asked == [(384, 512, 55, 5), (384, 512, None, 5), (384, 50257, None, 5), (768, 50257, None, 2)]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_a_case_of_trl_runs_at_another_shape(capsys):
    s = Settings(**bench.GPT2 | dict(vocab_size=300, n_layer=2, n_head=2, n_embd=64, num_prompts=2, max_completion_length=8))
    found = bench.against_trl(s, None, CPU, 1)
    out = capsys.readouterr().out
    assert set(found) == {"TRL", "ours", "ours, influence"} and min(x for way in found.values() for x in way) > 0
    assert "2 x 64, V 300, 2 prompts x 8, 32 + 8 tokens, micro-batches of 16" in out


def test_ceilings_are_rates_of_this_machine():
    matrix, copies = bench.ceilings(CPU, FLOAT, seconds=0)
    assert 1e9 < matrix < 1e14 and 1e8 < copies < 1e13


def test_a_phase_has_what_it_calls_and_not_what_another_calls():
    spent, judged, slept = dict.fromkeys(bench.PHASES, 0.0), [], []
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        clock = iter(range(100))
        patch.setattr(bench.time, "perf_counter", lambda: slept.append(1) or next(clock))
        patch.setattr(grpo, "keep_helpful", lambda: model(torch.ones(3)).sum().backward())
        with bench.timed(CPU, spent, optimizer, judged):
            grpo.keep_helpful()
            optimizer.step()
    assert spent == dict.fromkeys(bench.PHASES, 0.0) | {"influence": 1, "optimiser": 1} and len(slept) == 4


def test_the_end_token_has_the_probability_that_the_case_asks_for():
    s = Settings(vocab_size=512, block_size=160, n_layer=2, n_head=4, n_embd=128)
    for mean in (20, None):
        policy = bench.policy_that_ends(s, mean)
        with torch.no_grad():
            p = policy.lm_head(policy(torch.randint(511, (8, 64)))).softmax(-1)[..., -1]
        assert p.max() < 1e-12 if mean is None else 0.8 < float(p.mean()) * mean < 1.25


@pytest.mark.parametrize("argv, message", [
    (["--repeat=0"], "repeat = '0': must be a whole number from 1"), (["tracin", "--beta=1"], "usage: python bench.py tracin"),
    (["trl", "--case=none"], r"usage: python bench.py trl .*ends\|fixed.*gpt2"), (["--betta=1"], "did you mean 'beta'"),
    (["levers", "--betta=1"], "did you mean 'beta'"), (["levers", "--picture=x.png"], "there is no setting 'picture'"),
    (["gpt2", "--n_head=5"], "n_embd = 768 is not a multiple of n_head = 5"), (["gpt2", "--case=ends"], "no setting 'case'"),
    (["levers", "--repeat=x"], "repeat = 'x': must be a whole number from 1"),
    (["trl"], "python bench.py trl needs .*: pip install trl"),
    (["--picture=x.png"], "picture = 'x.png': pip install matplotlib")])
def test_wrong_requests_are_one_line(argv, message, monkeypatch):
    for name in ("trl", "datasets", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(BadInput, match=message):
        bench.main(argv)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_policy_in_transformers_has_the_same_logits():
    import transformers
    policy = bench.policy_that_ends(Settings(**TINY), 20)
    x = torch.randint(299, (2, 9))
    with torch.no_grad():
        theirs, ours = bench.to_transformers(policy, transformers)(x).logits, policy.lm_head(policy(x))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
