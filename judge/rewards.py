"""Reward functions are called here, the judge's and those of a config file; and an environment.

What a user's function does wrong ends in one line that names the function and an example.
"""
import inspect
import math

import torch

from run.script import BadInput, shown, user_error

LARGEST = 1e16  # of a reward: squares of larger ones leave float32, and with them the std


def try_rewards(cfg, prompts):
    """Let the config file's rewards score a few prompts in place of completions, and an empty one,
    before anything is trained. Every prompt must have the columns that they ask for."""
    names = {*cfg.reward_funcs, cfg.tracin_val_reward} - {"judge", None}
    functions = {name: cfg.functions[name] for name in sorted(names)}
    for name, function in functions.items():
        arguments_of(f"reward {name!r}", function, prompts, completions=[])
    texts = [prompt.text for prompt in prompts[:8]]
    if functions:
        score(functions, prompts[:8] + prompts[:1], texts + [""])


def score(reward_funcs, prompts, completions):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K).

    A function returns one number per completion, higher is better, or None where it abstains; None
    becomes NaN.
    """
    columns = [score_by(name, function, prompts, completions)
               for name, function in reward_funcs.items()]
    return torch.tensor(columns).T


def score_by(name, function, prompts, completions):
    """Score the completions with one reward function -> list of N floats."""
    if not completions:     # of several processes one may have none
        return []
    if name == "judge":     # what it raises is no fault of a user's function
        values = function([prompt.text for prompt in prompts], completions)
    else:
        values = call(f"reward {name!r}", function, prompts, completions)
    try:
        values = [v.item() if hasattr(v, "item") else v for v in values]  # of numpy or torch
    except (TypeError, ValueError, RuntimeError) as e:
        raise BadInput(f"reward {name!r} returned {shown(values)}: must be one number per "
                       "completion") from e
    if len(values) != len(completions):
        raise BadInput(f"reward {name!r} returned {len(values)} numbers for {len(completions)} "
                       "completions")
    for value, completion in zip(values, completions):
        is_number = isinstance(value, (int, float)) and abs(value) <= LARGEST
        if value is not None and not is_number:
            raise BadInput(f"reward {name!r} returned {shown(value)} for the completion "
                           f"{completion!r}: must be a finite number up to {LARGEST:g}, or None")
    return [math.nan if v is None else float(v) for v in values]


def call(what, function, prompts, completions):
    """Call a user's function. Where it raises, BadInput names the first example that it raises for
    alone; the function's own traceback is a note of the BadInput."""
    args, kwargs = arguments_of(what, function, prompts, completions)
    try:
        return function(*args, **kwargs)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:
        example = failing_example(what, function, prompts, completions)
        raise user_error(what, e, example) from None


def failing_example(what, function, prompts, completions):
    for prompt, completion in zip(prompts, completions):
        args, kwargs = arguments_of(what, function, [prompt], [completion])
        try:
            function(*args, **kwargs)
        except (Exception, SystemExit):
            return f", for the prompt {shown(prompt.text)} and completion {shown(completion)}"
    return ""


def arguments_of(what, function, prompts, completions):
    """Find what a user's function is to be called with -> (args, kwargs).

    The first two parameters are prompts and completions; if one is called completions, these two
    go by their names (TRL's form). Every other parameter goes by its name: rows, which are dicts of
    all columns, or a column of the prompts' file. **kwargs takes all that is left.
    """
    texts = [prompt.text for prompt in prompts]
    rows = [prompt.row for prompt in prompts]
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    parameters = inspect.signature(function).parameters
    given = dict(rows=rows)
    args = [texts, completions]
    if "completions" in parameters:
        given |= dict(prompts=texts, completions=completions)
        args = [] if next(iter(parameters)) in columns | given else [texts]
    elif len(parameters) < 2:
        raise BadInput(f"{what} takes ({', '.join(parameters)}): must take (prompts, completions); "
                       "rows or columns of the prompts' file may follow")
    known = columns | given
    kwargs = {}
    for p in list(parameters.values())[len(args):]:
        if p.kind is p.VAR_KEYWORD:
            kwargs |= {name: x for name, x in known.items() if name not in parameters}
            continue
        for prompt in prompts if p.default is p.empty and p.name not in given else ():
            if p.name not in prompt.row:
                raise BadInput(f"{what} asks for the column {p.name!r}; the prompt "
                               f"{shown(prompt.text)} has {sorted(map(str, prompt.row))}")
        if p.name in known:
            kwargs[p.name] = known[p.name]
    return args, kwargs
