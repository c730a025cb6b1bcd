"""
A card's page: every part of the project on small shapes on this device, each with its error, in one
block to paste into a report. If a part fails, the card names it and the others go on.

A part is compared with float64 on the CPU, a whole float32 run with the same run on the CPU
(without a GPU, with itself). In bfloat16 a run may draw different tokens, so its error is the
difference of log-probs between trainer and sampler.
"""
import contextlib
import copy
import functools
import importlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

import grpo
from common.device import autocast, pick_device, read_proc
from common.errors import shown
from common.files import ROOT, read_log
from common.guards import tolerance_of
from data.weights import save_gpt
from extras.bench.phases import device_name
from extras.graph import generate_by_graph
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
RUNS = {    # {name: (settings, folder of extras/ that they need)}
    "plain": ((), None),
    "lora": (("--lora_rank=4",), "lora"),
    "critic": (("--critic=True",), "critic"),
    "entropy": (("--entropy_coef=0.01",), None),
    "truncated": (("--top_k=20", "--top_p=0.9"), None),
    "mini-batches": (("--mini_batch_size=8", "--num_iterations=2"), None),
    "influence": (("--tracin=reward",), None),
    "leave-one-out": (("--tracin=self", "--tracin_leave_one_out=True"), None),
    "adam": (("--tracin=reward", "--tracin_adam=True"), None),
    "held-out": (("--tracin=reward", "--tracin_val_prompts=4", "--tracin_val_size=8",
                  "--tracin_target_ema=0.9"), None),
    "kl in reward": (("--tracin=reward", "--kl_in=reward", "--kl_estimator=k1"), None),
    "checkpointing": (("--activation_checkpointing=True", "--tracin=reward"), None),
    "moving reference": (("--ref_model_sync_steps=1",), None),
    "compile": (("--compile=True",), "compiled")}
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


class NotThere(Exception):
    """A part needs a folder of extras/ that was deleted."""


class Part(NamedTuple):
    name: str
    error: float | None     # None: the part has no number
    allowed: float
    said: str               # "ok", "not there", or why it failed
    seconds: float


@dataclass
class World:
    """Where the parts run."""
    device: torch.device
    folder: str     # a temporary one

    def path(self, name):
        return os.path.join(self.folder, name)


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


def needs(extra):
    if extra and not os.path.isdir(os.path.join(ROOT, "extras", extra)):
        raise NotThere(f"extras/{extra}")


def family(world, name, dtype, by_graph=False):
    """The largest error in a model's sampling, log-probs, gradient and influences -> (error,
    allowed)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, block_size=64, n_layer=2, n_head=4, n_embd=32, **FAMILIES[name]))
    if name == "lora":
        needs("lora")
        from extras.lora import add_lora
        add_lora(model, 2, 4.0)
    shake(model)
    exact = copy.deepcopy(model).double()
    model = model.to(world.device)
    with autocast(world.device, dtype):
        sampler = generate_by_graph(model) if by_graph else generate
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
        tape.rows(torch.arange(len(logp), device=world.device), {model.lm_head: where})
        with autocast(world.device, dtype):
            loss = completion_logprobs(model, r, 1.0).sum()
        loss.backward()
    ones = torch.ones(len(logp), device=world.device)
    errors.append(relative(tape.dot(tape.gradient(ones)), rows @ total))
    return max(errors), 2 * tolerance_of(dtype)


def judge(world, dtype):
    """The larger of two errors of logits near -5: their mean error, and the share of distinct
    values that rounding has merged."""
    torch.manual_seed(0)
    config = GPTConfig(300, block_size=32, n_layer=2, n_head=2, n_embd=32, causal=False)
    model = Scorer(config).eval().requires_grad_(False)
    model.score.bias.fill_(-5.0)
    rows = [[299, *torch.randint(299, (1 + i % 23,)).tolist()] for i in range(256)]
    exact = logits_of(copy.deepcopy(model).double(), rows, torch.device("cpu"))
    with autocast(world.device, dtype):
        logits = logits_of(model.to(world.device), rows, world.device)
    ties = 1 - len(logits.unique()) / len(exact.unique())
    return max(float((logits - exact).abs().mean()), ties), tolerance_of(dtype)


# ------------------------------------------------------------------------------------------------
# whole runs


def quiet(main, argv):
    """Call a command -> its printed text."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        main(argv)
    return text.getvalue()


