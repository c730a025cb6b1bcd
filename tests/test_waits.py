"""How often a GPU is waited for, counted on a CPU: each number here is exact, and whoever asks the
device for one thing more sees the line.

Counted are reads of tensors that a GPU would hold, as in tests/waits.py, and copies to it from
ordinary memory. Not counted is what is on the CPU on a GPU's machine too (see DeviceWaits).
"""
import collections
import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import grpo as grpo_module
import model as model_module
import run.host
import run.loop
import run.metrics
import sample as sampling
from by_hand import random_gpt
from evaluate import AT_ONCE, evaluate, rows_at_once
from judge.scorer import load_scorer, log_odds
from run.checkpoint import contents_read, random_state
from run.decoder import Decoder
from run.host import bundles, copies_of, small_to_host, to_host
from run.script import hash_of
from sample import generate
from test_grpo import gpt, moved, nets_of, sample, settings
from waits import Waits, line_of_project

CPU = torch.device("cpu")
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


class DeviceWaits(Waits):
    """Waits, as if all were on a GPU but what the code itself leaves on the CPU: what is made
    without `device`, what .cpu() and to_host gave, and what is computed from these alone."""

    def __init__(self, patch):
        super().__init__()
        self.near = WeakTensorKeyDictionary()       # what is on the CPU
        for module in (run.host, run.metrics):
            patch.setattr(module, "to_host", self.to_host)

    def to_host(self, tensors):
        """run.host.to_host, which leaves what a CPU holds where it is."""
        if not all(x in self.near for x in tensors):
            self.lines[f"{line_of_project()}: to_host"] += 1
        return [self.marked(x.detach().clone()) for x in tensors]

    def marked(self, x):
        self.near[x] = True
        return x

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        near = all(x in self.near for x in given)
        if not given:
            near = kwargs.get("device") is None
        crosses = name == "to" and any(
            isinstance(x, torch.device) for x in (*args, *kwargs.values()))
        if near and not crosses:
            out = function(*args, **kwargs)
        else:
            out = super().__torch_function__(function, types, args, kwargs)
        if crosses and near:
            if not kwargs.get("non_blocking"):
                self.lines[f"{line_of_project()}: to the device"] += 1
            return out.clone()      # the same tensor is on both sides on a CPU
        if name == "cpu":
            return self.marked(out.clone())
        if near:
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self.near[x] = True
        return out


def told(lines):
    return "the device is waited for in other places: " + ", ".join(
        f"{count} at {line}" for line, count in sorted(lines.items()))


# ------------------------------------------------------------------------------------------------
# by part


@pytest.fixture
def parts(monkeypatch):
    """Counts by part of a run's iterations: .counts, .lines of each part."""
    waits = DeviceWaits(monkeypatch)
    found = SimpleNamespace(waits=waits, lines=collections.defaultdict(collections.Counter))

    def watch(owner, name, part):
        plain = getattr(owner, name)

        def counted(*args, **kwargs):
            before = waits.lines.copy()
            try:
                return plain(*args, **kwargs)
            finally:
                found.lines[part] += waits.lines - before

        monkeypatch.setattr(owner, name, counted)

    def train(*args, **kwargs):
        found.lines.clear()         # of what came before the loop
        return plain_train(*args, **kwargs)

    for owner, name, part in (
            (grpo_module, "score", "judge"), (grpo_module, "update", "update"),
            (run.loop.Run, "record", "log"), (run.loop, "save_checkpoint", "save")):
        watch(owner, name, part)
    plain_train = grpo_module.train
    monkeypatch.setattr(grpo_module, "train", train)
    return found


ITERATIONS = 2
EXPECTED = {    # in two iterations of 16 rows in micro-batches of 4, the last of which saves
    "judge": 1 * ITERATIONS,
    "update": (2 * 4 + 2) * ITERATIONS + 1,     # the ratio is checked once
    "log": 1 * ITERATIONS + 1,                  # the eval judge reads every other rollout
    "save": 1}


