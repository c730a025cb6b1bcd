"""Several processes give the numbers of one. Started by torchrun, this file is also the program
that the processes run."""
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import grpo as trainer  # noqa: E402
import run.loop  # noqa: E402
import run.processes  # noqa: E402
from run.files import load_file  # noqa: E402
from run.processes import (  # noqa: E402
    all_gather, all_reduce, messages, rank0_first, rank_and_size, shard)
from run.script import hash_of, interrupts, run_script  # noqa: E402

CASES = {
    "judge": ("--beta=0.1", "--judge=train", "--reward_funcs=('judge', 'reward')",
              "--micro_batch_size=3"),
    "steps": ("--beta=0.1", "--scale_rewards=batch", "--num_iterations=2", "--mini_batch_size=8",
              "--micro_batch_size=4", "--sync_ref_model=True", "--ref_model_sync_steps=1"),
    "entropy": ("--top_entropy_quantile=0.5", "--top_k=20", "--zero_std_groups=drop",
                "--loss_type=grpo", "--temperature=0.7"),
    "self": ("--tracin=self", "--beta=0.1", "--max_completion_length=20", "--micro_batch_size=3"),
    "reward": ("--tracin=reward", "--tracin_leave_one_out=True", "--tracin_normalizer=kept",
               "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1"),
    "held_out": ("--tracin=advantage", "--tracin_val_prompts=5", "--tracin_val_size=7",
                 "--lora_rank=2", "--beta=0.1"),
    "mini": ("--tracin=contrastive", "--tracin_adam=True", "--mini_batch_size=4",
             "--micro_batch_size=4", "--num_iterations=2", "--learning_rate=0.003"),
    # of three processes one has no prompt, and in every step one has no row. With seed 1 a draw
    # falls 7e-8 beside the border of two tokens, where rounding decides
    "few": ("--tracin=reward", "--num_prompts=2", "--num_generations=3", "--mini_batch_size=2",
            "--micro_batch_size=2", "--num_eval_prompts=2", "--tracin_select=all", "--beta=0.1",
            "--learning_rate=0.03", "--seed=2"),
    "turns": ("--max_turns=2", "--stop_strings=('e', 'a', ' ')", "--force_rate=0.5",
              "--force_text= the", "--decode_batch_size=8", "--beta=0.1"),
    "critic": ("--critic=True", "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1",
               "--bootstrap_truncated_completions=True", "--num_iterations=2"),
    "average": ("--tracin=reward", "--tracin_target_ema=0.7", "--tracin_normalizer=norm",
                "--tracin_val_prompts=5", "--tracin_val_every=2", "--beta=0.1",
                "--num_iterations=2", "--mini_batch_size=8", "--micro_batch_size=4",
                "--learning_rate=0.03"),
    "random": ("--tracin=contrastive", "--tracin_select=random", "--beta=0.1",
               "--micro_batch_size=4"),
}
UNEVEN = ("entropy", "held_out", "mini", "few")  # in three processes
LONG = ("--max_iters=6", "--save_interval=2", "--tracin=self", "--beta=0.1", "--learning_rate=1e-3")
RULE = """
import os, signal

def reward(prompts, completions):
    if os.path.exists(os.environ.get("DIE", "/none")) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(map(ord, text)) % 101 / 101 for text in completions]

max_turns = 0   # but in the case that sets it

def environment(prompts, transcripts):
    return [None if len(text) % 4 == 0 else f" {len(text)}" for text in transcripts]
"""


def plain_descent(nets, cfg):
    """AdamW divides by the gradient's size, so a weight whose gradient is 0 but for rounding moves
    anywhere. This does not."""
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    group = dict(params=nets.trained, betas=betas, eps=.1)
    return torch.optim.SGD([group], lr=cfg.learning_rate)


def disagreeing(generate):
    """The sampler, made to disagree with the trainer a little, more on later rows."""
    def disagree(model, prompts, num_generations, *args, part, **more):
        rollout = generate(model, prompts, num_generations, *args, part=part, **more)
        if len(rollout.logp):
            first = part.start * num_generations
            rollout.logp[:, 0] += 4e-5 * (first + torch.arange(len(rollout.logp)))
        return rollout

    return disagree


def run_all(runs):
    """Each of [(flags, whether by plain descent)] here, in what may be one of several processes.
    All processes must hold the same weights. The sampler disagrees with the trainer, since the two
    are compared."""
    prepare, save = trainer.prepare, run.loop.save_checkpoint

    def prepared(cfg, *more):
        nets = prepare(cfg, *more)
        nets.generate = disagreeing(nets.generate)
        if plain:
            nets.optimizer = plain_descent(nets, cfg)
        return nets

    def checked(folder, nets, *more):
        assert len(set(all_gather([hash_of(nets.policy)]))) == 1, "processes hold different weights"
        save(folder, nets, *more)

    trainer.prepare, run.loop.save_checkpoint = prepared, checked
    try:
        for flags, plain in runs:
            trainer.main(flags)
    finally:
        trainer.prepare, run.loop.save_checkpoint = prepare, save


