# How to make influence useless, the first failure of many: a target of 16 rollouts, only the best ones. It says "write
# this", not "improve"; watch tracin/target_contrast and tracin/target_cosine, and the warnings. Mended in tracin_128_random.py
from config.toxicity import *

out_dir = "out/tracin_16_best"
tracin = "reward"
tracin_val_prompts, tracin_val_size, tracin_val_select = 16, 16, "best"
