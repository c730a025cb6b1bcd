"""
Checks that end a run, when a number shows a bug or would spoil the weights. Nothing is lost: the
step is not taken, and the last checkpoint is good. grpo.py, tracin.py and run/meter.py call them.
"""
import math

import torch


def tolerance_of(dtype):
    """How far two computations of the same number may differ, with forward passes in dtype."""
    return 1e-3 if dtype == torch.float32 else 5e-2


def logp_error(mean, largest, dtype):
    """How far two equal log-probs differ -> (nats, tolerance): the largest difference in float32,
    the mean in bfloat16."""
    return largest if dtype == torch.float32 else mean, tolerance_of(dtype)


def moments_of(optimizer):
    """The tensors of an optimizer's state."""
    return [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]


def not_finite(setup, batch):
    """Say what is not finite, causes before effects, and what to do. batch: a loss.Batch."""
    # moments first: a step with bad moments has ruined the weights too
    if not all(x.isfinite().all() for x in moments_of(setup.optimizer)):
        return "A moment of the optimizer is not finite: continue from an earlier checkpoint"
    weights = setup.policy.named_parameters()
    if bad := [name for name, p in weights if not p.isfinite().all()]:
        return (f"The weights of {bad[0]} are not finite: the policy's file or the checkpoint "
                "is damaged, continue from an earlier one")
    if not batch.advantages.isfinite().all():
        return ("A reward, or its advantage, is not finite: let the reward function return less")
    if not batch.rollout.logp.isfinite().all():
        return ("A log-prob of a sampled token is not finite: raise temperature, or take dtype "
                "= 'float32'")
    return ("Weights, moments, rewards and the sampler's log-probs are finite, so the loss or its "
            "gradient overflowed: lower learning_rate or raise beta, then --resume=True")


def check_ratio(setup, batch, mean, largest):
    """Before the first step of a run: do trainer and sampler, which have the same weights, agree
    about every token? mean, largest: differences of their log-probs."""
    error, tolerance = logp_error(mean, largest, setup.dtype)
    if not math.isfinite(error):
        raise SystemExit(f"stopped before the first step: {not_finite(setup, batch)}")
    if not error <= tolerance:
        raise SystemExit(
            "stopped before the first step: the ratio is not 1, sampler and trainer disagree by "
            f"{error:.3g} nats on a token: is the temperature different, are the tokens shifted by "
            "one, or is something in the model random, or does it see padding? (Or try dtype = "
            "'float32', or device = 'cpu')")


def check_importance(ratio):
    """Before the first step of a run, where all log-ratios are 0: is the mean ratio that a hook has
    made of them 1?"""
    if not abs(ratio - 1) < 0.5:        # a ratio in its place would give 2.72
        raise SystemExit(
            f"stopped before the first step: with importance the mean ratio is {ratio:.3g}, where "
            "it must be 1: does it return the logarithm of the ratio?")


def check_scores(influence):
    """Before rollouts are selected by their influence (n,): is it finite?"""
    if not influence.isfinite().all():
        raise SystemExit("stopped: an influence is not finite, because the weights or the target's "
                         "rewards are not. The last checkpoint is intact")


def check_influence(error, dtype):
    """Before the first step of a run: does influence agree with plain backwards? error: from
    tracin.true_error."""
    tolerance = tolerance_of(dtype)
    if not error <= tolerance:
        raise SystemExit(
            "stopped before the first step: the influences do not add up to the product of "
            f"ordinary gradients (relative error {float(error):.1e}, at most {tolerance:g}); the "
            "tape has a bug, or a hook says one_slope and is not so (or try dtype = 'float32')")


def check_step(setup, batch, loss, grad_norm):
    """Before each step: are loss and gradient finite, and the sampler's log-probs, which the clip
    may hide, and are only the policy's tokens under the loss?"""
    # in one transfer, since each waits for a GPU
    strays = (batch.loss_mask & ~batch.rollout.sampled_mask).sum()
    strays, infinite = torch.stack([strays, (~batch.rollout.logp.isfinite()).sum()]).tolist()
    if strays:
        raise SystemExit(
            f"stopped: {strays} tokens under the loss are the environment's, which the policy "
            "did not choose; this step was not taken. A loss mask must stay within "
            "rollout.sampled_mask")
    if infinite or not math.isfinite(loss + grad_norm):
        raise SystemExit(
            f"stopped: loss {loss}, grad_norm {grad_norm}; this step was not taken and the last "
            f"checkpoint is good. {not_finite(setup, batch)}")
