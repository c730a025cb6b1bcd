"""What makes a policy and a judge alike: a cache of models, and the training loop."""
import glob
import hashlib
import math
import os
import time

from common.errors import BadInput
from common.files import load_file, save_file
from common.processes import rank0_first
from common.progress import Progress

SAVE_SECONDS = 20


def cached(cfg, name, inputs, make, may_train):
    """Path of the file in cfg.cache_dir for these inputs. make(path) makes it at first use;
    BadInput if it is missing and may_train is False."""
    # the name holds a hash of all inputs, so a file of that name is the right one
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()[:8]
    path = os.path.join(cfg.cache_dir, f"{name}-{key}.pt")
    with rank0_first():
        if not os.path.exists(path):
            if not may_train:
                raise BadInput(f"{path}: is missing, and this run needs it; make it again: "
                               f"python -m extras.make {cfg.out_dir}")
            os.makedirs(cfg.cache_dir, exist_ok=True)
            make(path)
            for partial in glob.glob(f"{glob.escape(path)}.partial*"):      # of `fit`
                os.remove(partial)
    print(f"{name}: {path}")
    return path


def trapezoid(step, steps):
    """The factor of the learning rate at a step. It rises over the first 2 % of the steps,
    stays at 1, and falls to almost 0 over the last half."""
    up = (step + 1) / max(1, 0.02 * steps)
    down = (steps - step) / max(1, 0.5 * steps)
    return min(1.0, up, down)


def load_partial(partial, model, optimizers, label, steps):
    """Load what `fit` saved, if anything -> the step to start from."""
    if not os.path.exists(partial):
        return 0

    # weights, moments and step
    content = load_file(partial, "partial")
    model.load_state_dict(content["model"])
    for optimizer, state in zip(optimizers, content["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    print(f"{label}: continues from step {content['step']} of {steps} ({partial})")
    return content["step"]


def fit(model, optimizers, loss_at, steps, partial, label):
    """Minimise loss_at(step) for `steps` steps, each optimizer at its rate x trapezoid(...).

    The state is saved to the file `partial` every SAVE_SECONDS, and a call that finds the file
    continues from it. loss_at must depend on the weights and the step alone, so that an
    interruption changes no result. Print loss and remaining time under the name `label`.
    """
    # from the start, or where it was interrupted
    rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
    start = load_partial(partial, model, optimizers, label, steps)
    progress = Progress(label, "step", steps, start)
    saved = time.monotonic()
    mean = None     # of the loss, over about the last 50 steps
    for step in range(start, steps):
        # a step
        for optimizer, base in zip(optimizers, rates):
            for group, rate in zip(optimizer.param_groups, base):
                group["lr"] = rate * trapezoid(step, steps)
        loss = loss_at(step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        # how is it going?
        mean = loss.detach() if mean is None else mean.lerp(loss.detach(), 0.02)
        if progress.is_due() or step + 1 == steps:
            progress.show(step + 1, f"loss {float(mean):.3f}, ")

        # an interruption costs SAVE_SECONDS at most
        if time.monotonic() - saved > SAVE_SECONDS:
            save_file(partial, "partial", model=model.state_dict(), step=step + 1,
                      optimizers=[o.state_dict() for o in optimizers])
            saved = time.monotonic()
    if mean is not None and not math.isfinite(float(mean)):
        raise SystemExit(f"stopped: the loss of {label} became {float(mean)}; move {partial} away "
                         "and lower its learning rate")
