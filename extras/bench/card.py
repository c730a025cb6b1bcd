"""
Every part of the project on small shapes on this device, a line for each, with its error. What
fails is named, and the rest goes on.

A model is compared with float64 on the CPU, a float32 run with the same run on the CPU (without a
GPU, with itself). In bfloat16 a run may draw different tokens, so its error is the difference of
log-probs between trainer and sampler.
"""
import contextlib
import copy
import functools
import importlib
import io
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time

import torch

import grpo
from common.device import autocast, machine
from common.errors import shown
from common.files import ROOT, read_log
from common.guards import tolerance_of
from data.weights import save_gpt
from judge.scorer import Scorer, logits_of
from model import GPT, GPTConfig
from rollout import completion_logprobs, generate
from tape import Tape

FAMILIES = {
    "gpt2": {},
    "llama": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=2, tied=False, bias=False),
    "qwen3": dict(rope_base=1e4, rms=True, swiglu=True, n_kv_head=1, qk_norm=True, head_dim=16),
    "gpt-neo": dict(window=4, local_layers=(1,), attn_scale=1.0, qkv_bias=False, exact_gelu=True),
    "lora": {}}
RUNS = {    # {name: flags}
    "plain": "", "lora": "--lora_rank=4", "critic": "--critic=True",
    "entropy": "--entropy_coef=0.01", "truncated": "--top_k=20 --top_p=0.9",
    "mini-batches": "--mini_batch_size=8 --num_iterations=2", "influence": "--tracin=reward",
    "leave-one-out": "--tracin=self --tracin_leave_one_out=True",
    "adam": "--tracin=reward --tracin_adam=True",
    "held-out": "--tracin=reward --tracin_val_prompts=4 --tracin_val_size=8",
    "kl in reward": "--tracin=reward --kl_in=reward --kl_estimator=k1",
    "checkpointing": "--activation_checkpointing=True --tracin=reward",
    "moving reference": "--ref_model_sync_steps=1", "compile": "--compile=True"}
SETTINGS = (
    "--max_completion_length=12", "--num_prompts=4", "--num_generations=4", "--micro_batch_size=8",
    "--num_eval_prompts=4", "--num_eval_generations=2", "--eval_interval=0", "--max_iters=2",
    "--log_micro=False", "--beta=0.1", "--judge=None", "--eval_judge=None")
CONFIG = '''
reward_funcs = ("reward",)

def reward(prompts, completions):
    return [sum(map(ord, text)) % 101 / 101 for text in completions]
'''
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# ------------------------------------------------------------------------------------------------
# one model: sampling, log-probs, gradients, influence


def relative(x, expected):
    """|x - expected| / |expected|, in float64 on the CPU."""
    x = x.detach().double().cpu()
    return float((x - expected).norm() / expected.norm())


@torch.no_grad()
def shake(model):
    """Noise on every weight, so that rounding shows."""
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p)


def flat_gradient(loss, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(loss, trained, materialize_grads=True, retain_graph=True)
    return torch.cat([g.flatten() for g in parts])


def family(device, name, dtype, by_graph=False):
    """The largest error in a model's sampling, log-probs, gradient and influences -> (error,
    allowed)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, block_size=64, n_layer=2, n_head=4, n_embd=32, **FAMILIES[name]))
    if name == "lora":
        from extras.lora import add_lora
        add_lora(model, 2, 4.0)
    shake(model)
    exact = copy.deepcopy(model).double()
    model = model.to(device)
    sampler = generate
    if by_graph:
        from extras.graph import generate_by_graph
        sampler = generate_by_graph(model)
    with autocast(device, dtype):
        r = sampler(model, [[3, 1, 4], [5], [2, 1, 7, 7]], 4, 20, seed=0, eos=(9,))
        logp = completion_logprobs(model, r, 1.0)                               # (N, T)

    # in float64, a row at a time
    expected = completion_logprobs(exact, r.map(lambda x: x.cpu()), 1.0)
    rows = torch.stack([flat_gradient(row, exact) for row in expected.sum(1)])  # (N, weights)
    total = rows.sum(0)

    expected = expected.detach()
    gaps = torch.stack([(x.detach().double().cpu() - expected).abs() for x in (logp, r.logp)])
    gap = float(gaps.mean() if dtype == torch.bfloat16 else gaps.max())
    errors = [gap, relative(flat_gradient(logp.sum(), model), total)]
    with Tape(model, len(logp)) as tape:
        where = r.sampled_mask.nonzero()[:, 0]
        tape.next_rows(torch.arange(len(logp), device=device), {model.lm_head: where})
        with autocast(device, dtype):
            loss = completion_logprobs(model, r, 1.0).sum()
        loss.backward()
    ones = torch.ones(len(logp), device=device)
    errors.append(relative(tape.dot(tape.gradient(ones)), rows @ total))
    return max(errors), 2 * tolerance_of(dtype)


def judge(device, dtype):
    """The larger of two errors of logits near -5: their mean error, and the share of distinct
    values that rounding has merged."""
    torch.manual_seed(0)
    config = GPTConfig(300, block_size=32, n_layer=2, n_head=2, n_embd=32, causal=False)
    model = Scorer(config).eval().requires_grad_(False)
    model.score.bias.fill_(-5.0)
    rows = [[299, *torch.randint(299, (1 + i % 23,)).tolist()] for i in range(256)]
    exact = logits_of(copy.deepcopy(model).double(), rows, torch.device("cpu"))
    with autocast(device, dtype):
        logits = logits_of(model.to(device), rows, device)
    ties = 1 - len(logits.unique()) / len(exact.unique())
    return max(float((logits - exact).abs().mean()), ties), tolerance_of(dtype)


# ------------------------------------------------------------------------------------------------
# whole runs, in a temporary folder


def prepare_folder(folder):
    """Write the policy, prompts and config file of the runs."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(300, block_size=64, n_layer=2, n_head=2, n_embd=32))
    shake(model)
    save_gpt(f"{folder}/policy.pt", model)
    with open(f"{folder}/card.py", "w") as f:
        f.write(CONFIG)
    words = "the a my your this our warm quiet river garden song lamp".split()
    with open(f"{folder}/prompts.txt", "w") as f:
        f.writelines(f"{a} {b}\n" for a in words for b in words)


def quiet(main, argv):
    """Call a command -> its printed text."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(argv)
    return text.getvalue()


def argv_of(folder, name, device, dtype, flags):
    return [f"{folder}/card.py", *SETTINGS, f"--prompts={folder}/prompts.txt",
            f"--policy={folder}/policy.pt", f"--device={device}", f"--dtype={dtype}",
            f"--out_dir={folder}/{name}", *flags.split()]


def rows_of_run(folder, name, device, dtype, flags=""):
    """Make a run -> rows of its metrics. RuntimeError if a fast path was turned off."""
    shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
    out = quiet(grpo.main, argv_of(folder, name, device, dtype, flags))
    for line in out.splitlines():
        if line.startswith("note: ") and " off: " in line:
            raise RuntimeError(line)
    return read_log(f"{folder}/{name}/metrics.jsonl")


def gap_of(rows, others):
    """The largest relative difference of two runs' rewards, entropies and gradients."""
    return max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-3)
               for a, b in zip(rows, others, strict=True)
               for name in ("reward", "entropy", "grad_norm"))


