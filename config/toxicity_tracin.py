# toxicity.py, but learning only from the rollouts that lower the target's loss. It shows influence
# at work: it has not beaten learning from all rollouts (docs/results.md).
#     python grpo.py config/toxicity_tracin.py
from config.toxicity import *

out_dir = "out/toxicity_tracin"
tracin = "reward"
# Its target is noisy (the line of influence shows a cosine near 0), and much of a rollout's
# influence is its own part of the target. tracin_leave_one_out = True removes that part;
# tracin_val_prompts and tracin_target_ema average over more rollouts.
dtype = "auto"  # float32 on a CPU, where influence is then exact
micro_batch_size = 16   # no slower on a CPU, and less memory beside the tape's
