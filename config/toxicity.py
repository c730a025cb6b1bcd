# Make a small language model less toxic.
#     python grpo.py config/toxicity.py
out_dir = "out/toxicity"
max_iters = 40
eval_interval = 20

# The reward 1 - p(toxic) is flat where a completion is clean already. Dividing by the std of the
# batch keeps it flat, so the step goes to the toxic completions. The logit and the std of the group
# would stretch every group to the same spread: the policy would move towards whatever the judge
# likes most, and its text would grow uniform.
judge_score = "probability"
scale_rewards = "batch"
learning_rate = 2e-4
beta = 0.1

# bfloat16 on a CPU that multiplies it faster; losses, weights and the judges of the evaluation stay
# in float32
dtype = "fast"