def parts_of(rank):
    """Tensors to sum, some alike, some with more numbers than a message of seven."""
    return [torch.tensor([1., 2, 3]) * rank, torch.ones(2, 4).t()[:2] * rank,
            torch.tensor(1e-12, dtype=torch.float64) + rank, torch.ones(8) + rank, torch.ones(0),
            torch.full((2, 2), rank), torch.tensor([[3. + rank]])]


def wait_and_die(folder):
    """Rank 0 prepares for longer than the others wait for anything else, then the sums of parts_of
    are written, then rank 0 dies while it prepares again."""
    rank, _ = rank_and_size()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    with interrupts(), rank0_first():
        time.sleep(0 if rank else 2)
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=1))
    run.processes.MESSAGE = 7
    sums = parts_of(rank)
    all_reduce(sums)
    torch.save(sums, os.path.join(folder, f"sums-{rank}.pt"))
    with interrupts(), rank0_first():
        os.kill(os.getpid(), signal.SIGKILL)


def program(argv):
    """What the processes run: the runs of a .json file, or wait_and_die in a folder."""
    if os.path.isdir(argv[0]):
        return wait_and_die(argv[0])
    run_all(json.load(open(argv[0])))


def torchrun(processes, argument, **environment):
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", **environment)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={processes}", os.path.abspath(__file__), str(argument)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=env, cwd=ROOT)


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """.at(name, processes): folder of that run. .two, .three: stdout, stderr and exit code of
    torchrun with two and with three processes."""
    where = tmp_path_factory.mktemp("distributed")
    (where / "rule.py").write_text(RULE)

    def at(name, processes):
        return where / f"{name}-{processes}"

    def flags(name, processes, *more):
        return [
            str(where / "rule.py"), *tiny.flags, "--max_iters=2", "--eval_interval=2",
            "--learning_rate=0.3", "--judge=None", "--eval_judge=None",
            "--reward_funcs=('reward',)", "--log_micro=False", "--device=cpu",
            f"--out_dir={at(name, processes)}",
            *CASES.get(name, LONG), *more]

    def start(processes, runs):
        (where / f"{processes}.json").write_text(json.dumps(runs))
        return torchrun(processes, where / f"{processes}.json",
                        DIE=str(at("killed", processes) / "ckpt_prev.pt"))

    # the long run is begun by two processes, goes on in one and ends in three
    process = start(2, [*((flags(name, 2), True) for name in CASES),
                        (flags("long", 2, "--max_iters=2"), False),
                        (flags("killed", 2, "--max_iters=99"), False)])
    run_all([*((flags(name, 1), True) for name in CASES), (flags("long", 1), False)])
    two = *process.communicate(timeout=120), process.returncode
    os.rename(at("long", 2), at("long", 3))
    run_all([(flags("long", 3, "--max_iters=4", "--resume=True"), False)])
    process = start(3, [*((flags(name, 3), True) for name in UNEVEN),
                        (flags("long", 3, "--resume=True"), False),
                        (flags("stopped", 3, "--max_iters=9999"), False)])
    log, deadline = at("stopped", 3) / "metrics.jsonl", time.time() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None and time.time() < deadline, process.communicate()[1]
        time.sleep(.05)
    process.send_signal(signal.SIGINT)
    three = *process.communicate(timeout=60), process.returncode
    return SimpleNamespace(at=at, two=two, three=three)


def worst(a, b, rows, tolerance=1e-6):
    """{(file, field): error} of the fields of two runs that differ by more than the tolerance times
    their scale."""
    out = {}
    apart = {"step_time", "padding", "tracin/kept_gradients"}   # those are of the micro-batches
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        a_rows, b_rows = (list(map(flattened, rows(path / name))) for path in (a, b))
        assert len(a_rows) == len(b_rows)
        assert all(list(x) == list(y) for x, y in zip(a_rows, b_rows))
        influences = [f for f in a_rows[0] if f == "influence" or f.endswith("_ip")]
        for field in a_rows[0].keys() - apart:
            x, y = ([math.nan if row[field] is None else row[field] for row in found]
                    for found in (a_rows, b_rows))
            if not all(isinstance(v, float) for v in x):
                if x != y:
                    out[name, field] = x, y
                continue
            x, y = torch.tensor([x, y], dtype=torch.float64)
            assert torch.equal(x.isnan(), y.isnan())
            if field in influences:   # of any size, inner products over all weights
                scale = 2 * max(abs(row[f]) for row in a_rows for f in influences)
            elif field == "advantage":      # a reward over the spread of its group
                scale = max(abs(row["reward"] or 0) for row in a_rows) / least_spread(a_rows)
            else:                     # about 1 or a sum of such
                scale = max(1, float(x.nan_to_num().abs().max()))
            error = float((x - y).nan_to_num().abs().max()) / scale
            if error > tolerance:
                out[name, field] = error
    return out


