"""run/prove.py: a fast path that fails or is off is left out, one line says so, and the run is that
of the setting without it."""
import math
import random
from dataclasses import replace

import pytest
import torch

import bench
import grpo as trainer
import tracin
from config import Settings, load_settings
from data.prompts import Prompt
from peak import Peak
from run import attention, prove
from run.decoder import Decoder
from run.head import float32_product
from run.script import BadInput, run_script
from test_bench import TINY, Words

CPU = torch.device("cpu")
COMPILED = ("generate", "judge", "reference", "update")
EVERY = dict(beta=0.1, num_iterations=2, tracin="self", compile=COMPILED)


def settings(**knobs):
    return Settings(**TINY | EVERY | knobs)


def nets_of(cfg):
    """Plain Nets of random weights with a judge."""
    torch.manual_seed(0)
    prompts = [Prompt(f"say {i}", list(range(2 + i, 6 + i)), {}) for i in range(4)]
    given = bench.inputs_from(cfg, CPU, bench.new_policy(cfg), Words(), prompts)
    return bench.plain_nets(cfg, given)


def spoilt(kind, function):
    """The function as it would be with a bug of this kind."""
    def broken(*args, **kwargs):
        if kind == "raises":
            raise RuntimeError("CUDA error: no kernel image\nmore of it")
        return changed(function(*args, **kwargs), kind)
    return broken


def changed(x, kind):
    if isinstance(x, torch.Tensor):
        return x + (0.2 if kind == "off" else math.nan)
    return x


# what is spoilt, and how the settings leave it out
PATHS = {
    "attention": ((attention, "attend_by_hand"), dict(speed=("head", "retire", "sort"))),
    "head": ((prove, "fused_logprobs"), dict(speed=("attention", "retire", "sort"))),
    "bfloat16": ((prove, "logp_and_gradient"), dict(dtype="float32")),
    "influence, kept": ((tracin, "add_gradients"), dict(tracin_memory=0.0)),
}


def spoil(monkeypatch, name, kind):
    (module, attribute), _ = PATHS[name]
    plain = getattr(module, attribute)

    def in_low_precision(nets, cfg, rollout, dtype, *more, **named):
        found = plain(nets, cfg, rollout, dtype, *more, **named)
        if dtype == torch.float32:
            return found
        logp = spoilt(kind, lambda: found[0])()
        return logp, found[1]

    def stored(total, *more):
        plain(total, *more)
        total.copy_(spoilt(kind, lambda: total)())

    replacement = spoilt(kind, plain)
    if name == "bfloat16":
        replacement = in_low_precision
    if name == "influence, kept":
        replacement = stored
    monkeypatch.setattr(module, attribute, replacement)


def spoil_compiled(monkeypatch, name, kind):
    """torch.compile changes nothing, but spoils the part whose network has this name."""
    def compile(part, **options):
        if getattr(part, "__name__", type(part).__name__) != name:
            return part
        if name == "decode_step":
            return spoilt_step(kind, part)
        network = spoilt(kind, part)
        network.lm_head = getattr(part, "lm_head", None)
        return network

    monkeypatch.setattr(torch, "compile", compile)


def spoilt_step(kind, step):
    def broken(model, r, *more):
        spoilt(kind, step)(model, r, *more)
        r.logp.copy_(changed(r.logp, kind))
    return broken


