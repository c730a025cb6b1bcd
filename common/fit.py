"""The supervised loop that trains the default policy and the judges."""
import math
import os
import time

from common.files import load_file, load_optimizer, load_weights, save_file, undamaged
from run.report import Progress

SAVE_SECONDS = 20


def fit(model, optimizers, loss_at, steps, partial, label, stop=lambda: False):
    """Minimise loss_at(step) for `steps` steps, each optimizer at its rate x trapezoid(...).

    The state is saved to the file `partial` now and then; a call that finds the file continues from
    it. loss_at must depend on nothing but the weights and the step, so that an interruption changes
    no result. Prints loss and remaining time under the name `label`. Raises KeyboardInterrupt,
    after saving, once stop() is true.
    """
    rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
    start = load_partial(partial, model, optimizers, label, steps)
    progress = Progress(label, "step", steps, start)
    saved = time.time()
    mean = None     # of the loss, over about the last 50 steps
    for step in range(start, steps):
        for optimizer, base in zip(optimizers, rates):
            for group, rate in zip(optimizer.param_groups, base):
                group["lr"] = rate * trapezoid(step, steps)
        loss = loss_at(step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        mean = loss.detach() if mean is None else mean.lerp(loss.detach(), 0.02)
        if progress.is_due() or step + 1 == steps:
            progress.show(step + 1, f"loss {float(mean):.3f}, ")
        stopped = stop()
        if stopped or time.time() - saved > SAVE_SECONDS:
            save_file(partial, "partial", model=model.state_dict(), step=step + 1,
                      optimizers=[o.state_dict() for o in optimizers])
            saved = time.time()
        if stopped:
            raise KeyboardInterrupt(f"{label} is saved; the same command goes on from there")
    if mean is not None and not math.isfinite(float(mean)):
        raise SystemExit(f"stopped: the loss of {label} became {float(mean)}; remove {partial} and "
                         "lower its learning rate")


def trapezoid(step, steps):
    """Return the factor of the learning rate at a step. It rises during the first 2 % of the steps,
    stays, and falls to almost 0 during the last half."""
    up = (step + 1) / max(1, 0.02 * steps)
    down = (steps - step) / max(1, 0.5 * steps)
    return min(1.0, up, down)


def load_partial(partial, model, optimizers, label, steps):
    """Put back what `fit` saved, if anything -> the step to start from."""
    if not os.path.exists(partial):
        return 0
    content = load_file(partial, "partial")
    with undamaged(partial):
        load_weights(partial, model, content["model"])
        for optimizer, state in zip(optimizers, content["optimizers"], strict=True):
            load_optimizer(optimizer, state)
        if content["step"] not in range(steps + 1):
            raise ValueError(f"step {content['step']}")
        print(f"{label}: goes on from step {content['step']} of {steps} ({partial})")
        return content["step"]
