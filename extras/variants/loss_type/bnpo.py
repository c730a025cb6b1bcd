"""BNPO's divisor, as TRL has it: the tokens of the micro-batch."""


def divide(x, mask, num_rows):
    share = len(x) / num_rows
    return x.sum() / mask.sum().clamp(min=1) * share


divide.by_micro_batch = True    # which rows share one is drawn by chance, and changes the result
divide.one_slope = True         # influence takes its faster way (docs/hooks.md)
