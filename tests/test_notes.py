"""
What the notes ask to see, so that no later change takes it away.

The project began with five diaries of people who lost days to silent mistakes in GRPO:
    000     influence: which numbers show that it works
    001     influence: what a target must be
    002     a loss of 0.0000, and minutes for an iteration
    003     one step of GRPO taken apart, in ten phases
    004     ratio, environment, reference and values: what was silently wrong
A row is what a note asks for: its note, what it is, and the names or the line that show it. Numbers
are checked by hand elsewhere (test_metrics.py, test_report.py); here it is asked that they are
there. Then each failure of the notes is provoked once, and must be named.
"""
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import grpo as method
from common.files import ROOT
from rollout import Rollout, completion_logprobs
from run.flags import notes
from tracin import select
from worlds import (
    WORDS, WORD_PROMPTS, load_settings, loss_of_rows, read_rows, refusal, setup_of, skip_without,
    word_gpt, words)


def cells(table):
    """Rows "note | what | names" of a table."""
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    return [pytest.param(*names, id=f"note {note}, {what}") for note, what, *names in rows]


# ------------------------------------------------------------------------------------------------
# numbers in metrics.jsonl

INFLUENCE = """
000 issue 1 | counts by sign | tracin/positive_ratio tracin/negative_ratio tracin/zero_ratio
000 issue 1 | distribution | tracin/mean_ip tracin/std_ip tracin/min_ip tracin/max_ip
000 issue 1 | fallback | tracin/fallback
000 issue 2 | advantages of the target | tracin/target_advantage_min tracin/target_advantage_max
000 issue 2 | loss of the target by rollout | tracin/target_loss_min tracin/target_loss_max
000 issue 2 | loss of the target | tracin/target_loss
000 issue 2 | gradient of the target | tracin/target_grad_norm
000 issue 2 | first layers | tracin/target_grad_norm/wte.weight tracin/target_grad_norm/wpe.weight
000 issue 2 | how much is learned from | num_completion_tokens num_steps tracin/target_rows
000 hypothesis 2 | is the target noise | tracin/target_cosine
000 testing 4 | selection ratio | tracin/selected_ratio tracin/empty_steps
001 mistake 2 | contrast | tracin/target_contrast
001 fix | same batch: own part | tracin/self_share
002 values | KL | kl kl_loss
002 step 1 | do rewards vary | reward reward_std reward_min reward_max frac_reward_zero_std
002 step 2 | do completions differ | identical_completions
002 step 3 | log-probs | logp entropy
003 healthy 1 | advantages | advantage_std advantage_min advantage_max
003 healthy 3 | gradient | grad_norm
003 phase 10 | KL's share | kl_grad_share
004 fix 1 | ratio | ratio ratio_std ratio_min ratio_max
004 fix 2 | tokens of an environment | forced
004 fix 3 | sync of the reference | ref_tensors_differing
004 fix 5 | trainer against sampler | sampling/sampling_logp_difference/mean
"""
CRITIC = """
004 fix 4 | values | val/mean val/std returns/mean
004 fix 4 | is the head trained | val/grad_norm critic_loss
004 fix 4 | explained variance | val/var_explained
"""


@pytest.fixture(scope="module")
def influence(run_grpo, tmp_path_factory):
    """A run with influence on held-out rollouts, a KL and a reference that is copied."""
    folder = tmp_path_factory.mktemp("influence") / "run"
    out = run_grpo(folder, "--tracin=reward", "--tracin_val_prompts=2", "--beta=0.1",
                   "--max_iters=2", "--ref_model_sync_steps=1", "--ref_model_mixup_alpha=1",
                   "--eval_interval=1")
    return SimpleNamespace(out=out, folder=folder, metrics=read_rows(folder / "metrics.jsonl"))


@pytest.mark.parametrize("names", cells(INFLUENCE))
def test_a_number_is_logged(names, influence):
    for m in influence.metrics:
        assert m.keys() >= set(names.split())
    page = open(f"{ROOT}/docs/running.md").read()
    for name in names.split():
        family, _, last = name.rpartition("/")
        short = re.escape("target_grad_norm/NAME" if family.count("/") else last)
        assert re.search(rf"`([\w/]*/)?{short}`", page), f"docs/running.md has no {name}"


