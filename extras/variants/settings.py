"""The settings of variants, and which functions they put in the place of the core's. They join
those of run/settings.py while this folder is here."""
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from common.kinds import Temperature, Variant
from common.variants import variant


@dataclass
class VariantSettings:
    # variants (extras/variants)
    # sequence: GSPO; pair it with loss_type grpo
    importance_sampling_level: Literal["token"] | Variant = "token"
    delta: float | None = None          # ceiling of the unclipped term (two-sided clip)
    sapo_temperature_neg: Temperature = 1.05    # of sapo's sigmoid, where the advantage is negative
    sapo_temperature_pos: Temperature = 1.0     # of sapo's sigmoid, where it is positive
    # multiply k1 or k3 in the loss by the ratio (DeepSeek-V3.2). None: where the KL is in the loss
    use_bias_correction_kl: bool | None = None

    def doors(self):
        """{name: what stands there in place of the core's}."""
        found = {}
        if self.delta is not None:
            found["objective"] = import_module("extras.variants.two_sided").objective
        if self.loss_type != "dapo":
            found |= vars(variant("loss_type", self.loss_type))
        if self.importance_sampling_level != "token":
            found["importance"] = variant(
                "importance_sampling_level", self.importance_sampling_level)
        if self.use_bias_correction_kl is not None or self.kl_estimator == "k2":
            found["corrects_kl"] = bool(self.use_bias_correction_kl)
        return found

    def rules(self):
        """(Whether it is wrong, what to say), one after the other, as in run/check.py."""
        _, ceiling = self.clip_range
        yield self.delta is not None and self.delta <= ceiling, (
            f"delta = {self.delta}: must be above the upper clip, {ceiling}")
        yield self.loss_type == "cispo" and (self.epsilon_high or 0) < 1, (
            "loss_type = 'cispo': epsilon_high is the ceiling of the ratio; take 5.0")
        yield self.critic and self.importance_sampling_level != "token", (
            "critic = True: advantages are by token; leave importance_sampling_level as it is")
        yield self.use_bias_correction_kl and (
            self.kl_in == "reward" or self.kl_estimator == "k2"), (
            "use_bias_correction_kl = True: is for kl_in = 'loss' with k1 or k3")
