"""`python tracin.py RUN --prompt --completion`: it repeats the run, says what adds up, refuses what
it cannot answer and leaves nothing behind. Its arithmetic is in test_account.py."""
import functools
import importlib
import math
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from extras.explain import question, sentences, tables
from extras.explain.account import Account
from extras.explain.groups import Rows, Split, at_random, rows_of, splits_of, sums_of
from extras.explain.repeat import RepeatedRun
from extras.explain.sentences import TOO_FAR
from extras.explain.target import Point
from rollout import Rollout
from worlds import assert_refused, printed, read_rows, skip_without

explain = importlib.import_module("extras.explain.__main__")
accounts = importlib.import_module("extras.explain.account")
RULE = """
judge = eval_judge = None


def reward(prompts, completions):
    return [1.0 * (text.count("e") + 0.1 * len(text)) for prompt, text in zip(prompts, completions)]
"""
JUDGED = """
def reward(prompts, completions):
    return [text.count("e") for text in completions]


def target(policy, tokenizer, batch):
    return policy.ln_f.weight.square().sum()
"""
TIED = RULE.replace("1.0", "len(prompt) % 2")       # some prompts teach nothing
KINDS = {
    "plain": [],
    "one backward": [
        "--tracin=advantage", "--tracin_leave_one_out=True", "--tracin_adam=True", "--top_k=20",
        "--lora_rank=2", "--num_iterations=2", "--temperature=0.8"],
    "held out": [
        "--tracin=reward", "--tracin_val_prompts=3", "--tracin_target_ema=0.8", "--beta=0.1",
        "--entropy_coef=0.01", "--ref_model_sync_steps=2"],
    "resample": ["--zero_std_groups=resample"]}
ASKED = ["--prompt=you are", "--completion= green"]
FAST = "--hessian=False"
WHOLE = ["--held_out=12"]        # the completions of the evaluation
NUMBER = "[+-][0-9.]+"


@pytest.fixture(scope="module")
def run(run_grpo, tmp_path_factory):
    """run(name of KINDS): the folder of such a run, made once."""
    there = tmp_path_factory.mktemp("explained")
    (there / "rule.py").write_text(RULE)
    (there / "tied.py").write_text(TIED)

    @functools.cache
    def make(name):
        folder = there / name
        if name == "one backward":
            skip_without("lora")
        rule = "tied.py" if name == "resample" else "rule.py"
        run_grpo(folder, there / rule, "--max_iters=4", *KINDS[name])
        return str(folder)

    return make


def told(folder, *flags):
    """What is printed, and the numbers of its last account by name; rest: what is no rollout's;
    rounding: of what is printed, half of its last digit."""
    text = printed(explain.main, [folder, f"{folder}/config.py", *flags])
    line = re.findall("^account: rollouts.*$", text, re.M)[-1]
    numbers = {name: float(x) for name, x in re.findall(f"([A-Za-z]+) ({NUMBER})", line)}
    parts = line.partition(", together")[0]
    numbers["rest"] = sum(map(float, re.findall(f" ({NUMBER})", parts))) - numbers["rollouts"]
    decimals = re.search(r"rollouts [+-]\d+\.(\d+)", line)[1]
    numbers["rounding"] = 0.5 * 10.0 ** -len(decimals)
    return text, numbers


def curve_of(text):
    """The column of the number in the table by iteration."""
    rows = re.findall("^  [0-9]+ +([0-9.-]+) +[+-]", text, re.M)
    return [float(x) for x in rows]


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read()
            for name in os.listdir(folder) if not name.endswith(".html")}


def page_of(folder):
    return open(os.path.join(folder, "account.html"), encoding="utf-8").read()


@pytest.mark.parametrize("kind", KINDS)
def test_it_repeats_the_run_and_adds_up(run, kind):
    """To the same bits, and nothing else is left behind."""
    folder = run(kind)
    before = contents(folder)
    text, numbers = told(folder, *ASKED, FAST)
    assert "warning: the repeated run" not in text
    size = max(map(abs, numbers.values()))
    assert abs(numbers["together"] - numbers["change"]) < TOO_FAR * size
    rows = read_rows(f"{folder}/samples.jsonl")
    said = {f"{row['prompt'][:48]!r} -> {row['completion'][:72]!r}" for row in rows}
    cards = re.findall("^  share .*?: (.*)$", text, re.M)
    assert cards and said.issuperset(cards), "a completion is under another one's prompt"
    assert page_of(folder).count("<article>") == len(cards) + 1
    assert contents(folder) == before


