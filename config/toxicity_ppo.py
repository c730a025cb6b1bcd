# toxicity.py with a critic: PPO in place of GRPO, on the same rollouts and rewards.
#     python grpo.py config/toxicity_ppo.py
from config.toxicity import *

out_dir = "out/toxicity_ppo"
critic = True           # scale_rewards has no part then
