"""
Print completions of a prompt by a trained policy, each with the scores of judges and rewards.

    python sample.py out/toxicity --prompt="You are" [--num=5] [--before=True] [--setting=value ...]
    python sample.py out/toxicity       # reads prompts from the terminal or a pipe, one per line

With --chat=True the prompt becomes a user's message, in the model's chat template. With
--before=True the policy before training answers first, with the same noise. Settings are the run's
unless changed here, such as --temperature=0.7 or --max_completion_length=20.
"""
import sys
from dataclasses import replace

from common.cli import own_flags, run_script     # before torch: see common
from common.errors import BadInput
from common.seeds import seed_for

import torch

from data.prompts import Prompt, encode_prompt, note_texts
from grpo import prepare, read_inputs
from judge.rewards import reward_facts, score
from run.checkpoint import load_checkpoint, newest_checkpoint
from run.sampling import sample_completions
from run.settings import load_settings


@torch.no_grad()
def complete(setup, policy, cfg, prompt, num, chat=False, iteration=0):
    """Sample completions of a prompt, always the same ones -> (completions, {name: scores}).
    iteration: how many the policy was trained for, for rewards that take it."""
    # the prompt as ids; with --chat it is a user's message
    content = [{"role": "user", "content": prompt}] if chat else prompt
    _, ids = encode_prompt(setup.tokenizer, content, f"--prompt with --chat={chat}")
    encoded = Prompt(prompt, ids, {"text": prompt})

    # the same prompt always gets the same noise
    seed = seed_for(cfg.seed, "speak", prompt)
    try:
        samples = sample_completions(
            setup, policy, [encoded], replace(cfg, num_generations=num), seed)
    except ValueError as e:     # an empty or overlong prompt
        raise BadInput(f"{prompt[:40]!r}: {e}") from e

    # scores of the judges, then of the config file's rewards
    completions = samples.texts
    scores = {name: torch.sigmoid(judge(completions)).tolist()
              for name, judge in setup.judges.items()}
    for name, function in setup.reward_funcs.items():
        try:
            if name != "judge":
                facts = reward_facts(samples.rollout, iteration, num)
                column = score({name: function}, samples.prompts, completions, facts)
                scores[name] = column[:, 0].tolist()
        except BadInput as e:   # it needs a column, such as the answer to a question
            print(f"note: no column for {name!r}: {e}")
    return completions, scores


def answer(setup, policies, cfg, prompt, flags):
    """Print what each of the policies {title: (policy, iterations done)} makes of a prompt."""
    print(repr(prompt))
    if not flags["chat"]:
        note_texts(setup.tokenizer, [prompt], "this prompt")
    for title, (policy, done) in policies.items():
        completions, scores = complete(
            setup, policy, cfg, prompt, flags["num"], flags["chat"], done)
        print("  " + "".join(f"{name:>12}" for name in scores) + f"  {title}")
        for completion, *numbers in zip(completions, *scores.values()):
            print("  " + "".join(f"{x:12.3f}" for x in numbers) + f"  {completion!r}", flush=True)


def main(argv):
    flags, argv = own_flags(argv, dict(prompt="", num=5, before=False, chat=False))
    if not argv:
        raise BadInput('usage: python sample.py RUN [CONFIG.py] [--prompt="You are"] [--num=5] '
                       "[--before=True] [--chat=True] [--setting=value ...]")
    cfg = load_settings([*argv, "--compile=False"])      # it would take longer than it saves
    setup = prepare(cfg, read_inputs(cfg, may_train=False))
    path = newest_checkpoint(cfg.out_dir)       # not earlier: a live run removes older ones
    iteration = load_checkpoint(path, setup, cfg)["iteration"]
    print(f"{path}: after {iteration} iterations")

    # the policy after training, and before it
    policies = {f"after {iteration} iterations": (setup.policy, iteration)}
    if flags["before"]:
        policies = {"before training": (setup.base, 0)} | policies
    print("judge columns: p(toxic); reward columns: raw reward")

    # one prompt, or line by line
    if flags["prompt"]:
        answer(setup, policies, cfg, flags["prompt"], flags)
        return
    if sys.stdin.isatty():
        print("one prompt per line, Ctrl-D to quit", flush=True)
    for line in filter(str.strip, sys.stdin):
        try:
            answer(setup, policies, cfg, line.rstrip("\r\n"), flags)
        except BadInput as e:   # the next line may be better
            print(f"error: {e}", flush=True)


if __name__ == "__main__":
    run_script(main)
