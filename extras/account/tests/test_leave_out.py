"""The study of predictions in a toy world: what it leaves out, and what it predicts of that."""
import pytest
import torch

from extras.account import leave_out, logprobs, replay
from worlds import refusal, settings, setup_of


def odd_reward(prompts, completions):
    return [sum(map(ord, text)) % 7 for text in completions]


def toy(**knobs):
    """A policy whose steps are smooth: AdamW with a large eps."""
    cfg = settings(odd_reward, max_iters=3, learning_rate=0.005, kl_in="loss", beta=0.2, **knobs)
    setup = setup_of(cfg)
    setup.optimizer = torch.optim.AdamW(
        setup.trained, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=0.1, weight_decay=0, fused=True)
    return setup, cfg


def test_the_derivative_is_what_weights_do_and_nothing_left_out_is_the_run(tmp_path):
    setup, cfg = toy()
    states, taken = replay(setup, cfg, 0, 0, cfg.max_iters, str(tmp_path))
    start = states[0][0]
    batches = [k.batch for k in taken]
    sentences = leave_out.sentences_of(setup, cfg, batches[0])[:2]
    scores = leave_out.scores_of(setup, cfg, states, taken, sentences, [0.0])
    score = scores["derivative with the Hessian 0.0"]
    everything = torch.ones(score.shape[1:])
    for sampled in (False, True):
        end = leave_out.train_again(setup, cfg, start, batches, everything, sampled)
        assert torch.equal(end, states[-1][0]), "the run with all of its rollouts is another run"

    less = 0.02 * torch.rand(everything.shape)
    end = leave_out.train_again(setup, cfg, start, batches, everything - less, False)
    with torch.no_grad():
        was, now = (logprobs(setup, w, sentences, cfg).sum(1) for w in (states[-1][0], end))
    for x, error in zip(score, now - was + (less * score).sum((1, 2))):
        error = abs(error)
        assert error < 0.05 * (less * x).abs().sum(), "a rollout has another one's score"


def test_study_of_two_sentences_and_four_subsets(monkeypatch, tmp_path):
    monkeypatch.setattr(leave_out, "OWN", 1)
    monkeypatch.setattr(leave_out, "UNSEEN", 1)
    setup, cfg = toy(out_dir=str(tmp_path))
    found = leave_out.study(setup, cfg, [0.3], [0.0, 0.3], 4, False)
    for arm, rho in found[0.3].items():
        assert rho.shape == (2,) and (rho.abs() <= 1 + 1e-6).all(), f"{arm}: no correlation"
    assert found[0.3]["derivative with the Hessian 0.0"].min() > 0.7, "smooth steps, no prediction"


def test_spearman_by_hand():
    x = torch.tensor([[1.0, 5], [2, 6], [30, 4]])
    y = torch.tensor([[-3.0, 2], [-2, 1], [7, 3]])
    assert leave_out.spearman(x, y).tolist() == pytest.approx([1, -1])


def test_a_run_that_weighs_its_rollouts_is_refused(tiny):
    assert "tracin" in refusal(leave_out.main, [*tiny.flags, "--tracin=self"])
