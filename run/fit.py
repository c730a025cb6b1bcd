"""The supervised loop of the policy and the judges."""
import math
import os
import time

from run.files import load_file, save_file


def fit(model, optimizers, loss_at, steps, partial, label, warmup=0.02, decay=0.5, stop=lambda: False, save_seconds=20):
    """The supervised loop that pretrain.py and judge.train share: minimise loss_at(step) for `steps` steps.

    loss_at must depend on nothing but the weights and the step, so that a run which is interrupted and started again
    from the file `partial` goes on as if it had not been. Learning rate: up over `warmup`, down to 0 over `decay` of
    the steps. Prints loss and remaining time; raises KeyboardInterrupt, having saved, once stop() is true.
    """
    first, began = 0, time.time()
    if os.path.exists(partial):
        state = load_file(partial, "partial")
        model.load_state_dict(state["model"])
        for optimizer, s in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(s)
        first = state["step"]
        print(f"{label}: goes on from step {first} of {steps} ({partial})")
    base, saved, printed = [[g.setdefault("base_lr", g["lr"]) for g in o.param_groups] for o in optimizers], began, began
    smooth, weight = 0.0, 1e-9
    for step in range(first, steps):
        scale = min(1.0, (step + 1) / max(1, warmup * steps), (steps - step) / max(1, decay * steps))
        for optimizer, rates in zip(optimizers, base):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * scale
        loss = loss_at(step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth, weight = 0.98 * smooth + 0.02 * loss.detach(), 0.98 * weight + 0.02
        now = time.time()
        if now - printed > 10 or step + 1 == steps:
            left = (now - began) / (step + 1 - first) * (steps - step - 1)
            print(f"{label}: step {step + 1}/{steps}, loss {float(smooth) / weight:.3f}, {left:.0f} s left", flush=True)
            printed = now
        if now - saved > save_seconds or stop():
            save_file(partial, "partial", model=model.state_dict(), step=step + 1,
                      optimizers=[o.state_dict() for o in optimizers])
            saved = now
            if stop():
                raise KeyboardInterrupt(f"{label} is saved; the same command goes on from there")
    if not math.isfinite(float(smooth)):
        raise SystemExit(f"stopped: the loss of {label} became {float(smooth)}; remove {partial} and lower its learning rate")
    return float(smooth) / weight
