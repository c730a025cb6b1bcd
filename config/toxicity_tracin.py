# toxicity.py, but learning only from the rollouts that lower the target's loss. To see influence at
# work: no setting of it was better than all rollouts (docs/results.md).
#     python grpo.py config/toxicity_tracin.py
from config.toxicity import *

out_dir = "out/toxicity_tracin"
tracin = "reward"
# What would help: its target is noise (in the line of influence a cosine near 0), and much of a
# rollout's influence is its own part in it. tracin_leave_one_out = True leaves that out,
# tracin_val_prompts and tracin_target_ema take more rollouts.
dtype = "auto"  # float32 on a CPU, where influence is then exact
micro_batch_size = 16   # no slower on a CPU, and less memory beside the tape's
