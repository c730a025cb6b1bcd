"""run/peak.py: the most memory that a run is said to take is what its tensors take."""
import pytest
import torch

import model
import run.size
from bench import inputs_from, own_nets, random_prompts, storages, word_tokenizer
from config import load_settings
from evaluate import evaluate
from grpo import collect, collect_target, update
from peak import Peak
from pretrain import new_policy
from run.peak import peak_bytes
from run.size import note_memory

SHAPE = ["--vocab_size=4096", "--n_layer=2", "--n_embd=96", "--n_head=3", "--block_size=32",
         "--num_prompts=4", "--num_generations=8", "--max_completion_length=12", "--beta=0.04",
         "--micro_batch_size=16", "--dtype=float32", "--device=cpu", "--num_eval_generations=2"]
ONE_PASS = "--tracin=reward --kl_in=reward --kl_estimator=k1"
PIECES = 2 ** 18    # logits at once: a third of a micro-batch


@pytest.fixture
def start(tmp_path):
    """start("--dtype=bfloat16", ...) -> cfg and nets of a policy of random weights."""
    path = tmp_path / "rule.py"
    path.write_text("def reward(prompts, completions):\n    return [len(set(c)) for c in "
                    "completions]\njudge = None\neval_judge = None\n")

    def start(*flags):
        cfg = load_settings([str(path), *SHAPE, *flags])
        torch.manual_seed(0)
        given = inputs_from(cfg, torch.device("cpu"), new_policy(cfg),
                            word_tokenizer(cfg.vocab_size), random_prompts(cfg, 12))
        given.eval_prompts = given.prompts[:4]
        return cfg, own_nets(cfg, given)

    return start


def measured(cfg, nets, iterations=2):
    """{phase: the most bytes alive} in an evaluation and iterations of grpo.train."""
    weights = [*nets.policy.parameters(), *nets.base.parameters()]
    with Peak() as peak:
        for p in weights:
            p.detach()      # is seen, and counts
        for it in range(iterations):
            batch = collect(nets, nets.prompts, cfg, it)
            target = collect_target(nets, it, cfg)
            update(nets, batch, target, cfg, it, first=it == 0)
        del batch, target
        evaluate(nets, nets.policy, cfg)
    return peak.most, sum(storages(weights).values())


@pytest.mark.parametrize("flags, logits", [
    ("", 2 ** 24), ("", PIECES), ("--dtype=bfloat16", 2 ** 24), ("--dtype=bfloat16", PIECES),
    ("--activation_checkpointing=True", PIECES), ("--lora_rank=4", PIECES),
    ("--tracin=self --tracin_memory=0", PIECES), ("--tracin=self", 2 ** 24),
    (ONE_PASS + " --tracin_memory=0.02", 2 ** 24),
    ("--tracin=reward --tracin_memory=0 --dtype=bfloat16", PIECES),
    ("--tracin=reward --lora_rank=4", 2 ** 24)])
def test_the_most_is_right_to_a_tenth(flags, logits, start, monkeypatch):
    monkeypatch.setattr(model, "LOGITS_AT_ONCE", logits)
    cfg, nets = start(*flags.split())
    most, weights = measured(cfg, nets)
    counted = weights + max(peak_bytes(nets, cfg).values())
    share = counted / max(most.values())
    assert 0.9 < share < 1.1, f"{counted} bytes are counted, {share:.2f} of what is alive: {most}"


def test_a_note_says_that_memory_may_not_suffice(start, monkeypatch, capsys):
    cfg, nets = start("--tracin=self")
    most = max(peak_bytes(nets, cfg).values())
    monkeypatch.setattr(run.size, "free_memory", lambda device: most)
    note_memory(nets, cfg)
    assert capsys.readouterr().out == "", "what fits is no news"
    monkeypatch.setattr(run.size, "free_memory", lambda device: most - 1)
    note_memory(nets, cfg)
    said = capsys.readouterr().out
    assert said.startswith("note: the update needs up to 0.0 GB"), said
    assert said.endswith("lower micro_batch_size or tracin_memory\n"), said


def test_a_run_begins_with_the_note(grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(run.size, "free_memory", lambda device: 2 ** 20)
    out = grpo(tmp_path / "run", "--max_iters=1")
    assert out.index("note: the update needs up to") < out.index("eval 0"), out


def test_the_counter_sees_what_is_kept_and_what_is_freed():
    x = torch.ones(1000, requires_grad=True)
    with Peak() as peak:
        x.detach()
        y = x.exp().exp()           # both are kept for the backward
        assert peak.total == 3 * 4000, "a tensor that autograd keeps is not counted"
        y.view(10, 100).T.sum().backward()
        del y
        assert peak.total == 2 * 4000, "the weight and its gradient are left"
    assert max(peak.most.values()) >= 4 * 4000, "nothing was alive at the peak"
