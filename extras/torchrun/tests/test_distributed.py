"""Several processes compute what one does: with every setting that has a share in it, gone on with
in another number of them, killed, signalled. torchrun starts this file, see `program`."""
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = str(Path(__file__).parents[3])
sys.path[:0] = [ROOT, f"{ROOT}/tests"]

import grpo  # noqa: E402
import rollout  # noqa: E402
import run.saver  # noqa: E402
import tracin  # noqa: E402
from common.files import load_file  # noqa: E402
from common.processes import all_gather  # noqa: E402
from common.cli import run_script  # noqa: E402
from common.seeds import hash_of  # noqa: E402
from run.checkpoint import newest_checkpoint  # noqa: E402
from worlds import assert_near, read_rows, settled  # noqa: E402

CASES = {
    "judge": ("--beta=0.1", "--judge=tests/tiny/judge.pt", "--reward_funcs=('judge', 'reward')",
              "--micro_batch_size=3", "--top_entropy_quantile=0.5", "--top_k=20",
              "--zero_std_groups=drop", "--loss_type=grpo", "--temperature=0.7"),
    "resample": ("--zero_std_groups=resample", "--max_resamples=4"),
    "reward": ("--tracin=reward", "--tracin_leave_one_out=True", "--tracin_normalizer=norm",
               "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1"),
    "held_out": ("--tracin=advantage", "--tracin_val_prompts=5", "--tracin_val_size=7",
                 "--tracin_target_ema=0.7", "--lora_rank=2", "--beta=0.1"),
    "mini": ("--tracin=contrastive", "--tracin_adam=True", "--mini_batch_size=4",
             "--micro_batch_size=4", "--num_iterations=2", "--learning_rate=0.003"),
    # of three processes one has no prompt, and in every step one has no row
    "few": ("--tracin=reward", "--num_prompts=2", "--num_generations=3", "--mini_batch_size=2",
            "--micro_batch_size=2", "--num_eval_prompts=2", "--tracin_select=all", "--beta=0.1",
            "--learning_rate=0.03"),
    "turns": ("--max_turns=2", "--stop_strings=('e', 'a', ' ')", "--decode_batch_size=8",
              "--beta=0.1"),
    "critic": ("--critic=True", "--kl_in=reward", "--kl_estimator=k1", "--beta=0.1",
               "--num_iterations=2")}
NEEDS = {"turns": "environment", "critic": "critic", "held_out": "lora"}    # folders of extras/
HERE = [name for name in CASES if os.path.isdir(f"{ROOT}/extras/{NEEDS.get(name, '')}")]
IN_TWO = [name for name in HERE if name != "few"]
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

COARSE = """
def reward(prompts, completions):
    return [0.5 if len(prompt) % 2 else sum(map(ord, text)) % 101 / 101
            for prompt, text in zip(prompts, completions)]
"""


def without_rounding(influence_scores):
    """tracin.influence_scores, but an influence that is 0 but for rounding, as that of a rollout
    whose advantage is, is 0: its sign decides whether it is learned from."""
    def scores_without_rounding(*args):
        scores = influence_scores(*args)
        size = scores.influence.abs()
        is_known = size > 1e-6 * size.max()
        return scores._replace(influence=scores.influence.where(is_known, torch.zeros(())))

    return scores_without_rounding


