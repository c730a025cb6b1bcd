"""Reward functions are called here, the judge's and those of a config file; and an environment.

What a user's function does wrong ends in one line that names the function and an example.
"""
import inspect
import itertools
import math

import torch

from common.script import BadInput, shown, user_error

LARGEST = 1e16      # the square of a reward must fit into float32


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


@torch.no_grad()    # and a user's function that switches gradients off does so until here
def score(reward_funcs, prompts, completions):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K).

    A function returns one number per completion, higher is better, or None where it abstains; None
    becomes NaN.
    """
    columns = [score_by(name, function, prompts, completions)
               for name, function in reward_funcs.items()]
    torch.set_default_dtype(torch.float32)      # of this too
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
        values = list(itertools.islice(values, len(completions) + 1))   # it may have no end
        numbers = [math.nan if v is None else float(v) for v in values]
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        raise BadInput(f"reward {name!r} returned {shown(values)}: must be one number per "
                       "completion") from e
    if len(numbers) != len(completions):
        raise BadInput(f"reward {name!r} returned {len(numbers)} numbers for {len(completions)} "
                       "completions")
    for value, number, completion in zip(values, numbers, completions):
        is_number = not isinstance(value, str) and abs(number) <= LARGEST
        if value is not None and not is_number:
            raise BadInput(f"reward {name!r} returned {shown(value)} for the completion "
                           f"{completion!r}: must be a finite number up to {LARGEST:g}, or None")
    return numbers


def call(what, function, prompts, completions):
    """Call a user's function. Where it raises, BadInput names the first example that it raises for
    alone; the function's own traceback is a note of the BadInput."""
    arguments = arguments_of(what, function, prompts, list(completions))    # to do with as it likes
    try:
        return function(**arguments)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:
        example = failing_example(what, function, prompts, completions)
        raise user_error(what, e, example) from None


def failing_example(what, function, prompts, completions):
    for prompt, completion in zip(prompts, completions):
        arguments = arguments_of(what, function, [prompt], [completion])
        try:
            function(**arguments)
        except (Exception, SystemExit):
            return f", for the prompt {shown(prompt.text)} and completion {shown(completion)}"
    return ""


def arguments_of(what, function, prompts, completions):
    """Find what a user's function is to be called with -> {name: argument}.

    The first two parameters are prompts and completions, whatever they are called, unless one is
    called completions (TRL's form). Every other parameter goes by its name: rows, which are dicts
    of all columns, or a column of the prompts' file. **kwargs takes all that is left.
    """
    texts = [prompt.text for prompt in prompts]
    rows = [prompt.row for prompt in prompts]
    fields = {name for row in rows for name in row}
    columns = {name: [row.get(name) for row in rows] for name in fields}
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    given = dict(rows=rows, prompts=texts, completions=completions)
    if "completions" not in names:
        if len(names) < 2:
            raise BadInput(f"{what} takes ({', '.join(names)}): must take (prompts, completions); "
                           "rows or columns of the prompts' file may follow")
        given |= {names[0]: texts, names[1]: completions}
    elif names[0] not in columns:
        given.setdefault(names[0], texts)
    known = columns | given
    for name, p in parameters.items():
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            raise BadInput(f"{what} takes {inspect.signature(function)}: it is called by names, so "
                           "neither / nor * may stand there")
        if p.kind is p.VAR_KEYWORD:
            return known
        lacking = [prompt for prompt in prompts if name not in given and name not in prompt.row]
        if lacking and p.default is p.empty:
            raise BadInput(f"{what} asks for the column {name!r}; the prompt "
                           f"{shown(lacking[0].text)} has {sorted(map(str, lacking[0].row))}")
    return {name: known[name] for name in names if name in known}
