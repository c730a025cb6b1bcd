"""
Does influence help where a quarter of the rewards of training are inverted?

The held-out target has right rewards, and is a tenth as large as the rollouts of training.
random and top_advantage keep as many rows as influence would, and every step is as long as all
rollouts would make it. `oracle` drops exactly the wrong ones: no selection by influence can be
expected to do better. A win: held-out, average or adam is better than all, random and top_advantage
at equal KL, each with p < 0.01 (sign flips over seeds, after Holm).
"""
from common.files import read_rows as _read_rows

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


def columns(folder):
    """Describe the last third of a run: auc, the chance that of a wrong and a right rollout of an
    iteration the wrong one has the lower influence, and the same for the reward and |advantage|.
    Rollouts with advantage 0 teach nothing and are left out."""
    rows = _read_rows(f"{folder}/samples.jsonl")
    last = rows[-1]["iteration"]
    rows = [row for row in rows if row["iteration"] > last * 2 / 3 and row["advantage"]]
    wrong = [row for row in rows if row["scores"]["wrong"]]
    right = [row for row in rows if not row["scores"]["wrong"]]
    pairs = [(a, b) for a in wrong for b in right if a["iteration"] == b["iteration"]]
    if not pairs or pairs[0][0].get("influence") is None:
        return {}
    return {"auc": _auc(pairs, lambda row: row["influence"]),
            "auc reward": _auc(pairs, lambda row: row["reward"]),
            "auc |advantage|": _auc(pairs, lambda row: abs(row["advantage"]))}


def _auc(pairs, key):
    """Return the share of pairs whose wrong row has the lower key; a tie is a half."""
    lower = [(key(wrong) < key(right)) + (key(wrong) == key(right)) / 2 for wrong, right in pairs]
    return sum(lower) / len(lower)