def run_all(runs, tokens):
    """Each of [(flags, whether by plain descent)] here, in what may be one of several processes.
    AdamW divides by the gradient's size, so a weight whose gradient is 0 but for rounding moves
    anywhere; plain descent does not. All processes must hold the same weights. tokens: see settled.
    """
    prepare = grpo.prepare
    save = run.saver.save_checkpoint
    draw = rollout.draw
    influence_scores = tracin.influence_scores

    def prepared(cfg, *more):
        setup = prepare(cfg, *more)
        if plain:
            betas = (cfg.adam_beta1, cfg.adam_beta2)
            group = dict(params=setup.trained, betas=betas, eps=.1)
            # AdamW's scale is asked for by its moments alone; with this eps it hardly divides
            by_scale = cfg.tracin_adam
            optimizer = torch.optim.AdamW if by_scale else torch.optim.SGD
            setup.optimizer = optimizer([group], lr=cfg.learning_rate, weight_decay=0.0)
        return setup

    def checked(folder, setup, *more):
        hashes = set(all_gather([hash_of(setup.policy)]))
        assert len(hashes) == 1, "processes hold different weights"
        save(folder, setup, *more)

    grpo.prepare = prepared
    run.saver.save_checkpoint = checked
    rollout.draw = settled(draw, tokens)
    tracin.influence_scores = without_rounding(influence_scores)
    try:
        for flags, plain in runs:
            grpo.main(flags)
    finally:
        grpo.prepare = prepare
        run.saver.save_checkpoint = save
        rollout.draw = draw
        tracin.influence_scores = influence_scores


def program(argv):
    """What the processes run: the runs and tokens of a .json file."""
    run_all(**json.load(open(argv[0])))


def torchrun(processes, argument, **environment):
    env = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **environment)
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
    (where / "coarse.py").write_text(COARSE)

    def at(name, processes):
        return where / f"{name}-{processes}"

    def flags(name, processes, *more):
        return [
            str(where / ("coarse.py" if name == "resample" else "rule.py")), *tiny.flags,
            "--max_iters=2", "--eval_interval=2",
            "--learning_rate=0.3", "--judge=None", "--eval_judge=None",
            "--reward_funcs=('reward',)", "--log_micro=False", f"--out_dir={at(name, processes)}",
            *CASES.get(name, LONG), *more]

    def start(processes, runs):
        content = dict(runs=runs, tokens=tokens)
        (where / f"{processes}.json").write_text(json.dumps(content))
        return torchrun(processes, where / f"{processes}.json",
                        DIE=str(at("killed", processes) / "ckpt_000002.pt"))

    tokens = {}
    run_all([*((flags(name, 1), True) for name in HERE), (flags("long", 1), False)], tokens)
    # the long run is begun by two processes, continued by one and ended by three
    process = start(2, [*((flags(name, 2), True) for name in IN_TWO),
                        (flags("long", 2, "--max_iters=2"), False),
                        (flags("killed", 2, "--max_iters=99"), False)])
    two = *process.communicate(timeout=900), process.returncode
    os.rename(at("long", 2), at("long", 3))
    run_all([(flags("long", 3, "--max_iters=4", "--resume=True"), False)], tokens)
    process = start(3, [(flags("few", 3), True), (flags("long", 3, "--resume=True"), False),
                        (flags("stopped", 3, "--max_iters=9999"), False)])
    log = at("stopped", 3) / "metrics.jsonl"
    deadline = time.time() + 900
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None and time.time() < deadline, process.communicate()[1]
        time.sleep(.05)
    process.send_signal(signal.SIGINT)
    three = *process.communicate(timeout=300), process.returncode
    return SimpleNamespace(at=at, two=two, three=three)


def columns(path, last):
    """{field: its values} of a log, up to and with iteration `last`. None is NaN."""
    found = {}
    for row in read_rows(path):
        if row["iteration"] <= last:
            for field, x in (row | row.get("scores", {})).items():
                found.setdefault(field, []).append(math.nan if x is None else x)
    return found


