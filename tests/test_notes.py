"""
What the notes ask to see, so that no later change takes it away.

The project began with five diaries of people who lost days to silent mistakes in GRPO:
    000     influence: which numbers show that it works
    001     influence: what a target must be
    002     a loss of 0.0000, and minutes for an iteration
    003     one step of GRPO taken apart, in ten phases
    004     ratio, environment, reference and values: what was silently wrong
Each was lost once, without anybody's noticing. Numbers are checked by hand elsewhere; here it is
asked that they are there, where a reader sees them, that the settings are, and that the failures of
the notes are named, each with what to do. A test's name says what would be lost, and of which note.
`python .ci/planted.py ": gone"` takes out twenty-nine of these things, one at a time.
"""
import math
import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import grpo
from common.files import ROOT
from run.flags import notes, problems, problems_of_evaluation
from run.meanings import meanings
from run.settings import PARTS
from test_report import EVERYTHING, GOOD, GROUPS, PLAIN, found
from tracin import positive
from worlds import (
    assert_refused, load_settings, read_rows, refusal, settings, skip_for, skip_without,
    world)


def read_page(path):
    with open(f"{ROOT}/{path}", encoding="utf-8") as f:
        return f.read()


# ------------------------------------------------------------------------------------------------
# numbers, lines and settings

# note: names in metrics.jsonl
LOGGED = {
    "000, which rollouts": """
        tracin/positive_ratio tracin/negative_ratio tracin/zero_ratio tracin/mean_ip tracin/std_ip
        tracin/min_ip tracin/max_ip tracin/fallback tracin/selected_ratio tracin/empty_steps""",
    "000, the target": """
        tracin/target_advantage_min tracin/target_advantage_max tracin/target_loss
        tracin/target_loss_min tracin/target_loss_max tracin/target_rows tracin/target_grad_norm
        tracin/target_grad_norm/wte.weight tracin/target_grad_norm/wpe.weight tracin/target_cosine
        num_completion_tokens num_steps""",
    "001": "tracin/target_contrast tracin/self_share",
    "002": """
        kl kl_loss reward reward_std reward_min reward_max frac_reward_zero_std
        identical_completions logp entropy tokens_without_loss""",
    "003": "advantage_std advantage_min advantage_max grad_norm kl_grad_share",
    "004": """
        ratio ratio_std ratio_min ratio_max forced sampling/sampling_logp_difference/mean""",
    "004, a sync": "ref_tensors_differing",
    "the lines below": """
        loss policy_loss step_time clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean
        completions/clipped_ratio completions/mean_length completions/mean_terminated_length
        rewards/judge/mean rewards/judge/std"""}
OF_A_CRITIC = """
    val/mean val/std returns/mean val/grad_norm critic_loss val/var_explained"""
LINES = ("iter 1/2", "[Micro 0] 1.", "[Micro 0] 2.", "[Micro 0] 3.", "[Micro 0] 4.", "5.",
         "reference synced")
NUMBER = r"-?\d+(\.\d+)?"
# note: what a line shows (the line: its beginning; what follows it, indented, belongs to it)
SHOWN = {
    "002: the memory in use": (r"\[Micro 0\] [1-4]\.|5\.", rf"mem={NUMBER} MB"),
    "002: the time of each part": (r"\[Micro 0\] [1-4]\.|5\.", rf"time={NUMBER}s"),
    "002: rewards, their mean and spread": (r"\[Micro 0\] 3\.", rf"rewards={NUMBER}±{NUMBER}"),
    "002: the policy's loss": (r"\[Micro 0\] 4\.", rf"pg_loss={NUMBER}"),
    "002: the KL beside it": (r"\[Micro 0\] 4\.", rf" kl={NUMBER}"),
    "002: the loss in all": (r"\[Micro 0\] 4\.", rf"total={NUMBER}"),
    "002: the loss of an iteration": ("iter 1/2", rf"loss {NUMBER}"),
    "002: the reward of an iteration": ("iter 1/2", rf"reward {NUMBER}"),
    "002: the KL of an iteration": ("iter 1/2", rf"kl {NUMBER}"),
    "002: the time of an iteration": ("iter 1/2", rf"\b(?<!eta ){NUMBER} ?s\b"),
    "002: the time that is left": ("iter 1/2", rf"eta {NUMBER}"),
    "003: the gradient's norm": ("iter 1/2", rf"grad_norm {NUMBER}"),
    "004: how far the reference is after a sync": ("reference synced", "0 tensors differ")}
