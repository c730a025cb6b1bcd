"""
The folder of a run: logged to, saved in, gone on from. Only rank 0 writes.

    config.json    settings, the config file's text, versions: is itself a config
    *.jsonl        metrics of every iteration, its samples, the evaluations
    ckpt.pt        all that the next iteration depends on; ckpt_prev.pt is the one before
"""
import contextlib
import json
import math
import os
import platform
import random
import subprocess

import numpy as np
import torch

from config import with_speed
from run.content import (LOGS, check_fit, check_logs, check_moments, newest_checkpoint,
                         read_newest)
from run.files import check_tensors, save_file, write_json
from run.held_out import influence_state, load_influence
from run.host import small_to_host
from run.processes import rank_and_size
from run.script import BadInput, seed_for, uninterrupted
from run.trust import signature_of

OTHER_POLICY = ("{}: this run began from another policy than the settings name now (a published "
                "one may have changed: name its commit, policy = 'NAME@COMMIT')")


def append_rows(folder, name, rows):
    """Adds rows to a log. Numbers that JSON does not know become null."""
    path = os.path.join(folder, name) if rank_and_size()[0] == 0 else os.devnull
    with open(path, "a", encoding="utf-8") as f:
        for row in rows:
            row = {k: None if is_nan_or_inf(v) else v for k, v in row.items()}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")


def is_nan_or_inf(x):
    return isinstance(x, float) and not math.isfinite(x)


def write_run_config(folder, cfg, device):
    """config.json: settings, the config file's text, versions, device, git revision."""
    if rank_and_size()[0] > 0:
        return
    settings = cfg.public()
    signature = None if cfg.strange else signature_of(cfg.source, settings, make=True)
    about = dict(
        settings=settings, source=cfg.source, signature=signature, device=str(device),
        torch=torch.__version__, python=platform.python_version(), git=git_revision(),
        threads=torch.get_num_threads())
    if signature is None and not cfg.strange:
        print("note: no key can be kept in the folder that XDG_CACHE_HOME names, or ~/.cache: "
              f"{folder}/config.json will need --trust=True")
    write_json(os.path.join(folder, "config.json"), about)


def git_revision():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None


# ------------------------------------------------------------------------------------------------
# checkpoints: saved


def save_checkpoint(folder, nets, cfg, iteration, num_tokens, base_hash):
    """Writes ckpt.pt: all that the next iteration depends on, and how long the logs are. A signal
    waits until it is there. SystemExit, and nothing is written, if a number is not finite."""
    reference = nets.reference.state_dict() if cfg.sync_ref_model else None
    optimizer = nets.optimizer.state_dict()
    check_saved(iteration, nets.policy.state_dict(), reference or {}, *optimizer["state"].values())
    if rank_and_size()[0] > 0:
        return
    path = os.path.join(folder, "ckpt.pt")
    new = os.path.join(folder, "ckpt_new.pt")
    states = dict(policy=nets.policy.state_dict(), optimizer=optimizer, reference=reference,
                  influence=influence_state(nets.influence, cfg.tracin_val_every))
    states = small_to_host(states)
    with uninterrupted():
        save_file(
            new, "run", iteration=iteration, policy=states["policy"],
            optimizer=states["optimizer"], num_tokens=num_tokens, base_hash=base_hash,
            settings=cfg.public(), source=cfg.source, reference=states["reference"],
            influence=states["influence"],
            random=random_state(nets.device), inputs=contents_read(nets),
            logs={name: os.path.getsize(os.path.join(folder, name)) for name in LOGS})
        if os.path.exists(path):
            os.replace(path, os.path.join(folder, "ckpt_prev.pt"))
        os.replace(new, path)


def check_saved(iteration, *states):
    """Ends the run if a tensor of the states {name: tensor} holds a number that is not finite."""
    tensors = [(name, x) for state in states for name, x in state.items() if torch.is_tensor(x)]
    fine = [x.isfinite().all().to(tensors[0][1].device) for _, x in tensors]
    if torch.stack(fine).all():     # a GPU is waited for once
        return
    for (name, _), is_fine in zip(tensors, fine):
        if not is_fine:
            raise SystemExit(
                f"stopped: {name} is not finite after iteration {iteration}, which is not saved; "
                "the last checkpoint stands. Lower learning_rate or raise beta, then --resume=True")


# ------------------------------------------------------------------------------------------------
# checkpoints: gone on from


