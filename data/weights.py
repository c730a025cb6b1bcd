"""Models in files: a policy or a judge, as its shape and weights."""
import glob
import os
from dataclasses import asdict

import torch

from common.files import load_file, load_weights, save_file, undamaged
from common.script import BadInput, shown
from model import GPTConfig, Policy


def save_gpt(path, model, kind="policy", **extra):
    """Write weights and shape. What was saved on the way is no longer needed, nor what a killed
    process left unfinished."""
    save_file(path, kind, config=asdict(model.config), model=model.state_dict(), **extra)
    for partial in glob.glob(f"{glob.escape(path)}.partial*"):
        os.remove(partial)


@torch.no_grad()
def rebuilt(path, shape, weights, make):
    """make(GPTConfig) with these weights. That they fit is seen before anything large is built, and
    that they compute before anything relies on it."""
    try:
        config = GPTConfig(**shape)
        if config.n_layer > len(weights) or not all(x.is_contiguous() for x in weights.values()):
            raise ValueError(f"{len(weights)} tensors for {config.n_layer} layers, or views")
        with torch.device("meta"):
            make(config).load_state_dict(dict(weights), assign=True)
    except (RuntimeError, TypeError) as e:
        raise BadInput(f"{path}: damaged, or a model of another class ({shown(e, 200)})") from e
    model = make(config)
    load_weights(path, model, weights)
    getattr(model, "trunk", model)(torch.zeros(1, 2, dtype=torch.long))
    return model


def load_gpt(path, kind="policy", make=Policy):
    """The policy that save_gpt wrote, on the CPU; or another module that a GPTConfig makes."""
    content = load_file(path, kind)
    with undamaged(path):
        return rebuilt(path, content["config"], content["model"], make)
