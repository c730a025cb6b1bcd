"""
Golden runs: small runs of every kind, to see whether a change left all digits as they were.

    python .ci/golden.py write DIR [NAME ...]           # runs them, and writes what they gave
    python .ci/golden.py compare DIR [NAME ...]         # runs them again, and says what differs
    python .ci/golden.py CHECKOUT CHECKOUT [NAME ...]   # both, of two working copies
    python .ci/golden.py list

With names, those runs whose name holds one of them. --of=CHECKOUT runs another working copy than
this one. Everything is done by commands that a user types, so files may move in between. Exit code
1: something differs. A number that only the second has is named at the end and is no difference.

A run gives rows: those of its logs without times, a row for each tensor of its last checkpoint,
and the numbers that a command prints that writes no log. A whole set takes some three minutes of
one core. Nothing of it belongs into the repository: another CPU has other digits.
"""
import hashlib
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LOGS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
TIMES = re.compile(r"time|seconds|tok/s|per_second")    # in names of what is no digit

# ------------------------------------------------------------------------------------------------
# the runs

PROMPTS = """I think you are
The article about the old city
You should not write
This is what
Please read the page on
Thank you for the
Who wrote this
It was never a good idea to
In the beginning of the year
My own view of
He said that
The source which is given here
"""
WORLD = """
policy = "data/policy.pt"
judge = eval_judge = None
prompts = eval_prompts = {here!r} + "/prompts.txt"
max_iters = num_eval_generations = 2
num_prompts = num_generations = num_eval_prompts = 4
max_completion_length = 8
save_interval = 1
log_micro = False
learning_rate = 3e-4
beta = 0.1

def reward(completions):
    return [text.count("e") / (1 + len(text)) for text in completions]
"""
# what a config file adds to it
CONFIGS = {
    "plain": "",
    "two": """
reward_funcs = ("reward", "short")
reward_weights = (1.0, 0.5)

def short(completions):
    return [None if not text else -len(text) / 40 for text in completions]
""",
    "rare": """
def reward(completions):
    return [float("th" in text) for text in completions]
""",
    "choose": """
def choose(rewards, n, random):
    order = random.sample(range(len(rewards)), len(rewards))
    return sorted(order, key=lambda i: len(rewards[i]))[:n]
""",
    "advantage": """
def advantage(batch, cfg):
    r = batch.rewards.view(-1, cfg.num_generations)
    return (r - (r.sum(1, keepdim=True) - r) / (cfg.num_generations - 1)).flatten()
""",
    "weigh": """
tracin = "reward"
tracin_select = "weigh"

def weigh(influence, self_influence):
    return (influence / (influence.std() + 1e-12)).sigmoid() * (self_influence > 0)
""",
    "target": """
import torch as _torch
tracin = "target"

def target(policy, tokenizer, batch):
    ids = _torch.tensor([tokenizer.encode_ordinary("Thank you for your help with it")])
    logps = policy.lm_head(policy(ids[:, :-1])).float().log_softmax(-1)
    return logps.gather(2, ids[:, 1:, None]).mean()
""",
    "optimizer": """
import torch as _torch

def optimizer(named_parameters, learning_rate):
    return _torch.optim.SGD([p for _, p in named_parameters], lr=100 * learning_rate, momentum=0.9)
""",
    "environment": """
stop_strings = (" ",)
max_turns = 2

def environment(prompts, transcripts):
    return [" well," if transcript.count("well") < 2 else None for transcript in transcripts]
""",
    "distill": """
from extras.distill import of_teacher

advantage = of_teacher({out!r} + "/teacher")
""",
    "calculator": """
from extras.environment.config.calculator import *

policy = "train"
prompts = eval_prompts = None
vocab_size, n_layer, n_embd, pretrain_tokens = 300, 1, 64, 60_000
max_iters = 2
max_completion_length = 30

def reward(completions, answer):
    return [text.count("1") / 9 + float(right in text) for text, right in zip(completions, answer)]
"""}

