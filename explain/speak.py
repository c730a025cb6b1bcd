"""
Lets a trained policy speak: completions of a prompt, each with its scores by judges and rewards.

    python sample.py out/toxicity --prompt="You are" [--num=5] [--before=True] [--setting=value ...]

With --chat=True a prompt is what a user says to a chat model, in the model's chat template.
Without a prompt it reads prompts from the terminal, one a line. --before=True lets the policy from
before training speak first, with the same noise. Settings are those of the run unless changed here,
for instance --temperature=0.7 or --max_completion_length=20.
"""
import sys
from dataclasses import replace

import torch

from data.chat import encode_prompt, with_messages
from data.prompts import Prompt
from data.tokenizer import end_tokens, texts_of
from tasks.turns import answering, try_environment
from evaluate import open_run
from judge.rewards import score
from run.device import autocast
from run.script import BadInput, run_script, seed_for
from sample import generate

USAGE = ('usage: python sample.py RUN [--prompt="You are"] [--num=5] [--before=True] '
         "[--chat=True] [--setting=value ...]")


@torch.no_grad()
def speak(nets, policy, cfg, prompt, num, chat=False):
    """[(completion, {name: score})] for a prompt, always the same ones."""
    content = [{"role": "user", "content": prompt}] if chat else prompt
    _, ids = encode_prompt(nets.tokenizer, content, "--chat=True")
    most = cfg.block_size - cfg.max_completion_length
    if not 1 <= len(ids) <= most:
        raise BadInput(f"prompt {prompt!r} has {len(ids)} tokens: must be 1 to {most} (block_size "
                       f"{cfg.block_size} less max_completion_length {cfg.max_completion_length})")
    asked = [Prompt(prompt, ids, with_messages({"text": prompt}, content))] * num
    try:
        try_environment(cfg, asked, nets.tokenizer)
    except BadInput as e:   # it may need more of a prompt than its text
        print(f"note: without the environment: {e}")
        cfg = replace(cfg, max_turns=0)
    with autocast(nets.device, nets.dtype):
        rollout = generate(
            policy, [ids], num, cfg.max_completion_length, seed=seed_for(cfg.seed, "speak", prompt),
            eos=end_tokens(nets.tokenizer), temperature=cfg.temperature, top_k=cfg.top_k,
            top_p=cfg.top_p, min_p=cfg.min_p, respond=answering(nets.tokenizer, asked, cfg, 1))
    completions = texts_of(nets.tokenizer, rollout)
    columns = {}
    for name, judge in nets.judges.items():
        columns[name] = torch.sigmoid(judge([prompt] * num, completions)).tolist()
    own_rewards = {name: f for name, f in nets.reward_funcs.items() if name != "judge"}
    for name, function in own_rewards.items():
        try:
            columns[name] = score({name: function}, asked, completions)[:, 0].tolist()
        except BadInput as e:   # it may need more of a prompt than its text
            print(f"note: no column for {name!r}: {e}")
    return [(completion, {name: column[i] for name, column in columns.items()})
            for i, completion in enumerate(completions)]


def answer(nets, policies, cfg, prompt, num, chat=False):
    """Prints what each of policies {title: policy} says after the prompt, a line per completion."""
    print(repr(prompt))
    for title, policy in policies.items():
        spoken = speak(nets, policy, cfg, prompt, num, chat)
        names = list(spoken[0][1])
        print("  " + "".join(f"{name:>12}" for name in names) + f"  {title}")
        for completion, scores in spoken:
            numbers = "".join(f"{scores[name]:12.3f}" for name in names)
            print(f"  {numbers}  {completion!r}", flush=True)


def prompts_from(lines):
    """Lines of text as prompts; a terminal is asked for them."""
    if lines.isatty():
        print("a prompt a line; Ctrl-D ends", flush=True)
    for line in lines:
        if line.strip():
            yield line.rstrip("\n")


def main(argv):
    own = dict(prompt=None, num="5", before="False", chat="False")
    flags = []
    for arg in argv[1:]:
        name, equals, value = arg[2:].partition("=")
        if name in own and equals:
            own[name] = value
        else:
            flags.append(arg)
    num = int(own["num"]) if own["num"].isdecimal() else 0
    answers = [own[name].title() for name in ("before", "chat")]
    if not argv or argv[0].startswith("--") or num < 1 or not {*answers} <= {"True", "False"}:
        raise BadInput(USAGE)
    before, chat = [text == "True" for text in answers]
    cfg, nets, policy, iteration = open_run(argv[0], flags)
    policies = {f"after {iteration} iterations": policy}
    if before:
        policies = {"before training": nets.base} | policies
    print("the judges' numbers are probabilities of toxic; other rewards are as they are")
    if True:
        if own["prompt"] is not None:
            answer(nets, policies, cfg, own["prompt"], num, chat)
            return
        for prompt in prompts_from(sys.stdin):
            try:
                answer(nets, policies, cfg, prompt, num, chat)
            except BadInput as e:   # the next line may be better
                print(f"error: {e}")


if __name__ == "__main__":
    run_script(main)
