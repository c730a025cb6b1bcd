"""Runs that need no data: a config file makes up the texts of pretraining and the questions."""
import os

import pytest
import torch
from conftest import TINY

from config import load_settings
from data.comments import get_splits
from data.prompts import load_prompts
from data.tokenizer import load_tokenizer
from grpo import main
from pretrain import get_policy, windows
from run.device import pick_device
from run.script import BadInput

CONFIG = '''
import random
judge = None
eval_judge = None

def texts(n, seed):
    rng = random.Random(seed)
    return [f"{rng.randrange(10)} and {rng.randrange(10)}" for _ in range(n)]

def questions(n, seed):
    rng = random.Random(seed)
    return [{"text": f"{i} {rng.randrange(10)}", "answer": str(i % 3)} for i in range(n)]

def reward(prompts, completions, answer):
    return [float(a in text) for a, text in zip(answer, completions)]
'''
FLAGS = [flag for flag in TINY if not flag.startswith("--pretrain_tokens")]


@pytest.fixture
def settings(tmp_path):
    def load(*changes, flags=()):
        source = CONFIG
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        path = tmp_path / "config.py"
        path.write_text(source)
        return load_settings([str(path), *FLAGS, "--pretrain_tokens=4000", "--max_prompts=50",
                              f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/prepared",
                              "--comments=/no/such/file", *flags])
    return load


def prompts_of(cfg):
    return load_prompts(cfg, load_tokenizer(cfg.vocab_size), get_splits(cfg))


def test_a_run_needs_no_comments(settings, tmp_path, capsys):
    cfg = settings()
    flags = [f"--{name}={getattr(cfg, name)}" for name in ("out_dir", "cache_dir", "comments")]
    main([str(tmp_path / "config.py"), *FLAGS, "--pretrain_tokens=4000", "--max_iters=1", *flags])
    out = capsys.readouterr().out
    assert "rewards/reward" in out and os.path.exists(f"{cfg.out_dir}/ckpt.pt"), out


def test_questions_are_the_prompts_and_a_fifth_of_them_is_held_out(settings):
    train, evaluation, others = prompts_of(settings())
    rows = settings().functions["questions"](50, 0)
    texts = [[prompt.text for prompt in prompts] for prompts in (train, evaluation, others)]
    assert sorted(sum(texts, [])) == sorted(row["text"] for row in rows)
    assert len(evaluation) == 4 and len(train) > 30
    assert train[0].row["answer"] in "012", "a reward cannot ask for the question's columns"
    assert len(prompts_of(settings(flags=["--max_prompts=20"]))[0]) < 20
    other_seed = prompts_of(settings(flags=["--prepare_seed=1"]))[0]
    assert [prompt.text for prompt in other_seed] != texts[0]


def test_a_policy_is_made_anew_when_the_texts_change(settings, capsys):
    cpu = pick_device("cpu", False, False)
    files = []
    for changes in ([], [], [(" and ", " or ")]):
        cfg = settings(*changes)
        get_policy(cfg, get_splits(cfg), cpu)
        files.append(sorted(os.listdir(cfg.cache_dir)))
    assert files[0] == files[1], "the same texts made another policy"
    assert len(files[2]) == 2, "a policy of other texts was used"


@pytest.mark.parametrize("change, message", [
    (("return [f", "return 3, [f"), "texts(1000, 0) returned (3,"),
    (("for _ in range(n)]", "for _ in range(3)]"), "must be a list of 1000 texts"),
    ((' and {rng.randrange(10)}" for', '"[1:] for'), "none empty"),
    (("rng.randrange(10)", "rng.randrange(0)"), "texts raised ValueError: empty range")])
def test_wrong_texts_are_one_line(settings, change, message):
    cfg = settings(change)
    with pytest.raises(BadInput) as error:
        get_policy(cfg, get_splits(cfg), pick_device("cpu", False, False))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change, message", [
    (('{"text": f"{i} ', '{"prompt": f"{i} '), "row 1 is {'prompt': '0 6'"),
    (("for i in range(n)]", "for i in range(3)]"), "must be a list of 50 rows"),
    (('"text": f"{i} {rng.randrange(10)}"', '"text": "long " * 40'), "must be 1 to 24"),
    (("randrange(10)}\", \"answer", "choice([])}\", \"answer"), "questions raised IndexError")])
def test_wrong_questions_are_one_line(settings, change, message):
    with pytest.raises(BadInput) as error:
        prompts_of(settings(change))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_strangers_questions_are_not_replaced_by_comments(settings, tmp_path):
    flags = [f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/prepared"]
    settings()
    main([str(tmp_path / "config.py"), *FLAGS, "--pretrain_tokens=4000", "--max_iters=0", *flags])
    path = tmp_path / "out" / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"signature": "', '"signature": "0'))
    assert path.read_text() != text
    with pytest.raises(BadInput, match="Python of somebody else's run"):
        load_settings([str(path)])


def test_windows_of_made_up_texts_begin_with_a_text():
    """As a prompt does. Of comments they begin anywhere, so position 0 is the middle of one."""
    eot = 9
    stream = torch.tensor([1, 5, 5, eot, 2, 5, eot, 3, 5, 5, 5, eot, 4, 5, eot])
    found = windows(stream, 50, 4, seed=1, eot=eot)
    assert found.shape == (50, 5), "a window must fit behind each start"
    assert set(found[:, 0].tolist()) == {1, 2, 3}
    assert 5 in windows(stream, 50, 4, seed=1)[:, 0]
