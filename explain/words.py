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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
from data.tokenizer import end_tokens


class Row(NamedTuple):
    """A prompt of P tokens and its completion of T tokens, without batch and padding."""
    tokens: Tensor      # (P + T,) ids
    sampled: Tensor     # (T,) True on tokens of the policy, False on those of an environment
    allowed: Tensor     # (T, V) tokens that truncated sampling could draw; None: all
    temperature: float


class Piece(NamedTuple):
    """A token of a completion, or several that share a character."""
    text: str           # "": the end token
    influence: float    # in standard deviations of its iteration
    sampled: bool       # by the policy


def row_alone(rollout, i, temperature):
    """Take row i out of a Rollout, whose prompts are padded on the left."""
    r = rollout[i]
    T = int(r.completion_mask.sum())
    end = len(r.tokens) - len(r.completion_mask) + T
    allowed = None if r.allowed is None else r.allowed[:T]
    return Row(r.tokens[:end][r.attention_mask[:end]], r.sampled_mask[:T], allowed, temperature)


def row_logprobs(policy, weights, row):
    """Log-probs (T,) of the tokens of a Row under other weights {name: tensor}; 0 if not sampled.

    rollout.completion_logprobs computes the same, but has no forward derivative. Of attention's
    kernels MATH alone has one.
    """
    T = len(row.sampled)
    with sdpa_kernel(SDPBackend.MATH):
        h = torch.func.functional_call(policy, weights, row.tokens[None, :-1])
    h = h[0, -T:]                                                                   # (T, C)
    head = next(name for name, p in policy.named_parameters() if p is policy.lm_head.weight)
    logits = h @ weights.get(head, policy.get_parameter(head)).T / row.temperature  # (T, V)
    if row.allowed is not None:
        logits = logits.masked_fill(~row.allowed, -math.inf)
    logp = logits.log_softmax(-1).gather(1, row.tokens[-T:, None])[:, 0]
    return logp.masked_fill(~row.sampled, 0)    # an environment's token need not be allowed


def logprob_changes(policy, D, row):
    """d log-prob / d e (T,) of the tokens of a Row, at weights + e D. D: {name of a parameter:
    tensor}."""
    weights = {k: policy.get_parameter(k).detach() for k in D}
    _, tangent = torch.func.jvp(lambda w: row_logprobs(policy, w, row), (weights,), (D,))
    return tangent.detach()


def token_influences(setup, cfg, batch, i, step, G):
    """d (policy's loss) / d e (T,) of row i (1,) of a batch in a step, through each of its tokens,
    at weights + e G. G: {parameter: tensor}."""
    micro_batches = grpo.micro_batches(batch.lengths, step.rows, cfg)
    rows = next(rows for rows in micro_batches if i in rows)    # bnpo divides by all their tokens
    loss = grpo.loss_of(setup, setup.policy, batch, rows, step, cfg)
    slope, = torch.autograd.grad(loss.policy, loss.logp)                            # (n, T)
    slope = slope[rows == i]                                                        # (1, T)
    row = row_alone(batch.rollout, int(i), cfg.temperature)
    D = {name: G[p] for name, p in setup.policy.named_parameters() if p in G}
    return slope[0, :len(row.sampled)] * logprob_changes(setup.policy, D, row)


def pieces_of(row, influence, tokenizer):
    """Split the completion of a Row into Pieces. They add up to its text, and to the influence (T,)
    of its tokens."""
    ends = end_tokens(tokenizer)
    T = len(row.sampled)
    ids = row.tokens[-T:].tolist()
    decode = tokenizer.decode
    pieces = []
    start = 0
    for end in range(1, T + 1):
        piece = ids[start:end]
        after = ids[end:end + 3]        # a character has four bytes at most
        if decode(piece) + decode(after) != decode(piece + after):
            continue                    # the piece ends within a character
        is_end = piece[0] in ends and row.sampled[start]
        text = "" if is_end else decode(piece)
        sampled = bool(row.sampled[start:end].all())
        pieces.append(Piece(text, float(influence[start:end].sum()), sampled))
        start = end
    return pieces
