"""GSM8K's job, on a random Qwen and made-up questions: its numbers, and that it runs."""
import importlib
import json

import pytest

import grpo
from extras.hub.tests.published import make_chat
from worlds import printed, read_rows

job = importlib.import_module("extras.hub.config.gsm8k")


@pytest.mark.parametrize("text, number", [
    ("so 3 + 4 = 7\n#### 7", 7), ("#### 5\nno:\n#### 72 clips", 72), ("#### $1,000", 1000),
    (r"it is \boxed{1,000.50}", 1000.5), ("#### -3", -3), ("#### 12 500", 12500),
    ("#### 20%", 20), ("#### .5", .5), ("#### 18.", 18), ("the answer is 7", None),
    ("####", None), ("", None)])
def test_the_number_that_a_completion_answers(text, number):
    assert job._answer(text) == number


def test_rewards_by_rule():
    texts = ["#### 7", "7 eggs\n#### 7 \n", "#### 7\nI am sure", "7", "#### 8 #### 7"]
    assert job.right(texts, [" 7"] * 5) == [1, 1, 1, 0, 1]
    assert job.form(texts) == [1, 1, 0, 0, 0]
    texts = ["#### 1", "#### 7", "#### 1", "#### 2"]
    assert job.pass_at_k(["a", "a", "b", "b"], texts, ["7"] * 4) == [1, 1, 0, 0]


def test_it_runs_on_a_random_model_of_that_form(tmp_path, monkeypatch):
    """The chat template, held-out questions, and pass@1 and pass@k before and after."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1?", "answer": f"{i} plus 1.\n#### {i + 1}"} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(job.__file__, encoding="utf-8") as f:
        source = f.read()
    short = source.replace(job._SYSTEM, "Add.")      # the model has 64 positions
    (tmp_path / "short.py").write_text(short)
    model = make_chat(str(tmp_path / "model"))
    printed(grpo.main, [
        str(tmp_path / "short.py"), f"--policy={model}", f"--out_dir={tmp_path}/run",
        "--max_iters=1", "--num_prompts=2", "--num_generations=2", "--num_eval_prompts=2",
        "--threads=1",
        "--num_eval_generations=2", "--max_completion_length=8", "--device=cpu",
        "--dtype=float32", "--lora_rank=2"])
    evals = read_rows(tmp_path / "run" / "eval.jsonl")
    assert [row["iteration"] for row in evals] == [0, 1]
    assert all({"rewards/right", "rewards/form", "rewards/pass_at_k"} <= row.keys()
               for row in evals)
