# Make a small language model less toxic.
#     python grpo.py config/toxicity.py
out_dir = "out/toxicity"
max_iters = 40
eval_interval = 20

# The reward 1 - p(toxic) is near 1 for all clean completions. The std of the batch leaves their
# small differences small, so the step goes to the toxic ones. The std of the group, or the logit,
# would blow them up: the policy would move towards whatever the judge likes most, and its text
# would grow uniform.
judge_score = "probability"
scale_rewards = "batch"
learning_rate = 2e-4
beta = 0.1

# bfloat16 on a CPU that multiplies it faster; losses, weights and the judges of the evaluation stay
# in float32
dtype = "fast"
