"""
Hashes of what a run has read. A file may be replaced under the same name, and then "before and
after" would compare two different things. So a checkpoint holds hashes of all inputs, and a resumed
run says what differs.
"""
import hashlib
import json

import torch


def of_value(value):
    """Short hash of a value that JSON can write."""
    text = json.dumps(value, default=lambda x: type(x).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_prompts(prompts):
    return of_value([[prompt.text, list(prompt.ids), prompt.row] for prompt in prompts])


def what_was_read(setup, cfg):
    """{name: hash or words} of everything that this run depends on beside its settings and its
    policy, which has a separate hash."""
    inputs = {"prompts": of_prompts(setup.prompts), "eval_prompts": of_prompts(setup.eval_prompts)}
    if cfg.tracin != "off" and cfg.tracin_val_prompts:
        inputs["held-out prompts of the target"] = of_prompts(setup.val_prompts)
    for role, judge in setup.judges.items():
        inputs[f"weights of {role}"] = getattr(judge, "digest", "")
    inputs["text of the config file"] = of_value(cfg.source)

    # the machine: devices and versions differ in random numbers and in rounding
    return inputs | {"device": setup.device.type, "dtype": str(setup.dtype),
                     "torch": str(torch.__version__), "threads": str(torch.get_num_threads())}


def changed_inputs(before, now):
    """{name: (hash before, hash now)} of inputs that have changed. An input that was read only
    before, or only now, does not count."""
    return {name: (before[name], x) for name, x in now.items() if before.get(name, x) != x}
