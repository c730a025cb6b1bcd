"""What a config file can change: prompts, weights of rollouts, the optimizer, the divisor. Each
does what it says, goes on after a stop with the same bits, and is refused by name where it cannot
work. The examples are those of docs/hooks.md."""
import glob
import math
from dataclasses import replace

import pytest
import torch

import grpo
from common.files import ROOT
from common.variants import variant
from grpo import collect, collect_iteration, group_advantages, prepare, update
from run.after import after_iteration
from run.optimizer import load_state
from run.settings import HOOKS, load_settings
from worlds import (
    WORD_PROMPTS, WORDS, assert_near, assert_refused, forward, gradient, inputs_of, letters,
    loss_of_rows, printed, read_rows, refusal, setup_of, skip_for, skip_without, steps_of,
    untimed_metrics, word_gpt, words, world)

PAGE = open(f"{ROOT}/docs/hooks.md", encoding="utf-8").read()
EXAMPLES = [code.removeprefix("python\n") for code in PAGE.split("```")[1::2]]


def examples(name):
    """Names of each example of the page that defines this function."""
    found = []
    for code in EXAMPLES:
        if f"def {name}(" in code:
            names = {}
            exec(code, names)
            found.append(names)
    return found


def with_function(name, function, reward=letters, **knobs):
    """Settings of the world of words with a function that a config file might have."""
    cfg = words(reward)
    return replace(cfg, functions=cfg.functions | {name: function}, **knobs)


def prepared(cfg):
    return prepare(cfg, inputs_of(word_gpt(), WORD_PROMPTS, WORDS))


def word_world(cfg):
    """Setup, and a Batch that its policy has sampled."""
    return world(cfg, policy=word_gpt(), prompts=WORD_PROMPTS, tokenizer=WORDS)


def parameters(named):
    return [p for _, p in named]


def flat(tensors):
    return torch.cat([x.detach().flatten() for x in tensors])


# ------------------------------------------------------------------------------------------------
# the divisor


def test_maxrl_divides_by_the_mean_of_the_group():
    """As in the paper: a group in which p of G are right has (1 - p) / p for these, -1 else."""
    skip_for(scale_rewards="mean")
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]).double()
    found = group_advantages(rewards, 4, variant("scale_rewards", "mean"))
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, *[0] * 8]
    assert found.tolist() == pytest.approx(expected, rel=1e-5), "not (r - mean) / mean"
    rewards = torch.tensor([200, math.nan, 400, 0]).double()
    found = group_advantages(rewards, 4, variant("scale_rewards", "mean"))
    assert found.tolist() == pytest.approx([0, 0, 1, -1]), "what is not known counts"


def test_maxrl_refuses_what_has_no_mean_to_divide_by():
    skip_for(scale_rewards="mean")
    assert_refused("kl_in", load_settings, [
        "--scale_rewards=mean", "--judge_score=probability", "--kl_in=reward", "--beta=0.1"])
    def given(*rewards):
        def reward(completions):
            return [rewards[i % len(rewards)] for i in range(len(completions))]
        return words(reward, scale_rewards="mean", judge_score="probability")

    assert "-1" in refusal(word_world, given(-1.0))
    for rewards in ((-5.6e-17, 0.0), (0.3 - 0.1 - 0.2, 1.0, 0.0), (1e6, 1e6 * (0.3 - 0.1 - 0.2))):
        assert word_world(given(*rewards))[1].advantages.isfinite().all(), "rounding is not below 0"


def test_a_reward_may_have_the_name_of_what_only_variants_replace():
    """Those places are not hooks of a config file: the reward would be called there."""
    names = ("average", "direction", "tracin_normalizer", "tracin", "follow", "targets",
             "critic_loss")
    cfg = words(letters, tracin="self")
    cfg = replace(cfg, functions=cfg.functions | dict.fromkeys(names, letters))
    setup, batch = word_world(cfg)
    steps_of(setup, batch, cfg)
    assert batch.influence.isfinite().all() and setup.target_average is None


# ------------------------------------------------------------------------------------------------
# which prompts


