"""A tiny world: made-up comments, a policy and two judges that know nothing else (make_tiny.py).

    WORLD_SEED=1 python -m pytest       # other random worlds: what holds must hold in any
    TEST_THREADS=2 python -m pytest     # more than one thread
    TEST_BFLOAT16=yes python -m pytest  # as on a CPU with fast bfloat16; no: on one without
"""
import functools
import os
import sys
from types import SimpleNamespace

import pytest

# threads that wait for each other sleep. By default they spin, and take the core that the one they
# wait for needs when tests run side by side. To be set before torch starts any
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import torch  # noqa: E402

TESTS = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(TESTS), TESTS]
THREADS = int(os.environ.get("TEST_THREADS", 1))     # the tensors are tiny
torch.set_num_threads(THREADS)
if "TEST_BFLOAT16" in os.environ:
    torch.cpu._is_avx512_bf16_supported = lambda: os.environ["TEST_BFLOAT16"] == "yes"

import data.tokenizer  # noqa: E402

# before anybody else imports it: a run reads it three times, and each takes 50 ms
data.tokenizer.load_tokenizer = functools.cache(data.tokenizer.load_tokenizer)
import rollout  # noqa: E402
from common.files import read_text  # noqa: E402
from worlds import printed, seed_of, settled, skip_for, write_comments  # noqa: E402

TINY = ["--device=cpu", "--max_completion_length=8", "--num_prompts=4", "--num_generations=4",
        "--num_eval_prompts=4", "--num_eval_generations=3", "--prompt_words=(2, 4)",
        f"--seed={seed_of(1)}", f"--threads={THREADS}", "--dtype=float32"]


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory):
    """Tests write to a cache folder of their own, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    """A test draws the same alone as among others, and where rounding decides between two tokens,
    the same ones in computations that it compares."""
    torch.manual_seed(seed_of(0))
    monkeypatch.setattr(rollout, "draw", settled(rollout.draw, {}))


@pytest.fixture(scope="session")
def comments(tmp_path_factory):
    return write_comments(tmp_path_factory.mktemp("comments") / "comments.csv", 400)


@pytest.fixture(scope="session")
def tiny(comments):
    """.flags for every script, .judges: those that name the judges; .policy and .judge: files."""
    weights = f"{TESTS}/tiny"
    flags = [*TINY, f"--policy={weights}/policy.pt", f"--comments={comments}",
             "--save_interval=2", "--max_iters=3", "--eval_interval=3"]
    judges = [f"--judge={weights}/judge.pt", f"--eval_judge={weights}/eval_judge.pt"]
    return SimpleNamespace(flags=flags, judges=judges, weights=weights,
                           policy=f"{weights}/policy.pt", judge=f"{weights}/judge.pt")


@pytest.fixture(scope="session")
def run_grpo(tiny):
    """run_grpo(out_dir, "--beta=0.1", ...) runs grpo.py here and returns what it printed. A config
    file may say which judges there are."""
    import grpo

    def start(out_dir, *argv):
        argv = list(map(str, argv))
        pairs = [arg[2:].partition("=") for arg in argv if arg.startswith("--")]
        skip_for(**{name: value for name, _, value in pairs})
        configs = [read_text(path) for path in argv if path.endswith(".py")]
        judges = [] if any("judge =" in text for text in configs) else tiny.judges
        return printed(grpo.main, [*tiny.flags, *judges, f"--out_dir={out_dir}", *argv])

    return start