def run(device, folder, name, dtype):
    rows = rows_of_run(folder, "run", device, dtype, RUNS[name])
    if dtype == "bfloat16":
        gap = max(row["sampling/sampling_logp_difference/mean"] for row in rows)
        return gap, tolerance_of(torch.bfloat16)
    plain = RUNS[name].replace("--compile=True", "")
    return gap_of(rows, rows_of_run(folder, "cpu", "cpu", dtype, plain)), 1e-2


def resume(device, folder):
    """Repeat a run's last iteration from a checkpoint -> (difference, allowed)."""
    flags = "--tracin=reward --save_interval=1 --max_iters=3"
    before = rows_of_run(folder, "resume", device, "auto", flags)
    os.remove(f"{folder}/resume/ckpt_000003.pt")
    quiet(grpo.main, argv_of(folder, "resume", device, "auto", flags))
    after = read_log(f"{folder}/resume/metrics.jsonl")
    return gap_of(before, after), 0.0 if device.type == "cpu" else 1.0


def look_at(folder, module, *flags):
    """A command that looks at the run `resume`."""
    quiet(importlib.import_module(module).main, [f"{folder}/resume", f"{folder}/card.py", *flags])
    return 0.0, 0.0


def torchrun(device, folder):
    """A run by torchrun with one process, beside the same run without."""
    rows = rows_of_run(folder, "alone", device, "float32")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1",
               f"{ROOT}/grpo.py", *argv_of(folder, "torchrun", device, "float32", "")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return gap_of(rows, read_log(f"{folder}/torchrun/metrics.jsonl")), 1e-2


# ------------------------------------------------------------------------------------------------
# all parts


def parts_of(device, folder):
    """{name: a function that returns (error, allowed)}."""
    part = functools.partial
    parts = {}
    for name, dtype in DTYPES.items():
        parts |= {f"model {kind}, {name}": part(family, device, kind, dtype) for kind in FAMILIES}
        parts |= {f"graph {kind}, {name}": part(family, device, kind, dtype, True)
                  for kind in FAMILIES}
        parts[f"judge, {name}"] = part(judge, device, dtype)
        parts |= {f"run {kind}, {name}": part(run, device, folder, kind, name) for kind in RUNS}
    return parts | {
        "resume": part(resume, device, folder),
        "evaluate.py": part(look_at, folder, "evaluate"),
        "sample.py": part(look_at, folder, "sample", "--prompt=the"),
        "tracin.py": part(look_at, folder, "extras.explain.__main__"),
        "torchrun, one process": part(torchrun, device, folder)}


def print_part(name, function):
    """Print a part's line -> whether it holds."""
    start = time.perf_counter()
    error = math.nan
    try:
        error, allowed = function()
        said = "ok" if error <= allowed else f"off by more than {allowed:g}"
    except (Exception, SystemExit) as e:
        said = f"failed: {shown(e, 200)}"
    print(f"{name:28} {error:8.1e}  {said}, {time.perf_counter() - start:.1f} s", flush=True)
    return said == "ok"


def print_card(device, part=""):
    """Print the parts whose names contain `part`. SystemExit names those that fail."""
    print(f"{machine(device, torch.float32)}; torch {torch.__version__}")
    threads = torch.get_num_threads()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        prepare_folder(folder)
        for name, function in parts_of(device, folder).items():
            if part in name:
                if not print_part(name, function):
                    failed.append(name)
                torch.set_num_threads(threads)
    if failed:
        raise SystemExit(f"failed on this machine: {', '.join(failed)}")
    print("failed on this machine: nothing")
