# quick_test.py with several steps on each batch, so that the clip acts: a verdict on it, too.
#     python grpo.py config/quick_test_clip.py
from config.quick_test import *

out_dir = "out/quick_test_clip"
num_iterations = 2      # passes over each batch
mini_batch_size = 32    # rows in a step: four steps on each batch
learning_rate = 3e-4    # the clip then stops 2 to 17 % of the tokens; reward from 0.34 to 0.99
