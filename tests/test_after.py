"""What changes between iterations by the config file's `after`: settings, replay, an early end. A
run that goes on has the same bits, and config.json says what was given."""
import copy
import shutil
from dataclasses import replace

import pytest
import torch

import grpo
import run.after as hook
from common.files import read_json
from grpo import collect, collect_iteration, update
from loss import Batch
from rollout import completion_entropies
from run.settings import PARTS, load_settings, settings_that_are
from worlds import (
    WORD_PROMPTS, WORDS, assert_near, assert_refused, letters, read_rows, setup_of, shaken,
    skip_for, skip_without, steps_of, untimed_metrics, word_gpt, words)

REWARD = """
def reward(prompts, completions):
    return [completion.count("a") / max(1, len(completion)) for completion in completions]
"""
# settings, memory and replay at once
ALL = REWARD + """
beta = 0.1
num_iterations = 2

def after(it, cfg, metrics, memory, batch):
    memory["kl"] = 0.5 * memory.get("kl", 0.0) + metrics["kl"]
    cfg.beta *= 1 + memory["kl"]
    cfg.temperature = 1 / (1 + 0.1 * it)
    cfg.learning_rate *= 0.9
    metrics["own/memory"] = memory["kl"]
    metrics["own/tensor"] = batch.rewards.new_tensor(it)
    return batch.age < 2
"""


@pytest.fixture
def run_own(tiny, run_grpo, tmp_path):
    """run_own(name, "--beta=0.1", ..., config=ALL): makes or continues a run of this config file ->
    what it printed."""
    flags = [f"--policy={tiny.policy}", "--judge=None", "--eval_judge=None", "--save_interval=1"]

    def run(name, *more, config=ALL):
        (tmp_path / "own.py").write_text(config)
        return run_grpo(tmp_path / name, tmp_path / "own.py", *flags, *more)

    return run


def weights_of(folder):
    path = sorted(folder.glob("ckpt_*.pt"))[-1]
    return torch.load(path, weights_only=True)["policy"]


def assert_same_run(one, two, what):
    """To the bit: metrics, completions, weights. What was changed in between need not be logged."""
    def rows(folder):
        return [{k: x for k, x in row.items() if not k.startswith("cfg/")}
                for row in untimed_metrics(folder)]

    assert rows(one) == rows(two), what
    assert read_rows(one / "samples.jsonl") == read_rows(two / "samples.jsonl"), what
    weights = weights_of(one), weights_of(two)
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items()), what


# ------------------------------------------------------------------------------------------------
# settings


def test_a_run_with_after_goes_on_with_the_same_bits(run_own, tmp_path):
    run_own("whole", "--max_iters=5")
    run_own("parts", "--max_iters=2")
    run_own("parts", "--max_iters=4", "--resume=True")
    run_own("parts", "--max_iters=5", "--resume=True")
    assert_same_run(tmp_path / "parts", tmp_path / "whole", "a run that stopped is another run")
    changes = [row.get("cfg/beta") for row in untimed_metrics(tmp_path / "parts")]
    assert changes[0] is None and changes[1] < changes[2] < changes[3] < changes[4]


def test_config_json_says_what_was_given(run_own, tmp_path):
    run_own("run", "--max_iters=3", "--learning_rate=1e-3")
    folder = tmp_path / "run"
    given = read_json(folder / "config.json")["settings"]
    assert (given["beta"], given["temperature"], given["learning_rate"]) == (.1, 1.0, 1e-3), (
        "config.json says what after has made of the settings")
    assert load_settings([str(folder), str(tmp_path / "own.py")]).beta == 0.1
    run_own("run", "--max_iters=4", "--learning_rate=1e-3", "--resume=True")    # not refused
    last = untimed_metrics(folder)[-1]
    assert last["cfg/beta"] > 0.1, "the value of an iteration is not logged"
    assert last["own/tensor"] == 3, "a tensor among the metrics is logged as text"
    assert last["learning_rate"] == pytest.approx(1e-3 * .9 ** 3), "the rate did not change"


def test_a_value_given_to_a_run_that_goes_on_wins(run_own, tmp_path):
    run_own("run", "--max_iters=2")
    text = run_own("run", "--max_iters=3", "--resume=True", "--beta=0.7")
    assert "different beta: 0.1 -> 0.7" in text
    row = untimed_metrics(tmp_path / "run")[-1]
    assert row["kl_loss"] == pytest.approx(0.7 * row["kl"], rel=1e-4), "beta is not what was given"
    assert "cfg/beta" not in row and row["cfg/temperature"] < 1


@pytest.mark.parametrize("how", ["cfg.max_iters = min(cfg.max_iters, 2)",
                                 "cfg.max_iters = [9, 1][it]"])     # that is over by then