@pytest.mark.parametrize("flags", ([], ["--beta=0.1", "--loss_type=dapo"]))
def test_a_runs_iteration(flags, parts, grpo, tmp_path):
    with parts.waits:
        grpo(tmp_path / "run", f"--max_iters={ITERATIONS}", "--micro_batch_size=4",
             "--save_interval=10", "--eval_interval=10", "--device=cpu", *flags)
    for part, count in EXPECTED.items():
        lines = parts.lines[part]
        assert lines.total() == count, f"{part}: {lines.total()}, not {count}: {told(lines)}"


@pytest.mark.parametrize("knobs", [
    {}, dict(loss_type="sapo", beta=.1), dict(top_p=.9, num_iterations=2), dict(mini_batch_size=8),
    dict(fused=True), dict(fused=True, beta=.1, loss_type="cispo", epsilon_high=1.1)])
def test_update_waits_twice_a_micro_batch_and_twice_a_step(knobs, monkeypatch):
    """Before a forward, for the sizes and the tokens of its rows. In a step: for its number of
    tokens, then for its loss and the norm of its gradient, with which come the metrics. In the
    first step for the ratio. An epoch of mini-batches copies its order to the device. (Not seen
    here: the fused head's backward holds its gradient against what comes back.)"""
    knobs = dict(knobs)
    if knobs.pop("fused", False):
        monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 7 * 300)
    for micro in (8, 2):
        policy, cfg = gpt(), settings(micro_batch_size=micro, **knobs)
        batch = sample(policy, cfg, moved(policy))
        optimizer = torch.optim.AdamW(policy.parameters(), lr=.01, fused=True)
        nets = nets_of(policy, cfg, optimizer=optimizer)
        with DeviceWaits(monkeypatch) as waits:
            m = grpo_module.update(nets, batch, None, cfg, 3, first=True)
        per_pass = 2 * 16 // micro + bool(cfg.mini_batch_size)
        expected = per_pass * cfg.num_iterations + 2 * m["num_steps"] + 1
        assert waits.total == expected, (
            f"{waits.total}, not {expected}, at micro-batches of {micro} and {knobs}: "
            f"{told(waits.lines)}")


@pytest.mark.parametrize("batch_size", (256, 3))
def test_a_judge_is_waited_for_once(batch_size, monkeypatch):
    rows = [[1] * (1 + i % 5) for i in range(10)]
    waits = DeviceWaits(monkeypatch)

    def model(idx, attention_mask):
        assert idx not in waits.near and attention_mask not in waits.near
        return (idx * attention_mask).sum(1)

    with waits:
        scores = log_odds(model, rows, CPU, batch_size)
        assert scores in waits.near, "the scores are not on the CPU"
    assert scores.tolist() == [len(row) for row in rows], "scores stand in another order"
    assert waits.total == 1, told(waits.lines)


@pytest.mark.parametrize("prompts", ([[3, 1, 4], [5]], [[3, 1], [5, 9]]))
def test_sampling_knows_on_the_host_what_is_known_there(prompts, monkeypatch):
    """The prompts and the noise go to the device, the width of the rollout comes back."""
    monkeypatch.setattr(sampling, "CHECK_EVERY", {"cpu": 100})
    model, T = random_gpt(), 6
    decoder = Decoder(model, graphs=False)
    with DeviceWaits(monkeypatch) as waits:
        rollout = generate(model, prompts, 4, T, eos=49, seed=1, decode=decoder)
        by_token = T        # of draw, on a CPU alone
        assert waits.total == 3 + by_token, told(waits.lines)
        rollout.completions(eos=49)
    assert waits.total == 4 + by_token, told(waits.lines)


# ------------------------------------------------------------------------------------------------
# evaluation


def test_an_evaluation_samples_as_the_rollouts_do():
    """With the run's Decoder, to the same measures, and after a change of the weights with the new
    ones."""
    policy, cfg = gpt(), settings(num_eval_generations=100)
    nets = nets_of(policy, cfg)
    nets.reward_funcs = {}
    decoder = Decoder(policy, graphs=False)
    plain = functools.partial(generate, decode=sampling.decode)
    fast = functools.partial(generate, decode=decoder)
    for change in (0, .05):
        with torch.no_grad():
            for p in policy.parameters():
                p.mul_(1 + change)
        nets.generate = plain
        measures, texts = evaluate(nets, policy, cfg)
        nets.generate = fast
        found, found_texts = evaluate(nets, policy, cfg)
        assert decoder.buffers, "the evaluation went past the run's Decoder"
        assert found_texts == texts, "another way of decoding, other completions"
        assert found == pytest.approx(measures, rel=1e-5)
    assert len(decoder.buffers) <= 2, f"buffers of {len(decoder.buffers)} sizes are kept"