def test_choose_picks_the_prompts_and_is_told_their_rewards():
    told = []

    def choose(prompts, rows, rewards, n, iteration, random):
        told.append((prompts, rows, rewards, iteration))
        return [3, 0, 3, 1]

    cfg = with_function("choose", choose)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    first = collect_iteration(setup, 0, cfg)
    wanted = [WORD_PROMPTS[i].text for i in (3, 0, 3, 1)]
    assert [prompt.text for prompt in first.prompts[::4]] == wanted, "others were sampled"
    collect_iteration(setup, 1, cfg)
    (prompts, rows, before, _), (_, _, after, iteration) = told
    assert prompts == [prompt.text for prompt in WORD_PROMPTS]
    assert [row["text"] for row in rows] == prompts and iteration == 2
    assert before == [[], [], [], []], "rewards of prompts that were never drawn"
    groups = first.rewards.view(-1, 4).tolist()
    assert after == [[groups[1]], [groups[3]], [], [groups[0], groups[2]]], (
        "these are not the rewards of each prompt's groups, oldest first")


def test_choose_is_told_the_groups_that_resample_replaces():
    """A prompt whose first group is replaced comes again in the next round."""
    calls = []

    def number_of_call(completions):
        calls.append(0)
        differs = len(calls) > 1        # and is kept
        return [float(len(calls)) * (not differs or i % 4 > 0) for i in range(len(completions))]

    skip_for(zero_std_groups="resample")
    cfg = with_function("choose", lambda n: [0] * n, number_of_call, zero_std_groups="resample",
                        num_prompts=2)
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS[:1], WORDS)
    collect_iteration(setup, 0, cfg)
    assert [max(group) for group in setup.seen[0]] == [1.0] * 2 + [2.0] * 2


def test_all_processes_take_the_prompts_that_rank_0_has_chosen(monkeypatch):
    monkeypatch.setattr("data.prompts.all_gather", lambda mine: [[3, 2, 1, 0], *mine])
    cfg = with_function("choose", lambda n: [0, 1, 2, 3])
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    found = [prompt.text for prompt in grpo.prompts_of(setup, 0, cfg)]
    assert found == [prompt.text for prompt in WORD_PROMPTS[::-1]], "each process has its own"


# ------------------------------------------------------------------------------------------------
# which rollouts

SELF = dict(tracin="self", tracin_select="weigh")


def test_weigh_gets_what_it_names():
    """self_influence is the square of the norm of a rollout's own gradient, by plain backwards."""
    seen = {}

    def weigh(self_influence, influence, recording):
        seen.update(own=self_influence, influence=influence)
        seen["all"] = recording.policy_gradient(torch.ones_like(influence))
        return [1.0] * len(influence)

    cfg = with_function("weigh", weigh, tracin="advantage", tracin_select="weigh")
    setup, batch = word_world(cfg)
    plain = replace(cfg, tracin="off")
    expected = []
    for i in range(16):
        alone = replace(batch, row_weights=torch.eye(16)[i])
        copy = setup_of(plain, word_gpt(), WORD_PROMPTS, WORDS)
        (g,), _ = steps_of(copy, alone, plain)
        expected.append(float(g.double().square().sum()))
    (whole,), _ = steps_of(setup, batch, cfg)
    assert seen["own"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-12)
    assert_near(flat(seen["all"].values()), whole, 1e-6)    # the recording's, and the step's


# ------------------------------------------------------------------------------------------------
# which optimizer


def sgd(named_parameters, learning_rate):
    return torch.optim.SGD([p for _, p in named_parameters], lr=3 * learning_rate)


def test_the_optimizer_of_the_config_file_takes_the_steps():
    """SGD: the weights go down the gradient at three times the rate, warm-up included."""
    cfg = with_function("optimizer", sgd, learning_rate=.1, warmup_iters=2)
    setup = prepared(cfg)
    batch = collect(setup, WORD_PROMPTS, cfg, 1)
    before = flat(setup.trained)
    grpo.set_learning_rate(setup.optimizer, 0, cfg)
    (g,), _ = steps_of(setup, batch, cfg)
    assert_near(flat(setup.trained), before - .5 * .3 * g, 1e-7)