def test_after_ends_a_run_early(how, run_own, tmp_path):
    """With its evaluation and its checkpoint; the same command finds nothing left to do."""
    early = REWARD + f"def after(it, cfg):\n    {how}\n"
    run_own("run", "--max_iters=5", "--save_interval=10", config=early)
    folder = tmp_path / "run"
    assert len(read_rows(folder / "metrics.jsonl")) == 2, "it did not end"
    assert [row["iteration"] for row in read_rows(folder / "eval.jsonl")] == [0, 2]
    assert (folder / "ckpt_000002.pt").exists()
    assert read_json(folder / "config.json")["settings"]["max_iters"] == 5
    assert "nothing to do" in run_own("run", "--max_iters=5", "--save_interval=10", config=early)


# a value that does something in the tiny runs, and flags that it needs
LIVE = {
    "temperature": (.5,), "epsilon": (1e-6, "--num_iterations=2"),
    "epsilon_high": (1e-6, "--num_iterations=2"), "beta": (.5,), "entropy_coef": (.5,),
    "top_entropy_quantile": (.5,), "num_iterations": (2,), "learning_rate": (1e-3,),
    "max_grad_norm": (1e-3, "--num_iterations=2"),
    "tracin_fraction": (1.0, "--tracin=reward", "--tracin_select=drop"),
    "ref_model_mixup_alpha": (.1, "--beta=.1", "--ref_model_sync_steps=1")}


def test_each_live_setting_has_a_case():
    cases = {name for name in (*LIVE, "max_iters") if name in PARTS}    # extras may be gone
    assert cases == set(settings_that_are("live"))


@pytest.mark.parametrize("name", LIVE)
def test_what_after_sets_is_what_a_resumed_run_is_given(name, run_own, tmp_path):
    """Stopped, and continued with another value: the same bits as set by after."""
    value, *flags = LIVE[name]
    skip_for(**{name: value})
    plain = REWARD + "def after(it, cfg):\n    pass\n"
    run_own("given", "--max_iters=1", *flags, config=plain)
    shutil.copytree(tmp_path / "given", tmp_path / "before")
    last = "--max_iters=3" if name == "ref_model_mixup_alpha" else "--max_iters=2"
    more = (last, "--resume=True", *flags)
    run_own("given", *more, f"--{name}={value}", config=plain)
    run_own("before", *more, config=plain)
    sets = REWARD + f"def after(it, cfg):\n    cfg.{name} = {value}\n"
    run_own("set", last, *flags, config=sets)
    assert_same_run(tmp_path / "set", tmp_path / "given", f"{name} is another one than was set")
    weights = weights_of(tmp_path / "before"), weights_of(tmp_path / "set")
    assert any(not torch.equal(x, weights[1][key]) for key, x in weights[0].items()), (
        f"{name} does nothing in this test")


def cfg_with(after, **knobs):
    cfg = words(letters, **knobs)
    return replace(cfg, functions=cfg.functions | {"after": after})


def after_once(after, **knobs):
    """-> (setup, cfg, batch) of an iteration, and after it."""
    cfg = cfg_with(after, **knobs)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    batch = collect_iteration(setup, 0, cfg)
    hook.after_iteration(setup, 0, cfg, batch, {})
    return setup, cfg, batch


def sets(name, value):
    return lambda cfg: setattr(cfg, name, value)


@pytest.mark.parametrize("after, named", [
    (sets("weight_decay", .1), "weight_decay"), (sets("num_generations", 2), "num_generations"),
    (sets("temperature", -1.0), "temperature"), (sets("beta", float("nan")), "beta"),
    (lambda: [.5] * 16, "16"), (lambda: [True] * 2 + [False] * 14, "group")],
    ids=["read once", "groups", "out of range", "NaN", "no mask", "half a group"])
def test_what_after_does_wrong_is_refused(after, named):
    """What would do nothing, or something else, in silence."""
    assert_refused(("after" if "temp" not in named and named != "beta" else named, named),
                   after_once, after)


def test_all_processes_go_on_with_what_rank_0_has_made(monkeypatch):
    theirs = {"beta": .3}, {"calls": 7}, [True] * 4 + [False] * 12
    monkeypatch.setattr(hook, "all_gather", lambda mine: [theirs, *mine])
    setup, cfg, batch = after_once(sets("beta", .2))
    assert cfg.beta == .3 and setup.memory == {"calls": 7}
    assert setup.replay.completions == batch.completions[:4], "each process replays its own"


# ------------------------------------------------------------------------------------------------
# replay


