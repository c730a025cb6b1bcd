"""Make the weights of the tests' world, tests/tiny/*.pt: a policy and two judges that know nothing
but the made-up comments of worlds.py. They tell those that grumble from all others.

    python tests/make_tiny.py       # ten seconds on one core
"""
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from conftest import TINY  # noqa: E402

from data.weights import load_gpt, save_gpt  # noqa: E402
from extras.make import __main__ as make, judges  # noqa: E402
from judge.scorer import Scorer  # noqa: E402
from run.settings import load_settings  # noqa: E402
from worlds import write_comments  # noqa: E402

judges.SHAPE = dict(n_layer=1, n_head=2, n_embd=32, block_size=64, causal=False)
judges.VOCAB_SIZE = 300


def main(where):
    """Train them in a folder, and keep what they became in 16 bits."""
    comments = write_comments(f"{where}/comments.csv", 400)
    make.main(load_settings([
        *TINY, f"--comments={comments}", f"--cache_dir={where}", "--policy=train",
        "--judge=train", "--eval_judge=train", "--pretrain_tokens=40000", "--judge_tokens=400000",
        "--vocab_size=300", "--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=32"]))
    made = {name: next(Path(where).glob(f"{found}-*.pt")) for name, found in (
        ("policy", "policy"), ("judge", "judge_a"), ("eval_judge", "judge_b"))}
    save_gpt(HERE / "tiny/policy.pt", load_gpt(made.pop("policy")).half())
    for name, path in made.items():
        save_gpt(HERE / f"tiny/{name}.pt", load_gpt(path, "judge", Scorer).half(), "judge")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
