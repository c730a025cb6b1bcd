"""The bench: an iteration is grpo's, variants take turns, parts that fail on a card are named, and
what is typed wrong is refused."""
import itertools
import json
import math
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import extras.bench.__main__ as bench
import grpo
import loss
from common.files import ROOT
from common.seeds import seed_for
from extras.bench import card, fits, ladder, phases
from rollout import completion_logprobs
from worlds import (
    SHAPES, assert_near, assert_refused, mean_token, printed, random_gpt, read_rows, settings,
    setup_of, skip_without)

CPU = torch.device("cpu")


@pytest.fixture
def quick(comments):
    """Flags of a job that takes a moment."""
    return [f"{ROOT}/config/quick_test.py", f"--comments={comments}", "--policy=train",
            "--n_layer=1", "--n_embd=16", "--n_head=2", "--num_prompts=2", "--num_generations=2",
            "--max_completion_length=4", "--device=cpu", "--repeat=1"]


def test_an_iteration_is_that_of_a_run():
    cfg = settings(beta=0.1)
    here = setup_of(cfg)
    there = setup_of(cfg)
    found = phases.timed_iteration(here, cfg, 3)
    batch = grpo.collect_iteration(there, 3, cfg)
    grpo.update(there, batch, None, cfg, seed_for(cfg.seed, "rows", 3))
    for a, b in zip(here.trained, there.trained):
        assert torch.equal(a, b)
    assert found.tokens == int(batch.rollout.sampled_mask.sum())


def test_variants_take_turns_and_the_first_round_does_not_count(monkeypatch):
    order = []

    def iteration(setup, cfg, it):
        order.append((setup, it))
        return phases.Timed({"sample": 1.0, "update": 99.0 if it == 0 else it - 1.0}, 10, 0.5)

    monkeypatch.setattr(phases, "timed_iteration", iteration)
    variants = {name: phases.Variant(name, None) for name in "ab"}
    rounds = phases.in_turns(variants, 3)
    assert order == [(setup, it) for it in range(4) for setup in "ab"]
    row = phases.row_of("a", rounds["a"])
    assert row["ms"] == {"sample": 1000, "update": 1000}
    assert [row[name] for name in ("all", "least", "most", "tokens_per_s", "gb")] == [
        2000, 1000, 3000, 5, .5]


def test_a_config_beside_a_variant(quick):
    text = printed(bench.main, [*quick, "vs", "--tracin=self"])
    plain, influence = json.loads(text.splitlines()[-1])["rows"]
    assert "influence" not in plain["ms"] and influence["ms"]["influence"] > 0
    assert text.count("float32") >= 2, "a variant says what it computes in"


# ------------------------------------------------------------------------------------------------
# by phase


def test_the_work_of_a_forward_is_what_torch_counts():
    cfg = settings(beta=0.1)
    setup = setup_of(cfg)
    rollout = grpo.collect(setup, setup.prompts[1:], cfg, seed=0).rollout       # without padding
    T = rollout.sampled_mask.shape[1]
    rollout.completion_mask[:] = rollout.sampled_mask[:] = True                 # and without ends
    counter = FlopCounterMode(display=False)
    with counter:
        completion_logprobs(setup.policy, rollout)
    found = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in found.items() if "mm" in str(op) and "bmm" not in str(op))
    width = rollout.tokens.shape[1] - 1
    c = setup.policy.config
    attention = 4 * c.n_layer * c.n_embd * len(rollout.ended) * width ** 2 / 2
    work = phases.work_of(setup, cfg, rollout)
    assert work["reference"] == (products + attention, "matrix")
    assert work["update"] == (3 * work["reference"][0], "matrix")

    # while sampling, all weights are read for each token of the batch, and all keys before it
    linear = sum(p.numel() for name, p in setup.policy.named_parameters()
                 if p.dim() == 2 and name != "wpe.weight")      # the head is the embedding
    P = rollout.tokens.shape[1] - T
    keys = len(rollout.ended) * sum(P + t for t in range(T))
    assert work["sample"] == (4 * (T * linear + keys * 2 * c.n_layer * c.n_embd), "bandwidth")


