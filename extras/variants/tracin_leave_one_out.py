"""A rollout is a part of its own target."""
from common.errors import BadInput


def without_own_part(raw, own):
    """Influence (n,) less a rollout's influence on itself."""
    if own is None:
        raise BadInput(
            "tracin_leave_one_out = True: a rollout's own part is known only with "
            "tracin_val_prompts = 0 and with tracin = 'self', or with a target of log-probs, in "
            "one step on fresh rollouts, by the core's loss and one advantage for each of them")
    return raw - own.to(raw)
