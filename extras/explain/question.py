"""
The reader's question: which number to explain, and what to group its rollouts by.
"""
import torch

from common.errors import BadInput, shown
from common.files import read_log
from data.prompts import read_prompt
from extras.explain.target import HeldOut, function_target
from rollout import empty_rollout


def row_of(prompt, completion, device):
    """A Rollout of one row, by the ids of a prompt and of a completion."""
    prompt = torch.tensor([prompt], device=device)
    row = empty_rollout(prompt, torch.ones_like(prompt) > 0, 1, len(completion), 0)
    row.tokens[0, prompt.shape[1]:] = torch.tensor(completion)
    row.completion_mask |= True
    return row


def read_sentence(setup, options):
    """The sentence of --prompt and --completion, as a Rollout of one row."""
    _, prompt, _ = read_prompt(setup.tokenizer, vars(options), "prompt", "a sentence")
    completion = setup.tokenizer.encode_ordinary(options.completion)
    most = setup.policy.block_size
    if not prompt or not completion or len(prompt) + len(completion) > most:
        raise BadInput(f"prompt {shown(options.prompt)}, completion {shown(options.completion)}: "
                       f"{len(prompt)} and {len(completion)} tokens; must be at least 1 each, "
                       f"together {most} at most")
    return row_of(prompt, completion, setup.device)


def reward_named(setup, cfg, name):
    """A reward function or a judge by its name."""
    if name in setup.reward_funcs:
        return setup.reward_funcs[name]
    if name in setup.judges:
        return lambda completions: (1 - torch.sigmoid(setup.judges[name](completions))).tolist()
    names = {"reward", *setup.reward_funcs, *setup.judges, *cfg.functions.keys() & {"target"}}
    raise BadInput(f"--target={name}: must be one of {', '.join(sorted(names))}; a sentence is "
                   "given by --prompt and --completion")


def target_named(setup, cfg, name, held_out):
    """The target of a name, "" for the reward. held_out: completions; 0: half as many as an
    evaluation has, with which an account takes about twice the time of its run."""
    if name == "target" and "target" in cfg.functions:
        return function_target(setup, cfg)
    functions = {name: setup.reward_funcs[name] for name in cfg.reward_funcs}
    weights = list(cfg.reward_weights)
    if name and not (name == "reward" and len(functions) == 1):
        functions = {name: reward_named(setup, cfg, name)}
        weights = [1.0]
    prompts = setup.eval_prompts
    count = max(2, cfg.num_eval_generations // 2)       # completions of each prompt
    if held_out:        # over prompts first
        count = max(2, held_out // len(prompts))
        prompts = prompts[:max(1, held_out // count)]
    return HeldOut(name or "reward", setup, cfg, functions, weights, prompts, count)


def labels_by(run, folder, by):
    """The reader's group of each rollout of a RepeatedRun: by the config file's function
    group(prompt, completion, reward, row), a column of the prompts' file, or one of samples.jsonl.
    """
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
              for row in read_log(f"{folder}/samples.jsonl")}
    names = {*columns, *next(iter(logged.values()), {}), *{"group"} & functions.keys()}
    if by not in names:
        raise BadInput(f"--by={by}: must be a column of the prompts' file or of samples.jsonl, or "
                       f"`group`, a function of the config file: {', '.join(sorted(names))}")
    return [logged.get((it, prompt.text, text), {}).get(by) for it, prompt, text, _ in rows]
