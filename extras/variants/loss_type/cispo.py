"""CISPO (MiniMax-M1, 2025): clip the weight of a token, never its gradient. epsilon_high is the
ceiling itself; 5.0 is usual."""


def objective(ratio, logp, A, cfg):
    return ratio.clamp(max=cfg.epsilon_high).detach() * A * logp


objective.detaches = True       # to a Hessian the weight is a constant
objective.one_slope = True      # influence takes its faster way (docs/hooks.md)


def _clipped(ratio, A, cfg):
    """What is counted of it.

    Metrics:
        cispo_clip_ratio: share of tokens at cispo's ceiling
    """
    return {"cispo_clip_ratio": (ratio > cfg.epsilon_high) & (A > 0)}


objective.clipped = _clipped