def test_a_share_of_the_peak_is_of_the_card_and_its_dtype(monkeypatch):
    cfg = settings(beta=0.1)
    setup = setup_of(cfg)
    timed = phases.timed_iteration(setup, cfg, 0)._replace(seconds={"sample": 2.0, "update": 4.0})
    monkeypatch.setattr(phases, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    row = phases.row_of("a", [timed], phases.Variant(setup, cfg))
    work = phases.work_of(setup, cfg, timed.rollout)
    assert row["of_peak"] == pytest.approx({
        "sample, bandwidth": work["sample"][0] / 2 / 3350e9,
        "update, matrix": work["update"][0] / 4 / 67e12}, 0.01)


# ------------------------------------------------------------------------------------------------
# the card


@pytest.mark.parametrize("name", [
    "graph llama, bfloat16", "judge, bfloat16", "run influence, float32"])
def test_a_part_works_here(name):
    if name.startswith("graph"):
        skip_without("graph")
    assert re.search(name + " .* ok, ", printed(card.print_card, CPU, name))


def test_a_run_is_resumed_and_looked_at(monkeypatch):
    skip_without("explain")
    names = ("resume", "evaluate.py", "tracin.py")
    parts_of = card.parts_of
    monkeypatch.setattr(card, "parts_of", lambda *world: {
        name: part for name, part in parts_of(*world).items() if name in names})
    _, *lines, _ = printed(card.print_card, CPU).splitlines()
    assert [line.split()[1:3] for line in lines] == [["0.0e+00", "ok,"]] * 3, lines


def test_what_fails_is_named_and_the_rest_goes_on(monkeypatch, capsys):
    def raises():
        raise RuntimeError("no kernel")

    def ends():
        raise SystemExit("stopped: NaN")

    parts = {"raises": raises, "ends": ends, "wrong": lambda: (0.5, 0.1),
             "nan": lambda: (math.nan, 0.1), "right": lambda: (0.05, 0.1)}
    monkeypatch.setattr(card, "parts_of", lambda *world: parts)
    with pytest.raises(SystemExit, match="raises, ends, wrong, nan$"):
        card.print_card(CPU)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "no kernel" in lines["raises"]
    assert "stopped: NaN" in lines["ends"]
    assert "ok" in lines["right"]


@pytest.mark.parametrize("name", ["model gpt2, float32", "run plain, float32"])
def test_wrong_numbers_are_found(name, monkeypatch):
    """Those of the device, which here is told from the CPU by its order."""
    calls = itertools.count()

    def off(model, *args):
        return completion_logprobs(model, *args) * (1.01 if next(calls) == 0 else 1)

    def off_entropy(*args):
        return [row | {"entropy": row["entropy"] * (1 + 0.1 * next(calls))}
                for row in read_rows(*args)]

    monkeypatch.setattr(card, "completion_logprobs", off)
    monkeypatch.setattr(card, "read_log", off_entropy)
    with pytest.raises(SystemExit, match=name):
        card.print_card(CPU, name)


def test_a_fast_path_that_is_turned_off_fails(monkeypatch, capsys):
    from run import precision
    monkeypatch.setattr(precision, "find_problem", lambda *_: "made up")
    with pytest.raises(SystemExit, match="run plain"):
        card.print_card(CPU, "run plain, bfloat16")
    assert "made up" in capsys.readouterr().out


def test_a_shape_that_would_be_ignored_is_refused(comments):
    """Numbers of the bundled policy would be taken for those of this shape."""
    argv = [f"{ROOT}/config/quick_test.py", f"--comments={comments}", "--n_embd=768",
            "--device=cpu"]
    assert_refused(["n_embd", "--policy=train"], bench.main, argv)


def test_what_is_typed_wrong_is_one_line(quick):
    assert_refused("--repeat", bench.main, ["--repeat=0"])
    assert_refused("tracing", bench.main, [*quick, "vs", "--tracing=self"])


# ------------------------------------------------------------------------------------------------
# what fits


def test_what_fits_is_near_what_a_card_measured():
    """An H100 took 8.4 GB, and 13.3 with influence: see docs/gpus.md."""
    gpt2 = fits.SHAPES["GPT-2 (124M)"]
    job = fits.Job(128, 10, 128, 64, 128)
    plain = fits.memory_of(gpt2, job)
    more = fits.memory_of(gpt2, job._replace(influence=True))
    assert 0.95 * 8.4 < fits.total(plain) < 1.1 * 8.4
    assert 13.3 < fits.total(more) < 1.25 * 13.3, "a count is on the safe side"


def test_the_micro_batch_to_set_is_the_largest_that_fits():
    job = fits.Job(96, 10, 128, 1, 96)
    shape = fits.SHAPES["Qwen2.5-0.5B"]
    for card in fits.CARDS:
        n = fits.largest_micro_batch(shape, job, card)
        gb = [1.1 * fits.total(fits.memory_of(shape, job._replace(micro_batch=size)))
              for size in (n, 2 * n)]
        assert gb[0] < card and (n == 96 or gb[1] >= card)
    assert fits.largest_micro_batch(shape, job, 2000) == 96, "all rows"
    assert fits.largest_micro_batch(shape, job, 2) == 0


def test_what_fits_for_a_run_is_of_its_policy(quick):
    policy = random_gpt(**SHAPES["llama"])
    P = sum(p.numel() for p in policy.parameters())
    expected = fits.Shape(P / 1e6, V=50, C=32, L=2, inner=128, kv=16, gated=3, half=False)
    assert fits.shape_of(policy) == expected
    assert fits.shape_of(policy.bfloat16().float()).half
    lines = printed(bench.main, ["fits", *quick]).splitlines()
    assert lines[-2:] == [f"{card} GB: micro_batch_size = 4" for card in fits.CARDS], "all rows"


def test_the_page_has_the_table_of_what_fits():
    with open(f"{ROOT}/docs/gpus.md", encoding="utf-8") as f:
        assert printed(fits.print_fits) in f.read(), "python -m extras.bench fits"


# ------------------------------------------------------------------------------------------------
# the ladder


def test_each_rung_adds_its_technique_and_changes_no_number(monkeypatch):
    """A row has what stands above it, and not what follows; all rows give the same log-probs."""
    cfg = settings(mean_token, beta=0.1, micro_batch_size=5)
    setup = setup_of(cfg, lr=0)
    techniques = {rung.name: rung.off(setup) for rung in ladder.rungs_for(setup, cfg)}
    assert "attention by formula" in techniques and "graph" not in techniques, "this is a CPU"
    found = []
    off = []

    def timed(setup, cfg, it):
        off.append([name for name, places in techniques.items()
                    if all(getattr(thing, what) is value for thing, what, value in places)])
        found.append(timed_iteration(setup, cfg, 0))
        return found[-1]

    timed_iteration = phases.timed_iteration
    monkeypatch.setattr(phases, "timed_iteration", timed)
    printed_lines = printed(ladder.print_ladder, setup, cfg, 1).splitlines()
    names = ["plain float32", *techniques]
    assert off == [names[i:] for i in range(1, len(names) + 1)] * 2
    exact = ["bfloat16" not in techniques or "bfloat16" in without for without in off]
    for is_exact, timed in zip(exact, found):
        if is_exact:        # bfloat16 rounds, and may draw another token
            assert (timed.rollout.tokens == found[0].rollout.tokens).all()
            assert_near(timed.rollout.logp, found[0].rollout.logp, 1e-5)
    rows = json.loads(printed_lines[-1])["rows"]
    assert [row["row"] for row in rows] == names
    for before, row, rung in zip(rows, rows[1:], ladder.rungs_for(setup, cfg)):
        gain = before["ms"][rung.phase] / row["ms"][rung.phase]
        assert row["gain"] == pytest.approx(gain, 0.01)
    assert loss.micro_batches is grpo.micro_batches is not ladder.unsorted, "it is left behind"


def test_every_rung_of_a_gpu_names_what_is_there():
    setup = setup_of(settings())
    for rung in ladder.RUNGS:
        for thing, what, _ in rung.off(setup):
            assert hasattr(thing, what), f"{rung.name}: {thing} has no {what}"
