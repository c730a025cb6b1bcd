"""The questions of note 003, which takes one GRPO step of a chess policy apart, each with a test.

By the note's phases: log-probs and their shapes (3), rewards (4: tests/test_chess.py), advantages
(5), loss, KL and length (6 to 8), and what --debug_step=True shows of all ten.
"""
import re

import pytest
import torch
from torch.nn import functional as F

from conftest import ROOT
from config import Settings
from grpo import Step, group_advantages, grpo_loss, kl_estimate, main
from model import GPT, GPTConfig
from sample import completion_logprobs
from sample import generate

V = 23
PROMPTS = [[5, 6, 7, 8, 9], [3, 4]]     # left padding before the second


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    return GPT(GPTConfig(V, 24, 2, 2, 16)).eval()


@pytest.fixture(scope="module")
def rollout(policy):
    return generate(policy, PROMPTS, 4, 6, eos=(0,), seed=3)


def by_the_note(policy, ids, prompt_len):
    """The note's "corrected per-token log probability extraction" of one row of ids (L,)."""
    logits = policy.lm_head(policy(ids[None]))[0]                                   # (L, V)
    lp = F.log_softmax(logits[:-1], dim=-1)
    tok_lp = lp.gather(dim=1, index=ids[1:].unsqueeze(1)).squeeze(1)                # (L - 1,)
    return tok_lp[prompt_len - 1:]


def rows_of(rollout):
    """(ids of prompt and completion without padding, length of the prompt) of each row."""
    T = rollout.completion_mask.shape[1]
    for tokens, seen, mask in zip(rollout.tokens, rollout.attention_mask, rollout.completion_mask):
        prompt = tokens[:-T][seen[:-T]]
        yield torch.cat([prompt, tokens[-T:][mask]]), len(prompt)


def test_note_003_a_logit_predicts_the_next_token(policy, rollout):
    """Phase 3: position prompt_length - 1 scores the first token of the completion."""
    found = completion_logprobs(policy, rollout)                                    # (N, T)
    for row, (ids, prompt_len) in enumerate(rows_of(rollout)):
        expected = by_the_note(policy, ids, prompt_len)
        torch.testing.assert_close(found[row][rollout.completion_mask[row]], expected, rtol=1e-4, atol=1e-5)
        one_late = by_the_note(policy, ids, prompt_len + 1)
        if len(one_late):
            assert (found[row][:len(one_late)] - one_late).abs().max() > 1e-3


def test_note_003_log_probs_have_a_row_and_a_column_for_each_token(policy, rollout):
    """The note's gather took all tokens' log-probs at one position: its "shape bug"."""
    row = int(rollout.completion_mask.sum(1).argmax())
    ids, prompt_len = list(rows_of(rollout))[row]
    completion = ids[prompt_len:]
    lp = F.log_softmax(policy.lm_head(policy(ids[None]))[0][prompt_len - 1:-1], dim=-1)
    wrong = lp.gather(1, completion.unsqueeze(0)).squeeze()
    found = completion_logprobs(policy, rollout)
    right = found[row][rollout.completion_mask[row]]
    assert found.shape == rollout.completion_mask.shape == rollout.logp.shape
    assert len(completion) > 1 and wrong.shape == right.shape, "the fault is not one of shape"
    torch.testing.assert_close(wrong[0], right[0], rtol=1e-4, atol=1e-5)
    assert (wrong[1:] - right[1:]).abs().max() > 1e-3, "only the first token is right by chance"


def test_note_003_sampling_and_training_see_the_same_network(policy, rollout):
    """Phase 3's generate_eval: without dropout there is no mode to forget. The ratio is 1."""
    assert not any(isinstance(module, torch.nn.Dropout) for module in policy.modules())
    for mode in (True, False):
        logp = completion_logprobs(policy.train(mode), rollout)
        ratio = (logp - rollout.logp)[rollout.completion_mask].exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-4, atol=1e-4)


