# toxicity_tracin.py with LoRA adapters. Influence costs nothing for the frozen weights.
#     python grpo.py config/toxicity_tracin_lora.py
from config.toxicity_tracin import *

out_dir = "out/toxicity_tracin_lora"
lora_rank = 16
learning_rate = 2e-3
