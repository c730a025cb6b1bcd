"""Whose is the Python in a run's config.json? That of this user's own runs is signed.

The key is made at first use and stays in the user's cache. A text that another machine, another
user or nobody signed is a stranger's: it is executed only with --trust=True.
"""
import contextlib
import hashlib
import hmac
import json
import os
import secrets


def user_key(make=False):
    """The user's key (bytes), made if asked for; None where there is none."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(cache, "grpo-tracin", "key")
    try:
        if make and not os.path.exists(path):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            new = f"{path}.{os.getpid()}.tmp"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
                f.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):      # another run was first
                os.link(new, path)
            os.remove(new)
        with open(path, "rb") as f:
            key = f.read()
    except OSError:
        return None
    return key if len(key) == 32 else None


def signature_of(source, settings, make=False):
    """The signature (hex) of a config file's text and settings under the user's key; None without
    a key."""
    key = user_key(make)
    if key is None:
        return None
    signed = json.dumps([source, settings], sort_keys=True)
    return hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()


def is_own(about):
    """True if this user's key signed the text and the settings of a config.json."""
    signature = about.get("signature")
    right = signature_of(about.get("source"), about.get("settings"))
    found = str(signature).encode("utf-8", "surrogatepass")
    return right is not None and hmac.compare_digest(right.encode(), found)
