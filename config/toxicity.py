# GRPO makes a small language model less toxic: python grpo.py config/toxicity.py
out_dir = "out/toxicity"
max_iters = 40
eval_interval = 20

# 1 - p(toxic) is flat where a completion is clean already, and dividing by the std of the batch keeps it so: the step goes
# to the toxic ones. With the logit and the std of the group, every group is stretched to the same spread, the policy is
# pushed to ever more of what the judge likes, and its text grows uniform.
judge_score = "probability"
scale_rewards = "batch"
learning_rate = 2e-4
beta = 0.1

dtype = "fast"  # bfloat16 where the CPU multiplies it faster; loss, weights and the evaluation's judges stay in float32
log_micro = False  # config/quick_test.py shows the numbered lines
