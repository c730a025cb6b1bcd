# Make the policy of the lessons, of sentences that config/lesson.py makes up: half a minute.
#     python -m extras.make extras/make/config/lesson.py
from config.lesson import *

policy = "train"
n_layer = 2
n_embd = 64
vocab_size = 3072
block_size = 32
pretrain_tokens = 150_000
