"""What is in a checkpoint of a run: whatever a stranger's file holds is named in one line."""
import json
import os
import stat

import torch

from config import Settings, assign, types_of, with_speed
from config.check import check_parts, check_values
from run.files import check_tensors, is_dense, load_file, read_rows
from run.held_out import is_influence_state
from run.script import BadInput

LOGS = ("metrics.jsonl", "samples.jsonl", "eval.jsonl")


def is_count(x):
    return type(x) is int and 0 <= x < 2 ** 53


def is_str(x):
    return isinstance(x, str)


def is_named(x, fits):
    """True for {text: what fits}."""
    return isinstance(x, dict) and all(is_str(name) and fits(value) for name, value in x.items())


def is_setting(x):
    """True for a plain value or a flat row of them."""
    values = x if isinstance(x, (list, tuple)) else [x]
    return all(isinstance(value, (str, int, float, type(None))) for value in values)


def is_optimizer(x):
    """True for the state of AdamW: {"state": {number: {name: tensor}}, "param_groups": [...]}."""
    if not isinstance(x, dict) or not isinstance(x.get("state"), dict):
        return False
    groups = x.get("param_groups")
    has_rate = isinstance(groups, list) and groups and isinstance(groups[0], dict)
    known = all(is_count(i) and is_named(state, is_dense) for i, state in x["state"].items())
    return known and has_rate and isinstance(groups[0].get("lr"), float)


def is_random(x):
    """True for what random_state gives, on this machine or on another."""
    names = {"python", "numpy", "torch", "cuda"}
    return isinstance(x, dict) and x.keys() == names and isinstance(x["cuda"], list)


def is_evaluation(row):
    """True for a row of eval.jsonl, as the table at the end needs it."""
    if not isinstance(row, dict) or not is_count(row.get("iteration")):
        return False
    samples = row.get("samples")
    return isinstance(samples, list) and all(
        isinstance(sample, dict) and {"prompt", "completion"} <= sample.keys()
        for sample in samples)


def is_first_evaluation(path):
    """True for an eval.jsonl that holds the evaluation before training and nothing else."""
    try:
        rows = read_rows(path)
    except BadInput:
        return False
    return len(rows) == 1 and is_evaluation(rows[0]) and rows[0]["iteration"] == 0


FIELDS = {      # of a checkpoint: what each must be
    "base_hash": is_str,
    "policy": lambda x: is_named(x, is_dense),
    "reference": lambda x: x is None or is_named(x, is_dense),
    "optimizer": is_optimizer,
    "random": is_random,
    "logs": lambda x: is_named(x, is_count) and set(x) == set(LOGS),    # no other file is cut
    "iteration": is_count,
    "num_tokens": is_count,
    "settings": lambda x: is_named(x, is_setting),
    "source": lambda x: x is None or is_str(x),
    "inputs": lambda x: is_named(x, is_str),
    "influence": is_influence_state,
}


def read_checkpoint(path):
    """The content of a run's checkpoint, its fields checked by type and range. BadInput if one does
    not fit; whether they fit the settings is load_checkpoint's question."""
    # which older runs did not note
    content = {"inputs": {}, "influence": None} | load_file(path, "run")
    missing = [name for name in FIELDS if name not in content]
    if missing:
        raise BadInput(f"{path}: no checkpoint of a run (it has no {', '.join(missing)})")
    for name, fits in FIELDS.items():
        if not fits(content[name]):
            raise BadInput(f"{path}: damaged, or not made here: its {name!r} cannot be right")
    return content


def settings_of(content, path):
    """The Settings in the content of a checkpoint, checked one by one, without functions."""
    cfg = Settings()
    for name, value in with_speed(content["settings"]).items():
        if types_of(name):      # an older run may have had others
            assign(cfg, name, value, path)
    check_values(cfg)
    check_parts(cfg)
    return cfg


# ------------------------------------------------------------------------------------------------
# beside the folder and the settings


def newest_checkpoint(folder):
    """Path of ckpt.pt, or of ckpt_prev.pt after a kill between two renames; None without both."""
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        path = os.path.join(folder, name)
        if os.path.lexists(path):
            return path
    return None