def test_several_optimizers_step_as_one():
    (example,) = examples("optimizer")
    cfg = with_function("optimizer", example["optimizer"], learning_rate=.01)
    setup = prepared(cfg)
    assert [group["lr"] for group in setup.optimizer.param_groups] == pytest.approx([.2, .01])
    before = [p.detach().clone() for p in setup.trained]
    update(setup, collect(setup, WORD_PROMPTS, cfg, 1), None, cfg, 3)
    moved = [not torch.equal(p, b) for p, b in zip(setup.trained, before)]
    assert all(moved), "one of the optimizers took no step"


def test_moments_of_other_weights_are_refused():
    """AdamW's own load_state_dict takes them, and the next step would write beyond a weight."""
    def made(params):
        return torch.optim.AdamW(params, lr=0.1)

    params = [torch.nn.Parameter(torch.ones(shape)) for shape in (2, 3)]
    optimizer = made(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.1
    load_state(optimizer, optimizer.state_dict())
    with pytest.raises(ValueError, match="shape"):
        load_state(made(params[::-1]), optimizer.state_dict())


def test_the_eps_of_adamw_is_a_setting():
    """A large one turns AdamW's first step of equal size into one along the gradient."""
    cfg = words(learning_rate=1.0, adam_eps=100.0)
    setup = prepared(cfg)
    batch = collect(setup, WORD_PROMPTS, cfg, 1)
    before = flat(setup.trained)
    (g,), _ = steps_of(setup, batch, cfg)
    assert_near(before - flat(setup.trained), g / (g.abs() + 100), 1e-6)


def test_tracin_adam_refuses_another_optimizer():
    skip_without("variants")
    cfg = with_function("optimizer", sgd, tracin="reward", tracin_adam=True)
    assert_refused("tracin_adam", steps_of, *word_world(cfg), cfg)


# ------------------------------------------------------------------------------------------------
# what a function does wrong

WRONG = [       # a function, and what the line names
    ("choose", lambda n: [0] * (n - 1), "num_prompts"), ("choose", lambda speed: [0], "speed"),
    ("after", lambda rewards: None, "rewards"),
    ("advantage", lambda batch: torch.ones(15), "advantage"),
    ("weigh", lambda influence: [math.nan] * 8, "finite"),
    ("target", lambda batch: torch.tensor(1.0), "policy"),      # it does not depend on it
    ("optimizer", lambda named, rate: torch.optim.SGD(parameters(named)[1:], rate), "wte.weight")]


@pytest.mark.parametrize("name, function, named", WRONG)
def test_what_a_function_does_wrong_ends_the_first_iteration(name, function, named):
    knobs = {"weigh": SELF, "target": dict(tracin="target")}.get(name, {})
    cfg = with_function(name, function, **knobs)

    def first_iteration():
        setup = prepared(cfg)
        batch = collect_iteration(setup, 0, cfg)
        update(setup, batch, None, cfg, 3)
        after_iteration(setup, 0, cfg, batch, {})

    assert_refused((name, named), first_iteration)


# ------------------------------------------------------------------------------------------------
# a run of a config file with all of them

PLAIN = """
def reward(prompts, completions):
    return [completion.count("a") / max(1, len(completion)) for completion in completions]
"""
OWN = PLAIN + """
import torch

def choose(prompts, rewards, n, random):
    spread = [max(groups[-1]) - min(groups[-1]) + .1 if groups else 1 for groups in rewards]
    return random.choices(range(len(prompts)), spread, k=n)

def optimizer(named_parameters, learning_rate):
    matrices = [p for name, p in named_parameters if p.dim() == 2 and name.startswith("h.")]
    taken = set(matrices)
    others = [p for _, p in named_parameters if p not in taken]
    return [torch.optim.Muon(matrices, lr=20 * learning_rate),
            torch.optim.AdamW(others, lr=learning_rate)]

tracin = "reward"
tracin_select = "weigh"

def weigh(influence, self_influence):
    return influence > 0
"""


@pytest.fixture
def run_own(tiny, run_grpo, tmp_path):
    """run_own(name, "--beta=0.1", ..., config=OWN): makes or continues a run of this config file ->
    what it printed."""
    flags = [f"--policy={tiny.policy}", "--judge=None", "--eval_judge=None"]

    def run(name, *more, config=OWN):
        (tmp_path / "own.py").write_text(config)
        return run_grpo(tmp_path / name, tmp_path / "own.py", *flags, *more)

    return run


def test_a_run_with_all_of_them_goes_on_with_the_same_bits(run_own, tmp_path):
    flags = ("--max_prompts=12", "--save_interval=1")
    run_own("whole", *flags, "--max_iters=4")
    run_own("parts", *flags, "--max_iters=2")
    run_own("parts", *flags, "--max_iters=4", "--resume=True")
    assert untimed_metrics(tmp_path / "parts") == untimed_metrics(tmp_path / "whole"), (
        "a run that stopped and went on is another run")
    whole, parts = (torch.load(tmp_path / name / "ckpt_000004.pt", weights_only=True)["policy"]
                    for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_same_command_goes_on_when_a_function_that_failed_is_mended(run_own, tmp_path):
    wrong = PLAIN + "\ndef advantage(batch): return batch.rewards.colour\n"
    with pytest.raises(AttributeError, match="colour"):
        run_own("run", "--max_iters=2", config=wrong)
    run_own("run", "--max_iters=2", config=wrong.replace(".colour", ""))
    assert len(untimed_metrics(tmp_path / "run")) == 2


COUNTS = PLAIN + """
def choose(rewards, n):
    return [sum(map(len, rewards)) % len(rewards)] * n
"""


def test_choose_is_told_a_failed_iteration_once(run_own, tmp_path, monkeypatch):
    """The second iteration fails after its rewards are known and before its step."""
    flags = ("--max_prompts=11", "--max_iters=3")
    run_own("whole", *flags, config=COUNTS)
    update = grpo.update
    left = iter(range(1))

    def fails(*args, **more):
        if next(left, None) is None:
            raise ChildProcessError
        return update(*args, **more)

    with monkeypatch.context() as patch, pytest.raises(ChildProcessError):
        patch.setattr(grpo, "update", fails)
        run_own("parts", *flags, config=COUNTS)
    run_own("parts", *flags, config=COUNTS)
    assert untimed_metrics(tmp_path / "parts") == untimed_metrics(tmp_path / "whole"), (
        "the rewards of the iteration that failed were counted, and counted again")


def test_choose_is_not_told_the_rewards_of_other_prompts(run_own):
    """Where a run goes on with another pool: what was prompt 3 is another one now."""
    tells = OWN.replace("spread = ", "print('told of', sum(map(len, rewards)))\n    spread = ")
    run_own("run", "--max_prompts=12", "--max_iters=2", config=tells)
    other = run_own("run", "--max_prompts=9", "--resume=True", "--max_iters=3", config=tells)
    assert "told of 0\n" in other and "told of 8\n" not in other


CONFIGS = [code.removeprefix("python\n") for path in sorted(glob.glob(f"{ROOT}/docs/*.md"))
           for code in open(path, encoding="utf-8").read().split("```")[1::2]
           if code.startswith("python\n") and any(f"def {name}(" in code for name in HOOKS)]
ABSTAINS = """
def reward(completions):
    return [None if i % 3 == 0 or i < 4 else float(len(t)) for i, t in enumerate(completions)]
"""


@pytest.mark.parametrize("config", CONFIGS)
def test_an_example_of_a_page_is_a_config_file_that_trains(config, run_own, tmp_path):
    """With a reward that is not known of some completions, and of none of a group: the judge's is
    so for one completion in fifty."""
    run_own("run", "--max_iters=2", config=ABSTAINS + config)
    assert len(untimed_metrics(tmp_path / "run")) == 2


def test_max_prompts_is_the_size_of_the_pool(run_own, tmp_path):
    run_own("run", "--max_prompts=5", "--max_iters=4", config=PLAIN)
    rows = read_rows(tmp_path / "run/samples.jsonl")
    assert len({row["prompt"] for row in rows}) == 5, "4 iterations of 4 prompts, of a pool of 5"


# ------------------------------------------------------------------------------------------------
# another algorithm


def test_best_of_n_imitates_the_best():
    """The example of the page: its gradient is that of minus the mean log-prob of the best. Where
    nobody has scored a completion, or a group, it is not imitated."""
    def reward(completions):
        return [None if i < 4 or i % 4 == 0 else float(i) for i in range(len(completions))]

    (names,) = examples("best_of_n")
    cfg = words(reward, loss_type="grpo")
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS, lr=1.0)
    before = flat(setup.trained)
    batch = collect(setup, WORD_PROMPTS, cfg, 5)
    names["best_of_n"](setup, WORD_PROMPTS, cfg, 5)
    step = before - flat(setup.trained)

    other = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    best = torch.tensor([7, 11, 15])
    logp = grpo.completion_logprobs(other.policy, batch.rollout)[best]
    mask = batch.loss_mask[best]
    loss = -((logp * mask).sum(1) / mask.sum(1)).sum() / 16
    assert_near(step, gradient(loss, other.trained), 1e-6)


def test_the_example_of_another_algorithm_is_a_command(tiny):
    (names,) = examples("best_of_n")
    rows = printed(names["main"], [*tiny.flags, *tiny.judges, "--max_iters=2"]).splitlines()
    assert [row.split()[0] for row in rows[-2:]] == ["0", "1"]
    assert all(math.isfinite(float(row.split()[1])) for row in rows[-2:])


# ------------------------------------------------------------------------------------------------
# which loss


def unclipped(ratio, A):
    return ratio * A


def test_a_loss_of_ones_own_is_learned_from(monkeypatch):
    """objective and divide, each alone: beside the gradient of the same sum written out."""
    def halved(x, num_tokens):
        return x.sum() / (2 * num_tokens)

    for functions, factor, high in (({}, 1, 0.2), ({"objective": unclipped}, 1, math.inf),
                                    ({"divide": halved}, 0.5, 0.2)):
        cfg = words(micro_batch_size=3)
        cfg = replace(cfg, functions=cfg.functions | functions)
        setup, batch = word_world(cfg)
        batch.rollout.logp += 0.3 * torch.sin(torch.arange(batch.rollout.logp.numel())).view_as(
            batch.rollout.logp)     # as after a step: ratios on both sides of the clip
        found, _ = steps_of(setup, batch, cfg)
        logp = grpo.completion_logprobs(setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS).policy,
                                        batch.rollout)
        other = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
        logp = grpo.completion_logprobs(other.policy, batch.rollout)
        ratio = (logp - batch.rollout.logp).exp()
        A = batch.advantages[:, None]
        objective = torch.min(ratio * A, ratio.clamp(1 - high, 1 + high) * A)
        loss = -factor * (objective * batch.loss_mask).sum() / batch.loss_mask.sum()
        assert_near(found[0], gradient(loss, other.trained), 1e-6, what=f"with {list(functions)}")


