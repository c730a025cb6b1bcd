"""
Marks for settings, written with the type: `top_p: Free[Share]`. A number is at least 0 unless its
type says more.
"""
from typing import Annotated, Any, Callable, NamedTuple, TypeVar, get_args

T = TypeVar("T")


class Mark(NamedTuple):
    """A word about a setting."""
    word: str


class Range(NamedTuple):
    """A condition on a number, in words and as a function."""
    words: str
    holds: Callable[[Any], bool]


Free = Annotated[T, Mark("free")]           # may differ when the same command goes on
Live = Annotated[T, Mark("live")]           # the config file's `after` may set it within a run
Path = Annotated[str, Mark("path")]         # ~ at its beginning is the home folder
Variant = Annotated[str, Mark("variant")]   # beside the core's own values: names in extras/variants


def at_least(least):
    return Range(f"at least {least}", lambda x: x >= least)


def at_most(most):
    return Range(f"at most {most}", lambda x: x <= most)


Positive = Annotated[int, at_least(1)]
Iterations = Annotated[int, at_least(0), at_most(999_999)]  # six digits in a checkpoint's name
Real = Annotated[float, Range("a number", lambda x: True)]  # of any sign
Above0 = Annotated[float, Range("above 0", lambda x: x > 0)]
Share = Annotated[float, at_least(0), at_most(1)]
ShareAbove0 = Annotated[float, Range("above 0", lambda x: x > 0), at_most(1)]
Decay = Annotated[float, at_least(0), Range("below 1", lambda x: x < 1)]    # 1 would never update
Temperature = Annotated[float, at_least(1e-6)]


def parts_of(hint):
    """What a type is made of: plain types, the texts of a Literal, marks and ranges."""
    parts = get_args(hint)
    return [x for part in parts for x in parts_of(part)] if parts else [hint]
