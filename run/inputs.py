"""
What a run has read, by its content. A name is no fact: the file behind it may be replaced while the
run goes on, and then sentences about two moments ("before and after", "has fallen") compare two
things. So a checkpoint holds hashes of what was read, and a run that goes on says what differs.
"""
import ast
import hashlib
import json
import os
import sys

import torch

from common.files import ROOT
from run.settings import HINTS

# settings without which an evaluation is another one; and those of an iteration
OF_EVALUATION = {
    "max_completion_length", "eval_temperature", "num_eval_generations", "reward_funcs",
    "judge_score", "max_turns", "stop_strings"}
OF_ITERATION = {
    "max_completion_length", "temperature", "top_k", "top_p", "min_p", "num_generations",
    "reward_funcs", "reward_weights", "judge_score", "max_turns", "stop_strings"}


def digest(content):
    """Short hash of what JSON can write."""
    text = json.dumps(content, default=lambda x: type(x).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_prompts(prompts):
    return digest([[prompt.text, list(prompt.ids), prompt.row] for prompt in prompts])


def of_functions(source):
    """Hash of a config file's text, without comments between its statements and without those that
    assign settings, which are compared one by one."""
    kept = []
    for node in ast.parse(source or "").body:
        targets = [name for target in getattr(node, "targets", ())
                   for name in getattr(target, "elts", [target])]
        assigned = {getattr(target, "id", None) for target in targets}
        if not assigned or not assigned <= HINTS.keys():
            kept.append(ast.get_source_segment(source, node))
    return digest(kept)


def of_code():
    """{file: hash} of the Python files that are loaded, installed packages left out: this
    project's, and what a config file imports."""
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        parts = path.split(os.sep)
        is_installed = "site-packages" in parts or "dist-packages" in parts
        if path.startswith(os.path.dirname(os.__file__)) or is_installed:
            continue
        if path.endswith(".py") and os.path.isfile(path):
            with open(path, "rb") as f:
                name = os.path.relpath(path, ROOT) if path.startswith(ROOT + os.sep) else path
                found[f"code in {name}"] = hashlib.sha256(f.read()).hexdigest()[:16]
    return found


def what_was_read(setup, cfg):
    """{name: hash or words} of all that this run depends on beside its settings and its policy,
    which has a hash of its own."""
    found = {"prompts": of_prompts(setup.prompts), "eval_prompts": of_prompts(setup.eval_prompts)}
    if cfg.tracin != "off" and cfg.tracin_val_prompts:
        found["held-out prompts of the target"] = of_prompts(setup.val_prompts)
    for role, judge in setup.judges.items():
        found[f"weights of {role}"] = getattr(judge, "digest", "")
    found["functions in the config file"] = of_functions(cfg.source)
    found |= of_code()

    # where it is computed: another device draws other random numbers, another version rounds
    return found | {"device": setup.device.type, "dtype": str(setup.dtype),
                    "torch": str(torch.__version__), "threads": str(torch.get_num_threads())}


def changed_inputs(before, now):
    """{name: (hash before, hash now)} of what has another content. What was not read before, or is
    not read now, is no other content."""
    return {name: (before[name], x) for name, x in now.items() if before.get(name, x) != x}


def makes_another_evaluation(name):
    """Whether measures before and after a change of this setting or input cannot be compared."""
    inputs = ("eval_prompts", "weights of judge", "weights of eval_judge", "device", "dtype")
    is_code = name.startswith(("code in", "functions in"))
    return is_code or name in inputs or name in OF_EVALUATION


def makes_another_iteration(name):
    """The same of the metrics of iterations."""
    is_code = name.startswith(("code in", "functions in"))
    return is_code or name in ("prompts", "weights of judge") or name in OF_ITERATION


def since_change(rows, changes, matters):
    """(Those of a log's rows that can be compared with its last one, the names of what makes the
    earlier ones others). changes: [[iterations done, name, before, now]]."""
    changes = [change for change in changes if change[0] is not None and matters(change[1])]
    last = max((done for done, *_ in changes), default=-1)
    names = dict.fromkeys(name for done, name, *_ in changes if done == last)
    return [row for row in rows if row["iteration"] > last], list(names)