RUN = "python grpo.py {here}/plain.py --out_dir={out}/run"
# name: what is added to RUN
FLAGS = {
    "plain": "",
    "micro-batches": "--micro_batch_size=3 --decode_batch_size=8 --activation_checkpointing=True",
    "several passes": "--num_iterations=2 --mini_batch_size=8 --micro_batch_size=3",
    "schedule": "--warmup_iters=2 --lr_decay=cosine --weight_decay=0.1 --max_grad_norm=0.1",
    "sampling": "--temperature=0.8 --top_k=50 --top_p=0.9 --min_p=0.01 --eval_temperature=0.7",
    "truncated": "--mask_truncated_completions=True",
    "KL in the reward": "--kl_in=reward --kl_estimator=k1",
    "KL k1": "--kl_estimator=k1 --num_iterations=2",
    "KL k2": "--kl_estimator=k2 --num_iterations=2",
    "KL not corrected": "--use_bias_correction_kl=False --num_iterations=2",
    "sync": "--ref_model_sync_steps=1",
    "loss grpo": "--loss_type=grpo --num_iterations=2 --mini_batch_size=8",
    "loss bnpo": "--loss_type=bnpo --num_iterations=2 --mini_batch_size=8 --micro_batch_size=4",
    "loss dr_grpo": "--loss_type=dr_grpo --num_iterations=2 --mini_batch_size=8",
    "loss cispo": "--loss_type=cispo --epsilon_high=5.0 --num_iterations=2 --mini_batch_size=8",
    "loss sapo": "--loss_type=sapo --num_iterations=2 --mini_batch_size=8",
    "loss two-sided": "--delta=1.5 --epsilon_high=0.3 --num_iterations=2 --learning_rate=3e-3",
    "GSPO": "--importance_sampling_level=sequence --loss_type=grpo --num_iterations=2 "
            "--epsilon=0.003",
    "MaxRL": "--scale_rewards=mean",
    "std of the batch": "--scale_rewards=batch",
    "no std": "--scale_rewards=none",
    "entropy quantile": "--top_entropy_quantile=0.5 --num_iterations=2 --mini_batch_size=8",
    "entropy bonus": "--entropy_coef=0.01",
    "PPO": "--critic=True --num_iterations=2 --mini_batch_size=8 --value_clip=0.2",
    "PPO and influence": "--critic=True --tracin=self",
    "LoRA": "--lora_rank=4",
    "LoRA and influence": "--lora_rank=4 --tracin=reward --ref_model_sync_steps=1",
    "influence reward": "--tracin=reward",
    "influence advantage": "--tracin=advantage --num_iterations=2 --mini_batch_size=8",
    "influence contrastive": "--tracin=contrastive --tracin_normalizer=norm",
    "influence self": "--tracin=self --micro_batch_size=3",
    "influence leave-one-out": "--tracin=self --tracin_leave_one_out=True",
    "influence held-out": "--tracin=reward --tracin_val_prompts=4 --tracin_val_size=8 "
                          "--tracin_val_select=worst",
    "influence balanced": "--tracin=reward --tracin_val_prompts=4 --tracin_val_size=8 "
                          "--tracin_val_select=balanced",
    "influence average, Adam": "--tracin=reward --tracin_target_ema=0.9 --tracin_adam=True",
    **{f"influence select {rule}": f"--tracin=reward --tracin_select={rule}"
       for rule in ("drop", "top", "bottom", "random", "top_advantage", "top_reward", "all")}}
# name: the config file, and flags
OTHERS = {
    "two rewards": ("two", ""), "GDPO": ("two", "--multi_objective_aggregation=normalize_then_sum"),
    "dropped groups": ("rare", "--zero_std_groups=drop"),
    "resampling": ("rare", "--zero_std_groups=resample"),
    **{f"own {name}": (name, "")
       for name in ("choose", "advantage", "weigh", "target", "optimizer")},
    "environment": ("environment", "--max_completion_length=16"), "tools": ("calculator", "")}
LOOKED_AT = RUN + " --eval_interval=1 --keep_checkpoints=0"
# name: commands, one after another; what writes no log prints its digits
COMMANDS = {
    **{name: [f"{RUN} {flags}"] for name, flags in FLAGS.items()},
    **{name: [f"python grpo.py {{here}}/{config}.py --out_dir={{out}}/run {flags}"]
       for name, (config, flags) in OTHERS.items()},
    "toxicity": ["python grpo.py config/toxicity.py --max_iters=2 --num_prompts=4 "
                 "--num_generations=4 --num_eval_prompts=4 --num_eval_generations=2 "
                 "--log_micro=False --out_dir={out}/run"],
    "distill": [RUN.replace("{out}/run", "{out}/teacher"),
                "python grpo.py {here}/distill.py --out_dir={out}/run"],
    "killed and continued": ["KILL " + RUN + " --max_iters=3", RUN + " --max_iters=3"],
    "torchrun": ["torchrun --standalone --nproc_per_node=2 grpo.py {here}/plain.py "
                 "--out_dir={out}/run --tracin=reward"],
    "evaluate, sample": [
        RUN, "python evaluate.py {out}/run {here}/plain.py --num_eval_prompts=6",
        "python sample.py {out}/run {here}/plain.py --prompt='You are' --num=3 --before=True"],
    "account of the reward": [
        LOOKED_AT, "python tracin.py {out}/run {here}/plain.py --held_out=16"],
    "account of a sentence": [
        LOOKED_AT, "python tracin.py {out}/run {here}/plain.py --prompt='You are' "
        "--completion=' a good editor'"],
    "step taken apart": [
        RUN + " --max_iters=1",
        "python grpo.py {out}/run {here}/plain.py --debug_step=True --tracin=reward"]}
