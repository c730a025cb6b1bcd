"""The optimizer of a run: AdamW, or what the config file's function `optimizer` makes.

    def optimizer(named_parameters, learning_rate):         # [(name, parameter)], the setting
        return torch.optim.SGD([p for _, p in named_parameters], lr=learning_rate, momentum=0.9)

Each has param_groups, state, step, zero_grad, state_dict and load_state_dict, as in torch.optim. A
list of optimizers steps as one: Muon for the matrices, say, and AdamW for the rest. Warm-up and
decay scale each parameter group's rate from the value that the function set. An optimizer's whole
state must be in its state_dict(), as tensors and plain numbers: a checkpoint saves that.
"""
import io
import math
import pickle

import torch

from common.errors import BadInput, shown


class Several:
    """Optimizers that step as one, with what the loop and checkpoints use."""

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

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}


def check_moments(optimizer):
    """ValueError if a moment does not lie in memory like its weight, as when weights have another
    order now: AdamW would not notice, and would write elsewhere."""
    for p, moments in optimizer.state.items():
        for name in {"exp_avg", "exp_avg_sq"} & moments.keys():
            layout = moments[name].shape, moments[name].stride()
            if layout != (p.shape, p.stride()):
                raise ValueError(f"{name} has shape and strides {layout}, its weight "
                                 f"{(p.shape, p.stride())}")


def load_state(optimizer, state):
    """optimizer <- an earlier state_dict(), with the rates of now. The groups of torch's optimizers
    hold nothing but settings, and those of now count. Other optimizers (Schedule-Free, Prodigy) may
    keep step counts in their groups."""
    optimizers = getattr(optimizer, "optimizers", [optimizer])
    states = state.get("optimizers", [state])
    for one, before in zip(optimizers, states, strict=True):
        now = [{name: x for name, x in group.items() if name != "params"}
               for group in one.param_groups]
        one.load_state_dict(before)
        is_torchs = type(one).__module__.startswith("torch.")
        if not is_torchs:
            now = [dict(lr=group["lr"], initial_lr=group["initial_lr"]) for group in now]
        for group, settings in zip(one.param_groups, now):
            group.update(settings)
        if is_torchs:
            check_moments(one)


def check_state(optimizer):
    """End the run after the first step of the config file's optimizer if a checkpoint could not
    hold its state: the trained policy would be lost with it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as e:
        words = str(e).split("WeightsUnpickler error: ")[-1]
        raise BadInput("optimizer: a checkpoint cannot hold its state_dict(), which must be "
                       f"tensors, numbers, text, and dicts or lists of these ({shown(words)})"
                       ) from e


def adamw(named_parameters, cfg):
    """AdamW from the settings. As in nanoGPT and TRL, matrices decay; vectors, which are biases and
    gains of norms, do not."""
    matrices = [p for _, p in named_parameters if p.dim() >= 2]
    vectors = [p for _, p in named_parameters if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg.weight_decay},
         {"params": vectors, "weight_decay": 0.0}],
        lr=cfg.learning_rate, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_eps, fused=True)


def check_made(optimizer, named_parameters):
    """Refuse the config file's optimizer unless it has every trained parameter once: one that is
    missing would never move, one that is there twice would move twice."""
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for name, p in named_parameters:
        if ids.count(id(p)) != 1:
            raise BadInput(f"optimizer: {name} is in it {ids.count(id(p))} times: put each of "
                           "named_parameters into one parameter group")


def make_optimizer(policy, cfg):
    """The optimizer of the policy's trained parameters. Every group remembers its rate before
    warm-up and decay as initial_lr."""
    named_parameters = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    if "optimizer" in cfg.functions:
        optimizer = cfg.functions["optimizer"](list(named_parameters), cfg.learning_rate)
        optimizer = Several(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer
        check_made(optimizer, named_parameters)
    else:
        optimizer = adamw(named_parameters, cfg)
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
    # each group keeps its ratio to the first rate: the config file's optimizer may give it another
    # one, and `after` may have changed cfg.learning_rate since
    first = cfg.given.get("learning_rate", cfg.learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(it, cfg) * (group.get("initial_lr", first) / first)
