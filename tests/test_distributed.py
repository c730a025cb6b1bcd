"""Several processes give the numbers of one. Started by torchrun, this file is also the program that the processes run."""
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import grpo as trainer  # noqa: E402
import run.processes  # noqa: E402
from run.processes import gather, share
from run.script import hash_of, run_script
from run.files import load_file

CASES = {
    "judge": ("--beta=0.1", "--judge=train", "--reward_funcs=('judge', 'reward')", "--micro_batch_size=4"),
    "steps": ("--beta=0.1", "--scale_rewards=batch", "--num_iterations=2", "--mini_batch_size=8", "--micro_batch_size=4",
              "--sync_ref_model=True", "--ref_model_sync_steps=1"),
    "entropy": ("--top_entropy_quantile=0.5", "--top_k=20", "--zero_std_groups=drop", "--loss_type=grpo", "--temperature=0.7"),
    "self": ("--tracin=self", "--beta=0.1", "--max_completion_length=20", "--micro_batch_size=4"),
    "reward": ("--tracin=reward", "--tracin_leave_one_out=True", "--tracin_normalizer=kept", "--kl_in=reward",
               "--kl_estimator=k1", "--beta=0.1"),
    "held_out": ("--tracin=advantage", "--tracin_val_prompts=5", "--tracin_val_size=7", "--lora_rank=2", "--beta=0.1"),
    "mini": ("--tracin=contrastive", "--tracin_adam=True", "--mini_batch_size=4", "--micro_batch_size=4", "--num_iterations=2",
             "--learning_rate=0.003"),
    # of three processes one has no prompt, and in every step one has no row
    "few": ("--tracin=reward", "--num_prompts=2", "--num_generations=3", "--mini_batch_size=2", "--micro_batch_size=2",
            "--num_eval_prompts=2", "--tracin_select=all", "--beta=0.1", "--learning_rate=0.03",
            "--seed=2"),  # with seed 1 a draw falls 7e-8 beside the border of two tokens, where rounding decides
    "random": ("--tracin=contrastive", "--tracin_select=random", "--beta=0.1", "--micro_batch_size=4"),
}
UNEVEN = ("entropy", "held_out", "mini", "few")  # in three processes
LONG = ("--max_iters=6", "--save_interval=2", "--tracin=self", "--beta=0.1", "--learning_rate=1e-3")
RULE = """
import os, signal

def reward(prompts, completions):
    if os.path.exists(os.environ.get("DIE", "/none")) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(map(ord, text)) % 101 / 101 for text in completions]
"""


def descent(parameters, lr, betas, **more):
    """AdamW divides by the gradient's size, so a weight whose gradient is 0 but for rounding moves anywhere; this does not."""
    return torch.optim.SGD([dict(params=parameters, betas=betas, eps=.1)], lr=lr)


def run_all(runs):
    """Each of [(flags, whether by plain descent)] here, in what may be one of several processes; all must hold the same weights.
    The sampler is made to disagree with the trainer a little, more on later rows: the two are compared."""
    save, adamw, generate = trainer.save_run, torch.optim.AdamW, trainer.generate

    def disagree(*args, **more):
        rollout = generate(*args, **more)
        rollout.logp[:, 0] += 4e-5 * torch.arange(len(rollout.logp))
        return rollout

    def checked(out_dir, iteration, policy, *more):
        assert len(set(gather([hash_of(policy)]))) == 1
        save(out_dir, iteration, policy, *more)

    trainer.save_run, trainer.generate = checked, disagree
    try:
        for flags, plain in runs:
            torch.optim.AdamW = descent if plain else adamw
            trainer.main(flags)
    finally:
        trainer.save_run, torch.optim.AdamW, trainer.generate = save, adamw, generate


@pytest.fixture(scope="module")
def world(tiny, tmp_path_factory):
    """.flags(name, processes): of that run; .start(processes, runs): torchrun; .at(name, processes): the folder."""
    where = tmp_path_factory.mktemp("distributed")
    (where / "rule.py").write_text(RULE)

    def at(name, processes):
        return where / f"{name}-{processes}"

    def flags(name, processes, *more):
        return [str(where / "rule.py"), *tiny.flags, "--max_iters=2", "--eval_interval=2", "--learning_rate=0.3", "--judge=None",
                "--eval_judge=None", "--reward_funcs=('reward',)", "--log_micro=False", "--device=cpu",
                f"--out_dir={at(name, processes)}", *CASES.get(name, LONG), *more]

    def start(processes, runs):
        (where / f"{processes}.json").write_text(json.dumps(runs))
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1",
                   DIE=str(at("killed", processes) / "ckpt_prev.pt"))
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
                                 os.path.abspath(__file__), str(where / f"{processes}.json")],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)

    world = type("World", (), dict(at=staticmethod(at), flags=staticmethod(flags), start=staticmethod(start)))
    # the long run is begun by two processes, goes on in one and ends in three
    process = start(2, [(flags(name, 2), True) for name in CASES] + [(flags("long", 2, "--max_iters=2"), False),
                                                                       (flags("killed", 2, "--max_iters=99"), False)])
    run_all([(flags(name, 1), True) for name in CASES] + [(flags("long", 1), False)])
    world.two = *process.communicate(timeout=120), process.returncode
    os.rename(at("long", 2), at("long", 3))
    run_all([(flags("long", 3, "--max_iters=4", "--resume=True"), False)])
    process = start(3, [(flags(name, 3), True) for name in UNEVEN] + [(flags("long", 3, "--resume=True"), False),
                                                                       (flags("stopped", 3, "--max_iters=9999"), False)])
    log, deadline = at("stopped", 3) / "metrics.jsonl", time.time() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None and time.time() < deadline, process.communicate()[1]
        time.sleep(.05)
    process.send_signal(signal.SIGINT)
    world.three = *process.communicate(timeout=60), process.returncode
    return world


