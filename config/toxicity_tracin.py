# toxicity.py, but learning only from the rollouts that lower the target's loss.
#     python grpo.py config/toxicity_tracin.py
from config.toxicity import *

out_dir = "out/toxicity_tracin"
tracin = "reward"
dtype = "auto"  # float32 on a CPU, where influence is then exact
