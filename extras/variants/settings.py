"""The settings of variants, and which functions they put in the place of the core's. They join
those of run/settings.py while this folder is here."""
from dataclasses import dataclass
from typing import Literal

from common.kinds import (
    Decay, Live, Positive, Share, ShareAbove0, Temperature, Variant)
from common.variants import variant


@dataclass
class VariantSettings:
    # variants (extras/variants)
    # normalize_then_sum: each reward by its group's std, their weighted sum by the batch's (GDPO)
    multi_objective_aggregation: Literal["sum_then_normalize"] | Variant = "sum_then_normalize"
    max_resamples: Positive = 3         # rounds; groups that are equal then are dropped
    # sequence: GSPO; pair it with loss_type grpo
    importance_sampling_level: Literal["token"] | Variant = "token"
    delta: float | None = None          # ceiling of the unclipped term (two-sided clip)
    sapo_temperature_neg: Temperature = 1.05    # of sapo's sigmoid, where the advantage is negative
    sapo_temperature_pos: Temperature = 1.0     # of sapo's sigmoid, where it is positive
    # multiply k1 or k3 in the loss by the ratio (DeepSeek-V3.2). None: where the KL is in the loss
    use_bias_correction_kl: bool | None = None
    ref_model_sync_steps: int = 0       # update the reference every N iterations; 0: never
    # that update: reference <- (1 - alpha) reference + alpha policy, weight by weight,
    # with LoRA its A and B; 1: a copy
    ref_model_mixup_alpha: Live[Share] = 0.6
    # policy gradient on this most uncertain share of the tokens
    top_entropy_quantile: Live[ShareAbove0] = 1.0
    tracin_val_size: int = 0            # rollouts of the held-out prompts to keep; 0: all
    # which of those: random ones, those of the highest or the lowest rewards, half of each
    tracin_val_select: Literal["random", "best", "worst", "balanced"] = "random"
    # drop: share of the rollouts of negative influence; top: share kept of all
    tracin_fraction: Live[Share] = 0.5
    tracin_target_ema: Decay = 0.0      # decay per step of the target gradient's average; 0: off
    tracin_leave_one_out: bool = False  # subtract a rollout's influence on itself
    tracin_adam: bool = False           # measure with AdamW's scaling, 1 / (sqrt(v) + eps)
    # all: the kept gradient as it is; norm: made as long as the gradient of all rollouts
    tracin_normalizer: Literal["all"] | Variant = "all"

    def hooks(self):
        """{hook: the function that a setting puts there}."""
        # a setting that names a function
        hooks = {name: self.variant(name) for name in (
            "scale_rewards", "kl_estimator", "zero_std_groups", "tracin", "tracin_select",
            "tracin_normalizer")}
        hooks["advantage"] = self.variant("multi_objective_aggregation")
        hooks["importance"] = self.variant("importance_sampling_level")
        # or a file, which may be a config file, too
        file = self.variant("loss_type")
        hooks["objective"] = getattr(file, "objective", None)
        hooks["divide"] = getattr(file, "divide", None)

        # a setting that turns one on
        if self.delta is not None:
            hooks["objective"] = variant("two_sided", "objective")
        if self.top_entropy_quantile < 1:
            hooks["policy_tokens"] = variant("top_entropy_quantile", "least_sure")
        if self.ref_model_sync_steps:
            hooks["follow"] = variant("ref_model_sync_steps", "follow")
        if self.tracin_val_size or self.tracin_val_select != "random":
            hooks["targets"] = variant("tracin_val_select", "targets")
        if self.tracin_target_ema:
            hooks["average"] = variant("tracin_target_ema", "Average")
        if self.tracin_target_ema or self.tracin_adam:
            hooks["direction"] = variant("tracin_direction", "direction")
        if self.tracin_leave_one_out:
            hooks["without_own_part"] = variant("tracin_leave_one_out", "without_own_part")

        # a setting that turns one off, or an estimator that does
        is_corrected = self.use_bias_correction_kl
        if is_corrected is None:
            is_corrected = not getattr(hooks["kl_estimator"], "uncorrected", False)
        if not is_corrected:
            hooks["kl_correction"] = variant("use_bias_correction_kl", "uncorrected")
        return {name: function for name, function in hooks.items() if function}

    def rules(self):
        """(Whether it is wrong, what to say), one after the other, as in run/check.py."""
        _, ceiling = self.clip_range
        yield self.delta is not None and self.delta <= ceiling, (
            f"delta = {self.delta}: must be above the upper clip, {ceiling}")
        yield self.delta is not None and self.loss_type in ("cispo", "sapo"), (
            f"delta = {self.delta}: bounds the clipped objective, and loss_type = "
            f"{self.loss_type!r} has a different one")
        yield self.ref_model_sync_steps and not self.beta, (
            "ref_model_sync_steps: set beta, which is 0: the reference serves the KL")
        chooses = self.tracin_val_size or self.tracin_val_select != "random"
        yield chooses and not self.tracin_val_prompts, (
            "tracin_val_size, tracin_val_select: set tracin_val_prompts, which is 0")
        yield self.tracin != "off" and self.tracin_val_size == 1, (
            "tracin_val_size = 1: must be at least 2; the target of one reward is 0, as it is its "
            "own mean")
        yield self.loss_type == "cispo" and (self.epsilon_high or 0) < 1, (
            "loss_type = 'cispo': epsilon_high is the ceiling of the ratio; take 5.0")
        by_score = self.multi_objective_aggregation != "sum_then_normalize"
        yield self.critic and (by_score or self.importance_sampling_level != "token"), (
            "critic = True: advantages are by token; leave importance_sampling_level and "
            "multi_objective_aggregation as they are")
        yield by_score and (self.kl_in == "reward" or self.zero_std_groups != "keep"), (
            "multi_objective_aggregation = 'normalize_then_sum': set kl_in = 'loss' and "
            "zero_std_groups = 'keep'")

        # MaxRL divides by the mean reward of a group
        by_mean = self.scale_rewards == "mean"
        yield by_mean and (self.critic or by_score), (
            "scale_rewards = 'mean': a critic, and normalize_then_sum, have divisors of their own: "
            "leave critic and multi_objective_aggregation as they are")
        yield by_mean and self.kl_in_reward, (
            "scale_rewards = 'mean': divides by the mean reward of a group, which a KL in the "
            "reward can turn: set kl_in = 'loss'")
        yield self.use_bias_correction_kl and (
            self.kl_in == "reward" or self.kl_estimator == "k2"), (
            "use_bias_correction_kl = True: is for kl_in = 'loss' with k1 or k3")
