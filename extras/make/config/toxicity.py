# Make the policy and the two judges of config/toxicity.py: two hours on one core.
#     python -m extras.make extras/make/config/toxicity.py --threads=1
from config.toxicity import *

policy = "train"
judge = "train"
eval_judge = "train"
vocab_size = 2048
n_layer = 3
pretrain_tokens = 30_000_000
judge_tokens = 9_000_000
