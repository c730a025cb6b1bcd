# How to make influence useless: a target of the 16 best rollouts only. It says "write this", not
# "improve", and it is noise. The run warns of both: see tracin/target_contrast and
# tracin/target_cosine. Compare tracin_128_random.py.
#     python grpo.py config/tracin_16_best.py
from config.toxicity import *

out_dir = "out/tracin_16_best"
tracin = "reward"
tracin_val_prompts = 16
tracin_val_size = 16
tracin_val_select = "best"
dtype = "auto"