def test_what_is_replayed_is_learned_from_and_logged_once(run_own, tmp_path):
    """Each rollout in three iterations: a third, then half, then two thirds are old."""
    replays = ALL.replace("    cfg.", "    # cfg.") + "learning_rate = 0.02\n"
    text = run_own("run", "--max_iters=4", config=replays)
    alone = run_own("alone", "--max_iters=1", config=replays)
    rows = untimed_metrics(tmp_path / "run")
    assert [row["replayed"] for row in rows] == pytest.approx([0, 1 / 2, 2 / 3, 2 / 3])
    samples = read_rows(tmp_path / "run/samples.jsonl")
    assert [row["iteration"] for row in samples] == [i for i in (1, 2, 3, 4) for _ in range(16)], (
        "a rollout that is replayed is logged again")
    for i, row in enumerate(rows):
        rewards = [sample["reward"] for sample in samples[16 * i:16 * i + 16]]
        assert row["reward"] == pytest.approx(sum(rewards) / 16), "the reward of old rollouts, too"
        assert row["sampling/sampling_logp_difference/max"] < 1e-3, "off by the rollouts' age"
    assert rows[2]["ratio_max"] - rows[2]["ratio_min"] > 1e-3, "the old log-probs are not theirs"
    assert "ratio off" not in text + alone


def replayed_world(**knobs):
    """An iteration whose second half was sampled by an earlier policy -> (setup, cfg, batch)."""
    cfg = cfg_with(lambda batch: batch.age < 1, **knobs)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS, lr=.05)
    first = collect_iteration(setup, 0, cfg)
    update(setup, first, None, replace(cfg, tracin="off"), 3)
    hook.after_iteration(setup, 0, cfg, first, {})
    return setup, cfg, collect_iteration(setup, 1, cfg)


def test_the_gradient_of_replayed_rollouts_is_that_of_their_old_log_probs():
    setup, cfg, batch = replayed_world()
    assert batch.age.tolist() == [0] * 16 + [1] * 16
    fresh = collect(setup, batch.prompts[:16:4], cfg, grpo.seed_for(cfg.seed, "rollout", 1))
    assert fresh.completions == batch.completions[:16]
    ratio = (grpo.completion_logprobs(setup.policy, batch.rollout) - batch.rollout.logp).exp()
    ratio = ratio[16:][batch.loss_mask[16:]]
    assert (ratio - 1).abs().max() > 1e-3, "the policy that sampled them is the policy now"
    expected = Batch.joined([fresh, setup.replay])
    grpo.add_advantages(setup, expected, cfg)
    copies = [setup_of(cfg, copy.deepcopy(setup.policy), WORD_PROMPTS, WORDS) for _ in range(2)]
    found, by_hand = (steps_of(other, b, cfg)[0] for other, b in zip(copies, (batch, expected)))
    assert_near(found[0], by_hand[0], 1e-7)


@pytest.mark.parametrize("tracin", ["reward", "self", "advantage"])
def test_influence_of_replayed_rollouts_is_that_of_plain_backwards(tracin):
    """Meter(check=True) compares the two; at these ratios the log-prob is not the loss."""
    setup, cfg, batch = replayed_world(tracin=tracin)
    _, metrics = steps_of(setup, batch, cfg, check=True)
    assert metrics["ratio_max"] > 1 + 1e-3 and metrics["num_steps"] == 1


def test_entropy_of_replayed_rollouts_is_that_of_the_policy_now():
    setup, cfg, batch = replayed_world(top_entropy_quantile=.5)
    from extras.variants.top_entropy_quantile import most_entropy
    shaken(setup.policy)        # far enough for other tokens to be the least sure
    step = next(grpo.optimizer_steps(batch, cfg, 3))
    mask = grpo.policy_mask_of(setup, batch, step.rows, True, cfg)
    now = torch.zeros_like(batch.rollout.entropy)
    now[:] = completion_entropies(setup.policy, batch.rollout, cfg.temperature)
    assert torch.equal(mask, most_entropy(now, batch.loss_mask, cfg)), "of the policy then"
    assert not torch.equal(mask, most_entropy(batch.rollout.entropy, batch.loss_mask, cfg))


# ------------------------------------------------------------------------------------------------
# what else must know


def test_a_reward_is_told_how_many_completions_stand_side_by_side(run_own, tmp_path):
    """Four in training, three in an evaluation."""
    told = """
def reward(prompts, completions, num_generations):
    groups = [prompts[i:i + num_generations] for i in range(0, len(prompts), num_generations)]
    assert all(len(set(group)) == 1 for group in groups) and num_generations > 1
    return [float(num_generations)] * len(completions)
"""
    run_own("run", "--max_iters=1", config=told)
    assert untimed_metrics(tmp_path / "run")[0]["reward"] == 4
    assert read_rows(tmp_path / "run/eval.jsonl")[0]["rewards/reward"] == 3


def test_an_account_refuses_a_loop_that_changes(run_own, tmp_path):
    skip_without("explain")
    from extras.explain.__main__ import main
    run_own("run", "--max_iters=1")
    assert_refused("after", main, [str(tmp_path / "run"), str(tmp_path / "own.py")])


def test_memory_is_what_a_checkpoint_gives_back():
    """A tuple is a list at once, not only after a stop."""
    setup, _, _ = after_once(lambda memory: memory.update(pair=(1, 2)))
    assert setup.memory == {"pair": [1, 2]}
