"""A rollout is a part of its own target."""


def without_own_part(raw, own):
    """Influence (n,) less a rollout's influence on itself."""
    return raw - own.to(raw)
