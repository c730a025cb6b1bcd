"""
Which words: the influence of every token of a rollout, by a forward-mode pass over it alone.

To first order in a step of size e along the target's gradient, a rollout's influence is a sum over
its tokens,

    I_i = sum_t I_it,    I_it = d L_i / d logp_it  x  d logp_it / d e

and torch.func.jvp computes the second factor of all tokens at once. The tape is not used here.
"""
import math
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
from data.tokenizer import end_tokens
from rollout import completion_states


class Piece(NamedTuple):
    """A token of a completion, or several that share a character."""
    text: str           # "": the end token
    influence: float    # in standard deviations of its iteration
    sampled: bool       # by the policy


def row_logprobs(policy, weights, row, temperature):
    """Log-probs (1, T) of the tokens of a Rollout of one row under other weights {name: tensor}; 0
    if not sampled.

    rollout.completion_logprobs computes the same, but has no forward derivative. Of attention's
    kernels MATH alone has one.
    """
    with sdpa_kernel(SDPBackend.MATH):
        states = completion_states(
            lambda *inputs: torch.func.functional_call(policy, weights, inputs), row)
    head = next(name for name, p in policy.named_parameters() if p is policy.lm_head.weight)
    logits = states.h @ weights.get(head, policy.get_parameter(head)).T / temperature   # (m, V)
    if states.allowed is not None:
        logits = logits.masked_fill(~states.allowed, -math.inf)
    logp = logits.log_softmax(-1).gather(1, states.targets[:, None])[:, 0]              # (m,)
    return torch.zeros_like(row.logp).index_put(states.where, logp)


def logprob_changes(policy, D, row, temperature):
    """d log-prob / d e (1, T) of the tokens of a Rollout of one row, at weights + e D. D: {name of
    a parameter: tensor}."""
    weights = {k: policy.get_parameter(k).detach() for k in D}
    _, tangent = torch.func.jvp(
        lambda w: row_logprobs(policy, w, row, temperature), (weights,), (D,))
    return tangent.detach()


def token_influences(setup, cfg, batch, i, step, G):
    """d (policy's loss) / d e (T,) of row i (1,) of a batch in a step, through each of its tokens,
    at weights + e G. G: {parameter: tensor}."""
    micro_batches = grpo.micro_batches(batch.rollout, step.rows, cfg)
    rows = next(rows for rows in micro_batches if i in rows)    # bnpo divides by all their tokens
    loss = grpo.loss_of(setup, setup.policy, batch, rows, step, cfg)
    slope, = torch.autograd.grad(loss.policy, loss.logp)                            # (n, T)
    slope = slope[rows == i]                                                        # (1, T)
    D = {name: G[p] for name, p in setup.policy.named_parameters() if p in G}
    return (slope * logprob_changes(setup.policy, D, batch.rollout[i], cfg.temperature))[0]


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
