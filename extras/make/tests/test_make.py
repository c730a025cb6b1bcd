"""The policy and the judges that are made: of which texts, once, in a loop that goes on."""
import math
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import data.weights
import evaluate
import extras.make.policy
import grpo
import run.policy
from common.seeds import hash_of
from conftest import TINY
from data.weights import load_gpt
from extras.make.judges import auc, even_lengths, length_batches
from extras.make.policy import made_policy, optimizers, text_starts, windows
from extras.make.supervised import fit
from run.settings import load_settings
from worlds import assert_refused, printed, random_gpt, random_ids

CPU = torch.device("cpu")
SHAPE = ["--vocab_size=300", "--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=32"]



# ------------------------------------------------------------------------------------------------
# the policy

MADE_UP = '''
import random
judge = eval_judge = None

def texts(n, seed):
    rng = random.Random(seed)
    return [f"{rng.randrange(10)} and {rng.randrange(10)}" for _ in range(n)]

def questions(n, seed):
    return [{"text": f"{i} {seed}", "answer": str(i % 3)} for i in range(50)]

def reward(prompts, completions, answer):
    return [float(a in text) for a, text in zip(answer, completions)]
'''


@pytest.fixture
def made_up(tmp_path):
    """Settings of a run that needs no data: a config file makes up texts and questions."""
    def load(old="", new="", *flags):
        (tmp_path / "config.py").write_text(MADE_UP.replace(old, new))
        return load_settings([
            f"{tmp_path}/config.py", *TINY, *SHAPE, "--policy=train", "--pretrain_tokens=4000",
            "--comments=/nowhere", f"--cache_dir={tmp_path}/prepared", *flags])
    return load


def test_a_policy_is_made_once_of_the_same_texts(made_up):
    for change, policies in (((), 1), ((), 1), ((" and ", " or "), 2)):
        cfg = made_up(*change)
        made_policy(cfg, CPU)
        assert len(os.listdir(cfg.cache_dir)) == policies, "a policy for each choice of texts"


def test_dtype_is_that_of_pretraining_too(made_up, tmp_path, monkeypatch):
    """Also where the CPU has fast bfloat16, which the setting has to name."""
    monkeypatch.setattr("common.device.fast_dtype", lambda device: torch.bfloat16)
    weights = []
    for dtype in ("float32", "auto", "bfloat16"):
        cfg = made_up("", "", f"--dtype={dtype}", f"--cache_dir={tmp_path}/{dtype}")
        weights.append(load_gpt(made_policy(cfg, CPU)).wte.weight)
    assert torch.equal(weights[0], weights[1]), "auto is not float32 on a CPU"
    assert not torch.equal(weights[0], weights[2]), "dtype does nothing"


def test_windows_begin_where_a_text_does_or_anywhere():
    stream = torch.tensor([int(token) for token in "155925935559459"])      # 9 ends a text
    starts = text_starts(stream, 4, 9)
    assert starts.tolist() == [0, 4, 7], "the window of the last text would not end"
    found = windows(stream, starts, 0, 4, seed=1)
    assert found.shape[1] == 5 and set(found[:, 0].tolist()) == {1, 2, 3}
    assert 5 in windows(stream, starts, 24, 4, seed=1)[:24, 0], "these may begin anywhere"


