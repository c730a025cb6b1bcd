"""
Print completions of a prompt by a trained policy, each with its scores by judges and rewards.

    python sample.py out/toxicity --prompt="You are" [--num=5] [--before=True] [--setting=value ...]
    python sample.py out/toxicity       # reads prompts from the terminal or a pipe, one a line

With --chat=True the prompt is what a user says to a chat model, in the model's chat template.
--before=True prints those of the policy before training first, with the same noise. Settings are
the run's unless changed here, such as --temperature=0.7 or --max_completion_length=20.
"""
import io
import sys
from dataclasses import replace

from common.script import BadInput, own_flags, run_script, seed_for     # before torch: see common

import torch

from data.prompts import Prompt, encode_prompt, note_blanks
from grpo import prepare, read_inputs
from judge.rewards import reward_facts, score
from run.checkpoint import load_checkpoint, look_at, newest_checkpoint
from run.sampling import sample_completions


@torch.no_grad()
def speak(setup, policy, cfg, prompt, num, chat=False, iteration=0):
    """Sample completions of a prompt, always the same ones -> (completions, {name: scores}).
    iteration: how many the policy has learned from, for rewards that ask."""
    # the prompt in ids, as a chat if that is asked for
    content = [{"role": "user", "content": prompt}] if chat else prompt
    _, ids = encode_prompt(setup.tokenizer, content, f"--prompt with --chat={chat}")
    asked = Prompt(prompt, ids, {"text": prompt})

    # always the same completions of the same prompt
    seed = seed_for(cfg.seed, "speak", prompt)
    try:
        samples = sample_completions(
            setup, policy, [asked], replace(cfg, num_generations=num), seed)
    except ValueError as e:     # an empty or overlong prompt
        raise BadInput(f"{prompt[:40]!r}: {e}") from e

    # scored by the judges, then by the config file's rewards
    completions = samples.texts
    scores = {name: torch.sigmoid(judge(completions)).tolist()
              for name, judge in setup.judges.items()}
    for name, function in setup.reward_funcs.items():
        try:
            if name != "judge":
                facts = reward_facts(samples.rollout, iteration, num)
                found = score({name: function}, samples.prompts, completions, facts)
                scores[name] = found[:, 0].tolist()
        except BadInput as e:   # it may need more of a prompt than its text, such as an answer
            print(f"note: no column for {name!r}: {e}")
    return completions, scores


def answer(setup, policies, cfg, prompt, own):
    """Print what each of policies {title: (policy, iterations done)} says after a prompt."""
    print(repr(prompt))
    if not own["chat"]:
        note_blanks([prompt], "this prompt")
    for title, (speaker, done) in policies.items():
        completions, scores = speak(setup, speaker, cfg, prompt, own["num"], own["chat"], done)
        print("  " + "".join(f"{name:>12}" for name in scores) + f"  {title}")
        for completion, *numbers in zip(completions, *scores.values()):
            print("  " + "".join(f"{x:12.3f}" for x in numbers) + f"  {completion!r}", flush=True)


def prompts_from(lines):
    """The lines of a terminal or a pipe that hold a prompt."""
    if lines.isatty():
        print("a prompt a line; Ctrl-D ends", flush=True)
    for line in lines:
        if line.strip():
            yield line.rstrip("\r\n")


def main(argv):
    own, argv = own_flags(argv, dict(prompt="", num=5, before=False, chat=False))
    if not argv:
        raise BadInput('usage: python sample.py RUN [CONFIG.py] [--prompt="You are"] [--num=5] '
                       "[--before=True] [--chat=True] [--setting=value ...]")
    cfg = look_at(argv)
    setup = prepare(cfg, read_inputs(cfg, may_train=False))
    path = newest_checkpoint(argv[0])       # only now: a run at work removes older ones
    iteration = load_checkpoint(path, setup, cfg)["iteration"]
    print(f"{path}: after {iteration} iterations")

    # the policy after training, and before it
    policies = {f"after {iteration} iterations": (setup.policy, iteration)}
    if own["before"]:
        policies = {"before training": (setup.base, 0)} | policies
    print("the judges' numbers are probabilities of toxic; other rewards are as they are")

    # one prompt, or line by line
    if own["prompt"]:
        answer(setup, policies, cfg, own["prompt"], own)
        return
    if sys.stdin is None:       # closed, as by `<&-`
        raise BadInput("--prompt: give one, since there is no input to read prompts from")
    if isinstance(sys.stdin, io.TextIOWrapper):     # a line that is no text is refused alone
        sys.stdin.reconfigure(errors="surrogateescape")
    for prompt in prompts_from(sys.stdin):
        try:
            answer(setup, policies, cfg, prompt, own)
        except BadInput as e:   # the next line may be better
            print(f"error: {e}", flush=True)


if __name__ == "__main__":
    run_script(main)
