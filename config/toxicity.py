# GRPO makes a small language model less toxic: python grpo.py config/toxicity.py
out_dir = "out/toxicity"
max_iters = 60