def flags_of(world, out_dir, device, dtype, settings):
    return [world.path("card.py"), *SETTINGS, f"--prompts={world.path('prompts.txt')}",
            f"--policy={world.path('policy.pt')}", f"--device={device}", f"--dtype={dtype}",
            f"--out_dir={world.path(out_dir)}", *settings]


@contextlib.contextmanager
def graphs_alone(device):
    """Without a GPU: torch.compile makes its graphs, but no code, which takes minutes."""
    compile = torch.compile
    if device.type != "cuda":
        torch.compile = functools.partial(compile, backend="eager")
    try:
        yield
    finally:
        torch.compile = compile


def run_there(world, out_dir, device, dtype, settings):
    """Make a run -> rows of its metrics. RuntimeError if a fast path was turned off."""
    shutil.rmtree(world.path(out_dir), ignore_errors=True)
    flags = flags_of(world, out_dir, device, dtype, settings)
    with graphs_alone(torch.device(device)):
        out = quiet(grpo.main, flags)
    for line in out.splitlines():
        if line.startswith("note: ") and " off: " in line:
            raise RuntimeError(line)
    return read_log(os.path.join(world.path(out_dir), "metrics.jsonl"))


def gap_of(rows, others):
    """The largest relative difference of two runs' rewards, entropies and gradients."""
    return max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-3)
               for a, b in zip(rows, others, strict=True)
               for name in ("reward", "entropy", "grad_norm"))


def run(world, name, dtype):
    settings, extra = RUNS[name]
    needs(extra)
    out_dir = f"run-{name.replace(' ', '-')}"
    rows = run_there(world, out_dir, world.device, dtype, settings)
    if dtype == "bfloat16":
        gap = max(row["sampling/sampling_logp_difference/mean"] for row in rows)
        return gap, tolerance_of(torch.bfloat16)
    plain = [x for x in settings if x != "--compile=True"]
    others = run_there(world, f"{out_dir}-cpu", "cpu", dtype, plain)
    return gap_of(rows, others), 1e-2


def resume(world):
    """Repeat a run's last iteration from a checkpoint -> (difference, allowed)."""
    settings = ("--tracin=reward", "--save_interval=1", "--max_iters=3")
    before = run_there(world, "resume", world.device, "auto", settings)
    os.remove(os.path.join(world.path("resume"), "ckpt_000003.pt"))
    quiet(grpo.main, flags_of(world, "resume", world.device, "auto", settings))
    after = read_log(os.path.join(world.path("resume"), "metrics.jsonl"))
    return gap_of(before, after), 0.0 if world.device.type == "cpu" else 1.0


def looked_at(world, module, *more):
    """A command that looks at the run `resume`."""
    main = importlib.import_module(module).main
    quiet(main, [world.path("resume"), world.path("card.py"), *more])
    return None, 0.0


