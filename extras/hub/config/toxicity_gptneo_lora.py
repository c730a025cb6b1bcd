# The setting of the papers on influence in RLHF: GPT-Neo with LoRA of rank 16 and alpha 32,
# 256 rollouts of 30 tokens, learning rate 1e-5, KL 0.04. Memory: about 9.5 GB (an estimate).
#     pip install -r extras/hub/requirements.txt
#     python grpo.py extras/hub/config/toxicity_gptneo_lora.py [--policy=EleutherAI/gpt-neo-2.7B]
from extras.hub.config.toxicity_gpt2 import *

out_dir = "out/toxicity_gptneo_lora"
policy = "EleutherAI/gpt-neo-125m"
lora_rank = 16
lora_alpha = 32.0
num_prompts = 32
tracin = "reward"
kl_in = "reward"
kl_estimator = "k1"