def test_note_004_the_values_are_logged(run_grpo, tmp_path):
    skip_without("critic")
    run_grpo(tmp_path / "run", "--critic=True", "--max_iters=1")
    m, = read_rows(tmp_path / "run" / "metrics.jsonl")
    for row in cells(CRITIC):
        assert m.keys() >= set(row.values[0].split()), row.id


def test_note_000_these_numbers_go_to_wandb(run_grpo, tmp_path, monkeypatch):
    sent = {}
    wandb = SimpleNamespace(init=lambda **what: None, finish=lambda *what, **more: None,
                            log=lambda m, step: sent.update(m))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_grpo(tmp_path / "run", "--tracin=self", "--max_iters=1", "--wandb_project=mine")
    assert {"tracin/positive_ratio", "tracin/negative_ratio", "tracin/min_ip", "tracin/max_ip",
            "tracin/selected_ratio"} <= sent.keys()


# ------------------------------------------------------------------------------------------------
# lines

LINES = r"""
002 lines | an iteration | ^iter 1/2: loss -?\d.*\(main -?\d.*\), reward .*tok/s, time \d
002 log 1 | start | ^\[Micro 0\] 1\. .*mem=\d+ MB, time=\d
002 log 2 | sampled | ^\[Micro 0\] 2\. .*mem=\d+ MB, time=\d
002 log 3 | scored | ^\[Micro 0\] 3\. .*rewards=-?\d\.\d+±\d
002 log 4 | loss | ^\[Micro 0\] 4\. .*pg_loss=-?\d.*kl=-?\d.*total=-?\d
002 log 5 | step | ^5\. .*mem=\d+ MB.*total
004 fix 3 | sync | ^reference synced: 0 tensors differ
"""


@pytest.mark.parametrize("line", cells(LINES))
def test_a_line_is_printed(line, influence):
    assert re.search(line, influence.out, re.M), influence.out


DEBUG = r"""
003 phase 1 | set-up | set-up | policy: [\d,]+ weights, [\d,]+ of them trained, torch.float32 on cpu
003 phase 1 | parameters | set-up | num_generations 4.*temperature 1.*beta 0.5.*learning rate
003 phase 1 | frozen reference | set-up | reference: .*frozen
003 phase 2 | evaluation before | evaluation before | rewards/judge +-?\d
003 phase 3 | log-prob by token | rollout | best: row \d+.*\n.*\n.*' -\d+\.\d\d/-\d
003 phase 3 | log-prob of the reference | rollout | log-prob of the reference -\d
003 phase 4 | rewards by function | rewards | judge: mean -?\d.*abstains for \d
003 phase 5 | advantages by group | advantages | group 0: mean -?\d.*divisor.*\n +rewards .*\n +adv
003 phase 6 | policy and KL | loss | policy gradient -?\d.* \+ beta \* KL -?\d.* = loss -?\d
003 phase 10 | KL's share | loss | the KL has \d.*% of the loss.*gradient is \d
003 phase 10 | ratio | loss | ratio: mean .*std .*min .*max
003 phase 10 | gradient norms | gradient norms | wte.weight +\d\.\d+e\S+ +\d.*\n.*
003 phase 10 | clipping | gradient norms | all +\d.*max_grad_norm
003 phase 10 | what the step did | moved | tensors changed
003 phase 10 | ratio and KL after | moved | ratio of the tokens.*\n.*KL to the reference.* -> \d
003 phase 10 | log-probs after | moved | best completion.*log-prob -\S+ -> -
003 phase 9 | evaluation after | evaluation after | rewards/judge +-?\d\S+ +[+-]\d
003 red flags | red flags | red flags | \w
"""


@pytest.fixture(scope="module")
def taken_apart(run_grpo, tmp_path_factory):
    """What --debug_step prints of the iteration after a checkpoint."""
    skip_without("step")
    run = tmp_path_factory.mktemp("step") / "run"
    run_grpo(run, "--beta=0.5", "--max_iters=1")
    return run_grpo(run, run, "--debug_step=True")


@pytest.mark.parametrize("phase, line", cells(DEBUG))
def test_a_step_is_taken_apart(phase, line, taken_apart):
    found = re.search(rf"^--- \d+\. {phase}(.*?)(?=^---|\Z)", taken_apart, re.M | re.S)
    assert found, f"there is no phase {phase!r}:\n{taken_apart}"
    assert re.search(line, found[1]), found[1]


