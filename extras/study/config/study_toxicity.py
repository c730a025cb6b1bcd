# The base of study_wrong.py: toxicity.py with a policy so small that a run takes seconds.
from config.toxicity import *

out_dir = "out/study_toxicity"
dtype = "auto"
policy = "train"
vocab_size = 1024
n_layer = 2
n_embd = 128
pretrain_tokens = 3_000_000
max_completion_length = 16
num_prompts = 8
num_generations = 8
max_iters = 24
learning_rate = 5e-4
beta = 0.1
eval_interval = 0
num_eval_prompts = 128
num_eval_generations = 4
# held-out rollouts are the target; what is kept makes as long a step as all would
tracin_val_prompts = 8
tracin_normalizer = "norm"
