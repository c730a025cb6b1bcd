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
LEAST = 4           # folds: the spread of fewer says next to nothing


class Number(NamedTuple):
    value: float            # NaN: not known
    error: float = 0.0      # standard error; 0: exact; inf: not known
    unit: str = ""          # " %", or none

    @property
    def is_known(self):
        """Whether its sign is."""
        return abs(self.value) > KNOWN * self.error

    def text(self, digits):
        """As "+0.113 ± 0.012", or "80 % ± 6"; "" if it is not known at all."""
        if self.value != self.value:
            return ""
        digits, sign = (0, "") if self.unit else (digits, "+")
        error = f" ± {self.error:.{digits}f}" if 0 < self.error < math.inf else ""
        return f"{self.value:{sign}.{digits}f}{self.unit}{error}"


def total(parts):
    """The Number whose parts are (F,)."""
    if len(parts) == 1:
        error = 0.0
    elif len(parts) < LEAST:
        error = math.inf
    else:
        error = float(parts.std()) * math.sqrt(len(parts))
    return Number(float(parts.sum()), error)


def percent(parts, whole):
    """The Number of what parts (F,) have of whole (F,), in percent: NaN where the whole is not
    known."""
    if not total(whole).is_known:
        return Number(math.nan)
    ratio = float(parts.sum() / whole.sum())
    noise = total(parts - ratio * whole).error
    return Number(100 * ratio, 100 * noise / abs(float(whole.sum())), " %")


def text_of(cell, digits):
    """A cell of a table. digits: of a Number, behind the point."""
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.3g}"
    return cell.text(digits) if isinstance(cell, Number) else str(cell)
