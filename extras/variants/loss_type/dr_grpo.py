"""Dr. GRPO's divisor (Liu et al. 2025): a constant, so that no length is favoured."""


def divide(x, num_rows, cfg):
    return x.sum() / (num_rows * cfg.max_completion_length)


divide.one_slope = True     # influence takes its faster way (docs/hooks.md)
