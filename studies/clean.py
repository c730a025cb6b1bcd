"""
Does influence help where every reward is right?

random, top_advantage and bottom keep as many rows as influence would, and every step is as long as
all rollouts would make it. A win: held-out, average or adam is better than all, random and
top_advantage at equal KL, each with p < 0.01 (sign flips over seeds, after Holm).
"""
config = "config/study_toxicity.py"
seeds = range(1, 12)
grid = ("beta", (0.02, 0.1, 0.4))
measure = "eval_judge/toxicity"
controls = ("all", "random", "top_advantage")
tested = ("held-out", "average", "adam")

_held_out = {"tracin": "reward"}    # tracin_val_prompts is in the config
_same_batch = {"tracin": "self", "tracin_val_prompts": 0, "tracin_val_reward": None}

arms = {
    "all": {"tracin": "off"},
    "random": _held_out | {"tracin_select": "random"},
    "top_advantage": _held_out | {"tracin_select": "top_advantage"},
    "held-out": _held_out,
    "average": _held_out | {"tracin_target_ema": 0.95},
    "adam": _held_out | {"tracin_adam": True},
    "self": _same_batch,
    "self_leave-one-out": _same_batch | {"tracin_leave_one_out": True},
    "bottom": _held_out | {"tracin_select": "bottom"},
}