def test_note_003_advantages_step_by_step():
    """Phase 5: group, mean, expand, subtract, divide by the std of the group + 1e-4."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, -0.5, -0.3, 0.2, 0.0])
    grouped = rewards.view(2, 4)
    mean = grouped.mean(dim=1).repeat_interleave(4, dim=0)
    std = grouped.std(dim=1).repeat_interleave(4, dim=0) + 1e-4
    torch.testing.assert_close(group_advantages(rewards, 4), (rewards - mean) / std)


# --------------------------------------------------------------------------------------------------
# phases 6 to 8


def planted(loss_type="dapo", **settings):
    """Log-probs, masks and what grpo_loss makes of them; the second row is two tokens shorter."""
    g = torch.Generator().manual_seed(1)
    logp = (-torch.rand(2, 5, generator=g) * 3).requires_grad_()
    ref_logp = logp.detach() + 0.3 * torch.randn(2, 5, generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    advantages = torch.tensor([1.5, -0.5])
    cfg = Settings(loss_type=loss_type, use_bias_correction_kl=False, **settings)
    step = Step(0, torch.arange(2), 2, int(mask.sum()))
    loss, _ = grpo_loss(
        logp, logp.detach(), ref_logp, advantages, mask, None, step, cfg)
    return logp, ref_logp, mask, advantages, loss


def same_gradient(loss, expected, logp):
    found, = torch.autograd.grad(loss, logp, retain_graph=True)
    wanted, = torch.autograd.grad(expected, logp)
    torch.testing.assert_close(found, wanted)


def test_note_003_the_kl_is_the_surrogate_and_not_a_difference():
    """exp(ref - pol) - (ref - pol) - 1: never negative, and it has a gradient."""
    logp, ref_logp, *_ = planted(beta=0.1)
    found = kl_estimate(logp, ref_logp, "k3")
    torch.testing.assert_close(found, torch.exp(ref_logp - logp) - (ref_logp - logp) - 1)
    torch.testing.assert_close(kl_estimate(logp, ref_logp, "k1"), logp - ref_logp)
    assert (found >= 0).all() and not (logp >= ref_logp).all()
    assert torch.autograd.grad(found.sum(), logp)[0].abs().min() > 0


def test_note_003_the_loss_is_the_one_it_gives_as_trls():
    """Per token -ratio * A + beta * KL, summed over the mask and divided by its tokens."""
    logp, ref_logp, mask, advantages, loss = planted(beta=0.1)
    kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
    pg = -torch.exp(logp - logp.detach()) * advantages.unsqueeze(1)
    loss_tokens = pg + 0.1 * kl
    expected = (loss_tokens * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, expected)
    same_gradient(loss, expected, logp)


def test_note_003_its_sequence_reinforce_is_loss_type_grpo_at_ratio_1():
    """-A * (sum of log-probs / length) has another value and the same gradient."""
    logp, _, mask, advantages, loss = planted("grpo")
    lengths = mask.sum(1)
    expected = (-advantages * (logp * mask).sum(1) / lengths).mean()
    same_gradient(loss, expected, logp)
    assert abs(loss - expected) > 0.1


def test_note_003_padding_is_in_no_length():
    """A row's padding adds nothing, whatever stands there."""
    logp, ref_logp, mask, advantages, loss = planted(beta=0.1)
    gradient, = torch.autograd.grad(loss, logp)
    assert gradient[mask].all() and not gradient[~mask].any()


# --------------------------------------------------------------------------------------------------
# all phases


def test_note_003_debug_step_walks_its_ten_phases(tmp_path, capsys):
    """Of config/chess.py: setup, evaluation, rollout, rewards, advantages, loss with its KL,
    gradients and the step, evaluation, red flags."""
    pytest.importorskip("chess")
    main([f"{ROOT}/config/chess.py", "--debug_step=True", "--n_layer=1", "--n_embd=32",
          "--n_head=2", "--pretrain_tokens=3000", "--max_prompts=40", "--num_prompts=2",
          "--num_generations=2", "--num_eval_prompts=2", "--num_eval_generations=1",
          "--device=cpu", f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/prepared"])
    out = capsys.readouterr().out
    phases = re.findall(r"^--- \d+\. (\w+(?: \w+)?)", out, re.M)
    assert phases == ["evaluation before", "rollout", "rewards", "loss", "gradient norms",
                      "evaluation after", "red flags"], out
    for word in ("setup: ", "learning_rate", "beta * KL", "ratio: min", "clipped to",
                 "a_exact mean", "abstains", "advantages", "change: ", "KL is now"):
        assert word in out, f"note 003 asks for {word!r}:\n{out}"