ALWAYS = ("--device=cpu", "--dtype=float32", "--threads=1")


# ------------------------------------------------------------------------------------------------
# running a command

def start(argv, checkout, log):
    """Start `python SCRIPT ...` in a fork of this process, which has read torch already, so that a
    run takes a second and not three -> its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        os.chdir(checkout)
        sys.path[0] = str(checkout)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(command, checkout, log):
    """Run a command as a user types it -> exit code. KILL before it: killed by SIGKILL once an
    iteration is saved."""
    kill = command.startswith("KILL ")
    words = shlex.split(command.removeprefix("KILL "))
    if words[0] == "torchrun":
        module = [sys.executable, "-m", "torch.distributed.run"]
        env = dict(os.environ, OMP_NUM_THREADS="1")
        return subprocess.run([*module, *words[1:]], cwd=checkout, stdout=log, stderr=log, env=env,
                              check=False).returncode
    pid = start(words[1:], checkout, log)
    if not kill:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    folder = Path(next(word for word in words if "out_dir" in word).partition("=")[2])
    while not (folder / "ckpt_000001.pt").exists():
        if os.waitpid(pid, os.WNOHANG)[0]:
            return 1        # it ended before it was to be killed
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 0


def with_flags(command, here, out):
    """A command with its folders; a training takes one thread and float32."""
    flags = ALWAYS if " grpo.py " in command else ()
    return " ".join((command.format(here=here, out=out), *flags))


# ------------------------------------------------------------------------------------------------
# what a run gave: {name of a row: {name: number or text}}

def flat(value, name=""):
    """Nested dicts and lists as one {"a.0.b": value}."""
    if not isinstance(value, (dict, list, tuple)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: x for key, part in items for k, x in flat(part, f"{name}.{key}".strip(".")).items()}


def log_rows(folder):
    for log in LOGS:
        path = folder / log
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for i, line in enumerate(lines):
            row = flat(json.loads(line))
            yield f"{log} row {i + 1}", {k: x for k, x in row.items() if not TIMES.search(k)}


def digest(x):
    """Of a tensor: whether it is the same, and three numbers that say by how much it is not."""
    x = x.detach().contiguous()
    same = hashlib.sha256(x.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    x = x.double().flatten()
    wave = torch.arange(len(x), dtype=torch.float64).mul(0.7).cos()
    return {"bits": same, "norm": float(x.norm()), "wave": float(x @ wave)}


def weight_rows(folder):
    """A row for each tensor of the last checkpoint, but the state of random generators."""
    paths = sorted(folder.glob("ckpt_*.pt"))
    if paths:
        content = torch.load(paths[-1], map_location="cpu", weights_only=True)
        content = {k: x for k, x in content.items() if k not in ("random", "settings")}
        for name, x in flat(content).items():
            if isinstance(x, torch.Tensor):
                yield f"{paths[-1].name} {name}", digest(x)


def numbers_of(text, folders):
    """{number: how often} of what a command printed, without times, memory and folders."""
    for folder in folders:
        text = text.replace(str(folder), "")
    text = re.sub(r"\b(time|mem|step)=\S+|\d+m\d\ds|[\d.]+ ?(s|ms|seconds|MB|GB|tok/s)\b", "", text)
    found = re.findall(r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+e[-+]?\d+", text)
    return {number: found.count(number) for number in found}


def rows_of(name, checkout, parent):
    """Do the commands of a run -> its rows. parent: a folder with the config files."""
    out = parent / "out"
    out.mkdir()
    rows = {}
    for i, command in enumerate(COMMANDS[name], 1):
        with open(parent / "log", "w+b") as log:
            code = run(with_flags(command, parent, out), checkout, log)
            log.seek(0)
            text = log.read().decode(errors="replace")
        rows[f"command {i}"] = {"exit code": code}
        if code:
            rows[f"command {i}"]["its last line"] = text.strip().rpartition("\n")[2]
        if " grpo.py " not in command or "debug_step" in command:
            rows[f"command {i} printed"] = numbers_of(text, (parent, checkout))
    rows |= log_rows(out / "run")
    rows |= weight_rows(out / "run")
    shutil.rmtree(out)
    return rows


def write(folder, checkout, names):
    """Do runs, and write a file of rows for each into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        parent = Path(parent)
        (parent / "prompts.txt").write_text(PROMPTS)
        cache = f"cache_dir = {str(parent / 'prepared')!r}\n"
        for name, config in CONFIGS.items():
            config = WORLD + config.replace("{out!r}", repr(str(parent / "out")))
            (parent / f"{name}.py").write_text(
                config.replace("{here!r}", repr(str(parent))) + cache)
        for name in names:
            rows = rows_of(name, checkout, parent)
            failed = [row for row in rows.values() if row.get("exit code")]
            (folder / f"{name}.json").write_text(json.dumps(rows, indent=0))
            failure = f", FAILED {failed}" if failed else ""
            print(f"ran  {name}: {len(rows)} rows{failure}", flush=True)


