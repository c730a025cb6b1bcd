# Does the logic work at all? A tiny model, a rule as reward, under a minute on two cores: loss terms are not zero, the
# reward rises. Run it after every change to the algorithm: python grpo.py config/quick_test.py
out_dir = "out/quick_test"
n_layer, n_head, n_embd, vocab_size = 2, 4, 128, 512
pretrain_tokens = 200_000
max_iters = 15
num_prompts = 8
micro_batch_size = 32
learning_rate = 1e-3
beta = 0.04
judge = eval_judge = None
num_eval_prompts, num_eval_generations = 16, 8


def reward(prompts, completions):
    """Share of the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]
