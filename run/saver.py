"""Checkpoints of a run, so that a failure loses no whole iteration."""
import copy

from common.script import hash_of, shown
from run.checkpoint import random_state, save_checkpoint, set_random_state


class Saver:
    """Saves a run, also its last whole iteration after a failure."""

    def __init__(self):
        self.done = None            # iterations, as what is in memory has them
        self.saved = None           # iterations, as the newest checkpoint has them

    def begin(self, folder, setup, cfg, log):
        """log: a run.log.Log, whose count of tokens is in a checkpoint."""
        self.folder = folder
        self.setup = setup
        self.cfg = cfg
        self.log = log
        self.base_hash = hash_of(setup.base)
        setup.optimizer.register_step_pre_hook(self.step_begins)

    def save(self, iteration):
        save_checkpoint(self.folder, self.setup, self.cfg, iteration, self.log.num_tokens,
                        self.base_hash)
        self.saved = iteration

    def mark_whole(self, done):
        """What is in memory are so many whole iterations: remember what changes before the next
        step."""
        self.done = done
        self.has_stepped = False
        self.random = random_state()
        self.average = copy.copy(self.setup.target_average)
        self.seen = {i: list(groups) for i, groups in self.setup.seen.items()}

    def step_begins(self, *_):
        """Called by the optimizer."""
        self.has_stepped = True

    def keep_last(self):
        """Save the last whole iteration, after something failed -> words about it."""
        # unless there is none yet, or a step was taken since
        if self.done is None or self.has_stepped:
            return "what was saved last is kept, and the same command continues"
        set_random_state(self.random)
        self.setup.target_average = self.average
        self.setup.seen = self.seen
        try:
            if self.saved != self.done:
                self.save(self.done)
        except Exception as e:      # what failed first ends the run: a disk, or a GPU, may be why
            return f"iteration {self.done} could not be saved ({shown(str(e), 120)})"
        return f"saved after iteration {self.done}; the same command continues"
