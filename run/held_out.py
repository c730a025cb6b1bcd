"""What influence carries from one iteration to the next, as a checkpoint holds it: the average of
the target's gradient, and the held-out rollouts that serve for several iterations."""
import torch

from run.files import check_tensors, is_dense


def influence_state(influence, every):
    """{"age", "average", "held_out"} of a tracin.Influence; None without one. every: the iterations
    that held-out rollouts serve; those that serve one only are not kept."""
    if influence is None:
        return None
    average = {influence.tape.names[p]: g for p, g in influence.average.items()}
    held_out = None
    if every > 1 and influence.held_out is not None:
        batch, rows = influence.held_out
        held_out = {"rows": rows}
        held_out |= {f"rollout.{name}": x for name, x in vars(batch.rollout).items()}
        held_out |= {f"batch.{name}": x for name, x in vars(batch).items()}
        held_out = {name: x for name, x in held_out.items() if torch.is_tensor(x)}
    return {"age": influence.age, "average": average, "held_out": held_out}


def is_influence_state(x):
    """True for what influence_state gives."""
    if x is None:
        return True
    if not isinstance(x, dict) or x.keys() != {"age", "average", "held_out"}:
        return False
    tensors = [x["average"], {} if x["held_out"] is None else x["held_out"]]
    named = all(isinstance(found, dict) for found in tensors)
    return type(x["age"]) is int and named and all(
        type(name) is str and is_dense(value)
        for found in tensors for name, value in found.items())


def load_influence(influence, state, device):
    """Gives a tracin.Influence what influence_state found. ValueError where it does not fit."""
    parameters = {name: p for p, name in influence.tape.names.items()}
    average = state["average"]
    check_tensors(average, {name: p for name, p in parameters.items() if average})
    influence.age = state["age"]
    influence.average = {parameters[name]: g.to(device) for name, g in average.items()}
    influence.held_out = state["held_out"]      # grpo.collect_target makes a Target of it


def unpack(held_out, Target, Batch, Rollout, device):
    """The Target of which influence_state has made tensors by name."""
    on_host = ("batch.scores", "batch.rewards")
    x = {name: value if name in on_host else value.to(device) for name, value in held_out.items()}
    parts = {"rollout": {}, "batch": {}}
    for name, value in x.items():
        part, _, field = name.partition(".")
        if field:
            parts[part][field] = value
    return Target(Batch(Rollout(**parts["rollout"]), **parts["batch"]), x["rows"])
