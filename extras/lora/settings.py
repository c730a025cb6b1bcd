"""A setting for LoRA, beside lora_rank. It joins run/settings.py."""
from dataclasses import dataclass


@dataclass
class LoraSettings:
    # adapters (extras/lora)
    lora_alpha: float = 32.0            # adapters are scaled by lora_alpha / lora_rank