def notes(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


# ------------------------------------------------------------------------------------------------
# each path


def test_what_holds_is_used_without_a_word(capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    cfg = settings()
    nets = nets_of(cfg)
    prove.prove(nets, cfg)
    assert notes(capsys) == []
    assert nets.logprobs is prove.fused_logprobs
    assert isinstance(nets.generate.keywords["decode"], Decoder)
    assert nets.policy.h[0].attn.attend is attention.attend_by_hand
    assert nets.influence.tape.memory > 0


@pytest.mark.parametrize("kind, reason", [
    ("off", "differs from the plain path by "), ("nan", "its result is nan"),
    ("raises", "CUDA error: no kernel image more of it")])
@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_does_not_hold_is_off(name, kind, reason, capsys, monkeypatch):
    _, without = PATHS[name]
    cfg = settings(compile=(), dtype="bfloat16" if name == "bfloat16" else "float32")
    expected = nets_of(replace(cfg, **without))
    prove.prove(expected, replace(cfg, **without))
    assert notes(capsys) == []
    spoil(monkeypatch, name, kind)
    nets = nets_of(cfg)
    prove.prove(nets, cfg)
    found = notes(capsys)
    assert found[-1].startswith(f"note: {name} off: {reason}"), found
    assert found[-1].endswith("; --strict=True makes this an error")
    # a bug of all of bfloat16 is seen in its logits first
    assert len(found) == 1 + (name == "bfloat16"), found
    assert nets.dtype == expected.dtype
    assert nets.logprobs is expected.logprobs
    assert nets.policy.h[0].attn.attend is expected.policy.h[0].attn.attend
    assert nets.influence.tape.memory == expected.influence.tape.memory
    cfg.strict = True
    with pytest.raises(BadInput, match=f"^{name}.*; set .*, or strict = False"):
        prove.prove(nets_of(cfg), cfg)


@pytest.mark.parametrize("kind", ("off", "nan", "raises"))
@pytest.mark.parametrize("part, network", [
    ("generate", "decode_step"), ("judge", "Scorer"), ("update", "GPT"), ("reference", "GPT")])
def test_a_compiled_part_that_does_not_hold_stays_plain(part, network, kind, capsys, monkeypatch):
    spoil_compiled(monkeypatch, network, kind)
    cfg = settings(compile=(part,))
    nets = nets_of(cfg)
    judge = nets.judges["judge"].model
    prove.prove(nets, cfg)
    note, = notes(capsys)
    assert note.startswith(f"note: compile {part!r} off: ")
    assert nets.policy_fn is nets.policy and nets.reference_fn is nets.reference
    assert nets.judges["judge"].model is judge
    assert not isinstance(nets.generate.keywords["decode"], Decoder)


def test_torch_that_cannot_compile_at_all_is_four_notes(capsys, monkeypatch):
    def compile(*args, **options):
        raise RuntimeError("Dynamo is not supported on Python 3.99+\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch, "compile", compile)
    cfg = settings()
    prove.prove(nets_of(cfg), cfg)
    assert notes(capsys) == [
        f"note: compile {part!r} off: Dynamo is not supported on Python 3.99+; --strict=True makes "
        "this an error" for part in ("generate", "reference", "update", "judge")]


def test_logits_that_bfloat16_rounds_too_far_are_in_float32(capsys):
    cfg = settings(compile=(), dtype="bfloat16", tracin="off")
    nets = nets_of(cfg)
    with torch.no_grad():       # logits near -100 that differ by about 1
        for model in (nets.policy, nets.base):
            model.wte.weight *= 4
            model.ln_f.bias[0] = 100
            model.wte.weight[:, 0] = -1
    prove.prove(nets, cfg)
    note, = notes(capsys)
    assert note.startswith("note: bfloat16 logits off: differs from the plain path by ")
    assert nets.dtype == torch.bfloat16 and nets.policy.lm_head.product is float32_product


def test_influence_that_is_wrong_both_ways_stops_the_run(monkeypatch):
    plain = tracin.layer_dot
    monkeypatch.setattr(tracin, "layer_dot", lambda *args: 1.1 * plain(*args))
    cfg = settings(compile=())
    with pytest.raises(SystemExit, match="stopped before training: influence does not agree"):
        prove.prove(nets_of(cfg), cfg)


def test_a_head_stays_plain_where_the_loss_of_a_token_is_not_its_own():
    cfg = settings(compile=(), importance_sampling_level="sequence", loss_type="grpo")
    nets = nets_of(cfg)
    prove.prove(nets, cfg)
    assert nets.logprobs is trainer.completion_logprobs


def test_the_judges_reward_follows_the_dtype_that_holds(monkeypatch):
    cfg = settings(compile=(), dtype="bfloat16")
    nets = nets_of(cfg)
    spoil(monkeypatch, "bfloat16", "raises")
    prove.prove(nets, cfg)
    texts = ["one text", "and another"]
    expected = [-x for x in nets.judges["judge"](texts, texts).tolist()]
    assert nets.reward_funcs["judge"](texts, texts) == expected, \
        "the judge still runs in bfloat16, which was switched off"


# ------------------------------------------------------------------------------------------------
# what a try leaves behind


def test_a_try_changes_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    cfg = settings(lora_rank=2)
    nets = nets_of(cfg)
    before = {name: p.clone() for name, p in nets.policy.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    prove.prove(nets, cfg)
    assert torch.equal(torch.get_rng_state(), states[0]), "global random numbers were drawn"
    assert random.getstate() == states[1], "Python's random numbers were drawn"
    assert all(p.grad is None for p in nets.policy.parameters()), "a .grad was left"
    after = nets.policy.state_dict()
    assert all(torch.equal(p, after[name]) for name, p in before.items()), "weights were changed"
    assert not nets.optimizer.state and not nets.influence.tape.pool
    assert not nets.generate.keywords["decode"].buffers, "buffers of the few rows were kept"


@pytest.mark.parametrize("knobs", [{}, dict(tracin="off", num_iterations=1)])
def test_a_try_takes_little_more_memory_than_a_run(knobs, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda part, **options: part)
    cfg = settings(vocab_size=8000, n_embd=64, **knobs)     # weights are what is large
    nets = nets_of(cfg)
    models = (nets.policy, nets.base, nets.judges["judge"].model)
    before = sum(p.nbytes for model in models for p in model.parameters())
    with Peak() as peak:
        prove.prove(nets, cfg)
    most = (max(peak.most.values()) - before) / sum(p.nbytes for p in nets.trained)
    assert most < 4.5, f"{most:.1f} times the weights; a step takes 3: the gradient and two moments"


def test_a_plain_path_that_fails_names_the_device(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available\nmore of it")

    cfg = settings(compile=())
    nets = nets_of(cfg)
    nets.generate = trainer.functools.partial(fails, decode=None)
    nets.device = torch.device("cuda", 0)
    with pytest.raises(BadInput, match="device = 'cuda:0': .*no kernel image.*device = 'cpu'"):
        with prove.plainly(nets.device):
            fails()
    nets.device = CPU
    with pytest.raises(RuntimeError, match="no kernel image"):      # a bug: nothing to fall back to
        prove.prove(nets, cfg)


# ------------------------------------------------------------------------------------------------
# whole runs


@pytest.mark.parametrize("name", ["head", "bfloat16"])
def test_a_run_goes_on_as_the_one_without_the_path(name, grpo, rows, tmp_path, monkeypatch):
    asked = {"head": "--dtype=float32", "bfloat16": "--dtype=bfloat16"}[name]
    without = {"head": "--speed=('attention','retire','sort')",
               "bfloat16": "--dtype=float32"}[name]
    flags = ["--max_iters=2", "--eval_interval=0", "--device=cpu"]
    grpo(tmp_path / "plain", *flags, without)
    spoil(monkeypatch, name, "raises")
    out = grpo(tmp_path / "broken", *flags, asked)
    assert f"note: {name} off: CUDA error: no kernel image more of it; --strict" in out
    for file in ("metrics.jsonl", "samples.jsonl"):
        for a, b in zip(rows(tmp_path / "plain" / file), rows(tmp_path / "broken" / file),
                        strict=True):
            assert {k: v for k, v in a.items() if k != "step_time"} == {
                k: v for k, v in b.items() if k != "step_time"}


def test_strict_ends_a_run_with_one_line(tiny, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, "head", "off")
    monkeypatch.setattr("sys.argv", ["grpo.py", *tiny.flags, f"--out_dir={tmp_path}/a",
                                     "--strict=True", "--device=cpu"])
    with pytest.raises(SystemExit) as end:
        run_script(trainer.main)
    assert end.value.code == 2
    error, = capsys.readouterr().err.splitlines()
    assert error.startswith("error: head: differs from the plain path by ")


def test_processes_agree(monkeypatch):
    monkeypatch.setattr(prove, "rank_and_size", lambda: (0, 3))
    monkeypatch.setattr(prove, "all_gather", lambda rows: [*rows, "", "old card"])
    assert prove.first_trouble("") == "process 2: old card", "one process's trouble is all others'"


def test_an_old_card_beside_newer_ones_makes_all_compute_in_float32(monkeypatch, capsys):
    def with_another(rows):
        return [*rows, torch.float32] if isinstance(rows[0], torch.dtype) else rows

    monkeypatch.setattr(prove, "all_gather", with_another)
    cfg = settings(compile=(), dtype="bfloat16")
    nets = nets_of(cfg)
    prove.prove(nets, cfg)
    assert nets.dtype == torch.float32, "the processes try different paths and wait for ever"
    assert notes(capsys) == [
        "note: dtype is float32, as of a process whose GPU only emulates bfloat16"]


def test_strict_is_a_setting():
    assert load_settings(["--strict"]).strict is True and not Settings().strict