def torchrun(world):
    """A run by torchrun with one process, beside the same run without."""
    needs("torchrun")
    rows = run_there(world, "alone", world.device, "float32", ("--tracin=reward",))
    flags = flags_of(world, "torchrun", world.device, "float32", ("--tracin=reward",))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1",
               os.path.join(ROOT, "grpo.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    others = read_log(os.path.join(world.path("torchrun"), "metrics.jsonl"))
    return gap_of(rows, others), 1e-2


def names_of_the_device(world):
    """Every value of --device that should mean this device does."""
    for name in ("auto", str(world.device), world.device.type):
        if name != "auto" or torch.cuda.is_available() == (world.device.type == "cuda"):
            assert pick_device(name) == world.device, f"device = {name!r}"
    return None, 0.0


# ------------------------------------------------------------------------------------------------
# all parts


def all_parts():
    """All parts -> [(name, function of a World, its further arguments)]."""
    parts = [("names of the device", names_of_the_device, ())]
    for name, dtype in DTYPES.items():
        parts += [(f"model {kind}, {name}", family, (kind, dtype)) for kind in FAMILIES]
        parts += [(f"graph {kind}, {name}", family, (kind, dtype, True)) for kind in FAMILIES]
        parts += [(f"judge, {name}", judge, (dtype,))]
        parts += [(f"run {kind}, {name}", run, (kind, name)) for kind in RUNS]
    parts += [
        ("resume", resume, ()),
        ("evaluate.py", looked_at, ("evaluate",)),
        ("sample.py", looked_at, ("sample", "--prompt=the")),
        ("tracin.py", looked_at, ("extras.explain.__main__",)),
        ("tracin.py, a sentence", looked_at,
         ("extras.explain.__main__", "--prompt=the", "--completion= cat")),
        ("torchrun, one process", torchrun, ())]
    return parts


def tried(name, function, world, arguments):
    """Run a part and catch whatever it raises -> Part."""
    start = time.perf_counter()
    error = None
    allowed = 0.0
    try:
        error, allowed = function(world, *arguments)
        said = "ok" if error is None or error <= allowed else "off by more than is allowed"
    except NotThere as e:
        said = f"not there: {e}"
    except (Exception, SystemExit) as e:
        said = f"failed: {shown(e, 200)}"
    return Part(name, error, allowed, said, time.perf_counter() - start)


def prepared(folder, device):
    """Write the policy, prompts and config file of the runs -> World."""
    world = World(device, folder)
    torch.manual_seed(0)
    model = GPT(GPTConfig(300, block_size=64, n_layer=2, n_head=2, n_embd=32))
    shake(model)
    save_gpt(world.path("policy.pt"), model)
    with open(world.path("card.py"), "w") as f:
        f.write(CONFIG)
    words = "the a my your this our warm quiet river garden song lamp".split()
    with open(world.path("prompts.txt"), "w") as f:
        f.writelines(f"{a} {b}\n" for a in words for b in words)
    return world


def try_parts(device, names=""):
    """Run the parts whose names contain `names` -> [Part]. Print the name of each."""
    threads = torch.get_num_threads()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        world = prepared(folder, device)
        for name, function, arguments in all_parts():
            if names in name:
                print(f"card: {name}", file=sys.stderr, flush=True)
                parts.append(tried(name, function, world, arguments))
                torch.set_num_threads(threads)
    return parts


def driver():
    """Version of NVIDIA's driver, or ""."""
    words = read_proc("driver/nvidia/version").split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def about(device):
    """Lines that describe this machine."""
    lines = [f"device    {device_name(device)} ({device})"]
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        memory = p.total_memory / 2 ** 30
        lines.append(f"          capability {p.major}.{p.minor}, {memory:.0f} GB, driver "
                     f"{driver() or 'unknown'}")
        lines.append("errors    against float64 on the CPU; of runs, against the CPU")
    else:
        lines += ["errors    against float64; of runs, against the same run: this is no GPU",
                  "compile   graphs alone, no code is generated: this is no GPU"]
    git = subprocess.getoutput(f"git -C '{ROOT}' rev-parse --short HEAD").splitlines()[-1]
    lines += [f"software  torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
              f"{platform.python_version()}, commit {git}",
              f"          {platform.platform()}"]
    return lines


def print_card(device, parts, lines):
    """Print the card: machine, parts, tokens/s. End with exit code 1 if a part failed."""
    bad = [part.name for part in parts if part.said != "ok" and "not there" not in part.said]
    absent = [part.name for part in parts if "not there" in part.said]
    print("\n----- card: paste from here -----")
    print(*about(device), sep="\n")
    for part in parts:
        error = "" if part.error is None else f"{part.error:.1e}"
        print(f"{part.name:37}{error:>8}  {part.said}, {part.seconds:.1f} s")
    print(*lines, sep="\n")
    print("not there:", ", ".join(absent) or "nothing")
    print("failed:   ", ", ".join(bad) or "nothing")
    print("----- to here -----")
    if bad:
        raise SystemExit(f"failed on this machine: {', '.join(bad)}")