# ------------------------------------------------------------------------------------------------
# settings

SETTINGS = """
000 issue 1 | positive influence | tracin_select=positive tracin=self
000 hypothesis 2 | size of the target | tracin_val_size=64 tracin_val_prompts=16 tracin=reward
000 hypothesis 3 | most toxic | tracin_val_select=worst tracin_val_prompts=2
000 option A | least toxic | tracin_val_select=best tracin_val_prompts=2
000 option B | balanced | tracin_val_select=balanced tracin_val_prompts=2
000 option C | random | tracin_val_select=random
000 testing 4 | beside plain GRPO | tracin_select=all tracin=reward
001 fix | same batch | tracin=self tracin_val_prompts=0
001 mistake 3 | seqloss-reward | tracin=reward
001 option 1 | seqloss-lastadv | tracin=advantage
001 option 2 | contrastive | tracin=contrastive
001 PPO | value function | critic=True
002 recommended 2 | compile off | compile=False
002 recommended 4 | fewer rows | num_prompts=1 micro_batch_size=4
003 phase 2 | temperature of the evaluation | eval_temperature=0.8
003 phase 3 | top-p | top_p=0.9 temperature=0.5
003 phase 5 | divisor of the advantages | scale_rewards=group
003 design 1 | global normalisation | scale_rewards=batch
003 differences 1 | KL as a difference | kl_estimator=k1 beta=0.1
003 differences 3 | length normalisation | loss_type=dr_grpo
004 fix 3 | sync every N steps | ref_model_sync_steps=100 beta=0.1
004 fix 4 | discount and lambda | gae_gamma=0.99 gae_lambda=0.95
"""


@pytest.mark.parametrize("flags", cells(SETTINGS))
def test_a_setting_is_there(flags):
    if "critic" in flags:
        skip_without("critic")
    load_settings([f"--{flag}" for flag in flags.split()])


PAGES = """
000 end | diagnosis | docs/influence.md | classic failures
000 testing 2 | how large a target | docs/influence.md | tracin/target_cosine
001 mistake 3 | raw reward times log-prob | docs/influence.md | batch.rewards
002 quick test | a config | config/quick_test.py | expect_rise
003 parameters | effect of higher and lower values | docs/running.md | What to turn
003 interactions | beta and learning rate | docs/running.md | how far it may
003 failure modes | collapse | docs/running.md | exploration
"""


@pytest.mark.parametrize("path, words", cells(PAGES))
def test_a_page_says_it(path, words):
    assert words in open(f"{ROOT}/{path}").read()


# ------------------------------------------------------------------------------------------------
# the arithmetic that note 003 gives as TRL's


@pytest.fixture(scope="module")
def sampled():
    """A policy, and a Batch that it has sampled."""
    cfg = words()
    setup = setup_of(cfg, word_gpt(), WORD_PROMPTS, WORDS)
    return setup.policy, method.collect(setup, WORD_PROMPTS, cfg, seed=3)


def test_note_003_log_probs_of_tokens(sampled):
    """Position prompt_length - 1 scores the first token of the completion."""
    policy, batch = sampled
    found = completion_logprobs(policy, batch.rollout)
    T = found.shape[1]
    for i, tokens in enumerate(batch.rollout.tokens):
        prompt = tokens[:-T][batch.rollout.attention_mask[i, :-T]]
        completion = tokens[-T:][batch.rollout.completion_mask[i]]
        ids = torch.cat([prompt, completion])
        lp = F.log_softmax(policy.lm_head(policy(ids[None]))[0][:-1], dim=-1)
        tok_lp = lp.gather(dim=1, index=ids[1:].unsqueeze(1)).squeeze(1)[len(prompt) - 1:]
        torch.testing.assert_close(found[i, :len(completion)], tok_lp, rtol=1e-4, atol=1e-5)


def test_note_003_advantages_step_by_step():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, -0.5, -0.3, 0.2, 0.0])
    grouped = rewards.view(2, 4)
    mean = grouped.mean(dim=1).repeat_interleave(4, dim=0)
    std = grouped.std(dim=1).repeat_interleave(4, dim=0) + 1e-4
    torch.testing.assert_close(method.group_advantages(rewards, 4), (rewards - mean) / std)


