# A target of 128 rollouts as they come, good and bad: it has contrast, which tracin_16_best.py lacks. Whether it is large
# enough is another matter: watch tracin/target_cosine, which says how much of its gradient is not noise.
from config.toxicity import *

out_dir = "out/tracin_128_random"
tracin = "reward"
dtype = "auto"
tracin_val_prompts, tracin_val_size, tracin_val_select = 16, 128, "random"