# note: settings that it asks for
SETTINGS = {
    "000, its target": """
        tracin=reward tracin_select=positive tracin_val_prompts=16 tracin_val_size=64
        tracin_val_select=worst""",
    "000, other targets": "tracin=self tracin_val_prompts=2 tracin_val_select=balanced",
    "000, beside plain GRPO": "tracin=reward tracin_select=all",
    "001": "tracin=contrastive tracin_val_prompts=0",
    "002": "compile=False num_prompts=1 micro_batch_size=4",
    "003": """
        eval_temperature=0.8 top_p=0.9 temperature=0.5 scale_rewards=batch loss_type=dr_grpo
        kl_estimator=k1 beta=0.1""",
    "004": "ref_model_sync_steps=100 beta=0.1 gae_gamma=0.99 gae_lambda=0.95"}


SYNC = {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1}      # of extras/variants


@pytest.fixture(scope="module")
def run(run_grpo, tmp_path_factory):
    """What a run prints, and its metrics: with influence on held-out rollouts, a KL and, where that
    can be, a reference that is copied."""
    folder = tmp_path_factory.mktemp("influence") / "run"
    copied = [f"--{name}={value}" for name, value in SYNC.items() if name in PARTS]
    out = run_grpo(folder, "--tracin=reward", "--tracin_val_prompts=2", "--beta=0.1",
                   "--max_iters=2", "--eval_interval=1", *copied)
    return out, read_rows(folder / "metrics.jsonl"), folder


def skip_without_sync(what):
    if "sync" in what:
        skip_for(**SYNC)


def shown_by(out, start):
    """Lines of a run that begin so, each with what follows it indented; without colours."""
    out = re.sub(r"\x1b\[[\d;]*m", "", out)
    lines = [m[0] for m in re.finditer(rf"^(?:{start}).*(?:\n +\S.*)*", out, re.MULTILINE)]
    assert lines, f"no line begins with {start}"
    return lines[0] if len(lines) == 1 else "\n".join(lines)


@pytest.mark.parametrize("note", LOGGED)
def test_numbers_are_logged_and_explained(note, run):
    skip_without_sync(note)
    names = LOGGED[note].split()
    for m in run[1]:
        assert m.keys() >= set(names), f"metrics.jsonl lacks {set(names) - m.keys()}"
    known = meanings()
    for name in names:
        name = re.sub("target_grad_norm/.*|(?<=^rewards/)[^/]+",
                      lambda m: "target_grad_norm/NAME" if m[0].startswith("t") else "NAME", name)
        assert known.get(name), f"--help=metrics does not explain {name}"