def test_note_003_loss_by_token():
    """-ratio * A + beta * KL, summed over the mask and divided by its tokens."""
    g = torch.Generator().manual_seed(1)
    logp = (-3 * torch.rand(2, 5, generator=g)).requires_grad_()
    ref_logp = logp.detach() + 0.3 * torch.randn(2, 5, generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    A = torch.tensor([1.5, -0.5])
    loss = loss_of_rows(logp, logp.detach(), A, mask, ref_logp, beta=0.1,
                        use_bias_correction_kl=False).total
    kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
    pg = -torch.exp(logp - logp.detach()) * A.unsqueeze(1)
    expected = ((pg + 0.1 * kl) * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(x, logp)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients)


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
RELATIVE = """
def reward(completions):
    counts = [text.count("e") for text in completions]
    return [count - sum(counts) / len(counts) for count in counts]
"""
FALLING = """
_calls = []

def reward(completions):
    _calls.append(1)
    return [len(text) - 30.0 * len(_calls) for text in completions]
"""
OWN = ("--judge=None", "--eval_judge=None")
# the note's failure: its config, the flags of the run, and what the run must say
FAILURES = {
    "003 red flag 1, identical completions": (RANDOM, ("--temperature=1e-3",), "exploration"),
    "002 step 3, log-probs near zero": (RANDOM, ("--temperature=1e-3",), "log-probs are near zero"),
    "003 red flag 2, no gradient": (
        RANDOM, ("--temperature=1e-3",), "gradient is near zero|policy is certain"),
    "002 issue 1.1, all rewards are equal": (CONSTANT, (), "all rewards of the batch are 0.5"),
    "002 step 2, all advantages are near zero": (BY_PROMPT, (), r"advantages.*group: \[\d"),
    "002 step 2, one reward of two never varies": (ONE_OF_TWO, (), "reward 'flat'"),
    "002 step 1, the spread of rewards is rounding": (ROUNDING, (), "rounding"),
    "003 red flag 3, the KL rules": (
        RANDOM, ("--beta=1e4", "--learning_rate=1e-2", "--eval_interval=1"), "KL's gradient"),
    "003 red flag 4, the held-out reward fell": (FALLING, (), "held-out reward fell"),
    "003 failure 1, the entropy has collapsed": (
        RELATIVE, ("--learning_rate=0.03", "--max_iters=14"), "entropy has collapsed"),
    "003 failure 1, the text has collapsed": (
        LETTERS, ("--learning_rate=0.03", "--max_iters=8"), "text has collapsed"),
    "003 red flag 3, the KL holds nothing": (
        LETTERS, ("--learning_rate=0.1", "--beta=1e-6"), "holds nothing back"),
    "001, a target of the best": (
        "", ("--tracin=reward", "--tracin_val_prompts=4", "--tracin_val_size=4",
             "--tracin_val_select=best"), "target's rewards spread"),
    "000 hypothesis 2, a target that is noise": (
        RANDOM, ("--tracin=reward", "--num_prompts=2"), "target's rollouts are too few"),
    "000 next steps 3, influence of zero": (
        CONSTANT, ("--tracin=reward",), "influence kept no rollout"),
    "002 issue 1.2, no token is learned from": (
        LETTERS, ("--mask_truncated_completions=True", "--max_completion_length=1"),
        "no completion tokens carry loss"),
    "002 issue 1, a loss of 0.0000 is right": (LETTERS, ("--loss_type=grpo",), "note: a loss of 0")}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_named(failure, run_grpo, tmp_path):
    config, flags, words = FAILURES[failure]
    path = tmp_path / "failure.py"
    path.write_text(config or "max_iters = 2\n")
    out = run_grpo(tmp_path / "run", path, *OWN * bool(config), *flags)
    said = [line for line in out.splitlines() if line.startswith(("WARNING: ", "note: "))]
    assert any(re.search(words, line) for line in said), "\n".join(said) or "nothing was said"


def test_note_000_hardly_any_positive_influence_keeps_the_better_half():
    keep, is_fallback = select(torch.tensor([0.5, *(-float(i) for i in range(1, 12))]), "positive")
    assert is_fallback and keep.tolist() == [True] * 6 + [False] * 6


def test_note_000_influence_through_adapters_is_that_of_plain_backwards(run_grpo, tmp_path):
    """The first step of every run with influence is checked; a difference would end it."""
    skip_without("lora")
    run_grpo(tmp_path / "run", "--lora_rank=2", "--tracin=reward", "--max_iters=1")


def test_note_002_an_iteration_that_takes_several_times_the_median():
    m = dict(loss=0.1, num_steps=1, grad_norm=1.0, step_time=9.0)
    assert dict(notes(m, earlier=[1.0] * 5)).keys() == {"slow"}


def test_note_004_values_that_do_not_move(run_grpo, tmp_path):
    skip_without("critic")
    out = run_grpo(tmp_path / "run", "--critic=True", "--value_coef=0")
    assert "WARNING: the critic's values do not move" in out


def test_note_004_an_environments_token_under_the_loss_stops_the_run(
        run_grpo, tmp_path, monkeypatch):
    skip_without("environment")
    config = tmp_path / "answers.py"
    config.write_text(LETTERS + "\n\ndef environment(prompts, transcripts):\n"
                      "    return [' yes' if len(text) < 40 else None for text in transcripts]\n")
    monkeypatch.setattr(
        method, "loss_masks", lambda rollout, cfg: (rollout.completion_mask,) * 2)
    said = refusal(run_grpo, tmp_path / "run", config, *OWN, "--max_completion_length=16")
    assert "stopped" in said and "environment" in said
    assert not read_rows(tmp_path / "run" / "metrics.jsonl"), "the step was taken"


@pytest.mark.parametrize("alpha", (1.0, 0.6))
@pytest.mark.parametrize("rank", (0, 2))
def test_note_004_a_sync_that_does_nothing(rank, alpha, run_grpo, tmp_path, monkeypatch):
    if rank:
        skip_without("lora")
    flags = ("--beta=0.1", "--ref_model_sync_steps=1", f"--ref_model_mixup_alpha={alpha}",
             f"--lora_rank={rank}", "--max_iters=2")
    honest = run_grpo(tmp_path / "honest", *flags)
    assert "reference synced" in honest and "WARNING: the sync" not in honest
    monkeypatch.setattr(torch.nn.Parameter, "lerp_", lambda self, *more: self, raising=False)
    assert re.search("WARNING: .*sync", run_grpo(tmp_path / "nothing", *flags))


def test_note_004_a_layer_that_is_random_stops_the_run(run_grpo, tmp_path, monkeypatch):
    plain = torch.nn.LayerNorm.forward
    monkeypatch.setattr(
        torch.nn.LayerNorm, "forward", lambda self, x: plain(self, x) + 0.1 * torch.randn_like(x))
    assert "ratio is not 1" in refusal(run_grpo, tmp_path / "run")


@pytest.mark.parametrize("kl, words", [(-0.1, "KL -.* is negative"), (9.0, "KL 9.* is exploding")])
def test_note_002_a_kl_that_none_should_be(kl, words, run_grpo, tmp_path, monkeypatch):
    monkeypatch.setattr(method, "kl_estimate", lambda logp, ref_logp, kind: 0 * logp + kl)
    assert re.search(f"WARNING: {words}", run_grpo(tmp_path / "run", "--beta=0.1", "--max_iters=1"))


def test_note_004_a_rollout_without_log_probs_is_refused():
    with pytest.raises(TypeError):
        Rollout(tokens=None, attention_mask=None)


def test_note_002_a_judge_that_is_no_scorer_is_refused(run_grpo, tiny, tmp_path):
    assert "judge" in refusal(run_grpo, tmp_path / "run", f"--judge={tiny.policy}")


def test_note_004_a_tools_name_that_no_prompt_has_is_refused(run_grpo, tmp_path):
    skip_without("environment")
    config = tmp_path / "tools.py"
    config.write_text(LETTERS + """

def send_message(text: str):
    return text

tools = {"send_message": send_message}

def questions(n, seed):
    return [{"text": f"message_send({i}) ="} for i in range(n)]
""")
    said = refusal(run_grpo, tmp_path / "run", config, *OWN)
    assert "send_message" in said
