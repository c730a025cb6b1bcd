"""The target's gradient averaged over steps: one step's target is noisy."""
import torch

from tape import cosine


class Average:
    """The target's gradient, averaged over steps."""

    def __init__(self, cfg):
        self.decay = cfg.tracin_target_ema
        self.total = {}     # {parameter: tensor}
        self.age = 0        # steps in it

    def update(self, gradient):
        """The average with this gradient in it, and its share of the average."""
        # an average that points elsewhere is of no use: start again
        if not self.total or cosine(gradient, self.total) < -0.3:
            self.age = 0
            self.total = {p: torch.zeros_like(g) for p, g in gradient.items()}

        # it begins at 0, so it is too small at first: divide by what all factors add up to
        self.age += 1
        newest = 1 - self.decay
        everything = 1 - self.decay ** self.age
        self.total = {p: torch.lerp(self.total[p], g, newest) for p, g in gradient.items()}
        return {p: g / everything for p, g in self.total.items()}, newest / everything

    def state(self):
        """For a checkpoint."""
        return {"age": self.age, "average": list(self.total.values())}

    def load_state(self, state, parameters):
        self.age = state["age"]
        self.total = {p: g.to(p) for p, g in zip(parameters, state["average"])}
