"""
Does influence help where a quarter of the rewards of training are inverted?

The held-out target has right rewards, and is a tenth as large as the rollouts of training.
random and top_advantage keep as many rows as influence would, and every step is as long as all
rollouts would make it. `oracle` drops exactly the wrong ones: no selection by influence can be
expected to do better. A win: held-out, average or adam is better than all, random and top_advantage
at equal KL, each with p < 0.01 (sign flips over seeds, after Holm).
"""
config = "extras/study/config/study_wrong.py"
seeds = range(1, 13)
measure = "eval_judge/toxicity"
controls = ("all", "random", "top_advantage")
tested = ("held-out", "average", "adam")

_held_out = {"tracin": "reward"}    # tracin_val_prompts is in the config
arms = {
    "all": {"tracin": "off"},
    "random": _held_out | {"tracin_select": "random"},
    "top_advantage": _held_out | {"tracin_select": "top_advantage"},
    "held-out": _held_out,
    "average": _held_out | {"tracin_target_ema": 0.95},
    "adam": _held_out | {"tracin_adam": True},
    "oracle": _held_out | {"tracin_select": "weigh"},
}