def test_a_loss_of_ones_own_is_counted_as_it_says():
    """W: without a word of it no clip is counted, since nobody knows what it holds back."""
    _, batch = word_world(words())
    for clip in (None, lambda A: {"mine/held_back": A > 0}):
        def objective(ratio, A):
            return ratio * A

        if clip:
            objective.clipped = clip
        cfg = with_function("objective", objective)
        setup, _ = word_world(cfg)
        _, m = steps_of(setup, batch, cfg)
        assert not any(name.startswith("clip_ratio") for name in m), "the clip is not its own"
        up = ((batch.advantages > 0)[:, None] & batch.loss_mask).sum() / batch.loss_mask.sum()
        assert m.get("mine/held_back") == (pytest.approx(float(up)) if clip else None)


@pytest.mark.parametrize("name, function, named", [
    ("objective", lambda ratio: ratio.sum(1), "objective"),
    ("objective", lambda ration: ration, "ratio"), ("divide", lambda x: x.sum(1), "divide"),
    ("importance", lambda log_ratio: log_ratio.sum(1), "importance")])
def test_a_loss_of_ones_own_that_has_another_shape_is_refused(name, function, named):
    """(n,) beside (n, T) would be summed over the wrong rows in silence."""
    cfg = with_function(name, function)
    setup, batch = word_world(cfg)
    assert_refused(named, steps_of, setup, batch, cfg)


