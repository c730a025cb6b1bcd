"""
Measure what a policy writes for held-out prompts. grpo.py does so before, during and after a run.
This command measures the last checkpoint of a run, with changed settings if you like:

    python evaluate.py out/toxicity --num_eval_prompts=256
"""
from common.cli import run_script    # before torch: see common

from grpo import prepare, read_inputs
from run.checkpoint import load_checkpoint, newest_checkpoint
from run.evaluation import evaluate
from run.report import print_table
from run.settings import load_settings


def main(argv):
    cfg = load_settings([*argv, "--compile=False"])      # it would take longer than it saves
    setup = prepare(cfg, read_inputs(cfg, may_train=False))
    path = newest_checkpoint(cfg.out_dir)       # not earlier: a live run removes older ones
    iteration = load_checkpoint(path, setup, cfg)["iteration"]
    print(f"{path}: after {iteration} iterations")

    # the same prompts and the same noise, before training and after it
    rows = []
    for done, policy in ((0, setup.base), (iteration, setup.policy)):
        measures, _, samples = evaluate(setup, policy, cfg, done)
        rows.append(dict(iteration=done, **measures, samples=samples))
    print_table(rows)


if __name__ == "__main__":
    run_script(main)
