"""The environment's settings. They join run/settings.py as long as this folder exists."""
from dataclasses import dataclass


@dataclass
class EnvironmentSettings:
    # environment (extras/environment)
    max_turns: int = 8                  # most answers to a completion; 0: none
    stop_strings: tuple = ()            # where it answers, beside the end token

    def rules(self):
        """(Whether it is wrong, what to say), one after the other, as in run/check.py."""
        by_function = "environment" in self.functions
        yield self.tools and by_function, (
            "tools and a function environment: both would answer; leave one out")
        yield self.stop_strings and not (self.tools or by_function), (
            f"stop_strings = {self.stop_strings!r}: needs a function environment, or tools, in the "
            "config file")
