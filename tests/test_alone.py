"""Files that can be copied out of the project: they run in a folder with nothing else of it."""
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

TAPE = """
import torch
import torch.nn as nn
from tracin import Tape, check_exact

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.Tanh(),
                      nn.RMSNorm(5), nn.Linear(5, 3, bias=False)).double()
x = torch.randint(7, (6, 4))
y = torch.randn(6, 4, 3).double()
weights = torch.randn(6).double()


def losses(rows):
    return (model(x[rows]) - y[rows]).square().sum((1, 2))


alone = []      # gradient of each row, one backward each
for i in range(6):
    gradient = torch.autograd.grad(losses([i]).sum(), list(model.parameters()))
    alone.append(torch.cat([g.flatten() for g in gradient]))
alone = torch.stack(alone)                                              # (6, weights)

with Tape(model, 6) as tape:
    for rows in torch.arange(6).split(4):
        tape.rows(rows)
        losses(rows).sum().backward()
G = tape.gradient(torch.ones(6))
target = torch.cat([g.flatten() for g in G.values()])
assert torch.allclose(target, alone.sum(0))
assert torch.allclose(tape.dot(G), alone @ target)
assert torch.allclose(tape.norms(torch.arange(6)), alone.square().sum(1))
some = torch.cat([g.flatten() for g in tape.gradient(weights).values()])
assert torch.allclose(some, weights @ alone)
check_exact(model, lambda rows: losses(rows).sum(), torch.arange(3))
"""

SAMPLE = """
import torch
from model import GPT, GPTConfig, add_lora
from sample import completion_logprobs, generate

torch.manual_seed(0)
shape = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)
llama = dict(rms=True, swiglu=True, rope_base=1e4, n_kv_head=1, tied=False, bias=False)
for more in ({}, llama):
    model = GPT(GPTConfig(50, **shape, **more))
    for truncation in ({}, dict(top_p=0.9)):
        rollout = generate(model, [[3, 1, 4], [5]], 4, 8, eos=49, seed=1, temperature=0.7,
                           **truncation)
        assert rollout.completion_mask.sum() > 30
        logp = completion_logprobs(model, rollout, 0.7)
        assert torch.allclose(logp, rollout.logp, atol=1e-5)
    add_lora(model, 2, 4.0)
    completion_logprobs(model, rollout).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
"""


@pytest.mark.parametrize("files, script", [
    (["tracin.py"], TAPE), (["model.py", "sample.py"], SAMPLE)], ids=["tape", "sample"])
def test_it_runs_without_the_project(files, script, tmp_path):
    for name in files:
        shutil.copy(os.path.join(ROOT, name), tmp_path)
    (tmp_path / "try_it.py").write_text(script)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "try_it.py"], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
