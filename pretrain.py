"""Make the policy that the settings name: load it, or pretrain it.

    python pretrain.py config/toxicity.py --policy=train --judge=train

trains what the settings call "train", and prints the names of the files: a small GPT from scratch,
on the comments or on the texts that the config file makes up, and the judges (judge/train.py).
grpo.py does so at first use, too.
"""
from common.script import BadInput, run_script     # before torch: see common

from common.device import machine, pick_device, pick_dtype
from data.comments import get_splits
from judge.train import trained_judges
from run.pretraining import get_policy
from run.settings import load_settings, usage


def main(argv):
    cfg = load_settings(argv)
    if "train" not in (cfg.policy, cfg.judge, cfg.eval_judge):
        raise BadInput(f"policy = {cfg.policy!r}, judge = {cfg.judge!r}, eval_judge = "
                       f"{cfg.eval_judge!r}: nothing to train; --policy=train trains a new one")
    device = pick_device(cfg.device, cfg.threads)
    print(machine(cfg.device, device, pick_dtype(cfg.dtype, device)))
    splits = get_splits(cfg)
    if cfg.policy == "train":
        get_policy(cfg, splits, device)
    trained_judges(cfg, splits, device)


if __name__ == "__main__":
    run_script(main, usage)