def iterations_in(folder):
    """The iterations that the newest checkpoint says it has, read in a moment; 0 where it cannot be
    read, which read_newest says why."""
    try:
        content = torch.load(newest_checkpoint(folder), mmap=True, weights_only=True)
        done = content["iteration"]
    except Exception:       # torch reports broken files in a dozen ways
        return 0
    return done if is_count(done) else 0


def read_newest(folder):
    """(path, content) of the newest checkpoint. BadInput says so where the one before may do."""
    path = newest_checkpoint(folder)
    try:
        return path, read_checkpoint(path)
    except BadInput as e:
        previous = os.path.join(folder, "ckpt_prev.pt")
        if path == previous or not os.path.exists(previous):
            raise
        raise BadInput(f"{e}; the checkpoint before it is {previous}: rename it to ckpt.pt to go "
                       "on from there") from e


def check_going_on(folder, cfg):
    """Reads the checkpoint that will be gone on from, so that what is wrong with it, with its logs
    or with its shape is said before anything is trained."""
    path, content = read_newest(folder)
    before = content["settings"]
    shape = ["lora_rank", "critic"]
    if cfg.policy == "train":   # another one would be trained first
        shape += ["policy", "vocab_size", "block_size", "n_layer", "n_head", "n_embd"]
    if cfg.lora_rank:
        shape.append("lora_layers")
    for name in shape:
        now = getattr(cfg, name)
        old = before.get(name, now)
        if old != now:
            raise BadInput(f"{path}: does not fit these settings: {name} was {old!r}, not {now!r}; "
                           "set it so, or choose another out_dir")
    if cfg.sync_ref_model and content["reference"] is None:
        raise BadInput(f"{path}: does not fit these settings: it holds no reference for "
                       "sync_ref_model = True")
    check_logs(content, path, folder)


def check_fit(path, content, policy):
    """BadInput unless the policy in the content of a checkpoint has this policy's shapes."""
    try:
        check_tensors(content["policy"], policy.state_dict())
    except ValueError as e:
        raise BadInput(f"{path}: does not fit these settings ({e})") from e


def check_moments(moments, parameters, names=("step", "exp_avg", "exp_avg_sq")):
    """Raises ValueError unless an optimizer's moments {number of a parameter: {name: tensor}} have
    its parameters' shapes and are finite; where they do not, AdamW reads beyond its memory."""
    for i, state in moments.items():
        if i >= len(parameters):
            raise ValueError(f"moments of parameter {i} of {len(parameters)}")
        p = parameters[i]
        try:
            wanted = {name: torch.zeros(()) if name == "step" else p for name in names}
            check_tensors(state, wanted)
        except ValueError as e:
            raise ValueError(f"moments of parameter {i}: {e}") from e
        if any(state[name].min() < 0 for name in ("step", "exp_avg_sq") if name in names):
            raise ValueError(f"moments of parameter {i}: one is below 0")


def check_logs(content, path, folder):
    """The logs may be longer than the checkpoint says, not shorter; they are files of this folder,
    not links to others; and the evaluations can be put into a table."""
    for name, size in content["logs"].items():
        log = os.path.join(folder, name)
        if not os.path.lexists(log) or os.path.getsize(log) < size:
            raise BadInput(
                f"{log}: shorter than when {path} was written; the run cannot go on without gaps")
        if not stat.S_ISREG(os.lstat(log).st_mode):
            raise BadInput(f"{log}: a link or no file; a run writes only into its own folder")
        if not os.access(log, os.R_OK | os.W_OK):
            raise BadInput(f"{log}: cannot be read and written")
    log = os.path.join(folder, "eval.jsonl")
    with open(log, "rb") as f:
        lines = f.read(content["logs"]["eval.jsonl"]).splitlines()
    try:
        rows = [json.loads(line) for line in lines]
        if not rows or not all(map(is_evaluation, rows)):
            raise ValueError("a row has other columns")
    except (ValueError, RecursionError) as e:   # JSON and UTF-8 errors are ValueErrors
        raise BadInput(f"{log}: damaged: holds no evaluations of a run ({e})") from e
