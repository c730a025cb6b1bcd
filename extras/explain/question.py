"""
The reader's question: which number to explain, and what to group its rollouts by.
"""
from dataclasses import replace

import torch

import grpo
from common.errors import BadInput, shown
from common.files import read_log, read_rows
from common.seeds import seed_for
from data.prompts import read_prompt
from extras.explain.target import Function, HeldOut, Sentences
from rollout import concatenate, empty_rollout

WORST = 3           # completions that --account=True explains


def reward_named(setup, cfg, name):
    """A reward function or a judge by its name."""
    if name in setup.reward_funcs:
        return setup.reward_funcs[name]
    if name in setup.judges:
        return lambda completions: (1 - torch.sigmoid(setup.judges[name](completions))).tolist()
    names = {"reward", *setup.reward_funcs, *setup.judges, *cfg.functions.keys() & {"target"}}
    raise BadInput(f"--target={name}: must be one of {', '.join(sorted(names))}; a sentence is "
                   "given by --prompt and --completion")


def target_of(setup, cfg, options, sentences, count):
    """The target of the account. options: its flags. count: completions of each held-out prompt,
    without --held_out."""
    name = options.target
    if sentences and name:
        raise BadInput(f"--target={name}: leave it out, or --prompt, --completion, --prompts and "
                       "--account: an account explains either")
    if sentences:
        return Sentences(setup, cfg, concatenate([row for _, row in sentences]))
    if name == "target" and "target" in cfg.functions:
        return Function(setup, cfg, None)       # its batch is not there yet
    functions = {name: setup.reward_funcs[name] for name in cfg.reward_funcs}
    weights = list(cfg.reward_weights)
    if name and not (name == "reward" and len(functions) == 1):
        functions = {name: reward_named(setup, cfg, name)}
        weights = [1.0]
    prompts = setup.eval_prompts
    if options.held_out:     # over prompts first
        count = max(2, options.held_out // len(prompts))
        prompts = prompts[:max(1, options.held_out // count)]
    return HeldOut(name or "reward", setup, cfg, functions, weights, prompts, count)


# ------------------------------------------------------------------------------------------------
# sentences


def row_of(before, said, device):
    """A Rollout of one row, by the ids of a prompt and of a completion."""
    prompt = torch.tensor([before], device=device)
    row = empty_rollout(prompt, torch.ones_like(prompt) > 0, 1, len(said), 0)
    row.tokens[0, len(before):] = torch.tensor(said)
    row.completion_mask |= True
    return row


def read_sentence(setup, cfg, row):
    """(the prompt's text, a Rollout of one row)."""
    text, before, _ = read_prompt(setup.tokenizer, row, "prompt", "a sentence")
    completion = row.get("completion")
    if type(completion) is not str:
        raise BadInput(f"completion {shown(completion)}: must be text, in a column `completion`")
    said = setup.tokenizer.encode_ordinary(completion)
    most = setup.policy.block_size
    if not before or not said or len(before) + len(said) > most:
        raise BadInput(f"prompt {shown(text)}, completion {shown(completion)}: {len(before)} and "
                       f"{len(said)} tokens; must be at least 1 each, together {most} at most")
    return text, row_of(before, said, setup.device)


def sentences_of(setup, cfg, options):
    """[(the prompt's text, a Rollout of one row)]. options: the account's flags."""
    rows = read_rows(options.prompts) if options.prompts else []
    if options.prompts and not rows:
        raise BadInput(f"{options.prompts}: is empty; must have the columns prompt and completion")
    if options.prompt or options.completion:
        rows.append(vars(options))
    sentences = [read_sentence(setup, cfg, row) for row in rows]
    if options.account:      # completions of lowest reward, by the policy before training
        batch = grpo.sample_and_score(
            setup, setup.eval_prompts, cfg, seed_for(cfg.seed, "account"))
        rollout = replace(batch.rollout, allowed=None)
        sentences += [(batch.prompts[i].text, rollout[[i]])
                      for i in batch.rewards.argsort()[:WORST].tolist()]
    return sentences


# ------------------------------------------------------------------------------------------------
# groups


def labels_by(run, by):
    """What the reader groups the rollouts of a Replay by, for each of them: the function
    group(prompt, completion, reward, row) of the config file, a column of the prompts' file, or one
    of samples.jsonl."""
    functions = run.cfg.functions
    rows = [(it + 1, prompt, text, reward) for it, batch in run.batches.items()
            for prompt, text, reward in
            zip(batch.prompts, batch.completions, batch.rewards.tolist())]
    if by == "group" and by in functions:
        return [functions[by](prompt.text, text, reward, prompt.row)
                for _, prompt, text, reward in rows]
    columns = rows[0][1].row
    if by in columns:
        return [prompt.row.get(by) for _, prompt, *_ in rows]
    logged = {(row["iteration"], row["prompt"], row["completion"]): row
              for row in read_log(f"{run.folder}/samples.jsonl")}
    names = {*columns, *next(iter(logged.values()), {}), *{"group"} & functions.keys()}
    if by not in names:
        raise BadInput(f"--by={by}: must be a column of the prompts' file or of samples.jsonl, or "
                       f"`group`, a function of the config file: {', '.join(sorted(names))}")
    return [logged.get((it, prompt.text, text), {}).get(by) for it, prompt, text, _ in rows]