# ------------------------------------------------------------------------------------------------
# what differs

def gap(a, b):
    """How far two numbers are apart, beside the larger one. 0: equal; inf: not numbers."""
    if a == b:
        return 0.0
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) / max(abs(a), abs(b))
    return math.inf


def compare_rows(old, new):
    """Two rows -> ({name: gap} of what differs, names that the second has alone)."""
    gaps = {k: gap(x, new[k]) if k in new else math.inf for k, x in old.items()}
    return {k: x for k, x in gaps.items() if x}, [k for k in new if k not in old]


def in_words(gaps):
    """The largest gaps of a run's rows, by what they are of."""
    found = sorted(gaps.items(), key=lambda item: -item[1])
    words = [name if x == math.inf else f"{name} by {x:.1e}" for name, x in found[:4]]
    return ", ".join(words) + f" and {len(found) - 4} more" * (len(found) > 4)


def compare_run(name, old, new):
    """Print what differs in a run -> how many of its rows do, names that are new."""
    different, added = 0, set()
    kinds = {}      # {"metrics.jsonl": ([rows], {what: gap})}
    for row, values in old.items():
        gaps, more = compare_rows(values, new.get(row, {}))
        kind = row.partition(" row ")[0].partition(".pt ")[0]
        added |= {f"{kind}: {k}" for k in more if "printed" not in kind}
        added |= {f"{kind}: {len(more)} numbers" for k in more if "printed" in kind}
        if gaps or row not in new:
            different += 1
            found = kinds.setdefault(kind, ([], {}))
            found[0].append(row)
            label = row.partition(".pt ")[2]
            if label and len(gaps) > 1:     # how far the numbers are apart says more than the bits
                gaps.pop("bits", None)
            for k, x in gaps.items():
                k = label or k
                found[1][k] = max(x, found[1].get(k, 0.0))
    added |= {f"{row}" for row in new if row not in old}
    print(f"{'DIFF' if different else 'same'} {name}: {len(old)} rows")
    for kind, (rows, gaps) in kinds.items():
        print(f"     {kind}: {len(rows)} rows, the first is {rows[0]}: {in_words(gaps)}")
    return different, added


def compare(first, second, names):
    """Compare two folders that write() made -> whether all is the same."""
    num_rows = different = 0
    added = {}
    for name in names:
        old, new = (json.loads((folder / f"{name}.json").read_text()) for folder in (first, second))
        count, more = compare_run(name, old, new)
        num_rows += len(old)
        different += count
        for what in more:
            added.setdefault(what, []).append(name)
    for what, runs in sorted(added.items()):
        print(f"new  {what} ({len(runs)} runs)")
    print(f"{num_rows} rows of {len(names)} runs: {different} differ")
    return different == 0


# ------------------------------------------------------------------------------------------------
# commands

def chosen(words):
    names = [name for name in COMMANDS if not words or any(word in name for word in words)]
    if not names:
        sys.exit(f"no run has one of {words} in its name: python .ci/golden.py list")
    return names


def main(argv):
    torch.set_num_threads(1)    # a fork of a process with threads may wait for ever
    checkouts = [arg.partition("=")[2] for arg in argv if arg.startswith("--of=")]
    checkout = Path(checkouts[-1] if checkouts else ROOT).resolve()
    words = [arg for arg in argv if not arg.startswith("--of=")]
    if words == ["list"]:
        for name, commands in COMMANDS.items():
            print(f"{name}:", *commands, sep="\n    ")
        return
    if len(words) < 2:
        sys.exit(__doc__)
    what, folder, *words = words
    names = chosen(words)
    if what == "write":
        write(Path(folder), checkout, names)
        return
    with tempfile.TemporaryDirectory() as made:
        first = Path(folder)
        second = Path(made) / "second"
        if what != "compare":       # two working copies
            first = Path(made) / "first"
            write(first, Path(what).resolve(), names)
            checkout = Path(folder).resolve()
        missing = [name for name in names if not (first / f"{name}.json").exists()]
        for name in missing:
            print(f"there is no {name} in {first}: left out")
        names = [name for name in names if name not in missing]
        write(second, checkout, names)
        sys.exit(0 if compare(first, second, names) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
