# What mends tracin_16_best.py: a target of 128 rollouts as they come, good and bad.
from config.toxicity import *

out_dir = "out/tracin_128_random"
tracin = "reward"
tracin_val_prompts, tracin_val_size, tracin_val_select = 16, 128, "random"
