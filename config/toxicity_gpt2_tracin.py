# toxicity_gpt2.py, learning only from the rollouts that lower the target's loss.
#     pip install -r requirements-hub.txt
#     python grpo.py config/toxicity_gpt2_tracin.py
from config.toxicity_gpt2 import *

out_dir = "out/toxicity_gpt2_tracin"
tracin = "reward"
kl_in = "reward"  # a row's loss is then a multiple of its log-prob, and one backward serves target, scores and step
kl_estimator = "k1"
