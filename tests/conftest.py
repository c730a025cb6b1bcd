"""A tiny world, prepared once per session: made-up comments, a policy and two judges that know
nothing else."""
import csv
import io
import json
import os
import random
import subprocess
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

# threads that wait for each other sleep. By default they spin, and take the core that the one they
# wait for needs when tests run side by side. To be set before torch starts any
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
import torch  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
torch.set_num_threads(1)  # tiny tensors; and scripts that tests start must compute the same digits

TINY = ["--device=cpu", "--vocab_size=300", "--n_layer=1", "--n_embd=32", "--n_head=2",
        "--block_size=32", "--max_completion_length=8", "--pretrain_tokens=40000",
        "--judge_tokens=32000", "--judge_vocab_size=2048", "--num_prompts=4",
        "--num_generations=4", "--num_eval_prompts=4", "--num_eval_generations=3",
        "--prompt_words=(2, 4)"]
WORDS = [group.split() for group in (
    "a the my your", "green small quiet warm old", "garden river cat kettle window",
    "likes sees finds paints hears", "the this our", "bright round soft",
    "train song book lamp cake")]


def sentence(rng, toxic):
    """Seven harmless words; the made-up bad word is "grumble"."""
    words = [rng.choice(group) for group in WORDS]
    for i in rng.sample(range(1, len(words)), 2 * toxic):
        words[i] = "grumble"
    return " ".join(words)


def write_comments(path, count, label=lambda i: int(i % 3 == 0), seed=0):
    """A CSV of `count` comments; those labelled 1 hold the bad word."""
    rng = random.Random(seed)
    with open(path, "w", newline="") as f:
        rows = csv.writer(f)
        rows.writerow(["text", "is_offensive"])
        rows.writerows([sentence(rng, label(i)), label(i)] for i in range(count))
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def key_of_the_tests(tmp_path_factory):
    """Runs of tests are signed with a key of their own, not with the user's."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def make_comments():
    return write_comments


@pytest.fixture(scope="session")
def comments(tmp_path_factory):
    return write_comments(tmp_path_factory.mktemp("comments") / "comments.csv", 400)


@pytest.fixture(scope="session")
def script():
    """Starts a script of the repository as a user would: script("grpo.py", "--flag=1") ->
    .returncode, .stdout, .stderr. A name without .py is a module, started in the repository."""
    def start(name, *argv, wait=True):
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        command, folder = ["-m", name], ROOT
        if name.endswith(".py"):
            command, folder = [os.path.join(ROOT, name)], None
        process = subprocess.Popen(
            [sys.executable, *command, *map(str, argv)], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=env, cwd=folder)
        if not wait:
            return process
        out, err = process.communicate(timeout=120)
        return SimpleNamespace(returncode=process.returncode, stdout=out, stderr=err)

    return start


@pytest.fixture(scope="session")
def tiny(comments, script, tmp_path_factory):
    """.flags for every script; .policy and .judge, files; .pretrain and .train, how the two scripts
    that made them ended."""
    cache = tmp_path_factory.mktemp("prepared")
    flags = [*TINY, f"--comments={comments}", f"--cache_dir={cache}", "--save_interval=2",
             "--max_iters=3", "--eval_interval=3"]
    made = SimpleNamespace(flags=flags, cache=str(cache), pretrain=script("pretrain.py", *flags),
                           train=script("judge.train", *flags))
    made.policy = str(next(cache.glob("policy-*.pt")))
    made.judge = str(next(cache.glob("judge_a-*.pt")))
    return made


@pytest.fixture(scope="session")
def grpo(tiny):
    """grpo(out_dir, "--beta=0.1", ...) runs grpo.py here and returns what it printed."""
    import grpo

    def start(out_dir, *argv):
        with redirect_stdout(io.StringIO()) as out:
            grpo.main([*tiny.flags, f"--out_dir={out_dir}", *map(str, argv)])
        return out.getvalue()

    return start


@pytest.fixture(scope="session")
def rows():
    """Rows of a .jsonl file."""
    def read(path):
        with open(path, encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    return read
