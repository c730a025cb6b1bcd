"""What divides r - mean, beside the std of the group or of the batch: of rewards r (B, G), with NaN
where they are not known."""
import math


def mean(r):
    """The group's mean + 1e-6 (MaxRL, Tajwar et al. 2026, arXiv 2602.02710), (B, 1): a success
    counts more, the rarer it is for its prompt. For rewards of at least 0; the paper's are binary,
    and its sum of pass@k / k is then estimated up to k = num_generations - 1."""
    # a sum of terms that cancel may be below 0 by rounding, which the 1e-6 hides
    least = float(r.nan_to_num(math.inf).min())
    rounding = 1e-9 * max(1.0, float(r.nan_to_num().abs().max()))
    if least < -rounding:
        raise SystemExit(
            f"stopped: a reward is {least:.4g}, and scale_rewards = 'mean' divides by the mean of "
            "a group: it is for rewards of at least 0. Shift the reward, or take 'group'")
    return r.nanmean(1, keepdim=True) + 1e-6
