"""
Hashes of the files and code that a run has read. A file may be replaced under the same name, and
then "before and after" would compare two different things. So a checkpoint holds hashes of all
inputs, and a resumed run says what differs.
"""
import ast
import hashlib
import json
import os
import sys

import torch

from common.files import ROOT
from rollout import Sampling
from run.settings import PARTS

# settings and inputs that change, beside code, what an evaluation measures, and what the metrics of
# an iteration do
OF_EVALUATION = {
    "max_completion_length", "eval_temperature", "num_eval_generations", "reward_funcs",
    "judge_score", "max_turns", "stop_strings", "eval_prompts", "weights of judge",
    "weights of eval_judge", "device", "dtype"}
OF_ITERATION = {
    *Sampling._fields, "max_completion_length", "num_generations", "reward_funcs", "reward_weights",
    "judge_score", "max_turns", "stop_strings", "prompts", "weights of judge"}


def short_hash(content):
    """Short hash of bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def of_value(value):
    """Short hash of a value that JSON can write."""
    return short_hash(json.dumps(value, default=lambda x: type(x).__name__).encode())


def of_prompts(prompts):
    return of_value([[prompt.text, list(prompt.ids), prompt.row] for prompt in prompts])


def of_functions(source):
    """Hash of a config file's text, without comments between its statements, and without statements
    that assign settings, which are compared one by one."""
    statements = []
    for node in ast.parse(source or "").body:
        targets = [name for target in getattr(node, "targets", ())
                   for name in getattr(target, "elts", [target])]
        assigned = {getattr(target, "id", None) for target in targets}
        if not assigned or not assigned <= PARTS.keys():
            statements.append(ast.get_source_segment(source, node))
    return of_value(statements)


def of_code():
    """{file: hash} of the loaded Python files outside installed packages: this project's, and those
    that a config file imports."""
    hashes = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        is_installed = path.startswith(os.path.dirname(os.__file__)) or "site-packages" in path
        if path.endswith(".py") and not is_installed and os.path.isfile(path):
            with open(path, "rb") as f:
                hashes[f"code in {path.removeprefix(ROOT + os.sep)}"] = short_hash(f.read())
    return hashes


def what_was_read(setup, cfg):
    """{name: hash or words} of everything that this run depends on beside its settings and its
    policy, which has a separate hash."""
    inputs = {"prompts": of_prompts(setup.prompts), "eval_prompts": of_prompts(setup.eval_prompts)}
    if cfg.tracin != "off" and cfg.tracin_val_prompts:
        inputs["held-out prompts of the target"] = of_prompts(setup.val_prompts)
    for role, judge in setup.judges.items():
        inputs[f"weights of {role}"] = getattr(judge, "digest", "")
    inputs["functions in the config file"] = of_functions(cfg.source)
    inputs |= of_code()

    # the machine: devices and versions differ in random numbers and in rounding
    return inputs | {"device": setup.device.type, "dtype": str(setup.dtype),
                     "torch": str(torch.__version__), "threads": str(torch.get_num_threads())}


def changed_inputs(before, now):
    """{name: (hash before, hash now)} of inputs that have changed. An input that was read only
    before, or only now, does not count."""
    return {name: (before[name], x) for name, x in now.items() if before.get(name, x) != x}


def since_change(rows, changes, names):
    """-> (the rows of a log that can be compared with its last one, names of the changes that make
    earlier rows incomparable). changes: [[iterations done, name, before, now]]. names: those that
    matter, OF_EVALUATION or OF_ITERATION; code always does."""
    matter = [(done, name) for done, name, *_ in changes
              if name in names or name.startswith(("code in", "functions in"))]
    last = max((done for done, _ in matter), default=-1)
    return ([row for row in rows if row["iteration"] > last],
            list(dict.fromkeys(name for done, name in matter if done == last)))
