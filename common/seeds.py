"""Seeds of random draws, and a hash of a model's weights."""
import hashlib

import torch


def seed_for(*purpose):
    """A seed for one purpose. Every random draw depends on the settings and the iteration alone,
    never on what was drawn before it."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def hash_of(model):
    """Short hash of all weights; the same where they are stored in bfloat16."""
    h = hashlib.sha256()
    for x in model.state_dict().values():
        x = x.float() if x.dtype == torch.bfloat16 else x
        h.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]
