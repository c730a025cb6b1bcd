# toxicity_gpt2.py, learning only from the rollouts that lower the target's loss.
#     pip install -r requirements-hub.txt
#     python grpo.py config/toxicity_gpt2_tracin.py
from config.toxicity_gpt2 import *

out_dir = "out/toxicity_gpt2_tracin"
tracin = "reward"

# The loss of a rollout is then a multiple of its log-prob, so one backward pass serves the target,
# the scores and the step.
kl_in = "reward"
kl_estimator = "k1"
# Memory: about 10 GB, counted as in toxicity_gpt2.py; 2.4 GB of it are what the tape keeps.
