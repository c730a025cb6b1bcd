"""
Repeating a run: is it the one that was made, what will its account cost, and does the replay end
where the run did?
"""
import math
from typing import NamedTuple

import torch

from common.errors import BadInput
from common.files import read_json, read_log
from common.seeds import hash_of
from extras.explain.account import flat, parts_of
from loss import by_micro_batch
from run.checkpoint import changed_settings, checkpoints, iterations_of, load_checkpoint
from run.inputs import changed_inputs, what_was_read

MOST_OFF = 0.1      # of the change: how far a replay may be from the run
# CPU time, where a rollout that the run samples and learns from takes 1 (config/toxicity.py)
SLOWER = 2.2        # the same rollout, replayed and on the tape
PASS = 0.7          # a further pass, for a part of the rest of the loss
PREDICTION = 5      # effects and smoothness
TOKENS = 4.3        # shares of its tokens, with their errors
HELD_OUT = 0.38     # a held-out completion
EVALUATED = 0.5     # a completion of an evaluation
LEAST = 64          # held-out completions at each point

# ------------------------------------------------------------------------------------------------
# is it the run?


def check_run(setup, cfg, folder, path, last):
    """Refuse a run that is not the one that was made -> names of what has changed and may compute
    the same: versions, and what changed when the run itself went on."""
    if last["base_hash"] != hash_of(setup.base):
        raise BadInput(f"{path}: this run began from another policy than the settings name now; "
                       "the policy must be the one that it began from")
    if "after" in cfg.functions:
        raise BadInput("after: changes the loop between iterations, and an account repeats it as "
                       f"the settings of {folder} have it")
    harmless = ["num_eval_generations"]
    if not by_micro_batch(cfg):
        harmless.append("micro_batch_size")
    for name, (was, now) in changed_settings(last["settings"], cfg).items():
        if name not in harmless:
            raise BadInput(f"{name} = {now!r}: must be {was!r} as in {path}, whose run is repeated")
    # what the names stand for
    inputs = changed_inputs(last["has_read"], what_was_read(setup, cfg))
    for name in inputs:
        if not name.startswith(("device", "dtype", "torch", "threads")):
            raise BadInput(f"{name}: not what this run has read, by the hash in {path}: the run is "
                           f"repeated with what it had ({folder}/config.py is a copy of its config "
                           "file)")
    midway = [f"{name} changed after iteration {done}" for done, name, *_ in last["changes"]
              if name not in harmless]
    return [*midway, *inputs]


def go_to(setup, cfg, folder, since):
    """Load the last checkpoint up to iteration `since`, if there is one -> its iteration, or 0."""
    earlier = [path for path in checkpoints(folder) if iterations_of(path) <= since]
    return load_checkpoint(earlier[-1], setup, cfg)["iteration"] if earlier else 0


def far_from_run(run, target, course, path, last, changed):
    """A line on how far the replay is from the run, in the number that is explained; "" where it is
    the same to the bit. BadInput where it is too far. changed: what check_run returned."""
    names = {p: name for name, p in run.setup.policy.named_parameters()}
    end = run.states[-1][0].cpu()
    saved = flat(last["policy"][names[p]].to(end) for p in run.setup.trained)
    if torch.equal(saved, end):
        return ""
    off = target.at(saved, with_slope=False).value - course.values[-1]              # (K,)
    change = course.change
    if target.rollouts:     # its columns are folds of one number
        off, change = off.sum(), change.sum()
    off = float((off.abs() / change.abs().clamp(min=1e-30)).max())
    threads = read_json(f"{run.folder}/config.json").get("threads")
    causes = ", ".join(changed) or (
        f"threads (then {threads}, now {torch.get_num_threads()}: --threads={threads}), a GPU, "
        "another machine or version, settings that changed, a reward that draws random numbers")
    far = f"{100 * off:.2g} % of the change, by {causes}"
    if not off <= MOST_OFF:
        raise BadInput(f"{path}: the replay is another run, off by {far}")
    return f"warning: the replay ends at different weights than {path}, and is off by {far}"


# ------------------------------------------------------------------------------------------------
# what will it cost?


class Price(NamedTuple):
    """CPU time, in rollouts that the run samples and learns from."""
    run: float          # the run itself, with its evaluations
    replay: float       # its account, without what is below
    learned: int        # rollouts of the run
    points: int         # weights at which held-out completions are drawn

    def times(self, completions, tokens=False, predicts=False):
        """The CPU time of an account, in CPU times of the run. completions: at each point."""
        more = (TOKENS * tokens + PREDICTION * predicts) * self.learned
        return (self.replay + more + HELD_OUT * self.points * completions) / self.run

    @property
    def affordable(self):
        """Held-out completions at each point for twice the run, but LEAST."""
        return max(LEAST, int((2 * self.run - self.replay) / HELD_OUT / self.points))


def price_of(setup, folder, cfg, since, end, pieces):
    """The Price of an account of iterations since + 1 to end."""
    steps = sum(row.get("num_steps", 1) for row in read_log(f"{folder}/metrics.jsonl")
                if since < row["iteration"] <= end)
    learned = (end - since) * cfg.num_prompts * cfg.num_generations
    evaluations = 1 + math.ceil((end - since) / (cfg.eval_interval or end))
    evaluated = evaluations * len(setup.eval_prompts) * cfg.num_eval_generations
    passes = PASS * len(parts_of(setup, cfg)[0])
    return Price(learned + EVALUATED * evaluated, (SLOWER + passes) * learned, learned,
                 int(steps) * pieces + 1)


def say_cost(price, target, since, end, predicts, exact):
    """Print what the account will cost before it starts, and what more or less would."""
    n = target.rollouts
    sampled, choice = "", f"--hessian=False, which predicts nothing: {price.times(0):.1f} times"
    if n:
        sampled = f" with {n} held-out completions at {price.points} points"
        choice = (f"--held_out=N for less noise: by half with {4 * n}, {price.times(4 * n):.1f} "
                  "times; --exact for as many as the evaluation has, and for shares of tokens")
    print(f"account: replaying iterations {since + 1} to {end}{sampled}: about "
          f"{price.times(n, exact, predicts):.1f} times the CPU time of the run ({choice})",
          flush=True)
