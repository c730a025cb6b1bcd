"""run/content.py and run/checkpoint.py: whatever a checkpoint holds, it is gone on from or refused
in one line, and no file outside the folder changes."""
import copy
import math
import os
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
from by_hand import random_gpt
from config import load_settings
from data.prompts import Prompt
from data.tokenizer import load_tokenizer
from sample import completion_logprobs
from pretrain import load_run
from run.checkpoint import begin_folder, save_checkpoint, write_run_config
from run.content import LOGS, check_going_on
from run.files import load_file, load_gpt, save_file, save_gpt
from run.processes import all_reduce
from run.script import BadInput, hash_of
from sample import generate
import selection
from tracin import Influence

ROW = '{"iteration": 0, "samples": []}\n'
PROMPTS = [Prompt("a", [5], {}), Prompt("b", [7, 8], {})]
TOKENIZER = load_tokenizer(300)
SHAPE = ["--vocab_size=300", "--block_size=24", "--n_layer=1", "--n_head=2", "--n_embd=16"]
TARGET = ["--max_completion_length=8", "--tracin=reward", "--tracin_val_prompts=2",
          "--tracin_val_every=5", "--tracin_target_ema=0.9", "--num_generations=3"]
INFLUENCE = load_settings([*SHAPE, *TARGET, "--beta=0.1"])
INFLUENCE = replace(INFLUENCE, reward_funcs=("length",), reward_weights=(1.0,))


def length(prompts, completions):
    return [len(text) for text in completions]


