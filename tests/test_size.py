"""run/size.py: what cannot fit is refused before it is allocated, and nothing that fits is."""
import pytest
import torch

import run.size
from config import load_settings
from conftest import TINY
from evaluate import open_run
from grpo import read_inputs
from pretrain import new_policy, pretrain, trainable
from run.script import BadInput
from run.size import check_size, rollout_bytes, weight_bytes
from sample import empty_rollout

CPU = torch.device("cpu")


@pytest.fixture
def tiny_settings(tmp_path):
    """tiny_settings("--top_k=5") -> Settings of a tiny policy, without judges."""
    path = tmp_path / "rule.py"
    path.write_text("def reward(prompts, completions):\n    return [1] * len(completions)\n"
                    "judge = None\neval_judge = None\n")
    return lambda *flags: load_settings([str(path), *TINY, *flags])


@pytest.mark.parametrize("flag", [
    "num_prompts=1000000000", "num_generations=1000000000", "n_embd=1000000", "n_layer=1000000000",
    "block_size=1000000000", "lora_rank=1000000000", "num_eval_generations=1000000000",
    "tracin_val_prompts=1000000000"])
def test_what_cannot_fit_is_refused_with_its_size(flag, tiny_settings, comments):
    cfg = tiny_settings(f"--{flag}", f"--comments={comments}")
    with pytest.raises(BadInput) as caught:
        read_inputs(cfg)
    message = str(caught.value)
    assert flag.replace("=", " = ") in message and "GB are free on cpu" in message, message


def test_what_pretraining_cannot_fit_is_refused(tiny_settings, monkeypatch):
    monkeypatch.setattr(run.size, "free_memory", lambda device: 2 ** 20)
    with pytest.raises(BadInput, match="vocab_size = 300, block_size = 32.*0.0 GB are free"):
        pretrain(tiny_settings(), "none.pt", [], [], 1, CPU, None)


@pytest.mark.parametrize("flags, truncates", [
    ((), False), (("--top_k=5",), True), (("--decode_batch_size=4",), False)])
def test_no_more_is_counted_than_is_allocated(flags, truncates, tiny_settings):
    cfg = tiny_settings("--num_prompts=50", *flags)
    N = 50 * cfg.num_generations
    T = cfg.max_completion_length
    policy = new_policy(cfg)
    prompt = torch.zeros(50, 1, dtype=torch.long)
    rollout = empty_rollout(prompt, prompt.bool(), 4, T, 0, 300 if truncates else None)
    tensors = [rollout.tokens, rollout.attention_mask, rollout.completion_mask, rollout.logp, rollout.entropy,
               torch.zeros(N, T), policy.new_cache(cfg.decode_batch_size or N, 1 + T)]
    if truncates:
        tensors.append(rollout.allowed)
    held = sum(x.nbytes for x in tensors)
    counted = rollout_bytes(cfg, policy, N, cfg.decode_batch_size, torch.float32, truncates)
    assert 0.9 * held < counted <= held, f"{counted} bytes are counted, {held} are allocated"


@pytest.mark.parametrize("rank", [0, 4])
def test_no_more_weights_are_counted_than_there_are(rank, tiny_settings):
    cfg = tiny_settings(f"--lora_rank={rank}")
    base = new_policy(cfg)
    policy = trainable(base, cfg)
    below = sum(p.nbytes for p in base.parameters())
    trained = sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    counted = weight_bytes(cfg, None, copies=4)
    assert 0.3 * (below + 4 * trained) < counted <= below + 4 * trained
    assert weight_bytes(cfg, base, copies=4) <= 4 * trained, "the base is there already"


def test_what_fits_exactly_is_not_refused(tiny_settings, monkeypatch):
    cfg = tiny_settings("--num_eval_generations=2")
    needed = weight_bytes(cfg, None, 3) + rollout_bytes(cfg, None, 16, 0, torch.float32, False)
    needed = max(needed, weight_bytes(cfg, None, 4))
    monkeypatch.setattr(run.size, "free_memory", lambda device: needed)
    check_size(cfg, None, 4, CPU, torch.float32)
    monkeypatch.setattr(run.size, "free_memory", lambda device: needed - 1)
    with pytest.raises(BadInput):
        check_size(cfg, None, 4, CPU, torch.float32)


def test_an_evaluation_that_cannot_fit_is_refused(grpo, tmp_path):
    grpo(tmp_path / "run", "--max_iters=1")
    with pytest.raises(BadInput, match="num_eval_generations = 1000000000.* GB are free"):
        open_run(str(tmp_path / "run"), ["--num_eval_generations=1000000000"])
