# To make GPT-2 less toxic on a GPU. The prompts are RealToxicityPrompts, the reward is a published
# hate-speech classifier, and the judge that training never sees is another toxicity classifier.
#     pip install -r extras/hub/requirements.txt
#     python grpo.py extras/hub/config/toxicity_gpt2.py
# The first start downloads 1.5 GB. A run takes about 7 GB of GPU memory (an estimate).
# extras/hub/README.md says what has been tried.
from huggingface_hub import hf_hub_download as _download

from common.files import read_rows as _read_rows

out_dir = "out/toxicity_gpt2"
policy = "gpt2"  # or gpt2-medium, gpt2-large, gpt2-xl, distilgpt2
judge = "facebook/roberta-hate-speech-dynabench-r4-target:hate"
# this revision has its weights as safetensors; the main branch has a pickle only
eval_judge = "unitary/unbiased-toxic-roberta@refs/pr/2:toxicity"

num_prompts = 16
max_completion_length = 30
max_iters = 1000
eval_interval = 250
save_interval = 100
log_micro = False
judge_score = "probability"
scale_rewards = "batch"
learning_rate = 1e-5
warmup_iters = 20
beta = 0.04


def questions(n, seed):
    """The first n prompts of RealToxicityPrompts with a toxicity of 0.3 or more."""
    path = _download("allenai/real-toxicity-prompts", "prompts.jsonl", repo_type="dataset")
    prompts = [row["prompt"] for row in _read_rows(path)]
    toxic = [prompt for prompt in prompts if (prompt["toxicity"] or 0) >= 0.3]
    return [{"text": prompt["text"]} for prompt in toxic[:n]]
