"""The critic's settings, beside `critic` itself. They join run/settings.py."""
from dataclasses import dataclass
from importlib import import_module

from common.kinds import Above0, Share


@dataclass
class CriticSettings:
    # critic (extras/critic)
    gae_gamma: Share = 1.0              # discount of later rewards, by token
    gae_lambda: Share = 0.95            # 1: no bias from the values; 0: least variance
    whiten_advantages: bool = True      # to mean 0 and variance 1 over an iteration's tokens
    value_coef: float = 0.1             # weight of the values' loss, half the squared error
    value_clip: Above0 | None = None    # largest change from the recorded values; None: no clip

    def hooks(self):
        """{hook: the function that the critic puts there}."""
        if not self.critic:
            return {}
        critic = import_module("extras.critic")
        return {"advantage": critic.advantage, "critic_loss": critic.critic_loss}
