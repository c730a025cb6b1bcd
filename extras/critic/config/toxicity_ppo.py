# toxicity.py with a critic: PPO (extras/critic).
#     python grpo.py extras/critic/config/toxicity_ppo.py
from config.toxicity import *

out_dir = "out/toxicity_ppo"
critic = True
