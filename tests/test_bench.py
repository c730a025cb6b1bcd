"""bench.py: what it counts against torch's own counter, what it times, and that it leaves everything as it was."""
import importlib.util
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
import grpo
import judge.scorer
from config import Settings
from model import BadInput

CPU, FLOAT = torch.device("cpu"), torch.float32
TINY = dict(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=64, num_prompts=4, num_generations=4, prompt_words=(3, 6),
            max_completion_length=8, micro_batch_size=8, judge_vocab_size=300, reward_weights=(1.0,), reward_funcs=("judge",))


@pytest.mark.parametrize("ends", [True, False])
def test_counted_flops_are_those_that_torch_counts(ends):
    """Without padding to the last one, since torch computes both halves of a causal square; else of real tokens only."""
    s = Settings(**TINY | dict(max_completion_length=16, beta=0.1, micro_batch_size=16))
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
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        b, target = bench.iteration(policy, policy, policy, optimizer, None, prompts, {"r": lambda p, c: list(range(len(c)))}, s,
                                    Words(), 1, FLOAT)
    found = bench.count(policy, b, None, s, FLOAT, [])
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
    s = Settings(**TINY)
    policy = bench.policy_of(s)
    b = bench.iteration(policy, policy, None, torch.optim.SGD(policy.parameters(), lr=0.0), None, [("", [1, 2, 3])],
                        {"r": lambda p, c: [1.0] * len(c)}, Settings(**TINY | dict(num_prompts=1)), Words(), 0, FLOAT)[0]
    weights = sum(p.numel() for name, p in policy.named_parameters() if p.dim() == 2 and name != "wpe.weight")
    cache = sum(2 * 2 * 64 * (3 + t) for n in b.mask.sum(1).tolist() for t in range(1, n))   # layers, k and v, channels
    assert bench.count(policy, b, None, s, FLOAT, [])["generate"][2] == 4 * (weights * int(b.mask.sum(1).max()) + cache)


@pytest.fixture
def run(capsys, comments, monkeypatch):
    """bench.main on few comments -> {first column: the others}, lines. The ceilings are given."""
    def table(*argv):
        flags = [f"--{k}={v if type(v) is str else repr(v)}" for k, v in TINY.items()]
        bench.main([*flags, f"--comments={comments}", "--device=cpu", *argv])
        lines = capsys.readouterr().out.splitlines()
        return {line[:17].strip(): line[17:].split() for line in lines}, lines

    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e13, 1e12))
    return table


@pytest.mark.parametrize("knobs, shown", [
    ([], set()), (["--beta=0.1"], {"reference"}), (["--tracin=self"], {"influence"}),
    (["--tracin=reward", "--beta=0.1", "--tracin_val_prompts=2", "--num_iterations=2", "--num_eval_prompts=2"],
     {"influence", "reference"})])
def test_the_table_names_the_phases_that_run_and_their_times_add_up(knobs, shown, run):
    before = grpo.generate, torch.Tensor.backward, torch.autograd.grad, judge.scorer.log_odds, torch.nn.utils.clip_grad_norm_
    found, lines = run("--repeat=1", *knobs)
    assert {"generate", "judge", "policy forward", "policy backward", "optimiser", "the rest", "all"} | shown == set(
        found) & {*bench.PHASES, "all"}
    seconds = {phase: float(found[phase][0]) for phase in found if phase in bench.PHASES}
    assert sum(seconds.values()) == pytest.approx(float(found["all"][0]), abs=0.005) and min(seconds.values()) >= 0
    assert all(float(found[phase][-1].rstrip("x")) > 0.5 for phase in seconds if phase != "the rest")  # x floor
    assert "peak memory" in lines[-1] and "padding" in lines[-1]
    assert before == (grpo.generate, torch.Tensor.backward, torch.autograd.grad, judge.scorer.log_odds,
                      torch.nn.utils.clip_grad_norm_)


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
    (["trl", "--case=none"], r"usage: python bench.py trl .*ends\|fixed"), (["--betta=1"], "did you mean 'beta'"),
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
