# Make a small language model less toxic.
#     python grpo.py config/toxicity.py
out_dir = "out/toxicity"
max_iters = 8       # toxicity falls from 0.13 to between 0.03 and 0.05 (README.md)
eval_interval = 20

# The weights come with the project (data/README.md)
policy = "data/policy.pt"
judge = "data/judge.pt"
eval_judge = "data/eval_judge.pt"
max_completion_length = 28      # tokens, some 80 characters

# The reward 1 - p(toxic) is near 1 for all clean completions. The std of the batch leaves their
# small differences small, so the step goes to the toxic ones. The std of the group, or the logit,
# would blow them up, and the text would grow uniform.
judge_score = "probability"
scale_rewards = "batch"
learning_rate = 3e-4
beta = 0.25
dtype = "fast"  # bfloat16 on a CPU that multiplies it faster; losses and weights stay in float32
