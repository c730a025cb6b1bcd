# A target of 128 rollouts as they come, good and bad. It has the contrast that tracin_16_best.py
# lacks. Whether it is large enough is another question: tracin/target_cosine tells how much of its
# gradient is not noise.
#     python grpo.py config/tracin_128_random.py
from config.toxicity import *

out_dir = "out/tracin_128_random"
tracin = "reward"
tracin_val_prompts = 16
tracin_val_size = 128
tracin_val_select = "random"
dtype = "auto"
