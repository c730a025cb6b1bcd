"""A tiny world, prepared once per session: made-up comments, a policy and two judges that know
nothing else.

    WORLD_SEED=1 python -m pytest       # other random worlds: what holds must hold in any
    TEST_THREADS=2 python -m pytest     # more than one thread
"""
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

from worlds import printed, seed_of, write_comments  # noqa: E402

TINY = ["--device=cpu", "--vocab_size=300", "--n_layer=1", "--n_embd=32", "--n_head=2",
        "--block_size=32", "--max_completion_length=8", "--pretrain_tokens=40000",
        "--judge_tokens=16000", "--num_prompts=4", "--num_generations=4", "--num_eval_prompts=4",
        "--num_eval_generations=3", "--prompt_words=(2, 4)", f"--seed={seed_of(1)}",
        f"--threads={THREADS}"]


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory):
    """Tests write to a cache folder of their own, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def same_draws():
    """A test draws the same alone as among others."""
    torch.manual_seed(seed_of(0))


@pytest.fixture(scope="session")
def comments(tmp_path_factory):
    return write_comments(tmp_path_factory.mktemp("comments") / "comments.csv", 400)


@pytest.fixture(scope="session")
def tiny(comments, tmp_path_factory):
    """.flags for every script; .policy and .judge, files that pretrain.py made."""
    import pretrain

    cache = tmp_path_factory.mktemp("prepared")
    flags = [*TINY, f"--comments={comments}", f"--cache_dir={cache}", "--save_interval=2",
             "--max_iters=3", "--eval_interval=3"]
    made = SimpleNamespace(flags=flags, cache=str(cache))
    printed(pretrain.main, flags)
    made.policy = str(next(cache.glob("policy-*.pt")))
    made.judge = str(next(cache.glob("judge_a-*.pt")))
    return made


@pytest.fixture(scope="session")
def run_grpo(tiny):
    """run_grpo(out_dir, "--beta=0.1", ...) runs grpo.py here and returns what it printed."""
    import grpo

    def start(out_dir, *argv):
        return printed(grpo.main, [*tiny.flags, f"--out_dir={out_dir}", *map(str, argv)])

    return start
