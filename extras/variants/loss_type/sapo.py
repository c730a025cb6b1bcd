"""SAPO (Gao et al. 2025): a soft clip, which may be another one for pushing down."""
import torch

from extras.variants.loss_type.grpo import divide  # noqa: F401


def objective(ratio, A, cfg):
    tau = torch.full_like(A, cfg.sapo_temperature_neg)
    tau = tau.masked_fill(A > 0, cfg.sapo_temperature_pos)
    return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A


objective.one_slope = True      # influence takes its faster way (docs/hooks.md)
