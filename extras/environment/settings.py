"""The environment's settings. They join run/settings.py as long as this folder exists."""
from dataclasses import dataclass

from common.errors import shown


@dataclass
class EnvironmentSettings:
    # environment (extras/environment)
    max_turns: int = 8                  # most answers to a completion; 0: none
    stop_strings: tuple = ()            # where it answers, beside the end token

    def rules(self):
        """(Whether it is wrong, what to say), one after the other, as in run/check.py."""
        tools = self.functions.get("tools", {})
        by_function = "environment" in self.functions
        yield not isinstance(tools, dict), (
            f"tools = {shown(tools)}: must be a dict of functions by name")
        yield tools and by_function, (
            "tools and a function environment: both would answer; leave one out")
        yield not all(type(text) is str for text in self.stop_strings) or (
            self.stop_strings and not by_function and not tools), (
            f"stop_strings = {self.stop_strings!r}: must be text, and needs a function "
            "environment, or tools, in the config file")
