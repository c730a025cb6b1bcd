"""Errors that the user can fix: one line, without a traceback."""
import contextlib


class BadInput(ValueError):
    """An error that the user can fix. The message is one line: name, value and fix."""

    def __init__(self, message):
        super().__init__(" ".join(message.split()))


def shown(value, most=80):
    """repr of what a user gave, on one line and cut after `most` characters."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= most else text[:most] + "..."


@contextlib.contextmanager
def optional(packages):
    """Around the import of an optional package: without it, one line says what to install."""
    try:
        yield
    except ImportError as e:
        raise BadInput(f"{e}; this needs an optional package: pip install {packages}") from e
