"""LoRA (Hu et al. 2021): train two small matrices beside each Linear of the policy."""
from torch import nn


class LoRA(nn.Module):
    """W x + (alpha / rank) B A x, with W frozen. B starts at 0."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        # drawn on the CPU, so that a run on a GPU starts from the same numbers
        device = base.weight.device
        self.A = nn.Linear(base.in_features, rank, bias=False).to(device)
        self.B = nn.Linear(rank, base.out_features, bias=False).to(device)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.base(x) + self.scale * self.B(self.A(x))


def add_lora(model, rank, alpha):
    """Freeze a model and adapt every Linear but its head."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not model.lm_head:
                setattr(module, name, LoRA(child, rank, alpha))
    return model
