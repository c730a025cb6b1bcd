# toxicity_tracin.py with LoRA adapters: the frozen weights cost the tape nothing.
from config.toxicity_tracin import *

out_dir = "out/toxicity_tracin_lora"
lora_rank = 16
learning_rate = 2e-3