def flattened(row):
    """A row with its scores side by side with the rest."""
    scores = row.pop("scores", {})
    return row | {f"scores/{name}": float(score) for name, score in scores.items()}


def least_spread(rows):
    """The smallest standard deviation of rewards in a group, of those that have one."""
    groups = {}
    for row in rows:
        if row["reward"] is not None:
            groups.setdefault((row["iteration"], row["prompt"]), []).append(row["reward"])
    spreads = [statistics.stdev(group) for group in groups.values() if len(group) > 1]
    return min(s for s in spreads if s > 0)


def weights(folder):
    return load_file(str(folder / "ckpt.pt"), "run")["policy"]


@pytest.mark.parametrize("name, processes", [
    *((name, 2) for name in CASES), *((name, 3) for name in UNEVEN)])
def test_the_numbers_of_one_process(name, processes, world, rows, tiny):
    one, several = world.at(name, 1), world.at(name, processes)
    assert worst(one, several, rows) == {}
    start = load_file(tiny.policy, "policy")["model"]
    p, q = weights(one), weights(several)
    moved = [k for k in p if k not in start or not torch.equal(p[k], start[k])]
    assert len(moved) > 3
    for k in p:
        scale = max(float(p[k].abs().max()), 1)
        assert float((p[k] - q[k]).abs().max()) <= 1e-6 * scale, k


def test_resumed_with_another_number_of_processes(world, rows):
    assert worst(world.at("long", 1), world.at("long", 3), rows, 1e-5) == {}


def test_number_0_alone_prints(world):
    assert world.two[0].count("\niter 1/") == len(CASES) + 2
    assert world.three[0].count("\niter 1/") == len(UNEVEN) + 1


def test_a_killed_process_ends_the_run_with_its_name(world):
    out, err, code = world.two
    said = r"rank 0 of 2 on \S+: stopped: another process is gone"
    assert code != 0 and re.search(said, err)
    named = err[err.index("Root Cause"):]
    assert re.search(r"host +: \S+", named)
    assert "1 (local_rank: 1)" in named and "Signal 9 (SIGKILL)" in named
    assert load_file(str(world.at("killed", 2) / "ckpt.pt"), "run")["iteration"] == 2


def test_a_signal_to_torchrun_saves(world, rows):
    out, err, code = world.three
    iteration = len(rows(world.at("stopped", 3) / "metrics.jsonl"))
    assert code != 0 and f"saved after iteration {iteration};" in err and "rank 0 of 3" in err
    saved = load_file(str(world.at("stopped", 3) / "ckpt.pt"), "run")
    assert saved["iteration"] == iteration
    assert "gloo" not in err, "threads of gloo outlive the group, and may abort Python at its end"


def test_rank_0_may_prepare_for_long_and_its_death_is_noticed(tmp_path):
    process = torchrun(2, tmp_path)
    err = process.communicate(timeout=60)[1]
    assert "Timed out" not in err, "the others waited for rank 0 only as long as for anything else"
    for rank in (0, 1):
        sums = torch.load(tmp_path / f"sums-{rank}.pt")
        for x, *own in zip(sums, parts_of(0), parts_of(1), strict=True):
            assert torch.equal(x, sum(own)) and x.dtype == own[0].dtype, "sums that share a message"
    said = re.findall(r"^rank 1 of 2 on \S+: stopped: another process is gone.*", err, re.M)
    assert len(said) == 1 and err.count("Traceback") == 1, err      # the one is torchrun's own
    assert "0 (local_rank: 0)" in err[err.index("Root Cause"):]


def test_small_tensors_share_a_message(monkeypatch):
    monkeypatch.setattr(run.processes, "MESSAGE", 7)
    parts = parts_of(1)
    found = messages(parts)
    assert [x for message in found for x in message] == parts
    assert [[x.numel() for x in message] for message in found] == [[3, 4], [1], [8], [0], [4], [1]]


def test_shares_are_all_rows_in_order_and_even(monkeypatch):
    for n, group, processes in ((16, 4, 3), (7, 1, 3), (2, 1, 5), (0, 1, 2), (12, 4, 1)):
        rows, sizes = [], []
        for rank in range(processes):
            monkeypatch.setattr(run.processes, "rank_and_size", lambda: (rank, processes))
            rows += range(n)[shard(n, group)]
            sizes.append(len(range(n)[shard(n, group)]))
        assert rows == list(range(n)) and all(size % group == 0 for size in sizes)
        assert max(sizes) - min(sizes) <= group


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        run_script(program)
    finally:
        for comm in Path("/proc/self/task").glob("*/comm"):
            if "gloo" in comm.read_text():
                print("still there:", comm.read_text(), file=sys.stderr)