def begin_folder(folder, nets, cfg, base_hash):
    """Goes on from the checkpoint in a claimed folder, or starts new logs. -> (iterations done,
    tokens seen), or (None, 0) for a run that starts."""
    if cfg.resume and newest_checkpoint(folder):
        return resume(folder, nets, cfg, base_hash)
    if cfg.resume:
        print(f"{folder}: no checkpoint to resume, starts from the beginning")
    if rank_and_size()[0] == 0:
        for name in LOGS:  # an earlier start may have been killed before its first checkpoint
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)         # a link, not what it points to
            open(path, "x").close()
    # our own draws have seeds of their own; a reward function may use the global generators
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2 ** 32)
    torch.manual_seed(cfg.seed)
    return None, 0


def resume(folder, nets, cfg, base_hash):
    """Puts everything back as the last checkpoint has it and cuts the logs to match."""
    path, content = read_newest(folder)
    load_checkpoint(content, path, nets, cfg, base_hash)
    check_logs(content, path, folder)
    try:
        set_random_state(content["random"], nets.device)
    except Exception as e:      # three libraries report it in a dozen ways
        raise BadInput(f"{path}: damaged: the state of its random generators ({e!r:.99})") from e
    if rank_and_size()[0] == 0:
        for name in LOGS:
            os.truncate(os.path.join(folder, name), content["logs"][name])
    say_what_differs(content, cfg, contents_read(nets))
    print(f"resumed {path} after {content['iteration']} iterations")
    return content["iteration"], content["num_tokens"]


def load_checkpoint(content, path, nets, cfg, base_hash):
    """Loads the content of a checkpoint into policy, optimizer and reference."""
    if content["base_hash"] != base_hash:
        raise BadInput(OTHER_POLICY.format(path))
    moments = content["optimizer"]["state"]
    check_fit(path, content, nets.policy)
    try:
        check_moments(moments, nets.trained)
        if cfg.sync_ref_model:
            check_tensors(content["reference"], nets.reference.state_dict())
        if nets.influence and content["influence"]:
            load_influence(nets.influence, content["influence"], nets.device)
    except ValueError as e:
        raise BadInput(f"{path}: does not fit these settings ({e})") from e
    nets.policy.load_state_dict(content["policy"])
    groups = nets.optimizer.state_dict()["param_groups"]    # the settings', not the checkpoint's
    nets.optimizer.load_state_dict({"state": moments, "param_groups": groups})
    if cfg.sync_ref_model:
        nets.reference.load_state_dict(content["reference"])


def contents_read(nets):
    """{what a run reads besides its settings: short hash of it}"""
    found = {}
    for name in ("prompts", "eval_prompts", "val_prompts"):
        contents = [prompt.ids if "messages" in prompt.row else prompt.text
                    for prompt in getattr(nets, name)]
        found[name] = f"{seed_for(contents):x}"
    for name, judge in nets.judges.items():
        if hasattr(judge, "hash"):
            found[name] = judge.hash
    return found


def say_what_differs(content, cfg, inputs):
    before = with_speed(content["settings"])
    for name, new in cfg.public().items():
        old = before.get(name, new)
        if old != new and name not in ("resume", "max_iters"):
            print(f"resumed with another {name}: {old!r} -> {new!r}")
    if content["source"] != cfg.source:
        print("resumed with another text of the config file")
    for name, new in inputs.items():
        if content["inputs"].get(name, new) != new:
            print(f"WARNING: resumed with other contents of {name}: a file has changed")


def random_state(device):
    """State of the global generators, which a reward function may use; of a GPU's only where the
    run is on it."""
    kind, keys, *rest = np.random.get_state()
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return dict(python=random.getstate(), numpy=(kind, keys.tolist(), *rest),
                torch=torch.get_rng_state(), cuda=cuda)


def set_random_state(state, device):
    """Sets the global generators. ValueError for a state that no generator has."""
    kind, keys, position, *rest = state["numpy"]
    mine = torch.get_rng_state()
    if len(keys) != 624 or any(type(key) is not int for key in keys):
        raise ValueError("numpy's has other keys")
    if type(position) is not int or not 0 <= position <= 624:   # numpy itself does not look
        raise ValueError("numpy's has another position")
    if state["torch"].shape != mine.shape or state["torch"].device != mine.device:
        raise ValueError("torch's has another size")
    if type(state["python"][2]) not in (float, type(None)):
        raise ValueError("Python's last number is none")
    random.setstate(state["python"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0], device)
