"""The optimizer of a run: AdamW, or what the config file's function `optimizer` makes.

    def optimizer(named_parameters, learning_rate):         # [(name, parameter)], the setting
        return torch.optim.SGD([p for _, p in named_parameters], lr=learning_rate, momentum=0.9)

A list of optimizers steps as one: Muon for the matrices, say, and AdamW for the rest. Warm-up and
decay scale each parameter group's rate from the value that the function set. An optimizer's whole
state must be in its state_dict(), as tensors and plain numbers: a checkpoint saves that.
"""
import math

import numpy as np
import torch

from common.errors import BadInput, shown
from common.files import load_optimizer, not_data


class Several:
    """Optimizers that step as one, with the methods that the loop and checkpoints use."""

    def __init__(self, optimizers):
        self.optimizers = list(optimizers)

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        """{parameter: its moments}; read only."""
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook):
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook):
        return self.optimizers[-1].register_step_post_hook(hook)

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}


def name_of(optimizer):
    """The classes of an optimizer, to compare with a checkpoint's."""
    several = optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]
    return ", ".join(type(one).__name__ for one in several)


def load_state(optimizer, state):
    """optimizer <- an earlier state_dict(). ValueError if it belongs to a different one."""
    is_list = isinstance(optimizer, Several)
    optimizers = optimizer.optimizers if is_list else [optimizer]
    states = state["optimizers"] if is_list else [state]
    for one, part in zip(optimizers, states, strict=True):
        load_optimizer(one, part)


def plain(value):
    """Replace numpy's numbers in a table, which a checkpoint cannot hold, by Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: plain(x) for key, x in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def state_of(optimizer):
    """The state of an optimizer, as a checkpoint saves it."""
    return plain(optimizer.state_dict())


def check_state(optimizer):
    """Refuse the config file's optimizer, after its first step, if a checkpoint could not save and
    restore its state: the trained policy would be lost with it."""
    state = state_of(optimizer)
    if place := not_data(state):
        raise BadInput(f"optimizer: a checkpoint cannot hold what its state_dict() has at {place}: "
                       "must be a tensor, a number, text, or a dict or list of these")
    try:
        load_state(optimizer, state)
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise BadInput(f"optimizer: {shown(optimizer)} does not take back what its state_dict() "
                       f"gave, so a run could not be resumed with it ({shown(e)})") from e


def settings_of_groups(state):
    """The settings of each parameter group in the result of state_of -> [{name: value}], without
    the learning rate, which follows from the iteration."""
    groups = [group for part in state.get("optimizers", [state]) for group in part["param_groups"]]
    return [{name: x for name, x in group.items() if name not in ("params", "lr")}
            for group in groups]


def differing(groups, others):
    """Compare two results of settings_of_groups -> {name: (value, other)}, from the first group
    where the setting differs."""
    differences = {}
    for one, other in zip(groups, others):
        for name in one.keys() | other.keys():
            values = one.get(name), other.get(name)
            if repr(values[0]) != repr(values[1]):
                differences.setdefault(name, values)
    return differences


def adamw(named_parameters, cfg):
    """AdamW from the settings. As in nanoGPT and TRL, matrices decay; vectors, which are biases and
    gains of norms, do not."""
    matrices = [p for _, p in named_parameters if p.dim() >= 2]
    vectors = [p for _, p in named_parameters if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg.weight_decay},
         {"params": vectors, "weight_decay": 0.0}],
        lr=cfg.learning_rate, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_eps, fused=True)


def check_made(optimizers, named_parameters):
    """Refuse the config file's optimizers, unless together they have every trained parameter
    once."""
    if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise BadInput(f"optimizer returned {shown(optimizers)}: must be a torch.optim.Optimizer, "
                       "or a list of them")

    # a parameter that is missing would never move, one that is there twice would move twice
    ids = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    for name, p in named_parameters:
        if ids.count(id(p)) != 1:
            raise BadInput(f"optimizer: {name} is in it {ids.count(id(p))} times: put each of "
                           "named_parameters into one parameter group")


def make_optimizer(policy, cfg):
    """The optimizer of the policy's trained parameters. Every group remembers its rate before
    warm-up and decay as initial_lr."""
    named_parameters = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    optimizer = adamw(named_parameters, cfg)

    # or the config file's optimizer
    if "optimizer" in cfg.functions:
        returned = cfg.functions["optimizer"](list(named_parameters), cfg.learning_rate)
        several = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        check_made(several, named_parameters)
        optimizer = returned if isinstance(returned, torch.optim.Optimizer) else Several(several)

    # warm-up and decay scale the rate that a group has now
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


def learning_rate(it, cfg):
    """Rate of iteration it: linear warm-up, then constant, or linear or cosine decay to 0."""
    if it < cfg.warmup_iters:
        return cfg.learning_rate * (it + 1) / cfg.warmup_iters
    done = (it - cfg.warmup_iters) / max(1, cfg.max_iters - cfg.warmup_iters)
    if cfg.lr_decay == "linear":
        return cfg.learning_rate * (1 - done)
    if cfg.lr_decay == "cosine":
        return cfg.learning_rate * (0.5 + 0.5 * math.cos(math.pi * done))
    return cfg.learning_rate


def set_learning_rate(optimizer, it, cfg):
    """Set the rate of iteration it."""
    for group in optimizer.param_groups:
        # a group of the config file's optimizer may have a rate of its own
        given = cfg.given.get("learning_rate", cfg.learning_rate)
        share = group.get("initial_lr", given) / given
        group["lr"] = learning_rate(it, cfg) * share
