"""The default job needs none of the packages of requirements-hub.txt."""
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WITHOUT = """
import runpy, sys
for package in ("huggingface_hub", "safetensors", "gguf"):
    sys.modules[package] = None  # as if it were not installed
sys.argv = sys.argv[1:]
sys.path.insert(0, "")
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_without(*argv):
    """Run a module of the project where the three packages cannot be imported."""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", WITHOUT, *map(str, argv)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_policy_judges_and_training_from_scratch(tiny, tmp_path):
    done = run_without("grpo", *tiny.flags, f"--cache_dir={tmp_path}/made", "--max_iters=1",
                       "--pretrain_tokens=4000", "--judge_tokens=4000", f"--out_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    made = sorted(name.split("-")[0] for name in os.listdir(tmp_path / "made"))
    assert made == ["judge_a", "judge_b", "policy"] and (tmp_path / "run" / "ckpt.pt").exists()
    again = run_without("evaluate", tmp_path / "run")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("package, argv", [
    ("huggingface_hub", ["hub.fetch", "gpt2"]),
    ("huggingface_hub", ["grpo", "--policy=gpt2", "--device=cpu", "--out_dir=never"]),
    ("safetensors", ["export", "{policy}", "{tmp}/exported"]),
    ("gguf", ["hub.tokenizer", "{tmp}/x.gguf", "text"])])
def test_where_they_are_needed_one_line_says_what_to_install(package, argv, tiny, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    done = run_without(*(arg.format(policy=tiny.policy, tmp=tmp_path) for arg in argv))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert package in done.stderr and "pip install -r requirements-hub.txt" in done.stderr
    assert os.listdir(tmp_path) == ["x.gguf"]
