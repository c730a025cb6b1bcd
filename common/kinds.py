"""
Marks for settings, written with the type: `top_p: Free[Share]`. A plain int or float is at least 0.
"""
from typing import Annotated, Any, Callable, NamedTuple, TypeVar, get_args

T = TypeVar("T")

# what a different value does. Free: it is still the same run. Harmless: an account may use it, too.
# Fixed: not even --resume can go on with it, since the weights would not fit. Live: the config
# file's `after` may set it within a run
Free = Annotated[T, "free"]
Harmless = Annotated[T, "harmless"]
Fixed = Annotated[T, "fixed"]
Live = Annotated[T, "live"]
Path = Annotated[str, "path"]       # ~ at its beginning is the home folder
Variant = Annotated[str, "variant"]     # beside the core's own values: a name in extras/variants


class Range(NamedTuple):
    """A condition on a number, in words and as a function."""
    words: str
    holds: Callable[[Any], bool]


def at_least(least):
    return Range(f"at least {least}", lambda x: x >= least)


def at_most(most):
    return Range(f"at most {most}", lambda x: x <= most)


Positive = Annotated[int, at_least(1)]
Iterations = Annotated[int, at_most(999_999)]      # six digits in the names of checkpoints
Above0 = Annotated[float, Range("above 0", lambda x: x > 0)]
Share = Annotated[float, at_least(0), at_most(1)]
ShareAbove0 = Annotated[float, Range("above 0", lambda x: x > 0), at_most(1)]
Decay = Annotated[float, at_least(0), Range("below 1", lambda x: x < 1)]    # 1 would never update
Temperature = Annotated[float, at_least(1e-6)]


def kinds_of(hint):
    """The marks of a type, or of each type in a union: words and Ranges."""
    return [kind for part in (hint, *get_args(hint)) for kind in getattr(part, "__metadata__", ())]
