# The policy before training learns from the one after it, without a reward and without a judge.
#     python grpo.py config/toxicity.py                     # the teacher
#     python grpo.py extras/distill/config/distill.py       # the student
from config.toxicity import *
from extras.distill import of_teacher

out_dir = "out/distill"
judge = None                            # eval_judge looks on: it takes no part
beta = 0.0
advantage = of_teacher("out/toxicity")


def reward(prompts, completions):
    return [0.0] * len(completions)     # nobody is rewarded
