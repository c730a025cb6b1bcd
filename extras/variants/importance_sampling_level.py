"""Whose ratio is clipped, beside the core's `token`."""
from common.errors import BadInput


def sequence(log_ratio, mask, A):
    """GSPO (Zheng et al. 2025): one ratio for all tokens of a row, their geometric mean -> its
    logarithm (n, 1)."""
    if A.shape[1] > 1:
        raise BadInput("importance_sampling_level = 'sequence': has one ratio for all tokens, and "
                       "advantage returned a number for each: take 'token'")
    return log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


sequence.one_slope = True       # influence takes its faster way (docs/hooks.md)
