# How to make influence useless: a target of 16 rollouts, only the best ones. It says "write this", not "improve", and it is
# noise; see the two warnings, tracin/target_contrast and tracin/target_cosine. Compare tracin_128_random.py.
from config.toxicity import *

out_dir = "out/tracin_16_best"
tracin = "reward"
dtype = "auto"
tracin_val_prompts, tracin_val_size, tracin_val_select = 16, 16, "best"
