"""The teacher's advantages by plain Python, and the gradient that they make, by enumeration."""
from dataclasses import replace

import pytest
import torch

import grpo
from data.weights import save_gpt
from extras.distill import of_teacher
from model import GPT, GPTConfig
from worlds import (
    WORD_PROMPTS, WORDS, plain_logps, refusal, setup_of, shaken, untimed_metrics, word_gpt, words)


@pytest.fixture
def teacher(tmp_path):
    """A policy near the student's, and its file."""
    model = shaken(word_gpt(), .05)
    save_gpt(tmp_path / "teacher.pt", model)
    return model, str(tmp_path / "teacher.pt")


def taught(path, coef=1.0, **knobs):
    cfg = words(**knobs)
    return replace(cfg, functions=cfg.functions | {"advantage": of_teacher(path, coef)})


def test_an_advantage_is_the_log_ratio_of_the_token(teacher):
    """coef * (log p(teacher) - log p(student)), as two public trainers have it, read row by row."""
    model, path = teacher
    cfg = taught(path, coef=.5)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    batch = grpo.collect(setup, WORD_PROMPTS, cfg, 1)
    theirs = plain_logps(model, batch.rollout)
    ours = plain_logps(setup.policy, batch.rollout)
    for row, (a, b) in enumerate(zip(theirs, ours)):
        found = batch.advantages[row]
        assert torch.allclose(found[:len(a)], .5 * (a - b), atol=1e-5)
        assert (found[len(a):] == 0).all(), "padding has an advantage"


def test_a_teacher_of_other_tokens_is_refused(tmp_path):
    other = GPT(GPTConfig(vocab_size=400, block_size=32, n_layer=1, n_head=1, n_embd=8))
    save_gpt(tmp_path / "other.pt", other)
    cfg = taught(str(tmp_path / "other.pt"))
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    found = refusal(grpo.collect, setup, WORD_PROMPTS, cfg, 1)
    assert "other.pt" in found and "400" in found


def test_a_run_is_a_teacher_and_its_student_goes_on_with_the_same_bits(tiny, run_grpo, tmp_path):
    more = [f"--policy={tiny.policy}", "--judge=None", "--eval_judge=None", "--save_interval=1"]
    letters = tmp_path / "letters.py"
    letters.write_text("def reward(prompts, completions):\n"
                       "    return [c.count('a') / max(1, len(c)) for c in completions]\n")
    run_grpo(tmp_path / "teacher", str(letters), *more, "--max_iters=2", "--learning_rate=1e-2")
    config = tmp_path / "student.py"
    config.write_text("from extras.distill import of_teacher\n"
                      f"advantage = of_teacher({str(tmp_path / 'teacher')!r})\n"
                      "def reward(prompts, completions):\n    return [0.0] * len(completions)\n")
    run_grpo(tmp_path / "whole", str(config), *more, "--max_iters=3")
    run_grpo(tmp_path / "parts", str(config), *more, "--max_iters=1")
    run_grpo(tmp_path / "parts", str(config), *more, "--max_iters=3", "--resume=True")
    assert untimed_metrics(tmp_path / "whole") == untimed_metrics(tmp_path / "parts")
