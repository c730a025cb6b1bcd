"""
A number with its standard error, and how both are written.

What is estimated by held-out completions has F parts, one a fold of the held-out prompts, that add
up to it: how much they differ says how noisy the sum is. What is exact has one part.
"""
import math
from typing import NamedTuple

# Standard errors from 0: then a number is known. That is 95 % by the t of seven degrees of freedom,
# as eight folds have.
KNOWN = 2.4


class Number(NamedTuple):
    value: float
    error: float = 0.0      # standard error; 0: exact
    unit: str = ""          # " %", or none

    @property
    def is_known(self):
        """Whether its sign is."""
        return abs(self.value) > KNOWN * self.error

    def text(self, digits):
        """As "+0.113 ± 0.012", or "80 % ± 6"."""
        if self.unit:
            return f"{self.value:.0f}{self.unit}" + f" ± {self.error:.0f}" * (self.error > 0)
        return f"{self.value:+.{digits}f}" + f" ± {self.error:.{digits}f}" * (self.error > 0)


def total(parts, unit=""):
    """The Number whose parts are (F,)."""
    error = float(parts.std()) * math.sqrt(len(parts)) if len(parts) > 1 else 0.0
    return Number(float(parts.sum()), error, unit)


def percent(parts, whole):
    """The Number of what parts (F,) have of whole (F,), in percent: "" where the whole is not
    known."""
    if not total(whole).is_known:
        return ""
    ratio = float(parts.sum() / whole.sum())
    noise = total(parts - ratio * whole).error
    return Number(100 * ratio, 100 * noise / abs(float(whole.sum())), " %")


def text_of(cell, digits):
    """A cell of a table, or a word of a sentence."""
    return cell.text(digits) if isinstance(cell, Number) else str(cell)
