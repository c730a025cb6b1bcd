"""The checkpoints of a run. A failure before a step loses no whole iteration."""
import copy
import types

from common.seeds import hash_of
from run.checkpoint import random_state, save_checkpoint, set_random_state


class Saver:
    """Saves a run where the loop says so, and its last whole iteration after a failure."""

    def __init__(self):
        self.done = None            # iterations that are done in memory
        self.saved = None           # iterations that are done in the newest checkpoint

    def begin(self, folder, setup, cfg, log):
        """log: a run.log.Log, whose count of tokens goes into checkpoints."""
        self.folder = folder
        self.setup = setup
        self.cfg = cfg
        self.log = log
        self.base_hash = hash_of(setup.base)

        # whatever calls it, a step changes the weights of the last whole iteration
        step = setup.optimizer.step

        def noted_step(optimizer, *args, **kwargs):
            self.has_stepped = True
            return step(*args, **kwargs)

        # a method, as torch's schedulers expect
        setup.optimizer.step = types.MethodType(noted_step, setup.optimizer)

    def save(self, iteration):
        save_checkpoint(self.folder, self.setup, self.cfg, iteration, self.log.num_tokens,
                        self.base_hash)
        self.saved = iteration

    def mark_whole(self, done):
        """Memory now holds `done` whole iterations. Remember what the next one changes before its
        first step: the random generators, the target's average, the history of prompts."""
        self.done = done
        self.has_stepped = False
        self.random = random_state()
        self.average = copy.copy(self.setup.target_average)
        self.seen = {i: list(groups) for i, groups in self.setup.seen.items()}

    def keep_last(self):
        """Save the last whole iteration, unless a step has changed the weights since -> a sentence
        about it."""
        if self.has_stepped:
            return ("the last checkpoint is kept; the same command continues, with --resume=True "
                    "if you mend the config file")
        if self.saved != self.done:
            set_random_state(self.random)
            self.setup.target_average = self.average
            self.setup.seen = self.seen
            self.save(self.done)
        return (f"saved after iteration {self.done}; the same command continues, with "
                "--resume=True if you mend the config file")
