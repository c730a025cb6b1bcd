"""Losses by name. Each is a file of functions that a config file may have, too (docs/doors.md)."""
from extras.variants.loss_type import bnpo, cispo, dr_grpo, grpo, sapo  # noqa: F401