def test_a_reward_that_asks_for_more_is_explained(run_grpo, tmp_path):
    """What training tells it, the account tells it, too: the curve is the run's own."""
    (tmp_path / "asks.py").write_text("""
judge = eval_judge = None

def reward(prompts, completions, completion_ids, ended, iteration):
    return [len(set(ids)) + end for ids, end in zip(completion_ids, ended)]
""")
    folder = str(tmp_path / "run")
    run_grpo(folder, tmp_path / "asks.py", "--max_iters=2")
    text, _ = told(folder, FAST, *WHOLE)
    last = read_rows(f"{folder}/eval.jsonl")[-1]["rewards/reward"]
    assert curve_of(text)[-1] == pytest.approx(last, abs=.006)


@pytest.mark.parametrize("kind", ["plain", "one backward"])
def test_the_held_out_reward_is_that_of_the_evaluation(run, kind):
    """With the completions of the evaluation the curve is the run's own, the parts add up, and the
    page says so."""
    folder = run(kind)
    before = contents(folder)
    text, found = told(folder, *WHOLE)
    evaluated = {row["iteration"]: row["rewards/reward"] for row in
                 read_rows(f"{folder}/eval.jsonl")}
    curve = curve_of(text)
    assert len(curve) == 4
    for iteration in evaluated.keys() - {0}:
        assert curve[iteration - 1] == pytest.approx(evaluated[iteration], abs=0.02, rel=1e-3)
    assert abs(found["change"] - (evaluated[4] - evaluated[0])) < 0.02
    assert abs(found["rollouts"] + found["rest"] - found["together"]) < 0.02
    assert "nats" not in text and "nan" not in text
    assert ("<article>" in page_of(folder)) == ("\n  share " in text)
    assert contents(folder) == before