def small_nets():
    base = random_gpt(vocab_size=300, n_layer=1, n_head=2, n_embd=16)
    policy = copy.deepcopy(base)
    trained = list(policy.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    reference = copy.deepcopy(policy)
    nets = SimpleNamespace(
        policy=policy, base=base, trained=trained, optimizer=optimizer, reference=reference,
        device=torch.device("cpu"), dtype=torch.float32, prompts=[], eval_prompts=[],
        val_prompts=PROMPTS, judges={}, reward_funcs={"length": length}, generate=generate,
        tokenizer=TOKENIZER, logprobs=completion_logprobs, reference_fn=reference)
    nets.influence = Influence(nets, INFLUENCE, grpo.loss_of, grpo.gradient_of, selection, all_reduce)
    return nets


def step(nets, it=4):
    """An optimizer step, which reads AdamW's moments, and the target of an iteration, which reads
    its average and its rollouts. Gradients are what they are."""
    target = grpo.collect_target(nets, it, INFLUENCE)
    whole = grpo.Step(0, target.rows, len(target.rows), 1)
    coef = torch.ones(len(target.batch.loss_mask))
    gradient = grpo.gradient_of(nets, target.batch, target.rows, whole, INFLUENCE, coef=coef)
    nets.influence.averaged(gradient)
    for p in nets.trained:
        p.grad = torch.ones_like(p)
    nets.optimizer.step()
    nets.optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """.folder of a run after 3 iterations with its settings .cfg and .hash; only for reading."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    folder.mkdir()
    cfg = load_settings([*SHAPE, f"--out_dir={folder}", "--resume=True", "--beta=0.1",
                         "--sync_ref_model=True", *TARGET])
    nets = small_nets()
    step(nets, it=0)
    write_run_config(str(folder), cfg, nets.device)
    for name in LOGS:
        (folder / name).write_text(ROW)
    save_checkpoint(str(folder), nets, cfg, 3, 1000, hash_of(nets.base))
    return SimpleNamespace(folder=folder, cfg=cfg, hash=hash_of(nets.base))


@pytest.fixture
def changed(saved, tmp_path):
    """changed(change) -> what going on says after change(content of the checkpoint), None if it
    goes on. Nothing outside the folder may have changed, nor a log if it was refused."""
    folder = tmp_path / "run"
    outside = tmp_path / "mine.txt"

    def go_on(change):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved.folder, folder)
        outside.write_text("mine")
        content = load_file(str(folder / "ckpt.pt"), "run")
        content = change(content) or content
        torch.save(content, folder / "ckpt.pt")
        nets = small_nets()
        said = None
        try:
            check_going_on(str(folder), saved.cfg)
            begin_folder(str(folder), nets, saved.cfg, saved.hash)
            step(nets)      # moments of another shape would be read beyond their memory here
        except BadInput as e:
            said = str(e)
            assert len(said.splitlines()) == 1, said
            for name in LOGS:
                size = os.path.getsize(folder / name)
                assert size == len(ROW), f"{name} was changed by a checkpoint that was refused"
        assert outside.read_text() == "mine", "a file outside the folder was changed"
        assert sorted(os.listdir(tmp_path)) == ["mine.txt", "run"]
        return said

    return go_on


def test_a_checkpoint_as_it_was_is_gone_on_from(changed):
    assert changed(lambda content: None) is None


@pytest.mark.parametrize("name", ["../mine.txt", "{tmp}/mine.txt", "ckpt.pt", "config.json"])
def test_a_checkpoint_cuts_no_other_file(name, changed, tmp_path):
    def change(content):
        content["logs"][name.format(tmp=tmp_path)] = 0

    assert "'logs'" in changed(change)


def moment(name, i, x):
    def change(content):
        content["optimizer"]["state"][i][name] = x
    return change


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("x", [
    torch.zeros(3), torch.zeros(()), torch.zeros(1).expand(2 ** 40),
    torch.full((300, 16), math.nan),
    torch.full((300, 16), math.inf), torch.zeros(300, 16, dtype=torch.int64),
    torch.zeros(300, 16).to_sparse(), torch.zeros(300, 16, device="meta"), None, 1.0],
    ids=["other", "scalar", "huge", "nan", "inf", "whole", "sparse", "meta", "None", "number"])
def test_moments_that_do_not_fit_are_refused(name, x, changed):
    assert "ckpt.pt" in changed(moment(name, 0, x))


def test_moments_of_no_parameter_are_refused(changed):
    def change(content):
        content["optimizer"]["state"][99] = content["optimizer"]["state"][0]

    assert "99" in changed(change)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["policy", "reference"])
def test_weights_that_are_not_finite_are_refused(part, value, changed):
    def change(content):
        content[part]["ln_f.weight"][3] = value

    assert "ln_f.weight holds numbers that are not finite" in changed(change)


@pytest.mark.parametrize("part, name, value", [
    ("held_out", "rows", torch.tensor([6])), ("held_out", "rows", torch.tensor([-1])),
    ("held_out", "rollout.tokens", torch.full((6, 9), 300)),
    ("held_out", "rollout.logp", torch.zeros(6, 99)), ("held_out", "rollout.sampled_mask", None),
    ("held_out", "batch.rewards", torch.zeros(6, dtype=torch.bool)),
    ("held_out", "batch.lengths", torch.zeros(6)),
    ("average", "ln_f.weight", torch.full((16,), math.nan)),
    ("average", "ln_f.weight", torch.zeros(17)), ("average", "other", torch.zeros(1))])
def test_what_influence_carries_on_is_checked(part, name, value, changed):
    def change(content):
        content["influence"][part][name] = value

    said = changed(change)
    assert said and "ckpt.pt" in said


@pytest.mark.parametrize("age", [-1, 1.5, None])
def test_an_average_has_an_age(age, changed):
    def change(content):
        content["influence"]["age"] = age

    assert "its 'influence' cannot be right" in changed(change)


def test_an_older_run_that_knew_no_average_is_gone_on_from(changed):
    def change(content):
        del content["influence"]

    assert changed(change) is None


HOSTILE = [
    None, True, -1, 0, 1.5, math.nan, math.inf, 2 ** 40, 2 ** 70, -2 ** 70, "", "x" * 300,
    "../mine.txt", "a\0b", "\n", [], {}, (), b"x", [[]], {"x": 1}, {1: 2}, {"state": {}},
    torch.zeros(0), torch.zeros(()), torch.zeros(7), torch.zeros(1).expand(2 ** 40),
    torch.full((32,), math.nan), torch.zeros(32, dtype=torch.int64), torch.zeros(32, device="meta"),
    torch.zeros(32).to_sparse(), torch.arange(5056, dtype=torch.uint8)]


def places(x, path=()):
    """Paths to every value in a checkpoint, through dicts, lists and tuples; the first few of long
    lists."""
    if path:
        yield path
    if isinstance(x, dict):
        for key in x:
            yield from places(x[key], (*path, key))
    elif isinstance(x, (list, tuple)):
        for i in range(min(len(x), 8)):
            yield from places(x[i], (*path, i))


def replaced(x, path, value):
    """A copy of x with another value at a path; `del` removes it."""
    if not path:
        return value
    key, *rest = path
    pairs = list(x.items() if isinstance(x, dict) else enumerate(x))
    if value is del_ and not rest:
        pairs = [(k, v) for k, v in pairs if k != key]
    else:
        pairs = [(k, replaced(v, rest, value) if k == key else v) for k, v in pairs]
    return dict(pairs) if isinstance(x, dict) else type(x)(v for _, v in pairs)


del_ = object()


@pytest.mark.parametrize("seed", range(4))
def test_wrong_checkpoints_are_refused_or_gone_on_from(seed, changed):
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    rng = random.Random(seed)
    refused = 0

    def change(content):
        top = rng.choice(list(content))     # each field as often, however much is in it
        path = rng.choice([p for p in places(content) if p[0] == top])
        return replaced(content, path, rng.choice([*HOSTILE, del_]))

    try:
        for _ in range(75):
            refused += changed(change) is not None
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
    assert refused > 35, "the changes hardly matter: nothing was tried"


@pytest.mark.parametrize("seed", range(2))
def test_the_policy_of_a_wrong_checkpoint_is_loaded_or_refused(seed, saved, tmp_path):
    content = load_file(str(saved.folder / "ckpt.pt"), "run")
    rng = random.Random(seed)
    fields = [("settings", name) for name in content["settings"]]
    shape = [("settings", name) for name in ("n_layer", "n_embd", "block_size", "policy")]
    for path in [*rng.sample(fields, 25), *shape, ("policy",), ("policy", "wte.weight")]:
        torch.save(replaced(content, path, rng.choice(HOSTILE)), tmp_path / "ckpt.pt")
        try:
            load_run(str(tmp_path))
        except BadInput as e:
            assert len(str(e).splitlines()) == 1


@pytest.mark.parametrize("field, value", [
    ("n_layer", 10 ** 7), ("n_layer", 1), ("n_embd", 2 ** 40), ("block_size", 2 ** 30),
    ("n_head", 0), ("n_head", "4"), ("vocab_size", -1), ("local_layers", "x"), ("tied", 3)])
def test_a_shape_is_compared_with_its_tensors_before_a_model_is_built(field, value, tmp_path):
    path = str(tmp_path / "policy.pt")
    model = random_gpt()
    config = vars(model.config) | {field: value}
    save_file(path, "policy", config=config, model=model.state_dict())
    with pytest.raises(BadInput, match="weights and shape do not fit"):
        load_gpt(path)


def test_a_policy_file_with_nan_says_so(tmp_path):
    path = str(tmp_path / "policy.pt")
    model = random_gpt()
    model.ln_f.weight.data[0] = math.nan
    save_gpt(path, model)
    with pytest.raises(BadInput, match="ln_f.weight holds numbers that are not finite"):
        load_gpt(path)


def poison_weight(nets):
    nets.policy.ln_f.weight.data[0] = math.nan


def poison_reference(nets):
    nets.reference.ln_f.weight.data[0] = math.inf


def poison_moment(nets):
    nets.optimizer.state[nets.trained[0]]["exp_avg"][0] = math.nan


@pytest.mark.parametrize("poison", [poison_weight, poison_reference, poison_moment])
def test_no_checkpoint_holds_what_is_not_finite(poison, saved, tmp_path):
    shutil.copytree(saved.folder, tmp_path / "run")
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    nets = small_nets()
    step(nets)
    poison(nets)
    with pytest.raises(SystemExit, match="not finite after iteration 4, which is not saved"):
        save_checkpoint(str(tmp_path / "run"), nets, saved.cfg, 4, 1, saved.hash)
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    assert not (tmp_path / "run" / "ckpt_prev.pt").exists()
