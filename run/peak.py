"""
The most memory that the tensors of a run take, counted before it begins.

A term is what its comment says, in bytes. The factors of activations and logits are the tensors
that the forward in model.py, run/attention.py and run/fused_head.py leaves to the backward.
tests/test_peak.py measures them. On a GPU, torch's allocator and CUDA's context come on top.

Shapes: n rows of a micro-batch have `tokens` tokens, M of which are chosen. A number in a matrix
product has i bytes (2 in bfloat16). C, V as in model.py; inner is the width inside the MLP.
"""
from types import SimpleNamespace

import torch.nn as nn

from model import piece_size
from run.attention import attend_by_hand
from run.decoder import Decoder
from run.fused_head import fused_logprobs
from run.processes import rank_and_size
from tracin import trained_layers

EVALUATED = 256     # rows at once, as in evaluate.py


def peak_bytes(nets, cfg):
    """{phase: bytes} beside the weights that are there already, judges included, if all prompts are
    as long as the longest and all completions as long as they may be."""
    s = sizes(nets, cfg)
    recorded = tape_bytes(nets, s) if nets.influence else 0
    kept = 2 * s.trained                # AdamW's moments
    kept += s.trained * bool(cfg.tracin_target_ema)     # the average
    rollout = sampling_bytes(s, s.decoded)
    decoder = getattr(nets.generate, "keywords", {}).get("decode")
    if isinstance(decoder, Decoder):    # keeps its cache and the Linears in bfloat16
        kept += cache_bytes(s, s.decoded, -(-s.width // decoder.bucket) * decoder.bucket) + s.casts
        rollout -= cache_bytes(s, s.decoded, s.width) + s.casts
    update = s.casts + backward_bytes(nets, s)
    if nets.influence:
        # a plain backward: of the check, before there are moments, or of the target's second half;
        # or the target's halves and their sum, of rows kept, dropped and both, and a weighed b
        update = recorded + max(2 * s.trained + update, 6 * s.trained + s.i * s.M * s.V)
        # the gradient of what all rows keep, and the average corrected for its start
        update += s.trained * (cfg.two_parts + bool(cfg.tracin_target_ema))
    else:
        update += s.trained                                         # the gradient
    num_evaluated = min(EVALUATED, len(nets.eval_prompts) * cfg.num_eval_generations)
    return {
        "rollout": kept + rollout,
        "reference": kept + forward_bytes(nets, s, s.n, s.i) * bool(cfg.beta),
        "update": kept + update,
        "evaluation": kept + max(sampling_bytes(s, num_evaluated),
                                 forward_bytes(nets, s, num_evaluated, 4))}


def sizes(nets, cfg):
    """The numbers that the terms are made of."""
    config = nets.policy.config
    own = -(-cfg.num_prompts * cfg.num_generations // rank_and_size()[1])   # rows of this process
    n = min(cfg.micro_batch_size, cfg.mini_batch_size or own, own)
    T = cfg.max_completion_length
    width = max(len(prompt.ids) for prompt in nets.prompts) + T
    i = nets.dtype.itemsize
    weights = sum(m.weight.numel() for m in nets.policy.modules() if isinstance(m, nn.Linear))
    return SimpleNamespace(
        i=i, n=n, T=T, width=width, tokens=n * (width - 1), M=n * T, C=config.n_embd,
        V=config.vocab_size, inner=config.n_inner or 4 * config.n_embd,
        rows=min(cfg.mini_batch_size or own, own), decoded=min(cfg.decode_batch_size or own, own),
        trained=4 * sum(p.numel() for p in nets.trained),   # bytes
        casts=i * weights if i < 4 else 0,      # bytes of the Linears' weights in bfloat16
        keys_values=2 * config.n_layer * nets.policy.h[0].attn.n_kv_head * nets.policy.h[0].attn.hs)


def cache_bytes(s, rows, width):
    return rows * width * s.keys_values * s.i


def sampling_bytes(s, rows):
    """Keys and values, and then those of the prompts once more, or logits of one position, their
    exponentials and the sums of these."""
    prompts = cache_bytes(s, rows, s.width - s.T)
    return s.casts + cache_bytes(s, rows, s.width) + max(prompts, 16 * rows * s.V)


def forward_bytes(nets, s, n, i):
    """A forward of n rows without gradients: inside an MLP, or the vocabulary head."""
    mlp = n * (s.width - 1) * (12 * s.C + 2 * i * s.inner)
    return max(mlp, 8 * s.V * min(n * s.T, piece_of(nets)))


def piece_of(nets):
    return piece_size(nets.policy.lm_head, nets.policy.wte.weight)


def backward_bytes(nets, s):
    """Activations and logits of a micro-batch when its backward begins."""
    block = block_bytes(nets, s) * s.tokens
    residual = 4 * s.C * s.tokens
    last = residual + s.M * (8 + s.i) * s.C     # around the last norm, and what the head is given
    if nets.policy.recompute:                   # one block at a time
        return last + len(nets.policy.h) * residual + max(head_bytes(nets, s), block)
    return last + len(nets.policy.h) * block + head_bytes(nets, s)


def block_bytes(nets, s):
    """What a block leaves to the backward, for each token."""
    attn = nets.policy.h[0].attn
    q = attn.n_head * attn.hs
    kv = attn.n_kv_head * attn.hs
    block = 2 * 4 * s.C                     # float32: what each norm is given
    block += s.i * 2 * s.C                  # what each norm gives, for Linears
    block += s.i * (2 * q + 2 * kv)         # queries, keys, values, what attention gives
    block += s.i * s.inner * (4 if nets.policy.config.swiglu else 2)    # around the GELU
    by_hand = nets.device.type == "cpu" and attn.attend is attend_by_hand
    if by_hand and s.i < 4:
        block += 6 * attn.n_head * s.width + s.i * (q + 2 * kv)     # softmax; heads laid out anew
    return block


def head_bytes(nets, s):
    """Logits and what the backward makes of them; the gradient of the head's weight."""
    m = piece_of(nets)
    if s.M <= m:
        return 16 * s.M * s.V       # logits, less their logsumexp, the exp of that, its gradient
    fused = nets.logprobs is fused_logprobs and not nets.influence  # which has plain backwards too
    logits = 8 * m * s.V if fused else 16 * m * s.V     # fused: the logits, and logsumexp's copy
    if not nets.policy.lm_head.weight.requires_grad:
        return logits
    dw = 4 * s.C * s.V              # of the pieces so far, and beside their logits one piece's
    return dw + max(logits, (4 + s.i % 4) * m * s.V + s.i * s.C * s.V)


def tape_bytes(nets, s):
    """a and b of the layers that the tape records, of a step."""
    recorded = 0
    for first in range(0, s.rows, s.n):
        n = min(s.n, s.rows - first)
        for module in trained_layers(nets.policy):
            positions = s.T if module is nets.policy.lm_head else s.width - 1
            recorded += n * positions * record_bytes(nets, s, module)
    return recorded


def record_bytes(nets, s, module):
    """a and b of a layer (see tracin.Tape), for each token."""
    if isinstance(module, nn.Linear):
        return s.i * (module.in_features + module.out_features)
    if isinstance(module, nn.Embedding):    # both have the same b
        return 4 * s.C * (module is nets.policy.wte)
    return 2 * 4 * s.C
