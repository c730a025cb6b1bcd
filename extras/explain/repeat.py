"""
A run, once more: its optimizer steps, with what is needed to take each of them apart. A run that
cannot be repeated is refused.
"""
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo
from common.errors import BadInput
from common.files import read_json
from common.progress import Progress
from common.seeds import hash_of, seed_for
from loss import by_micro_batch
from run.checkpoint import changed_settings
from run.hashes import changed_inputs, what_was_read

MOST_OFF = 0.1      # of the change: how far the repeated run may end from the run

# ------------------------------------------------------------------------------------------------
# is it the run?


def check_run(setup, cfg, folder, path, last):
    """Refuse settings or inputs that differ from the run's. path, last: its last checkpoint."""
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
    for name in changed_inputs(last["has_read"], what_was_read(setup, cfg)):
        if not name.startswith(("device", "dtype", "torch", "threads")):
            raise BadInput(f"{name}: not what this run has read, by the hash in {path}: the run is "
                           f"repeated with what it had ({folder}/config.py is a copy of its config "
                           "file)")


def check_optimizer(optimizer):
    """Refuse an optimizer that takes different steps than the formulas of account.py."""
    first, *others = optimizer.param_groups
    same = ("lr", "betas", "eps", "amsgrad", "maximize")
    if (type(optimizer) is not torch.optim.AdamW or first["amsgrad"] or first["maximize"]
            or any(group[name] != first[name] for group in others for name in same)):
        raise BadInput(
            f"optimizer {type(optimizer).__name__}: an account knows torch.optim.AdamW alone, with "
            "one lr, betas and eps for all weights, and without amsgrad and maximize")


# ------------------------------------------------------------------------------------------------
# its steps


class RunStep(NamedTuple):
    """An optimizer step as the run took it."""
    it: int         # its iteration, from 0
    batch: Any      # loss.Batch, with the row_weights of this step
    step: Any       # loss.Step
    clip: float     # what its gradient was multiplied by
    lr: float
    decay: Tensor   # (W,) of each weight
    eps: float
    b1: float
    b2: float
    count: int      # of AdamW's steps, this one included

    @property
    def c1(self):
        return 1 - self.b1 ** self.count

    @property
    def c2(self):
        return 1 - self.b2 ** self.count


class RepeatedRun(NamedTuple):
    """I iterations of N rollouts, S optimizer steps, W trained weights end to end."""
    setup: Any
    cfg: Any
    states: list    # before each step and after the last one: S + 1 of (3, W), weights, m and v
    steps: list     # S of RunStep

    @property
    def shape(self):
        """(I, N)."""
        return self.steps[-1].it + 1, len(self.steps[0].batch.row_weights)

    @property
    def batches(self):
        """{iteration: its Batch}. Its last step knows all weights of its rows."""
        return {k.it: k.batch for k in self.steps}


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])


def decay_of(setup):
    """The weight decay (W,) of each trained weight."""
    decay = {p: group["weight_decay"] for group in setup.optimizer.param_groups
             for p in group["params"]}
    return flat(torch.full_like(p, decay[p]) for p in setup.trained).detach()


def state_of(setup):
    """Weights, m and v (3, W), on the CPU."""
    state = setup.optimizer.state
    moments = [flat(state[p].get(name, torch.zeros_like(p)) for p in setup.trained)
               for name in ("exp_avg", "exp_avg_sq")]
    return torch.stack([flat(setup.trained).detach(), *moments]).cpu()


def run_step(setup, cfg, it, batch, step, norm, decay):
    """The RunStep that the run is about to take."""
    # AdamW skips a weight without gradient. One that never has any stands still; any other would
    # have a count of its own
    counts = {p: int(state["step"]) for p, state in setup.optimizer.state.items() if state}
    moved = {1 + counts.get(p, 0) for p in setup.trained if p.grad is not None}
    skipped = any(p.grad is None and p in counts for p in setup.trained)
    if len(moved) > 1 or skipped:
        raise BadInput(f"iteration {it + 1}: a weight has no gradient in some steps, which AdamW "
                       "skips; an account knows weights that have one always or never")
    count, = moved
    group = setup.optimizer.param_groups[0]     # all have the same, but for the decay
    clip = min(1.0, cfg.max_grad_norm / (norm + 1e-6)) if cfg.max_grad_norm else 1.0
    batch = replace(batch, row_weights=batch.row_weights.clone())
    return RunStep(it, batch, step, clip, group["lr"], decay, group["eps"], *group["betas"], count)


def repeat_run(setup, cfg, end):
    """Do iterations 0 .. end - 1 as grpo.train did -> RepeatedRun."""
    states = []
    steps = []
    check_optimizer(setup.optimizer)
    decay = decay_of(setup)                                                         # (W,)
    progress = Progress("repeated", "iteration", end)
    for it in range(end):
        grpo.set_learning_rate(setup.optimizer, it, cfg)
        batch = grpo.collect_iteration(setup, it, cfg)
        held_out = grpo.collect_held_out(setup, it, cfg)

        def watch(step, norm):
            states.append(state_of(setup))
            steps.append(run_step(setup, cfg, it, batch, step, float(norm), decay))

        grpo.update(setup, batch, held_out, cfg, seed_for(cfg.seed, "rows", it),
                    grpo.Meter(setup, cfg, watch=watch))
        if cfg.hook("follow"):
            cfg.call("follow", setup=setup, done=it + 1, cfg=cfg)
        if progress.is_due():
            progress.show(it + 1)
    states.append(state_of(setup))
    return RepeatedRun(setup, cfg, states, steps)


def check_end(run, target, folder, path, last):
    """Refuse a repeated run that ends too far from the run, in the number that is explained -> a
    line on how far it is, "" where the weights are the same to the bit."""
    names = {p: name for name, p in run.setup.policy.named_parameters()}
    end = run.states[-1][0]
    saved = flat(last["policy"][names[p]].to(end) for p in run.setup.trained)
    if torch.equal(saved, end):
        return ""
    before, after, expected = (float(target.at(weights, with_slope=False).value.sum())
                               for weights in (run.states[0][0], end, saved))
    off = abs(after - expected) / max(abs(after - before), 1e-30)
    threads = read_json(f"{folder}/config.json").get("threads")
    far = (f"the repeated run ends {100 * off:.2g} % of the change away from {path} (another "
           f"machine or GPU, or other threads: the run had --threads={threads})")
    if not off <= MOST_OFF:
        raise BadInput(far)
    return f"warning: {far}"
