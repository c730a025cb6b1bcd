"""What rollouts are scored against, where it is not the target's gradient as it is: an average over
steps, and a scale for each weight."""
from extras.variants.tracin_adam import adam_scale
from tape import add
from tracin import Direction


def direction(recording, target):
    """The Direction of a tracin.Target: averaged with tracin_target_ema, then scaled with
    tracin_adam."""
    gradient = target.gradient
    coef = target.coef
    if average := recording.setup.target_average:
        gradient, step_share = average.update(gradient)
        coef = None if coef is None else coef * step_share      # what the average holds of the step
    if not recording.cfg.tracin_adam:
        return Direction(gradient, coef)

    # the step's whole gradient makes AdamW's second moment
    everyone = target.gradient if target.is_whole_step else recording.tape.gradient(
        recording.policy_coef)
    scale = adam_scale(recording.setup.optimizer, add(recording.rest_gradient, everyone))
    return Direction({p: g * scale[p] for p, g in gradient.items()}, coef, scale)
