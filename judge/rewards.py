"""Reward functions are called here, the judge's and those of a config file; and an environment.

What a user's function does wrong ends in one line that names the function and an example.
"""
import inspect
import math

import torch

from run.script import BadInput, shown, user_error

LARGEST = 1e16  # of a reward: squares of larger ones leave float32, and with them the std


def try_rewards(cfg, prompts):
    """Try the config file's rewards before anything is trained.

    Every prompt must have the columns that they ask for. Then they score a few prompts in place of
    completions, and an empty completion, which a policy may write too.
    """
    names = {*cfg.reward_funcs, cfg.tracin_val_reward} - {"judge", None}
    functions = {name: cfg.functions[name] for name in sorted(names)}
    for name, function in functions.items():
        arguments_of(f"reward {name!r}", function, prompts, completions=[])
    some = prompts[:8]
    texts = [prompt.text for prompt in some]
    if functions:
        score(functions, some + prompts[:1], texts + [""])


def score(reward_funcs, prompts, completions):
    """Score the completions of N prompts (data.prompts.Prompt) with every function -> (N, K).

    A function returns one number per completion, higher is better, or None where it abstains; None
    becomes NaN. Raises BadInput with the name of a function that fails or returns anything else.
    """
    columns = [score_by(name, function, prompts, completions)
               for name, function in reward_funcs.items()]
    return torch.tensor(columns).T


def score_by(name, function, prompts, completions):
    """Score the completions with one reward function -> list of N floats."""
    if not completions:
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


# --------------------------------------------------------------------------------------------------
# calling a function of a config file; `what` names it in errors


def call(what, function, prompts, completions):
    """Call a user's function. Where it raises, BadInput names an example it raises for.

    The function's own traceback is a note of the BadInput.
    """
    try:
        return call_plainly(what, function, prompts, completions)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:
        example = ""
        for prompt, completion in failing_example(what, function, prompts, completions, type(e)):
            example = f", for the prompt {shown(prompt.text)} and completion {shown(completion)}"
        raise user_error(what, e, 2, example) from None   # 2: the lines of this file


def call_plainly(what, function, prompts, completions):
    args, kwargs = arguments_of(what, function, prompts, completions)
    values = function(*args, **kwargs)
    if inspect.iscoroutine(values):
        values.close()
        raise BadInput(f"{what} is a coroutine: write def in place of async def")
    return list(values) if inspect.isgenerator(values) else values


def failing_example(what, function, prompts, completions, kind):
    """Halve the examples as long as a half raises `kind` -> [(prompt, completion)], or []."""
    examples = list(zip(prompts, completions))
    while len(examples) > 1:
        half = len(examples) // 2
        parts = (examples[:half], examples[half:])
        examples = next((part for part in parts if raises(what, function, part, kind)), [])
    return examples


def raises(what, function, examples, kind):
    """Tell whether a user's function raises `kind` for these (prompt, completion)."""
    prompts, completions = map(list, zip(*examples))
    try:
        call_plainly(what, function, prompts, completions)
    except (Exception, SystemExit) as e:
        return type(e) is kind
    return False


def arguments_of(what, function, prompts, completions):
    """Find what a user's function is to be called with -> (args, kwargs).

    The first two parameters are prompts and completions. Any other goes by its name: rows, which
    are dicts of all columns, or a column of the prompts' file; **kwargs takes the columns left. If
    a parameter is called completions, these two go by their names as well (TRL's form). Raises
    BadInput for a parameter that is none of these and has no default.
    """
    texts = [prompt.text for prompt in prompts]
    rows = [prompt.row for prompt in prompts]
    columns = dict.fromkeys(key for row in rows for key in row if type(key) is str)
    by_name = {"rows": rows}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):     # some functions written in C have none
        return [texts, completions], {}

    args = [texts, completions]
    if "completions" in signature.parameters:
        by_name |= {"prompts": texts, "completions": completions}
        first = next(iter(signature.parameters))
        args = [] if first in by_name or first in columns else [texts]
    kwargs = {}
    for p in other_parameters(what, signature, args):
        if p.kind is p.VAR_KEYWORD:
            left = {key: [row.get(key) for row in rows] for key in columns} | by_name
            kwargs |= {key: x for key, x in left.items() if key not in signature.parameters}
        elif p.name in by_name:
            kwargs[p.name] = by_name[p.name]
        elif p.name in columns or p.default is p.empty:
            kwargs[p.name] = column(what, p, prompts)
    return args, kwargs


def other_parameters(what, signature, args):
    """List the parameters that are left behind these positional arguments."""
    try:
        filled = signature.bind_partial(*args).arguments
    except TypeError:
        raise BadInput(f"{what} takes {signature}: must take (prompts, completions); rows "
                       "or columns of the prompts' file may follow") from None
    others = [p for p in signature.parameters.values() if p.name not in filled]
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        # perhaps a wrapper that hands *args and **kwargs on to a function of two parameters
        others = [p for p in others if p.kind is p.KEYWORD_ONLY]
    return others


def column(what, parameter, prompts):
    """Take the column of a parameter's name from each prompt; None where it may be missing."""
    for prompt in prompts:
        if parameter.name not in prompt.row and parameter.default is parameter.empty:
            raise BadInput(f"{what} asks for the column {parameter.name!r}; the prompt "
                           f"{shown(prompt.text)} has {sorted(map(str, prompt.row))}")
    return [prompt.row.get(parameter.name) for prompt in prompts]