class GRUPolicy(nn.Module):
    """What README.md and rollout.py ask of a class, and no more: it has no blocks `h`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.block_size = config.block_size
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.gru = nn.GRU(config.n_embd, config.n_embd, batch_first=True)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, ids, attention_mask=None):
        real = torch.ones_like(ids) if attention_mask is None else attention_mask
        h = torch.zeros(1, len(ids), self.config.n_embd)
        out = []
        for t, x in enumerate(self.embedding(ids).unbind(1)):
            _, new = self.gru(x[:, None], h)
            h = torch.where(real[None, :, t, None].bool(), new, h)
            out.append(h[0])
        return torch.stack(out, 1)


@pytest.fixture
def made(tiny, tmp_path):
    """made("--max_iters=1", ...) runs grpo.py here with a policy that is made first."""
    def start(out_dir, *argv):
        flags = ["--policy=train", *SHAPE, "--pretrain_tokens=4000",
                 f"--cache_dir={tmp_path}/cache", f"--out_dir={out_dir}"]
        return printed(grpo.main, [*tiny.flags, *tiny.judges, *flags, *argv])
    return start


def test_a_run_trains_what_is_called_train(made, tmp_path):
    made(tmp_path / "run", "--max_iters=1", "--judge=train", "--eval_judge=train",
         "--judge_tokens=4000")
    names = {name.split("-")[0] for name in os.listdir(tmp_path / "cache")}
    assert names == {"policy", "judge_a", "judge_b"}


def test_a_class_in_place_of_policy_is_pretrained(made, tmp_path, monkeypatch):
    """Beside the GPT of the same sizes, whose file is there already."""
    made(tmp_path / "gpt", "--max_iters=0")
    before = {*os.listdir(tmp_path / "cache")}
    for module in (run.policy, extras.make.policy):
        monkeypatch.setattr(module, "Policy", GRUPolicy)
    monkeypatch.setattr(data.weights.load_gpt, "__defaults__", ("policy", GRUPolicy))
    made(tmp_path / "run", "--max_iters=2")
    (found,) = {*os.listdir(tmp_path / "cache")} - before
    assert "GRUPolicy" in found
    made(tmp_path / "again", "--max_iters=1")
    assert len(os.listdir(tmp_path / "cache")) == len(before) + 1, "it was made twice"


def test_looking_at_a_run_never_trains(made, tmp_path):
    run_of = str(tmp_path / "run")
    made(run_of, "--max_iters=1")
    for flag in (f"--cache_dir={tmp_path}/none", "--pretrain_tokens=1000000000000"):
        assert_refused("extras.make", evaluate.main, [run_of, flag])


# ------------------------------------------------------------------------------------------------
# the judges

def test_auc_counts_pairs_and_equal_scores_half():
    scores = torch.tensor([1.0, 2.0, 2.0, 3.0])
    assert auc(scores, torch.tensor([False, False, True, True])) == 3.5 / 4
    scores = torch.arange(200_000.0)        # all pairs are 10 ** 10
    assert auc(scores, scores >= 100_000) == 1


def test_length_batches_hold_every_row_once():
    lengths = [1 + i * i % 37 for i in range(1001)]
    batches = length_batches([[0] * n for n in lengths], 8, seed=1)
    assert sorted(sum(batches, [])) == list(range(1001)) and max(map(len, batches)) == 8
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.1 * sum(lengths), "rows of different lengths share a batch"


def test_clean_comments_are_cut_to_the_lengths_of_toxic_ones():
    whole = " ".join(map(str, range(100)))
    toxic = [("bad word", 1.0), ("a bad one", 1.0)]
    comments = toxic + [(whole, 0.0)] * 200
    cut = even_lengths(comments, 0)
    assert cut[:2] == toxic     # a piece of a toxic comment may be clean
    assert all(f" {text} " in f" {whole} " for text, _ in cut[2:])
    lengths = [len(text.split()) for text, _ in cut[2:]]
    assert set(lengths) == {2, 3, 100}
    assert 70 < lengths.count(100) < 130
    assert even_lengths(comments, 0) == cut != even_lengths(comments, 1)


# ------------------------------------------------------------------------------------------------
# the supervised loop

def train(partial, crash_in=None, error=None):
    """Train a GPT on random tokens for 8 steps -> it and the steps that were made."""
    model = random_gpt(seed=int(os.path.exists(partial)))
    made = []

    def loss_at(step):
        if step == crash_in:
            raise error
        made.append(step)
        idx = random_ids(4, 9, seed=step)
        logits = model.lm_head(model(idx[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())

    fit(model, optimizers(model), loss_at, 8, partial, "test")
    return model, made


def test_interrupted_fit_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole, made = train(f"{tmp_path}/whole.pt")
    assert made == list(range(8))
    assert not (tmp_path / "whole.pt").exists()
    monkeypatch.setattr("extras.make.supervised.SAVE_SECONDS", -1)
    partial = f"{tmp_path}/partial.pt"
    # 6: while the learning rate goes down
    for step, error in ((1, RuntimeError("power cut")), (6, KeyboardInterrupt("Ctrl-C"))):
        with pytest.raises(type(error), match=str(error)):
            train(partial, step, error)
    model, made = train(partial)
    assert made == [6, 7]
    assert hash_of(model) == hash_of(whole) != hash_of(random_gpt())


def test_the_rates_of_a_fit_go_up_stay_and_go_down(tmp_path):
    """Up over the first 2 % of the steps, down over the last half; each group's from its own."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([
        dict(params=[model.weight], lr=0.1), dict(params=[model.bias], lr=0.02)])
    scales = [0.5] + [1.0] * 50 + [(49 - i) / 50 for i in range(49)]

    def loss_at(step):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.1 * scales[step], 0.02 * scales[step]])
        return model(torch.ones(2)).square().sum()

    fit(model, [optimizer], loss_at, 100, f"{tmp_path}/p", "test")
    with pytest.raises(SystemExit, match="test.* nan"):
        fit(model, [optimizer], lambda step: math.nan * model.bias.sum(), 2, f"{tmp_path}/p",
            "test")