def test_on_a_gpu_as_many_completions_are_sampled_at_once_as_in_the_rollouts():
    cfg = settings(num_prompts=4, num_generations=8)
    gpu = torch.device("cuda")
    assert rows_at_once(cfg, gpu) == 32, "a Decoder would keep buffers of another size"
    assert rows_at_once(replace(cfg, decode_batch_size=16), gpu) == 16
    assert rows_at_once(cfg, CPU) == AT_ONCE, "tokens of evaluations on a CPU would change"


# ------------------------------------------------------------------------------------------------
# copies


def odd_tensors():
    torch.manual_seed(0)
    shapes = ((), (3,), (0,), (5, 7), (2, 1, 3))
    return [(torch.randn(shape) * 9).to(kind) for kind in KINDS for shape in shapes]


@pytest.mark.parametrize("packed", (1, 100, 2 ** 26))
def test_packed_copies_are_those_of_each_tensor(packed, monkeypatch):
    monkeypatch.setattr(run.host, "PACKED", packed)
    tensors = odd_tensors() + [torch.arange(12.).view(3, 4).T, torch.arange(6.)[::2]]
    pieces = list(bundles(tensors))
    together = [sum(x.nbytes for x in piece) for piece in pieces if len(piece) > 1]
    assert all(size <= packed for size in together), f"{max(together)} bytes were packed together"
    copies = [x for piece in pieces for x in copies_of(piece)]
    for x, y in zip(tensors, copies, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), f"another {x.dtype} of shape {x.shape}"
        assert packed == 1 or y.untyped_storage().nbytes() == y.nbytes, (
            "a copy drags the memory of others into a file")


def test_what_is_on_the_cpu_stays_as_it_is():
    model = random_gpt()
    state = model.state_dict()
    tensors = odd_tensors()
    assert all(x is y for x, y in zip(tensors, to_host(tensors), strict=True))
    assert small_to_host(state) is state, "a checkpoint of a CPU run would be copied"


@pytest.mark.parametrize("small", (0, 4096, 2 ** 20))
def test_a_states_small_tensors_cross_and_nothing_else_changes(small, monkeypatch):
    """On "meta", the one other device that every machine has; its tensors hold no numbers."""
    monkeypatch.setattr(run.host, "SMALL", small)
    monkeypatch.setattr(run.host, "copies_of", lambda piece: [torch.zeros(x.shape) for x in piece])
    model = random_gpt().to("meta")
    content = {"policy": model.state_dict(), "none": None, "groups": [{"lr": 1.}], "number": 3}
    before = copy.copy(content["policy"])
    found = small_to_host(content)
    assert list(found) == list(content) and found["groups"] is content["groups"]
    assert found["none"] is None and found["number"] == 3
    assert list(found["policy"]) == list(before)
    assert not small or found["policy"]._metadata == before._metadata
    for name, x in before.items():
        assert content["policy"][name] is x, "the run's own state was changed"
        where = found["policy"][name].device.type
        assert where == ("cpu" if x.nbytes <= small else "meta"), f"{name} is on {where}"


def test_a_judge_is_hashed_once(tiny):
    judge = load_scorer(tiny.judge)
    nets = SimpleNamespace(prompts=[], eval_prompts=[], val_prompts=[], judges={"judge": judge})
    right = hash_of(judge.model)
    assert contents_read(nets)["judge"] == right
    with torch.no_grad():
        for p in judge.model.parameters():
            p.zero_()
    assert contents_read(nets)["judge"] == right, "the weights are read again at every save"


def test_a_run_on_a_cpu_leaves_a_gpu_alone(monkeypatch):
    def touched(*args):
        raise AssertionError("a CUDA context was opened by a run on the CPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    assert random_state(CPU)["cuda"] == []
