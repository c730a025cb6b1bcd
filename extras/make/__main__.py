"""Make each policy or judge that is set to "train", and print the names of their files.

    python -m extras.make extras/make/config/toxicity.py

makes the models of the default job. grpo.py also makes a missing one at first use.
"""
from common.cli import run_script     # before torch: see common
from common.errors import BadInput

from common.device import machine, pick_device, pick_dtype
from extras.make.judges import HALVES, made_judge
from extras.make.policy import made_policy


def main(cfg):
    roles = [role for role in HALVES if getattr(cfg, role) == "train"]
    if cfg.policy != "train" and not roles:
        raise BadInput(f"policy = {cfg.policy!r}, judge = {cfg.judge!r}, eval_judge = "
                       f"{cfg.eval_judge!r}: nothing to train; --policy=train trains a new one")
    device = pick_device(cfg.device, cfg.threads)
    print(machine(device, pick_dtype(cfg.dtype, device)))
    if cfg.policy == "train":
        made_policy(cfg, device)
    for role in roles:
        made_judge(cfg, role, device)


if __name__ == "__main__":
    # here, not above: run/ makes models by this room, which needs none of it but for its command
    from run.settings import load_settings, usage
    run_script(lambda argv: main(load_settings(argv)), usage)
