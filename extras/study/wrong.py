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
    """Of the last third of a run: the shares kept of rollouts with a wrong and with a right reward;
    and auc, the chance that the wrong one of two of an iteration has the lower influence, and the
    same by reward and by |advantage|. Rollouts with advantage 0 teach nothing and are left out."""
    rows = _read_rows(f"{folder}/samples.jsonl")
    last = rows[-1]["iteration"]
    rows = [row for row in rows if row["iteration"] > last * 2 / 3 and row["advantage"]]
    wrong = [row for row in rows if row["scores"]["wrong"]]
    right = [row for row in rows if not row["scores"]["wrong"]]
    found = {"wrong kept": _share_kept(wrong), "right kept": _share_kept(right)}
    if rows and rows[0].get("influence") is not None:
        found["auc"] = _auc(wrong, right, lambda row: row["influence"])
        found["auc reward"] = _auc(wrong, right, lambda row: row["reward"])
        found["auc |advantage|"] = _auc(wrong, right, lambda row: abs(row["advantage"]))
    return found


def _auc(wrong, right, key):
    """The share of pairs of an iteration whose wrong row has the lower key; a tie is a half."""
    lower = [(key(a) < key(b)) + (key(a) == key(b)) / 2
             for a in wrong for b in right if a["iteration"] == b["iteration"]]
    return sum(lower) / len(lower) if lower else None


def _share_kept(rows):
    return sum(row.get("weight", 1) != 0 for row in rows) / max(1, len(rows))
