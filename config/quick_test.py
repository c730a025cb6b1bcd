# Check that the logic works: a tiny model and a rule as reward, under a minute on two cores. It
# ends with a verdict and exit code 0 or 1. Run it after every change to the algorithm.
#     python grpo.py config/quick_test.py
out_dir = "out/quick_test"
dtype = "float32"  # the same story on any machine

policy = "data/quick_test.pt"   # comes with the project (data/README.md)
max_iters = 15
num_prompts = 8
micro_batch_size = 32
learning_rate = 1e-3
beta = 0.04

judge = None
eval_judge = None
num_eval_prompts = 16
num_eval_generations = 8
log_micro = False  # one line per iteration
expect_rise = 0.3  # from 0.34; it ends near 0.98


def reward(prompts, completions):
    """Share of the letter e, full marks from a quarter on: more would reward eeee."""
    return [min(1.0, 4 * text.count("e") / max(1, len(text))) for text in completions]
