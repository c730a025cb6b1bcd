"""What influence carries from one iteration to the next, as a checkpoint holds it: the average of
the target's gradient, and the held-out rollouts that serve for several iterations."""
from types import SimpleNamespace

import torch

from run.files import check_tensors, is_plain
from sample import Rollout

# of a held-out target: kind and shape of each tensor. N rows, m of which are the target, W tokens
# with the prompt, T of the completion, K reward functions
FORMS = {
    "rows": ("int", "m"),
    "rollout.tokens": ("int", "NW"),
    "rollout.attention_mask": ("bool", "NW"),
    "rollout.mask": ("bool", "NT"),
    "rollout.chosen": ("bool", "NT"),
    "rollout.logp": ("float", "NT"),
    "rollout.entropy": ("float", "NT"),
    "rollout.ended": ("bool", "N"),
    "rollout.allowed": ("bool", "NTV"),
    "rollout.values": ("float", "NT"),
    "rollout.value_after": ("float", "N"),
    "batch.advantages": ("float", "N"),     # with a critic NT
    "batch.mask": ("bool", "NT"),
    "batch.policy_mask": ("bool", "NT"),
    "batch.ref_logp": ("float", "NT"),
    "batch.scores": ("float", "NK"),
    "batch.rewards": ("float", "N"),
    "batch.returns": ("float", "NT"),
}
OPTIONAL = ("rollout.allowed", "rollout.values", "rollout.value_after", "batch.policy_mask",
            "batch.ref_logp", "batch.returns")
KINDS = {torch.bool: "bool", torch.int64: "int", torch.float32: "float", torch.float64: "float"}


def influence_state(influence, every):
    """{"age", "average", "held_out"} of a tracin.Influence; None without one. every: the iterations
    that held-out rollouts serve; those that serve one only are not kept."""
    if influence is None:
        return None
    names = names_of(influence)
    average = {names[p]: g for p, g in influence.average.items()}
    held_out = None
    if every > 1 and influence.held_out:
        batch, rows = influence.held_out
        found = {"rows": rows}
        found |= {f"rollout.{name}": x for name, x in vars(batch.rollout).items()}
        found |= {f"batch.{name}": x for name, x in vars(batch).items()}
        # no None, which unpack leaves out, and nothing that a batch has computed from these
        held_out = {name: found[name] for name in FORMS if found.get(name) is not None}
    return {"age": influence.age, "average": average, "held_out": held_out}


def is_influence_state(x):
    """True for what influence_state gives."""
    if x is None:
        return True
    if not isinstance(x, dict) or x.keys() != {"age", "average", "held_out"}:
        return False
    is_age = type(x["age"]) is int and 0 <= x["age"] < 2 ** 53
    is_average = isinstance(x["average"], dict) and all(map(is_plain, x["average"].values()))
    return is_age and is_average and (x["held_out"] is None or is_held_out(x["held_out"]))


def is_held_out(x):
    """True for the tensors of a held-out target, all of FORMS and shapes that go together."""
    needed = {name for name in FORMS if name not in OPTIONAL}
    if not isinstance(x, dict) or not needed <= x.keys() <= FORMS.keys():
        return False
    sizes = {}
    for name, value in x.items():
        kind, shape = FORMS[name]
        if not is_plain(value) or KINDS.get(value.dtype) != kind:
            return False
        if name == "batch.advantages" and value.dim() == 2:
            shape = "NT"
        if value.dim() != len(shape):
            return False
        if any(sizes.setdefault(*pair) != pair[1] for pair in zip(shape, value.shape)):
            return False
    rows = x["rows"]
    return 0 < sizes["T"] < sizes["W"] and len(rows) > 0 and is_below(rows, sizes["N"])


def is_below(x, end):
    """True if whole numbers are 0 to end - 1."""
    return bool(((x >= 0) & (x < end)).all())


def load_influence(influence, state, device):
    """Gives a tracin.Influence what influence_state found. ValueError where it does not fit."""
    average = state["average"]
    if average:
        names = names_of(influence)
        check_tensors(average, {name: p for p, name in names.items()})
        average = {p: average[name].to(p) for p, name in names.items()}
    held_out = state["held_out"]
    if held_out:
        shape = influence.nets.policy.config
        tokens = held_out["rollout.tokens"]
        if not is_below(tokens, shape.vocab_size) or tokens.shape[1] > shape.block_size:
            raise ValueError("the held-out rollouts are of another vocabulary or block_size")
        influence.held_out = unpack(held_out, device)
    influence.age = state["age"]
    influence.average = average


def unpack(held_out, device):
    """(batch, rows) of which influence_state has made tensors by name. grpo.collect_target makes a
    grpo.Batch of the fields of batch."""
    on_host = ("batch.scores", "batch.rewards")
    parts = {"": {}, "rollout.": {}, "batch.": {}}
    for name, value in held_out.items():
        part, dot, field = name.rpartition(".")
        parts[part + dot][field] = value if name in on_host else value.to(device)
    batch = SimpleNamespace(rollout=Rollout(**parts["rollout."]), **parts["batch."])
    return batch, parts[""]["rows"]


def names_of(influence):
    return {p: name for name, p in influence.nets.policy.named_parameters() if p.requires_grad}