def assert_same_numbers(one, several, tolerance, last=99):
    """The fields of two runs differ by at most the tolerance times their scale, which is at least
    1, up to and with iteration `last`."""
    largest = max(abs(x) for x in columns(one / "samples.jsonl", 99).get("influence", [0]))
    apart = {"step_time", "padding", "samples", "row", "scores"}    # the padding of micro-batches
    for log in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        a = columns(one / log, last)
        b = columns(several / log, last)
        assert a.keys() == b.keys(), f"{log} has other fields"
        for field in a.keys() - apart:
            if isinstance(a[field][0], (str, int)):
                assert a[field] == b[field], f"{log} has another {field}"
                continue
            x = torch.tensor(a[field], dtype=torch.float64)
            y = torch.tensor(b[field], dtype=torch.float64)
            scale = max(1, float(x.nan_to_num().abs().max()))
            if field == "advantage":        # a reward over the spread of its group, at least 1/101
                scale *= 10
            if field == "influence":    # after a step it has two ratios, each of two log-probs that
                scale *= 5              # are rounded to 1e-6
            if field.endswith("_ip"):       # of the influences, and as exact as they are
                scale = largest
            error = float((x - y).nan_to_num().abs().max()) / scale
            assert torch.equal(x.isnan(), y.isnan()), f"{log}: {field} is not known in both"
            assert error <= tolerance, f"{log}: {field} is off by {error:.1e} of its scale"


@pytest.mark.parametrize("name, processes", [*((name, 2) for name in IN_TWO), ("few", 3)])
def test_the_numbers_of_one_process(name, processes, world, tiny):
    one = world.at(name, 1)
    several = world.at(name, processes)
    assert_same_numbers(one, several, 2e-6, last=1)
    assert_same_numbers(one, several, 1e-5)     # after a step that was rounded in another way
    start = load_file(tiny.policy, "policy")["model"]
    weights = load_file(newest_checkpoint(one), "run")["policy"]
    others = load_file(newest_checkpoint(several), "run")["policy"]
    moved = 0
    for k, x in weights.items():
        assert_near(others[k], x, 1e-6 * max(float(x.abs().max()), 1))
        moved += k not in start or not torch.equal(x, start[k])
    assert moved > 3, "nothing was trained"


def test_resumed_with_another_number_of_processes(world):
    assert_same_numbers(world.at("long", 1), world.at("long", 3), 1e-5)


def test_number_0_alone_prints(world):
    assert world.two[0].count("\niter 1/") == len(IN_TWO) + 2
    assert world.three[0].count("\niter 1/") == 2


def test_a_killed_process_ends_the_run_with_its_name(world):
    out, err, code = world.two
    assert code != 0
    assert "another process exited" in err, "the other process does not say that it has stopped"
    assert "local_rank: 1" in err[err.index("Root Cause"):]
    assert newest_checkpoint(world.at("killed", 2)).endswith("ckpt_000002.pt")


def test_a_signal_to_torchrun_saves(world):
    out, err, code = world.three
    iteration = len(read_rows(world.at("stopped", 3) / "metrics.jsonl"))
    assert code != 0
    assert err.count("\ninterrupted\n") == 1
    saved = load_file(newest_checkpoint(world.at("stopped", 3)), "run")
    assert saved["iteration"] == iteration
    assert "gloo" not in err, "threads of gloo outlive the group, and may abort Python at its end"


WAITS = """
import sys, time
sys.path.insert(0, {root!r})
from datetime import timedelta
import extras.torchrun
from common.cli import run_script
from common.processes import all_gather, rank0_first, rank_and_size

def main(argv):
    rank, _ = rank_and_size()
    with rank0_first():
        time.sleep(0 if rank else 6)
    print("gathered", all_gather([rank]))
    time.sleep(0 if rank else 300)
    all_gather([rank])

extras.torchrun.WAIT = timedelta(seconds=3)
run_script(main)
"""


def test_rank_0_may_take_long_to_prepare_and_nothing_else_may(tmp_path):
    """The second process waits twice as long as for a collective, and then not for one that hangs.
    """
    program = tmp_path / "waits.py"
    program.write_text(WAITS.format(root=ROOT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(program)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert "gathered [0, 1]" in found.stdout, found.stderr
    assert found.returncode != 0
    assert "or hangs" in found.stderr, "a process waits for ever for one that hangs"


if __name__ == "__main__":
    try:
        run_script(program)
    finally:
        for comm in Path("/proc/self/task").glob("*/comm"):
            if "gloo" in comm.read_text():
                print("still there:", comm.read_text(), file=sys.stderr)
