"""
D: the two failures that the project began from, as full runs beside what should do better.

best_16 is config/tracin_16_best.py, whose target is the 16 best of 128 held-out rollouts;
random_128 is config/tracin_128_random.py, whose target is all 128. Both as then: a dropped rollout
takes its KL along, and steps are shorter where fewer rollouts are kept.

Win: random_128, best_16 or held-out is better than all and random at equal KL, each with p < 0.01
(sign flips over seeds, corrected after Holm for the 6 comparisons).
No: no win, and the 95 % interval of the difference to the best control excludes 20 % less toxicity.
Else: not decided.
"""
config = "config/study_toxicity.py"
seeds = range(1, 12)
grid = {}
measure = "eval_judge/toxicity"
controls = ("all", "random")
tested = ("best_16", "random_128", "held-out")

_now = {"tracin": "reward", "eval_interval": 8}
_then = _now | {"tracin_val_prompts": 16, "tracin_normalizer": "all", "tracin_kl": "kept"}

arms = {
    "all": _now | {"tracin": "off"},
    "random": _now | {"tracin_select": "random"},
    "held-out": _now,
    "best_16": _then | {"tracin_val_size": 16, "tracin_val_select": "best"},
    "random_128": _then | {"tracin_val_size": 128, "tracin_val_select": "random"},
}
quick = {"max_iters": 6, "num_eval_prompts": 32}