def first_tokens(batch):
    return batch.loss_mask & (torch.arange(batch.loss_mask.shape[1]) < 2)


def slopes(cfg):
    """The gradient of the loss by the log-prob of each token, and the Batch."""
    setup, batch = word_world(cfg)
    loss = forward(setup, batch, cfg)
    slope, = torch.autograd.grad(loss.total, loss.logp)
    return slope, batch


def test_policy_tokens_pick_the_tokens_with_a_gradient():
    every, _ = slopes(words())
    some, batch = slopes(with_function("policy_tokens", first_tokens))
    assert batch.loss_mask[:, 2:].any() and every[:, 2:].any()
    assert_near(some, every * first_tokens(batch), 1e-8)
    assert_refused("policy_tokens", word_world, with_function(
        "policy_tokens", lambda batch: batch.loss_mask.any(1)))


def test_importance_makes_the_ratio():
    """Twice the logarithm: as if the policy had moved twice as far."""
    old = torch.linspace(-3, -1, 12).view(3, 4)
    logp = old + torch.linspace(-.3, .3, 12).view(3, 4)
    rows = dict(advantages=torch.tensor([1.0, -1, 2]), mask=torch.ones(3, 4, dtype=torch.bool))
    once, further = (loss_of_rows(x, old, **rows).policy for x in (logp, 2 * logp - old))
    functions = {"importance": lambda log_ratio: 2 * log_ratio}
    twice = loss_of_rows(logp, old, **rows, functions=functions).policy
    assert float(twice) == pytest.approx(float(further), rel=1e-5)
    assert float(twice) != pytest.approx(float(once), rel=.01)