def worst(a, b, rows, tolerance=1e-6):
    """{(file, field): error} of the fields of two runs that differ by more than the tolerance times their scale."""
    out = {}
    for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        a_rows, b_rows = rows(a / name), rows(b / name)
        assert len(a_rows) == len(b_rows) and all(list(x) == list(y) for x, y in zip(a_rows, b_rows))
        for field in a_rows[0].keys() - {"step_time", "padding", "tracin/kept_gradients"}:  # those are of the micro-batches
            x, y = ([math.nan if row[field] is None else row[field] for row in found] for found in (a_rows, b_rows))
            if not all(isinstance(v, float) for v in x):
                if x != y:
                    out[name, field] = x, y
                continue
            x, y = torch.tensor([x, y], dtype=torch.float64)
            assert torch.equal(x.isnan(), y.isnan())
            influences = [f for f in a_rows[0] if f == "influence" or f.endswith("_ip")]
            influence = field in influences   # of any size; the rest is about 1 or a sum of such
            scale = max(abs(row[f]) for row in a_rows for f in influences) if influence else max(1, float(x.nan_to_num().abs().max()))
            error = float((x - y).nan_to_num().abs().max()) / scale
            if error > tolerance * (2 if influence else 1):  # an inner product over all weights
                out[name, field] = error
    return out


def weights(folder):
    return load_file(str(folder / "ckpt.pt"), "run")["policy"]


@pytest.mark.parametrize("name, processes", [(name, 2) for name in CASES] + [(name, 3) for name in UNEVEN])
def test_the_numbers_of_one_process(name, processes, world, rows, tiny):
    one, several = world.at(name, 1), world.at(name, processes)
    assert worst(one, several, rows) == {}
    start, p, q = load_file(tiny.policy, "policy")["model"], weights(one), weights(several)
    moved = [k for k in p if k not in start or not torch.equal(p[k], start[k])]
    assert len(moved) > 3 and all(float((p[k] - q[k]).abs().max()) <= 1e-6 * max(float(p[k].abs().max()), 1) for k in p)


def test_resumed_with_another_number_of_processes(world, rows):
    assert worst(world.at("long", 1), world.at("long", 3), rows, 1e-5) == {}


def test_number_0_alone_prints(world):
    assert world.two[0].count("\niter 1:") == len(CASES) + 2 and world.three[0].count("\niter 1:") == len(UNEVEN) + 1


def test_a_killed_process_ends_the_run_with_its_name(world):
    out, err, code = world.two
    assert code != 0 and re.search(r"rank 0 of 2 on \S+: stopped: another process is gone", err)
    named = err[err.index("Root Cause"):]
    assert re.search(r"host +: \S+", named) and "1 (local_rank: 1)" in named and "Signal 9 (SIGKILL)" in named
    assert load_file(str(world.at("killed", 2) / "ckpt.pt"), "run")["iteration"] == 2


def test_a_signal_to_torchrun_saves(world, rows):
    out, err, code = world.three
    iteration = len(rows(world.at("stopped", 3) / "metrics.jsonl"))
    assert code != 0 and f"saved after iteration {iteration};" in err and "rank 0 of 3" in err
    assert load_file(str(world.at("stopped", 3) / "ckpt.pt"), "run")["iteration"] == iteration


def test_shares_are_all_rows_in_order_and_even(monkeypatch):
    for n, group, processes in ((16, 4, 3), (7, 1, 3), (2, 1, 5), (0, 1, 2), (12, 4, 1)):
        rows, sizes = [], []
        for rank in range(processes):
            monkeypatch.setattr(run.processes, "world", lambda: (rank, processes))
            rows += range(n)[share(n, group)]
            sizes.append(len(range(n)[share(n, group)]))
        assert rows == list(range(n)) and all(size % group == 0 for size in sizes) and max(sizes) - min(sizes) <= group


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_script(lambda argv: run_all(json.load(open(argv[0]))))
