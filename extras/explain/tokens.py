"""
Which words: the influence of every token of a rollout, by derivatives of its log-probs alone.

To first order in a step of size e along the target's gradient, a rollout's influence is a sum over
its tokens,

    I_i = sum_t I_it,    I_it = d L_i / d logp_it  x  d logp_it / d e

The tape is not used here.
"""
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.device import full_precision
from data.tokenizer import end_tokens
from loss import losses
from rollout import completion_logprobs


class Piece(NamedTuple):
    """A token of a completion, or several that share a character."""
    text: str           # "": the end token
    influence: float    # in standard deviations of its iteration
    sampled: bool       # by the policy


@full_precision()
def logprob_changes(policy, direction, rollout, temperature):
    """d log-prob / d e (n, T) of the tokens of n rows, at weights + e direction. direction:
    {parameter: tensor}."""
    with sdpa_kernel(SDPBackend.MATH):      # no other attention has a second derivative
        logp = completion_logprobs(policy, rollout, temperature)
        factors = torch.zeros_like(logp, requires_grad=True)
        # the gradient of <factors, logp>; its product with direction is <factors, changes>
        mixed = torch.autograd.grad(
            logp, list(direction), factors, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(mixed, factors, list(direction.values()))[0]


def token_slopes(setup, cfg, batch, step):
    """d (policy's loss) / d log-prob (N, T) of the tokens of a step; 0 elsewhere."""
    slopes = torch.zeros_like(batch.rollout.logp)
    for loss, rows in losses(setup, setup.policy, batch, step, cfg):
        slopes[rows], = torch.autograd.grad(loss.policy, loss.logp)
    return slopes


def pieces_of(row, influence, tokenizer):
    """Split the completion of a Rollout of one row into Pieces. They add up to its text, and to the
    influence (T,) of its tokens."""
    ends = end_tokens(tokenizer)
    T = int(row.completion_mask.sum())
    ids = row.tokens[0, -row.completion_mask.shape[1]:][:T].tolist()
    sampled = row.sampled_mask[0].tolist()
    decode = tokenizer.decode
    pieces = []
    start = 0
    for end in range(1, T + 1):
        piece = ids[start:end]
        after = ids[end:end + 3]        # a character has four bytes at most
        if decode(piece) + decode(after) != decode(piece + after):
            continue                    # the piece ends within a character
        is_end = piece[0] in ends and sampled[start]
        text = "" if is_end else decode(piece)
        pieces.append(Piece(text, float(influence[start:end].sum()), all(sampled[start:end])))
        start = end
    return pieces