def test_importance_returns_a_logarithm():
    """The ratio in its place, an easy slip, would make every ratio 2.72 in silence."""
    cfg = with_function("importance", lambda log_ratio: log_ratio.exp())
    setup, batch = word_world(cfg)
    with pytest.raises(SystemExit, match="logarithm"):
        steps_of(setup, batch, cfg, check=True)


def test_influence_is_right_for_a_loss_that_weighs_tokens():
    """A row's tokens then have several slopes, and no multiple of its log-prob is its loss."""
    def objective(ratio, A):
        return ratio * A * torch.arange(1.0, 1 + ratio.shape[1])

    def divide(x):
        return (x * torch.arange(1.0, 1 + x.shape[1])).sum() / 100

    def importance(log_ratio):
        return log_ratio * torch.arange(1.0, 1 + log_ratio.shape[1])

    for name, function in (("objective", objective), ("divide", divide),
                           ("importance", importance), ("policy_tokens", first_tokens)):
        cfg = with_function(name, function, tracin="reward")
        setup, batch = word_world(cfg)
        steps_of(setup, batch, cfg, check=True)     # ends where a plain backward says otherwise
        assert batch.influence.any(), "nothing was scored"


# ------------------------------------------------------------------------------------------------
# which advantage


def test_the_example_of_leave_one_out_advantages():
    """A rollout beside the mean of the others: G / (G - 1) times (r - mean)."""
    (names,) = examples("advantage")
    cfg = with_function("advantage", names["advantage"])
    _, batch = word_world(cfg)
    expected = 4 / 3 * group_advantages(batch.rewards, 4, "none")
    assert batch.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_an_advantage_that_works_in_place_changes_no_log():
    def advantage(batch, cfg):
        r = batch.rewards.view(-1, cfg.num_generations)
        r -= r.mean(1, keepdim=True)
        batch.scores.zero_()
        batch.completions.sort()
        batch.rollout.completion_mask[:, 4:] = False
        batch.rollout.ended.logical_not_()
        batch.ref_logp.zero_()
        return r.flatten()

    plain, batch = (word_world(replace(cfg, beta=.1))[1] for cfg in (
        words(), with_function("advantage", advantage)))
    assert batch.completions == plain.completions, "a completion is under another one's prompt"
    assert torch.equal(batch.rewards, plain.rewards), "the rewards are others now"
    assert torch.equal(batch.scores, plain.scores), "the scores are others now"
    for name in ("completion_mask", "ended"):
        assert torch.equal(getattr(batch.rollout, name), getattr(plain.rollout, name)), (
            f"{name} of the rollout that is trained on is another one now")
    assert torch.equal(batch.ref_logp, plain.ref_logp), "the reference is another one now"
