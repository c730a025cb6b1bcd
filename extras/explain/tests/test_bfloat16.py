"""An account of a run in bfloat16: the policy that draws its held-out completions is the one whose
slope is taken, and its parts add up to the steps that the run took."""
import pytest
import torch

from extras.explain.account import make_account
from extras.explain.question import row_of
from extras.explain.repeat import repeat_run
from extras.explain.target import HeldOut, sentence_target
from rollout import completion_logprobs
from worlds import number_gpt, settings, setup_of, shaken


def length(prompts, completions):
    return [len(text) for text in completions]


@pytest.fixture
def half():
    """Setup in bfloat16, and its settings."""
    cfg = settings(functions=length, learning_rate=1e-3, max_iters=2, beta=0.1, kl_in="loss")
    setup = setup_of(cfg, number_gpt(), reference=shaken(number_gpt(), 0.05))
    setup.optimizer = torch.optim.AdamW(setup.trained, eps=1e-2)
    setup.dtype = torch.bfloat16
    return setup, cfg


def test_held_out_completions_are_drawn_by_the_policy_whose_slope_is_taken(half):
    setup, cfg = half
    held_out = HeldOut("reward", setup, cfg, setup.reward_funcs, [1.0], setup.eval_prompts, 20)
    rollout, _ = held_out.sample()
    logp = completion_logprobs(setup.policy, rollout, cfg.eval_temperature)
    off = ((rollout.logp - logp).abs() * rollout.sampled_mask).max()
    assert off < 1e-4, f"a log-prob is {off:.1e} off: another policy has drawn"


def test_parts_add_up_to_the_steps_that_were_taken(half):
    """What the run's own passes rounded is a part by name, and a small one."""
    setup, cfg = half
    sentence = sentence_target(setup, cfg, row_of([2, 3], [4, 1, 0], setup.device))
    account = make_account(repeat_run(setup, cfg, 2), sentence)
    size = float(account.shares.abs().sum())
    off = abs(float(account.gains.sum() - account.together.sum()))
    assert off < 1e-4 * size, f"{off / size:.1e} of the shares in size have no name"
    rounding = float(account.rest["rounding"].abs().sum())
    assert 1e-6 * size < rounding < 0.05 * size, f"rounding is {rounding / size:.1e} of the shares"
