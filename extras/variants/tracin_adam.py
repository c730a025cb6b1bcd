"""AdamW does not step along a gradient: measure on the weights as it will move them."""
import torch

from common.errors import BadInput


def adam_scale(optimizer, gradient):
    """{parameter: 1 / (sqrt(v) + eps)}: what AdamW will multiply a step with this gradient by."""
    if type(optimizer) is not torch.optim.AdamW:
        raise BadInput("tracin_adam = True: measures by the moments of torch.optim.AdamW, and "
                       f"optimizer made {type(optimizer).__name__}: set tracin_adam = False")
    # momentum and weight decay change no ranking. Clipping is ignored, and so are dropped rows
    scale = {}
    for group in optimizer.param_groups:
        decay = group["betas"][1]
        for p in group["params"]:
            state = optimizer.state.get(p, {"exp_avg_sq": 0, "step": 0})
            v = decay * state["exp_avg_sq"] + (1 - decay) * gradient[p].square()
            unbiased = v / (1 - decay ** (state["step"] + 1))
            scale[p] = 1 / (unbiased.sqrt() + group["eps"])
    return scale
