# Make the policy of config/quick_test.py: half a minute on one core.
#     python -m extras.make extras/make/config/quick_test.py --threads=1
from config.quick_test import *

policy = "train"
n_layer = 2
n_embd = 128
vocab_size = 512
pretrain_tokens = 200_000