def test_the_values_of_a_critic_are_logged(run_grpo, tmp_path):
    """And where they do not move, it is said."""
    skip_without("critic")
    out = run_grpo(tmp_path / "run", "--critic=True", "--value_coef=0")
    assert re.search(rf"critic {NUMBER}", shown_by(out, "iter 1/")), (
        "the line of an iteration lacks the critic's loss: note 002")
    names = set(OF_A_CRITIC.split())
    assert all(m.keys() >= names for m in read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert re.search("WARNING: .*value_coef", out), "nothing is said of values that do not move"


@pytest.mark.parametrize("start", LINES)
def test_each_part_of_an_iteration_has_its_line(start, run):
    skip_without_sync(start)
    assert f"\n{start}" in run[0]


@pytest.mark.parametrize("what", SHOWN)
def test_a_line_shows_what_a_note_asks_for(what, run):
    skip_without_sync(what)
    start, part = SHOWN[what]
    for line in re.split(r"\n(?! )", shown_by(run[0], start)):
        assert re.search(part, line), f"gone from a line, note {what}:\n{line}"


def test_the_environments_share_is_shown_and_logged(run_grpo, tmp_path):
    skip_without("environment")
    path = tmp_path / "answers.py"
    path.write_text(
        "max_turns = 1\ndef environment(prompts, transcripts): return [' yes' for _ in prompts]\n")
    out = run_grpo(tmp_path / "run", path, "--stop_strings=('e',)", "--max_iters=1")
    share = 100 * read_rows(tmp_path / "run" / "metrics.jsonl")[0]["forced"]
    assert share > 0 and f"{share:.1f} % forced" in shown_by(out, "iter 1/"), (
        "004: the line of an iteration does not say which share the environment wrote")


def test_the_end_of_a_run_shows_before_and_after(run):
    """003: each measure and the same prompts, before training and after it."""
    out, _, folder = run
    before, *_, after = read_rows(folder / "eval.jsonl")
    for name, x in before.items():
        if isinstance(x, float) and isinstance(after[name], float):
            assert re.search(rf"^{re.escape(name)} +{x:.4f} +{after[name]:.4f}", out, re.M), (
                f"003: the table of before and after lacks {name}")
    for old, new in zip(before["samples"], after["samples"]):
        assert repr(old["completion"]) in out and repr(new["completion"]) in out, (
            "003: the completions of before and after are not shown")


def test_samples_say_their_influence_and_what_became_of_it(run):
    """000: do the rollouts that are kept look reasonable?"""
    for row in read_rows(run[2] / "samples.jsonl"):
        assert {"reward", "advantage", "influence", "weight"} <= row.keys(), (
            f"000: a row of samples.jsonl lacks its influence or its weight: {list(row)}")
        assert row["weight"] == float(row["influence"] > 0), "000: what is positive is kept"


def test_wandb_gets_the_metrics_until_it_fails(run_grpo, tmp_path, monkeypatch):
    """000 and 003. Then the run goes on, says so, and asks it no more."""
    logged = []

    def log(row, step):
        logged.append((step, row))
        if step == 2:
            raise ConnectionError("unreachable")

    wandb = ModuleType("wandb")
    wandb.init = lambda **about: logged.append(about)
    wandb.log = log
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    text = run_grpo(tmp_path, "--wandb_project=toys", "--max_iters=3")
    assert len(logged) == 4, f"wandb gets {[step for step, _ in logged[1:]]}, not 0, 1 and 2"
    begun, (_, first), (_, row), (last, _) = logged
    assert begun["project"] == "toys" and begun["config"]["num_prompts"] == 4
    assert "eval/perplexity" in first and last == 2
    assert row["reward"] == read_rows(tmp_path / "metrics.jsonl")[0]["reward"]
    assert "wandb.log" in text, "nothing says that it failed"
    assert (tmp_path / "ckpt_000003.pt").exists(), "the run did not come to its end"


@pytest.mark.parametrize("note", SETTINGS)
def test_a_setting_is_there(note):
    flags = SETTINGS[note].split()
    skip_for(**dict(flag.split("=") for flag in flags))
    load_settings([f"--{flag}" for flag in flags])


@pytest.mark.parametrize("name", ("quick_test", "quick_test_clip"))
def test_the_quick_test_ends_with_a_verdict(name):
    cfg = load_settings([f"{ROOT}/config/{name}.py"])
    assert cfg.expect_rise > 0, f"002: config/{name}.py ends without a verdict"


def test_compile_is_off_until_it_is_asked_for(run_grpo, tmp_path, monkeypatch):
    """002: it took minutes, and nobody had asked for it. Here the compiler changes nothing."""
    skip_without("compiled")
    compiled = []

    def compiler(model, **how):
        compiled.append(model)
        return model

    monkeypatch.setattr(torch, "compile", compiler)
    run_grpo(tmp_path / "off", "--max_iters=1")
    assert not compiled, "002: it compiles unasked"
    run_grpo(tmp_path / "on", "--max_iters=1", "--compile=True")
    assert compiled, "002: compile = True compiles nothing"


# phase of --debug_step, by its title: what it shows, whatever its words
PHASES = {
    "set-up": [r"policy.*float32.*cpu", "reference.*frozen", "num_generations 4.*beta 0.5"],
    "evaluation before": [r"rewards/judge +-?\d"],
    "rollout": [r"best.*row \d", r"worst.*row \d", "reference"],
    "rewards": [r"judge: mean -?\d"],
    "advantages": [r"group 0: mean -?\d.*divisor.*\n +rewards .*\n +adv"],
    "loss": [r"gradient -?\d.*KL -?\d.*= loss -?\d", r"KL.*gradient is \d", "ratio.*std.*min.*max"],
    "gradient norms": [r"wte.weight +\d", r"all +\d.*max_grad_norm"],
    "moved": ["tensors changed", r"ratio.*\n.*KL.* -> \d", r"best.*log-prob -\S+ -> -"],
    "evaluation after": [r"rewards/judge +-?\d\S+ +[+-]\d"],
    "red flags": [r"\w"]}


@pytest.fixture(scope="module")
def taken_apart(run_grpo, tmp_path_factory):
    """What --debug_step prints of the iteration after a checkpoint."""
    skip_without("step")
    run = tmp_path_factory.mktemp("step") / "run"
    run_grpo(run, "--beta=0.5", "--max_iters=1")
    return run_grpo(run, run, "--debug_step=True")


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_is_taken_apart(phase, taken_apart):
    found = re.search(rf"^--- \d+\. {phase}(.*?)(?=^---|\Z)", taken_apart, re.M | re.S)
    assert found, f"there is no phase {phase!r}:\n{taken_apart}"
    for line in PHASES[phase]:
        assert re.search(line, found[1]), f"{phase} lacks {line}:\n{found[1]}"


# ------------------------------------------------------------------------------------------------
# failures

RANDOM = """
import random

def reward(completions):
    return [random.random() for _ in completions]
"""
CONSTANT = "def reward(completions): return [0.5 for _ in completions]"
BY_PROMPT = "def reward(prompts, completions): return [float(len(p)) for p in prompts]"
ONE_OF_TWO = """
reward_funcs = ("length", "flat")

def length(completions):
    return [float(len(text)) for text in completions]

def flat(completions):
    return [1.0 for _ in completions]
"""
ROUNDING = "def reward(completions): return [1e-6 * len(text) for text in completions]"
LETTERS = "def reward(completions): return [float(text.count('e')) for text in completions]"
# the nearer all letters are to e in the alphabet, the better
NEAR_E = """
def reward(completions):
    return [-sum(min(abs(ord(c) - ord("e")), 99) for c in text) / len(text) if text else -99.0
            for text in completions]
"""
RELATIVE = NEAR_E.replace("reward", "_nearness") + """
def reward(completions):
    found = _nearness(completions)
    return [x - sum(found) / len(found) for x in found]
"""
FALLING = """
_calls = []

def reward(completions):
    _calls.append(1)
    return [len(text) - 30.0 * len(_calls) for text in completions]
"""
HELD_OUT = ("--tracin=reward", "--tracin_val_prompts=4", "--tracin_val_size=4")
# the failure of a note: its config ("": the judge), the flags of the run, and the thing or the
# remedy that each line must name
FAILURES = {
    "002, 003: the policy is certain of one answer": (
        RANDOM, ["--temperature=1e-3"], ["completions.*temperature", "log-probs.*temperature"]),
    "000, 002: all rewards are equal": (CONSTANT, ["--tracin=reward"], ["0.5", "no rollout"]),
    "002: all advantages are near zero": (BY_PROMPT, [], [r"advantages.*\[\d"]),
    "002: one reward of two never varies": (ONE_OF_TWO, [], ["'flat'"]),
    "002: the spread of rewards is rounding": (ROUNDING, [], ["rounding"]),
    "002: no token is learned from": (
        LETTERS, ["--mask_truncated_completions=True", "--max_completion_length=1"],
        ["mask_truncated_completions"]),
    "002: a loss of 0.0000 is right": (LETTERS, ["--loss_type=grpo"], ["0.0000"]),
    "003: the KL rules": (
        RANDOM, ["--beta=1e4", "--learning_rate=1e-2", "--eval_interval=1"], ["KL.*lower beta"]),
    "003: the KL holds nothing": (
        LETTERS, ["--learning_rate=0.1", "--beta=1e-6"], ["KL.*raise beta"]),
    "003: the held-out reward fell": (FALLING, [], ["held-out reward"]),
    "003: the entropy has collapsed": (
        RELATIVE, ["--learning_rate=0.05", "--max_iters=14"], ["entropy"]),
    "003: the text has collapsed": (
        NEAR_E, ["--learning_rate=0.05", "--max_iters=12"], ["distinct_2"]),
    "001: a target of the best": (
        "", [*HELD_OUT, "--tracin_val_select=best"], ["tracin_val_select"]),
    "000: a target that is noise": (
        RANDOM, ["--tracin=reward", "--num_prompts=2"], ["num_prompts"])}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_named(failure, run_grpo, tmp_path):
    config, flags, names = FAILURES[failure]
    if config:
        config += "\njudge = eval_judge = None\n"
    path = tmp_path / "failure.py"
    path.write_text(config or "max_iters = 2\n")
    out = run_grpo(tmp_path / "run", path, *flags)
    said = [line for line in out.splitlines() if line.startswith(("WARNING: ", "note: "))]
    for name in names:
        assert any(re.search(name, line) for line in said), (
            f"nothing names {name}, where {failure.partition(': ')[2]}: {said}")


# the failure of a note: kind of its warning, what a run's metrics say (beside EVERYTHING)
WARNED = {
    "002: no function scored anything": (
        "reward", dict(reward=math.nan, reward_min=math.nan, reward_max=math.nan)),
    "002: all rewards are equal": ("equal", dict(reward_min=0.5, reward_max=0.5)),
    "002: one reward of several is constant": ("constant", {"rewards/b/std": 0.0}),
    "002: no token carries loss": ("tokens", dict(num_completion_tokens=0)),
    "002: all log-probs are near zero": ("logp", dict(logp=-1e-4)),
    "002: all completions are truncated": ("length", {"completions/clipped_ratio": 1.0}),
    "003: identical completions": ("identical", dict(identical_completions=0.75)),
    "003: the entropy has collapsed": ("entropy", dict(entropy=0.1)),
    "003: zero gradient": ("gradient", dict(grad_norm=5e-7)),
    "003: the KL is above 5": ("kl", dict(kl=5.25)),
    "003: a negative KL": ("negative", dict(kl=-0.01)),
    "003: a KL that is a prize": ("kl sign", dict(kl_loss=-0.01)),
    "003: the KL rules": ("kl share", dict(kl_grad_share=3.0)),
    "003: the KL holds nothing": ("kl share", dict(kl_grad_share=1e-5, kl=0.4)),
    "004: ratio off on the first pass": (
        "ratio", {"sampling/sampling_logp_difference/mean": 0.0512}),
    "004: old log-probs that are recomputed": (
        "steps", dict(ratio_min=1.0, ratio_max=1.0, num_steps=4)),
    "004: every call of a tool fails": ("tools", {"tools/failure_frequency": 1.0}),
    "004: values that do not move": ("values", {"val/std": 0.0}),
    "004: the critic explains nothing": ("critic", {"val/var_explained": -0.2}),
    "004: the reference differs after a sync": ("sync", dict(ref_tensors_differing=3)),
    "000: nothing was kept": ("empty", {"tracin/empty_steps": 1}),
    "000: hardly any influence is positive": (
        "fallback", {"tracin/fallback": 1.0, "tracin/positive_ratio": 0.05}),
    "000: a target that is noise": ("noise", {"tracin/target_cosine": 0.05}),
    "001: a target of the best": ("contrast", {"tracin/target_contrast": 0.2}),
    "001: own parts": ("self", {"tracin/self_share": 1.18})}


@pytest.mark.parametrize("failure", WARNED)
def test_each_warning_fires_in_its_case_alone(failure):
    kind, wrong = WARNED[failure]
    kinds = list(found(EVERYTHING | wrong))
    assert kinds == [kind], f"note {failure}: it warns of {kinds or 'nothing'}, not of {kind!r}"


def test_a_warning_about_a_metric_that_is_not_there_is_a_mistake():
    """A misspelled name must not be a warning that never comes."""
    for missing in {next(iter(wrong)) for _, wrong in WARNED.values()}:
        if missing in ("kl_grad_share", "ref_tensors_differing"):
            continue        # not every iteration has them
        some = {name: x for name, x in EVERYTHING.items() if name != missing}
        with pytest.raises(KeyError, match=missing):
            found(some, first=some)


def test_tokens_that_carry_no_loss_and_should_are_noted():
    """002. A note, since an edit of grpo.loss_mask_of may mean it."""
    said = dict(notes(GOOD | {"tokens_without_loss": 3}, PLAIN))
    assert list(said) == ["mask"], f"002: 3 sampled tokens carry no loss: {said or 'not a word'}"


def test_an_iteration_that_takes_several_times_the_median_is_noted():
    """002: a slow iteration."""
    for seconds, earlier, kinds in ((9.0, [30.0, 1.0, 2.0, 2.0], ["slow"]), (9.0, [1.0] * 3, []),
                                    (2.0, [1.0] * 9, [])):
        rows = [GOOD | {"step_time": x} for x in earlier]
        said = [kind for kind, _ in notes(GOOD | {"step_time": seconds}, PLAIN, rows)]
        assert said == kinds, f"002: {seconds} s after {earlier}: {said or 'not a word'}"


def every_flag():
    """{kind: sentence} of all warnings and notes."""
    flags = {}
    for kind, wrong in WARNED.values():
        flags |= {kind: found(EVERYTHING | wrong)[kind]}
    own = replace(PLAIN, functions={"advantage": len}, zero_std_groups="drop")
    for changes, cfg, groups in (
            (dict(frac_reward_zero_std=1.0), PLAIN, GROUPS),
            (dict(frac_reward_zero_std=1.0), own, GROUPS),
            (dict(advantage_group_mean=0.1), PLAIN, GROUPS), ({}, PLAIN, GROUPS * 1e-5)):
        flags |= dict(problems(GOOD | changes, cfg, [GOOD], groups))
    before = {"prompt_rewards": [0.5] * 4, "distinct_2": 0.9, "kl": 0.0}
    after = {"prompt_rewards": [0.1] * 4, "distinct_2": 0.1, "kl": 0.6}
    flags |= dict(problems_of_evaluation(before, after, PLAIN, [{"kl": 0.1}] * 5))
    flags |= dict(problems(GOOD | {"grad_norm": 99.0}, PLAIN, [GOOD] * 4, GROUPS))
    one_answer = GOOD | {"reward": 0.9, "entropy": 0.1}
    solved = one_answer | {"reward_min": 0.9, "reward_max": 0.9}
    for m in (GOOD | {"loss": 0.0, "step_time": 9.0}, one_answer, solved,
              GOOD | {"tokens_without_loss": 3}):
        flags |= dict(notes(m, PLAIN, [GOOD] * 4))
    return flags


def kinds_of_flags():
    """The kinds that run/flags.py yields, as they stand there."""
    kinds = re.findall(r'(?:yield |append\(\()"([a-z ]+)"', read_page("run/flags.py"))
    return sorted(set(kinds))


# a question that leads to the cause, or a thing to do
REMEDY = re.compile(
    r"\?|\b(check|do not trust|drop|look|lower|multiply|raise|read|sample|set|stop|take|try|unset|"
    r"use|watch)\b")


@pytest.mark.parametrize("kind", kinds_of_flags())
def test_a_flag_says_what_to_do(kind):
    """003: a warning that only complains leaves its reader where he was."""
    flags = every_flag()
    assert kind in flags, f"nothing above provokes {kind!r} of run/flags.py"
    assert REMEDY.search(re.split("[:;.] ", flags[kind], maxsplit=1)[-1]), (
        f"003: {kind!r} does not say what to do: {flags[kind]}")


def test_the_fallback_keeps_the_better_half():
    """000's first fix."""
    influence = torch.cat([-torch.arange(1.0, 21), torch.zeros(5)])     # those of 0 do not count
    keep, fallback = positive(influence)
    assert fallback and keep.tolist() == [True] * 10 + [False] * 15, (
        "000: hardly any influence is positive, and the better half is not kept")
    influence[18:20] = 1.0      # one in ten
    keep, fallback = positive(influence)
    assert not fallback and torch.equal(keep, influence > 0)


@pytest.mark.parametrize("tracin", ("off", "self"))
def test_an_environments_token_under_the_loss_stops_the_run(tracin):
    """004."""
    cfg = settings(tracin=tracin, micro_batch_size=5)
    setup, batch = world(cfg)
    batch.rollout.sampled_mask = batch.rollout.sampled_mask.clone()     # not the loss's
    batch.rollout.sampled_mask[7, 0] = False        # as if an environment had written it
    before = [p.clone() for p in setup.trained]
    assert "1 token" in refusal(grpo.update, setup, batch, None, cfg, seed=1)
    assert all(map(torch.equal, setup.trained, before)), "a step was taken"


def test_a_language_model_is_no_judge(run_grpo, tiny, tmp_path):
    """002: the judge was one, and nobody saw it."""
    assert_refused(("'policy'", "'judge'"), run_grpo, tmp_path / "run", f"--judge={tiny.policy}")


def test_a_prompt_and_the_table_name_the_same_tools(run_grpo, tmp_path):
    """004: the prompt said slack_send_message, the table send_slack_message."""
    skip_without("environment")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{i} slack_send(text)\n" for i in range(9)))
    path = tmp_path / "tools.py"
    path.write_text("def send(text): return text\ntools = {'send_slack': send}\n")
    assert_refused(("'slack_send'", "'send_slack'"), run_grpo, tmp_path / "run",
                   path, f"--prompts={prompts}", f"--eval_prompts={prompts}")


def test_a_sync_that_does_nothing_is_named(run_grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Parameter, "lerp_", lambda self, *more: self, raising=False)
    out = run_grpo(tmp_path / "run", "--beta=0.1", "--ref_model_sync_steps=1", "--max_iters=2")
    assert re.search("WARNING: .*sync", out)