def test_a_judge_and_a_function_are_explained(run_grpo, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(JUDGED)
    folder = f"{tmp_path}/judged"
    run_grpo(folder, config, "--max_iters=2", "--learning_rate=1e-3")
    first, last = read_rows(f"{folder}/eval.jsonl")
    _, found = told(folder, "--target=eval_judge", FAST, *WHOLE)
    clean = first["eval_judge/toxicity"] - last["eval_judge/toxicity"]
    assert found["change"] == pytest.approx(clean, abs=1.01 * found["rounding"])
    text, found = told(folder, "--target=target", FAST)
    policy = torch.load(f"{folder}/ckpt_000002.pt")["policy"]
    start = torch.load(f"{folder}/ckpt_000000.pt")["policy"]
    name = "ln_f.weight"
    change = float(policy[name].square().sum() - start[name].square().sum())
    assert found["change"] == pytest.approx(change, abs=0.01 * abs(change))
    assert abs(found["together"] - found["change"]) < 0.05 * abs(found["change"])
    assert_refused(("nothing", "eval_judge", "judge", "reward", "target"), explain.main,
                   [folder, f"{folder}/config.py", "--target=nothing"])


def test_what_cannot_be_trusted_is_not_listed(run, monkeypatch):
    """Effects where the run is rough, shares where the sum is far from the measured change."""
    folder = run("plain")
    cases = ((-2.0, math.inf, True, True), (2.0, math.inf, False, True), (-2.0, 0.0, False, False))
    for smooth, useless, effects, shares in cases:
        monkeypatch.setattr(explain, "SMOOTH", smooth)
        monkeypatch.setattr(sentences, "USELESS", useless)
        text, _ = told(folder, *ASKED)
        assert ("without it" in text) == effects
        assert ("\n  share " in text) == ("Lists are ordered" in text) == shares


def test_of_a_reward_nothing_is_predicted(run, monkeypatch):
    """Its lists are by share, and the passes that only a prediction needs are not made."""
    monkeypatch.setattr(explain, "SMOOTH", -2.0)
    monkeypatch.setattr(sentences, "USELESS", math.inf)
    monkeypatch.setattr(accounts, "hessian_times", None)
    monkeypatch.setattr(accounts, "train_again", None)
    text, _ = told(run("plain"))
    assert "without it" not in text
    assert "\n  share " in text


def test_nothing_is_predicted_for_a_loss_that_detaches_a_factor(run_grpo, tmp_path, monkeypatch):
    """To the Hessian it would be a constant."""
    monkeypatch.setattr(accounts, "hessian_times", None)
    (tmp_path / "rule.py").write_text(RULE + """
def objective(ratio, logp, A):
    return ratio.detach() * A * logp

objective.detaches = True
""")
    run_grpo(tmp_path / "run", tmp_path / "rule.py", "--max_iters=1")
    text, _ = told(str(tmp_path / "run"), *ASKED)
    assert "without it" not in text


REWARDS = [0.0, 0.2, 0.1, 1, 1, 0.9, 1, 1]


def planted(shares, weights=(1.0,) * 8, rewards=REWARDS, noise=0.0):
    """An Account of some iterations, from shares (F, I, 8): three rollouts of low reward, made less
    likely, and five more. The number rose as they say, but for noise (F,) in its last value."""
    shares = torch.tensor(shares).double()
    mask = torch.ones(8, 2, dtype=torch.bool)
    batch = SimpleNamespace(
        rewards=torch.tensor(rewards), row_weights=torch.tensor(weights),
        row_advantages=torch.tensor([-1.0] * 3 + [1.0] * 5), rollout=Rollout(*[mask] * 7),
        prompts=[SimpleNamespace(text=f"prompt {i}", row={"half": "ab"[i % 2]}) for i in range(8)],
        completions=[f"said {i}" for i in range(8)])
    step = SimpleNamespace(rows=torch.arange(8))
    steps = [SimpleNamespace(it=it, batch=batch, step=step) for it in range(shares.shape[1])]
    target = SimpleNamespace(title="held-out reward", rollouts=100, folds_of="prompts")
    rise = shares.sum((1, 2))
    points = [Point(0 * rise, torch.zeros(2, 2), None), Point(rise + noise, torch.ones(2, 2), None)]
    return Account(RepeatedRun(None, None, [], steps), target, points, rise[None], shares, {}, None,
                   [])


def folds(shares, noise):
    """Eight folds (8, 1, 8) of these shares (8,), noise of them apart."""
    signs = torch.tensor([1.0, -1.0] * 4)[:, None]
    return ((torch.tensor(shares) + noise * signs)[:, None] / 8).tolist()


def answer(account, by="", labels=None):
    rows = rows_of(account.run, account.shares)
    splits = splits_of(rows, by, labels)
    return sentences.say_answer(rows, splits, by, 2, 0.0)


def table_of(account):
    rows = rows_of(account.run, account.shares)
    return tables.by_group(rows, splits_of(rows), 2)


def test_a_group_is_named_where_it_is_known_and_ties_are_ties():
    shares = [0.2, 0.4, 0.3, 0.5, -0.4, 0, 0, 0]
    push, both, prompt = answer(planted(folds(shares, 0.01)))
    assert "made less likely +0.90" in push and "90 %" in push
    assert "up most: reward 0 to 0.25, made less likely (3 of 8 rollouts)" in both
    assert "up most: 'prompt 3'" in prompt and "down most: 'prompt 4'" in prompt
    tied = torch.tensor(folds([0.5, 0.49, 0, 0, 0, 0, 0, 0], 0.1))
    tied[:, :, 1] = tied[:, :, 1].flip(0)       # each is known, and their difference is not
    assert "'prompt 0' and 'prompt 1' tie" in answer(planted(tied.tolist()))[2]
    *_, both, prompt = answer(planted(folds(shares, 3.0)))
    assert "no group is known" in both and "no group is known" in prompt
    assert "%" not in both + prompt, "a part of a sum that is not known"


def splits_in(table):
    """The rows below each head of a Table of groups; "": those before the first."""
    splits = {"": []}
    for row in table.rows:
        if len(row) == 1:
            splits[row[0]] = []
        else:
            splits[list(splits)[-1]].append(row)
    return splits


def test_groups_of_all_iterations_add_up_with_their_errors():
    """One rollout has no reward; the shares of the first iteration cancel, and count."""
    generator = torch.Generator().manual_seed(3)
    shares = torch.randn(8, 2, 8, generator=generator, dtype=torch.float64)
    account = planted(shares.tolist(), rewards=[math.nan, *REWARDS[1:]])
    splits = splits_in(table_of(account))
    (_, count, _, _, whole, *_), = splits.pop("")
    assert int(count) == 16 and whole.value == pytest.approx(float(shares.sum()))
    by_fold = shares.sum((1, 2))
    assert whole.error == pytest.approx(float(by_fold.std() * 8 ** 0.5))
    assert len(splits) == 5
    unknown, = (row for row in splits["by reward"] if row[0] == "no reward")
    assert unknown[4].value == pytest.approx(float(shares[:, :, 0].sum()))
    for head, rows in splits.items():
        assert sum(int(row[1]) for row in rows) == 16, head
        assert sum(row[4].value for row in rows) == pytest.approx(whole.value), head
        assert sum(row[6].value for row in rows) == pytest.approx(whole.value), head
    less, _ = splits["by push"]
    expected = shares[:, :, :3].sum((1, 2))
    assert less[4].error == pytest.approx(float(expected.std() * 8 ** 0.5))


def test_a_group_tells_the_rewards_that_it_was_trained_on():
    """An abstention has none. A group whose rewards are all the same is seen by its std."""
    account = planted(folds([1.0] * 8, 0.01), rewards=[math.nan, 0.2, 0.4, *[0.7] * 5])
    rows = {row[0]: row[2:4] for row in splits_in(table_of(account))["by push"]}
    assert rows["made less likely"] == pytest.approx([0.3, 0.02 ** 0.5])
    assert rows["made likelier"] == pytest.approx([0.7, 0])


def test_what_was_dropped_or_turned_is_not_called_pushed():
    """By the sign of weight times advantage."""
    account = planted(folds([1.0] * 8, 0.01), weights=[0.0, -1, 1, 1, 1, 1, 1, 0.0])
    counts = {row[0]: int(row[1]) for row in splits_in(table_of(account))["by push"]}
    assert counts == {"made less likely": 1, "made likelier": 5, "dropped by influence": 2}


def test_the_spread_of_groups_at_random_is_that_of_dealing_out():
    """The control: shares of each iteration permuted among its rollouts, many times."""
    generator = torch.Generator().manual_seed(5)
    shares = torch.randn(1, 2, 8, generator=generator, dtype=torch.float64)
    account = planted(shares.tolist())
    split = splits_of(rows_of(account.run, account.shares))["push"]
    found = []
    for _ in range(3000):
        dealt = torch.stack([x[torch.randperm(8, generator=generator)] for x in shares[0]])
        found.append(sums_of(rows_of(account.run, dealt[None]), split)[0])
    found = torch.stack(found)
    for i, number in enumerate(at_random(rows_of(account.run, account.shares), split)):
        assert number.value == pytest.approx(float(found[:, i].mean()), abs=.1)
        assert number.error == pytest.approx(float(found[:, i].std()), rel=.1)


def test_a_group_of_the_readers_own_is_named():
    shares = [0.5, -0.4] * 4
    batch = planted([[shares]]).run.steps[0].batch
    labels = [prompt.row["half"] for prompt in batch.prompts]
    text = answer(planted(folds(shares, 0.01)), "half", labels)[1]
    assert "up most: half 'a' (4 of 8 rollouts), +2.00" in text
    assert "down most: half 'b' (4 of 8 rollouts), -1.60" in text
    many = [0.1 * i for i in range(16)]
    split = splits_of(rows_of(planted([[shares] * 2]).run, torch.ones(1, 2, 8)), "x", many)["x"]
    assert len(split.names) == 5 and "0 to 0.375" in split.names[0], "numbers have no bands"


def test_where_the_noise_of_the_sum_is_large_no_single_rollout_is_listed():
    certain, unsure = (planted(folds([1.0] * 8, noise)) for noise in (0.1, 40.0))
    assert sentences.is_useful(certain) and not sentences.is_useful(unsure)
    assert not sentences.say_off(certain)
    assert "--held_out" in sentences.say_off(unsure)


def test_a_group_has_its_share_of_each_iteration():
    its = torch.tensor([0, 0, 1, 1])
    shares = torch.tensor([[0.1, 0.2, 0.4, -0.8]])
    rows = Rows(its, shares, *[torch.ones(4)] * 4, [], [])
    split = Split("kind", ["a", "none", "b"], torch.tensor([0, 2, 0, 2]))
    table = tables.by_group_over_time(rows, split, 2)
    assert table.header == ["iteration", "a", "b"]
    found = [[cell.value for cell in row[1:]] for row in table.rows]
    assert found == [pytest.approx(x) for x in ([0.1, 0.2], [0.4, -0.8], [0.5, -0.6])]


def test_few_folds_have_no_error_that_looks_exact():
    """The spread of two or three says next to nothing."""
    for count in (2, 3, 4):
        account = planted([[[1.0 + 0.1 * i for i in range(8)]]] * count)
        assert (str(count) in sentences.say_off(account)) == (count < 4)
        push, *_ = answer(account)
        assert ("may be 0" in push) == (count < 4) and "±" not in push and "inf" not in push
        assert sentences.is_useful(account) == (count == 4)


def test_settings_that_change_no_number_may_differ(run):
    text, whole = told(run("plain"), *ASKED, FAST, "--micro_batch_size=3", "--eval_interval=9")
    _, same = told(run("plain"), *ASKED, FAST)
    assert same == pytest.approx(whole, abs=2e-3)


def test_held_out_is_the_number_of_completions(run):
    for count, of in ((40, "40 completions of 4"), (6, "6 completions of 3")):
        text, _ = told(run("plain"), f"--held_out={count}", FAST)
        assert f"{of} held-out prompts" in text, "they do not go over prompts first"


def test_rollouts_are_grouped_by_a_column_or_a_function(run, tmp_path):
    folder = run("plain")
    text, _ = told(folder, "--by=reward", FAST)
    assert "By reward, up most: " in text
    assert "Shares by reward, iteration by iteration" in text
    rows = [(3, SimpleNamespace(text=f"p{i}", row={"kind": i % 2}), "said", 0.5) for i in range(4)]
    batch = SimpleNamespace(prompts=[row[1] for row in rows], completions=["said"] * 4,
                            rewards=torch.full((4,), 0.5))
    cfg = SimpleNamespace(functions=dict(group=lambda p, c, r, row: (p, c, r, row["kind"])))
    again = RepeatedRun(None, cfg, [], [SimpleNamespace(it=3, batch=batch)])
    expected = [(f"p{i}", "said", 0.5, i % 2) for i in range(4)]
    assert question.labels_by(again, folder, "group") == expected
    assert question.labels_by(again, folder, "kind") == [0, 1, 0, 1]
    assert_refused(("--by", "advantage", "kind"), question.labels_by, again, folder, "no")


def test_without_a_word_it_draws_half_of_what_an_evaluation_draws(run):
    assert "24 completions of 4 held-out" in told(run("plain"), "--num_eval_generations=12")[0]


def test_what_cannot_be_answered_is_refused_by_name(run, tmp_path):
    folder = str(tmp_path / "run")
    shutil.copytree(run("plain"), folder)

    def refuses(names, *flags, config=f"{folder}/config.py", of=folder):
        assert_refused(names, explain.main, [of, config, *flags])

    refuses("usage", of="--x")
    refuses(("--target", "reward"), "--target=judge")
    refuses("'before'", *ASKED, "--before=True")        # that is a flag of sample.py
    refuses("learning_rate", *ASKED, "--learning_rate=1.0")
    for flag in ("--prompt=the", "--completion=a"):
        refuses("tokens", flag)
    refuses("32", "--prompt=the", "--completion=" + "long " * 40)
    changed = tmp_path / "changed.py"
    changed.write_text(RULE.replace("0.1", "0.2"))
    refuses(folder, *ASKED, config=str(changed))
    assert_refused(folder, explain.main, [folder, *ASKED])      # its functions are not run unasked


def test_checkpoints_of_another_run_are_seen(run, tmp_path):
    folder = str(tmp_path / "run")
    shutil.copytree(run("plain"), folder)
    path = os.path.join(folder, "ckpt_000004.pt")
    content = torch.load(path)

    def refuses(*names):
        assert_refused(names, explain.main, [folder, f"{folder}/config.py", *ASKED])

    os.truncate(path, 1000)
    refuses(path)
    content["policy"]["h.0.ln_1.weight"] += 1e-3
    torch.save(content, path)
    assert "warning" in told(folder, *ASKED, FAST)[0]
    with open(os.path.join(folder, "metrics.jsonl"), "a") as f:
        f.write('{"iteration": 5, "rew')         # as a kill leaves it
    content["policy"]["h.0.ln_1.weight"] += 5
    torch.save(content, path)
    refuses("--threads=1")
    torch.save(content | {"base_hash": "other"}, path)
    refuses(path, "policy")
    for name in ("prompts", "eval_prompts"):
        torch.save(content | {"has_read": content["has_read"] | {name: "other"}}, path)
        refuses(path, name)
    os.remove(path)
    os.remove(os.path.join(folder, "ckpt_000002.pt"))
    refuses(folder)
