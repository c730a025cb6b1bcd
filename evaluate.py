"""
Measure what a policy writes for held-out prompts. grpo.py does so before, during and after a run.
This command measures the last checkpoint of a run, with other settings if you like:

    python evaluate.py out/toxicity --num_eval_prompts=256
"""
import os

from common.script import BadInput, run_script      # before torch: see common

from common.files import load_gpt, rebuilt, undamaged
from config import HINTS, Settings, load_settings
from config.check import check_policy
from data.tokenizer import load_tokenizer
from grpo import prepare, read_inputs
from model import Policy
from pretrain import is_published, trainable
from run.checkpoint import load_checkpoint, newest_checkpoint, read_checkpoint
from run.evaluation import evaluate
from run.report import print_table


def open_run(argv):
    """Open a run's last checkpoint -> (cfg, Setup, iterations). argv: its folder, then the config
    file that has its functions, and settings that differ."""
    first = argv[0] if argv else "no argument"
    if not os.path.isdir(first):
        raise BadInput(f"{first}: must be the folder of a run: RUN [CONFIG.py] [--setting=value "
                       "...]")
    cfg = load_settings(argv)
    cfg.compile = False     # compiling would take longer than what it saves here
    path = newest_checkpoint(first)
    setup = prepare(cfg, read_inputs(cfg), may_train=False)
    iteration = load_checkpoint(path, setup, cfg)["iteration"]
    print(f"{path}: after {iteration} iterations")
    return cfg, setup, iteration


def load_run(path):
    """Load the policy of a run's folder or of a .pt file -> (policy, tokenizer). In place of the
    tokenizer of a published model comes the folder or file that has it."""
    if not os.path.isdir(path):
        policy = load_gpt(path)
        return policy, load_tokenizer(policy.config.vocab_size)
    path = newest_checkpoint(path)
    content = read_checkpoint(path)
    with undamaged(path):
        kept = content["settings"].items()     # other versions may have other settings
        cfg = Settings(**{name: value for name, value in kept if name in HINTS})
        check_policy(cfg)
        policy = rebuilt(path, content["shape"], content["policy"],
                         lambda config: trainable(Policy(config), cfg))
    if is_published(cfg):
        from extras.hub.policy import locate
        return policy, locate(cfg.policy)
    return policy, load_tokenizer(cfg.vocab_size)


def main(argv):
    cfg, setup, iteration = open_run(argv)
    rows = []
    for done, policy in ((0, setup.base), (iteration, setup.policy)):
        measures, samples = evaluate(setup, policy, cfg)
        rows.append(dict(iteration=done, **measures, samples=samples))
    print_table(rows)


if __name__ == "__main__":
    run_script(main)
