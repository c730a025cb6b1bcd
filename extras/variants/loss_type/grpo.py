"""GRPO's own divisor (Shao et al. 2024): a completion counts the same, however long it is."""


def divide(x, mask, num_rows):
    """The mean over the tokens of a row, then over the rows of the step."""
    row_tokens = mask.sum(1).clamp(min=1)                                           # (n,)
    return (x.sum(1) / row_tokens).sum() / num_rows


divide.one_slope = True     # influence takes its faster way (docs/hooks.md)
